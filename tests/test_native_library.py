"""The compiled operators: built where there is a compiler, once for all ranks; without one, plain torch and one warning."""

import os
import subprocess
import sys

import pytest

from fairseq_tupe.modules.attention_backends import cpu_fused

PROGRAM = """
import logging, torch
logging.basicConfig(format="%(levelname)s %(message)s", level=logging.INFO)
from fairseq_tupe.modules.attention_backends import cpu_fused
from fairseq_tupe.modules.encoder_layer import EncoderLayer
torch.manual_seed(0)
layer = EncoderLayer(24, 32, 3, 0.0, 0.0, 0.0, "gelu", False, terms=2, backend="auto")
x, bias = torch.randn(2, 9, 24), torch.randn(3, 9, 9, requires_grad=True)
for _ in range(3):
    out = layer(x, bias=bias)
layer.train()(x, bias=bias.detach())
print("fused" if cpu_fused.unavailable() is None else "plain", out.double().sum().item())
"""


def start(repo, folder, **environment) -> subprocess.Popen:
    environment = {**os.environ, "PYTHONPATH": str(repo), "TORCH_EXTENSIONS_DIR": str(folder), **environment}
    pipe = subprocess.PIPE
    return subprocess.Popen([sys.executable, "-c", PROGRAM], env=environment, stdout=pipe, stderr=pipe, text=True)


def test_two_ranks_build_once_and_no_compiler_means_plain_torch(repo, tmp_path):
    if cpu_fused.unavailable() is not None:
        pytest.skip(f"no fused operators here: {cpu_fused.unavailable()}")
    folder = tmp_path / "a folder"
    ranks = [start(repo, folder) for _ in range(2)]
    without = start(repo, tmp_path / "none", CXX="/nonexistent/c++", PATH=os.path.dirname(sys.executable))
    results = [(process, *process.communicate(timeout=300)) for process in (*ranks, without)]
    assert [process.returncode for process, *_ in results] == [0, 0, 0], [error for *_, error in results]
    names, sums = zip(*(out.split() for _, out, _ in results), strict=True)
    assert names == ("fused", "fused", "plain")
    assert max(map(float, sums)) - min(map(float, sums)) < 1e-4
    builds = [error.count("compiling the CPU operators") for *_, error in results]
    assert sum(builds[:2]) == 1, "two ranks must not compile the same thing"
    (kept,) = folder.iterdir()
    assert {path.name for path in kept.iterdir()} == {"fairseq_tupe_cpu.so", "lock"}
    warnings = [line for line in results[2][2].splitlines() if line.startswith("WARNING")]
    assert len(warnings) == 1, warnings
    assert "the CPU operators could not be built: no C++ compiler /nonexistent/c++" in warnings[0]

"""``python -m fairseq_tupe doctor`` as a user runs it: in a sound environment, and in broken ones made of shadowing packages."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from fairseq_tupe.doctor import fairseq_cure

REPO = Path(__file__).resolve().parent.parent

MUTABLE_DEFAULT = "mutable default <class 'fairseq.dataclass.configs.CommonConfig'> for field common is not allowed"


def doctor(folder: Path, *words: str, shadow=None) -> subprocess.CompletedProcess:
    """Runs the command in ``folder``; ``shadow`` maps file names to texts of packages that hide the installed ones."""
    for name, text in (shadow or {}).items():
        path = folder / "shadow" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text, encoding="utf-8")
    env = {**os.environ, "PYTHONPATH": os.pathsep.join([str(folder / "shadow"), str(REPO)]), "TMPDIR": str(folder)}
    command = [sys.executable, "-m", "fairseq_tupe", "doctor", *words]
    return subprocess.run(command, cwd=folder, env=env, capture_output=True, text=True, timeout=300, check=False)


def line_of(result: subprocess.CompletedProcess, check: str) -> str:
    """The status and text of one line of the table, its continuation lines included, as one line."""
    lines = result.stdout.splitlines()
    start = next(i for i, line in enumerate(lines) if line.startswith(check))
    end = next(i for i in range(start + 1, len(lines)) if not lines[i].startswith(" "))
    return " ".join(" ".join(lines[start:end])[len(check) :].split())


def test_sound_environment(tmp_path):
    folder = tmp_path / "a path; with 'quotes' ö"
    folder.mkdir()
    result = doctor(folder)
    assert result.returncode == 0, result.stdout + result.stderr
    for check in ("Python", "fairseq_tupe", "torch", "fairseq", "sentencepiece", "registered", "training run"):
        assert line_of(result, f"{check:<15}").startswith("OK"), result.stdout
    assert "tupe_roberta_large" in line_of(result, "registered")
    assert "one update on the" in line_of(result, "training run")
    assert result.stdout.splitlines()[-1] == "ready: TUPE can be trained here"
    assert max(map(len, result.stdout.splitlines())) <= 110 or len(str(REPO)) > 40
    assert list(folder.glob("fairseq_tupe-doctor-*")) == []  # the trial run leaves nothing behind
    assert result.stderr == ""


UNRELATED = {"apex/__init__.py": "import pyramid_that_is_not_here\n"}
PYTHON_ONLY = {
    "apex/__init__.py": "",
    "apex/normalization/__init__.py": "from .fused_layer_norm import FusedLayerNorm\n",
    "apex/normalization/fused_layer_norm.py": "class FusedLayerNorm:\n    pass\n",
}
BROKEN_BUILD = {
    **PYTHON_ONLY,
    "amp_C.py": "raise ImportError('amp_C.so: undefined symbol: _ZN2at')\n",
    "fused_layer_norm_cuda.py": "",
}


# What real breakages raise, each with another wrong apex, so that three processes serve both tables.
BROKEN = {
    "dataclasses": (f'raise ValueError("{MUTABLE_DEFAULT}")\n', "Python 3.11 and later", UNRELATED, "unrelated package"),
    "numpy": ("import numpy\nnumpy.float\n", "numpy 1.24 removed", PYTHON_ONLY, "Python-only build"),
    "omegaconf": ("import sys\nsys.modules['hydra'] = None\nimport hydra\n", "pip 24.1", BROKEN_BUILD, "undefined symbol"),
}


@pytest.mark.parametrize("name", BROKEN)
def test_broken_fairseq_and_wrong_apex_are_named_with_their_cures(tmp_path, name):
    text, cure, apex, apex_says = BROKEN[name]
    result = doctor(tmp_path, shadow={"fairseq/__init__.py": text, **apex})
    assert result.returncode == 1
    found = line_of(result, "fairseq  ")
    assert found.startswith("FAIL")
    assert cure in found
    assert "setup.sh" in found
    found = line_of(result, "apex")
    assert found.startswith("note ")  # optional, so it does not decide the status
    assert apex_says in found
    assert "uninstall" in found
    assert line_of(result, "training run").startswith("note left out")
    assert result.stdout.splitlines()[-1] == "not ready: fairseq, registered"
    assert "Traceback" not in result.stdout + result.stderr


@pytest.mark.parametrize(
    ("error", "cure"),
    [
        (ModuleNotFoundError("No module named 'bitarray'", name="bitarray"), "install bitarray:"),
        (OSError("libbase.so: undefined symbol: _ZN3c10"), "compile it again"),
        (ImportError("cannot import name 'data_utils_fast'"), "compile it again"),
        (RuntimeError("something new"), "known to work"),
    ],
)
def test_other_breakages_have_a_cure(error, cure):
    assert cure in fairseq_cure(error)


def test_without_torch(tmp_path):
    result = doctor(tmp_path, shadow={"torch/__init__.py": "raise ImportError('libtorch_cpu.so: cannot open shared object')\n"})
    assert result.returncode == 1
    assert line_of(result, "torch").startswith("FAIL ImportError: libtorch_cpu.so")
    assert "Traceback" not in result.stdout + result.stderr
    assert "the check itself failed" not in result.stdout
    assert result.stdout.splitlines()[-1].startswith("not ready: torch")


def test_training_that_fails_blocks(tmp_path):
    result = doctor(tmp_path, shadow={"fairseq_cli/__init__.py": "", "fairseq_cli/train.py": "raise SystemExit('out of luck')\n"})
    assert result.returncode == 1
    found = line_of(result, "training run")
    assert found.startswith("FAIL fairseq-train: out of luck")
    assert "train.log" in found

"""``python -m fairseq_tupe doctor``: what is here, what works, what is missing, and the cure."""

import importlib
import importlib.metadata
import importlib.util
import logging
import os
import platform
import re
import shlex
import shutil
import subprocess
import sys
import sysconfig
import textwrap
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import fairseq_tupe

PACKAGE = Path(fairseq_tupe.__file__).resolve().parent
SETUP = f"bash {shlex.quote(str(PACKAGE.parent / 'scripts' / 'setup.sh'))}"
NEW = f"{SETUP} --venv DIR (a new folder)"
OK, NOTE, MISSING, FAIL = "OK", "note", "missing", "FAIL"
WIDTH = 110

ARCHS = ("tupe_roberta", "tupe_roberta_base", "tupe_roberta_large", "tupe_roberta_small", "tupe_roberta_tiny")


@dataclass
class Row:
    """One line of the table. ``needed``: the main job can't run unless the status is OK or note."""

    name: str
    status: str
    detail: str
    cure: str = ""
    needed: bool = False

    @property
    def blocks(self) -> bool:
        """Whether this line alone makes the exit status 1."""
        return self.needed and self.status in (MISSING, FAIL)


def add_arguments(parser) -> None:
    """Adds the options of this command."""
    parser.add_argument("--no-train", action="store_true", help="leave out the one-step training run (about 10 s)")


def run(args) -> int:
    """Prints the table; returns 0 where the main job can run, else 1."""
    logging.disable(logging.WARNING)  # a broken installation must not fill the table with its own messages
    checks: list[Callable[[], Row]] = [
        python_row, package_row, torch_row, fairseq_row, cuda_row, bf16_row, compiler_row, headers_row,
        lambda: module_row("sentencepiece", "text is split into pieces with it", needed=True),
        lambda: module_row("matplotlib", "only to draw plots"),
        lambda: module_row("tensorboard", "only for --tensorboard-logdir"),
        apex_row, names_row,
    ]  # fmt: skip
    print(f"{'check':<15} {'status':<8} what was found")
    print("-" * WIDTH)
    rows = []
    for check in checks:
        rows.append(guarded(check))
        show(rows[-1])
    blocked = [row.name for row in rows if row.blocks]
    if args.no_train:
        show(Row("training run", NOTE, "left out (--no-train)"))
    elif blocked:
        show(Row("training run", NOTE, f"left out: {', '.join(blocked)} first"))
    else:
        from fairseq_tupe.doctor_training import training_row

        rows.append(guarded(training_row))
        show(rows[-1])
    print("-" * WIDTH)
    blocked = [row.name for row in rows if row.blocks]
    print(f"not ready: {', '.join(blocked)}" if blocked else "ready: TUPE can be trained here")
    return 1 if blocked else 0


def guarded(check: Callable[[], Row]) -> Row:
    """A check that itself breaks becomes a line of the table, since this command is run where things are broken."""
    try:
        return check()
    except Exception as error:
        name = getattr(check, "__name__", "check").replace("_row", "").replace("<lambda>", "module")
        return Row(name, FAIL, f"the check itself failed: {one_line(error)}", needed=True)


def show(row: Row) -> None:
    """Prints one line, wrapped within the column."""
    indent = " " * 25
    lines = textwrap.wrap(row.detail, WIDTH - len(indent)) or [""]
    if row.cure:
        lines += textwrap.wrap(f"-> {row.cure}", WIDTH - len(indent), subsequent_indent="   ", break_on_hyphens=False)
    print(f"{row.name:<15} {row.status:<8} {lines[0]}")
    for line in lines[1:]:
        print(indent + line)
    sys.stdout.flush()


def one_line(error: BaseException) -> str:
    """``ValueError: first line``, short enough for the table."""
    text = " ".join(str(error).split())
    return f"{type(error).__name__}: {text}"[:400]


def numbers(version: str) -> tuple:
    """The leading numbers of a version, for comparing: ``"2.13.0+cpu"`` gives ``(2, 13, 0)``."""
    return tuple(int(part) for part in re.match(r"[0-9.]*", version).group(0).split(".") if part)


def python_row() -> Row:
    """The interpreter."""
    found = f"{platform.python_version()} ({sys.executable})"
    version = sys.version_info[:2]
    if version < (3, 10):
        return Row("Python", FAIL, found, f"3.10 to 3.13 is needed: {SETUP} --python PATH", True)
    if version > (3, 13):
        return Row("Python", NOTE, found, "not tested; 3.10 to 3.13 are", True)
    return Row("Python", OK, found, needed=True)


def package_row() -> Row:
    """This package: where it lies, since a second copy is what registers twice."""
    return Row("fairseq_tupe", OK, f"{fairseq_tupe.__version__} in {PACKAGE} (that is --user-dir)", needed=True)


def torch_row() -> Row:
    """PyTorch and its version."""
    if importlib.util.find_spec("torch") is None:
        return Row("torch", MISSING, "PyTorch is not installed", SETUP, True)
    try:
        import torch
    except Exception as error:
        return Row("torch", FAIL, one_line(error), f"reinstall it: {NEW}", True)
    build = f"CUDA {torch.version.cuda}" if torch.version.cuda else "CPU"
    found = f"{torch.__version__} ({build} build)"
    if numbers(torch.__version__) < (2, 6):
        return Row("torch", FAIL, found, f"2.6 or later is needed: {SETUP} --torch torch==2.13.0", True)
    return Row("torch", OK, found, needed=True)


def fairseq_row() -> Row:
    """fairseq: which distribution provides it, its version, or why it doesn't import."""
    providers = importlib.metadata.packages_distributions().get("fairseq", [])
    names = ", ".join(f"{name} {importlib.metadata.version(name)}" for name in dict.fromkeys(providers))
    error = fairseq_tupe.FAIRSEQ_ERROR
    if error is None:
        import fairseq

        found = f"{fairseq.__version__}, from {names or Path(fairseq.__file__).parent}"
        if numbers(fairseq.__version__) < (0, 12, 2):
            return Row("fairseq", FAIL, found, f"0.12.2 or later is needed: {SETUP}", True)
        return Row("fairseq", OK, found, needed=True)
    if isinstance(error, ModuleNotFoundError) and error.name == "fairseq":
        return Row("fairseq", MISSING, "not installed", SETUP, True)
    return Row("fairseq", FAIL, f"{names or 'fairseq'} does not import: {one_line(error)}", fairseq_cure(error), True)


def fairseq_cure(error: BaseException) -> str:
    """What to do about a fairseq that doesn't import, by the ways in which that is known to happen."""
    text = str(error)
    mended = f"fairseq-fixed 0.12.3.1 is mended: {NEW}"
    if "mutable default" in text:
        return f"fairseq 0.12.2 does not import on Python 3.11 and later (dataclass defaults); {mended}; or take Python 3.10"
    if "numpy" in text and "has no attribute" in text:
        return f"this fairseq uses names that numpy 1.24 removed; {mended}"
    if isinstance(error, ModuleNotFoundError) and error.name in ("omegaconf", "hydra"):
        return f"pip 24.1 and later refuses the omegaconf 2.0 that fairseq 0.12.2 asks for; {mended}"
    if "omegaconf" in text or "hydra" in text:
        return f"omegaconf 2.3.0 and hydra-core 1.3.2 are the tested pair; {mended}"
    if "weights_only" in text or "Weights only" in text:
        return f"torch 2.6 and later loads checkpoints with weights_only; {mended}"
    if isinstance(error, ModuleNotFoundError) and error.name and error.name.split(".")[0] != "fairseq":
        return f"install {error.name.split('.')[0]}: {SETUP} brings everything that fairseq imports"
    if "undefined symbol" in text or "_fast" in text or "binary incompatib" in text or "dtype size changed" in text:
        return f"its compiled parts are missing or do not fit this torch or numpy; compile it again: {NEW}"
    return f"{NEW} installs a fairseq that is known to work"


def cuda_row() -> Row:
    """GPUs that PyTorch can use."""
    try:
        import torch
    except Exception:
        return Row("CUDA", MISSING, "unknown: PyTorch does not import")
    if torch.cuda.is_available():
        names = [torch.cuda.get_device_name(i) for i in range(torch.cuda.device_count())]
        return Row("CUDA", OK, f"{len(names)} GPU: " + ", ".join(names))
    if os.path.exists("/proc/driver/nvidia/gpus") or os.path.exists("/dev/nvidiactl"):
        cure = "this PyTorch is built without CUDA: install another, " + SETUP + " --torch SPEC"
        if torch.version.cuda:
            cure = f"it is built for CUDA {torch.version.cuda}: update the NVIDIA driver, or take an older PyTorch with --torch"
        return Row("CUDA", NOTE, "an NVIDIA GPU is here, and PyTorch can't use it", cure)
    return Row("CUDA", MISSING, "no GPU: training runs on the CPU (without --fp16, which fairseq has on GPUs only)")


def bf16_row() -> Row:
    """Whether the device computes in bfloat16."""
    if gpu_here():
        import torch

        able = torch.cuda.is_bf16_supported()
        return Row("bf16", OK if able else MISSING, "the GPU computes in bf16" if able else "not on this GPU: use --fp16")
    flags = set()
    if os.path.exists("/proc/cpuinfo"):
        flags = set(re.findall(r"\b(amx_bf16|avx512_bf16)\b", Path("/proc/cpuinfo").read_text("utf-8", "replace")))
    if flags:
        return Row("bf16", OK, "the CPU computes in bf16: " + ", ".join(sorted(flags)))
    return Row("bf16", MISSING, "the CPU has neither AMX nor AVX512-BF16: fp32 is the fastest here")


def compiler_row() -> Row:
    """A C++ compiler, which fairseq's installation needs."""
    command = next((name for name in (os.environ.get("CXX"), "c++", "g++") if name and shutil.which(name)), None)
    if command is None:
        return Row("C++ compiler", MISSING, "none found; only compiling fairseq needs it", "install g++ or clang")
    result = subprocess.run([command, "--version"], capture_output=True, text=True, errors="replace", timeout=20)
    first = (result.stdout.splitlines() or ["no version"])[0]
    return Row("C++ compiler", OK if result.returncode == 0 else NOTE, f"{command}: {first}")


def headers_row() -> Row:
    """Python.h, which fairseq's installation needs."""
    header = Path(sysconfig.get_path("include")) / "Python.h"
    if header.is_file():
        return Row("Python headers", OK, str(header))
    package = f"python{sys.version_info[0]}.{sys.version_info[1]}"
    cure = f"install {package}-dev (Debian, Ubuntu) or {package}-devel (Fedora)"
    return Row("Python headers", MISSING, "no Python.h; only compiling fairseq needs it", cure)


def module_row(name: str, purpose: str, needed: bool = False) -> Row:
    """A package that is imported by the name that it is installed by."""
    if importlib.util.find_spec(name) is None:
        return Row(name, MISSING, f"not installed; {purpose}", SETUP, needed)
    try:
        module = importlib.import_module(name)
    except Exception as error:
        return Row(name, FAIL, one_line(error), SETUP, needed)
    return Row(name, OK, str(getattr(module, "__version__", "installed")), needed=needed)


def apex_row() -> Row:
    """NVIDIA's apex, which is optional: absent, working, without its compiled parts, or another package of that name."""
    spec = importlib.util.find_spec("apex")
    if spec is None:
        return Row("apex", MISSING, "not installed; optional, fairseq works without it")
    where = (list(spec.submodule_search_locations or []) or [str(spec.origin)])[0]
    # Not imported here: a foreign package may do anything on import.
    if not any((Path(where) / "normalization" / name).is_file() for name in ("__init__.py", "fused_layer_norm.py")):
        return Row("apex", NOTE, f"an unrelated package of that name, not NVIDIA's ({where})", "pip uninstall apex")
    absent = [name for name in ("amp_C", "fused_layer_norm_cuda") if importlib.util.find_spec(name) is None]
    if absent:
        cure = "uninstall it, or build it from NVIDIA's source with --cpp_ext --cuda_ext"
        breaks = gpu_here()
        effect = "fairseq's adam and LayerNorm fail with it on a GPU" if breaks else "of no use"
        found = f"NVIDIA's, but a Python-only build ({', '.join(absent)} missing): {effect} ({where})"
        return Row("apex", FAIL if breaks else NOTE, found, cure, needed=breaks)
    code = "import torch, amp_C, fused_layer_norm_cuda; from apex.normalization import FusedLayerNorm"
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, errors="replace", timeout=120)
    if result.returncode != 0:
        reason = (result.stderr.strip().splitlines() or ["it crashed"])[-1]
        return Row("apex", NOTE, f"NVIDIA's does not import: {reason[:200]}", "build it again for this PyTorch, or uninstall it")
    return Row("apex", OK, f"NVIDIA's, with its compiled parts ({where})")


def gpu_here() -> bool:
    """Whether PyTorch sees a GPU; False where PyTorch itself is missing."""
    try:
        import torch

        return torch.cuda.is_available()
    except Exception:
        return False


def names_row() -> Row:
    """Our models, tasks, criterion and schedule in fairseq's registries."""
    if fairseq_tupe.FAIRSEQ_ERROR is not None:
        return Row("registered", MISSING, "nothing: fairseq does not import", needed=True)
    from fairseq.criterions import CRITERION_REGISTRY
    from fairseq.models import ARCH_MODEL_REGISTRY
    from fairseq.optim.lr_scheduler import LR_SCHEDULER_REGISTRY
    from fairseq.tasks import TASK_REGISTRY

    wanted = [(name, ARCH_MODEL_REGISTRY) for name in ARCHS]
    wanted += [(name, TASK_REGISTRY) for name in ("tupe_masked_lm", "tupe_sentence_prediction")]
    wanted += [("tupe_sentence_prediction", CRITERION_REGISTRY), ("tupe_polynomial_decay", LR_SCHEDULER_REGISTRY)]
    absent = [name for name, registry in wanted if name not in registry]
    if absent:
        cure = "this copy of fairseq_tupe is incomplete: restore its files (git status shows what changed)"
        return Row("registered", FAIL, "missing: " + ", ".join(absent), cure, True)
    return Row("registered", OK, ", ".join(dict.fromkeys(name for name, _ in wanted)), needed=True)

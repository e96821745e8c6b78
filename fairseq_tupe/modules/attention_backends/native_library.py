"""Builds the C++ operators on first use and keeps them in torch's extension folder (``TORCH_EXTENSIONS_DIR``).

A build is bound to what it depends on: sources, flags, torch, and the processor, since it is compiled for the processor at hand
and folders may be shared by several machines. It is made in a private folder and renamed into place, so a reader never sees half
of it; a lock, which dies with its owner, keeps two ranks from compiling the same thing.
"""

import contextlib
import functools
import hashlib
import logging
import os
import platform
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

import torch

logger = logging.getLogger(__name__)

HERE = Path(__file__).resolve().parent
SOURCES = ("cpu_fused.cpp", "cpu_fused_dropout.cpp")
HEADERS = ("cpu_fused.h", "cpu_fused_forward.h", "cpu_fused_backward.h")
NAME = "fairseq_tupe_cpu"


def compiler_flags() -> list[str]:
    """Flags of the build; floating point stays exact (no fast-math), save for contraction to fused multiply-adds."""
    arm = platform.machine() in ("aarch64", "arm64")
    return ["-O3", "-mcpu=native" if arm else "-march=native", "-fno-math-errno", "-fno-trapping-math", "-fopenmp", "-Wno-psabi"]


def _processor() -> str:
    """What the native flags depend on."""
    with contextlib.suppress(OSError):
        lines = Path("/proc/cpuinfo").read_text(errors="replace").splitlines()
        wanted = ("flags", "Features", "model name", "CPU part")
        return "\n".join(sorted({line for line in lines if line.startswith(wanted)}))
    return platform.processor()


def library_path() -> Path:
    """Where the compiled library belongs."""
    from torch.utils import cpp_extension

    root = os.environ.get("TORCH_EXTENSIONS_DIR") or cpp_extension.get_default_build_root()
    digest = hashlib.sha256()
    for name in SOURCES + HEADERS:
        digest.update((HERE / name).read_bytes())
    compiler = os.environ.get("CXX", "c++")
    facts = (compiler, torch.__version__, torch.backends.cpu.get_cpu_capability(), *compiler_flags(), _processor())
    digest.update("\n".join(facts).encode())
    return Path(root) / f"{NAME}-torch{torch.__version__}-{digest.hexdigest()[:16]}" / f"{NAME}.so"


@contextlib.contextmanager
def _lock(folder: Path):
    try:
        import fcntl
    except ImportError:  # no such locks on this platform: two builds at once only waste time
        yield
        return
    with open(folder / "lock", "w") as handle:
        fcntl.flock(handle, fcntl.LOCK_EX)
        yield


def _run(*command: str) -> subprocess.Popen:
    return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)


def _wait(processes: list) -> None:
    outputs = [process.communicate()[0] for process in processes]
    for process, output in zip(processes, outputs, strict=True):
        if process.returncode:
            raise RuntimeError(output or f"{process.args[0]} ended with status {process.returncode}")


def _build(target: Path) -> None:
    """By the compiler itself: torch's own builder breaks where a path holds a space."""
    from torch.utils import cpp_extension

    compiler = os.environ.get("CXX", "c++")
    if shutil.which(compiler) is None:
        raise FileNotFoundError(f"no C++ compiler {compiler} (install g++, or set CXX)")
    logger.info(f"compiling the CPU operators (once, about a minute) into {target.parent}")
    private = Path(tempfile.mkdtemp(prefix="build-", dir=target.parent))
    abi = f"-D_GLIBCXX_USE_CXX11_ABI={int(torch.compiled_with_cxx11_abi())}"
    flags = ["-std=c++20", "-fPIC", abi, *compiler_flags(), *(f"-I{path}" for path in cpp_extension.include_paths())]
    try:
        objects = [str(private / f"{name}.o") for name in SOURCES]
        pairs = zip(SOURCES, objects, strict=True)
        _wait([_run(compiler, *flags, "-c", str(HERE / source), "-o", target) for source, target in pairs])
        libraries = [*(f"-L{path}" for path in cpp_extension.library_paths()), "-lc10", "-ltorch_cpu", "-ltorch"]
        built = str(private / target.name)
        _wait([_run(compiler, "-shared", "-fopenmp", *objects, *libraries, "-o", built)])
        torch.ops.load_library(built)
        os.replace(built, target)
    finally:
        shutil.rmtree(private, ignore_errors=True)


@functools.cache
def load_failure() -> str | None:
    """Loads the operators into ``torch.ops.fairseq_tupe``, building them if need be; None, or why it can't."""
    if sys.platform != "linux":
        return f"the CPU operators are built on Linux only, this is {sys.platform}"
    try:
        target = library_path()
        target.parent.mkdir(parents=True, exist_ok=True)
        with _lock(target.parent):
            if target.exists():
                torch.ops.load_library(str(target))
            else:
                _build(target)
    except Exception as error:  # no compiler, no ninja, a full or read-only disk: all of them mean "go without"
        return _first_error(str(error)) or type(error).__name__
    return None


def _first_error(text: str, most: int = 300) -> str:
    """Of a compiler's long output the first line that names an error, else the beginning."""
    lines = text.splitlines()
    return " ".join(next((line for line in lines if ": error" in line), text).split())[:most]

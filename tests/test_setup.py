"""Packaging and scripts/setup.sh: what a built package holds, and what each way to fail says.

A whole installation takes minutes and the network, so it is not made here: scripts/test.sh itself starts with one.
"""

import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import time
import zipfile
from email.parser import Parser
from pathlib import Path

import pytest

REPO = Path(__file__).resolve().parent.parent
SETUP = REPO / "scripts" / "setup.sh"
BASE_PYTHON = Path(getattr(sys, "_base_executable", sys.executable)).resolve()
# pip without any index, so that nothing here reaches for the network.
OFFLINE = {"PIP_CONFIG_FILE": os.devnull, "PIP_NO_INDEX": "1", "PIP_FIND_LINKS": "", "PIP_EXTRA_INDEX_URL": ""}


def clean_environment(**more) -> dict:
    """This process's environment without what names an environment of its own."""
    hidden = ("VIRTUAL_ENV", "FAIRSEQ_TUPE_VENV", "PYTHONPATH", "PYTHONHOME", "CXX")
    return {**{k: v for k, v in os.environ.items() if k not in hidden}, **OFFLINE, **more}


def setup(*words, env=None, timeout=120, cwd="/") -> subprocess.CompletedProcess:
    """Runs scripts/setup.sh offline."""
    return subprocess.run(
        ["bash", str(SETUP), *map(str, words)],
        env=clean_environment(**(env or {})),
        cwd=cwd,
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=timeout,
        check=False,
    )


def script(path: Path, text: str) -> Path:
    """Writes an executable shell script."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("#!/bin/sh\n" + text, encoding="utf-8")
    path.chmod(0o755)
    return path


def one_error(result: subprocess.CompletedProcess) -> str:
    """The one line of standard error of a run that failed."""
    assert result.returncode == 1, result.stdout + result.stderr
    assert result.stderr.startswith("setup.sh: error: "), result.stderr
    assert result.stderr.count("\n") == 1, result.stderr
    return result.stderr


# --- the package ---


def build(kind: str, source: Path, out: Path) -> Path:
    """Builds an sdist or a wheel through the build backend that pip uses."""
    code = f"from setuptools import build_meta; print(build_meta.build_{kind}({str(out)!r}))"
    result = subprocess.run([sys.executable, "-c", code], cwd=source, capture_output=True, text=True, check=False)
    assert result.returncode == 0, result.stderr
    return out / result.stdout.splitlines()[-1]


def test_wheel_from_sdist_holds_the_package_and_its_yaml_files(tmp_path):
    source, out = tmp_path / "source", tmp_path / "out"
    out.mkdir()
    skip = shutil.ignore_patterns("__pycache__")
    shutil.copytree(REPO / "fairseq_tupe", source / "fairseq_tupe", ignore=skip)
    for name in ("setup.py", "pyproject.toml", "LICENSE", "README.md"):
        if (REPO / name).is_file():
            shutil.copy(REPO / name, source)
    shutil.unpack_archive(build("sdist", source, out), tmp_path / "unpacked")
    (unpacked,) = (tmp_path / "unpacked").iterdir()
    wheel = zipfile.ZipFile(build("wheel", unpacked, out))

    packed = {name for name in wheel.namelist() if name.startswith("fairseq_tupe/")}
    here = {str(p.relative_to(REPO)) for p in (REPO / "fairseq_tupe").rglob("*") if p.suffix in (".py", ".yaml")}
    assert packed >= here
    assert sum(name.endswith(".yaml") for name in packed) >= 2

    (metadata,) = (name for name in wheel.namelist() if name.endswith(".dist-info/METADATA"))
    fields = Parser().parsestr(wheel.read(metadata).decode("utf-8"))
    assert fields["Requires-Python"] == ">=3.10"
    assert set(fields.get_all("Provides-Extra")) >= {"plot", "hf", "dev"}
    requires = fields.get_all("Requires-Dist")
    assert "torch>=2.6" in requires
    assert not [line for line in requires if line.startswith("fairseq")]  # any distribution of that module serves


def test_requirements_are_pinned_and_grouped():
    lines = (REPO / "requirements.txt").read_text("utf-8").splitlines()
    groups = [re.match(r"# \[(\w+)\]", line).group(1) for line in lines if line.startswith("# [")]
    assert groups == ["torch", "build", "fairseq", "run", "plot", "dev"]
    pins = [line for line in lines if line and not line.startswith("#")]
    pin = re.compile(r'[A-Za-z0-9_-]+==[0-9][0-9.]*(; python_version [<>]=? "3\.11")?$')
    assert [line for line in pins if not pin.match(line)] == []


# --- setup.sh: what it refuses ---


def test_arguments_that_can_not_work(tmp_path):
    assert "unknown argument: --vnev" in one_error(setup("--vnev", tmp_path))
    assert "colon" in one_error(setup("--venv", tmp_path / "a:b"))
    assert "not --pre" in one_error(setup("--torch", "--pre"))
    full = tmp_path / "full"
    full.mkdir()
    (full / "thesis.txt").write_text("the only copy")
    assert "no working Python environment" in one_error(setup("--venv", full))
    assert {p.name for p in full.iterdir()} <= {"thesis.txt", "setup.log", "setup.lock"}
    (tmp_path / "file").write_text("")
    assert "can't make the folder" in one_error(setup("--venv", tmp_path / "file"))


def test_unsupported_python_is_listed(tmp_path):
    tools = tmp_path / "tools"
    old = script(tools / "python3", "echo 3.9.18 1 1\n")
    script(tools / "python3.11", "echo 'pyenv: python3.11: command not found' >&2; exit 127\n")  # a name that does not run
    for name in ("bash", "dirname", "readlink", "basename", "mkdir", "find", "head", "flock"):
        (tools / name).symlink_to(shutil.which(name))
    error = one_error(setup("--venv", tmp_path / "venv", env={"PATH": str(tools)}))
    assert "step 1 (Python)" in error
    assert f"found: {old} (3.9.18)" in error
    assert "3.10 to 3.13" in error
    error = one_error(setup("--venv", tmp_path / "venv", "--python", old))
    assert f"unsupported: {old} (3.9.18)" in error
    error = one_error(setup("--venv", tmp_path / "venv", "--python", tmp_path / "nothing"))
    assert "does not run" in error


def test_python_without_venv_module(tmp_path):
    message = "The virtual environment was not created successfully because ensurepip is not available."
    lame = script(tmp_path / "python3.12", f'case "$*" in *"-m venv"*) echo "{message}"; exit 1;; *) echo 3.12.3 0 1;; esac\n')
    error = one_error(setup("--venv", tmp_path / "venv", "--python", lame))
    assert "step 2" in error
    assert "this Python can't make environments" in error
    assert "python3.12" in error.split("run:")[1]


@pytest.fixture(scope="module")
def bare_venv(tmp_path_factory) -> Path:
    """An environment that setup.sh began, in a path with a space, and could not go on with."""
    folder = tmp_path_factory.mktemp("a path with spaces") / "bare venv"
    result = setup("--venv", folder, "--python", BASE_PYTHON)
    error = one_error(result)
    assert "step 3 (torch) failed" in error
    assert "package index can't be reached or has no torch==2.13.0 at all" in error
    assert "PIP_NO_INDEX" in error
    log = Path(error.rsplit("Full log: ", 1)[1].strip())
    assert log.parent == folder
    assert "No matching distribution" in log.read_text("utf-8")
    assert not (folder / "setup.stamp").exists()
    return folder


def test_failed_run_is_continued(bare_venv):
    result = setup("--venv", bare_venv)
    assert f"[2/6] environment: {bare_venv} is here" in result.stdout
    assert "step 3 (torch)" in one_error(result)


def test_no_compiler(bare_venv, tmp_path):
    tools = tmp_path / "tools"
    tools.mkdir()
    for name in ("bash", "cat", "dirname", "readlink", "basename", "mkdir", "find", "head", "flock", "awk", "grep", "cksum"):
        (tools / name).symlink_to(shutil.which(name))
    error = one_error(setup("--venv", bare_venv, env={"PATH": str(tools)}))
    assert "step 2 (compiler): a C++ compiler (c++, g++) is missing" in error
    assert "run: install g++" in error


def test_no_headers(bare_venv, tmp_path):
    # A Python that says the truth but for Python.h: the environment's own, behind a script.
    real = bare_venv / "bin" / "python"
    target = real.resolve()
    real.unlink()
    script(real, f'case "$3" in *Python.h*) "{target}" "$@" | sed "s/1$/0/";; *) exec "{target}" "$@";; esac\n')
    try:
        error = one_error(setup("--venv", bare_venv))
    finally:
        real.unlink()
        real.symlink_to(target)
    assert "step 2 (compiler): Python's headers (Python.h)" in error
    assert "run: " in error


def test_no_network(bare_venv):
    env = {"PIP_NO_INDEX": "0", "PIP_INDEX_URL": "http://127.0.0.1:9/simple", "PIP_RETRIES": "1", "PIP_TIMEOUT": "5"}
    error = one_error(setup("--venv", bare_venv, env=env))
    assert "step 3 (torch) failed: pip can't reach its package index" in error


def test_interruption_ends_pip_too(bare_venv):
    with socket.create_server(("127.0.0.1", 0)) as server:  # an index that takes the call and never answers
        url = f"http://127.0.0.1:{server.getsockname()[1]}/simple"
        env = clean_environment(PIP_NO_INDEX="0", PIP_INDEX_URL=url, PIP_TIMEOUT="60")
        command = ["bash", str(SETUP), "--venv", str(bare_venv)]
        process = subprocess.Popen(command, env=env, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
        server.settimeout(60)
        connection, _ = server.accept()
        process.send_signal(signal.SIGTERM)
        _, error = process.communicate(timeout=20)
        assert process.returncode == 1
        assert "interrupted; run it again to go on from here" in error
        connection.settimeout(10)
        while connection.recv(4096):  # pip's request, then its end: closed by pip's death
            pass
        connection.close()


def test_disk_full(tmp_path):
    small = tmp_path / "small"
    small.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", "size=8m", "tmpfs", str(small)]
    if os.geteuid() != 0 or subprocess.run(mount, capture_output=True, check=False).returncode != 0:
        pytest.skip("mounting a small file system is not permitted here")
    try:
        error = one_error(setup("--venv", small / "venv", "--python", BASE_PYTHON))
        assert "step 2" in error
        assert "the disk is full" in error
    finally:
        subprocess.run(["umount", str(small)], check=True)


def test_nothing_to_do_is_quick():
    if not (Path(sys.prefix) / "setup.stamp").is_file():
        pytest.skip("this environment was not made by scripts/setup.sh")
    start = time.monotonic()
    result = setup("--venv", sys.prefix, "--dev")
    assert result.returncode == 0, result.stderr
    assert "nothing to do" in result.stdout
    assert time.monotonic() - start < 3

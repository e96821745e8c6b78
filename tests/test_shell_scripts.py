"""Every shell script: style, --help, and the helpers of scripts/common.sh with awkward paths."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

REPO = Path(__file__).resolve().parent.parent
SCRIPTS = sorted((REPO / "scripts").glob("*.sh"))
AWKWARD = "a b; 'c' \"d\" ö -e"


def bash(*words, cwd="/", env=None) -> subprocess.CompletedProcess:
    """Runs bash without an active environment, from the root folder unless told otherwise."""
    clean = {k: v for k, v in os.environ.items() if k not in ("VIRTUAL_ENV", "FAIRSEQ_TUPE_VENV", "PYTHONPATH")}
    return subprocess.run(
        ["bash", *map(str, words)],
        cwd=cwd,
        env={**clean, **(env or {})},
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )


def test_shellcheck_finds_nothing():
    program = shutil.which("shellcheck", path=f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}")
    assert program, "shellcheck is missing: bash scripts/setup.sh --dev"
    command = [program, *map(str, SCRIPTS), str(REPO / ".ci" / "run")]
    result = subprocess.run(command, cwd=REPO, capture_output=True, text=True, check=False)
    assert result.returncode == 0, result.stdout + result.stderr


@pytest.mark.parametrize("script", [*SCRIPTS, REPO / ".ci" / "run"], ids=lambda path: path.name)
def test_script_is_well_formed(script):
    text = script.read_text(encoding="utf-8")
    assert text.startswith("#!/usr/bin/env bash\n")
    assert os.access(script, os.X_OK)
    assert "\r" not in text
    assert bash("-n", script).returncode == 0


@pytest.mark.parametrize("script", SCRIPTS, ids=lambda path: path.name)
def test_help_needs_no_environment(script, tmp_path):
    result = bash(script, "--help", cwd=tmp_path, env={"PATH": "/usr/bin:/bin", "FAIRSEQ_TUPE_VENV": str(tmp_path / "none")})
    assert result.returncode == 0, result.stderr
    assert "usage" in result.stdout.lower()
    assert list(tmp_path.iterdir()) == []


@pytest.fixture
def awkward(tmp_path) -> Path:
    """A copy of the scripts in a folder with an awkward name, and a script of one's own that sources common.sh."""
    repo = tmp_path / AWKWARD / "-repo"
    shutil.copytree(REPO / "scripts", repo / "scripts")
    source = 'source -- "$(dirname -- "$(readlink -f -- "${BASH_SOURCE[0]}")")/common.sh"'
    (repo / "scripts" / "mine.sh").write_text(f'set -euo pipefail\n{source}\neval "$1"\n', encoding="utf-8")
    return repo


def test_root_is_found_from_anywhere_and_through_a_link(awkward, tmp_path):
    script = awkward / "scripts" / "mine.sh"
    link = tmp_path / "-link.sh"
    link.symlink_to(script)
    show = 'printf "%s\\n" "$REPO_ROOT" "$USER_DIR"'
    wanted = [str(awkward), str(awkward / "fairseq_tupe")]
    assert bash(script, show).stdout.splitlines() == wanted
    assert bash("--", "scripts/mine.sh", show, cwd=awkward, env={"CDPATH": "/:/tmp"}).stdout.splitlines() == wanted
    assert bash("--", link.name, show, cwd=tmp_path).stdout.splitlines() == wanted


def test_absolute_path(awkward):
    script = awkward / "scripts" / "mine.sh"
    show = 'absolute_path "-x y"; absolute_path /a; absolute_path "ö;\'"'
    assert bash(script, show, cwd=awkward).stdout.splitlines() == [f"{awkward}/-x y", "/a", f"{awkward}/ö;'"]


def test_environment_missing_is_said_with_the_cure(awkward, tmp_path):
    script = awkward / "scripts" / "mine.sh"
    result = bash(script, "use_environment; echo not reached")
    assert (result.returncode, result.stdout) == (1, "")
    assert result.stderr.startswith("mine.sh: error: no environment found; run: bash ")
    assert result.stderr.count("\n") == 1
    # The cure must be a command that a shell understands, whatever the path.
    cure = result.stderr.split("run: ", 1)[1]
    assert bash("-c", cure.strip() + " --help").stdout.startswith("usage: bash scripts/setup.sh")

    empty = tmp_path / "empty"
    (empty / "bin").mkdir(parents=True)
    result = bash(script, "use_environment", env={"FAIRSEQ_TUPE_VENV": str(empty)})
    assert result.returncode == 1
    assert f"no Python in the environment {empty}" in result.stderr

    (empty / "bin" / "python").symlink_to(Path(sys.executable).resolve())  # without the site-packages of this one
    result = bash(script, "use_environment", env={"FAIRSEQ_TUPE_VENV": "empty"}, cwd=tmp_path)
    assert result.returncode == 1
    assert f"fairseq is missing in the environment {empty}" in result.stderr
    assert f"--venv {empty}" in result.stderr


def test_environment_is_used(awkward, tmp_path):
    venv = Path(sys.prefix)
    (tmp_path / "fairseq").mkdir()  # a folder of that name where the user stands must not hide the package
    show = "use_environment; python -c 'import sys, os; print(sys.prefix); print(os.environ[\"PYTHONPATH\"])'"
    result = bash(awkward / "scripts" / "mine.sh", show, cwd=tmp_path, env={"VIRTUAL_ENV": str(venv)})
    assert result.stdout.splitlines() == [str(venv), str(awkward)], result.stderr


def test_option_without_value(awkward):
    result = bash(awkward / "scripts" / "setup.sh", "--venv")
    assert result.returncode == 1
    assert result.stderr == "setup.sh: error: --venv needs a value (see --help)\n"
    result = bash(awkward / "scripts" / "test.sh", "--python")
    assert result.stderr == "test.sh: error: --python needs a value (see --help)\n"

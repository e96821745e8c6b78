#!/usr/bin/env bash
# Makes the virtual environment that everything here runs in. See --help.
set -euo pipefail
source -- "$(dirname -- "$(readlink -f -- "${BASH_SOURCE[0]}")")/common.sh"
source -- "$REPO_ROOT/scripts/setup_steps.sh"

usage() {
    cat <<'USAGE'
usage: bash scripts/setup.sh [--venv DIR] [--python PY] [--torch SPEC] [--dev]

Makes a virtual environment and installs the tested set of requirements.txt in it. Run again, it does only what is missing.

  --venv DIR     the environment's folder (default: $FAIRSEQ_TUPE_VENV, else .venv in the repository)
  --python PY    the Python to use, 3.10 to 3.13 (default: the first that works of python3.11, 3.12, 3.13, 3.10, python3)
  --torch SPEC   another PyTorch than the tested one, as pip names it (torch==2.14.1, 2.14.1, a wheel file)
  --dev          the test tools too
  -h, --help     this text

A PyTorch (2.6 or later) or a fairseq (0.12.2 or later) that is already in DIR is kept. pip's own settings (PIP_INDEX_URL, PIP_PROXY,
its configuration files ...) are in force. Compiling fairseq takes about 3 minutes and needs a C++ compiler and Python's headers.
USAGE
}

venv="${FAIRSEQ_TUPE_VENV:-$REPO_ROOT/.venv}" python_wanted="" torch_wanted="" dev=0
while [[ $# -gt 0 ]]; do
    case "$1" in
        --venv) need_value "$@"; venv="$2"; shift 2 ;;
        --python) need_value "$@"; python_wanted="$2"; shift 2 ;;
        --torch) need_value "$@"; torch_wanted="$2"; shift 2 ;;
        --venv=* | --python=* | --torch=*) set -- "${1%%=*}" "${1#*=}" "${@:2}" ;;
        --dev) dev=1; shift ;;
        -h | --help) usage; exit 0 ;;
        *) die "unknown argument: $1 (see --help)" ;;
    esac
done
[[ -n "$venv" ]] || die "--venv needs the name of a folder"
venv="$(absolute_path "$venv")"
[[ "$venv" != *:* ]] || die "the environment's path must not hold a colon (Python refuses it): $venv; choose another with --venv DIR"
case "$torch_wanted" in
    -*) die "--torch takes a version or a requirement such as torch==2.14.1, not $torch_wanted" ;;
    [0-9]*) torch_wanted="torch==$torch_wanted" ;;
esac
# Python is started with -I throughout: it must see neither the caller's packages nor the folder it stands in.
export PIP_DISABLE_PIP_VERSION_CHECK=1

py="$venv/bin/python" log="$venv/setup.log" stamp="$venv/setup.stamp"
made_here="$venv/setup.made-here" unfinished="$venv/setup.unfinished" fairseq_found=""

# Prints what the stamp must hold: one line for the run-time set, one for --dev, one for --torch.
wanted_stamp() {
    local sum
    sum="$(cat -- "$REPO_ROOT"/{requirements.txt,setup.py} | cksum)"
    echo "base ${sum// /-} $1"
    if [[ $dev == 1 ]]; then echo "dev ${sum// /-} $1"; fi
    if [[ -n "$torch_wanted" ]]; then echo "torch $torch_wanted"; fi
}

# Status 0 when an earlier run finished with these options and the environment still works and points at this repository.
nothing_to_do() {
    [[ -f "$stamp" && -x "$py" ]] || return 1
    local version line
    version="$(probe "$py")" || return 1
    while IFS= read -r line; do
        grep -qxF -e "$line" -- "$stamp" || return 1
    done < <(wanted_stamp "${version%% *}")
    "$py" -I - "$REPO_ROOT" "$dev" <<'PY' 2>/dev/null
import importlib.util as u, os, sys
names = ["torch", "fairseq", "numpy", "sentencepiece"] + (["pytest", "ruff"] if sys.argv[2] == "1" else [])
package = u.find_spec("fairseq_tupe")
here = os.path.join(sys.argv[1], "fairseq_tupe")
same = package is not None and package.origin and os.path.realpath(os.path.dirname(package.origin)) == os.path.realpath(here)
sys.exit(not (same and all(u.find_spec(name) for name in names)))
PY
}

# probe PYTHON: prints "VERSION HAS_VENV HEADERS"; fails where it doesn't run (pyenv leaves names behind that only print an error).
probe() {
    "$1" -I -c '
import importlib.util as u, os, sys, sysconfig
found = all(u.find_spec(n) for n in ("venv", "ensurepip"))
header = os.path.exists(os.path.join(sysconfig.get_path("include"), "Python.h"))
print("%d.%d.%d" % sys.version_info[:3], int(found), int(header))' 2>/dev/null </dev/null
}

supported() {
    case "$1" in 3.10.* | 3.11.* | 3.12.* | 3.13.*) ;; *) return 1 ;; esac
}

# Sets base_python and base_facts. A complete Python (venv module, headers) wins over an earlier one that lacks something.
find_python() {
    local name path facts seen="" names=(python3.11 python3.12 python3.13 python3.10 python3 python)
    base_python=""
    if [[ -n "$python_wanted" ]]; then names=("$python_wanted"); fi
    for name in "${names[@]}"; do
        while IFS= read -r path; do
            facts="$(probe "$path")" || continue
            seen+="${seen:+, }$path (${facts%% *})"
            supported "$facts" || continue
            if [[ -z "$base_python" || "$facts" == *" 1 1" ]]; then base_python="$path" base_facts="$facts"; fi
            if [[ "$facts" == *" 1 1" ]]; then return; fi
        done < <(type -aP -- "$name" || true)
    done
    [[ -z "$base_python" ]] || return 0
    if [[ -n "$python_wanted" ]]; then
        [[ -n "$seen" ]] || die "step 1 (Python): $python_wanted does not run; name a Python 3.10 to 3.13 with --python"
        die "step 1 (Python): unsupported: $seen; Python 3.10 to 3.13 is needed: install one, or name another with --python"
    fi
    die "step 1 (Python): no supported Python on PATH (found: ${seen:-none}); install Python 3.10 to 3.13 (3.11 is the tested one)" \
        "or name one with --python PATH"
}

# Fails before gigabytes are downloaded where fairseq could not be compiled afterwards.
check_compiler() {
    local short="python${version%.*}" missing cure
    if [[ "$base_facts" != *" 1" ]]; then
        missing="Python's headers (Python.h) for $short" cure="$(install_hint "$short-dev" "$short-devel" "$short")"
    elif ! command -v -- "${CXX:-c++}" >/dev/null && ! command -v g++ >/dev/null; then
        missing="a C++ compiler (c++, g++)" cure="$(install_hint g++ gcc-c++ gcc)"
    else
        return 0
    fi
    # A ready wheel (PIP_FIND_LINKS, an index of one's own) needs neither.
    if [[ -x "$py" ]] && pip install -q --dry-run --no-deps --only-binary :all: -r <(group fairseq) >/dev/null 2>&1; then return 0; fi
    die "step 2 (compiler): $missing is missing, fairseq can't be compiled; run: $cure, then this again"
}

# group NAME...: prints these groups of requirements.txt.
group() {
    awk -v wanted=" $* " '/^# \[/ { split($2, name, /[][]/); on = index(wanted, " " name[2] " ") } on && !/^#/ && NF' "$REPO_ROOT/requirements.txt"
}

pip() {
    "$py" -I -m pip "$@"
}

# pip_group NUMBER TITLE "GROUP..." [OPTION...]: installs these groups of requirements.txt. An earlier run that was stopped in the
# same step may have left half a package, which pip would take for a whole one.
pip_group() {
    local number="$1" title="$2" list="$venv/setup.step-$1.txt"
    group "$3" >"$list" || return 1
    pip_step "$number" "$title" "${@:4}" -r "$list"
}

pip_step() {
    local number="$1" title="$2" again=()
    shift 2
    if [[ -f "$unfinished-$number" ]]; then again=(--ignore-installed); fi
    : >"$unfinished-$number" || return 1
    run_step "$number" "$title" pip install ${again[@]+"${again[@]}"} "$@" || return 1
    rm -f -- "$unfinished-$number"
}

make_environment() {
    local facts=""
    if [[ -x "$py" ]] && facts="$(probe "$py")"; then
        version="${facts%% *}" base_facts="$facts"
        supported "$facts" || die "step 2 (environment): $venv has Python $version, unsupported; remove it or name another with --venv"
        if [[ -n "$python_wanted" ]]; then
            find_python
            [[ "${base_facts%.*}" == "${facts%.*}" ]] || die "step 2 (environment): $venv has Python $version, not the" \
                "${base_facts%% *} of --python: remove it or name another folder with --venv"
        fi
        if pip --version >/dev/null 2>&1; then
            echo "[1/$STEPS] Python $version"
            echo "[2/$STEPS] environment: $venv is here"
            return
        fi
    elif [[ ! -f "$made_here" && -n "$(find "$venv" -mindepth 1 -maxdepth 1 ! -name 'setup.*' 2>/dev/null | head -1)" ]]; then
        die "step 2 (environment): $venv exists and holds no working Python environment; remove it or name another with --venv"
    fi
    find_python
    version="${base_facts%% *}"
    echo "[1/$STEPS] Python $version: $base_python"
    # What an interrupted run or a Python that is gone left behind.
    if [[ -f "$made_here" ]]; then rm -rf -- "${venv:?}"/{bin,lib,lib64,include,pyvenv.cfg}; fi
    : >"$made_here"
    step 2 "environment $venv" "$base_python" -I -m venv "$venv"
}

has_torch() {
    "$py" -I -c '
import torch, sys
print(torch.__version__)
sys.exit(tuple(int(n) for n in torch.__version__.split(".")[:2]) < (2, 6))' 2>/dev/null
}

has_fairseq() {
    "$py" -I -c '
import re, sys, fairseq
print(fairseq.__version__)
sys.exit(tuple(int(n) for n in re.findall(r"\d+", fairseq.__version__)[:3]) < (0, 12, 2))' 2>/dev/null
}

install_torch() {
    local spec found
    if [[ -z "$torch_wanted" && ! -f "$unfinished-3" ]] && found="$(has_torch)"; then
        echo "[3/$STEPS] torch: $found is here, kept"
        return
    fi
    spec="${torch_wanted:-$(group torch)}"
    # Some indexes and local folders have builds without CUDA, gigabytes smaller, under the version +cpu.
    if [[ -z "$torch_wanted" && "$(uname -s)" == Linux && ! -e /proc/driver/nvidia && ! -e /dev/nvidiactl ]]; then
        if pip_step 3 "torch (for CPUs)" "$spec+cpu"; then return; fi
        # "from versions: none" means that no index answered, so that a second try would fail in the same way.
        grep -qE 'from versions: [^n]|ResolutionImpossible' <(tail -c "+$step_from" -- "$log") || fail_step 3 torch
        echo "[3/$STEPS] torch: the index has no build for CPUs, taking the usual one"
    fi
    pip_step 3 "torch" "$spec" || fail_step 3 torch
}

install_fairseq() {
    if [[ -n "$fairseq_found" ]]; then
        echo "[5/$STEPS] fairseq: $fairseq_found is here, kept"
        return
    fi
    # fairseq's CUDA kernels are not used here, and compiling them needs the CUDA toolkit of exactly torch's version.
    unset CUDA_HOME
    pip_group 5 "fairseq (compiles for about 3 minutes)" fairseq --no-build-isolation --no-deps || fail_step 5 fairseq
}

interrupted() {
    trap - INT TERM
    if [[ -n "$child" ]]; then kill -TERM -- "-$child" 2>/dev/null || true; fi
    echo >&2
    die "interrupted; run it again to go on from here. Log: $log"
}

main() {
    if nothing_to_do; then echo "setup: nothing to do, $venv is complete"; return; fi
    mkdir -p -- "$venv" 2>/dev/null || die "step 2 (environment): can't make the folder $venv"
    [[ -w "$venv" ]] || die "step 2 (environment): no permission to write in $venv"
    if command -v flock >/dev/null; then
        exec 9>"$venv/setup.lock"
        flock -n 9 || { echo "setup: another setup is at work in $venv, waiting for it"; flock 9; }
        if nothing_to_do; then echo "setup: nothing to do, $venv is complete"; return; fi
    fi
    trap interrupted INT TERM
    : >"$log"
    echo "setup: log in $log"
    make_environment
    if [[ -f "$unfinished-5" ]] || ! fairseq_found="$(has_fairseq)"; then
        fairseq_found=""
        check_compiler
    fi
    install_torch
    pip_group 4 "build tools" build || fail_step 4 "build tools"
    install_fairseq
    local groups="run plot"
    if [[ $dev == 1 ]]; then groups+=" dev"; fi
    pip_group 6 "the other packages" "$groups" --no-build-isolation || fail_step 6 "the other packages"
    cd -- "$REPO_ROOT"
    step 6 "this package" pip install --no-deps --no-build-isolation -e .
    step 6 "check" "$py" -I -c 'import torch, fairseq, sentencepiece; print(torch.__version__, fairseq.__version__)'
    # On first use otherwise; without them attention runs in plain PyTorch, and says so.
    step 6 "compile the CPU operators" "$py" -I -c 'from fairseq_tupe.modules.attention_backends import native_library as n; print(n.load_failure())'
    wanted_stamp "$version" >"$stamp.new"
    mv -f -- "$stamp.new" "$stamp"
    echo "setup: done in $SECONDS s. Check it with: $(printf '%q' "$py") -m fairseq_tupe doctor"
}

main

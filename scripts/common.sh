#!/usr/bin/env bash
# Sourced by every script here:
#   source -- "$(dirname -- "$(readlink -f -- "${BASH_SOURCE[0]}")")/common.sh"
# Gives REPO_ROOT, USER_DIR, die, need_value, absolute_path, split_arguments, find_environment, use_environment, gpu_count.

if [[ "${BASH_SOURCE[0]}" == "$0" ]]; then
    if [[ "${1:-}" == --help || "${1:-}" == -h ]]; then
        echo "usage: source scripts/common.sh    (helpers for the other scripts; does nothing by itself)"
        exit 0
    fi
    echo "common.sh: error: this file is sourced by the other scripts, it does nothing by itself" >&2
    exit 1
fi

# Physical path: the plug-in reached by two names would be registered twice.
REPO_ROOT="$(CDPATH='' cd -- "$(dirname -- "$(readlink -f -- "${BASH_SOURCE[0]}")")/.." && pwd -P)"
# shellcheck disable=SC2034  # for the scripts that source this file
USER_DIR="$REPO_ROOT/fairseq_tupe"
SCRIPT_NAME="$(basename -- "$0")"

# die MESSAGE...: one line on standard error, exit status 1.
die() {
    printf '%s: error: %s\n' "$SCRIPT_NAME" "$*" >&2
    exit 1
}

# need_value "$@": refuses an option that is the last word, as in `--save-dir` with nothing behind it.
need_value() {
    [[ $# -ge 2 ]] || die "$1 needs a value (see --help)"
}

# absolute_path PATH: the same path from /, existing or not, so that a leading dash can't be taken for an option.
absolute_path() {
    case "$1" in
        /*) printf '%s\n' "$1" ;;
        *) printf '%s/%s\n' "$PWD" "$1" ;;
    esac
}

# split_arguments MOST WORD...: puts up to MOST leading words in the array `arguments` and the rest, which is fairseq's, in `extra`.
# A path may begin with a dash; behind the first flag everything is fairseq's.
split_arguments() {
    local most="$1" word
    shift
    for word in "$@"; do
        if [[ ${#extra[@]} -eq 0 && ${#arguments[@]} -lt $most && ("$word" != -* || -e "$word") ]]; then
            arguments+=("$word")
        else
            extra+=("$word")
        fi
    done
}

# find_environment: prints the folder of the virtual environment to use; status 1 when there is none.
find_environment() {
    if [[ -n "${FAIRSEQ_TUPE_VENV:-}" ]]; then
        absolute_path "$FAIRSEQ_TUPE_VENV"
    elif [[ -e "$REPO_ROOT/.venv" ]]; then
        printf '%s\n' "$REPO_ROOT/.venv"
    elif [[ -n "${VIRTUAL_ENV:-}" ]]; then
        printf '%s\n' "$VIRTUAL_ENV"
    else
        return 1
    fi
}

# use_environment: puts the environment's programs first on PATH and this repository's package first for Python.
use_environment() {
    local venv option=""
    venv="$(find_environment)" || die "no environment found; run: bash $(printf '%q' "$REPO_ROOT/scripts/setup.sh")"
    if [[ "$venv" != "$REPO_ROOT/.venv" ]]; then option=" --venv $(printf '%q' "$venv")"; fi
    local cure
    cure="bash $(printf '%q' "$REPO_ROOT/scripts/setup.sh")$option"
    [[ -x "$venv/bin/python" ]] || die "no Python in the environment $venv; run: $cure"
    export VIRTUAL_ENV="$venv" PATH="$venv/bin:$PATH"
    unset PYTHONHOME
    # A folder of the same name where the user stands, or an installed second copy, must not win over this repository.
    export PYTHONSAFEPATH=1 PYTHONPATH="$REPO_ROOT${PYTHONPATH:+:$PYTHONPATH}"
    python -c 'import importlib.util as u, sys; sys.exit(u.find_spec("fairseq") is None)' \
        || die "fairseq is missing in the environment $venv; run: $cure"
}

# gpu_count: prints how many GPUs PyTorch sees (0 without one). Call use_environment first.
gpu_count() {
    python -c 'import torch; print(torch.cuda.device_count() if torch.cuda.is_available() else 0)' 2>/dev/null || echo 0
}

#!/usr/bin/env bash
# Sets up whatever is missing, then checks style and runs the tests. See --help.
set -euo pipefail
source -- "$(dirname -- "$(readlink -f -- "${BASH_SOURCE[0]}")")/common.sh"

usage() {
    cat <<'USAGE'
usage: bash scripts/test.sh [--venv DIR] [--python PY] [--torch SPEC] [pytest arguments]

Sets up whatever is missing (scripts/setup.sh --dev, which takes the first three options), runs ruff, then pytest on tests/.
Everything else goes to pytest: bash scripts/test.sh -k schedule -x
OMP_NUM_THREADS, where it is not set, becomes half the cores (at most 4), since some tests run two processes.
USAGE
}

setup_options=(--dev)
while [[ $# -gt 0 ]]; do
    case "$1" in
        --venv)
            need_value "$@"
            FAIRSEQ_TUPE_VENV="$(absolute_path "$2")"
            export FAIRSEQ_TUPE_VENV
            shift 2
            ;;
        --python | --torch) need_value "$@"; setup_options+=("$1" "$2"); shift 2 ;;
        -h | --help) usage; exit 0 ;;
        --) shift; break ;;
        *) break ;;
    esac
done

bash "$REPO_ROOT/scripts/setup.sh" "${setup_options[@]}"
use_environment
cd -- "$REPO_ROOT"

cores="$(getconf _NPROCESSORS_ONLN 2>/dev/null || echo 2)"
threads=$((cores / 2 < 1 ? 1 : cores / 2 > 4 ? 4 : cores / 2))
export OMP_NUM_THREADS="${OMP_NUM_THREADS:-$threads}"

style=0
python -m ruff check . || style=$?
tests=0
python -m pytest "$@" || tests=$?
if [[ $style != 0 ]]; then
    echo "test.sh: error: ruff found faults (above pytest's output)" >&2
    exit 1
fi
exit "$tests"

#!/usr/bin/env bash
# Sourced by setup.sh: runs one step into the log, and finds the reason of a failure. Uses its variables log, venv, version, STEPS.

if [[ "${BASH_SOURCE[0]}" == "$0" ]]; then
    if [[ "${1:-}" == --help || "${1:-}" == -h ]]; then
        echo "usage: source scripts/setup_steps.sh    (a part of setup.sh; does nothing by itself)"
        exit 0
    fi
    echo "setup_steps.sh: error: this file is a part of setup.sh, it does nothing by itself" >&2
    exit 1
fi

STEPS=6 log="" venv="" version="" child="" step_from=1

# Prints how to install something where the package manager is known: install_hint APT_NAME DNF_NAME BREW_NAME
install_hint() {
    if command -v apt-get >/dev/null; then echo "apt-get install $1"
    elif command -v dnf >/dev/null; then echo "dnf install $2"
    elif command -v brew >/dev/null; then echo "brew install $3"
    else echo "install $1"; fi
}

# diagnose TEXT: the reason of a failure in this part of the log, and the cure, in one line.
diagnose() {
    local text="$1" short="python${version%.*}"
    local network='Temporary failure in name|NewConnectionError|Failed to establish|Connection refused|unreachable|Max retries'
    network+='|ConnectTimeout|ReadTimeout|timed out|ProxyError|SSLError|ConnectionError|Connection broken|Could not fetch URL'
    # The log may lie on the full disk, and then says nothing of it.
    if has 'No space left on device|Errno 28|Disk quota exceeded' || disk_full "$venv" || disk_full "${TMPDIR:-/tmp}"; then
        echo "the disk is full: make room beside $venv and in ${TMPDIR:-/tmp} (or set TMPDIR); 3 GB are needed, 9 GB with CUDA"
    elif has 'Python\.h: No such file'; then
        echo "Python's headers are missing; run: $(install_hint "$short-dev" "$short-devel" "$short")"
    elif has 'error: command .* failed|ninja: build stopped'; then
        if has 'Killed|terminated program'; then
            echo "the compiler was killed, most likely for want of memory: set MAX_JOBS=1 and run this again"
        else
            echo "compiling failed: $(last ' error: '); a C++17 compiler is needed, see the log"
        fi
    elif has "$network"; then
        echo "pip can't reach its package index: check the network and pip's settings (pip config list; PIP_INDEX_URL, PIP_PROXY, PIP_CERT)"
    elif has 'ResolutionImpossible'; then
        echo "pip can't have these versions together, or a constraint of yours forbids one (pip config list; PIP_CONSTRAINT); see the log"
    elif has 'from versions: none'; then
        echo "pip's package index can't be reached or has no $(last 'No matching distribution' | sed 's/.* for //; s/+cpu//') at all:" \
            "check the network and pip's settings (pip config list; PIP_INDEX_URL, PIP_NO_INDEX, PIP_PROXY)"
    elif has 'No matching distribution'; then
        echo "pip's package index has no $(last 'No matching distribution' | sed 's/.* for //') for Python $version on this system;" \
            "take another Python, or another PyTorch with --torch"
    elif has 'ensurepip|No module named pip|No module named venv'; then
        echo "this Python can't make environments; run: $(install_hint "$short-venv" "$short" "$short")"
    elif has 'Permission denied|Read-only file system'; then
        echo "no permission to write: $(last 'Permission denied|Read-only file system')"
    else
        local line
        line="$(last 'error')"
        echo "${line:-$(last .)}; see the log"  # a process ended from outside leaves no more than "Terminated"
    fi
}

# disk_full FOLDER: less than 20 MB are left.
disk_full() {
    df -Pk -- "$1" 2>/dev/null | awk 'NR == 2 { exit !($4 < 20000) }'
}

# The two look at the text of diagnose. No here-strings: bash may need a file for them, and the disk may be full.
has() {
    [[ "$text" =~ $1 ]]
}

last() {
    printf '%s\n' "$text" | grep -iE -e "$1" | tail -1 | cut -c1-250 || true
}

# run_step NUMBER TITLE COMMAND...: runs it into the log, shows that time passes; status of the command. See fail_step.
run_step() {
    local number="$1" title="$2" start=$SECONDS shown=0 status=0
    shift 2
    step_from=$(($(wc -c <"$log") + 1))
    printf '\n=== [%s/%s] %s: %s\n' "$number" "$STEPS" "$title" "$*" >>"$log"
    if [[ -t 1 ]]; then printf '[%s/%s] %s ...' "$number" "$STEPS" "$title"; else echo "[$number/$STEPS] $title ..."; fi
    set -m  # a process group of its own, so that an interruption reaches pip's compilers too
    "$@" >>"$log" 2>&1 </dev/null &
    child=$!
    set +m
    while kill -0 "$child" 2>/dev/null; do
        sleep 0.2
        if [[ -t 1 ]]; then
            printf '\r[%s/%s] %s ... %s s' "$number" "$STEPS" "$title" $((SECONDS - start))
        elif ((SECONDS - start >= shown + 20)); then
            shown=$((SECONDS - start))
            echo "[$number/$STEPS] $title ... still running, $shown s"
        fi
    done
    wait "$child" || status=$?
    child=""
    if [[ -t 1 ]]; then echo; elif [[ $status == 0 ]]; then echo "[$number/$STEPS] $title: done, $((SECONDS - start)) s"; fi
    return "$status"
}

# fail_step NUMBER TITLE: which step, why, the cure.
fail_step() {
    local part why
    part="$(tail -c "+$step_from" -- "$log")"
    why="$(diagnose "$part")"
    die "step $1 ($2) failed: $why. Full log: $log"
}

step() {
    run_step "$@" || fail_step "$1" "$2"
}

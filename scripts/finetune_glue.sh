#!/usr/bin/env bash
# Fine-tune a checkpoint on a GLUE task with the paper's settings.
set -euo pipefail
# shellcheck source=scripts/common.sh
source -- "$(dirname -- "$(readlink -f -- "${BASH_SOURCE[0]}")")/common.sh"

usage() {
    cat <<'TEXT'
usage: finetune_glue.sh TASK CHECKPOINT [DATA] [--save-dir DIR] [--print-flags] [fairseq flags]

Fine-tunes CHECKPOINT on CoLA, SST-2, MRPC, STS-B, QQP, MNLI, QNLI, RTE or WNLI. DATA is a folder made by prepare_glue_data.sh
(default data-bin/glue/TASK-bin in this repository).

  CHECKPOINT        a checkpoint of tupe_roberta: its size and variant are read from it. `none` (or `scratch`) starts from
                    random weights; give the model's flags then (--arch tupe_roberta_small --rel-pos ...)
  --save-dir DIR    checkpoints, TensorBoard logs and a copy of the tokenizer (default checkpoints/TASK in this repository);
                    a run that was stopped goes on from here
  --print-flags     print the flags for fairseq-train, one a line, and do nothing

Defaults are the paper's: batch 32 (and at most 4,400 tokens), lr 5e-5 after a warm-up of 6%, linear decay, 10 epochs (5 for MNLI,
QNLI, QQP), one process, so that 32 sentences make an update; fp16 on a GPU. It validates and saves twice an epoch and keeps the
best and the last checkpoint. Any fairseq flag behind the arguments overrides a default; --distributed-world-size N uses N GPUs.
TEXT
}

arguments=() save_dir="" print_flags="" extra=() words=()
while [[ $# -gt 0 ]]; do
    case "$1" in
        --help | -h) usage; exit 0 ;;
        --print-flags) print_flags=yes; shift; continue ;;
        --save-dir=*) set -- "${1%%=*}" "${1#*=}" "${@:2}" ;;
    esac
    case "$1" in
        --save-dir) need_value "$@"; save_dir="$2"; shift 2 ;;
        *) words+=("$1"); shift ;;
    esac
done
split_arguments 3 ${words[@]+"${words[@]}"}
[[ ${#arguments[@]} -ge 1 ]] || die "TASK is missing (see --help)"
[[ ${#arguments[@]} -ge 2 ]] || die "CHECKPOINT is missing: a file, or none to start from scratch (see --help)"
task="${arguments[0]}" checkpoint="${arguments[1]}"
case "$checkpoint" in
    none | scratch) ;;
    *)
        [[ -f "$checkpoint" ]] || die "checkpoint $checkpoint does not exist"
        checkpoint="$(absolute_path "$checkpoint")"
        ;;
esac

use_environment
data="${arguments[2]:-}"
if [[ -n "$data" ]]; then data="$(absolute_path "$data")"; fi
if [[ -n "$save_dir" ]]; then extra+=("--save-dir=$(absolute_path "$save_dir")"); fi
printed="$(python -m fairseq_tupe finetune-flags "$task" "$data" \
    --checkpoint="$checkpoint" ${extra[@]+"${extra[@]}"})"
mapfile -t flags <<<"$printed"
flags+=("--user-dir=$USER_DIR" ${extra[@]+"${extra[@]}"})
if [[ -n "$print_flags" ]]; then
    printf '%s\n' "${flags[@]}"
    exit 0
fi

data="${flags[0]}"
for flag in "${flags[@]}"; do
    if [[ "$flag" == --save-dir=* ]]; then save_dir="${flag#*=}"; fi
done
if [[ -d "$data/tokenizer" ]]; then
    mkdir -p -- "$save_dir"
    fresh="$(mktemp -d -- "$save_dir/.tokenizer.XXXXXX")"
    cp -R -- "$data/tokenizer/." "$fresh/"
    chmod 755 -- "$fresh"
    rm -rf -- "$save_dir/tokenizer"
    mv -- "$fresh" "$save_dir/tokenizer"
else
    echo "$SCRIPT_NAME: note: no tokenizer in $data, so $save_dir will not hold one" >&2
fi
exec fairseq-train "${flags[@]}"

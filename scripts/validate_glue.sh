#!/usr/bin/env bash
# Metrics of a fine-tuned checkpoint on a GLUE dev set, by fairseq-validate.
set -euo pipefail
# shellcheck source=scripts/common.sh
source -- "$(dirname -- "$(readlink -f -- "${BASH_SOURCE[0]}")")/common.sh"

usage() {
    cat <<'TEXT'
usage: validate_glue.sh TASK CHECKPOINT [DATA] [fairseq flags]

Prints the metrics of CHECKPOINT, a model fine-tuned by finetune_glue.sh, on the dev set of TASK (both dev sets for MNLI):
CoLA Matthews correlation; MRPC and QQP accuracy and F1; STS-B Pearson and Spearman correlation; others accuracy; in percent.
DATA is a folder made by prepare_glue_data.sh (default data-bin/glue/TASK-bin in this repository), not the one the checkpoint
remembers. Any flag of fairseq-validate may follow, such as --valid-subset or --batch-size.
TEXT
}

arguments=() extra=()
for word in "$@"; do
    if [[ "$word" == --help || "$word" == -h ]]; then usage; exit 0; fi
done
split_arguments 3 "$@"
[[ ${#arguments[@]} -ge 1 ]] || die "TASK is missing (see --help)"
[[ ${#arguments[@]} -ge 2 ]] || die "CHECKPOINT is missing (see --help)"
task="${arguments[0]}" checkpoint="${arguments[1]}"
[[ -f "$checkpoint" ]] || die "checkpoint $checkpoint does not exist"

use_environment
data="${arguments[2]:-}"
if [[ -n "$data" ]]; then data="$(absolute_path "$data")"; fi
printed="$(python -m fairseq_tupe finetune-flags "$task" "$data" \
    --validate --checkpoint="$(absolute_path "$checkpoint")" ${extra[@]+"${extra[@]}"})"
mapfile -t flags <<<"$printed"
exec fairseq-validate "${flags[@]}" "--user-dir=$USER_DIR" ${extra[@]+"${extra[@]}"}

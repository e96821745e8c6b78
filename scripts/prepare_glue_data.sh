#!/usr/bin/env bash
# GLUE files, through the pretraining tokenizer, into fairseq's binary format.
set -euo pipefail
# shellcheck source=scripts/common.sh
source -- "$(dirname -- "$(readlink -f -- "${BASH_SOURCE[0]}")")/common.sh"

usage() {
    cat <<'TEXT'
usage: prepare_glue_data.sh GLUE_DIR TASK...|ALL --tokenizer DIR [--out DIR] [--drop-bad-rows]

Makes DIR/TASK-bin (default data-bin/glue in this repository) for CoLA, SST-2, MRPC, STS-B, QQP, MNLI, QNLI, RTE, WNLI and the
diagnostic set AX. GLUE_DIR holds a folder a task (CoLA/, SST-2/, ...); for a single task it may be that task's own folder.

  --tokenizer DIR    the pretraining data or tokenizer folder (made by prepare_pretrain_data.sh), or a checkpoint's folder
  --out DIR          where TASK-bin goes
  --drop-bad-rows    leave unusable rows out of dev and test sets too; without it they are an error

Reads the GLUE site's TSV files (MRPC also as Microsoft's msr_paraphrase_{train,test}.txt with dev_ids.tsv; STS-B also as
sts-{train,dev,test}.csv of the STS benchmark), and jsonl or parquet exports of the `datasets` library (parquet needs pyarrow).
Unusable rows of a training set are dropped; every one is listed with file, line and reason, on screen and in report.json.
TEXT
}

positional=() tokenizer="" out="$REPO_ROOT/data-bin/glue" flags=()
while [[ $# -gt 0 ]]; do
    case "$1" in
        --help | -h) usage; exit 0 ;;
        --tokenizer=* | --out=*) set -- "${1%%=*}" "${1#*=}" "${@:2}" ;;
    esac
    case "$1" in
        --tokenizer) need_value "$@"; tokenizer="$2"; shift 2 ;;
        --out) need_value "$@"; out="$2"; shift 2 ;;
        --drop-bad-rows) flags+=("$1"); shift ;;
        *)
            if [[ "$1" == -* && ! (${#positional[@]} -eq 0 && -d "$1") ]]; then die "unknown option $1 (see --help)"; fi
            positional+=("$1")
            shift
            ;;
    esac
done
[[ ${#positional[@]} -ge 1 && -n "${positional[0]}" ]] || die "GLUE_DIR is missing (see --help)"
[[ ${#positional[@]} -ge 2 ]] || die "TASK is missing, or ALL (see --help)"
[[ -n "$tokenizer" ]] || die "--tokenizer is missing (see --help)"
[[ -n "$out" ]] || die "--out is empty (see --help)"

use_environment
exec python -m fairseq_tupe prepare-glue-data ${flags[@]+"${flags[@]}"} \
    --tokenizer "$(absolute_path "$tokenizer")" --out "$(absolute_path "$out")" \
    "$(absolute_path "${positional[0]}")" "${positional[@]:1}"

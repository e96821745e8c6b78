#!/usr/bin/env bash
# Pretrain TUPE with the paper's recipe.
set -euo pipefail
# shellcheck source=scripts/common.sh
source -- "$(dirname -- "$(readlink -f -- "${BASH_SOURCE[0]}")")/common.sh"

readonly VARIANTS="tupe-a tupe-r bert-a bert-r tupe-a-tie-cls bert-a-d"
readonly SIZES="tiny small base large"
readonly PAPER_BATCH=256

usage() {
    cat <<'TEXT'
usage: pretrain.sh DATA --save-dir DIR [--variant NAME] [--size NAME] [--gpus N] [--without FLAG] [--print-flags] [fairseq flags]

Pretrains on DATA, a folder made by prepare_pretrain_data.sh: one data-bin, several joined by colons (dir1:dir2), or a
folder that holds shard0, shard1, ... (each is one epoch, in turn).

  --save-dir DIR    checkpoints, TensorBoard logs and a copy of the tokenizer; a run that was stopped goes on from here
  --variant NAME    tupe-a, tupe-r (default: the paper's best), bert-a, bert-r, tupe-a-tie-cls or bert-a-d
  --size NAME       tiny, small, base (default: the paper's) or large
  --gpus N          use N of the local GPUs (default: all of them; 0: the CPU)
  --without FLAG    leave out a default that takes no value, such as --embedding-normalize or --fp16 (may be repeated)
  --print-flags     print the flags for fairseq-train, one a line, and do nothing

Defaults are the paper's: sequences of 512 tokens, 256 of them an update, 1M updates, Adam, lr 1e-4 after 10,000 warm-up
updates, then linear to zero; fp16 on a GPU. --update-freq follows from the number of GPUs and --batch-size (default 16; 4 on a
CPU), so that 256 sequences make an update; the log says at the start what the batch is, and warns where it is another. Every
100,000th update's checkpoint is kept (100k, 300k, 600k and 1M among them), and the last three of every 25,000.
Any fairseq flag behind DATA overrides the default. The learning rate reaches zero at --max-update (or --total-num-update).
TEXT
}

# known NAME KIND LIST: refuses a name that is not in the list.
known() {
    [[ " $3 " == *" $1 "* ]] || die "unknown $2 '$1'; known: ${3// /, }"
}

data="" save_dir="" variant=tupe-r size=base gpus="" print_flags=""
without=() extra=()
while [[ $# -gt 0 ]]; do
    case "$1" in
        --help | -h) usage; exit 0 ;;
        --print-flags) print_flags=yes; shift; continue ;;
        --save-dir=* | --variant=* | --size=* | --gpus=* | --without=*) set -- "${1%%=*}" "${1#*=}" "${@:2}" ;;
    esac
    case "$1" in
        --save-dir) need_value "$@"; save_dir="$2"; shift 2 ;;
        --variant) need_value "$@"; variant="$2"; shift 2 ;;
        --size) need_value "$@"; size="$2"; shift 2 ;;
        --gpus) need_value "$@"; gpus="$2"; shift 2 ;;
        --without) need_value "$@"; without+=("$2"); shift 2 ;;
        *)
            if [[ -z "$data" ]]; then
                [[ "$1" != -* || -d "$1" ]] || die "DATA comes before fairseq's flags, found $1 (see --help)"
                data="$1"
                [[ -n "$data" ]] || die "DATA is empty (see --help)"
            else
                extra+=("$1")
            fi
            shift
            ;;
    esac
done

[[ -n "$data" ]] || die "DATA is missing: a folder made by prepare_pretrain_data.sh (see --help)"
[[ -n "$save_dir" ]] || die "--save-dir is missing (see --help)"
known "$variant" variant "$VARIANTS"
known "$size" size "$SIZES"
[[ "$gpus" =~ ^[0-9]*$ ]] || die "--gpus takes a number, found '$gpus'"
save_dir="$(absolute_path "$save_dir")"

# last_value DEFAULT NAME...: what the user gave for a flag under any of its names (the last one counts), or the default.
last_value() {
    local value="$1" name i
    shift
    for ((i = 0; i < ${#extra[@]}; i++)); do
        for name in "$@"; do
            if [[ "${extra[i]}" == "$name" ]]; then value="${extra[i + 1]:-}"; fi
            if [[ "${extra[i]}" == "$name="* ]]; then value="${extra[i]#*=}"; fi
        done
    done
    printf '%s' "$value"
}

# resolve_data: turns DATA into the absolute folders that fairseq wants, joined by colons, in $folders.
resolve_data() {
    local path
    local -a parts=()
    folders=""
    if [[ -d "$data" && "$data" == *:* ]]; then
        die "the path $data holds a colon, which separates folders for fairseq; rename it"
    elif [[ -d "$data/shard0" ]]; then
        while IFS= read -r path; do parts+=("$path"); done < <(
            find -- "$(absolute_path "$data")" -mindepth 1 -maxdepth 1 -type d -name 'shard[0-9]*' | sort -V
        )
    else
        IFS=: read -r -a parts <<<"$data"
    fi
    for path in "${parts[@]}"; do
        [[ -d "$path" ]] || die "DATA: no folder $path; make it with prepare_pretrain_data.sh"
        [[ -s "$path/dict.txt" && -e "$path/train.idx" ]] \
            || die "DATA: $path holds no data-bin (dict.txt and train.idx expected); make it with prepare_pretrain_data.sh"
        path="$(absolute_path "$path")"
        [[ "$path" != *:* ]] || die "the path $path holds a colon, which separates folders for fairseq; rename it"
        folders+="${folders:+:}$path"
    done
}

# copy_tokenizer: makes the save-dir self-contained. A checkpoint is useless with another tokenizer, so that is refused.
copy_tokenizer() {
    local first="${folders%%:*}" source target="$save_dir/tokenizer" fresh
    source="$first/tokenizer"
    [[ -d "$source" ]] || source="$(dirname -- "$first")/tokenizer"
    if [[ ! -d "$source" ]]; then
        echo "$SCRIPT_NAME: note: no tokenizer beside $first, so $save_dir will not hold one" >&2
    elif [[ -d "$target" && -n "$(find "$save_dir" -maxdepth 1 -name '*.pt' -print -quit)" ]]; then
        diff -q -- "$source" "$target" >/dev/null 2>&1 \
            || die "$save_dir holds a run with another tokenizer than $source; choose another --save-dir"
    else
        mkdir -p -- "$save_dir" || die "can't create $save_dir"
        fresh="$(mktemp -d -- "$save_dir/.tokenizer.XXXXXX")"
        cp -R -- "$source/." "$fresh/"
        chmod 755 -- "$fresh"
        rm -rf -- "$target" # of a run that was refused before it began
        mv -- "$fresh" "$target"
    fi
}

resolve_data
for word in ${extra[@]+"${extra[@]}"}; do
    if [[ "$word" == --cpu ]]; then gpus=0; fi
done
if [[ -z "$gpus" ]]; then
    use_environment
    gpus="$(gpu_count)"
fi
batch_size="$(last_value "$([[ "$gpus" -gt 0 ]] && echo 16 || echo 4)" --batch-size --max-sentences)"
ranks="$(last_value "$([[ "$gpus" -gt 0 ]] && echo "$gpus" || echo 1)" --distributed-world-size)"
[[ "$batch_size" =~ ^[1-9][0-9]*$ ]] || die "--batch-size takes a number of sentences, found '$batch_size'"
[[ "$ranks" =~ ^[1-9][0-9]*$ ]] || die "--distributed-world-size takes a number, found '$ranks'"
update_freq="$(last_value $(((PAPER_BATCH + ranks * batch_size - 1) / (ranks * batch_size))) --update-freq)"
update_freq="${update_freq%%,*}" # fairseq takes a list with one number an epoch; the first one is the recipe's
[[ "$update_freq" =~ ^[1-9][0-9]*$ ]] || die "--update-freq takes a number, found '$update_freq'"

flags=(
    "$folders" --user-dir "$USER_DIR"
    --task tupe_masked_lm --criterion masked_lm --arch "tupe_roberta_$size"
    --sample-break-mode complete --tokens-per-sample 512 --mask-prob 0.15
    --embedding-normalize --dropout 0.1 --attention-dropout 0.1
    --optimizer adam --adam-betas "(0.9, 0.999)" --adam-eps 1e-6 --weight-decay 0.01 --clip-norm 1.0
    --lr 1e-4 --lr-scheduler tupe_polynomial_decay --warmup-updates 10000
    --max-update 1000000
    --batch-size "$batch_size" --update-freq "$update_freq" --distributed-world-size "$ranks"
    --load-checkpoint-on-all-dp-ranks --num-workers 4 --seed 1
    --save-dir "$save_dir" --tensorboard-logdir "$save_dir/tensorboard" --log-format simple --log-interval 100
    --no-epoch-checkpoints --save-interval-updates 25000 --keep-interval-updates 3 --keep-interval-updates-pattern 100000
)
case "$variant" in
    tupe-a) ;;
    tupe-r) flags+=(--rel-pos) ;;
    bert-a) flags+=(--position-encoding absolute) ;;
    bert-r) flags+=(--position-encoding absolute --rel-pos) ;;
    tupe-a-tie-cls) flags+=(--tie-cls) ;;
    bert-a-d) flags+=(--position-encoding untied-projections) ;;
esac
if [[ "$gpus" -gt 0 ]]; then flags+=(--fp16); else flags+=(--cpu); fi
for flag in ${without[@]+"${without[@]}"}; do
    kept=()
    for word in "${flags[@]}"; do [[ "$word" == "$flag" ]] || kept+=("$word"); done
    [[ ${#kept[@]} -lt ${#flags[@]} ]] || die "--without $flag: not among the defaults (see --print-flags)"
    flags=("${kept[@]}")
done
flags+=(${extra[@]+"${extra[@]}"})

if [[ -n "$print_flags" ]]; then
    printf '%s\n' "${flags[@]}"
    exit 0
fi
use_environment
copy_tokenizer
exec fairseq-train "${flags[@]}"

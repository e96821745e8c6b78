#!/usr/bin/env bash
# Clean, tokenize and binarize text files for pretraining: a thin shell over `python -m fairseq_tupe prepare-pretrain-data`.
set -euo pipefail

usage() {
    cat <<'USAGE'
usage: bash scripts/prepare_pretrain_data.sh --out data-bin/NAME [options] FILE...

Takes plain, gzip, xz or bzip2 text in UTF-8 and writes what fairseq reads:
data-bin/NAME/{dict.txt,train.bin,train.idx,valid.bin,valid.idx,report.json,tokenizer/}.
An interrupted run continues when it is given again; the output is replaced only when all is done.

  --out DIR              folder to write (needed)
  --vocab-size N         sentencepiece pieces (32768)
  --tokenizer DIR        use this tokenizer and its cleaning instead of training one
  --shards N (to 256)    write DIR/shard0 to DIR/shardN-1, for DIR/shard0:DIR/shard1:...
  --valid-fraction F     share of lines to hold out (0.005)
  --seed N               of the held-out choice (1)
  --workers N            processes (2); the result does not depend on it
  --force                start over even if the same is done or half done
  --unwrap               join hard-wrapped lines into paragraphs first
  --sample-sentences N   at most so many to train the tokenizer on (2000000)
cleaning, on unless turned off; recorded in the tokenizer folder:
  --cased  --no-repair  --no-normalize  --no-placeholders
lines and sentences, on unless turned off:
  --min-chars N  --min-sentence-chars N  --no-length-filter  --no-letter-filter  --no-table-filter  --no-maths-filter
  --no-deduplicate  --no-rare-word-filter  --no-sentence-split  --no-join-short
A FILE whose name starts with a dash goes behind --, or as ./-NAME.
USAGE
}

for word in "$@"; do
    case "$word" in
        --) break ;;
        -h | --help)
            usage
            exit 0
            ;;
    esac
done

# shellcheck source=scripts/common.sh
source -- "$(dirname -- "$(readlink -f -- "${BASH_SOURCE[0]}")")/common.sh"
[[ $# -gt 0 ]] || {
    usage >&2
    exit 1
}
use_environment
exec python -m fairseq_tupe prepare-pretrain-data "$@"

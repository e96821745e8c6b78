"""`prepare-pretrain-data`: text files to cleaned, tokenized, binarized data that fairseq reads.

The steps are those of the original (guolinke/TUPE, preprocess/pretrain), each with a switch. Where they differ:

- sentencepiece (BPE, byte fallback) stands for Moses' tokenizer and fastBPE; so there are no unknown words, punctuation stays
  on its word, and words with hyphens are not taken apart.
- The original writes <unk> for all words but the most frequent 21% of distinct ones. Here a line is left out when more than 3
  in 10 of its words occur fewer than 3 times (foreign or damaged text), and only in a corpus of at least a million words.
- Sentences are found before lower-casing, by `sentencex` (see `sentences`), not by spaCy after it.
- Of the original's floor of 50 characters and 50 letters a line only 20 are asked where lines are single sentences
  (their mean is under 200 characters); --min-chars sets it.
- The original joins a line to the next where the former ends in a letter, a digit or a comma; that is --unwrap here, by the
  length of the lines, and off by default.
- Held-out lines are chosen by their hash, not by counting to 200: they stay held out when the corpus grows or is reordered; and
  a held-out sentence that also stands in a training line is left out.
"""

import argparse
import errno
import os
import sys
from dataclasses import asdict
from pathlib import Path

import numpy
import sentencepiece

from fairseq_tupe.data import corpus_pipeline, corpus_report, text_input
from fairseq_tupe.data.cleaning import CleaningOptions
from fairseq_tupe.data.corpus_pipeline import Settings
from fairseq_tupe.data.corpus_stages import TextOptions
from fairseq_tupe.data.line_filters import LineFilterOptions
from fairseq_tupe.data.tokenizer import Tokenizer
from fairseq_tupe.data.workers import Workers
from fairseq_tupe.data.workspace import REPORT, Workspace, settings_key, write_json
from fairseq_tupe.errors import TupeError

PIPELINE_VERSION = 1  # raise it when the same settings would give other data
DEFAULT_VOCAB_SIZE = 32768
_CLEANING_FLAGS = {
    "repair": "--no-repair",
    "normalize": "--no-normalize",
    "placeholders": "--no-placeholders",
    "lowercase": "--cased",
}
_SINGLE_SENTENCES = 200  # mean bytes of a row; paragraphs are longer


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds this command's arguments to `parser`."""
    parser.add_argument("files", nargs="+", metavar="FILE", help="text in UTF-8: plain, gzip, xz or bzip2 (told by content)")
    parser.add_argument("--out", required=True, metavar="DIR", help="folder to write; replaced as a whole when all is done")
    parser.add_argument("--vocab-size", type=int, metavar="N", help=f"sentencepiece pieces (default {DEFAULT_VOCAB_SIZE})")
    parser.add_argument("--tokenizer", metavar="DIR", help="use this tokenizer folder, and its cleaning, instead of training one")
    parser.add_argument("--shards", type=int, default=1, metavar="N", help="write DIR/shard0 to shardN-1, for one an epoch")
    parser.add_argument("--valid-fraction", type=float, default=0.005, metavar="F", help="share of lines held out (0.005)")
    parser.add_argument("--seed", type=int, default=1, metavar="N", help="of the held-out choice (default 1)")
    parser.add_argument("--workers", type=int, default=2, metavar="N", help="processes (default 2); they don't change the result")
    parser.add_argument("--force", action="store_true", help="start over even if the same is done or half done")
    parser.add_argument("--unwrap", action="store_true", help="join hard-wrapped lines into paragraphs first")
    parser.add_argument(
        "--sample-sentences", type=int, default=2_000_000, metavar="N", help="to train the tokenizer on, at most (2,000,000)"
    )
    cleaning = parser.add_argument_group("cleaning (recorded in the tokenizer folder)")
    cleaning.add_argument("--cased", action="store_true", help="keep capitals; the default is lower case")
    cleaning.add_argument("--no-repair", action="store_true", help="refuse bytes that are not UTF-8 instead of dropping them")
    cleaning.add_argument("--no-normalize", action="store_true", help="leave punctuation and invisible characters as they are")
    cleaning.add_argument("--no-placeholders", action="store_true", help="no <url>, <email>, <file>")
    lines = parser.add_argument_group("lines and sentences")
    lines.add_argument("--min-chars", type=int, metavar="N", help="of a line (50, the original's; 20 for single sentences)")
    lines.add_argument("--min-sentence-chars", type=int, default=20, metavar="N", help="of a sentence (default 20)")
    lines.add_argument("--no-length-filter", action="store_true", help="keep lines and sentences of any length")
    lines.add_argument("--no-letter-filter", action="store_true", help="keep lines with few letters")
    lines.add_argument("--no-table-filter", action="store_true", help="keep lines with many bars")
    lines.add_argument("--no-maths-filter", action="store_true", help="keep lines with many backslashes")
    lines.add_argument("--no-deduplicate", action="store_true", help="keep repeated lines")
    lines.add_argument("--no-rare-word-filter", action="store_true", help="keep lines with many rare words")
    lines.add_argument("--no-sentence-split", action="store_true", help="a line is a sentence")
    lines.add_argument("--no-join-short", action="store_true", help="don't join short sentences to their neighbours")


def run(args: argparse.Namespace) -> int:
    """Runs the command; returns 0.

    Raises:
        TupeError: for bad input or settings, and for a full disk or a folder that can't be written.
    """
    try:
        return _run(args)
    except OSError as error:
        what = "no space left on the disk" if error.errno == errno.ENOSPC else (error.strerror or str(error))
        place = f"{error.filename}: " if error.filename else f"{args.out}: "
        raise TupeError(f"{place}{what}; what was at {args.out} before is unchanged") from None


def _run(args: argparse.Namespace) -> int:
    space = Workspace(Path(args.out))
    _check_numbers(args)
    space.restore()
    report = space.existing_report()
    settings = _settings(args, space)
    keys = _keys(settings)
    same = report is not None and report.get("key") == keys["encode"] and corpus_report.files_intact(space.out, report)
    if same and not args.force:
        _say(f"{space.out} is done already, with these settings and inputs; --force makes it anew")
        return 0
    with space:
        space.open(fresh=args.force)
        new = space.unswapped_report()
        if new is None or new.get("key") != keys["encode"] or not corpus_report.files_intact(space.partial, new):
            results = _run_stages(settings, space, keys, args.workers)
            new = corpus_report.make(settings, keys["encode"], results, space.partial)
            write_json(space.partial / REPORT, new)
        space.swap()
    if report is not None:
        _say(f"replaced the earlier {space.out} ({corpus_report.one_line(report)})")
    print(corpus_report.summary(new, space.out))
    for line in corpus_report.warnings(new):
        _warn(line)
    return 0


def _run_stages(settings: Settings, space: Workspace, keys: dict[str, str], workers: int) -> dict[str, dict]:
    results: dict[str, dict] = {}
    folder, work = space.partial, space.work
    with Workers(workers) as pool:
        for name, function, needs, files in (
            ("clean", corpus_pipeline.clean, None, lambda: [work / "clean.txt"]),
            ("split", corpus_pipeline.split, "clean", lambda: corpus_pipeline.split_files(work)),
            ("tokenize", corpus_pipeline.tokenize, "split", lambda: [folder / "tokenizer" / "spm.model"]),
            ("encode", corpus_pipeline.encode, "split", lambda: corpus_report.result_files(folder)),
        ):
            done = space.finished(name, keys[name])
            if done is not None:
                _say(f"{name}: done in an earlier run")
            else:
                arguments = [results[needs]] if needs else []
                done = function(settings, space, pool, *arguments)
                if name == "clean" and not done.get("kept"):
                    raise TupeError(f"nothing is left after the filters: {corpus_report.explain_dropped(done, settings)}")
                space.finish(name, keys[name], done, files())
            results[name] = done
    return results


def _check_numbers(args: argparse.Namespace) -> None:
    for name, low, high in (
        ("vocab_size", 1, None), ("shards", 1, 256), ("workers", 1, 1000), ("min_chars", 0, None),
        ("min_sentence_chars", 0, None), ("sample_sentences", 1, None), ("seed", 0, None),
    ):  # fmt: skip
        value = getattr(args, name)
        if value is not None and (value < low or (high is not None and value > high)):
            limit = f"at least {low}" if high is None else f"{low} to {high}"
            raise TupeError(f"--{name.replace('_', '-')} is {value}, expected {limit}")
    if not 0 < args.valid_fraction < 1:
        raise TupeError(f"--valid-fraction is {args.valid_fraction}, expected a share between 0 and 1")


def _settings(args: argparse.Namespace, space: Workspace) -> Settings:
    files = [Path(name) for name in args.files]
    probes = [text_input.probe(path) for path in files]
    for path, look in zip(files, probes, strict=True):
        resolved = path.resolve()
        if any(folder.resolve() in resolved.parents for folder in (space.out, space.partial, space.previous)):
            raise TupeError(f"{path}: this input lies in the output folder {space.out}, which is replaced as a whole")
        if look.hard_wrapped and not args.unwrap:
            _warn(f"{path}: {look.wrapped:.0%} of the lines have 50 to 80 characters and most stop in mid-sentence; "
                  "if the text is hard-wrapped, --unwrap joins its lines")  # fmt: skip
    cleaning, tokenizer = _cleaning(args)
    min_chars = args.min_chars
    if min_chars is None:
        single = not args.unwrap and sum(look.mean_row for look in probes) / len(probes) < _SINGLE_SENTENCES
        min_chars = 20 if single else 50
    filters = LineFilterOptions(
        length=not args.no_length_filter,
        letters=not args.no_letter_filter,
        tables=not args.no_table_filter,
        maths=not args.no_maths_filter,
        min_chars=min_chars,
    )
    text = TextOptions(
        cleaning=cleaning,
        filters=filters,
        split_sentences=not args.no_sentence_split,
        join_short=not args.no_join_short,
        min_sentence_chars=0 if args.no_length_filter else args.min_sentence_chars,
    )
    return Settings(
        files=files,
        text=text,
        unwrap=args.unwrap,
        widths=[look.width for look in probes],
        deduplicate=not args.no_deduplicate,
        rare_words=not args.no_rare_word_filter,
        valid_fraction=args.valid_fraction,
        seed=args.seed,
        vocab_size=args.vocab_size or DEFAULT_VOCAB_SIZE,
        sample_sentences=args.sample_sentences,
        tokenizer=tokenizer,
        shards=args.shards,
    )


def _cleaning(args: argparse.Namespace) -> tuple[CleaningOptions, Tokenizer | None]:
    """The cleaning switches, and the tokenizer where one was given: its switches then rule, and other ones are refused."""
    asked = CleaningOptions(not args.no_repair, not args.no_normalize, not args.no_placeholders, not args.cased)
    if args.tokenizer is None:
        return asked, None
    tokenizer = Tokenizer.load(args.tokenizer)
    for name, flag in _CLEANING_FLAGS.items():
        if not getattr(asked, name) and getattr(tokenizer.cleaning, name):
            raise TupeError(f"{flag} contradicts the tokenizer {args.tokenizer}, which was made without it; leave it out")
    if args.vocab_size not in (None, tokenizer.vocab_size):
        found = f"has {tokenizer.vocab_size} pieces"
        raise TupeError(f"--vocab-size {args.vocab_size} contradicts the tokenizer {args.tokenizer}, which {found}")
    return tokenizer.cleaning, tokenizer


def _keys(settings: Settings) -> dict[str, str]:
    """For each stage a hash of everything that its result depends on."""
    files = [(os.path.abspath(path), path.stat().st_size, path.stat().st_mtime_ns) for path in settings.files]
    versions = [PIPELINE_VERSION, sentencepiece.__version__, numpy.__version__]
    keys = {"clean": settings_key(versions, files, asdict(settings.text), settings.unwrap, settings.deduplicate)}
    keys["split"] = settings_key(keys["clean"], settings.seed, settings.valid_fraction, settings.rare_words)
    own = settings.tokenizer.manifest["sha256"] if settings.tokenizer else [settings.vocab_size, settings.sample_sentences]
    keys["tokenize"] = settings_key(keys["split"], own)
    keys["encode"] = settings_key(keys["tokenize"], settings.shards)
    return keys


def _say(text: str) -> None:
    print(f"fairseq_tupe: {text}", file=sys.stderr)


def _warn(text: str) -> None:
    print(f"fairseq_tupe: warning: {text}", file=sys.stderr)

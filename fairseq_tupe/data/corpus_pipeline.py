"""The four stages from text files to binarized data, as the main process sees them; the work itself is in `corpus_stages`.

clean    input files -> work/clean.txt, one record a line, each once
split    work/clean.txt -> work/train.txt, work/valid.txt, one sentence a line
tokenize work/train.txt -> tokenizer/spm.model (or the given tokenizer)
encode   sentences -> train.bin, train.idx, valid.bin, valid.idx and the dictionary's counts
"""

import shutil
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np

from fairseq_tupe.data import corpus_stages, text_input, tokenizer_training
from fairseq_tupe.data.binarized import DatasetWriter
from fairseq_tupe.data.dictionaries import OFFSET, write_dictionary
from fairseq_tupe.data.hashing import HashSet, hash_lines
from fairseq_tupe.data.line_filters import WordCounts
from fairseq_tupe.data.progress import Progress
from fairseq_tupe.data.tokenizer import DICTIONARY, MANIFEST, MODEL, Tokenizer, write_manifest
from fairseq_tupe.data.workers import Workers
from fairseq_tupe.data.workspace import Workspace
from fairseq_tupe.errors import TupeError

# Below this many words nearly every word is rare, and counts say nothing about a line.
RARE_WORDS_NEED = 1_000_000
_BATCH_BYTES = 1 << 19


@dataclass
class Settings:
    """What was asked for, checked; `pretraining_corpus` makes it from the command line."""

    files: list[Path]
    text: corpus_stages.TextOptions
    unwrap: bool = False
    widths: list[int] = field(default_factory=list)
    deduplicate: bool = True
    rare_words: bool = True
    valid_fraction: float = 0.005
    seed: int = 1
    vocab_size: int = 32768
    sample_sentences: int = 2_000_000
    tokenizer: Tokenizer | None = None
    shards: int = 1


def clean(settings: Settings, space: Workspace, workers: Workers) -> dict:
    """Stage 1. Returns counts by reason, `lines` (read), `kept`, `words` and `text_bytes`; writes work/clean.txt."""
    counts: Counter = Counter()
    seen = HashSet()
    progress = Progress("clean", sum(path.stat().st_size for path in settings.files))
    batches = _batches(settings, counts, progress)
    with open(space.work / "clean.txt", "wb") as out:
        for records, hashes, found in workers.map(corpus_stages.clean_rows, batches):
            counts.update(found)
            if settings.deduplicate:
                fresh = seen.add(hashes)
                counts["duplicate"] += int(len(fresh) - fresh.sum())
                records = [record for record, new in zip(records, fresh.tolist(), strict=True) if new]
            counts["kept"] += len(records)
            out.write(b"".join(record + b"\n" for record in records))
    progress.update(progress.total or 0, counts["text_bytes"])
    return {**counts, "seconds": progress.finish()}


def _batches(settings: Settings, counts: Counter, progress: Progress) -> Iterator[tuple]:
    """Arguments for `corpus_stages.clean_rows`, about half a megabyte of rows each."""
    before = 0
    for number, path in enumerate(settings.files):
        base = before
        source = text_input.read_rows(path, lambda done, base=base: progress.update(base + done, counts["text_bytes"]))
        if settings.unwrap:
            source = text_input.unwrap(source, settings.widths[number])
        rows, size, first = [], 0, 1
        for some in source:
            rows += some
            size += sum(map(len, some)) + len(some)
            if size >= _BATCH_BYTES:
                counts["text_bytes"] += size
                counts["lines"] += len(rows)
                yield rows, str(path), first, settings.text
                first += len(rows)
                rows, size = [], 0
        if rows:
            counts["text_bytes"] += size
            counts["lines"] += len(rows)
            yield rows, str(path), first, settings.text
        before += path.stat().st_size


def split(settings: Settings, space: Workspace, workers: Workers, cleaned: dict) -> dict:
    """Stage 2. Returns counts of lines and sentences of both parts; writes work/train.txt and work/valid.txt.

    Raises:
        TupeError: where fewer than two lines are left.
    """
    source = space.work / "clean.txt"
    progress = Progress("split", source.stat().st_size)
    rare_counts = ""
    if settings.rare_words and cleaned.get("words", 0) >= RARE_WORDS_NEED:
        rare_counts = str(space.work / "word_counts.npy")
        table = WordCounts()
        for cells, amounts in workers.map(corpus_stages.count_words, corpus_stages.line_ranges(source)):
            table.add(cells, amounts)
            progress.beat()
        np.save(rare_counts, table.counts)
    options = corpus_stages.SplitOptions(settings.seed, int(settings.valid_fraction * 2**64), rare_counts)
    counts = _split_once(space, workers, options, progress)
    if counts["train_lines"] + counts["valid_lines"] < 2:
        raise TupeError(
            f"{counts['train_lines'] + counts['valid_lines']} lines are left after the filters; at least 2 are needed, "
            "one of them for the held-out part (a row of input counts as one line)"
        )
    if not counts["valid_lines"]:  # a small corpus: hold out the line with the smallest hash
        options = corpus_stages.SplitOptions(settings.seed, counts["smallest"] + 1, rare_counts)
        counts = _split_once(space, workers, options, progress)
    if not counts["train_lines"]:
        raise TupeError(f"--valid-fraction {settings.valid_fraction} leaves no line to train on")
    _find_shared(space, workers, progress)
    return {**counts, "rare_filter": bool(rare_counts), "seconds": progress.finish()}


def split_files(work: Path) -> list[Path]:
    """The files that `split` leaves for `encode`."""
    return [work / f"{part}{ending}" for part in ("train", "valid") for ending in (".txt", "_skip.npy")]


def _split_once(space: Workspace, workers: Workers, options: corpus_stages.SplitOptions, progress: Progress) -> dict:
    counts: Counter = Counter()
    smallest = []
    done = 0
    ranges = [(*piece, options) for piece in corpus_stages.line_ranges(space.work / "clean.txt")]
    with open(space.work / "train.txt", "wb") as train, open(space.work / "valid.txt", "wb") as valid:
        for (_, start, end, _), result in zip(ranges, workers.map(corpus_stages.split_records, ranges), strict=True):
            train.write(result.pop("train"))
            valid.write(result.pop("valid"))
            if (least := result.pop("smallest")) is not None:
                smallest.append(least)
            counts.update(result)
            done += end - start
            progress.update(done)
    return {**counts, "smallest": min(smallest, default=0)}


def _find_shared(space: Workspace, workers: Workers, progress: Progress) -> None:
    """Writes work/{valid,train}_skip.npy: hashes of sentences to leave out, so that none stands in both parts.

    Lines are never in both, but two lines may share a sentence: it leaves the held-out part, unless that would be empty.
    """
    with open(space.work / "valid.txt", "rb") as stream:
        held_out = np.unique(hash_lines(line.rstrip(b"\n") for line in stream))
    known = str(space.work / "valid_hashes.npy")
    np.save(known, held_out)
    shared = np.empty(0, dtype=np.uint64)
    ranges = [(*piece, known) for piece in corpus_stages.line_ranges(space.work / "train.txt")]
    for found in workers.map(corpus_stages.find_known, ranges):
        shared = np.union1d(shared, found)
        progress.beat()
    kept = np.empty(0, dtype=np.uint64)
    if len(shared) == len(held_out):  # a corpus of repeated sentences: hold out one of them wherever it stands
        kept, shared = shared[:1], shared[1:]
    np.save(space.work / "valid_skip.npy", shared)
    np.save(space.work / "train_skip.npy", kept)


def tokenize(settings: Settings, space: Workspace, workers: Workers, parts: dict) -> dict:
    """Stage 3: trains tokenizer/spm.model, or copies the given tokenizer."""
    folder = space.partial / "tokenizer"
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir()
    if settings.tokenizer is not None:
        for name in (MODEL, DICTIONARY, MANIFEST):
            shutil.copyfile(settings.tokenizer.folder / name, folder / name)
        return {"seconds": 0.0, "trained": False}
    progress = Progress(f"train a tokenizer of {settings.vocab_size} pieces")
    source = space.work / "train.txt"
    arguments = (source, parts["train_sentences"], source.stat().st_size, settings.sample_sentences, settings.vocab_size)
    model = workers.call(tokenizer_training.train_model, *arguments, beat=progress.beat)
    (folder / MODEL).write_bytes(model)
    return {"seconds": progress.finish(), "trained": True}


def encode(settings: Settings, space: Workspace, workers: Workers, parts: dict) -> dict:
    """Stage 4. Writes the datasets, and the dictionary with its counts; returns sentences, tokens and rates of both parts."""
    folder = space.partial / "tokenizer"
    symbols = _symbols(folder / MODEL)
    if parts["train_sentences"] < settings.shards:
        raise TupeError(f"{parts['train_sentences']} sentences can't fill {settings.shards} shards: give a smaller --shards")
    total = sum((space.work / f"{part}.txt").stat().st_size for part in ("train", "valid"))
    progress = Progress("encode", total)
    for old in (*space.partial.glob("shard*"), *space.partial.glob("*.bin"), *space.partial.glob("*.idx")):
        shutil.rmtree(old) if old.is_dir() else old.unlink()  # of an earlier try with other settings
    targets = [space.partial / f"shard{i}" if settings.shards > 1 else space.partial for i in range(settings.shards)]
    for target in targets:
        target.mkdir(exist_ok=True)
    result = {}
    for part, places in (("valid", targets[:1]), ("train", targets)):
        skip = space.work / f"{part}_skip.npy"
        leave_out = str(skip) if np.load(skip, mmap_mode="r").size else ""
        writers = [DatasetWriter(place / part, len(symbols) + OFFSET + 1) for place in places]
        block = max(1, min(1000, parts[f"{part}_sentences"] // len(writers)))
        counts = np.zeros(len(symbols) + OFFSET, dtype=np.int64)
        left_out = sentences = 0
        ranges = [(*piece, str(folder / MODEL), leave_out) for piece in corpus_stages.line_ranges(space.work / f"{part}.txt")]
        for piece, found in zip(ranges, workers.map(corpus_stages.encode_range, ranges), strict=True):
            ids, sizes, skipped = found
            _deal(writers, ids, sizes, sentences, block)
            counts += np.bincount(ids, minlength=len(counts))
            sentences += len(sizes)
            left_out += skipped
            progress.update(progress.done + piece[2] - piece[1])
        for writer in writers:
            writer.finish()
        if min(writer.sentences for writer in writers) == 0:
            cure = "give a smaller --shards" if len(writers) > 1 else "the corpus repeats one sentence"
            raise TupeError(f"{sentences} sentences can't fill the {part} data ({len(writers)} shards): {cure}")
        result[part] = _part_report(counts, symbols, sentences, left_out)
    for target in targets[1:]:
        for ending in ("bin", "idx"):
            shutil.copyfile(targets[0] / f"valid.{ending}", target / f"valid.{ending}")
    if settings.tokenizer is None:
        write_dictionary(folder / DICTIONARY, symbols, counts[OFFSET:].tolist())
        write_manifest(folder, settings.text.cleaning, {"model_type": "bpe", "byte_fallback": True, "normalization": "identity"})
    for target in {space.partial, *targets}:
        shutil.copyfile(folder / DICTIONARY, target / DICTIONARY)
    return {**result, "seconds": progress.finish()}


def _symbols(model: Path) -> list[str]:
    import sentencepiece

    from fairseq_tupe.data.dictionaries import dictionary_symbols

    processor = sentencepiece.SentencePieceProcessor(model_file=str(model))
    return dictionary_symbols([processor.id_to_piece(i) for i in range(processor.get_piece_size())], str(model))


def _deal(writers: list[DatasetWriter], ids: np.ndarray, sizes: np.ndarray, first: int, block: int) -> None:
    """Gives sentences to the shards in turn, `block` at a time; `first` is the number of the first one in the corpus."""
    if len(writers) == 1:
        writers[0].add(ids, sizes)
        return
    ends = np.concatenate(([0], np.cumsum(sizes)))
    start = 0
    while start < len(sizes):
        end = min(len(sizes), start + block - (first + start) % block)
        writers[(first + start) // block % len(writers)].add(ids[ends[start] : ends[end]], sizes[start:end])
        start = end


def _part_report(counts: np.ndarray, symbols: list[str], sentences: int, left_out: int) -> dict:
    tokens = int(counts.sum()) - sentences  # without the </s> of each
    by_bytes = sum(int(count) for symbol, count in zip(symbols, counts[OFFSET:], strict=True) if symbol.startswith("<0x"))
    return {
        "sentences": sentences,
        "tokens": tokens,
        "unknown_rate": int(counts[3]) / max(1, tokens),
        "byte_piece_rate": by_bytes / max(1, tokens),
        "left_out_in_both": left_out,
    }

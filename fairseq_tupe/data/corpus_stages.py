"""The parts of the pretraining pipeline that run in worker processes, each on about a megabyte of text.

Between stages a line of the corpus is a record: its sentences, with a tab between them (cleaning leaves no tabs).
"""

from collections import Counter
from dataclasses import dataclass
from itertools import chain
from pathlib import Path

import numpy as np
import sentencepiece

from fairseq_tupe.data import cleaning, line_filters, sentences
from fairseq_tupe.data.dictionaries import FAIRSEQ_SPECIALS, fairseq_ids
from fairseq_tupe.data.hashing import hash_lines, reseed
from fairseq_tupe.data.text_input import MAX_BAD_SHARE, bad_share
from fairseq_tupe.errors import TupeError

SEPARATOR = "\t"


@dataclass(frozen=True)
class TextOptions:
    """Everything that decides what a row of input becomes; see `pretraining_corpus` for the switches."""

    cleaning: cleaning.CleaningOptions
    filters: line_filters.LineFilterOptions
    split_sentences: bool = True
    join_short: bool = True
    min_sentence_chars: int = 20


def clean_rows(rows: list[bytes], source: str, first_row: int, options: TextOptions) -> tuple[list[bytes], np.ndarray, dict]:
    """Rows of one file to records, their hashes and counts of what happened.

    Raises:
        TupeError: naming `source`, for rows that are mostly not UTF-8, or not all UTF-8 where repair is off.
    """
    counts: Counter = Counter()
    records = []
    dropped_bytes = 0
    for number, raw in enumerate(rows):
        try:
            text, lost = cleaning.decode_line(raw, options.cleaning)
        except UnicodeDecodeError as error:
            where = f"line {first_row + number}, byte {error.start}"
            raise TupeError(f"{source}: {where} is not UTF-8 ({error.reason}); --no-repair was given") from None
        if lost:
            dropped_bytes += lost
            counts["repaired_lines"] += 1
        record, reason = make_record(text, options)
        if reason:
            counts[reason] += 1
        else:
            records.append(record.encode("utf-8"))
            counts["words"] += record.count(" ") + record.count(SEPARATOR) + 1
    if dropped_bytes and bad_share(b"\n".join(rows)) > MAX_BAD_SHARE:
        where = f"lines {first_row} to {first_row + len(rows) - 1}"
        raise TupeError(f"{source}: {where} are mostly not UTF-8: binary data, or text in another encoding")
    counts["dropped_bytes"] = dropped_bytes
    return records, hash_lines(records), dict(counts)


def make_record(text: str, options: TextOptions) -> tuple[str, str | None]:
    """One decoded row to its record, or to the reason why it is left out."""
    line = cleaning.normalize(text, options.cleaning)
    reason = line_filters.why_dropped(text, line, options.filters)
    if reason:
        return "", reason
    if options.cleaning.placeholders:
        line = cleaning.replace_names(line)
    parts = sentences.split_sentences(line) if options.split_sentences else [line]
    if options.join_short:
        parts = sentences.join_short(parts)
    parts = [cleaning.lower(part, options.cleaning) for part in parts]
    parts = [part for part in parts if sentences.keep_sentence(part, options.min_sentence_chars)]
    return SEPARATOR.join(parts), None if parts else "no_sentence"


def read_range(path: str, start: int, end: int) -> bytes:
    """Bytes `start` to `end` of a file."""
    with open(path, "rb") as stream:
        stream.seek(start)
        return stream.read(end - start)


def line_ranges(path: Path, step: int = 1 << 20) -> list[tuple[str, int, int]]:
    """Cuts a file at ends of lines into ranges of about `step` bytes: (path, start, end)."""
    ranges, start, size = [], 0, path.stat().st_size
    with open(path, "rb") as stream:
        while start < size:
            stream.seek(min(start + step, size) - 1)
            stream.readline()
            end = stream.tell()
            ranges.append((str(path), start, end))
            start = end
    return ranges


def count_words(path: str, start: int, end: int) -> tuple[np.ndarray, np.ndarray]:
    """Word counts of a range of records, for `line_filters.WordCounts.add`."""
    return line_filters.WordCounts.count(read_range(path, start, end).decode("utf-8"))


@dataclass(frozen=True)
class SplitOptions:
    """How records are divided: those with a reseeded hash below `threshold` are held out.

    Attributes:
        rare_counts: a file with the array of `WordCounts`, "" for no filter of rare words.
        rare_below: a word that occurs fewer times is rare.
        rare_share: a record with a larger share of rare words is left out.
    """

    seed: int
    threshold: int
    rare_counts: str = ""
    rare_below: int = 3
    rare_share: float = 0.3


def split_records(path: str, start: int, end: int, options: SplitOptions) -> dict:
    """A range of records to sentences, one a line, of the training and of the held-out part.

    Returns:
        train, valid (bytes), train_lines, valid_lines, train_sentences, valid_sentences, rare_words (records left out for it),
        smallest (the smallest reseeded hash of a kept record).
    """
    records = read_range(path, start, end).split(b"\n")[:-1]
    kept = records
    if options.rare_counts:
        counts = line_filters.WordCounts(np.load(options.rare_counts, mmap_mode="r"))
        words = [record.decode("utf-8").split() for record in records]
        rare = counts.rare({word for line in words for word in line}, options.rare_below)
        kept = [
            record
            for record, line in zip(records, words, strict=True)
            if not line_filters.has_many_rare_words(line, rare, options.rare_share)
        ]
    hashes = reseed(hash_lines(kept), options.seed)
    held_out = hashes < np.uint64(options.threshold)
    parts = {True: [], False: []}
    for record, valid in zip(kept, held_out.tolist(), strict=True):
        parts[valid].append(record)
    result = {"rare_words": len(records) - len(kept), "smallest": int(hashes.min()) if len(hashes) else None}
    for name, lines in (("train", parts[False]), ("valid", parts[True])):
        text = b"".join(line.replace(b"\t", b"\n") + b"\n" for line in lines)
        result[name] = text
        result[f"{name}_lines"] = len(lines)
        result[f"{name}_sentences"] = text.count(b"\n")
    return result


def find_known(path: str, start: int, end: int, known: str) -> np.ndarray:
    """Those of the hashes in the file `known` that a range of sentences holds."""
    return np.intersect1d(hash_lines(read_range(path, start, end).split(b"\n")[:-1]), np.load(known))


class WordEncoder:
    """sentencepiece's ids, as fairseq's, of cleaned sentences, each distinct word encoded once: five times as fast.

    No piece of our models reaches over a space, so a sentence is its words one behind the other (a test compares). For a model
    where one does, whole sentences are encoded.
    """

    _MAX_WORDS = 500_000

    def __init__(self, model: str):
        self._processor = sentencepiece.SentencePieceProcessor(model_file=model)
        pieces = [self._processor.id_to_piece(i) for i in range(self._processor.get_piece_size())]
        self._table = fairseq_ids(pieces, model).astype(np.uint32)
        self._by_word = not any("\u2581" in piece[1:] for piece in pieces)
        self._known: dict[str, bytes] = {}  # word -> its ids as bytes, which join faster than lists

    def encode(self, sentences: list[str]) -> tuple[np.ndarray, np.ndarray]:
        """Returns ids uint32 (total,), </s> at the end of each sentence, and sizes int32 (sentences,)."""
        units = [sentence.split(" ") if self._by_word else [sentence] for sentence in sentences]
        if len(self._known) > self._MAX_WORDS or not self._by_word:
            self._known.clear()
        new = list(set(chain.from_iterable(units)).difference(self._known))
        for unit, ids in zip(new, self._processor.encode(new, num_threads=1), strict=True):
            self._known[unit] = self._table[ids].tobytes()
        look_up = self._known.__getitem__
        lines = [b"".join(map(look_up, line)) for line in units]
        end = np.uint32(FAIRSEQ_SPECIALS["</s>"]).tobytes()
        ids = np.frombuffer(end.join([*lines, b""]), dtype=np.uint32)
        return ids, np.fromiter(map(len, lines), dtype=np.int32, count=len(lines)) // 4 + 1


_ENCODERS: dict[str, WordEncoder] = {}


def encode_range(path: str, start: int, end: int, model: str, leave_out: str) -> tuple[np.ndarray, np.ndarray, int]:
    """A range of sentences to fairseq ids, </s> behind each.

    Args:
        model: the spm.model file.
        leave_out: a file with sorted hashes of sentences to leave out, "" for none.

    Returns:
        ids uint32 (total,), sizes int32 (sentences,), and how many sentences were left out.
    """
    lines = read_range(path, start, end).split(b"\n")[:-1]
    total = len(lines)
    if leave_out:
        known = np.isin(hash_lines(lines), np.load(leave_out))
        lines = [line for line, skip in zip(lines, known.tolist(), strict=True) if not skip]
    if model not in _ENCODERS:
        _ENCODERS[model] = WordEncoder(model)
    ids, sizes = _ENCODERS[model].encode([line.decode("utf-8") for line in lines])
    return ids, sizes, total - len(lines)

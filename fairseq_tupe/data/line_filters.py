"""Which lines of a corpus are left out, and why: length, share of letters, remains of tables and formulas, rare words.

The thresholds are the original's (guolinke/TUPE, preprocess/pretrain), but letters of every script count, not only a to z,
and `min_chars` may be lower than its 50 (see `pretraining_corpus`).
"""

import string
import zlib
from collections import Counter
from dataclasses import dataclass

import numpy as np

_ASCII_LETTERS = string.ascii_letters.encode()


@dataclass(frozen=True)
class LineFilterOptions:
    """Switches and thresholds.

    Attributes:
        length: leave out lines of fewer than `min_chars` or more than `max_chars` characters.
        letters: leave out lines with fewer than `min_chars` letters, or where less than `min_letter_share` of the
            characters are letters.
        tables: leave out lines that start with a bar or where more than one character in 20 is a bar.
        maths: leave out lines where more than one character in 20 is a backslash.
    """

    length: bool = True
    letters: bool = True
    tables: bool = True
    maths: bool = True
    min_chars: int = 50
    max_chars: int = 1_000_000
    min_letter_share: float = 0.7
    max_symbol_share: float = 0.05


REASONS = ("empty", "too_short", "too_long", "maths", "table", "few_letters")


def count_letters(text: str) -> int:
    """Number of letters, of any script, in `text`."""
    if text.isascii():
        return len(text) - len(text.encode().translate(None, _ASCII_LETTERS))
    return sum(map(str.isalpha, text))


def why_dropped(raw: str, text: str, options: LineFilterOptions) -> str | None:
    """The reason to leave a line out, one of `REASONS`, or None to keep it.

    Args:
        raw: the line as it was read: backslashes and bars are counted here, since cleaning removes some.
        text: the same line after `cleaning.normalize`.
    """
    length = len(text)
    if not length:
        return "empty"
    if options.length and length < options.min_chars:
        return "too_short"
    if options.length and length > options.max_chars:
        return "too_long"
    if options.maths and "\\" in raw and raw.count("\\") > options.max_symbol_share * len(raw):
        return "maths"
    if options.tables and "|" in text and (text[0] == "|" or text.count("|") > options.max_symbol_share * length):
        return "table"
    if options.letters:
        letters = count_letters(text)
        if letters < options.min_letter_share * length or (options.length and letters < options.min_chars):
            return "few_letters"
    return None


class WordCounts:
    """How often each word of a corpus occurs, in 16 MB whatever the corpus holds.

    Words share 2**22 counters by their hash, so a count may be too high, never too low: with tens of millions of distinct
    words fewer lines are left out than an exact count would.
    """

    cells = 1 << 22

    def __init__(self, counts: np.ndarray | None = None):
        self.counts = np.zeros(self.cells, dtype=np.uint32) if counts is None else counts

    @classmethod
    def count(cls, text: str) -> tuple[np.ndarray, np.ndarray]:
        """Counters to raise, and by how much, for the words of `text` (the part a worker does)."""
        words = Counter(text.split())
        cells = np.fromiter(map(cls._cell, words), dtype=np.uint32, count=len(words))
        return cells, np.fromiter(words.values(), dtype=np.uint32, count=len(words))

    def add(self, cells: np.ndarray, amounts: np.ndarray) -> None:
        """Adds `count`'s result."""
        np.add.at(self.counts, cells, amounts)

    def rare(self, words: set[str], fewer_than: int) -> set[str]:
        """Those of `words` that occur fewer than `fewer_than` times."""
        ordered = list(words)
        cells = np.fromiter(map(self._cell, ordered), dtype=np.uint32, count=len(ordered))
        return {ordered[i] for i in np.flatnonzero(self.counts[cells] < fewer_than)}

    @classmethod
    def _cell(cls, word: str) -> int:
        return zlib.crc32(word.encode()) & (cls.cells - 1)


def has_many_rare_words(words: list[str], rare: set[str], max_share: float) -> bool:
    """True where more than `max_share` of a line's words are in `rare`."""
    return not rare.isdisjoint(words) and sum(word in rare for word in words) > max_share * len(words)

"""Between a sentencepiece vocabulary and a fairseq dict.txt.

fairseq puts its own four specials first (<s> 0, <pad> 1, </s> 2, <unk> 3), so row i of dict.txt (from 0) is token i + 4. A
sentencepiece vocabulary has specials of its own, in any place: they are left out of dict.txt by name. A task adds <mask> last.
"""

from collections.abc import Sequence
from pathlib import Path

import numpy as np

from fairseq_tupe.errors import TupeError

FAIRSEQ_SPECIALS = {"<s>": 0, "<pad>": 1, "</s>": 2, "<unk>": 3}
OFFSET = len(FAIRSEQ_SPECIALS)
MASK = "<mask>"


def dictionary_symbols(pieces: Sequence[str], source: str = "vocabulary") -> list[str]:
    """The rows of dict.txt for a sentencepiece vocabulary: all pieces in order but the specials, wherever those stand.

    Raises:
        TupeError: for a piece that occurs twice or would break a row (a blank or an end of line in it, or nothing).
    """
    symbols, seen = [], set()
    for number, piece in enumerate(pieces):
        if piece in FAIRSEQ_SPECIALS or piece == MASK:
            continue
        if piece in seen:
            raise TupeError(f"{source}: piece {number}, {piece!r}, occurs twice; a dictionary needs distinct symbols")
        if piece.split() != [piece]:
            raise TupeError(f"{source}: piece {number}, {piece!r}, is empty or holds a blank, so it can't be a row of dict.txt")
        seen.add(piece)
        symbols.append(piece)
    return symbols


def fairseq_ids(pieces: Sequence[str], source: str = "vocabulary") -> np.ndarray:
    """fairseq's id of each sentencepiece id: int64, shape (number of pieces,)."""
    rows = {symbol: row + OFFSET for row, symbol in enumerate(dictionary_symbols(pieces, source))}
    rows.update(FAIRSEQ_SPECIALS)
    rows[MASK] = FAIRSEQ_SPECIALS["<unk>"]  # never made from text
    return np.array([rows[piece] for piece in pieces], dtype=np.int64)


def read_sentencepiece_vocab(path: Path) -> list[str]:
    """The pieces of a sentencepiece `.vocab` file (piece, tab, score), in order."""
    pieces = []
    for number, row in enumerate(_rows(path), start=1):
        piece, tab, score = row.rpartition("\t")
        if not tab or not piece or not _is_number(score):
            raise TupeError(f"{path}: line {number} is {row!r}, expected a piece, a tab and a score")
        pieces.append(piece)
    return pieces


def _is_number(text: str) -> bool:
    try:
        float(text)
    except ValueError:
        return False
    return True


def _rows(path: Path) -> list[str]:
    try:
        text = Path(path).read_bytes().decode("utf-8")
    except FileNotFoundError:
        raise TupeError(f"{path}: no such file") from None
    except UnicodeDecodeError as error:
        raise TupeError(f"{path}: not UTF-8 ({error.reason} at byte {error.start})") from None
    rows = text.split("\n")  # not splitlines: a symbol may be a character that Unicode calls a line separator
    if rows and not rows[-1]:
        rows.pop()
    return [row.removesuffix("\r") for row in rows]


def write_dictionary(path: Path, symbols: Sequence[str], counts: Sequence[int]) -> None:
    """Writes dict.txt: one `symbol count` a row, in the given order (fairseq sorts nothing when it loads)."""
    assert len(symbols) == len(counts)
    with open(path, "w", encoding="utf-8", newline="\n") as stream:
        stream.writelines(f"{symbol} {int(count)}\n" for symbol, count in zip(symbols, counts, strict=True))


def read_dictionary(path: Path) -> tuple[list[str], list[int]]:
    """Symbols and counts of a dict.txt.

    Raises:
        TupeError: with file and line, for a row that is no symbol and whole number, or a symbol that occurs twice or is one
            of fairseq's own.
    """
    symbols, counts, first_seen = [], [], {}
    for number, row in enumerate(_rows(path), start=1):
        symbol, _, count = row.rpartition(" ")
        if not symbol or symbol.split() != [symbol] or not (count.isascii() and count.isdigit()):
            raise TupeError(f"{path}: line {number} is {row!r}, expected a symbol, one space and a whole number")
        if symbol in FAIRSEQ_SPECIALS:
            raise TupeError(f"{path}: line {number} is {symbol}, which fairseq adds itself; leave it out")
        if symbol in first_seen:
            raise TupeError(f"{path}: line {number} repeats {symbol!r} of line {first_seen[symbol]}")
        first_seen[symbol] = number
        symbols.append(symbol)
        counts.append(int(count))
    if not symbols:
        raise TupeError(f"{path}: the dictionary is empty")
    return symbols, counts

"""Text files in: plain, gzip, xz or bzip2 by their content, read in blocks, a row ending at LF or CRLF and nowhere else."""

import bz2
import gzip
import lzma
import stat
import zlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO

from fairseq_tupe.errors import TupeError

# A longer row is cut, at the end of a sentence where there is one, so that memory stays bounded.
MAX_ROW_BYTES = 100_000
_READ_BYTES = 1 << 18
_PROBE_BYTES = 1 << 18
_TERMINATORS = tuple(b"%c" % c for c in b".!?:;\"')]*") + ("\u201d".encode(), "\u2019".encode())
MAX_BAD_SHARE = 0.3
_CONTROL_BYTES = bytes(set(range(32)) - set(b"\t\n\r\x0b\x0c\x1c\x1d\x1e\x1f")) + b"\x7f"
_UTF16_MARKS = (b"\xff\xfe", b"\xfe\xff")
_UTF8_MARK = b"\xef\xbb\xbf"
_REFUSED_KINDS = {b"\x28\xb5\x2f\xfd": "zstd", b"PK\x03\x04": "zip", b"%PDF-": "PDF", b"7z\xbc\xaf": "7z"}


def compression_of(path: Path) -> str:
    """"gzip", "xz", "bzip2" or "plain", by the first bytes of the file; refuses other archives by name."""
    with open(path, "rb") as stream:
        start = stream.read(10)
    if start.startswith(b"\x1f\x8b"):
        return "gzip"
    if start.startswith(b"\xfd7zXZ\x00"):
        return "xz"
    if start.startswith(b"BZh") and start[4:10] in (b"1AY&SY", b"\x17rE8P\x90"):
        return "bzip2"
    for magic, name in _REFUSED_KINDS.items():
        if start.startswith(magic):
            raise TupeError(f"{path}: this is a {name} file, expected plain text, gzip, xz or bzip2; unpack it first")
    return "plain"


def _unpacked(path: Path, raw: BinaryIO) -> BinaryIO:
    opener = {"gzip": gzip.GzipFile, "xz": lzma.LZMAFile, "bzip2": bz2.BZ2File}.get(compression_of(path))
    if opener is None:
        return raw
    return gzip.GzipFile(fileobj=raw) if opener is gzip.GzipFile else opener(raw)


def read_blocks(path: Path, on_position: Callable[[int], None] | None = None) -> Iterator[bytes]:
    """The unpacked bytes in blocks; `on_position` hears how many bytes of the file itself were read.

    Raises:
        TupeError: where the compressed stream is cut short or damaged.
    """
    done = 0
    with open(path, "rb") as raw, _unpacked(path, raw) as stream:
        while True:
            try:
                block = stream.read(_READ_BYTES)
            except EOFError:
                raise TupeError(f"{path}: the compressed stream ends too early, after {done:,} bytes of text") from None
            except (zlib.error, lzma.LZMAError, gzip.BadGzipFile) as error:
                raise TupeError(f"{path}: the compressed stream is damaged after {done:,} bytes of text ({error})") from None
            except OSError as error:
                if error.errno is not None:  # a real input error; bz2 reports damage as an OSError without a number
                    raise
                raise TupeError(f"{path}: the compressed stream is damaged after {done:,} bytes of text ({error})") from None
            if on_position is not None:
                on_position(raw.tell())
            if not block:
                return
            if not done and block.startswith(_UTF8_MARK):
                block = block[len(_UTF8_MARK) :]
            done += len(block)
            yield block


def read_rows(path: Path, on_position: Callable[[int], None] | None = None) -> Iterator[list[bytes]]:
    """The rows of a file in lists of a few hundred kilobytes, without their LF; a CR before it may be left on.

    A row over `MAX_ROW_BYTES` comes in several pieces. Raises TupeError with file and row for a NUL byte.
    """
    rest, number = b"", 0
    for block in read_blocks(path, on_position):
        if b"\0" in block:
            row = number + (rest + block).split(b"\0")[0].count(b"\n") + 1
            raise TupeError(f"{path}: line {row} holds a NUL byte, so this is not text in UTF-8 (UTF-16 or a binary file?)")
        rows = (rest + block).split(b"\n")
        rest = rows.pop()
        number += len(rows)
        if len(rest) > MAX_ROW_BYTES:
            pieces = cut_row(rest)
            rest = pieces.pop()
            rows += pieces
        yield [piece for row in rows for piece in (cut_row(row) if len(row) > MAX_ROW_BYTES else (row,))]
    if rest:
        yield cut_row(rest)


def cut_row(row: bytes) -> list[bytes]:
    """Pieces of at most `MAX_ROW_BYTES`: cut after a sentence, else at a blank, else between two characters."""
    pieces = []
    start = 0
    while len(row) - start > MAX_ROW_BYTES:
        window = row[start : start + MAX_ROW_BYTES]
        end = max(window.rfind(mark, MAX_ROW_BYTES // 2) for mark in (b". ", b"! ", b"? ")) + 2
        if end < 2:
            end = window.rfind(b" ") + 1
        if end < 1:
            end = MAX_ROW_BYTES
            while end > MAX_ROW_BYTES - 4 and row[start + end] & 0xC0 == 0x80:  # a byte inside a character
                end -= 1
        pieces.append(row[start : start + end])
        start += end
    pieces.append(row[start:])
    return pieces


@dataclass(frozen=True)
class Probe:
    """What the beginning of a file looks like.

    Attributes:
        mean_row: mean length in bytes of the rows that are not blank.
        width: the length that 9 of 10 rows do not exceed.
        wrapped: share of rows of 50 to 80 bytes.
        unended: share of rows that do not end a sentence.
    """

    mean_row: float
    width: int
    wrapped: float
    unended: float

    @property
    def hard_wrapped(self) -> bool:
        """True where most rows have the length of a printed line and stop in mid-sentence."""
        return self.wrapped > 0.5 and self.unended > 0.5 and self.width <= 90


def probe(path: Path) -> Probe:
    """Reads the first quarter of a megabyte; raises TupeError for what is no readable, non-empty text file."""
    if not path.exists():
        raise TupeError(f"{path}: no such file")
    mode = path.stat().st_mode
    if not stat.S_ISREG(mode):
        raise TupeError(f"{path}: this is a {'folder' if stat.S_ISDIR(mode) else 'special file'}, expected a text file")
    start = b""
    for block in read_blocks(path):
        start += block
        if len(start) >= _PROBE_BYTES:
            break
    if not start.strip():
        raise TupeError(f"{path}: the file is empty")
    if start.startswith(_UTF16_MARKS):
        raise TupeError(f"{path}: this is UTF-16, expected UTF-8; convert it: iconv -f UTF-16 -t UTF-8")
    if b"\0" in start:
        row = start.split(b"\0")[0].count(b"\n") + 1
        raise TupeError(f"{path}: line {row} holds a NUL byte, so this is not text in UTF-8 (UTF-16 or a binary file?)")
    if bad_share(start) > MAX_BAD_SHARE:
        raise TupeError(f"{path}: {bad_share(start):.0%} of the first bytes are not UTF-8: binary, or in another encoding")
    rows = [row.strip() for row in start.split(b"\n")]
    rows = [row for row in rows[: max(1, len(rows) - 1)] if row]  # the last one may be cut
    if not rows:
        return Probe(0.0, 0, 0.0, 0.0)
    lengths = sorted(map(len, rows))
    return Probe(
        mean_row=sum(lengths) / len(lengths),
        width=lengths[len(lengths) * 9 // 10],
        wrapped=sum(50 <= length <= 80 for length in lengths) / len(lengths),
        unended=sum(not row.endswith(_TERMINATORS) for row in rows) / len(lengths),
    )


def bad_share(data: bytes) -> float:
    """Share of the bytes of `data` that are neither UTF-8 nor plain text (control characters), between 0 and 1."""
    lost = len(data) - len(data.decode("utf-8", errors="ignore").encode("utf-8"))
    controls = len(data) - len(data.translate(None, _CONTROL_BYTES))
    return (lost + controls) / max(1, len(data))


def unwrap(batches: Iterator[list[bytes]], width: int) -> Iterator[list[bytes]]:
    """Joins hard-wrapped rows into paragraphs.

    A paragraph ends at a blank row, at a row shorter than two thirds of `width` (its last line, a heading, a speaker's
    name), or where it has grown over `MAX_ROW_BYTES`.
    """
    paragraph: list[bytes] = []
    size = 0
    for rows in batches:
        done = []
        for row in rows:
            text = row.strip()
            if text:
                paragraph.append(text)
                size += len(text) + 1
            if paragraph and (len(text) * 3 < width * 2 or size > MAX_ROW_BYTES):
                done.append(b" ".join(paragraph))
                paragraph, size = [], 0
        yield done
    if paragraph:
        yield [b" ".join(paragraph)]

"""fairseq's memory-mapped dataset files (.bin and .idx), written in bounded memory.

The bytes are those of fairseq's `MMapIndexedDatasetBuilder`, which a test compares. That class keeps the sizes and offsets of
all sentences in Python lists, some 70 bytes a sentence, and takes one tensor at a time; this one takes whole batches.
"""

import os
import struct
from pathlib import Path

import numpy as np

_MAGIC = b"MMIDIDX\x00\x00"
_DTYPE_CODES = {np.uint16: 8, np.uint32: 9}
_COPY = 1 << 20


def id_dtype(dictionary_size: int) -> type:
    """The type fairseq picks for a dictionary of that size."""
    return np.uint16 if dictionary_size < 65500 else np.uint32


class DatasetWriter:
    """Writes PREFIX.bin and PREFIX.idx; `finish` makes them complete."""

    def __init__(self, prefix: Path, dictionary_size: int):
        self.dtype = id_dtype(dictionary_size)
        self.sentences = 0
        self.tokens = 0
        self._prefix = str(prefix)
        self._data = open(self._prefix + ".bin", "wb")  # noqa: SIM115
        self._sizes = open(self._prefix + ".sizes", "wb+")  # noqa: SIM115

    def add(self, ids: np.ndarray, sizes: np.ndarray) -> None:
        """Adds sentences: `ids` (total,) one behind the other, `sizes` (sentences,) their lengths."""
        self._data.write(np.ascontiguousarray(ids, dtype=self.dtype).data)
        self._sizes.write(np.ascontiguousarray(sizes, dtype="<i4").data)
        self.sentences += len(sizes)
        self.tokens += len(ids)

    def finish(self) -> None:
        """Writes the index: magic, version, type, count, then int32 sizes and int64 byte offsets of all sentences."""
        self._data.close()
        self._sizes.flush()
        with open(self._prefix + ".idx", "wb") as index:
            index.write(_MAGIC + struct.pack("<QBQ", 1, _DTYPE_CODES[self.dtype], self.sentences))
            self._sizes.seek(0)
            while block := self._sizes.read(4 * _COPY):
                index.write(block)
            self._sizes.seek(0)
            position = 0
            while block := self._sizes.read(4 * _COPY):
                ends = position + np.cumsum(np.frombuffer(block, dtype="<i4"), dtype=np.int64) * self.dtype().itemsize
                index.write(np.concatenate(([position], ends[:-1])).astype("<i8").data)
                position = int(ends[-1])
        self._sizes.close()
        os.remove(self._prefix + ".sizes")

"""Line hashes: de-duplication in 8 bytes a distinct line, and a held-out split that does not depend on the line's place."""

from collections.abc import Iterable
from hashlib import blake2b

import numpy as np


def hash_lines(lines: Iterable[bytes]) -> np.ndarray:
    """64-bit hashes, uint64, the same on every machine and in every run."""
    return np.frombuffer(b"".join([blake2b(line, digest_size=8).digest() for line in lines]), dtype="<u8")


def reseed(hashes: np.ndarray, seed: int) -> np.ndarray:
    """Other hashes of the same lines, one set a seed, spread evenly over 64 bits (the finalizer of splitmix64)."""
    x = hashes ^ np.uint64((seed * 0x9E3779B97F4A7C15 + 0x632BE59BD9B4E019) & 0xFFFFFFFFFFFFFFFF)
    x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return x ^ (x >> np.uint64(31))


class HashSet:
    """A growing set of 64-bit hashes in sorted arrays: 8 bytes each, and a 16th more for a moment while arrays are merged.

    Two different lines share a hash with a chance of 1 in 2,000 for a corpus of 130 million lines.
    """

    _PARTS_BITS = 4

    def __init__(self):
        parts = 1 << self._PARTS_BITS
        self._runs: list[list[np.ndarray]] = [[] for _ in range(parts)]
        self._starts = (np.arange(parts, dtype=np.uint64) << np.uint64(64 - self._PARTS_BITS)).astype(np.uint64)

    def __len__(self) -> int:
        return sum(run.size for runs in self._runs for run in runs)

    def add(self, hashes: np.ndarray) -> np.ndarray:
        """Adds uint64 hashes (N,); returns bool (N,), True where a hash was not in the set nor earlier in `hashes`."""
        unique, first = np.unique(hashes, return_index=True)
        fresh = np.ones(len(unique), dtype=bool)
        bounds = np.append(np.searchsorted(unique, self._starts), len(unique))
        for runs, low, high in zip(self._runs, bounds, bounds[1:], strict=False):
            if low == high:
                continue
            part = unique[low:high]
            for run in runs:
                fresh[low:high] &= run[np.minimum(np.searchsorted(run, part), run.size - 1)] != part
            part = part[fresh[low:high]]
            if part.size:
                self._append(runs, part)
        result = np.zeros(len(hashes), dtype=bool)
        result[first[fresh]] = True
        return result

    @staticmethod
    def _append(runs: list[np.ndarray], part: np.ndarray) -> None:
        runs.append(part)
        while len(runs) > 1 and runs[-1].size * 2 > runs[-2].size:  # few runs, each at least twice the next
            merged = np.concatenate((runs.pop(), runs.pop()))
            merged.sort(kind="stable")
            runs.append(merged)

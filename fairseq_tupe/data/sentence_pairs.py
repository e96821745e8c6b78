"""``<s> A </s> </s> B </s>``: the one formatter of sentences and pairs, and the fairseq dataset built on it.

Training, validation and the hub interface all go through :class:`PairFormat`, so the same pair gives the same ids everywhere.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from fairseq.data import FairseqDataset, data_utils
from torch import Tensor

from fairseq_tupe.errors import TupeError


def pair_lengths(first: Any, second: Any, budget: int) -> tuple[Any, Any]:
    """Numbers of tokens that stay of two sentences so that both together fit ``budget``; works on integers and on arrays.

    The longer one loses its last token until they fit, on a tie the second one (Hugging Face's ``longest_first``). In closed
    form: a sentence no longer than its half stays whole, and the odd token of the budget is the first one's.
    """
    half = (budget + 1) // 2
    first_kept = np.minimum(first, np.maximum(budget - second, half))
    return first_kept, np.minimum(second, budget - first_kept)


@dataclass(frozen=True)
class PairFormat:
    """How one or two sentences become one row of ids.

    Args:
        bos: id in column 0, or None for no such token.
        eos: id that ends every sentence.
        separator: id between the sentences of a pair, or None.
        max_length: longest row in tokens, special ones included; None for no limit.
    """

    bos: int | None
    eos: int
    separator: int | None
    max_length: int | None = None

    def special_tokens(self, sentences: int) -> int:
        """Number of tokens of a row that are not content."""
        return (self.bos is not None) + sentences + (sentences - 1) * (self.separator is not None)

    def kept_lengths(self, first: Any, second: Any = None) -> tuple[Any, Any]:
        """Content tokens that stay of each sentence (integers or arrays); the second is None for single sentences.

        Raises:
            TupeError: not even the special tokens fit ``max_length``.
        """
        if self.max_length is None:
            return first, second
        budget = self.max_length - self.special_tokens(1 if second is None else 2)
        if budget < 1:
            raise TupeError(
                f"a row of at most {self.max_length} tokens has no room for content beside its special tokens: "
                "raise --max-positions"
            )
        if second is None:
            return np.minimum(first, budget), None
        return pair_lengths(first, second, budget)

    def row_lengths(self, first: Any, second: Any = None) -> Any:
        """Length of the rows that :meth:`__call__` returns, from the numbers of content tokens."""
        first, second = self.kept_lengths(first, second)
        return first + self.special_tokens(1) if second is None else first + second + self.special_tokens(2)

    def __call__(self, first: Sequence[int], second: Sequence[int] | None = None) -> Tensor:
        """One row of ids, a LongTensor (T,), of sentences without special tokens; long content is cut at its end.

        Every ``</s>`` stays. A single sentence is cut too. An empty sentence is one without content.
        """
        first_kept, second_kept = self.kept_lengths(len(first), None if second is None else len(second))
        row = [] if self.bos is None else [self.bos]
        row += [*first[:first_kept], self.eos]
        if second is not None:
            row += [] if self.separator is None else [self.separator]
            row += [*second[:second_kept], self.eos]
        return torch.tensor(row, dtype=torch.long)


def load_indexed(path: str | Path, dictionary: Any, combine: bool = False) -> Any:
    """The indexed dataset ``path.bin``; ``combine`` appends ``path1.bin``, ``path2.bin`` and so on.

    Raises:
        TupeError: a file is missing or damaged.
    """
    path = Path(path)
    missing = [f"{path}{ending}" for ending in (".idx", ".bin") if not Path(f"{path}{ending}").is_file()]
    if missing:
        splits = ", ".join(sorted(other.stem for other in path.parent.glob("*.idx"))) or "no binarized split"
        raise TupeError(f"{' and '.join(missing)} not found; {path.parent} has {splits}")
    empty = [f"{path}{ending}" for ending in (".idx", ".bin") if not Path(f"{path}{ending}").stat().st_size]
    if empty:
        raise TupeError(f"{' and '.join(empty)} is empty: prepare the data again")
    try:
        return data_utils.load_indexed_dataset(str(path), dictionary, combine=combine)
    except Exception as error:  # numpy, mmap and fairseq each fail in their own way
        raise TupeError(f"{path}.bin or {path}.idx is damaged ({error}): prepare the data again") from error


class SentencePairDataset(FairseqDataset):
    """Rows of one or two indexed datasets with a target each, long rows trimmed and none dropped.

    Args:
        first, second: indexed datasets whose rows end in ``</s>`` (what fairseq-preprocess writes); second may be None.
        row_format: the formatter.
        pad: id of the padding token.
        targets: (N,) class indices (int64) or numbers (float64: fairseq would turn float32 into half precision); or None.
        order: (N,) row numbers in which batches are made, or None for file order.
        name: path without its ending, for messages.

    Raises:
        TupeError: numbers of rows differ, or rows don't end in ``</s>``.
    """

    def __init__(self, first, second, row_format: PairFormat, pad: int, targets=None, order=None, name: str = "data"):
        self.first, self.second, self.format, self.pad = first, second, row_format, pad
        self.targets, self.order, self.name = targets, order, name
        for other, what in ((second, "input1"), (targets, "label")):
            if other is not None and len(other) != len(first):
                raise TupeError(f"{name}: input0 has {len(first)} rows and {what} has {len(other)}: prepare the data again")
        if not len(first):
            raise TupeError(f"{name}: input0 has no rows")
        for part in (first, second):
            for index in (0, len(first) - 1) if part is not None else ():
                if int(part[index][-1]) != row_format.eos:
                    raise TupeError(f"{name}: row {index + 1} does not end in </s>: binarize with fairseq-preprocess")
        content = [np.asarray(part.sizes, dtype=np.int64) - 1 for part in (first, second) if part is not None]
        self._sizes = row_format.row_lengths(*content)
        self.untrimmed_sizes = sum(content) + row_format.special_tokens(len(content))

    @property
    def sizes(self) -> np.ndarray:
        """(N,) lengths of the rows in tokens, after trimming."""
        return self._sizes

    def __len__(self) -> int:
        return len(self.first)

    def __getitem__(self, index: int) -> dict:
        second = None if self.second is None else self.second[index][:-1].tolist()
        item = {"id": index, "tokens": self.format(self.first[index][:-1].tolist(), second)}
        return item if self.targets is None else {**item, "target": self.targets[index]}

    def collater(self, samples: list) -> dict:
        """A batch: src_tokens (B, T), padded on the right, and src_lengths (B,) in ``net_input``; id and target (B,); counts."""
        if not samples:
            return {}
        rows = [sample["tokens"] for sample in samples]
        lengths = torch.tensor([len(row) for row in rows])
        batch = {
            "id": torch.tensor([int(sample["id"]) for sample in samples]),
            "net_input": {"src_tokens": data_utils.collate_tokens(rows, self.pad), "src_lengths": lengths},
            "nsentences": len(samples),
            "ntokens": int(lengths.sum()),
            "dataset_size": len(self),
        }
        if self.targets is not None:
            batch["target"] = torch.stack([sample["target"] for sample in samples])
        return batch

    def ordered_indices(self) -> np.ndarray:
        """Row numbers in the order in which batches are made."""
        return np.arange(len(self), dtype=np.int64) if self.order is None else self.order

    def size(self, index: int) -> int:
        """Length of one row in tokens."""
        return int(self._sizes[index])

    def num_tokens(self, index: int) -> int:
        """Length of one row in tokens."""
        return int(self._sizes[index])

    def num_tokens_vec(self, indices: np.ndarray) -> np.ndarray:
        """Lengths of several rows in tokens."""
        return self._sizes[indices]

    @property
    def supports_prefetch(self) -> bool:
        """True where an input dataset has to be told which rows come."""
        return any(getattr(part, "supports_prefetch", False) for part in (self.first, self.second))

    def prefetch(self, indices) -> None:
        """Read rows ahead."""
        for part in (self.first, self.second):
            if getattr(part, "supports_prefetch", False):
                part.prefetch(indices)

"""Cut token blocks that are longer than the model's limit, so that no token is lost.

``--sample-break-mode complete`` packs whole sentences, so a sentence longer than the limit becomes a block that is too
long: stock fairseq drops it in training and dies on it in validation.
"""

import logging

import numpy as np
from fairseq.data import BaseWrapperDataset

logger = logging.getLogger(__name__)


def split_long_blocks(blocks, limit: int):
    """Return `blocks` itself where none is longer than `limit` tokens, else a view in which long ones are cut.

    A block of n tokens becomes ceil(n / limit) neighbouring blocks of nearly equal size. The later blocks then have new
    numbers; as fairseq seeds a block's mask with its number, they are masked differently than without the cut.

    Args:
        blocks: dataset of 1-d token tensors with `sizes`, such as TokenBlockDataset.
        limit: most tokens a block may have, 1 or more.
    """
    lengths = _true_lengths(blocks)
    too_long = lengths > limit
    if not too_long.any():
        return blocks
    split = SplitBlocksDataset(blocks, lengths, limit)
    logger.info(
        f"split {too_long.sum():,} blocks of more than {limit} tokens (the longest has {lengths.max():,}): "
        f"{len(blocks):,} blocks became {len(split):,}, and the masks of those after the first cut changed"
    )
    return split


def _true_lengths(blocks) -> np.ndarray:
    """Length of each block, int64; TokenBlockDataset.sizes is 16 bits wide and wraps around at 65,536 tokens."""
    if hasattr(blocks, "slice_indices"):
        bounds = blocks.slice_indices.astype(np.int64)
        return bounds[:, 1] - bounds[:, 0]
    return np.asarray(blocks.sizes, dtype=np.int64)


class SplitBlocksDataset(BaseWrapperDataset):
    """View of `blocks` in which every block has at most `limit` tokens; see :func:`split_long_blocks`.

    Args:
        blocks: dataset of 1-d token tensors.
        lengths: their lengths, (len(blocks),) int64.
        limit: most tokens a block may have.
    """

    def __init__(self, blocks, lengths: np.ndarray, limit: int):
        super().__init__(blocks)
        parts = -(-lengths // limit)
        part_size = -(-lengths // np.maximum(parts, 1))
        self._block = np.repeat(np.arange(len(lengths)), parts)
        first_part = np.cumsum(parts) - parts
        self._start = (np.arange(parts.sum()) - first_part[self._block]) * part_size[self._block]
        self._sizes = np.minimum(part_size[self._block], lengths[self._block] - self._start)

    def __getitem__(self, index):
        start = self._start[index]
        return self.dataset[self._block[index]][start : start + self._sizes[index]]

    def __len__(self):
        return len(self._block)

    @property
    def sizes(self) -> np.ndarray:
        """Tokens of each part, (len(self),) int64."""
        return self._sizes

    def num_tokens(self, index):
        """Tokens of one part."""
        return self._sizes[index]

    def size(self, index):
        """Tokens of one part."""
        return self._sizes[index]

    def attr(self, attr: str, index: int):
        """Attribute of the block that the part was cut from."""
        return self.dataset.attr(attr, self._block[index])

    def prefetch(self, indices):
        """Prefetch the blocks that the parts were cut from."""
        self.dataset.prefetch(sorted({int(self._block[index]) for index in indices}))

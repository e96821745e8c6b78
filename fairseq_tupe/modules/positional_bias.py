"""Positions that never touch the content: TUPE's untied correlations, T5's relative bias and the [CLS] reset.

Dimensions: H heads, T tokens, d head dimension, C = H * d model dimension.
Source: arXiv 2006.15595, equations 6 to 10, and guolinke/TUPE ``fairseq/modules/transformer_sentence_encoder.py``.
"""

import math

import torch
from torch import Tensor, nn

from fairseq_tupe.errors import TupeError


def relative_position_bucket(distance: Tensor, num_bins: int, max_distance: int) -> Tensor:
    """T5's bidirectional buckets.

    Half of the bins are for keys on the left (``distance <= 0``), half for keys on the right; in each half the first half of the
    bins is exact and the rest grows logarithmically up to ``max_distance``. Bin ``num_bins // 2`` ("on the right, at distance
    zero") and bin ``num_bins`` are never produced, so the [CLS] rule can use them.

    Args:
        distance: key position minus query position, any shape, integers.
        num_bins: even number of bins.
        max_distance: distance from which on all keys share the last bin of their half.
    """
    half = num_bins // 2
    exact = half // 2
    magnitude = distance.abs()
    # fp32 on purpose: the recorded buckets of the original come from fp32 logarithms
    growth = torch.log(magnitude.float().clamp(min=1) / exact) / math.log(max_distance / exact)
    logarithmic = (exact + (growth * (half - exact)).long()).clamp(max=half - 1)
    return torch.where(magnitude < exact, magnitude, logarithmic) + (distance > 0).long() * half


def check_buckets(num_bins: int, max_distance: int) -> None:
    """Refuse, by a TupeError, numbers that :func:`relative_position_bucket` can't work with."""
    if num_bins % 2 or num_bins < 4:
        raise TupeError(f"--rel-pos-bins must be an even number of at least 4 (half for each direction), got {num_bins}")
    if max_distance <= num_bins // 4:
        raise TupeError(
            f"--max-rel-pos must be larger than a quarter of --rel-pos-bins ({num_bins} // 4 = {num_bins // 4}), "
            f"got {max_distance}"
        )


def reset_cls(bias: Tensor, first_row: Tensor, first_column: Tensor) -> Tensor:
    """The paper's equation 10: everything [CLS] (token 0) takes part in gets one learned value instead of a position's.

    Row 0 takes ``first_row`` (theta1, from [CLS] to others), column 0 below it takes ``first_column`` (theta2, from others to
    [CLS]); cell (0, 0) belongs to the row. Row 0 is constant, so it cancels in the softmax: theta1 has no effect on any output
    and its gradient is rounding noise. It is kept because the paper defines it and the original stores it.

    Args:
        bias: (H, T, T).
        first_row, first_column: (H,).
    """
    heads, length, _ = bias.shape
    column = first_column.view(heads, 1, 1).expand(heads, length - 1, 1)
    row = first_row.view(heads, 1, 1).expand(heads, 1, length)
    return torch.cat([row, torch.cat([column, bias[:, 1:, 1:]], dim=2)], dim=1)


class UntiedPositions(nn.Module):
    """Position embeddings with projections of their own, shared by all layers.

    The table has ``max_positions + 1`` rows: row 0 yields theta1, row 1 yields theta2, and **token i uses row i + 1** (row 1 is
    both theta2 and the position of [CLS], which the reset hides). Without the [CLS] rule row 0 is unused.
    """

    def __init__(self, embed_dim: int, num_heads: int, max_positions: int):
        super().__init__()
        self.num_heads = num_heads
        self.head_dim = embed_dim // num_heads
        self.embedding = nn.Embedding(max_positions + 1, embed_dim)
        self.layer_norm = nn.LayerNorm(embed_dim)
        self.query_proj = nn.Linear(embed_dim, embed_dim)
        self.key_proj = nn.Linear(embed_dim, embed_dim)

    def forward(self, length: int) -> tuple[Tensor, Tensor]:
        """Position queries and keys, (H, length + 1, d) each; row 0 is the extra one, token i is row i + 1."""
        positions = self.layer_norm(self.embedding.weight[: length + 1])

        def split_heads(projected: Tensor) -> Tensor:
            return projected.view(length + 1, self.num_heads, self.head_dim).transpose(0, 1)

        return split_heads(self.query_proj(positions)), split_heads(self.key_proj(positions))


class RelativeBias(nn.Module):
    """One learned scalar a head and bucket of the distance j - i, shared by all layers.

    The table always has ``num_bins + 1`` rows, as in the original. With the [CLS] rule column 0 uses row ``num_bins`` and row 0
    uses row ``num_bins // 2``; without it those two rows are unused.
    """

    def __init__(self, num_heads: int, num_bins: int, max_distance: int):
        super().__init__()
        check_buckets(num_bins, max_distance)
        self.num_bins = num_bins
        self.max_distance = max_distance
        self.weight = nn.Parameter(torch.empty(num_bins + 1, num_heads))

    def forward(self, length: int) -> Tensor:
        """Bias before any reset, (H, length, length)."""
        distance = torch.arange(1 - length, length, device=self.weight.device)
        # (H, 2T - 1), one value a diagonal: its gradient is a sum over windows, not a scatter of T * T rows
        diagonals = self.weight[relative_position_bucket(distance, self.num_bins, self.max_distance)].t()
        return diagonals.unfold(1, length, 1).flip(1)

    def cls_values(self) -> tuple[Tensor, Tensor]:
        """What the [CLS] rule puts in row 0 and in column 0, (H,) each."""
        return self.weight[self.num_bins // 2], self.weight[self.num_bins]


class PositionalBias(nn.Module):
    """The additive attention bias (H, T, T) that every layer shares, built once a forward.

    Args:
        untied: the untied absolute part, or None.
        relative: the relative part, or None.
        cls_rule: apply :func:`reset_cls` to the sum of the parts. It belongs to the untied encoding; a relative bias beside
            absolute positions (BERT-R) has no such rule, as in T5.

    The sum is kept in fp32 whatever the dtype of the weights.
    """

    def __init__(self, untied: UntiedPositions | None, relative: RelativeBias | None, cls_rule: bool):
        super().__init__()
        self.untied = untied
        self.relative = relative
        self.cls_rule = cls_rule
        self._kept: tuple | None = None

    def forward(self, length: int) -> Tensor | None:
        """(H, length, length), or None where there is neither part; kept in evaluation until a parameter changes."""
        if self.training or torch.is_grad_enabled() or torch.compiler.is_compiling() or torch.jit.is_tracing():
            return self._build_exactly(length)
        if any(p.is_inference() for p in self.parameters()):  # nothing tells when those change
            return self._build_exactly(length)
        key = (length, torch.is_inference_mode_enabled(), *((p.data_ptr(), p.dtype, p._version) for p in self.parameters()))
        if self._kept is None or self._kept[0] != key:
            self._kept = key, self._build_exactly(length)
        return self._kept[1]

    def train(self, mode: bool = True) -> "PositionalBias":
        """Forgets the kept bias: an optimizer may write to ``parameter.data``, which leaves no trace in the key."""
        self._kept = None
        return super().train(mode)

    def _build_exactly(self, length: int) -> Tensor | None:
        device = next(self.parameters(), torch.empty(0)).device.type
        with torch.autocast(device, enabled=False):  # autocast would round the correlations
            return self._build(length)

    def _build(self, length: int) -> Tensor | None:
        bias = first_row = first_column = None
        if self.untied is not None:
            query, key = self.untied(length)
            query = query.float() / math.sqrt(2 * self.untied.head_dim)
            correlation = query @ key.float().transpose(1, 2)  # (H, T + 1, T + 1)
            first_row, first_column = correlation[:, 0, 0], correlation[:, 1, 1]
            bias = correlation[:, 1:, 1:]
        if self.relative is not None:
            relative = self.relative(length).float()
            bias = relative if bias is None else bias + relative
            if self.cls_rule:
                row, column = self.relative.cls_values()
                first_row, first_column = first_row + row.float(), first_column + column.float()
        return reset_cls(bias, first_row, first_column) if self.cls_rule else bias

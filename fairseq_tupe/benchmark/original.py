"""The original's way to compute TUPE, rebuilt from what it does (guolinke/TUPE), not from its text.

It repeats the bias for every sentence, adds it to a (B * H, T, T) score matrix in every layer, and draws a dropout mask of that
size.
"""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from fairseq_tupe.models.tupe_roberta import TupeRobertaModel
from fairseq_tupe.modules.attention import BiasedSelfAttention


def original_attention(query: Tensor, key: Tensor, value: Tensor, bias: Tensor | None, scale: float, dropout: float) -> Tensor:
    """All of them (B * H, T, d), the bias (B * H, T, T)."""
    weights = torch.bmm(query * scale, key.transpose(1, 2))
    if bias is not None:
        weights = weights + bias
    weights = torch.softmax(weights, dim=-1, dtype=torch.float32).type_as(weights)
    return torch.bmm(F.dropout(weights, dropout), value)


class OriginalAttention(nn.Module):
    """Takes the place of a :class:`BiasedSelfAttention`, with its parameters."""

    def __init__(self, ours: BiasedSelfAttention):
        super().__init__()
        self.num_heads, self.head_dim, self.scale = ours.num_heads, ours.head_dim, ours.scale
        self.dropout, self.in_proj, self.out_proj = ours.dropout, ours.in_proj, ours.out_proj

    def forward(self, x: Tensor, bias: Tensor, padding_mask: Tensor | None = None) -> Tensor:
        """(B, T, C) to (B, T, C); the bias is (B * H, T, T)."""
        batch, length, width = x.shape
        # the original works on T x B x C, and so lays out heads as (T, B * H, d)
        query, key, value = (
            part.contiguous().view(length, batch * self.num_heads, self.head_dim).transpose(0, 1)
            for part in self.in_proj(x.transpose(0, 1)).chunk(3, dim=-1)
        )
        if padding_mask is not None:
            hidden = padding_mask[:, None, None, :].expand(batch, self.num_heads, length, length).reshape_as(bias)
            bias = bias.masked_fill(hidden, float("-inf"))
        mixed = original_attention(query, key, value, bias, self.scale, self.dropout if self.training else 0.0)
        return self.out_proj(mixed.transpose(0, 1).contiguous().view(length, batch, width)).transpose(0, 1)


class RepeatedBias(nn.Module):
    """The bias repeated for every sentence of the batch, once a forward."""

    def __init__(self, ours: nn.Module):
        super().__init__()
        self.ours = ours
        self.batch = 1

    def forward(self, length: int) -> Tensor:
        """(B * H, length, length)."""
        return self.ours(length).repeat(self.batch, 1, 1)


def as_original(model: TupeRobertaModel) -> TupeRobertaModel:
    """Change a model built with ``attention_backend="eager"`` in place: same parameters, same results, the original's way."""
    encoder = model.encoder.sentence_encoder
    encoder.positional_bias = RepeatedBias(encoder.positional_bias)
    encoder.register_forward_pre_hook(lambda module, inputs: setattr(module.positional_bias, "batch", inputs[0].size(0)))
    for layer in encoder.layers:
        layer.self_attn = OriginalAttention(layer.self_attn)
    return model

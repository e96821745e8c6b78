"""Self-attention with an additive positional bias.

Dimensions: B sentences, T tokens, H heads, d head dimension, C = H * d model dimension.
"""

import math

import torch
from torch import Tensor, nn


class BiasedSelfAttention(nn.Module):
    """softmax(q k^T / sqrt(terms * d) + bias) v, with the softmax in fp32.

    Args:
        embed_dim, num_heads: C and H; H divides C.
        dropout: on the attention probabilities.
        terms: how many correlation terms the logits sum; 1 for plain attention, 2 for TUPE (content and position, equation 7),
            4 where queries and keys hold content plus position (equation 6's four terms).
    """

    def __init__(self, embed_dim: int, num_heads: int, dropout: float, terms: int):
        super().__init__()
        self.num_heads = num_heads
        self.head_dim = embed_dim // num_heads
        self.scale = 1 / math.sqrt(terms * self.head_dim)
        self.in_proj = nn.Linear(embed_dim, 3 * embed_dim)
        self.out_proj = nn.Linear(embed_dim, embed_dim)
        self.dropout = nn.Dropout(dropout)

    def forward(
        self,
        x: Tensor,
        bias: Tensor | None = None,
        padding_mask: Tensor | None = None,
        position_query: Tensor | None = None,
        position_key: Tensor | None = None,
    ) -> Tensor:
        """(B, T, C) to (B, T, C).

        Args:
            bias: (H, T, T), added to the logits of every sentence.
            padding_mask: (B, T), true (or non-zero) at keys that must not be seen.
            position_query, position_key: (H, T, d), added to the content's queries and keys.
        """
        batch, length, embed_dim = x.shape
        projected = self.in_proj(x).view(batch, length, 3, self.num_heads, self.head_dim)
        query, key, value = projected.permute(2, 0, 3, 1, 4)  # (B, H, T, d) each
        if position_query is not None:
            query, key = query + position_query, key + position_key
        # scaled before the product: q k^T alone can leave the range of fp16
        logits = ((query * self.scale) @ key.transpose(2, 3)).float()  # (B, H, T, T)
        if bias is not None:
            logits = logits + bias
        if padding_mask is not None:
            # the lowest finite number, not -inf: a sentence of nothing but padding stays finite
            hidden = padding_mask.to(torch.bool).view(batch, 1, 1, length)
            logits = logits.masked_fill(hidden, torch.finfo(logits.dtype).min)
        probabilities = self.dropout(torch.softmax(logits, dim=-1).type_as(value))
        mixed = (probabilities @ value).transpose(1, 2).reshape(batch, length, embed_dim)
        return self.out_proj(mixed)

"""Self-attention with an additive positional bias.

Dimensions: B sentences, T tokens, H heads, d head dimension, C = H * d model dimension.
"""

import math

import torch
from torch import Tensor, nn

from fairseq_tupe.modules.attention_backends.cpu_fused import fused_attention
from fairseq_tupe.modules.attention_backends.selection import BACKENDS, select_backend


class BiasedSelfAttention(nn.Module):
    """softmax(q k^T / sqrt(terms * d) + bias) v, with the softmax in fp32.

    Args:
        embed_dim, num_heads: C and H; H divides C.
        dropout: on the attention probabilities.
        terms: how many correlation terms the logits sum; 1 for plain attention, 2 for TUPE (content and position, equation 7),
            4 where queries and keys hold content plus position (equation 6's four terms).
        backend: one of ``attention_backends.selection.CHOICES``; all compute the same.
    """

    def __init__(self, embed_dim: int, num_heads: int, dropout: float, terms: int, backend: str = "auto"):
        super().__init__()
        self.num_heads = num_heads
        self.head_dim = embed_dim // num_heads
        self.scale = 1 / math.sqrt(terms * self.head_dim)
        self.in_proj = nn.Linear(embed_dim, 3 * embed_dim)
        self.out_proj = nn.Linear(embed_dim, embed_dim)
        self.dropout = dropout
        self.backend = backend

    def forward(
        self,
        x: Tensor,
        bias: Tensor | None = None,
        padding_mask: Tensor | None = None,
        position_query: Tensor | None = None,
        position_key: Tensor | None = None,
        offsets: Tensor | None = None,
    ) -> Tensor:
        """(B, T, C) to (B, T, C).

        Args:
            bias: (H, T, T), added to the logits of every sentence.
            padding_mask: (B, T), true (or non-zero) at keys that must not be seen.
            position_query, position_key: (H, T, d), added to the content's queries and keys.
            offsets: see :func:`.attention_backends.cpu_fused.fused_attention`; x is then (1, N, C).
        """
        batch, length, _ = x.shape
        qkv = self.in_proj(x).view(batch, length, 3, self.num_heads, self.head_dim)
        if position_query is not None:
            positions = torch.stack([position_query, position_key, torch.zeros_like(position_key)])  # (3, H, T, d)
            qkv = qkv + positions.permute(2, 0, 1, 3).type_as(qkv)
        if padding_mask is not None:
            padding_mask = padding_mask.to(torch.bool)
        dropout = self.dropout if self.training else 0.0
        if offsets is not None:
            return self.out_proj(fused_attention(qkv, bias, None, self.scale, dropout, offsets))
        bias_gradient = bias is not None and bias.requires_grad and torch.is_grad_enabled()
        name = select_backend(self.backend, x.device.type, qkv.dtype, dropout > 0, bias_gradient)
        return self.out_proj(BACKENDS[name](qkv, bias, padding_mask, self.scale, dropout))

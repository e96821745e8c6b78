"""Plain torch, every intermediate matrix in memory: what the other backends must equal."""

import torch
import torch.nn.functional as F
from torch import Tensor


def eager_attention(
    qkv: Tensor,
    bias: Tensor | None,
    padding: Tensor | None,
    scale: float,
    dropout: float = 0.0,
    keep: Tensor | None = None,
) -> Tensor:
    """softmax(q k^T * scale + bias) v, with the softmax in fp32 (or float64 where that is the input's type).

    Args:
        qkv: (B, T, 3, H, d) queries, keys and values.
        bias: (H, T, T), added to the logits of every sentence.
        padding: (B, T), true at keys that must not be seen.
        scale: of the logits, before the bias.
        dropout: probability of dropping an attention weight.
        keep: (B, H, T, T) true at the weights that stay, instead of drawing them.

    Returns:
        (B, T, H * d).
    """
    query, key, value = qkv.permute(2, 0, 3, 1, 4)  # (B, H, T, d) each
    # scaled before the product: q k^T alone can leave the range of fp16
    logits = (query * scale) @ key.transpose(2, 3)  # (B, H, T, T)
    if logits.dtype != torch.float64:
        logits = logits.float()
    if bias is not None:
        logits = logits + bias
    if padding is not None:
        # the lowest finite number, not -inf: a sentence of nothing but padding stays finite
        logits = logits.masked_fill(padding[:, None, None, :], torch.finfo(logits.dtype).min)
    weights = torch.softmax(logits, dim=-1).type_as(value)
    weights = F.dropout(weights, dropout) if keep is None else weights * keep / (1 - dropout)
    return (weights @ value).transpose(1, 2).flatten(2)

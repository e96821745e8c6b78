"""torch's own fused attention. It has no fused path on a CPU with dropout or with a bias that needs a gradient, and is then
slower than the plain form, but exact all the same."""

import torch
import torch.nn.functional as F
from torch import Tensor


def sdpa_attention(qkv: Tensor, bias: Tensor | None, padding: Tensor | None, scale: float, dropout: float = 0.0) -> Tensor:
    """See :func:`.eager.eager_attention`; half-precision inputs round the bias to their own type."""
    query, key, value = qkv.permute(2, 0, 3, 1, 4)  # (B, H, T, d) each
    mask = None if bias is None else bias.to(query.dtype).unsqueeze(0)  # (1, H, T, T)
    if padding is not None:
        # where nothing is visible the hidden logits must not pass a gradient on, as they don't in the eager form
        query = query.masked_fill(padding.all(dim=1)[:, None, None, None], 0.0)
        hidden, lowest = padding[:, None, None, :], torch.finfo(query.dtype).min
        if mask is None:
            mask = torch.zeros_like(hidden, dtype=query.dtype).masked_fill(hidden, lowest)
        else:
            mask = mask.masked_fill(hidden, lowest)
    mixed = F.scaled_dot_product_attention(query, key, value, attn_mask=mask, dropout_p=dropout, scale=scale)
    return mixed.transpose(1, 2).flatten(2)

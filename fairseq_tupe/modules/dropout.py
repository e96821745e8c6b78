"""Dropout on hidden states, with the residual sum that follows it."""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from fairseq_tupe.modules.attention_backends.cpu_fused import draw_seed
from fairseq_tupe.modules.attention_backends.selection import fused_refusal


class Dropout(nn.Module):
    """Drops elements with probability ``p`` while training, scales the rest by 1 / (1 - p).

    Args:
        p: in [0, 1).
        backend: as of attention. "auto" and "fused" use the C++ operator on a CPU, which keeps a seed where torch keeps a mask
            as large as the input; other inputs and other backends take torch's dropout.
    """

    def __init__(self, p: float, backend: str = "auto"):
        super().__init__()
        self.p = p
        self.backend = backend

    def extra_repr(self) -> str:
        return f"p={self.p}"

    def forward(self, x: Tensor, residual: Tensor | None = None) -> Tensor:
        """dropout(x), plus ``residual`` (of the same shape) where there is one."""
        if self.training and self.p > 0 and self._fused(x, residual):
            if residual is not None:
                return torch.ops.fairseq_tupe.dropout_add(x, residual, self.p, draw_seed())
            return torch.ops.fairseq_tupe.dropout(x, self.p, draw_seed(), x.dtype)
        x = F.dropout(x, self.p, self.training)
        return x if residual is None else residual + x

    def _fused(self, x: Tensor, residual: Tensor | None) -> bool:
        if self.backend not in ("auto", "fused") or (residual is not None and residual.dtype == torch.float64):
            return False
        return fused_refusal(x.device.type, x.dtype, dropout_only=True) is None

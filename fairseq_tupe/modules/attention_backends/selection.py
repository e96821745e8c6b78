"""Which attention backend runs, and why."""

import functools
import logging
from collections.abc import Callable

import torch
from torch import Tensor

from fairseq_tupe.modules.attention_backends import cpu_fused
from fairseq_tupe.modules.attention_backends.cpu_fused import fused_attention
from fairseq_tupe.modules.attention_backends.eager import eager_attention
from fairseq_tupe.modules.attention_backends.sdpa import sdpa_attention

logger = logging.getLogger(__name__)

BACKENDS: dict[str, Callable[..., Tensor]] = {
    "eager": eager_attention,
    "sdpa": sdpa_attention,
    "fused": fused_attention,
}
CHOICES = ("auto", *BACKENDS)


@torch.compiler.assume_constant_result  # torch.compile asks once, while tracing
def fused_refusal(device: str, dtype: torch.dtype, dropout_only: bool = False) -> str | None:
    """Why the fused operators can't take such inputs, or None. May compile them.

    ``dropout_only``: of the dropout operators, which multiply no matrices and take bfloat16 on every processor.
    """
    return _fused_refusal(device, dtype, dropout_only)


@functools.cache
def _fused_refusal(device: str, dtype: torch.dtype, dropout_only: bool) -> str | None:
    if device != "cpu":
        return f"it is for CPUs, the input is on {device}"
    if dtype not in (torch.float32, torch.bfloat16):
        return f"it computes float32 and bfloat16, the input is {str(dtype).removeprefix('torch.')}"
    reason = cpu_fused.unavailable()
    if reason is not None:
        return "it could not be built"
    return None if dropout_only or cpu_fused.computes(dtype) else "this processor does not multiply bfloat16"


def _automatic(device: str, dtype: torch.dtype, dropout: bool, bias_gradient: bool) -> tuple[str, str]:
    refusal = fused_refusal(device, dtype)
    if refusal is None:
        return "fused", "the fastest one on a CPU"
    # torch's kernel loses its fused path, and with it all advantage, on dropout (CPU) or a bias gradient
    if bias_gradient or (dropout and device == "cpu"):
        return "eager", f"fused: {refusal}; sdpa has no fused path with {'a bias gradient' if bias_gradient else 'dropout'}"
    if dtype == torch.float64:
        return "eager", "float64 is for checks"
    return "sdpa", f"fused: {refusal}"


@torch.compiler.assume_constant_result
def select_backend(requested: str, device: str, dtype: torch.dtype, dropout: bool, bias_gradient: bool) -> str:
    """Name (in ``BACKENDS``) of what computes attention on such inputs; each decision is logged once.

    Args:
        requested: one of ``CHOICES``.
        device: type of the input's device, such as "cpu".
        dtype: the input's.
        dropout: whether attention weights are dropped.
        bias_gradient: whether the bias needs a gradient.
    """
    return _select(requested, device, dtype, dropout, bias_gradient)


@functools.cache
def _select(requested: str, device: str, dtype: torch.dtype, dropout: bool, bias_gradient: bool) -> str:
    if requested == "auto":
        name, reason = _automatic(device, dtype, dropout, bias_gradient)
        logger.info(f"attention backend: {name} ({reason})")
        return name
    refusal = fused_refusal(device, dtype) if requested == "fused" else None
    if refusal is not None:
        logger.warning(f"attention backend: eager instead of fused ({refusal})")
        return "eager"
    return requested

"""The C++ operators as torch functions with gradients."""

import functools
import logging

import torch
from torch import Tensor

from fairseq_tupe.modules.attention_backends.native_library import load_failure

logger = logging.getLogger(__name__)


def draw_seed() -> Tensor:
    """A 0-dimensional int64 from torch's generator: dropout follows ``torch.manual_seed`` and activation checkpointing."""
    return torch.randint(-(2**63), 2**63 - 1, (), dtype=torch.int64)


def _attention_context(ctx, inputs, output) -> None:
    qkv, bias, padding, ctx.scale, ctx.dropout, seed, offsets = inputs
    ctx.mark_non_differentiable(output[1])
    ctx.save_for_backward(qkv, bias, padding, seed, offsets, *output)


def _attention_backward(ctx, grad: Tensor, _unused):
    qkv, bias, padding, seed, offsets, out, lse = ctx.saved_tensors
    need_bias = bias is not None and ctx.needs_input_grad[1]
    qkv_grad, bias_grad = torch.ops.fairseq_tupe.attention_backward(
        grad, qkv, bias, padding, out, lse, ctx.scale, ctx.dropout, seed, offsets, need_bias
    )
    return qkv_grad, bias_grad if need_bias else None, None, None, None, None, None


def _dropout_add_context(ctx, inputs, output) -> None:
    x, residual, ctx.dropout, seed = inputs
    ctx.types = x.dtype, residual.dtype
    ctx.save_for_backward(seed)


def _dropout_add_backward(ctx, grad: Tensor):
    (seed,) = ctx.saved_tensors
    x_type, residual_type = ctx.types
    return torch.ops.fairseq_tupe.dropout(grad, ctx.dropout, seed, x_type), grad.to(residual_type), None, None


def _dropout_context(ctx, inputs, output) -> None:
    x, ctx.dropout, seed, _ = inputs
    ctx.type = x.dtype
    ctx.save_for_backward(seed)


def _dropout_backward(ctx, grad: Tensor):
    (seed,) = ctx.saved_tensors
    return torch.ops.fairseq_tupe.dropout(grad, ctx.dropout, seed, ctx.type), None, None, None


def _fake_attention(qkv, bias, padding, scale, p, seed, offsets):
    batch, length, _, heads, dim = qkv.shape
    out = qkv.new_empty(batch, length, heads * dim)
    return out, qkv.new_empty(heads, batch * length, dtype=torch.float32)


def _fake_attention_backward(grad, qkv, bias, padding, out, lse, scale, p, seed, offsets, need_bias):
    return torch.empty_like(qkv), lse.new_empty(bias.shape if need_bias else (0,))


@functools.cache
def unavailable() -> str | None:
    """None when the operators are loaded, else the reason. The first call may compile them."""
    reason = load_failure()
    if reason is not None:
        logger.warning(f"attention and dropout run in plain torch, slower: the CPU operators could not be built: {reason}")
    else:
        library = torch.library
        library.register_autograd("fairseq_tupe::attention", _attention_backward, setup_context=_attention_context)
        library.register_autograd("fairseq_tupe::dropout_add", _dropout_add_backward, setup_context=_dropout_add_context)
        library.register_autograd("fairseq_tupe::dropout", _dropout_backward, setup_context=_dropout_context)
        library.register_fake("fairseq_tupe::attention", _fake_attention)
        library.register_fake("fairseq_tupe::attention_backward", _fake_attention_backward)
        library.register_fake("fairseq_tupe::dropout", lambda x, p, seed, dtype: torch.empty_like(x, dtype=dtype))
        library.register_fake("fairseq_tupe::dropout_add", lambda x, residual, p, seed: x + residual)
    return reason


def computes(dtype: torch.dtype) -> bool:
    """Whether the loaded operators take this type: bfloat16 only where the processor multiplies it."""
    return dtype == torch.float32 or (dtype == torch.bfloat16 and torch.ops.fairseq_tupe.native_bfloat16())


def fused_attention(
    qkv: Tensor,
    bias: Tensor | None,
    padding: Tensor | None,
    scale: float,
    dropout: float = 0.0,
    offsets: Tensor | None = None,
) -> Tensor:
    """See :func:`.eager.eager_attention`; float32 or bfloat16 on a CPU.

    Args:
        offsets: (B + 1,) int64; then ``qkv`` is (1, N, 3, H, d), the tokens of B sentences of different lengths one after the
            other: sentence b is tokens ``offsets[b]`` to ``offsets[b + 1]``.
    """
    seed = draw_seed() if dropout > 0 else None
    if bias is not None:
        bias = bias.float().contiguous()
    padding = None if padding is None else padding.contiguous()
    return torch.ops.fairseq_tupe.attention(qkv, bias, padding, scale, dropout, seed, offsets)[0]


def attention_keep_mask(seed: Tensor, batch: int, heads: int, length: int, dropout: float) -> Tensor:
    """(B, H, T, T) booleans: the attention weights that dropout keeps under ``seed``. For tests."""
    return torch.ops.fairseq_tupe.attention_keep_mask(seed, batch, heads, length, dropout)

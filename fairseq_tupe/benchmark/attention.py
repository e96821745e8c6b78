"""Contestants of the attention rows: forward and backward, with the gradient of the bias."""

import math
from collections.abc import Callable

import torch
import torch.nn.functional as F

from fairseq_tupe.benchmark.original import original_attention
from fairseq_tupe.modules.attention_backends.selection import BACKENDS, fused_refusal

HEADS, DIM = 12, 64


def attention_contestants(
    batch: int, length: int, dropout: float, dtype: torch.dtype, device: str
) -> dict[str, Callable[[], None]]:
    """Name to a function that runs forward and backward once."""
    generator = torch.Generator().manual_seed(0)

    def normal(*shape: int, of: torch.dtype = dtype) -> torch.Tensor:
        return torch.randn(*shape, generator=generator).to(device=device, dtype=of).requires_grad_()

    scale = 1 / math.sqrt(2 * DIM)
    parts = [normal(batch * HEADS, length, DIM) for _ in range(3)]
    heads = [part.detach().view(batch, HEADS, length, DIM).requires_grad_() for part in parts]
    qkv = normal(batch, length, 3, HEADS, DIM)
    bias = normal(HEADS, length, length, of=torch.float32)
    upstream = normal(batch * HEADS, length, DIM).detach()

    def original() -> None:
        repeated = bias.repeat(batch, 1, 1).to(dtype)
        original_attention(*parts, repeated, scale, dropout).backward(upstream)

    def without_bias() -> None:
        # torch has no fused dropout on a CPU: the floor is measured without it
        p = dropout if device == "cuda" else 0.0
        out = F.scaled_dot_product_attention(*heads, dropout_p=p, scale=scale)
        out.backward(upstream.view_as(out))

    def ours(name: str) -> Callable[[], None]:
        def run() -> None:
            out = BACKENDS[name](qkv, bias, None, scale, dropout)
            out.backward(upstream.view_as(out))

        return run

    contestants = {
        "original": original,
        "sdpa without bias": without_bias,
        "ours eager": ours("eager"),
        "ours sdpa": ours("sdpa"),
    }
    if fused_refusal(device, dtype) is None:
        contestants["ours fused"] = ours("fused")
    leaves = [*parts, *heads, qkv, bias]

    def fresh(run: Callable[[], None]) -> Callable[[], None]:
        def once() -> None:
            run()
            for leaf in leaves:  # at the end, so that no gradient of a former run hides in the memory held before
                leaf.grad = None

        return once

    return {name: fresh(run) for name, run in contestants.items()}

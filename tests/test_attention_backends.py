"""Every attention backend equals the eager one in float64: values, all gradients, padding, dropout, seeds, recomputation."""

import math
from types import SimpleNamespace

import pytest
import torch
from small_model import VARIANTS, random_tokens, small_model
from torch.utils.checkpoint import checkpoint

from fairseq_tupe.modules.attention import BiasedSelfAttention
from fairseq_tupe.modules.attention_backends import cpu_fused
from fairseq_tupe.modules.attention_backends.eager import eager_attention
from fairseq_tupe.modules.attention_backends.selection import BACKENDS, select_backend
from fairseq_tupe.modules.encoder_layer import EncoderLayer

LENGTHS = (1, 2, 17, 130, 512)
PADDINGS = ("none", "right", "scattered", "everything")
TOLERANCE = {torch.float32: 3e-6, torch.bfloat16: 3e-2}


@pytest.fixture(params=list(BACKENDS))
def backend(request) -> str:
    if request.param == "fused":
        needs_fused()
    return request.param


def needs_fused() -> None:
    if cpu_fused.unavailable() is not None:
        pytest.skip(f"no fused operators here: {cpu_fused.unavailable()}")


def example(length, padding="none", dtype=torch.float32, batch=3, heads=3, dim=10, with_bias=True) -> SimpleNamespace:
    """Random inputs and an upstream gradient; odd sizes expose transposes and vector tails."""
    generator = torch.Generator().manual_seed(length)

    def normal(*shape):
        return torch.randn(*shape, generator=generator)

    mask = torch.zeros(batch, length, dtype=torch.bool)
    if padding != "none" and length > 1:
        mask[0, length // 2 + 1 :] = True
    if padding == "scattered":
        mask |= torch.rand(batch, length, generator=generator) < 0.3
        mask[:, length // 2] = False
    if padding == "everything":
        mask[1] = True
    return SimpleNamespace(
        qkv=normal(batch, length, 3, heads, dim).to(dtype),
        bias=normal(heads, length, length) if with_bias else None,
        padding=None if padding == "none" else mask,
        scale=1 / math.sqrt(2 * dim),
        upstream=normal(batch, length, heads * dim).to(dtype),
    )


def with_gradients(attend, x, dtype=None, **options) -> list[torch.Tensor]:
    """Output and the gradients of qkv and bias."""
    qkv = x.qkv.to(dtype or x.qkv.dtype).clone().requires_grad_()
    bias = None if x.bias is None else x.bias.to(dtype or x.bias.dtype).clone().requires_grad_()
    out = attend(qkv, bias, x.padding, x.scale, **options)
    out.backward(x.upstream.to(out.dtype))
    return [out.detach(), qkv.grad] + ([] if bias is None else [bias.grad])


def assert_equal(actual, expected, tolerance):
    """Relative to the largest number; a (1, 1) bias has a gradient of zero."""
    for name, ours, theirs in zip(("output", "gradient of qkv", "gradient of bias"), actual, expected, strict=False):
        assert ours.shape == theirs.shape
        error = (ours.double() - theirs.double()).abs().max().item()
        assert error <= tolerance * max(theirs.abs().max().item(), 1.0), f"{name}: off by {error}"


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("padding", PADDINGS)
@pytest.mark.parametrize("length", LENGTHS)
def test_values_and_gradients(backend, length, padding, dtype):
    x = example(length, padding, dtype)
    attend = BACKENDS[select_backend(backend, "cpu", dtype, False, True)]
    assert_equal(with_gradients(attend, x), with_gradients(eager_attention, x, torch.float64), TOLERANCE[dtype])


@pytest.mark.parametrize(("heads", "dim"), [(1, 64), (5, 1), (2, 7), (2, 33)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_head_sizes_and_no_bias(backend, heads, dim, dtype):
    for with_bias in (True, False):
        x = example(37, "scattered", dtype, heads=heads, dim=dim, with_bias=with_bias)
        attend = BACKENDS[select_backend(backend, "cpu", dtype, False, with_bias)]
        assert_equal(with_gradients(attend, x), with_gradients(eager_attention, x, torch.float64), TOLERANCE[dtype])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("padding", PADDINGS)
@pytest.mark.parametrize("length", LENGTHS)
def test_dropout_by_a_shared_mask(length, padding, dtype):
    needs_fused()
    x = example(length, padding, dtype)
    batch, _, _, heads, _ = x.qkv.shape
    torch.manual_seed(5)
    actual = with_gradients(BACKENDS[select_backend("fused", "cpu", dtype, True, True)], x, dropout=0.3)
    torch.manual_seed(5)
    keep = cpu_fused.attention_keep_mask(cpu_fused.draw_seed(), batch, heads, length, 0.3)
    expected = with_gradients(eager_attention, x, torch.float64, dropout=0.3, keep=keep)
    assert_equal(actual, expected, TOLERANCE[dtype])


@pytest.mark.parametrize("dropout", [0.1, 0.5])
def test_dropout_statistics_of_the_hash(dropout):
    """Rate within 4 standard deviations, overall and by row and column; no correlation of neighbours, rows, heads or seeds."""
    needs_fused()
    masks = [cpu_fused.attention_keep_mask(torch.tensor(seed), 4, 6, 256, dropout).float() for seed in (7, 8)]
    rate, spread, keep = 1 - dropout, math.sqrt(dropout * (1 - dropout)), masks[0]
    assert abs(keep.mean() - rate) < 4 * spread / math.sqrt(keep.numel())
    for axis in range(4):
        means = keep.mean(dim=axis)
        expected = spread / math.sqrt(keep.shape[axis])
        assert means.std().item() == pytest.approx(expected, rel=0.05), f"means over axis {axis}"
    z = (keep - rate) / spread
    pairs = {
        "columns": z[..., 1:] * z[..., :-1],
        "rows": z[:, :, 1:] * z[:, :, :-1],
        "shifted rows": z[:, :, 1:, 1:] * z[:, :, :-1, :-1],
        "heads": z[:, 1:] * z[:, :-1],
        "sentences": z[1:] * z[:-1],
        "seeds": z * ((masks[1] - rate) / spread),
    }
    for name, products in pairs.items():
        assert abs(products.mean()) < 5 / math.sqrt(products.numel()), f"{name} are correlated"


def test_dropout_is_unbiased(backend):
    x = example(17, batch=1)
    attend = BACKENDS[select_backend(backend, "cpu", torch.float32, True, False)]
    torch.manual_seed(0)
    draws = torch.stack([attend(x.qkv, x.bias, None, x.scale, dropout=0.2) for _ in range(2000)])
    expected = eager_attention(x.qkv, x.bias, None, x.scale)
    error = (draws.mean(0) - expected) / (draws.std(0) / math.sqrt(len(draws)))
    assert error.abs().max() < 4.8
    assert error.std().item() == pytest.approx(1, abs=0.15)


def test_seed_decides(backend):
    x = example(65)
    attend = BACKENDS[select_backend(backend, "cpu", torch.float32, True, True)]

    def run(seed):
        torch.manual_seed(seed)
        return with_gradients(attend, x, dropout=0.1)

    for first, again, other in zip(run(3), run(3), run(4), strict=True):
        assert torch.equal(first, again)
        assert not torch.equal(first, other)


@pytest.mark.parametrize("variant", VARIANTS)
def test_models_agree(backend, variant):
    """Through the module: position queries and keys, padding, and the gradient of every parameter. What stands at padding is
    no result: the fused backend does not compute it (see test_packing.py)."""
    tokens = random_tokens(4, 9)
    tokens[1, 5:] = 1
    results = []
    for name in ("eager", backend):
        model = small_model(**VARIANTS[variant], attention_backend=name)
        out = model(tokens)[0][tokens.ne(1)]
        out.square().sum().backward()
        results.append([out, *(p.grad for p in model.parameters() if p.grad is not None)])
    assert len(results[0]) == len(results[1])
    for theirs, ours in zip(*results, strict=True):
        assert (ours - theirs).abs().max() <= 2e-4 * max(theirs.abs().max().item(), 0.1)


def layer_and_input(backend: str, length: int = 33):
    torch.manual_seed(0)
    layer = EncoderLayer(24, 32, 3, 0.2, 0.2, 0.2, "gelu", False, terms=2, backend=backend)
    return layer, torch.randn(2, length, 24, requires_grad=True), torch.randn(3, length, length, requires_grad=True)


def test_activation_checkpointing_draws_the_same_dropout(backend):
    layer, x, bias = layer_and_input(backend)
    results = []
    for recompute in (False, True):
        torch.manual_seed(9)
        out = checkpoint(layer, x, bias=bias, use_reentrant=False) if recompute else layer(x, bias=bias)
        results.append([out, *torch.autograd.grad(out.square().sum(), [x, bias, *layer.parameters()])])
    for plain, recomputed in zip(*results, strict=True):
        assert torch.equal(plain, recomputed)


def test_autocast(backend):
    attention = BiasedSelfAttention(24, 3, 0.0, terms=2, backend=backend)
    x, bias = torch.randn(2, 33, 24), torch.randn(3, 33, 33, requires_grad=True)
    exact = attention(x, bias=bias)
    with torch.autocast("cpu", torch.bfloat16):
        rounded = attention(x, bias=bias)
    assert rounded.dtype == torch.bfloat16
    assert (rounded - exact).abs().max() < 2e-2 * exact.abs().max()
    rounded.float().sum().backward()
    assert bias.grad.dtype == torch.float32


def test_nothing_of_size_length_squared_is_kept_a_sentence():
    needs_fused()
    layer, x, bias = layer_and_input("fused", length=128)
    kept = []
    with torch.autograd.graph.saved_tensors_hooks(lambda tensor: kept.append(tensor.shape) or tensor, lambda tensor: tensor):
        layer(x, bias=bias)
    assert torch.Size([3, 128, 128]) in kept
    assert not [shape for shape in kept if shape.numel() >= 2 * 3 * 128 * 128]


def test_double_precision_takes_the_eager_backend():
    assert select_backend("auto", "cpu", torch.float64, True, True) == "eager"
    assert select_backend("fused", "cpu", torch.float64, True, True) == "eager"
    layer, x, bias = layer_and_input("auto", length=5)
    assert layer.double()(x.double(), bias=bias.double()).dtype == torch.float64


def test_non_contiguous_inputs(backend):
    x = example(19, "right")
    expected = with_gradients(eager_attention, x, torch.float64)
    x.qkv = x.qkv.permute(4, 3, 2, 1, 0).contiguous().permute(4, 3, 2, 1, 0)
    x.bias = x.bias.transpose(1, 2).contiguous().transpose(1, 2)
    x.padding = x.padding.t().contiguous().t()
    x.upstream = x.upstream.transpose(0, 1).contiguous().transpose(0, 1)
    assert_equal(with_gradients(BACKENDS[backend], x), expected, TOLERANCE[torch.float32])


def test_nan_is_not_hidden(backend):
    x = example(17)
    x.qkv[1, 3, 1, 0, 0] = float("nan")  # one key
    out = BACKENDS[backend](x.qkv, x.bias, None, x.scale)
    assert out[1, :, :10].isnan().all()
    assert not out[0].isnan().any()


def test_operators_follow_torchs_rules():
    """Schema, fake tensors (which torch.compile traces with) and autograd registration."""
    needs_fused()
    x, seed = example(17, "right"), torch.tensor(3)
    qkv, bias = x.qkv.requires_grad_(), x.bias.requires_grad_()
    torch.library.opcheck(torch.ops.fairseq_tupe.attention, (qkv, bias, x.padding, x.scale, 0.1, seed, None))
    torch.library.opcheck(torch.ops.fairseq_tupe.dropout_add, (x.upstream.requires_grad_(), x.upstream, 0.1, seed))
    torch.library.opcheck(torch.ops.fairseq_tupe.dropout, (x.upstream, 0.1, seed, torch.float32))


def test_torch_compile_traces_a_layer_whole(backend):
    layer, x, bias = layer_and_input(backend)
    layer.eval()
    compiled = torch.compile(layer, backend="aot_eager", fullgraph=True)
    for ours, theirs in zip(
        torch.autograd.grad(compiled(x, bias=bias).square().sum(), [x, bias]),
        torch.autograd.grad(layer(x, bias=bias).square().sum(), [x, bias]),
        strict=True,
    ):
        torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-4)

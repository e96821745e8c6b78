"""Dropout on hidden states: values and gradients by its own mask, statistics, seeds, and the cases left to torch."""

import math

import pytest
import torch

from fairseq_tupe.modules.attention_backends import cpu_fused
from fairseq_tupe.modules.dropout import Dropout

pytestmark = pytest.mark.skipif(cpu_fused.unavailable() is not None, reason=f"no fused operators: {cpu_fused.unavailable()}")
TYPES = [(torch.float32, torch.float32), (torch.bfloat16, torch.float32), (torch.bfloat16, torch.bfloat16)]


@pytest.mark.parametrize("shape", [(1,), (3, 5, 7), (2, 1024), (33, 65)])
@pytest.mark.parametrize(("x_type", "residual_type"), TYPES)
def test_values_and_gradients(x_type, residual_type, shape):
    torch.manual_seed(0)
    x, residual = torch.randn(shape).to(x_type), torch.randn(shape).to(residual_type)
    upstream, dropout = torch.randn(shape), Dropout(0.3)
    torch.manual_seed(1)
    keep = dropout(torch.ones(shape)).gt(0)
    x.requires_grad_(), residual.requires_grad_()
    torch.manual_seed(1)
    out = dropout(x, residual=residual)
    out.backward(upstream.to(out.dtype))
    assert out.dtype == torch.promote_types(x_type, residual_type)
    tolerance = 1e-6 if out.dtype == torch.float32 else 2e-2
    torch.testing.assert_close(out.double(), x.double() * keep / 0.7 + residual.double(), rtol=tolerance, atol=tolerance)
    given, tolerance = upstream.to(out.dtype).double(), 1e-6 if x_type == torch.float32 else 1e-2
    torch.testing.assert_close(x.grad.double(), given * keep / 0.7, rtol=tolerance, atol=tolerance)
    torch.testing.assert_close(residual.grad.double(), given, rtol=1e-2, atol=0)
    assert (x.grad.dtype, residual.grad.dtype) == (x_type, residual_type)


@pytest.mark.parametrize("p", [0.1, 0.5])
def test_statistics(p):
    torch.manual_seed(3)
    keep = Dropout(p)(torch.ones(512, 1024)).gt(0).float()
    spread = math.sqrt(p * (1 - p))
    assert abs(keep.mean() - (1 - p)) < 4 * spread / math.sqrt(keep.numel())
    for axis in (0, 1):
        assert keep.mean(axis).std().item() == pytest.approx(spread / math.sqrt(keep.shape[axis]), rel=0.1)
    z = (keep.flatten() - (1 - p)) / spread
    for lag in (1, 2, 16, 1024, 1025):
        assert abs((z[lag:] * z[:-lag]).mean()) < 5 / math.sqrt(len(z) - lag), f"correlation at distance {lag}"


def test_seed_decides_and_evaluation_drops_nothing():
    x, dropout = torch.randn(50, 30), Dropout(0.5)

    def draw(seed):
        torch.manual_seed(seed)
        return dropout(x)

    assert torch.equal(draw(1), draw(1))
    assert not torch.equal(draw(1), draw(2))
    assert not torch.equal(dropout(x), dropout(x))
    assert torch.equal(dropout.eval()(x, residual=x), x + x)


@pytest.mark.parametrize(("backend", "dtype"), [("eager", torch.float32), ("auto", torch.float64)])
def test_other_cases_take_torchs_dropout(backend, dtype):
    x = torch.randn(20, 30, dtype=dtype)
    torch.manual_seed(1)
    ours = Dropout(0.5, backend)(x)
    torch.manual_seed(1)
    assert torch.equal(ours, torch.nn.functional.dropout(x, 0.5))


def test_no_mask_is_kept():
    kept = []
    x = torch.randn(64, 64, requires_grad=True)
    with torch.autograd.graph.saved_tensors_hooks(lambda tensor: kept.append(tensor.numel()) or tensor, lambda tensor: tensor):
        Dropout(0.1)(x, residual=x)
    assert kept == [1]

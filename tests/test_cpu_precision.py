"""--cpu-autocast bf16, and the positional bias that is kept in evaluation."""

import pytest
import torch
from small_model import random_tokens, small_model

from fairseq_tupe.errors import TupeError


@pytest.mark.parametrize("backend", ["eager", "sdpa", "auto"])
def test_autocast_is_close_and_keeps_fp32_weights(backend):
    tokens, results = random_tokens(3, 9), []
    for precision in ("none", "bf16"):
        model = small_model(rel_pos=True, cpu_autocast=precision, attention_backend=backend)
        model.register_classification_head("sentence", num_classes=2)
        logits = model(tokens)[0]
        scores = model(tokens, classification_head_name="sentence")[0]
        assert scores.dtype == torch.float32
        (logits.float().logsumexp(-1).mean() + scores.square().mean()).backward()
        gradients = {name: p.grad for name, p in model.named_parameters() if p.grad is not None}
        assert {grad.dtype for grad in gradients.values()} == {torch.float32}
        results.append((logits, gradients))
    (exact, exact_gradients), (rounded, rounded_gradients) = results
    assert rounded.dtype == torch.bfloat16
    difference = (rounded - exact).norm() / exact.norm()
    assert 1e-4 < difference < 5e-2
    assert rounded_gradients.keys() == exact_gradients.keys()
    flat = [torch.cat([grad.flatten() for grad in grads.values()]) for grads in (exact_gradients, rounded_gradients)]
    assert torch.cosine_similarity(*flat, dim=0) > 0.98


def test_bias_is_exact_under_autocast():
    model = small_model(rel_pos=True, cpu_autocast="bf16")
    bias = model.encoder.sentence_encoder.positional_bias
    exact = bias(9)
    with torch.autocast("cpu", torch.bfloat16):
        assert torch.equal(bias(9), exact)


def test_autocast_is_refused_where_weights_are_not_fp32():
    with pytest.raises(TupeError, match="--cpu-autocast bf16 is for fp32 weights on a CPU, this model is in float64 on cpu"):
        small_model(cpu_autocast="bf16").double()(random_tokens(1, 4))


def count_builds(model) -> list:
    bias, calls = model.encoder.sentence_encoder.positional_bias, []
    build = bias._build
    bias._build = lambda length: calls.append(length) or build(length)
    return calls


@torch.no_grad()
def test_bias_is_kept_until_something_changes():
    model, tokens = small_model(rel_pos=True), random_tokens(2, 7)
    calls = count_builds(model)
    first = model(tokens)[0]
    assert torch.equal(model(tokens)[0], first)
    assert calls == [7]
    with torch.inference_mode():
        model(tokens)
    model(tokens[:, :5])
    model(tokens)
    assert calls == [7, 7, 5, 7], "an inference tensor can't serve elsewhere; one length is kept"
    model.encoder.sentence_encoder.positional_bias.relative.weight.mul_(2.0)
    changed = model(tokens)[0]
    assert not torch.allclose(changed, first)
    model.train()
    model.encoder.sentence_encoder.positional_bias.relative.weight.data.div_(2.0)  # as fairseq's adam does: no trace
    torch.testing.assert_close(model.eval()(tokens)[0], first, rtol=1e-3, atol=1e-3)


def test_bias_is_never_kept_with_gradients():
    model, tokens = small_model(), random_tokens(2, 7)
    calls = count_builds(model)
    for _ in range(2):
        model(tokens)[0].sum().backward()
    assert calls == [7, 7]

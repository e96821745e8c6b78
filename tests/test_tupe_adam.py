"""The fused Adam: fairseq's own updates, the original's recorded ones, and checkpoints that either optimizer can read."""

import copy

import pytest
import torch
import torch.nn.functional as F
from fairseq.optim.adam import Adam
from fairseq.utils import clip_grad_norm_
from golden_data import VARIANTS, GoldenModel
from omegaconf import OmegaConf

from fairseq_tupe.errors import TupeError
from fairseq_tupe.optim.tupe_adam import TupeAdam, TupeAdamConfig

SETTINGS = {"lr": 5e-3, "betas": (0.9, 0.98), "eps": 1e-6, "weight_decay": 0.01}


def parameters(seed: int = 0) -> list[torch.nn.Parameter]:
    torch.manual_seed(seed)
    return [torch.nn.Parameter(torch.randn(shape)) for shape in ((7, 5), (300,), (1,))]


def gradients(update: int) -> list[torch.Tensor]:
    """Of very different sizes, so that eps matters in some and not in others; the last parameter skips two updates."""
    torch.manual_seed(100 + update)
    grads = [torch.randn(7, 5), torch.randn(300) * 1e-6, torch.randn(1) * 1e-3]
    return [*grads[:2], None if update in (0, 3) else grads[2]]


def ours(params) -> TupeAdam:
    cfg = TupeAdamConfig(adam_betas="(0.9, 0.98)", adam_eps=1e-6, weight_decay=0.01, lr=[5e-3])
    return TupeAdam(OmegaConf.structured(cfg), params)


def run(optimizer, params, updates) -> None:
    for update in updates:
        for parameter, grad in zip(params, gradients(update), strict=True):
            parameter.grad = grad
        optimizer.step()


def assert_same(left, right, tolerance=1e-6):
    for a, b in zip(left, right, strict=True):
        torch.testing.assert_close(a, b, rtol=tolerance, atol=tolerance)


def test_equals_fairseqs_adam():
    left, right = parameters(), parameters()
    run(ours(left), left, range(10))
    run(Adam(right, **SETTINGS), right, range(10))
    assert_same(left, right)
    torchs = parameters()
    run(torch.optim.AdamW(torchs, **SETTINGS), torchs, range(10))
    assert (torchs[1] - right[1]).abs().max() > 1e-4  # so the comparison can fail


@pytest.mark.parametrize("direction", ["from fairseq", "to fairseq", "to itself"])
def test_checkpoints_are_interchangeable(direction):
    straight = parameters()
    run(Adam(straight, **SETTINGS), straight, range(8))
    first, second = parameters(), parameters(1)
    before = Adam(first, **SETTINGS) if direction == "from fairseq" else ours(first)
    run(before, first, range(5))
    state = copy.deepcopy(before.state_dict())
    assert set(state["param_groups"][0]) == {"lr", "betas", "eps", "weight_decay", "amsgrad", "params"}
    assert all(type(value["step"]) is int and len(value) == 3 for value in state["state"].values())
    with torch.no_grad():
        for to, value in zip(second, first, strict=True):
            to.copy_(value)
    after = Adam(second, **SETTINGS) if direction == "to fairseq" else ours(second)
    after.load_state_dict(state)
    run(after, second, range(5, 8))
    assert_same(second, straight)


@pytest.mark.parametrize("variant", VARIANTS)
def test_recorded_updates_of_the_original(variant):
    golden = GoldenModel(variant)
    model, expected = golden.build().train(), golden.expected
    cfg = TupeAdamConfig(adam_betas="(0.9, 0.999)", adam_eps=1e-6, weight_decay=0.01, lr=[5e-4])
    optimizer = TupeAdam(OmegaConf.structured(cfg), model.parameters())
    for step, (mean_loss, norm) in enumerate(expected["traj_loss_gnorm"].tolist()):
        tokens, target, masked = (expected[f"traj_{part}_{step}"] for part in ("src", "tgt", "mask"))
        loss = F.cross_entropy(model(tokens, masked_tokens=masked)[0], target[masked])
        optimizer.zero_grad()
        optimizer.backward(loss)
        assert optimizer.clip_grad_norm(1.0).item() == pytest.approx(norm, rel=1e-4), f"gradient norm of update {step}"
        optimizer.step()
        assert loss.item() == pytest.approx(mean_loss, abs=1e-4), f"loss of update {step}"


def test_clipping_equals_fairseqs():
    left, right = parameters(), parameters()
    for max_norm in (0, 0.5, 1e9):
        for params in (left, right):
            for parameter, grad in zip(params, gradients(1), strict=True):
                parameter.grad = grad
        theirs = clip_grad_norm_(right, max_norm)
        torch.testing.assert_close(ours(left).clip_grad_norm(max_norm), theirs)
        assert_same([p.grad for p in left], [p.grad for p in right])


def test_other_types_are_refused():
    with pytest.raises(TupeError, match="float32 parameters, got torch.float16: use --optimizer adam"):
        ours([torch.nn.Parameter(torch.ones(2, dtype=torch.float16))])

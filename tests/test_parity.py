"""Equal to the original in every digit: values, gradients, ten updates, a classification head, a whole training run."""

import itertools
import math

import pytest
import torch
import torch.nn.functional as F
from fairseq.optim.adam import Adam
from golden_data import GOLDEN, VARIANTS, GoldenModel, reference_dictionary
from sklearn.metrics import accuracy_score, matthews_corrcoef

from fairseq_tupe.interop.reference import build_reference_model, convert_name, load_reference_checkpoint
from fairseq_tupe.modules.attention_backends import cpu_fused
from fairseq_tupe.modules.attention_backends.selection import BACKENDS
from fairseq_tupe.modules.positional_bias import relative_position_bucket, reset_cls


@pytest.fixture(scope="module", params=itertools.product(VARIANTS, BACKENDS), ids="-".join)
def golden(request) -> GoldenModel:
    variant, backend = request.param
    if backend == "fused" and cpu_fused.unavailable() is not None:
        pytest.skip(f"no fused operators here: {cpu_fused.unavailable()}")
    return GoldenModel(variant, backend)


def close(actual, expected, tolerance=1e-5):
    torch.testing.assert_close(actual, expected, rtol=0, atol=tolerance)


def test_logits_and_hidden_states(golden):
    model, expected = golden.build(), golden.expected
    with torch.no_grad():
        logits, extra = model(expected["src_tokens"], return_all_hiddens=True)
        masked, _ = model(expected["src_tokens"], masked_tokens=expected["masked_tokens"])
    close(logits.transpose(0, 1), expected["lm_logits"])
    close(torch.stack(extra["inner_states"]), expected["inner_states_TBC"])
    close(masked, expected["masked_logits"])


def test_positional_bias_at_four_lengths(golden):
    bias = golden.build().encoder.sentence_encoder.positional_bias
    with torch.no_grad():
        for length, key in ((40, "full"), (17, "len"), (1, "len1"), (2, "len2")):
            close(bias(length), golden.expected[f"bias_HLL_{key}"])


def test_loss_and_every_gradient(golden):
    model, expected = golden.build(), golden.expected
    loss = masked_loss(model, expected["src_tokens"], expected["target"], expected["masked_tokens"])
    close(loss, expected["loss_sum_nats"])
    loss.backward()
    gradients = {name: parameter.grad for name, parameter in model.named_parameters()}
    assert {convert_name(name) for name in expected["grads"]} == set(gradients)
    for name, theirs in expected["grads"].items():
        ours, largest = gradients[convert_name(name)], theirs.abs().max().item()
        assert (ours - theirs).abs().max() <= 1e-4 * largest + 1e-9, name


def masked_loss(model, tokens, target, masked):
    """Summed negative log-likelihood of the masked tokens in nats."""
    return F.cross_entropy(model(tokens, masked_tokens=masked)[0].float(), target[masked], reduction="sum")


def test_ten_adam_updates(golden):
    model, expected = golden.build().train(), golden.expected
    optimizer = Adam(model.parameters(), lr=5e-4, betas=(0.9, 0.999), eps=1e-6, weight_decay=0.01)
    for step, (mean_loss, norm) in enumerate(expected["traj_loss_gnorm"].tolist()):
        tokens, target, masked = (expected[f"traj_{part}_{step}"] for part in ("src", "tgt", "mask"))
        loss = masked_loss(model, tokens, target, masked)
        optimizer.zero_grad()
        (loss / masked.sum()).backward()
        ours = torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        assert loss.item() / masked.sum().item() == pytest.approx(mean_loss, abs=1e-4), f"loss of update {step}"
        assert ours.item() == pytest.approx(norm, rel=1e-4), f"gradient norm of update {step}"


def test_classification_head(golden):
    model, expected = golden.build(), golden.expected
    model.register_classification_head("sentence_classification_head", num_classes=3)
    model.classification_heads.load_state_dict(expected["cls_head"])
    model.eval()
    with torch.no_grad():
        logits, _ = model(expected["src_tokens"], classification_head_name="sentence_classification_head")
    close(logits, expected["cls_logits"])


def test_relative_buckets():
    for key, expected in torch.load(GOLDEN / "relative_buckets.pt", weights_only=True).items():
        length, bins, distance = (int("".join(filter(str.isdigit, part))) for part in key.split("_"))
        positions = torch.arange(length)
        buckets = relative_position_bucket(positions[None, :] - positions[:, None], bins, distance)
        assert bins not in buckets, "the [CLS] column's bucket must be free"
        assert bins // 2 not in buckets, "the [CLS] row's bucket must be free"
        reset = reset_cls(buckets[None], torch.tensor([bins // 2]), torch.tensor([bins]))[0]
        assert torch.equal(reset, expected.long()), key


def test_theta1_has_no_effect(golden):
    """Row 0 of the bias is constant, so it cancels in the softmax (DESIGN: true to the paper)."""
    model, tokens = golden.build(), golden.expected["src_tokens"]
    with torch.no_grad():
        before = model(tokens)[0]
        model.encoder.sentence_encoder.positional_bias.untied.embedding.weight[0].normal_()
        close(model(tokens)[0], before)


@pytest.mark.parametrize("variant", VARIANTS)
def test_reference_run_losses(shared, variant):
    run = shared / "golden" / "reference_run"
    dictionary = reference_dictionary(run / "data-bin" / "dict.txt")
    model = build_reference_model(load_reference_checkpoint(run / f"{variant}.checkpoint_last.pt"), dictionary)
    items = torch.load(run / f"{variant}.valid_items.pt", weights_only=True)
    # the original could not compute the samples longer than 128 positions: they have no loss
    computed = [row for row, nll in enumerate(items["nll_sum_nats"].tolist()) if not math.isnan(nll)]
    losses = [summed_loss(model, items["src_tokens"][row], items["target"][row]) for row in computed]
    assert len(losses) == 238
    close(torch.tensor(losses), items["nll_sum_nats"][computed].float(), 1e-4)
    recorded = {"tupe_a": 8.6128, "tupe_r": 8.6187}[variant]
    bits = sum(losses) / items["num_masked"][computed].sum().item() / math.log(2)
    assert bits == pytest.approx(recorded, abs=1e-4)


def summed_loss(model, tokens, target) -> float:
    """Of one sample; its target is padding where nothing is predicted."""
    with torch.no_grad():
        return masked_loss(model, tokens[None], target[None], target[None].ne(model.encoder.dictionary.pad())).item()


def test_reference_run_sst2(shared):
    run = shared / "golden" / "reference_run"
    dictionary = reference_dictionary(run / "SST-2-bin" / "input0" / "dict.txt")
    model = build_reference_model(load_reference_checkpoint(run / "tupe_r_sst2.checkpoint_last.pt"), dictionary)
    recorded = torch.load(run / "tupe_r_sst2.dev_logits.pt", weights_only=True)
    with torch.no_grad():
        logits = [
            model(tokens[None], classification_head_name="sentence_classification_head")[0] for tokens in recorded["src_tokens"]
        ]
    close(torch.cat(logits), recorded["logits"], 1e-4)
    predictions = torch.cat(logits).argmax(1)
    assert accuracy_score(recorded["target_index"], predictions) == pytest.approx(recorded["accuracy"], abs=1e-6)
    assert matthews_corrcoef(recorded["target_index"], predictions) == pytest.approx(recorded["mcc"], abs=1e-6)

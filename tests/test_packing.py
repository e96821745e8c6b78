"""Sentences of different lengths computed without their padding equal the padded batch."""

import pytest
import torch
from small_model import VARIANTS, random_tokens, small_model

from fairseq_tupe.modules.attention_backends import cpu_fused
from fairseq_tupe.modules.sentence_encoder import Packing

pytestmark = pytest.mark.skipif(cpu_fused.unavailable() is not None, reason=f"no fused operators: {cpu_fused.unavailable()}")
LENGTHS = (4, 11, 1, 7)


def padded_batch() -> torch.Tensor:
    tokens = random_tokens(len(LENGTHS), max(LENGTHS))
    for row, length in enumerate(LENGTHS):
        tokens[row, length:] = 1
    return tokens


def results(model, tokens) -> list[torch.Tensor]:
    """Classes, features, and all gradients."""
    real = tokens.ne(1)
    classes = model(tokens, classification_head_name="sentence")[0]
    features = model.extract_features(tokens)[0]
    (classes.square().sum() + features.square().sum() + model(tokens, masked_tokens=real)[0].square().mean()).backward()
    return [classes, features, *(p.grad for p in model.parameters() if p.grad is not None)]


@pytest.mark.parametrize("prenorm", [False, True])
@pytest.mark.parametrize("variant", VARIANTS)
def test_equals_the_padded_batch(variant, prenorm):
    tokens, found = padded_batch(), []
    for backend in ("eager", "fused"):
        model = small_model(**VARIANTS[variant], encoder_normalize_before=prenorm, attention_backend=backend)
        model.register_classification_head("sentence", num_classes=3)
        torch.manual_seed(0)
        for parameter in model.classification_heads.parameters():
            torch.nn.init.normal_(parameter)
        shapes = []
        model.encoder.sentence_encoder.layers[0].fc1.register_forward_hook(lambda m, i, out, to=shapes: to.append(out.shape[:2]))
        found.append(results(model.eval(), tokens))
        packs = backend == "fused" and variant != "bert-a-d"
        # whoever asks for features may read those of padding
        assert set(shapes) == ({(1, sum(LENGTHS)), (4, 11)} if packs else {(4, 11)})
    for theirs, ours in zip(*found, strict=True):
        assert (ours - theirs).abs().max() <= 2e-4 * max(theirs.abs().max().item(), 0.1)


def test_dropout_by_a_shared_mask():
    heads, dim, p = 3, 10, 0.3
    torch.manual_seed(0)
    qkv, bias = torch.randn(1, sum(LENGTHS), 3, heads, dim), torch.randn(heads, 11, 11)
    offsets = torch.tensor([0, 4, 15, 16, 23])
    torch.manual_seed(1)
    packed = cpu_fused.fused_attention(qkv, bias, None, 0.2, p, offsets)
    torch.manual_seed(1)
    keep = cpu_fused.attention_keep_mask(cpu_fused.draw_seed(), 4, heads, 11, p)
    for row, (begin, end) in enumerate(zip(offsets, offsets[1:], strict=False)):
        length = end - begin
        query, key, value = qkv[0, begin:end].double().permute(1, 2, 0, 3)
        weights = torch.softmax(query @ key.transpose(1, 2) * 0.2 + bias[:, :length, :length].double(), -1)
        expected = (weights * keep[row, :, :length, :length] / (1 - p)) @ value
        torch.testing.assert_close(packed[0, begin:end].double(), expected.transpose(0, 1).flatten(1), rtol=1e-5, atol=1e-5)


def test_only_padding_on_the_right_is_packed():
    packing = Packing.of(padded_batch().eq(1))
    assert packing.offsets.tolist() == [0, 4, 15, 16, 23]
    assert packing.indices.tolist() == [*range(4), *range(11, 22), 22, *range(33, 40)]
    for row in ([1, 0, 0], [0, 1, 0], [1, 1, 1]):
        assert Packing.of(torch.tensor([[0, 0, 0], row]).bool()) is None


def test_bad_offsets_are_refused():
    qkv = torch.randn(1, 6, 3, 2, 4)
    for offsets in ([0, 3, 5], [1, 3, 6], [0, 7, 6]):
        with pytest.raises(RuntimeError, match="packed sentence"):
            cpu_fused.fused_attention(qkv, None, None, 1.0, 0.0, torch.tensor(offsets))

"""The model beyond the recorded variants: every encoding, stock RoBERTa, initialisation, padding, numerics, refusals."""

import itertools
from argparse import Namespace
from types import SimpleNamespace

import pytest
import torch
from fairseq.data import Dictionary
from fairseq.models.roberta import RobertaModel
from fairseq.utils import get_activation_fn
from loop_oracle import LoopEncoder, t5_bucket
from omegaconf import OmegaConf
from small_model import SIZES, VARIANTS, random_tokens, small_dictionary, small_model

from fairseq_tupe.errors import TupeError
from fairseq_tupe.models.config import TupeRobertaConfig
from fairseq_tupe.models.encoder_adapter import TupeRobertaEncoder
from fairseq_tupe.modules.attention import BiasedSelfAttention
from fairseq_tupe.modules.encoder_layer import ACTIVATIONS
from fairseq_tupe.modules.positional_bias import PositionalBias, RelativeBias, UntiedPositions, reset_cls


@pytest.mark.parametrize("prenorm", [False, True])
@pytest.mark.parametrize("variant", VARIANTS)
def test_equals_the_loop_form_of_the_equations(variant, prenorm):
    options = VARIANTS[variant]
    model = small_model(**options, encoder_normalize_before=prenorm)
    oracle = LoopEncoder(
        model.state_dict(),
        heads=3,
        encoding=options.get("position_encoding", "untied"),
        tie_cls=options.get("tie_cls", False),
        bins=8 if options.get("rel_pos") else None,
        max_distance=9,
    )
    with torch.no_grad():
        for length in (1, 2, 5, SIZES["max_positions"]):
            tokens = random_tokens(1, length)
            torch.testing.assert_close(model.extract_features(tokens)[0][0].double(), oracle(tokens[0]), rtol=1e-4, atol=1e-4)


def test_reset_by_hand():
    """Cell (0, 0) takes the row's value; nothing else of row 0 and column 0 survives."""
    bias = torch.arange(25.0).view(1, 5, 5)
    expected = [
        [-1, -1, -1, -1, -1],
        [-2, 6, 7, 8, 9],
        [-2, 11, 12, 13, 14],
        [-2, 16, 17, 18, 19],
        [-2, 21, 22, 23, 24],
    ]
    assert reset_cls(bias, torch.tensor([-1.0]), torch.tensor([-2.0]))[0].tolist() == expected
    assert reset_cls(torch.ones(1, 1, 1), torch.tensor([-1.0]), torch.tensor([-2.0]))[0].tolist() == [[-1.0]]


def test_relative_bias_reads_the_diagonals():
    relative = RelativeBias(num_heads=2, num_bins=8, max_distance=9)
    torch.nn.init.normal_(relative.weight)
    bias = relative(13)
    for i, j in itertools.product(range(13), repeat=2):
        assert torch.equal(bias[:, i, j], relative.weight[t5_bucket(j - i, 8, 9)])


def test_bias_is_built_once_and_never_expanded_over_the_batch():
    model, shapes = small_model(rel_pos=True, encoder_layers=3), []
    positional_bias = model.encoder.sentence_encoder.positional_bias
    assert isinstance(positional_bias, PositionalBias)
    positional_bias.register_forward_hook(lambda module, inputs, output: shapes.append(tuple(output.shape)))
    model(random_tokens(4, 7))
    assert shapes == [(3, 7, 7)]


def test_bert_a_equals_stock_roberta():
    dictionary = small_dictionary()
    sizes = {"encoder_layers": 2, "encoder_embed_dim": 18, "encoder_ffn_embed_dim": 22, "encoder_attention_heads": 3}
    torch.manual_seed(3)
    stock = RobertaModel.build_model(Namespace(**sizes, max_positions=11), SimpleNamespace(source_dictionary=dictionary))
    stock.eval()
    with torch.no_grad():
        for parameter in stock.parameters():
            parameter.normal_(std=0.3)
        stock.encoder.sentence_encoder.embed_tokens.weight[dictionary.pad()].zero_()
    ours = small_model(position_encoding="absolute")
    ours.load_state_dict(from_stock(stock.state_dict(), ours.state_dict(), dictionary.pad()))
    tokens = random_tokens(3, 9)
    tokens[1, 5:] = dictionary.pad()
    real = tokens.ne(dictionary.pad())
    with torch.no_grad():
        torch.testing.assert_close(ours(tokens)[0][real], stock(tokens)[0][real], rtol=0, atol=1e-5)


def from_stock(theirs: dict, ours: dict, pad: int) -> dict:
    """Stock RoBERTa's weights under our names; its position table begins after the row of padding."""
    copied = {"encoder.positional_signature": ours["encoder.positional_signature"]}
    for name in ours:
        if "in_proj" in name:
            copied[name] = torch.cat([theirs[name.replace("in_proj", f"{part}_proj")] for part in "qkv"])
        elif "embed_positions" in name:
            copied[name] = theirs[name][pad + 1 :]
        elif "signature" not in name:
            copied[name] = theirs[name]
    return copied


def test_initialisation_by_the_moments_of_every_parameter():
    """N(0, 0.02) for whatever is linear or embedded, zero biases, unit LayerNorms (Devlin et al., as the original has it)."""
    torch.manual_seed(0)
    for variant in VARIANTS.values():
        sizes = {
            "encoder_layers": 1,
            "encoder_embed_dim": 64,
            "encoder_ffn_embed_dim": 96,
            "encoder_attention_heads": 4,
        }
        cfg = OmegaConf.structured(TupeRobertaConfig(**{**sizes, **variant, "embedding_normalize": True, "max_positions": 90}))
        encoder = TupeRobertaEncoder(cfg, small_dictionary(200))
        for name, value in encoder.named_parameters():
            value = value.detach()
            if "layer_norm" in name or "layernorm" in name:
                assert torch.equal(value, torch.full_like(value, float(name.endswith("weight")))), name
            elif name.endswith("bias"):
                assert value.abs().max() == 0, name
            else:
                if name.endswith("embed_tokens.weight"):
                    assert value[1].abs().max() == 0, "the padding row"
                    value = value[torch.arange(len(value)) != 1]
                count = value.numel()
                assert abs(value.mean()) < 5 * 0.02 / count**0.5, name
                assert abs(value.std() / 0.02 - 1) < 5 / (2 * count) ** 0.5, name


def test_classification_head_keeps_torch_defaults_and_has_no_dropout_before_dense():
    model = small_model(pooler_dropout=0.9)
    model.register_classification_head("new", num_classes=2)
    head = model.classification_heads["new"].train()
    bound = 18**-0.5  # torch's Linear: uniform in +-1/sqrt(inputs)
    assert head.dense.weight.abs().max() <= bound
    assert head.dense.bias.abs().max() > 0
    features = torch.randn(5, 3, 18)
    seen = []
    head.dense.register_forward_hook(lambda module, inputs, output: seen.append(inputs[0]))
    head(features)
    assert torch.equal(seen[0], features[:, 0])


@pytest.mark.parametrize("variant", VARIANTS)
def test_right_padding_changes_no_real_token(variant):
    model, pad = small_model(**VARIANTS[variant]), 1
    tokens = random_tokens(1, 4)
    padded = torch.cat([tokens, torch.full((1, 7), pad)], dim=1)
    with torch.no_grad():
        torch.testing.assert_close(model(padded)[0][:, :4], model(tokens)[0], rtol=0, atol=1e-5)


def test_padding_masks_of_any_kind():
    attention = BiasedSelfAttention(18, 3, dropout=0.0, terms=2)
    x = torch.randn(2, 5, 18)
    hidden = torch.tensor([[0, 0, 0, 1, 1], [0, 0, 0, 0, 0]])
    as_bool = attention(x, padding_mask=hidden.bool())
    assert torch.equal(attention(x, padding_mask=hidden.to(torch.uint8)), as_bool)
    assert torch.equal(attention(x)[1], as_bool[1])
    torch.testing.assert_close(attention(x[:1, :3]), as_bool[:1, :3])
    assert attention(x, padding_mask=torch.ones(2, 5)).isfinite().all()


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_large_logits_stay_finite(dtype):
    """q.k of 1e4 and more: the softmax and the sum with the bias are in fp32."""
    attention = BiasedSelfAttention(32, 2, dropout=0.0, terms=2).to(dtype)
    with torch.no_grad():
        attention.in_proj.weight.copy_(torch.eye(32).repeat(3, 1) * 30)
    x = torch.full((1, 6, 32), 1.0, dtype=dtype, requires_grad=True)
    bias = torch.full((2, 6, 6), 1e4)
    out = attention(x, bias=bias)
    out.sum().backward()
    assert out.isfinite().all()
    assert x.grad.isfinite().all()
    assert 30 * 30 * 16 > 1e4


def test_bias_is_fp32_in_a_half_precision_model():
    assert small_model(rel_pos=True).half().encoder.sentence_encoder.positional_bias(5).dtype == torch.float32


def test_evaluation_after_training_mode_equals_a_fresh_load():
    """A fused inference path must never leave the bias out (it did in fairseq's stock layer, with relu)."""
    model = small_model(activation_fn="relu", rel_pos=True)
    tokens = random_tokens(2, 6)
    fresh = small_model(seed=5, activation_fn="relu", rel_pos=True)
    fresh.load_state_dict(model.state_dict())
    with torch.no_grad():
        assert torch.equal(model.train().eval()(tokens)[0], fresh(tokens)[0])
        model.encoder.sentence_encoder.positional_bias.relative.weight.normal_()
        assert not torch.allclose(model(tokens)[0], fresh(tokens)[0])


@pytest.mark.parametrize("activation", ["gelu", "gelu_accurate", "relu", "tanh", "linear"])
def test_activations_are_fairseqs(activation):
    x = torch.linspace(-4, 4, 101)
    torch.testing.assert_close(ACTIVATIONS[activation](x), get_activation_fn(activation)(x))


def test_longest_input():
    model = small_model()
    model(random_tokens(1, 11))
    with pytest.raises(TupeError, match="input of 12 tokens is longer than max_positions = 11"):
        model(random_tokens(1, 12))


def test_first_column_must_be_bos_for_features():
    tokens = random_tokens(3, 5)
    tokens[2, 0] = 9
    with pytest.raises(TupeError, match=r"column 0 of input row 2 is token 9, not <s> \(0\)"):
        small_model().extract_features(tokens)
    small_model(tie_cls=True).extract_features(tokens)
    small_model()(tokens)  # pretraining masks column 0 now and then, as the original does


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"rel_pos": True, "rel_pos_bins": 31}, "even number of at least 4.*got 31"),
        ({"rel_pos": True, "rel_pos_bins": 2}, "even number of at least 4.*got 2"),
        ({"rel_pos": True, "max_rel_pos": 2}, "--max-rel-pos must be larger than a quarter"),
        ({"encoder_attention_heads": 4}, "18 / 4 leaves 2"),
        ({"tie_cls": True, "position_encoding": "absolute"}, "--tie-cls removes the .CLS. rule"),
        ({"tie_cls": True, "position_encoding": "untied-projections"}, "--tie-cls"),
        ({"max_positions": 0}, "--max-positions must be at least 1, got 0"),
        ({"dropout": 1.5}, r"--dropout must be in \[0, 1\), got 1.5"),
    ],
)
def test_refused_settings(options, message):
    with pytest.raises(TupeError, match=message) as error:
        small_model(**options)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize(("theirs", "ours"), list(itertools.permutations(VARIANTS, 2)))
def test_weights_of_another_variant_are_refused(theirs, ours):
    state = small_model(**VARIANTS[theirs]).state_dict()
    with pytest.raises(TupeError, match="the checkpoint is of another model: it holds ") as error:
        small_model(**VARIANTS[ours]).load_state_dict(state)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (
            {"rel_pos": True},
            "it holds TUPE-A .*this model is TUPE-R .*--rel-pos.*missing in the checkpoint: .*relative.weight",
        ),
        ({"encoder_layers": 3}, "--encoder-layers is 2 there and 3 here"),
        ({"encoder_embed_dim": 12}, "--encoder-embed-dim is 18 there and 12 here"),
        ({"encoder_ffn_embed_dim": 10}, "--encoder-ffn-embed-dim is 22 there and 10 here"),
        ({"encoder_attention_heads": 2}, "--encoder-attention-heads 3.*--encoder-attention-heads 2"),
        ({"embedding_normalize": False}, "--embedding-normalize is on there and off here"),
        ({"encoder_normalize_before": True}, "--encoder-normalize-before is off there and on here"),
        ({"max_positions": 40}, "--max-positions is 11 there and 40 here"),
        ({"dictionary": small_dictionary(30)}, "its dictionary has 25 types and the data's dictionary 35"),
    ],
)
def test_weights_of_another_model_are_refused(options, message):
    with pytest.raises(TupeError, match=message):
        small_model(**options).load_state_dict(small_model().state_dict())


def test_stock_weights_are_refused():
    with pytest.raises(TupeError, match="not a checkpoint of tupe_roberta"):
        small_model().load_state_dict({"encoder.sentence_encoder.embed_tokens.weight": torch.zeros(2, 2)})


def test_heads_of_a_checkpoint(caplog):
    trained, fresh = small_model(), small_model()
    trained.register_classification_head("sentence", num_classes=3)
    state = trained.state_dict()

    fresh.register_classification_head("sentence", num_classes=2)
    fresh.load_state_dict(dict(state))
    assert "initialised anew: the checkpoint has 3 classes and inner width 18, this model 2 and 18" in caplog.text

    small_model().load_state_dict(dict(state))
    assert 'leaving out classification head "sentence"' in caplog.text

    wanted = small_model(load_checkpoint_heads=True)
    wanted.load_state_dict(dict(state))
    assert torch.equal(wanted.classification_heads["sentence"].dense.weight, state["classification_heads.sentence.dense.weight"])


def test_untied_table_has_one_row_more():
    assert len(UntiedPositions(18, 3, max_positions=11).embedding.weight) == 12


def test_dictionary_special_symbols():
    dictionary = Dictionary()
    assert (dictionary.bos(), dictionary.pad()) == (0, 1)  # what random_tokens and the padding tests rely on

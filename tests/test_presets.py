"""Sizes and options mean the same on the command line and under Hydra."""

import pytest
from fairseq import options
from fairseq.dataclass.initialize import add_defaults
from fairseq.dataclass.utils import convert_namespace_to_omegaconf
from fairseq.models import ARCH_CONFIG_REGISTRY, MODEL_DATACLASS_REGISTRY, MODEL_REGISTRY
from omegaconf import OmegaConf
from omegaconf.errors import OmegaConfBaseException
from small_model import small_dictionary

import fairseq_tupe

SIZES = {
    "tupe_roberta": (12, 768, 3072, 12),
    "tupe_roberta_base": (12, 768, 3072, 12),
    "tupe_roberta_large": (24, 1024, 4096, 16),
    "tupe_roberta_small": (6, 512, 2048, 8),
    "tupe_roberta_tiny": (2, 128, 512, 2),
}


def from_command_line(*flags):
    parser = options.get_training_parser()
    args = options.parse_args_and_arch(parser, ["data", "--task", "tupe_masked_lm", "--criterion", "masked_lm", *flags])
    return convert_namespace_to_omegaconf(args).model


def from_hydra(model: dict):
    cfg = OmegaConf.create({"model": model, "task": None, "criterion": None, "common": {"seed": 1}})
    add_defaults(cfg)  # what fairseq-hydra-train does with the inline `_name`
    return cfg.model


def sizes(cfg):
    return cfg.encoder_layers, cfg.encoder_embed_dim, cfg.encoder_ffn_embed_dim, cfg.encoder_attention_heads


@pytest.mark.parametrize("name", SIZES)
def test_presets(name):
    assert fairseq_tupe.FAIRSEQ_ERROR is None
    assert name in ARCH_CONFIG_REGISTRY
    assert sizes(from_command_line("--arch", name)) == SIZES[name]
    assert sizes(from_hydra({"_name": name})) == SIZES[name]


def test_large_has_24_layers_when_built():
    cfg = from_hydra({"_name": "tupe_roberta_large", "encoder_embed_dim": 32, "encoder_ffn_embed_dim": 32})
    task = type("Task", (), {"source_dictionary": small_dictionary()})
    model = MODEL_REGISTRY["tupe_roberta_large"].build_model(cfg, task)
    assert len(model.encoder.sentence_encoder.layers) == 24


def test_options_reach_both_sides():
    flags = ["--position-encoding", "absolute", "--rel-pos", "--rel-pos-bins", "16", "--max-rel-pos", "64"]
    flags += ["--embedding-normalize", "--encoder-normalize-before", "--max-positions", "99", "--activation-fn", "relu"]
    theirs = {"position_encoding": "absolute", "rel_pos": True, "rel_pos_bins": 16, "max_rel_pos": 64}
    theirs |= {
        "embedding_normalize": True,
        "encoder_normalize_before": True,
        "max_positions": 99,
        "activation_fn": "relu",
    }
    command_line, hydra = (
        from_command_line("--arch", "tupe_roberta_tiny", *flags),
        from_hydra({"_name": "tupe_roberta_tiny", **theirs}),
    )
    for field in MODEL_DATACLASS_REGISTRY["tupe_roberta_tiny"]().__dataclass_fields__:
        if field != "_name":
            assert str(command_line[field]) == str(hydra[field]), field


def test_unknown_names_are_refused():
    with pytest.raises(OmegaConfBaseException, match="encoder_layer"):
        from_hydra({"_name": "tupe_roberta", "encoder_layer": 3})
    with pytest.raises(SystemExit):
        from_command_line("--arch", "tupe_roberta", "--position-encoding", "tied")

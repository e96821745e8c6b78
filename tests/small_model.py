"""Small models with random weights, of any variant."""

import torch
from fairseq.data import Dictionary
from omegaconf import OmegaConf

from fairseq_tupe.models.config import TupeRobertaConfig
from fairseq_tupe.models.encoder_adapter import TupeRobertaEncoder
from fairseq_tupe.models.tupe_roberta import TupeRobertaModel

# variant -> options; odd sizes expose transposes
VARIANTS = {
    "tupe-a": {},
    "tupe-r": {"rel_pos": True},
    "tupe-a-tie-cls": {"tie_cls": True},
    "bert-a": {"position_encoding": "absolute"},
    "bert-r": {"position_encoding": "absolute", "rel_pos": True},
    "bert-a-d": {"position_encoding": "untied-projections"},
    "tupe-r-tie-cls": {"rel_pos": True, "tie_cls": True},
    "relative-only": {"position_encoding": "none", "rel_pos": True},
    "no-positions": {"position_encoding": "none"},
}
SIZES = {
    "encoder_layers": 2,
    "encoder_embed_dim": 18,
    "encoder_ffn_embed_dim": 22,
    "encoder_attention_heads": 3,
    "max_positions": 11,
    "rel_pos_bins": 8,
    "max_rel_pos": 9,
    "embedding_normalize": True,
}


def small_dictionary(words: int = 20) -> Dictionary:
    dictionary = Dictionary()
    for number in range(words):
        dictionary.add_symbol(f"w{number}")
    dictionary.add_symbol("<mask>")
    return dictionary


def small_model(seed: int = 1, dictionary=None, **options) -> TupeRobertaModel:
    """In eval mode, every parameter random, so that no term can hide behind a zero or a one."""
    torch.manual_seed(seed)
    dictionary = dictionary or small_dictionary()
    cfg = OmegaConf.structured(TupeRobertaConfig(**{**SIZES, **options}))
    model = TupeRobertaModel(cfg, TupeRobertaEncoder(cfg, dictionary))
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.normal_(std=0.5)
        model.encoder.sentence_encoder.embed_tokens.weight[dictionary.pad()].zero_()
    return model.eval()


def random_tokens(batch: int, length: int, seed: int = 2) -> torch.Tensor:
    """(batch, length) ids that begin with ``<s>``."""
    torch.manual_seed(seed)
    tokens = torch.randint(4, 24, (batch, length))
    tokens[:, 0] = 0
    return tokens

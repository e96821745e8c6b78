"""Names of settings and weights: fairseq's on one side, transformers' on the other."""

from types import SimpleNamespace
from typing import Any

import torch

from fairseq_tupe.errors import TupeError

# option of TupeRobertaConfig -> TupeConfig, where one is simply the other
SETTINGS = {
    "encoder_layers": "num_hidden_layers",
    "encoder_embed_dim": "hidden_size",
    "encoder_ffn_embed_dim": "intermediate_size",
    "encoder_attention_heads": "num_attention_heads",
    "max_positions": "max_position_embeddings",
    "activation_fn": "activation_fn",
    "pooler_activation_fn": "pooler_activation_fn",
    "dropout": "hidden_dropout_prob",
    "attention_dropout": "attention_probs_dropout_prob",
    "activation_dropout": "activation_dropout",
    "pooler_dropout": "classifier_dropout",
    "position_encoding": "position_encoding",
    "max_rel_pos": "relative_max_distance",
    "embedding_normalize": "embedding_normalize",
    "encoder_normalize_before": "normalize_before",
}
SIGNATURE = "encoder.positional_signature"
DICTIONARY_SIGNATURE = "encoder.dictionary_signature"
ENCODER, LM_HEAD, HEADS = "encoder.sentence_encoder.", "encoder.lm_head.", "classification_heads."
TIED = "lm_head.weight"


def hf_settings(settings: dict, vocabulary: int) -> dict[str, Any]:
    """Keyword arguments of TupeConfig from the options of a checkpoint.

    Args:
        settings: options of the model, complete.
        vocabulary: rows of the embedding.
    """
    from fairseq_tupe.models.config import check_config, has_cls_rule, variant_name

    cfg = SimpleNamespace(**settings)
    check_config(cfg)
    values = {theirs: settings[ours] for ours, theirs in SETTINGS.items()}
    return {
        **values,
        "vocab_size": vocabulary,
        "relative_bins": settings["rel_pos_bins"] if settings["rel_pos"] else None,
        "cls_rule": has_cls_rule(cfg),
        "variant": variant_name(settings["position_encoding"], settings["rel_pos"], settings["tie_cls"]),
    }


def fairseq_settings(config: dict) -> dict[str, Any]:
    """Options of our model from a config.json, as far as it has them."""
    values = {ours: config[theirs] for ours, theirs in SETTINGS.items() if theirs in config}
    values["rel_pos"] = config.get("relative_bins") is not None
    if values["rel_pos"]:
        values["rel_pos_bins"] = config["relative_bins"]
    values["tie_cls"] = config.get("position_encoding", "untied") == "untied" and not config.get("cls_rule", True)
    return values


def to_hf(model: dict, head: str | None) -> dict[str, torch.Tensor]:
    """Weights under transformers' names; the tied matrix once, and of several classification heads the chosen one."""
    weights = {}
    for name, value in model.items():
        if name.startswith(ENCODER):
            weights["tupe.sentence_encoder." + name[len(ENCODER) :]] = value
        elif name.startswith(LM_HEAD) and name != "encoder." + TIED:
            weights["lm_head." + name[len(LM_HEAD) :]] = value
        elif head is not None and name.startswith(f"{HEADS}{head}."):
            weights["classifier." + name[len(HEADS) + len(head) + 1 :]] = value
    return {name: value.contiguous() for name, value in weights.items()}


def from_hf(weights: dict[str, torch.Tensor], head: str) -> dict[str, torch.Tensor]:
    """Weights under our names, without the signature.

    Raises:
        TupeError: there are others than an exported model's.
    """
    model = {}
    for name, value in weights.items():
        if name.startswith("sentence_encoder."):  # saved from the bare TupeModel
            name = "tupe." + name
        if name.startswith("tupe.sentence_encoder."):
            model[ENCODER + name[len("tupe.sentence_encoder.") :]] = value
        elif name.startswith("lm_head."):
            model[LM_HEAD + name[len("lm_head.") :]] = value
        elif name.startswith("classifier."):
            model[f"{HEADS}{head}.{name[len('classifier.') :]}"] = value
        else:
            raise TupeError(f"the weights are not a TUPE model's: {name} is none of tupe.*, lm_head.* and classifier.*")
    if ENCODER + "embed_tokens.weight" not in model:
        raise TupeError("the weights are not a TUPE model's: there is no tupe.sentence_encoder.embed_tokens.weight")
    model["encoder." + TIED] = model[ENCODER + "embed_tokens.weight"]
    return model

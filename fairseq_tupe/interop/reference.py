"""Checkpoints of the original repository (guolinke/TUPE at 4c64ff7, a patched fairseq 0.8): names and settings.

Its ``dict.txt`` goes with a dictionary that has three more special symbols (``--reference-dictionary``).
"""

import argparse
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from fairseq_tupe.errors import TupeError
from fairseq_tupe.interop.safe_loading import load_training_checkpoint

SENTENCE_ENCODER = "decoder.sentence_encoder."
# below the sentence encoder: prefix there -> prefix here
RENAMED = {
    "pos.": "positional_bias.untied.embedding.",
    "pos_ln.": "positional_bias.untied.layer_norm.",
    "pos_q_linear.": "positional_bias.untied.query_proj.",
    "pos_k_linear.": "positional_bias.untied.key_proj.",
    "relative_attention_bias.": "positional_bias.relative.",
    "emb_layer_norm.": "layernorm_embedding.",
    "emb_out_layer_norm.": "layer_norm.",
}
# the original's defaults for what an old Namespace may lack
DEFAULTS = {"rel_pos": False, "rel_pos_bins": 32, "max_rel_pos": 128, "encoder_normalize_before": False}
SAME_NAME = (
    *("encoder_layers", "encoder_embed_dim", "encoder_ffn_embed_dim", "encoder_attention_heads", "max_positions"),
    *("activation_fn", "pooler_activation_fn", "dropout", "attention_dropout", "activation_dropout", "pooler_dropout"),
    *("embedding_normalize", "encoder_normalize_before", "rel_pos", "rel_pos_bins", "max_rel_pos"),
)


def is_reference(state: Any) -> bool:
    """Whether a loaded file is a checkpoint of the original; its code has no other position encoding than the untied one."""
    return (
        isinstance(state, dict)
        and isinstance(state.get("args"), argparse.Namespace)
        and SENTENCE_ENCODER + "pos.weight" in (state.get("model") or ())
    )


def load_reference_checkpoint(path: str | Path) -> dict:
    """Read a checkpoint of the original without running code from it.

    Raises:
        TupeError: the file is not one.
    """
    state = load_training_checkpoint(path)
    if not is_reference(state):
        raise TupeError(f"{path}: not a checkpoint of the original TUPE repository (no {SENTENCE_ENCODER}pos.weight in it)")
    return state


def convert_name(name: str) -> str:
    """Our name of one of the original's parameters."""
    if name.startswith(SENTENCE_ENCODER):
        rest = (
            name[len(SENTENCE_ENCODER) :].replace(".in_proj_weight", ".in_proj.weight").replace(".in_proj_bias", ".in_proj.bias")
        )
        for old, new in RENAMED.items():
            if rest.startswith(old):
                rest = new + rest[len(old) :]
                break
        return "encoder.sentence_encoder." + rest
    return "encoder." + name[len("decoder.") :] if name.startswith("decoder.") else name


def reference_settings(args: Any) -> dict:
    """Fields of :class:`TupeRobertaConfig` from the original's saved arguments."""
    return {name: getattr(args, name, DEFAULTS.get(name)) for name in SAME_NAME if hasattr(args, name) or name in DEFAULTS}


def convert_state_dict(state_dict: dict, args: Any) -> dict:
    """The original's weights under our names, with the signature that our checkpoints carry."""
    from fairseq_tupe.models.encoder_adapter import positional_signature

    converted = {convert_name(name): value for name, value in state_dict.items()}
    settings = SimpleNamespace(position_encoding="untied", tie_cls=False, **reference_settings(args))
    converted["encoder.positional_signature"] = positional_signature(settings)
    return converted


def build_reference_model(state: dict, dictionary: Any, **settings):
    """A :class:`TupeRobertaModel` in eval mode with the weights of a loaded original checkpoint, heads included.

    Args:
        state: what :func:`load_reference_checkpoint` returns.
        dictionary: with the three extra special symbols and ``<mask>``.
        settings: fields of :class:`TupeRobertaConfig` that the original has not, such as ``attention_backend``.
    """
    from omegaconf import OmegaConf

    from fairseq_tupe.models.config import TupeRobertaConfig
    from fairseq_tupe.models.encoder_adapter import TupeRobertaEncoder
    from fairseq_tupe.models.tupe_roberta import TupeRobertaModel

    cfg = OmegaConf.structured(TupeRobertaConfig(load_checkpoint_heads=True, **reference_settings(state["args"]), **settings))
    model = TupeRobertaModel(cfg, TupeRobertaEncoder(cfg, dictionary))
    model.load_state_dict(convert_state_dict(state["model"], state["args"]))
    return model.eval()

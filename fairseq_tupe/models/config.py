"""The model's configuration: one dataclass, size presets that change fields of it, and the names of the paper's variants."""

from dataclasses import dataclass, field
from typing import Any

from fairseq.dataclass import ChoiceEnum, FairseqDataclass

from fairseq_tupe.errors import TupeError
from fairseq_tupe.modules.attention_backends.selection import CHOICES as ATTENTION_BACKENDS
from fairseq_tupe.modules.encoder_layer import ACTIVATIONS
from fairseq_tupe.modules.positional_bias import check_buckets
from fairseq_tupe.modules.sentence_encoder import POSITION_ENCODINGS

ACTIVATION_CHOICES = ChoiceEnum(list(ACTIVATIONS))
CPU_AUTOCAST_CHOICES = ChoiceEnum(["none", "bf16"])
ATTENTION_BACKEND_CHOICES = ChoiceEnum(list(ATTENTION_BACKENDS))
POSITION_ENCODING_CHOICES = ChoiceEnum(list(POSITION_ENCODINGS))


@dataclass
class TupeRobertaConfig(FairseqDataclass):
    """BERT-Base sizes and the paper's dropouts; TUPE-A unless told otherwise."""

    encoder_layers: int = field(default=12, metadata={"help": "number of encoder layers"})
    encoder_embed_dim: int = field(default=768, metadata={"help": "width of the encoder"})
    encoder_ffn_embed_dim: int = field(default=3072, metadata={"help": "width inside the feed-forward part"})
    encoder_attention_heads: int = field(default=12, metadata={"help": "number of attention heads; divides the width"})
    activation_fn: ACTIVATION_CHOICES = field(default="gelu", metadata={"help": "activation of the feed-forward part"})
    pooler_activation_fn: ACTIVATION_CHOICES = field(default="tanh", metadata={"help": "activation of classification heads"})
    dropout: float = field(default=0.1, metadata={"help": "dropout on embeddings and sublayer outputs"})
    attention_dropout: float = field(default=0.1, metadata={"help": "dropout on attention probabilities"})
    activation_dropout: float = field(default=0.0, metadata={"help": "dropout inside the feed-forward part"})
    pooler_dropout: float = field(default=0.1, metadata={"help": "dropout before the projection of classification heads"})
    max_positions: int = field(default=512, metadata={"help": "longest input in tokens, <s> and </s> included"})
    position_encoding: POSITION_ENCODING_CHOICES = field(
        default="untied",
        metadata={
            "help": "untied: TUPE; absolute: an embedding added to the input (BERT-A); untied-projections: all four "
            "correlations, positions with projections of their own (BERT-A^d); none: no absolute positions"
        },
    )
    rel_pos: bool = field(default=False, metadata={"help": "add T5's relative bias (TUPE-R; BERT-R with absolute)"})
    rel_pos_bins: int = field(default=32, metadata={"help": "buckets of the relative bias, an even number"})
    max_rel_pos: int = field(default=128, metadata={"help": "distance from which on all tokens share a bucket"})
    tie_cls: bool = field(
        default=False, metadata={"help": "treat [CLS] like any position: no reset of its correlations (tie-cls)"}
    )
    embedding_normalize: bool = field(default=False, metadata={"help": "LayerNorm on the embeddings, as in both recipes"})
    encoder_normalize_before: bool = field(default=False, metadata={"help": "pre-norm layers"})
    attention_backend: ATTENTION_BACKEND_CHOICES = field(
        default="auto",
        metadata={
            "help": "how attention is computed, with equal results: auto chooses by device, type, dropout and gradient; fused: a "
            "C++ operator for CPUs, compiled on first use; sdpa: torch's; eager: plain torch"
        },
    )
    cpu_autocast: CPU_AUTOCAST_CHOICES = field(
        default="none",
        metadata={
            "help": "bf16: multiply matrices in bfloat16 on a CPU, where fairseq's --bf16 and --fp16 crash; weights, optimizer, "
            "LayerNorms, softmax and positional bias stay in fp32"
        },
    )
    load_checkpoint_heads: bool = field(
        default=False, metadata={"help": "register and load the classification heads found in the checkpoint"}
    )


@dataclass
class TupeRobertaLargeConfig(TupeRobertaConfig):
    """BERT-Large sizes (Devlin et al. 2019, section 3)."""

    encoder_layers: int = 24
    encoder_embed_dim: int = 1024
    encoder_ffn_embed_dim: int = 4096
    encoder_attention_heads: int = 16


@dataclass
class TupeRobertaSmallConfig(TupeRobertaConfig):
    """BERT-Small's width (Turc et al. 2019) with six layers: for one GPU, or a patient CPU."""

    encoder_layers: int = 6
    encoder_embed_dim: int = 512
    encoder_ffn_embed_dim: int = 2048
    encoder_attention_heads: int = 8


@dataclass
class TupeRobertaTinyConfig(TupeRobertaConfig):
    """BERT-Tiny (Turc et al. 2019): for tests and trials."""

    encoder_layers: int = 2
    encoder_embed_dim: int = 128
    encoder_ffn_embed_dim: int = 512
    encoder_attention_heads: int = 2


# registered name suffix -> configuration; "tupe_roberta" itself is the base size
PRESETS = {
    "base": TupeRobertaConfig,
    "large": TupeRobertaLargeConfig,
    "small": TupeRobertaSmallConfig,
    "tiny": TupeRobertaTinyConfig,
}


def has_cls_rule(cfg: Any) -> bool:
    """Whether [CLS] gets correlations of its own, so that column 0 of every input must be ``<s>``."""
    return str(cfg.position_encoding) == "untied" and not cfg.tie_cls


def variant_name(position_encoding: str, rel_pos: bool, tie_cls: bool) -> str:
    """The paper's name of a combination of options, such as "TUPE-R" (section 4.1 and its ablations)."""
    names = {
        "untied": "TUPE-R" if rel_pos else "TUPE-A",
        "absolute": "BERT-R" if rel_pos else "BERT-A",
        "untied-projections": "BERT-A^d" + (" with relative bias" if rel_pos else ""),
        "none": "relative bias only" if rel_pos else "no positions",
    }
    return names[position_encoding] + ("^tie-cls" if tie_cls else "")


def check_config(cfg: Any) -> None:
    """Refuse settings that can't work together.

    Raises:
        TupeError: one line that says which and why.
    """
    encoding = str(cfg.position_encoding)
    if cfg.tie_cls and encoding != "untied":
        raise TupeError(
            f"--tie-cls removes the [CLS] rule of --position-encoding untied, but --position-encoding is {encoding}, "
            "which has no such rule: leave --tie-cls out"
        )
    for name in (
        "encoder_layers",
        "encoder_embed_dim",
        "encoder_ffn_embed_dim",
        "encoder_attention_heads",
        "max_positions",
    ):
        if getattr(cfg, name) < 1:
            raise TupeError(f"--{name.replace('_', '-')} must be at least 1, got {getattr(cfg, name)}")
    check_buckets(cfg.rel_pos_bins, cfg.max_rel_pos)
    for name in ("dropout", "attention_dropout", "activation_dropout", "pooler_dropout"):
        if not 0 <= getattr(cfg, name) < 1:
            raise TupeError(f"--{name.replace('_', '-')} must be in [0, 1), got {getattr(cfg, name)}")

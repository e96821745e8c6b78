"""Contestants of the whole-model rows, each with what its users would train it with."""

from argparse import Namespace
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass
from types import SimpleNamespace

import torch
import torch.nn.functional as F
from fairseq.data import Dictionary
from fairseq.models.roberta import RobertaModel
from fairseq.optim.adam import Adam
from fairseq.utils import clip_grad_norm_
from omegaconf import OmegaConf

from fairseq_tupe.benchmark.original import as_original
from fairseq_tupe.models.config import TupeRobertaConfig
from fairseq_tupe.models.encoder_adapter import TupeRobertaEncoder
from fairseq_tupe.models.tupe_roberta import TupeRobertaModel
from fairseq_tupe.optim.tupe_adam import ExactFusedAdamW

VOCABULARY = 32768
ADAM = {"lr": 1e-4, "betas": (0.9, 0.999), "eps": 1e-6, "weight_decay": 0.01}


@dataclass(frozen=True)
class Size:
    """Of a model."""

    layers: int
    width: int = 768
    heads: int = 12
    dropout: float = 0.1
    vocabulary: int = VOCABULARY


@dataclass
class Contestant:
    """A model, its masked logits (number of masked tokens, V) of a batch, and one update of its optimizer with clipping."""

    model: torch.nn.Module
    logits: Callable[[torch.Tensor, torch.Tensor], torch.Tensor]
    update: Callable[[], None]


def dictionary(size: Size) -> Dictionary:
    """As large as the vocabulary, ``<mask>`` last."""
    words = Dictionary()
    for number in range(size.vocabulary - len(words) - 1):
        words.add_symbol(f"w{number}")
    words.add_symbol("<mask>")
    return words


def tupe(size: Size, device: str, backend: str, **options) -> TupeRobertaModel:
    """TUPE-R with the recipe's settings."""
    cfg = OmegaConf.structured(
        TupeRobertaConfig(
            encoder_layers=size.layers,
            encoder_embed_dim=size.width,
            encoder_ffn_embed_dim=4 * size.width,
            encoder_attention_heads=size.heads,
            dropout=size.dropout,
            attention_dropout=size.dropout,
            embedding_normalize=True,
            rel_pos=True,
            attention_backend=backend,
            **options,
        )
    )
    return TupeRobertaModel(cfg, TupeRobertaEncoder(cfg, dictionary(size))).to(device)


def _fairseq_update(model: torch.nn.Module) -> Callable[[], None]:
    optimizer = Adam(model.parameters(), **ADAM)

    def update() -> None:
        clip_grad_norm_(list(model.parameters()), 1.0)
        optimizer.step()

    return update


def _torch_update(model: torch.nn.Module, optimizer: torch.optim.Optimizer) -> Callable[[], None]:
    def update() -> None:
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()

    return update


def _with_head(model: torch.nn.Module, head: str | None, device: str) -> torch.nn.Module:
    """With a head of one output, before the optimizer is made."""
    if head is not None:
        model.register_classification_head(head, num_classes=1)
    return model.to(device)


def original(size: Size, device: str, head: str | None = None) -> Contestant:
    """(a): the original's computation, fairseq's Adam."""
    model = _with_head(as_original(tupe(size, device, "eager")), head, device)
    return Contestant(model, lambda tokens, masked: model(tokens, masked_tokens=masked)[0], _fairseq_update(model))


def stock_roberta(size: Size, device: str, head: str | None = None) -> Contestant:
    """(b): fairseq's RoBERTa, fairseq's Adam."""
    args = Namespace(
        encoder_layers=size.layers,
        encoder_embed_dim=size.width,
        encoder_ffn_embed_dim=4 * size.width,
        encoder_attention_heads=size.heads,
        dropout=size.dropout,
        attention_dropout=size.dropout,
        max_positions=512,
    )
    model = _with_head(RobertaModel.build_model(args, SimpleNamespace(source_dictionary=dictionary(size))), head, device)
    return Contestant(model, lambda tokens, masked: model(tokens, masked_tokens=masked)[0], _fairseq_update(model))


def transformers_roberta(size: Size, device: str) -> Contestant:
    """(c): transformers' RoBERTa with sdpa and torch's fused AdamW; it computes the logits of every token.

    Raises:
        ImportError: transformers is not installed.
    """
    from transformers import RobertaConfig, RobertaForMaskedLM

    config = RobertaConfig(
        vocab_size=size.vocabulary,
        hidden_size=size.width,
        num_hidden_layers=size.layers,
        num_attention_heads=size.heads,
        intermediate_size=4 * size.width,
        hidden_dropout_prob=size.dropout,
        attention_probs_dropout_prob=size.dropout,
        max_position_embeddings=514,
        attn_implementation="sdpa",
    )
    model = RobertaForMaskedLM(config).to(device)
    update = _torch_update(model, torch.optim.AdamW(model.parameters(), **ADAM, fused=True))
    return Contestant(model, lambda tokens, masked: model(input_ids=tokens).logits[masked], update)


def ours(size: Size, device: str, backend: str = "auto", head: str | None = None) -> Contestant:
    """(e): this package, its fused Adam."""
    model = _with_head(tupe(size, device, backend), head, device)
    update = _torch_update(model, ExactFusedAdamW(model.parameters(), **ADAM))
    return Contestant(model, lambda tokens, masked: model(tokens, masked_tokens=masked)[0], update)


def batch(size: Size, count: int, length: int, device: str) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Tokens (count, length), which of them are predicted (15%), and the targets of those."""
    generator = torch.Generator().manual_seed(0)
    tokens = torch.randint(5, size.vocabulary - 1, (count, length), generator=generator)
    tokens[:, 0] = 0
    masked = torch.rand(count, length, generator=generator) < 0.15
    masked[:, 1:2] = True  # never none
    return tokens.to(device), masked.to(device), tokens[masked].to(device)


def loss_of(contestant: Contestant, data: tuple, dtype: torch.dtype, device: str) -> torch.Tensor:
    """fairseq's masked_lm loss, under autocast where the type is not float32."""
    tokens, masked, targets = data
    with nullcontext() if dtype == torch.float32 else torch.autocast(device, dtype):
        logits = contestant.logits(tokens, masked)
    return F.cross_entropy(logits.float(), targets, reduction="sum")


def training_step(contestant: Contestant, data: tuple, dtype: torch.dtype, device: str) -> Callable[[], None]:
    """A function that does one whole update."""
    contestant.model.train()

    def step() -> None:
        loss_of(contestant, data, dtype, device).backward()
        contestant.update()
        for parameter in contestant.model.parameters():
            parameter.grad = None

    return step


def inference(contestant: Contestant, tokens: torch.Tensor, dtype: torch.dtype, device: str) -> Callable[[], torch.Tensor]:
    """A function that computes the features of a batch."""
    model = contestant.model.eval()
    features = model.roberta if hasattr(model, "roberta") else lambda batch: model(batch, features_only=True)

    def run() -> torch.Tensor:
        with torch.inference_mode(), nullcontext() if dtype == torch.float32 else torch.autocast(device, dtype):
            return features(tokens)[0]

    return run

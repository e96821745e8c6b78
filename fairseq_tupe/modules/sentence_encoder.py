"""The encoder: token embeddings without positions, one positional bias for all layers, the layers.

Dimensions: B sentences, T tokens, H heads, d head dimension, C model dimension.
"""

from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from fairseq_tupe.errors import TupeError
from fairseq_tupe.modules.attention_backends.selection import fused_refusal
from fairseq_tupe.modules.dropout import Dropout
from fairseq_tupe.modules.encoder_layer import EncoderLayer
from fairseq_tupe.modules.positional_bias import PositionalBias, RelativeBias, UntiedPositions

# name -> number of correlation terms in the attention logits (see BiasedSelfAttention)
POSITION_ENCODINGS = {"untied": 2, "absolute": 1, "untied-projections": 4, "none": 1}


def init_bert_parameters(module: nn.Module) -> None:
    """N(0, 0.02) for everything linear or embedded, biases zero, the padding row zero; for ``module.apply``."""
    if isinstance(module, (nn.Linear, nn.Embedding, RelativeBias)):
        nn.init.normal_(module.weight, mean=0.0, std=0.02)
    if isinstance(module, nn.Linear) and module.bias is not None:
        nn.init.zeros_(module.bias)
    if isinstance(module, nn.Embedding) and module.padding_idx is not None:
        with torch.no_grad():
            module.weight[module.padding_idx].zero_()


class Packing(NamedTuple):
    """The real tokens of a padded batch, one sentence after the other."""

    indices: Tensor  # (N,) of the real tokens among all B * T
    offsets: Tensor  # (B + 1,) where sentences begin, and where the last one ends

    @classmethod
    def of(cls, padding_mask: Tensor) -> "Packing | None":
        """Of a mask (B, T) that is true at padding; None unless all padding is on the right of at least one token."""
        lengths = (~padding_mask).sum(dim=1)
        on_the_right = torch.arange(padding_mask.size(1)) >= lengths.unsqueeze(1)
        if not torch.equal(on_the_right, padding_mask) or not lengths.all():
            return None
        return cls((~padding_mask).flatten().nonzero().squeeze(1), F.pad(lengths.cumsum(0), (1, 0)))


class SentenceEncoder(nn.Module):
    """Tokens to features, in any of the paper's positional encodings.

    Args:
        vocabulary, padding_idx: rows of the token embedding, and the row of padding.
        num_layers, embed_dim, ffn_dim, num_heads: sizes; ``num_heads`` divides ``embed_dim``.
        max_positions: longest input.
        position_encoding: a name in ``POSITION_ENCODINGS``. "untied": TUPE. "absolute": an embedding added to the input (BERT-A);
            its table has ``max_positions`` rows, token i uses row i. "untied-projections": projected positions added to queries
            and keys (BERT-A^d), from the same table and rows as TUPE. "none": no absolute positions.
        relative_bins, relative_max_distance: T5 buckets; ``relative_bins=None`` for no relative bias.
        cls_rule: treat [CLS] apart (only with "untied").
        embedding_normalize: LayerNorm on the embedding sum.
        normalize_before: pre-norm layers and a LayerNorm after the last one.
        dropout, attention_dropout, activation_dropout, activation: see :class:`EncoderLayer`.
        attention_backend: one of ``attention_backends.selection.CHOICES``.
    """

    def __init__(
        self,
        *,
        vocabulary: int,
        padding_idx: int,
        num_layers: int,
        embed_dim: int,
        ffn_dim: int,
        num_heads: int,
        max_positions: int,
        position_encoding: str = "untied",
        relative_bins: int | None = None,
        relative_max_distance: int = 128,
        cls_rule: bool = True,
        embedding_normalize: bool = False,
        normalize_before: bool = False,
        dropout: float = 0.1,
        attention_dropout: float = 0.1,
        activation_dropout: float = 0.0,
        activation: str = "gelu",
        attention_backend: str = "auto",
    ):
        super().__init__()
        if embed_dim % num_heads:
            raise TupeError(
                "--encoder-attention-heads must divide --encoder-embed-dim: "
                f"{embed_dim} / {num_heads} leaves {embed_dim % num_heads}"
            )
        assert cls_rule is False or position_encoding == "untied", "the [CLS] rule belongs to the untied encoding"
        self.padding_idx = padding_idx
        self.attention_backend = attention_backend
        self.max_positions = max_positions
        self.embed_tokens = nn.Embedding(vocabulary, embed_dim, padding_idx)
        self.embed_positions = nn.Embedding(max_positions, embed_dim) if position_encoding == "absolute" else None
        self.layernorm_embedding = nn.LayerNorm(embed_dim) if embedding_normalize else None
        self.dropout = Dropout(dropout, attention_backend)
        untied = UntiedPositions(embed_dim, num_heads, max_positions) if position_encoding.startswith("untied") else None
        relative = None if relative_bins is None else RelativeBias(num_heads, relative_bins, relative_max_distance)
        # BERT-A^d feeds its positions to the queries and keys, not to the bias
        self.untied_projections = untied if position_encoding == "untied-projections" else None
        self.positional_bias = PositionalBias(untied if self.untied_projections is None else None, relative, cls_rule)
        self.layers = nn.ModuleList(
            EncoderLayer(
                embed_dim=embed_dim,
                ffn_dim=ffn_dim,
                num_heads=num_heads,
                dropout=dropout,
                attention_dropout=attention_dropout,
                activation_dropout=activation_dropout,
                activation=activation,
                normalize_before=normalize_before,
                terms=POSITION_ENCODINGS[position_encoding],
                backend=attention_backend,
            )
            for _ in range(num_layers)
        )
        self.layer_norm = nn.LayerNorm(embed_dim) if normalize_before else None
        self.apply(init_bert_parameters)

    def forward(
        self, tokens: Tensor, return_all_hiddens: bool = False, real_tokens_only: bool = False
    ) -> tuple[Tensor, list[Tensor]]:
        """Features (B, T, C) of ``tokens`` (B, T), and, if asked for, the embedding output and every layer's.

        Args:
            real_tokens_only: nobody reads the features of padding, so they need not be computed: they may be zeros.

        Raises:
            TupeError: more tokens than ``max_positions``.
        """
        length = tokens.size(1)
        if length > self.max_positions:
            raise TupeError(f"input of {length} tokens is longer than max_positions = {self.max_positions}")
        if length == 0:
            raise TupeError("input of 0 tokens: every row begins with <s>")
        padding_mask = tokens.eq(self.padding_idx)
        if tokens.device.type == "cpu" and not padding_mask.any():  # elsewhere the question costs a synchronisation
            padding_mask = None
        packing = self._packing(padding_mask) if real_tokens_only and not return_all_hiddens else None
        if packing is not None:
            return self._forward_packed(tokens, packing), []
        x = self._embed(tokens, padding_mask)
        attention = {"bias": self.positional_bias(length), "padding_mask": padding_mask}
        if self.untied_projections is not None:
            query, key = self.untied_projections(length)
            attention.update(position_query=query[:, 1:], position_key=key[:, 1:])
        hiddens = [x]
        for layer in self.layers:
            x = layer(x, **attention)
            hiddens.append(x)
        if self.layer_norm is not None:
            x = self.layer_norm(x)
        return x, hiddens if return_all_hiddens else []

    def _packing(self, padding_mask: Tensor | None) -> Packing | None:
        """How to compute the real tokens only, where that is possible: padding on the right, and the fused operator."""
        if padding_mask is None or padding_mask.device.type != "cpu" or self.untied_projections is not None:
            return None
        weight = self.embed_tokens.weight
        dtype = torch.get_autocast_dtype("cpu") if torch.is_autocast_enabled("cpu") else weight.dtype
        if self.attention_backend not in ("auto", "fused") or fused_refusal(weight.device.type, dtype) is not None:
            return None
        return Packing.of(padding_mask)

    def _forward_packed(self, tokens: Tensor, packing: Packing) -> Tensor:
        """Equal to the padded computation at real tokens; zeros at padding."""
        batch, length = tokens.shape
        x = self._embed(tokens.flatten()[packing.indices].unsqueeze(0), None, packing.indices % length)
        bias = self.positional_bias(length)
        for layer in self.layers:
            x = layer(x, bias=bias, offsets=packing.offsets)
        if self.layer_norm is not None:
            x = self.layer_norm(x)
        padded = x.new_zeros(batch * length, x.size(2)).index_copy(0, packing.indices, x.squeeze(0))
        return padded.view(batch, length, -1)

    def _embed(self, tokens: Tensor, padding_mask: Tensor | None, positions: Tensor | None = None) -> Tensor:
        x = self.embed_tokens(tokens)
        if self.embed_positions is not None:
            table = self.embed_positions.weight
            x = x + (table[: tokens.size(1)] if positions is None else F.embedding(positions, table))
        if self.layernorm_embedding is not None:
            x = self.layernorm_embedding(x)
        x = self.dropout(x)
        return x if padding_mask is None else x.masked_fill(padding_mask.unsqueeze(-1), 0.0)

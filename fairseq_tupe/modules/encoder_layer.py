"""One encoder layer: attention and feed-forward, post-norm as in BERT or pre-norm."""

from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from fairseq_tupe.modules.attention import BiasedSelfAttention
from fairseq_tupe.modules.dropout import Dropout

# erf-gelu is BERT's; "gelu_accurate" is fairseq's name for the tanh approximation
ACTIVATIONS = {
    "gelu": F.gelu,
    "gelu_accurate": partial(F.gelu, approximate="tanh"),
    "relu": F.relu,
    "tanh": torch.tanh,
    "linear": lambda x: x,
}


class EncoderLayer(nn.Module):
    """(B, T, C) to (B, T, C).

    Args:
        embed_dim, ffn_dim, num_heads: sizes.
        dropout: on the output of both sublayers.
        attention_dropout, activation_dropout: on attention probabilities, and inside the feed-forward part.
        activation: a name in ``ACTIVATIONS``.
        normalize_before: LayerNorm before each sublayer (pre-norm) instead of after its residual sum.
        terms, backend: see :class:`BiasedSelfAttention`.
    """

    def __init__(
        self,
        embed_dim: int,
        ffn_dim: int,
        num_heads: int,
        dropout: float,
        attention_dropout: float,
        activation_dropout: float,
        activation: str,
        normalize_before: bool,
        terms: int,
        backend: str = "auto",
    ):
        super().__init__()
        self.normalize_before = normalize_before
        self.self_attn = BiasedSelfAttention(embed_dim, num_heads, attention_dropout, terms, backend)
        self.self_attn_layer_norm = nn.LayerNorm(embed_dim)
        self.fc1 = nn.Linear(embed_dim, ffn_dim)
        self.fc2 = nn.Linear(ffn_dim, embed_dim)
        self.final_layer_norm = nn.LayerNorm(embed_dim)
        self.activation = ACTIVATIONS[activation]
        self.dropout = Dropout(dropout, backend)
        self.activation_dropout = Dropout(activation_dropout, backend)

    def forward(self, x: Tensor, **attention) -> Tensor:
        """``attention`` goes to :meth:`BiasedSelfAttention.forward` as it is."""
        if self.normalize_before:
            x = self.dropout(self.self_attn(self.self_attn_layer_norm(x), **attention), residual=x)
            return self.dropout(self._feed_forward(self.final_layer_norm(x)), residual=x)
        x = self.self_attn_layer_norm(self.dropout(self.self_attn(x, **attention), residual=x))
        return self.final_layer_norm(self.dropout(self._feed_forward(x), residual=x))

    def _feed_forward(self, x: Tensor) -> Tensor:
        return self.fc2(self.activation_dropout(self.activation(self.fc1(x))))

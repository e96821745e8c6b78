"""What stands on the encoder: the masked language model head and classification heads."""

import torch.nn.functional as F
from torch import Tensor, nn

from fairseq_tupe.modules.encoder_layer import ACTIVATIONS


class LanguageModelHead(nn.Module):
    """dense, activation, LayerNorm, then the tied embedding matrix and a bias of its own."""

    def __init__(self, embedding: nn.Embedding, activation: str):
        super().__init__()
        vocabulary, embed_dim = embedding.weight.shape
        self.dense = nn.Linear(embed_dim, embed_dim)
        self.activation = ACTIVATIONS[activation]
        self.layer_norm = nn.LayerNorm(embed_dim)
        self.weight = embedding.weight
        self.bias = nn.Parameter(embedding.weight.new_zeros(vocabulary))

    def forward(self, features: Tensor, masked_tokens: Tensor | None = None) -> Tensor:
        """(B, T, C) to (B, T, V), or to (number of true cells, V) with a boolean ``masked_tokens`` (B, T)."""
        if masked_tokens is not None:
            features = features[masked_tokens, :]
        return F.linear(self.layer_norm(self.activation(self.dense(features))), self.weight, self.bias)


class ClassificationHead(nn.Module):
    """dense, activation, dropout, projection on the features of token 0.

    As in the original there is no dropout before ``dense`` (today's RoBERTa has one), and torch's default initialisation stays.
    """

    def __init__(self, embed_dim: int, inner_dim: int, num_classes: int, activation: str, dropout: float):
        super().__init__()
        self.dense = nn.Linear(embed_dim, inner_dim)
        self.activation = ACTIVATIONS[activation]
        self.dropout = nn.Dropout(dropout)
        self.out_proj = nn.Linear(inner_dim, num_classes)

    def forward(self, features: Tensor) -> Tensor:
        """(B, T, C) to (B, num_classes)."""
        return self.out_proj(self.dropout(self.activation(self.dense(features[:, 0, :]))))

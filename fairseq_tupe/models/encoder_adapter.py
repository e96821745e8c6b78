"""From fairseq's configuration and dictionary to the plain modules; the last place where a configuration is seen."""

import hashlib
from typing import Any

import torch
from fairseq.models import FairseqEncoder

from fairseq_tupe.models.config import check_config, has_cls_rule
from fairseq_tupe.modules.heads import LanguageModelHead
from fairseq_tupe.modules.sentence_encoder import POSITION_ENCODINGS, SentenceEncoder, init_bert_parameters


def positional_signature(cfg: Any) -> torch.Tensor:
    """The settings that change results but not always the shape of any parameter, as integers.

    It is stored in every checkpoint, so that TUPE-A^tie-cls or BERT-A^d weights, or another number of heads, can't pass for
    TUPE-A. Order: index of the position encoding, relative bias, [CLS] rule, bins, largest distance, heads.
    """
    encoding = list(POSITION_ENCODINGS).index(str(cfg.position_encoding))
    bins, distance = (cfg.rel_pos_bins, cfg.max_rel_pos) if cfg.rel_pos else (0, 0)
    values = [encoding, int(cfg.rel_pos), int(has_cls_rule(cfg)), bins, distance, cfg.encoder_attention_heads]
    return torch.tensor(values, dtype=torch.int64)


def dictionary_signature(dictionary: Any) -> torch.Tensor:
    """Two integers from the sha256 of all symbols in order; stored in every checkpoint.

    Data of another tokenizer with as many pieces would otherwise load, and mean something else.
    """
    digest = hashlib.sha256("\n".join(dictionary.symbols).encode("utf-8", "surrogatepass")).digest()
    return torch.tensor([int.from_bytes(digest[start : start + 8], "big", signed=True) for start in (0, 8)])


class TupeRobertaEncoder(FairseqEncoder):
    """Sentence encoder and language model head behind the interface of fairseq's ``RobertaEncoder``."""

    def __init__(self, cfg: Any, dictionary):
        super().__init__(dictionary)
        check_config(cfg)
        self.sentence_encoder = SentenceEncoder(
            vocabulary=len(dictionary),
            padding_idx=dictionary.pad(),
            num_layers=cfg.encoder_layers,
            embed_dim=cfg.encoder_embed_dim,
            ffn_dim=cfg.encoder_ffn_embed_dim,
            num_heads=cfg.encoder_attention_heads,
            max_positions=cfg.max_positions,
            position_encoding=str(cfg.position_encoding),
            relative_bins=cfg.rel_pos_bins if cfg.rel_pos else None,
            relative_max_distance=cfg.max_rel_pos,
            cls_rule=has_cls_rule(cfg),
            embedding_normalize=cfg.embedding_normalize,
            normalize_before=cfg.encoder_normalize_before,
            dropout=cfg.dropout,
            attention_dropout=cfg.attention_dropout,
            activation_dropout=cfg.activation_dropout,
            activation=str(cfg.activation_fn),
            attention_backend=str(cfg.attention_backend),
        )
        self.lm_head = LanguageModelHead(self.sentence_encoder.embed_tokens, str(cfg.activation_fn))
        self.lm_head.dense.apply(init_bert_parameters)
        self.register_buffer("positional_signature", positional_signature(cfg))
        self.register_buffer("dictionary_signature", dictionary_signature(dictionary))

    def forward(
        self,
        src_tokens,
        features_only=False,
        return_all_hiddens=False,
        masked_tokens=None,
        real_tokens_only=False,
        **unused,
    ):
        """Logits (B, T, V), or of the masked tokens only, or features (B, T, C); and ``{"inner_states": ...}``.

        Args:
            src_tokens: (B, T) token ids.
            features_only: skip the head.
            return_all_hiddens: ``inner_states`` is a list of (T, B, C), the embedding output first; otherwise None.
            masked_tokens: boolean (B, T); project only these, giving (number of true cells, V).
            real_tokens_only: the features of padding are not needed.
        """
        features, hiddens = self.sentence_encoder(
            src_tokens, return_all_hiddens=return_all_hiddens, real_tokens_only=real_tokens_only or masked_tokens is not None
        )
        # T x B x C is fairseq's convention for inner states
        extra = {"inner_states": [state.transpose(0, 1) for state in hiddens] if return_all_hiddens else None}
        return (features if features_only else self.lm_head(features, masked_tokens)), extra

    def max_positions(self) -> int:
        """Longest input in tokens."""
        return self.sentence_encoder.max_positions

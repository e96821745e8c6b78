"""Configuration of TUPE models in transformers."""

from transformers import PretrainedConfig

# Stock BERT and RoBERTa classes would take this configuration and start with random weights. They look up their activation
# here and fail with this text instead.
NOT_BERT = "none: this is TUPE, load it with AutoModel and trust_remote_code=True, or after import fairseq_tupe.interop.hf"


class TupeConfig(PretrainedConfig):
    """TUPE (arXiv 2006.15595) and the encodings that it is compared with.

    Args:
        vocab_size: rows of the token embedding.
        hidden_size, num_hidden_layers, num_attention_heads, intermediate_size: sizes.
        max_position_embeddings: longest input in tokens, <s> and </s> included.
        position_encoding: "untied" (TUPE), "absolute" (BERT), "untied-projections" (BERT-A^d) or "none".
        relative_bins: buckets of the relative bias; None for none.
        relative_max_distance: distance from which on all tokens share a bucket.
        cls_rule: treat <s> apart from positions; only with "untied". Inputs must then begin with <s>.
        embedding_normalize: LayerNorm on the embeddings.
        normalize_before: pre-norm layers.
        activation_fn, pooler_activation_fn: "gelu", "gelu_accurate", "relu", "tanh" or "linear".
        hidden_dropout_prob, attention_probs_dropout_prob, activation_dropout, classifier_dropout: dropout rates.
        pooler_size: width inside the classification head; None for ``hidden_size``.
        variant: the paper's name of these settings; for people.
        fairseq: settings of the checkpoint this was exported from, for the way back.
    """

    model_type = "tupe"

    def __init__(
        self,
        vocab_size=32768,
        hidden_size=768,
        num_hidden_layers=12,
        num_attention_heads=12,
        intermediate_size=3072,
        max_position_embeddings=512,
        position_encoding="untied",
        relative_bins=None,
        relative_max_distance=128,
        cls_rule=True,
        embedding_normalize=True,
        normalize_before=False,
        activation_fn="gelu",
        pooler_activation_fn="tanh",
        hidden_dropout_prob=0.1,
        attention_probs_dropout_prob=0.1,
        activation_dropout=0.0,
        classifier_dropout=0.1,
        pooler_size=None,
        variant=None,
        fairseq=None,
        pad_token_id=1,
        bos_token_id=0,
        eos_token_id=2,
        tie_word_embeddings=True,
        **kwargs,
    ):
        kwargs.pop("hidden_act", None)
        kwargs.pop("activation", None)
        self.vocab_size = vocab_size
        self.hidden_size = hidden_size
        self.num_hidden_layers = num_hidden_layers
        self.num_attention_heads = num_attention_heads
        self.intermediate_size = intermediate_size
        self.max_position_embeddings = max_position_embeddings
        self.position_encoding = position_encoding
        self.relative_bins = relative_bins
        self.relative_max_distance = relative_max_distance
        self.cls_rule = cls_rule
        self.embedding_normalize = embedding_normalize
        self.normalize_before = normalize_before
        self.activation_fn = activation_fn
        self.pooler_activation_fn = pooler_activation_fn
        self.hidden_dropout_prob = hidden_dropout_prob
        self.attention_probs_dropout_prob = attention_probs_dropout_prob
        self.activation_dropout = activation_dropout
        self.classifier_dropout = classifier_dropout
        self.pooler_size = pooler_size
        self.variant = variant
        self.fairseq = fairseq
        self.hidden_act = NOT_BERT
        self.activation = NOT_BERT  # DistilBERT's name for it
        super().__init__(
            pad_token_id=pad_token_id,
            bos_token_id=bos_token_id,
            eos_token_id=eos_token_id,
            tie_word_embeddings=tie_word_embeddings,
            **kwargs,
        )

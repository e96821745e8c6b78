"""TUPE models for transformers, around the same modules that the fairseq models are made of."""

from torch import nn
from transformers import PreTrainedModel
from transformers.modeling_outputs import BaseModelOutput, MaskedLMOutput, SequenceClassifierOutput
from transformers.utils import logging as hf_logging

from fairseq_tupe.interop.hf.configuration_tupe import TupeConfig
from fairseq_tupe.modules.heads import ClassificationHead, LanguageModelHead
from fairseq_tupe.modules.sentence_encoder import SentenceEncoder, init_bert_parameters

hf_logger = hf_logging.get_logger(__name__)


class TupePreTrainedModel(PreTrainedModel):
    """Initialisation and attention choices that all TUPE models share."""

    config_class = TupeConfig
    base_model_prefix = "tupe"
    _supports_sdpa = True
    _no_split_modules = ["EncoderLayer"]
    # a folder may hold the weights of both heads
    _keys_to_ignore_on_load_unexpected = [r"^lm_head\.", r"^classifier\."]

    def _init_weights(self, module):
        if isinstance(module, nn.LayerNorm):
            nn.init.ones_(module.weight)
            nn.init.zeros_(module.bias)
        elif isinstance(module, LanguageModelHead):
            nn.init.zeros_(module.bias)
        else:
            init_bert_parameters(module)


class TupeModel(TupePreTrainedModel):
    """The bare encoder. Inputs are right-padded and begin with ``<s>``, as the tokenizer makes them."""

    def __init__(self, config, add_pooling_layer=False):
        super().__init__(config)
        self.sentence_encoder = SentenceEncoder(
            vocabulary=config.vocab_size,
            padding_idx=config.pad_token_id,
            num_layers=config.num_hidden_layers,
            embed_dim=config.hidden_size,
            ffn_dim=config.intermediate_size,
            num_heads=config.num_attention_heads,
            max_positions=config.max_position_embeddings,
            position_encoding=config.position_encoding,
            relative_bins=config.relative_bins,
            relative_max_distance=config.relative_max_distance,
            cls_rule=config.cls_rule,
            embedding_normalize=config.embedding_normalize,
            normalize_before=config.normalize_before,
            dropout=config.hidden_dropout_prob,
            attention_dropout=config.attention_probs_dropout_prob,
            activation_dropout=config.activation_dropout,
            activation=config.activation_fn,
        )
        self.post_init()

    def get_input_embeddings(self):
        return self.sentence_encoder.embed_tokens

    def set_input_embeddings(self, value):
        self.sentence_encoder.embed_tokens = value

    def forward(
        self,
        input_ids=None,
        attention_mask=None,
        token_type_ids=None,
        position_ids=None,
        inputs_embeds=None,
        output_attentions=None,
        output_hidden_states=None,
        return_dict=None,
        **unused,
    ):
        """Features (B, T, C) of ``input_ids`` (B, T); where ``attention_mask`` (B, T) is zero there is padding.

        Raises:
            ValueError: for arguments that TUPE has no place for, left padding, or more tokens than ``max_position_embeddings``.
        """
        if input_ids is None or inputs_embeds is not None:
            raise ValueError("TUPE needs input_ids; inputs_embeds are not supported, since padding is found by its id")
        if position_ids is not None or (token_type_ids is not None and token_type_ids.any()):
            raise ValueError("TUPE has no position_ids and no token_type_ids: order gives positions, </s> the segments")
        if output_attentions:
            raise ValueError("TUPE does not return attention probabilities (output_attentions)")
        self._check_first_column(input_ids, attention_mask)
        if attention_mask is not None:
            if attention_mask.dim() != 2:
                raise ValueError(f"attention_mask must be (batch, length), got {tuple(attention_mask.shape)}")
            input_ids = input_ids.masked_fill(attention_mask == 0, self.config.pad_token_id)
        self._use_attention(self.config._attn_implementation)
        hidden = output_hidden_states if output_hidden_states is not None else self.config.output_hidden_states
        features, states = self.sentence_encoder(input_ids, return_all_hiddens=bool(hidden))
        output = BaseModelOutput(last_hidden_state=features, hidden_states=tuple(states) if hidden else None)
        return output if _wants_dict(self.config, return_dict) else output.to_tuple()

    def _use_attention(self, implementation):
        backend = "sdpa" if implementation == "sdpa" else "eager"
        if getattr(self, "_attention_backend", None) != backend:
            for module in self.modules():
                if hasattr(module, "backend"):
                    module.backend = backend
            self._attention_backend = backend

    def _check_first_column(self, input_ids, attention_mask):
        if input_ids.device.type != "cpu":  # elsewhere the question costs a synchronisation
            return
        if attention_mask is not None and attention_mask.dim() == 2 and (attention_mask[:, 0] == 0).any():
            raise ValueError("column 0 is padding: TUPE needs right-padded inputs (tokenizer.padding_side = 'right')")
        if self.config.cls_rule and input_ids[:, 0].ne(self.config.bos_token_id).any():
            hf_logger.warning_once(
                "column 0 of the input is not <s>: the [CLS] rule resets the position of an ordinary word "
                "(tokenize with add_special_tokens=True)"
            )


class TupeForMaskedLM(TupePreTrainedModel):
    """The encoder with the head that it was pretrained with."""

    _tied_weights_keys = {"lm_head.weight": "tupe.sentence_encoder.embed_tokens.weight"}

    def __init__(self, config):
        super().__init__(config)
        self.tupe = TupeModel(config)
        self.lm_head = LanguageModelHead(self.tupe.sentence_encoder.embed_tokens, config.activation_fn)
        self.post_init()

    def resize_token_embeddings(self, *args, **kwargs):
        """Refused: the head and the special tokens depend on the number of rows."""
        raise NotImplementedError("the vocabulary of a TUPE model is that of its tokenizer and can't be resized")

    def forward(self, input_ids=None, attention_mask=None, labels=None, return_dict=None, **kwargs):
        """Logits (B, T, V); with ``labels`` (B, T), -100 where nothing is predicted, the mean loss of the others in nats."""
        outputs = self.tupe(input_ids, attention_mask, return_dict=True, **kwargs)
        logits, loss = self.lm_head(outputs.last_hidden_state), None
        if labels is not None:
            loss = nn.functional.cross_entropy(logits.flatten(0, 1).float(), labels.flatten().to(logits.device))
        output = MaskedLMOutput(loss=loss, logits=logits, hidden_states=outputs.hidden_states)
        return output if _wants_dict(self.config, return_dict) else output.to_tuple()


class TupeForSequenceClassification(TupePreTrainedModel):
    """The encoder with a classification head on ``<s>``; one label makes it a regression."""

    def __init__(self, config):
        super().__init__(config)
        self.tupe = TupeModel(config)
        self.classifier = ClassificationHead(
            embed_dim=config.hidden_size,
            inner_dim=config.pooler_size or config.hidden_size,
            num_classes=config.num_labels,
            activation=config.pooler_activation_fn,
            dropout=config.classifier_dropout,
        )
        self.post_init()

    def _init_weights(self, module):
        if module in (self.classifier.dense, self.classifier.out_proj):
            module.reset_parameters()  # torch's own initialisation, as in fairseq
        else:
            super()._init_weights(module)

    def forward(self, input_ids=None, attention_mask=None, labels=None, return_dict=None, **kwargs):
        """Logits (B, labels); with ``labels`` (B,) the mean cross entropy in nats, or the mean squared error of one output."""
        outputs = self.tupe(input_ids, attention_mask, return_dict=True, **kwargs)
        logits, loss = self.classifier(outputs.last_hidden_state), None
        if labels is not None and self.config.num_labels == 1:
            loss = nn.functional.mse_loss(logits.squeeze(-1).float(), labels.flatten().float())
        elif labels is not None and labels.is_floating_point():
            loss = nn.functional.binary_cross_entropy_with_logits(logits.float(), labels.float())
        elif labels is not None:
            loss = nn.functional.cross_entropy(logits.float(), labels.flatten())
        output = SequenceClassifierOutput(loss=loss, logits=logits, hidden_states=outputs.hidden_states)
        return output if _wants_dict(self.config, return_dict) else output.to_tuple()


def _wants_dict(config, return_dict: "bool | None") -> bool:
    return config.return_dict if return_dict is None else return_dict

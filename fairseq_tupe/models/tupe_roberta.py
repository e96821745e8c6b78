"""The registered models: ``tupe_roberta`` and its sizes."""

import logging
from contextlib import nullcontext

import torch
from fairseq.models import FairseqEncoderModel, register_model
from torch import nn

from fairseq_tupe.errors import TupeError
from fairseq_tupe.models.checkpoint_compatibility import check_state_dict
from fairseq_tupe.models.config import PRESETS, TupeRobertaConfig, has_cls_rule
from fairseq_tupe.models.encoder_adapter import TupeRobertaEncoder
from fairseq_tupe.modules.heads import ClassificationHead

logger = logging.getLogger(__name__)

HEADS_PREFIX = "classification_heads."


@register_model("tupe_roberta", dataclass=TupeRobertaConfig)
class TupeRobertaModel(FairseqEncoderModel):
    """TUPE and the encodings it is compared with, behind the interface of fairseq's ``RobertaModel``."""

    def __init__(self, cfg: TupeRobertaConfig, encoder: TupeRobertaEncoder):
        super().__init__(encoder)
        self.cfg = cfg
        self.classification_heads = nn.ModuleDict()
        self._bos = encoder.dictionary.bos()
        self._check_first_token = has_cls_rule(cfg)

    @classmethod
    def build_model(cls, cfg: TupeRobertaConfig, task):
        """A freshly initialised model for the task's source dictionary."""
        return cls(cfg, TupeRobertaEncoder(cfg, task.source_dictionary))

    @classmethod
    def from_pretrained(
        cls,
        model_name_or_path: str,
        checkpoint_file: str = "checkpoint_best.pt",
        data_name_or_path: str | None = None,
        **overrides,
    ):
        """A hub interface that works on raw text; see :func:`fairseq_tupe.models.hub_interface.load_hub_interface`."""
        from fairseq_tupe.models.hub_interface import load_hub_interface

        return load_hub_interface(model_name_or_path, checkpoint_file, data_name_or_path, **overrides)

    def forward(
        self,
        src_tokens,
        features_only=False,
        return_all_hiddens=False,
        classification_head_name=None,
        masked_tokens=None,
        **unused,
    ):
        """See :meth:`TupeRobertaEncoder.forward`; with ``classification_head_name`` the first result is (B, classes).

        Raises:
            TupeError: the input is empty or longer than ``max_positions``; there is no such head; features are asked for and
                column 0 is not ``<s>`` while the [CLS] rule is on. (Pretraining is free of that check: its masking may hit
                column 0 too.)
        """
        if classification_head_name is not None and classification_head_name not in self.classification_heads:
            known = ", ".join(self.classification_heads) or "none"
            raise TupeError(f'no classification head "{classification_head_name}" in this model; it has: {known}')
        features_only = features_only or classification_head_name is not None
        if features_only and self._check_first_token:
            self._require_bos(src_tokens)
        with self._autocast(src_tokens):
            x, extra = self.encoder(
                src_tokens,
                features_only=features_only,
                return_all_hiddens=return_all_hiddens,
                masked_tokens=masked_tokens,
                real_tokens_only=classification_head_name is not None,
            )
            if classification_head_name is not None:
                x = self.classification_heads[classification_head_name](x).type_as(self.encoder.lm_head.bias)
        return x, extra

    def _autocast(self, src_tokens):
        """What ``--cpu-autocast`` asks for; gradients and the loss stay outside, in the weights' type.

        Raises:
            TupeError: the model is not on a CPU in fp32.
        """
        if str(self.cfg.cpu_autocast) == "none":
            return nullcontext()
        dtype = self.encoder.lm_head.weight.dtype
        if src_tokens.device.type != "cpu" or dtype != torch.float32:
            where = f"{str(dtype).removeprefix('torch.')} on {src_tokens.device.type}"
            raise TupeError(
                f"--cpu-autocast bf16 is for fp32 weights on a CPU, this model is in {where}: leave it out; a GPU takes "
                "fairseq's --fp16, or common.bf16=true with fairseq-hydra-train"
            )
        return torch.autocast("cpu", torch.bfloat16)

    def extract_features(self, src_tokens, return_all_hiddens=False, **unused):
        """Features (B, T, C) and the extra dictionary."""
        return self(src_tokens, features_only=True, return_all_hiddens=return_all_hiddens)

    def _require_bos(self, src_tokens) -> None:
        wrong = src_tokens[:, 0].ne(self._bos)
        if src_tokens.device.type != "cpu":
            self._check_first_token = False  # the first batch only: the question costs a synchronisation
        if wrong.any():
            row = int(wrong.nonzero()[0, 0])
            raise TupeError(
                f"column 0 of input row {row} is token {int(src_tokens[row, 0])}, not <s> ({self._bos}): the [CLS] rule would "
                "reset the position of an ordinary word; pass --init-token 0, or --tie-cls for a model without the rule"
            )

    def register_classification_head(self, name: str, num_classes: int, inner_dim: int | None = None, **unused):
        """Add a head of ``num_classes`` outputs on the features of ``<s>``, with torch's default initialisation."""
        inner_dim = inner_dim or self.cfg.encoder_embed_dim
        if name in self.classification_heads:
            old = self.classification_heads[name]
            if (old.out_proj.out_features, old.dense.out_features) != (num_classes, inner_dim):
                logger.warning(
                    f'registering head "{name}" again, with {num_classes} classes (before: {old.out_proj.out_features}) '
                    f"and inner width {inner_dim} (before: {old.dense.out_features})"
                )
        self.classification_heads[name] = ClassificationHead(
            embed_dim=self.cfg.encoder_embed_dim,
            inner_dim=inner_dim,
            num_classes=num_classes,
            activation=str(self.cfg.pooler_activation_fn),
            dropout=self.cfg.pooler_dropout,
        )

    @property
    def supported_targets(self):
        """Targets come with the input, as in every masked language model of fairseq."""
        return {"self"}

    def upgrade_state_dict_named(self, state_dict, name):
        """Fit the classification heads of a checkpoint to this model's, and refuse weights of another model.

        Raises:
            TupeError: the checkpoint is of another variant, size or dictionary.
        """
        super().upgrade_state_dict_named(state_dict, name)
        prefix = f"{name}." if name else ""
        self._fit_heads(state_dict, prefix + HEADS_PREFIX)
        check_state_dict(self, state_dict, prefix)

    def _fit_heads(self, state_dict, prefix: str) -> None:
        in_checkpoint = sorted({key[len(prefix) :].split(".")[0] for key in state_dict if key.startswith(prefix)})
        for head in in_checkpoint:
            classes, inner_dim = state_dict[f"{prefix}{head}.out_proj.weight"].shape
            if head not in self.classification_heads and self.cfg.load_checkpoint_heads:
                self.register_classification_head(head, classes, inner_dim)
            if head not in self.classification_heads:
                logger.warning(f'leaving out classification head "{head}" of the checkpoint: this model has no such head')
            else:
                ours = self.classification_heads[head].out_proj.weight.shape
                if tuple(ours) == (classes, inner_dim):
                    continue
                logger.warning(
                    f'classification head "{head}" is initialised anew: the checkpoint has {classes} classes and inner width '
                    f"{inner_dim}, this model {ours[0]} and {ours[1]}"
                )
            for key in [key for key in state_dict if key.startswith(f"{prefix}{head}.")]:
                del state_dict[key]
        for key, value in self.classification_heads.state_dict().items():
            if prefix + key not in state_dict:
                logger.info(f"{prefix}{key} is not in the checkpoint: it keeps its fresh values")
                state_dict[prefix + key] = value


# A class a size: fairseq reads a model's options from the class, and Hydra ignores architecture functions.
for _size, _config in PRESETS.items():
    _class = type(f"TupeRoberta{_size.capitalize()}Model", (TupeRobertaModel,), {"__doc__": _config.__doc__})
    globals()[_class.__name__] = register_model(f"tupe_roberta_{_size}", dataclass=_config)(_class)

"""Task ``tupe_sentence_prediction``: classes or a number for single sentences and pairs, in fairseq's GLUE layout.

``DATA/{input0,input1}/{dict.txt,SPLIT.bin,SPLIT.idx}`` hold the sentences, ``DATA/label/`` the classes in the same form or, for
regression, ``SPLIT.label`` with one number a line. A row is ``<s> A </s>`` or ``<s> A </s> </s> B </s>``; one that is too long is
trimmed, the longer sentence first, and none is dropped.
"""

import logging
import math
import re
from pathlib import Path
from typing import Any, Optional

import numpy as np
import torch
from fairseq.data import Dictionary, data_utils
from fairseq.logging import metrics
from fairseq.tasks import FairseqTask, register_task

from fairseq_tupe.criterions.tupe_sentence_prediction import (
    METRICS,
    TupeSentencePredictionCriterion,
    settle_validation_meters,
    undefined_metrics,
)
from fairseq_tupe.data.sentence_labels import (
    check_label_order,
    describe_labels,
    load_targets,
    real_labels,
)
from fairseq_tupe.data.sentence_pairs import PairFormat, SentencePairDataset, load_indexed
from fairseq_tupe.errors import TupeError
from fairseq_tupe.models.config import has_cls_rule
from fairseq_tupe.tasks.sentence_prediction_config import TupeSentencePredictionConfig
from fairseq_tupe.tasks.tupe_masked_lm import REFERENCE_SPECIALS, load_dictionary

logger = logging.getLogger(__name__)


@register_task("tupe_sentence_prediction", dataclass=TupeSentencePredictionConfig)
class TupeSentencePredictionTask(FairseqTask):
    """See the module's docstring.

    Args:
        cfg: options.
        dictionary: of the sentences, with ``<mask>`` as its last symbol.
        label_dictionary: of the labels; None for regression, and until a checkpoint brings its labels.
    """

    def __init__(self, cfg: TupeSentencePredictionConfig, dictionary: Dictionary, label_dictionary: Optional[Dictionary]):
        super().__init__(cfg)
        self.dictionary = dictionary
        self._label_dictionary = label_dictionary
        self._limit = cfg.max_positions
        self._run_by_trainer = False
        self._validated_subsets = 0

    @classmethod
    def setup_task(cls, cfg: TupeSentencePredictionConfig, from_checkpoint: bool = False, **unused):
        """Load the dictionaries.

        A checkpoint brings its own labels, so that its folder and a ``dict.txt`` beside it or in ``tokenizer/`` are enough
        to use it.

        Raises:
            TupeError: a file is missing, or the number of labels is not ``num_classes``.
        """
        data = Path(cfg.data)
        if not data.is_dir():
            here = "" if data.is_absolute() else f" below {Path.cwd()}"
            raise TupeError(f"{cfg.data}: no such folder{here}, expected one that holds input0/ and label/")
        places = ["input0/dict.txt"] + (["dict.txt", "tokenizer/dict.txt"] if from_checkpoint else [])
        found = [data / place for place in places if (data / place).is_file()]
        if not found:
            raise TupeError(f"{cfg.data}: no {' or '.join(places)} there: prepare the data first, or correct the path")
        dictionary = load_dictionary(str(found[0]), cfg.reference_dictionary)
        if len(dictionary) == dictionary.nspecial:
            raise TupeError(f"{found[0]} is empty: prepare the data again")
        dictionary.add_symbol("<mask>")
        second = data / "input1" / "dict.txt"
        if second.is_file() and second.read_bytes() != found[0].read_bytes():
            raise TupeError(f"{second} differs from {found[0]}: both inputs must be binarized with one dictionary")
        logger.info(f"[input] dictionary: {len(dictionary)} types")
        return cls(cfg, dictionary, cls._load_labels(cfg, data / "label" / "dict.txt", from_checkpoint))

    @staticmethod
    def _load_labels(cfg, path: Path, from_checkpoint: bool) -> Optional[Dictionary]:
        if cfg.regression_target:
            if cfg.num_classes != 1:
                raise TupeError(f"--regression-target predicts one number: pass --num-classes 1, not {cfg.num_classes}")
            return None
        if from_checkpoint and not path.is_file():
            return None
        dictionary = load_dictionary(str(path), cfg.reference_dictionary)
        labels = real_labels(dictionary)
        if cfg.num_classes != len(labels):
            raise TupeError(f"{path} has {len(labels)} labels ({describe_labels(labels)}), --num-classes is {cfg.num_classes}")
        logger.info(f"[label] {len(labels)} labels: {describe_labels(labels)}")
        return dictionary

    def has_sharded_data(self, split: str) -> bool:
        """False: a colon in the path is part of it."""
        return False

    @property
    def labels(self) -> Optional[list]:
        """Label texts; the index is the class index. None for regression."""
        return None if self._label_dictionary is None else real_labels(self._label_dictionary)

    @property
    def row_format(self) -> PairFormat:
        """The formatter that every row goes through."""
        init, separator = (
            None if token is None or token < 0 else token for token in (self.cfg.init_token, self.cfg.separator_token)
        )
        return PairFormat(bos=init, eos=self.dictionary.eos(), separator=separator, max_length=self._limit)

    def build_model(self, cfg: Any, from_checkpoint: bool = False):
        """Build the model with its classification head; its ``max_positions`` becomes the limit of rows.

        Raises:
            TupeError: the options of the task do not fit the model's.
        """
        from fairseq import models

        bos = self.dictionary.bos()
        if hasattr(cfg, "position_encoding") and has_cls_rule(cfg) and self.cfg.init_token != bos:
            raise TupeError(
                f"--init-token is {self.cfg.init_token}, but this model treats column 0 as [CLS]: pass --init-token {bos} "
                "(<s>), or --tie-cls for a model without that rule"
            )
        model = models.build_model(cfg, self, from_checkpoint)
        limit = model.max_positions()
        if self.cfg.max_positions is not None and self.cfg.max_positions > limit:
            raise TupeError(f"the task's max_positions is {self.cfg.max_positions}, the model's {limit}: lower the task's")
        self._limit = self.cfg.max_positions or limit
        model.register_classification_head(self.cfg.classification_head_name, num_classes=self.cfg.num_classes)
        return model

    def build_criterion(self, cfg: Any, *args, **kwargs):
        """Build the criterion.

        Raises:
            TupeError: there is no such ``--best-checkpoint-metric`` (fairseq would say so after the first epoch), or the
                worst checkpoint would be kept as the best.
        """
        criterion = super().build_criterion(cfg, *args, **kwargs)
        wanted = self.cfg.best_checkpoint_metric
        if isinstance(criterion, TupeSentencePredictionCriterion) and wanted not in ("loss", *criterion.metric_names):
            raise TupeError(
                f"--best-checkpoint-metric {wanted} does not exist for this task "
                f"({describe_labels(self.labels) if self.labels else 'regression'}): "
                f"choose one of loss, {', '.join(criterion.metric_names)}"
            )
        if (wanted == "loss") == self.cfg.maximize_best_checkpoint_metric:
            verb, cure = ("smaller", "leave out") if wanted == "loss" else ("larger", "pass")
            raise TupeError(f"a {verb} {wanted} is better: {cure} --maximize-best-checkpoint-metric")
        return criterion

    def load_dataset(self, split: str, combine: bool = False, **kwargs):
        """Load a split; ``combine`` appends SPLIT1, SPLIT2 and so on.

        Raises:
            TupeError: a file is missing, inputs and labels differ in number, or a label is not valid.
        """
        data = Path(self.cfg.data)
        first, second = (
            load_indexed(data / part / split, self.dictionary, combine) if part == "input0" or (data / part).is_dir() else None
            for part in ("input0", "input1")
        )
        row_format = self.row_format
        dataset = SentencePairDataset(
            first, second, row_format, self.dictionary.pad(), self._load_targets(split, combine), name=f"{data}/*/{split}"
        )
        if not self.cfg.no_shuffle:
            dataset.order = self._order(split, dataset)
        trimmed = int((dataset.untrimmed_sizes > dataset.sizes).sum())
        logger.info(
            f"Loaded {split} with #samples: {len(dataset)}"
            + (f", {trimmed} of them trimmed to {row_format.max_length} tokens" if trimmed else "")
        )
        self.datasets[split] = dataset
        return dataset

    def _order(self, split: str, dataset: SentencePairDataset) -> np.ndarray:
        if re.match("valid|dev|test", split):
            return np.argsort(dataset.sizes, kind="stable")  # less padding; no figure depends on it
        with data_utils.numpy_seed(self.cfg.seed):
            return np.random.permutation(len(dataset))

    def _load_targets(self, split: str, combine: bool) -> Optional[torch.Tensor]:
        folder = Path(self.cfg.data) / "label"
        ending = ".label" if self.cfg.regression_target else ".idx"
        if split.startswith("test") and not (folder / f"{split}{ending}").is_file():
            return None
        if self._label_dictionary is None and not self.cfg.regression_target:
            raise TupeError(f"{folder / 'dict.txt'} not found: prepare the data first, or correct the path")
        return load_targets(folder / split, self._label_dictionary, combine)

    # What a checkpoint says about the labels: "task_state" when it is loaded to be used, the dictionary of
    # get_checkpoint_dict when training is resumed (which is skipped with --reset-dataloader: then another task may follow).

    def state_dict(self) -> dict:
        """The label order, for the checkpoint."""
        return {} if self.labels is None else {"labels": self.labels}

    def load_state_dict(self, state_dict: dict) -> None:
        """Take or check the label order of a checkpoint.

        Raises:
            TupeError: the data's order is another one.
        """
        recorded = state_dict.get("labels")
        if recorded is None or self.cfg.regression_target:
            return
        if self._label_dictionary is None:
            specials = list(REFERENCE_SPECIALS) if self.cfg.reference_dictionary else None
            self._label_dictionary = Dictionary(extra_special_symbols=specials)
            for label in recorded:
                self._label_dictionary.add_symbol(label)
        check_label_order(recorded, self.labels, Path(self.cfg.data) / "label" / "dict.txt")

    def get_checkpoint_dict(self) -> dict:
        """Part of a checkpoint's extra state that :meth:`set_checkpoint_dict` gets back on resuming."""
        return {type(self).__name__: self.state_dict()}

    def set_checkpoint_dict(self, state_dict: dict) -> None:
        """Check the label order of the checkpoint that training resumes from."""
        self.load_state_dict(state_dict)

    def ranks_add_up_outputs(self) -> bool:
        """Whether logging outputs of several ranks are summed (fairseq's trainer) rather than listed (fairseq-validate)."""
        return self._run_by_trainer and torch.distributed.is_available() and torch.distributed.is_initialized()

    def begin_valid_epoch(self, epoch: int, model: Any) -> None:
        """fairseq's trainer is about to validate."""
        self._run_by_trainer = True
        self._validated_subsets = 0

    def reduce_metrics(self, logging_outputs: list, criterion: Any) -> None:
        """Log metrics. Numbers are Python's, not tensors: they end up in checkpoints."""
        logging_outputs = [
            {key: value.item() if torch.is_tensor(value) and value.dim() == 0 else value for key, value in log.items()}
            for log in logging_outputs
        ]
        with metrics.aggregate() as agg:
            super().reduce_metrics(logging_outputs, criterion)
        if not self._run_by_trainer:  # fairseq-validate hands over all batches at once and calls no hook afterwards
            self._explain(undefined_metrics(agg))

    def post_validate(self, model: Any, stats: dict, agg: Any) -> None:
        """Take metrics without a value out of the choice of the best checkpoint: fairseq skips None, but not NaN."""
        reasons = undefined_metrics(agg)
        for name in ("loss", *METRICS):
            if name in stats and not math.isfinite(stats[name]):
                stats[name] = None
                reasons.setdefault(name, "it is not finite")
        self._explain(reasons)
        settle_validation_meters(stats, keep_values=self._validated_subsets > 0)
        self._validated_subsets += 1

    def _explain(self, reasons: dict) -> None:
        for reason in sorted(set(reasons.values())):
            names = " and ".join(name for name in reasons if reasons[name] == reason)
            logger.warning(f"validation: no value for {names}, so this can't be the best checkpoint by it: {reason}")

    def max_positions(self) -> Optional[int]:
        """Longest row in tokens; None before the model is built."""
        return self._limit

    @property
    def source_dictionary(self) -> Dictionary:
        """Dictionary of the sentences."""
        return self.dictionary

    @property
    def target_dictionary(self) -> Dictionary:
        """Dictionary of the sentences; labels have their own."""
        return self.dictionary

    @property
    def label_dictionary(self) -> Optional[Dictionary]:
        """Dictionary of the labels: class index + ``nspecial``. None for regression."""
        return self._label_dictionary

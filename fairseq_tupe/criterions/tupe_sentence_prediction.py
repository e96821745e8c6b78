"""Loss of sentence tasks, and their metrics over the whole dev set.

Classification: cross entropy in bits, as fairseq logs it; ``accuracy``, ``mcc`` and, where the labels are two and one is "1",
``f1`` of label "1". Regression: mean squared error of the single logit, as it is; ``pearson`` and ``spearman``. Metrics are
percent with two decimals. Accuracy is fairseq's own name for a batch average while training; in validation it is exact.
"""

import logging
import math
import warnings
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from fairseq.criterions import FairseqCriterion, register_criterion
from fairseq.dataclass import FairseqDataclass
from fairseq.logging import metrics
from scipy.stats import pearsonr, spearmanr
from sklearn.metrics import f1_score, matthews_corrcoef
from torch import Tensor

from fairseq_tupe.errors import TupeError

logger = logging.getLogger(__name__)

METRICS = ("accuracy", "f1", "mcc", "pearson", "spearman")
# meters that metrics are derived from; fairseq does not print names that begin with an underscore
CONFUSION, ROWS, NOT_FINITE = "_confusion", "_rows", "_not_finite"


@dataclass
class TupeSentencePredictionCriterionConfig(FairseqDataclass):
    """Options of the criterion; the task reads both from here."""

    classification_head_name: str = field(
        default="sentence_classification_head", metadata={"help": "name of the classification head to use"}
    )
    regression_target: bool = field(default=False, metadata={"help": "predict a number instead of a class"})


@register_criterion("tupe_sentence_prediction", dataclass=TupeSentencePredictionCriterionConfig)
class TupeSentencePredictionCriterion(FairseqCriterion):
    """See the module's docstring. Needs the task ``tupe_sentence_prediction``."""

    def __init__(self, cfg: TupeSentencePredictionCriterionConfig, task):
        super().__init__(task)
        self.head = cfg.classification_head_name
        self.regression = cfg.regression_target
        labels = [] if self.regression else list(task.labels or [])
        self.has_f1 = len(labels) == 2 and "1" in labels
        # f1 is of the second class; where "1" comes first, both axes of the confusion counts are turned round
        self.turn_round = self.has_f1 and labels[0] == "1"

    @property
    def metric_names(self) -> tuple[str, ...]:
        """Metrics that validation reports."""
        if self.regression:
            return ("pearson", "spearman")
        return ("accuracy", "f1", "mcc") if self.has_f1 else ("accuracy", "mcc")

    def forward(self, model, sample: dict, reduce: bool = True):
        """Summed loss, number of rows, and logging outputs whose tensors may be added up over batches and ranks.

        Raises:
            TupeError: the model has no such head, or the rows have no labels.
        """
        if self.head not in getattr(model, "classification_heads", {}):
            raise TupeError(f'the model has no classification head "{self.head}": pass --task tupe_sentence_prediction')
        if "target" not in sample:
            raise TupeError("these rows have no labels, so there is no loss: choose another subset")
        logits, _ = model(**sample["net_input"], features_only=True, classification_head_name=self.head)
        logits, targets = logits.float(), sample["target"].view(-1)
        rows = targets.numel()
        outputs = {"ntokens": sample["ntokens"], "nsentences": rows, "sample_size": rows}
        if self.regression:
            predictions = logits.view(-1)
            loss = F.mse_loss(predictions, targets.float(), reduction="sum")
        else:
            predictions = logits.argmax(dim=-1)
            loss = F.cross_entropy(logits, targets, reduction="sum")
            outputs["ncorrect"] = (predictions == targets).sum()
        outputs["loss"] = loss.detach()
        if not model.training:
            outputs.update(self._validation_outputs(sample, logits, predictions.detach(), targets))
        return loss, rows, outputs

    def _validation_outputs(self, sample: dict, logits: Tensor, predictions: Tensor, targets: Tensor) -> dict:
        if self.regression:
            return self._regression_outputs(sample, predictions, targets)
        classes = logits.shape[-1]
        counts = torch.bincount(targets * classes + predictions, minlength=classes * classes).view(classes, classes)
        counts = counts.flip((0, 1)) if self.turn_round else counts
        not_finite = (~torch.isfinite(logits)).any(dim=-1).sum()
        return {"confusion_of_1" if self.has_f1 else "confusion": counts, "not_finite": not_finite}

    def _regression_outputs(self, sample: dict, predictions: Tensor, targets: Tensor) -> dict:
        values = torch.stack([sample["id"].double(), predictions.double(), targets.double()], dim=1)  # (B, 3)
        if not self.task.ranks_add_up_outputs():
            return {"rows": values}
        # every rank adds its rows to zeros: the sum is the rows of all ranks
        scattered = values.new_zeros(sample["dataset_size"], 3)
        scattered[sample["id"]] = torch.cat([torch.ones_like(values[:, :1]), values[:, 1:]], dim=1)
        return {"scattered_rows": scattered}

    @staticmethod
    def reduce_metrics(logging_outputs: list[dict]) -> None:
        """Log the loss and the metrics of one or more batches, of one or more ranks."""

        def total(key):
            return sum(float(log.get(key, 0)) for log in logging_outputs)

        rows = total("sample_size")
        classification = any("ncorrect" in log for log in logging_outputs)
        loss = total("loss") / (rows or 1) / (math.log(2) if classification else 1)
        metrics.log_scalar("loss", loss, rows, round=3)
        for log in logging_outputs:
            if "rows" in log or "scattered_rows" in log:
                metrics.log_concat_tensor(ROWS, _rows(log), dim=0)
            for key in ("confusion", "confusion_of_1"):
                if key in log:
                    metrics.log_scalar_sum(CONFUSION, log[key].cpu().double())
                    metrics.log_scalar_sum(NOT_FINITE, float(log["not_finite"]))
        keys = {key for log in logging_outputs for key in log}
        if keys & {"rows", "scattered_rows"}:
            metrics.log_derived("pearson", pearson)
            metrics.log_derived("spearman", spearman)
        elif keys & {"confusion", "confusion_of_1"}:
            metrics.log_derived("accuracy", accuracy)
            metrics.log_derived("mcc", mcc)
            if "confusion_of_1" in keys:
                metrics.log_derived("f1", f1)
        elif classification:
            metrics.log_scalar("accuracy", 100.0 * total("ncorrect") / (rows or 1), rows, round=2)

    @staticmethod
    def logging_outputs_can_be_summed() -> bool:
        """True: fairseq then adds them up over ranks, which works without a GPU as well."""
        return True


def _rows(log: dict) -> Tensor:
    """(n, 3) on the CPU: row number, prediction, target."""
    if "rows" in log:
        return log["rows"].cpu()
    scattered = log["scattered_rows"].cpu()
    seen = scattered[:, 0].nonzero().view(-1)
    return torch.cat([seen.double().unsqueeze(1), scattered[seen, 1:]], dim=1)


def _predictions_and_targets(meters: Any) -> tuple[np.ndarray, np.ndarray]:
    """Both (n,) in the order of row numbers, so that sums do not depend on how rows were spread over ranks."""
    rows = meters[ROWS].tensor
    rows = np.empty((0, 3)) if rows is None else rows.numpy()
    rows = rows[np.argsort(rows[:, 0], kind="stable")]
    return rows[:, 1], rows[:, 2]


def _correlation(function: Any, meters: Any) -> float:
    if undefined_correlation(meters):
        return math.nan
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # nearly constant input: the number is what it is
        return _percent(function(*_predictions_and_targets(meters))[0])


def pearson(meters: Any) -> float:
    """Pearson's correlation in percent; NaN where it is not defined."""
    return _correlation(pearsonr, meters)


def spearman(meters: Any) -> float:
    """Spearman's rank correlation in percent; NaN where it is not defined."""
    return _correlation(spearmanr, meters)


def _grid(meters: Any) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Confusion counts as sklearn wants them: targets, predictions, weights, each (classes * classes,)."""
    counts = meters[CONFUSION].sum
    targets, predictions = np.indices(counts.shape)
    return targets.ravel(), predictions.ravel(), counts.numpy().ravel()


def accuracy(meters: Any) -> float:
    """Share of right predictions in percent."""
    if undefined_classification(meters):
        return math.nan
    targets, predictions, weights = _grid(meters)
    return _percent(np.average(targets == predictions, weights=weights))


def f1(meters: Any) -> float:
    """F1 of label "1" in percent, which is the second class here; 0 where it is neither found nor there."""
    if undefined_classification(meters):
        return math.nan
    targets, predictions, weights = _grid(meters)
    return _percent(f1_score(targets, predictions, sample_weight=weights, zero_division=0.0))


def mcc(meters: Any) -> float:
    """Matthews' correlation in percent; 0 where all predictions are one class, as in sklearn."""
    if undefined_classification(meters):
        return math.nan
    targets, predictions, weights = _grid(meters)
    return _percent(matthews_corrcoef(targets, predictions, sample_weight=weights))


def _percent(value: Any) -> float:
    return round(100.0 * float(value), 2)  # a numpy float in a checkpoint would make it unloadable


def undefined_correlation(meters: Any) -> str:
    """Why the correlations have no value, or ""."""
    predictions, targets = _predictions_and_targets(meters)
    if len(predictions) < 2:
        return f"it takes two rows, there are {len(predictions)}"
    for values, what in ((predictions, "predictions"), (targets, "targets")):
        if not np.isfinite(values).all():
            return f"{(~np.isfinite(values)).sum()} of {len(values)} {what} are not finite"
        if (values == values[0]).all():
            return f"all {len(values)} {what} are {values[0]:g}"
    return ""


def undefined_classification(meters: Any) -> str:
    """Why the classification metrics have no value, or ""."""
    if not torch.is_tensor(meters[CONFUSION].sum):
        return "there are no rows"
    if meters[NOT_FINITE].sum:
        return f"{meters[NOT_FINITE].sum:g} rows have logits that are not finite"
    return ""


def undefined_metrics(meters: Any) -> dict[str, str]:
    """Metric name -> reason, of the metrics in ``meters`` that have no value."""
    reasons = {}
    for names, source, explain in (
        (("pearson", "spearman"), ROWS, undefined_correlation),
        (("accuracy", "f1", "mcc"), CONFUSION, undefined_classification),
    ):
        if source in meters and explain(meters):
            reasons.update({name: explain(meters) for name in names if name in meters})
    return reasons


def settle_validation_meters(stats: dict, keep_values: bool) -> None:
    """Empty what fairseq's lasting "valid" meters gathered, so that neither a checkpoint nor the next subset gets tensors of it.

    Args:
        stats: the subset's final values; they become what the "valid" meters say (Hydra's sweepers read them).
        keep_values: leave the earlier values there (a later subset than the first).
    """
    valid = metrics.get_meters("valid") or {}
    for name in METRICS:
        if name in valid and name in stats and not keep_values:
            valid[name].fn = lambda _meters, value=stats[name]: value
    for name in (CONFUSION, ROWS, NOT_FINITE):
        metrics.reset_meter("valid", name)

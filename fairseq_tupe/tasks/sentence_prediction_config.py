"""Options of the task ``tupe_sentence_prediction``."""

from dataclasses import dataclass, field
from typing import Optional

from fairseq.dataclass import FairseqDataclass
from omegaconf import II, MISSING
from omegaconf import __version__ as omegaconf_version


def _criterion_option(name: str, default: str) -> str:
    """Interpolation of a criterion's option; the default stands in where the criterion does not (yet) have it.

    Under Hydra a criterion's defaults may be absent, and fairseq-validate without ``--criterion`` has another one.
    omegaconf before 2.1 (fairseq 0.12.2) can't express a default.
    """
    if tuple(int(part) for part in omegaconf_version.split(".")[:2]) < (2, 1):
        return II(f"criterion.{name}")
    return f"${{oc.select:criterion.{name},{default}}}"


@dataclass
class TupeSentencePredictionConfig(FairseqDataclass):
    """Options of the task."""

    data: str = field(default=MISSING, metadata={"help": "folder with input0/, perhaps input1/, and label/"})
    num_classes: int = field(default=-1, metadata={"help": "number of labels; 1 for regression"})
    init_token: Optional[int] = field(
        default=0, metadata={"help": "id of the first token of every row: <s>, 0; -1 for none (see --tie-cls)"}
    )
    separator_token: Optional[int] = field(
        default=2, metadata={"help": "id between the sentences of a pair, after the first one's </s>: </s>, 2; -1 for none"}
    )
    no_shuffle: bool = field(default=False, metadata={"help": "make batches in the order of the files"})
    reference_dictionary: bool = field(
        default=False,
        metadata={"help": "data of the original repository: <file> <email> <url> are ids 4 to 6 of every dictionary"},
    )
    max_positions: Optional[int] = field(default=None, metadata={"help": "longest row in tokens; the model's limit by default"})
    # of other groups; without help text fairseq adds no second flag for them
    regression_target: bool = _criterion_option("regression_target", "false")
    classification_head_name: str = _criterion_option("classification_head_name", "sentence_classification_head")
    best_checkpoint_metric: str = II("checkpoint.best_checkpoint_metric")
    maximize_best_checkpoint_metric: bool = II("checkpoint.maximize_best_checkpoint_metric")
    seed: int = II("common.seed")

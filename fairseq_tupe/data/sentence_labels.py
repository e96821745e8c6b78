"""Labels of sentence tasks: which are real, in which order, and the targets of a split, each row checked."""

import math
import re
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from fairseq_tupe.data.sentence_pairs import load_indexed
from fairseq_tupe.errors import TupeError

# rows that fairseq-preprocess adds so that a dictionary's length is a multiple of 8
PADDING_ROW = re.compile(r"madeupword\d{4}")


def real_labels(dictionary: Any) -> list[str]:
    """Labels of a fairseq label dictionary in order, without special symbols and padding rows; index = class index."""
    labels = list(dictionary.symbols[dictionary.nspecial :])
    while labels and PADDING_ROW.fullmatch(labels[-1]):
        labels.pop()
    return labels


def describe_labels(labels: list[str]) -> str:
    """``0 = "entailment", 1 = "not_entailment"``."""
    return ", ".join(f'{index} = "{label}"' for index, label in enumerate(labels))


def check_label_order(recorded: list[str], found: list[str], path: Any) -> None:
    """Refuse data whose class indices mean something else than in the checkpoint.

    Raises:
        TupeError: with both orders.
    """
    if list(recorded) != list(found):
        raise TupeError(
            f"{path}: its labels are {describe_labels(found)}, but the checkpoint was trained with {describe_labels(recorded)}: "
            "use the data, or at least label/dict.txt and labels binarized with it, that the checkpoint was trained on"
        )


def load_targets(path: Path, dictionary: Any | None, combine: bool = False) -> Tensor:
    """Targets of the split ``DATA/label/SPLIT``: classes (int64) of a label dictionary, or without one numbers (float64).

    ``combine`` appends SPLIT1, SPLIT2 and so on.

    Raises:
        TupeError: a file is missing, or a row's label is not valid.
    """
    if dictionary is not None:
        return read_class_targets(load_indexed(path, dictionary, combine), dictionary, str(path))
    paths = [Path(f"{path}.label")]
    if not paths[0].is_file():
        raise TupeError(f"{paths[0]} not found: regression needs it, one number a line")
    while combine and Path(f"{path}{len(paths)}.label").is_file():
        paths.append(Path(f"{path}{len(paths)}.label"))
    return read_regression_targets(paths)


def read_class_targets(dataset: Any, dictionary: Any, name: str) -> Tensor:
    """Class indices (N,), int64, of a binarized label split whose rows hold one label each and perhaps ``</s>``.

    Args:
        dataset: indexed dataset of ids of ``dictionary``.
        name: path without its ending, for messages.

    Raises:
        TupeError: a row without a label, with several, or with one that is not in the dictionary.
    """
    labels = real_labels(dictionary)
    rows = [dataset[row] for row in range(len(dataset))]  # hundreds of thousands: no more than this in Python
    ids = torch.cat(rows).numpy() if rows else np.empty(0, dtype=np.int64)
    row_of = np.repeat(np.arange(len(rows)), np.asarray(dataset.sizes))
    content = ids != dictionary.eos()
    targets, row_of = ids[content] - dictionary.nspecial, row_of[content]
    wrong = np.bincount(row_of, minlength=len(rows)) != 1
    wrong[row_of[(targets < 0) | (targets >= len(labels))]] = True
    if wrong.any():
        row = int(wrong.argmax())
        found = " ".join(dictionary[index] for index in rows[row] if index != dictionary.eos())
        raise TupeError(
            f'{name}: row {row + 1} has label "{found}", expected one of {", ".join(labels)}: '
            "correct the label file and binarize it again"
        )
    return torch.from_numpy(targets)


def read_regression_targets(paths: list[Path]) -> Tensor:
    """Numbers (N,), float64, one a line, of one or more ``.label`` files.

    Raises:
        TupeError: a line that is not one finite number.
    """
    values = []
    for path in paths:
        with open(path, encoding="utf-8", newline="\n") as lines:  # only LF ends a row
            for number, line in enumerate(lines, start=1):
                values.append(_number(line.strip(), path, number))
    return torch.tensor(values, dtype=torch.float64)


def _number(text: str, path: Path, line: int) -> float:
    try:
        value = float(text)
    except ValueError:
        value = math.nan
    if not math.isfinite(value):
        raise TupeError(f'{path}: line {line} is "{text}", expected one number, the score of that row')
    return value

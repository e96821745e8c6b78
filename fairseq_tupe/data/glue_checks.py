"""Checks before a fine-tuning or validation run starts: prepared data, checkpoint, tokenizer, save-dir."""

import argparse
from pathlib import Path
from typing import Any

import numpy as np

from fairseq_tupe.data.glue_tasks import INPUT_NAMES, GlueTask
from fairseq_tupe.data.tokenizer import Tokenizer
from fairseq_tupe.errors import TupeError

# Options of the model that a checkpoint fixes; dropouts and the pooler belong to the recipe.
MODEL_OPTIONS = (
    "encoder_layers",
    "encoder_embed_dim",
    "encoder_ffn_embed_dim",
    "encoder_attention_heads",
    "activation_fn",
    "max_positions",
    "position_encoding",
    "rel_pos",
    "rel_pos_bins",
    "max_rel_pos",
    "tie_cls",
    "embedding_normalize",
    "encoder_normalize_before",
)


def input_lengths(task: GlueTask, data: Path, split: str, max_positions: int) -> np.ndarray:
    """Tokens of each row as the model sees it: ``<s> A </s>`` or ``<s> A </s> </s> B </s>``, long rows cut."""
    from fairseq.data.indexed_dataset import MMapIndexedDataset

    datasets = [MMapIndexedDataset(str(data / name / split)) for name in INPUT_NAMES[: len(task.texts)]]
    # a copy: the file is unmapped with its dataset
    sizes = [np.array(dataset.sizes, dtype=np.int64) for dataset in datasets]
    return np.minimum(sum(size + 1 for size in sizes), max_positions)


def valid_subsets(task: GlueTask, data: Path, chosen: str | None = None) -> list[str]:
    """The task's dev sets that are in ``data`` (MNLI's second one may be missing), or those the user chose."""
    if chosen:
        return chosen.split(",")
    first, *others = task.valid_subsets
    return [first, *(split for split in others if (data / "input0" / f"{split}.idx").exists())]


def check_data(task: GlueTask, data: Path, *splits: str) -> None:
    """TupeError where ``data`` isn't this task's prepared folder or lacks a split."""
    prepare = "prepare it with scripts/prepare_glue_data.sh"
    if not (data / "input0" / "dict.txt").is_file():
        raise TupeError(f"{data} holds no {task.name} data (no input0/dict.txt): {prepare}")
    labels = data / "label" / "dict.txt"
    if not task.regression:
        found = [line.split()[0] for line in labels.read_text(encoding="utf-8").splitlines()] if labels.exists() else []
        if tuple(found) != task.labels:
            raise TupeError(f"{labels} holds labels {found}, expected those of {task.name}, {list(task.labels)}: {prepare}")
    for split in splits:
        parts = [f"{name}/{split}.idx" for name in INPUT_NAMES[: len(task.texts)]]
        parts.append(f"label/{split}.label" if task.regression else f"label/{split}.idx")
        missing = next((part for part in parts if not (data / part).is_file()), None)
        if missing:
            raise TupeError(f"{data} has no {missing}, expected a {split} set of {task.name} with labels: {prepare}")


def read_checkpoint_config(path: Path) -> dict[str, Any]:
    """Configuration tree stored in a checkpoint, read without running code from it.

    Raises:
        TupeError: no such file, not a checkpoint, or not one of this package's models.
    """
    from fairseq_tupe.interop.safe_loading import load_training_checkpoint

    config = load_training_checkpoint(path).get("cfg")
    model = _as_dict(config.get("model")) if config else {}
    name = str(model.get("_name") or model.get("arch"))
    if not name.startswith("tupe_roberta"):
        raise TupeError(f"{path} holds a model {name!r}, expected tupe_roberta or one of its sizes")
    return {**config, "model": model}


def _as_dict(value: Any) -> dict:
    return vars(value) if isinstance(value, argparse.Namespace) else dict(value or {})


def model_options(saved: dict[str, Any]) -> dict[str, Any]:
    """Name and options of a checkpoint's model, those that equal the preset's left out."""
    from fairseq_tupe.models.config import PRESETS

    model = saved["model"]
    name = str(model.get("_name") or model.get("arch"))
    preset = PRESETS.get(name.removeprefix("tupe_roberta").lstrip("_") or "base")
    if preset is None:
        raise TupeError(f"unknown model {name!r} in the checkpoint, expected tupe_roberta or tupe_roberta_{'|'.join(PRESETS)}")
    options = {key: model[key] for key in MODEL_OPTIONS if key in model}
    defaults = preset()
    kept = {key: value for key, value in options.items() if str(value) != str(getattr(defaults, key))}
    return {"_name": name, **kept}


def check_tokenizer(data: Path, checkpoint: Path) -> None:
    """Refuse data made with another tokenizer than the checkpoint's, where both are known."""
    if not (data / "tokenizer").is_dir() or not (checkpoint.parent / "tokenizer").is_dir():
        return
    ours, theirs = Tokenizer.find(data), Tokenizer.find(checkpoint.parent)
    if ours.fingerprint != theirs.fingerprint:
        raise TupeError(
            f"{data} was made with another tokenizer than {checkpoint} ({ours.fingerprint[:12]} and "
            f"{theirs.fingerprint[:12]}): prepare it with --tokenizer {checkpoint.parent / 'tokenizer'}"
        )


def check_finetuned(task: GlueTask, saved: dict[str, Any], path: str) -> None:
    """Refuse to validate a checkpoint that was not fine-tuned, or for another kind of task."""
    settings = _as_dict(saved.get("task"))
    if settings.get("_name") != "tupe_sentence_prediction":
        raise TupeError(f"{path} was trained by task {settings.get('_name')}, expected one that finetune_glue.sh wrote")
    regression = bool(_as_dict(saved.get("criterion")).get("regression_target"))
    classes = settings.get("num_classes")
    if (regression, classes) != (task.regression, task.num_classes):
        found = "a score" if regression else f"{classes} classes"
        expected = "a score" if task.regression else f"{task.num_classes} classes"
        raise TupeError(f"{path} was fine-tuned to predict {found}, {task.name} needs {expected}")


def check_resumed(last: Path, data: Path, start: str | None, lr: float, seed: int) -> None:
    """Refuse a save-dir whose ``last`` checkpoint is of another run: fairseq would go on with that one."""
    if not last.exists():
        return
    saved = read_checkpoint_config(last)
    there = {group: _as_dict(saved.get(group)) for group in ("task", "checkpoint", "optimization", "common")}
    first_lr = there["optimization"].get("lr")
    pairs = {
        "data": (_resolved(there["task"].get("data")), _resolved(str(data))),
        "starting checkpoint": (_resolved(there["checkpoint"].get("finetune_from_model")), _resolved(start)),
        "learning rate": (first_lr[0] if isinstance(first_lr, (list, tuple)) else first_lr, lr),
        "seed": (there["common"].get("seed"), seed),
    }
    for name, (theirs, ours) in pairs.items():
        if theirs != ours:
            raise TupeError(f"{last} is of another run ({name} {theirs}, now {ours}): choose another --save-dir or remove it")


def _resolved(path: str | None) -> str | None:
    return str(Path(path).resolve()) if path else None

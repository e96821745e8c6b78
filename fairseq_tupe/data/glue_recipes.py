"""Command ``finetune-flags``: the paper's fine-tuning settings of a GLUE task as fairseq flags, from one place.

``config/finetuning/*.yaml`` hold the same settings for ``fairseq-hydra-train``; a test compares the two.
"""

import argparse
import math
import sys
from pathlib import Path
from typing import Any

import numpy as np

from fairseq_tupe.data.glue_checks import (
    check_data,
    check_finetuned,
    check_resumed,
    check_tokenizer,
    input_lengths,
    model_options,
    read_checkpoint_config,
    valid_subsets,
)
from fairseq_tupe.data.glue_tasks import GLUE_TASKS, GlueTask, find_task
from fairseq_tupe.errors import TupeError

BATCH_SIZE = 32
MAX_TOKENS = 4400
FROM_SCRATCH = ("none", "scratch")
REPOSITORY = Path(__file__).resolve().parents[2]


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Arguments of ``finetune-flags``."""
    parser.add_argument("task", metavar="TASK", help=f"one of {', '.join(name for name in GLUE_TASKS if name != 'AX')}")
    parser.add_argument("data", metavar="DATA", help="folder made by prepare-glue-data; '': data-bin/glue/TASK-bin here")
    parser.add_argument(
        "words",
        metavar="...",
        nargs=argparse.REMAINDER,
        help="--checkpoint FILE (or none), --save-dir DIR, --validate (flags of fairseq-validate instead), and the "
        "fairseq flags that will be appended: the validation interval depends on them",
    )


def run(args: argparse.Namespace) -> int:
    """Print the flags, one a line."""
    task = find_task(args.task)
    data = Path(args.data) if args.data else REPOSITORY / "data-bin" / "glue" / task.folder
    user = _read_words(args.words)
    user.save_dir = user.save_dir or str(REPOSITORY / "checkpoints" / task.name)
    if user.checkpoint is None:
        raise TupeError("--checkpoint is missing, expected a file, or none to start from scratch")
    if not task.trainable:
        raise TupeError(f"{task.name} has no training or dev set: use a model fine-tuned on MNLI")
    check_data(task, data, *([] if user.validate else ["train"]), *valid_subsets(task, data, user.valid_subset))
    scratch = user.checkpoint in FROM_SCRATCH
    if user.validate and scratch:
        raise TupeError(f"--checkpoint {user.checkpoint} can't be validated, expected a file")
    saved = None if scratch else read_checkpoint_config(Path(user.checkpoint))
    if saved:
        check_tokenizer(data, Path(user.checkpoint))
    flags = _validation_flags(task, data, saved, user) if user.validate else _training_flags(task, data, saved, user)
    for flag in flags:
        if "\n" in flag:
            raise TupeError(f"a path with a line break can't be used: {flag!r}")
        print(flag)
    return 0


def _read_words(words: list) -> argparse.Namespace:
    """The words this command needs to know; the others are fairseq's business."""
    parser = argparse.ArgumentParser(prog="fairseq_tupe finetune-flags", add_help=False, allow_abbrev=False)
    parser.add_argument("--checkpoint")
    parser.add_argument("--save-dir")
    parser.add_argument("--validate", action="store_true")
    parser.add_argument("--arch", "-a")
    parser.add_argument("--batch-size", "--max-sentences", type=int, default=BATCH_SIZE)
    parser.add_argument("--max-tokens", type=int, default=MAX_TOKENS)
    parser.add_argument("--max-positions", type=int)
    parser.add_argument("--max-epoch", type=int)
    parser.add_argument("--update-freq", type=lambda text: int(text.strip("[]()").split(",")[0]), default=1)
    parser.add_argument("--distributed-world-size", type=int, default=1)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--lr", type=lambda text: float(text.strip("[]()").split(",")[0]))
    parser.add_argument("--valid-subset")
    for name in ("--cpu", "--fp16", "--bf16", "--amp", "--memory-efficient-fp16", "--memory-efficient-bf16"):
        parser.add_argument(name, action="store_true")
    return parser.parse_known_args(words)[0]


def recipe(task: GlueTask, interval: int) -> dict[str, dict[str, Any]]:
    """The paper's settings as fairseq's configuration tree; ``interval`` is in updates (half an epoch).

    Ends of epochs are validated by the interval alone (``validate_interval`` is the last epoch): with an odd number of
    updates fairseq would otherwise validate three times an epoch.
    """
    epochs = task.epochs
    return {
        "common": {
            "seed": 1,
            "log_format": "simple",
            "log_interval": 50,
            "fp16_init_scale": 4,
            "fp16_scale_window": 128,
            "threshold_loss_scale": 1.0,
        },
        "task": {
            "_name": "tupe_sentence_prediction",
            "num_classes": task.num_classes,
            "init_token": 0,
            "separator_token": 2,
        },
        "criterion": {"_name": "tupe_sentence_prediction", "regression_target": task.regression},
        "model": {"dropout": 0.1, "attention_dropout": 0.1},
        "optimizer": {"_name": "adam", "adam_betas": "(0.9, 0.999)", "adam_eps": 1e-6, "weight_decay": 0.01},
        "lr_scheduler": {"_name": "tupe_polynomial_decay", "warmup_ratio": 0.06},
        "optimization": {"max_epoch": epochs, "lr": [5e-5], "clip_norm": 1.0},
        "dataset": {
            "batch_size": BATCH_SIZE,
            "max_tokens": MAX_TOKENS,
            "required_batch_size_multiple": 1,
            "valid_subset": ",".join(task.valid_subsets),
            "validate_interval": epochs,
            "validate_interval_updates": interval,
        },
        "checkpoint": {
            "save_interval": epochs,
            "save_interval_updates": interval,
            "keep_interval_updates": 1,
            "no_epoch_checkpoints": True,
            "best_checkpoint_metric": task.metric,
            "maximize_best_checkpoint_metric": True,
            "load_checkpoint_on_all_dp_ranks": True,
        },
        "distributed_training": {"distributed_world_size": 1, "find_unused_parameters": True},
    }


def half_epoch(lengths: np.ndarray, batch_size: int, max_tokens: int, groups: int, seed: int = 1) -> int:
    """Half an epoch in updates.

    Args:
        lengths: tokens of each training row, (rows,).
        batch_size: rows a batch at most.
        max_tokens: padded tokens a batch at most.
        groups: batches an update (ranks times update_freq).
        seed: orders the rows as the task does.
    """
    from fairseq.data import data_utils

    with data_utils.numpy_seed(seed):
        order = np.random.permutation(len(lengths))
    ordered = np.minimum(lengths, max_tokens)[order]
    batches = data_utils.batch_by_size(order, None, ordered, max_tokens=max_tokens, max_sentences=batch_size)
    return math.ceil(math.ceil(len(batches) / groups) / 2)


def _training_flags(task: GlueTask, data: Path, saved: dict | None, user: argparse.Namespace) -> list[str]:
    max_positions = user.max_positions or (saved["model"].get("max_positions", 512) if saved else 512)
    groups = max(1, user.distributed_world_size) * max(1, user.update_freq)
    lengths = input_lengths(task, data, "train", max_positions)
    settings = recipe(task, half_epoch(lengths, user.batch_size, user.max_tokens, groups, user.seed))
    if user.max_epoch:
        settings["dataset"]["validate_interval"] = settings["checkpoint"]["save_interval"] = user.max_epoch
    settings["dataset"]["valid_subset"] = ",".join(valid_subsets(task, data))
    settings["checkpoint"]["save_dir"] = user.save_dir
    settings["common"]["tensorboard_logdir"] = str(Path(user.save_dir) / "tb")
    settings["common"].update(_precision(user))
    if saved:
        settings["model"].update(model_options(saved))
        # Unlike restore_file with resets, this continues from the save-dir's checkpoint_last where there is one.
        settings["checkpoint"]["finetune_from_model"] = user.checkpoint
    elif not user.arch:
        raise TupeError("starting from scratch needs the model's flags, at least --arch tupe_roberta_base")
    _announce_batch(user)
    check_resumed(
        Path(user.save_dir) / "checkpoint_last.pt",
        data=data,
        start=user.checkpoint if saved else None,
        lr=user.lr or settings["optimization"]["lr"][0],
        seed=user.seed,
    )
    return [str(data), *to_flags(settings)]


def _announce_batch(user: argparse.Namespace) -> None:
    batch = user.distributed_world_size * user.batch_size * user.update_freq
    product = f"{user.distributed_world_size} rank(s) x batch size {user.batch_size} x update_freq {user.update_freq}"
    paper = "" if batch == BATCH_SIZE else f"; the paper's is {BATCH_SIZE}, which its learning rates are made for"
    print(f"effective batch: {product} = {batch} sentences, within {user.max_tokens} tokens a rank{paper}", file=sys.stderr)


def _precision(user: argparse.Namespace) -> dict[str, bool]:
    import torch

    chosen = any(getattr(user, name) for name in ("cpu", "bf16", "amp", "memory_efficient_bf16"))
    return {"fp16": True} if torch.cuda.is_available() and not chosen else {}


def _validation_flags(task: GlueTask, data: Path, saved: dict, user: argparse.Namespace) -> list[str]:
    check_finetuned(task, saved, user.checkpoint)
    settings = {
        "common": {"log_format": "simple", **(_precision(user) if saved["common"].get("fp16") else {})},
        "task": {"_name": "tupe_sentence_prediction", "num_classes": task.num_classes},
        "criterion": {"_name": "tupe_sentence_prediction", "regression_target": task.regression},
        "common_eval": {"path": user.checkpoint},
        "dataset": {
            "batch_size": BATCH_SIZE,
            "max_tokens": MAX_TOKENS,
            "required_batch_size_multiple": 1,
            "valid_subset": ",".join(valid_subsets(task, data)),
        },
    }
    return [str(data), *to_flags(settings)]


def to_flags(settings: dict[str, dict[str, Any]]) -> list[str]:
    """A configuration tree as ``--flag=value`` words."""
    flags = []
    for group, options in settings.items():
        for key, value in options.items():
            name = ("arch" if group == "model" else group) if key == "_name" else key
            flag = "--" + name.replace("_", "-")
            if value is True:
                flags.append(flag)
            elif isinstance(value, list):
                flags.append(f"{flag}={','.join(map(str, value))}")
            elif value is not False and value is not None:
                flags.append(f"{flag}={value}")
    return flags

"""The original's checkpoints where fairseq expects today's: weights, settings, optimizer moments and position in the data.

:func:`upgrade_state` stands around fairseq's own step that upgrades old checkpoints, so fairseq-validate, --restore-file,
--finetune-from-model and ``from_pretrained`` take the original's files as they are. It changes no other checkpoint.
"""

import argparse
import logging
import warnings
from collections.abc import Callable
from typing import Any

import torch

from fairseq_tupe.errors import TupeError
from fairseq_tupe.interop.reference import convert_name, convert_state_dict, is_reference, reference_settings

logger = logging.getLogger(__name__)

# saved there -> here; the option of the same name wins, since fairseq writes the command line's options into the saved ones
RENAMED_OPTIONS = {"max_sentences": "batch_size", "max_sentences_valid": "batch_size_valid"}
TASKS = {"masked_lm": "tupe_masked_lm", "sentence_prediction": "tupe_sentence_prediction"}
CRITERIONS = {"masked_lm": "masked_lm", "sentence_prediction": "tupe_sentence_prediction"}
CRITERION_CLASSES = {"SentencePredictionCriterion": "TupeSentencePredictionCriterion"}
# of the machine and the command of that run, or with another meaning today (validate_interval_updates: times an epoch there)
DROPPED = (
    *("user_dir", "save_dir", "restore_file", "tensorboard_logdir", "validate_interval_updates", "keep_updates_list"),
    *("reset_optimizer", "reset_meters", "reset_dataloader", "reset_lr_scheduler", "device_id", "itr_mul", "curriculum"),
    *("bpe", "tokenizer", "dataset_impl", "cpu"),
)


def upgrade_state(original: Callable[[dict], dict], state: dict) -> dict:
    """Wraps ``fairseq.checkpoint_utils._upgrade_state_dict``: what fairseq has just read, with command line options applied."""
    if not is_reference(state):
        return original(state)
    logger.info(describe(state))
    return original(convert_checkpoint(state))


def describe(state: dict) -> str:
    """One line: which variant, of which size, how far trained, for what."""
    args, updates = state["args"], state["optimizer_history"][-1]["num_updates"]
    heads = [f"{name} ({classes} outputs)" for name, classes in classification_heads(state["model"]).items()]
    kind = f"fine-tuned, with {', '.join(heads)}" if heads else "pretrained"
    optimizer = state.get("last_optimizer_state")
    variant = "TUPE-R" if getattr(args, "rel_pos", False) else "TUPE-A"
    flat = "; its optimizer state is of --fp16" if optimizer and is_flat(optimizer, state["model"]) else ""
    return (
        f"checkpoint of the original TUPE repository, read as it is: {variant}, "
        f"{kind}, {args.encoder_layers} layers of width {args.encoder_embed_dim}, {updates:,} updates, its dictionary "
        f"with <file>, <email> and <url> (--reference-dictionary){flat}"
    )


def classification_heads(model: dict) -> dict[str, int]:
    """Name -> number of outputs of the heads in a state dict, ours or the original's."""
    return {
        name.split(".")[1]: len(value)
        for name, value in model.items()
        if name.startswith("classification_heads.") and name.endswith(".out_proj.bias")
    }


def convert_checkpoint(state: dict) -> dict:
    """The original's checkpoint in the format that fairseq saves today, ready to validate, use, or go on with.

    Args:
        state: ``args``, ``model``, ``optimizer_history``, ``extra_state`` and perhaps ``last_optimizer_state``.
    """
    args = convert_args(state["args"])
    model = convert_state_dict(state["model"], state["args"])
    history = [
        {**entry, "criterion_name": CRITERION_CLASSES.get(entry["criterion_name"], entry["criterion_name"])}
        for entry in state["optimizer_history"]
    ]
    converted = {
        "args": None,
        "cfg": whole_config(args),
        "model": model,
        "criterion": None,
        "optimizer_history": history,
        "task_state": {},
        "extra_state": _extra_state(state),
    }
    if state.get("last_optimizer_state") is not None:
        order = parameter_order(args, model)
        converted["last_optimizer_state"] = reorder_optimizer(state["last_optimizer_state"], state["model"], order)
    return converted


def convert_args(args: argparse.Namespace) -> argparse.Namespace:
    """The original's saved options under today's names; options of today's fairseq among them stay as they are."""
    kept = {
        name: value
        for name, value in vars(args).items()
        if name not in DROPPED and not name.startswith("distributed_") and name not in RENAMED_OPTIONS
    }
    for old, new in RENAMED_OPTIONS.items():
        if hasattr(args, old):
            kept.setdefault(new, getattr(args, old))
    kept.update(reference_settings(args))
    kept["arch"] = "tupe_roberta"
    kept["task"] = TASKS.get(args.task, args.task)
    kept["criterion"] = CRITERIONS.get(args.criterion, args.criterion)
    kept["reference_dictionary"] = True
    for name in ("tpu", "skip_remainder_batch"):  # fairseq reads the default, an interpolation, as true
        kept.setdefault(name, False)
    if getattr(args, "lr_scheduler", None) == "polynomial_decay":
        kept["lr_scheduler"] = "tupe_polynomial_decay"
        if getattr(args, "warmup_ratio", 0):  # the original then counts the updates of max_epoch itself
            kept.update(warmup_updates=0, total_num_update=None)
    if isinstance(kept.get("lr"), float):
        kept["lr"] = [kept["lr"]]
    if kept.pop("min_lr", None) not in (None, -1):
        kept["stop_min_lr"] = args.min_lr
    return argparse.Namespace(**kept)


def whole_config(args: argparse.Namespace) -> Any:
    """fairseq's whole configuration (DictConfig) from flat options in today's names; what is left out gets its default."""
    from fairseq.dataclass.utils import convert_namespace_to_omegaconf

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of fairseq's own calls of Hydra
        return convert_namespace_to_omegaconf(args)


def _extra_state(state: dict) -> dict:
    """Position in the data and the best score; the meters go, nothing reads them."""
    extra = {key: value for key, value in state["extra_state"].items() if key != "train_meters"}
    if getattr(state["args"], "best_checkpoint_metric", "loss") in ("accuracy", "mcc", "pearson"):
        for key in ("best", "val_loss"):  # a share there, percent here
            if isinstance(extra.get(key), float):
                extra[key] *= 100.0
    return extra


# --- optimizer -------------------------------------------------------------------------------------------------------


def parameter_order(args: Any, model: dict) -> list[str]:
    """Names of our model's parameters in the order in which optimizers number them.

    Args:
        args: converted options.
        model: our state dict of the checkpoint, heads included.
    """
    from omegaconf import OmegaConf

    from fairseq_tupe.models.config import TupeRobertaConfig
    from fairseq_tupe.models.encoder_adapter import TupeRobertaEncoder
    from fairseq_tupe.models.tupe_roberta import TupeRobertaModel

    settings = {name: getattr(args, name) for name in TupeRobertaConfig.__dataclass_fields__ if hasattr(args, name)}
    cfg = OmegaConf.structured(TupeRobertaConfig(**settings))
    with torch.device("meta"):
        built = TupeRobertaModel(cfg, TupeRobertaEncoder(cfg, _DictionaryOfSize(model)))
        for head, classes in classification_heads(model).items():
            built.register_classification_head(head, classes, model[f"classification_heads.{head}.dense.weight"].shape[0])
    return [name for name, _ in built.named_parameters()]


class _DictionaryOfSize:
    """As much of a dictionary as building a model takes."""

    def __init__(self, model: dict):
        self.symbols = [str(row) for row in range(len(model["encoder.sentence_encoder.embed_tokens.weight"]))]

    def __len__(self) -> int:
        return len(self.symbols)

    def pad(self) -> int:
        return 1

    def bos(self) -> int:
        return 0


def reference_order(model: dict) -> list[str]:
    """The original's parameters as its optimizer numbers them: the order of its state dict, the tied matrix once."""
    return [name for name in model if name != "decoder.lm_head.weight"]


def is_flat(optimizer_state: dict, model: dict) -> bool:
    """Whether the moments are one long vector, as fairseq keeps them with --fp16."""
    moments = [entry["exp_avg"] for entry in optimizer_state["state"].values() if "exp_avg" in entry]
    total = sum(model[name].numel() for name in reference_order(model))
    return len(moments) == 1 and moments[0].dim() == 1 and moments[0].numel() == total


def reorder_optimizer(optimizer_state: dict, model: dict, order: list[str]) -> dict:
    """Adam's state with every moment at the number of its parameter in our model.

    Flat moments stay flat, in our order: a run with --fp16 goes on with --fp16.

    Args:
        optimizer_state: the original's ``last_optimizer_state``.
        model: the original's state dict.
        order: see :func:`parameter_order`.

    Raises:
        TupeError: the state does not fit the weights.
    """
    theirs = reference_order(model)
    names = [convert_name(name) for name in theirs]
    if sorted(names) != sorted(order):
        different = sorted(set(names) ^ set(order))
        raise TupeError(f"the original's optimizer state has other parameters than this model ({different[:4]}): {RESET}")
    if is_flat(optimizer_state, model):
        sizes = [model[name].numel() for name in theirs]
        return {**optimizer_state, "state": _reorder_flat(optimizer_state["state"], sizes, names, order)}
    groups = optimizer_state["param_groups"]
    if len(groups) != 1 or list(groups[0]["params"]) != list(range(len(theirs))):
        raise TupeError(f"the original's optimizer state holds {len(groups)} groups, expected one of {len(theirs)}: {RESET}")
    state = {}
    for number, name in enumerate(names):
        if number not in optimizer_state["state"]:
            continue  # a parameter that never had a gradient
        entry = optimizer_state["state"][number]
        if entry["exp_avg"].shape != model[theirs[number]].shape:
            raise TupeError(
                f"the original's moment {number} is {tuple(entry['exp_avg'].shape)}, its parameter {theirs[number]} "
                f"{tuple(model[theirs[number]].shape)}: {RESET}"
            )
        state[order.index(name)] = entry
    return {**optimizer_state, "state": dict(sorted(state.items()))}


RESET = "pass --reset-optimizer to start with fresh moments"


def _reorder_flat(state: dict, sizes: list[int], names: list[str], order: list[str]) -> dict:
    (number, entry), *_ = state.items()
    moved = {}
    for key, value in entry.items():
        if torch.is_tensor(value) and value.numel() == sum(sizes):
            parts = dict(zip(names, value.split(sizes), strict=True))
            value = torch.cat([parts[name] for name in order])
        moved[key] = value
    return {number: moved}

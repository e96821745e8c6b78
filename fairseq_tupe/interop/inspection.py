"""``python -m fairseq_tupe inspect FILE``: what a checkpoint is, without running code from it."""

import argparse
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from fairseq_tupe.errors import TupeError
from fairseq_tupe.interop.convert import require_fairseq
from fairseq_tupe.interop.reference import is_reference
from fairseq_tupe.interop.safe_loading import explain_contents, load_checkpoint_file

SIGNATURE = "encoder.positional_signature"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Arguments of the command."""
    parser.add_argument("file", help="checkpoint of this project, of the original or of fairseq; or an exported folder")
    parser.add_argument("--json", action="store_true", help="print one JSON object instead of lines")


def run(args: argparse.Namespace) -> int:
    """Describe one file; returns the exit status."""
    facts = inspect_file(args.file)
    if args.json:
        print(json.dumps(facts))
    else:
        width = max(map(len, facts))
        for name, value in facts.items():
            print(f"{name:<{width}}  {value}")
    return 0


def inspect_file(path: str | Path) -> dict[str, Any]:
    """Facts about a file, in the order to show them; what a file does not tell is left out.

    Raises:
        TupeError: the file is none of what can be described.
    """
    path = Path(path)
    if (path / "config.json").is_file() or path.name == "model.safetensors":
        return {"file": str(path), **_exported_folder(path if path.is_dir() else path.parent)}
    require_fairseq("inspect")
    state = load_checkpoint_file(path)
    facts = {"file": f"{path} ({path.stat().st_size:,} bytes)"}
    if explain_contents(state) is None:
        return {**facts, **inspect_checkpoint(state)}
    weights = state.get("model", state) if isinstance(state, dict) else {}
    if not any(torch.is_tensor(value) for value in weights.values()):
        raise TupeError(f"{path}: {explain_contents(state)}")
    return {**facts, "format": explain_contents(state), **_weights(weights)}


def inspect_checkpoint(state: dict) -> dict[str, Any]:
    """Facts about a loaded checkpoint of fairseq, the original's included."""
    from fairseq_tupe.interop.reference import convert_state_dict
    from fairseq_tupe.interop.reference_checkpoint import convert_args

    model = state["model"]
    if is_reference(state):
        kind = "the original TUPE repository's (a patched fairseq 0.8); used as it is, or after: fairseq_tupe convert"
        settings = vars(convert_args(state["args"]))
        model = convert_state_dict(model, state["args"])
    else:
        settings = _settings(state)
        kind = "this project's" if SIGNATURE in model else f"fairseq's, model {settings.get('arch', 'unknown')}"
    facts = {"format": kind, **_variant(model, settings), **_training(state, settings), **_weights(model)}
    if "reference_dictionary" in settings:
        special = 7 if settings["reference_dictionary"] else 4
        facts["dictionary"] = f"{facts.pop('vocabulary rows')} types, {special} special ones first and <mask> last"
    return facts


def _settings(state: dict) -> dict:
    """All options of a checkpoint in one flat dictionary; the model's win over others of the same name."""
    if state.get("args") is not None:
        return vars(state["args"])
    flat: dict = {}
    for name in ("common", "optimization", "dataset", "checkpoint", "lr_scheduler", "optimizer", "criterion", "task", "model"):
        group = state["cfg"].get(name)
        if isinstance(group, argparse.Namespace):
            flat.update(vars(group))
        elif isinstance(group, Mapping):
            flat.update({key: value for key, value in group.items() if key != "_name"})
            flat["arch" if name == "model" else name] = group.get("_name")
    return flat


def _variant(model: dict, settings: dict) -> dict:
    from fairseq_tupe.models.checkpoint_compatibility import describe_signature

    facts = {}
    if SIGNATURE in model:
        name, options = describe_signature(model[SIGNATURE])
        norm = "pre-norm" if "encoder.sentence_encoder.layer_norm.weight" in model else "post-norm"
        facts["variant"] = f"{name}, {norm} ({options})"
    for label, option in (
        *(("layers", "encoder_layers"), ("width", "encoder_embed_dim"), ("feed-forward width", "encoder_ffn_embed_dim")),
        *(("attention heads", "encoder_attention_heads"), ("longest input", "max_positions"), ("task", "task")),
    ):
        if settings.get(option) is not None:
            facts[label] = settings[option]
    return facts


def _training(state: dict, settings: dict) -> dict:
    facts: dict[str, Any] = {}
    last = (state.get("optimizer_history") or [{}])[-1]
    if "num_updates" in last:
        facts["updates"] = last["num_updates"]
    extra = state.get("extra_state") or {}
    position = extra.get("train_iterator") or {}
    if "epoch" in position:
        batches = position.get("iterations_in_epoch", 0)
        facts["epoch"] = f"{position['epoch']}, after {batches:,} batches of it"
    metric = settings.get("best_checkpoint_metric", "loss")
    for label, key in (("best", "best"), ("last", "val_loss")):
        if isinstance(extra.get(key), (int, float)):
            facts[f"{label} {metric}"] = f"{extra[key]:g}"
    if isinstance(state.get("task_state"), dict) and state["task_state"].get("labels"):
        facts["labels"] = ", ".join(f'{i} = "{label}"' for i, label in enumerate(state["task_state"]["labels"]))
    has_state = state.get("last_optimizer_state") is not None
    facts["optimizer"] = f"{last.get('optimizer_name', 'unknown')}, {'with' if has_state else 'without'} its state"
    return facts


def _weights(model: dict) -> dict:
    from fairseq_tupe.interop.reference_checkpoint import classification_heads

    tensors = {name: value for name, value in model.items() if torch.is_tensor(value)}
    heads = [f"{name} ({count} outputs)" for name, count in classification_heads(tensors).items()]
    embedding = next((len(value) for name, value in tensors.items() if name.endswith("embed_tokens.weight")), None)
    # a tied matrix is stored under two names
    unique = {(value.data_ptr(), value.shape): value for value in tensors.values() if value.is_floating_point()}
    facts = {"heads": ", ".join(heads) or "none"}
    if embedding is not None:
        facts["vocabulary rows"] = embedding
    facts["parameters"] = f"{sum(value.numel() for value in unique.values()):,}"
    facts["number format"] = ", ".join(sorted({str(value.dtype).removeprefix("torch.") for value in unique.values()}))
    return facts


def _exported_folder(folder: Path) -> dict:
    """A transformers folder: its config.json and the header of model.safetensors, neither of which is code."""
    try:
        config = json.loads((folder / "config.json").read_text("utf-8"))
        with open(folder / "model.safetensors", "rb") as file:
            header = json.loads(file.read(int.from_bytes(file.read(8), "little")))
    except FileNotFoundError as error:
        raise TupeError(f"{error.filename}: no such file, expected config.json and model.safetensors side by side") from error
    except ValueError as error:
        raise TupeError(f"{folder}: config.json or model.safetensors is damaged ({error})") from error
    header.pop("__metadata__", None)
    architectures = ", ".join(config.get("architectures") or [])
    facts = {"format": f"transformers folder, model type {config.get('model_type')}, {architectures}"}
    for label, option in (
        *(("variant", "variant"), ("layers", "num_hidden_layers"), ("width", "hidden_size")),
        *(("feed-forward width", "intermediate_size"), ("attention heads", "num_attention_heads")),
        *(("longest input", "max_position_embeddings"), ("vocabulary rows", "vocab_size"), ("labels", "id2label")),
    ):
        if option in config:
            facts[label] = config[option]
    facts["parameters"] = f"{sum(_count(entry['shape']) for entry in header.values()):,}"
    facts["number format"] = ", ".join(sorted({entry["dtype"] for entry in header.values()}))
    return facts


def _count(shape: list[int]) -> int:
    total = 1
    for size in shape:
        total *= size
    return total

"""``python -m fairseq_tupe export-hf CHECKPOINT OUT``: a folder that transformers loads, without fairseq or this package."""

import argparse
import json
import logging
import os
import shutil
from pathlib import Path
from typing import Any

from fairseq_tupe.errors import TupeError
from fairseq_tupe.interop.convert import require_fairseq
from fairseq_tupe.interop.reference import is_reference
from fairseq_tupe.interop.safe_loading import load_training_checkpoint

AUTO_CLASSES = {
    "AutoConfig": "configuration_tupe.TupeConfig",
    "AutoModel": "modeling_tupe.TupeModel",
    "AutoModelForMaskedLM": "modeling_tupe.TupeForMaskedLM",
    "AutoModelForSequenceClassification": "modeling_tupe.TupeForSequenceClassification",
}
TOKENIZER_FILES = ("spm.model", "dict.txt", "manifest.json")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Arguments of the command."""
    parser.add_argument("checkpoint", help="checkpoint of this project, or of the original repository")
    parser.add_argument("output", help="folder to write; must not exist, or be empty")
    parser.add_argument("--tokenizer", metavar="FOLDER", help="tokenizer folder (default: beside the checkpoint or its data)")
    parser.add_argument("--no-tokenizer", action="store_true", help="export the model alone")
    parser.add_argument("--head", metavar="NAME", help="classification head to export (default: the only one)")


def run(args: argparse.Namespace) -> int:
    """Export one checkpoint; returns the exit status."""
    require_transformers("export-hf")
    require_fairseq("export-hf")
    logging.getLogger("hydra").setLevel(logging.WARNING)
    checkpoint = read_checkpoint(args.checkpoint, args.head)
    tokenizer = None if args.no_tokenizer else _tokenizer(args, checkpoint)
    output = Path(args.output)
    if output.exists() and (not output.is_dir() or any(output.iterdir())):
        raise TupeError(f"{output} exists already and is not an empty folder: remove it, or choose another name")
    partial = output.with_name(f"{output.name}.writing")
    shutil.rmtree(partial, ignore_errors=True)
    try:
        partial.mkdir(parents=True)
        write_folder(checkpoint, tokenizer, partial)
        if output.exists():
            output.rmdir()
        os.replace(partial, output)
    except BaseException as error:
        shutil.rmtree(partial, ignore_errors=True)
        if isinstance(error, OSError):
            raise TupeError(f"{output} could not be written: {error}") from error
        raise
    print(f"wrote {output}: {checkpoint['config']['variant']}, {checkpoint['architecture']}")
    if tokenizer is not None and has_rules(tokenizer):
        print(
            "note: spm.model normalizes text by rules of its own; ids may differ from sentencepiece's where a combining mark "
            "follows a blank (tokenizers trained by prepare-pretrain-data have no such rules)"
        )
    return 0


def has_rules(tokenizer: Any) -> bool:
    """Whether the sentencepiece model has compiled normalization rules."""
    from fairseq_tupe.interop.hf.fast_tokenizer import model_settings

    return bool(model_settings((tokenizer.folder / "spm.model").read_bytes())[1])


def require_transformers(command: str) -> None:
    """Raise TupeError where transformers or safetensors is missing."""
    try:
        import safetensors  # noqa: F401
        import transformers  # noqa: F401
    except ImportError as error:
        cure = "pip install transformers safetensors"
        raise TupeError(f"{command} needs transformers and safetensors ({error}): {cure}") from error


def read_checkpoint(path: str, head: str | None = None) -> dict[str, Any]:
    """What to export of a checkpoint: ``config`` (arguments of TupeConfig), ``weights``, ``architecture``, ``facts`` and so on.

    Raises:
        TupeError: it is not a TUPE model's, or its heads leave a choice.
    """
    from omegaconf import OmegaConf

    from fairseq_tupe.interop.hf import mapping
    from fairseq_tupe.interop.inspection import inspect_checkpoint
    from fairseq_tupe.interop.reference_checkpoint import classification_heads, convert_checkpoint
    from fairseq_tupe.models.config import TupeRobertaConfig

    state = load_training_checkpoint(path)
    facts = inspect_checkpoint(state)
    if is_reference(state):
        state = convert_checkpoint(state)
    model = state["model"]
    if mapping.SIGNATURE not in model:
        raise TupeError(f"{path}: {facts['format']}; only checkpoints of tupe_roberta can be exported")
    cfg = state["cfg"]
    cfg = cfg if isinstance(cfg, dict) else OmegaConf.to_container(cfg, resolve=True, enum_to_str=True)
    settings = OmegaConf.to_container(OmegaConf.structured(TupeRobertaConfig), resolve=False, enum_to_str=True)
    settings.update({name: value for name, value in cfg["model"].items() if name in settings})
    heads = classification_heads(model)
    if head is None and len(heads) > 1:
        raise TupeError(f"{path}: has the classification heads {', '.join(heads)}: choose one with --head")
    if head is not None and head not in heads:
        raise TupeError(f"{path}: has no classification head {head}, but {', '.join(heads) or 'none'}")
    head = head or next(iter(heads), None)
    config = mapping.hf_settings(settings, len(model[mapping.ENCODER + "embed_tokens.weight"]))
    task = cfg.get("task") or {}
    labels = (state.get("task_state") or {}).get("labels")
    config.update(_labels(model, head, labels, bool((cfg.get("criterion") or {}).get("regression_target"))))
    if head is not None:
        config["pooler_size"] = model[f"{mapping.HEADS}{head}.dense.weight"].shape[0]
    history = (state.get("optimizer_history") or [{}])[-1]
    config["fairseq"] = {
        "task": task.get("_name"),
        "reference_dictionary": bool(task.get("reference_dictionary")),
        "head": head,
        "labels": labels,
        "num_updates": history.get("num_updates", 0),
        "dictionary_signature": model[mapping.DICTIONARY_SIGNATURE].tolist() if mapping.DICTIONARY_SIGNATURE in model else None,
    }
    return {
        "path": path,
        "config": config,
        "weights": mapping.to_hf(model, head),
        "architecture": "TupeForMaskedLM" if head is None else "TupeForSequenceClassification",
        "facts": facts,
        "cfg": cfg,
    }


def _labels(model: dict, head: str | None, labels: list | None, regression: bool) -> dict:
    if head is None:
        return {}
    count = len(model[f"classification_heads.{head}.out_proj.bias"])
    if regression or count == 1:
        return {"num_labels": 1, "problem_type": "regression"}
    names = labels if labels and len(labels) == count else [f"LABEL_{index}" for index in range(count)]
    return {"id2label": dict(enumerate(names)), "label2id": {name: index for index, name in enumerate(names)}}


def _tokenizer(args: argparse.Namespace, checkpoint: dict) -> Any:
    from fairseq_tupe.data.tokenizer import Tokenizer

    if args.tokenizer:
        return Tokenizer.find(args.tokenizer)
    data = (checkpoint["cfg"].get("task") or {}).get("data")
    try:
        return Tokenizer.find(Path(args.checkpoint).parent, *(str(data).split(":")[:1] if data else []))
    except TupeError as error:
        raise TupeError(f"{error}; pass --tokenizer FOLDER, or --no-tokenizer for the model alone") from error


def write_folder(checkpoint: dict, tokenizer: Any, folder: Path) -> None:
    """Fill an empty folder: configuration, weights, code, tokenizer and model card."""
    from safetensors.torch import save

    from fairseq_tupe.interop.hf import TupeConfig, bundle, model_card

    config = TupeConfig(**checkpoint["config"], architectures=[checkpoint["architecture"]], auto_map=AUTO_CLASSES)
    config.dtype = str(next(iter(checkpoint["weights"].values())).dtype).removeprefix("torch.")
    config.save_pretrained(folder)
    (folder / "model.safetensors").write_bytes(save(checkpoint["weights"], metadata={"format": "pt"}))
    (folder / "configuration_tupe.py").write_text(bundle.source_of("fairseq_tupe.interop.hf.configuration_tupe"), "utf-8")
    (folder / "modeling_tupe.py").write_text(bundle.bundle("fairseq_tupe.interop.hf.modeling_tupe"), "utf-8")
    if tokenizer is not None:
        _write_tokenizer(tokenizer, config, folder)
    (folder / "README.md").write_text(model_card.model_card(checkpoint, tokenizer is not None), "utf-8")


def _write_tokenizer(ours: Any, config: Any, folder: Path) -> None:
    from fairseq_tupe.interop.hf import bundle, fast_tokenizer
    from fairseq_tupe.tasks.tupe_masked_lm import REFERENCE_SPECIALS

    specials = REFERENCE_SPECIALS if config.fairseq["reference_dictionary"] else ()
    built = fast_tokenizer.build_tokenizer(ours, config.vocab_size, specials, config.max_position_embeddings)
    built.save_pretrained(folder)
    (folder / "tokenization_tupe.py").write_text(bundle.bundle("fairseq_tupe.interop.hf.tokenization_tupe"), "utf-8")
    settings = folder / "tokenizer_config.json"
    values = json.loads(settings.read_text("utf-8"))
    values.update(tokenizer_class="TupeTokenizer", auto_map={"AutoTokenizer": [None, "tokenization_tupe.TupeTokenizer"]})
    settings.write_text(json.dumps(values, indent=2, ensure_ascii=False) + "\n", "utf-8")
    (folder / "tokenizer").mkdir()  # for the way back
    for name in TOKENIZER_FILES:
        shutil.copyfile(ours.folder / name, folder / "tokenizer" / name)

"""``python -m fairseq_tupe import-hf FOLDER OUT.pt``: an exported model, perhaps trained further, as a fairseq checkpoint."""

import argparse
import json
import logging
import shutil
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch

from fairseq_tupe.errors import TupeError
from fairseq_tupe.interop.convert import require_fairseq, save_new
from fairseq_tupe.interop.hf.exporting import TOKENIZER_FILES, require_transformers


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Arguments of the command."""
    parser.add_argument("folder", help="folder that export-hf wrote, or save_pretrained of such a model")
    parser.add_argument("output", help="checkpoint to write; must not exist")


def run(args: argparse.Namespace) -> int:
    """Import one folder; returns the exit status."""
    require_transformers("import-hf")
    require_fairseq("import-hf")
    logging.getLogger("hydra").setLevel(logging.WARNING)
    folder, output = Path(args.folder), Path(args.output)
    state, notes = read_folder(folder)
    save_new(state, output)
    source, target = folder / "tokenizer", output.parent / "tokenizer"
    if source.is_dir() and not target.exists():
        target.mkdir()
        for name in TOKENIZER_FILES:
            shutil.copyfile(source / name, target / name)
        notes.append(f"its tokenizer is in {target}")
    print("\n".join([f"wrote {output}", *notes]))
    return 0


def read_folder(folder: Path) -> tuple[dict, list[str]]:
    """The checkpoint, and what there is to say about it.

    Raises:
        TupeError: the folder does not hold a TUPE model.
    """
    from omegaconf import OmegaConf

    from fairseq_tupe.interop.hf import mapping
    from fairseq_tupe.interop.reference_checkpoint import whole_config
    from fairseq_tupe.models.config import TupeRobertaConfig
    from fairseq_tupe.models.encoder_adapter import positional_signature

    config, weights = _read(folder)
    saved = config.get("fairseq") or {}
    head = saved.get("head") or "sentence_classification_head"
    model = mapping.from_hf(weights, head)
    has_head = f"{mapping.HEADS}{head}.dense.weight" in model
    settings = {**vars(TupeRobertaConfig()), **mapping.fairseq_settings(config)}
    settings = {name: value for name, value in settings.items() if not name.startswith("_")}
    model[mapping.SIGNATURE] = positional_signature(SimpleNamespace(**settings))
    if saved.get("dictionary_signature"):
        model[mapping.DICTIONARY_SIGNATURE] = torch.tensor(saved["dictionary_signature"], dtype=torch.int64)
    notes = _fill_language_head(model, settings)
    regression = config.get("problem_type") == "regression"
    options = {
        **settings,
        "arch": "tupe_roberta",
        "task": "tupe_sentence_prediction" if has_head else "tupe_masked_lm",
        "criterion": "tupe_sentence_prediction" if has_head else "masked_lm",
        "data": str(folder),
        "reference_dictionary": bool(saved.get("reference_dictionary")),
        "tokens_per_sample": settings["max_positions"],
        "tpu": False,
    }
    if has_head:
        classes = len(model[f"{mapping.HEADS}{head}.out_proj.bias"])
        options.update(num_classes=classes, regression_target=regression, classification_head_name=head)
    cfg = whole_config(argparse.Namespace(**options))
    criterion = "TupeSentencePredictionCriterion" if has_head else "MaskedLmLoss"
    state = {
        "args": None,
        "cfg": OmegaConf.to_container(cfg, resolve=True, enum_to_str=True),
        "model": model,
        "criterion": None,
        "optimizer_history": [
            {
                "criterion_name": criterion,
                "optimizer_name": "FairseqAdam",
                "lr_scheduler_state": {"best": None},
                "num_updates": saved.get("num_updates", 0),
            }
        ],
        "task_state": {"labels": saved["labels"]} if has_head and saved.get("labels") else {},
        "extra_state": {"train_iterator": {"version": 2, "epoch": 1, "iterations_in_epoch": 0, "shuffle": True}},
        "last_optimizer_state": None,
    }
    return state, notes


def _read(folder: Path) -> tuple[dict, dict]:
    from safetensors import SafetensorError
    from safetensors.torch import load_file

    for name in ("config.json", "model.safetensors"):
        if not (folder / name).is_file():
            raise TupeError(f"{folder}: no {name} there, expected a folder that export-hf wrote")
    try:
        config = json.loads((folder / "config.json").read_text("utf-8"))
        weights = load_file(folder / "model.safetensors")
    except (ValueError, SafetensorError) as error:
        raise TupeError(f"{folder}: config.json or model.safetensors is damaged ({error})") from error
    if config.get("model_type") != "tupe":
        raise TupeError(f"{folder}: a model of type {config.get('model_type')}, expected tupe, which export-hf writes")
    return config, weights


def _fill_language_head(model: dict, settings: dict) -> list[str]:
    """transformers saves no language model head with a classifier, but our model always has one."""
    from fairseq_tupe.modules.heads import LanguageModelHead
    from fairseq_tupe.modules.sentence_encoder import init_bert_parameters

    embedding: Any = torch.nn.Embedding.from_pretrained(model["encoder.sentence_encoder.embed_tokens.weight"])
    head = LanguageModelHead(embedding, str(settings["activation_fn"]))
    head.dense.apply(init_bert_parameters)
    fresh = {f"encoder.lm_head.{name}": value for name, value in head.state_dict().items()}
    missing = sorted(fresh.keys() - model.keys())
    model.update({name: fresh[name].to(embedding.weight.dtype) for name in missing})
    return [f"not in the folder, so fresh: {', '.join(missing)}"] if missing else []

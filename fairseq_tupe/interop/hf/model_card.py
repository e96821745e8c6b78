"""README.md of an exported model: what it is, how it was trained, what it is for, whom to cite."""

from typing import Any

CITATION = """@inproceedings{ke2021rethinking,
  title     = {Rethinking Positional Encoding in Language Pre-training},
  author    = {Guolin Ke and Di He and Tie-Yan Liu},
  booktitle = {International Conference on Learning Representations},
  year      = {2021},
  url       = {https://arxiv.org/abs/2006.15595}
}"""

# group of the configuration -> options that say how a model was trained
TRAINING = {
    "optimization": ("max_update", "max_epoch", "lr", "clip_norm", "update_freq"),
    "dataset": ("batch_size", "max_tokens", "train_subset"),
    "optimizer": ("_name", "adam_betas", "adam_eps", "weight_decay"),
    "lr_scheduler": ("_name", "warmup_updates", "warmup_ratio", "total_num_update", "power"),
    "task": ("_name", "mask_prob", "tokens_per_sample", "num_classes"),
    "common": ("seed", "fp16", "bf16"),
}


def model_card(checkpoint: dict[str, Any], has_tokenizer: bool) -> str:
    """Text of the card.

    Args:
        checkpoint: see :func:`fairseq_tupe.interop.hf.exporting.read_checkpoint`.
        has_tokenizer: whether the folder holds one.
    """
    config, facts = checkpoint["config"], checkpoint["facts"]
    classifies = checkpoint["architecture"] == "TupeForSequenceClassification"
    what = "fine-tuned for sentence classification" if classifies else "a masked language model"
    if config.get("problem_type") == "regression":
        what = "fine-tuned to predict a number for a sentence or pair"
    hidden = {"file", "format", "optimizer"}
    rows = "\n".join(f"| {name} | {value} |" for name, value in facts.items() if name not in hidden)
    training = "\n".join(f"| {name} | {value} |" for name, value in _training(checkpoint["cfg"])) or "| unknown | |"
    metrics = "; ".join(f"{name}: {value}" for name, value in facts.items() if name.startswith(("best ", "last ")))
    evaluation = f"On the validation data of the training run: {metrics}." if metrics else "The checkpoint records no metric."
    return f"""---
library_name: transformers
pipeline_tag: {"text-classification" if classifies else "fill-mask"}
tags:
- tupe
---

# {config["variant"]}

A Transformer encoder with the positional encoding "{config["variant"]}" of TUPE (Transformer with Untied Positional Encoding),
{what}. Exported by `python -m fairseq_tupe export-hf` from a fairseq checkpoint.

## Use

```python
{_example(checkpoint["architecture"], has_tokenizer)}
```

Inputs begin with `<s>`, are padded on the right, and hold at most {config["max_position_embeddings"]} tokens. The tokenizer
cleans text as the training text was cleaned. Stock BERT and RoBERTa classes can't load these weights.

## Model

| | |
|---|---|
{rows}

## Training

| | |
|---|---|
{training}

## Evaluation

{evaluation}

## Intended use and limits

For research on positional encodings and for {"the task it was fine-tuned on" if classifies else "fine-tuning on sentence tasks"}.
It repeats the biases of its training text, and is no source of facts. Texts in other languages or domains than its training
text give poor results.

## Citation

```bibtex
{CITATION}
```
"""


def _example(architecture: str, has_tokenizer: bool) -> str:
    auto = f"AutoModelFor{architecture.removeprefix('TupeFor')}"
    names = f"{auto}, AutoTokenizer" if has_tokenizer else auto
    lines = [f"from transformers import {names}", "", f'model = {auto}.from_pretrained("FOLDER", trust_remote_code=True)']
    if has_tokenizer:
        lines.append('tokenizer = AutoTokenizer.from_pretrained("FOLDER", trust_remote_code=True)')
        lines.append('logits = model(**tokenizer("a sentence", return_tensors="pt")).logits')
    return "\n".join(lines)


def _training(cfg: dict) -> list[tuple[str, Any]]:
    return [
        (f"{group}.{option.lstrip('_')}", cfg[group][option])
        for group, options in TRAINING.items()
        for option in options
        if isinstance(cfg.get(group), dict) and cfg[group].get(option) not in (None, "")
    ]

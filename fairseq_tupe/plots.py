"""Plots: the learned positional correlations of every head (the paper's figure 6), and loss curves from fairseq's log.

Dimensions: H heads, T tokens, d head dimension, C = H * d model dimension.
"""

import argparse
import json
import logging
import math
import os
import re
from pathlib import Path
from typing import Any

from fairseq_tupe.errors import TupeError

ENCODER = "encoder.sentence_encoder."
SUFFIXES = (".png", ".svg", ".pdf")
COLUMNS = 6  # heads side by side, at most
# dark to light in one direction, so that a grey print can be read too
COLOURS = "cividis"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Options of ``plot-positions``."""
    parser.add_argument("checkpoint", metavar="CHECKPOINT", help="a checkpoint of tupe_roberta")
    parser.add_argument("--out", required=True, metavar="FILE", help="file to write: .png, .svg or .pdf")
    parser.add_argument("--length", type=int, metavar="T", help="number of positions to draw (default: all)")


def run(args: argparse.Namespace) -> int:
    """Draw the positional correlations of ``args.checkpoint``."""
    check_suffix(args.out)
    draw_correlations(correlations(load_weights(args.checkpoint), args.length), args.out)
    print(f"wrote {args.out}")
    return 0


def load_weights(path: str | Path) -> dict:
    """The parameters in a checkpoint, on the CPU; nothing in the file is run.

    Raises:
        TupeError: no such file, or not a checkpoint of tupe_roberta or of the original.
    """
    from fairseq_tupe.interop.reference import convert_state_dict, is_reference
    from fairseq_tupe.interop.safe_loading import load_training_checkpoint

    state = load_training_checkpoint(path)
    weights = convert_state_dict(state["model"], state["args"]) if is_reference(state) else state["model"]
    if "encoder.positional_signature" not in weights:
        raise TupeError(f"{path} is not a checkpoint of tupe_roberta: it holds no encoder.positional_signature")
    return weights


def correlations(weights: dict, length: int | None = None) -> dict:
    """Title -> (H, T, T) float tensor: each part of the attention logits that depends on positions alone.

    For TUPE "absolute" is (p_i Uq)(p_j Uk)^T / sqrt(2d) before [CLS] is set apart, "relative" the bias b_{j-i}, and
    "as used" their sum with the [CLS] rule, just as the layers add it. For BERT-A^d the scale is 1 / sqrt(4d).

    Args:
        weights: what :func:`load_weights` returns.
        length: T; by default as many positions as the model has.

    Raises:
        TupeError: the model has no such part (BERT-A), or fewer positions than ``length``.
    """
    import torch

    from fairseq_tupe.modules.positional_bias import PositionalBias
    from fairseq_tupe.modules.sentence_encoder import POSITION_ENCODINGS

    encoding, _, cls_rule, bins, distance, heads = weights["encoder.positional_signature"].tolist()
    name = list(POSITION_ENCODINGS)[encoding]
    untied = _untied_positions(weights, name, heads)
    relative = _relative_bias(weights, heads, bins, distance)
    if untied is None and relative is None:
        raise TupeError(f"--position-encoding {name} without --rel-pos has no correlations of positions alone to draw")
    positions = untied.embedding.num_embeddings - 1 if untied is not None else length or 4 * distance
    length = positions if length is None else length
    if not 1 <= length <= positions:
        raise TupeError(f"--length {length} is not between 1 and the model's max_positions = {positions}")
    parts = {}
    with torch.no_grad():
        if untied is not None:
            terms = POSITION_ENCODINGS[name]
            absolute = PositionalBias(untied, None, cls_rule=False)(length) * math.sqrt(2 / terms)
            parts[f"absolute part: $(p_i U^Q)(p_j U^K)^T / \\sqrt{{{terms}d}}$"] = absolute
        if relative is not None:
            parts["relative part: $b_{j-i}$"] = PositionalBias(None, relative, cls_rule=False)(length)
        if cls_rule:
            whole = PositionalBias(untied, relative, cls_rule=True)(length)
            parts["as used: the sum, with [CLS] (position 0) set apart"] = whole
    return parts


def _untied_positions(weights: dict, encoding: str, heads: int):
    from fairseq_tupe.modules.positional_bias import UntiedPositions

    if not encoding.startswith("untied"):
        return None
    prefix = ENCODER + ("positional_bias.untied." if encoding == "untied" else "untied_projections.")
    rows, embed_dim = weights[prefix + "embedding.weight"].shape
    return _filled(UntiedPositions(embed_dim, heads, rows - 1), weights, prefix)


def _relative_bias(weights: dict, heads: int, bins: int, distance: int):
    from fairseq_tupe.modules.positional_bias import RelativeBias

    prefix = ENCODER + "positional_bias.relative."
    if prefix + "weight" not in weights:
        return None
    return _filled(RelativeBias(heads, bins, distance), weights, prefix)


def _filled(module: Any, weights: dict, prefix: str):
    own = {key: weights[prefix + key].float() for key in module.state_dict()}
    module.load_state_dict(own)
    return module.eval()


def draw_correlations(parts: dict, out: str | Path) -> None:
    """One heat map a head and part; rows are queries i, columns are keys j.

    Raises:
        TupeError: matplotlib is missing, or ``out`` has another suffix than those in ``SUFFIXES``.
    """
    plt = _matplotlib()
    heads = len(next(iter(parts.values())))
    rows = math.ceil(heads / COLUMNS)
    columns = math.ceil(heads / rows)
    figure = plt.figure(figsize=(2.7 * columns + 0.4, (2.5 * rows + 0.5) * len(parts)), layout="constrained")
    sections = figure.subfigures(len(parts), 1, squeeze=False)[:, 0]
    for section, (title, values) in zip(sections, parts.items(), strict=True):
        section.suptitle(title, fontsize=12)
        axes = section.subplots(rows, columns, squeeze=False).flatten()
        for head, panel in enumerate(axes):
            if head >= heads:
                panel.set_visible(False)
                continue
            image = panel.imshow(values[head].numpy(), cmap=COLOURS, interpolation="nearest")
            bar = section.colorbar(image, ax=panel, fraction=0.046, pad=0.03)
            bar.ax.tick_params(labelsize=8)
            panel.set_title(f"head {head + 1}", fontsize=10)
            panel.set_xlabel("key position j", fontsize=9)
            panel.set_ylabel("query position i", fontsize=9)
            panel.tick_params(labelsize=8)
    _save(plt, figure, out)


# --log-format simple: `epoch 001:    100 / 500 loss=9.1, ..` and `epoch 001 | valid on 'valid' subset | loss 9.0 | ..`
SIMPLE_STEP = re.compile(r"epoch \d+:\s+\d+ / \d+ (?P<stats>\S+=.*)$")
SIMPLE_SUMMARY = re.compile(r"epoch \d+ \| (?P<valid>valid[^|]*)\| (?P<stats>.*)$")


def read_losses(log: str | Path) -> dict[str, dict[int, float]]:
    """``{"train": {update: loss}, "valid": {update: loss}}``, bits a masked token, from a log of fairseq-train.

    Understands ``--log-format simple`` and ``json``. Where a run was resumed, the later line of an update counts.

    Raises:
        TupeError: there is no such file, or no loss in it.
    """
    losses: dict[str, dict[int, float]] = {"train": {}, "valid": {}}
    try:
        text = Path(log).read_text(encoding="utf-8", errors="replace")
    except OSError as error:
        raise TupeError(f"can't read {log}: {error.strerror}") from error
    for line in text.splitlines():
        split, stats = _read_line(line)
        prefix = "valid_" if f"{split}_loss" in stats else ""
        if split and f"{prefix}loss" in stats and f"{prefix}num_updates" in stats:
            losses[split][int(stats[f"{prefix}num_updates"])] = float(stats[f"{prefix}loss"])
    if not losses["train"] and not losses["valid"]:
        raise TupeError(f"{log} holds no loss: expected the output of fairseq-train with --log-format simple or json")
    return losses


def _read_line(line: str) -> tuple[str, dict]:
    """("train", "valid" or "", statistics) of one log line."""
    match = re.search(r"\| (train_inner|valid) \| (\{.*\})\s*$", line)
    if match:
        try:
            return match[1].removesuffix("_inner"), json.loads(match[2])
        except ValueError:  # a line that a kill cut short
            return "", {}
    match = SIMPLE_STEP.search(line)
    if match:
        return "train", dict(pair.split("=", 1) for pair in match["stats"].split(", ") if "=" in pair)
    match = SIMPLE_SUMMARY.search(line)
    if match:
        return "valid", dict(pair.split(" ", 1) for pair in match["stats"].split(" | ") if " " in pair)
    return "", {}


def draw_losses(losses: dict[str, dict[int, float]], out: str | Path, title: str = "") -> None:
    """Loss against updates, the training loss as a line, the validation loss as marked points.

    Raises:
        TupeError: matplotlib is missing, or ``out`` has another suffix than those in ``SUFFIXES``.
    """
    plt = _matplotlib()
    figure, axes = plt.subplots(figsize=(7, 4.2), layout="constrained")
    for split, style in {"train": {"lw": 1.4}, "valid": {"marker": "o", "ls": "--", "ms": 5}}.items():
        updates = sorted(losses[split])
        if updates:
            axes.plot(updates, [losses[split][update] for update in updates], label=split, **style)
    axes.set_xlabel("updates")
    axes.set_ylabel("loss (bits a masked token)")
    axes.set_title(title)
    axes.grid(alpha=0.3)
    axes.legend()
    _save(plt, figure, out)


def check_suffix(out: str | Path) -> None:
    """TupeError where ``out`` has another suffix than those in ``SUFFIXES``."""
    if Path(out).suffix.lower() not in SUFFIXES:
        raise TupeError(f"{out}: unknown kind of picture '{Path(out).suffix}', known: {', '.join(SUFFIXES)}")


def _matplotlib():
    for name in ("matplotlib", "PIL"):  # fairseq lets everyone log everything
        logging.getLogger(name).setLevel(logging.WARNING)
    try:
        import matplotlib
    except ImportError as error:
        raise TupeError("plots need matplotlib: run scripts/setup.sh, or pip install 'fairseq_tupe[plot]'") from error
    matplotlib.use("Agg")  # no display needed
    matplotlib.rcParams["svg.hashsalt"] = "fairseq_tupe"  # the same plot gives the same file
    import matplotlib.pyplot as plt

    return plt


def _save(plt: Any, figure: Any, out: str | Path) -> None:
    check_suffix(out)
    out = Path(out)
    kind = out.suffix.lower()
    fresh = out.with_name(f".{out.name}.{os.getpid()}{kind}")
    try:
        out.parent.mkdir(parents=True, exist_ok=True)
        figure.savefig(fresh, dpi=150, metadata={"Date": None} if kind == ".svg" else None)
        os.replace(fresh, out)
    except OSError as error:
        raise TupeError(f"can't write {out}: {error.strerror}") from error
    finally:
        plt.close(figure)
        fresh.unlink(missing_ok=True)

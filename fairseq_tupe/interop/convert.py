"""``python -m fairseq_tupe convert reference.pt out.pt``: a checkpoint of the original in today's format.

Nothing here needs it, since fairseq takes the original's files as they are where this package is loaded. It is for files that
are to be used for years, and for programs that read checkpoints themselves.
"""

import argparse
import logging
import os
from pathlib import Path
from typing import Any

import torch

import fairseq_tupe
from fairseq_tupe.errors import TupeError
from fairseq_tupe.interop.reference import is_reference
from fairseq_tupe.interop.safe_loading import load_training_checkpoint


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Arguments of the command."""
    parser.add_argument("checkpoint", help="checkpoint of the original repository (guolinke/TUPE)")
    parser.add_argument("output", help="file to write; must not exist")
    parser.add_argument("--no-optimizer", action="store_true", help="leave out the optimizer's state: a third of the size")


def run(args: argparse.Namespace) -> int:
    """Convert one file; returns the exit status."""
    require_fairseq("convert")
    state = load_training_checkpoint(args.checkpoint)
    if not is_reference(state):
        raise TupeError(f"{args.checkpoint}: not a checkpoint of the original TUPE repository; see: fairseq_tupe inspect FILE")
    if args.no_optimizer:
        state.pop("last_optimizer_state", None)
    from omegaconf import OmegaConf

    from fairseq_tupe.interop.reference_checkpoint import convert_checkpoint, describe

    logging.getLogger("hydra").setLevel(logging.WARNING)
    converted = convert_checkpoint(state)
    converted["cfg"] = OmegaConf.to_container(converted["cfg"], resolve=True, enum_to_str=True)
    save_new(converted, args.output)
    print(describe(state).replace("read as it is", "converted"))
    print(f"wrote {args.output} ({os.path.getsize(args.output):,} bytes)")
    return 0


def require_fairseq(command: str) -> None:
    """Raise TupeError where fairseq can't be imported."""
    if fairseq_tupe.FAIRSEQ_ERROR is not None:
        raise TupeError(f"{command} needs fairseq, which fails to import ({fairseq_tupe.FAIRSEQ_ERROR}): fairseq_tupe doctor")


def save_new(state: Any, output: str | Path) -> None:
    """``torch.save`` to a file that must not exist, whole or not at all."""
    output = Path(output)
    if output.exists():
        raise TupeError(f"{output} exists already: remove it, or choose another name")
    output.parent.mkdir(parents=True, exist_ok=True)
    partial = output.with_name(f"{output.name}.writing")
    try:
        torch.save(state, partial)
        os.replace(partial, output)
    except BaseException as error:
        partial.unlink(missing_ok=True)
        if isinstance(error, (OSError, RuntimeError)):  # torch reports a full disk as RuntimeError
            raise TupeError(f"{output} could not be written: {error}") from error
        raise

"""Checkpoint files: loaded safely, refused in one line, copied atomically, kept when they should be."""

import logging
import os
import shutil
from pathlib import Path

import torch
from fairseq.file_io import PathManager

from fairseq_tupe.error_lines import LINE, one_line
from fairseq_tupe.errors import TupeError
from fairseq_tupe.interop.safe_loading import ALLOWED_GLOBALS, explain_failure
from fairseq_tupe.optim.lr_scheduler.tupe_polynomial_decay import TupePolynomialDecaySchedule, plan_run

logger = logging.getLogger(__name__)


def is_ours(task) -> bool:
    """Whether a task, or a task class, belongs to this package."""
    return (task if isinstance(task, type) else type(task)).__module__.startswith("fairseq_tupe.")


def load_safely() -> None:
    """Let torch load fairseq's and the reference's checkpoints without letting a file run code.

    torch loads plain data only, unless told otherwise: these classes are what the checkpoints hold besides. Some builds
    of fairseq turn the protection off; the variable overrides them.
    """
    torch.serialization.add_safe_globals(ALLOWED_GLOBALS)
    os.environ["TORCH_FORCE_WEIGHTS_ONLY_LOAD"] = "1"
    if os.environ.pop("TORCH_FORCE_NO_WEIGHTS_ONLY_LOAD", None):  # torch refuses to load anything with both
        logger.warning("ignoring TORCH_FORCE_NO_WEIGHTS_ONLY_LOAD: a checkpoint must not be able to run code")


def load_checkpoint_to_cpu(original, path, *args, **kwargs):
    """Say which file is bad, and which one is good; the exception keeps its type."""
    try:
        return original(path, *args, **kwargs)
    except Exception as error:
        setattr(error, LINE, one_line(error) or explain_failure(path, error))
        raise


def load_ensemble(original, filenames, *args, **kwargs):
    """Name the checkpoint where its contents are refused (fairseq-validate, from_pretrained)."""
    try:
        return original(filenames, *args, **kwargs)
    except TupeError as error:
        raise TupeError(f"{', '.join(filenames)}: {error}") from error
    except OSError as error:
        missing = [name for name in filenames if not PathManager.exists(name)]
        if missing and not hasattr(error, LINE):
            setattr(error, LINE, f"checkpoint {missing[0]} does not exist")
        raise


def load_into_trainer(original, trainer, filename, *args, **kwargs):
    """Name the checkpoint where it can't be used; fairseq says "ensure that the architectures match"."""
    try:
        return original(trainer, filename, *args, **kwargs)
    except Exception as error:
        if not is_ours(trainer.task):
            raise
        reason = one_line(error)
        if reason is None and isinstance(error, AssertionError):
            reason = str(error)
        if reason is None and "Cannot load model parameters" in str(error):
            reason = f"its weights do not fit this model ({error.__context__})"
        if reason is None:
            raise
        if os.path.dirname(os.path.abspath(filename)) == os.path.abspath(trainer.cfg.checkpoint.save_dir):
            reason += " (the file was found in --save-dir: a new run needs a folder of its own)"
        raise TupeError(reason if filename in reason else f"{filename}: {reason}") from error


def load_checkpoint(original, cfg, trainer, **passthrough):
    """Refuse to start from scratch where a checkpoint was asked for, and tell our schedule the length of the run."""
    if is_ours(trainer.task):
        _require_checkpoint(cfg, trainer.checkpoint_suffix)
    extra_state, epoch_itr = original(cfg, trainer, **passthrough)
    if isinstance(trainer.lr_scheduler, TupePolynomialDecaySchedule):
        plan_run(trainer, epoch_itr)
    return extra_state, epoch_itr


def _require_checkpoint(cfg, suffix: str) -> None:
    if cfg.restore_file != "checkpoint_last.pt":
        wanted, flag = cfg.restore_file.replace(".pt", f"{suffix}.pt"), "--restore-file"
    elif PathManager.exists(os.path.join(cfg.save_dir, f"checkpoint_last{suffix}.pt")):
        return
    elif getattr(cfg, "continue_once", None):
        wanted, flag = cfg.continue_once, "--continue-once"
    else:
        wanted, flag = cfg.finetune_from_model, "--finetune-from-model"
    if wanted and not PathManager.isfile(wanted):
        raise TupeError(f"{flag} {wanted} does not exist: training would have started from scratch")


def copy_atomically(original, src_path: str, dst_path: str, overwrite: bool = False):
    """checkpoint_last and checkpoint_best are copies: a kill or a full disk must not leave a torn one."""
    if PathManager.path_requires_pathmanager(src_path) or PathManager.path_requires_pathmanager(dst_path):
        return original(src_path, dst_path, overwrite)
    target = os.path.realpath(dst_path)  # a link stays a link
    partial = f"{target}.copying"
    try:
        with open(src_path, "rb") as source, open(partial, "wb") as copy:
            shutil.copyfileobj(source, copy, 1 << 24)
            copy.flush()
            os.fsync(copy.fileno())
        os.replace(partial, target)
    except BaseException:
        Path(partial).unlink(missing_ok=True)
        raise
    return dst_path


def save_checkpoint(original, cfg, trainer, epoch_itr, val_loss):
    """Keep the checkpoint of --save-interval-updates on the last update of an epoch too, where fairseq leaves it out.

    With --no-epoch-checkpoints the 300,000th update would otherwise be lost whenever an epoch ends there.
    """
    result = original(cfg, trainer, epoch_itr, val_loss)
    updates, suffix = trainer.get_num_updates(), trainer.checkpoint_suffix
    due = cfg.save_interval_updates > 0 and updates % cfg.save_interval_updates == 0
    if not (is_ours(trainer.task) and due and epoch_itr.end_of_epoch() and trainer.should_save_checkpoint_on_current_rank):
        return result
    last = os.path.join(cfg.save_dir, f"checkpoint_last{suffix}.pt")
    if not (cfg.no_save or cfg.no_last_checkpoints) and os.path.isfile(last):
        PathManager.copy(last, os.path.join(cfg.save_dir, f"checkpoint_{epoch_itr.epoch}_{updates}{suffix}.pt"), overwrite=True)
    return result

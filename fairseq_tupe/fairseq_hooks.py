"""Every change that importing this package makes to fairseq's behaviour, each with its reason.

Checks and messages concern our own tasks only: a stock run with this user directory stays a stock run. What reaches
further is safe loading, atomic copies, and that an error of ours, or a checkpoint that can't be read, ends a program in
one line; FAIRSEQ_TUPE_TRACEBACK=1 shows the traceback instead.
"""

import argparse
import functools
import logging
import os
import re
import shutil
import sys
import zipfile
from pathlib import Path

import torch
from fairseq import checkpoint_utils, options, tasks
from fairseq.data import data_utils
from fairseq.distributed import utils as distributed_utils
from fairseq.file_io import PathManager
from fairseq.logging.meters import AverageMeter, StopwatchMeter, TimeMeter
from fairseq.tasks import FairseqTask
from fairseq.trainer import Trainer

from fairseq_tupe.error_lines import LINE, one_line, print_line
from fairseq_tupe.errors import TupeError
from fairseq_tupe.optim.lr_scheduler.tupe_polynomial_decay import TupePolynomialDecaySchedule, plan_run

logger = logging.getLogger(__name__)

PAPER_BATCH = 256  # sequences an update (arXiv 2006.15595, section 4.1)


def install() -> None:
    """Apply all changes; a second call does nothing."""
    if getattr(install, "done", False):
        return
    install.done = True
    _load_safely()
    sys.excepthook = functools.partial(_show_one_line, sys.excepthook)
    _show_one_line_under_hydra()
    PathManager.copy = staticmethod(functools.partial(_copy_atomically, PathManager.copy))
    _wrap(options, "parse_args_and_arch", _parse_args_and_arch)
    _wrap(distributed_utils, "call_main", _call_main)
    _wrap(Trainer, "__init__", _init_trainer)
    _wrap(Trainer, "load_checkpoint", _load_into_trainer)
    _wrap(FairseqTask, "get_batch_iterator", _get_batch_iterator)
    _wrap(checkpoint_utils, "load_checkpoint", _load_checkpoint)
    _wrap(checkpoint_utils, "load_checkpoint_to_cpu", _load_checkpoint_to_cpu)
    _wrap(checkpoint_utils, "load_model_ensemble_and_task", _load_ensemble)


def _wrap(owner, name: str, replacement) -> None:
    """Replace owner.name by replacement(original, ...)."""
    original = getattr(owner, name)

    @functools.wraps(original)
    def wrapped(*args, **kwargs):
        return replacement(original, *args, **kwargs)

    setattr(owner, name, wrapped)


def is_ours(task) -> bool:
    """Whether a task, or a task class, belongs to this package."""
    return (task if isinstance(task, type) else type(task)).__module__.startswith("fairseq_tupe.")


# --- loading ---------------------------------------------------------------------------------------------------------


def _load_safely() -> None:
    """Let torch load fairseq's and the reference's checkpoints without letting a file run code.

    torch loads plain data only, unless told otherwise: these classes are what the checkpoints hold besides. Some builds
    of fairseq turn the protection off; the variable overrides them.
    """
    meters = [(meter, f"fairseq.meters.{meter.__name__}") for meter in (AverageMeter, TimeMeter, StopwatchMeter)]
    torch.serialization.add_safe_globals([argparse.Namespace, *meters])
    os.environ["TORCH_FORCE_WEIGHTS_ONLY_LOAD"] = "1"
    if os.environ.pop("TORCH_FORCE_NO_WEIGHTS_ONLY_LOAD", None):  # torch refuses to load anything with both
        logger.warning("ignoring TORCH_FORCE_NO_WEIGHTS_ONLY_LOAD: a checkpoint must not be able to run code")


def _load_checkpoint_to_cpu(original, path, *args, **kwargs):
    """Say which file is bad, and which one is good; the exception keeps its type."""
    try:
        return original(path, *args, **kwargs)
    except Exception as error:
        setattr(error, LINE, _why_unreadable(path, error))
        raise


def _why_unreadable(path: str, error: Exception) -> str:
    if isinstance(error, FileNotFoundError):
        return f"checkpoint {path} does not exist"
    unsafe = re.search(r"GLOBAL ([\w.]+) (was not an allowed global|whose module \w+ is blocked)", str(error))
    if unsafe:
        return f"checkpoint {path} holds a {unsafe[1]}, which could run code, so it is not loaded"
    if zipfile.is_zipfile(path):
        return f"{path} is not a checkpoint of fairseq ({type(error).__name__}: {error})"
    others = sorted(Path(path).parent.glob("*.pt"), key=os.path.getmtime, reverse=True)
    whole = next((str(other) for other in others if other != Path(path) and zipfile.is_zipfile(other)), None)
    cure = f"use {whole} (--restore-file, or --path)" if whole else "no other checkpoint lies beside it"
    return f"checkpoint {path} is damaged or cut short ({os.path.getsize(path):,} bytes): {cure}"


def _load_ensemble(original, filenames, *args, **kwargs):
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


def _load_into_trainer(original, trainer, filename, *args, **kwargs):
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


def _load_checkpoint(original, cfg, trainer, **passthrough):
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


def _copy_atomically(original, src_path: str, dst_path: str, overwrite: bool = False):
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


# --- starting --------------------------------------------------------------------------------------------------------


def _parse_args_and_arch(original, *args, **kwargs):
    """Refuse reduced precision on a CPU before --bf16, which sets tpu=True, makes fairseq import torch_xla."""
    result = original(*args, **kwargs)
    namespace = result[0] if isinstance(result, tuple) else result
    task = tasks.TASK_REGISTRY.get(getattr(namespace, "task", None))
    if task is not None and is_ours(task):
        _refuse_reduced_precision_on_cpu(namespace)
        if getattr(namespace, "bf16", False):
            namespace.tpu = False  # there is a GPU
    return result


def _gpu(common) -> bool:
    return torch.cuda.is_available() and not getattr(common, "cpu", False)


def _refuse_reduced_precision_on_cpu(common) -> None:
    if not _gpu(common):
        for name in ("fp16", "bf16", "amp", "memory_efficient_fp16", "memory_efficient_bf16"):
            if getattr(common, name, False):
                flag = "--" + name.replace("_", "-")
                raise TupeError(f"{flag} needs a GPU, and this run is on the CPU: leave it out to train in fp32")


def _call_main(original, cfg, main, **kwargs):
    """fairseq-validate gathers its results through a CUDA tensor, so several CPU ranks die in a TypeError at the end."""
    ranks = cfg.distributed_training.distributed_world_size
    validates = Path(main.__code__.co_filename).parts[-2:] == ("fairseq_cli", "validate.py")
    if validates and ranks > 1 and not _gpu(cfg.common):
        raise TupeError(f"fairseq-validate can't run on {ranks} CPU ranks: use one (--distributed-world-size 1)")
    return original(cfg, main, **kwargs)


def _init_trainer(original, trainer, cfg, task, *args, **kwargs):
    """Check what only the whole configuration shows, and say which copy of this package runs, on what batch."""
    if not is_ours(task):
        return original(trainer, cfg, task, *args, **kwargs)
    _refuse_reduced_precision_on_cpu(cfg.common)
    world = int(os.environ.get("WORLD_SIZE", 1)) if "TORCHELASTIC_RUN_ID" in os.environ else 1
    if world > 1 and cfg.distributed_training.distributed_world_size == 1:
        raise TupeError(
            f"torchrun started {world} processes, but fairseq takes each for a run of its own where there is no GPU, and "
            f"they would overwrite each other's checkpoints: start the ranks with --distributed-rank instead"
        )
    original(trainer, cfg, task, *args, **kwargs)
    logger.info(f"fairseq_tupe is {Path(__file__).resolve().parent}")
    if task.cfg._name == "tupe_masked_lm":
        _announce_batch(cfg, trainer.data_parallel_world_size, task.cfg.tokens_per_sample)
    return None


def _announce_batch(cfg, ranks: int, tokens_per_sample: int) -> None:
    sentences, tokens = cfg.dataset.batch_size, cfg.dataset.max_tokens
    for freq in dict.fromkeys(cfg.optimization.update_freq):
        share = f"{ranks} ranks x {{}} x update_freq {freq} = {{}}"
        if sentences:
            total = ranks * sentences * freq
            text = share.format(f"batch size {sentences}", f"{total:,} sequences")
            text += f", within {tokens:,} tokens a rank" if tokens else ""
        else:
            total = ranks * (tokens // tokens_per_sample) * freq
            text = share.format(f"at most {tokens:,} tokens", f"at most {ranks * tokens * freq:,} tokens")
        logger.info(f"effective batch: {text}")
        if total != PAPER_BATCH:
            logger.warning(f"the effective batch is {total:,} full sequences, the paper's is {PAPER_BATCH}")


def _get_batch_iterator(original, task, *args, **kwargs):
    """Keep the last batch of an epoch and of a validation set.

    fairseq's main branch (0.12.2 does not) drops it where --required-batch-size-multiple, 8 by default, does not divide
    its size: the same longest sentences are never trained on, and a metric misses part of the validation set.
    """
    if not is_ours(task):
        return original(task, *args, **kwargs)
    stock = data_utils.batch_by_size

    def batch_by_size(indices, *args, **kwargs):
        batches = list(stock(indices, *args, **kwargs))  # neighbouring parts of indices
        kept = sum(len(batch) for batch in batches)
        return batches if kept == len(indices) else [*batches, indices[kept:]]

    data_utils.batch_by_size = batch_by_size
    try:
        return original(task, *args, **kwargs)
    finally:
        data_utils.batch_by_size = stock


# --- ending ----------------------------------------------------------------------------------------------------------


def _show_one_line(previous, kind, error, trace) -> None:
    """A refusal is no crash: one line says more than a traceback of fairseq's internals."""
    if not print_line(error):
        previous(kind, error, trace)


def _show_one_line_under_hydra() -> None:
    """Hydra prints its own traceback when it takes the result of a failed job, and exits with 1; so does this."""
    from hydra.core.utils import JobReturn

    result = getattr(JobReturn, "return_value", None)
    if not isinstance(result, property):  # before Hydra 1.1 the exception goes straight to the excepthook
        return

    def return_value(job):
        error = getattr(job, "_return_value", None)
        if isinstance(error, BaseException) and print_line(error):
            sys.exit(1)
        return result.fget(job)

    JobReturn.return_value = property(return_value, result.fset)

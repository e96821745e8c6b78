"""How fairseq's programs start, make batches, and end."""

import logging
import os
import sys
from pathlib import Path

import torch
from fairseq import tasks
from fairseq.data import data_utils

import fairseq_tupe
from fairseq_tupe.error_lines import print_line
from fairseq_tupe.errors import TupeError
from fairseq_tupe.fairseq_hooks.checkpoints import is_ours

logger = logging.getLogger(__name__)

PAPER_BATCH = 256  # sequences an update (arXiv 2006.15595, section 4.1)


def parse_args_and_arch(original, *args, **kwargs):
    """Let fairseq-validate do without --task, and refuse reduced precision on a CPU.

    The latter before --bf16, which sets tpu=True, makes fairseq import torch_xla.
    """
    parser = args[0]
    if parser.get_default("task") is None:  # fairseq-validate: the checkpoint knows its task, fairseq dies without the option
        parser.set_defaults(task="tupe_masked_lm")
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
        for name in ("memory_efficient_fp16", "memory_efficient_bf16", "fp16", "bf16", "amp"):
            if getattr(common, name, False):
                flag = "--" + name.replace("_", "-")
                raise TupeError(f"{flag} needs a GPU, and this run is on the CPU: leave it out to train in fp32")


def call_main(original, cfg, main, **kwargs):
    """fairseq-validate gathers its results through a CUDA tensor, so several CPU ranks die in a TypeError at the end."""
    ranks = cfg.distributed_training.distributed_world_size
    validates = Path(main.__code__.co_filename).parts[-2:] == ("fairseq_cli", "validate.py")
    if validates and ranks > 1 and not _gpu(cfg.common):
        raise TupeError(f"fairseq-validate can't run on {ranks} CPU ranks: use one (--distributed-world-size 1)")
    task = tasks.TASK_REGISTRY.get(cfg.task._name if cfg.task is not None else None)
    launched = cfg.distributed_training.distributed_init_method or "MASTER_ADDR" in os.environ or "SLURM_NODELIST" in os.environ
    if ranks > 1 and not _gpu(cfg.common) and not launched and task is not None and is_ours(task):
        raise TupeError(
            f"fairseq can't start {ranks} ranks on a CPU: start each yourself with --distributed-rank R "
            "--distributed-init-method tcp://127.0.0.1:PORT --distributed-no-spawn --distributed-backend gloo "
            "--ddp-backend legacy_ddp --cpu"
        )
    return original(cfg, main, **kwargs)


def init_trainer(original, trainer, cfg, task, *args, **kwargs):
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
    logger.info(f"fairseq_tupe is {Path(fairseq_tupe.__file__).resolve().parent}")
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


def get_batch_iterator(original, task, *args, **kwargs):
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


def show_one_line(previous, kind, error, trace) -> None:
    """A refusal is no crash: one line says more than a traceback of fairseq's internals."""
    if not print_line(error):
        previous(kind, error, trace)


def show_one_line_under_hydra() -> None:
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

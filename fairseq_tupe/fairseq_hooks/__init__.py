"""Every change that importing this package makes to fairseq's behaviour, each with its reason.

Checks and messages concern our own tasks only: a stock run with this user directory stays a stock run. What reaches
further is safe loading, atomic copies, and that an error of ours, or a checkpoint that can't be read, ends a program in
one line; FAIRSEQ_TUPE_TRACEBACK=1 shows the traceback instead.

``checkpoints`` holds what concerns checkpoint files, ``programs`` how fairseq's programs start and end.
"""

import functools
import sys

from fairseq import checkpoint_utils, options
from fairseq.distributed import utils as distributed_utils
from fairseq.file_io import PathManager
from fairseq.tasks import FairseqTask
from fairseq.trainer import Trainer

from fairseq_tupe.fairseq_hooks import checkpoints, programs
from fairseq_tupe.interop import reference_checkpoint


def install() -> None:
    """Apply all changes; a second call does nothing."""
    if getattr(install, "done", False):
        return
    install.done = True
    checkpoints.load_safely()
    sys.excepthook = functools.partial(programs.show_one_line, sys.excepthook)
    programs.show_one_line_under_hydra()
    PathManager.copy = staticmethod(functools.partial(checkpoints.copy_atomically, PathManager.copy))
    _wrap(options, "parse_args_and_arch", programs.parse_args_and_arch)
    _wrap(distributed_utils, "call_main", programs.call_main)
    _wrap(Trainer, "__init__", programs.init_trainer)
    _wrap(Trainer, "load_checkpoint", checkpoints.load_into_trainer)
    _wrap(FairseqTask, "get_batch_iterator", programs.get_batch_iterator)
    _wrap(checkpoint_utils, "save_checkpoint", checkpoints.save_checkpoint)
    _wrap(checkpoint_utils, "load_checkpoint", checkpoints.load_checkpoint)
    _wrap(checkpoint_utils, "load_checkpoint_to_cpu", checkpoints.load_checkpoint_to_cpu)
    # fairseq's step that brings what it has just read up to date: the original repository's checkpoints are converted there
    _wrap(checkpoint_utils, "_upgrade_state_dict", reference_checkpoint.upgrade_state)
    _wrap(checkpoint_utils, "load_model_ensemble_and_task", checkpoints.load_ensemble)


def _wrap(owner, name: str, replacement) -> None:
    """Replace owner.name by replacement(original, ...)."""
    original = getattr(owner, name)

    @functools.wraps(original)
    def wrapped(*args, **kwargs):
        return replacement(original, *args, **kwargs)

    setattr(owner, name, wrapped)

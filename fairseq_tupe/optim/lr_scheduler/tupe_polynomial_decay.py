"""Warm-up and polynomial decay over the real number of updates: ``--lr-scheduler tupe_polynomial_decay``.

With w warm-up updates out of T, the learning rate after n updates, which is the one that update n + 1 uses, is

    lr * max(n, 1) / w                                       for n <= w
    end + (lr - end) * (1 - (n - w) / (T - w)) ** power      for w < n < T
    end                                                      from T on

so the first update already moves the weights. w = int(warmup_ratio * T), as in the reference implementation
(guolinke/TUPE), or warmup_updates. T is, in this order: ``--total-num-update``; the updates that ``--max-epoch`` epochs
make (update_freq of each epoch, ranks and shards counted), at most ``--max-update``; ``--max-update``.
"""

import logging
from dataclasses import dataclass, field
from typing import Any, List, Optional  # noqa: UP035 - the oldest OmegaConf that fairseq takes knows no list[int]

from fairseq import utils
from fairseq.dataclass import FairseqDataclass
from fairseq.optim.lr_scheduler import FairseqLRScheduler, register_lr_scheduler
from omegaconf import II

from fairseq_tupe.errors import TupeError

logger = logging.getLogger(__name__)


@dataclass
class TupePolynomialDecayConfig(FairseqDataclass):
    """Options of the schedule; those that stock ``polynomial_decay`` has keep their names."""

    warmup_updates: int = field(default=0, metadata={"help": "warm the learning rate up linearly for the first N updates"})
    warmup_ratio: float = field(
        default=0.0, metadata={"help": "warm up for this share of all updates, rounded down; 0 is no warm-up"}
    )
    end_learning_rate: float = field(default=0.0, metadata={"help": "learning rate to decay to"})
    power: float = field(default=1.0, metadata={"help": "decay exponent"})
    total_num_update: Optional[float] = field(
        default=None,
        metadata={"help": "updates until the end of the decay (default: those of --max-epoch or --max-update)"},
    )
    max_epoch: int = II("optimization.max_epoch")
    max_update: int = II("optimization.max_update")
    update_freq: List[int] = II("optimization.update_freq")  # noqa: UP006
    skip_remainder_batch: Optional[bool] = II("optimization.skip_remainder_batch")
    lr: List[float] = II("optimization.lr")  # noqa: UP006


@register_lr_scheduler("tupe_polynomial_decay", dataclass=TupePolynomialDecayConfig)
class TupePolynomialDecaySchedule(FairseqLRScheduler):
    """See the module's docstring. TupeError for settings that contradict each other."""

    def __init__(self, cfg: TupePolynomialDecayConfig, optimizer):
        super().__init__(cfg, optimizer)
        _check(cfg)
        self.lr = cfg.lr[0]
        self.warmup: Optional[int] = None
        self.total: Optional[int] = None
        self._basis: Optional[list[int]] = None  # what the total was computed from; None: from options alone
        self._saved: dict[str, Any] = {}
        if not self.needs_epochs:
            self._set_total(cfg.total_num_update or cfg.max_update)
        optimizer.set_lr(self.lr)

    @property
    def needs_epochs(self) -> bool:
        """Whether the total depends on the number of batches an epoch, so that :meth:`plan` must be called."""
        return not self.cfg.total_num_update and (self.cfg.max_epoch or 0) > 0

    def plan(self, num_updates: int, epoch: int, consumed: int, batches: list[int]) -> None:
        """Learn the number of batches, and so the number of updates; called once training is about to start.

        A run that goes on as it began keeps the total it was saved with. One that goes on with other settings (ranks,
        batch size, epochs) gets the updates it has made plus those that are left.

        Args:
            num_updates: updates made before.
            epoch: the epoch that comes next or goes on, from 1.
            consumed: its batches that were used before.
            batches: batches a rank of each shard of the data, the first epoch's first; shards are used in turn.
        """
        limit = self.cfg.max_update or 0
        self._basis = [self.cfg.max_epoch, limit, *self.cfg.update_freq, *batches]
        if num_updates > 0 and self._saved.get("basis") == self._basis:
            total = self._saved["total"]
        else:
            left = sum(self._updates(e, batches[(e - 1) % len(batches)]) for e in range(epoch, self.cfg.max_epoch + 1))
            if consumed:
                left -= -(-consumed // self._update_freq(epoch))
            total = num_updates + max(left, 0)
            total = min(total, limit) if limit > 0 else total
        self._set_total(total)
        logger.info(f"learning rate schedule: {self.total:,} updates, {self.warmup:,} of them warm-up")

    def step_begin_epoch(self, epoch):
        """Refuse to train where the number of updates is still unknown; the rate depends on updates only."""
        if self.total is None:
            raise TupeError("tupe_polynomial_decay was not told the number of batches an epoch; pass --total-num-update N")
        return self.optimizer.get_lr()

    def step_update(self, num_updates: int) -> float:
        """Set and return the learning rate after `num_updates` updates."""
        if self.total is not None:
            self.optimizer.set_lr(self._rate(num_updates))
        return self.optimizer.get_lr()

    def state_dict(self) -> dict[str, Any]:
        """What a resumed run needs to go on exactly."""
        return {**super().state_dict(), "total": self.total, "warmup": self.warmup, "basis": self._basis}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Take up a saved state; also that of another scheduler, of which only the best loss is of use."""
        super().load_state_dict(state_dict)
        self._saved = state_dict

    def _rate(self, n: int) -> float:
        end, warmup = self.cfg.end_learning_rate, self.warmup
        if warmup > 0 and n <= warmup:
            return self.lr * max(n, 1) / warmup
        if n >= self.total:
            return end
        return (self.lr - end) * (1 - (n - warmup) / (self.total - warmup)) ** self.cfg.power + end

    def _set_total(self, total: float) -> None:
        self.total = max(int(total), 1)
        self.warmup = int(self.total * self.cfg.warmup_ratio) if self.cfg.warmup_ratio else self.cfg.warmup_updates
        if self.warmup >= self.total:
            logger.warning(f"the warm-up takes {self.warmup:,} updates, the whole schedule only {self.total:,}")

    def _update_freq(self, epoch: int) -> int:
        return self.cfg.update_freq[min(epoch, len(self.cfg.update_freq)) - 1]

    def _updates(self, epoch: int, batches: int) -> int:
        freq = self._update_freq(epoch)
        if self.cfg.skip_remainder_batch:  # fairseq drops the last batch, then the last incomplete group
            return max(batches - 1, 0) // freq
        return -(-batches // freq)


def plan_run(trainer, epoch_itr) -> None:
    """Tell the trainer's schedule, if it needs to know, how many batches there are; once a checkpoint is loaded.

    Of several shards of data those that are not at hand are loaded once to count their batches.
    """
    schedule = trainer.lr_scheduler
    if not schedule.needs_epochs:
        return
    task, split = trainer.task, trainer.cfg.dataset.train_subset
    settings = task.cfg if getattr(task, "cfg", None) is not None else task.args
    shards = len(utils.split_paths(settings.data)) if task.has_sharded_data(split) else 1
    batches = [len(epoch_itr)] * shards
    dataset, dummy_batch = task.datasets[split], trainer._dummy_batch
    for shard in range(min(shards, schedule.cfg.max_epoch)):
        if shard != (epoch_itr.next_epoch_idx - 1) % shards:
            batches[shard] = len(trainer.get_train_iterator(shard + 1, disable_iterator_cache=True))
    task.datasets[split] = dataset
    trainer.reset_dummy_batch(dummy_batch)
    schedule.plan(trainer.get_num_updates(), epoch_itr.next_epoch_idx, epoch_itr.iterations_in_epoch, batches)
    trainer.lr_step_update()


def _check(cfg: TupePolynomialDecayConfig) -> None:
    if len(cfg.lr) != 1:
        raise TupeError(f"tupe_polynomial_decay takes one --lr, not {len(cfg.lr)}: it depends on updates, not epochs")
    if not 0 <= cfg.warmup_ratio < 1:
        raise TupeError(f"--warmup-ratio {cfg.warmup_ratio:g} is not in 0 <= R < 1")
    if cfg.warmup_updates < 0:
        raise TupeError(f"--warmup-updates {cfg.warmup_updates} is negative")
    if cfg.warmup_ratio and cfg.warmup_updates:
        raise TupeError(f"--warmup-ratio {cfg.warmup_ratio:g} and --warmup-updates {cfg.warmup_updates} contradict: give one")
    if cfg.total_num_update is not None and cfg.total_num_update < 1:
        raise TupeError(f"--total-num-update {cfg.total_num_update:g} is not positive")
    if not (cfg.total_num_update or (cfg.max_epoch or 0) > 0 or (cfg.max_update or 0) > 0):
        raise TupeError("tupe_polynomial_decay needs --max-epoch, --max-update or --total-num-update to know the end")

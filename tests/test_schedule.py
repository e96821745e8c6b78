"""The learning rate schedule: recorded rates of the reference implementation, real training runs, refusals."""

import json
import math

import pytest
import torch
from fairseq.optim import build_optimizer
from fairseq_processes import REPO, masked_lm_flags, run_many, tiny_sentences, write_data_bin
from omegaconf import OmegaConf

from fairseq_tupe.errors import TupeError
from fairseq_tupe.optim.lr_scheduler.tupe_polynomial_decay import (
    TupePolynomialDecayConfig,
    TupePolynomialDecaySchedule,
)

GOLDEN = json.loads((REPO / "tests/golden/warmup_ratio_schedule.json").read_text())


def schedule(lr=1e-3, max_epoch=0, max_update=0, update_freq=(1,), skip_remainder_batch=False, **options):
    """A schedule on a real optimizer, as fairseq builds it."""
    adam = OmegaConf.create({"_name": "adam", "lr": [lr], "tpu": False, "fp16_adam_stats": False})
    optimizer = build_optimizer(adam, [torch.nn.Parameter(torch.zeros(1))])
    config = TupePolynomialDecayConfig(
        lr=[lr], max_epoch=max_epoch, max_update=max_update, update_freq=list(update_freq),
        skip_remainder_batch=skip_remainder_batch, **options,
    )  # fmt: skip
    return TupePolynomialDecaySchedule(OmegaConf.structured(config), optimizer)


def formula(n, total, warmup, lr=1e-3):
    """The rate after n updates, linear decay to zero."""
    if warmup and n <= warmup:
        return lr * max(n, 1) / warmup
    return lr * max(total - n, 0) / (total - warmup)


@pytest.mark.parametrize("record", GOLDEN, ids=lambda record: f"{record['total_updates']}-at-{record['resumed_at']}")
def test_rates_equal_the_reference(record):
    ours = schedule(lr=record["lr"], warmup_ratio=record["warmup_ratio"], max_epoch=10)
    ours.plan(0, 1, 0, [record["total_updates"] // 10])
    for updates, rate in record["updates_lr"]:
        assert ours.step_update(updates) == pytest.approx(rate, rel=1e-12, abs=1e-20), updates
        assert ours.optimizer.get_lr() == pytest.approx(rate, rel=1e-12, abs=1e-20)


def test_pretraining_recipe_and_power():
    recipe = schedule(lr=1e-4, warmup_updates=10_000, total_num_update=1e6, max_update=1_000_000)
    assert recipe.step_update(0) == pytest.approx(1e-8)
    assert recipe.step_update(10_000) == pytest.approx(1e-4)
    assert recipe.step_update(505_000) == pytest.approx(0.5e-4)
    assert recipe.step_update(1_000_000) == 0
    curved = schedule(lr=1.0, total_num_update=10, power=2, end_learning_rate=0.2)
    assert [curved.step_update(n) for n in (0, 5, 10, 11)] == pytest.approx([1, 0.2 + 0.8 * 0.25, 0.2, 0.2])


@pytest.mark.parametrize("update_freq", [[1], [2], [3, 1], [4, 2, 3]])
@pytest.mark.parametrize("max_update", [0, 7, 1000])
@pytest.mark.parametrize("batches", [[10], [7, 4], [3, 5, 8]])
def test_total_is_what_the_training_loop_would_do(update_freq, max_update, batches):
    count = 0
    for epoch in range(4):
        freq = update_freq[epoch] if epoch < len(update_freq) else update_freq[-1]
        left = batches[epoch % len(batches)]
        while left > 0:
            left -= freq
            count += 1
    ours = schedule(max_epoch=4, max_update=max_update, update_freq=update_freq, warmup_ratio=0.3)
    ours.plan(0, 1, 0, batches)
    assert ours.total == (min(count, max_update) if max_update else count)
    assert ours.warmup == math.floor(ours.total * 0.3)


def test_zero_warmup_is_none():
    ours = schedule(warmup_ratio=0.06, max_epoch=1)
    ours.plan(0, 1, 0, [10])
    assert ours.warmup == 0
    assert [ours.step_update(n) for n in (0, 5, 10)] == pytest.approx([1e-3, 0.5e-3, 0])


def test_resuming_keeps_the_total_and_new_settings_change_what_is_left():
    first = schedule(warmup_ratio=0.1, max_epoch=4)
    first.plan(0, 1, 0, [25])
    state = json.loads(json.dumps(first.state_dict()))  # plain data only: a checkpoint holds nothing else
    # three updates were skipped (fp16 overflow): 57 are counted where 60 batches are gone; the rates must not jump
    again = schedule(warmup_ratio=0.1, max_epoch=4)
    again.load_state_dict(state)
    again.plan(57, 3, 10, [25])
    assert again.total == 100
    assert again.step_update(58) == first.step_update(58)
    # on twice the ranks an epoch has 13 batches: 50 updates are made, two epochs are left
    wider = schedule(warmup_ratio=0.1, max_epoch=4)
    wider.load_state_dict(state)
    wider.plan(50, 3, 0, [13])
    assert wider.total == 50 + 2 * 13
    # more epochs, in the middle of one, with gradient accumulation
    longer = schedule(warmup_ratio=0.1, max_epoch=6, update_freq=[2])
    longer.load_state_dict(state)
    longer.plan(60, 3, 10, [25])
    assert longer.total == 60 + (13 - 5) + 3 * 13


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"warmup_ratio": 0.1, "warmup_updates": 10, "max_epoch": 3}, ["--warmup-ratio 0.1", "--warmup-updates 10"]),
        ({"warmup_ratio": 0.1}, ["--max-epoch", "--max-update", "--total-num-update"]),
        ({"warmup_ratio": 6, "max_epoch": 3}, ["--warmup-ratio 6"]),
        ({"warmup_updates": -1, "max_epoch": 3}, ["--warmup-updates -1"]),
        ({"total_num_update": 0.5}, ["--total-num-update 0.5"]),
    ],
)
def test_contradictions_are_refused(settings, words):
    with pytest.raises(TupeError) as refusal:
        schedule(**settings)
    assert all(word in str(refusal.value) for word in words)


def test_unknown_length_is_refused():
    with pytest.raises(TupeError, match="--total-num-update"):
        schedule(warmup_ratio=0.1, max_epoch=3).step_begin_epoch(1)


def test_real_training_runs(tmp_path):
    one = write_data_bin(tmp_path / "one", train=tiny_sentences(90, 0), valid=tiny_sentences(8, 1))
    two = write_data_bin(tmp_path / "two", train=tiny_sentences(40, 2), valid=tiny_sentences(8, 1))
    ratio = ["--lr-scheduler", "tupe_polynomial_decay", "--warmup-ratio", 0.4]
    whole = ["--max-epoch", 3, "--update-freq", "2,3", "--save-interval-updates", 2]
    restore = ["--restore-file", tmp_path / "whole/checkpoint_1_2.pt"]
    # stock batching drops the last batch unless told to take any size
    stock_task = ["--max-epoch", 2, "--task", "masked_lm", "--required-batch-size-multiple", 1]
    runs = run_many(
        tmp_path / "logs",
        [
            ["fairseq-train", *masked_lm_flags(one, tmp_path / "whole", *ratio, *whole)],
            ["fairseq-train", *masked_lm_flags(one, tmp_path / "resumed", *ratio, *whole, *restore)],
            ["fairseq-train", *masked_lm_flags(f"{one}:{two}", tmp_path / "shards", *ratio, "--max-epoch", 3)],
            ["fairseq-train", *masked_lm_flags(one, tmp_path / "stock", *ratio, *stock_task)],
            ["fairseq-train", *masked_lm_flags(one, tmp_path / "none", *ratio)],
        ],
    )
    *trained, refused = runs
    rates = []
    for process in trained:
        rows = process.check().log("train_inner")
        rates.append({int(row["num_updates"]): row["lr"] for row in rows})
    uninterrupted, resumed, shards, stock = rates
    for run in (uninterrupted, shards, stock):
        total = max(run)  # updates that were really made
        assert total > 8
        assert list(run) == list(range(1, total + 1))
        for n, rate in run.items():
            assert rate == pytest.approx(formula(n, total, int(total * 0.4)), rel=1e-5, abs=1e-9), (n, total)
    assert min(resumed) == 3
    assert resumed == {n: rate for n, rate in uninterrupted.items() if n >= 3}
    per_epoch = [sum(row["epoch"] == epoch for row in trained[2].log("train_inner")) for epoch in (1, 2, 3)]
    assert per_epoch[0] == per_epoch[2] > per_epoch[1] > 0
    assert refused.returncode != 0
    assert len(refused.errors) == 1
    assert "--max-epoch" in refused.errors[0]
    assert "Traceback" not in refused.output

"""The benchmark: the rebuilt original computes what we compute, rows carry what they must, memory is counted, refusals."""

import json

import pytest
import torch

from fairseq_tupe.__main__ import main
from fairseq_tupe.benchmark import models
from fairseq_tupe.benchmark.measure import interleaved_times, median_ratio, peak_megabytes, saved_megabytes

FIELDS = (
    "what",
    "contestant",
    "dtype",
    "batch",
    "length",
    "dropout",
    "median_s",
    "ratio_to_original",
    "peak_mb",
    "threads",
    "torch",
)


def test_the_rebuilt_original_computes_the_same():
    size = models.Size(layers=2, width=128, heads=2, dropout=0.0, vocabulary=100)
    original, ours = models.original(size, "cpu"), models.ours(size, "cpu", "eager")
    for theirs, mine in zip(original.model.parameters(), ours.model.parameters(), strict=True):
        mine.data.copy_(theirs.data)
    tokens, masked, _ = data = models.batch(size, 3, 17, "cpu")
    tokens[1, 9:], masked[1, 9:] = 1, False
    torch.testing.assert_close(original.logits(tokens, masked), ours.logits(tokens, masked), rtol=1e-4, atol=1e-5)
    data = (tokens, masked, tokens[masked])
    for contestant in (original, ours):
        models.loss_of(contestant, data, torch.float32, "cpu").backward()
    for theirs, mine in zip(original.model.parameters(), ours.model.parameters(), strict=True):
        torch.testing.assert_close(theirs.grad, mine.grad, rtol=1e-3, atol=1e-4)


def test_rows_of_a_tiny_run(tmp_path, capsys):
    tiny = ["--sizes", "2x9", "--rounds", "1", "--layers", "1", "--width", "64", "--out", str(tmp_path)]
    assert main(["benchmark", "--what", "attention", "step", "inference", *tiny]) == 0
    rows = json.loads((tmp_path / "benchmark.json").read_text())
    assert {row["what"] for row in rows} == {"attention", "step", "inference"}
    assert all(field in row for row in rows for field in FIELDS)
    assert {row["ratio_to_original"] for row in rows if (row["contestant"], row["dtype"]) == ("original", "fp32")} == {1.0}
    assert len([line for line in capsys.readouterr().out.splitlines() if line.startswith("| ")]) == len(rows) + 1


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--dtype", "fp8"], "--dtype takes fp32 and bf16, got fp8"),
        (["--sizes", "4by5"], "--sizes"),
        (["--what", "finetune"], "--what finetune needs --data"),
        (["--what", "finetune", "--data", "/nonexistent"], "--data /nonexistent"),
        (["--rounds", "0"], "--rounds must be at least 1"),
    ],
)
def test_refusals(arguments, message, capsys, tmp_path):
    assert main(["benchmark", "--out", str(tmp_path), *arguments]) == 1
    assert message in capsys.readouterr().err


def test_memory_is_counted():
    mebibyte = 2**18  # floats

    def run() -> None:
        first = torch.zeros(3 * mebibyte)
        second = first + 1
        del first, second
        torch.zeros(mebibyte)

    assert peak_megabytes(run, "cpu") == pytest.approx(6, abs=0.1)
    linear, x = torch.nn.Linear(1024, 1024), torch.zeros(1024, 1024)
    assert saved_megabytes(lambda: linear(linear(x)), linear) == pytest.approx(8, abs=0.1)


def test_contestants_take_turns():
    order = []
    times = interleaved_times({name: lambda name=name: order.append(name) for name in "abc"}, 3, "cpu")
    assert "".join(order) == "abc" + "abc" + "bca" + "cab"
    assert {len(taken) for taken in times.values()} == {3}
    assert median_ratio([2.0, 9.0, 3.0], [1.0, 3.0, 6.0]) == 2.0

"""What importing the package changes in fairseq: safe loading, one-line refusals, atomic copies; and what it does not."""

import os
import resource
import shutil
from pathlib import Path

import pytest
import torch
import yaml
from fairseq.file_io import PathManager
from fairseq_processes import (
    REPO,
    USER_DIR,
    free_port,
    masked_lm_flags,
    run,
    run_many,
    tiny_sentences,
    write_data_bin,
)

from fairseq_tupe.error_lines import one_line
from fairseq_tupe.errors import TupeError
from fairseq_tupe.fairseq_hooks import programs


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    """A data-bin and a save-dir with the checkpoint of one epoch: (data, save_dir, the finished run)."""
    folder = tmp_path_factory.mktemp("hooks")
    data = write_data_bin(folder / "data", train=tiny_sentences(60), valid=tiny_sentences(12, 1))
    flags = masked_lm_flags(data, folder / "save", "--max-epoch", 1, "--update-freq", "2,64")
    flags[flags.index(USER_DIR)] = os.path.relpath(USER_DIR, folder)
    # imported before --user-dir names the same folder, and that by a relative path from elsewhere
    program = "import fairseq_cli.train as train, fairseq_tupe; train.cli_main()"
    process = run("python", "-c", program, *flags, cwd=folder, PYTHONPATH=str(REPO))
    return data, folder / "save", process.check()


def snapshot(folder: Path) -> dict:
    """Contents of every file of a folder."""
    return {path.name: path.read_bytes() for path in folder.iterdir()}


def test_the_start_says_which_copy_runs_and_the_effective_batch(trained):
    _, save, process = trained
    assert f"fairseq_tupe is {USER_DIR.resolve()}\n" in process.stdout
    assert "1 ranks x batch size 4 x update_freq 2 = 8 sequences" in process.stdout
    assert "the effective batch is 8 full sequences, the paper's is 256" in process.stdout
    assert "1 ranks x batch size 4 x update_freq 64 = 256 sequences" in process.stdout
    assert process.stdout.count("the paper's is 256") == 1
    assert {"checkpoint1.pt", "checkpoint_best.pt", "checkpoint_last.pt"} == set(snapshot(save))


def refused_commands(data: Path, save: Path, folder: Path) -> list[tuple]:
    """Commands that must end in one line, and what the line must name."""
    bigger = write_data_bin(folder / "bigger", words=44, train=tiny_sentences(20), valid=tiny_sentences(12, 1))
    torn, unsafe, foreign = (folder / name for name in ("torn", "unsafe", "foreign"))
    for path in (torn, unsafe, foreign):
        path.mkdir()
    shutil.copy(save / "checkpoint1.pt", torn)
    (torn / "checkpoint_last.pt").write_bytes((save / "checkpoint_last.pt").read_bytes()[:-1000])
    torch.save({"model": os.system}, unsafe / "checkpoint_last.pt")
    torch.save({"weights": torch.zeros(1)}, foreign / "checkpoint_last.pt")
    same_size = shutil.copytree(data, folder / "same-size")
    rows = (data / "dict.txt").read_text().splitlines(keepends=True)
    (same_size / "dict.txt").write_text("".join(rows[::-1]))
    train = ["fairseq-train", *masked_lm_flags(data, save, "--max-epoch", 2)]
    elsewhere = [*train, "--save-dir", folder / "new"]
    validate = ["fairseq-validate", data, "--user-dir", USER_DIR, "--task", "tupe_masked_lm", "--batch-size", 4, "--path"]
    two_ranks = ["--distributed-world-size", 2, "--distributed-rank", 0, "--distributed-no-spawn", "--cpu"]
    two_ranks += ["--distributed-backend", "gloo", "--distributed-init-method", f"tcp://127.0.0.1:{free_port()}"]
    return [
        ([*elsewhere, "--fp16"], ["--fp16", "fp32"]),
        ([*elsewhere, "--bf16"], ["--bf16", "fp32"]),
        ([*elsewhere, "--amp"], ["--amp", "fp32"]),
        ([*elsewhere, "--restore-file", "no/where.pt"], ["--restore-file no/where.pt"]),
        ([*elsewhere, "--finetune-from-model", "no.pt"], ["--finetune-from-model no.pt"]),
        (["TORCHELASTIC_RUN_ID=none", "WORLD_SIZE=2", *elsewhere], ["torchrun started 2 processes"]),
        ([*train, "--rel-pos"], [save / "checkpoint_last.pt", "--rel-pos", "TUPE-A", "--save-dir"]),
        ([train[0], bigger, *train[2:]], [save / "checkpoint_last.pt", "55", "60", "dictionary"]),
        ([train[0], same_size, *train[2:]], [save / "checkpoint_last.pt", "55 types each", "dictionary"]),
        ([*elsewhere, "--rel-pos-bins", 31], ["--rel-pos-bins", "31"]),
        ([*elsewhere, "--distributed-world-size", 2, "--cpu"], ["2 ranks on a CPU", "--distributed-rank"]),
        ([*train, "--save-dir", torn], [torn / "checkpoint_last.pt", torn / "checkpoint1.pt"]),
        ([*train, "--save-dir", unsafe], [unsafe / "checkpoint_last.pt", "posix.system"]),
        ([*train, "--save-dir", foreign], [foreign / "checkpoint_last.pt", "not a checkpoint"]),
        ([*train, "--optimizer", "sgd"], [save / "checkpoint_last.pt", "ptimizer"]),
        ([*validate, save / "none.pt"], [save / "none.pt", "does not exist"]),
        ([*validate, torn / "checkpoint_last.pt"], [torn / "checkpoint1.pt", "--path"]),
        ([validate[0], bigger, *validate[2:], save / "checkpoint_best.pt"], ["checkpoint_best.pt", "55", "60"]),
        ([validate[0], same_size, *validate[2:], save / "checkpoint_best.pt"], ["checkpoint_best.pt", "55 types each"]),
        ([*validate, save / "checkpoint_best.pt", *two_ranks], ["2 CPU ranks"]),
    ]


def stock_commands(data: Path, folder: Path) -> list[list]:
    """A stock task and model on 18 blocks in batches of 3, with this user directory and without it."""
    flags = masked_lm_flags(data, folder / "with", "--max-epoch", 1, "--disable-validation", arch="roberta")
    flags[flags.index("tupe_masked_lm")] = "masked_lm"
    flags += ["--restore-file", "no/where.pt", "--required-batch-size-multiple", 8, "--batch-size", 3]
    plain = [*flags, "--save-dir", folder / "without"]
    plain[plain.index("--user-dir") : plain.index("--user-dir") + 2] = []
    return [["fairseq-train", *flags], ["fairseq-train", *plain]]


def test_refusals_the_traceback_and_a_stock_run(trained, tmp_path):
    data, save, _ = trained
    before = snapshot(save)
    refused = refused_commands(data, save, tmp_path)
    traced = ["FAIRSEQ_TUPE_TRACEBACK=1", *refused[0][0]]
    commands = [*(command for command, _ in refused), traced, *stock_commands(data, tmp_path)]
    *processes, trace, with_us, without = run_many(tmp_path / "logs", commands, timeout=600)

    for process, (command, words) in zip(processes, refused, strict=True):
        assert process.returncode == 1, (command, process.output[-2000:])
        assert len(process.errors) == 1, (command, process.output[-2000:])
        assert "Traceback" not in process.output, command
        for word in words:
            assert str(word) in process.errors[0], (word, process.errors)
    assert snapshot(save) == before
    assert not list(tmp_path.glob("new/*.pt"))

    assert trace.returncode == 1
    assert "Traceback" in trace.stderr
    assert "TupeError: --fp16" in trace.stderr

    # stock starts from scratch where --restore-file is missing, and drops the last batch: so it must here
    rows = [[(row["loss"], row["gnorm"]) for row in run.check().log("train_inner")] for run in (with_us, without)]
    assert len(rows[0]) > 3
    assert rows[0] == rows[1]
    assert "effective batch" not in with_us.stdout
    assert "fairseq_tupe is" not in with_us.stdout


def test_hydra(trained, tmp_path):
    data, save, process = trained
    config = {
        "common": {"user_dir": str(USER_DIR), "log_format": "json", "log_interval": 1, "seed": 1},
        "task": {"_name": "tupe_masked_lm", "data": str(data), "tokens_per_sample": 32, "sample_break_mode": "complete"},
        "model": {
            "_name": "tupe_roberta_tiny", "encoder_layers": 1, "encoder_embed_dim": 16, "encoder_ffn_embed_dim": 32,
            "encoder_attention_heads": 2, "max_positions": 32,
        },
        "criterion": "masked_lm",
        "optimizer": {"_name": "adam", "adam_betas": "(0.9,0.999)"},
        "lr_scheduler": {"_name": "tupe_polynomial_decay", "warmup_ratio": 0.5},
        "optimization": {"lr": [0.001], "max_epoch": 1, "update_freq": [2]},
        "dataset": {"batch_size": 4, "num_workers": 0},
        "checkpoint": {"save_dir": str(tmp_path / "save")},
    }  # fmt: skip
    (tmp_path / "tiny.yaml").write_text("# @package _group_\n" + yaml.safe_dump(config))
    hydra = ["--config-dir", tmp_path, "--config-name", "tiny"]
    result = run("fairseq-hydra-train", *hydra, cwd=tmp_path).check()
    rows = result.log("train_inner")
    assert len(rows) == len(process.log("train_inner")) > 1
    total = len(rows)
    warmup = total // 2
    expected = [0.001 * min(n / warmup, (total - n) / (total - warmup)) for n in range(1, total + 1)]
    assert [row["lr"] for row in rows] == pytest.approx(expected, rel=1e-5)
    assert rows[0]["loss"] == process.log("train_inner")[0]["loss"]  # the same model, data and masks by both ways
    assert (tmp_path / "save/checkpoint_last.pt").exists()
    assert "effective batch: 1 ranks x batch size 4 x update_freq 2 = 8 sequences" in result.output
    wrong = run("fairseq-hydra-train", *hydra, f"checkpoint.restore_file={tmp_path}/none.pt", cwd=tmp_path)
    assert wrong.returncode == 1
    assert wrong.errors == [f"--restore-file {tmp_path}/none.pt does not exist: training would have started from scratch"]
    assert "Traceback" not in wrong.output
    assert "Error executing job" not in wrong.output


def test_safe_loading(tmp_path):
    state = torch.load(REPO / "tests/golden/tupe_a.checkpoint.pt")  # holds an argparse.Namespace
    assert state["args"].arch
    torch.save({"model": os.system}, tmp_path / "evil.pt")
    for weights_only in (None, True, False):
        with pytest.raises(Exception, match="Weights only load failed"):
            torch.load(tmp_path / "evil.pt", weights_only=weights_only)


def test_copies_are_atomic(tmp_path):
    old, new = tmp_path / "checkpoint_last.pt", tmp_path / "checkpoint1.pt"
    old.write_bytes(b"good" * 1000)
    new.write_bytes(b"next" * 100_000)
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (50_000, limits[1]))  # writing fails half way, as on a full disk
    try:
        with pytest.raises(OSError, match="large"):
            PathManager.copy(str(new), str(old), overwrite=True)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert old.read_bytes() == b"good" * 1000
    assert sorted(path.name for path in tmp_path.iterdir()) == ["checkpoint1.pt", "checkpoint_last.pt"]
    link = tmp_path / "best.pt"
    link.symlink_to(old)
    assert PathManager.copy(str(new), str(link), overwrite=True)
    assert link.is_symlink()
    assert old.read_bytes() == new.read_bytes()


class Refusing(torch.utils.data.Dataset):
    """Read by a worker process of a data loader."""

    def __len__(self):
        return 1

    def __getitem__(self, index):
        raise TupeError(f"row {index} is not amused")


def refuse(rank):
    """Run by a spawned process."""
    raise TupeError(f"rank {rank} is\nnot amused")


def test_the_line_is_found_anywhere_in_a_chain(capfd):
    def caught(function):
        try:
            function()
        except Exception as error:
            return error

    def wrapped():
        try:
            raise TupeError("two\n lines")
        except TupeError:
            raise Exception("please ensure that the architectures match")  # noqa: B904 - as fairseq's trainer does

    assert one_line(caught(wrapped)) == "two lines"
    assert one_line(ValueError("not ours")) is None
    spawned = caught(lambda: torch.multiprocessing.spawn(refuse, nprocs=1))
    assert one_line(spawned) == "rank 0 is"  # what follows in the text is the child's traceback
    worker = caught(lambda: next(iter(torch.utils.data.DataLoader(Refusing(), num_workers=1))))
    assert one_line(worker) == "row 0 is not amused"
    seen = []
    programs.show_one_line(lambda *args: seen.append(args), ValueError, ValueError("not ours"), None)
    assert len(seen) == 1
    capfd.readouterr()
    error = caught(wrapped)
    programs.show_one_line(lambda *args: seen.append(args), type(error), error, None)
    assert len(seen) == 1
    assert capfd.readouterr().err == "fairseq_tupe: error: two lines\n"

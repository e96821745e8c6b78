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

from fairseq_tupe import fairseq_hooks
from fairseq_tupe.error_lines import one_line
from fairseq_tupe.errors import TupeError


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


def test_refusals_of_fairseq_train_and_validate(trained, tmp_path):
    data, save, _ = trained
    before = snapshot(save)
    bigger = write_data_bin(tmp_path / "bigger", words=44, train=tiny_sentences(20), valid=tiny_sentences(12, 1))
    torn, unsafe, foreign = (tmp_path / name for name in ("torn", "unsafe", "foreign"))
    for folder in (torn, unsafe, foreign):
        folder.mkdir()
    shutil.copy(save / "checkpoint1.pt", torn)
    (torn / "checkpoint_last.pt").write_bytes(before["checkpoint_last.pt"][:-1000])
    torch.save({"model": os.system}, unsafe / "checkpoint_last.pt")
    torch.save({"weights": torch.zeros(1)}, foreign / "checkpoint_last.pt")
    train = masked_lm_flags(data, save, "--max-epoch", 2)
    other_save = [*train, "--save-dir", tmp_path / "new"]
    validate = [data, "--user-dir", USER_DIR, "--task", "tupe_masked_lm", "--batch-size", 4, "--path"]
    two_ranks = ["--distributed-world-size", 2, "--distributed-rank", 0, "--distributed-no-spawn", "--cpu"]
    two_ranks += ["--distributed-backend", "gloo", "--distributed-init-method", f"tcp://127.0.0.1:{free_port()}"]
    cases = [
        (["fairseq-train", *other_save, "--fp16"], ["--fp16", "fp32"]),
        (["fairseq-train", *other_save, "--bf16"], ["--bf16", "fp32"]),
        (["fairseq-train", *other_save, "--amp"], ["--amp", "fp32"]),
        (["fairseq-train", *other_save, "--memory-efficient-fp16"], ["fp16", "fp32"]),
        (["fairseq-train", *other_save, "--restore-file", "no/where.pt"], ["--restore-file no/where.pt"]),
        (["fairseq-train", *other_save, "--finetune-from-model", "no.pt"], ["--finetune-from-model no.pt"]),
        (["fairseq-train", *train, "--rel-pos"], [save / "checkpoint_last.pt", "--rel-pos", "TUPE-A", "--save-dir"]),
        (["fairseq-train", bigger, *train[1:]], [save / "checkpoint_last.pt", "55", "60", "dictionary"]),
        (["fairseq-train", *train, "--save-dir", torn], [torn / "checkpoint_last.pt", torn / "checkpoint1.pt"]),
        (["fairseq-train", *train, "--save-dir", unsafe], [unsafe / "checkpoint_last.pt", "posix.system"]),
        (["fairseq-train", *train, "--save-dir", foreign], [foreign / "checkpoint_last.pt", "not a checkpoint"]),
        (["fairseq-train", *train, "--optimizer", "sgd"], [save / "checkpoint_last.pt", "ptimizer"]),
        (["fairseq-validate", *validate, save / "none.pt"], [save / "none.pt", "does not exist"]),
        (["fairseq-validate", *validate, torn / "checkpoint_last.pt"], [torn / "checkpoint1.pt", "--path"]),
        (["fairseq-validate", bigger, *validate[1:], save / "checkpoint_best.pt"], ["checkpoint_best.pt", "55", "60"]),
        (["fairseq-validate", *validate, save / "checkpoint_best.pt", *two_ranks], ["2 CPU ranks"]),
    ]
    for process, (command, words) in zip(run_many(tmp_path / "logs", [case for case, _ in cases]), cases, strict=True):
        assert process.returncode == 1, (command, process.output[-2000:])
        assert len(process.errors) == 1, (command, process.output[-2000:])
        assert "Traceback" not in process.output, command
        for word in words:
            assert str(word) in process.errors[0], (word, process.errors)
    assert snapshot(save) == before
    assert not list(tmp_path.glob("new/*.pt"))


def test_the_traceback_is_one_variable_away_and_torchrun_is_refused(trained, tmp_path):
    data, _, _ = trained
    flags = ["fairseq-train", *masked_lm_flags(data, tmp_path / "new", "--max-epoch", 1)]
    (process,) = run_many(tmp_path / "a", [[*flags, "--fp16"]], FAIRSEQ_TUPE_TRACEBACK="1")
    assert process.returncode == 1
    assert "Traceback" in process.stderr
    assert "TupeError: --fp16" in process.stderr
    (process,) = run_many(tmp_path / "b", [flags], TORCHELASTIC_RUN_ID="none", WORLD_SIZE="2")
    assert process.returncode == 1
    assert "torchrun started 2 processes" in process.errors[0]


def test_a_stock_run_with_this_user_dir_is_a_stock_run(trained, tmp_path):
    data, _, _ = trained
    sizes = masked_lm_flags(data, tmp_path / "with", "--max-epoch", 1, arch="roberta")
    sizes[sizes.index("tupe_masked_lm")] = "masked_lm"
    sizes += ["--restore-file", "no/where.pt", "--required-batch-size-multiple", 8, "--batch-size", 3]
    plain = [*sizes, "--save-dir", tmp_path / "without"]
    plain[plain.index("--user-dir") : plain.index("--user-dir") + 2] = []
    runs = run_many(tmp_path / "logs", [["fairseq-train", *flags, "--disable-validation"] for flags in (sizes, plain)])
    # 18 blocks in batches of 3: stock drops the last batch, and so it must here
    with_us, without = ([(row["loss"], row["gnorm"]) for row in process.check().log("train_inner")] for process in runs)
    assert len(with_us) > 3
    assert with_us == without
    assert "effective batch" not in runs[0].stdout
    assert "fairseq_tupe is" not in runs[0].stdout


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
    fairseq_hooks._show_one_line(lambda *args: seen.append(args), ValueError, ValueError("not ours"), None)
    assert len(seen) == 1
    capfd.readouterr()
    error = caught(wrapped)
    fairseq_hooks._show_one_line(lambda *args: seen.append(args), type(error), error, None)
    assert len(seen) == 1
    assert capfd.readouterr().err == "fairseq_tupe: error: two lines\n"

"""The doctor's last check: a real fairseq-train process makes one update on a corpus of a few made-up lines."""

import os
import random
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import fairseq_tupe
from fairseq_tupe.doctor import FAIL, OK, PACKAGE, Row

TIMEOUT = 180  # seconds; a cold disk makes the first import slow


def training_row() -> Row:
    """Runs the process and loads what it saved. The folder is kept where it fails."""
    import torch

    folder = Path(tempfile.mkdtemp(prefix="fairseq_tupe-doctor-"))
    log = folder / "train.log"
    start = time.monotonic()
    try:
        write_corpus(folder / "data")
        with open(log, "wb") as output:
            code = subprocess.run(
                command(folder), stdout=output, stderr=subprocess.STDOUT, stdin=subprocess.DEVNULL,
                env=environment(), cwd=folder, timeout=TIMEOUT,
            ).returncode  # fmt: skip
        if code != 0:
            return Row("training run", FAIL, f"fairseq-train: {last_line(log)}", f"the whole output: {log}", True)
        # What --restore-file and fairseq-validate do on torch 2.6 and later; our hooks allow the few classes it needs.
        state = torch.load(folder / "save" / "checkpoint_last.pt", map_location="cpu", weights_only=True)
        updates = state["optimizer_history"][-1]["num_updates"]
        if updates != 1 or not all(bool(t.isfinite().all()) for t in state["model"].values()):
            return Row("training run", FAIL, f"{updates} updates, or weights that are not finite", f"its folder: {folder}", True)
    except Exception as error:
        text = f"{type(error).__name__}: {' '.join(str(error).split())[:300]}"
        return Row("training run", FAIL, text, f"its folder: {folder}", True)
    shutil.rmtree(folder, ignore_errors=True)
    device = "GPU" if torch.cuda.is_available() else "CPU"
    found = f"one update on the {device}, checkpoint loads with weights_only, {time.monotonic() - start:.0f} s"
    return Row("training run", OK, found, needed=True)


def write_corpus(folder: Path) -> None:
    """Binarizes made-up lines with fairseq's own dictionary and dataset builder, as fairseq-preprocess does."""
    from fairseq.data import Dictionary, indexed_dataset

    folder.mkdir(parents=True)
    words = [f"word{i}" for i in range(40)]
    rng = random.Random(1)
    lines = [" ".join(rng.choices(words, k=12)) for _ in range(32)]
    dictionary = Dictionary()
    for line in lines:
        dictionary.encode_line(line, add_if_not_exist=True)
    dictionary.finalize(padding_factor=8)
    dictionary.save(str(folder / "dict.txt"))
    for split, part in (("train", lines), ("valid", lines[:4])):
        prefix = str(folder / split)
        builder = indexed_dataset.make_builder(prefix + ".bin", impl="mmap", vocab_size=len(dictionary))
        for line in part:
            builder.add_item(dictionary.encode_line(line, add_if_not_exist=False))
        builder.finalize(prefix + ".idx")


def command(folder: Path) -> list[str]:
    """The training command; the module, not the script, since a script's first line can't hold every path."""
    import torch

    words = [
        sys.executable, "-m", "fairseq_cli.train", str(folder / "data"), "--user-dir", str(PACKAGE),
        "--task", "tupe_masked_lm", "--criterion", "masked_lm", "--arch", "tupe_roberta_tiny", "--rel-pos",
        "--max-positions", "32", "--tokens-per-sample", "32", "--num-workers", "0",
        "--batch-size", "4", "--required-batch-size-multiple", "1",  # the usual 8 drops a smaller last batch
        "--optimizer", "adam", "--lr", "0.001", "--lr-scheduler", "fixed", "--max-update", "1",
        "--save-dir", str(folder / "save"), "--no-epoch-checkpoints", "--distributed-world-size", "1",
        "--log-format", "simple",
    ]  # fmt: skip
    return words if torch.cuda.is_available() else [*words, "--cpu"]


def environment() -> dict:
    """This process's environment with this copy of the package first."""
    parts = [str(Path(fairseq_tupe.__file__).resolve().parent.parent), os.environ.get("PYTHONPATH", "")]
    return {**os.environ, "PYTHONPATH": os.pathsep.join(part for part in parts if part), "PYTHONSAFEPATH": "1"}


def last_line(log: Path) -> str:
    """The last line that says something, which is where Python puts the error."""
    lines = [line.strip() for line in log.read_text("utf-8", "replace").splitlines() if line.strip()]
    return lines[-1][:300] if lines else "it ended without a word"

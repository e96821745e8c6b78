"""Helpers of the tests: run fairseq's own programs as real processes and read what they log.

The programs come from the folder of the interpreter that runs the tests, on one thread and without a GPU, so that
figures do not depend on the machine. A process takes about 5 s to start: group what a test needs into few of them.
"""

import json
import os
import re
import socket
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import numpy as np

REPO = Path(__file__).resolve().parents[1]
USER_DIR = REPO / "fairseq_tupe"
BIN = Path(sys.executable).parent  # not resolved: the link's own folder is the environment's

# `time | INFO | tag | {"epoch": 1, ...}` (fairseq-train), or `[time][tag][INFO] - {...}` (Hydra's logging)
LOG_LINE = re.compile(r"(?:\| INFO \| (?P<tag>\w+) \| |\]\[(?P<hydra_tag>\w+)\]\[INFO\] - )(?P<stats>\{.*\})\s*$")


@dataclass
class Finished:
    """A process that has ended: exit status and everything it wrote."""

    returncode: int
    stdout: str
    stderr: str

    def log(self, tag: str) -> list[dict]:
        """Statistics logged under `tag` ("train", "train_inner", "valid", ...), numbers as floats, in order."""
        rows = []
        for line in self.stdout.splitlines():
            match = LOG_LINE.search(line)
            if match and (match["tag"] or match["hydra_tag"]) == tag:
                rows.append({key: _number(value) for key, value in json.loads(match["stats"]).items()})
        return rows

    @property
    def output(self) -> str:
        """Both streams."""
        return self.stdout + self.stderr

    @property
    def errors(self) -> list[str]:
        """The messages of the lines that begin with `fairseq_tupe: error: `."""
        prefix = "fairseq_tupe: error: "
        return [line.removeprefix(prefix) for line in self.stderr.splitlines() if line.startswith(prefix)]

    def check(self) -> "Finished":
        """Fail with the end of the output unless the process ended well."""
        assert self.returncode == 0, f"exit status {self.returncode}\n{self.stdout[-3000:]}\n{self.stderr[-5000:]}"
        return self


def _number(value):
    try:
        return float(value)
    except (TypeError, ValueError):
        return value


def environment(**changes: str) -> dict[str, str]:
    """Environment of a child process: one thread, no GPU, plus `changes`."""
    plain = {"OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": "", "PYTHONUNBUFFERED": "1", "HYDRA_FULL_ERROR": "1"}
    return {**os.environ, **plain, **changes}


def start(program: str, *arguments, cwd: Path | None = None, **env: str) -> subprocess.Popen:
    """Start `program` ("fairseq-train", "python", ...) of this environment; finish it with `finish`."""
    command = [str(BIN / program) if program != "python" else sys.executable, *map(str, arguments)]
    return subprocess.Popen(command, cwd=cwd, env=environment(**env), stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


def finish(process: subprocess.Popen, timeout: float = 300) -> Finished:
    """Wait for a process; it is killed after `timeout` seconds."""
    try:
        stdout, stderr = process.communicate(timeout=timeout)
    except subprocess.TimeoutExpired:
        process.kill()
        stdout, stderr = process.communicate()
        stderr += f"\nkilled after {timeout} s"
    return Finished(process.returncode, stdout, stderr)


def run(program: str, *arguments, cwd: Path | None = None, timeout: float = 300, **env: str) -> Finished:
    """Run `program` to its end. Keyword arguments become environment variables."""
    return finish(start(program, *arguments, cwd=cwd, **env), timeout)


# Imports fairseq, and what it imports late, once and forks a process for each case, so that a case takes a second and not
# five. The user directory is imported by the case itself. The processes of a group run at the same time.
FORKING_LAUNCHER = """
import importlib, json, os, sys
import hydra.core.override_parser.overrides_parser, torch._dynamo
groups, statuses = json.load(sys.stdin), []
modules = {case[0]: importlib.import_module("fairseq_cli." + case[0][len("fairseq-"):]) for g in groups for case in g}

def run_group(group):
    children = []
    for program, arguments, path, changes in group:
        child = os.fork()
        if child == 0:
            for number, suffix in ((1, ".out"), (2, ".err")):
                os.dup2(os.open(path + suffix, os.O_WRONLY | os.O_CREAT), number)
            sys.argv = [program, *arguments]
            os.environ.update(changes)
            return modules[program].cli_main
        children.append(child)
    statuses.append([os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) for child in children])

main = next(filter(None, map(run_group, groups)), None)
if main is None:
    print(json.dumps(statuses))
else:
    main()
"""


def run_many(folder: Path, cases: list[list], cwd: Path | None = None, timeout: float = 300, **env: str) -> list:
    """Run fairseq-train or fairseq-validate once for each case, one after the other; logs go to `folder`.

    A case is a list of program and arguments, with NAME=VALUE before the program as in a shell, or a list of such lists
    (from `ranks`) that run at the same time; its result is a Finished, or a list of them.
    """
    folder.mkdir(parents=True, exist_ok=True)
    groups = []
    for number, case in enumerate(cases):
        group = case if isinstance(case[0], list) else [case]
        logs = [folder / f"process{number}-{rank}" for rank in range(len(group))]
        groups.append([_forked(command, log) for command, log in zip(group, logs, strict=True)])
    launcher = subprocess.run(
        [sys.executable, "-c", FORKING_LAUNCHER], input=json.dumps(groups), cwd=cwd, env=environment(**env),
        stdout=subprocess.PIPE, text=True, timeout=timeout, check=True,
    )  # fmt: skip
    results = []
    for group, statuses in zip(groups, json.loads(launcher.stdout.splitlines()[-1]), strict=True):
        texts = [[Path(log + suffix).read_text() for suffix in (".out", ".err")] for _, _, log, _ in group]
        results.append([Finished(status, *text) for status, text in zip(statuses, texts, strict=True)])
    return [result if isinstance(case[0], list) else result[0] for case, result in zip(cases, results, strict=True)]


def _forked(command: list, log: Path) -> list:
    words = [str(word) for word in command]
    start = next(number for number, word in enumerate(words) if "=" not in word)
    return [words[start], words[start + 1 :], str(log), dict(word.split("=", 1) for word in words[:start])]


def ranks(count: int, program: str, *arguments) -> list[list]:
    """Commands of `count` gloo ranks on the CPU, one process each."""
    shared = [
        "--distributed-world-size", count, "--distributed-init-method", f"tcp://127.0.0.1:{free_port()}",
        "--distributed-no-spawn", "--distributed-backend", "gloo", "--ddp-backend", "legacy_ddp", "--cpu",
    ]  # fmt: skip
    return [[program, *arguments, *shared, "--distributed-rank", rank] for rank in range(count)]


def free_port() -> int:
    """A TCP port that nobody listens on."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def run_ranks(count: int, program: str, *arguments, cwd: Path | None = None, timeout: float = 300) -> list[Finished]:
    """Run `program` as `count` gloo ranks on the CPU, one process each; returns them in the order of their ranks."""
    processes = [start(*command, cwd=cwd) for command in ranks(count, program, *arguments)]
    with ThreadPoolExecutor(count) as pool:  # all at once, or a rank whose pipe is full would hold up the others
        return list(pool.map(lambda process: finish(process, timeout), processes))


def tiny_sentences(count: int, seed: int = 0, longest: int = 12, words: int = 40) -> list[list[str]]:
    """Random sentences of sentencepiece-like pieces: `▁wN` begins a word, `sN` goes on with it."""
    rng = np.random.default_rng(seed)
    sentences = []
    for _ in range(count):
        pieces = [f"▁w{rng.integers(words)}" if rng.random() < 0.7 else f"s{rng.integers(words // 4)}"
                  for _ in range(rng.integers(3, longest + 1))]  # fmt: skip
        sentences.append(["▁w0", *pieces[1:]])
    return sentences


def write_data_bin(folder: Path, words: int = 40, extra_specials: tuple = (), **splits: list[list[str]]) -> Path:
    """Write a data-bin as fairseq-preprocess does: dict.txt and, for each split, its sentences with </s> appended.

    `extra_specials` stand after <unk>, as with --reference-dictionary; dict.txt does not hold them.
    """
    from fairseq.data import Dictionary, indexed_dataset

    folder.mkdir(parents=True, exist_ok=True)
    dictionary = Dictionary(extra_special_symbols=list(extra_specials) or None)
    for number in range(words):
        dictionary.add_symbol(f"▁w{number}", n=10 * words - number)
    for number in range(words // 4):
        dictionary.add_symbol(f"s{number}", n=words - number)
    dictionary.save(str(folder / "dict.txt"))
    for split, sentences in splits.items():
        path = str(folder / split)
        builder = indexed_dataset.make_builder(path + ".bin", impl="mmap", vocab_size=len(dictionary))
        for sentence in sentences:
            builder.add_item(dictionary.encode_line(" ".join(sentence), add_if_not_exist=False))
        builder.finalize(path + ".idx")
    return folder


def masked_lm_flags(data, save_dir, *more, arch: str = "tupe_roberta_tiny") -> list:
    """Flags of a fairseq-train run small enough for a test; `more` comes last, so it wins."""
    return [
        data, "--user-dir", USER_DIR, "--task", "tupe_masked_lm", "--criterion", "masked_lm", "--arch", arch,
        "--encoder-layers", 1, "--encoder-embed-dim", 16, "--encoder-ffn-embed-dim", 32, "--encoder-attention-heads", 2,
        "--max-positions", 32, "--tokens-per-sample", 32, "--sample-break-mode", "complete",
        "--optimizer", "adam", "--lr", 1e-3, "--lr-scheduler", "fixed", "--batch-size", 4, "--num-workers", 0,
        "--seed", 1, "--log-format", "json", "--log-interval", 1, "--save-dir", save_dir, *more,
    ]  # fmt: skip

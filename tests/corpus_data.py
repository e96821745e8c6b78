"""A small corpus of made-up sentences, and how tests run `prepare-pretrain-data` on it and read the result."""

import json
import os
import random
import subprocess
import sys

from fairseq_tupe.__main__ import main
from fairseq_tupe.data.tokenizer import Tokenizer

WORDS = [
    *("time", "year", "people", "way", "day", "man", "thing", "woman", "life", "child", "world", "school", "state", "family"),
    *("student", "group", "country", "problem", "hand", "part", "place", "case", "week", "company", "system", "program"),
    *("question", "work", "number", "night", "point", "home", "water", "room", "mother", "area", "money", "story", "fact"),
]
VOCAB = ("--vocab-size", "400")


def make_lines(count, seed=0):
    """`count` lines of one to three sentences, no two alike."""
    rng = random.Random(seed)

    def sentence():
        return " ".join(rng.choices(WORDS, k=rng.randint(8, 14))).capitalize() + rng.choice(".!?")

    return [" ".join(sentence() for _ in range(rng.randint(1, 3))) for _ in range(count)]


LINES = make_lines(400)


def prepare(*arguments):
    return main(["prepare-pretrain-data", *map(str, arguments)])


def refused(capsys, *arguments):
    """Runs the command, which must fail; returns the error line."""
    capsys.readouterr()
    assert prepare(*arguments) == 1
    errors = [line for line in capsys.readouterr().err.split("\n") if line.startswith("fairseq_tupe: error: ")]
    assert len(errors) == 1
    return errors[0]


def report_of(out):
    return json.loads((out / "report.json").read_text())


def sentences_of(out, part, folder=None):
    """The sentences of a part, decoded, as stock fairseq reads them."""
    from fairseq.data import Dictionary, data_utils

    folder = folder or out
    dictionary = Dictionary.load(str(folder / "dict.txt"))
    data = data_utils.load_indexed_dataset(str(folder / part), dictionary)
    tokenizer = Tokenizer.load(out / "tokenizer")
    assert all(item[-1] == dictionary.eos() for item in data)
    return [tokenizer.decode(item[:-1]) for item in data]


def snapshot(out):
    """Everything in a folder but its report, which holds times."""
    return {str(f.relative_to(out)): f.read_bytes() for f in sorted(out.rglob("*")) if f.is_file() and f.name != "report.json"}


def script(repo, *arguments, **settings):
    environment = {**os.environ, "FAIRSEQ_TUPE_VENV": sys.prefix, "OMP_NUM_THREADS": "1"}
    command = ["bash", str(repo / "scripts" / "prepare_pretrain_data.sh"), *map(str, arguments)]
    return subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, **settings)

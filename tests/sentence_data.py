"""Tiny data of sentence tasks in fairseq's GLUE layout, and the flags of runs on it."""

from pathlib import Path

import numpy as np
from fairseq.data import Dictionary, indexed_dataset
from fairseq_processes import USER_DIR

WORDS = [f"w{number}" for number in range(40)]


def write_indexed(path: Path, dictionary: Dictionary, lines: list[str]) -> None:
    """Binarize lines as fairseq-preprocess does: </s> ends every row, what is not in the dictionary becomes <unk>."""
    path.parent.mkdir(parents=True, exist_ok=True)
    builder = indexed_dataset.make_builder(f"{path}.bin", impl="mmap", vocab_size=len(dictionary))
    for line in lines:
        builder.add_item(dictionary.encode_line(line, add_if_not_exist=False))
    builder.finalize(f"{path}.idx")


def dictionary_of(symbols, padding: int = 0, extra_specials: tuple = ()) -> Dictionary:
    """A dictionary of the symbols in this order and `padding` rows as fairseq-preprocess adds them."""
    dictionary = Dictionary(extra_special_symbols=list(extra_specials) or None)
    for number, symbol in enumerate(symbols):
        dictionary.add_symbol(symbol, n=1000 - number)
    for number in range(padding):
        dictionary.add_symbol(f"madeupword{number:04d}", n=0)
    return dictionary


def write_task_bin(folder: Path, splits: dict, labels: tuple = (), extra_specials: tuple = ()) -> Path:
    """Write DATA/{input0,input1,label}.

    `splits` maps a split to rows (first sentence, second sentence or None, label). Without `labels`, in the order of the
    label dictionary, labels are numbers in .label files.
    """
    inputs, classes = dictionary_of(WORDS, 0, extra_specials), dictionary_of(labels, 3, extra_specials)
    for split, rows in splits.items():
        for part in (0, 1):
            if rows[0][part] is not None:
                write_indexed(folder / f"input{part}" / split, inputs, [row[part] for row in rows])
                inputs.save(str(folder / f"input{part}" / "dict.txt"))
        if labels:
            write_indexed(folder / "label" / split, classes, [row[2] for row in rows])
            classes.save(str(folder / "label" / "dict.txt"))
        else:
            (folder / "label").mkdir(parents=True, exist_ok=True)
            (folder / "label" / f"{split}.label").write_text("".join(f"{row[2]}\n" for row in rows))
    return folder


def sentence(rng: np.random.Generator, longest: int = 9, shortest: int = 1) -> str:
    """Random words."""
    return " ".join(rng.choice(WORDS, rng.integers(shortest, longest + 1)))


def rows_of(count: int, seed: int, labels: tuple = (), pair: bool = False, longest: int = 9) -> list:
    """Rows whose label follows from the first sentence: its first word's number modulo the number of labels, or / 40."""
    rng = np.random.default_rng(seed)
    rows = []
    for _ in range(count):
        first, second = sentence(rng, longest), sentence(rng, longest) if pair else None
        number = int(first.split()[0][1:])
        rows.append((first, second, labels[number % len(labels)] if labels else number / 40))
    return rows


def flags(data, save_dir, num_classes: int, *more, arch: str = "tupe_roberta_tiny") -> list:
    """Flags of a fairseq-train run small enough for a test; `more` comes last, so it wins."""
    return [
        data, "--user-dir", USER_DIR, "--task", "tupe_sentence_prediction", "--criterion", "tupe_sentence_prediction",
        "--num-classes", num_classes, "--init-token", 0, "--separator-token", 2, "--arch", arch,
        "--encoder-layers", 1, "--encoder-embed-dim", 16, "--encoder-ffn-embed-dim", 32, "--encoder-attention-heads", 2,
        "--max-positions", 32, "--dropout", 0, "--attention-dropout", 0, "--pooler-dropout", 0,
        "--optimizer", "adam", "--lr", 5e-3, "--lr-scheduler", "fixed", "--batch-size", 8, "--num-workers", 0, "--seed", 1,
        "--max-epoch", 1, "--log-format", "json", "--log-interval", 100, "--no-epoch-checkpoints",
        "--required-batch-size-multiple", 1, "--save-dir", save_dir, *more,
    ]  # fmt: skip


def validate_flags(data, checkpoint, *more) -> list:
    """Flags of fairseq-validate; neither the criterion nor the model's options are needed."""
    return [
        data, "--user-dir", USER_DIR, "--task", "tupe_sentence_prediction", "--path", checkpoint, "--batch-size", 8,
        "--num-workers", 0, "--log-format", "json", "--required-batch-size-multiple", 1, *more,
    ]  # fmt: skip

"""Helpers of the GLUE tests: a small tokenizer, and task folders written from the formats' definitions."""

from pathlib import Path

import numpy as np
import sentencepiece

from fairseq_tupe.data.cleaning import CleaningOptions
from fairseq_tupe.data.dictionaries import dictionary_symbols, write_dictionary
from fairseq_tupe.data.tokenizer import write_manifest
from fairseq_tupe.data.tokenizer_training import train_model

WORDS = ["bird", "sings", "green", "tree", "old", "house", "red", "river", "runs", "small", "dog", "big", "cat", "sees", "walks"]
WORDS += ["man", "woman", "good", "bad", "film", "plays"]


def sentences(count: int, seed: int = 0, longest: int = 8) -> list[str]:
    """Random sentences of plain words."""
    rng = np.random.default_rng(seed)
    return [" ".join(rng.choice(WORDS, rng.integers(2, longest + 1))).capitalize() + "." for _ in range(count)]


def make_tokenizer(folder: Path, seed: int = 0, vocab_size: int = 330) -> Path:
    """A tokenizer folder trained on random sentences; another seed gives another tokenizer."""
    folder.mkdir(parents=True)
    text = folder / "text"
    lines = [line.lower() for line in sentences(400, seed)]
    text.write_text("\n".join(lines) + "\n", encoding="utf-8")
    model = train_model(text, len(lines), text.stat().st_size, 10_000, vocab_size)
    text.unlink()
    (folder / "spm.model").write_bytes(model)
    processor = sentencepiece.SentencePieceProcessor(model_proto=model)
    symbols = dictionary_symbols([processor.id_to_piece(i) for i in range(processor.get_piece_size())])
    write_dictionary(folder / "dict.txt", symbols, [1] * len(symbols))
    write_manifest(folder, CleaningOptions(), {})
    return folder


def write_tsv(path: Path, header: str, rows: list[tuple]) -> Path:
    """A GLUE file; `header` is a line or ""."""
    path.parent.mkdir(parents=True, exist_ok=True)
    lines = ([header] if header else []) + ["\t".join(map(str, row)) for row in rows]
    path.write_bytes("".join(f"{line}\n" for line in lines).encode("utf-8"))
    return path


def write_rte(folder: Path, train: int = 6, dev: int = 4) -> Path:
    """An RTE folder with a few rows."""
    texts = sentences(2 * (train + dev))
    rows = [(i, texts[2 * i], texts[2 * i + 1], ("entailment", "not_entailment")[i % 2]) for i in range(train + dev)]
    header = "index\tsentence1\tsentence2\tlabel"
    write_tsv(folder / "train.tsv", header, rows[:train])
    write_tsv(folder / "dev.tsv", header, rows[train:])
    return folder


def write_sts_b(folder: Path, train: int = 40, dev: int = 9) -> Path:
    """An STS-B folder in the layout of the STS benchmark: no header; the score grows with the words in common."""
    texts = sentences(2 * (train + dev), seed=3)
    rows = []
    for i in range(train + dev):
        first, second = texts[2 * i], texts[2 * i if i % 3 == 0 else 2 * i + 1]
        one, two = set(first.lower().split()), set(second.lower().split())
        score = f"{5 * len(one & two) / len(one | two):.3f}"
        rows.append(("genre", "file", 2012, i, score, first, second))
    write_tsv(folder / "sts-train.csv", "", rows[:train])
    write_tsv(folder / "sts-dev.csv", "", rows[train:])
    return folder

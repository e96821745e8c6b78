"""Contestants of the fine-tuning rows: the sentence pairs' real lengths, a regression head, whole updates.

Only lengths are read from the data: the time does not depend on which token stands where.
"""

from collections.abc import Callable
from pathlib import Path

import torch
import torch.nn.functional as F
from fairseq.data import Dictionary, data_utils

from fairseq_tupe.benchmark import models
from fairseq_tupe.errors import TupeError

BATCH = 32
PAD = 1
SMALL = {"layers": 6, "width": 512, "heads": 8}  # tupe_roberta_small
HEAD = "sentence_classification_head"


def pair_lengths(data: Path) -> tuple[list[int], int]:
    """Tokens of every training pair ``<s> A </s> </s> B </s>`` of a prepared task, and the size of its dictionary.

    Raises:
        TupeError: ``data`` holds no such task.
    """
    try:
        vocabulary = Dictionary.load(str(data / "input0" / "dict.txt"))
        sides = [data_utils.load_indexed_dataset(str(data / side / "train"), vocabulary) for side in ("input0", "input1")]
    except OSError as error:
        raise TupeError(f"--data {data}: {error}") from None
    if None in sides:
        raise TupeError(f"--data {data}: not a prepared task of sentence pairs (input0/train.idx, input1/train.idx)")
    return [int(a) + int(b) + 2 for a, b in zip(sides[0].sizes, sides[1].sizes, strict=True)], len(vocabulary) + 1


def batches(lengths: list[int], vocabulary: int, most: int, device: str) -> list[torch.Tensor]:
    """Shuffled batches of 32, padded on the right as fairseq does; at most ``most`` of them (0: all)."""
    generator = torch.Generator().manual_seed(0)
    order = torch.randperm(len(lengths), generator=generator).tolist()
    found = []
    for start in range(0, len(order), BATCH)[: most or None]:
        chosen = [min(lengths[index], 512) for index in order[start : start + BATCH]]
        tokens = torch.randint(5, vocabulary - 1, (len(chosen), max(chosen)), generator=generator)
        tokens[:, 0] = 0
        for row, length in enumerate(chosen):
            tokens[row, length:] = PAD
        found.append(tokens.to(device))
    return found


def epoch(contestant: models.Contestant, data: list[torch.Tensor]) -> Callable[[], None]:
    """A function that trains on every batch once."""
    model = contestant.model.train()

    def run() -> None:
        for tokens in data:
            scores = model(tokens, features_only=True, classification_head_name=HEAD)[0].squeeze(-1).float()
            F.mse_loss(scores, torch.zeros_like(scores), reduction="sum").backward()
            contestant.update()
            for parameter in model.parameters():
                parameter.grad = None

    return run


def contestants(data: Path, device: str, most: int = 0) -> tuple[list[tuple[str, str, Callable]], dict]:
    """Entries and facts for the benchmark's rows, all in fp32: the original, stock RoBERTa, ours."""
    lengths, vocabulary = pair_lengths(data)
    size = models.Size(**SMALL, vocabulary=vocabulary)
    found = batches(lengths, vocabulary, most, device)
    entries = []
    for name, build in (("original", models.original), ("fairseq roberta", models.stock_roberta), ("ours", models.ours)):
        contestant = build(size, device, head=HEAD)
        entries.append((name, "fp32", epoch(contestant, found)))
    real = sum(int(tokens.ne(PAD).sum()) for tokens in found) / sum(tokens.numel() for tokens in found)
    facts = {
        "layers": size.layers,
        "batch": BATCH,
        "length": max(lengths),
        "dropout": size.dropout,
        "real_tokens": round(real, 3),
    }
    return entries, facts

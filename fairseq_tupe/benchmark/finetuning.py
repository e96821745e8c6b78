"""Contestants of the fine-tuning rows: real sentence lengths, a sentence-pair head, whole updates."""

from collections.abc import Callable
from pathlib import Path

from fairseq_tupe.errors import TupeError


def contestants(data: Path, device: str) -> tuple[list[tuple[str, str, Callable]], dict]:
    """Entries and facts for :meth:`.command.Benchmark.add`."""
    raise TupeError("not yet")

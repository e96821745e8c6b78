"""Training of the sentencepiece model, on a bounded and repeatable sample of the corpus."""

import io
import re
from collections.abc import Iterator
from pathlib import Path

import sentencepiece

from fairseq_tupe.data.cleaning import PLACEHOLDERS
from fairseq_tupe.data.dictionaries import dictionary_symbols
from fairseq_tupe.errors import TupeError

MAX_SAMPLE_BYTES = 300_000_000
_MAX_TRAINING_BYTES = 4000  # sentencepiece leaves longer sentences out, so they are cut
_TOO_HIGH = re.compile(r"value <= (\d+)")
_TOO_LOW = re.compile(r"required_chars\. (\d+) vs (\d+)")


def sample_sentences(path: Path, sentences: int, size: int, limit: int) -> Iterator[str]:
    """Every k-th sentence of a file of one sentence a line, so that at most `limit` sentences and about 300 MB come out.

    Args:
        sentences: how many sentences the file holds.
        size: its bytes.
    """
    step = max(1, -(-sentences // limit), -(-size // MAX_SAMPLE_BYTES))
    with open(path, "rb") as stream:
        for number, line in enumerate(stream):
            if number % step == 0:
                yield from _pieces(line.rstrip(b"\n"))


def _pieces(line: bytes) -> Iterator[str]:
    while len(line) > _MAX_TRAINING_BYTES:
        end = line.rfind(b" ", 0, _MAX_TRAINING_BYTES)
        end = end if end > 0 else _MAX_TRAINING_BYTES
        yield line[:end].decode("utf-8", errors="ignore")
        line = line[end:].lstrip(b" ")
    if line:
        yield line.decode("utf-8", errors="ignore")


def train_model(path: Path, sentences: int, size: int, limit: int, vocab_size: int) -> bytes:
    """Trains BPE with byte fallback and the placeholders as symbols of their own; the same input gives the same bytes.

    Returns:
        The serialized model, with exactly `vocab_size` pieces (<unk>, <s>, </s>, the placeholders and 256 bytes included).

    Raises:
        TupeError: where the corpus allows no vocabulary of that size; it names the largest or smallest possible one.
    """
    model = io.BytesIO()
    try:
        sentencepiece.SentencePieceTrainer.train(
            sentence_iterator=sample_sentences(path, sentences, size, limit),
            model_writer=model,
            vocab_size=vocab_size,
            model_type="bpe",
            byte_fallback=True,
            character_coverage=0.9995,
            normalization_rule_name="identity",
            user_defined_symbols=list(PLACEHOLDERS),
            unk_id=0,
            bos_id=1,
            eos_id=2,
            pad_id=-1,
            input_sentence_size=0,
            shuffle_input_sentence=False,
            max_sentence_length=4 * _MAX_TRAINING_BYTES,
            num_threads=1,
            minloglevel=2,
        )
    except (RuntimeError, OSError) as error:
        raise TupeError(_explain(str(error), vocab_size)) from None
    data = model.getvalue()
    processor = sentencepiece.SentencePieceProcessor(model_proto=data)
    dictionary_symbols([processor.id_to_piece(i) for i in range(vocab_size)], "the trained vocabulary")
    return data


def _explain(message: str, vocab_size: int) -> str:
    if match := _TOO_HIGH.search(message):
        return f"--vocab-size {vocab_size} is larger than this corpus allows: the largest possible is {match[1]}"
    if match := _TOO_LOW.search(message):
        return f"--vocab-size {vocab_size} is too small for the characters of this corpus: the smallest possible is {match[2]}"
    return f"sentencepiece could not train a vocabulary of {vocab_size}: {' '.join(message.split())}"

"""Checkpoints to export, a tokenizer trained on the spot, and an exported model: fixtures of the tests of interop.hf."""

import argparse
import random

import pytest
import torch
from omegaconf import OmegaConf
from small_model import random_tokens, small_model

from fairseq_tupe.__main__ import main
from fairseq_tupe.data.cleaning import PLACEHOLDERS, CleaningOptions, clean
from fairseq_tupe.data.dictionaries import dictionary_symbols, write_dictionary
from fairseq_tupe.data.tokenizer import Tokenizer, write_manifest
from fairseq_tupe.data.tokenizer_training import train_model
from fairseq_tupe.interop.reference_checkpoint import whole_config

HEAD = "sentence_classification_head"
PAD = 1


def write_checkpoint(path, model, labels=(), **options):
    """A checkpoint as fairseq saves it."""
    task = "tupe_sentence_prediction" if labels else "tupe_masked_lm"
    model_options = {key: value for key, value in OmegaConf.to_container(model.cfg, enum_to_str=True).items() if key[0] != "_"}
    args = argparse.Namespace(**{"arch": "tupe_roberta", "task": task, "criterion": "masked_lm", "data": str(path.parent),
                                 "tpu": False, **model_options, **options})  # fmt: skip
    state = {
        "args": None,
        "cfg": OmegaConf.to_container(whole_config(args), resolve=True, enum_to_str=True),
        "model": model.state_dict(),
        "optimizer_history": [{"num_updates": 7, "optimizer_name": "FairseqAdam", "criterion_name": "MaskedLmLoss"}],
        "task_state": {"labels": list(labels)} if labels else {},
        "extra_state": {"best": 3.5, "train_iterator": {"epoch": 2, "iterations_in_epoch": 0}},
        "last_optimizer_state": None,
    }
    torch.save(state, path)
    return path


def padded_tokens():
    """Three rows of different lengths and their attention mask."""
    tokens = random_tokens(3, 11)
    for row, length in enumerate((11, 7, 2)):
        tokens[row, length:] = PAD
    return tokens, tokens.ne(PAD).long()


def close(actual, expected, tolerance=1e-5):
    torch.testing.assert_close(actual, expected, rtol=0, atol=tolerance)


@pytest.fixture(scope="session")
def tokenizer_folder(tmp_path_factory):
    """A tokenizer trained as prepare-pretrain-data trains one, on generated words."""
    folder = tmp_path_factory.mktemp("data") / "tokenizer"
    folder.mkdir()
    rng = random.Random(1)
    # few letters in any order: pairs overlap, so the order of merges matters
    words = ["".join(rng.choices("badokemi", k=rng.randint(1, 8))) for _ in range(300)]
    sentences = [clean(" ".join(rng.choices(words, k=9)) + ".", CleaningOptions()) for _ in range(600)]
    sentences += [f"see {name} now" for name in PLACEHOLDERS] + ["naïve café"]
    corpus = folder.parent / "corpus.txt"
    corpus.write_text("\n".join(sentences) + "\n", "utf-8")
    data = train_model(corpus, len(sentences), corpus.stat().st_size, 10**6, 500)
    (folder / "spm.model").write_bytes(data)
    import sentencepiece

    processor = sentencepiece.SentencePieceProcessor(model_proto=data)
    symbols = dictionary_symbols([processor.id_to_piece(index) for index in range(processor.get_piece_size())])
    write_dictionary(folder / "dict.txt", symbols, [1] * len(symbols))
    write_manifest(folder, CleaningOptions(), {})
    return folder


@pytest.fixture(scope="session")
def exported(tokenizer_folder, tmp_path_factory):
    """A TUPE-R with a head, its folder, and its tokenizer."""
    from fairseq.data import Dictionary

    folder = tmp_path_factory.mktemp("run")
    dictionary = Dictionary.load(str(tokenizer_folder / "dict.txt"))
    dictionary.add_symbol("<mask>")
    model = small_model(dictionary=dictionary, rel_pos=True, max_positions=40)
    torch.manual_seed(5)
    model.register_classification_head(HEAD, num_classes=2)
    labels = ["entailment", "not_entailment"]
    path = write_checkpoint(folder / "checkpoint_best.pt", model.eval(), labels, num_classes=2, data=str(tokenizer_folder.parent))
    assert main(["export-hf", str(path), str(folder / "hf")]) == 0
    return model, folder / "hf", Tokenizer.load(tokenizer_folder)

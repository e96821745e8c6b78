"""A trained model on raw text, from real checkpoints of both tasks."""

import shutil
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from fairseq.data import Dictionary
from fairseq_processes import REPO, finish, masked_lm_flags, run, start
from sentence_data import flags, write_indexed

from fairseq_tupe.data.tokenizer import Tokenizer
from fairseq_tupe.errors import TupeError
from fairseq_tupe.models.tupe_roberta import TupeRobertaModel

HEAD = "sentence_classification_head"
NAMES = ("Elizabeth", "her sister", "the gentleman", "Mr. Collins", "a young officer", "the colonel", "nobody at all")
VERBS = ("walked to", "wrote a letter about", "could not forget", "was fond of", "laughed at", "returned from", "admired")
PLACES = ("the village", "London", "a ball in Meryton", "the library", "Pemberley", "the garden", "an old friend's house")


def sentences(count: int, seed: int) -> list:
    rng = np.random.default_rng(seed)
    return [f"{rng.choice(NAMES)} {rng.choice(VERBS)} {rng.choice(PLACES)}, and {rng.choice(NAMES)} {rng.choice(VERBS)} "
            f"{rng.choice(PLACES)}{'.!?'[rng.integers(3)]}" for _ in range(count)]  # fmt: skip


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    """Folders of a tokenizer with its data, of a pretrained model, and of a model fine-tuned on pairs."""
    root = tmp_path_factory.mktemp("hub")
    text = sentences(400, 0)
    (root / "text.txt").write_text("\n".join(text) + "\n")
    prepare = ("-m", "fairseq_tupe", "prepare-pretrain-data", "--out", root / "bin", "--vocab-size", 420)
    run("python", *prepare, root / "text.txt", PYTHONPATH=str(REPO)).check()
    tokenizer = Tokenizer.find(root / "bin")
    pairs = [(a, b, "same" if i % 2 else "other") for i, (a, b) in enumerate(zip(text[:24], text[24:48], strict=True))]
    pairs[1::3] = [(a.split(" and ")[0], "London", label) for a, _, label in pairs[1::3]]
    write_glue(root / "PAIR-bin", tokenizer, pairs)
    shutil.copytree(root / "bin" / "tokenizer", root / "tokenizer")
    pretraining = start("fairseq-train", *masked_lm_flags(root / "bin", root / "pretrained", "--max-update", 3))
    finetuning = start("fairseq-train", *flags(root / "PAIR-bin", root / "finetuned", 2))
    finish(pretraining).check()
    finish(finetuning).check()
    return SimpleNamespace(root=root, tokenizer=tokenizer, pairs=pairs)


def write_glue(folder, tokenizer, pairs) -> None:
    dictionary = Dictionary.load(str(tokenizer.folder / "dict.txt"))
    labels = Dictionary()
    for label in ("same", "other"):
        labels.add_symbol(label)
    for split in ("train", "valid"):
        for part in (0, 1):
            lines = [" ".join(tokenizer.encode_pieces(pair[part])) for pair in pairs]
            write_indexed(folder / f"input{part}" / split, dictionary, lines)
            dictionary.save(str(folder / f"input{part}" / "dict.txt"))
        write_indexed(folder / "label" / split, labels, [pair[2] for pair in pairs])
    labels.save(str(folder / "label" / "dict.txt"))


@pytest.fixture(scope="module")
def pretrained(trained):
    return TupeRobertaModel.from_pretrained(trained.root / "pretrained", "checkpoint_last.pt")


@pytest.fixture(scope="module")
def finetuned(trained):
    return TupeRobertaModel.from_pretrained(trained.root / "finetuned", "checkpoint_last.pt")


def test_encode_and_decode(pretrained, trained):
    text = "Elizabeth admired the library."
    ids = pretrained.encode(text)
    assert ids.dtype == torch.long
    assert ids.tolist() == [0, *trained.tokenizer.encode(text), 2]
    assert pretrained.decode(ids) == text.lower()
    first, second = ids[1:].tolist(), trained.tokenizer.encode("London?")
    assert pretrained.encode(text, "London?").tolist() == [0, *first, 2, *second, 2]
    assert pretrained.encode(text, "London?", no_separator=True).tolist() == [0, *first, *second, 2]
    for texts in ((text, "London?"), ("", "London?"), (text, ""), ("", ""), (text, "London?", "the garden")):
        assert pretrained.decode(pretrained.encode(*texts)) == [part.lower() for part in texts]
    assert pretrained.decode(pretrained.encode("")) == ""
    assert pretrained.decode(torch.tensor([*ids.tolist(), 1, 1])) == text.lower()
    smile = "a smile \N{GRINNING FACE} and \u4e2d\u6587"
    assert pretrained.decode(pretrained.encode(smile)) == smile


def test_pairs_equal_the_rows_of_the_task(finetuned, trained):
    """Also where a row has to be trimmed: the model takes 32 tokens."""
    dataset = finetuned.task.load_dataset("valid")
    rows = [finetuned.encode(first, second) for first, second, _ in trained.pairs]
    assert any(dataset.untrimmed_sizes > 32)
    assert any(dataset.untrimmed_sizes <= 32)
    for row, ids in enumerate(rows):
        assert ids.tolist() == dataset[row]["tokens"].tolist()


def test_too_long_input_is_refused_not_cut(finetuned):
    long = finetuned.encode("the garden " * 40)
    assert len(long) > 32
    for use in (finetuned.extract_features, lambda ids: finetuned.predict(HEAD, ids)):
        with pytest.raises(TupeError, match=f"{len(long)}.*32|32.*{len(long)}"):
            use(long)
    cut = finetuned.encode("the garden " * 40, truncate=True)
    assert cut.tolist() == [*long[:31].tolist(), 2]
    assert len(finetuned.encode("the garden " * 40, "London", truncate=False)) > 32
    with pytest.raises(TupeError, match="3 sentences"):
        finetuned.encode("the garden " * 40, "London", "London", truncate=True)


def test_features(pretrained):
    ids = pretrained.encode("nobody at all")
    features = pretrained.extract_features(ids)
    hiddens = pretrained.extract_features(ids, return_all_hiddens=True)
    assert features.shape == (1, len(ids), 16)
    assert len(hiddens) == 2
    assert torch.equal(hiddens[-1], features)
    assert torch.equal(pretrained.extract_features(ids), features), "eval mode: no dropout"
    batch = torch.stack([ids, ids.roll(1).index_fill(0, torch.tensor([0]), 0)])
    assert pretrained.extract_features(batch).shape == (2, len(ids), 16)
    assert pretrained.device.type == "cpu"


def test_predict(finetuned, trained):
    assert finetuned.labels == ["same", "other"]
    ids = finetuned.encode(*trained.pairs[0][:2])
    logits = finetuned.predict(HEAD, ids, return_logits=True)
    assert logits.shape == (1, 2)
    assert torch.equal(finetuned.predict(HEAD, ids), logits.log_softmax(dim=-1))
    assert torch.equal(logits, finetuned.model(ids.unsqueeze(0), classification_head_name=HEAD)[0])
    with pytest.raises(TupeError, match=f'no classification head "other"; the model has {HEAD}'):
        finetuned.predict("other", ids)


def test_new_head(pretrained):
    pretrained.register_classification_head("score", num_classes=1)
    ids = pretrained.encode("London")
    assert torch.equal(pretrained.predict("score", ids), pretrained.predict("score", ids, return_logits=True))


def test_fill_mask(pretrained):
    filled = pretrained.fill_mask("Elizabeth walked to <mask> village.", topk=7)
    assert len(filled) == 7
    scores = [score for _, score, _ in filled]
    assert scores == sorted(scores, reverse=True)
    ids = pretrained.encode("Elizabeth walked to").tolist()[:-1] + [pretrained.dictionary.index("<mask>")]
    ids = torch.tensor([ids + pretrained.encode("village.").tolist()[1:]])
    probabilities = pretrained.model(ids)[0][0, (ids[0] == ids.max()).nonzero().item()].softmax(dim=-1)
    for text, score, piece in filled:
        assert text == f"Elizabeth walked to{piece} village."
        assert score == pytest.approx(probabilities[pretrained.dictionary.index(piece.replace(" ", "\u2581"))].item(), abs=1e-6)
        assert piece not in ("<s>", "<pad>", "</s>", "<unk>", "<mask>")
    assert pretrained.fill_mask("<mask>", topk=1)[0][0] == pretrained.fill_mask("<mask>", topk=1)[0][2].strip()
    for text in ("no mask", "<mask> and <mask>"):
        with pytest.raises(TupeError, match="one <mask>"):
            pretrained.fill_mask(text)


def test_what_follows_a_mask_directly_begins_no_word(pretrained):
    begun = pretrained._content(".", begins_word=False)
    assert [pretrained.dictionary[index] for index in begun] == ["."]
    assert pretrained._content(" london", begins_word=True) == pretrained.encode("london").tolist()[1:-1]


def test_a_folder_is_enough(trained, tmp_path, monkeypatch):
    """Checkpoint and tokenizer in a folder of their own: no data, no label dictionary, from anywhere."""
    folder = tmp_path / "a folder"
    folder.mkdir()
    for name in ("pretrained", "finetuned"):
        state = torch.load(trained.root / name / "checkpoint_last.pt", weights_only=True)
        state["cfg"]["task"]["data"] = "gone"
        torch.save(state, folder / f"{name}.pt")
    with pytest.raises(TupeError, match="no dictionary .* in gone, "):
        TupeRobertaModel.from_pretrained(folder, "finetuned.pt")
    monkeypatch.chdir(tmp_path)
    shutil.copytree(trained.root / "tokenizer", folder / "tokenizer")
    text = trained.pairs[0][:2]
    for name in ("pretrained", "finetuned"):
        one = TupeRobertaModel.from_pretrained("a folder", f"{name}.pt")
        other = TupeRobertaModel.from_pretrained(folder, f"{name}.pt", data_name_or_path=trained.root / "PAIR-bin")
        ids = one.encode(*text)
        assert torch.equal(ids, other.encode(*text))
        assert torch.equal(one.extract_features(ids), other.extract_features(ids))
        assert one.labels == other.labels == (["same", "other"] if name == "finetuned" else None)
    with pytest.raises(TupeError, match="missing.pt not found; .* has finetuned.pt, pretrained.pt"):
        TupeRobertaModel.from_pretrained(folder, "missing.pt")
    with pytest.raises(TupeError, match="is no folder"):
        TupeRobertaModel.from_pretrained(tmp_path / "nowhere")


def test_another_tokenizer_is_refused(trained, tmp_path):
    data = tmp_path / "data"
    shutil.copytree(trained.root / "PAIR-bin", data)
    (tmp_path / "text.txt").write_text("\n".join(sentences(200, 5)).replace("Elizabeth", "Anne Elliot"))
    run("python", "-m", "fairseq_tupe", "prepare-pretrain-data", "--out", tmp_path / "bin", "--vocab-size", 400,
        tmp_path / "text.txt", PYTHONPATH=str(REPO)).check()  # fmt: skip
    shutil.copytree(tmp_path / "bin" / "tokenizer", tmp_path / "tokenizer")
    with pytest.raises(TupeError, match="the tokenizer in .* does not fit"):
        TupeRobertaModel.from_pretrained(trained.root / "finetuned", "checkpoint_last.pt", data_name_or_path=data)
    with pytest.raises(TupeError, match="dictionary has .* types"):
        TupeRobertaModel.from_pretrained(trained.root / "pretrained", "checkpoint_last.pt", data_name_or_path=tmp_path / "bin")

"""Dictionaries and the tokenizer folder: ids, specials, checksums, and text that survives the round trip."""

import io
import json
import shutil

import numpy as np
import pytest
import sentencepiece
from hypothesis import given, settings
from hypothesis import strategies as st

from fairseq_tupe.data import dictionaries, tokenizer_training
from fairseq_tupe.data.cleaning import CleaningOptions
from fairseq_tupe.data.corpus_stages import WordEncoder
from fairseq_tupe.data.tokenizer import Tokenizer, write_manifest
from fairseq_tupe.errors import TupeError

SENTENCES = [
    f"the {noun} of {place} {verb} the old {other}, and nobody at <url> knew it."
    for noun in ("captain", "daughter", "gardener", "<s>doctor</s>")
    for place in ("highbury", "bath", "london", "kent")
    for verb in ("admired", "forgot", "visited<mask>")
    for other in ("house", "carriage", "library <pad>", "piano")
]
VOCAB_SIZE = 400


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("tok") / "tokenizer"
    folder.mkdir()
    text = folder / "text"
    text.write_text("\n".join(SENTENCES) + "\n")
    model = tokenizer_training.train_model(text, len(SENTENCES), text.stat().st_size, 10_000, VOCAB_SIZE)
    (folder / "spm.model").write_bytes(model)
    processor = sentencepiece.SentencePieceProcessor(model_file=str(folder / "spm.model"))
    symbols = dictionaries.dictionary_symbols([processor.id_to_piece(i) for i in range(VOCAB_SIZE)])
    dictionaries.write_dictionary(folder / "dict.txt", symbols, [1] * len(symbols))
    write_manifest(folder, CleaningOptions(), {})
    return folder


@pytest.fixture(scope="module")
def tokenizer(folder):
    return Tokenizer.load(folder)


@pytest.fixture
def copy(folder, tmp_path):
    return shutil.copytree(folder, tmp_path / "tokenizer")


def test_ids_are_lines_of_dict_txt_plus_four_and_fairseq_agrees(folder, tokenizer):
    from fairseq.data import Dictionary

    rows = (folder / "dict.txt").read_text().split("\n")[:-1]
    assert len(rows) == VOCAB_SIZE - 3  # sentencepiece's own <unk>, <s> and </s> are fairseq's already
    assert tokenizer.vocab_size == VOCAB_SIZE
    stock = Dictionary.load(str(folder / "dict.txt"))
    assert len(stock) == len(rows) + 4
    for sentence in SENTENCES[::7]:
        pieces, ids = tokenizer.encode_pieces(sentence), tokenizer.encode(sentence)
        assert [rows[i - 4].split(" ")[0] for i in ids] == pieces
        assert [stock.index(piece) for piece in pieces] == ids
    assert stock.add_symbol("<mask>") == tokenizer.mask_id


def test_specials_written_in_the_text_are_no_specials(tokenizer):
    ids = tokenizer.encode("a <s> b</s> <pad> <unk> <mask>")
    assert min(ids) > 3
    assert max(ids) < tokenizer.mask_id
    assert tokenizer.decode(ids) == "a <s> b</s> <pad> <unk> <mask>"


def test_placeholders_are_one_id_and_made_by_cleaning(tokenizer):
    assert tokenizer.encode_pieces("x<url>")[-1] == "<url>"
    url = tokenizer.encode("x<url>")[-1]
    assert tokenizer.encode("See www.example.com, please").count(url) == 1
    assert tokenizer.encode("<url><url>").count(url) == 2


@settings(max_examples=300, deadline=None)
@given(st.text())
def test_any_text_survives_up_to_cleaning(tokenizer, text):
    ids = tokenizer.encode(text)
    assert 3 not in ids
    assert tokenizer.decode(ids) == tokenizer.clean(text)
    assert tokenizer.encode(tokenizer.decode(ids)) == ids


def test_emoji_other_scripts_and_lone_returns_survive(tokenizer):
    text = "\U0001f600 \U0001f468\u200d\U0001f469\u200d\U0001f467 \u3072\u3089 \u0440\u0443\u0441 caf\u00e9 a\rb"
    assert tokenizer.decode(tokenizer.encode(text)) == text.replace("\r", " ")
    assert any(piece.startswith("<0x") for piece in tokenizer.encode_pieces(text))


def test_batches_and_whole_words_give_the_same_ids(tokenizer, folder):
    texts = [*SENTENCES[:20], "\U0001f600 never seen <url>.", ""]
    assert tokenizer.encode_batch(texts) == [tokenizer.encode(text) for text in texts]
    encoder = WordEncoder(str(folder / "spm.model"))
    for _ in range(2):  # cold and warm
        ids, sizes = encoder.encode([tokenizer.clean(text) for text in texts[:-1]])
        parts = np.split(ids, np.cumsum(sizes)[:-1])
        assert [part.tolist() for part in parts] == [[*tokenizer.encode(text), 2] for text in texts[:-1]]


def test_a_model_with_pieces_over_spaces_encodes_whole_sentences(tmp_path):
    path = tmp_path / "spm.model"
    with open(path, "wb") as stream:
        sentencepiece.SentencePieceTrainer.train(
            sentence_iterator=iter(SENTENCES), model_writer=stream, vocab_size=300, model_type="bpe", minloglevel=2,
            split_by_whitespace=False, byte_fallback=False, max_sentencepiece_length=30,
        )  # fmt: skip
    processor = sentencepiece.SentencePieceProcessor(model_file=str(path))
    pieces = processor.encode(SENTENCES[0], out_type=str)
    assert any("\u2581" in piece[1:] for piece in pieces)
    ids, sizes = WordEncoder(str(path)).encode([SENTENCES[0]])
    table = dictionaries.fairseq_ids([processor.id_to_piece(i) for i in range(300)])
    assert ids.tolist() == [*table[processor.encode(SENTENCES[0])], 2]
    assert sizes.tolist() == [len(ids)]


def test_decode_shows_unknown_and_mask_and_refuses_ids_beyond(tokenizer):
    ids = tokenizer.encode("the captain")
    assert tokenizer.decode([0, *ids, tokenizer.mask_id, 3, 2, 1]) == "the captain <mask> <unk>"
    with pytest.raises(TupeError, match=f"id {tokenizer.mask_id + 1} "):
        tokenizer.decode([tokenizer.mask_id + 1])


def test_find_looks_in_three_places_and_lists_them(folder, tmp_path):
    base = folder.parent
    beside = base / "MRPC-bin"
    beside.mkdir(exist_ok=True)
    for place in (base, folder, beside):
        assert Tokenizer.find(tmp_path, place).fingerprint == Tokenizer.load(folder).fingerprint
    with pytest.raises(TupeError, match="looked at") as caught:
        Tokenizer.find(tmp_path / "nowhere")
    assert str(tmp_path / "nowhere" / "tokenizer") in str(caught.value)


def test_a_changed_or_missing_file_is_refused(copy):
    with open(copy / "dict.txt", "a") as stream:
        stream.write("new 1\n")
    with pytest.raises(TupeError, match=r"dict\.txt: the file changed"):
        Tokenizer.load(copy)
    (copy / "dict.txt").unlink()
    with pytest.raises(TupeError, match=r"no dict\.txt there"):
        Tokenizer.load(copy)


def test_a_dictionary_of_another_model_is_refused(copy):
    rows = (copy / "dict.txt").read_text().split("\n")
    rows[10], rows[11] = rows[11], rows[10]
    (copy / "dict.txt").write_text("\n".join(rows))
    write_manifest(copy, CleaningOptions(), {})
    with pytest.raises(TupeError, match=r"line 11 differs from spm\.model"):
        Tokenizer.load(copy)


def test_a_bad_manifest_is_refused(copy):
    manifest = json.loads((copy / "manifest.json").read_text())
    changes = {
        "cleaning switches": {"cleaning": {"lowercase": 1}},
        "format 99": {"format": 99},
        "no tokenizer manifest": {"sha256": {}},
    }
    for message, change in changes.items():
        (copy / "manifest.json").write_text(json.dumps({**manifest, **change}))
        with pytest.raises(TupeError, match=message):
            Tokenizer.load(copy)


def test_specials_are_stripped_by_name_wherever_they_stand(tmp_path):
    model = io.BytesIO()
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter(SENTENCES), model_writer=model, vocab_size=200, model_type="bpe", minloglevel=2,
        unk_id=3, bos_id=1, eos_id=0, pad_id=2,
    )  # fmt: skip
    processor = sentencepiece.SentencePieceProcessor(model_proto=model.getvalue())
    pieces = [processor.id_to_piece(i) for i in range(200)]
    pieces.insert(150, pieces.pop(1))  # <s> in the middle
    vocab = tmp_path / "m.vocab"
    vocab.write_text("".join(f"{piece}\t{-i}\n" for i, piece in enumerate(pieces)))
    assert dictionaries.read_sentencepiece_vocab(vocab) == pieces
    symbols = dictionaries.dictionary_symbols(pieces)
    assert symbols == [piece for piece in pieces if piece not in ("<s>", "</s>", "<pad>", "<unk>")]
    ids = dictionaries.fairseq_ids(pieces)
    assert [int(ids[pieces.index(name)]) for name in ("<s>", "<pad>", "</s>", "<unk>")] == [0, 1, 2, 3]
    assert [symbols[i - 4] for i in ids if i > 3] == symbols


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("a 1\nb 2\na 3\n", "line 3 repeats 'a' of line 1"),
        ("a 1\nb -2.5\n", "line 2 is 'b -2.5'"),
        ("a 1\nb\n", "line 2 is 'b'"),
        ("a 1\n\nb 2\n", "line 2 is ''"),
        ("<s> 1\n", "line 1 is <s>"),
        ("a b 1\n", "line 1 is 'a b 1'"),
        ("", "is empty"),
    ],
)
def test_wrong_dictionaries_are_refused_with_file_and_line(tmp_path, text, message):
    path = tmp_path / "dict.txt"
    path.write_text(text)
    with pytest.raises(TupeError, match=message) as caught:
        dictionaries.read_dictionary(path)
    assert str(path) in str(caught.value)


def test_vocabulary_limits_are_named_and_hold(tmp_path):
    text = tmp_path / "text"
    text.write_text("\n".join(SENTENCES) + "\n")
    arguments = (text, len(SENTENCES), text.stat().st_size, 10_000)
    with pytest.raises(TupeError, match="largest possible is") as caught:
        tokenizer_training.train_model(*arguments, 32768)
    largest = int(str(caught.value).rsplit(" ", 1)[1])
    with pytest.raises(TupeError, match="smallest possible is") as caught:
        tokenizer_training.train_model(*arguments, 100)
    smallest = int(str(caught.value).rsplit(" ", 1)[1])
    for size in (smallest, largest):
        model = tokenizer_training.train_model(*arguments, size)
        assert sentencepiece.SentencePieceProcessor(model_proto=model).get_piece_size() == size
        assert model == tokenizer_training.train_model(*arguments, size)
    for size in (smallest - 1, largest + 1):
        with pytest.raises(TupeError, match="possible is"):
            tokenizer_training.train_model(*arguments, size)


def test_the_training_sample_is_spread_over_the_corpus(tmp_path):
    path = tmp_path / "text"
    path.write_text("".join(f"sentence {i}\n" for i in range(100)))
    sample = list(tokenizer_training.sample_sentences(path, 100, path.stat().st_size, 30))
    assert sample == [f"sentence {i}" for i in range(0, 100, 4)]
    path.write_text("word " * 3000 + "\n")
    assert "".join(tokenizer_training.sample_sentences(path, 1, 15_000, 30)).count("word") == 3000

"""`prepare-pretrain-data` on real files: what fairseq reads, what the report says, what settings change."""

import bz2
import gzip
import lzma
import random
import struct
import subprocess
import sys
import textwrap

import numpy as np
import pytest
from corpus_data import LINES, VOCAB, make_lines, prepare, refused, report_of, sentences_of, snapshot

from fairseq_tupe.data import binarized
from fairseq_tupe.data.binarized import DatasetWriter
from fairseq_tupe.data.tokenizer import Tokenizer


@pytest.fixture(scope="module")
def corpus(tmp_path_factory):
    path = tmp_path_factory.mktemp("text") / "corpus.txt"
    path.write_text("\n".join(LINES) + "\n")
    return path


@pytest.fixture(scope="module")
def prepared(corpus):
    out = corpus.parent / "prepared"
    assert prepare("--out", out, *VOCAB, "--valid-fraction", "0.05", corpus) == 0
    return out


def test_ids_decode_to_the_sentences_and_the_split_is_clean(prepared):
    from fairseq_tupe.data.sentences import join_short, split_sentences

    expected = [s.lower() for line in LINES for s in join_short(split_sentences(line))]
    train, valid = sentences_of(prepared, "train"), sentences_of(prepared, "valid")
    assert sorted(train + valid) == sorted(expected)
    assert not set(train) & set(valid)
    held_out = set(valid)
    assert train == [s for s in expected if s not in held_out]  # in the order of the text
    assert 8 <= report_of(prepared)["valid"]["lines"] <= 35  # 20 expected of 400


def test_the_report_adds_up(prepared, corpus):
    report = report_of(prepared)
    lines = report["lines"]
    assert lines["in"] == 400 == lines["kept"] + sum(lines["dropped"].values())
    train, valid = report["train"], report["valid"]
    assert train["lines"] + valid["lines"] == lines["kept"]
    assert train["sentences"] == len(sentences_of(prepared, "train"))
    assert report["text_bytes"] == corpus.stat().st_size
    sizes = {name: (prepared / name).stat().st_size for name in report["files"]}
    assert sizes == report["files"]
    assert sizes["train.bin"] == 2 * (train["tokens"] + train["sentences"])
    counts = [int(row.rsplit(" ", 1)[1]) for row in (prepared / "dict.txt").read_text().split("\n")[:-1]]
    assert sum(counts) == train["tokens"]
    assert train["unknown_rate"] == 0
    assert set(report["seconds"]) == {"clean", "split", "tokenize", "encode"}
    assert not list(prepared.parent.glob("prepared.*"))


def test_stock_fairseq_trains_on_it(prepared, tmp_path):
    run = subprocess.run(
        [sys.executable, "-m", "fairseq_cli.train", str(prepared), "--task", "masked_lm", "--criterion", "masked_lm",
         "--arch", "roberta",
         "--encoder-layers", "1", "--encoder-embed-dim", "16", "--encoder-ffn-embed-dim", "16", "--encoder-attention-heads", "2",
         "--tokens-per-sample", "128", "--max-positions", "128", "--sample-break-mode", "complete", "--batch-size", "4",
         "--optimizer", "adam", "--lr", "1e-3", "--max-update", "1", "--save-dir", str(tmp_path), "--no-save", "--cpu",
         "--num-workers", "0"],
        capture_output=True, text=True, timeout=120, check=False,
    )  # fmt: skip
    output = run.stdout + run.stderr
    assert run.returncode == 0, output[-2000:]
    assert "dictionary: 401 types" in output  # 397 rows and 4 specials, before the task's <mask>
    assert f"loaded {report_of(prepared)['train']['sentences']} examples" in output.replace(",", "")
    assert "valid on 'valid' subset" in output


def test_the_dataset_files_are_those_of_fairseqs_builder(tmp_path, monkeypatch):
    import torch
    from fairseq.data.indexed_dataset import MMapIndexedDatasetBuilder

    monkeypatch.setattr(binarized, "_COPY", 3)  # sentences the index takes at a time: here several turns
    rng = np.random.default_rng(0)
    for dictionary_size, dtype in ((400, np.uint16), (70_000, np.uint32)):
        items = [rng.integers(0, dictionary_size, size=size) for size in (3, 1, 70, 12)]
        stock = MMapIndexedDatasetBuilder(str(tmp_path / "stock.bin"), dtype=dtype)
        for item in items:
            stock.add_item(torch.from_numpy(item))
        stock.finalize(str(tmp_path / "stock.idx"))
        ours = DatasetWriter(tmp_path / "ours", dictionary_size)
        for some in (items[:1], items[1:3], [], items[3:]):
            ours.add(np.concatenate([*some, np.empty(0, dtype=np.int64)]), np.array([len(item) for item in some]))
        ours.finish()
        for ending in ("bin", "idx"):
            assert (tmp_path / f"ours.{ending}").read_bytes() == (tmp_path / f"stock.{ending}").read_bytes()
        assert not (tmp_path / "ours.sizes").exists()


def test_packing_names_and_workers_do_not_change_the_result(prepared, corpus, tmp_path):
    text = corpus.read_bytes()
    third = len(text) // 3
    cuts = [0, text.index(b"\n", third) + 1, text.index(b"\n", 2 * third) + 1, len(text)]
    files, names = [], ("-a.txt", "b c.txt", "\u00e9'\".zst")
    for pack, name, start, end in zip((gzip, lzma, bz2), names, cuts[:3], cuts[1:], strict=True):
        files.append(tmp_path / name)
        files[-1].write_bytes(pack.compress(text[start:end].replace(b"\n", b"\r\n")))
    options = ("--out", tmp_path / "o ;'", *VOCAB, "--valid-fraction", "0.05", "--workers", "1")
    assert prepare(*options, *files) == 0
    assert snapshot(tmp_path / "o ;'") == snapshot(prepared)


def test_rows_end_at_lf_only_and_duplicates_go(tmp_path):
    long = make_lines(30, seed=3)
    text = "\n".join([long[0] + "\r" + long[1], long[2] + "\u2028" + long[3], long[4], long[4].upper(), "", "short", *long[5:]])
    path = tmp_path / "x.txt"
    path.write_bytes(text.encode())
    assert prepare("--out", tmp_path / "o", "--vocab-size", "320", path) == 0
    lines = report_of(tmp_path / "o")["lines"]
    assert lines["in"] == 31
    assert {reason: n for reason, n in lines["dropped"].items() if n} == {"duplicate": 1, "empty": 1, "too_short": 1}
    assert lines["kept"] == 28


def test_shards_share_out_all_sentences(prepared, corpus, tmp_path):
    out = tmp_path / "o"
    assert prepare("--out", out, *VOCAB, "--valid-fraction", "0.05", "--shards", "3", corpus) == 0
    parts = [sentences_of(out, "train", out / f"shard{i}") for i in range(3)]
    assert sorted(sum(parts, [])) == sorted(sentences_of(prepared, "train"))
    assert all(len(part) >= len(sum(parts, [])) // 4 for part in parts)
    for i in range(3):
        assert (out / f"shard{i}" / "valid.bin").read_bytes() == (prepared / "valid.bin").read_bytes()
        assert Tokenizer.find(out / f"shard{i}").fingerprint == Tokenizer.find(prepared).fingerprint


def test_a_given_tokenizer_brings_its_cleaning(corpus, prepared, tmp_path, capsys):
    cased = tmp_path / "cased"
    assert prepare("--out", cased, "--vocab-size", "420", "--cased", corpus) == 0
    assert any(sentence[0].isupper() for sentence in sentences_of(cased, "train"))
    other = tmp_path / "other.txt"
    other.write_text("\n".join(make_lines(50, seed=9)))
    out = tmp_path / "o"
    assert prepare("--out", out, "--tokenizer", cased / "tokenizer", other) == 0
    assert snapshot(out / "tokenizer") == snapshot(cased / "tokenizer")
    assert (out / "dict.txt").read_bytes() == (cased / "dict.txt").read_bytes()
    assert any(sentence[0].isupper() for sentence in sentences_of(out, "train"))
    assert not report_of(out)["settings"]["lowercase"]
    before = snapshot(out)
    assert "--cased contradicts" in refused(capsys, "--out", out, "--tokenizer", prepared / "tokenizer", "--cased", other)
    assert "has 400 pieces" in refused(capsys, "--out", out, "--tokenizer", prepared / "tokenizer", "--vocab-size", 401, other)
    assert "no manifest.json" in refused(capsys, "--out", out, "--tokenizer", tmp_path, other)
    assert snapshot(out) == before


def test_the_same_again_is_done_and_other_settings_replace(corpus, tmp_path, capsys):
    out = tmp_path / "o"
    assert prepare("--out", out, *VOCAB, corpus) == 0
    written = (out / "train.bin").stat().st_mtime_ns
    assert prepare("--out", out, *VOCAB, corpus) == 0
    assert "is done already" in capsys.readouterr().err
    assert (out / "train.bin").stat().st_mtime_ns == written
    (out / "train.bin").write_bytes(b"torn")
    assert prepare("--out", out, *VOCAB, corpus) == 0
    assert len(sentences_of(out, "train")) == report_of(out)["train"]["sentences"]
    assert prepare("--out", out, "--vocab-size", 350, corpus) == 0
    assert f"replaced the earlier {out}" in capsys.readouterr().err
    assert Tokenizer.load(out / "tokenizer").vocab_size == 350
    assert [path.name for path in tmp_path.iterdir()] == ["o"]


def test_a_small_corpus_holds_out_one_line(tmp_path):
    path = tmp_path / "x.txt"
    path.write_text("\n".join(LINES[:20]))
    assert prepare("--out", tmp_path / "o", "--vocab-size", 320, path) == 0
    report = report_of(tmp_path / "o")
    assert (report["train"]["lines"], report["valid"]["lines"]) == (19, 1)


def test_repeated_sentences_never_stand_in_both_parts(tmp_path):
    rng = random.Random(5)
    some = [line.split(".")[0].split("!")[0].split("?")[0] + "." for line in make_lines(6, seed=7)]
    path = tmp_path / "x.txt"
    path.write_text("\n".join(" ".join(rng.choices(some, k=4)) for _ in range(300)))
    assert prepare("--out", tmp_path / "o", "--vocab-size", 300, path) == 0
    train, valid = (set(sentences_of(tmp_path / "o", part)) for part in ("train", "valid"))
    assert len(train) == 5
    assert len(valid) == 1
    assert not train & valid


def test_hard_wrapped_text_is_noticed_and_unwrapped(tmp_path, capsys):
    path = tmp_path / "wrapped.txt"
    paragraphs = [" ".join(pair) for pair in zip(LINES[::2], LINES[1::2], strict=True)]
    path.write_text("\n\n".join("\n".join(textwrap.wrap(paragraph, 70)) for paragraph in paragraphs))
    assert prepare("--out", tmp_path / "a", *VOCAB, path) == 0
    assert "--unwrap joins its lines" in capsys.readouterr().err
    assert prepare("--out", tmp_path / "b", *VOCAB, "--unwrap", "--no-deduplicate", path) == 0
    assert "--unwrap" not in capsys.readouterr().err
    found = [sentence for part in ("train", "valid") for sentence in sentences_of(tmp_path / "b", part)]
    # A row under two thirds of the width ends a paragraph: a few long words may make one in mid-paragraph.
    assert sum(any(sentence in p.lower() for p in paragraphs) for sentence in found) == len(found)
    assert sum(sentence[-1] in ".!?" for sentence in found) > 0.95 * len(found)


def test_index_header_says_what_it_holds(prepared):
    header = (prepared / "train.idx").read_bytes()[:26]
    assert header[:9] == b"MMIDIDX\0\0"
    assert struct.unpack("<QBQ", header[9:26]) == (1, 8, report_of(prepared)["train"]["sentences"])

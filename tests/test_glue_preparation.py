"""prepare-glue-data: what it writes, what stock fairseq reads from it, what it reports and what it refuses."""

import json
import os
import signal
import subprocess
import sys
import time
from argparse import Namespace

import pytest
from fairseq.data import Dictionary, data_utils
from fairseq.tasks.sentence_prediction import SentencePredictionConfig, SentencePredictionTask
from glue_data import make_tokenizer, write_rte, write_tsv

from fairseq_tupe.data import glue_preparation
from fairseq_tupe.data.glue_tasks import GLUE_TASKS
from fairseq_tupe.data.tokenizer import Tokenizer
from fairseq_tupe.errors import TupeError


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory):
    return make_tokenizer(tmp_path_factory.mktemp("glue") / "tokenizer")


def prepare(glue_dir, tokenizer, out, *tasks, drop_bad_rows=False):
    arguments = Namespace(
        glue_dir=str(glue_dir), tasks=list(tasks), tokenizer=str(tokenizer), out=str(out), drop_bad_rows=drop_bad_rows
    )
    assert glue_preparation.run(arguments) == 0


def texts_of(data, name, split, tokenizer):
    """Decoded rows, read by fairseq; every one ends in </s>."""
    dataset = data_utils.load_indexed_dataset(str(data / name / split), Dictionary.load(str(data / name / "dict.txt")))
    rows = [dataset[i].tolist() for i in range(len(dataset))]
    assert all(row[-1] == 2 for row in rows)
    return [Tokenizer.load(tokenizer).decode(row[:-1]) for row in rows]


def test_stock_fairseq_reads_the_result(tmp_path, tokenizer):
    """Texts, their order, the fixed label order (not that of frequencies or of the files), and the task's own offset."""
    header = "index\tsentence1\tsentence2\tgold_label"
    rows = [(0, "Old dog.", "Big cat.", "contradiction"), (1, "A bird", "", "neutral"), (2, "x\ry", "B", "contradiction")]
    write_tsv(tmp_path / "glue" / "MNLI" / "train.tsv", header, rows)
    write_tsv(tmp_path / "glue" / "MNLI" / "dev_matched.tsv", header, [(0, "Red house.", "Tree.", "entailment")])
    prepare(tmp_path / "glue", tokenizer, tmp_path / "out", "mnli")
    data = tmp_path / "out" / "MNLI-bin"
    assert texts_of(data, "input0", "train", tokenizer) == ["old dog.", "a bird", "x y"]
    assert texts_of(data, "input1", "train", tokenizer) == ["big cat.", "", "b"]
    assert (data / "label" / "dict.txt").read_text() == "entailment 0\nneutral 1\ncontradiction 2\n"
    for name in ("input0", "input1", "tokenizer"):
        assert (data / name / "dict.txt").read_bytes() == (tokenizer / "dict.txt").read_bytes()
    config = SentencePredictionConfig(data=str(data), num_classes=3, init_token=0, separator_token=2, no_shuffle=True)
    config.regression_target, config.seed = False, 1
    task = SentencePredictionTask.setup_task(config)
    train, dev = task.load_dataset("train"), task.load_dataset("valid")
    assert [int(train[i]["target"]) for i in range(3)] == [2, 1, 2]
    assert int(dev[0]["target"]) == 0
    first = train[1]["net_input.src_tokens"].tolist()
    assert first == [0, *Tokenizer.load(tokenizer).encode("a bird"), 2, 2, 2]


def test_regression_labels_are_scaled(tmp_path, tokenizer, capsys):
    """The STS benchmark's own files; each sentence, score / 5, and the test set's scores too."""
    row = ("genre", "file", 2012, 1)
    write_tsv(
        tmp_path / "sts" / "sts-train.csv", "", [(*row, "5.000", "A.", "B."), (*row, "3.8", "C.", "D.", "source", "source")]
    )
    write_tsv(tmp_path / "sts" / "sts-test.csv", "", [(*row, "0", "E.", "F.")])
    prepare(tmp_path / "sts", tokenizer, tmp_path / "out", "STS-B")  # the task's own folder
    label = tmp_path / "out" / "STS-B-bin" / "label"
    assert [float(line) for line in (label / "train.label").read_text().splitlines()] == [1.0, 0.76]
    assert [float(line) for line in (label / "test.label").read_text().splitlines()] == [0.0]
    assert sorted(path.name for path in label.iterdir()) == ["test.label", "train.label"]
    assert texts_of(tmp_path / "out" / "STS-B-bin", "input1", "train", tokenizer) == ["b.", "d."]
    printed = capsys.readouterr().out
    assert "STS-B: train set from sts-train.csv: 2 of 2 rows used, -5747 against the official 5749" in printed
    assert f"STS-B: no dev set in {tmp_path / 'sts'}, left out" in printed


QQP_HEADER = "id\tqid1\tqid2\tquestion1\tquestion2\tis_duplicate"
QQP_ROWS = [(0, 1, 2, "Why?", "How?", 1), (1, 3, 4, "A field is missing", 0), (2, 5, 6, "Who?", "What?", 0)]


def test_malformed_qqp_rows_are_dropped_counted_and_listed(tmp_path, tokenizer, capsys):
    path = write_tsv(tmp_path / "QQP" / "train.tsv", QQP_HEADER, QQP_ROWS)
    prepare(tmp_path, tokenizer, tmp_path / "out", "QQP")
    report = json.loads((tmp_path / "out" / "QQP-bin" / "report.json").read_text())["splits"]["train"]
    assert (report["rows_read"], report["rows_used"], report["labels"]) == (3, 2, {"1": 1, "0": 1})
    assert report["dropped"] == [{"file": str(path), "line": 3, "reason": "5 fields, expected 6"}]
    assert f"QQP: dropped: {path}, line 3: 5 fields, expected 6" in capsys.readouterr().err
    assert texts_of(tmp_path / "out" / "QQP-bin", "input0", "train", tokenizer) == ["why?", "who?"]


def test_bad_rows_of_a_dev_set_are_refused_and_the_old_result_stays(tmp_path, tokenizer):
    write_tsv(tmp_path / "QQP" / "train.tsv", QQP_HEADER, QQP_ROWS)
    prepare(tmp_path, tokenizer, tmp_path / "out", "QQP")
    before = {path: path.read_bytes() for path in (tmp_path / "out").rglob("*") if path.is_file()}
    write_tsv(tmp_path / "QQP" / "train.tsv", QQP_HEADER, QQP_ROWS[:1])
    dev = write_tsv(tmp_path / "QQP" / "dev.tsv", QQP_HEADER, QQP_ROWS)
    with pytest.raises(TupeError) as error:
        prepare(tmp_path, tokenizer, tmp_path / "out", "QQP")
    assert str(error.value) == f"{dev}, line 3: 5 fields, expected 6; --drop-bad-rows leaves such rows out of dev and test sets"
    assert {path: path.read_bytes() for path in (tmp_path / "out").rglob("*") if path.is_file()} == before
    prepare(tmp_path, tokenizer, tmp_path / "out", "QQP", drop_bad_rows=True)
    assert texts_of(tmp_path / "out" / "QQP-bin", "input1", "valid", tokenizer) == ["how?", "what?"]
    assert texts_of(tmp_path / "out" / "QQP-bin", "input1", "train", tokenizer) == ["how?"]
    assert os.listdir(tmp_path / "out") == ["QQP-bin"]


def test_empty_lines_hold_no_row(tmp_path, tokenizer):
    """A dev file that ends in empty lines is common; they are listed, not fatal."""
    write_rte(tmp_path / "RTE")
    with open(tmp_path / "RTE" / "dev.tsv", "ab") as file:
        file.write(b"\n\n")
    prepare(tmp_path, tokenizer, tmp_path / "out", "RTE")
    report = json.loads((tmp_path / "out" / "RTE-bin" / "report.json").read_text())["splits"]["valid"]
    assert (report["rows_read"], report["rows_used"]) == (6, 4)
    assert [row["line"] for row in report["dropped"]] == [6, 7]


def test_all_takes_what_is_there_and_names_what_is_not(tmp_path, tokenizer, capsys):
    write_rte(tmp_path / "glue" / "RTE")
    write_tsv(tmp_path / "glue" / "diagnostic" / "diagnostic.tsv", "index\tsentence1\tsentence2", [(0, "A.", "B.")])
    prepare(tmp_path / "glue", tokenizer, tmp_path / "out", "ALL")
    assert sorted(os.listdir(tmp_path / "out")) == ["AX-bin", "RTE-bin"]
    assert (tmp_path / "out" / "AX-bin" / "label" / "dict.txt").read_text() == "entailment 0\nneutral 0\ncontradiction 0\n"
    assert f"WNLI: not in {tmp_path / 'glue'}, left out" in capsys.readouterr().out


def test_old_qnli_is_recognised(tmp_path, tokenizer, capsys):
    count = GLUE_TASKS["QNLI"].other_rows["valid"]
    write_tsv(
        tmp_path / "QNLI" / "dev.tsv", "index\tquestion\tsentence\tlabel", [(i, "A?", "B.", "entailment") for i in range(count)]
    )
    prepare(tmp_path, tokenizer, tmp_path / "out", "QNLI")
    assert f"{count} of {count} rows used, as many as the first QNLI, which GLUE replaced" in capsys.readouterr().out


def test_refusals(tmp_path, tokenizer):
    write_rte(tmp_path / "glue" / "RTE")
    for glue_dir, tok, task, message in (
        (tmp_path / "nowhere", tokenizer, "RTE", f"{tmp_path / 'nowhere'} is not a folder, expected one with GLUE files"),
        (tmp_path / "glue", tokenizer, "SNLI", "unknown GLUE task 'SNLI', expected one of CoLA, SST-2"),
        (
            tmp_path / "glue",
            tokenizer,
            "CoLA",
            f"no files of CoLA in {tmp_path / 'glue'}: looked for {{train, dev, validation, test}}",
        ),
        (tmp_path / "glue" / "RTE", tokenizer, "ALL", f"no GLUE task in {tmp_path / 'glue' / 'RTE'}"),
        (tmp_path / "glue", tmp_path, "RTE", "no tokenizer found; looked at"),
    ):
        with pytest.raises(TupeError) as error:
            prepare(glue_dir, tok, tmp_path / "out", task)
        assert str(error.value).startswith(message)
        assert "\n" not in str(error.value)
    assert not (tmp_path / "out").exists()
    (tmp_path / "file").touch()
    with pytest.raises(TupeError, match=r"RTE: .*File exists"):
        prepare(tmp_path / "glue", tokenizer, tmp_path / "file", "RTE")


def test_a_killed_preparation_leaves_the_old_result(tmp_path, tokenizer, repo):
    """Killed in the middle of a large file: the old data stay, and the next run removes what was left."""
    out = tmp_path / "out"
    write_rte(tmp_path / "RTE")
    prepare(tmp_path, tokenizer, out, "RTE")
    before = (out / "RTE-bin" / "input0" / "train.bin").read_bytes()
    write_rte(tmp_path / "RTE", train=120_000)
    command = [sys.executable, "-m", "fairseq_tupe", "prepare-glue-data", "--tokenizer", tokenizer, "--out", out, tmp_path, "RTE"]
    process = subprocess.Popen([str(word) for word in command], env={**os.environ, "PYTHONPATH": str(repo)})
    deadline = time.time() + 60
    while not list(out.glob(".RTE-bin.partial-*/input0/train.bin")) and process.poll() is None and time.time() < deadline:
        time.sleep(0.02)
    process.send_signal(signal.SIGKILL)
    assert process.wait() == -signal.SIGKILL, "the preparation ended before it could be killed"
    assert len(list(out.glob(".RTE-bin.partial-*"))) == 1
    assert (out / "RTE-bin" / "input0" / "train.bin").read_bytes() == before
    write_rte(tmp_path / "RTE", train=2)
    prepare(tmp_path, tokenizer, out, "RTE")
    assert os.listdir(out) == ["RTE-bin"]


def test_real_rows(shared, tmp_path, tokenizer):
    """Whole real tasks: every row of the file is in the data, and the report says official counts are met."""
    glue = shared / "data" / "glue"
    prepare(glue, tokenizer, tmp_path, "WNLI", "MRPC", "CoLA")
    for task, splits in (("WNLI", (635, 71, 146)), ("MRPC", (3668, 408, 1725)), ("CoLA", (8551, 1043, 1063))):
        report = json.loads((tmp_path / f"{task}-bin" / "report.json").read_text())["splits"]
        assert tuple(report[split]["rows_used"] for split in ("train", "valid", "test")) == splits
        assert all(part["rows_used"] == part["rows_read"] == part["rows_official"] for part in report.values())
    first = texts_of(tmp_path / "MRPC-bin", "input1", "valid", tokenizer)[0]
    assert first == '"the foodservice pie business does not fit our long-term growth strategy.'

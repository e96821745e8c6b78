"""Every layout of a GLUE file, made from the format's definition, and: rows in = rows used + rows listed."""

import json

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fairseq_tupe.data.glue_reading import BadRow, Row, find_folder, find_source, read_rows
from fairseq_tupe.data.glue_tasks import GLUE_TASKS, find_task
from fairseq_tupe.errors import TupeError

MNLI_START = "index\tpromptID\tpairID\tgenre\tsentence1_binary_parse\tsentence2_binary_parse\tsentence1_parse\tsentence2_parse"
STS_HEADER = "index\tgenre\tfilename\tyear\told_index\tsource1\tsource2\tsentence1\tsentence2"

# task, split, file, content, rows (line, texts, label)
LAYOUTS = [
    ("CoLA", "train", "train.tsv", "gj04\t1\t\tBirds sing.\nks08\t0\t*\tSing birds the.\n",
     [(1, ("Birds sing.",), "1"), (2, ("Sing birds the.",), "0")]),
    ("CoLA", "valid", "dev.tsv", "gj04\t1\t\tA last line without an end", [(1, ("A last line without an end",), "1")]),
    ("CoLA", "train", "train.tsv", "sentence\tlabel\tidx\nBirds sing.\t1\t0\n", [(2, ("Birds sing.",), "1")]),
    ("CoLA", "test", "test.tsv", "index\tsentence\n0\tBill whistled.\n", [(2, ("Bill whistled.",), None)]),
    ("SST-2", "train", "train.tsv", "sentence\tlabel\ngood fun \t1\n", [(2, ("good fun ",), "1")]),
    ("SST-2", "test", "test.tsv", "index\tsentence\n0\tbad \n", [(2, ("bad ",), None)]),
    ("MRPC", "train", "train.tsv", "\ufeffQuality\t#1 ID\t#2 ID\t#1 String\t#2 String\n1\t10\t11\t\"He said\t\"No.\n",
     [(2, ('"He said', '"No.'), "1")]),
    ("MRPC", "valid", "dev.tsv", "Quality\t#1 String\t#2 String\n0\tOne.\tTwo.\n", [(2, ("One.", "Two."), "0")]),
    ("MRPC", "test", "test.tsv", "index\t#1 ID\t#2 ID\t#1 String\t#2 String\n0\t1\t2\tOne.\tTwo.\n",
     [(2, ("One.", "Two."), None)]),
    ("STS-B", "train", "train.tsv", STS_HEADER + "\tscore\n0\tg\tf\t2012\t1\tn\tn\tA plane.\tAn air plane.\t5.000\n",
     [(2, ("A plane.", "An air plane."), "5.000")]),
    ("STS-B", "test", "test.tsv", STS_HEADER + "\n0\tg\tf\t2012\t1\tn\tn\tA.\tB.\n", [(2, ("A.", "B."), None)]),
    ("STS-B", "valid", "sts-dev.csv", "g\tf\t2012\t0001\t3.800\tA, b.\tC.\nh\tf\t2016\t12\t0\tD.\tE.\tsource\tsource\n",
     [(1, ("A, b.", "C."), "3.800"), (2, ("D.", "E."), "0")]),
    ("STS-B", "test", "sts-test.csv", "g\tf\t2012\t0001\t2.5\tA.\tB.\n", [(1, ("A.", "B."), "2.5")]),
    ("QQP", "train", "train.tsv", "id\tqid1\tqid2\tquestion1\tquestion2\tis_duplicate\n5\t1\t2\tWhy?\tHow?\t0\n",
     [(2, ("Why?", "How?"), "0")]),
    ("QQP", "test", "test.tsv", "id\tquestion1\tquestion2\n0\tWhy?\tHow?\n", [(2, ("Why?", "How?"), None)]),
    ("MNLI", "train", "train.tsv", MNLI_START + "\tsentence1\tsentence2\tlabel1\tgold_label\n"
     "0\t1\t1n\tfiction\t(\t(\t(\t(\tIt rains.\tIt is wet.\tcontradiction\tneutral\n",
     [(2, ("It rains.", "It is wet."), "neutral")]),
    ("MNLI", "valid", "dev_matched.tsv", MNLI_START + "\tsentence1\tsentence2"
     "\tlabel1\tlabel2\tlabel3\tlabel4\tlabel5\tgold_label\n"
     "0\t1\t1n\tfiction\t(\t(\t(\t(\tA.\tB.\tneutral\tneutral\tneutral\tneutral\tneutral\tentailment\n",
     [(2, ("A.", "B."), "entailment")]),
    ("MNLI", "valid1", "dev_mismatched.tsv", "index\tsentence1\tsentence2\tgold_label\n0\tA.\tB.\tcontradiction\n",
     [(2, ("A.", "B."), "contradiction")]),
    ("MNLI", "test1", "test_mismatched.tsv", MNLI_START + "\tsentence1\tsentence2\n0\t1\t1n\tf\t(\t(\t(\t(\tA.\tB.\n",
     [(2, ("A.", "B."), None)]),
    ("QNLI", "train", "train.tsv", "index\tquestion\tsentence\tlabel\n0\tWho?\tHe.\tnot_entailment\n",
     [(2, ("Who?", "He."), "not_entailment")]),
    ("RTE", "valid", "dev.tsv", "index\tsentence1\tsentence2\tlabel\r\n0\tA.\tB.\tentailment\r\n",
     [(2, ("A.", "B."), "entailment")]),
    ("WNLI", "train", "train.tsv", "index\tsentence1\tsentence2\tlabel\n0\tA.\tB.\t1\n", [(2, ("A.", "B."), "1")]),
    ("AX", "test", "diagnostic.tsv", "index\tsentence1\tsentence2\n0\tA.\tB.", [(2, ("A.", "B."), None)]),
]  # fmt: skip


def read(folder, task_name, split):
    task = GLUE_TASKS[task_name]
    return list(read_rows(find_source(folder, task, split), task, split))


def write(folder, name, content):
    folder.mkdir(parents=True, exist_ok=True)
    (folder / name).write_bytes(content.encode("utf-8") if isinstance(content, str) else content)


@pytest.mark.parametrize(("task", "split", "name", "content", "expected"), LAYOUTS)
def test_layouts(tmp_path, task, split, name, content, expected):
    write(tmp_path, name, content)
    assert read(tmp_path, task, split) == [Row(*row) for row in expected]


# How `datasets` exports the ten configurations: texts, label of the first row, and what it stands for.
EXPORTS = [
    ("cola", "CoLA", {"sentence": "A."}, 1, "1"),
    ("sst2", "SST-2", {"sentence": "A."}, 0, "0"),
    ("mrpc", "MRPC", {"sentence1": "A.", "sentence2": "B."}, 1, "1"),
    ("stsb", "STS-B", {"sentence1": "A.", "sentence2": "B."}, 3.8, "3.8"),
    ("qqp", "QQP", {"question1": "A.", "question2": "B."}, 0, "0"),
    ("mnli", "MNLI", {"premise": "A.", "hypothesis": "B."}, 2, "contradiction"),
    ("qnli", "QNLI", {"question": "A.", "sentence": "B."}, 1, "not_entailment"),
    ("rte", "RTE", {"sentence1": "A.", "sentence2": "B."}, 0, "entailment"),
    ("wnli", "WNLI", {"sentence1": "A.", "sentence2": "B."}, 1, "1"),
]


def export_names(task):
    return ("validation_matched", "test_matched") if task == "MNLI" else ("validation", "test")


@pytest.mark.parametrize(("folder", "task", "texts", "label", "meaning"), EXPORTS)
@pytest.mark.parametrize("kind", ["jsonl", "parquet"])
def test_exports_of_datasets(tmp_path, kind, folder, task, texts, label, meaning):
    dev, test = export_names(task)
    dev_rows = [{**texts, "label": label, "idx": 0}, {**texts, "label": label, "idx": 1}]
    test_rows = [{**texts, "label": -1.0 if task == "STS-B" else -1, "idx": 0}]
    target = tmp_path / folder
    if kind == "parquet":
        pyarrow = pytest.importorskip("pyarrow")
        target.mkdir()
        from pyarrow import parquet

        parquet.write_table(pyarrow.Table.from_pylist(dev_rows[:1]), target / f"{dev}-00000-of-00002.parquet")
        parquet.write_table(pyarrow.Table.from_pylist(dev_rows[1:]), target / f"{dev}-00001-of-00002.parquet")
        parquet.write_table(pyarrow.Table.from_pylist(test_rows), target / f"{test}.parquet")
    else:
        write(target, f"{dev}.jsonl", "".join(json.dumps(row) + "\n" for row in dev_rows))
        write(target, f"{test}.json", json.dumps(test_rows[0], ensure_ascii=False))
    assert find_folder(tmp_path, GLUE_TASKS[task], alone=False).name.lower() == folder
    found = read(target, task, "valid")
    assert [(row.texts, row.label) for row in found] == [(tuple(texts.values()), meaning)] * 2
    assert [row.label for row in read(target, task, "test")] == [None]


def test_parquet_needs_pyarrow(tmp_path):
    try:
        import pyarrow  # noqa: F401
    except ImportError:
        write(tmp_path, "test.parquet", b"PAR1")
        with pytest.raises(TupeError, match=r"test\.parquet: reading parquet needs pyarrow"):
            read(tmp_path, "RTE", "test")
    else:
        write(tmp_path, "test.parquet", b"not parquet")
        with pytest.raises(TupeError, match=r"test\.parquet is not a readable parquet file"):
            read(tmp_path, "RTE", "test")


def test_microsofts_mrpc_files_are_split_by_dev_ids(tmp_path):
    header = "\ufeffQuality\t#1 ID\t#2 ID\t#1 String\t#2 String\r\n"
    write(tmp_path, "msr_paraphrase_train.txt", header + "1\t1\t2\tA.\tB.\r\n0\t3\t4\tC.\tD.\r\n1\t2\t1\tE.\tF.\r\n")
    write(tmp_path, "msr_paraphrase_test.txt", header + "1\t5\t6\tG.\tH.\r\n")
    with pytest.raises(TupeError, match=r"msr_paraphrase_train\.txt needs dev_ids\.tsv or mrpc_dev_ids\.tsv beside it"):
        read(tmp_path, "MRPC", "train")
    write(tmp_path, "mrpc_dev_ids.tsv", "3\t4\n\n")
    assert read(tmp_path, "MRPC", "train") == [Row(2, ("A.", "B."), "1"), Row(4, ("E.", "F."), "1")]
    assert read(tmp_path, "MRPC", "valid") == [Row(3, ("C.", "D."), "0")]
    assert read(tmp_path, "MRPC", "test") == [Row(2, ("G.", "H."), "1")]


def test_fields_keep_everything_but_tab_and_line_ends(tmp_path):
    text = ' "a\rb\u2028c\u0085d\u00a0e\x0b\x0c\x1c \U0001f600\u2019" '
    write(tmp_path, "dev.tsv", f"sentence\tlabel\n{text}\t1\r\n\t0\nlast\t1")
    assert read(tmp_path, "SST-2", "valid") == [Row(2, (text,), "1"), Row(3, ("",), "0"), Row(4, ("last",), "1")]


@pytest.mark.parametrize(
    ("task", "name", "line", "reason"),
    [
        ("RTE", "dev.tsv", "0\tA.\tB.\tmaybe", "label 'maybe', expected one of entailment, not_entailment"),
        ("RTE", "dev.tsv", "0\tA.\tB.\t", "label '', expected one of entailment, not_entailment"),
        ("RTE", "dev.tsv", "0\tA.\tB.", "3 fields, expected 4"),
        ("RTE", "dev.tsv", "", "an empty line"),
        ("RTE", "dev.tsv", b"0\tcaf\xe9 \tB.\tentailment", "not UTF-8 (invalid continuation byte at byte 5 of the line)"),
        ("STS-B", "sts-dev.csv", "g\tf\t2012\t1\tfive\tA.\tB.", "label 'five' is not a number, expected 0 to 5"),
        ("STS-B", "sts-dev.csv", "g\tf\t2012\t1\tnan\tA.\tB.", "label 'nan' is not a number, expected 0 to 5"),
        ("STS-B", "sts-dev.csv", "g\tf\t2012\t1\t1_0\tA.\tB.", "label '1_0' is not a number, expected 0 to 5"),
        ("STS-B", "sts-dev.csv", "g\tf\t2012\t1\t5.01\tA.\tB.", "label 5.01 is out of range, expected 0 to 5"),
        ("STS-B", "sts-dev.csv", "g\tf\t2012\t1\t2\tA.", "6 fields, expected 7 or 9"),
    ],
)
def test_bad_rows_name_file_line_and_reason(tmp_path, task, name, line, reason):
    first = b"index\tsentence1\tsentence2\tlabel\n" if task == "RTE" else b"g\tf\t2012\t1\t1.5\tA.\tB.\n"
    write(tmp_path, name, first + (line.encode() if isinstance(line, str) else line) + b"\n")
    bad = read(tmp_path, task, "valid")[-1]
    assert str(bad) == f"{tmp_path / name}, line 2: {reason}"


@pytest.mark.parametrize(
    ("content", "reason"),
    [
        ('{"sentence": "A."}', "no label, expected column 'label'"),
        ('{"sentence": "A.", "label": -1}', "no label, expected column 'label'"),
        ('{"sentence": null, "label": 1}', "column 'sentence' is None, expected text"),
        ('{"sentence": "\\ud800", "label": 1}', "column 'sentence' holds half of a surrogate pair, expected text"),
        ('{"text": "A.", "label": 1}', "columns text, label, expected 'sentence', 'label'"),
        ('{"sentence": "A.", "label": 2}', "label '2', expected one of 0, 1"),
        ('["A.", 1]', "a JSON list, expected an object a line"),
        ('{"sentence"', "not a JSON object in UTF-8 ("),
    ],
)
def test_bad_json_rows(tmp_path, content, reason):
    write(tmp_path, "validation.jsonl", content + "\n")
    (bad,) = read(tmp_path, "SST-2", "valid")
    assert str(bad).startswith(f"{tmp_path / 'validation.jsonl'}, line 1: {reason}")


@pytest.mark.parametrize(
    ("task", "name", "content", "message"),
    [
        ("SST-2", "train.tsv", "text\tlabel\nA.\t1\n", "the header is text, label; expected columns 'sentence', 'label' of"),
        ("MRPC", "train.tsv", "1\t2\t3\tA.\tB.\n", "'#1 String' or 'sentence1', '#2 String' or 'sentence2', 'Quality'"),
        ("CoLA", "train.tsv", "gj04\t1\tA.\n", "line 1: 3 fields, expected 4 (the CoLA layout without a header)"),
        ("CoLA", "train.tsv", "", "is empty, expected rows of CoLA"),
        ("CoLA", "train.tsv", "\ufeffx".encode("utf-16-le"), "line 1: not UTF-8"),
    ],
)  # fmt: skip
def test_unusable_files(tmp_path, task, name, content, message):
    write(tmp_path, name, content)
    with pytest.raises(TupeError) as error:
        read(tmp_path, task, "train")
    assert str(tmp_path / name) in str(error.value)
    assert message in str(error.value)
    assert "\n" not in str(error.value)


def test_unknown_task_lists_the_valid_ones():
    assert find_task("sts_b") is find_task("STSB") is GLUE_TASKS["STS-B"]
    with pytest.raises(TupeError, match="unknown GLUE task 'SNLI', expected one of CoLA, SST-2, MRPC, STS-B, QQP, MNLI"):
        find_task("SNLI")


FIELD = st.text(
    alphabet=st.one_of(st.sampled_from("ab \"'\t\r\u2028\u2029\x85\xa0\x0b\x1c\\\U0001f600"), st.characters(codec="utf-8"))
)
LABEL = st.one_of(st.sampled_from(["0", "1", "0\r"]), FIELD)


@settings(max_examples=300, deadline=None)
@given(rows=st.lists(st.tuples(FIELD, LABEL)), line_end=st.sampled_from(["\n", "\r\n"]), ended=st.booleans())
def test_every_row_is_used_or_listed(tmp_path_factory, rows, line_end, ended):
    """Whatever the fields hold, each row comes back once, in order, and a well-formed one unchanged."""
    rows = [tuple(field.replace("\n", " ") for field in row) for row in rows]
    content = "sentence\tlabel" + line_end + line_end.join("\t".join(row) for row in rows) + (line_end if ended and rows else "")
    folder = tmp_path_factory.mktemp("random")
    (folder / "train.tsv").write_bytes(content.encode("utf-8"))
    found = read(folder, "SST-2", "train")
    assert [row.line for row in found] == list(range(2, len(rows) + 2))
    for (text, label), row in zip(rows, found, strict=True):
        has_end = ended or row is not found[-1]
        if line_end == "\n" and has_end and label.endswith("\r"):
            label = label[:-1]  # the same bytes as a CRLF row
        fields = f"{text}\t{label}".split("\t")
        if len(fields) == 2 and label in ("0", "1"):
            assert row == Row(row.line, (text,), label)
        else:
            assert isinstance(row, BadRow)
            expected = f"{len(fields)} fields, expected 2" if len(fields) != 2 else "expected one of 0, 1"
            assert expected in row.reason


# folder, split, file in ../shared/data/glue, the task's own name for it, rows
REAL = [
    ("CoLA", "train", "CoLA/train.tsv", "train.tsv", 8551), ("CoLA", "valid", "CoLA/dev.tsv", "dev.tsv", 1043),
    ("CoLA", "test", "CoLA/test.tsv", "test.tsv", 1063), ("SST-2", "valid", "SST-2/dev.tsv", "dev.tsv", 872),
    ("MRPC", "train", "MRPC/train.tsv", "train.tsv", 3668), ("MRPC", "valid", "MRPC/dev.tsv", "dev.tsv", 408),
    ("MRPC", "test", "MRPC/test.tsv", "test.tsv", 1725), ("STS-B", "train", "STS-B/train.tsv", "train.tsv", 5749),
    ("STS-B", "valid", "STS-B/dev.tsv", "dev.tsv", 1500), ("STS-B", "test", "STS-B/test.tsv", "test.tsv", 1379),
    ("QNLI", "valid", "QNLI/dev.tsv", "dev.tsv", 5463), ("QNLI", "train", "QNLI/k-shot/16-13/train.tsv", "train.tsv", 32),
    ("RTE", "train", "RTE/train.tsv", "train.tsv", 2490), ("RTE", "test", "RTE/test.tsv", "test.tsv", 3000),
    ("WNLI", "train", "WNLI/train.tsv", "train.tsv", 635), ("AX", "test", "AX/diagnostic.tsv", "diagnostic.tsv", 1104),
    ("MNLI", "valid", "MNLI/dev_matched.rebuilt.tsv", "dev_matched.tsv", 9815),
    ("MNLI", "train", "MNLI/k-shot/16-13/train.tsv", "train.tsv", 48),
    ("QQP", "train", "QQP/k-shot/16-13/train.tsv", "train.tsv", 32),
]  # fmt: skip
REAL_LABELS = {  # counts stated in the data's own README
    ("CoLA", "train"): {"1": 6023, "0": 2528}, ("MRPC", "valid"): {"1": 279, "0": 129},
    ("QNLI", "valid"): {"entailment": 2702, "not_entailment": 2761}, ("WNLI", "train"): {"1": 312, "0": 323},
    ("RTE", "train"): {"entailment": 1249, "not_entailment": 1241},
    ("MNLI", "valid"): {"entailment": 3479, "neutral": 3123, "contradiction": 3213},
}  # fmt: skip


@pytest.mark.parametrize(("task", "split", "source", "name", "count"), REAL)
def test_real_files(shared, tmp_path, task, split, source, name, count):
    (tmp_path / name).symlink_to(shared / "data" / "glue" / source)
    rows = read(tmp_path, task, split)
    assert [row for row in rows if isinstance(row, BadRow)] == []
    assert len(rows) == count
    if "k-shot" not in source:
        assert GLUE_TASKS[task].rows[split] == count
    if (task, split) in REAL_LABELS:
        labels = [row.label for row in rows]
        assert {label: labels.count(label) for label in set(labels)} == REAL_LABELS[task, split]

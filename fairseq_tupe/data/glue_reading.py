"""Readers of GLUE files: every row comes out once, as a ``Row`` or as a ``BadRow`` with file, line and reason."""

import json
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from fairseq_tupe.data.glue_tasks import GlueTask
from fairseq_tupe.errors import TupeError

_BOM = b"\xef\xbb\xbf"
_NUMBER = re.compile(r"[+-]?(\d+\.?\d*|\.\d+)([eE][+-]?\d+)?", re.ASCII)
_SURROGATE = re.compile("[\ud800-\udfff]")  # JSON escapes can spell it, UTF-8 can't
_MSR_TRAIN, _MSR_TEST = "msr_paraphrase_train.txt", "msr_paraphrase_test.txt"
_MSR_DEV_IDS = ("dev_ids.tsv", "mrpc_dev_ids.tsv")


@dataclass(frozen=True)
class Row:
    """A usable row: the raw texts, and the label (a class name, or the score as written), None without one."""

    line: int  # from 1, the header included
    texts: tuple[str, ...]
    label: str | None


@dataclass(frozen=True)
class BadRow:
    """A row that can't be used. ``kind`` is "fields", "label", "text" or "blank" (a line without a single byte)."""

    file: str
    line: int
    reason: str
    kind: str

    def __str__(self) -> str:
        return f"{self.file}, line {self.line}: {self.reason}"


@dataclass(frozen=True)
class Source:
    """Files of one split and how to read them; ``dev_ids`` splits the paraphrase corpus as Microsoft ships it."""

    paths: tuple[Path, ...]
    kind: str  # "tsv", "jsonl" or "parquet"
    dev_ids: Path | None = None
    keep_dev: bool = False

    def __str__(self) -> str:
        return ", ".join(path.name for path in self.paths)


@dataclass(frozen=True)
class _Columns:
    fields: tuple[int, ...]
    texts: tuple[int, ...]
    label: int | None


def find_folder(glue_dir: Path, task: GlueTask, alone: bool) -> Path | None:
    """Folder that holds the task's files: a known name inside ``glue_dir``, or ``glue_dir`` itself where ``alone``."""
    candidates = [glue_dir / name for name in task.folders]
    if alone:
        candidates.append(glue_dir)
    return next((folder for folder in candidates if any(find_source(folder, task, s) for s in task.files)), None)


def find_source(folder: Path, task: GlueTask, split: str) -> Source | None:
    """Files of one split inside ``folder``, None where there are none."""
    for stem in task.files[split]:
        for ending in task.endings:
            if (folder / f"{stem}{ending}").is_file():
                return Source((folder / f"{stem}{ending}",), "tsv")
        for kind, pattern in (
            ("parquet", f"{stem}.parquet"),
            ("parquet", f"{stem}-*-of-*.parquet"),
            ("jsonl", f"{stem}.jsonl"),
            ("jsonl", f"{stem}.json"),
        ):
            paths = tuple(sorted(folder.glob(pattern)))
            if paths:
                return Source(paths, kind)
    return _find_paraphrase_corpus(folder, split) if task.name == "MRPC" else None


def _find_paraphrase_corpus(folder: Path, split: str) -> Source | None:
    name = _MSR_TEST if split == "test" else _MSR_TRAIN
    if not (folder / name).is_file():
        return None
    if split == "test":
        return Source((folder / name,), "tsv")
    for ids in _MSR_DEV_IDS:
        if (folder / ids).is_file():
            return Source((folder / name,), "tsv", dev_ids=folder / ids, keep_dev=split == "valid")
    raise TupeError(f"{folder / name} needs {' or '.join(_MSR_DEV_IDS)} beside it, which says which rows are the dev set")


def read_rows(source: Source, task: GlueTask, split: str) -> Iterator[Row | BadRow]:
    """All rows of a split in their order. A missing label is allowed in a test set only. TupeError: unusable file."""
    labelled = not split.startswith("test")
    if source.kind == "tsv":
        yield from _read_tsv(source, task, labelled)
        return
    for path in source.paths:
        yield from (_read_jsonl if source.kind == "jsonl" else _read_parquet)(path, task, labelled)


def _lines(path: Path) -> Iterator[tuple[int, bytes]]:
    """Numbered rows without their ending; only LF and CRLF end a row, and a binary file splits at LF alone."""
    with open(path, "rb") as handle:
        for number, line in enumerate(handle, 1):
            if number == 1:
                line = line.removeprefix(_BOM)
            yield number, line[:-2] if line.endswith(b"\r\n") else line.removesuffix(b"\n")


def _read_tsv(source: Source, task: GlueTask, labelled: bool) -> Iterator[Row | BadRow]:
    path = source.paths[0]
    rows = _lines(path)
    first = next(rows, None)
    if first is None:
        raise TupeError(f"{path} is empty, expected rows of {task.name}")
    columns, is_header = _find_columns(path, first[1], task, labelled)
    dev_ids = _read_dev_ids(source.dev_ids) if source.dev_ids else None
    if not is_header:
        yield _parse(path, *first, task, columns, labelled)
    for number, line in rows:
        if dev_ids is not None and (tuple(line.split(b"\t")[1:3]) in dev_ids) != source.keep_dev:
            continue  # the other part of the corpus reads this row
        yield _parse(path, number, line, task, columns, labelled)


def _read_dev_ids(path: Path) -> set[tuple[bytes, ...]]:
    return {tuple(line.split(b"\t")[:2]) for _, line in _lines(path) if line}


def _find_columns(path: Path, line: bytes, task: GlueTask, labelled: bool) -> tuple[_Columns, bool]:
    """Columns of a file from its first line, and whether that line is a header."""
    try:
        names = line.decode("utf-8").split("\t")
    except UnicodeDecodeError as error:
        raise TupeError(f"{path}, line 1: not UTF-8 ({error.reason} at byte {error.start})") from None
    texts = [next((names.index(name) for name in group if name in names), None) for group in task.texts]
    label = next((names.index(name) for name in task.label if name in names), None)
    layout = task.headerless
    if layout and path.stem in layout.stems and (None in texts or (labelled and label is None)):
        if len(names) not in layout.fields:
            raise TupeError(
                f"{path}, line 1: {len(names)} fields, expected {_numbers(layout.fields)} (the {task.name} layout "
                f"without a header) or a header with {_wanted(task, labelled)}"
            )
        return _Columns(layout.fields, layout.texts, layout.label), False
    if None in texts or (labelled and label is None):
        found = ", ".join(names)
        found = found if len(found) <= 200 else found[:200] + "..."
        raise TupeError(f"{path}, line 1: the header is {found}; expected columns {_wanted(task, labelled)} of {task.name}")
    return _Columns((len(names),), tuple(texts), label), True


def _wanted(task: GlueTask, labelled: bool) -> str:
    groups = task.texts + ((task.label,) if labelled else ())
    return ", ".join(" or ".join(repr(name) for name in group) for group in groups)


def _numbers(numbers: tuple[int, ...]) -> str:
    return " or ".join(str(number) for number in numbers)


def _parse(path: Path, number: int, line: bytes, task: GlueTask, columns: _Columns, labelled: bool):
    if not line:
        return BadRow(str(path), number, "an empty line", "blank")
    try:
        fields = line.decode("utf-8").split("\t")
    except UnicodeDecodeError as error:
        return BadRow(str(path), number, f"not UTF-8 ({error.reason} at byte {error.start} of the line)", "text")
    if len(fields) not in columns.fields:
        return BadRow(str(path), number, f"{len(fields)} fields, expected {_numbers(columns.fields)}", "fields")
    label = None
    if columns.label is not None:
        label, problem = _check_label(fields[columns.label], task)
        if problem:
            return BadRow(str(path), number, problem, "label")
    return Row(number, tuple(fields[column] for column in columns.texts), label)


def _check_label(found: str, task: GlueTask) -> tuple[str | None, str]:
    """The label as it is stored, or what is wrong with it."""
    if task.label_range is None:
        if found in task.labels:
            return found, ""
        return None, f"label {_short(found)}, expected one of {', '.join(task.labels)}"
    low, high = task.label_range
    if not _NUMBER.fullmatch(found):
        return None, f"label {_short(found)} is not a number, expected {low:g} to {high:g}"
    if not low <= float(found) <= high:
        return None, f"label {found} is out of range, expected {low:g} to {high:g}"
    return found, ""


def _short(text: str) -> str:
    return repr(text if len(text) <= 40 else text[:40] + "...")


def _read_jsonl(path: Path, task: GlueTask, labelled: bool) -> Iterator[Row | BadRow]:
    """One JSON object a line, as ``Dataset.to_json`` writes it."""
    for number, line in _lines(path):
        if not line:
            yield BadRow(str(path), number, "an empty line", "blank")
            continue
        try:
            record = json.loads(line.decode("utf-8"))
        except ValueError as error:  # bad UTF-8 and bad JSON alike
            yield BadRow(str(path), number, f"not a JSON object in UTF-8 ({error})".replace("\n", " "), "text")
            continue
        if not isinstance(record, dict):
            yield BadRow(str(path), number, f"a JSON {type(record).__name__}, expected an object a line", "text")
            continue
        yield _parse_record(path, number, record, task, labelled)


def _read_parquet(path: Path, task: GlueTask, labelled: bool) -> Iterator[Row | BadRow]:
    try:
        import pyarrow.parquet as parquet
    except ImportError:
        raise TupeError(
            f"{path}: reading parquet needs pyarrow (pip install pyarrow); TSV and jsonl files need nothing"
        ) from None
    try:
        table = parquet.ParquetFile(path)
    except Exception as error:  # pyarrow raises its own types, OSError or ValueError
        raise TupeError(f"{path} is not a readable parquet file ({error})".replace("\n", " ")) from None
    with table:
        number = 0
        for batch in table.iter_batches():
            for record in batch.to_pylist():
                number += 1
                yield _parse_record(path, number, record, task, labelled)


def _parse_record(path: Path, number: int, record: dict, task: GlueTask, labelled: bool) -> Row | BadRow:
    """A row of the ``datasets`` library: labels are class numbers (or scores), -1 where there is none."""
    texts = []
    for group in task.texts:
        name = next((name for name in group if name in record), None)
        if name is None:
            return BadRow(str(path), number, f"columns {', '.join(record)}, expected {_wanted(task, labelled)}", "fields")
        if not isinstance(record[name], str):
            return BadRow(str(path), number, f"column {name!r} is {record[name]!r}, expected text", "text")
        if _SURROGATE.search(record[name]):
            return BadRow(str(path), number, f"column {name!r} holds half of a surrogate pair, expected text", "text")
        texts.append(record[name])
    label = next((record[name] for name in task.label if name in record), None)
    if label is None or (isinstance(label, (int, float)) and label == -1):
        if labelled:
            return BadRow(str(path), number, f"no label, expected column {_wanted(task, True).split(', ')[-1]}", "label")
        return Row(number, tuple(texts), None)
    if isinstance(label, int) and not task.regression and 0 <= label < len(task.labels):
        label = task.labels[label]
    stored, problem = _check_label(str(label), task)
    return BadRow(str(path), number, problem, "label") if problem else Row(number, tuple(texts), stored)

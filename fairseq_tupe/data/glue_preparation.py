"""Command ``prepare-glue-data``: GLUE files, through the pretraining tokenizer, into fairseq's binary format."""

import argparse
import itertools
import json
import os
import shutil
import sys
import time
from collections import Counter
from pathlib import Path

import numpy as np

from fairseq_tupe.data.binarized import DatasetWriter
from fairseq_tupe.data.glue_reading import BadRow, Source, find_folder, find_source, read_rows
from fairseq_tupe.data.glue_tasks import GLUE_TASKS, INPUT_NAMES, GlueTask, find_task
from fairseq_tupe.data.tokenizer import DICTIONARY, MANIFEST, MODEL, Tokenizer
from fairseq_tupe.errors import TupeError

_EOS, _UNK, _SPECIALS = 2, 3, 4  # fairseq's <s>, <pad>, </s>, <unk> come before the first line of a dictionary
_BLOCK = 1000  # rows encoded at a time
_SHOWN_ROWS = 50  # bad rows printed a split; the report lists all
_KINDS = {"valid": "dev", "valid1": "mismatched dev", "test1": "mismatched test"}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Arguments of ``prepare-glue-data``."""
    parser.add_argument("glue_dir", metavar="GLUE_DIR", help="folder with a folder a task, or the one task's own folder")
    parser.add_argument("tasks", metavar="TASK", nargs="+", help=f"ALL or any of {', '.join(GLUE_TASKS)}")
    parser.add_argument("--tokenizer", required=True, metavar="DIR", help="tokenizer folder, or data prepared with it")
    parser.add_argument("--out", required=True, metavar="DIR", help="each task goes to DIR/TASK-bin")
    parser.add_argument(
        "--drop-bad-rows",
        action="store_true",
        help="drop unusable rows of dev and test sets too, instead of refusing them",
    )


def run(args: argparse.Namespace) -> int:
    """Prepare the tasks; a task that fails leaves what was there before."""
    glue_dir, out = Path(args.glue_dir), Path(args.out)
    if not glue_dir.is_dir():
        raise TupeError(f"{glue_dir} is not a folder, expected one with GLUE files")
    every = any(name.lower() == "all" for name in args.tasks)
    names = list(GLUE_TASKS) if every else list(dict.fromkeys(find_task(name).name for name in args.tasks))
    tasks = [GLUE_TASKS[name] for name in names]
    found = []
    for task in tasks:
        folder = find_folder(glue_dir, task, alone=len(tasks) == 1)
        if folder is not None:
            found.append((task, folder))
        elif every:
            print(f"{task.name}: not in {glue_dir}, left out")
        else:
            raise TupeError(f"no files of {task.name} in {glue_dir}: looked for {_looked_for(task)}")
    if not found:
        raise TupeError(f"no GLUE task in {glue_dir}: looked for folders {', '.join(GLUE_TASKS)}")
    tokenizer = Tokenizer.find(Path(args.tokenizer))
    for task, folder in found:
        prepare_task(task, folder, out, tokenizer, args.drop_bad_rows)
    return 0


def _looked_for(task: GlueTask) -> str:
    stems = [stem for stems in task.files.values() for stem in stems]
    endings = [*task.endings, ".jsonl", ".parquet"]
    return f"{{{', '.join(stems)}}}.{{{', '.join(e[1:] for e in endings)}}} there and in {{{', '.join(task.folders)}}}/"


def prepare_task(task: GlueTask, folder: Path, out: Path, tokenizer: Tokenizer, drop_bad_rows: bool = False) -> dict:
    """Write ``out/TASK-bin`` from the files in ``folder`` and return its report.

    The result replaces an earlier one only when it is complete.

    Raises:
        TupeError: an unusable file, a bad row in a dev or test set (unless ``drop_bad_rows``), or no usable row.
    """
    final = out / task.folder
    partial = out / f".{task.folder}.partial-{os.getpid()}"
    try:
        out.mkdir(parents=True, exist_ok=True)
        _remove_leftovers(out, task)
        report = _TaskWriter(task, folder, partial, tokenizer, drop_bad_rows).write()
        _replace(partial, final)
    except OSError as error:  # full disk, no permission
        raise TupeError(f"{task.name}: {error}; {final} is as it was") from error
    finally:
        shutil.rmtree(partial, ignore_errors=True)
    print(f"{task.name}: written to {final}", flush=True)
    return report


def _remove_leftovers(out: Path, task: GlueTask) -> None:
    """Remove what killed preparations left; one that still runs keeps its own."""
    for kind in ("partial", "old"):
        for leftover in out.glob(f".{task.folder}.{kind}-*"):
            pid = leftover.name.rsplit("-", 1)[1]
            if pid.isdigit() and not _runs(int(pid)):
                shutil.rmtree(leftover, ignore_errors=True)


def _runs(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except PermissionError:  # someone else's process
        return True
    return True


def _replace(partial: Path, final: Path) -> None:
    """Rename ``partial`` to ``final``; a folder can't be renamed onto a full one, so the old one steps aside first."""
    old = final.with_name(f".{final.name}.old-{os.getpid()}")
    if final.exists():
        os.rename(final, old)
    try:
        os.rename(partial, final)
    except BaseException:
        if old.exists():
            os.rename(old, final)
        raise
    shutil.rmtree(old, ignore_errors=True)


class _TaskWriter:
    """Writes one task into an empty folder."""

    def __init__(self, task: GlueTask, folder: Path, target: Path, tokenizer: Tokenizer, drop_bad_rows: bool):
        self.task, self.folder, self.target = task, folder, target
        self.tokenizer, self.drop_bad_rows = tokenizer, drop_bad_rows
        self.names = INPUT_NAMES[: len(task.texts)]
        self.label_counts: Counter = Counter()

    def write(self) -> dict:
        """Write every split that has files; returns the report."""
        for name in (*self.names, "label", "tokenizer"):
            (self.target / name).mkdir(parents=True, exist_ok=True)
        splits = {}
        for split in self.task.files:
            source = find_source(self.folder, self.task, split)
            if source is None:
                print(f"{self.task.name}: no {_KINDS.get(split, split)} set in {self.folder}, left out", flush=True)
            else:
                splits[split] = self._write_split(split, source)
        for name in self.names:
            shutil.copyfile(self.tokenizer.folder / DICTIONARY, self.target / name / "dict.txt")
        for name in (MODEL, DICTIONARY, MANIFEST):
            shutil.copyfile(self.tokenizer.folder / name, self.target / "tokenizer" / name)
        if not self.task.regression:
            lines = [f"{label} {self.label_counts[label]}\n" for label in self.task.labels]
            (self.target / "label" / "dict.txt").write_text("".join(lines), encoding="utf-8")
        report = {
            "task": self.task.name,
            "labels": list(self.task.labels),
            "label_range": self.task.label_range,
            "tokenizer": self.tokenizer.fingerprint,
            "source": str(self.folder),
            "splits": splits,
        }
        text = json.dumps(report, indent=1, ensure_ascii=False)
        (self.target / "report.json").write_text(text + "\n", encoding="utf-8", errors="backslashreplace")
        return report

    def _write_split(self, split: str, source: Source) -> dict:
        started = time.time()
        writers = [_Writer(self.target / name / split, self.tokenizer.mask_id) for name in self.names]
        labels: list[str | None] = []
        bad: list[BadRow] = []
        rows = read_rows(source, self.task, split)
        while block := list(itertools.islice(rows, _BLOCK)):
            bad += [row for row in block if isinstance(row, BadRow)]
            good = [row for row in block if not isinstance(row, BadRow)]
            labels += [row.label for row in good]
            for number, writer in enumerate(writers):
                writer.add(self.tokenizer.encode_batch([row.texts[number] for row in good]))
        for writer in writers:
            writer.finish()
        self._judge(split, source, len(labels), bad)
        if None not in labels:
            self._write_labels(split, labels)
        print(
            f"{self.task.name}: {_KINDS.get(split, split)} set from {source}: "
            f"{len(labels)} of {len(labels) + len(bad)} rows used, "
            f"{_compare(self.task, split, len(labels))}, {sum(w.tokens for w in writers)} tokens, {time.time() - started:.1f} s",
            flush=True,
        )
        return {
            "files": [str(path) for path in source.paths],
            "rows_read": len(labels) + len(bad),
            "rows_used": len(labels),
            "rows_official": self.task.rows[split],
            "dropped": [{"file": row.file, "line": row.line, "reason": row.reason} for row in bad],
            "labels": None if self.task.regression else {str(key): count for key, count in Counter(labels).items()},
            "tokens": {name: writer.tokens for name, writer in zip(self.names, writers, strict=True)},
            "longest": int(max(sum(np.concatenate(writer.sizes) for writer in writers))),
            "unknown_tokens": sum(writer.unknown for writer in writers),
        }

    def _judge(self, split: str, source: Source, used: int, bad: list[BadRow]) -> None:
        """Print the rows that can't be used; refuse them where no row may be missing."""
        for row in bad[:_SHOWN_ROWS]:
            print(f"{self.task.name}: dropped: {row}", file=sys.stderr)
        if len(bad) > _SHOWN_ROWS:
            print(f"{self.task.name}: ... and {len(bad) - _SHOWN_ROWS} more, all in report.json", file=sys.stderr)
        fatal = [row for row in bad if row.kind != "blank"]
        if split != "train" and fatal and not self.drop_bad_rows:
            more = f" (and {len(fatal) - 1} more rows)" if len(fatal) > 1 else ""
            raise TupeError(f"{fatal[0]}{more}; --drop-bad-rows leaves such rows out of dev and test sets")
        if not used:
            first = f": {bad[0]}" if bad else ""
            raise TupeError(f"no usable row for the {_KINDS.get(split, split)} set in {source.paths[0]}{first}")

    def _write_labels(self, split: str, labels: list) -> None:
        if self.task.regression:
            highest = self.task.label_range[1]
            lines = [f"{float(label) / highest:.10g}\n" for label in labels]
            (self.target / "label" / f"{split}.label").write_text("".join(lines), encoding="utf-8")
            return
        writer = _Writer(self.target / "label" / split, _SPECIALS + len(self.task.labels))
        writer.add([[_SPECIALS + self.task.labels.index(label)] for label in labels])
        writer.finish()
        if split == "train":
            self.label_counts.update(labels)


def _compare(task: GlueTask, split: str, used: int) -> str:
    official = task.rows[split]
    if used == official:
        return "as many as the official set"
    if task.other_rows.get(split) == used:
        return f"as many as {task.other_version} (official: {official})"
    return f"{used - official:+d} against the official {official}"


class _Writer(DatasetWriter):
    """Rows that end with ``</s>``, as fairseq-preprocess writes them."""

    def __init__(self, prefix: Path, dictionary_size: int):
        super().__init__(prefix, dictionary_size)
        self.sizes: list[np.ndarray] = []
        self.unknown = 0

    def add(self, rows: list) -> None:
        """Add rows of ids without ``</s>``."""
        ids = np.array([index for row in rows for index in (*row, _EOS)], dtype=np.int64)
        sizes = np.array([len(row) + 1 for row in rows], dtype=np.int64)
        super().add(ids, sizes)
        self.sizes.append(sizes)
        self.unknown += int((ids == _UNK).sum())

"""Command ``quickstart-report``: the table and the plots of ``scripts/quickstart.sh``, from the logs it left."""

import argparse
import csv
import json
import os
import re
from collections import Counter
from pathlib import Path

from fairseq_tupe import plots
from fairseq_tupe.errors import TupeError

STARTS = ("pretrained", "scratch")
METRICS = {"SST-2": ("accuracy",), "STS-B": ("pearson", "spearman")}
SUMMARY = re.compile(r"valid on 'valid' subset \| (?P<stats>.*)$")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Options of ``quickstart-report``."""
    parser.add_argument("folder", metavar="DIR", help="the quickstart's folder")


def run(args: argparse.Namespace) -> int:
    """Print the table; write results.json, results.md, loss.png and positions.png into the folder."""
    folder = Path(args.folder)
    results = collect(folder)
    table = format_results(results)
    _write(folder / "results.json", json.dumps(results, indent=2) + "\n")
    _write(folder / "results.md", table)
    losses = plots.read_losses(next((folder / "logs").glob("*-pretraining.log")))
    plots.draw_losses(losses, folder / "loss.png", "Pretraining a small TUPE-R on six novels")
    weights = plots.load_weights(folder / "pretraining" / "tupe_r" / "checkpoint_last.pt")
    plots.draw_correlations(plots.correlations(weights), folder / "positions.png")
    print(table)
    print(f"written to {folder}: results.md, results.json, loss.png, positions.png; logs in logs/")
    return 0


def collect(folder: Path) -> dict:
    """Everything the table shows, as plain numbers: losses in bits a masked token, metrics in percent, times in seconds.

    Raises:
        TupeError: a log that the quickstart should have left is missing or holds no result.
    """
    validation = folder / "validation"
    results = {
        "prose_loss": {start: _summary(validation / f"prose-{start}.log")["loss"] for start in STARTS},
        "tasks": {},
        "stages": _stages(folder / "stages"),
    }
    for task, metrics in METRICS.items():
        if task == "STS-B" and (folder / "stages" / "sts-b-missing").exists():
            results["sts_b_missing"] = (folder / "stages" / "sts-b-missing").read_text(encoding="utf-8").strip()
            continue
        scores = {start: _summary(validation / f"{task}-{start}.log") for start in STARTS}
        results["tasks"][task] = {start: {name: scores[start][name] for name in metrics} for start in STARTS}
    results["tasks"]["SST-2"]["majority_class"] = majority_class(folder / "glue-files" / "SST-2" / "dev.tsv")
    results["seconds"] = round(sum(stage["seconds"] for stage in results["stages"]), 1)
    results["cpu_seconds"] = round(sum(stage["cpu_seconds"] for stage in results["stages"]), 1)
    return results


def _summary(log: Path) -> dict[str, float]:
    """Name -> value in the last validation summary of a log of fairseq-validate."""
    try:
        lines = log.read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError as error:
        raise TupeError(f"can't read {log} ({error.strerror}): run scripts/quickstart.sh first") from error
    found = [match for match in map(SUMMARY.search, lines) if match]
    if not found:
        raise TupeError(f"{log} holds no validation result; its last line: {lines[-1] if lines else 'it is empty'}")
    pairs = (pair.split() for pair in found[-1]["stats"].split(" | "))
    return {pair[0]: float(pair[1]) for pair in pairs if len(pair) == 2 and pair[1] != "None"}


def _stages(folder: Path) -> list[dict]:
    stages = [json.loads(path.read_text(encoding="utf-8")) for path in folder.glob("*.json")]
    return sorted(stages, key=lambda stage: stage["number"])


def majority_class(table: Path) -> float:
    """Share of the most frequent label in a file of SST-2's layout, in percent: what a constant answer would reach."""
    with open(table, encoding="utf-8", newline="") as lines:
        labels = Counter(row["label"] for row in csv.DictReader(lines, delimiter="\t", quoting=csv.QUOTE_NONE))
    return round(100 * max(labels.values()) / sum(labels.values()), 2)


def format_results(results: dict) -> str:
    """The results as Markdown tables that read well on a terminal too."""
    loss, tasks = results["prose_loss"], results["tasks"]
    rows = [
        ["", "pretrained", "from scratch", "to compare"],
        ["held-out prose: loss (bits a masked token)", f"{loss['pretrained']:.2f}", f"{loss['scratch']:.2f}", "not trained"],
    ]
    for task, metrics in METRICS.items():
        for metric in metrics:
            label = f"{'sentiment (SST-2 layout)' if task == 'SST-2' else task} dev: {metric} (%)"
            if task not in tasks:
                rows.append([label, "-", "-", results.get("sts_b_missing", "")])
                continue
            compare = f"{tasks[task]['majority_class']:.2f} majority class" if task == "SST-2" else "0.00 constant answer"
            rows.append([label, *(f"{tasks[task][start][metric]:.2f}" for start in STARTS), compare])
    times = [["stage", "time", "CPU time"]]
    times += [[stage["title"], _time(stage["seconds"]), _time(stage["cpu_seconds"])] for stage in results["stages"]]
    times.append(["all", _time(results["seconds"]), _time(results["cpu_seconds"])])
    return f"{_table(rows)}\n\n{_table(times)}\n"


def _time(seconds: float) -> str:
    return f"{seconds / 60:.1f} min" if seconds >= 99.5 else f"{seconds:.0f} s"


def _table(rows: list[list[str]]) -> str:
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
    lines = ["| " + " | ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)) + " |" for row in rows]
    lines.insert(1, "|" + "|".join("-" * (width + 2) for width in widths) + "|")
    return "\n".join(lines)


def _write(path: Path, text: str) -> None:
    fresh = path.with_name(f".{path.name}.new")
    fresh.write_text(text, encoding="utf-8")
    os.replace(fresh, path)

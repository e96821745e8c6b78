"""scripts/quickstart.sh on a sample cut short, its report, and the bundled sample itself."""

import fcntl
import hashlib
import json
import lzma
import re
import shutil
import subprocess
import sys

import pytest
from fairseq_processes import Finished, environment

from fairseq_tupe import quickstart_report
from fairseq_tupe.errors import TupeError

OFFLINE = {"PIP_NO_INDEX": "1", "PIP_FIND_LINKS": "", "PIP_CONFIG_FILE": "/dev/null"}


def quickstart(clone, *words, cwd) -> Finished:
    """Run a clone's quickstart in this environment, without a network."""
    process = subprocess.run(
        ["bash", str(clone / "scripts" / "quickstart.sh"), *map(str, words)], cwd=cwd,
        env=environment(FAIRSEQ_TUPE_VENV=sys.prefix, **OFFLINE), stdin=subprocess.DEVNULL,
        capture_output=True, text=True, timeout=900, check=False,
    )  # fmt: skip
    return Finished(process.returncode, process.stdout, process.stderr)


@pytest.fixture(scope="module")
def clone(repo, tmp_path_factory):
    """The code with a tenth of the sample, in a path with a space."""
    root = tmp_path_factory.mktemp("quick start") / "a clone"
    ignore = shutil.ignore_patterns("__pycache__")
    for name in ("scripts", "fairseq_tupe"):
        shutil.copytree(repo / name, root / name, ignore=ignore)
    for name, rows in {"austen.txt": 1000, "sentiment/train.tsv": 49, "sentiment/dev.tsv": 25}.items():
        lines = lzma.decompress((repo / "data-bin" / "sample" / f"{name}.xz").read_bytes()).splitlines(keepends=True)
        target = root / "data-bin" / "sample" / f"{name}.xz"
        target.parent.mkdir(parents=True, exist_ok=True)
        target.write_bytes(lzma.compress(b"".join(lines[:rows])))
    return root


def test_the_whole_way_and_again(clone, tmp_path):
    out = tmp_path / "an output"
    first = quickstart(clone, "--out", "an output", "--updates", 3, cwd=tmp_path).check()
    assert re.findall(r"^\[(\d/6)\]", first.stdout, re.M) == [f"{number}/6" for number in range(1, 7)]
    warnings = [line for line in first.stderr.splitlines() if line.startswith("quickstart.sh: warning")]
    assert len(warnings) == 1
    assert "without STS-B" in warnings[0]
    assert "--glue-dir" in warnings[0]
    assert re.search(r"^    update 3: dev loss 1\d\.\d+$", first.stdout, re.M)  # progress of pretraining
    assert re.search(r"^    scratch: update \d+: dev .*accuracy \d", first.stdout, re.M)  # and of fine-tuning

    results = json.loads((out / "results.json").read_text(encoding="utf-8"))
    pieces = len((out / "data" / "dict.txt").read_text(encoding="utf-8").splitlines())
    # an untrained model knows nothing, and three small updates teach it nothing: log2 of the vocabulary
    assert results["prose_loss"]["scratch"] == pytest.approx(len(f"{pieces:b}"), abs=0.6)
    assert results["prose_loss"]["pretrained"] != results["prose_loss"]["scratch"]
    for start in ("pretrained", "scratch"):
        log = (out / "validation" / f"SST-2-{start}.log").read_text(encoding="utf-8")
        assert results["tasks"]["SST-2"][start]["accuracy"] == float(re.findall(r"accuracy ([\d.]+)", log)[-1])
        assert (out / "finetuning" / "SST-2" / start / "tokenizer" / "spm.model").is_file()
    assert [stage["name"] for stage in results["stages"]] == ["text", "pretraining", "glue", "SST-2", "validation"]
    assert all(stage["cpu_seconds"] > 0 for stage in results["stages"])
    assert (out / "results.md").read_text(encoding="utf-8") in first.stdout
    assert all((out / name).read_bytes().startswith(b"\x89PNG") for name in ("loss.png", "positions.png"))

    checkpoint = out / "pretraining" / "tupe_r" / "checkpoint_last.pt"
    before = checkpoint.stat().st_mtime_ns
    again = quickstart(clone, "--out", out, "--updates", 3, cwd="/").check()
    assert again.stdout.count(": done before") == 5
    assert checkpoint.stat().st_mtime_ns == before
    assert json.loads((out / "results.json").read_text(encoding="utf-8")) == results


def test_a_failing_stage_is_named_with_its_log(clone, tmp_path):
    broken = tmp_path / "broken"
    shutil.copytree(clone, broken)
    sample = broken / "data-bin" / "sample" / "austen.txt.xz"
    sample.write_bytes(sample.read_bytes()[:5000])
    result = quickstart(broken, cwd=tmp_path)
    assert result.returncode == 1
    log = broken / "outputs" / "quickstart" / "logs" / "1-text.log"
    assert result.stderr.splitlines()[-1] == (
        f"quickstart.sh: error: stage 1 (clean, tokenize and binarize the bundled prose) failed with status 1; its log: {log}"
    )
    assert "austen.txt.xz" in log.read_text(encoding="utf-8")
    assert not (broken / "outputs" / "quickstart" / "pretraining").exists()


def test_refusals(clone, tmp_path):
    def refused(*words):
        result = quickstart(clone, *words, cwd=tmp_path)
        assert result.returncode == 1
        assert result.stderr.count("\n") == 1, result.stderr
        return result.stderr

    assert "unknown argument: --fast" in refused("--fast")
    assert "--updates takes a number" in refused("--updates", "many")
    assert "holds no folder STS-B" in refused("--glue-dir", tmp_path)
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "thesis.txt").write_text("mine")
    for force in ((), ("--force",)):
        assert "holds something else" in refused("--out", "mine", *force)
    assert [path.name for path in (tmp_path / "mine").iterdir()] == ["thesis.txt"]
    (tmp_path / "busy").mkdir()
    with open(tmp_path / "busy" / ".fairseq_tupe_quickstart", "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        assert "another quickstart is at work" in refused("--out", "busy")


@pytest.fixture
def finished(tmp_path):
    """What a quickstart leaves for the report, with figures of our own."""
    figures = {
        "prose-pretrained": "loss 5.6 | ppl 48.5",
        "prose-scratch": "loss 12.01 | ppl 4128.5",
        "SST-2-pretrained": "loss 0.8 | accuracy 71.1",
        "SST-2-scratch": "loss 0.9 | accuracy 65.25",
        "STS-B-pretrained": "loss 0.1 | pearson 22.5 | spearman 21.75",
        "STS-B-scratch": "loss 0.1 | pearson 10.5 | spearman -1.25",
    }
    for folder in ("validation", "stages", "glue-files/SST-2"):
        (tmp_path / folder).mkdir(parents=True)
    for name, stats in figures.items():
        line = f"2026-01-01 00:00:00 | INFO | valid |  | valid on 'valid' subset | {stats} | num_updates 0\n"
        (tmp_path / "validation" / f"{name}.log").write_text("earlier lines\n" + line)
    for number, name in enumerate(("text", "pretraining"), 1):
        stage = {"number": number, "name": name, "title": name, "seconds": 90.0 * number, "cpu_seconds": 5.0, "cores": 2}
        (tmp_path / "stages" / f"{name}.json").write_text(json.dumps(stage))
    (tmp_path / "glue-files" / "SST-2" / "dev.tsv").write_text('sentence\tlabel\na "\t1\nb\t1\nc "\t0\n')
    return tmp_path


def test_the_table_shows_what_came_out(finished):
    table = quickstart_report.format_results(quickstart_report.collect(finished))
    cells = [[cell.strip() for cell in line.strip("|").split("|")] for line in table.splitlines() if line]
    assert ["held-out prose: loss (bits a masked token)", "5.60", "12.01", "not trained"] in cells
    assert ["sentiment (SST-2 layout) dev: accuracy (%)", "71.10", "65.25", "66.67 majority class"] in cells
    assert ["STS-B dev: pearson (%)", "22.50", "10.50", "0.00 constant answer"] in cells
    assert ["STS-B dev: spearman (%)", "21.75", "-1.25", "0.00 constant answer"] in cells
    assert cells[-3:] == [["text", "90 s", "5 s"], ["pretraining", "3.0 min", "5 s"], ["all", "4.5 min", "10 s"]]


def test_the_table_says_when_there_is_no_sts_b(finished):
    (finished / "stages" / "sts-b-missing").write_text("the reason\n")
    results = quickstart_report.collect(finished)
    assert "STS-B" not in results["tasks"]
    assert re.search(r"STS-B dev: pearson \(%\) +\| - +\| - +\| the reason", quickstart_report.format_results(results))


def test_a_missing_result_is_an_error(finished):
    (finished / "validation" / "SST-2-scratch.log").write_text("something went wrong\n")
    with pytest.raises(TupeError, match="SST-2-scratch.log holds no validation result; its last line: something went wrong"):
        quickstart_report.collect(finished)
    (finished / "validation" / "SST-2-scratch.log").unlink()
    with pytest.raises(TupeError, match="run scripts/quickstart.sh first"):
        quickstart_report.collect(finished)


def test_the_sample_is_what_its_readme_says(repo):
    folder = repo / "data-bin" / "sample"
    rows = re.findall(
        r"^\| `([^`]+)` \| ([\d,]+) .*? \| ([\d,]+) \| `(\w+)` \| `(\w+)` \|$", (folder / "README.md").read_text(), re.M
    )
    assert [row[0] for row in rows] == ["austen.txt.xz", "sentiment/train.tsv.xz", "sentiment/dev.tsv.xz"]
    for name, lines, size, packed, unpacked in rows:
        data = (folder / name).read_bytes()
        text = lzma.decompress(data)
        assert len(data) == int(size.replace(",", ""))
        assert hashlib.sha256(data).hexdigest() == packed
        assert hashlib.sha256(text).hexdigest() == unpacked
        assert text.count(b"\n") - name.startswith("sentiment") == int(lines.replace(",", ""))
    assert sum(path.stat().st_size for path in folder.rglob("*") if path.is_file()) < 2_000_000

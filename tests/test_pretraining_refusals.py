"""`prepare-pretrain-data` where something is wrong: one error line, earlier output untouched; kills, locks, a full disk."""

import argparse
import bz2
import fcntl
import gzip
import json
import lzma
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from corpus_data import LINES, VOCAB, make_lines, prepare, refused, script, snapshot

from fairseq_tupe.data import pretraining_corpus
from fairseq_tupe.data.workspace import Workspace


@pytest.fixture(scope="module")
def corpus(tmp_path_factory):
    path = tmp_path_factory.mktemp("text") / "corpus.txt"
    path.write_text("\n".join(LINES) + "\n")
    return path


@pytest.fixture(scope="module")
def prepared(corpus):
    out = corpus.parent / "prepared"
    assert prepare("--out", out, *VOCAB, corpus) == 0
    return out


def bad_inputs():
    """Name of the file, its bytes, what the error says."""
    text = "\n".join(LINES).encode()
    yield "empty", b"", "the file is empty"
    yield "blank", b"\n \n\r\n", "the file is empty"
    yield "binary", bytes(range(256)) * 40, "line 1 holds a NUL byte"
    yield "late", text + b"\n" + b"x" * 400_000 + b"\nab\0c\n", "line 402 holds a NUL byte"
    yield "utf16", "\ufeff".encode("utf-16-le") + text.decode().encode("utf-16-le"), "UTF-16"
    yield "koi8", "\u043f\u0440\u0438\u0432\u0435\u0442 \u043c\u0438\u0440 ".encode("koi8-r") * 90, "are not UTF-8"
    yield "gzip", gzip.compress(text)[:-100], "ends too early"
    yield "xz", lzma.compress(text)[:-100], "ends too early"
    yield "bzip2", bz2.compress(text)[:-100], "ends too early"
    yield "zip", b"PK\x03\x04" + b"x" * 100, "this is a zip file"
    yield "short", b"too short\n" * 5, "nothing is left after the filters: 5 lines in, 5 too short"
    yield "one", LINES[0].encode(), "1 lines are left"


@pytest.mark.parametrize(("name", "content", "message"), [pytest.param(*case, id=case[0]) for case in bad_inputs()])
def test_bad_input_is_refused_and_earlier_output_stays(name, content, message, prepared, tmp_path, capsys):
    path = tmp_path / name
    path.write_bytes(content)
    before = snapshot(prepared)
    line = refused(capsys, "--out", prepared, *VOCAB, path)
    assert message in line
    assert name in line or name in ("short", "one")
    assert snapshot(prepared) == before
    assert not list(prepared.parent.glob("prepared.*"))


def test_bad_settings_are_refused(prepared, corpus, tmp_path, capsys):
    before = snapshot(prepared)
    for arguments, message in (
        ((tmp_path / "missing.txt",), "no such file"),
        ((tmp_path,), "this is a folder"),
        ((corpus, "--vocab-size", 32768), "the largest possible is "),
        ((corpus, "--vocab-size", 100), "the smallest possible is "),
        ((corpus, *VOCAB, "--shards", 5000), "--shards is 5000, expected 1 to 256"),
        ((corpus, *VOCAB, "--shards", 0), "--shards is 0"),
        ((corpus, *VOCAB, "--valid-fraction", 0), "--valid-fraction is 0"),
        ((corpus, *VOCAB, "--valid-fraction", 0.9999999), "leaves no line to train on"),
        ((prepared / "dict.txt", *VOCAB), "lies in the output folder"),
    ):
        assert message in refused(capsys, "--out", prepared, *arguments)
    assert snapshot(prepared) == before
    assert "this is a file" in refused(capsys, "--out", corpus, *VOCAB, corpus)
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "notes.txt").write_text("precious")
    assert "did not write" in refused(capsys, "--out", tmp_path / "mine", *VOCAB, corpus)
    assert (tmp_path / "mine" / "notes.txt").read_text() == "precious"
    assert "File exists" in refused(capsys, "--out", corpus / "below", *VOCAB, corpus)
    with pytest.raises(SystemExit) as caught:
        prepare("--out", tmp_path / "x", "--no-such-flag", corpus)
    assert caught.value.code == 2


def test_more_shards_than_sentences_are_refused(tmp_path, capsys):
    path = tmp_path / "x.txt"
    path.write_text("\n".join(LINES[:20]))
    assert "can't fill" in refused(capsys, "--out", tmp_path / "o", "--vocab-size", 320, "--shards", 100, path)


def test_a_killed_run_continues_and_ends_the_same(repo, tmp_path):
    folder = tmp_path / "with space"
    folder.mkdir()
    path = folder / "-big.txt"
    path.write_text("\n".join(make_lines(6_000, seed=1)))
    out = folder / "out"
    arguments = ("--out", "out", *VOCAB, "--", "-big.txt")
    process = script(repo, *arguments, cwd=folder)
    stages = Path(f"{out}.partial") / "stages.json"
    deadline = time.monotonic() + 60
    while not stages.exists() and process.poll() is None and time.monotonic() < deadline:
        time.sleep(0.01)
    process.send_signal(signal.SIGKILL)
    process.communicate()
    done = set(json.loads(stages.read_text()))
    assert "clean" in done
    assert not out.exists()
    time.sleep(0.5)  # the workers notice that their parent is gone
    process = script(repo, *arguments, cwd=folder)
    output, errors = process.communicate(timeout=120)
    assert process.returncode == 0, errors
    assert "clean: done in an earlier run" in errors
    assert "speed" in output
    assert prepare("--out", folder / "again", *VOCAB, path) == 0
    assert snapshot(out) == snapshot(folder / "again")
    assert sorted(entry.name for entry in folder.iterdir()) == ["-big.txt", "again", "out"]


def test_a_stage_counts_as_done_only_with_its_settings_and_files(tmp_path):
    space = Workspace(tmp_path / "o")
    with space:
        space.open(fresh=False)
        path = space.work / "x"
        path.write_text("1234")
        space.finish("clean", "key", {"seconds": 99}, [path])
        assert space.finished("clean", "key") == {"seconds": 99}
        assert space.finished("clean", "other") is None
        assert space.finished("split", "key") is None
        path.write_text("123")
        assert space.finished("clean", "key") is None
    assert space.partial.is_dir()  # 99 seconds of work are worth keeping
    with space:
        space.open(fresh=True)
        assert space.finished("clean", "key") is None
    assert not space.partial.exists()


def test_a_kill_between_the_renames_loses_nothing(corpus, tmp_path, capsys):
    out = tmp_path / "o"
    assert prepare("--out", out, *VOCAB, corpus) == 0
    before = snapshot(out)
    os.rename(out, tmp_path / "o.previous")
    assert "no such file" in refused(capsys, "--out", out, *VOCAB, tmp_path / "missing")
    assert snapshot(out) == before
    os.rename(out, tmp_path / "o.partial")  # killed just before the last rename
    started = (tmp_path / "o.partial" / "train.bin").stat().st_mtime_ns
    assert prepare("--out", out, *VOCAB, corpus) == 0
    assert snapshot(out) == before
    assert (out / "train.bin").stat().st_mtime_ns == started


def test_two_runs_on_one_output_and_a_full_disk_are_refused(corpus, tmp_path, capsys):
    (tmp_path / "o.partial").mkdir()
    with open(tmp_path / "o.partial" / "lock", "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        assert "another run is working" in refused(capsys, "--out", tmp_path / "o", *VOCAB, corpus)
    limit = (  # no file may grow over 20 kB: the nearest thing to a full disk that needs no mount
        "import resource, signal, sys; resource.setrlimit(resource.RLIMIT_FSIZE, (20000, 20000)); "
        "signal.signal(signal.SIGXFSZ, signal.SIG_IGN); from fairseq_tupe.__main__ import main; sys.exit(main(sys.argv[1:]))"
    )
    command = [sys.executable, "-c", limit, "prepare-pretrain-data", "--out", str(tmp_path / "full"), *VOCAB, str(corpus)]
    run = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
    assert run.returncode == 1
    assert "File too large" in run.stderr.strip().split("\n")[-1]
    assert "Traceback" not in run.stderr
    assert not (tmp_path / "full").exists()


def test_the_script_prints_help_and_refuses_unknown_flags(repo):
    process = script(repo, "--help")
    output, _ = process.communicate(timeout=60)
    assert process.returncode == 0
    assert output.startswith("usage: ")
    parser = argparse.ArgumentParser(add_help=False)
    pretraining_corpus.add_arguments(parser)
    for action in parser._actions:
        assert all(flag in output for flag in action.option_strings), action.option_strings

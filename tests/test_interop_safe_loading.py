"""No file runs code, and every file that is no checkpoint is called what it is."""

import os
import pickle
import zipfile
from pathlib import Path

import numpy as np
import pytest
import torch
from fairseq_processes import run
from golden_data import GOLDEN

from fairseq_tupe.errors import TupeError
from fairseq_tupe.interop.safe_loading import load_checkpoint_file, load_training_checkpoint, pickle_globals

CHECKPOINT = {"model": {"encoder.x": torch.arange(3000.0)}, "cfg": {"task": {}}, "args": None}


class Dangerous:
    """Would create a file if it were unpickled."""

    def __init__(self, trace: Path):
        self.trace = trace

    def __reduce__(self):
        return os.system, (f"touch '{self.trace}'",)


@pytest.fixture
def file(tmp_path) -> Path:
    return tmp_path / "folder with space" / "checkpoint.pt"


@pytest.fixture(autouse=True)
def _folder(file):
    file.parent.mkdir()


def refusal(file: Path) -> str:
    """The message; one line that begins with the file's name."""
    with pytest.raises(TupeError) as caught:
        load_training_checkpoint(file)
    message = str(caught.value)
    assert message.startswith(f"{file}: ")
    assert "\n" not in message
    return message


@pytest.mark.parametrize("writer", ["zip", "before 1.6", "plain pickle"])
def test_code_in_a_file_never_runs(file, tmp_path, writer):
    trace = tmp_path / "it ran"
    content = {"model": {"weight": torch.ones(2)}, "args": Dangerous(trace)}
    if writer == "plain pickle":
        file.write_bytes(pickle.dumps({"args": Dangerous(trace)}))
    else:
        torch.save(content, file, _use_new_zipfile_serialization=writer == "zip")
    assert f"asks for {os.system.__module__}.system" in refusal(file)
    assert not trace.exists()
    pickle.loads(pickle.dumps(Dangerous(trace)))  # the test itself can fail: this one does run
    assert trace.exists()


def test_other_classes_are_named(file):
    torch.save({**CHECKPOINT, "metric": np.float64(1)}, file)
    assert "asks for numpy._core.multiarray.scalar" in refusal(file) or "numpy.core.multiarray.scalar" in refusal(file)
    torch.save(torch.nn.Linear(2, 2), file)
    assert "asks for torch.nn.modules.linear.Linear" in refusal(file)


@pytest.mark.parametrize("zipped", [True, False])
def test_both_formats_of_torch_load(file, zipped):
    torch.save(CHECKPOINT, file, _use_new_zipfile_serialization=zipped)
    assert torch.equal(load_training_checkpoint(file)["model"]["encoder.x"], CHECKPOINT["model"]["encoder.x"])


@pytest.mark.parametrize("zipped", [True, False])
@pytest.mark.parametrize("share", [0.01, 0.3, 0.99])
def test_truncated(file, zipped, share):
    torch.save(CHECKPOINT, file, _use_new_zipfile_serialization=zipped)
    whole = file.read_bytes()
    file.write_bytes(whole[: int(len(whole) * share)])
    assert f"damaged or cut short ({int(len(whole) * share):,} bytes)" in refusal(file)


def test_one_flipped_bit_in_the_weights(file):
    torch.save(CHECKPOINT, file)
    damaged = bytearray(file.read_bytes())
    damaged[damaged.find(CHECKPOINT["model"]["encoder.x"].numpy().tobytes()) + 5000] ^= 1
    file.write_bytes(damaged)
    assert "the checksum of checkpoint/data/0 is wrong" in refusal(file)
    torch.serialization.set_crc32_options(False)
    try:
        torch.save(CHECKPOINT, file)
    finally:
        torch.serialization.set_crc32_options(True)
    load_training_checkpoint(file)  # written without checksums: nothing to compare with


def test_damage_names_the_checkpoint_to_go_on_from(file):
    torch.save(CHECKPOINT, file.with_name("checkpoint_1_500.pt"))
    file.write_bytes(b"")
    message = refusal(file)
    assert "empty, 0 bytes" in message
    assert f"use {file.with_name('checkpoint_1_500.pt')}" in message


def test_what_is_no_checkpoint_is_called_what_it_is(file):
    for content, expected in (
        (b"<!DOCTYPE html>\n<html>", 'a text file that begins with "<!DOCTYPE html>"'),
        ("é".encode() * 600, 'a text file that begins with "é'),
        (b"version https://git-lfs.github.com/spec/v1\n", "a Git LFS pointer"),
        (b"\x1f\x8b\x08\x00" + bytes(100), "a gzip archive"),
        (bytes(257) + b"ustar" + bytes(300), "a tar archive"),
        (bytes(range(1, 256)) * 9, "do not begin like a checkpoint"),
        (pickle.dumps([1, 2]), "a plain Python pickle"),
        ((16).to_bytes(8, "little") + b'{"__metadata__":' + bytes(16), "a safetensors file of transformers"),
    ):
        file.write_bytes(content)
        assert expected in refusal(file)
    with zipfile.ZipFile(file, "w") as archive:
        archive.writestr("word/document.xml", "x")
    assert "a zip archive of word/document.xml" in refusal(file)
    torch.jit.script(torch.nn.Linear(2, 2)).save(str(file))
    assert "a TorchScript program, which is code" in refusal(file)
    assert "the checkpoint does not exist" in refusal(file.with_name("missing.pt"))
    assert "is a folder; pass a file in it: checkpoint.pt" in refusal(file.parent)
    (file.parent / "config.json").write_text("{}")
    assert "is a transformers folder: run python -m fairseq_tupe import-hf" in refusal(file.parent)


def test_weights_without_settings(file):
    for content, expected in (
        ({"encoder.x": torch.ones(2)}, "a state dict alone (1 weights such as encoder.x)"),
        ({"model": {"encoder.x": torch.ones(2)}}, "a state dict alone"),
        ({"roberta.encoder.layer.0.x": torch.ones(2)}, "a transformers file (1 weights such as roberta.encoder.layer.0.x)"),
        ({"epoch": 3}, "holds epoch, but no model"),
        (torch.ones(2), "holds a Tensor"),
    ):
        torch.save(content, file)
        assert expected in refusal(file)
        load_checkpoint_file(file)  # safe to read, if only it is wanted


def test_the_original_needs_four_names(file):
    """Fewer would not load it (each is in the file), and the list is no longer than that."""
    state = load_training_checkpoint(GOLDEN / "tupe_r.checkpoint.pt")
    assert state["args"].rel_pos
    with zipfile.ZipFile(GOLDEN / "tupe_r.checkpoint.pt") as archive:
        (record,) = (name for name in archive.namelist() if name.endswith("/data.pkl"))
        names = pickle_globals(archive.read(record))
    assert "argparse.Namespace" in names
    assert {name for name in names if name.startswith("fairseq")} <= {
        f"fairseq.meters.{name}" for name in ("AverageMeter", "TimeMeter", "StopwatchMeter")
    }


def test_command_line(file):
    file.write_text("hello")
    finished = run("python", "-m", "fairseq_tupe", "inspect", file)
    assert finished.returncode == 1
    assert finished.errors == [f'{file}: is a text file that begins with "hello", not a checkpoint: pass the .pt file, or '
                               "download it again"]  # fmt: skip


def test_what_was_allowed_before_stays_allowed(file):
    before = torch.serialization.get_safe_globals()
    torch.save(CHECKPOINT, file)
    load_checkpoint_file(file)
    assert set(torch.serialization.get_safe_globals()) == set(before)

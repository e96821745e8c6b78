"""Load a checkpoint without running code from it, or say in one line what the file is and what to do.

torch loads plain data only when it is told ``weights_only=True``; :data:`ALLOWED_GLOBALS` is all that checkpoints of fairseq
and of the original repository hold besides. Whatever else a file asks for is named and refused.
"""

import argparse
import os
import pickletools
import re
import zipfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch

from fairseq_tupe.errors import TupeError


class DiscardedMeter:
    """Stands for the meters that old fairseq pickled into checkpoints; nothing reads them, so no fairseq code has to run."""


METERS = ("AverageMeter", "TimeMeter", "StopwatchMeter")
ALLOWED_GLOBALS = [argparse.Namespace, *((DiscardedMeter, f"fairseq.meters.{name}") for name in METERS)]

# first bytes -> what the file is
MAGIC = {
    b"\x1f\x8b": "a gzip archive",
    b"ustar": "a tar archive",
    b"7z\xbc\xaf": "a 7z archive",
    b"\x89HDF": "an HDF5 file (TensorFlow or Keras)",
    b"GGUF": "a GGUF file",
}
LFS = "version https://git-lfs"


@contextmanager
def allowed_globals() -> Iterator[None]:
    """Allow :data:`ALLOWED_GLOBALS` for a while; torch's own way also takes away what was allowed before."""
    before = torch.serialization.get_safe_globals()
    try:
        with torch.serialization.safe_globals(ALLOWED_GLOBALS):
            yield
    finally:
        torch.serialization.add_safe_globals(before)


def load_checkpoint_file(path: str | Path) -> Any:
    """What ``torch.save`` wrote to ``path``, on the CPU; torch's format from before 1.6 loads as well.

    Raises:
        TupeError: the file is missing, empty, damaged, no checkpoint at all, or asks for something that could run code.
    """
    path = Path(path)
    try:
        with allowed_globals():
            state = torch.load(path, map_location="cpu", weights_only=True)
    except Exception as error:  # torch, zip reader and unpickler each fail in their own ways
        raise TupeError(explain_failure(path, error)) from error
    bad = _damaged_record(path)
    if bad:
        raise TupeError(_damaged(path, f"the checksum of {bad} is wrong"))
    return state


def load_training_checkpoint(path: str | Path) -> dict:
    """A checkpoint that fairseq wrote, the original's fairseq included: weights with the settings they belong to.

    Raises:
        TupeError: as :func:`load_checkpoint_file`, or the file holds something else.
    """
    state = load_checkpoint_file(path)
    other = explain_contents(state)
    if other:
        raise TupeError(f"{path}: {other}")
    return state


def explain_failure(path: str | Path, error: BaseException | None = None) -> str:
    """One line: which file, what it is, what to do. ``error`` is what loading it raised."""
    path = Path(path)
    if not path.exists():
        return f"{path}: the checkpoint does not exist"
    if path.is_dir():
        return f"{path}: {_folder(path)}"
    if path.stat().st_size == 0:
        return _damaged(path, "empty, 0 bytes")
    if isinstance(error, PermissionError):
        return f"{path}: no permission to read the checkpoint: change its mode or owner"
    unsafe = _forbidden_global(path, error)
    if unsafe:
        return (
            f"{path}: not loaded, because it asks for {unsafe}, which is not plain data and could run code: get a checkpoint "
            "from a source you trust, with nothing but tensors, numbers and text in it"
        )
    what = _foreign_format(path)
    if what:
        return f"{path}: {what}"
    contents = _contents_of_readable(path)
    if contents:
        return f"{path}: {contents}"
    with open(path, "rb") as file:
        known = file.read(2) == b"PK" or file.seek(0) == 0 and file.read(1) == b"\x80"
    size = f"{path.stat().st_size:,} bytes"
    return _damaged(path, size if known else f"{size} that do not begin like a checkpoint of torch")


def explain_contents(state: Any) -> str | None:
    """Why what a file holds is not a checkpoint of fairseq, with the cure; None where it is one."""
    if not isinstance(state, dict):
        return f"holds a {type(state).__name__}, expected a checkpoint of fairseq: pass the file that fairseq-train wrote"
    if isinstance(state.get("model"), dict) and (state.get("args") is not None or state.get("cfg") is not None):
        return None
    weights = state["model"] if isinstance(state.get("model"), dict) else state
    names = [name for name, value in weights.items() if torch.is_tensor(value)]
    if not names:
        return f"holds {', '.join(map(str, list(state)[:5])) or 'nothing'}, but no model: pass the file that fairseq-train wrote"
    if any(".encoder.layer." in name or name.startswith(("tupe.", "roberta.", "bert.")) for name in names):
        return (
            f"is a transformers file ({len(names)} weights such as {names[0]}): for one that export-hf wrote run "
            "python -m fairseq_tupe import-hf FOLDER OUT.pt; weights of other models than TUPE can't be used"
        )
    return (
        f"is a state dict alone ({len(names)} weights such as {names[0]}), not a checkpoint: the settings they belong to are "
        "missing; pass the whole file that fairseq-train wrote (a dictionary with model, and cfg or args)"
    )


def _contents_of_readable(path: Path) -> str | None:
    try:
        with allowed_globals():
            return explain_contents(torch.load(path, map_location="cpu", weights_only=True))
    except Exception:
        return None


def _damaged(path: Path, what: str) -> str:
    others = sorted(path.parent.glob("*.pt"), key=os.path.getmtime, reverse=True)
    whole = next((str(other) for other in others if other != path and zipfile.is_zipfile(other)), None)
    cure = f"use {whole} (--restore-file, or --path)" if whole else "copy it again; no other checkpoint lies beside it"
    return f"{path}: the checkpoint is damaged or cut short ({what}): {cure}"


def _folder(path: Path) -> str:
    if (path / "config.json").is_file():
        return "is a transformers folder: run python -m fairseq_tupe import-hf FOLDER OUT.pt and use OUT.pt"
    found = sorted(other.name for other in path.glob("*.pt"))
    return f"is a folder; pass a file{' in it: ' + ', '.join(found[:5]) if found else ', and it holds no *.pt'}"


def _foreign_format(path: Path) -> str | None:
    """What a file is that ``torch.save`` did not write, with the cure; None where it may have."""
    with open(path, "rb") as file:
        head = file.read(512)
    if head[8:10] == b'{"' and int.from_bytes(head[:8], "little") < path.stat().st_size:
        return (
            "is a safetensors file of transformers: run python -m fairseq_tupe import-hf FOLDER OUT.pt on the folder it lies in"
        )
    for magic, name in MAGIC.items():
        if head.startswith(magic) or head[257:262] == magic:
            return f"is {name}, not a checkpoint: unpack it, or pass the .pt file"
    if zipfile.is_zipfile(path):
        return _foreign_zip(path)
    text = _as_text(head)
    if text is not None:
        if text.startswith(LFS):
            return "is a Git LFS pointer, not the checkpoint itself: run git lfs pull"
        first = text.strip().splitlines()[0][:60] if text.strip() else ""
        return f'is a text file that begins with "{first}", not a checkpoint: pass the .pt file, or download it again'
    if head.startswith(b"\x80") and b"\x8a\x0al\xfc\x9cF\xf9 j\xa8P\x19." not in head[:20]:
        return "is a plain Python pickle, which torch.save did not write: pass the file that fairseq-train wrote"
    return None


def _foreign_zip(path: Path) -> str | None:
    with zipfile.ZipFile(path) as archive:
        names = archive.namelist()
    if any(name.endswith("/constants.pkl") for name in names):
        return "is a TorchScript program, which is code, not a checkpoint: pass the .pt file that fairseq-train wrote"
    if not any(name.endswith("/data.pkl") for name in names):
        return f"is a zip archive of {', '.join(names[:3]) or 'nothing'}, not a checkpoint: unpack it, or pass the .pt file"
    return None


def _as_text(head: bytes) -> str | None:
    try:
        text = head.decode("utf-8")
    except UnicodeDecodeError as error:
        if error.start < len(head) - 4:  # not just a character cut by the end of what was read
            return None
        text = head[: error.start].decode("utf-8")
    printable = sum(character.isprintable() or character in "\t\r\n" for character in text)
    return text if printable == len(text) else None


def _forbidden_global(path: Path, error: BaseException | None) -> str | None:
    message = str(error)
    found = re.search(r"GLOBAL (\S+) was not an allowed global|unsupported GLOBAL (\S+) whose", message)
    name = (found[1] or found[2]) if found else None
    if name is None and "Unsupported operand 149" in message:  # torch reads no newer protocols: look without running
        name = next((name for name in pickle_globals(path.read_bytes()) if not name.startswith("torch")), None)
    if name is None or name.startswith("torch.") and not hasattr(torch, name.split(".")[1]):
        return None  # a damaged name
    return name


def pickle_globals(data: bytes) -> list[str]:
    """Names that a pickle would import, in order, found without running it."""
    names, strings = [], []
    try:
        for opcode, argument, _ in pickletools.genops(data):
            if opcode.name == "GLOBAL":
                names.append(argument.replace(" ", "."))
            elif opcode.name == "STACK_GLOBAL" and len(strings) >= 2:
                names.append(".".join(strings[-2:]))
            elif isinstance(argument, str):
                strings.append(argument)
    except Exception:  # noqa: S110 - cut short: what was found until then counts
        pass
    return names


def _damaged_record(path: Path) -> str | None:
    """Name of a record whose checksum is wrong; torch itself does not look."""
    if not zipfile.is_zipfile(path):
        return None
    with zipfile.ZipFile(path) as archive:
        bad = archive.testzip()
    # torch can be told to write no checksums; then the first record's, which was readable, is wrong too
    return None if bad is None or bad.endswith("/data.pkl") else bad

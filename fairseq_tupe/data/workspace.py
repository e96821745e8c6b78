"""An output folder that is built beside its place, stage by stage, and put there in one rename.

OUT.partial holds the work; a finished stage is marked there with a key of everything it depends on, so that a later run
continues where an earlier one was stopped, and does over what has other settings. OUT stays as it was until the swap:
OUT -> OUT.previous, OUT.partial -> OUT, then OUT.previous goes. A run that finds OUT.previous without OUT puts it back.
"""

import fcntl
import hashlib
import json
import os
import shutil
from pathlib import Path
from typing import Any

from fairseq_tupe.errors import TupeError

REPORT = "report.json"
WORTH_SECONDS = 5  # a run that stops with less work done leaves nothing behind
_STAGES = "stages.json"
_LOCK = "lock"


def settings_key(*parts: Any) -> str:
    """A hash of settings, stable over runs."""
    return hashlib.sha256(json.dumps(parts, sort_keys=True).encode()).hexdigest()


def write_json(path: Path, value: Any) -> None:
    """Writes a JSON file whole or not at all."""
    temporary = path.with_name(path.name + ".tmp")
    temporary.write_text(json.dumps(value, indent=2) + "\n", encoding="utf-8")
    os.replace(temporary, path)


class Workspace:
    """The folder under construction. `open` first; use it as a context so that its lock goes.

    Attributes:
        out: the final folder.
        partial: the folder under construction.
        work: inside it, files that don't become part of the result.
    """

    def __init__(self, out: Path):
        out = Path(os.path.abspath(out))
        self.out = out
        self.partial = out.with_name(out.name + ".partial")
        self.previous = out.with_name(out.name + ".previous")
        self.work = self.partial / "work"
        self._lock = None

    def restore(self) -> None:
        """Undoes a swap that a kill cut in two (`unswapped_report` lets the next run finish it), or removes its rest."""
        if self.previous.is_dir():
            if not self.out.exists():
                os.rename(self.previous, self.out)
            elif (self.previous / REPORT).is_file():
                shutil.rmtree(self.previous)

    def existing_report(self) -> dict | None:
        """The report of a complete result at OUT, None where there is none.

        Raises:
            TupeError: where OUT is something else, which must not be replaced.
        """
        if not self.out.exists() and not self.out.is_symlink():
            return None
        if not self.out.is_dir():
            raise TupeError(f"{self.out}: this is a file, expected a folder to write or a new name; give another --out")
        if not any(self.out.iterdir()):
            return None
        try:
            report = json.loads((self.out / REPORT).read_text(encoding="utf-8"))
            return report if report["command"] == "prepare-pretrain-data" else self._not_ours()
        except (OSError, ValueError, KeyError, TypeError):
            return self._not_ours()

    def _not_ours(self) -> None:
        raise TupeError(f"{self.out}: holds files that this command did not write; give another --out, or remove the folder")

    def open(self, fresh: bool) -> None:
        """Makes or continues OUT.partial and locks it; `fresh` drops what an earlier run left."""
        self.out.parent.mkdir(parents=True, exist_ok=True)
        self.partial.mkdir(exist_ok=True)
        self._lock = open(self.partial / _LOCK, "w")  # noqa: SIM115
        try:
            fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            self._lock.close()
            self._lock = None
            raise TupeError(f"{self.partial}: another run is working on this output; wait for it or give another --out") from None
        if fresh:
            for entry in self.partial.iterdir():
                if entry.name != _LOCK:
                    shutil.rmtree(entry) if entry.is_dir() else entry.unlink()
        self.work.mkdir(exist_ok=True)

    def unswapped_report(self) -> dict | None:
        """The report of a finished folder that a kill kept from its place, None where there is none."""
        try:
            return json.loads((self.partial / REPORT).read_text(encoding="utf-8"))
        except (OSError, ValueError):
            return None

    def __enter__(self) -> "Workspace":
        return self

    def __exit__(self, *_: object) -> None:
        if self._lock is None:
            return
        seconds = sum(mark["result"].get("seconds", 0) for mark in self._stages().values())
        if self.partial.is_dir() and seconds < WORTH_SECONDS:
            shutil.rmtree(self.partial, ignore_errors=True)
        self._lock.close()
        self._lock = None

    def _stages(self) -> dict:
        try:
            return json.loads((self.partial / _STAGES).read_text(encoding="utf-8"))
        except (OSError, ValueError):
            return {}

    def finished(self, stage: str, key: str) -> dict | None:
        """What a finished stage recorded, or None where it must run: not finished, other settings, or a file changed."""
        mark = self._stages().get(stage)
        if mark is None or mark["key"] != key:
            return None
        for name, size in mark["files"].items():
            path = self.partial / name
            if not path.is_file() or path.stat().st_size != size:
                return None
        return mark["result"]

    def finish(self, stage: str, key: str, result: dict, files: list[Path]) -> None:
        """Marks a stage as finished; `files` are what later stages need of it."""
        sizes = {str(path.relative_to(self.partial)): path.stat().st_size for path in files}
        write_json(self.partial / _STAGES, {**self._stages(), stage: {"key": key, "result": result, "files": sizes}})

    def swap(self) -> None:
        """Puts the finished folder in its place."""
        shutil.rmtree(self.work, ignore_errors=True)
        (self.partial / _STAGES).unlink(missing_ok=True)
        (self.partial / _LOCK).unlink(missing_ok=True)
        if self.out.exists():
            os.rename(self.out, self.previous)
        os.rename(self.partial, self.out)
        shutil.rmtree(self.previous, ignore_errors=True)

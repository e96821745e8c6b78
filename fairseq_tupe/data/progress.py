"""Progress of a long stage on standard error: one line that renews itself on a terminal, else a line now and then."""

import sys
import time


class Progress:
    """Shows how many megabytes of a stage are done, how fast, and the percentage where the total is known."""

    def __init__(self, stage: str, total_bytes: int | None = None):
        self.stage = stage
        self.total = total_bytes
        self.done = 0
        self.text_bytes = 0
        self._started = time.monotonic()
        self._terminal = sys.stderr.isatty()
        self._shown = self._started

    def update(self, done: int, text_bytes: int | None = None) -> None:
        """Sets what is done, in bytes of the file and (for packed files) in bytes of text, and shows it at times."""
        self.done = done
        self.text_bytes = done if text_bytes is None else text_bytes
        now = time.monotonic()
        if now - self._shown >= (0.2 if self._terminal else 5.0):
            self._shown = now
            self._show(now)

    def _show(self, now: float, end: str = "") -> None:
        elapsed = max(now - self._started, 1e-3)
        megabytes = self.text_bytes / 1e6
        percent = f" ({100 * self.done / self.total:.0f}%)" if self.total else ""
        amount = f"{megabytes:.1f} MB{percent}, {megabytes / elapsed:.1f} MB/s, " if megabytes else ""
        line = f"{self.stage}: {amount}{elapsed:.0f} s"
        print(f"\r\033[K{line}" if self._terminal else line, end=end if self._terminal else "\n", file=sys.stderr, flush=True)

    def beat(self) -> None:
        """For a stage that can't say how far it is: shows the time it has run."""
        self.update(self.done)

    def finish(self) -> float:
        """Shows the end of the stage; returns its seconds."""
        now = time.monotonic()
        if self.total:
            self.done = self.total
        self._show(now, end="\n")
        return now - self._started

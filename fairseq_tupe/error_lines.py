"""Errors as one line instead of a traceback through fairseq's internals."""

import os
import re
import sys

from fairseq_tupe.errors import TupeError

LINE = "fairseq_tupe_line"  # attribute of an exception that keeps its type, but is to be shown as this one line
TRACEBACK_END = re.compile(r"^fairseq_tupe\.errors\.TupeError: (.*)$", re.MULTILINE)


def one_line(error: BaseException | None) -> str | None:
    """The message to show: ours from anywhere in the chain of exceptions, the outermost first; or None.

    fairseq wraps what goes wrong while it loads a checkpoint in a plain Exception; from a spawned rank, or a worker that
    loads data, an exception arrives as text, traceback and all.
    """
    seen = set()
    while error is not None and id(error) not in seen:
        seen.add(id(error))
        from_elsewhere = TRACEBACK_END.findall(str(error))
        if from_elsewhere:
            return from_elsewhere[-1]
        text = str(error) if isinstance(error, TupeError) else getattr(error, LINE, None)
        if text:
            return " ".join(text.split())
        error = error.__cause__ or error.__context__
    return None


def print_line(error: BaseException | None) -> bool:
    """Print the error's line to stderr, if it has one and FAIRSEQ_TUPE_TRACEBACK is not set; whether it did."""
    line = None if os.environ.get("FAIRSEQ_TUPE_TRACEBACK") else one_line(error)
    if line:  # the real stderr: torch.distributed puts a buffer in its place, to add a prefix
        print(f"fairseq_tupe: error: {line}", file=sys.__stderr__ or sys.stderr, flush=True)
    return bool(line)

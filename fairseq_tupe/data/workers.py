"""Work spread over processes: results in order, a bounded number of pieces under way, nothing left behind by a kill."""

import multiprocessing
import os
import signal
import threading
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures import TimeoutError as FutureTimeoutError
from concurrent.futures.process import BrokenProcessPool
from multiprocessing.connection import wait
from typing import Any

from fairseq_tupe.errors import TupeError


def _start_worker() -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the main process hears Ctrl-C and ends the workers
    parent = multiprocessing.parent_process()

    def leave_with_parent() -> None:
        wait([parent.sentinel])
        os._exit(1)

    threading.Thread(target=leave_with_parent, daemon=True).start()


class Workers:
    """A pool of processes; use it in a with statement."""

    def __init__(self, count: int):
        method = "fork" if "fork" in multiprocessing.get_all_start_methods() else "spawn"
        self.count = count
        self._others = set(multiprocessing.active_children())
        self._pool = ProcessPoolExecutor(count, multiprocessing.get_context(method), initializer=_start_worker)

    def __enter__(self) -> "Workers":
        return self

    def __exit__(self, kind: type | None, *_: object) -> None:
        self._pool.shutdown(wait=kind is None, cancel_futures=True)
        if kind is not None:  # after an error nobody waits for a training of minutes
            for child in set(multiprocessing.active_children()) - self._others:
                child.terminate()

    def map(self, function: Callable[..., Any], pieces: Iterable[tuple]) -> Iterator[Any]:
        """`function(*piece)` for each piece, in order; reads only a few pieces ahead, so memory stays bounded."""
        under_way: deque = deque()
        try:
            for piece in pieces:
                under_way.append(self._pool.submit(function, *piece))
                while len(under_way) > 2 * self.count + 1:
                    yield under_way.popleft().result()
            while under_way:
                yield under_way.popleft().result()
        except BrokenProcessPool:
            raise TupeError("a worker process was killed (out of memory?); try --workers 1") from None

    def call(self, function: Callable[..., Any], *arguments: Any, beat: Callable[[], None], seconds: float = 1.0) -> Any:
        """One call in a worker; `beat()` runs about every `seconds` until it is done."""
        future = self._pool.submit(function, *arguments)
        while True:
            try:
                return future.result(timeout=seconds)
            except FutureTimeoutError:  # Python 3.10's is not the built-in one
                if future.done():
                    raise
                beat()
            except BrokenProcessPool:
                raise TupeError("the process that trains the tokenizer was killed (out of memory?)") from None

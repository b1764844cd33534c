"""While llama.cpp loads a model: progress, Ctrl-C, and what the loader says when it refuses.

llama.cpp's loader reports failures as NULL and a log line. :class:`LoadMonitor` keeps those lines for the
exception, and turns an exception of a progress callback (KeyboardInterrupt above all) into a stopped load
that raises it, where ctypes alone would print and forget it.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import re
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator
from types import FrameType, TracebackType
from typing import Any, TextIO

import llama_cpp

from .options import ProgressCallback

_DEBUG, _WARN, _ERROR, _CONT = 1, 3, 4, 5  # enum ggml_log_level; "cont" continues the line before
# llama.cpp has no calls that tell; these are the texts of the version that SPICE is built for.
_ASSIGNED = re.compile(rb"layer +(\d+) assigned to device ([^,]+),")
_CACHE = re.compile(rb"size = +([\d.]+) MiB \( *\d+ cells")
_KEPT_LINES = 20
_BAR_DELAY_S = 0.5  # a load shorter than this shows no bar
_BAR_WIDTH = 30


class HeldInterrupt:
    """Holds Ctrl-C back while C calls back into Python, where ctypes would print and forget it.

    A context manager; at its end the signal is handled as it would have been. Does nothing but in the main
    thread, which alone gets signals.
    """

    def __init__(self) -> None:
        self.seen = False  #: for a callback to ask, so that C stops early
        self._handler: Any = None

    def __enter__(self) -> HeldInterrupt:
        handler = signal.getsignal(signal.SIGINT)
        if threading.current_thread() is threading.main_thread() and callable(handler):
            self._handler = handler
            signal.signal(signal.SIGINT, self._note)
        return self

    def _note(self, _number: int, _frame: FrameType | None) -> None:
        self.seen = True

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._handler is not None:
            signal.signal(signal.SIGINT, self._handler)
            if self.seen:
                self._handler(signal.SIGINT, None)  # raises KeyboardInterrupt, unless the user has another


# The log callback of llama.cpp is one global, so loads that listen to it take turns.
_log_lock = threading.RLock()


@contextlib.contextmanager
def listening(hear: Callable[[int, bytes], None], *, forward: bool = False) -> Iterator[None]:
    """Give each line that llama.cpp logs, and its level, to ``hear``; ``forward``: to its log as well.

    ``hear`` must not raise: ctypes would print that and forget it.
    """
    before, user_data = llama_cpp.llama_log_callback(), ctypes.c_void_p()

    def on_log(level: int, text: bytes, _user_data: int | None) -> None:
        hear(level, text)
        if forward and before:
            before(level, text, user_data)

    listener = llama_cpp.llama_log_callback(on_log)
    with _log_lock:
        llama_cpp.llama_log_get(ctypes.byref(before), ctypes.byref(user_data))
        llama_cpp.llama_log_set(listener, ctypes.c_void_p(0))
        try:
            yield
        finally:
            llama_cpp.llama_log_set(before, user_data)


def cache_sizes(line: bytes) -> list[int]:
    """Bytes of the cache that a line of llama.cpp's log tells of, if it does."""
    return [int(float(size) * 2**20) for size in _CACHE.findall(line)]


class ProgressBar:
    """A bar on stderr that appears once the work takes longer than half a second; ``quiet``: never."""

    def __init__(self, label: str, *, quiet: bool = False) -> None:
        self._label, self._quiet = label, quiet
        self._started = time.monotonic()
        self._shown = -1
        self._stream = _private_stderr()

    def __call__(self, fraction: float) -> None:
        percent = int(100 * fraction)
        if self._quiet or percent == self._shown or time.monotonic() - self._started < _BAR_DELAY_S:
            return
        self._shown = percent
        bar = "#" * int(_BAR_WIDTH * fraction)
        self._write(f"\r{self._label} [{bar:<{_BAR_WIDTH}}] {percent:3d} %")

    def close(self) -> None:
        """Wipe the bar, so that what follows starts on a clean line."""
        if self._shown >= 0:
            self._write("\r\x1b[2K")
        if self._stream is not sys.stderr:
            with contextlib.suppress(OSError):
                self._stream.close()

    def _write(self, text: str) -> None:
        # A closed terminal must not end a load.
        with contextlib.suppress(OSError, ValueError):
            self._stream.write(text)
            self._stream.flush()


def _private_stderr() -> TextIO:
    """A stream to today's stderr: llama-cpp-python points the real one to nowhere while it loads quietly."""
    try:
        return os.fdopen(os.dup(sys.stderr.fileno()), "w", encoding="utf-8", errors="replace")
    except (OSError, ValueError, AttributeError):
        return sys.stderr  # a notebook, or a test that captures: not a file descriptor


class LoadMonitor:
    """Listens to one load. Use as a context manager around it, in the thread that loads.

    ``portion`` is the share of the file's weights that llama.cpp really reads: it reports progress against
    all of them, experts included, so its fractions are stretched by it.
    """

    def __init__(self, progress: ProgressCallback | bool | None, *, portion: float, verbose: bool) -> None:
        self._bar = ProgressBar("loading") if progress is True else None
        self._report: ProgressCallback | None = self._bar or (progress if callable(progress) else None)
        self._portion = max(portion, 1e-9)
        self._verbose = verbose
        self._level = 0
        self._lines: list[str] = []
        self.layer_devices: dict[int, str] = {}  #: which device llama.cpp put each layer on
        self._exit = contextlib.ExitStack()
        self._held = HeldInterrupt()
        self.cache_bytes = 0  #: of the KV cache, and of recurrent layers' states
        self.interrupted: BaseException | None = None  #: what a callback raised; the load was told to stop
        self.stopped = False  #: the progress callback returned False
        self.progress_callback = llama_cpp.llama_progress_callback(self._on_progress)

    @property
    def messages(self) -> list[str]:
        """Warnings and errors that llama.cpp logged during the load, oldest first."""
        return [line.strip() for line in self._lines if line.strip()]

    def __enter__(self) -> LoadMonitor:
        self._exit.enter_context(self._held)
        self._exit.enter_context(self._listening())
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._bar is not None:
            self._bar.close()
        self._exit.close()

    def _on_progress(self, fraction: float, _user_data: int | None) -> bool:
        try:
            if self.interrupted is not None or self._held.seen:
                return False
            if self._report is not None:
                self.stopped |= self._report(min(1.0, fraction / self._portion)) is False
        except BaseException as error:
            self.interrupted = error
            return False
        return not self.stopped

    @contextlib.contextmanager
    def _listening(self) -> Iterator[None]:
        def hear(level: int, text: bytes) -> None:
            try:
                self._level = self._level if level == _CONT else level
                if level == _DEBUG and (match := _ASSIGNED.search(text)):
                    self.layer_devices[int(match[1])] = match[2].decode("utf-8", "replace")
                self.cache_bytes += sum(cache_sizes(text))
                if self._level in (_WARN, _ERROR):
                    self._keep(text.decode("utf-8", "replace"), continued=level == _CONT)
            except BaseException as error:
                self.interrupted = error

        with listening(hear, forward=self._verbose):
            yield

    def _keep(self, text: str, *, continued: bool) -> None:
        if continued and self._lines:
            self._lines[-1] += text
        else:
            self._lines.append(text)
            del self._lines[:-_KEPT_LINES]

"""Ctrl-C while C calls back into Python, and progress bars."""

from __future__ import annotations

import ctypes
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from spice_moe.loading import HeldInterrupt, ProgressBar
from spice_moe.shipped import tiny_model


@pytest.fixture(autouse=True)
def ctrl_c() -> Iterator[None]:
    """A test that runs in the background of a shell has the signal ignored."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


def test_the_signal_waits_for_c_to_return() -> None:
    reached: list[str] = []

    def callback() -> None:  # ctypes would print and forget what is raised in here
        signal.raise_signal(signal.SIGINT)
        reached.append("callback went on")

    def call() -> None:
        with HeldInterrupt() as outer, HeldInterrupt() as held:
            ctypes.CFUNCTYPE(None)(callback)()
            assert held.seen and not outer.seen
            reached.append("C returned")

    with pytest.raises(KeyboardInterrupt):
        call()
    assert reached == ["callback went on", "C returned"]
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler


def test_the_users_own_handler_gets_the_signal() -> None:
    got: list[int] = []
    signal.signal(signal.SIGINT, lambda number, _frame: got.append(number))
    with HeldInterrupt():
        signal.raise_signal(signal.SIGINT)
        assert not got
    assert got == [signal.SIGINT]


def test_other_threads_are_left_alone() -> None:
    failed: list[BaseException] = []

    def work() -> None:
        try:
            with HeldInterrupt() as held:
                assert not held.seen
        except BaseException as error:
            failed.append(error)

    thread = threading.Thread(target=work)
    thread.start()
    thread.join()
    assert not failed


def test_ctrl_c_ends_a_trace(tmp_path: Path) -> None:
    text = tmp_path / "text.txt"
    text.write_text("It is a long way to the sea, and nobody knows it. " * 2000)
    arguments = [str(tiny_model()), "-f", str(text), "-o", str(tmp_path / "t.npz"), "--decode"]
    process = subprocess.Popen(
        [sys.executable, "-m", "spice_moe.trace_cli", *arguments, "--threads", "1"],
        stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.default_int_handler),
    )  # fmt: skip
    deadline = time.monotonic() + 60
    while not list(tmp_path.glob(".spice-trace-*/ids")) and time.monotonic() < deadline:
        time.sleep(0.02)
    process.send_signal(signal.SIGINT)
    out, err = process.communicate(timeout=60)
    assert process.returncode == 130, err
    assert err == "spice-trace: interrupted\n" and out == ""
    assert list(tmp_path.iterdir()) == [text]


def test_a_quiet_bar_draws_nothing(capsys: pytest.CaptureFixture[str], monkeypatch) -> None:
    monkeypatch.setattr("spice_moe.loading._BAR_DELAY_S", 0)
    for quiet in (False, True):
        bar = ProgressBar("working", quiet=quiet)
        bar(0.5)
        bar.close()
        assert (capsys.readouterr().err == "") is quiet

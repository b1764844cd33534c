"""``spice-run`` as users run it: in a process of its own."""

from __future__ import annotations

import json
import os
import resource
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest
from spice_moe import COUNTERS, _core
from support_models import make_dense

RUN = [sys.executable, "-m", "spice_moe"]


@pytest.fixture(scope="module")
def model(tiny_model) -> Path:
    return tiny_model("qwen2moe", layers=3, expert_type="Q4_K", seed=1)


def run(*args: object, stdin: str | None = None, **kwargs) -> subprocess.CompletedProcess[str]:
    command = [*RUN, *map(str, args), "-t", "1"]
    source = {"stdin": subprocess.DEVNULL} if stdin is None else {"input": stdin}
    return subprocess.run(command, capture_output=True, text=True, timeout=120, **source, **kwargs)


def test_text_goes_to_stdout_and_the_rest_to_stderr(model: Path) -> None:
    done = run(model, "-p", "Hello", "-n", 12, "--temp", 0)
    assert done.returncode == 0
    assert done.stdout.strip()
    plan, summary = done.stderr.splitlines()
    assert plan.startswith("spice-run: SPICE: qwen2moe")
    for part in ("prompt", "decode 11 tokens", "tokens/s", "from disk", "experts resident", "SPICE, exact"):
        assert part in summary
    again = run(model, "-p", "Hello", "-n", 12, "--temp", 0, "--plain")
    assert again.stdout == done.stdout
    assert "plain llama.cpp" in again.stderr


def test_json_is_one_object(model: Path) -> None:
    text = run(model, "-p", "Hello", "-n", 12, "--temp", 0).stdout.removesuffix("\n")
    done = run(model, "-p", "Hello", "-n", 12, "--temp", 0, "--json")
    assert done.returncode == 0
    assert done.stderr == ""
    report = json.loads(done.stdout)
    assert report["text"] == text
    assert report["decode"]["tokens"] == 11
    assert report["prompt"]["tokens_per_second"] > 0
    assert report["plan"]["mode"] == "spice"
    assert report["stats"].keys() == COUNTERS.keys()
    assert report["stats"]["layer_calls"] == 3 * 12
    assert report["exit_code"] == 0


def test_prompt_from_stdin_and_file(model: Path, tmp_path: Path) -> None:
    options = ("-n", 8, "--temp", 0, "--raw")
    expected = run(model, "-p", "Grüße", *options).stdout
    file = tmp_path / "prompt.txt"
    file.write_text("Grüße\n", encoding="utf-8")
    assert run(model, "-f", file, *options).stdout == expected
    assert run(model, *options, stdin="Grüße\n").stdout == expected
    assert run(model, "-p", "Grüße", "-n", 8, "--temp", 0).stdout != expected, "the template was not used"


def test_seed_repeats_an_answer(model: Path) -> None:
    texts = [run(model, "-p", "Hello", "-n", 12, "--seed", seed).stdout for seed in (5, 5, 6)]
    assert texts[0] == texts[1] != texts[2]


def test_chat_on_a_pipe(model: Path) -> None:
    done = run(
        model, "-i", "-n", 6, "--temp", 0, "--system", "Be brief.", stdin="one\n\n/reset\none\n/exit\nno\n"
    )
    assert done.returncode == 0
    first, second = done.stdout.splitlines()
    assert first == second, "/reset starts the same conversation again"
    assert run(model, "-i", "-n", 6, stdin="").returncode == 0


def test_a_chat_longer_than_the_context_goes_on(model: Path) -> None:
    done = run(model, "-i", "-n", 4, "-c", 64, stdin=f"{'word ' * 200}\n/reset\nhi\n/exit\n")
    assert done.returncode == 0
    assert "/reset" in done.stderr
    assert len(done.stdout.splitlines()) == 2  # an empty answer and an answer


def test_experts_used(model: Path) -> None:
    done = run(model, "-p", "Hello", "-n", 4, "--experts-used", 3)
    assert done.returncode == 0
    assert "3 used per token" in done.stderr
    assert run(model, "-p", "Hello", "--experts-used", 9).returncode == 2


def test_dense_model(tmp_path: Path) -> None:
    dense = make_dense(tmp_path / "dense.gguf")
    done = run(dense, "-p", "Hello", "-n", 4)
    assert done.returncode == 0
    assert "dense" in done.stderr
    assert run(dense, "-p", "Hello", "--experts-used", 2).returncode == 2


def test_exit_codes_and_one_line_messages(model: Path, tmp_path: Path) -> None:
    other = tmp_path / "other.gguf"
    other.write_text("This is a text, not a model.\n" * 100)
    cut = tmp_path / "cut.gguf"
    cut.write_bytes(model.read_bytes()[:100_000])
    odd = tmp_path / "odd.gguf"
    odd.write_bytes(model.read_bytes().replace(b"qwen2moe", b"qwen9moe"))
    for path, code, words in (
        (tmp_path / "none.gguf", 3, "no such file"),
        (other, 4, "not a GGUF"),
        (cut, 4, "ends after"),
        (odd, 5, "architecture"),
    ):
        done = run(path, "-p", "Hello")
        assert done.returncode == code, done.stderr
        message = done.stderr.splitlines()[-1]
        assert words in message
        assert path.name in message
        assert "Traceback" not in done.stderr
        assert done.stdout == ""
        report = json.loads(run(path, "-p", "Hello", "--json").stdout)
        assert report["exit_code"] == code


def test_out_of_memory(model: Path) -> None:
    limit = 4 << 30
    done = run(
        model, "-p", "Hello", "-c", 3_000_000,
        preexec_fn=lambda: resource.setrlimit(resource.RLIMIT_AS, (limit, limit)),
    )  # fmt: skip
    assert done.returncode == 6, done.stderr
    assert "not enough memory" in done.stderr


@pytest.mark.parametrize(
    "args",
    [
        (),
        ("MODEL",),  # empty stdin
        ("MODEL", "-p", "a", "-i"),
        ("MODEL", "-i", "--json"),
        ("MODEL", "-p", "a", "--raw", "--system", "b"),
        ("MODEL", "-p", "a", "-n", "0"),
        ("MODEL", "-p", ""),
        ("MODEL", "--nonsense"),
    ],
)
def test_wrong_usage(model: Path, args: tuple[str, ...]) -> None:
    done = run(*(str(model) if arg == "MODEL" else arg for arg in args))
    assert done.returncode == 2
    assert "spice-run: error:" in done.stderr.splitlines()[-1]


def test_help_and_version() -> None:
    assert "exit codes" in run("--help").stdout
    assert _core.LLAMA_CPP_PYTHON in run("--version").stdout


def test_a_reader_that_leaves(model: Path) -> None:
    command = f'{" ".join(RUN)} "{model}" -p Hello -n 2000 -t 1 | head -c 3'
    done = subprocess.run(["bash", "-c", command], capture_output=True, text=True, timeout=120)
    assert len(done.stdout) == 3
    assert "Traceback" not in done.stderr
    assert "Exception ignored" not in done.stderr


def start(*args: object) -> subprocess.Popen[str]:
    command = [*RUN, *map(str, args), "-t", "1"]
    pipe = subprocess.PIPE
    process = subprocess.Popen(
        command, stdin=pipe, stdout=pipe, stderr=pipe, text=True, bufsize=1,
        # A shell starts background jobs with SIGINT ignored, and children inherit that.
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),
    )  # fmt: skip
    watchdog = threading.Timer(60, process.kill)  # a test that fails must not leave it waiting for input
    watchdog.daemon = True
    watchdog.start()
    return process


def test_ctrl_c_ends_an_answer_with_the_summary(model: Path) -> None:
    process = start(model, "-p", "Hello", "--temp", "0", "--raw")
    assert process.stdout is not None
    first = process.stdout.read(3)
    process.send_signal(signal.SIGINT)
    out, err = process.communicate(timeout=60)
    assert process.returncode == 130
    assert first + out
    assert "tokens/s" in err.splitlines()[-1]
    assert "Traceback" not in err


def test_ctrl_c_in_a_chat_stops_the_answer_and_then_ends(model: Path) -> None:
    process = start(model, "-i", "--temp", "0")
    assert process.stdin is not None
    assert process.stdout is not None
    process.stdin.write("Hello\n")
    process.stdout.read(3)
    process.send_signal(signal.SIGINT)
    process.stdout.readline()  # the answer's end
    process.stdin.write("again\n")
    assert process.stdout.read(3)
    process.send_signal(signal.SIGINT)
    process.stdout.readline()
    time.sleep(0.2)  # now it waits for a line
    process.send_signal(signal.SIGINT)
    _, err = process.communicate(timeout=60)
    assert process.returncode == 130
    assert "tokens/s" in err.splitlines()[-1]
    assert "Traceback" not in err


def test_a_terminal_gets_a_chat(model: Path) -> None:
    """With a terminal as stdin and no prompt, -i is the default; Ctrl-D ends it."""
    pty = pytest.importorskip("pty")
    master, slave = pty.openpty()
    process = subprocess.Popen(
        [*RUN, str(model), "-n", "4", "-t", "1"],
        stdin=slave, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
    )  # fmt: skip
    os.close(slave)
    os.write(master, b"hi\n")
    time.sleep(0.5)
    os.write(master, b"\x04")
    _, err = process.communicate(timeout=60)
    os.close(master)
    assert process.returncode == 0
    assert "/exit or Ctrl-D" in err

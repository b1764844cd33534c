"""What the commands have in common: arguments with bounds, failures in one line, streams that are closed."""

from __future__ import annotations

import argparse
import json
import os
import re
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from spice_moe import command, fit_cli, plan_cli, sim_cli, trace_cli
from spice_moe.shipped import tiny_model

TEXT = "It is a long way to the sea, and nobody knows it. " * 4


@pytest.mark.parametrize(
    ("parse", "good", "bad"),
    [
        (command.count, {"1": 1, "20": 20}, ["0", "-1", "x", "1.5", ""]),
        (command.integer(-1, 5), {"-1": -1, "5": 5}, ["-2", "6", "nan"]),
        (command.number(0, 1), {"0": 0.0, "0.5": 0.5, "1": 1.0}, ["-0.1", "1.1", "nan", "inf", "x"]),
        (command.number(0), {"1e9": 1e9}, ["inf", "-1"]),
        (command.size, {"6GiB": 6 * 2**30, "7": 7}, ["-5", "50%", "x", "99999999999999T"]),
    ],
)
def test_argument_types(parse, good: dict[str, float], bad: list[str]) -> None:
    for text, value in good.items():
        assert parse(text) == value
    for text in bad:
        with pytest.raises(argparse.ArgumentTypeError, match=r"must be|not a size"):
            parse(text)


def test_an_error_of_the_system_names_the_file(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    def work() -> int:
        raise PermissionError(13, "Permission denied", str(tmp_path / "model.gguf"))

    assert command.run("spice-x", work, json_errors=True) == command.IO
    out, err = capsys.readouterr()
    assert err == f"spice-x: error: {tmp_path}/model.gguf: Permission denied\n"
    assert json.loads(out)["exit_code"] == command.IO


def shell(script: str, **kwargs) -> subprocess.CompletedProcess[str]:
    main = f'"{sys.executable}" -m spice_moe.plan_cli "{tiny_model()}" --hardware laptop-nvme --json'
    run = script.replace("PLAN", main)
    return subprocess.run(["bash", "-c", run], capture_output=True, text=True, timeout=120, **kwargs)


@pytest.mark.parametrize(
    ("script", "code"),
    [
        ("PLAN >&-", 0),  # the shell closed stdout: Python has None in its place
        ("PLAN <&- 2>&- >&-", 0),
        ("PLAN > /dev/full", command.IO),
        ("PLAN | true; exit ${PIPESTATUS[0]}", command.OTHER),
    ],
)
def test_streams_that_cannot_be_written(script: str, code: int) -> None:
    if "/dev/full" in script and not Path("/dev/full").exists():
        pytest.skip("no /dev/full")
    done = shell(script)
    assert done.returncode == code, done.stderr
    assert "Traceback" not in done.stderr and "Exception ignored" not in done.stderr
    if code == command.IO:
        assert "No space left" in done.stderr


def test_an_output_never_replaces_an_input(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    model, text, trace = tmp_path / "m.gguf", tmp_path / "t.txt", tmp_path / "t.npz"
    model.write_bytes(tiny_model().read_bytes())
    text.write_text(TEXT)
    link = tmp_path / "link.gguf"
    link.symlink_to(model)
    assert trace_cli.main([str(model), "-f", str(text), "-o", str(trace), "--tokens", "20"]) == 0
    before = {path: path.read_bytes() for path in (model, text, trace)}
    for main, arguments in (
        (fit_cli.main, [model, "--text", text, "-o", model]),
        (fit_cli.main, [model, "--text", text, "-o", link]),
        (fit_cli.main, [model, "--text", text, "-o", text]),
        (trace_cli.main, [model, "-f", text, "-o", model]),
        (trace_cli.main, [model, "-f", text, "-o", text]),
        (plan_cli.main, [model, "--probe", model]),
    ):
        capsys.readouterr()
        assert main([str(one) for one in arguments]) == command.USAGE
        assert "would be overwritten" in capsys.readouterr().err
    assert all(path.read_bytes() == data for path, data in before.items())
    for main, arguments in (
        (fit_cli.main, [model, "--text", text, "-o"]),
        (trace_cli.main, [model, "-f", text, "-o"]),
        (plan_cli.main, [model, "--probe"]),
    ):
        assert main([*map(str, arguments), str(tmp_path)]) == command.USAGE
        assert "is a directory" in capsys.readouterr().err
        assert main([*map(str, arguments), str(tmp_path / "no" / "x")]) == command.NO_FILE
        assert "no such folder" in capsys.readouterr().err


def test_inputs_that_are_no_files(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    text = tmp_path / "t.txt"
    text.write_text(TEXT)
    out = str(tmp_path / "out")
    for name, code, words in (
        ("", command.NO_FILE, "no such file"),
        (str(tmp_path / "none"), command.NO_FILE, "no such file"),
        (str(tmp_path), command.FORMAT, "directory"),
        ("/dev/null", command.FORMAT, "regular file"),
        (str(tmp_path / "n\udcff.gguf"), command.UNSUPPORTED, "UTF-8"),
    ):
        for main, arguments in (
            (fit_cli.main, [name, "--text", str(text), "-o", out]),
            (trace_cli.main, [name, "-f", str(text), "-o", out]),
            *(() if not name else ((plan_cli.main, [name, "--hardware", "laptop-nvme"]),)),
        ):
            assert main(arguments) == code, (main, name)
            assert words in capsys.readouterr().err
    for option in ("--model", "--hardware"):
        assert sim_cli.main([str(tmp_path), "--slab", "1M", option, "laptop-nvme"]) == command.FORMAT
        assert "regular file" in capsys.readouterr().err


def test_a_probe_as_json_and_options_that_exclude_each_other(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    from spice_moe import hardware

    monkeypatch.setattr("spice_moe.probe.measure", lambda *_: hardware.load("laptop-nvme"))
    assert plan_cli.main(["--probe", str(tmp_path / "p.toml"), "--json"]) == 0
    report = json.loads(capsys.readouterr().out)
    assert report["hardware"] == str(tmp_path / "p.toml") and report["memory"] > 0
    for arguments in (["--probe", "p", "--hardware", "rtx4060"], [str(tiny_model()), "--file", "x"]):
        with pytest.raises(SystemExit) as stop:
            plan_cli.main(arguments)
        assert stop.value.code == 2
    assert plan_cli.main([str(tiny_model()), "--hardware", "laptop-nvme", "--vram", "6G"]) == command.USAGE
    assert "no GPU" in capsys.readouterr().err


UNREADABLE = """
import ctypes, importlib, sys
libc = ctypes.CDLL(None)
header, sets = (ctypes.c_uint32 * 2)(0x20080522, 0), (ctypes.c_uint32 * 6)()
assert libc.capget(header, sets) == 0
for held in (0, 1):  # CAP_DAC_OVERRIDE and CAP_DAC_READ_SEARCH, with which the superuser reads everything
    sets[held] &= ~0b110
assert libc.capset(header, sets) == 0
from spice_moe import cli, fit_cli, plan_cli, sim_cli, trace_cli
secret, folder, model, text = sys.argv[1:]
for main, *arguments in (
    (cli.main, secret, "-p", "x"),
    (cli.main, model, "-f", secret),
    (cli.main, model, "-p", "x", "--timeline", folder + "/t"),
    (plan_cli.main, secret, "--hardware", "rtx4060"),
    (trace_cli.main, secret, "-f", text, "-o", "/tmp/t.npz"),
    (trace_cli.main, model, "-f", text, "-o", folder + "/t.npz"),
    (sim_cli.main, secret, "--slab", "1M"),
    (fit_cli.main, model, "--text", text, "-o", folder + "/x"),
):
    print(main(arguments))
"""


@pytest.mark.skipif(sys.platform != "linux", reason="takes capabilities away")
def test_without_permission(tmp_path: Path) -> None:
    secret, folder, text = tmp_path / "secret", tmp_path / "folder", tmp_path / "t.txt"
    secret.write_bytes(tiny_model().read_bytes())
    secret.chmod(0)
    text.write_text(TEXT)
    folder.mkdir(mode=0o500)
    names = [str(one) for one in (secret, folder, tiny_model(), text)]
    done = subprocess.run([sys.executable, "-c", UNREADABLE, *names], capture_output=True, text=True)
    assert done.stdout.split() == [str(command.IO)] * 8, done.stderr
    lines = done.stderr.splitlines()
    assert len(lines) == 8
    assert all(re.search(r"secret: .*ermission|folder: no permission", line) for line in lines)


# Ctrl-C in the middle of the imports: what imports numpy sends it.
INTERRUPTED_IMPORT = """
import os, runpy, signal, sys
class Finder:
    def find_spec(self, name, path=None, target=None):
        if name == "numpy":
            os.kill(os.getpid(), signal.SIGINT)
sys.meta_path.insert(0, Finder())
"""
MODULES = ["spice_moe", *(f"spice_moe.{name}_cli" for name in ("trace", "fit", "sim", "plan"))]


@pytest.mark.parametrize("name", ["spice-run", *MODULES])
def test_ctrl_c_while_imports_run(name: str, tmp_path: Path) -> None:
    """As a script of that name, as pip makes them, or as ``python -m``."""
    (tmp_path / "sitecustomize.py").write_text(INTERRUPTED_IMPORT)
    paths = os.pathsep.join([str(tmp_path), *filter(None, sys.path)])
    script = tmp_path / name
    script.write_text("import sys\nfrom spice_moe.cli import main\nsys.exit(main())\n")
    command = [str(script)] if name == "spice-run" else ["-m", name]
    done = subprocess.run(
        [sys.executable, *command, "--version"], capture_output=True, text=True, timeout=180,
        env={**os.environ, "PYTHONPATH": paths},
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),
    )  # fmt: skip
    assert (done.returncode, done.stdout, done.stderr) == (130, "", "")


def test_an_import_in_another_program_is_left_alone() -> None:
    script = (
        "import signal; old = signal.getsignal(signal.SIGINT); import spice_moe.command\n"
        "assert signal.getsignal(signal.SIGINT) is old"
    )
    assert subprocess.run([sys.executable, "-c", script], timeout=180).returncode == 0


def test_a_wrong_installation_is_told_in_one_line(tmp_path: Path) -> None:
    (tmp_path / "llama_cpp.py").write_text("__version__ = '0.0.1'\n")
    paths = os.pathsep.join([str(tmp_path), *filter(None, sys.path)])
    command = [sys.executable, "-m", "spice_moe", "--version"]
    env = {**os.environ, "PYTHONPATH": paths}
    done = subprocess.run(command, capture_output=True, text=True, env=env, cwd=tmp_path, timeout=180)
    assert done.returncode == 1 and done.stdout == ""
    assert re.fullmatch(r"spice_moe: error: SPICE needs .* found 0\.0\.1: pip install .*\n", done.stderr)

"""spice-fit from end to end: the shipped model gets better, random models of other families stay valid."""

from __future__ import annotations

import contextlib
import json
import os
import random
import signal
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from spice_moe import SpiceOptions, _core, fit, fit_cli, fit_recall, sidecar
from spice_moe.attachment import sidecar_for
from spice_moe.errors import SpiceError, SpiceUnsupportedError
from spice_moe.shipped import tiny_model as shipped_model
from support_models import make_dense

from models.tiny import stories, tasks


def chat(characters: int) -> str:
    r, out = random.Random(3), []
    while sum(map(len, out)) < characters:
        question, answer = stories.request(r) if r.random() < 0.2 else tasks.draw(r)
        out.append(f"<|im_start|>user\n{question}<|im_end|>\n<|im_start|>assistant\n{answer}<|im_end|>\n")
    return "".join(out)


WORDS = " ".join(random.Random(0).choices(["river", "stone", "lamp", "the", "runs", "under", "blue"], k=700))


@pytest.fixture(scope="module")
def fitted(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict]:
    out = tmp_path_factory.mktemp("fit") / "tiny.spice.gguf"
    options = fit.FitOptions(tokens=3000, chunk=128, memory=4 << 20)
    return out, fit.fit(shipped_model(), {"chat": chat(14000)}, out, options)


def test_every_horizon_of_the_shipped_model_is_predicted_better(fitted: tuple[Path, dict]) -> None:
    _, report = fitted
    for horizon in (0, 1):  # it has three layers with experts
        frozen, adapter, draft = (
            report["recall"][kind][horizon] for kind in ("training-free", *fit_recall.KINDS)
        )
        assert adapter > frozen + 0.05
        assert draft > frozen + 0.05
    assert report["kept"] == {"adapter": 3, "draft": 3}
    assert report["possible"] == 3


def test_little_memory_means_more_passes_and_the_same_heads(
    fitted: tuple[Path, dict], tmp_path: Path
) -> None:
    _, report = fitted
    assert report["passes"] > 1
    options = fit.FitOptions(tokens=3000, chunk=128)
    again = fit.fit(shipped_model(), {"chat": chat(14000)}, tmp_path / "s.gguf", options)
    assert again["passes"] == 1
    assert again["recall"] == report["recall"]


def test_the_file_says_what_it_is_and_is_refused_for_another_model(
    fitted: tuple[Path, dict], tiny_model
) -> None:
    from gguf import GGUFReader

    path, report = fitted
    fields = GGUFReader(path).fields
    assert fields["general.architecture"].contents() == "spice-sidecar"
    assert fields["spice.fingerprint"].contents() == report["fingerprint"]
    assert fields["spice.recall.draft"].contents() == pytest.approx(
        [v for v in report["recall"]["draft"] if v is not None]
    )
    heads = _core.heads.Heads(str(shipped_model()), sidecar=str(path))
    assert heads.fitted("draft", 0, 1) and heads.fitted("adapter", 0, 2)
    with pytest.raises(SpiceUnsupportedError, match="another model"):
        _core.heads.Heads(str(tiny_model("qwen2moe")), sidecar=str(path))


@pytest.mark.parametrize(
    "arch", ["qwen2moe", "deepseek2-v3", "gemma4", "gpt-oss", "granitehybrid", "smallthinker"]
)
def test_random_models_of_other_families_stay_valid(arch: str, tiny_model, tmp_path: Path) -> None:
    model = tiny_model(arch, layers=3)
    out = tmp_path / "s.gguf"
    report = fit.fit(model, {"words": WORDS}, out, fit.FitOptions(chunk=64, horizons=2, tokens=1200))
    heads = _core.heads.Heads(str(model), sidecar=str(out), max_horizon=2)
    for kind in ("training-free", *fit_recall.KINDS):
        for group in range(len(heads.layers)):
            hidden = np.ones((1, 256), np.float32)
            scores = heads.scores(kind, group, 1, hidden)
            assert scores is None or np.isfinite(scores).all()
    # What is kept was better on rows of its own, so on others it is not much worse.
    for frozen, kind in ((report["recall"]["training-free"], k) for k in fit_recall.KINDS):
        for before, after in zip(frozen, report["recall"][kind], strict=True):
            assert before is None or after is None or after > before - 0.05


def test_more_experts_than_the_rank(tiny_model, tmp_path: Path) -> None:
    model = tiny_model("qwen3moe", experts=160, used=4, ff=64, layers=2)
    out = tmp_path / "s.gguf"
    fit.fit(model, {"words": WORDS}, out, fit.FitOptions(chunk=64, horizons=1, tokens=1200))
    assert _core.heads.Heads(str(model), sidecar=str(out)).layers == [0, 1]


@pytest.mark.parametrize(
    ("texts", "error", "words"),
    [({"t": "too short"}, ValueError, "too few"), ({}, ValueError, "too few")],
)
def test_too_little_text(texts: dict, error: type, words: str, tmp_path: Path) -> None:
    with pytest.raises(error, match=words):
        fit.fit(shipped_model(), texts, tmp_path / "s.gguf")
    assert not list(tmp_path.iterdir())


def test_what_cannot_be_fitted(tiny_model, tmp_path: Path) -> None:
    with pytest.raises(SpiceUnsupportedError, match="two banks"):
        fit.fit(tiny_model("grovemoe"), {"t": WORDS}, tmp_path / "s.gguf")
    with pytest.raises(SpiceUnsupportedError, match="nothing can be fitted"):
        fit.fit(make_dense(tmp_path / "dense.gguf"), {"t": WORDS}, tmp_path / "s.gguf")
    with pytest.raises(FileNotFoundError, match="no such folder"):
        fit.fit(shipped_model(), {"t": WORDS}, tmp_path / "absent" / "s.gguf")
    assert [p.name for p in tmp_path.iterdir()] == ["dense.gguf"]


def test_without_the_package_that_writes_it_is_said_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "gguf", None)
    with pytest.raises(SpiceError, match="pip install gguf"):
        fit.fit("no-such-model.gguf", {"t": WORDS})


def test_an_interruption_leaves_no_file(tmp_path: Path) -> None:
    def stop(fraction: float) -> None:
        if fraction > 0.5:
            raise KeyboardInterrupt

    out = tmp_path / "s.gguf"
    out.write_bytes(b"what was there before")
    with pytest.raises(KeyboardInterrupt):
        fit.fit(
            shipped_model(), {"chat": chat(3000)}, out, fit.FitOptions(chunk=32, tokens=600), progress=stop
        )
    assert [p.name for p in tmp_path.iterdir()] == ["s.gguf"]
    assert out.read_bytes() == b"what was there before"


def test_the_command(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    text = tmp_path / "chat.txt"
    text.write_text(chat(3000))
    out = tmp_path / "s.gguf"
    arguments = [
        str(shipped_model()),
        "--text",
        str(text),
        "-o",
        str(out),
        "--chunk",
        "32",
        "--tokens",
        "600",
    ]
    assert fit_cli.main([*arguments, "--json"]) == 0
    report = json.loads(capsys.readouterr().out)
    assert report["file"] == str(out) and out.exists()
    assert "training-free" in fit_cli.describe(report)
    assert fit_cli.main([str(tmp_path / "no.gguf"), "--text", str(text)]) == 3
    assert fit_cli.main([str(shipped_model()), "--text", str(text), "--tokens", "40"]) == 2
    assert not list(shipped_model().parent.glob("*.spice.gguf"))
    with pytest.raises(SystemExit):
        fit_cli.main(["--help"])
    assert "examples:" in capsys.readouterr().out


def test_ctrl_c_ends_the_command_cleanly(tmp_path: Path) -> None:
    text = tmp_path / "chat.txt"
    text.write_text(chat(60000))
    program = (
        "import sys, signal; signal.signal(signal.SIGINT, signal.default_int_handler)\n"
        "from spice_moe import fit_cli\nsys.exit(fit_cli.main())"
    )
    command = [sys.executable, "-c", program]
    arguments = [str(shipped_model()), "--text", str(text), "-o", str(tmp_path / "s.gguf")]
    terminal, its_end = os.openpty()  # bars are for people
    child = subprocess.Popen([*command, *arguments], stdout=subprocess.DEVNULL, stderr=its_end)
    os.close(its_end)
    errors = b""
    with contextlib.suppress(OSError):  # the end of a terminal that nobody writes to any more
        while b"%" not in errors:  # the progress bar: it is at work
            errors += os.read(terminal, 100)
        child.send_signal(signal.SIGINT)
        while True:
            errors += os.read(terminal, 100)
    os.close(terminal)
    assert child.wait(timeout=60) == 130
    assert b"interrupted" in errors and b"Traceback" not in errors
    assert [p.name for p in tmp_path.iterdir()] == ["chat.txt"]


def test_a_sidecar_that_cannot_be_written_leaves_nothing(tmp_path: Path) -> None:
    head = sidecar.Head("draft", 0, 1, full=np.zeros((4, 33), np.float32), bias=np.zeros(4, np.float32))
    with pytest.raises((SpiceError, OSError)):
        sidecar.write(tmp_path / "absent" / "s.gguf", fingerprint="", model="m", heads=[head], facts={})
    with pytest.raises(Exception, match=r".+"):
        sidecar.write(tmp_path / "s.gguf", fingerprint="", model="m", heads=[head], facts={"x": object()})
    assert not list(tmp_path.iterdir())
    sidecar.write(tmp_path / "s.gguf", fingerprint="", model="m", heads=[head], facts={"x": [1.0, 2.0]})
    assert (tmp_path / "s.gguf").stat().st_size > 0


def test_many_short_texts_are_divided_together(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fit.capture, "tokenize", lambda llm, text: [int(text)] * 40)
    monkeypatch.setattr(
        fit.capture, "cut", lambda llm, ids, n: [ids[i : i + n] for i in range(0, len(ids), n)]
    )
    texts = {str(i): str(i) for i in range(30)}
    split, used = fit._split(None, texts, fit.FitOptions(chunk=64), 1000)
    assert used == 30 * 40
    assert [len(split.fit), len(split.choose), len(split.report)] == [48, 6, 6]  # two pieces each
    assert [pieces[0][0] for pieces in (split.fit, split.choose, split.report)] == [0, 24, 27]


def test_the_default_path_is_beside_the_model() -> None:
    assert sidecar.default_path("/a/m.Q4_K.gguf") == Path("/a/m.Q4_K.spice.gguf")


@pytest.mark.parametrize("name", ["m.Q4_K.gguf", "m-1.5", "m"])
def test_what_is_fitted_is_found_again(tmp_path: Path, name: str) -> None:
    model = tmp_path / name
    sidecar.default_path(model).write_bytes(b"")
    assert Path(sidecar_for(str(model), SpiceOptions())) == sidecar.default_path(model)

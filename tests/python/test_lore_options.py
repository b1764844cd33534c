"""The options `lore`, `lore_budget` and `lore_prompts`, in Python and on the command line."""

from __future__ import annotations

import contextlib
import json
import shutil
from pathlib import Path

import numpy as np
import pytest
from spice_moe import (
    Llama,
    SpiceBudgetError,
    SpiceFileNotFoundError,
    SpiceFormatError,
    SpiceOptions,
    SpiceUnsupportedError,
    run_arguments,
)
from support import assert_same, open_model, prefill, prompt
from support_lore import Weights, random_lore, write_lore
from support_models import make_dense
from test_cli import run


@pytest.fixture(scope="module")
def model(tiny_model, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model with stand-ins beside it."""
    made = tiny_model("qwen2moe", layers=3, expert_type="Q4_K", experts=16, used=4, seed=1)
    path = tmp_path_factory.mktemp("lore") / "m.gguf"
    shutil.copy(made, path)
    write_lore(path, path.with_name("m.spice.gguf"), random_lore(Weights(path), rank=8))
    return path


@pytest.mark.parametrize(
    ("options", "error"),
    [
        ({"lore": 3}, TypeError),
        ({"lore": "auto:"}, ValueError),
        ({"lore": "auto:-1"}, ValueError),
        ({"lore": "auto:nan"}, ValueError),
        ({"lore_budget": "much"}, TypeError),
        ({"lore_budget": True}, TypeError),
        ({"lore_budget": 0}, ValueError),
        ({"lore_budget": float("nan")}, ValueError),
        ({"lore_budget": 0.1, "lore": "auto:0.1"}, ValueError),
        ({"lore_prompts": 1}, TypeError),
        ({"lore_budget": 0.1}, ValueError),
        ({"lore_budget": 0.1, "lore": False}, ValueError),
        ({"lore_budget": float("inf"), "lore": "off"}, ValueError),
    ],
)
def test_options_that_make_no_sense_are_named(options: dict, error: type[Exception]) -> None:
    with pytest.raises(error, match=next(iter(options))):
        SpiceOptions(**options)


@pytest.mark.parametrize(("word", "value"), [("on", True), ("On", True), ("off", False), ("OFF", False)])
def test_words_switch_them_on_and_off(word: str, value: bool) -> None:
    assert SpiceOptions(lore=word).lore is value
    assert run_arguments.for_llama(run_arguments.parse(["m", "--lore", word]))["spice"].lore is value
    assert SpiceOptions(lore=f"./{word}").lore == f"./{word}"


def test_a_bound_without_stand_ins_names_the_remedy(model: Path) -> None:
    for options in ({}, {"lore": False}, {"spice": SpiceOptions(lore="off")}):
        with pytest.raises(ValueError, match=r"^lore_budget=0.1 bounds .* off: give lore=True .*leave out"):
            Llama(str(model), lore_budget=0.1, **options)
    both = SpiceOptions(lore=True, lore_budget=0.1)
    for off in (False, "off"):
        assert both.with_overrides(lore=off) == SpiceOptions(lore=False)
    assert both.with_overrides(lore="x.gguf").lore_budget == 0.1
    with contextlib.closing(open_model(Llama, model, spice=both, lore="off")) as llm:
        assert llm.spice.plan.exact and llm.spice.plan.lore == {}


@pytest.mark.parametrize(
    ("options", "budget", "words"),
    [
        ({"lore": True}, 0.02, "at most 0.02 nats per token, prompts exact"),
        ({"lore": True, "lore_budget": 0.5, "lore_prompts": True}, 0.5, "at most 0.5 nats per token)"),
        ({"lore": True, "lore_budget": float("inf")}, None, "light experts only, prompts exact"),
        ({"lore": "auto:0.003"}, 0.003, "thresholds chosen by cost, expected KL at most 0.003"),
    ],
)
def test_the_plan_says_so(model: Path, options: dict, budget: float | None, words: str) -> None:
    with contextlib.closing(open_model(Llama, model, ram_budget="40%", **options)) as llm:
        plan = llm.spice.plan
        prefill(llm, prompt(120), [20, *[1] * 100])
        stats = llm.spice.stats()
    assert not plan.exact
    share = plan.lore["bytes"] / plan.expert_bytes
    assert plan.lore["share"] == share
    words_of_all = "approximate: missed experts may be replaced by stand-ins of"
    assert plan.exactness.startswith(f"{words_of_all} {share:.1%} of their size (m.spice.gguf;")
    assert words in plan.exactness and plan.exactness in str(plan)
    assert "stand-ins for 3 layers" in str(plan)
    assert plan.lore["budget"] == budget
    assert json.loads(json.dumps(plan.to_dict()))["lore"]["path"].endswith("m.spice.gguf")
    assert stats["lore_substituted"] > 0
    if budget is not None:
        assert stats["lore_kl"] <= budget * stats["lore_rows"] / 3


def test_stand_ins_share_the_budget(model: Path, tmp_path: Path) -> None:
    with contextlib.closing(open_model(Llama, model, ram_budget="40%")) as llm:
        without = llm.spice.plan
    with contextlib.closing(open_model(Llama, model, ram_budget="40%", lore=True)) as llm:
        plan = llm.spice.plan
    size = plan.lore["bytes"]
    assert size >= 3 * 2 * 16 * 8 * 256
    assert without.lore == {} and without.exact
    assert plan.ram_budget < without.ram_budget
    assert abs(plan.ram_budget + size - without.ram_budget) < 0.4 * size + 3 * plan.slab_bytes_max
    with contextlib.closing(open_model(Llama, model, ram_budget=1.0, lore=True)) as llm:
        assert llm.spice.plan.slots == llm.spice.plan.experts_total
    with pytest.raises(SpiceBudgetError, match=f"give at least {size + without.smallest_budget} bytes"):
        open_model(Llama, model, ram_budget=size + 1000, lore=True)


def test_without_the_option_a_sidecar_changes_nothing(model: Path, tiny_model) -> None:
    made = tiny_model("qwen2moe", layers=3, expert_type="Q4_K", experts=16, used=4, seed=1)
    tokens, chunks = prompt(40), [20, *[1] * 20]
    with contextlib.closing(open_model(Llama, made, ram_budget="40%")) as llm:
        expected = prefill(llm, tokens, chunks)
    with contextlib.closing(open_model(Llama, model, ram_budget="40%")) as llm:
        assert_same(prefill(llm, tokens, chunks), expected)
        assert all(not v for k, v in llm.spice.stats().items() if k.startswith("lore_"))
        assert llm.spice._core.lore() is None


def test_files_that_cannot_be_used(model: Path, tiny_model, tmp_path: Path) -> None:
    with pytest.raises(SpiceFileNotFoundError, match=r"no such file.*spice-fit --lore"):
        Llama(str(model), lore=tmp_path / "none.gguf", verbose=False)
    bare = tiny_model("qwen2moe", layers=3, expert_type="Q4_K", experts=16, used=4, seed=1)
    with pytest.raises(SpiceFileNotFoundError, match="no sidecar beside it"):
        Llama(str(bare), lore=True, verbose=False)
    weights = Weights(model)
    heads_only = write_lore(model, tmp_path / "heads.gguf", {"other": weights["output_norm.weight"]})
    with pytest.raises(SpiceUnsupportedError, match="no low-rank stand-ins"):
        Llama(str(model), lore=heads_only, verbose=False)
    tensors = random_lore(weights)
    tensors["lore.1.b"] = tensors["lore.1.b"][:, :3]
    damaged = write_lore(model, tmp_path / "damaged.gguf", tensors)
    with pytest.raises(SpiceFormatError, match=r"lore\.1\.b' has the shape"):
        Llama(str(model), lore=damaged, verbose=False)
    tensors = {k: v for k, v in random_lore(weights).items() if not k.endswith("sensitivity")}
    uncalibrated = write_lore(model, tmp_path / "bare.gguf", tensors)
    with pytest.raises(SpiceUnsupportedError, match="does not say what its stand-ins cost"):
        Llama(str(model), lore=uncalibrated, verbose=False)
    with contextlib.closing(open_model(Llama, model, lore=uncalibrated, lore_budget=float("inf"))) as llm:
        assert llm.spice.plan.lore["budget"] is None


def test_stand_ins_of_earlier_versions_are_refused(model: Path, tmp_path: Path) -> None:
    tensors = random_lore(Weights(model))
    tensors |= {k: v.astype(np.float16) for k, v in tensors.items() if k.endswith((".a", ".b"))}
    old = write_lore(model, tmp_path / "old.gguf", tensors)
    with pytest.raises(SpiceUnsupportedError, match=r"old\.gguf.*in F16.*fit them again"):
        Llama(str(model), lore=old, verbose=False)


def test_a_dense_model_says_that_it_does_nothing(tmp_path: Path) -> None:
    dense = make_dense(tmp_path / "dense.gguf")
    with pytest.warns(UserWarning, match="no experts, so lore does nothing"):
        llm = open_model(Llama, dense, lore=True)
    with contextlib.closing(llm):
        assert "lore does nothing" in str(llm.spice.plan)
    done = run(dense, "-p", "Hello", "-n", 2, "--lore", "on")
    assert done.returncode == 0
    assert "lore does nothing" in done.stderr


def test_the_command_line(model: Path) -> None:
    common = (model, "--ram", "40%", "-p", "Hello world, how are you", "-n", 40, "--temp", 0)
    done = run(*common, "--lore", "auto:0.05")
    assert done.returncode == 0
    plan, summary = done.stderr.splitlines()
    assert "approximate: missed experts may be replaced" in plan
    assert "of experts replaced by stand-ins (expected KL" in summary and summary.endswith(
        "SPICE, approximate"
    )
    report = json.loads(run(*common, "--lore", "on", "--lore-budget", "0.5", "--json").stdout)
    assert report["plan"]["lore"]["budget"] == 0.5
    assert report["stats"]["lore_rows"] > 0
    off = run(*common, "--lore", "off")
    assert off.returncode == 0 and off.stderr.splitlines()[-1].endswith("SPICE, exact")
    assert run(*common, "--lore", "off", "--lore-budget", "0.5").returncode == 2
    assert run(*common, "--lore", "auto:x").returncode == 2
    assert run(*common, "--lore", "on", "--lore-budget", "-1").returncode == 2
    assert run(*common, "--lore", model.with_name("none.gguf")).returncode == 3

"""Arguments of llama_cpp.Llama that would end the process, and what spice-run makes of its own."""

from __future__ import annotations

import contextlib
import ctypes
import json
import pickle
import shlex
import subprocess
import sys
from pathlib import Path

import llama_cpp
import pytest
from spice_moe import Llama, SpiceFileNotFoundError, SpiceMemoryError, SpiceUnsupportedError, command
from spice_moe import run_arguments as arguments
from spice_moe.arguments import CACHE_TYPES, QUANTISED_CACHE_TYPES
from spice_moe.shipped import tiny_model
from support import open_model

TINY = str(tiny_model())


@pytest.mark.parametrize(
    "wrong",
    [
        {"n_threads": 99_999},
        {"n_threads_batch": 99_999},
        {"n_ctx": 2**32 + 1},
        {"n_ctx": -1},
        {"n_batch": -1},
        {"n_batch": 0},
        {"n_ubatch": -1},
        {"n_gpu_layers": 2**31},
    ],
    ids=str,
)
def test_numbers_that_do_not_fit_are_refused(wrong: dict[str, int]) -> None:
    (name,) = wrong
    with pytest.raises(ValueError, match=rf"^{name} must be .* not {wrong[name]}$"):
        Llama(TINY, verbose=False, **wrong)


@pytest.mark.parametrize("name", ["type_k", "type_v"])
@pytest.mark.parametrize("number", [-1, 4, 9, 12, 24, 26, 999])  # 4, 9 and 26 end the process
def test_types_that_are_none_for_a_cache(name: str, number: int) -> None:
    with pytest.raises(ValueError, match=rf"^{name}={number} is no type for a KV cache.*8 \(q8_0\)"):
        Llama(TINY, verbose=False, flash_attn=True, **{name: number})
    with pytest.raises(TypeError, match=f"^{name} must be a number"):
        Llama(TINY, verbose=False, **{name: "q8_0"})


def test_the_cache_types_have_the_names_of_llama_cpp(tmp_path: Path, tiny_model) -> None:
    """Their numbers give what llama.cpp calls by these names; flash attention goes on with its option."""
    ggml = ctypes.CDLL(str(Path(llama_cpp.__file__).parent / "lib" / "libggml-base.so"))
    ggml.ggml_type_name.restype = ctypes.c_char_p
    for text, number in CACHE_TYPES.items():
        assert ggml.ggml_type_name(number).decode() == text
        assert bool(ggml.ggml_is_quantized(number)) == (text in QUANTISED_CACHE_TYPES)
        flash = ["-fa"] if text in QUANTISED_CACHE_TYPES else []
        given = arguments.for_llama(arguments.parse(["m", "-p", "x", "-ctv", text, "-ctk", text, *flash]))
        assert given["type_k"] == given["type_v"] == number
        assert given["flash_attn"] == bool(flash)
    made = tiny_model("qwen2moe", layers=2, expert_type="Q4_K", seed=1)
    given |= {"n_threads": 1, "n_threads_batch": 1, "verbose": False}
    with contextlib.closing(Llama(made, **given)) as llm:
        llm.eval([1, 2, 3])
        assert llm.context_params.flash_attn_type == llama_cpp.LLAMA_FLASH_ATTN_TYPE_ENABLED


def test_quantised_values_need_flash_attention(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(ValueError, match=r"^type_v=8 is quantised.*flash_attn=True"):
        Llama(TINY, verbose=False, type_v=llama_cpp.GGML_TYPE_Q8_0)
    for flash in ([], ["-fa", "off"]):
        with pytest.raises(SystemExit) as stop:
            arguments.parse(["m", "-p", "x", "--cache-type-v", "q4_0", *flash])
        assert stop.value.code == 2
        last = capsys.readouterr().err.splitlines()[-1]
        assert last == "spice-run: error: --cache-type-v q4_0 needs --flash-attn on"


def test_names_that_nobody_reads(recwarn: pytest.WarningsRecorder) -> None:
    """llama_cpp.Llama takes any name and ignores it: a misspelt budget would be none."""
    with pytest.warns(UserWarning, match="no argument ram_buget, it is ignored; did you mean ram_budget"):
        open_model(Llama, Path(TINY), ram_buget="1MiB").close()
    with pytest.warns(UserWarning, match="no argument nctx, it is ignored; did you mean n_ctx") as seen:
        open_model(Llama, Path(TINY), nctx=64).close()
    assert Path(seen[0].filename).name == "support.py", "it names the line of the call"
    recwarn.clear()
    with contextlib.closing(open_model(Llama, Path(TINY), ram_budget="50%", type_k=None)) as llm:
        pickle.loads(pickle.dumps(llm)).close()
    assert not [one for one in recwarn if "no argument" in str(one.message)]


def test_a_batch_too_large_for_memory() -> None:
    with pytest.raises(SpiceMemoryError, match="n_batch"):
        Llama(TINY, verbose=False, n_batch=10**9, n_ctx=64)


def test_paths() -> None:
    with pytest.raises(SpiceUnsupportedError, match=r"UTF-8.*rename"):
        Llama("n\udcff.gguf")
    with pytest.raises(SpiceFileNotFoundError, match="''"):
        Llama("")
    with pytest.raises(ValueError, match="choose one of: spice"):
        Llama(TINY, placement="nothing")


def test_a_grammar_that_is_none(tmp_path: Path) -> None:
    """The parent hands llama.cpp a NULL sampler for it, which is a crash."""
    with contextlib.closing(open_model(Llama, Path(TINY))) as llm:
        for text in ("nonsense", 'x ::= "a"'):
            grammar = llama_cpp.LlamaGrammar.from_string(text, verbose=False)
            with pytest.raises(ValueError, match="grammar does not parse"):
                llm("Hello", grammar=grammar, max_tokens=2)
        good = llama_cpp.LlamaGrammar.from_string('root ::= "yes"', verbose=False)
        assert llm("Hello", grammar=good, max_tokens=8)["choices"][0]["text"] == "yes"


def test_options_of_several_gpus_are_passed_on() -> None:
    given = arguments.parse(
        [
            "m",
            "-p",
            "x",
            "--tensor-split",
            "3,1",
            "--main-gpu",
            "1",
            "--split-mode",
            "row",
            "--gpu-layers",
            "-1",
        ]
    )
    made = arguments.for_llama(given)
    assert made["tensor_split"] == [3.0, 1.0]
    assert made["main_gpu"] == 1
    assert made["split_mode"] == llama_cpp.LLAMA_SPLIT_MODE_ROW
    assert made["n_gpu_layers"] == -1
    default = arguments.for_llama(arguments.parse(["m", "-p", "x"]))
    assert default["tensor_split"] is None
    assert default["split_mode"] == llama_cpp.LLAMA_SPLIT_MODE_LAYER  # the parent's defaults
    assert default["main_gpu"] == 0
    with contextlib.closing(Llama(TINY, **{**made, "verbose": False})) as llm:
        assert llm.model_params.main_gpu == 1
        assert llm.model_params.split_mode == llama_cpp.LLAMA_SPLIT_MODE_ROW
        assert llm.model_params.tensor_split[0] == 3.0 and llm.model_params.tensor_split[1] == 1.0


@pytest.mark.parametrize(
    "wrong",
    [
        ["--tensor-split", "0,0"],
        ["--tensor-split", "a"],
        ["--tensor-split", ",".join("1" * 99)],
        ["--split-mode", "rows"],
        ["--main-gpu", "-1"],
        ["--temp", "nan"],
        ["--temp", "-1"],
        ["--top-p", "1.5"],
        ["--min-p", "-0.1"],
        ["--top-k", "-1"],
        ["--seed", str(2**32)],
        ["-t", "99999"],
        ["-c", str(2**32 + 1)],
        ["-n", "x"],
        ["--strategy", "best"],
        ["--placement", "best"],
        ["--predictor", "best"],
        ["--lore-budget", "0.1"],
        ["--flash-attn", "m.gguf"],
        ["-ctk", "q2_K"],
        ["--ram", "much"],
        ["--vram", "6G,"],
        ["-m", "again"],
        ["--grammar", "x", "--json-schema", "{}"],
        ["--system", "\udcff"],
        ["--stop", "\udcff"],
    ],
    ids=" ".join,
)
def test_wrong_options(wrong: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as stop:
        arguments.parse(["m", "-p", "x", *wrong])
    assert stop.value.code == 2
    last = capsys.readouterr().err.splitlines()[-1]
    assert last.startswith("spice-run: error:") and "invalid" not in last.replace("invalid choice", "")


def test_names_of_llama_cpp(tmp_path: Path) -> None:
    given = arguments.parse(
        ["-m", "m", "-p", "x", "--ctx-size", "64", "--n-predict", "3", "--batch-size", "32"]
    )
    assert (given.model, given.ctx, given.tokens, given.batch) == ("m", 64, 3, 32)
    letters = (
        "-m m -p x -c 0 -n -1 -b 64 -tb 2 -ngl 7 -sm none -mg 1 -ts 3,1 -s 5 -sys s -j {} --temperature 1"
    )
    short = arguments.parse(shlex.split(letters))
    made = arguments.for_llama(short)
    assert (made["n_ctx"], made["n_batch"], made["n_threads_batch"], made["n_gpu_layers"]) == (0, 64, 2, 7)
    assert (made["main_gpu"], made["tensor_split"], made["seed"]) == (1, [3.0, 1.0], 5)
    assert made["split_mode"] == llama_cpp.LLAMA_SPLIT_MODE_NONE
    assert (short.tokens, short.temp, short.system, short.json_schema) == (None, 1.0, "s", "{}")
    with contextlib.closing(Llama(TINY, verbose=False, n_ctx=0)) as llm:
        assert llm.n_ctx() == llm._model.n_ctx_train() > 512  # what -c 0 asks for
    sampler = arguments.for_sampler(
        arguments.parse(["-p", "x", "--stop", "a", "--stop", "b", "--seed", "-1"])
    )
    assert sampler["stop"] == ["a", "b"]
    assert sampler["seed"] == llama_cpp.LLAMA_DEFAULT_SEED
    file = tmp_path / "g"
    for text, option in (('root ::= "a"\n', "--grammar"), ('{"type": "integer"}\n', "--json-schema")):
        file.write_text(text)
        one = arguments.for_sampler(arguments.parse(["-p", "x", option, text.strip()]))["grammar"]
        two = arguments.for_sampler(arguments.parse(["-p", "x", f"{option}-file", str(file)]))["grammar"]
        assert one._grammar == two._grammar != ""
    with pytest.raises(command.UsageError, match="--json-schema"):
        arguments.for_sampler(arguments.parse(["-p", "x", "--json-schema", "{nope"]))


def test_what_the_options_do() -> None:
    def run(*more: str) -> subprocess.CompletedProcess[str]:
        base = [sys.executable, "-m", "spice_moe", TINY, "-p", "What is 3 + 4?", "--temp", "0", "-t", "1"]
        return subprocess.run([*base, *more], capture_output=True, text=True, timeout=120)

    whole = run().stdout.strip()
    assert len(whole) > 4
    assert run("--stop", whole[3:5]).stdout.strip() == whole[:3].strip()
    assert run("--grammar", 'root ::= "yes" | "no"').stdout.strip() in ("yes", "no")
    base = [sys.executable, "-m", "spice_moe", TINY, "-i", "--grammar", "nope"]
    chat = subprocess.run(base, input="Hello\nHello\n", capture_output=True, text=True, timeout=120)
    assert chat.returncode == command.USAGE and chat.stderr.count("spice-run: error") == 1
    bad = run("--grammar", "nope")
    assert bad.returncode == command.USAGE and "does not parse" in bad.stderr
    long = run("-c", "64", "--system", "word " * 500)
    assert long.returncode == command.USAGE and "--ctx" in long.stderr
    full = run("-c", "1", "--raw", "--temp", "2", "--seed", "3", "--min-p", "0", "--json")
    assert json.loads(full.stdout)["finish_reason"] in ("length", "stop"), full.stderr
    base = [sys.executable, "-m", "spice_moe", TINY, "-i", "-n", "2"]
    odd = subprocess.run(base, input=b"H\xff\xfei\n", capture_output=True, timeout=120)
    assert odd.returncode == 0 and odd.stdout.strip(), odd.stderr
    over = run("--timeline", TINY)
    assert over.returncode == command.USAGE and "overwritten" in over.stderr

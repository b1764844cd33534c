"""Damaged and lying models: a Python exception each time, or a model that works. The process never dies."""

from __future__ import annotations

import json
import random
import struct
import subprocess
import sys
from collections import Counter
from collections.abc import Callable
from pathlib import Path

import pytest
from bad_input_child import attempt
from gguf import GGMLQuantizationType, GGUFReader
from spice_moe import Llama, SpiceError, SpiceFormatError, SpiceUnsupportedError
from support_models import rewrite

CHILD = Path(__file__).with_name("bad_input_child.py")
SMALL = dict(layers=2, embd=64, ff=32, experts=4, expert_type="Q8_0")
FLIPS = 300


@pytest.fixture(scope="module")
def sound(tiny_model) -> Path:
    return tiny_model("qwen2moe", **SMALL)


@pytest.fixture
def damage(sound: Path, tmp_path: Path) -> Callable[[Callable[[bytearray], object]], Path]:
    """``damage(edit)``: a copy of the sound model whose bytes ``edit`` has changed in place."""

    def make(edit: Callable[[bytearray], object]) -> Path:
        data = bytearray(sound.read_bytes())
        edit(data)
        path = tmp_path / "damaged.gguf"
        path.write_bytes(data)
        return path

    return make


def load(path: Path) -> None:
    Llama(str(path), n_ctx=64, verbose=False).close()


def in_children(model: Path, scratch: Path, flips: list[list[int]]) -> Counter[str]:
    """Outcomes of all flips, counted. Fails the test, naming the flips, if one ended its process."""
    outcomes: Counter[str] = Counter()
    deaths: list[str] = []
    while flips:
        job = json.dumps({"model": str(model), "scratch": str(scratch), "flips": flips})
        child = subprocess.run(
            [sys.executable, str(CHILD)], input=job, capture_output=True, text=True, timeout=240
        )
        lines = child.stdout.splitlines()
        done = [line.split(":")[0] for line in lines if not line.startswith("try ")]
        outcomes.update(done)
        if child.returncode != 0:
            deaths.append(
                f"{lines[-1] if lines else 'start'}: exit {child.returncode}, {child.stderr[-300:]}"
            )
            done.append("died")
        flips = flips[len(done) :]
    assert not deaths, "these flips (byte offset, bit) ended the process:\n" + "\n".join(deaths)
    return outcomes


@pytest.mark.parametrize("arch", ["qwen2moe", "deepseek2", "llama"])
def test_flipped_bits(arch: str, tiny_model, tmp_path: Path) -> None:
    model = tiny_model(arch, **SMALL)
    reader = GGUFReader(model)
    random_bits = random.Random(arch)
    header = int(reader.data_offset)
    # The vocabulary fills most of the header; every second flip goes where the model is described.
    scalars = [(field.offset, min(256, sum(int(part.nbytes) for part in field.parts)))
               for field in reader.fields.values()]  # fmt: skip
    tensors = reader.tensors[0].field.offset
    scalars += [(0, 24), (tensors, header - tensors)]
    flips = []
    for number in range(FLIPS):
        start, length = random_bits.choice(scalars) if number % 2 else (0, header)
        flips.append([start + random_bits.randrange(length), random_bits.randrange(8)])
    outcomes = in_children(model, tmp_path / "flipped.gguf", flips)
    assert sum(outcomes.values()) == FLIPS
    assert outcomes["error SpiceFormatError"] > FLIPS / 10, outcomes
    assert {name for name in outcomes if name != "ok"} <= {
        f"error {kind}" for kind in ("SpiceFormatError", "SpiceUnsupportedError", "SpiceMemoryError")
    }


@pytest.mark.parametrize("part", ["header", "tensor table", "weights", "last byte"])
def test_truncated(part: str, sound: Path, tmp_path: Path) -> None:
    reader, data = GGUFReader(sound), sound.read_bytes()
    table, weights = reader.tensors[0].field.offset, int(reader.data_offset)
    lengths = {
        "header": [0, 1, 3, 4, 8, 23, 24, 100, table // 2],
        "tensor table": [table, table + 9, (table + weights) // 2, weights - 1],
        "weights": [weights, weights + 100, (weights + len(data)) // 2],
        "last byte": [len(data) - 1],
    }[part]
    path = tmp_path / "cut.gguf"
    for length in lengths:
        path.write_bytes(data[:length])
        with pytest.raises(SpiceFormatError, match=r"cut\.gguf"):
            load(path)


@pytest.mark.parametrize("value", [0, 1, 2**31 - 1, 2**31, 2**32 - 1, 2**63 - 1, 2**63, 2**64 - 1])
@pytest.mark.parametrize("offset", [8, 16], ids=["tensor count", "value count"])
def test_lying_counts(damage, offset: int, value: int) -> None:
    with pytest.raises(SpiceFormatError):
        load(damage(lambda data: struct.pack_into("<Q", data, offset, value)))


def tensor_info(data: bytes, name: str) -> int:
    """Where the number of dimensions stands in the table entry of the tensor."""
    key = struct.pack("<Q", len(name)) + name.encode()
    return data.index(key) + len(key)


@pytest.mark.parametrize("name", ["blk.1.ffn_up_exps.weight", "blk.0.attn_q.weight"])
@pytest.mark.parametrize(
    ("field", "code", "values"),
    [
        ("offset", "<Q", [2**20, 2**40, 2**63, 2**64 - 32, 1]),
        ("size", "<q", [0, -1, 1, 31, 2**31, 2**62]),
        ("dimensions", "<I", [0, 5, 2**31]),
        ("type", "<i", [-1, 4, 1000, 2**31 - 1]),
    ],
)
def test_lying_tensor_table(damage, name: str, field: str, code: str, values: list[int]) -> None:
    def edit(data: bytearray, value: int) -> None:
        start = tensor_info(data, name)
        (dimensions,) = struct.unpack_from("<I", data, start)
        type_at = start + 4 + 8 * dimensions
        place = {"offset": type_at + 4, "size": start + 4, "dimensions": start, "type": type_at}[field]
        struct.pack_into(code, data, place, value)

    for value in values:
        with pytest.raises(SpiceError):
            load(damage(lambda data, value=value: edit(data, value)))


def test_the_rewritten_model_is_sound(sound: Path, tmp_path: Path) -> None:
    assert attempt(rewrite(sound, tmp_path / "copy.gguf")) == "ok"


def test_f64_router(sound: Path, tmp_path: Path) -> None:
    types = {"blk.1.ffn_gate_inp.weight": GGMLQuantizationType.F64}
    path = rewrite(sound, tmp_path / "f64.gguf", types=types)
    with pytest.raises(SpiceUnsupportedError, match="f64"):
        load(path)


@pytest.mark.parametrize(
    "values",
    [
        {"qwen2moe.expert_count": 0},
        {"qwen2moe.expert_used_count": 0},
        {"qwen2moe.expert_count": 0, "qwen2moe.expert_used_count": 0},
        {"qwen2moe.expert_used_count": 5},
        {"qwen2moe.expert_count": 8},
        {"qwen2moe.expert_count": 2**31},
        {"qwen2moe.block_count": 0},
        {"qwen2moe.block_count": 5000},
        {"qwen2moe.attention.head_count": 0},
        {"qwen2moe.attention.head_count_kv": 0},
        {"qwen2moe.attention.head_count_kv": 3},
        {"qwen2moe.embedding_length": 0},
    ],
    ids=str,
)
def test_lying_header_values(values: dict[str, int], sound: Path, tmp_path: Path) -> None:
    with pytest.raises(SpiceError):
        load(rewrite(sound, tmp_path / "lying.gguf", values=values))


def test_overridden_expert_count_that_cannot_be(sound: Path) -> None:
    for used in (-1, 5, 2**31, 2**63 - 1):
        with pytest.raises(SpiceUnsupportedError, match=r"asked to be .* has 4 experts; ask for"):
            Llama(str(sound), verbose=False, kv_overrides={"qwen2moe.expert_used_count": used})


def test_a_split_file_is_missing(tiny_model) -> None:
    first = tiny_model("qwen2moe", **SMALL, split=3, seed=5)
    second = first.with_name(first.name.replace("-00001-", "-00002-"))
    second.rename(second.with_suffix(".away"))
    try:
        with pytest.raises(SpiceError, match="00002"):
            load(first)
    finally:
        second.with_suffix(".away").rename(second)


def test_a_failed_read_fails_the_call_and_the_next_one_works(sound: Path, tmp_path: Path) -> None:
    """The weights vanish after the load; when they are back, the same model goes on."""
    path = tmp_path / "vanishing.gguf"
    data = sound.read_bytes()
    path.write_bytes(data)
    llm = Llama(str(path), n_ctx=64, verbose=False, n_threads=1, n_threads_batch=1, logits_all=True)
    try:
        with path.open("r+b") as file:
            file.truncate(GGUFReader(sound).data_offset)
        with pytest.raises(SpiceError):
            llm.eval([1, 300, 301])
        assert llm.spice.stats()["failures"] > 0
        assert llm.n_tokens == 0
        path.open("r+b").write(data)
        llm.eval([1, 300, 301])
        assert llm.n_tokens == 3
        assert abs(llm.scores[2]).max() > 0
    finally:
        llm.close()

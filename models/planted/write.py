"""Writing a planted model as a stream: one tensor in memory at a time, experts from banks of encoded rows."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
from gguf import GGUFReader, GGUFValueType, GGUFWriter, TokenType
from numpy.typing import NDArray

from models import gguf_file, tokenizer
from models.ggml import GGMLType, quantize_rows, row_bytes, type_for_row, type_of
from models.planted.plant import Plant
from models.planted.real import REAL, Latent, Real
from models.planted.tensors import Planted, header, tensors

_COUNTS = Path(__file__).with_name("token_counts.json")
_BANK_VALUES = 12_000_000  # values of a bank, about: a second to draw and encode
_VOCABULARY_BANK = 2048  # rows for tokens that do not exist
_BLOCK = 4096  # rows of the vocabulary made at once
_FILE_TYPES = {"Q4_K_M": GGMLType.Q4_K, "Q5_K_M": GGMLType.Q5_K}


def kind_of(tensor: Planted, real: Real, layers: int, file_type: str) -> GGMLType:
    """What a file of that type stores a tensor as, by the rules of llama.cpp's src/llama-quant.cpp.

    file_type: "Q4_K_M", "Q5_K_M", "MXFP4" (experts; the rest Q8_0), or a tensor type for all matrices.
    """
    name, shape = tensor.name, tensor.shape
    if tensor.plain:
        return GGMLType.F32
    if file_type == "MXFP4":
        return type_for_row(GGMLType.MXFP4 if "_exps." in name else GGMLType.Q8_0, shape[-1])
    base = _FILE_TYPES.get(file_type)
    if base is None:
        return type_for_row(type_of(file_type), shape[-1])
    found = re.match(r"blk\.(\d+)\.", name)
    layer = int(found[1]) if found else 0
    eighth = layers // 8
    more = layer < eighth or layer >= 7 * layers // 8 or (layer - eighth) % 3 == 2
    kind, eight = base, real.experts == 8
    if name == "output.weight" or ("ffn_down" in name and more):
        kind = GGMLType.Q6_K
    elif "attn_v.weight" in name:
        kind = GGMLType.Q8_0 if eight else GGMLType.Q6_K if more else base
    elif "attn_k.weight" in name and eight:
        kind = GGMLType.Q8_0
    elif "attn_output.weight" in name and eight and base == GGMLType.Q4_K:
        kind = GGMLType.Q5_K
    return type_for_row(kind, shape[-1])


class Banks:
    """Encoded random rows, drawn once per type, width and gain; experts take theirs in their own order."""

    def __init__(self, plant: Plant) -> None:
        self._plant = plant
        self._banks: dict[tuple[GGMLType, int, float], NDArray[np.uint8]] = {}

    def matrices(self, tensor: Planted, kind: GGMLType) -> NDArray[np.uint8]:
        """[experts, rows, row_bytes] or [rows, row_bytes]; no two experts, and no two layers, alike."""
        *experts, rows, width = tensor.shape
        bank = self._bank(kind, rows, width, tensor.gain)
        out = np.empty((*experts, rows, bank.shape[1]), dtype=np.uint8)
        rng = self._plant.rng(tensor.name)
        for one in out if experts else [out]:  # mode "raise" would copy `out`
            np.take(bank, rng.permutation(len(bank))[:rows], axis=0, out=one, mode="clip")
        return out

    def rows(self, tensor: Planted, kind: GGMLType) -> NDArray[np.uint8]:
        """[rows, row_bytes]: the tokens' own, made in blocks, and then any rows of the bank."""
        make = tensor.rows
        assert make is not None
        count, width = tensor.shape
        out = np.empty((count, row_bytes(kind, width)), dtype=np.uint8)
        for first in range(0, tensor.known, _BLOCK):
            last = min(first + _BLOCK, tensor.known)
            out[first:last] = quantize_rows(make(first, last), kind)
        if tensor.known < count:
            bank = self._bank(kind, 0, width, tensor.gain)
            chosen = self._plant.rng(tensor.name, count).integers(len(bank), size=count - tensor.known)
            np.take(bank, chosen, axis=0, out=out[tensor.known :], mode="clip")
        return out

    def _bank(self, kind: GGMLType, rows: int, width: int, gain: float) -> NDArray[np.uint8]:
        key = (kind, width, gain)
        if key not in self._banks:
            count = max(rows + rows // 4, min(4 * rows, _BANK_VALUES // width)) or _VOCABULARY_BANK
            values = self._plant.normal(f"bank {kind.name} {width}", (count, width), gain / np.sqrt(width))
            self._banks[key] = quantize_rows(values, kind)
        return self._banks[key]


def _fill(tensor: Planted, kind: GGMLType, banks: Banks) -> Callable[[], NDArray[np.uint8]]:
    if tensor.rows is not None:
        return lambda: banks.rows(tensor, kind)
    if tensor.make is None:
        return lambda: banks.matrices(tensor, kind)
    values = tensor.make
    return lambda: quantize_rows(values(), kind)


class _Padded:
    """A GGUFWriter that lengthens the vocabulary to the real model's with unused tokens."""

    def __init__(self, writer: GGUFWriter, size: int) -> None:
        self._writer, self._size = writer, size

    def __getattr__(self, name: str) -> object:
        return getattr(self._writer, name)

    def add_token_list(self, tokens: list[bytes]) -> None:
        pad = [f"[unused {i}]".encode() for i in range(len(tokens), self._size)]
        self._writer.add_token_list([*tokens, *pad])

    def add_token_scores(self, scores: list[float]) -> None:
        self._writer.add_token_scores([*scores, *[-1e4] * (self._size - len(scores))])

    def add_token_types(self, kinds: list[int]) -> None:
        self._writer.add_token_types([*kinds, *[int(TokenType.UNUSED)] * (self._size - len(kinds))])


class _Vocabulary:
    """The vocabulary of a planted model: ours, or a copy of another file's.

    counts: [tokens], how often each occurs in text (of another's: as Zipf would have it by rank, which is
    about the order of merges). kinds: [size].
    """

    def __init__(self, size: int, source: Path | None) -> None:
        self.size, self._source = size, source
        if source is None:
            self.bos = tokenizer.BOS
            self.kinds = [t.kind for t in tokenizer.vocabulary()]
            stored = json.loads(_COUNTS.read_text())
            self.counts = np.array(stored, dtype=np.float64) + 0.1
        else:
            fields = GGUFReader(source).fields
            if "tokenizer.ggml.tokens" not in fields:
                raise ValueError(f"{source} has no vocabulary")
            count = len(fields["tokenizer.ggml.tokens"].data)
            types = fields.get("tokenizer.ggml.token_type")
            numbers = types.contents() if types else [int(TokenType.NORMAL)] * count
            self.kinds = [TokenType(n) for n in numbers]
            bos = fields.get("tokenizer.ggml.bos_token_id")
            self.bos = int(bos.contents()) if bos else -1
            self.counts = 1 / (30.0 + np.arange(count))
        if len(self.kinds) > size:
            raise ValueError(f"a vocabulary of {len(self.kinds)} tokens does not fit {size} rows")
        self.kinds += [TokenType.UNUSED] * (size - len(self.kinds))

    def add_to(self, writer: GGUFWriter) -> None:
        padded = _Padded(writer, self.size)
        if self._source is None:
            tokenizer.add_to(padded)  # type: ignore[arg-type]
            return
        lists = {
            "tokenizer.ggml.tokens": padded.add_token_list,
            "tokenizer.ggml.scores": padded.add_token_scores,
            "tokenizer.ggml.token_type": padded.add_token_types,
        }
        for name, entry in GGUFReader(self._source).fields.items():
            if not name.startswith("tokenizer."):
                continue
            value = entry.contents()
            if name == "tokenizer.ggml.tokens":
                value = [t.encode() for t in value]
            if name in lists:
                lists[name](value)
            else:
                inner = entry.types[-1] if entry.types[0] == GGUFValueType.ARRAY else None
                writer.add_key_value(name, value, entry.types[0], inner)


def narrowed(real: Real, embd: int, ff: int) -> Real:
    """The same model with another width: heads, latents and the other FFNs shrink in proportion."""
    share = embd / real.embd
    kv_heads = max(1, round(real.kv_heads * share))
    groups = real.heads // real.kv_heads
    latent = real.latent
    if latent is not None:
        latent = replace(latent, rank=max(64, 64 * round(latent.rank * share / 64)))
    head_dim = real.head_dim
    if real.norms == "full":  # there a head is the width divided by the heads
        head_dim = embd // (kv_heads * groups)
    return replace(
        real,
        embd=embd,
        ff=ff,
        heads=kv_heads * groups,
        kv_heads=kv_heads,
        head_dim=head_dim,
        dense_ff=real.dense_ff * ff // real.ff,
        shared_ff=real.shared_ff * ff // real.ff,
        latent=latent,
    )


def thinned(real: Real) -> Real:
    """The same routed experts and routing with next to nothing around them: attention of two heads, no shared
    experts, dense layers or large vocabulary. For benchmarks in which the experts' time is to stand alone.
    """
    return replace(
        real,
        arch="qwen3moe",
        layers=real.layers - real.lead,
        lead=0,
        heads=2,
        kv_heads=1,
        head_dim=128,
        latent=None,
        norms="head",
        shared_ff=0,
        dense_ff=0,
        vocab=len(tokenizer.vocabulary()),
        renormalised=True,
        neox=True,
    )


def parse_size(text: str) -> int:
    """Bytes of "10G", "800M" (powers of ten) or a plain number. Raises ValueError."""
    found = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*([KMGT]?)B?\s*", text, re.IGNORECASE)
    if not found:
        raise ValueError(f"no size: {text!r}; write 10G or 800M")
    return int(float(found[1]) * 1000 ** " KMGT".index(found[2].upper() or " "))


def _plans(plant: Plant, layers: int, kinds: list[TokenType], file_type: str) -> list[gguf_file.Plan]:
    banks, out = Banks(plant), []
    for tensor in tensors(plant, layers, kinds):
        kind = kind_of(tensor, plant.real, layers, file_type)
        out.append(gguf_file.Plan(tensor.name, tensor.shape, kind, _fill(tensor, kind, banks)))
    return out


def _layers_for(plant: Plant, size: int, kinds: list[TokenType], file_type: str) -> int:
    """The most layers whose file is no larger than `size`. Raises ValueError if not even the fewest fit."""
    fewest = plant.real.lead + 1

    def weight(layers: int) -> int:
        return sum(plan.nbytes for plan in _plans(plant, layers, kinds, file_type))

    layers = fewest
    if weight(layers) > size:
        raise ValueError(f"{plant.real.name} with {fewest} layer(s) is {weight(fewest) / 1e9:.2f} GB already")
    while weight(layers + 1) <= size:
        layers += 1
    return layers


def make_like(
    name: str,
    path: Path | str,
    *,
    layers: int = 0,
    size: int = 0,
    file_type: str | None = None,
    seed: int = 0,
    split: int = 0,
    embd: int = 0,
    ff: int = 0,
    vocab: int = 0,
    thin: bool = False,
    tokens_from: Path | None = None,
    recipe: dict[str, float] | None = None,
    progress: Callable[[str], None] = lambda line: None,
) -> Path:
    """Write a model of a real model's shape with random weights and planted routing; the (first) file.

    Args:
        name: one of `REAL`. layers: leading dense ones included (default: as the real one). size: bytes;
            as many layers as fit. file_type: see `kind_of` (default: the real one's usual). split: files.
        embd, ff: another width, and experts' width, for small models. vocab: rows of the vocabulary.
        thin: see `thinned`. tokens_from: a GGUF whose tokenizer is copied instead of our own of 512 tokens.
        recipe: changes to the planting, by field of `Recipe`.
    Raises: ValueError for an unknown name or sizes that cannot be, OSError from the disk. No file is left.
    """
    if name not in REAL:
        raise ValueError(f"unknown model {name!r}; known: {', '.join(sorted(REAL))}")
    real = REAL[name]
    if embd or ff:
        real = narrowed(real, embd or real.embd, ff or real.ff)
    if thin:
        real = thinned(real)
    real = replace(real, vocab=vocab or real.vocab, recipe=replace(real.recipe, **(recipe or {})))
    words = _Vocabulary(real.vocab, tokens_from)
    plant = Plant(real, words.counts, words.bos, seed)
    file_type = file_type or real.file_type
    if layers and size:
        raise ValueError("give layers or a size, not both")
    if size:
        layers = _layers_for(plant, size, words.kinds, file_type)
    layers = layers or real.layers
    if layers <= real.lead:
        raise ValueError(f"{name} has {real.lead} dense layer(s) first: it needs more than {layers}")

    def write_header(writer: GGUFWriter) -> None:
        writer.add_name(f"planted like {name}, {layers} layers, seed {seed}")
        writer.add_quantization_version(2)
        gguf_file.add_values(writer, f"{real.arch}.", header(plant, layers))
        words.add_to(writer)

    plans = _plans(plant, layers, words.kinds, file_type)
    return gguf_file.write(Path(path), real.arch, write_header, plans, parts=split, progress=progress)


__all__ = ["Banks", "Latent", "kind_of", "make_like", "narrowed", "parse_size"]

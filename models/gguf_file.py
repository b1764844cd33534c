"""Writing GGUF files tensor by tensor, whole or in parts, without holding the model in memory."""

from __future__ import annotations

import itertools
import re
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from gguf import GGUFWriter
from numpy.typing import NDArray

from models.architectures.parts import Value
from models.ggml import GGMLType, row_bytes


@dataclass(frozen=True)
class Plan:
    """A tensor to be written: shape (outermost first), type, and what makes its bytes [..., row_bytes]."""

    name: str
    shape: tuple[int, ...]
    kind: GGMLType
    fill: Callable[[], NDArray[np.uint8]]

    @property
    def byte_shape(self) -> tuple[int, ...]:
        return (*self.shape[:-1], row_bytes(self.kind, self.shape[-1]))

    @property
    def nbytes(self) -> int:
        return int(np.prod(self.byte_shape, dtype=np.int64))


def add_values(writer: GGUFWriter, prefix: str, values: dict[str, Value]) -> None:
    """Write header values: whole numbers as uint32, fractions as float32, the rest as what they are."""
    for key, value in values.items():
        if isinstance(value, bool):
            writer.add_bool(prefix + key, value)
        elif isinstance(value, int):
            writer.add_uint32(prefix + key, value)
        elif isinstance(value, float):
            writer.add_float32(prefix + key, value)
        elif isinstance(value, str):
            writer.add_string(prefix + key, value)
        else:
            writer.add_array(prefix + key, value)


def part_names(path: Path, parts: int) -> list[Path]:
    """The names llama.cpp wants: FILE-00001-of-00003.gguf and so on; the path itself for a single file."""
    if parts <= 1:
        return [path]
    stem = path.name.removesuffix(".gguf")
    return [path.with_name(f"{stem}-{i + 1:05d}-of-{parts:05d}.gguf") for i in range(parts)]


def cut(plans: Sequence[Plan], parts: int) -> list[list[Plan]]:
    """Divide tensors into parts of about equal bytes, cut between expert tensors of one layer if possible.

    Raises ValueError if there are fewer tensors than parts.
    """
    if parts <= 1:
        return [list(plans)]
    if parts > len(plans):
        raise ValueError(f"cannot cut {len(plans)} tensors into {parts} parts")
    ends = np.cumsum([p.nbytes for p in plans])
    layer = [re.match(r"(blk\.\d+\.).*_exps\.", p.name) for p in plans]
    places = range(1, len(plans))
    inside = {i for i in places if layer[i - 1] and layer[i] and layer[i - 1][1] == layer[i][1]}
    chosen: list[int] = []
    for n in range(1, parts):
        wanted = ends[-1] * n / parts
        # A place later than the last cut that leaves a tensor for each part still to come.
        free = [i for i in places if i > (chosen[-1] if chosen else 0) and len(plans) - i >= parts - n]
        best = [i for i in free if i in inside] or free
        chosen.append(min(best, key=lambda i: abs(float(ends[i - 1]) - wanted)))
    bounds = [0, *chosen, len(plans)]
    return [list(plans[a:b]) for a, b in itertools.pairwise(bounds)]


def write(
    path: Path,
    arch: str,
    header: Callable[[GGUFWriter], None],
    plans: Sequence[Plan],
    *,
    parts: int = 1,
    progress: Callable[[str], None] = lambda line: None,
) -> Path:
    """Write a model and return the (first) file.

    header: adds keys beyond general.architecture, called for the first part only, as in llama.cpp's splitter.
    Raises ValueError if a tensor's bytes do not have the planned shape. After any error no file is left.
    """
    groups = cut(plans, parts)
    names = part_names(path, len(groups))
    path.parent.mkdir(parents=True, exist_ok=True)
    try:
        for number, (name, group) in enumerate(zip(names, groups, strict=True)):
            writer = GGUFWriter(name, arch)
            if number == 0:
                header(writer)
            if len(groups) > 1:
                writer.add_uint16("split.no", number)
                writer.add_uint16("split.count", len(groups))
                writer.add_int32("split.tensors.count", len(plans))
            _write_part(writer, group, progress)
    except BaseException:
        for name in names:
            name.unlink(missing_ok=True)
        raise
    return names[0]


def _write_part(writer: GGUFWriter, plans: Iterable[Plan], progress: Callable[[str], None]) -> None:
    plans = list(plans)
    for plan in plans:
        writer.add_tensor_info(
            plan.name, plan.byte_shape, np.dtype(np.uint8), plan.nbytes, raw_dtype=plan.kind
        )
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_ti_data_to_file()
    try:
        for plan in plans:
            data = plan.fill()
            if data.shape != plan.byte_shape or data.dtype != np.uint8:
                raise ValueError(f"{plan.name}: filled {data.dtype} {data.shape}, planned {plan.byte_shape}")
            writer.write_tensor_data(data)
            progress(f"{plan.name} {plan.kind.name} {plan.nbytes / 1e6:.1f} MB")
    finally:
        writer.close()

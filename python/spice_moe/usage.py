"""Which experts earlier runs of a model used most: a small file in the user's cache directory.

Written when a model is closed, read when it is loaded, so that the experts that are likely to be needed can
be read while nothing else is. Never required: a file that is missing, damaged or for another shape is
ignored, one that cannot be written is not written.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
from collections.abc import Mapping, Sequence
from pathlib import Path

#: For each MoE layer by its number, how often each expert was used.
Uses = Mapping[int, Sequence[float]]

_FORMAT = 1
_KEPT = 0.5  # of what earlier runs say, when a run is added


def cache_folder() -> Path:
    """``$XDG_CACHE_HOME/spice-moe``, or ``~/.cache/spice-moe``."""
    base = os.environ.get("XDG_CACHE_HOME", "")
    return (Path(base) if Path(base).is_absolute() else Path.home() / ".cache") / "spice-moe"


def usage_file(files: Sequence[Path]) -> Path:
    """Where the uses of the model with these GGUF files are kept. Raises OSError when one is not there.

    Another path, size or time of change is another model.
    """
    key = hashlib.sha256()
    for file in files:
        stat = file.stat()
        key.update(f"{file.resolve()}\0{stat.st_size}\0{stat.st_mtime_ns}\0".encode())
    return cache_folder() / f"uses-{key.hexdigest()[:24]}.json"


def read_uses(path: Path) -> dict[int, list[float]] | None:
    """The uses in the file; None when there is none. Raises ValueError for a damaged one, or OSError."""
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        return None
    if not (
        isinstance(found, dict) and found.get("format") == _FORMAT and isinstance(found.get("uses"), dict)
    ):
        raise ValueError(f"{path} is no file of uses")
    try:
        uses = {int(layer): [float(use) for use in row] for layer, row in found["uses"].items()}
    except (TypeError, ValueError) as error:
        raise ValueError(f"{path} is damaged: {error}") from error
    if not all(0.0 <= use < float("inf") for row in uses.values() for use in row):
        raise ValueError(f"{path} is damaged: a use that is no number of uses")
    return uses


def add_run(before: Uses | None, run: Uses) -> dict[int, list[float]]:
    """``run`` joined with what was known before. Each layer is scaled to a sum of 1 first, so that a long run
    says as much as a short one; layers of another shape than the run's are forgotten."""
    joined = {}
    for layer, row in run.items():
        old = _shares((before or {}).get(layer, []))
        new = _shares(row)
        if len(old) != len(new) or not any(old):
            joined[layer] = new
        elif not any(new):
            joined[layer] = old
        else:
            joined[layer] = [_KEPT * a + (1 - _KEPT) * b for a, b in zip(old, new, strict=True)]
    return joined


def _shares(row: Sequence[float]) -> list[float]:
    total = float(sum(row))
    return [use / total if total > 0 else 0.0 for use in row]


def write_uses(path: Path, uses: Uses) -> None:
    """Replace the file in one step. Raises OSError."""
    path.parent.mkdir(parents=True, exist_ok=True)
    rows = {str(layer): [round(use, 6) for use in row] for layer, row in uses.items()}
    draft = path.with_suffix(f".{os.getpid()}.tmp")
    try:
        draft.write_text(json.dumps({"format": _FORMAT, "uses": rows}), encoding="utf-8")
        draft.replace(path)
    except OSError:
        with contextlib.suppress(OSError):
            draft.unlink(missing_ok=True)
        raise


def hottest_first(uses: Uses, shape: Uses) -> list[tuple[int, int]]:
    """(layer, expert) of the experts in ``shape`` that were used: each layer's most used one, then each
    layer's second, and so on. A pool with room for a part then holds an equal share of every layer."""
    ranked: list[tuple[int, float, int, int]] = []
    for layer, row in uses.items():
        known = len(shape.get(layer, []))
        order = sorted(range(min(len(row), known)), key=lambda expert, row=row: (-row[expert], expert))
        ranked += [(rank, -row[e], layer, e) for rank, e in enumerate(order) if row[e] > 0]
    return [(layer, expert) for _, _, layer, expert in sorted(ranked)]

"""Fits a sidecar for one model on a text: heads that predict which experts the next MoE layers will choose,
and on request stand-ins for experts (`fit_lore`).

    from spice_moe import fit

    report = fit.fit("model.gguf", {"book.txt": text}, "model.spice.gguf")

One pass over the text (several if the sums of all layers do not fit `memory`) evaluates it in chunks and adds
up what a ridge regression needs (`fit_stats`); `fit_solve` makes candidates from the sums; rows held out for
the choice pick the best one for each layer and horizon, and the training-free head (the target's own router
on the present hidden state) stays where none is better. The recall that is reported comes from a third part
of the text, through the very C++ heads that will run.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np

from . import _core, capture, files, fit_solve, sidecar
from .budget import Budget
from .errors import SpiceUnsupportedError
from .fit_lore_run import LoreRun
from .fit_recall import KINDS, Chooser, Recall, count, share
from .fit_stats import Floats, Ids, MomentSums, Router, indicators, shifted
from .llama import Llama

RANK = 64
FULL_UP_TO = 128  #: experts up to which a draft is a full map; beyond, router plus rank 64 is smaller
LEAST_CHUNKS = 10
_CHOOSE, _REPORT = 0.1, 0.1  # shares of the text, at its end
_MOST_CHOICE_ROWS = 4096

Progress = Callable[[float], object]


@dataclass(frozen=True)
class FitOptions:
    """horizons: MoE layers ahead, 1 to 16. chunk: tokens of one sequence. tokens: of the text to use, 0 for
    all. memory: bytes for the sums (each layer's grow with the square of its width, not with the text); a
    quarter as much again for inputs that the choice is made on. expert_used: experts per token, 0 for the
    model's own. n_threads: 0 for all cores. ram_budget: for experts, as in `Llama`. heads: fit heads. lore:
    the size of the experts' stand-ins, as a rank in F16, 8 to 64; 0 for none."""

    horizons: int = 6
    chunk: int = 256
    tokens: int = 0
    memory: int = 2 << 30
    expert_used: int = 0
    n_threads: int = 0
    ram_budget: Budget = "auto"
    heads: bool = True
    lore: int = 0

    def __post_init__(self) -> None:
        if not 1 <= self.horizons <= 16:
            raise ValueError(f"horizons must be 1 to 16, not {self.horizons}")
        if self.chunk < 2:
            raise ValueError(f"chunk must be at least 2 tokens, not {self.chunk}")
        if self.lore and not 8 <= self.lore <= 64:
            raise ValueError(f"the size of stand-ins must be 8 to 64, not {self.lore}")
        if not self.heads and not self.lore:
            raise ValueError("neither heads nor stand-ins: there is nothing to fit")
        if self.memory < 1 << 20:
            raise ValueError(f"memory must be at least 1 MiB, not {self.memory} bytes")


@dataclass
class _Split:
    """Chunks of token ids for fitting, for the choice, and for the report."""

    fit: list[list[int]] = field(default_factory=list)
    choose: list[list[int]] = field(default_factory=list)
    report: list[list[int]] = field(default_factory=list)


def fit(
    model: str | os.PathLike[str],
    texts: Mapping[str, str],
    output: str | os.PathLike[str] | None = None,
    options: FitOptions | None = None,
    *,
    progress: Progress | None = None,
) -> dict[str, Any]:
    """Fit on `texts` (by name) and write the sidecar to `output` (default: beside the model).

    Returns the report: recall by kind and horizon on text that was not fitted, what was kept, sizes, and
    under "lore" the errors of the stand-ins.
    Raises SpiceUnsupportedError for a model without usable routers, ValueError for too little text, and what
    `Llama` raises. No file is written then, nor when interrupted.
    """
    options, model = options or FitOptions(), files.name(model)
    sidecar.writer_package()  # now, not after the work
    output = sidecar.default_path(model) if output is None else Path(output)
    files.check_output(output, model)
    # No text has more tokens than bytes: a context for more would only take memory.
    longest = max((len(text.encode()) for text in texts.values()), default=0)
    options = replace(options, chunk=min(options.chunk, max(longest, 16)))
    heads = _core.heads.Heads(os.fspath(model), expert_used=options.expert_used, max_horizon=options.horizons)
    groups = range(len(heads.layers)) if options.heads else ()
    routers = {g: Router.read(heads, g) for g in groups if heads.has_router(g)}
    pairs = {
        g: [h for h in range(1, options.horizons + 1) if heads.has("training-free", g, h)] for g in routers
    }
    if options.heads and not any(pairs.values()):
        why = heads.reason or "fewer than two layers have routed experts"
        raise SpiceUnsupportedError(f"{os.fspath(model)}: nothing can be fitted: {why}")
    chooser = Chooser(heads)
    step = _Steps(progress)
    with contextlib.closing(open_model(model, options)) as llm:
        # Of the rows for the choice, the inputs of all layers are kept, as F16.
        row_bytes = sum(2 * r.weight.shape[1] + 4 * chooser.top_k for r in routers.values())
        most_rows = min(_MOST_CHOICE_ROWS, options.memory // 4 // max(1, row_bytes))
        split, used = _split(llm, texts, options, most_rows)
        groups = [g for g in routers if pairs[g]]
        passes = _passes(groups, routers, pairs, options.memory)
        lore = LoreRun(llm, model, split.fit[0], options.lore) if options.lore else None
        parts = (split.fit, split.choose, split.report)
        more = 0 if lore is None else sum(map(len, parts)) + lore.steps
        step.plan(len(passes) * len(split.fit) + len(split.choose) + len(split.report), len(groups) + more)
        with contextlib.closing(capture.run(llm, split.choose if groups else [])) as chunks:
            held = _Held(chunks, step)
        fitted: list[sidecar.Head] = []
        for part in passes:
            fitted += _fit_pass(llm, part, routers, pairs, split.fit, held, chooser, step)
        stand_ins, lore_report = lore.fit(*parts, output.absolute().parent, step) if lore else ([], {})
        print_ = _core.heads.fingerprint(os.fspath(model))
        draft = output.with_name(output.name + ".try")
        facts: dict[str, Any] = {
            "horizons": options.horizons,
            "expert_used": chooser.top_k,
            "text.names": list(texts),
            "text.tokens": used,
            "text.fit_tokens": sum(map(len, split.fit)),
            **(lore.facts(stand_ins) if lore else {}),
        }
        named = {"fingerprint": print_, "model": Path(model).name, "heads": fitted}
        try:
            # More than once: what is reported is measured through the file itself, and then noted in it.
            def write_draft(layers: Sequence[sidecar.Lore]) -> Path:
                sidecar.write(draft, **named, facts=facts, lore=layers)
                return draft

            write_draft(stand_ins)
            curve: list[tuple[float, float]] = []
            if lore:
                pieces = [*split.choose, *split.report]
                stand_ins, curve = lore.calibrate(stand_ins, pieces, write_draft, step)
            recall = _measure(
                model, draft, llm, split.report if groups else [], routers, pairs, chooser, options, step
            )
            kinds = ("training-free", *KINDS)
            table = recall.table(kinds, options.horizons)
            for kind in kinds:
                values = [v for v in table[kind] if v is not None]
                if values:
                    facts[f"recall.{kind}"] = [float(v) for v in values]
            sidecar.write(output, **named, facts=facts, lore=stand_ins, lore_curve=curve)
        finally:
            draft.unlink(missing_ok=True)
    step.close()
    return {
        "file": str(output),
        "bytes": output.stat().st_size,
        "fingerprint": print_,
        "tokens": used,
        "fit_tokens": sum(map(len, split.fit)),
        "choose_tokens": sum(map(len, split.choose)),
        "report_tokens": sum(map(len, split.report)),
        "layers": len(heads.layers),
        "horizons": options.horizons,
        "top_k": chooser.top_k,
        "passes": len(passes),
        "reason": heads.reason,
        "kept": {kind: sum(head.kind == kind for head in fitted) for kind in KINDS},
        "possible": sum(map(len, pairs.values())),
        "recall": table,
        **({"lore": lore_report} if lore else {}),
    }


class _Steps:
    """Progress over chunks and layers, which take about as long as each other."""

    def __init__(self, report: Progress | None) -> None:
        self._report, self._total, self._done = report, 1, 0

    def plan(self, chunks: int, layers: int) -> None:
        self._total = chunks + layers

    def __call__(self) -> None:
        self._done += 1
        if self._report is not None:
            self._report(min(1.0, self._done / self._total))

    def close(self) -> None:
        if self._report is not None:
            self._report(1.0)


def open_model(model: str | os.PathLike[str], options: FitOptions) -> Llama:
    """The model in SPICE, with a context of one chunk. Raises what `Llama` raises."""
    arguments: dict[str, Any] = {}
    if options.expert_used:
        summary = files.summary(model)
        if options.expert_used > summary["n_expert"]:
            raise ValueError(
                f"{os.fspath(model)} has {summary['n_expert']} experts: {options.expert_used} of them cannot "
                f"be used per token"
            )
        arguments["kv_overrides"] = {f"{summary['architecture']}.expert_used_count": options.expert_used}
    if options.n_threads:
        arguments["n_threads"] = arguments["n_threads_batch"] = options.n_threads
    return Llama(
        model,
        n_ctx=options.chunk,
        n_batch=options.chunk,
        ram_budget=options.ram_budget,
        verbose=False,
        **arguments,
    )


def _split(llm: Llama, texts: Mapping[str, str], options: FitOptions, most_rows: int) -> tuple[_Split, int]:
    """Every text in three contiguous blocks, so that each kind is in each part; and the tokens used.

    Texts of one or two pieces are divided together, as one text.
    """
    ids = {name: capture.tokenize(llm, text) for name, text in texts.items()}
    total = sum(map(len, ids.values()))
    part = min(1.0, options.tokens / total) if options.tokens and total else 1.0
    out, used, chunk = _Split(), 0, options.chunk
    # Short texts in shorter chunks, rather than not at all.
    while chunk > 16 and sum(int(len(v) * part) // chunk for v in ids.values()) < LEAST_CHUNKS:
        chunk //= 2
    blocks: list[list[list[int]]] = []
    short: list[list[int]] = []
    for tokens in ids.values():
        pieces = [p for p in capture.cut(llm, tokens[: int(len(tokens) * part)], chunk) if len(p) > 1]
        used += sum(map(len, pieces))
        if len(pieces) > 2:
            blocks.append(pieces)
        else:
            short += pieces
    for pieces in (*blocks, short):
        report = max(1, round(len(pieces) * _REPORT)) if len(pieces) > 2 else 0
        choose = max(1, round(len(pieces) * _CHOOSE)) if len(pieces) > 2 else 0
        end = len(pieces) - report - choose
        out.fit += pieces[:end]
        out.choose += pieces[end : end + choose]
        out.report += pieces[end + choose :]
    rows = np.cumsum([len(p) for p in out.choose])
    kept = int(np.searchsorted(rows, most_rows, side="right")) or 1
    out.fit += out.choose[kept:]
    del out.choose[kept:]
    if len(out.fit) < LEAST_CHUNKS - 2 or not out.choose or not out.report:
        raise ValueError(f"{used} tokens of text are too few: give at least {LEAST_CHUNKS * 16}")
    return out, used


def _passes(
    groups: Sequence[int], routers: Mapping[int, Router], pairs: Mapping[int, Sequence[int]], memory: int
) -> list[list[int]]:
    """Groups whose sums fit the memory together; at least one group a pass."""
    out: list[list[int]] = []
    left = 0
    for group in groups:
        experts, width = routers[group].weight.shape
        need = MomentSums.bytes_for(width, experts, len(pairs[group]))
        if not out or need > left:
            out.append([])
            left = memory
        out[-1].append(group)
        left -= need
    return out


class _Held:
    """The chunks held out for the choice: inputs as F16, and ids, by layer."""

    def __init__(self, chunks: Iterator[capture.Chunk], step: _Steps) -> None:
        self.chunks: list[tuple[dict[int, Any], dict[int, Ids]]] = []
        for chunk in chunks:
            self.chunks.append(({n: h.astype(np.float16) for n, h in chunk.hidden.items()}, chunk.ids))
            step()

    def rows(self, present: Router, target: Router) -> tuple[Floats, Floats, Floats, Ids] | None:
        """Inputs and indicators of the present layer, indicators of the target's previous token (none for a
        chunk's first), and the target's ids."""
        parts = [
            (
                hidden[present.layer].astype(np.float32),
                indicators(ids[present.layer], present.weight.shape[0]),
                shifted(indicators(ids[target.layer], target.weight.shape[0])),
                ids[target.layer],
            )
            for hidden, ids in self.chunks
            if present.layer in hidden and target.layer in ids
        ]
        if not parts:
            return None
        h, p, q, ids = (np.concatenate(column) for column in zip(*parts, strict=True))
        return h, p, q, ids


def _fit_pass(
    llm: Llama,
    groups: Sequence[int],
    routers: Mapping[int, Router],
    pairs: Mapping[int, Sequence[int]],
    pieces: Sequence[Sequence[int]],
    held: _Held,
    chooser: Chooser,
    step: _Steps,
) -> list[sidecar.Head]:
    """Run the text, and fit the heads of these groups."""
    sums: dict[int, MomentSums] = {}
    for group in groups:
        targets = {h: routers[group + h] for h in pairs[group]}
        centre = all(chooser.by_order(t) for t in targets.values())
        sums[group] = MomentSums(routers[group], targets, centre)
    with contextlib.closing(capture.run(llm, pieces)) as chunks:
        for chunk in chunks:
            for group in groups:
                needed = [routers[group].layer, *(t.layer for t in sums[group].targets.values())]
                if all(layer in chunk.hidden for layer in needed):
                    sums[group].add(chunk.hidden, chunk.ids)
            step()
    heads: list[sidecar.Head] = []
    for group in groups:
        if sums[group].rows:
            heads += _choose(sums[group], held, chooser)
        step()
    return heads


@dataclass
class _Best:
    recall: float
    head: sidecar.Head | None = None


def _choose(sums: MomentSums, held: _Held, chooser: Chooser) -> list[sidecar.Head]:
    """The best candidate for each kind and horizon, where it beats the training-free head."""
    rows = {h: held.rows(sums.present, target) for h, target in sums.targets.items()}
    best: dict[tuple[str, int], _Best] = {}
    for horizon, found in rows.items():
        if found is None:
            continue
        target = sums.targets[horizon]
        router, constant = target.seen_from(sums.present)
        frozen = share(chooser(found[0] @ router.T + constant, target), found[3])
        for kind in KINDS:
            best[kind, horizon] = _Best(frozen)
    for kind, candidates in (("draft", fit_solve.drafts(sums)), ("adapter", fit_solve.adapters(sums))):
        for candidate in candidates:
            found, now = rows[candidate.horizon], best.get((kind, candidate.horizon))
            if found is None or now is None:
                continue
            form = _as_head(candidate, sums, kind)
            if form is None:
                continue
            head, scored = form
            target = sums.targets[candidate.horizon]
            found_share = share(chooser(scored.scores(*found[:3]), target), found[3])
            if np.isfinite(scored.full).all() and found_share > now.recall:
                best[kind, candidate.horizon] = _Best(found_share, head)
    return [b.head for b in best.values() if b.head is not None]


def _as_head(
    candidate: fit_solve.Candidate, sums: MomentSums, kind: str
) -> tuple[sidecar.Head, fit_solve.Candidate] | None:
    """The head in the form that it will have in the file, and the scores that this form gives."""
    n_out = sums.targets[candidate.horizon].weight.shape[0]
    place = (kind, sums.present.layer, candidate.horizon)
    if n_out <= (RANK if kind == "adapter" else FULL_UP_TO):
        head = sidecar.Head(
            *place,
            full=candidate.full,
            present=candidate.present,
            previous=candidate.previous,
            bias=candidate.bias,
        )
        return head, candidate
    reduced = fit_solve.reduce(candidate, sums, RANK)
    if reduced is None:
        return None
    low, a, b = reduced
    _, constant = sums.targets[candidate.horizon].seen_from(sums.present)
    bias = low.bias - constant  # the router that stays has its own
    return sidecar.Head(*place, a=a, b=b, present=low.present, previous=low.previous, bias=bias), low


def _measure(
    model: str | os.PathLike[str],
    file: Path,
    llm: Llama,
    pieces: Sequence[Sequence[int]],
    routers: Mapping[int, Router],
    pairs: Mapping[int, Sequence[int]],
    chooser: Chooser,
    options: FitOptions,
    step: _Steps,
) -> Recall:
    """Recall of the three kinds on text that nothing was fitted on, through the C++ heads."""
    heads = _core.heads.Heads(
        os.fspath(model),
        sidecar=os.fspath(file),
        expert_used=options.expert_used,
        max_horizon=options.horizons,
    )
    recall = Recall()
    with contextlib.closing(capture.run(llm, pieces)) as chunks:
        for chunk in chunks:
            for group, horizons in pairs.items():
                for horizon in horizons:
                    count(recall, heads, routers, chooser, chunk, group, horizon)
            step()
    return recall

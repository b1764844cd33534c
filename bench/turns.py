"""Sides of a benchmark that take turns every few tokens, and the ratio of their times.

A shared machine is slower in one minute than in the next; turns of a second or less meet the same machine.
"""

from __future__ import annotations

import json
import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from bench.worker import Job, Report, TurnWorker, WorkerEndedError

NOT_LOADED = 3  #: the exit code of a worker whose model does not load


def side_by_side(script: Path, jobs: Sequence[Job], turn: int) -> list[Report] | None:
    """Decode with one worker process of `script` for each job, in turns of so many tokens; their reports.

    job["decode"]: tokens of each. A report has what the worker told when it was loaded and when it was done,
    and "turns" (seconds of each), "decode_seconds" (all of them) and "best" (its tokens). None when one of
    the models did not load: no room on the device. Ends the process, saying so, when a worker fails
    otherwise.
    """
    workers: list[TurnWorker] = []
    try:
        for job in jobs:
            try:
                workers.append(TurnWorker([script, json.dumps(job)]))
            except WorkerEndedError as error:
                if error.code == NOT_LOADED:
                    return None
                raise
        reports = [worker.loaded | dict(turns=[], best=[]) for worker in workers]
        left = jobs[0]["decode"]
        order = list(range(len(jobs)))
        while left > 0:
            tokens = min(turn, left)
            for index in order:
                answer = workers[index].ask(do="decode", tokens=tokens)
                reports[index]["turns"].append(answer["seconds"])
                reports[index]["best"] += answer["best"]
            left -= tokens
            order.reverse()
        for report, worker in zip(reports, workers, strict=True):
            report |= worker.ask(do="report") | dict(decode_seconds=sum(report["turns"]))
        return reports
    except WorkerEndedError as error:
        raise SystemExit(f"{' and '.join(job['label'] for job in jobs)}: {error}") from None
    finally:
        for worker in workers:
            worker.close()


@dataclass(frozen=True)
class Ratio:
    """The time of one side for that of the other, which did the same in every turn."""

    ratio: float
    error: float | None  #: standard error, by leaving out one turn after another; None: there was only one

    def __str__(self) -> str:
        return f"{self.ratio:.3f}" + ("" if self.error is None else f" +- {self.error:.3f}")


def ratio(ours: Sequence[float], theirs: Sequence[float]) -> Ratio:
    """Of seconds by turn."""
    whole = sum(ours) / sum(theirs)
    n = len(ours)
    if n < 2:
        return Ratio(whole, None)
    without = [(sum(ours) - a) / (sum(theirs) - b) for a, b in zip(ours, theirs, strict=True)]
    mean = statistics.fmean(without)
    return Ratio(whole, math.sqrt((n - 1) / n * sum((r - mean) ** 2 for r in without)))

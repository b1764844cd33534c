"""How benchmarks and their worker processes run: a failure is told in one line.

A worker's job goes in as JSON, its report comes out as JSON.
"""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

Job = dict[str, Any]
Report = dict[str, Any]


def run_worker(script: Path, job: Job, label: str, *, enter: Callable[[], None] | None = None) -> Report:
    """Run `script` in a process of its own and return its report.

    enter: called in that process before anything else. Raises SystemExit, which names the run, if it fails.
    """
    command = [sys.executable, str(script), "--worker", json.dumps(job)]
    done = subprocess.run(command, stdout=subprocess.PIPE, text=True, preexec_fn=enter)
    if done.returncode != 0:
        raise SystemExit(f"the run of {label} ended with exit code {done.returncode}; see above")
    return json.loads(done.stdout)


def run_main(main: Callable[[], int]) -> int:
    """What a benchmark's script does: its exit code, or that of a command of SPICE that fails like that."""
    from spice_moe import command

    return command.run(Path(sys.argv[0]).stem, main, json_errors=False)


def serve(work: Callable[[Job], Report]) -> None:
    """What a worker's script does: the job of its argument, done and reported."""
    from spice_moe import SpiceError

    try:
        print(json.dumps(work(json.loads(sys.argv[-1]))))
    except (SpiceError, OSError) as error:
        raise SystemExit(f"error: {error}") from None

"""How benchmarks and their worker processes run: a failure is told in one line.

A worker's job goes in as JSON, its report comes out as JSON. One that takes turns with others
(:class:`TurnWorker`) answers requests until it is closed.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
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


class WorkerEndedError(RuntimeError):
    """A worker ended by itself; `code`: its exit code."""

    def __init__(self, code: int) -> None:
        super().__init__(f"a worker ended with exit code {code}; see its message above")
        self.code = code


class TurnWorker:
    """A worker process that waits for its turn. Requests and answers are JSON lines on its pipes.

    `command`: its arguments, the script first. It answers once by itself when it is ready (:attr:`loaded`).
    """

    def __init__(self, command: Sequence[str | Path]) -> None:
        self._process = subprocess.Popen(
            [sys.executable, *map(str, command)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            bufsize=1,
        )
        self.loaded = self._answer()

    def ask(self, **request: Any) -> Report:
        """Send a request and wait for the answer. Raises :class:`WorkerEndedError`."""
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps(request) + "\n")
        return self._answer()

    def _answer(self) -> Report:
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if not line:
            raise WorkerEndedError(self._process.wait())
        return json.loads(line)

    def cpu_seconds(self) -> float:
        """CPU time that the process has used, all threads; 0 where there is no /proc."""
        try:
            fields = Path(f"/proc/{self._process.pid}/stat").read_text().rpartition(")")[2].split()
        except OSError:
            return 0.0
        return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")

    def close(self) -> int:
        """End the process and wait for it; returns its exit code."""
        if self._process.stdin is not None:
            self._process.stdin.close()
        return self._process.wait()


def run_main(main: Callable[[], int]) -> int:
    """What a benchmark's script does: its exit code, or that of a command of SPICE that fails like that."""
    from spice_moe import command

    return command.run(Path(sys.argv[0]).stem, main, json_errors=False)


def take_turns(loaded: Report, tasks: Mapping[str, Callable[..., Report]]) -> None:
    """What the script of a :class:`TurnWorker` does: the task that each request names, until stdin ends."""
    print(json.dumps(loaded), flush=True)
    for line in sys.stdin:
        request = json.loads(line)
        print(json.dumps(tasks[request.pop("do")](**request)), flush=True)


def serve(work: Callable[[Job], Report]) -> None:
    """What a worker's script does: the job of its argument, done and reported."""
    from spice_moe import SpiceError

    try:
        print(json.dumps(work(json.loads(sys.argv[-1]))))
    except (SpiceError, OSError) as error:
        raise SystemExit(f"error: {error}") from None

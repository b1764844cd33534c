"""Loads damaged copies of a model, one after the other, and reports each. Run as a process of its own.

stdin: a JSON object {"model": path, "scratch": path, "flips": [[byte offset, bit], ...]}.
stdout: for every flip, a line "try OFFSET BIT" before, and "ok" or "error CLASS: message" after.
Whoever reads that knows the flip that ended this process, if one did.
"""

from __future__ import annotations

import json
import resource
import sys
from pathlib import Path

from spice_moe import Llama

PROMPT = [1, 300, 301, 302, 303, 304, 305]


def attempt(path: Path) -> str:
    """Load the model and evaluate a prompt and a token. Returns "ok" or the exception."""
    try:
        llm = Llama(str(path), n_ctx=64, verbose=False, n_threads=1, n_threads_batch=1)
        try:
            llm.eval(PROMPT)
            llm.eval([306])
        finally:
            llm.close()
    except Exception as error:
        return f"error {type(error).__name__}: {' '.join(str(error).split())}"
    return "ok"


def main() -> None:
    job = json.load(sys.stdin)
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    sound = Path(job["model"]).read_bytes()
    scratch = Path(job["scratch"])
    for offset, bit in job["flips"]:
        print(f"try {offset} {bit}", flush=True)
        damaged = bytearray(sound)
        damaged[offset] ^= 1 << bit
        scratch.write_bytes(damaged)
        print(attempt(scratch), flush=True)


if __name__ == "__main__":
    main()

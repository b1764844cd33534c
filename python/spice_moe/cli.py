"""``spice-run``: run a GGUF model from the command line."""

from __future__ import annotations

import argparse
import contextlib
import json
import sys
from collections.abc import Iterable, Sequence
from typing import Any

from . import command, lore, run_arguments
from .plan import format_bytes
from .session import MeteredLlama, Session
from .shipped import tiny_model


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command with ``argv`` (default: ``sys.argv[1:]``) and return its exit code; see ``--help``."""
    args = run_arguments.parse(argv)
    for stream in (sys.stdin, sys.stdout):
        with contextlib.suppress(AttributeError):  # closed, or replaced by what is no TextIOWrapper
            stream.reconfigure(encoding="utf-8", errors="replace")
    return command.run("spice-run", lambda: _run(args), json_errors=args.json, verbose=args.verbose)


def _say(text: str) -> None:
    command.say("spice-run", text)


def _run(args: argparse.Namespace) -> int:
    prompt = None if args.interactive else run_arguments.prompt(args)
    if args.model is None:
        args.model = str(tiny_model())
    sampling = run_arguments.for_sampler(args)
    llm = MeteredLlama(args.model, **run_arguments.for_llama(args))
    try:
        if not args.json:
            _say(str(llm.spice.plan))
        session = Session(llm, system=args.system, sampling=sampling)
        if args.interactive:
            code, text = _converse(session), ""
        else:
            assert prompt is not None
            code, text = _answer(session, prompt, args)
        if args.json:
            print(json.dumps(_report(llm, session, text, code), ensure_ascii=False))
        else:
            _say(_summary(llm))
        return code
    finally:
        llm.close()


def _stream(pieces: Iterable[str], *, echo: bool) -> tuple[str, bool]:
    """Collect an answer, printing it as it comes if ``echo``. Returns the text and whether Ctrl-C cut it."""
    text, cut = "", False
    try:
        for piece in pieces:
            text += piece
            if echo:
                sys.stdout.write(piece)
                sys.stdout.flush()
    except KeyboardInterrupt:
        cut = True
    finally:
        if echo:
            sys.stdout.write("\n")
            sys.stdout.flush()
    return text, cut


def _answer(session: Session, prompt: str, args: argparse.Namespace) -> tuple[int, str]:
    if args.system is not None and not session.has_template:
        raise command.UsageError("--system: this model has no chat template")
    chat = session.has_template and not args.raw
    pieces = session.chat(prompt) if chat else session.complete(prompt)
    try:
        text, cut = _stream(pieces, echo=not args.json)
    except ValueError as error:
        if not _too_long(error):
            raise
        raise command.UsageError(f"{command.one_line(error)}; --ctx N makes room for more") from error
    return (command.INTERRUPTED if cut else command.OK), text


def _converse(session: Session) -> int:
    if not session.has_template:
        _say("this model has no chat template; messages are written in the style of llama-2")
    _say("chat: /reset starts anew, /exit or Ctrl-D ends, Ctrl-C stops an answer")
    while True:
        try:
            line = _read_line().strip()
        except EOFError:
            return command.OK
        except KeyboardInterrupt:
            print(file=sys.stderr)
            return command.INTERRUPTED
        if line == "/exit":
            return command.OK
        if line == "/reset":
            session.forget()
        elif line:
            try:
                _stream(session.chat(line), echo=True)
            except ValueError as error:
                if not _too_long(error):
                    raise
                _say(f"{command.one_line(error)}; /reset starts anew, --ctx N makes room for more")


def _too_long(error: ValueError) -> bool:
    """Whether the parent says that a prompt does not fit the context."""
    return "context window" in str(error)


def _read_line() -> str:
    if not sys.stdin.isatty():
        line = sys.stdin.readline()
        if not line:
            raise EOFError
        return line
    with contextlib.suppress(ImportError):
        import readline  # noqa: F401  (its import gives input() editing and a history)
    if sys.stdout.isatty():
        return input("> ")
    print("> ", end="", file=sys.stderr, flush=True)  # stdout is for the model's text
    return input()


def _summary(llm: MeteredLlama) -> str:
    meter, stats, plan = llm.meter, llm.spice.stats(), llm.spice.plan
    parts = [
        f"prompt {meter.prompt_tokens} tokens, {meter.prompt_speed:.1f} tokens/s",
        f"decode {meter.decode_tokens} tokens, {meter.decode_speed:.1f} tokens/s",
    ]
    if plan.mode == "spice":
        parts += [
            f"read {format_bytes(stats['bytes_read'])} from disk{_ahead(stats)}, "
            f"waited {stats['stall_seconds']:.1f} s",
            f"{stats['resident_experts']} of {plan.experts_total} experts resident "
            f"({format_bytes(stats['resident_bytes'])})",
        ]
    if plan.device:
        parts.append(_on_device(stats, plan.device))
    mode = "SPICE" if plan.mode == "spice" else "plain llama.cpp"
    if plan.lore and (replaced := lore.summary(stats, plan.moe_layers)):
        parts.append(replaced)
    return " | ".join([*parts, f"{mode}, {'exact' if plan.exact else 'approximate'}"])


def _ahead(stats: dict[str, Any]) -> str:
    """How much of what was read was read ahead of need, and for nothing; "" for none."""
    if not stats["prefetch_bytes"]:
        return ""
    wasted = f", {format_bytes(stats['wasted_bytes'])} for nothing" if stats["wasted_bytes"] else ""
    return f" ({format_bytes(stats['prefetch_bytes'])} ahead of need{wasted})"


def _on_device(stats: dict[str, Any], device: str) -> str:
    """How much of the experts' work the GPU did, and what crossed the link for it."""
    share = stats["device_rows"] / max(stats["expert_rows"], 1)
    wasted = stats["device_prefetch_wasted"]
    nothing = f", {wasted} for nothing" if wasted else ""
    sent = stats["device_prefetched"]
    ahead = f" ({sent} of {stats['uploads']} experts ahead of need{nothing})" if sent else ""
    return f"{share:.0%} of expert work on {device}, {format_bytes(stats['upload_bytes'])} sent there{ahead}"


def _report(llm: MeteredLlama, session: Session, text: str, code: int) -> dict[str, Any]:
    meter = llm.meter
    stats = llm.spice.stats()
    return {
        "text": text,
        "finish_reason": "interrupted" if code == command.INTERRUPTED else session.finish_reason,
        "prompt": {
            "tokens": meter.prompt_tokens,
            "seconds": meter.prompt_seconds,
            "tokens_per_second": meter.prompt_speed,
        },
        "decode": {
            "tokens": meter.decode_tokens,
            "seconds": meter.decode_seconds,
            "tokens_per_second": meter.decode_speed,
        },
        "plan": stats.pop("plan"),
        "stats": stats,
        "exit_code": code,
    }

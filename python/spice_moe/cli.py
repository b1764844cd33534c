"""``spice-run``: run a GGUF model from the command line."""

from __future__ import annotations

import argparse
import contextlib
import json
import sys
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from . import __version__, _core, budget, command, lore
from .device import check_vram, placements
from .options import predictors, strategies
from .plan import format_bytes
from .session import MeteredLlama, Session
from .shipped import tiny_model

_EPILOG = """\
examples:
  spice-run -p "What is 3 + 4?"
  spice-run model.gguf -p "What is the capital of France?"
  spice-run model.gguf -i --system "Answer in one sentence."
  spice-run model.gguf --raw -p "Once upon a time" -n 100 --temp 0
  spice-run model.gguf -f question.txt --json > answer.json
  echo "Why is the sky blue?" | spice-run model.gguf

Text goes to stdout, everything else to stderr. A prompt is sent as a chat message through the model's own
template if it has one; --raw completes the text as it is. In a chat (-i), /reset starts a new conversation,
/exit or Ctrl-D ends, Ctrl-C stops an answer and, at the prompt, ends.

exit codes:
  0  done                                 5  the model cannot be run (quantisation, architecture, context)
  1  another failure                      6  out of memory, or --ram is too small
  2  wrong usage                          7  the disk refused to read
  3  no such file                       130  ended by Ctrl-C
  4  not a GGUF, truncated or malformed
"""


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command with ``argv`` (default: ``sys.argv[1:]``) and return its exit code; see ``--help``."""
    args = _parse(argv)
    with contextlib.suppress(AttributeError):  # a replaced stdout may not be a TextIOWrapper
        sys.stdout.reconfigure(encoding="utf-8", errors="replace")
    return command.run(
        "spice-run",
        lambda: _run(args),
        json_errors=args.json,
        verbose=args.verbose,
        value_error=command.OTHER,  # llama.cpp's binding raises it, for a model that does not load
    )


def _say(text: str) -> None:
    command.say("spice-run", text)


def _parse(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="spice-run",
        description="Run a GGUF model. Mixture-of-Experts models load only the experts that they use.",
        epilog=_EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument(
        "model",
        nargs="?",
        metavar="MODEL",
        help="the model, a .gguf file (default: the small one that comes along)",
    )
    prompt = parser.add_mutually_exclusive_group()
    prompt.add_argument("-p", "--prompt", metavar="TEXT", help="answer this prompt and end")
    prompt.add_argument(
        "-f", "--file", metavar="FILE", type=Path, help="answer the prompt in this UTF-8 file"
    )
    prompt.add_argument("-i", "--interactive", action="store_true", help="chat (default at a terminal)")
    parser.add_argument(
        "--raw", action="store_true", help="complete the text as it is, without a chat template"
    )
    parser.add_argument("--system", metavar="TEXT", help="system message of the chat")
    parser.add_argument(
        "-n", "--tokens", metavar="N", type=_positive, help="stop after N tokens (default: when done)"
    )
    parser.add_argument("--json", action="store_true", help="print one JSON object instead of streaming text")
    parser.add_argument(
        "-v", "--verbose", action="store_true", help="show llama.cpp's own log, and tracebacks"
    )
    parser.add_argument("--version", action="version", version=_version())

    sampling = parser.add_argument_group("sampling")
    sampling.add_argument("--temp", type=float, default=0.8, help="temperature, 0 is greedy (default 0.8)")
    sampling.add_argument("--top-k", type=int, default=40, metavar="K", help="default 40, 0 is all")
    sampling.add_argument("--top-p", type=float, default=0.95, metavar="P", help="default 0.95")
    sampling.add_argument("--min-p", type=float, default=0.05, metavar="P", help="default 0.05")
    sampling.add_argument(
        "--repeat-penalty", type=float, default=1.0, metavar="X", help="default 1.0, which is none"
    )
    sampling.add_argument("--seed", type=int, help="for a repeatable answer (default: random)")

    run = parser.add_argument_group("running")
    run.add_argument("-c", "--ctx", type=_positive, default=4096, metavar="N", help="context (default 4096)")
    run.add_argument("-t", "--threads", type=_positive, metavar="N", help="compute threads for single tokens")
    run.add_argument("--threads-batch", type=_positive, metavar="N", help="compute threads for prompts")
    run.add_argument(
        "--batch", type=_positive, default=512, metavar="N", help="prompt tokens per step (default 512)"
    )
    run.add_argument(
        "--experts-used", type=_positive, metavar="K", help="experts per token, instead of the model's"
    )
    run.add_argument(
        "--ram",
        type=_budget,
        metavar="SIZE",
        default="auto",
        help="memory for experts: 6GiB, 6G, 50%% of them, or auto (default: what is free)",
    )
    run.add_argument(
        "--gpu-layers",
        type=int,
        metavar="N",
        default=0,
        help="layers whose other weights go to the GPU, -1 for all (default 0)",
    )
    run.add_argument(
        "--vram",
        type=_vram,
        metavar="SIZE",
        default="auto",
        help="GPU memory for experts, as --ram; auto: what is free, if --gpu-layers is not 0; 0: none; "
        "with several GPUs of each, or 6G,4G for each of them",
    )
    run.add_argument(
        "--placement", metavar="NAME", help=f"who computes which expert: {', '.join(placements())}"
    )
    run.add_argument("--strategy", metavar="NAME", help=f"who leaves a full pool: {', '.join(strategies())}")
    run.add_argument(
        "--no-prefetch", action="store_true", help="read experts only when they are needed, never ahead"
    )
    run.add_argument(
        "--predictor",
        metavar="NAME",
        help=f"what predicts the next layers' experts: {', '.join(predictors())}",
    )
    run.add_argument(
        "--no-preload",
        action="store_true",
        help="forget which experts earlier runs used; read nothing at start",
    )
    run.add_argument(
        "--timeline",
        metavar="FILE",
        help="write what happened when to FILE, for Perfetto (Chrome trace format)",
    )
    run.add_argument(
        "--sidecar", metavar="FILE", help="what spice-fit made (default: MODEL.spice.gguf, if it is there)"
    )
    run.add_argument(
        "--lore",
        type=_lore,
        metavar="WHAT",
        help="approximate: replace missed experts that matter little by stand-ins of spice-fit --lore; "
        "on (those in the sidecar), FILE, or auto:KL (nats per token, as in auto:0.01)",
    )
    run.add_argument(
        "--lore-budget",
        type=float,
        metavar="KL",
        help=f"nats of expected KL per token that they may cost (default {lore.DEFAULT_BUDGET}, inf: any)",
    )
    run.add_argument("--plain", action="store_true", help="run with plain llama.cpp, without SPICE")

    args = parser.parse_args(argv)
    if args.raw and (args.system is not None or args.interactive):
        parser.error("--raw sends no chat messages: it excludes --system and -i")
    if not (args.prompt is not None or args.file or args.interactive):
        args.interactive = sys.stdin.isatty() and not args.json and not args.raw
    try:
        lore.check(args.lore, args.lore_budget, False)
    except ValueError as error:
        parser.error(str(error))
    if args.json and args.interactive:
        parser.error("--json prints one answer: give it a prompt with -p, -f or on stdin, not -i")
    return args


def _positive(text: str) -> int:
    value = int(text)
    if value < 1:
        raise argparse.ArgumentTypeError(f"must be 1 or more, not {value}")
    return value


def _budget(text: str) -> str:
    try:
        budget.check(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(str(error)) from error
    return text


def _lore(text: str) -> bool | str:
    try:
        return lore.from_text(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(str(error)) from error


def _vram(text: str) -> str:
    try:
        check_vram(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(str(error)) from error
    return text


def _version() -> str:
    return (
        f"spice-run {__version__} (llama-cpp-python {_core.LLAMA_CPP_PYTHON}, "
        f"ggml {_core.GGML_VERSION}, backend API {_core.BACKEND_API_VERSION})"
    )


def _run(args: argparse.Namespace) -> int:
    prompt = None if args.interactive else _prompt(args)
    if args.model is None:
        args.model = str(tiny_model())
    llm = _load(args)
    try:
        if not args.json:
            _say(str(llm.spice.plan))
        session = Session(llm, system=args.system, sampling=_sampling(args))
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


def _prompt(args: argparse.Namespace) -> str:
    """The prompt of -p, -f or stdin. Raises UsageError when it is empty or not UTF-8."""
    if args.prompt is not None:
        text, source = args.prompt, "-p"
    else:
        source = "stdin" if args.file is None or args.file == Path("-") else str(args.file)
        data = sys.stdin.buffer.read() if source == "stdin" else args.file.read_bytes()
        try:
            text = data.decode("utf-8")
        except UnicodeDecodeError as error:
            raise command.UsageError(f"the prompt from {source} is not UTF-8 (byte {error.start})") from error
        text = text.removesuffix("\n")
    if not text:
        raise command.UsageError(f"the prompt from {source} is empty")
    return text


def _load(args: argparse.Namespace) -> MeteredLlama:
    threads = {"n_threads": args.threads, "n_threads_batch": args.threads_batch or args.threads}
    return MeteredLlama(
        args.model,
        enabled=not args.plain,
        ram_budget=args.ram,
        vram_budget=args.vram,
        placement=args.placement,
        timeline=args.timeline,
        strategy=args.strategy,
        n_gpu_layers=args.gpu_layers,
        prefetch=not args.no_prefetch,
        preload=not args.no_preload,
        predictor=args.predictor,
        sidecar=args.sidecar,
        lore=args.lore,
        lore_budget=args.lore_budget,
        progress=sys.stderr.isatty() or None,
        n_ctx=args.ctx,
        n_batch=args.batch,
        n_ubatch=args.batch,
        kv_overrides=_expert_override(args),
        verbose=args.verbose,
        **{name: count for name, count in threads.items() if count is not None},
        **({} if args.seed is None else {"seed": args.seed}),
    )


def _expert_override(args: argparse.Namespace) -> dict[str, int] | None:
    if args.experts_used is None:
        return None
    if not Path(args.model).exists():
        return None  # the load says so
    core = _core.Model(args.model)
    summary = core.summary()
    core.close()
    if summary["dense"]:
        raise command.UsageError(f"--experts-used: {args.model} is a dense model, it has no experts")
    if args.experts_used > summary["n_expert"]:
        raise command.UsageError(
            f"--experts-used {args.experts_used}: {args.model} has {summary['n_expert']} experts"
        )
    return {f"{summary['architecture']}.expert_used_count": args.experts_used}


def _sampling(args: argparse.Namespace) -> dict[str, Any]:
    return {
        "max_tokens": args.tokens,
        "temperature": args.temp,
        "top_k": args.top_k,
        "top_p": args.top_p,
        "min_p": args.min_p,
        "repeat_penalty": args.repeat_penalty,
        "seed": args.seed,
    }


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
    text, cut = _stream(pieces, echo=not args.json)
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
            except ValueError as error:  # the conversation is longer than the context
                _say(f"{command.one_line(error)}; /reset starts anew, --ctx N makes room for more")


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

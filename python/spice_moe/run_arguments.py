"""The arguments of ``spice-run``, and what they are for ``Llama`` and for its sampler."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import llama_cpp

from . import __version__, _core, budget, command, files, lore
from .arguments import CACHE_TYPES, MAX_THREADS, QUANTISED_CACHE_TYPES
from .device import check_vram, placements
from .options import SpiceOptions, predictors, strategies

_EPILOG = """\
examples:
  spice-run -p "What is 3 + 4?"
  spice-run model.gguf -p "What is the capital of France?"
  spice-run model.gguf -i --system "Answer in one sentence."
  spice-run model.gguf --raw -p "Once upon a time" -n 100 --temp 0
  spice-run model.gguf -f question.txt --json > answer.json
  spice-run model.gguf -p "Name three cities." --json-schema '{"type": "array", "items": {"type": "string"}}'
  spice-run model.gguf --gpu-layers -1 --tensor-split 3,1 --vram 6GiB,2GiB
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

_UINT32 = 2**32 - 1
_SPLIT_MODES = {
    "none": llama_cpp.LLAMA_SPLIT_MODE_NONE,
    "layer": llama_cpp.LLAMA_SPLIT_MODE_LAYER,
    "row": llama_cpp.LLAMA_SPLIT_MODE_ROW,
    "tensor": llama_cpp.LLAMA_SPLIT_MODE_TENSOR,
}


def parse(argv: Sequence[str] | None) -> argparse.Namespace:
    """The arguments, checked as far as they can be without the model. Raises SystemExit, as argparse does."""
    parser = argparse.ArgumentParser(
        prog="spice-run",
        description="Run a GGUF model. Mixture-of-Experts models load only the experts that they use.",
        epilog=_EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    _prompting(parser)
    _sampling(parser.add_argument_group("sampling"))
    _running(parser.add_argument_group("running"))
    _experts(parser.add_argument_group("experts"))
    args = parser.parse_args(argv)
    if args.named_model is not None:
        if args.model is not None:
            parser.error("give the model once: as MODEL, or with -m")
        args.model = args.named_model
    if args.raw and (args.system is not None or args.interactive):
        parser.error("--raw sends no chat messages: it excludes --system and -i")
    if not (args.prompt is not None or args.file or args.interactive):
        terminal = sys.stdin is not None and sys.stdin.isatty()
        args.interactive = terminal and not args.json and not args.raw
    if args.cache_type_v in QUANTISED_CACHE_TYPES and not args.flash_attn:
        parser.error(f"--cache-type-v {args.cache_type_v} needs --flash-attn on")
    if args.lore_budget is not None and not args.lore:
        parser.error("--lore-budget bounds what --lore may cost: give --lore, too")
    try:
        lore.check(args.lore, args.lore_budget, False)
    except ValueError as error:
        parser.error(str(error))
    for option, text in (
        ("-p", args.prompt),
        ("--system", args.system),
        ("--grammar", args.grammar),
        ("--json-schema", args.json_schema),
        *(("--stop", one) for one in args.stop),
    ):
        if text is not None and text != text.encode(errors="replace").decode():
            parser.error(f"{option} is not UTF-8")
    if args.json and args.interactive:
        parser.error("--json prints one answer: give it a prompt with -p, -f or on stdin, not -i")
    return args


def _prompting(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("model", nargs="?", metavar="MODEL", help="a .gguf file (default: the small one that comes along)")
    add("-m", "--model", dest="named_model", metavar="MODEL", help="the same, as llama.cpp's tools name it")
    prompt = parser.add_mutually_exclusive_group()
    prompt.add_argument("-p", "--prompt", metavar="TEXT", help="answer this prompt and end")
    prompt.add_argument(
        "-f", "--file", metavar="FILE", type=Path, help="answer the prompt in this UTF-8 file; - is stdin"
    )
    prompt.add_argument("-i", "--interactive", action="store_true", help="chat (default at a terminal)")
    add("--raw", action="store_true", help="complete the text as it is, without a chat template")
    add("-sys", "--system", "--system-prompt", metavar="TEXT", help="system message of the chat")
    add("-n", "--tokens", "--n-predict", metavar="N", type=_tokens,
        help="stop after N tokens (default: when done, as is -1)")  # fmt: skip
    add("--stop", metavar="TEXT", action="append", default=[], help="end an answer before TEXT; repeatable")
    add("--json", action="store_true", help="print one JSON object instead of streaming text")
    add("-v", "--verbose", action="store_true", help="show llama.cpp's own log, and tracebacks")
    add("--version", action="version", version=_version())


def _sampling(group: argparse._ArgumentGroup) -> None:
    add = group.add_argument
    add("--temp", "--temperature", type=command.number(0), default=0.8, metavar="T",
        help="temperature, 0 is greedy (default 0.8)")  # fmt: skip
    add("--top-k", type=command.integer(0), default=40, metavar="K", help="default 40, 0 is all")
    add("--top-p", type=command.number(0, 1), default=0.95, metavar="P", help="default 0.95")
    add("--min-p", type=command.number(0, 1), default=0.05, metavar="P", help="default 0.05")
    add("--repeat-penalty", type=command.number(0), default=1.0, metavar="X",
        help="default 1.0, which is none")  # fmt: skip
    add("--presence-penalty", type=command.number(-10, 10), default=0.0, metavar="X", help="default 0")
    add("--frequency-penalty", type=command.number(-10, 10), default=0.0, metavar="X", help="default 0")
    add("-s", "--seed", type=command.integer(-1, _UINT32), metavar="N",
        help="for a repeatable answer (default: random, as is -1)")  # fmt: skip
    rules = group.add_mutually_exclusive_group()
    add = rules.add_argument
    add("--grammar", metavar="GBNF", help="only text that this grammar allows")
    add("--grammar-file", metavar="FILE", type=Path, help="the same, from a file")
    add("-j", "--json-schema", metavar="JSON", help="only JSON that this schema allows; {} is any")
    add("--json-schema-file", metavar="FILE", type=Path, help="the same, from a file")


def _running(group: argparse._ArgumentGroup) -> None:
    add = group.add_argument
    threads = command.integer(1, MAX_THREADS)
    add("-c", "--ctx", "--ctx-size", type=command.integer(0, 2**31 - 1), default=4096, metavar="N",
        help="context, in steps of 256, 0: the model's own (default 4096)")  # fmt: skip
    add("-t", "--threads", type=threads, metavar="N", help="compute threads for single tokens")
    add("-tb", "--threads-batch", type=threads, metavar="N", help="compute threads for prompts")
    add("-b", "--batch", "--batch-size", type=command.integer(1, 2**31 - 1), default=512, metavar="N",
        help="prompt tokens per step (default 512)")  # fmt: skip
    add("-fa", "--flash-attn", type=_switch, nargs="?", const=True, default=False, metavar="on|off",
        help="flash attention: less memory for a long context, other last bits (default off)")  # fmt: skip
    add("-ctk", "--cache-type-k", metavar="TYPE", choices=CACHE_TYPES, default="f16",
        help=f"the KV cache's type for keys: {', '.join(CACHE_TYPES)} (default f16)")  # fmt: skip
    add("-ctv", "--cache-type-v", metavar="TYPE", choices=CACHE_TYPES, default="f16",
        help="the same for values; quantised ones need --flash-attn on")  # fmt: skip
    add("--lora", metavar="FILE", help="a LoRA adapter, as GGUF")
    add("-ngl", "--gpu-layers", "--n-gpu-layers", type=command.integer(-1, 2**31 - 1), metavar="N", default=0,
        help="layers whose other weights go to the GPU, -1 for all (default 0)")  # fmt: skip
    add("-sm", "--split-mode", choices=_SPLIT_MODES, default="layer",
        help="how llama.cpp spreads a model over several GPUs (default layer)")  # fmt: skip
    add("-ts", "--tensor-split", type=_shares, metavar="N0,N1",
        help="share of the model for each GPU (default: by free memory)")  # fmt: skip
    add("-mg", "--main-gpu", type=command.integer(0, 2**31 - 1), default=0, metavar="N",
        help="the GPU of --split-mode none (default 0)")  # fmt: skip
    add("--plain", action="store_true", help="run with plain llama.cpp, without SPICE")


def _experts(group: argparse._ArgumentGroup) -> None:
    add = group.add_argument
    add("--experts-used", type=command.count, metavar="K", help="experts per token, instead of the model's")
    add("--ram", type=_valid(budget.check), metavar="SIZE", default="auto",
        help="memory for experts: 6GiB, 6G, 50%% of them, or auto (default: what is free)")  # fmt: skip
    add("--vram", type=_valid(check_vram), metavar="SIZE", default="auto",
        help="GPU memory for experts, as --ram; auto: what is free, if --gpu-layers is not 0; 0: none; "
        "with several GPUs of each, or 6G,4G for each of them")  # fmt: skip
    add("--placement", metavar="NAME", choices=placements(),
        help=f"who computes which expert: {', '.join(placements())}")  # fmt: skip
    add("--strategy", metavar="NAME", choices=strategies(),
        help=f"who leaves a full pool: {', '.join(strategies())}")  # fmt: skip
    add("--no-prefetch", action="store_true",
        help="read and send experts only when they are needed, never ahead")  # fmt: skip
    add("--predictor", metavar="NAME", choices=predictors(),
        help=f"what predicts the next layers' experts: {', '.join(predictors())}")  # fmt: skip
    add("--no-preload", action="store_true",
        help="forget which experts earlier runs used; read nothing at start")  # fmt: skip
    add("--timeline", metavar="FILE",
        help="write what happened when to FILE, for Perfetto (Chrome trace format)")  # fmt: skip
    add("--sidecar", metavar="FILE",
        help="what spice-fit made (default: MODEL.spice.gguf, if it is there)")  # fmt: skip
    add("--lore", type=command.checked(lore.from_text), metavar="WHAT",
        help="approximate: replace missed experts that matter little by stand-ins of spice-fit --lore; "
        "on (those in the sidecar), FILE, auto:KL (nats per token, as in auto:0.01), or off (default)",
        )  # fmt: skip
    add("--lore-budget", type=float, metavar="KL",
        help=f"nats of expected KL per token that they may cost (default {lore.DEFAULT_BUDGET}, inf: any)",
        )  # fmt: skip


def _version() -> str:
    return (
        f"spice-run {__version__} (llama-cpp-python {_core.LLAMA_CPP_PYTHON}, "
        f"ggml {_core.GGML_VERSION}, backend API {_core.BACKEND_API_VERSION})"
    )


def _valid(check: Callable[[str], None]) -> Callable[[str], str]:
    """An argparse type: the text as it is, once ``check`` finds nothing wrong with it."""

    def valid(text: str) -> str:
        check(text)
        return text

    return command.checked(valid)


def _tokens(text: str) -> int | None:
    """A count, or None for -1, which is no bound in llama.cpp's tools."""
    return None if text == "-1" else command.count(text)


def _switch(text: str) -> bool:
    """``"on"`` or ``"off"``, in the words that llama.cpp takes for them."""
    for value, words in ((True, ("on", "enabled", "true", "1")), (False, ("off", "disabled", "false", "0"))):
        if text.lower() in words:
            return value
    raise argparse.ArgumentTypeError(f"must be on or off, not {text!r}")


def _shares(text: str) -> list[float]:
    """``"3,1"`` or ``"3/1"``, as llama.cpp reads it."""
    share = command.number(0)
    shares = [share(part) for part in text.replace("/", ",").split(",")]
    if not any(shares):
        raise argparse.ArgumentTypeError("one share must be above 0")
    most = llama_cpp.llama_max_devices()
    if len(shares) > most:
        raise argparse.ArgumentTypeError(f"has {len(shares)} shares, llama.cpp takes at most {most}")
    return shares


def for_llama(args: argparse.Namespace) -> dict[str, Any]:
    """Keyword arguments of ``Llama``. Raises UsageError for options that cannot be met."""
    try:
        spice = SpiceOptions(
            enabled=not args.plain,
            ram_budget=args.ram,
            vram_budget=args.vram,
            placement=args.placement,
            timeline=args.timeline,
            strategy=args.strategy,
            prefetch=not args.no_prefetch,
            preload=not args.no_preload,
            predictor=args.predictor,
            sidecar=args.sidecar,
            lore=args.lore,
            lore_budget=args.lore_budget,
            progress=sys.stderr.isatty() or None,
        )
        if args.timeline is not None:
            files.check_output(args.timeline, args.model, args.file, args.sidecar, args.lora)
    except (TypeError, ValueError) as error:
        if isinstance(error, FileNotFoundError):
            raise
        raise command.UsageError(str(error)) from None
    threads = {"n_threads": args.threads, "n_threads_batch": args.threads_batch or args.threads}
    return {
        "spice": spice,
        "n_gpu_layers": args.gpu_layers,
        "split_mode": _SPLIT_MODES[args.split_mode],
        "tensor_split": args.tensor_split,
        "main_gpu": args.main_gpu,
        "lora_path": args.lora,
        # As llama.cpp rounds it: the parent's own arrays are not, and end before the context does.
        "n_ctx": -(-args.ctx // 256) * 256,
        "n_batch": args.batch,
        "n_ubatch": args.batch,
        "flash_attn": args.flash_attn,
        "type_k": CACHE_TYPES[args.cache_type_k],
        "type_v": CACHE_TYPES[args.cache_type_v],
        "kv_overrides": _expert_override(args),
        "verbose": args.verbose,
        **{name: count for name, count in threads.items() if count is not None},
        **({} if args.seed is None else {"seed": args.seed & _UINT32}),
    }


def _expert_override(args: argparse.Namespace) -> dict[str, int] | None:
    if args.experts_used is None:
        return None
    summary = files.summary(args.model)
    if summary["dense"]:
        raise command.UsageError(f"--experts-used: {args.model} is a dense model, it has no experts")
    if args.experts_used > summary["n_expert"]:
        raise command.UsageError(
            f"--experts-used {args.experts_used}: {args.model} has {summary['n_expert']} experts"
        )
    return {f"{summary['architecture']}.expert_used_count": args.experts_used}


def for_sampler(args: argparse.Namespace) -> dict[str, Any]:
    """Keyword arguments of both completion calls. Raises UsageError for a grammar that is none."""
    return {
        "max_tokens": args.tokens,
        "stop": args.stop,
        "temperature": args.temp,
        "top_k": args.top_k,
        "top_p": args.top_p,
        "min_p": args.min_p,
        "repeat_penalty": args.repeat_penalty,
        "presence_penalty": args.presence_penalty,
        "frequency_penalty": args.frequency_penalty,
        "seed": None if args.seed is None else args.seed & _UINT32,
        "grammar": _grammar(args),
    }


def _grammar(args: argparse.Namespace) -> llama_cpp.LlamaGrammar | None:
    schema = args.json_schema
    if args.json_schema_file is not None:
        schema = read_text(args.json_schema_file, "the schema")
    if schema is not None:
        try:
            return llama_cpp.LlamaGrammar.from_json_schema(schema, verbose=False)
        except Exception as error:  # whatever the parent's converter stumbles over
            raise command.UsageError(f"--json-schema: {command.one_line(error)}") from error
    text = args.grammar
    if args.grammar_file is not None:
        text = read_text(args.grammar_file, "the grammar")
    return None if text is None else llama_cpp.LlamaGrammar.from_string(text, verbose=False)


def prompt(args: argparse.Namespace) -> str:
    """The prompt of -p, -f or stdin. Raises UsageError when it is empty or not UTF-8."""
    if args.prompt is not None:
        text, source = args.prompt, "-p"
    elif args.file is None or args.file == Path("-"):
        text, source = _decode(sys.stdin.buffer.read(), "the prompt", "stdin"), "stdin"
    else:
        text, source = read_text(args.file, "the prompt"), str(args.file)
    if not text:
        raise command.UsageError(f"the prompt from {source} is empty")
    return text


def read_text(path: Path, what: str) -> str:
    """A UTF-8 file without the line end at its end. Raises UsageError for another encoding, and OSError."""
    return _decode(path.read_bytes(), what, str(path))


def _decode(data: bytes, what: str, source: str) -> str:
    try:
        return data.decode("utf-8").removesuffix("\n")
    except UnicodeDecodeError as error:
        raise command.UsageError(f"{what} from {source} is not UTF-8 (byte {error.start})") from error

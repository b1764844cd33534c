"""``spice_moe.Llama``: llama-cpp-python's ``Llama``, with the experts in SPICE's hands."""

from __future__ import annotations

import contextlib
import dataclasses
import os
import sys
from collections.abc import Iterator, Sequence
from typing import Any

import jinja2
import llama_cpp
import llama_cpp._internals as internals

from . import _core, arguments, context_memory, files
from .attachment import Attachment
from .budget import Budget
from .device import VramBudget
from .errors import (
    SpiceError,
    SpiceFileNotFoundError,
    SpiceFormatError,
    SpiceMemoryError,
    SpiceUnsupportedError,
    from_code,
)
from .options import ProgressCallback, SpiceOptions
from .stats import Spice

# What llama.cpp logs when an allocation fails, in its loader and in its contexts.
_MEMORY_WORDS = ("failed to allocate", "unable to allocate", "bad_alloc", "out of memory")
_UNSUPPORTED_WORDS = ("unknown model architecture", "unknown pre-tokenizer", "unsupported", "not supported")
# How the parent's exceptions begin when llama.cpp returned NULL.
_LOAD_FAILED = ("Failed to load model", "Failed to get vocab", "Failed to create llama_context")


class Llama(llama_cpp.Llama):
    """A drop-in for ``llama_cpp.Llama`` that reads the experts of a MoE model only when they are needed.

    Every argument of ``llama_cpp.Llama`` works as it does there. SPICE's own are keyword-only: ``spice``, a
    :class:`SpiceOptions`, and its fields as shortcuts that win over it. A dense model, ``vocab_only`` and
    ``enabled=False`` load with plain llama.cpp, and :attr:`spice` says so.

    ``use_mmap`` has no effect on a model that SPICE runs: llama.cpp would read the whole file.

    Raises:
        SpiceFileNotFoundError, SpiceFormatError, SpiceUnsupportedError, SpiceIOError, SpiceMemoryError,
        SpiceBudgetError: the model cannot be loaded; nothing stays allocated. Computing may raise
            SpiceIOError and SpiceMemoryError as well: that call failed, the next one works.
        TypeError, ValueError: an option or argument makes no sense.
    """

    spice: Spice
    """The plan (``llm.spice.plan``) and the counters (``llm.spice.stats()``) of this model."""

    _attachment: Attachment | None = None
    _closed = False

    def __init__(
        self,
        model_path: str | os.PathLike[str],
        *,
        spice: SpiceOptions | None = None,
        enabled: bool | None = None,
        repack: bool | None = None,
        ram_budget: Budget | None = None,
        vram_budget: VramBudget | None = None,
        placement: str | None = None,
        timeline: str | os.PathLike[str] | None = None,
        strategy: str | None = None,
        direct_io: bool | None = None,
        io_threads: int | None = None,
        prefetch: bool | str | None = None,
        preload: bool | None = None,
        predictor: str | None = None,
        sidecar: str | os.PathLike[str] | None = None,
        lore: bool | str | os.PathLike[str] | None = None,
        lore_budget: float | None = None,
        lore_prompts: bool | None = None,
        progress: ProgressCallback | bool | None = None,
        **kwargs: Any,
    ) -> None:
        options = (spice or SpiceOptions()).with_overrides(
            enabled=enabled,
            repack=repack,
            ram_budget=ram_budget,
            vram_budget=vram_budget,
            placement=placement,
            timeline=timeline,
            strategy=strategy,
            direct_io=direct_io,
            io_threads=io_threads,
            prefetch=prefetch,
            preload=preload,
            predictor=predictor,
            sidecar=sidecar,
            lore=lore,
            lore_budget=lore_budget,
            lore_prompts=lore_prompts,
            progress=progress,
        )
        path = files.name(model_path)
        for file in (path, kwargs.get("lora_path")):
            if file is not None and not os.path.exists(files.name(file)):  # noqa: PTH110  (as the parent)
                raise SpiceFileNotFoundError(f"no such file: {file or repr('')}")
        arguments.warn_of_unknown(kwargs, (field.name for field in dataclasses.fields(SpiceOptions)))
        arguments.check(kwargs)
        attachment = self._attachment = Attachment(path, options, kwargs)
        try:
            context_memory.check(path, kwargs, layers=attachment.n_layers, beside=attachment.certain_bytes)
            with (
                attachment.monitor,
                _core.AbortGuard() as guard,
                self._failures_of_load(attachment, guard, path),
            ):
                super().__init__(path, **kwargs)
                if self.lora_path and not self._lora_adapter:  # NULL, which the parent takes for an adapter
                    raise _lora_failure(self.lora_path, attachment)
            attachment.build_pool(self.n_threads)  # now everything else is in memory
            if attachment.monitor.interrupted is not None:  # too late for the loader to stop
                raise attachment.monitor.interrupted
        except BaseException:
            self.close()
            raise
        plan = attachment.plan(n_threads=self.n_threads, n_threads_batch=self.n_threads_batch)
        self.spice = Spice(plan, attachment.core)
        if self.verbose:
            print(plan, file=sys.stderr)

    # The parent builds its load parameters in this attribute, field by field, and passes it to the loader
    # last of all: whoever reads it gets SPICE's fields on top of whatever the parent has set so far.
    @property
    def model_params(self) -> llama_cpp.llama_model_params:
        """The ``llama_model_params`` of the load."""
        if self._attachment is not None:
            self._attachment.apply(self._model_params)
        return self._model_params

    @model_params.setter
    def model_params(self, params: llama_cpp.llama_model_params) -> None:
        self._model_params = params

    # The parent sets this as soon as llama.cpp has loaded the model, before contexts and LoRA adapters.
    @property
    def _model(self) -> internals.LlamaModel:
        self._check_open()
        return self._loaded_model

    @_model.setter
    def _model(self, model: internals.LlamaModel) -> None:
        self._loaded_model = model
        if self._attachment is not None:
            self._attachment.finish_load()

    @property
    def _ctx(self) -> internals.LlamaContext:
        self._check_open()
        return self._made_context

    @_ctx.setter
    def _ctx(self, context: internals.LlamaContext) -> None:
        self._made_context = context

    def _check_open(self) -> None:
        """Raise ValueError once the model is closed: the parent then hands llama.cpp NULL, and crashes."""
        if self._closed:
            raise ValueError("the model is closed; load it again")

    def tokenize(self, *args: Any, **kwargs: Any) -> list[int]:
        """As the parent, while the model is open."""
        self._check_open()
        return super().tokenize(*args, **kwargs)

    def detokenize(self, tokens: Sequence[int], *args: Any, **kwargs: Any) -> bytes:
        """As the parent. Raises ValueError for ids outside of the vocabulary: they end its process."""
        size = self.n_vocab()
        unknown = next((token for token in tokens if not 0 <= token < size), None)
        if unknown is not None:
            raise ValueError(f"token {unknown} is not in the vocabulary of {size}")
        return super().detokenize(tokens, *args, **kwargs)

    def eval(self, tokens: Sequence[int]) -> None:
        """Evaluate tokens as the parent does. Raises SpiceError subclasses when an expert cannot be had."""
        with self._failures_of_compute():
            super().eval(tokens)

    def embed(self, *args: Any, **kwargs: Any) -> Any:
        """Embed text as the parent does. Raises SpiceError subclasses when an expert cannot be had."""
        with self._failures_of_compute():
            return super().embed(*args, **kwargs)

    def _init_sampler(self, *args: Any, **kwargs: Any) -> Any:
        """As the parent. Raises ValueError for a grammar that does not parse, which crashes the parent."""
        grammar = kwargs.get("grammar")
        if grammar is not None:
            text, root = grammar._grammar.encode(), grammar._root.encode()
            sampler = llama_cpp.llama_sampler_init_grammar(self._model.vocab, text, root)
            if not sampler:
                raise ValueError(f"the grammar does not parse, or has no rule {grammar._root!r}")
            llama_cpp.llama_sampler_free(sampler)
        return super()._init_sampler(*args, **kwargs)

    def __enter__(self) -> Llama:
        """The model itself; the end of the ``with`` block closes it."""
        return self

    def __exit__(self, *_failure: object) -> None:
        self.close()

    def close(self) -> None:
        """Free the model, its contexts, and then SPICE's memory and threads. Safe to call twice."""
        if hasattr(self, "_stack"):  # absent when __init__ failed early
            super().close()
        self._closed = True
        spice: Spice | None = self.__dict__.get("spice")
        if spice is not None:
            spice.detach()
        if self._attachment is not None:
            try:
                self._attachment.write_timeline()
            finally:
                self._attachment.close()

    def __del__(self) -> None:
        # At interpreter exit, parts of the parent's modules may be gone already.
        with contextlib.suppress(Exception):
            self.close()

    def __getstate__(self) -> dict[str, Any]:
        attachment = self._attachment
        assert attachment is not None
        # The parent would report the load mode that SPICE set, not the one that the user asked for.
        return {
            **super().__getstate__(),
            "use_mmap": attachment.mmap,
            "use_mlock": attachment.mlock,
            "spice": attachment.options,
        }

    @contextlib.contextmanager
    def _failures_of_compute(self) -> Iterator[None]:
        """llama.cpp only says that a decode failed; the core knows why."""
        try:
            yield
        except RuntimeError as error:
            if self._attachment is not None:
                self._attachment.forget_devices()
            cause = None if self._attachment is None else self._attachment.take_error()
            if cause is None:
                raise
            raise from_code(*cause) from error

    @staticmethod
    @contextlib.contextmanager
    def _failures_of_load(attachment: Attachment, guard: _core.AbortGuard, path: str) -> Iterator[None]:
        """Turn what the parent raises for a load that failed into the SpiceError that says why."""
        try:
            yield
        except SpiceError:
            raise
        except UnicodeDecodeError as error:
            raise files.not_utf8(path, error) from error
        except MemoryError as error:  # the parent's arrays: logits of a batch, tokens of a context
            raise SpiceMemoryError(
                f"{path}: not enough memory: {error}; use a smaller n_ctx or n_batch"
            ) from error
        except jinja2.TemplateError as error:
            raise SpiceFormatError(f"{path}: the model's chat template is broken: {error}") from error
        except (ValueError, RuntimeError) as error:
            if attachment.monitor.interrupted is not None:
                raise attachment.monitor.interrupted from None
            cause = attachment.take_error()
            if cause is not None:
                raise from_code(*cause) from error
            if attachment.monitor.stopped:
                raise SpiceError(f"{path}: the progress callback stopped the load") from error
            if guard.message is None and not str(error).startswith(_LOAD_FAILED):
                raise  # an argument that the parent refuses: its own words are the best
            raise _load_failure(path, str(error), guard.message, attachment.monitor.messages) from error


def _lora_failure(lora: str, attachment: Attachment) -> SpiceError:
    """The exception for a LoRA adapter that llama.cpp refused."""
    reason = next((line for line in attachment.monitor.messages if "lora" in line), "no reason given")
    return SpiceFormatError(f"{lora}: llama.cpp refused the LoRA adapter: {reason}")


def _load_failure(path: str, parent: str, abort: str | None, log: list[str]) -> SpiceError:
    """The exception for a model that llama.cpp refused, from what its guard and its log say."""
    reason = (
        abort or next((line for line in log if "error" in line.lower()), None) or (log[-1] if log else parent)
    )
    said = "\n".join(log).lower()
    if any(word in said for word in _MEMORY_WORDS):
        return SpiceMemoryError(
            f"{path}: not enough memory: {reason}; use a smaller n_ctx or a smaller model"
        )
    if abort is None and any(word in said for word in _UNSUPPORTED_WORDS):
        return SpiceUnsupportedError(f"{path}: llama.cpp cannot run this model: {reason}")
    if abort is None and "context" in parent:
        return SpiceUnsupportedError(f"{path}: llama.cpp made no context for this model: {reason}")
    return SpiceFormatError(
        f"{path}: llama.cpp refused the model: {reason}; the file may be damaged, get it again"
    )

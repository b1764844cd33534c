"""Runs a model on stock llama.cpp and watches its routing, through llama.cpp's evaluation callback.

The callback makes every node of the graph synchronise, so this is slow; the numbers computed are the stock
ones. `spice_moe.trace` writes what is seen here to a file.
"""

from __future__ import annotations

import ctypes
import os
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any

import llama_cpp
import numpy as np
from numpy.typing import NDArray

from . import arguments, files
from .errors import SpiceError, SpiceFormatError, SpiceUnsupportedError
from .loading import HeldInterrupt, LoadMonitor

BIASES = ("router_bias", "selection_bias")


class _Tensor(ctypes.Structure):
    """`struct ggml_tensor` of the pinned ggml (its include/ggml.h), as far as it is read here."""

    _fields_ = (
        ("type", ctypes.c_int),
        ("buffer", ctypes.c_void_p),
        ("ne", ctypes.c_int64 * 4),
        ("nb", ctypes.c_size_t * 4),
        ("op", ctypes.c_int),
        ("op_params", ctypes.c_int32 * 16),
        ("flags", ctypes.c_int32),
        ("src", ctypes.c_void_p * 10),
    )


def _base_library() -> ctypes.CDLL:
    folder = Path(llama_cpp.__file__).parent / "lib"
    for name in ("libggml-base.so", "libggml-base.dylib", "ggml-base.dll"):
        if (folder / name).exists():
            return ctypes.CDLL(str(folder / name))
    raise SpiceUnsupportedError(f"llama-cpp-python has no ggml-base library in {folder}")


@dataclass
class Seen:
    """What one batch said about one layer. ids, weights: [tokens, top_k]; inputs: [tokens, width]."""

    ids: NDArray[np.int32] | None = None
    weights: NDArray[np.float32] | None = None
    inputs: NDArray[np.float16] | None = None
    n_expert: int = 0


_TYPE_F32, _TYPE_F16, _TYPE_I32 = 0, 1, 26
_DTYPES = {_TYPE_F32: np.float32, _TYPE_F16: np.float16, _TYPE_I32: np.int32}
_WEIGHTS = "ffn_moe_weights"
# Later stages of the gate weights replace earlier ones; the sums in between are of no interest.
_WEIGHT_STAGES = {_WEIGHTS, f"{_WEIGHTS}_softmax", f"{_WEIGHTS}_norm", f"{_WEIGHTS}_scaled"}


class Watch:
    """llama.cpp's evaluation callback that reads the routing of each batch into `layers`.

    Use `callback` as `cb_eval` of a context. An exception inside is kept in `error`: ctypes loses it.
    """

    def __init__(self, *, router_inputs: bool = False) -> None:
        self.layers: dict[int, Seen] = {}
        self.routers: dict[str, dict[int, NDArray[np.float32]]] = {name: {} for name in ("routers", *BIASES)}
        self.error: BaseException | None = None
        self.held = HeldInterrupt()
        self._inputs = router_inputs
        base = _base_library()
        self._name, self._nbytes, self._get = (
            base.ggml_get_name,
            base.ggml_nbytes,
            base.ggml_backend_tensor_get,
        )
        self._name.restype, self._name.argtypes = ctypes.c_char_p, [ctypes.c_void_p]
        self._nbytes.restype, self._nbytes.argtypes = ctypes.c_size_t, [ctypes.c_void_p]
        self._get.restype, self._get.argtypes = None, [*[ctypes.c_void_p] * 2, *[ctypes.c_size_t] * 2]
        self.callback = llama_cpp.ggml_backend_sched_eval_callback(self._on_tensor)

    def _on_tensor(self, address: int, ask: bool, _user: object) -> bool:
        try:
            stem, _, number = self._name(address).decode(errors="replace").rpartition("-")
            take = self._taker(stem) if number.isdigit() else None
            if ask:
                return take is not None
            if take is not None:
                take(address, int(number))
        except BaseException as error:
            self.error = error
        return self.error is None and not self.held.seen

    def _taker(self, stem: str) -> Callable[[int, int], None] | None:
        if stem == "ffn_moe_topk":
            return self._take_ids
        if stem in _WEIGHT_STAGES:
            return self._take_weights
        if stem == "ffn_moe_logits":
            return self._take_logits
        if self._inputs and stem in ("ffn_moe_logits_biased", "ffn_moe_probs_biased"):
            name = "router_bias" if "logits" in stem else "selection_bias"
            return lambda address, layer: self._take_operand(address, layer, name, 1)
        return None

    def _take_ids(self, address: int, layer: int) -> None:
        self._layer(layer).ids = self._read(address)

    def _take_weights(self, address: int, layer: int) -> None:
        values = self._read(address)
        ids = self._layer(layer).ids
        if ids is None or values.size != ids.size:
            raise SpiceUnsupportedError(f"layer {layer}: gate weights {values.shape} do not fit the ids")
        self._layer(layer).weights = values.reshape(ids.shape)

    def _take_logits(self, address: int, layer: int) -> None:
        tensor = _Tensor.from_address(address)
        self._layer(layer).n_expert = tensor.ne[0]
        if self._inputs:
            self._layer(layer).inputs = self._read(tensor.src[1]).astype(np.float16)
            self._take_operand(address, layer, "routers", 0)

    def _take_operand(self, address: int, layer: int, name: str, source: int) -> None:
        """Weights of the router, read once: they do not change."""
        if layer not in self.routers[name]:
            values = self._read(_Tensor.from_address(address).src[source]).astype(np.float32)
            self.routers[name][layer] = values if name == "routers" else values.reshape(-1)

    def _layer(self, layer: int) -> Seen:
        return self.layers.setdefault(layer, Seen())

    def _read(self, address: int) -> NDArray:
        """A copy of a tensor of two dimensions (or three with a leading 1): [rows, columns]."""
        tensor = _Tensor.from_address(address)
        dtype = _DTYPES.get(tensor.type)
        if dtype is None:
            raise SpiceUnsupportedError(f"a routing tensor has ggml type {tensor.type}: cannot read it")
        raw = np.empty(self._nbytes(address), dtype=np.uint8)
        self._get(address, raw.ctypes.data, 0, raw.nbytes)
        shape, strides = tuple(reversed(tensor.ne)), tuple(reversed(tensor.nb))
        values = np.lib.stride_tricks.as_strided(raw.view(dtype), shape, strides)
        return np.ascontiguousarray(values).reshape(-1, tensor.ne[0])


class Recorder:
    """A stock llama.cpp context whose routing is watched. A context manager; for one thread only.

    n_ctx: tokens of the longest sequence; batch: tokens evaluated at once, 1 is decoding.
    Raises SpiceFileNotFoundError, SpiceFormatError (llama.cpp refuses the model), SpiceMemoryError.
    """

    def __init__(
        self,
        model: str | os.PathLike[str],
        *,
        n_ctx: int,
        batch: int = 64,
        router_inputs: bool = False,
        threads: int = 0,
        progress: bool = False,
    ) -> None:
        files.headers(model).close()  # llama.cpp ends the process for some malformed models
        arguments.check({"n_threads": threads, "n_ctx": n_ctx})
        self.watch = Watch(router_inputs=router_inputs)
        self.n_ctx, self.batch = n_ctx, max(1, min(batch, n_ctx))
        self._model = self._context = None
        monitor = LoadMonitor(True if progress else None, portion=1.0, verbose=False)
        try:
            with monitor:
                self._open(os.fsencode(model), monitor, threads)
            if not self._context:
                if monitor.interrupted is not None:
                    raise monitor.interrupted
                why = monitor.messages[0] if monitor.messages else "it gives no reason"
                raise SpiceFormatError(f"{os.fspath(model)}: llama.cpp cannot run the model: {why}")
        except BaseException:  # Ctrl-C above all
            self.close()
            raise
        self._vocab = llama_cpp.llama_model_get_vocab(self._model)
        self.n_vocab: int = llama_cpp.llama_vocab_n_tokens(self._vocab)

    def _open(self, path: bytes, monitor: LoadMonitor, threads: int) -> None:
        """Load the model and make its context; either stays None where llama.cpp refuses."""
        llama_cpp.llama_backend_init()
        mparams = llama_cpp.llama_model_default_params()
        mparams.progress_callback = monitor.progress_callback
        self._model = llama_cpp.llama_model_load_from_file(path, mparams)
        if not self._model:
            return
        cparams = llama_cpp.llama_context_default_params()
        cparams.n_ctx, cparams.n_batch, cparams.n_ubatch = self.n_ctx, self.batch, self.batch
        cparams.n_threads = cparams.n_threads_batch = threads or os.cpu_count() or 1
        cparams.cb_eval = self.watch.callback
        # As llama_cpp.Llama computes by default, so that traces are of what users see.
        cparams.flash_attn_type = llama_cpp.LLAMA_FLASH_ATTN_TYPE_DISABLED
        self._context = llama_cpp.llama_init_from_model(self._model, cparams)

    def __enter__(self) -> Recorder:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        """Free the model and its context. Safe to call twice."""
        context, model = self._context, self._model
        self._context = self._model = None
        with LoadMonitor(None, portion=1.0, verbose=False):  # llama.cpp logs when it frees a context
            if context:
                llama_cpp.llama_free(context)
            if model:
                llama_cpp.llama_model_free(model)

    def describe(self) -> str:
        """llama.cpp's name for the model."""
        buffer = ctypes.create_string_buffer(256)
        llama_cpp.llama_model_desc(self._model, buffer, len(buffer))
        return buffer.value.decode("utf-8", "replace")

    def pieces(self, text: str | Sequence[int], size: int) -> list[list[int]]:
        """A text, with BOS before each piece if the model wants it, or token ids, cut to `size` tokens."""
        if not isinstance(text, str):
            return [list(text[i : i + size]) for i in range(0, len(text), size)]
        ids = tokenize(self._vocab, text)
        wanted = llama_cpp.llama_vocab_get_add_bos(self._vocab) and size > 1
        lead = [llama_cpp.llama_vocab_bos(self._vocab)] if wanted else []
        body, room = ids[len(lead) :], size - len(lead)
        return [lead + body[i : i + room] for i in range(0, len(body), room)]

    def evaluate(self, tokens: Sequence[int]) -> Iterator[tuple[int, dict[int, Seen]]]:
        """Evaluate one sequence from position 0; after each batch yield its tokens and what was seen.

        Raises ValueError for too many tokens, SpiceError if llama.cpp fails.
        """
        if not 0 < len(tokens) <= self.n_ctx:
            raise ValueError(f"{len(tokens)} tokens, room for {self.n_ctx}")
        llama_cpp.llama_memory_clear(llama_cpp.llama_get_memory(self._context), True)
        batch = llama_cpp.llama_batch_init(self.batch, 0, 1)
        try:
            for start in range(0, len(tokens), self.batch):
                part = tokens[start : start + self.batch]
                batch.n_tokens = len(part)
                for i, token in enumerate(part):
                    batch.token[i], batch.pos[i], batch.n_seq_id[i] = token, start + i, 1
                    batch.seq_id[i][0] = 0
                    # llama.cpp leaves out the last layer's FFN, and its routing, where nobody wants logits.
                    batch.logits[i] = 1
                self.watch.layers = {}
                with HeldInterrupt() as self.watch.held:
                    code = llama_cpp.llama_decode(self._context, batch)
                if self.watch.error is not None:
                    raise self.watch.error
                if code != 0:
                    raise SpiceError(f"llama_decode failed with code {code}")
                yield len(part), self.watch.layers
        finally:
            llama_cpp.llama_batch_free(batch)

    def logits(self, rows: int) -> NDArray[np.float32]:
        """A copy of the logits [rows, vocabulary] of the last batch, which had that many tokens."""
        pointer = llama_cpp.llama_get_logits(self._context)
        return np.ctypeslib.as_array(pointer, shape=(rows, self.n_vocab)).copy()


def tokenize(vocab: Any, text: str) -> list[int]:
    """Token ids of a text by a llama.cpp vocabulary, with BOS if it wants one."""
    raw = text.encode()
    room = (llama_cpp.llama_token * (len(raw) + 16))()
    count = llama_cpp.llama_tokenize(vocab, raw, len(raw), room, len(room), True, False)
    if count < 0:
        raise SpiceError("llama.cpp could not tokenize the text")
    return list(room[:count])

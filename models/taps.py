"""Run a model and collect named tensors of its graph, such as routing, by llama.cpp's evaluation callback.

For tests and recipes: it makes every node synchronise, so it is slow. Not for benchmarks.
"""

from __future__ import annotations

import ctypes
import os
from collections import defaultdict
from collections.abc import Sequence
from pathlib import Path

import llama_cpp
import numpy as np
from numpy.typing import NDArray

from models.ggml import library, quiet

Floats = NDArray[np.float32]


class Tap:
    """A model opened with a callback that sees the graph's tensors. A context manager; for one thread only.

    wanted: name stems ("ffn_moe_argsort", "ffn_norm"). Bytes of each node named STEM-LAYER are appended to
    `taken[(stem, layer)]`, one array per batch. n_ctx: tokens of all sequences together, and of one batch.
    overrides: whole-number header values by key, "__" for the dot (`olmoe__expert_used_count=4`).
    """

    def __init__(
        self,
        path: Path,
        wanted: Sequence[str],
        *,
        n_ctx: int = 512,
        sequences: int = 1,
        threads: int = 1,
        **overrides: int,
    ) -> None:
        self.taken: dict[tuple[str, int], list[NDArray[np.uint8]]] = defaultdict(list)
        self._wanted = frozenset(wanted)
        base = library("ggml-base")
        self._name, self._nbytes, self._get = (
            base.ggml_get_name,
            base.ggml_nbytes,
            base.ggml_backend_tensor_get,
        )
        self._name.restype, self._name.argtypes = ctypes.c_char_p, [ctypes.c_void_p]
        self._nbytes.restype, self._nbytes.argtypes = ctypes.c_size_t, [ctypes.c_void_p]
        self._get.restype, self._get.argtypes = None, [*[ctypes.c_void_p] * 2, *[ctypes.c_size_t] * 2]
        self._callback = llama_cpp.ggml_backend_sched_eval_callback(self._evaluated)
        self._model = self._context = None
        with quiet():
            mparams = llama_cpp.llama_model_default_params()
            if overrides:
                mparams.kv_overrides = self._keep = _overrides(overrides)
            self._model = llama_cpp.llama_model_load_from_file(os.fsencode(path), mparams)
            if not self._model:
                raise RuntimeError(f"llama.cpp cannot load {path}")
            cparams = llama_cpp.llama_context_default_params()
            cparams.n_ctx = cparams.n_batch = cparams.n_ubatch = n_ctx
            cparams.n_seq_max = sequences
            cparams.n_threads = cparams.n_threads_batch = threads
            if self._wanted:
                cparams.cb_eval = self._callback
            self._context = llama_cpp.llama_init_from_model(self._model, cparams)
            if not self._context:
                self.close()
                raise RuntimeError(f"llama.cpp cannot make a context for {path}")
        self.n_vocab: int = llama_cpp.llama_vocab_n_tokens(llama_cpp.llama_model_get_vocab(self._model))
        self.n_ctx, self.sequences = n_ctx, sequences

    def __enter__(self) -> Tap:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        with quiet():
            if self._context:
                llama_cpp.llama_free(self._context)
            if self._model:
                llama_cpp.llama_model_free(self._model)
        self._context = self._model = None

    def run(self, tokens: Sequence[int], *, logits: bool = True) -> Floats:
        """Evaluate up to n_ctx tokens as one sequence from position 0; logits [tokens, vocab], or [0, vocab].

        Raises RuntimeError if llama.cpp fails, ValueError for too many tokens.
        """
        if not 0 < len(tokens) <= self.n_ctx:
            raise ValueError(f"{len(tokens)} tokens, room for {self.n_ctx}")
        self._clear()
        rows = self._decode([(int(token), i, 0) for i, token in enumerate(tokens)])
        return rows if logits else rows[:0]

    def _clear(self) -> None:
        llama_cpp.llama_memory_clear(llama_cpp.llama_get_memory(self._context), True)

    def _decode(self, rows: Sequence[tuple[int, int, int]]) -> Floats:
        """Evaluate (token, position, sequence) rows in one batch; a copy of the logits [rows, vocab]."""
        batch = llama_cpp.llama_batch_init(len(rows), 0, 1)
        try:
            batch.n_tokens = len(rows)
            for i, (token, position, sequence) in enumerate(rows):
                batch.token[i], batch.pos[i], batch.n_seq_id[i] = token, position, 1
                batch.seq_id[i][0] = sequence
                # Of tokens without logits, llama.cpp leaves out the last layer's FFN, and so its routing.
                batch.logits[i] = 1
            code = llama_cpp.llama_decode(self._context, batch)
        finally:
            llama_cpp.llama_batch_free(batch)
        if code != 0:
            raise RuntimeError(f"llama_decode failed with code {code}")
        pointer = llama_cpp.llama_get_logits(self._context)
        return np.ctypeslib.as_array(pointer, shape=(len(rows), self.n_vocab)).copy()

    def continue_all(
        self, prompts: Sequence[Sequence[int]], tokens: int, *, temperature: float = 0.7, seed: int = 0
    ) -> list[list[int]]:
        """Sample `tokens` tokens after each prompt, all prompts at once (see `sequences`); the sampled ids.

        A finished text goes on with whatever the model says after its end token; cut there if that matters.
        Raises ValueError if the prompts are too many or too long.
        """
        room = self.n_ctx // max(1, len(prompts))
        if len(prompts) > self.sequences or max(map(len, prompts)) + tokens > room:
            raise ValueError(f"{len(prompts)} prompts do not fit {self.sequences} sequences of {room} tokens")
        rng = np.random.default_rng(seed)
        self._clear()
        out: list[list[int]] = [[] for _ in prompts]
        rows = [(t, pos, s) for s, prompt in enumerate(prompts) for pos, t in enumerate(prompt)]
        ends = list(np.cumsum([len(p) for p in prompts]) - 1)
        for step in range(tokens):
            logits = self._decode(rows)[ends] / temperature
            noisy = logits + rng.gumbel(size=logits.shape)  # the largest of them is a draw from the softmax
            chosen = noisy.argmax(axis=-1)
            rows = [(int(t), len(p) + step, s) for s, (t, p) in enumerate(zip(chosen, prompts, strict=True))]
            ends = list(range(len(prompts)))
            for text, (token, _, _) in zip(out, rows, strict=True):
                text.append(token)
        return out

    def tokenize(self, text: str, *, special: bool = False) -> list[int]:
        """Token ids of a text, without BOS."""
        raw = text.encode()
        room = (llama_cpp.llama_token * (len(raw) + 8))()
        vocab = llama_cpp.llama_model_get_vocab(self._model)
        n = llama_cpp.llama_tokenize(vocab, raw, len(raw), room, len(room), False, special)
        if n < 0:
            raise RuntimeError("llama_tokenize failed")
        return list(room[:n])

    def take(self, stem: str, layer: int, dtype: type = np.float32) -> NDArray:
        """What was collected of STEM-LAYER so far, flat and joined over batches; forgets it."""
        return np.concatenate(self.taken.pop((stem, layer))).view(dtype)

    def _evaluated(self, tensor: int, ask: bool, _user: object) -> bool:
        stem, dash, layer = self._name(tensor).decode(errors="replace").rpartition("-")
        if not dash or stem not in self._wanted or not layer.isdigit():
            return not ask
        if not ask:
            data = np.empty(self._nbytes(tensor), dtype=np.uint8)
            self._get(tensor, data.ctypes.data, 0, data.nbytes)
            self.taken[(stem, int(layer))].append(data)
        return True


def _overrides(values: dict[str, int]) -> ctypes.Array:
    """Whole-number header overrides; a double underscore in a name stands for the dot."""
    out = (llama_cpp.llama_model_kv_override * (len(values) + 1))()
    for slot, (key, value) in zip(out, values.items(), strict=False):
        slot.key = key.replace("__", ".").encode()
        slot.tag = llama_cpp.LLAMA_KV_OVERRIDE_TYPE_INT
        slot.value.val_i64 = value
    out[len(values)].key = b""
    return out


def routing(
    path: Path, tokens: Sequence[int], experts: int, used: int, **options: int
) -> dict[int, NDArray[np.int32]]:
    """The experts chosen by each MoE layer for each token: {layer: [tokens, used]}, best first.

    Read from the sorted router scores, so it holds for architectures that choose by ggml_argsort_top_k.
    """
    with Tap(path, ["ffn_moe_argsort"], n_ctx=max(64, len(tokens)), **options) as tap:
        tap.run(tokens, logits=False)
        layers = sorted(layer for _, layer in tap.taken)
        ranked = {il: tap.take("ffn_moe_argsort", il, np.int32).reshape(-1, experts) for il in layers}
    return {il: order[:, :used] for il, order in ranked.items()}

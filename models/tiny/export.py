"""Write spice-tiny as GGUF: F32 from the PyTorch weights, then Q5_K_M through llama.cpp's own quantiser."""

from __future__ import annotations

import ctypes
from pathlib import Path

import llama_cpp
import numpy as np
from gguf import GGUFWriter
from numpy.typing import NDArray

from models import gguf_file
from models.ggml import quiet
from models.tiny.config import Config
from models.tiny.tokens import Tokens

Arrays = dict[str, NDArray[np.float32]]


def tensors(c: Config, weights: Arrays) -> Arrays:
    """The tensors of the GGUF file by name, from the PyTorch state dict as arrays."""
    out: Arrays = {
        "token_embd.weight": weights["embed"],
        "output_norm.weight": weights["norm.weight"],
        "output.weight": weights["output"] + c.tie * weights["embed"],
    }
    for il in range(c.layers):
        b, s = f"blk.{il}.", f"blocks.{il}."
        out[b + "attn_norm.weight"] = weights[s + "attn_norm.weight"]
        out[b + "attn_q.weight"] = weights[s + "attn.q"]
        out[b + "attn_kv_a_mqa.weight"] = weights[s + "attn.kv_a"]
        out[b + "attn_kv_a_norm.weight"] = weights[s + "attn.kv_norm.weight"]
        out[b + "attn_k_b.weight"] = weights[s + "attn.k_b"]
        out[b + "attn_v_b.weight"] = weights[s + "attn.v_b"]
        out[b + "attn_output.weight"] = weights[s + "attn.out"]
        out[b + "ffn_norm.weight"] = weights[s + "ffn_norm.weight"]
        if il < c.dense_layers:
            out |= _gated(b + "ffn_{}.weight", weights[s + "ffn.gate_up"], weights[s + "ffn.down"])
            continue
        out[b + "ffn_gate_inp.weight"] = weights[s + "ffn.router"]
        out |= _gated(b + "ffn_{}_exps.weight", weights[s + "ffn.gate_up"], weights[s + "ffn.down"])
        out |= _gated(
            b + "ffn_{}_shexp.weight", weights[s + "ffn.shared.gate_up"], weights[s + "ffn.shared.down"]
        )
    return out


def _gated(name: str, gate_up: NDArray[np.float32], down: NDArray[np.float32]) -> Arrays:
    gate, up = np.split(gate_up, 2, axis=-2)
    return {name.format("gate"): gate, name.format("up"): up, name.format("down"): down}


def header(writer: GGUFWriter, c: Config, tokens: Tokens) -> None:
    """The keys beyond general.architecture. No RoPE scaling is named, so llama.cpp applies none."""
    writer.add_name("spice-tiny")
    writer.add_description("A tiny mixture of experts trained from scratch for SPICE")
    writer.add_license("MIT")
    values: dict[str, gguf_file.Value] = {
        "vocab_size": c.vocab,
        "context_length": c.context,
        "embedding_length": c.embd,
        "block_count": c.layers,
        "leading_dense_block_count": c.dense_layers,
        "feed_forward_length": c.dense_ff,
        "attention.head_count": c.heads,
        "attention.head_count_kv": 1,
        "attention.layer_norm_rms_epsilon": c.eps,
        "attention.q_lora_rank": 0,
        "attention.kv_lora_rank": c.rank,
        "attention.key_length": c.rank + c.rope,
        "attention.value_length": c.rank,
        "attention.key_length_mla": c.nope + c.rope,
        "attention.value_length_mla": c.value,
        "rope.dimension_count": c.rope,
        "rope.freq_base": c.rope_base,
        "expert_count": c.experts,
        "expert_used_count": c.used,
        "expert_shared_count": c.shared,
        "expert_feed_forward_length": c.ff,
        "expert_gating_func": 1,  # softmax
        "expert_weights_norm": True,
        "expert_weights_scale": c.weights_scale,
    }
    gguf_file.add_values(writer, "deepseek2.", values)
    tokens.add_to(writer)


def write_f32(path: Path, c: Config, weights: Arrays, tokens: Tokens) -> Path:
    """Write the F32 file and return its path."""
    path.parent.mkdir(parents=True, exist_ok=True)
    writer = GGUFWriter(path, "deepseek2")
    header(writer, c, tokens)
    for name, values in tensors(c, weights).items():
        writer.add_tensor(name, np.ascontiguousarray(values, dtype=np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def quantize_q5_k_m(src: Path, dst: Path, threads: int = 2) -> Path:
    """llama.cpp's Q5_K_M of an F32 file, with both tables in Q8_0. Raises RuntimeError if llama.cpp fails."""
    params = llama_cpp.llama_model_quantize_default_params()
    params.nthread = threads
    params.ftype = llama_cpp.LLAMA_FTYPE_MOSTLY_Q5_K_M
    params.output_tensor_type = params.token_embedding_type = llama_cpp.GGML_TYPE_Q8_0
    with quiet():
        code = llama_cpp.llama_model_quantize(str(src).encode(), str(dst).encode(), ctypes.byref(params))
    if code != 0:
        raise RuntimeError(f"llama_model_quantize({src} -> {dst}) failed with code {code}")
    return dst

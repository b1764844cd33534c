"""Makes files that models.synth does not: a dense model, LoRA adapters, models changed here and there."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np
from gguf import GGMLQuantizationType, GGUFReader, GGUFValueType, GGUFWriter, quants

from models import tokenizer


def make_dense(path: Path) -> Path:
    """A random dense `llama` model of two layers."""
    rng = np.random.default_rng(0)
    embd, ff, heads, vocab = 64, 128, 4, tokenizer.VOCABULARY_SIZE
    writer = GGUFWriter(path, "llama")
    writer.add_context_length(512)
    writer.add_embedding_length(embd)
    writer.add_block_count(2)
    writer.add_feed_forward_length(ff)
    writer.add_head_count(heads)
    writer.add_layer_norm_rms_eps(1e-6)
    writer.add_rope_dimension_count(embd // heads)
    tokenizer.add_to(writer)
    shapes = {"token_embd": (vocab, embd), "output": (vocab, embd), "output_norm": (embd,)}
    for layer in (0, 1):
        b = f"blk.{layer}."
        shapes |= {b + f"attn_{p}": (embd, embd) for p in ("q", "k", "v", "output")}
        shapes |= {b + "attn_norm": (embd,), b + "ffn_norm": (embd,), b + "ffn_down": (embd, ff)}
        shapes |= {b + "ffn_gate": (ff, embd), b + "ffn_up": (ff, embd)}
    for name, shape in shapes.items():
        values = rng.standard_normal(shape, dtype=np.float32) / shape[-1] ** 0.5
        writer.add_tensor(f"{name}.weight", np.ones(shape, np.float32) if len(shape) == 1 else values)
    _finish(writer)
    return path


def make_lora(model: Path, path: Path, targets: Sequence[str], rank: int = 4) -> Path:
    """A random LoRA adapter for the named tensors of ``model``, strong enough to change the output."""
    rng = np.random.default_rng(0)
    reader = GGUFReader(model)
    shapes = {tensor.name: [int(n) for n in tensor.shape] for tensor in reader.tensors}
    writer = GGUFWriter(path, reader.fields["general.architecture"].contents())
    writer.add_type("adapter")
    writer.add_string("adapter.type", "lora")
    writer.add_float32("adapter.lora.alpha", float(rank))
    for name in targets:
        n_in, n_out, *experts = shapes[name]
        for suffix, shape in (("lora_a", (*experts, rank, n_in)), ("lora_b", (*experts, n_out, rank))):
            values = 0.1 * rng.standard_normal(shape, dtype=np.float32)
            writer.add_tensor(f"{name}.{suffix}", values)
    _finish(writer)
    return path


def rewrite(
    model: Path,
    path: Path,
    *,
    values: Mapping[str, int] | None = None,
    types: Mapping[str, GGMLQuantizationType] | None = None,
) -> Path:
    """A copy of a model of the tests with other header values, and F32 tensors stored as other types."""
    reader = GGUFReader(model)
    writer = GGUFWriter(path, reader.fields["general.architecture"].contents())
    for name, field in reader.fields.items():
        if name.startswith(("GGUF.", "tokenizer.")) or name == "general.architecture":
            continue
        value = (values or {}).get(name, field.contents())
        writer.add_key_value(name, value, GGUFValueType(field.types[0]))
    tokenizer.add_to(writer)
    for tensor in reader.tensors:
        kind = (types or {}).get(tensor.name)
        if kind is None:
            writer.add_tensor(tensor.name, tensor.data, raw_dtype=tensor.tensor_type)
        elif kind is GGMLQuantizationType.F64:
            writer.add_tensor(tensor.name, tensor.data.astype("float64"))
        else:
            writer.add_tensor(tensor.name, quants.quantize(tensor.data, kind), raw_dtype=kind)
    _finish(writer)
    return path


def _finish(writer: GGUFWriter) -> None:
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()

// The low-rank stand-ins of a sidecar: which tensors `lore.LAYER.PART` it has, checked against the model, and
// the curve of what they cost together.
//
// Headers only; the data are read by runtime/surrogates.h. Format: docs/sidecar-format.md. Thread: any;
// nothing blocks. Errors: malformed (a layer that the model does not have, shapes or types that do not fit,
// an unknown part), unsupported (no stand-ins at all); each names the file and says what to do.
#pragma once

#include "store/sidecar.h"

#include <cstdint>
#include <span>
#include <vector>

namespace spice {

/// A layer of the model that can have stand-ins: one bank of routed experts.
struct LoreShape {
    int32_t layer = 0;
    int64_t n_in = 0;  ///< width of what the experts read
    int64_t n_out = 0; ///< width of what their down projection gives
    int32_t n_expert = 0;
};

/// One layer's tensors in the file, null where absent. Shapes in ggml's order.
struct LoreTensors {
    LoreShape shape;
    const GgufTensor *a = nullptr;           ///< [n_in, rank, n_expert] I8
    const GgufTensor *b = nullptr;           ///< [n_out, rank, n_expert] I8
    const GgufTensor *gate = nullptr;        ///< [n_in, gated, n_expert] I8, gated <= rank
    const GgufTensor *scale = nullptr;       ///< [rank, n_expert] F32, with a and b
    const GgufTensor *gate_scale = nullptr;  ///< [gated, n_expert] F32, with gate
    const GgufTensor *offset = nullptr;      ///< [rank, n_expert] F32
    const GgufTensor *bias = nullptr;        ///< [n_out, n_expert] F16
    const GgufTensor *error = nullptr;       ///< [n_expert] F32
    const GgufTensor *norm = nullptr;        ///< [n_expert] F32
    const GgufTensor *output = nullptr;      ///< [1] F32
    const GgufTensor *sensitivity = nullptr; ///< [1] F32
    [[nodiscard]] int64_t rank() const { return a == nullptr ? 0 : a->shape[1]; }
    [[nodiscard]] int64_t gated() const { return gate == nullptr ? 0 : gate->shape[1]; }
};

/// Those of every layer that has any, by layer. Their pointers live as long as the sidecar.
[[nodiscard]] Result<std::vector<LoreTensors>> lore_tensors(const Sidecar &sidecar,
                                                            std::span<const LoreShape> model);

/// Shape and type of the tensor `lore-kl.curve` are right: [2, points] F32; nullptr where the file has none.
[[nodiscard]] Result<const GgufTensor *> lore_curve(const Sidecar &sidecar);

} // namespace spice

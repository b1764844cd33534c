// Where rows of llama.cpp's tensors lie in host memory. Thread: any; no state, nothing blocks.
#pragma once

#include "ggml.h"

#include <cstddef>
#include <cstdint>

namespace spice {

/// Row [i1, i2] of the tensor.
template <class T>
[[nodiscard]] T *row_at(const ggml_tensor *tensor, int64_t i1, int64_t i2) {
    return reinterpret_cast<T *>(static_cast<std::byte *>(tensor->data) +
                                 i1 * static_cast<int64_t>(tensor->nb[1]) +
                                 i2 * static_cast<int64_t>(tensor->nb[2]));
}

/// The row of token t for its i-th routed expert, where the tensor has one, or the one that all of them
/// share.
template <class T>
[[nodiscard]] T *routed_row(const ggml_tensor *tensor, int64_t i, int64_t t) {
    return row_at<T>(tensor, i % tensor->ne[1], t);
}

/// The i-th expert that token t is routed to, of the ids [routed, tokens].
[[nodiscard]] inline int32_t id_at(const ggml_tensor *ids, int64_t i, int64_t t) {
    return *reinterpret_cast<const int32_t *>(static_cast<const std::byte *>(ids->data) +
                                              i * static_cast<int64_t>(ids->nb[0]) +
                                              t * static_cast<int64_t>(ids->nb[1]));
}

} // namespace spice

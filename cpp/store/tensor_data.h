// Small tensors of a GGUF file as floats: routers, norms, biases, the sidecar's heads.
//
// Thread: any; blocks on disk. Errors: io, truncated, unsupported (a type without a conversion to float),
// out_of_memory; each names the file and the tensor.
#pragma once

#include "store/gguf_model.h"
#include "store/status.h"

#include <cstddef>
#include <span>
#include <vector>

namespace spice {

/// The tensor's elements, ne[0] running fastest.
[[nodiscard]] Result<std::vector<float>> read_floats(const GgufModel &model, const GgufTensor &tensor);

/// Its bytes as they lie in the file; `to` must have exactly the tensor's size.
[[nodiscard]] Status read_bytes(const GgufModel &model, const GgufTensor &tensor, std::span<std::byte> to);

} // namespace spice

// Ordinary host memory on huge pages, for the weights that are not experts.
//
// llama.cpp allocates such weights with small pages when it does not map the file. They are read from end to
// end for every token, and address translation then costs a few percent of decode. This buffer type is host
// memory to everyone who asks (the CPU backend computes on it as on its own); only the allocation differs.
//
// Thread: any. Errors: allocation returns nullptr, which llama.cpp reports.
#pragma once

#include "backend/ggml_abi.h"

namespace spice {

/// The one instance, for llama_model_tensor_buft_override.buft.
[[nodiscard]] ggml_backend_buffer_type_t host_buffer_type();

/// Every tensor; the expert pattern comes first in the table of overrides.
inline constexpr const char *host_tensor_pattern = ".";

} // namespace spice

// Which nodes of llama.cpp's graph belong to a MoE block of ours, by structure, not by name.
//
// A block starts at the MUL_MAT_IDs on our expert buffers and ends with the weighted sum over the routed
// experts (adds of views). ggml asks the device for each node before it cuts the graph; claiming exactly the
// block makes each MoE layer arrive as one split. Pure functions, any thread.
#pragma once

#include "ggml.h"

namespace spice {

/// True when the node is a MUL_MAT_ID on expert weights of ours, or computes only from such results.
[[nodiscard]] bool is_block_node(const ggml_tensor *node);

} // namespace spice

// Which nodes of llama.cpp's graph compute a layer's shared expert, the FFN that every token uses.
//
// It multiplies the same activations as the routed experts and needs none of their results. Claimed with
// the block, it arrives in the same split, and is computed while the routed experts are being read
// (early_nodes.h); left to the CPU backend, it would come after them, with the disk idle.
//
// Only ordinary host weights are claimed: what lies on a GPU or is repacked stays where it is. Pure function,
// any thread.
#pragma once

#include "ggml.h"

namespace spice {

/// True when the node is a product with a shared expert's weights, or computes only from such products.
[[nodiscard]] bool is_shared_expert_node(const ggml_tensor *node);

} // namespace spice

// A node of a ggml graph that runs a function of ours on every thread of the graph.
//
// Thread: the context's compute thread. `context` has room for one more tensor.
#pragma once

#include "ggml.h"

namespace spice {

/// `job` must live until the graph has run.
[[nodiscard]] inline ggml_tensor *custom_node(ggml_context *context, ggml_custom_op_t fun, void *job) {
    ggml_tensor *node =
        ggml_custom_4d(context, GGML_TYPE_F32, 1, 1, 1, 1, nullptr, 0, fun, GGML_N_TASKS_MAX, job);
    node->flags |= GGML_TENSOR_FLAG_COMPUTE;
    return node;
}

} // namespace spice

#include "backend/shared_expert.h"

#include "ggml-backend.h"

#include <string_view>

namespace spice {

namespace {

bool is_host_weight(const ggml_tensor *tensor) {
    constexpr std::string_view ending = "_shexp.weight"; // GGUF's name for it in every architecture
    return tensor->op == GGML_OP_NONE && std::string_view(tensor->name).ends_with(ending) &&
           tensor->buffer != nullptr && ggml_backend_buffer_is_host(tensor->buffer);
}

} // namespace

bool is_shared_expert_node(const ggml_tensor *node) {
    const auto inside = [&](int source) {
        return node->src[source] != nullptr && is_shared_expert_node(node->src[source]);
    };
    switch (node->op) {
    case GGML_OP_MUL_MAT:
        return is_host_weight(node->src[0]);
    case GGML_OP_UNARY:
        return inside(0);
    case GGML_OP_GLU:
        return inside(0) && (node->src[1] == nullptr || inside(1));
    case GGML_OP_MUL: // by the shared expert's own gate
        return inside(0) && inside(1);
    default:
        return false;
    }
}

} // namespace spice

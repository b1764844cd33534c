#include "emulator/graph_copy.h"

#include <algorithm>
#include <cstring>
#include <unordered_map>

namespace spice::emulator {

namespace {

/// Nothing is computed for it: only who reads it needs its bytes.
bool is_name_only(const ggml_tensor *node) {
    switch (node->op) {
    case GGML_OP_NONE:
    case GGML_OP_VIEW:
    case GGML_OP_RESHAPE:
    case GGML_OP_PERMUTE:
    case GGML_OP_TRANSPOSE:
        return true;
    default:
        return false;
    }
}

/// Of a product by experts: those that its rows are routed to, all different or all there are.
uint64_t weight_bytes(const ggml_tensor *product) {
    const int64_t experts = std::min(ggml_nelements(product->src[2]), product->src[0]->ne[2]);
    return static_cast<uint64_t>(experts) * product->src[0]->nb[2];
}

} // namespace

std::unique_ptr<GraphCopy> GraphCopy::make(ggml_cgraph *graph, const DeviceMemory &memory,
                                           bool without_experts, std::string &why) {
    auto copy = std::make_unique<GraphCopy>();
    const int n = ggml_graph_n_nodes(graph);
    copy->context_.reset(ggml_init({.mem_size = ggml_graph_overhead_custom(static_cast<size_t>(n) + 1, false),
                                    .mem_buffer = nullptr,
                                    .no_alloc = true}));
    copy->graph_ = ggml_new_graph_custom(copy->context_.get(), static_cast<size_t>(n) + 1, false);

    std::unordered_map<const ggml_tensor *, ggml_tensor *> made;
    const auto copy_of = [&](ggml_tensor *tensor) -> ggml_tensor * {
        const auto [it, fresh] = made.try_emplace(tensor, nullptr);
        if (!fresh) return it->second;
        it->second = &copy->tensors_.emplace_back(*tensor);
        ggml_tensor &twin = *it->second;
        twin.buffer = nullptr;
        twin.extra = nullptr;
        twin.view_src = nullptr;
        if (tensor->data != nullptr) {
            twin.data = memory.real(tensor->data, ggml_nbytes(tensor));
            if (twin.data == nullptr) {
                why = std::string(ggml_op_desc(tensor)) + " '" + tensor->name +
                      "' is not in the device's memory";
            }
        }
        return &twin;
    };
    for (int i = 0; i < n; ++i) {
        ggml_tensor *node = ggml_graph_node(graph, i);
        if (is_name_only(node)) continue;
        ggml_tensor *twin = copy_of(node);
        for (ggml_tensor *&source : twin->src) {
            if (source != nullptr) source = copy_of(source);
        }
        ggml_graph_add_node(copy->graph_, twin);
        if (node->op != GGML_OP_MUL_MAT_ID) continue;
        copy->n_matmul_ids_ += 1;
        copy->expert_bytes_ += weight_bytes(node);
        if (without_experts) {
            twin->op = GGML_OP_FILL;
            twin->src[0] = twin->src[1]; // ggml-cpu takes the source's type for the result's
            std::memset(twin->op_params, 0, sizeof(twin->op_params)); // the value: 0.0F
        }
    }
    copy->n_nodes_ = static_cast<uint64_t>(n);
    return why.empty() ? std::move(copy) : nullptr;
}

} // namespace spice::emulator

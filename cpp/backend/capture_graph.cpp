// The part of BlockGraph that keeps a block's gate weights and the experts' outputs, for fitting.
#include "backend/block_graph.h"
#include "backend/custom_node.h"
#include "backend/expert_buffer.h"
#include "backend/substitution.h"
#include "backend/tensor_rows.h"

#include <new>

namespace spice {

void BlockGraph::capture(const ExpertTensor &weights, RoutedCall &call) {
    const int32_t layer = weights.engine->layer_of(weights.group);
    if (weights.engine->group_of(layer) != weights.group) return; // another bank
    const auto site = SubstitutionSite::find(nodes_, turn_, weights.group, nullptr);
    if (!site || is_pending(site->gates)) return;
    Capture &capture = weights.engine->capture();
    capture.add_gates(layer, site->gate_weights());
    if (capture.wants_outputs()) call.captured = {&capture, layer, site->down};
}

/// After the down product and all that writes its rows.
void BlockGraph::add_captured_outputs(RoutedCall &call) {
    const auto run = [](ggml_tensor *, int thread, int, void *job) {
        if (thread == 0) static_cast<const RoutedCall::Captured *>(job)->keep();
    };
    ggml_graph_add_node(pending_, custom_node(context_.get(), run, &call.captured));
}

void RoutedCall::Captured::keep() const noexcept try {
    const auto n = static_cast<size_t>(down->ne[0]);
    std::vector<float> rows;
    rows.reserve(n * static_cast<size_t>(down->ne[1] * down->ne[2]));
    for (int64_t t = 0; t < down->ne[2]; ++t) {
        for (int64_t i = 0; i < down->ne[1]; ++i) {
            const auto *row = row_at<const float>(down, i, t);
            rows.insert(rows.end(), row, row + n);
        }
    }
    capture->add_outputs(layer, down->ne[0], std::move(rows));
} catch (const std::bad_alloc &) { // an exception would have to pass through ggml
    capture->lose();
}

} // namespace spice

// The part of BlockGraph that computes stand-ins in place of experts.
#include "backend/block_graph.h"
#include "backend/custom_node.h"
#include "backend/expert_buffer.h"
#include "backend/substitution.h"
#include "runtime/surrogate_use.h"

#include <algorithm>

namespace spice {

/// Chooses the pairs that stand-ins compute, before the call's experts are asked for; `left` are the ids that
/// the host is to compute, and loses those.
void BlockGraph::substitute(const ExpertTensor &weights, RoutedCall &call, std::span<const int32_t> routed,
                            std::vector<int32_t> &left) {
    SurrogateUse &use = *weights.engine->surrogate_use();
    if (routed.empty() || !use.serves(weights.group) || call.ids->ne[1] > use.max_rows()) return;
    const auto [least, most] = std::ranges::minmax(routed);
    if (least < 0 || most >= weights.info->n_expert) return; // LayerCall::begin says what is wrong
    const SurrogateLayer *layer =
        use.kind() == compute::SurrogateKind::drop ? nullptr : use.layer(weights.group);
    const auto site =
        SubstitutionSite::find(nodes_, turn_, weights.group, layer == nullptr ? nullptr : &layer->shape);
    if (!site || is_pending(site->gates)) {
        use.count_unfit();
        return;
    }
    const bool only_missed = use.only_missed();
    std::vector<uint8_t> candidates =
        only_missed ? weights.engine->absent(weights.group, routed) : std::vector<uint8_t>(routed.size(), 1);
    for (size_t r = 0; r < routed.size(); ++r) {
        if (call.device.takes(routed[r])) candidates[r] = 0;
    }
    const std::vector<float> gates = site->gate_weights();
    std::vector<float> forecast;
    if (const Prefetcher *prefetcher = weights.engine->prefetcher(); only_missed && prefetcher != nullptr) {
        forecast = prefetcher->forecast(weights.group);
    }
    std::vector<uint8_t> taken(routed.size(), 0);
    if (!use.choose({.group = weights.group,
                     .top_k = static_cast<size_t>(call.ids->ne[0]),
                     .ids = routed,
                     .gates = gates,
                     .candidates = candidates,
                     .forecast = forecast},
                    taken)) {
        return;
    }
    left.clear();
    for (size_t r = 0; r < routed.size(); ++r) {
        if (taken[r] == 0 && !call.device.takes(routed[r])) left.push_back(routed[r]);
    }
    call.stand_ins = std::make_unique<Substituted>();
    call.stand_ins->taken = std::move(taken);
    call.stand_ins->set_up(*site, use.kind(), layer);
    // Now, as h may be gone at the turn of the down product.
    const auto run = [](ggml_tensor *, int, int, void *job) {
        compute::run_down(*static_cast<compute::SurrogateJob *>(job));
    };
    ggml_graph_add_node(pending_, custom_node(context_.get(), run, &call.stand_ins->job));
}

/// After the product of a projection: the rows of the pairs that stand-ins compute.
void BlockGraph::add_stand_ins(ggml_tensor *node, RoutedCall &call) {
    if (node != call.stand_ins->down) {
        ZeroRows &zeros = call.stand_ins->zeros.emplace_back(node, call.stand_ins->taken);
        ggml_graph_add_node(pending_, custom_node(context_.get(), ZeroRows::run, &zeros));
        return;
    }
    const auto run = [](ggml_tensor *, int, int n_threads, void *job) {
        compute::run_up(*static_cast<compute::SurrogateJob *>(job), n_threads);
    };
    ggml_graph_add_node(pending_, custom_node(context_.get(), run, &call.stand_ins->job));
}

} // namespace spice

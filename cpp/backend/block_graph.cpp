#include "backend/block_graph.h"

#include "backend/custom_node.h"
#include "backend/expert_buffer.h"
#include "backend/shared_expert.h"
#include "backend/tensor_rows.h"
#include "runtime/surrogate_use.h"

#include <algorithm>
#include <cstring>
#include <iterator>
#include <new>
#include <string>

namespace spice {

namespace {

/// The expert weights that a node multiplies by, or nullptr when the node is none of ours.
const ExpertTensor *expert_matmul(const ggml_tensor *node) {
    return node->op == GGML_OP_MUL_MAT_ID ? expert_tensor(node->src[0]) : nullptr;
}

} // namespace

void RowCopies::run(ggml_tensor *, int thread, int n_threads, void *job) {
    const auto &self = *static_cast<const RowCopies *>(job);
    const size_t n = self.copies.size();
    const auto first = n * static_cast<size_t>(thread) / static_cast<size_t>(n_threads);
    const auto last = n * static_cast<size_t>(thread + 1) / static_cast<size_t>(n_threads);
    for (size_t i = first; i < last; ++i) {
        std::memcpy(self.copies[i].to, self.copies[i].from, self.copies[i].bytes);
    }
}

ggml_status BlockGraph::run(ggml_cgraph *graph, int n_threads) {
    struct AtEnd { // of exceptions too: what a call holds must not outlive it
        BlockGraph &it;
        ~AtEnd() { it.reset(); }
    } const at_end{*this};
    return run_nodes(graph, n_threads);
}

ggml_status BlockGraph::run_nodes(ggml_cgraph *graph, int n_threads) {
    const double begun = Timeline::now();
    graph_ = graph;
    n_threads_ = n_threads;
    nodes_ = {ggml_graph_nodes(graph), static_cast<size_t>(ggml_graph_n_nodes(graph))};
    for (const ggml_tensor *node : nodes_) count_.matmul_nodes += expert_matmul(node) != nullptr;
    const auto n_shared = static_cast<size_t>(std::ranges::count_if(nodes_, is_shared_expert_node));
    count_.delegated_nodes = nodes_.size() - count_.matmul_nodes;

    // At most seven nodes for each of ours (pack, multiply, join, copy, two of stand-ins, capture), nine
    // tensors; and two for each of the shared expert's (the early twin, the copy of its result).
    const size_t capacity = nodes_.size() + 6 * count_.matmul_nodes + 2 * n_shared;
    const size_t bytes = ggml_graph_overhead_custom(capacity, false) +
                         (count_.matmul_nodes * 9 + n_shared * 2) * ggml_tensor_overhead();
    if (arena_.size() < bytes) arena_.resize(bytes);
    context_.reset(ggml_init({.mem_size = arena_.size(), .mem_buffer = arena_.data(), .no_alloc = true}));
    if (context_ == nullptr) throw std::bad_alloc();
    pending_ = ggml_new_graph_custom(context_.get(), capacity, false);

    ggml_status status = GGML_STATUS_SUCCESS;
    for (turn_ = 0; turn_ < nodes_.size() && status == GGML_STATUS_SUCCESS; ++turn_) {
        ggml_tensor *node = nodes_[turn_];
        if (early_.find(node) != nullptr) {
            add_early_results();
        } else if (const ExpertTensor *weights = expert_matmul(node); weights != nullptr) {
            status = add_matmul(node, *weights);
        } else {
            ggml_graph_add_node(pending_, node);
        }
    }
    if (status == GGML_STATUS_SUCCESS) status = run_pending();
    if (engine_ != nullptr) {
        engine_->count_graph(count_);
        if (engine_->timeline().on() && !calls_.empty()) {
            const int32_t layer = engine_->layer_of(calls_.front().group);
            engine_->timeline().add(
                Timeline::Track::layer, [&] { return "layer " + std::to_string(layer); }, begun,
                Timeline::now());
        }
    }
    return status;
}

void BlockGraph::reset() {
    count_ = {};
    for (const auto &lane : lanes_) lane->free();
    calls_.clear(); // unpins; waits for reads when a call ended early
    packs_.clear();
    matmuls_.clear();
    early_.clear();
    copies_.clear();
    scratch_used_ = 0;
    context_.reset();
    pending_ = nullptr;
}

ggml_status BlockGraph::run_pending() {
    if (ggml_graph_n_nodes(pending_) == 0) return GGML_STATUS_SUCCESS;
    const ggml_status status = ggml_backend_graph_compute(cpu_, pending_);
    ggml_graph_clear(pending_);
    if (status != GGML_STATUS_SUCCESS) return status;
    for (RoutedCall &call : calls_) { // a direct node skips what did not arrive
        if (Status failure = call.layer.failure(); !failure.ok()) return fail(std::move(failure));
    }
    return GGML_STATUS_SUCCESS;
}

void BlockGraph::add_early() {
    for (ggml_tensor *node : early_.take(context_.get(), nodes_.subspan(turn_), nodes_)) {
        node->data = scratch(ggml_nbytes(node));
        count_.early_nodes += 1;
        ggml_graph_add_node(pending_, node);
    }
}

/// Copies for the early nodes that are next to each other from the present turn on; moves on to the last.
void BlockGraph::add_early_results() {
    const size_t first = turn_;
    while (turn_ + 1 < nodes_.size() && early_.find(nodes_[turn_ + 1]) != nullptr) ++turn_;
    RowCopies &rows = copies_.emplace_back();
    for (const EarlyNodes::Copy &copy : early_.copies(nodes_.subspan(first, turn_ - first + 1))) {
        const auto n = static_cast<size_t>(ggml_nrows(copy.to));
        const size_t bytes = ggml_nbytes(copy.to) / n; // contiguous
        for (size_t r = 0; r < n; ++r) {
            rows.copies.push_back({static_cast<const std::byte *>(copy.from->data) + r * bytes,
                                   static_cast<std::byte *>(copy.to->data) + r * bytes, bytes});
        }
    }
    ggml_graph_add_node(pending_, custom_node(context_.get(), RowCopies::run, &rows));
}

ggml_status BlockGraph::fail(Status status) {
    if (engine_ != nullptr) engine_->fail(std::move(status));
    return GGML_STATUS_FAILED;
}

std::byte *BlockGraph::scratch(size_t bytes) {
    if (scratch_used_ == scratch_.size()) scratch_.emplace_back();
    std::vector<std::byte> &buffer = scratch_[scratch_used_++];
    if (buffer.size() < bytes + 64) buffer.resize(bytes + 64);
    const auto address = reinterpret_cast<uintptr_t>(buffer.data());
    return buffer.data() + (64 - address % 64) % 64;
}

bool BlockGraph::is_pending(const ggml_tensor *tensor) const {
    const ggml_tensor *root = tensor->view_src != nullptr ? tensor->view_src : tensor;
    for (int i = 0; i < ggml_graph_n_nodes(pending_); ++i) {
        const ggml_tensor *node = ggml_graph_node(pending_, i);
        if (node == tensor || node == root) return true;
    }
    return false;
}

/// What the router read, as far as the graph shows it: nearly always what the first projection multiplies.
RouterInput BlockGraph::router_input(const ggml_tensor *node) const {
    const ggml_tensor *x = node->src[1];
    RouterInput input{.n_tokens = node->src[2]->ne[1]};
    if (x->ne[1] != 1 || x->nb[0] != sizeof(float) || is_pending(x)) return input; // scaled for each expert
    input.data = static_cast<const std::byte *>(x->data);
    input.stride = static_cast<int64_t>(x->nb[2]);
    input.n_embd = x->ne[0];
    return input;
}

ggml_status BlockGraph::find_call(const ggml_tensor *node, const ExpertTensor &weights, RoutedCall **out) {
    const ggml_tensor *ids = node->src[2];
    for (RoutedCall &call : calls_) {
        if (call.ids == ids && call.group == weights.group) {
            *out = &call;
            return GGML_STATUS_SUCCESS;
        }
    }
    if (is_pending(ids)) { // ids computed inside this split: they must be known before experts are chosen
        if (const ggml_status status = run_pending(); status != GGML_STATUS_SUCCESS) return status;
    }
    std::vector<int32_t> routed;
    routed.reserve(static_cast<size_t>(ids->ne[0] * ids->ne[1]));
    for (int64_t t = 0; t < ids->ne[1]; ++t) {
        for (int64_t i = 0; i < ids->ne[0]; ++i) routed.push_back(id_at(ids, i, t));
    }
    RoutedCall &call = calls_.emplace_back();
    call.ids = ids;
    call.group = weights.group;
    DeviceLane *lane = lane_of(weights);
    if (lane != nullptr && lane->state() != DeviceLane::State::free) { // two blocks in one split
        if (const ggml_status status = run_pending(); status != GGML_STATUS_SUCCESS) return status;
        if (lane->state() == DeviceLane::State::computing) lane = nullptr; // interleaved: the host's
    }
    if (lane != nullptr) {
        const auto pending = [&](const ggml_tensor *tensor) { return is_pending(tensor); };
        if (Status status = lane->share(graph_, call, routed, inputs_, pending); !status.ok()) {
            weights.engine->device(weights.group)->forget();
            return fail(std::move(status));
        }
    }
    std::span<const int32_t> left = routed;
    std::vector<int32_t> rest;
    const SurrogateUse *stand_ins = weights.engine->surrogate_use();
    const bool substitutes = stand_ins != nullptr && stand_ins->on();
    if (substitutes || !call.device.empty()) {
        std::ranges::copy_if(routed, std::back_inserter(rest),
                             [&](int32_t id) { return !call.device.takes(id); });
        if (substitutes) substitute(weights, call, routed, rest);
        left = rest;
    }
    if (Status status = call.layer.begin(*weights.engine, weights.group, left); !status.ok()) {
        return fail(std::move(status));
    }
    const RouterInput input = router_input(node);
    weights.engine->routed(weights.group, input, routed);
    if (weights.engine->capture().on()) capture(weights, call);
    const bool waits = !call.layer.streaming() && !call.layer.all_ready(weights.part);
    if (waits && early_.empty()) add_early();
    call.sort_rows(routed, ids->ne[0], weights.info->n_expert);
    if (call.is_direct() && !call.rows.empty()) {
        call.forecast = {.engine = weights.engine, .input = input, .ids = std::move(routed)};
    } else {
        weights.engine->predict(weights.group, input, routed);
    }
    *out = &call;
    return GGML_STATUS_SUCCESS;
}

DeviceLane *BlockGraph::lane_of(const ExpertTensor &weights) {
    DeviceTier *tier = weights.engine->device(weights.group);
    if (tier == nullptr) return nullptr;
    const auto known = std::ranges::find(lanes_, tier, [](const auto &lane) { return &lane->tier(); });
    if (known != lanes_.end()) return known->get();
    std::unique_ptr<DeviceLane> lane = DeviceLane::make(*tier);
    if (lane == nullptr) {
        tier->count_refused();
        return nullptr;
    }
    return lanes_.emplace_back(std::move(lane)).get();
}

void BlockGraph::add_merge(RoutedCall &call) {
    const auto join = [](ggml_tensor *, int thread, int, void *data) {
        if (thread == 0) static_cast<RoutedCall *>(data)->join();
    };
    ggml_graph_add_node(pending_, custom_node(context_.get(), join, &call));
    if (call.lane == nullptr) return;
    RowCopies &rows = copies_.emplace_back();
    call.lane->results_to(rows);
    ggml_graph_add_node(pending_, custom_node(context_.get(), RowCopies::run, &rows));
}

ggml_status BlockGraph::add_matmul(ggml_tensor *node, const ExpertTensor &weights) {
    engine_ = weights.engine;
    const ggml_tensor *w = node->src[0];
    if (w->nb[2] != weights.info->stride || w->view_offs >= weights.info->stride || w->ne[3] != 1 ||
        node->src[1]->type != GGML_TYPE_F32) {
        return fail(
            Status(Code::unsupported,
                   weights.info->name + ": used in a way that SPICE does not know; set enabled=False"));
    }
    RoutedCall *call = nullptr;
    if (const ggml_status status = find_call(node, weights, &call); status != GGML_STATUS_SUCCESS) {
        return status;
    }
    const ggml_status status = multiply_on_host(node, weights, *call);
    if (status == GGML_STATUS_SUCCESS && call->stand_ins != nullptr) add_stand_ins(node, *call);
    if (status == GGML_STATUS_SUCCESS && node == call->merge_at) add_merge(*call);
    if (status == GGML_STATUS_SUCCESS && node == call->captured.down) add_captured_outputs(*call);
    return status;
}

} // namespace spice

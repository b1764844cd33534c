#include "backend/block_graph.h"

#include "backend/custom_node.h"
#include "backend/expert_buffer.h"
#include "backend/shared_expert.h"
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

template <class T>
T *at(const ggml_tensor *tensor, int64_t i1, int64_t i2) {
    return reinterpret_cast<T *>(static_cast<std::byte *>(tensor->data) +
                                 i1 * static_cast<int64_t>(tensor->nb[1]) +
                                 i2 * static_cast<int64_t>(tensor->nb[2]));
}

/// The activation row that the routed slot i of token t is multiplied with.
const float *activation(const ggml_tensor *node, int64_t i, int64_t t) {
    const ggml_tensor *x = node->src[1];
    return at<const float>(x, i % x->ne[1], t);
}

/// MatmulJob::arrived for a part; the context is the LayerCall.
template <size_t part>
bool part_arrived(void *layer, int32_t expert) {
    return static_cast<LayerCall *>(layer)->wait(static_cast<size_t>(expert), part);
}

/// The slot tensor as the weights of a MUL_MAT_ID in place of `original`, whose ids are slot numbers then.
ggml_tensor *slot_weights(ggml_context *context, const ggml_tensor *original, const ExpertTensor &weights) {
    const SlotTensor slots = weights.engine->slot_tensor(weights);
    ggml_tensor *source =
        ggml_new_tensor_3d(context, original->type, original->ne[0], original->ne[1], slots.n_slots);
    source->nb[1] = original->nb[1];
    source->nb[2] = slots.stride;
    source->nb[3] = slots.stride * static_cast<size_t>(slots.n_slots);
    source->data = slots.base + original->view_offs;
    return source;
}

/// Whether our own dot products compute the call.
bool is_direct(const RoutedCall &call) {
    return !call.layer.streaming() && call.most_rows < compute::batched_rows();
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
            const std::string layer = std::to_string(engine_->layer_of(calls_.front().group));
            engine_->timeline().add(Timeline::Track::layer, "layer " + layer, begun, Timeline::now());
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
        for (int64_t i = 0; i < ids->ne[0]; ++i) {
            const auto *id = static_cast<const std::byte *>(ids->data) +
                             t * static_cast<int64_t>(ids->nb[1]) + i * static_cast<int64_t>(ids->nb[0]);
            routed.push_back(*reinterpret_cast<const int32_t *>(id));
        }
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
    if (is_direct(call) && !call.rows.empty()) {
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

ggml_status BlockGraph::multiply_on_host(ggml_tensor *node, const ExpertTensor &weights, RoutedCall &call) {
    if (call.rows.empty()) return GGML_STATUS_SUCCESS; // device and stand-ins have all, or there are none
    if (is_direct(call)) {
        count_.rows_direct += call.rows.size();
        add_direct(node, weights, call);
        return GGML_STATUS_SUCCESS;
    }
    count_.rows_batched += call.rows.size();
    // ggml's product has all rows or none: with some computed elsewhere, the others go in waves.
    const bool all_here = call.device.empty() && call.stand_ins == nullptr;
    if (!call.layer.streaming() && all_here && call.layer.all_ready(weights.part)) {
        add_batched(node, weights, call);
        return GGML_STATUS_SUCCESS;
    }
    return run_waves(node, weights, call);
}

void BlockGraph::add_direct(ggml_tensor *node, const ExpertTensor &weights, RoutedCall &call) {
    const ggml_tensor *w = node->src[0];
    const ggml_tensor *x = node->src[1];
    const ggml_type_traits_cpu *traits = ggml_get_type_traits_cpu(w->type);
    const ggml_type packed_type = traits->vec_dot_type;
    const size_t row_bytes = ggml_row_size(packed_type, x->ne[0]);

    // gate and up multiply the same activations: pack them once. Row (i, t) of x is packed row t*ne1 + i%ne1.
    if (packed_type != GGML_TYPE_F32 && (call.packed_from != x || call.packed_type != packed_type)) {
        compute::PackJob &pack = packs_.emplace_back();
        pack.convert = ggml_get_type_traits_cpu(packed_type)->from_float;
        pack.n_in = x->ne[0];
        pack.block = ggml_blck_size(packed_type);
        pack.block_bytes = ggml_type_size(packed_type);
        pack.row_bytes = row_bytes;
        for (int64_t t = 0; t < x->ne[2]; ++t) {
            for (int64_t i = 0; i < x->ne[1]; ++i) pack.rows.push_back(at<const float>(x, i, t));
        }
        pack.packed = scratch(row_bytes * pack.rows.size());
        const auto run = [](ggml_tensor *, int thread, int n_threads, void *job) {
            compute::run_pack(*static_cast<const compute::PackJob *>(job), thread, n_threads);
        };
        ggml_graph_add_node(pending_, custom_node(context_.get(), run, &pack));
        call.packed_from = x;
        call.packed_type = packed_type;
        call.packed = &pack;
    }

    compute::MatmulJob &job = matmuls_.emplace_back();
    job.dot = traits->vec_dot;
    job.n_in = w->ne[0];
    job.n_out = w->ne[1];
    job.row_stride = w->nb[1];
    const std::span<const int32_t> experts = call.layer.experts();
    job.chunk = compute::chunk_rows(job.n_out, static_cast<int64_t>(experts.size()), n_threads_);
    job.experts.reserve(experts.size());
    job.pairs.reserve(call.rows.size());
    for (size_t e = 0; e < experts.size(); ++e) {
        job.experts.push_back({call.layer.weights(e, weights.part) + w->view_offs, static_cast<int32_t>(e),
                               call.first[e], call.first[e + 1] - call.first[e]});
    }
    for (const RoutedCall::Row &row : call.rows) {
        const void *packed =
            packed_type == GGML_TYPE_F32
                ? static_cast<const void *>(activation(node, row.i, row.t))
                : call.packed->packed + static_cast<size_t>(row.t * x->ne[1] + row.i % x->ne[1]) * row_bytes;
        job.pairs.push_back({packed, at<float>(node, row.i, row.t)});
    }
    constexpr std::array<bool (*)(void *, int32_t), max_parts> arrived = {part_arrived<0>, part_arrived<1>,
                                                                          part_arrived<2>, part_arrived<3>};
    if (!call.layer.all_ready(weights.part)) {
        job.arrived = arrived[weights.part];
        job.context = &call.layer;
    }
    if (call.forecast && call.first_product == nullptr) {
        call.first_product = &job;
        const auto run = [](ggml_tensor *, int thread, int n_threads, void *data) {
            auto &first = *static_cast<RoutedCall *>(data);
            if (thread == n_threads - 1)
                first.predict(); // the others take its share of the product meanwhile
            compute::run_matmul(*first.first_product);
        };
        ggml_graph_add_node(pending_, custom_node(context_.get(), run, &call));
        return;
    }
    const auto run = [](ggml_tensor *, int, int, void *data) {
        compute::run_matmul(*static_cast<compute::MatmulJob *>(data));
    };
    ggml_graph_add_node(pending_, custom_node(context_.get(), run, &job));
}

void BlockGraph::add_batched(ggml_tensor *node, const ExpertTensor &weights, RoutedCall &call) {
    if (call.slot_ids == nullptr) {
        const ggml_tensor *ids = call.ids;
        call.slot_ids = ggml_new_tensor_2d(context_.get(), GGML_TYPE_I32, ids->ne[0], ids->ne[1]);
        auto *slots = reinterpret_cast<int32_t *>(scratch(ggml_nbytes(call.slot_ids)));
        call.slot_ids->data = slots;
        for (size_t e = 0; e < call.layer.experts().size(); ++e) {
            for (uint32_t r = call.first[e]; r < call.first[e + 1]; ++r) {
                slots[call.rows[r].t * ids->ne[0] + call.rows[r].i] = call.layer.slot(e);
            }
        }
    }
    // A copy: llama.cpp uses its graph again for the next token.
    ggml_tensor *rewritten = ggml_new_tensor(context_.get(), node->type, GGML_MAX_DIMS, node->ne);
    *rewritten = *node;
    rewritten->src[0] = slot_weights(context_.get(), node->src[0], weights);
    rewritten->src[2] = call.slot_ids;
    ggml_graph_add_node(pending_, rewritten);
}

ggml_status BlockGraph::run_waves(ggml_tensor *node, const ExpertTensor &weights, RoutedCall &call) {
    if (const ggml_status status = run_pending(); status != GGML_STATUS_SUCCESS) return status;
    for (;;) {
        Result<std::vector<size_t>> wave = call.layer.next_wave(weights.part);
        if (!wave.ok()) return fail(wave.status());
        if (wave.value().empty()) return GGML_STATUS_SUCCESS;
        const size_t mark = scratch_used_;
        const ggml_status status = run_wave(node, weights, call, wave.value());
        scratch_used_ = mark;
        call.layer.wave_done(wave.value());
        if (status != GGML_STATUS_SUCCESS) return status;
        count_.waves += 1;
    }
}

ggml_status BlockGraph::run_wave(ggml_tensor *node, const ExpertTensor &weights, RoutedCall &call,
                                 std::span<const size_t> wave) {
    const ggml_tensor *w = node->src[0];
    int64_t n_rows = 0;
    for (const size_t e : wave) n_rows += call.first[e + 1] - call.first[e];
    const size_t in_bytes = static_cast<size_t>(w->ne[0]) * sizeof(float);
    const size_t out_bytes = static_cast<size_t>(w->ne[1]) * sizeof(float);
    std::byte *in = scratch(in_bytes * static_cast<size_t>(n_rows));
    std::byte *out = scratch(out_bytes * static_cast<size_t>(n_rows));
    auto *slots = reinterpret_cast<int32_t *>(scratch(sizeof(int32_t) * static_cast<size_t>(n_rows)));

    RowCopies gather;
    RowCopies scatter;
    size_t r = 0;
    for (const size_t e : wave) {
        for (uint32_t k = call.first[e]; k < call.first[e + 1]; ++k, ++r) {
            const RoutedCall::Row &row = call.rows[k];
            gather.copies.push_back({activation(node, row.i, row.t), in + r * in_bytes, in_bytes});
            scatter.copies.push_back({out + r * out_bytes, at<float>(node, row.i, row.t), out_bytes});
            slots[r] = call.layer.slot(e);
        }
    }

    const ggml_context_ptr context(
        ggml_init({.mem_size = ggml_graph_overhead_custom(3, false) + 6 * ggml_tensor_overhead(),
                   .mem_buffer = nullptr,
                   .no_alloc = true}));
    if (context == nullptr) throw std::bad_alloc();
    ggml_tensor *source = slot_weights(context.get(), w, weights);
    ggml_tensor *x = ggml_new_tensor_3d(context.get(), GGML_TYPE_F32, w->ne[0], 1, n_rows);
    x->data = in;
    ggml_tensor *ids = ggml_new_tensor_2d(context.get(), GGML_TYPE_I32, 1, n_rows);
    ids->data = slots;
    ggml_tensor *product = ggml_mul_mat_id(context.get(), source, x, ids);
    product->data = out;
    product->flags |= GGML_TENSOR_FLAG_COMPUTE;
    std::memcpy(product->op_params, node->op_params, sizeof(node->op_params)); // its precision

    ggml_cgraph *graph = ggml_new_graph_custom(context.get(), 3, false);
    ggml_graph_add_node(graph, custom_node(context.get(), RowCopies::run, &gather));
    ggml_graph_add_node(graph, product);
    ggml_graph_add_node(graph, custom_node(context.get(), RowCopies::run, &scatter));
    return ggml_backend_graph_compute(cpu_, graph);
}

} // namespace spice

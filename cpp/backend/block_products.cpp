// The part of BlockGraph that multiplies on the host, by one of the three exact equivalents of MUL_MAT_ID.
#include "backend/block_graph.h"
#include "backend/custom_node.h"
#include "backend/expert_buffer.h"
#include "backend/tensor_rows.h"

#include <array>
#include <cstring>
#include <new>

namespace spice {

namespace {

/// The activation row that the routed slot i of token t is multiplied with.
const float *activation(const ggml_tensor *node, int64_t i, int64_t t) {
    return routed_row<const float>(node->src[1], i, t);
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

} // namespace

ggml_status BlockGraph::multiply_on_host(ggml_tensor *node, const ExpertTensor &weights, RoutedCall &call) {
    if (call.rows.empty()) return GGML_STATUS_SUCCESS; // device and stand-ins have all, or there are none
    if (call.is_direct()) {
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
            for (int64_t i = 0; i < x->ne[1]; ++i) pack.rows.push_back(row_at<const float>(x, i, t));
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
        job.pairs.push_back({packed, row_at<float>(node, row.i, row.t)});
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
            scatter.copies.push_back({out + r * out_bytes, row_at<float>(node, row.i, row.t), out_bytes});
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

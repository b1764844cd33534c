#include "backend/spice_backend.h"

#include "backend/expert_buffer.h"

#include "ggml-cpp.h"
#include "ggml-cpu.h"

#include <deque>
#include <exception>
#include <memory>
#include <new>
#include <string>
#include <vector>

namespace spice {

namespace {

/// The routed experts of one block in one compute(): pinned while it lives.
struct LayerCall {
    Engine *engine = nullptr;
    int32_t group = 0;
    const ggml_tensor *ids = nullptr; ///< as in llama.cpp's graph
    std::vector<int32_t> slots;       ///< [tokens][routed], slot numbers
    ggml_tensor *slot_ids = nullptr;  ///< a tensor on `slots`

    LayerCall() = default;
    LayerCall(const LayerCall &) = delete;
    LayerCall &operator=(const LayerCall &) = delete;
    ~LayerCall() {
        if (slot_ids != nullptr) engine->done(group, slots);
    }
};

class Backend {
  public:
    explicit Backend(ggml_backend_t cpu) : cpu_(cpu) {}

    [[nodiscard]] ggml_backend_t cpu() const { return cpu_.get(); }

    [[nodiscard]] ggml_status compute(ggml_cgraph *graph) {
        const int n_nodes = ggml_graph_n_nodes(graph);
        int n_matmul = 0;
        engine_ = nullptr;
        for (int i = 0; i < n_nodes; ++i) n_matmul += expert_matmul(ggml_graph_node(graph, i)) != nullptr;

        // Tensors made here: the rewritten node, its slot tensor, and at most one id tensor.
        const size_t bytes = ggml_graph_overhead_custom(static_cast<size_t>(n_nodes), false) +
                             static_cast<size_t>(n_matmul) * 3 * ggml_tensor_overhead();
        if (arena_.size() < bytes) arena_.resize(bytes);
        const ggml_context_ptr context(
            ggml_init({.mem_size = arena_.size(), .mem_buffer = arena_.data(), .no_alloc = true}));
        if (context == nullptr) return GGML_STATUS_ALLOC_FAILED;
        context_ = context.get();
        calls_.clear();
        pending_ = ggml_new_graph_custom(context_, static_cast<size_t>(n_nodes), false);

        for (int i = 0; i < n_nodes; ++i) {
            ggml_tensor *node = ggml_graph_node(graph, i);
            if (const ExpertTensor *weights = expert_matmul(node); weights != nullptr) {
                const ggml_status status = add_matmul(node, *weights);
                if (status != GGML_STATUS_SUCCESS) {
                    calls_.clear();
                    return status;
                }
            } else {
                ggml_graph_add_node(pending_, node);
            }
        }
        const ggml_status status = run_pending();
        calls_.clear();
        if (engine_ != nullptr) {
            engine_->count_graph(static_cast<uint64_t>(n_matmul), static_cast<uint64_t>(n_nodes - n_matmul));
        }
        return status;
    }

    /// Keeps an error where the binding finds it.
    void fail(Status status) const {
        if (engine_ != nullptr) engine_->fail(std::move(status));
    }

  private:
    /// The expert weights that a node multiplies by, or nullptr when the node is none of ours.
    static const ExpertTensor *expert_matmul(const ggml_tensor *node) {
        return node->op == GGML_OP_MUL_MAT_ID ? expert_tensor(node->src[0]) : nullptr;
    }

    ggml_status run_pending() const {
        return ggml_graph_n_nodes(pending_) == 0 ? GGML_STATUS_SUCCESS
                                                 : ggml_backend_graph_compute(cpu_.get(), pending_);
    }

    /// Appends the node with its weights replaced by the slot tensor and its ids by slot numbers.
    ggml_status add_matmul(ggml_tensor *node, const ExpertTensor &weights) {
        engine_ = weights.engine;
        const LayerCall *call = nullptr;
        const ggml_status status = layer_call(weights, node->src[2], &call);
        if (status != GGML_STATUS_SUCCESS) return status;

        const ggml_tensor *original = node->src[0];
        const SlotTensor slots = weights.engine->slot_tensor(weights.group);
        if (original->nb[2] != weights.part->stride || original->view_offs >= weights.part->stride) {
            fail(Status(Code::unsupported, weights.part->name + ": a view across experts; set spice off"));
            return GGML_STATUS_FAILED;
        }
        ggml_tensor *source =
            ggml_new_tensor_3d(context_, original->type, original->ne[0], original->ne[1], slots.n_slots);
        source->nb[1] = original->nb[1];
        source->nb[2] = slots.stride;
        source->nb[3] = slots.stride * static_cast<size_t>(slots.n_slots);
        source->data = slots.base + weights.slot_offset + original->view_offs;

        // A copy: llama.cpp uses its graph again for the next token.
        ggml_tensor *rewritten = ggml_new_tensor(context_, node->type, GGML_MAX_DIMS, node->ne);
        *rewritten = *node;
        rewritten->src[0] = source;
        rewritten->src[2] = call->slot_ids;
        ggml_graph_add_node(pending_, rewritten);
        return GGML_STATUS_SUCCESS;
    }

    /// The call for these ids: made at the block's first projection, shared by the others.
    ggml_status layer_call(const ExpertTensor &weights, const ggml_tensor *ids, const LayerCall **out) {
        for (const LayerCall &call : calls_) {
            if (call.ids == ids && call.group == weights.group && call.engine == weights.engine) {
                *out = &call;
                return GGML_STATUS_SUCCESS;
            }
        }
        if (is_pending(ids)) { // ids computed inside this split: they must be known before experts are chosen
            const ggml_status status = run_pending();
            if (status != GGML_STATUS_SUCCESS) return status;
            ggml_graph_clear(pending_);
        }

        LayerCall &call = calls_.emplace_back();
        call.engine = weights.engine;
        call.group = weights.group;
        call.ids = ids;
        const int64_t n_routed = ids->ne[0];
        const int64_t n_tokens = ids->ne[1];
        std::vector<int32_t> experts;
        experts.reserve(static_cast<size_t>(n_routed * n_tokens));
        for (int64_t t = 0; t < n_tokens; ++t) {
            for (int64_t i = 0; i < n_routed; ++i) {
                const auto *row =
                    static_cast<const std::byte *>(ids->data) + t * static_cast<int64_t>(ids->nb[1]);
                experts.push_back(
                    *reinterpret_cast<const int32_t *>(row + i * static_cast<int64_t>(ids->nb[0])));
            }
        }
        call.slots.resize(experts.size());
        Status status = weights.engine->run(weights.group, experts, call.slots);
        if (!status.ok()) {
            fail(std::move(status));
            return GGML_STATUS_FAILED;
        }
        call.slot_ids = ggml_new_tensor_2d(context_, GGML_TYPE_I32, n_routed, n_tokens);
        call.slot_ids->data = call.slots.data();
        *out = &call;
        return GGML_STATUS_SUCCESS;
    }

    [[nodiscard]] bool is_pending(const ggml_tensor *ids) const {
        const ggml_tensor *root = ids->view_src != nullptr ? ids->view_src : ids;
        for (int i = 0; i < ggml_graph_n_nodes(pending_); ++i) {
            const ggml_tensor *node = ggml_graph_node(pending_, i);
            if (node == ids || node == root) return true;
        }
        return false;
    }

    ggml_backend_ptr cpu_;
    std::vector<std::byte> arena_;
    ggml_context *context_ = nullptr;
    ggml_cgraph *pending_ = nullptr; ///< nodes collected and not yet run
    std::deque<LayerCall> calls_;
    Engine *engine_ = nullptr; ///< of the block at hand
};

Backend &backend_of(ggml_backend_t backend) {
    return *static_cast<Backend *>(backend->context);
}

const char *backend_name(ggml_backend_t) {
    return "SPICE";
}

void backend_free(ggml_backend_t backend) {
    const std::unique_ptr<ggml_backend> handle(backend);
    const std::unique_ptr<Backend> context(&backend_of(backend));
}

ggml_status backend_compute(ggml_backend_t backend, ggml_cgraph *graph) {
    Backend &context = backend_of(backend);
    try {
        return context.compute(graph);
    } catch (const std::bad_alloc &) {
        context.fail(Status(Code::out_of_memory, "no memory for a layer call; use a smaller batch"));
        return GGML_STATUS_ALLOC_FAILED;
    } catch (const std::exception &error) { // nothing may pass through ggml's C frames
        context.fail(Status(Code::internal, error.what()));
        return GGML_STATUS_FAILED;
    }
}

ggml_guid_t backend_guid() {
    static ggml_guid guid = {'s', 'p', 'i', 'c', 'e', '-', 'm', 'o', 'e', '-', 'e', 'x', 'p', 'e', 'r', 't'};
    return &guid;
}

} // namespace

ggml_backend_t make_backend(ggml_backend_dev_t device) {
    try {
        ggml_backend_ptr cpu(ggml_backend_cpu_init());
        if (cpu == nullptr) return nullptr;
        auto context = std::make_unique<Backend>(cpu.release());
        auto backend = std::make_unique<ggml_backend>();
        backend->guid = backend_guid();
        backend->table = {};
        backend->table.name = backend_name;
        backend->table.free = backend_free;
        backend->table.compute = backend_compute;
        backend->device = device;
        backend->context = context.release(); // owned by the handle, see backend_free
        return backend.release();
    } catch (const std::bad_alloc &) {
        return nullptr;
    }
}

void set_n_threads(ggml_backend_t backend, int n_threads) {
    ggml_backend_cpu_set_n_threads(backend_of(backend).cpu(), n_threads);
}

void set_abort_callback(ggml_backend_t backend, ggml_abort_callback callback, void *data) {
    ggml_backend_cpu_set_abort_callback(backend_of(backend).cpu(), callback, data);
}

} // namespace spice

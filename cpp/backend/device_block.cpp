#include "backend/device_block.h"

#include "backend/expert_buffer.h"
#include "backend/tensor_rows.h"
#include "store/align.h"

#include <algorithm>
#include <cstring>
#include <new>
#include <unordered_map>

namespace spice {

namespace {

constexpr size_t max_nodes = 64; // of one block's device graph; blocks have about five
constexpr int max_depth = 16;
constexpr size_t n_ids = 3; // slots, experts, rows of x

const ExpertTensor *product_of(const ggml_tensor *node, const ggml_tensor *ids, int32_t group) {
    if (node->op != GGML_OP_MUL_MAT_ID || node->src[2] != ids) return nullptr;
    const ExpertTensor *weights = expert_tensor(node->src[0]);
    return weights != nullptr && weights->group == group ? weights : nullptr;
}

/// The weights are all of each expert's part, not a stretch of it.
bool whole(const ggml_tensor *w, const ExpertPart &info) {
    return w->view_offs == 0 && w->ne[0] == info.n_in && w->ne[1] == info.n_out && w->ne[2] == info.n_expert;
}

/// Elementwise on rows: the same for any set of rows.
bool is_elementwise(const ggml_tensor *node) {
    switch (node->op) {
    case GGML_OP_GLU:
    case GGML_OP_UNARY:
    case GGML_OP_SQR:
    case GGML_OP_SCALE:
    case GGML_OP_CLAMP:
    case GGML_OP_MUL:
        return true;
    default:
        return false;
    }
}

/// A view of some columns of every row.
bool is_column_view(const ggml_tensor *node) {
    const ggml_tensor *source = node->src[0];
    return node->op == GGML_OP_VIEW && source != nullptr && node->ne[1] == source->ne[1] &&
           node->ne[2] == source->ne[2] && node->nb[1] == source->nb[1] && node->nb[2] == source->nb[2] &&
           node->view_offs >= source->view_offs && node->view_offs - source->view_offs < source->nb[1];
}

/// A weight in host memory that nothing computes: [n, n_expert] or [n_expert], as floats.
bool is_host_weight(const ggml_tensor *node) {
    return node->op == GGML_OP_NONE && node->type == GGML_TYPE_F32 && node->buffer != nullptr &&
           ggml_backend_buffer_is_host(node->buffer) && ggml_is_contiguous(node);
}

/// The bias of each expert that the node adds, or nullptr.
const ggml_tensor *bias_of(const ggml_tensor *node, const BlockShape &block) {
    if (node->op != GGML_OP_ADD_ID || node->src[2] != block.ids || !is_host_weight(node->src[1]))
        return nullptr;
    return node->src[1]->ne[0] == node->ne[0] ? node->src[1] : nullptr;
}

/// The scale of each expert that the node multiplies by, GET_ROWS(REPEAT(RESHAPE(scale)), ids), or nullptr.
const ggml_tensor *scale_of(const ggml_tensor *node, const BlockShape &block) {
    if (node->op != GGML_OP_MUL) return nullptr;
    const ggml_tensor *chosen = node->src[1];
    if (chosen->op != GGML_OP_GET_ROWS || chosen->src[1] != block.ids || chosen->ne[0] != 1) return nullptr;
    const ggml_tensor *repeated = chosen->src[0];
    if (repeated->op != GGML_OP_REPEAT || repeated->src[0]->op != GGML_OP_RESHAPE) return nullptr;
    const ggml_tensor *scale = repeated->src[0]->src[0];
    if (!is_host_weight(scale) || ggml_n_dims(scale) != 1 || scale->ne[0] != repeated->ne[1]) return nullptr;
    return repeated->ne[0] == 1 ? scale : nullptr;
}

/// Every leaf of the expression is one of the products, or goes by expert.
bool from_products(const ggml_tensor *node, BlockShape &block, int depth) {
    if (std::ranges::find(block.products, node) != block.products.end()) return true;
    if (depth > max_depth || node->type != GGML_TYPE_F32) return false;
    if (is_column_view(node)) return from_products(node->src[0], block, depth + 1);
    if (bias_of(node, block) != nullptr || scale_of(node, block) != nullptr) {
        block.by_expert = true;
        return from_products(node->src[0], block, depth + 1);
    }
    if (!is_elementwise(node) || node->src[0] == nullptr) return false;
    for (const ggml_tensor *source : node->src) {
        if (source == nullptr) continue;
        // Rows are renamed one by one: both operands must have the same ones.
        if (source->ne[1] != node->ne[1] || source->ne[2] != node->ne[2]) return false;
        if (!from_products(source, block, depth + 1)) return false;
    }
    return true;
}

/// Makes the nodes of one block on the device, operands first.
class Emitter {
  public:
    Emitter(ggml_context *context, const BlockShape &block, DeviceTier &tier, ggml_tensor *x,
            ggml_tensor *slot_ids, ggml_tensor *expert_ids)
        : context_(context), block_(block), tier_(tier), x_(x), slot_ids_(slot_ids), expert_ids_(expert_ids) {
    }

    ggml_tensor *emit(const ggml_tensor *node) {
        const auto [it, fresh] = made_.try_emplace(node, nullptr);
        if (!fresh) return it->second;
        ggml_tensor *twin = make(node);
        made_[node] = twin;
        return twin;
    }
    [[nodiscard]] const Status &status() const { return status_; } ///< of copying weights to the device

  private:
    ggml_tensor *make(const ggml_tensor *node) {
        const bool product =
            node == block_.down || std::ranges::find(block_.products, node) != block_.products.end();
        if (product) {
            ggml_tensor *input = node == block_.down ? emit(node->src[1]) : x_;
            ggml_tensor *twin =
                ggml_mul_mat_id(context_, tier_.slot_tensor(*expert_tensor(node->src[0])), input, slot_ids_);
            std::memcpy(twin->op_params, node->op_params, sizeof(node->op_params)); // its precision
            return twin;
        }
        ggml_tensor *source = emit(node->src[0]);
        if (node->op == GGML_OP_VIEW) {
            return ggml_view_3d(context_, source, node->ne[0], source->ne[1], source->ne[2], source->nb[1],
                                source->nb[2], node->view_offs - node->src[0]->view_offs);
        }
        if (const ggml_tensor *bias = bias_of(node, block_); bias != nullptr) {
            ggml_tensor *there = by_expert(bias, bias->ne[0]);
            return there == nullptr ? source : ggml_add_id(context_, source, there, expert_ids_);
        }
        if (const ggml_tensor *scale = scale_of(node, block_); scale != nullptr) {
            ggml_tensor *there = by_expert(scale, 1);
            if (there == nullptr) return source;
            const int64_t n = ggml_nelements(expert_ids_);
            ggml_tensor *chosen = ggml_get_rows(context_, there, ggml_reshape_1d(context_, expert_ids_, n));
            return ggml_mul(context_, source,
                            ggml_reshape_3d(context_, chosen, 1, source->ne[1], source->ne[2]));
        }
        ggml_tensor *twin =
            ggml_new_tensor_3d(context_, node->type, node->ne[0], source->ne[1], source->ne[2]);
        twin->op = node->op;
        std::memcpy(twin->op_params, node->op_params, sizeof(node->op_params));
        twin->src[0] = source;
        for (size_t s = 1; s < GGML_MAX_SRC; ++s) {
            if (node->src[s] != nullptr) twin->src[s] = emit(node->src[s]);
        }
        return twin;
    }

    ggml_tensor *by_expert(const ggml_tensor *weight, int64_t n) {
        Result<ggml_tensor *> there = tier_.on_device(*weight, n);
        if (there.ok()) return there.value();
        status_ = there.status();
        return nullptr;
    }

    ggml_context *context_;
    const BlockShape &block_;
    DeviceTier &tier_;
    ggml_tensor *x_;
    ggml_tensor *slot_ids_;
    ggml_tensor *expert_ids_;
    Status status_;
    std::unordered_map<const ggml_tensor *, ggml_tensor *> made_;
};

} // namespace

std::optional<BlockShape> BlockShape::recognise(ggml_cgraph *graph, const ggml_tensor *ids, int32_t group) {
    BlockShape block;
    block.ids = ids;
    for (int n = 0; n < ggml_graph_n_nodes(graph); ++n) {
        const ggml_tensor *node = ggml_graph_node(graph, n);
        const ExpertTensor *weights = product_of(node, ids, group);
        if (weights == nullptr) continue;
        if (!whole(node->src[0], *weights->info) || node->src[1]->type != GGML_TYPE_F32) return std::nullopt;
        if (weights->info->projection == Projection::down) {
            if (block.down != nullptr) return std::nullopt;
            block.down = node;
        } else {
            if (block.x != nullptr && block.x != node->src[1]) return std::nullopt;
            block.x = node->src[1];
            block.products.push_back(node);
        }
    }
    if (block.down == nullptr || block.x == nullptr || block.x->nb[0] != sizeof(float)) return std::nullopt;
    if (!from_products(block.down->src[1], block, 0)) return std::nullopt;
    return block;
}

Status DeviceWork::place(ggml_context *context) {
    const ggml_backend_dev_t device = ggml_backend_get_device(stream_);
    const ggml_backend_buffer_type_t type = ggml_backend_dev_buffer_type(device);
    const size_t alignment = ggml_backend_buft_get_alignment(type);
    size_t total = 0;
    const auto needs_room = [](const ggml_tensor *t) { return t->data == nullptr && t->view_src == nullptr; };
    for (ggml_tensor *t = ggml_get_first_tensor(context); t != nullptr;
         t = ggml_get_next_tensor(context, t)) {
        if (needs_room(t)) total += align_up(ggml_backend_buft_get_alloc_size(type, t), alignment);
    }
    if (buffer_ == nullptr || ggml_backend_buffer_get_size(buffer_.get()) < total) {
        ggml_backend_synchronize(stream_); // earlier launches use it
        buffer_.reset();
        buffer_.reset(ggml_backend_buft_alloc_buffer(type, total));
        if (buffer_ == nullptr) {
            return {Code::out_of_memory, std::string(ggml_backend_dev_name(device)) + " has no " +
                                             std::to_string(total) +
                                             " bytes for a layer call; give a smaller vram_budget or batch"};
        }
        ggml_backend_buffer_clear(buffer_.get(), 0);
    }
    auto *next = static_cast<std::byte *>(ggml_backend_buffer_get_base(buffer_.get()));
    for (ggml_tensor *t = ggml_get_first_tensor(context); t != nullptr;
         t = ggml_get_next_tensor(context, t)) {
        ggml_status status = GGML_STATUS_SUCCESS;
        if (needs_room(t)) {
            status = ggml_backend_tensor_alloc(buffer_.get(), t, next);
            next += align_up(ggml_backend_buft_get_alloc_size(type, t), alignment);
        } else if (t->view_src != nullptr && t->buffer == nullptr) {
            status = ggml_backend_view_init(t);
        }
        if (status != GGML_STATUS_SUCCESS) return {Code::out_of_memory, "the device refused a tensor"};
    }
    return {};
}

Result<ggml_cgraph *> DeviceLaunch::build(const BlockShape &block, DeviceTier &tier, int64_t n_rows,
                                          ggml_tensor *x) {
    const size_t bytes = max_nodes * ggml_tensor_overhead() + ggml_graph_overhead_custom(max_nodes, false);
    if (arena_.size() < bytes) arena_.resize(bytes);
    context_.reset(ggml_init({.mem_size = arena_.size(), .mem_buffer = arena_.data(), .no_alloc = true}));
    if (context_ == nullptr) throw std::bad_alloc();
    ggml_context *context = context_.get();
    const bool one_row = block.one_row();
    const int64_t n_in = block.x->ne[0];
    if (x == nullptr) x = ggml_new_tensor_2d(context, GGML_TYPE_F32, n_in, one_row ? 1 : n_rows);
    // One token: its experts share the row. Otherwise each (token, expert) is a token with one expert.
    const auto new_ids = [&] {
        ggml_tensor *ids =
            ggml_new_tensor_2d(context, GGML_TYPE_I32, one_row ? n_rows : 1, one_row ? 1 : n_rows);
        ggml_set_input(ids);
        return ids;
    };
    slot_ids_ = new_ids();
    expert_ids_ = block.by_expert ? new_ids() : nullptr;
    x_rows_ = nullptr;
    if (!one_row) {
        x_rows_ = ggml_new_tensor_1d(context, GGML_TYPE_I32, n_rows);
        ggml_set_input(x_rows_);
        x = ggml_get_rows(context, x, x_rows_);
    }
    x = ggml_reshape_3d(context, x, n_in, 1, one_row ? 1 : n_rows);
    Emitter emitter(context, block, tier, x, slot_ids_, expert_ids_);
    result_ = emitter.emit(block.down);
    if (!emitter.status().ok()) return emitter.status();
    ggml_set_output(result_);
    ggml_cgraph *graph = ggml_new_graph_custom(context, max_nodes, false);
    ggml_build_forward_expand(graph, result_);
    if (Status status = work_.place(context); !status.ok()) return status;
    return graph;
}

std::optional<bool> DeviceLaunch::supported(const BlockShape &block, DeviceTier &tier) {
    const Result<ggml_cgraph *> graph = build(block, tier, 1, nullptr);
    if (!graph.ok()) return std::nullopt;
    for (int n = 0; n < ggml_graph_n_nodes(graph.value()); ++n) {
        if (!ggml_backend_supports_op(stream_, ggml_graph_node(graph.value(), n))) return false;
    }
    return true;
}

size_t DeviceLaunch::staging_bytes(const BlockShape &block, size_t n_rows) {
    const size_t row = static_cast<size_t>(block.down->ne[0]) * sizeof(float);
    return n_ids * align_up(n_rows * sizeof(int32_t), staging_unit) + align_up(n_rows * row, staging_unit);
}

Status DeviceLaunch::launch(const BlockShape &block, DeviceTier &tier, ggml_tensor *x,
                            std::span<const DeviceRows> experts, std::byte *staging) {
    rows_.clear();
    for (const DeviceRows &it : experts) rows_.insert(rows_.end(), it.rows.begin(), it.rows.end());
    const auto graph = build(block, tier, static_cast<int64_t>(rows_.size()), x);
    if (!graph.ok()) return graph.status();

    const auto send = [&](ggml_tensor *ids, const auto &fill) {
        if (ids == nullptr) return;
        fill(reinterpret_cast<int32_t *>(staging));
        ggml_backend_tensor_set_async(stream_, ids, staging, 0, ggml_nbytes(ids));
        staging += align_up(ggml_nbytes(ids), staging_unit);
    };
    send(slot_ids_, [&](int32_t *to) {
        for (const DeviceRows &it : experts) to = std::fill_n(to, it.rows.size(), it.expert.slot);
    });
    send(expert_ids_, [&](int32_t *to) {
        for (const DeviceRows &it : experts) to = std::fill_n(to, it.rows.size(), it.expert.expert);
    });
    send(x_rows_, [&](int32_t *to) {
        for (const RoutedCall::Row &row : rows_) {
            *to++ =
                row.t * static_cast<int32_t>(block.x->ne[1]) + row.i % static_cast<int32_t>(block.x->ne[1]);
        }
    });
    if (ggml_backend_graph_compute_async(stream_, graph.value()) != GGML_STATUS_SUCCESS) {
        return {Code::device,
                std::string(ggml_backend_name(stream_)) + " failed to compute experts; try again"};
    }
    ggml_backend_tensor_get_async(stream_, result_, staging, 0, ggml_nbytes(result_));
    results_ = staging;
    return {};
}

void DeviceLaunch::results_to(const ggml_tensor *down, RowCopies &to) const {
    const size_t row_bytes = static_cast<size_t>(down->ne[0]) * sizeof(float);
    for (size_t r = 0; r < rows_.size(); ++r) {
        to.copies.push_back(
            {results_ + r * row_bytes, row_at<std::byte>(down, rows_[r].i, rows_[r].t), row_bytes});
    }
}

} // namespace spice

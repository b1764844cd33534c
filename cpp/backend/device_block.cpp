#include "backend/device_block.h"

#include "backend/expert_buffer.h"

#include <algorithm>
#include <cstring>
#include <new>
#include <unordered_map>

namespace spice {

namespace {

constexpr size_t max_nodes = 64; // of one block's device graph; blocks have about five
constexpr int max_depth = 16;

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

/// Every leaf of the expression is one of the products.
bool from_products(const ggml_tensor *node, const std::vector<const ggml_tensor *> &products, int depth) {
    if (std::ranges::find(products, node) != products.end()) return true;
    if (depth > max_depth || node->type != GGML_TYPE_F32) return false;
    if (is_column_view(node)) return from_products(node->src[0], products, depth + 1);
    if (!is_elementwise(node) || node->src[0] == nullptr) return false;
    for (const ggml_tensor *source : node->src) {
        if (source == nullptr) continue;
        // Rows are renamed one by one: both operands must have the same ones.
        if (source->ne[1] != node->ne[1] || source->ne[2] != node->ne[2]) return false;
        if (!from_products(source, products, depth + 1)) return false;
    }
    return true;
}

/// Makes the nodes of one block on the device, operands first.
class Emitter {
  public:
    Emitter(ggml_context *context, const BlockShape &block, const DeviceTier &tier, ggml_tensor *x,
            ggml_tensor *ids)
        : context_(context), block_(block), tier_(tier), x_(x), ids_(ids) {}

    ggml_tensor *emit(const ggml_tensor *node) {
        const auto [it, fresh] = made_.try_emplace(node, nullptr);
        if (!fresh) return it->second;
        ggml_tensor *twin = make(node);
        made_[node] = twin;
        return twin;
    }

  private:
    ggml_tensor *make(const ggml_tensor *node) {
        const bool product =
            node == block_.down || std::ranges::find(block_.products, node) != block_.products.end();
        if (product) {
            ggml_tensor *input = node == block_.down ? emit(node->src[1]) : x_;
            ggml_tensor *twin =
                ggml_mul_mat_id(context_, tier_.slot_tensor(*expert_tensor(node->src[0])), input, ids_);
            std::memcpy(twin->op_params, node->op_params, sizeof(node->op_params)); // its precision
            return twin;
        }
        ggml_tensor *source = emit(node->src[0]);
        if (node->op == GGML_OP_VIEW) {
            return ggml_view_3d(context_, source, node->ne[0], source->ne[1], source->ne[2], source->nb[1],
                                source->nb[2], node->view_offs - node->src[0]->view_offs);
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

    ggml_context *context_;
    const BlockShape &block_;
    const DeviceTier &tier_;
    ggml_tensor *x_;
    ggml_tensor *ids_;
    std::unordered_map<const ggml_tensor *, ggml_tensor *> made_;
};

size_t align_up(size_t n, size_t alignment) {
    return (n + alignment - 1) / alignment * alignment;
}

const std::byte *row_of(const ggml_tensor *tensor, const RoutedCall::Row &row) {
    return static_cast<const std::byte *>(tensor->data) +
           row.i % tensor->ne[1] * static_cast<int64_t>(tensor->nb[1]) +
           row.t * static_cast<int64_t>(tensor->nb[2]);
}

} // namespace

std::optional<BlockShape> BlockShape::recognise(ggml_cgraph *graph, const ggml_tensor *ids, int32_t group) {
    BlockShape block;
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
    if (!from_products(block.down->src[1], block.products, 0)) return std::nullopt;
    return block;
}

ggml_cgraph *DeviceLaunch::build(const BlockShape &block, const DeviceTier &tier, int64_t n_rows,
                                 bool one_x) {
    const size_t bytes = max_nodes * ggml_tensor_overhead() + ggml_graph_overhead_custom(max_nodes, false);
    if (arena_.size() < bytes) arena_.resize(bytes);
    context_.reset(ggml_init({.mem_size = arena_.size(), .mem_buffer = arena_.data(), .no_alloc = true}));
    if (context_ == nullptr) throw std::bad_alloc();
    const int64_t n_in = block.x->ne[0];
    // One token: its experts share the row. Otherwise each (token, expert) is a token with one expert.
    x_ = ggml_new_tensor_3d(context_.get(), GGML_TYPE_F32, n_in, 1, one_x ? 1 : n_rows);
    ids_ = ggml_new_tensor_2d(context_.get(), GGML_TYPE_I32, one_x ? n_rows : 1, one_x ? 1 : n_rows);
    ggml_set_input(x_);
    ggml_set_input(ids_);
    result_ = Emitter(context_.get(), block, tier, x_, ids_).emit(block.down);
    ggml_set_output(result_);
    ggml_cgraph *graph = ggml_new_graph_custom(context_.get(), max_nodes, false);
    ggml_build_forward_expand(graph, result_);
    return graph;
}

Status DeviceLaunch::place() {
    const ggml_backend_dev_t device = ggml_backend_get_device(stream_);
    const ggml_backend_buffer_type_t type = ggml_backend_dev_buffer_type(device);
    const size_t alignment = ggml_backend_buft_get_alignment(type);
    size_t total = 0;
    const auto needs_room = [](const ggml_tensor *t) { return t->data == nullptr && t->view_src == nullptr; };
    for (ggml_tensor *t = ggml_get_first_tensor(context_.get()); t != nullptr;
         t = ggml_get_next_tensor(context_.get(), t)) {
        if (needs_room(t)) total += align_up(ggml_backend_buft_get_alloc_size(type, t), alignment);
    }
    if (work_ == nullptr || ggml_backend_buffer_get_size(work_.get()) < total) {
        work_.reset();
        work_.reset(ggml_backend_buft_alloc_buffer(type, total));
        if (work_ == nullptr) {
            return {Code::out_of_memory, std::string(ggml_backend_dev_name(device)) + " has no " +
                                             std::to_string(total) +
                                             " bytes for a layer call; give a smaller vram_budget or batch"};
        }
        ggml_backend_buffer_clear(work_.get(), 0);
    }
    auto *next = static_cast<std::byte *>(ggml_backend_buffer_get_base(work_.get()));
    for (ggml_tensor *t = ggml_get_first_tensor(context_.get()); t != nullptr;
         t = ggml_get_next_tensor(context_.get(), t)) {
        ggml_status status = GGML_STATUS_SUCCESS;
        if (needs_room(t)) {
            status = ggml_backend_tensor_alloc(work_.get(), t, next);
            next += align_up(ggml_backend_buft_get_alloc_size(type, t), alignment);
        } else if (t->view_src != nullptr && t->buffer == nullptr) {
            status = ggml_backend_view_init(t);
        }
        if (status != GGML_STATUS_SUCCESS) return {Code::out_of_memory, "the device refused a tensor"};
    }
    return {};
}

std::optional<bool> DeviceLaunch::supported(const BlockShape &block, const DeviceTier &tier) {
    ggml_cgraph *graph = build(block, tier, 1, true);
    if (!place().ok()) return std::nullopt;
    for (int n = 0; n < ggml_graph_n_nodes(graph); ++n) {
        if (!ggml_backend_supports_op(stream_, ggml_graph_node(graph, n))) return false;
    }
    return true;
}

Status DeviceLaunch::launch(const BlockShape &block, const DeviceTier &tier,
                            std::span<const DeviceRows> experts) {
    wait();
    rows_.clear();
    for (const DeviceRows &it : experts) rows_.insert(rows_.end(), it.rows.begin(), it.rows.end());
    down_ = block.down;
    const auto n_rows = static_cast<int64_t>(rows_.size());
    const bool one_x = block.x->ne[1] == 1 && block.x->ne[2] == 1;
    ggml_cgraph *graph = build(block, tier, n_rows, one_x);
    if (Status status = place(); !status.ok()) return status;

    constexpr size_t unit = 64;
    const size_t x_bytes = align_up(ggml_nbytes(x_), unit);
    const size_t ids_bytes = align_up(ggml_nbytes(ids_), unit);
    const size_t total = x_bytes + ids_bytes + ggml_nbytes(result_);
    if (staging_ == nullptr || ggml_backend_buffer_get_size(staging_.get()) < total) {
        const ggml_backend_dev_t device = ggml_backend_get_device(stream_);
        ggml_backend_buffer_type_t type = ggml_backend_dev_host_buffer_type(device);
        if (type == nullptr) type = ggml_backend_cpu_buffer_type();
        staging_.reset();
        staging_.reset(ggml_backend_buft_alloc_buffer(type, total));
        if (staging_ == nullptr) return {Code::out_of_memory, "no host memory for a layer call's results"};
    }
    auto *in = static_cast<std::byte *>(ggml_backend_buffer_get_base(staging_.get()));
    auto *ids = reinterpret_cast<int32_t *>(in + x_bytes);
    std::byte *out = in + x_bytes + ids_bytes;
    results_ = out;
    const size_t row_bytes = x_->nb[1];
    for (int64_t r = 0; r < (one_x ? 1 : n_rows); ++r) {
        std::memcpy(in + static_cast<size_t>(r) * row_bytes, row_of(block.x, rows_[static_cast<size_t>(r)]),
                    row_bytes);
    }
    for (const DeviceRows &it : experts) ids = std::fill_n(ids, it.rows.size(), it.expert.slot);

    running_ = true;
    ggml_backend_tensor_set_async(stream_, x_, in, 0, ggml_nbytes(x_));
    ggml_backend_tensor_set_async(stream_, ids_, in + x_bytes, 0, ggml_nbytes(ids_));
    if (ggml_backend_graph_compute_async(stream_, graph) != GGML_STATUS_SUCCESS) {
        return {Code::device,
                std::string(ggml_backend_name(stream_)) + " failed to compute experts; try again"};
    }
    ggml_backend_tensor_get_async(stream_, result_, out, 0, ggml_nbytes(result_));
    return {};
}

void DeviceLaunch::wait() {
    if (std::exchange(running_, false)) ggml_backend_synchronize(stream_);
}

void DeviceLaunch::scatter() const {
    const size_t row_bytes = static_cast<size_t>(down_->ne[0]) * sizeof(float);
    for (size_t r = 0; r < rows_.size(); ++r) {
        auto *to = static_cast<std::byte *>(down_->data) + rows_[r].i * static_cast<int64_t>(down_->nb[1]) +
                   rows_[r].t * static_cast<int64_t>(down_->nb[2]);
        std::memcpy(to, results_ + r * row_bytes, row_bytes);
    }
}

} // namespace spice

#include "backend/substitution.h"

#include "backend/expert_buffer.h"
#include "backend/tensor_rows.h"
#include "runtime/engine.h"

#include <algorithm>

namespace spice {

namespace {

constexpr int k_max_chain = 8; // from the down product to its gate weights: bias, scale, adapter

bool derives_from(const ggml_tensor *node, const ggml_tensor *product) {
    for (int depth = 0; node != nullptr && depth < k_max_chain; ++depth, node = node->src[0]) {
        if (node == product) return true;
    }
    return false;
}

bool is_column(const ggml_tensor *tensor, const ggml_tensor *ids) {
    return tensor != nullptr && tensor->type == GGML_TYPE_F32 && tensor->ne[0] == 1 &&
           tensor->ne[1] == ids->ne[0] && tensor->ne[2] == ids->ne[1] && tensor->ne[3] == 1;
}

bool contains(std::span<ggml_tensor *const> nodes, const ggml_tensor *tensor) {
    const ggml_tensor *root = tensor->view_src != nullptr ? tensor->view_src : tensor;
    return std::ranges::find(nodes, root) != nodes.end() || std::ranges::find(nodes, tensor) != nodes.end();
}

} // namespace

std::optional<SubstitutionSite> SubstitutionSite::find(std::span<ggml_tensor *const> nodes, size_t turn,
                                                       int32_t group, const LoreShape *shape) {
    const ggml_tensor *ids = nodes[turn]->src[2];
    SubstitutionSite site;
    site.x = nodes[turn]->src[1];
    for (ggml_tensor *node : nodes) {
        if (site.down != nullptr && node->op == GGML_OP_MUL && is_column(node->src[1], ids) &&
            derives_from(node->src[0], site.down) && !contains(nodes, node->src[1])) {
            site.gates = node->src[1];
        }
        if (node->op != GGML_OP_MUL_MAT_ID || node->src[2] != ids) continue;
        const ExpertTensor *weights = expert_tensor(node->src[0]);
        if (weights == nullptr || weights->group != group) continue;
        if (weights->info->projection != Projection::down) {
            if (node->src[1] != site.x) return std::nullopt;
        } else if (site.down == nullptr && node->src[0]->ne[1] == weights->info->n_out) {
            site.down = node;
        } else {
            return std::nullopt;
        }
    }
    // One row for all experts of a token: scaled for each, a stand-in would not know what it reads.
    const bool whole = site.down != nullptr && site.gates != nullptr && site.x->ne[1] == 1 &&
                       site.x->ne[3] == 1 && site.x->nb[0] == sizeof(float) &&
                       site.down->nb[0] == sizeof(float);
    if (!whole) return std::nullopt;
    if (shape != nullptr && (site.x->ne[0] != shape->n_in || site.down->ne[0] != shape->n_out)) {
        return std::nullopt;
    }
    return site;
}

std::vector<float> SubstitutionSite::gate_weights() const {
    std::vector<float> out;
    out.reserve(static_cast<size_t>(gates->ne[1] * gates->ne[2]));
    for (int64_t t = 0; t < gates->ne[2]; ++t) {
        for (int64_t i = 0; i < gates->ne[1]; ++i) out.push_back(*routed_row<float>(gates, i, t));
    }
    return out;
}

void Substituted::set_up(const SubstitutionSite &site, compute::SurrogateKind kind,
                         const SurrogateLayer *layer) {
    down = site.down;
    if (layer != nullptr) job.matrices = layer->matrices;
    job.matrices.n_out = site.down->ne[0];
    job.kind = kind;
    job.kernels = &compute::surrogate_kernels().front();
    const auto top_k = static_cast<size_t>(site.gates->ne[1]);
    const ggml_tensor *ids = site.down->src[2];
    for (int64_t t = 0; t < ids->ne[1]; ++t) {
        compute::SurrogateRow row = {.h = routed_row<float>(site.x, 0, t),
                                     .first = static_cast<uint32_t>(job.pairs.size()),
                                     .count = 0};
        for (int64_t i = 0; i < ids->ne[0]; ++i) {
            if (taken[static_cast<size_t>(t) * top_k + static_cast<size_t>(i)] == 0) continue;
            job.pairs.push_back({id_at(ids, i, t), routed_row<float>(site.down, i, t)});
            row.count += 1;
        }
        if (row.count > 0) job.rows.push_back(row);
    }
    z.resize(job.z_floats());
    job.z = z.data();
}

ZeroRows::ZeroRows(const ggml_tensor *product, std::span<const uint8_t> taken) : n(product->ne[0]) {
    const auto top_k = static_cast<size_t>(product->ne[1]);
    for (size_t p = 0; p < taken.size(); ++p) {
        if (taken[p] == 0) continue;
        rows.push_back(
            routed_row<float>(product, static_cast<int64_t>(p % top_k), static_cast<int64_t>(p / top_k)));
    }
}

void ZeroRows::run(ggml_tensor *, int thread, int n_threads, void *job) {
    const auto &self = *static_cast<const ZeroRows *>(job);
    for (size_t r = static_cast<size_t>(thread); r < self.rows.size(); r += static_cast<size_t>(n_threads)) {
        std::fill_n(self.rows[r], self.n, 0.0F);
    }
}

} // namespace spice

#include "backend/early_nodes.h"

#include "backend/shared_expert.h"

#include <unordered_set>

namespace spice {

namespace {

bool overlap(const ggml_tensor *a, const ggml_tensor *b) {
    const auto *a0 = static_cast<const std::byte *>(a->data);
    const auto *b0 = static_cast<const std::byte *>(b->data);
    return a0 < b0 + ggml_nbytes(b) && b0 < a0 + ggml_nbytes(a);
}

} // namespace

ggml_tensor *EarlyNodes::find(const ggml_tensor *node) const {
    const auto it = twins_.find(node);
    return it == twins_.end() ? nullptr : it->second;
}

std::vector<ggml_tensor *> EarlyNodes::take(ggml_context *context, std::span<ggml_tensor *const> nodes,
                                            std::span<ggml_tensor *const> split) {
    const std::unordered_set<const ggml_tensor *> made_here(split.begin(), split.end());
    std::vector<ggml_tensor *> taken;
    for (ggml_tensor *node : nodes) {
        if (node->view_src != nullptr || !ggml_is_contiguous(node) || !is_shared_expert_node(node)) continue;
        bool ready = true; // everything it reads is there, or is early itself
        for (const ggml_tensor *source : node->src) {
            if (source == nullptr || find(source) != nullptr) continue;
            const ggml_tensor *root = source->view_src != nullptr ? source->view_src : source;
            ready = ready && !made_here.contains(root);
        }
        if (!ready) continue;
        ggml_tensor *twin = ggml_new_tensor(context, node->type, GGML_MAX_DIMS, node->ne);
        *twin = *node;
        twin->data = nullptr;
        for (ggml_tensor *&source : twin->src) {
            if (source == nullptr) continue;
            if (ggml_tensor *early = find(source); early != nullptr) source = early;
        }
        twins_.emplace(node, twin);
        taken.push_back(twin);
    }
    return taken;
}

std::vector<EarlyNodes::Copy> EarlyNodes::copies(std::span<ggml_tensor *const> nodes) const {
    std::vector<Copy> copies;
    for (size_t i = 0; i < nodes.size(); ++i) {
        bool lost = false;
        for (size_t k = i + 1; k < nodes.size(); ++k) lost = lost || overlap(nodes[i], nodes[k]);
        if (!lost) copies.push_back({find(nodes[i]), nodes[i]});
    }
    return copies;
}

} // namespace spice

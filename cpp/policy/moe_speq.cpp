#include "policy/moe_speq.h"

#include <algorithm>
#include <cmath>

namespace spice::policy::speq {

LookaheadBuffer::LookaheadBuffer(const PoolShape &pool)
    : n_experts_(static_cast<size_t>(pool.n_experts)), n_groups_(pool.n_groups),
      counts_(static_cast<size_t>(pool.n_groups) * n_experts_, 0) {}

void LookaheadBuffer::add(std::span<const int32_t> ids, int32_t k) {
    for (size_t i = 0; i < ids.size(); ++i) {
        const size_t group = i / static_cast<size_t>(k);
        ++counts_[group * n_experts_ + static_cast<size_t>(ids[i])];
    }
    ++tokens_;
}

void LookaheadBuffer::clear() {
    std::fill(counts_.begin(), counts_.end(), 0);
    first_ = 0;
    tokens_ = 0;
}

void LookaheadBuffer::missing(int32_t least, bool by_layer, Evictable present,
                              std::vector<SlabId> &out) const {
    const size_t begin = out.size();
    for (int32_t group = first_; group < n_groups_; ++group) {
        for (int32_t e = 0; e < static_cast<int32_t>(n_experts_); ++e) {
            const SlabId id{group, e};
            if (count(id) >= least && !present(id)) out.push_back(id);
        }
    }
    std::stable_sort(out.begin() + static_cast<std::ptrdiff_t>(begin), out.end(), [&](SlabId a, SlabId b) {
        if (by_layer && a.group != b.group) return a.group < b.group;
        return count(a) > count(b);
    });
}

double new_slabs(const Cycle &c, int32_t k) {
    const double share = static_cast<double>(c.top_k) / static_cast<double>(c.n_experts);
    const double unique = c.n_experts * (1.0 - std::pow(1.0 - share, static_cast<double>(k)));
    return c.miss_rate * unique * c.n_groups;
}

double throughput(const Cycle &c, int32_t k) {
    const double accepted = c.acceptance >= 1.0
                                ? static_cast<double>(k)
                                : c.acceptance * (1.0 - std::pow(c.acceptance, k)) / (1.0 - c.acceptance);
    const double draft = c.draft_token * k;
    // Loads that fit beside the draft are hidden, the others follow it.
    const double loads = new_slabs(c, k) * c.transfer;
    const double after = std::max(loads - draft, 0.0);
    return (accepted + 1.0) / (draft + after + c.verify_fixed + c.verify_row * (k + 1));
}

int32_t best_length(const Cycle &c, int32_t most) {
    int32_t best = 1;
    for (int32_t k = 2; k <= most; ++k) {
        if (throughput(c, k) > throughput(c, best)) best = k;
    }
    return best;
}

} // namespace spice::policy::speq

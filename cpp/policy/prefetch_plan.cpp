#include "policy/prefetch_plan.h"

#include <algorithm>
#include <cassert>
#include <cmath>
#include <tuple>

namespace spice::policy {

PrefetchPlanner::PrefetchPlanner(int32_t n_experts, int32_t max_horizon, const PlanOptions &options)
    : options_(options), seconds_(static_cast<size_t>(max_horizon) + 1),
      bytes_(static_cast<size_t>(max_horizon) + 1) {
    candidates_.reserve(static_cast<size_t>(n_experts) * static_cast<size_t>(max_horizon));
    plan_.reserve(static_cast<size_t>(std::max(options.max_queue, 0)));
}

void PrefetchPlanner::add(int32_t group, int32_t horizon, double seconds, std::span<const float> chances,
                          Present present) {
    assert(horizon >= 1 && static_cast<size_t>(horizon) < seconds_.size());
    seconds_[static_cast<size_t>(horizon)] = seconds;
    for (size_t e = 0; e < chances.size(); ++e) {
        if (!(chances[e] >= options_.p_min)) continue;
        const SlabId id{group, static_cast<int32_t>(e)};
        if (present(id)) continue;
        candidates_.push_back({id, horizon, chances[e], 0.0F});
    }
}

/// Whether every load still ends in time when `bytes` more are taken for `horizon`: served by deadline, it
/// delays its own layer and all later ones.
bool PrefetchPlanner::fits(double bytes, size_t horizon, double bytes_per_second) const {
    double total = queued_ + bytes;
    for (size_t h = 1; h < bytes_.size(); ++h) {
        total += bytes_[h];
        const bool concerned = h == horizon || (h > horizon && bytes_[h] > 0.0);
        if (concerned && total > options_.share * seconds_[h] * bytes_per_second) return false;
    }
    return true;
}

std::span<const PrefetchLoad> PrefetchPlanner::plan(const LinkState &link, SlabBytes slab_bytes,
                                                    VictimValue victim_value) {
    plan_.clear();
    const int32_t room = options_.max_queue - link.n_queued;
    if (!(link.bytes_per_second > 0.0) || room <= 0 || candidates_.empty()) return plan_;
    std::fill(bytes_.begin(), bytes_.end(), 0.0);
    queued_ = link.queued_bytes;
    for (PrefetchLoad &candidate : candidates_) {
        const double seconds = slab_bytes(candidate.id.group) / link.bytes_per_second;
        candidate.priority = candidate.chance * static_cast<float>(seconds);
    }
    std::sort(candidates_.begin(), candidates_.end(), [](const PrefetchLoad &a, const PrefetchLoad &b) {
        return std::tuple(-a.priority, a.horizon, a.id.expert) <
               std::tuple(-b.priority, b.horizon, b.id.expert);
    });
    float value = victim_value(0);
    for (PrefetchLoad candidate : candidates_) {
        if (static_cast<int32_t>(plan_.size()) >= room) break;
        if (candidate.chance <= value) continue;
        const double bytes = slab_bytes(candidate.id.group);
        const auto h = static_cast<size_t>(candidate.horizon);
        if (!fits(bytes, h, link.bytes_per_second)) continue;
        bytes_[h] += bytes;
        candidate.priority = (candidate.chance - value) * static_cast<float>(bytes / link.bytes_per_second);
        plan_.push_back(candidate);
        value = victim_value(static_cast<int32_t>(plan_.size()));
    }
    std::sort(plan_.begin(), plan_.end(), [](const PrefetchLoad &a, const PrefetchLoad &b) {
        return std::tuple(a.horizon, -a.priority, a.id.expert) <
               std::tuple(b.horizon, -b.priority, b.id.expert);
    });
    return plan_;
}

} // namespace spice::policy

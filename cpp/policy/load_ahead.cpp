#include "policy/load_ahead.h"

namespace spice::policy {

void LoadAhead::add(int32_t group, int32_t horizon, double seconds, std::span<const float> chances,
                    PrefetchPlanner::Present present) {
    planner_.add(group, horizon, seconds, chances, present);
    for (size_t e = 0; e < chances.size(); ++e) {
        if (chances[e] >= options_.p_min) needed_[flat({group, static_cast<int32_t>(e)})] = call_;
    }
}

std::span<const PrefetchLoad> LoadAhead::plan(const LinkState &link, PrefetchPlanner::SlabBytes slab_bytes,
                                              int32_t n_free) {
    return planner_.plan(link, slab_bytes, [&](int32_t n) { return n < n_free ? 0.0F : victim_value_; });
}

} // namespace spice::policy

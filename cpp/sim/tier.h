// One pool of a simulation: when each slab is there, and who may leave.
//
// Who calls: the Simulator. Which slab leaves is the owner's choice; this keeps the times and the pins.
#pragma once

#include "policy/eviction.h"

#include <cassert>
#include <cstdint>
#include <limits>
#include <optional>
#include <utility>
#include <vector>

namespace spice::sim {

/// Why a slab that no call has used yet came: not ahead of need, planned on predictions, or a fill.
enum class Ahead : uint8_t { no, planned, fill };

class Tier {
  public:
    static constexpr double absent = std::numeric_limits<double>::infinity();
    static constexpr double interrupted = 1e300; ///< has a slot, its load goes on later

    Tier(int32_t n_groups, int32_t n_experts)
        : n_experts_(static_cast<size_t>(n_experts)),
          slabs_(static_cast<size_t>(n_groups) * static_cast<size_t>(n_experts)) {}

    [[nodiscard]] bool present(policy::SlabId id) const { return at(id).arrives != absent; }
    [[nodiscard]] bool ready(policy::SlabId id, double now) const { return at(id).arrives <= now; }
    [[nodiscard]] double arrives(policy::SlabId id) const { return at(id).arrives; }
    [[nodiscard]] bool evictable(policy::SlabId id, double now) const {
        return at(id).arrives <= now && !at(id).pinned;
    }
    [[nodiscard]] bool pinned(policy::SlabId id) const { return at(id).pinned; }

    void load(policy::SlabId id, double arrives, Ahead ahead) {
        assert(!present(id));
        at(id) = {arrives, false, ahead};
        ++n_present_;
    }
    void arrives_at(policy::SlabId id, double time) { at(id).arrives = time; }
    /// Returns how it was loaded ahead, if it was never used.
    Ahead evict(policy::SlabId id) {
        assert(present(id));
        const Ahead wasted = at(id).ahead;
        at(id) = {};
        --n_present_;
        return wasted;
    }
    void pin(policy::SlabId id, bool pinned) { at(id).pinned = pinned; }
    /// Returns how it was loaded ahead, if this is its first use.
    Ahead use(policy::SlabId id) { return std::exchange(at(id).ahead, Ahead::no); }
    [[nodiscard]] int32_t n_present() const { return n_present_; }

    /// The slab that arrives first among those that are present and not pinned; rare, so it searches.
    /// `group`: of that group only, unless it is below 0.
    [[nodiscard]] std::optional<policy::SlabId> first_loading(int32_t group) const {
        std::optional<policy::SlabId> first;
        for (size_t i = 0; i < slabs_.size(); ++i) {
            const policy::SlabId id{static_cast<int32_t>(i / n_experts_),
                                    static_cast<int32_t>(i % n_experts_)};
            if (slabs_[i].arrives >= interrupted || slabs_[i].pinned || (group >= 0 && id.group != group)) {
                continue;
            }
            if (!first || slabs_[i].arrives < at(*first).arrives) first = id;
        }
        return first;
    }

  private:
    struct Slab {
        double arrives = absent;
        bool pinned = false;
        Ahead ahead = Ahead::no; ///< not used yet
    };
    [[nodiscard]] const Slab &at(policy::SlabId id) const {
        return slabs_[static_cast<size_t>(id.group) * n_experts_ + static_cast<size_t>(id.expert)];
    }
    [[nodiscard]] Slab &at(policy::SlabId id) {
        return slabs_[static_cast<size_t>(id.group) * n_experts_ + static_cast<size_t>(id.expert)];
    }

    size_t n_experts_;
    std::vector<Slab> slabs_;
    int32_t n_present_ = 0;
};

} // namespace spice::sim

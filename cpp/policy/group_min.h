// The resident slabs of every group in the order of a key, for strategies whose order *within* a group
// changes only when that group is called, while the order *between* groups changes with every call.
//
// Each group keeps the resident with the smallest key; choosing a victim compares one candidate per group,
// and a group is searched again only after a change. So a victim costs n_groups comparisons and about one
// search of n_experts keys, whatever the number of slots.
//
// Used inside the strategies of policy/; thread and errors as in eviction.h.
#pragma once

#include "policy/eviction.h"

#include <algorithm>
#include <array>
#include <cassert>
#include <limits>
#include <vector>

namespace spice::policy {

template <class Key>
class GroupMin {
  public:
    explicit GroupMin(const PoolShape &shape)
        : n_groups_(static_cast<size_t>(shape.n_groups)), n_experts_(static_cast<size_t>(shape.n_experts)),
          stride_((n_experts_ + lanes - 1) / lanes * lanes), keys_(n_groups_ * stride_, absent),
          refused_(n_groups_ * stride_, 0), groups_(n_groups_) {
        refusals_.reserve(n_groups_ * n_experts_);
    }

    /// Keys of residents must be below this.
    static constexpr Key absent = std::numeric_limits<Key>::max();

    [[nodiscard]] bool contains(SlabId id) const { return keys_[flat(id)] != absent; }

    void insert(SlabId id, Key key) {
        assert(!contains(id) && key < absent);
        keys_[flat(id)] = key;
        groups_[static_cast<size_t>(id.group)].known = false;
    }

    void erase(SlabId id) {
        assert(contains(id));
        const size_t i = flat(id);
        keys_[i] = absent;
        if (refused_[i] != 0) {
            refused_[i] = 0;
            std::erase(refusals_, id);
        }
        groups_[static_cast<size_t>(id.group)].known = false;
    }

    /// A new key for a slab, if it is resident.
    void update(SlabId id, Key key) {
        if (contains(id)) {
            keys_[flat(id)] = key;
            groups_[static_cast<size_t>(id.group)].known = false;
        }
    }

    /// New keys for all residents of a group, from one value per expert.
    void update_group(int32_t group, const Key *keys) {
        Key *to = &keys_[static_cast<size_t>(group) * stride_];
        for (size_t e = 0; e < n_experts_; ++e) to[e] = to[e] == absent ? absent : keys[e];
        groups_[static_cast<size_t>(group)].known = false;
    }

    /// The evictable resident with the smallest value(group, key), which must not fall as the key rises. Ties
    /// go to the lower group, then to the lower expert.
    template <class Value>
    [[nodiscard]] std::optional<SlabId> victim(const Value &value, Evictable evictable) {
        std::erase_if(refusals_, [&](SlabId id) {
            if (!evictable(id)) return false;
            refused_[flat(id)] = 0;
            groups_[static_cast<size_t>(id.group)].known = false;
            return true;
        });
        while (true) {
            size_t best = n_groups_;
            decltype(value(int32_t{}, Key{})) best_value{};
            for (size_t g = 0; g < n_groups_; ++g) {
                Group &group = groups_[g];
                if (!group.known) find_min(g);
                if (group.min_key == absent) continue;
                const auto v = value(static_cast<int32_t>(g), group.min_key);
                if (best == n_groups_ || v < best_value) {
                    best = g;
                    best_value = v;
                }
            }
            if (best == n_groups_) return std::nullopt;
            const SlabId id{static_cast<int32_t>(best), groups_[best].min_expert};
            if (evictable(id)) return id;
            refused_[flat(id)] = 1;
            refusals_.push_back(id);
            groups_[best].known = false;
        }
    }

  private:
    static constexpr size_t lanes = 16;
    struct Group {
        Key min_key = absent; ///< of the residents not refused; absent: there is none
        int32_t min_expert = 0;
        bool known = true; ///< min_* are right
    };

    [[nodiscard]] size_t flat(SlabId id) const {
        assert(id.group >= 0 && static_cast<size_t>(id.group) < n_groups_ && id.expert >= 0 &&
               static_cast<size_t>(id.expert) < n_experts_);
        return static_cast<size_t>(id.group) * stride_ + static_cast<size_t>(id.expert);
    }

    void find_min(size_t g) {
        const Key *keys = &keys_[g * stride_];
        const uint8_t *refused = &refused_[g * stride_];
        std::array<Key, lanes> low;
        low.fill(absent);
        for (size_t e = 0; e < stride_; e += lanes) { // compilers make vector instructions of the inner loop
            for (size_t lane = 0; lane < lanes; ++lane) {
                const Key key = refused[e + lane] != 0 ? absent : keys[e + lane];
                low[lane] = key < low[lane] ? key : low[lane];
            }
        }
        const Key min = *std::min_element(low.begin(), low.end());
        size_t at = 0;
        if (min != absent) {
            while (keys[at] != min || refused[at] != 0) ++at;
        }
        groups_[g] = {min, static_cast<int32_t>(at), true};
    }

    size_t n_groups_;
    size_t n_experts_;
    size_t stride_;                ///< n_experts_ rounded up to whole lanes
    std::vector<Key> keys_;        ///< by flat number; absent: not resident
    std::vector<uint8_t> refused_; ///< by flat number: 1 for those in refusals_
    std::vector<SlabId> refusals_; ///< residents that the last victim() found not evictable
    std::vector<Group> groups_;
};

} // namespace spice::policy

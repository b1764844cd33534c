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
#include <cassert>
#include <limits>
#include <vector>

namespace spice::policy {

template <class Key>
class GroupMin {
  public:
    explicit GroupMin(const PoolShape &shape)
        : n_groups_(static_cast<size_t>(shape.n_groups)), n_experts_(static_cast<size_t>(shape.n_experts)),
          keys_(n_groups_ * n_experts_, absent), refused_(n_groups_ * n_experts_, 0), groups_(n_groups_) {}

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
        keys_[flat(id)] = absent;
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
        Key *to = &keys_[static_cast<size_t>(group) * n_experts_];
        for (size_t e = 0; e < n_experts_; ++e) to[e] = to[e] == absent ? absent : keys[e];
        groups_[static_cast<size_t>(group)].known = false;
    }

    /// The evictable resident with the smallest value(group, key), which must not fall as the key rises. Ties
    /// go to the lower group, then to the lower expert.
    template <class Value>
    [[nodiscard]] std::optional<SlabId> victim(const Value &value, Evictable evictable) {
        if (++round_ == 0) { // the stamps of 2^32 rounds ago must not count
            std::fill(refused_.begin(), refused_.end(), 0U);
            round_ = 1;
        }
        while (true) {
            size_t best = n_groups_;
            decltype(value(int32_t{}, Key{})) best_value{};
            for (size_t g = 0; g < n_groups_; ++g) {
                Group &group = groups_[g];
                if (!group.known) find_min(g, false);
                if (group.min_key == absent) continue;
                const auto v = value(static_cast<int32_t>(g), group.min_key);
                if (best == n_groups_ || v < best_value) {
                    best = g;
                    best_value = v;
                }
            }
            if (best == n_groups_) break;
            const SlabId id{static_cast<int32_t>(best), groups_[best].min_expert};
            if (evictable(id)) {
                forget_refusals();
                return id;
            }
            refused_[flat(id)] = round_;
            any_refused_ = true;
            find_min(best, true);
            groups_[best].skewed = true;
        }
        forget_refusals();
        return std::nullopt;
    }

  private:
    struct Group {
        Key min_key = absent; ///< absent: no resident
        int32_t min_expert = 0;
        bool known = true;   ///< min_* are right
        bool skewed = false; ///< min_* leave out refused slabs: right in this round only
    };

    [[nodiscard]] size_t flat(SlabId id) const {
        assert(id.group >= 0 && static_cast<size_t>(id.group) < n_groups_ && id.expert >= 0 &&
               static_cast<size_t>(id.expert) < n_experts_);
        return static_cast<size_t>(id.group) * n_experts_ + static_cast<size_t>(id.expert);
    }

    void find_min(size_t g, bool skip_refused) {
        const Key *keys = &keys_[g * n_experts_];
        const uint32_t *refused = &refused_[g * n_experts_];
        Key min = absent;
        size_t at = 0;
        for (size_t e = 0; e < n_experts_; ++e) {
            if (keys[e] < min && !(skip_refused && refused[e] == round_)) {
                min = keys[e];
                at = e;
            }
        }
        groups_[g] = {min, static_cast<int32_t>(at), true, groups_[g].skewed};
    }

    void forget_refusals() {
        if (!any_refused_) return;
        for (Group &group : groups_) {
            if (group.skewed) group.known = group.skewed = false;
        }
        any_refused_ = false;
    }

    size_t n_groups_;
    size_t n_experts_;
    std::vector<Key> keys_;         ///< by flat number; absent: not resident
    std::vector<uint32_t> refused_; ///< by flat number: the last round that refused it
    std::vector<Group> groups_;
    uint32_t round_ = 0;
    bool any_refused_ = false;
};

} // namespace spice::policy

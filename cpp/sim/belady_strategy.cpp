#include "sim/belady_strategy.h"

#include "policy/group_min.h"
#include "policy/strategy_base.h"

#include <array>

namespace spice::sim {

namespace {

using policy::SlabId;

constexpr std::array<std::string_view, 2> names{"belady", "belady-layer"};
constexpr int64_t never = std::numeric_limits<int64_t>::min() + 1; ///< as a key: leaves first

class Belady final : public policy::Strategy {
  public:
    Belady(bool per_layer, const policy::PoolShape &pool, const FutureUses &future)
        : pool_(pool), per_layer_(per_layer), quotas_(policy::equal_quotas(pool)),
          n_resident_(quotas_.size(), 0), placement_(policy::make_placement("all-fetch")), residents_(pool),
          keys_(pool.n_slabs(), never), next_(future.experts.size()) {
        // From the last call to the first: minus the number of the next call that uses the same slab.
        size_t end = future.experts.size();
        for (size_t c = future.groups.size(); c-- > 0;) {
            const size_t begin = c == 0 ? 0 : future.ends[c - 1];
            for (size_t i = begin; i < end; ++i) {
                const SlabId id{future.groups[c], future.experts[i]};
                next_[i] = std::exchange(keys_[pool_.flat(id)], -static_cast<int64_t>(c));
            }
            end = begin;
        }
    }

    [[nodiscard]] std::string_view name() const override { return names[per_layer_ ? 1 : 0]; }
    [[nodiscard]] policy::Placement &placement() override { return *placement_; }

    void begin_call(const policy::StrategyCall &call) override {
        for (const int32_t e : call.experts) {
            const SlabId id{call.group, e};
            keys_[pool_.flat(id)] = next_[at_++];
            residents_.update(id, keys_[pool_.flat(id)]);
        }
    }
    [[nodiscard]] bool full(SlabId incoming) const override {
        const size_t group = static_cast<size_t>(incoming.group);
        return per_layer_ ? n_resident_[group] >= quotas_[group] : total_ >= pool_.n_slots;
    }
    [[nodiscard]] bool split() const override { return per_layer_; }
    void on_load(SlabId id) override {
        ++total_;
        ++n_resident_[static_cast<size_t>(id.group)];
        residents_.insert(id, keys_[pool_.flat(id)]);
    }
    void on_evict(SlabId id) override {
        --total_;
        --n_resident_[static_cast<size_t>(id.group)];
        residents_.erase(id);
    }
    [[nodiscard]] std::optional<SlabId> victim(SlabId incoming, bool, policy::Evictable evictable) override {
        if (!per_layer_) return residents_.victim([](int32_t, int64_t key) { return key; }, evictable);
        std::optional<SlabId> farthest;
        for (int32_t e = 0; e < pool_.n_experts; ++e) {
            const SlabId id{incoming.group, e};
            if (!residents_.contains(id) || !evictable(id)) continue;
            if (!farthest || keys_[pool_.flat(id)] < keys_[pool_.flat(*farthest)]) farthest = id;
        }
        return farthest;
    }

  private:
    policy::PoolShape pool_;
    bool per_layer_;
    std::vector<int32_t> quotas_;
    std::vector<int32_t> n_resident_;
    int32_t total_ = 0;
    std::unique_ptr<policy::Placement> placement_;
    policy::GroupMin<int64_t> residents_;
    std::vector<int64_t> keys_; ///< by flat number: minus the number of the next call that uses it
    std::vector<int64_t> next_; ///< by use, in order: the same, after that use
    size_t at_ = 0;             ///< in next_
};

} // namespace

std::unique_ptr<policy::Strategy> make_belady(bool per_layer, const policy::PoolShape &pool,
                                              const FutureUses &future) {
    if (per_layer && pool.n_slots < pool.n_groups) return nullptr;
    return std::make_unique<Belady>(per_layer, pool, future);
}

std::span<const std::string_view> belady_names() {
    return names;
}

} // namespace spice::sim

// What strategies share: one pool over all layers behind an Eviction, or a pool that is split over the
// layers.
//
// Used inside the strategies of policy/; thread and errors as in strategy.h.
#pragma once

#include "policy/strategy.h"

#include <algorithm>
#include <cassert>
#include <numeric>
#include <utility>
#include <vector>

namespace spice::policy {

/// The experts with most uses [n_groups][n_experts], as many as there are slots, the most used first.
inline void take_most_used(std::span<const int64_t> uses, const PoolShape &pool, std::vector<SlabId> &to) {
    std::vector<size_t> order(uses.size());
    std::iota(order.begin(), order.end(), size_t{0});
    std::stable_sort(order.begin(), order.end(), [&](size_t a, size_t b) { return uses[a] > uses[b]; });
    order.resize(std::min(order.size(), static_cast<size_t>(pool.n_slots)));
    const auto n = static_cast<size_t>(pool.n_experts);
    for (const size_t i : order) to.push_back({static_cast<int32_t>(i / n), static_cast<int32_t>(i % n)});
}

/// One pool for all layers.
class SharedPool : public Strategy {
  public:
    SharedPool(std::string_view name, std::string_view eviction, std::string_view placement,
               const PoolShape &pool)
        : pool_(pool), name_(name), eviction_(make_eviction(eviction, pool)),
          placement_(make_placement(placement)) {
        assert(eviction_ != nullptr && placement_ != nullptr);
    }

    [[nodiscard]] std::string_view name() const override { return name_; }
    [[nodiscard]] Placement &placement() override { return *placement_; }
    void begin_call(const StrategyCall &call) override {
        eviction_->begin_call(call.group, call.experts, call.weights);
    }
    [[nodiscard]] bool full(SlabId) const override { return n_resident_ >= pool_.n_slots; }
    void on_load(SlabId id) override {
        ++n_resident_;
        eviction_->on_load(id);
    }
    void on_evict(SlabId id) override {
        --n_resident_;
        eviction_->on_evict(id);
    }
    [[nodiscard]] std::optional<SlabId> victim(SlabId, bool, Evictable evictable) override {
        return eviction_->victim(evictable);
    }
    void start_with(std::span<const int64_t> uses, std::vector<SlabId> &start) override {
        take_most_used(uses, pool_, start);
    }

  protected:
    [[nodiscard]] int32_t n_free() const { return std::max(pool_.n_slots - n_resident_, 0); }
    PoolShape pool_;

  private:
    std::string_view name_;
    std::unique_ptr<Eviction> eviction_;
    std::unique_ptr<Placement> placement_;
    int32_t n_resident_ = 0;
};

/// Slots of each layer when they are shared out equally; the first layers get what does not divide.
[[nodiscard]] inline std::vector<int32_t> equal_quotas(const PoolShape &pool) {
    std::vector<int32_t> quotas;
    for (int32_t group = 0; group < pool.n_groups; ++group) {
        const int32_t more = group < pool.n_slots % pool.n_groups ? 1 : 0;
        quotas.push_back(std::min(pool.n_slots / pool.n_groups + more, pool.n_experts));
    }
    return quotas;
}

/// Each layer has slots of its own, and an Eviction that knows that layer only.
class SplitPool : public Strategy {
  public:
    SplitPool(std::string_view name, std::string_view eviction, std::string_view placement,
              const PoolShape &pool, std::vector<int32_t> quotas)
        : pool_(pool), name_(name), placement_(make_placement(placement)), quotas_(std::move(quotas)),
          n_resident_(quotas_.size(), 0) {
        assert(placement_ != nullptr && quotas_.size() == static_cast<size_t>(pool.n_groups));
        for (const int32_t quota : quotas_) {
            evictions_.push_back(make_eviction(eviction, {1, pool.n_experts, quota, pool.top_k}));
            assert(evictions_.back() != nullptr);
        }
    }

    [[nodiscard]] std::string_view name() const override { return name_; }
    [[nodiscard]] Placement &placement() override { return *placement_; }
    void begin_call(const StrategyCall &call) override {
        of(call.group).begin_call(0, call.experts, call.weights);
    }
    [[nodiscard]] bool full(SlabId incoming) const override {
        const size_t group = static_cast<size_t>(incoming.group);
        return n_resident_[group] >= quotas_[group];
    }
    [[nodiscard]] bool split() const override { return true; }
    void on_load(SlabId id) override {
        ++n_resident_[static_cast<size_t>(id.group)];
        of(id.group).on_load({0, id.expert});
    }
    void on_evict(SlabId id) override {
        --n_resident_[static_cast<size_t>(id.group)];
        of(id.group).on_evict({0, id.expert});
    }
    [[nodiscard]] std::optional<SlabId> victim(SlabId incoming, bool, Evictable evictable) override {
        const int32_t group = incoming.group;
        const auto id = of(group).victim([&](SlabId slab) { return evictable({group, slab.expert}); });
        return id ? std::optional(SlabId{group, id->expert}) : std::nullopt;
    }

  protected:
    PoolShape pool_;

  private:
    [[nodiscard]] Eviction &of(int32_t group) { return *evictions_[static_cast<size_t>(group)]; }

    std::string_view name_;
    std::unique_ptr<Placement> placement_;
    std::vector<int32_t> quotas_;
    std::vector<int32_t> n_resident_;
    std::vector<std::unique_ptr<Eviction>> evictions_;
};

} // namespace spice::policy

// `all-host`, `static`, `fiddler`: the pool holds what a profile found most used, and does not change.
//
// Sources: llama.cpp (experts on the CPU; some of them on the GPU), Fiddler (arXiv 2402.07033: placement by
// profiled popularity). What each computes where is in placement_all_host.cpp, placement_static.cpp and
// placement_fiddler.cpp. Without a profile the pool stays empty. A fetched expert (Fiddler fetches for many
// rows, and a machine without a device for every miss) takes the place of the one loaded last: one slot
// serves for passing through, and the others keep what the profile put there. No constants.
#include "policy/strategy_base.h"
#include "policy/strategy_list.h"

#include <algorithm>

namespace spice::policy {

namespace {

class StaticPool final : public Strategy {
  public:
    StaticPool(std::string_view name, std::string_view placement, const PoolShape &pool)
        : pool_(pool), name_(name), placement_(make_placement(placement)) {}

    [[nodiscard]] std::string_view name() const override { return name_; }
    [[nodiscard]] Placement &placement() override { return *placement_; }
    void begin_call(const StrategyCall &) override {}
    [[nodiscard]] bool full(SlabId) const override {
        return loaded_.size() >= static_cast<size_t>(pool_.n_slots);
    }
    void on_load(SlabId id) override { loaded_.push_back(id); }
    void on_evict(SlabId id) override { loaded_.erase(std::find(loaded_.begin(), loaded_.end(), id)); }
    [[nodiscard]] std::optional<SlabId> victim(SlabId, bool, Evictable evictable) override {
        const auto newest =
            std::find_if(loaded_.rbegin(), loaded_.rend(), [&](SlabId id) { return evictable(id); });
        return newest == loaded_.rend() ? std::nullopt : std::optional(*newest);
    }

    void start_with(std::span<const int64_t> uses, std::vector<SlabId> &start) override {
        take_most_used(uses, pool_, start);
    }

  private:
    PoolShape pool_;
    std::string_view name_;
    std::unique_ptr<Placement> placement_;
    std::vector<SlabId> loaded_; ///< the residents, in the order in which they were loaded
};

} // namespace

StrategyPtr strategy_all_host(const PoolShape &pool) {
    return std::make_unique<StaticPool>("all-host", "all-host", pool);
}
StrategyPtr strategy_static(const PoolShape &pool) {
    return std::make_unique<StaticPool>("static", "static", pool);
}
StrategyPtr strategy_fiddler(const PoolShape &pool) {
    return std::make_unique<StaticPool>("fiddler", "fiddler", pool);
}

} // namespace spice::policy

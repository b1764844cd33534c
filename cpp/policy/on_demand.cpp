// `on-demand`: slabs are fetched when a layer needs them, and nothing is known of their later value; the slab
// that was loaded first leaves first, however often it was used since.
//
// Source: the naive baseline of the offloading papers. They keep nothing beyond the present layer; in a pool
// of fixed size that means that every slab not of the present call is free to go, the oldest first, and what
// happens to be still there is a hit. No constants.
#include "policy/recency_list.h"
#include "policy/strategies.h"

namespace spice::policy {

namespace {

class OnDemand final : public Eviction {
  public:
    explicit OnDemand(const PoolShape &shape) : list_(shape) {}

    [[nodiscard]] std::string_view name() const override { return "on-demand"; }
    void begin_call(int32_t, std::span<const int32_t>, std::span<const float>) override {}
    void on_load(SlabId id) override { list_.push_newest(id); }
    void on_evict(SlabId id) override { list_.erase(id); }
    [[nodiscard]] std::optional<SlabId> victim(Evictable evictable) override {
        return list_.oldest(evictable);
    }

  private:
    RecencyList list_;
};

} // namespace

std::unique_ptr<Eviction> make_on_demand(const PoolShape &shape) {
    return std::make_unique<OnDemand>(shape);
}

} // namespace spice::policy

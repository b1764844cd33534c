// `lru`: the slab whose last use is longest ago leaves first.
//
// Source: the usual cache of MoE offloading (Mixtral-Offloading keeps one such list per layer; here it is one
// list over all layers, so that layers share the pool). A use is the begin_call that routes to the slab;
// being loaded counts as one, too, so a prefetched slab is young. No constants. Known weakness: layers are
// visited in a cycle, so a pool below one token's working set (top-k times layers) always evicts just what
// comes next, and has exactly 0 hits.
#include "policy/recency_list.h"
#include "policy/strategies.h"

namespace spice::policy {

namespace {

class Lru final : public Eviction {
  public:
    explicit Lru(const PoolShape &shape) : list_(shape) {}

    [[nodiscard]] std::string_view name() const override { return "lru"; }

    void begin_call(int32_t group, std::span<const int32_t> experts, std::span<const float>) override {
        for (const int32_t expert : experts) {
            const SlabId id{group, expert};
            if (list_.contains(id)) list_.make_newest(id);
        }
    }

    void on_load(SlabId id) override { list_.push_newest(id); }
    void on_evict(SlabId id) override { list_.erase(id); }
    [[nodiscard]] std::optional<SlabId> victim(Evictable evictable) override {
        return list_.oldest(evictable);
    }

  private:
    RecencyList list_;
};

} // namespace

std::unique_ptr<Eviction> make_lru(const PoolShape &shape) {
    return std::make_unique<Lru>(shape);
}

} // namespace spice::policy

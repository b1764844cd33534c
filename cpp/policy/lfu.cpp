// `lfu`: the slab with the fewest uses leaves first, the one not used for longest among equals.
//
// Source: the usual baseline (LFU in SPICE, SpecMD and others). Counting is *perfect*: every use since the
// start counts, also while the slab is not resident. In-cache counting, which starts at one with every load,
// throws out what was just loaded: 1.3 times the misses on real routing (docs/negative-results.md). A use is
// the begin_call that routes to the slab, once per call. No ageing, no constants.
#include "policy/group_min.h"
#include "policy/strategies.h"

namespace spice::policy {

namespace {

class Lfu final : public Eviction {
  public:
    explicit Lfu(const PoolShape &shape)
        : n_experts_(shape.n_experts), uses_(static_cast<size_t>(shape.n_groups) * shape.n_experts),
          residents_(shape) {}

    [[nodiscard]] std::string_view name() const override { return "lfu"; }

    void begin_call(int32_t group, std::span<const int32_t> experts, std::span<const float>) override {
        for (const int32_t expert : experts) {
            const SlabId id{group, expert};
            Use &use = use_of(id);
            if (use.count < max_count) ++use.count;
            use.last = ++stamp_;
            residents_.update(id, key(use));
        }
    }

    void on_load(SlabId id) override {
        use_of(id).last = ++stamp_;
        residents_.insert(id, key(use_of(id)));
    }

    void on_evict(SlabId id) override { residents_.erase(id); }

    [[nodiscard]] std::optional<SlabId> victim(Evictable evictable) override {
        return residents_.victim([](int32_t, uint64_t key) { return key; }, evictable);
    }

  private:
    struct Use {
        uint64_t count = 0;
        uint64_t last = 0; ///< stamp of the last use or load
    };
    // A key holds the count above the stamp: 24 + 40 bits are 16 million uses of a slab and 10^12 uses in
    // all.
    static constexpr int stamp_bits = 40;
    static constexpr uint64_t max_count = (uint64_t{1} << (64 - stamp_bits)) - 2;
    [[nodiscard]] static uint64_t key(const Use &use) {
        return use.count << stamp_bits | (use.last & ((uint64_t{1} << stamp_bits) - 1));
    }
    [[nodiscard]] Use &use_of(SlabId id) {
        return uses_[static_cast<size_t>(id.group) * n_experts_ + static_cast<size_t>(id.expert)];
    }

    size_t n_experts_;
    uint64_t stamp_ = 0;
    std::vector<Use> uses_;
    GroupMin<uint64_t> residents_;
};

} // namespace

std::unique_ptr<Eviction> make_lfu(const PoolShape &shape) {
    return std::make_unique<Lfu>(shape);
}

} // namespace spice::policy

// `promoe`: learned predictions for several layers, loaded ahead at low priority; equal LRU caches per layer;
// misses fetched.
//
// Source: ProMoE (arXiv 2410.22134), from notes: a small MLP per layer with stride lookahead, experts moved
// in three chunks so that demands interrupt speculation (the link's `chunk` in the simulator), wrong loads
// dropped when the gate has spoken (a plan replaces the one before), cached experts computed first, then
// those on the way, then missing ones. Constants: 3 layers ahead, recall .847 (its accuracy as others quote
// it) for each.
#include "policy/strategy_base.h"
#include "policy/strategy_guess.h"
#include "policy/strategy_list.h"

namespace spice::policy {

namespace {

constexpr std::array<float, 3> recall{0.847F, 0.847F, 0.847F};

class ProMoe final : public SplitPool {
  public:
    explicit ProMoe(const PoolShape &pool)
        : SplitPool("promoe", "lru", "all-fetch", pool, equal_quotas(pool)), guess_(pool) {}

    void plan(const PlanContext &context, std::vector<SlabId> &wanted) override {
        for (int32_t d = 1; d <= horizon(); ++d) {
            for (const SlabId id : guess_.best(context, d, pool_.top_k)) {
                if (!context.present(id)) wanted.push_back(id);
            }
        }
    }
    [[nodiscard]] int32_t horizon() const override { return static_cast<int32_t>(recall.size()); }
    [[nodiscard]] std::span<const float> published_recall() const override { return recall; }

  private:
    Guesser guess_;
};

} // namespace

StrategyPtr strategy_promoe(const PoolShape &pool) {
    return std::make_unique<ProMoe>(pool);
}

} // namespace spice::policy

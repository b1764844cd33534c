// `mixtral-offloading`: equal LRU caches per layer, misses fetched, one or two experts of the next layer
// loaded ahead.
//
// Source: Eliseev and Mazur, "Fast Inference of Mixture-of-Experts Language Models with Offloading" (arXiv
// 2312.17238): a fixed number of slots per layer; the next layer's gate on the present hidden state names the
// experts to load ahead, one or two. Constants: 2 ahead, the next gate's recall as measured on
// DeepSeek-V2-Lite.
#include "policy/strategy_base.h"
#include "policy/strategy_guess.h"
#include "policy/strategy_list.h"

namespace spice::policy {

namespace {

constexpr int32_t n_ahead = 2;

class MixtralOffloading final : public SplitPool {
  public:
    explicit MixtralOffloading(const PoolShape &pool)
        : SplitPool("mixtral-offloading", "lru", "all-fetch", pool, equal_quotas(pool)), guess_(pool) {}

    void plan(const PlanContext &context, std::vector<SlabId> &wanted) override {
        for (const SlabId id : guess_.best(context, 1, n_ahead)) {
            if (!context.present(id)) wanted.push_back(id);
        }
    }
    [[nodiscard]] int32_t horizon() const override { return 1; }
    [[nodiscard]] std::span<const float> published_recall() const override {
        return std::span(next_gate_recall).first(1);
    }

  private:
    Guesser guess_;
};

} // namespace

StrategyPtr strategy_mixtral_offloading(const PoolShape &pool) {
    return std::make_unique<MixtralOffloading>(pool);
}

} // namespace spice::policy

// `specprefetch`: the next layer's likeliest missing experts, as many as arrive before it starts; LRU over
// all layers; misses fetched.
//
// Source: SpecPrefetch (arXiv 2607.24787): a low-rank adapter on the next layer's gate, and a window-aware
// scheduler (described in the paper, not in its code): chances summed over the batch, residents and loads on
// the way dropped, M_max = floor((W - in flight) B / S_e) of the best issued, at most 8. W is the time until
// the next layer's experts start, here the decayed time of a layer call. Constants: 8; recall@k .867, the
// mean of its five full-set recall@6 on DeepSeek-VL2-Tiny.
#include "policy/strategy_base.h"
#include "policy/strategy_guess.h"
#include "policy/strategy_list.h"

#include <cmath>

namespace spice::policy {

namespace {

constexpr double most = 8.0;
constexpr std::array<float, 1> recall{0.867F};

class SpecPrefetch final : public SharedPool {
  public:
    explicit SpecPrefetch(const PoolShape &pool)
        : SharedPool("specprefetch", "lru", "all-fetch", pool), guess_(pool) {}

    void plan(const PlanContext &context, std::vector<SlabId> &wanted) override {
        double room = std::min(most, std::floor((context.layer - context.link_queued) / context.transfer));
        for (const SlabId id : guess_.best(context, 1, pool_.n_experts)) {
            if (room < 1.0) return;
            if (context.present(id)) continue;
            wanted.push_back(id);
            room -= 1.0;
        }
    }
    [[nodiscard]] int32_t horizon() const override { return 1; }
    [[nodiscard]] std::span<const float> published_recall() const override { return recall; }

  private:
    Guesser guess_;
};

} // namespace

StrategyPtr strategy_specprefetch(const PoolShape &pool) {
    return std::make_unique<SpecPrefetch>(pool);
}

} // namespace spice::policy

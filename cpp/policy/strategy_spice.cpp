// `spice`, the default: eviction `spice`, placement `spice`, loads ahead as deep as predictions are worth it.
//
// Source: SPICE (arXiv 2608.21240), Algorithm 1 and the cost model, in the form that the runtime uses:
// lookahead.h (depth by confidence, tau 0.7, at most 6 layers), prefetch_plan.h, placement_spice.cpp,
// spice.cpp. Without a device the plan is the runtime's. With one, the host can compute what is missing, so
// that a late load costs more than none: only what arrives in time is loaded, with some room for surprises.
// Its low-rank stand-ins (LoRE) are lossy and not here. A load ahead does not push out what a layer within
// the horizon is predicted to use. A full pool's next victim is taken to be worth `victim_value`: the chance
// that the eviction `spice` was wrong about it. Constants: recall of the training-free next gate, which is
// what SPICE has without a fit.
#include "policy/load_ahead.h"
#include "policy/lookahead.h"
#include "policy/strategy_base.h"
#include "policy/strategy_guess.h"
#include "policy/strategy_list.h"

namespace spice::policy {

namespace {

class SpiceStrategy final : public SharedPool {
  public:
    explicit SpiceStrategy(const PoolShape &pool)
        : SharedPool("spice", "spice", "spice", pool), chances_(static_cast<size_t>(pool.n_experts)),
          to_memory_(pool, lookahead_.l_max, {}, device_victim_value),
          to_device_(pool, lookahead_.l_max, to_device, device_victim_value) {}

    [[nodiscard]] std::optional<SlabId> victim(SlabId incoming, bool demand, Evictable evictable) override {
        const auto free = [&](SlabId id) { return evictable(id) && !ahead_->needed(id); };
        const auto id = SharedPool::victim(incoming, demand, free);
        return id || !demand ? id : SharedPool::victim(incoming, demand, evictable);
    }

    void plan(const PlanContext &context, std::vector<SlabId> &wanted) override {
        if (context.predictor == nullptr) {
            ahead_->begin();
            return;
        }
        ahead_ = context.costs == nullptr ? &to_memory_ : &to_device_;
        ahead_->begin();
        const int32_t deepest = std::min(lookahead_.l_max, context.predictor->max_horizon());
        const int32_t least =
            least_depth(pool_.top_k, context.slab_bytes, context.link_bandwidth, context.layer, deepest);
        for (int32_t d = 1; d <= deepest; ++d) {
            if (!context.predictor->predict(context.group, d, {}, chances_)) break;
            const int32_t group = (context.group + d) % pool_.n_groups;
            ahead_->add(group, d, d * context.layer, chances_,
                        [&](SlabId id) { return context.present(id); });
            if (!look_further(lookahead_, d, least, confidence(chances_, scratch_))) break;
        }
        const LinkState link{context.link_bandwidth, context.link_queued * context.link_bandwidth, 0};
        for (const PrefetchLoad &load :
             ahead_->plan(link, [&](int32_t) { return context.slab_bytes; }, n_free())) {
            wanted.push_back(load.id);
        }
    }
    [[nodiscard]] int32_t horizon() const override { return lookahead_.l_max; }
    [[nodiscard]] std::span<const float> published_recall() const override { return recall_; }

  private:
    LookaheadOptions lookahead_;
    std::array<float, 6> recall_{next_gate_recall[0], next_gate_recall[1], next_gate_recall[2],
                                 next_gate_recall[3], next_gate_recall[4], next_gate_recall[4]};
    std::vector<float> chances_;
    std::vector<float> scratch_;
    LoadAhead to_memory_;
    LoadAhead to_device_;
    LoadAhead *ahead_ = &to_memory_; ///< the one that planned last
};

} // namespace

StrategyPtr strategy_spice(const PoolShape &pool) {
    return std::make_unique<SpiceStrategy>(pool);
}

} // namespace spice::policy

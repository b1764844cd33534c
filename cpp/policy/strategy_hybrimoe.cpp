// `hybrimoe`: decayed router scores say what each layer's cache keeps and what of the next layer is loaded
// ahead; host and device share a layer's experts.
//
// Source: HybriMoE (arXiv 2504.05897) and its code. Score of an expert: S <- 0.5 s + 0.5 S when it is among
// the token's top-p router scores, else 0.5 S; the paper has p = 2 top-k. Recorded routing has gates of the
// chosen k only, so p = top-k here. The lowest S of the same layer leaves. Ahead: the next layer's experts
// of highest S (its code; the paper ranks them by a simulated gain over three layers), top-k of them.
// Placement: placement_hybrimoe.cpp. Caches per layer are equal.
#include "policy/strategy_base.h"
#include "policy/strategy_list.h"

#include <algorithm>
#include <numeric>

namespace spice::policy {

namespace {

constexpr float decay = 0.5F;

class HybriMoeStrategy final : public Strategy {
  public:
    explicit HybriMoeStrategy(const PoolShape &pool)
        : pool_(pool), quotas_(equal_quotas(pool)), n_resident_(quotas_.size(), 0),
          score_(pool.n_slabs(), 0.0F), resident_(score_.size(), 0), placement_(make_placement("hybrimoe")),
          order_(static_cast<size_t>(pool.n_experts)) {}

    [[nodiscard]] std::string_view name() const override { return "hybrimoe"; }
    [[nodiscard]] Placement &placement() override { return *placement_; }

    void begin_call(const StrategyCall &call) override {
        float *score = &score_[pool_.flat({call.group, 0})];
        for (int32_t e = 0; e < pool_.n_experts; ++e) score[e] *= 1.0F - decay;
        const float sum = std::accumulate(call.weights.begin(), call.weights.end(), 0.0F);
        if (!(sum > 0.0F)) return;
        for (size_t i = 0; i < call.experts.size(); ++i) {
            score[call.experts[i]] += decay * call.weights[i] / sum;
        }
    }
    [[nodiscard]] bool full(SlabId id) const override {
        return n_resident_[static_cast<size_t>(id.group)] >= quotas_[static_cast<size_t>(id.group)];
    }
    [[nodiscard]] bool split() const override { return true; }
    void on_load(SlabId id) override {
        resident_[pool_.flat(id)] = 1;
        ++n_resident_[static_cast<size_t>(id.group)];
    }
    void on_evict(SlabId id) override {
        resident_[pool_.flat(id)] = 0;
        --n_resident_[static_cast<size_t>(id.group)];
    }
    [[nodiscard]] std::optional<SlabId> victim(SlabId incoming, bool, Evictable evictable) override {
        std::optional<SlabId> lowest;
        for (int32_t e = 0; e < pool_.n_experts; ++e) {
            const SlabId id{incoming.group, e};
            if (resident_[pool_.flat(id)] == 0 || !evictable(id)) continue;
            if (!lowest || score_[pool_.flat(id)] < score_[pool_.flat(*lowest)]) lowest = id;
        }
        return lowest;
    }

    void plan(const PlanContext &context, std::vector<SlabId> &wanted) override {
        const int32_t next = (context.group + 1) % pool_.n_groups;
        const float *score = &score_[pool_.flat({next, 0})];
        std::iota(order_.begin(), order_.end(), 0);
        const auto best = order_.begin() + std::min(pool_.top_k, pool_.n_experts);
        std::partial_sort(order_.begin(), best, order_.end(), [&](int32_t a, int32_t b) {
            return score[a] != score[b] ? score[a] > score[b] : a < b;
        });
        for (auto it = order_.begin(); it != best && score[*it] > 0.0F; ++it) {
            if (!context.present({next, *it})) wanted.push_back({next, *it});
        }
    }

  private:
    PoolShape pool_;
    std::vector<int32_t> quotas_;
    std::vector<int32_t> n_resident_;
    std::vector<float> score_; ///< by flat number
    std::vector<uint8_t> resident_;
    std::unique_ptr<Placement> placement_;
    std::vector<int32_t> order_;
};

} // namespace

StrategyPtr strategy_hybrimoe(const PoolShape &pool) {
    return std::make_unique<HybriMoeStrategy>(pool);
}

} // namespace spice::policy

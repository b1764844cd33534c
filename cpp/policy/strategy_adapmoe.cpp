// `adapmoe`: LRU caches per layer, larger where prefetching is worse; misses fetched; the first missing
// expert of the next layer's two likeliest is loaded ahead.
//
// Source: AdapMoE (arXiv 2408.10284) and its code, less its lossy gating (see placement_all_fetch.cpp).
//   prefetch: layer l+1's gate on layer l's MoE input, top-2; the first that is missing is loaded.
//   slots: dynamic programming over f(l, c), the expected loads of layer l with c slots. f falls ever more
//     slowly with c (convex), so giving out slots one by one, each where it saves most, finds the same
//     optimum; equal savings go to the layer with the fewest slots.
// Constants: its measured accuracy of the prediction *for* each layer on Mixtral (dp.py): layer 1 .57, 2 .72,
// 3 .79, 4 .87, later ones .80 to .94, here .87; layer 0 is not predicted from a layer before it: 0.
#include "policy/strategy_adapmoe.h"

#include "policy/strategy_base.h"
#include "policy/strategy_guess.h"
#include "policy/strategy_list.h"

#include <cmath>

namespace spice::policy {

namespace {

constexpr std::array<double, 5> accuracy_by_layer{0.0, 0.57, 0.72, 0.79, 0.87};
constexpr int32_t guesses = 2;

std::vector<double> accuracies(int32_t n_groups) {
    std::vector<double> out;
    for (size_t l = 0; l < static_cast<size_t>(n_groups); ++l) {
        out.push_back(accuracy_by_layer[std::min(l, accuracy_by_layer.size() - 1)]);
    }
    return out;
}

class AdapMoeStrategy final : public SplitPool {
  public:
    explicit AdapMoeStrategy(const PoolShape &pool)
        : SplitPool("adapmoe", "lru", "adapmoe", pool, adapmoe_quotas(pool, accuracies(pool.n_groups))),
          guess_(pool) {}

    void plan(const PlanContext &context, std::vector<SlabId> &wanted) override {
        if (context.group + 1 == pool_.n_groups) return; // there is no next layer's gate
        for (const SlabId id : guess_.best(context, 1, guesses)) {
            if (context.present(id)) continue;
            wanted.push_back(id);
            return;
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

double adapmoe_loads(int32_t n, int32_t k, int32_t slots, double accuracy) {
    // P(no miss) = C(slots, k) / C(n, k); the mean number of misses is k (1 - slots / n).
    double none = 1.0;
    for (int32_t i = 0; i < k; ++i) none *= std::max(0.0, static_cast<double>(slots - i)) / (n - i);
    return k * (1.0 - static_cast<double>(slots) / n) - accuracy * (1.0 - none);
}

std::vector<int32_t> adapmoe_quotas(const PoolShape &pool, const std::vector<double> &accuracy) {
    std::vector<int32_t> quotas(static_cast<size_t>(pool.n_groups), 1);
    const auto saves = [&](size_t layer) {
        return adapmoe_loads(pool.n_experts, pool.top_k, quotas[layer], accuracy[layer]) -
               adapmoe_loads(pool.n_experts, pool.top_k, quotas[layer] + 1, accuracy[layer]);
    };
    constexpr double equal = 1e-12;
    for (int32_t left = pool.n_slots - pool.n_groups; left > 0; --left) {
        size_t best = quotas.size();
        for (size_t layer = 0; layer < quotas.size(); ++layer) {
            if (quotas[layer] >= pool.n_experts) continue;
            if (best == quotas.size() || saves(layer) > saves(best) + equal ||
                (saves(layer) > saves(best) - equal && quotas[layer] < quotas[best])) {
                best = layer;
            }
        }
        if (best == quotas.size()) break;
        ++quotas[best];
    }
    return quotas;
}

StrategyPtr strategy_adapmoe(const PoolShape &pool) {
    return std::make_unique<AdapMoeStrategy>(pool);
}

} // namespace spice::policy

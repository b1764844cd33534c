// `adapmoe`: the device computes every expert; what neither the cache nor a prefetch has brought is fetched.
//
// Source: AdapMoE (arXiv 2408.10284) and its code. It has no CPU path: its three parts are lossy gating (drop
// the second expert below sqrt(0.005 / sensitivity of the layer); not here, outputs would change), prefetch
// from the next layer's gate, and slots per layer by dynamic programming; the latter two are other
// interfaces. What is left for this one is the same rule as `all-fetch`. No constants.
#include "policy/placement_strategies.h"

namespace spice::policy {

namespace {

class AdapMoe final : public Placement {
  public:
    [[nodiscard]] std::string_view name() const override { return "adapmoe"; }
    void place(const PlacementCall &call, const PlacementCosts &, std::span<Place> places) override {
        for (size_t i = 0; i < places.size(); ++i) places[i] = has(call, i) ? Place::device : Place::fetch;
    }
};

} // namespace

std::unique_ptr<Placement> make_place_adapmoe() {
    return std::make_unique<AdapMoe>();
}

} // namespace spice::policy

// `all-fetch`, `adapmoe`: the device computes every expert; what neither its pool nor a prefetch has brought
// is fetched.
//
// Sources: on-demand offloading, the naive baseline of every paper here, and Mixtral-Offloading (Eliseev and
// Mazur, arXiv 2312.17238); AdapMoE (arXiv 2408.10284) and its code, which has no CPU path. AdapMoE's three
// parts are lossy gating (drop the second expert below sqrt(0.005 / sensitivity of the layer); not here,
// outputs would change), prefetch from the next layer's gate, and slots per layer by dynamic programming; the
// latter two are other interfaces (strategy_adapmoe.cpp). No constants.
#include "policy/placement_strategies.h"

namespace spice::policy {

namespace {

class AllFetch final : public Placement {
  public:
    explicit AllFetch(std::string_view name) : name_(name) {}

    [[nodiscard]] std::string_view name() const override { return name_; }
    void place(const PlacementCall &call, const PlacementCosts &, std::span<Place> places) override {
        for (size_t i = 0; i < places.size(); ++i) places[i] = has(call, i) ? Place::device : Place::fetch;
    }

  private:
    std::string_view name_;
};

} // namespace

std::unique_ptr<Placement> make_place_all_fetch() {
    return std::make_unique<AllFetch>("all-fetch");
}

std::unique_ptr<Placement> make_place_adapmoe() {
    return std::make_unique<AllFetch>("adapmoe");
}

} // namespace spice::policy

// `all-host`: the host computes every expert, whatever the device holds.
//
// Source: llama.cpp with the experts on the CPU (`--cpu-moe`), and kTransformers' static split: attention,
// shared experts and dense layers on the GPU, routed experts on the CPU. No constants.
#include "policy/placement_strategies.h"

#include <algorithm>

namespace spice::policy {

namespace {

class AllHost final : public Placement {
  public:
    [[nodiscard]] std::string_view name() const override { return "all-host"; }
    void place(const PlacementCall &, const PlacementCosts &, std::span<Place> places) override {
        std::fill(places.begin(), places.end(), Place::host);
    }
};

} // namespace

std::unique_ptr<Placement> make_place_all_host() {
    return std::make_unique<AllHost>();
}

} // namespace spice::policy

// `all-fetch`: the device computes every expert; what it lacks is fetched.
//
// Source: on-demand offloading, the naive baseline of every paper here, and Mixtral-Offloading (Eliseev and
// Mazur, arXiv 2312.17238). No constants.
#include "policy/placement_strategies.h"

namespace spice::policy {

namespace {

class AllFetch final : public Placement {
  public:
    [[nodiscard]] std::string_view name() const override { return "all-fetch"; }
    void place(const PlacementCall &call, const PlacementCosts &, std::span<Place> places) override {
        for (size_t i = 0; i < places.size(); ++i) places[i] = has(call, i) ? Place::device : Place::fetch;
    }
};

} // namespace

std::unique_ptr<Placement> make_place_all_fetch() {
    return std::make_unique<AllFetch>();
}

} // namespace spice::policy

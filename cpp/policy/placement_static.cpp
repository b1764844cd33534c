// `static`: the device computes what is in its pool, the host everything else; the pool never changes.
//
// Source: llama.cpp's split of layers between GPU and CPU, and every placement by profiled popularity that is
// not revised (whoever fills the pool decides which experts these are). No constants.
#include "policy/placement_strategies.h"

namespace spice::policy {

namespace {

class Static final : public Placement {
  public:
    [[nodiscard]] std::string_view name() const override { return "static"; }
    void place(const PlacementCall &call, const PlacementCosts &, std::span<Place> places) override {
        for (size_t i = 0; i < places.size(); ++i) places[i] = has(call, i) ? Place::device : Place::host;
    }
};

} // namespace

std::unique_ptr<Placement> make_place_static() {
    return std::make_unique<Static>();
}

} // namespace spice::policy

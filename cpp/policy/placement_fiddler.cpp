// `fiddler`: each miss where it alone would be done sooner.
//
// Source: Fiddler (Kamahori et al., arXiv 2402.07033) and its code. The code has fixed costs for its machine,
// CPU 7 per token, GPU 70 if the expert must be fetched and 0 if not, and minimises their *sum* over all
// assignments (its comment says the maximum): a sum falls apart into one choice per expert, made here with
// the measured costs. With its constants the host takes up to 9 rows; at 10 both cost 70 and it is fetched.
// What its sum overlooks: link and host work at the same time, and neither's queue counts.
// Which experts the pool holds is profiled popularity, and does not change (the caller's matter).
#include "policy/placement_strategies.h"

namespace spice::policy {

namespace {

class Fiddler final : public Placement {
  public:
    [[nodiscard]] std::string_view name() const override { return "fiddler"; }
    void place(const PlacementCall &call, const PlacementCosts &costs, std::span<Place> places) override {
        const double transfer = costs.transfer(call.slab_bytes);
        for (size_t i = 0; i < places.size(); ++i) {
            if (has(call, i)) {
                places[i] = Place::device;
            } else {
                const double fetch = transfer + costs.device.at(call.rows[i]);
                places[i] = costs.host.at(call.rows[i]) < fetch ? Place::host : Place::fetch;
            }
        }
    }
};

} // namespace

std::unique_ptr<Placement> make_place_fiddler() {
    return std::make_unique<Fiddler>();
}

} // namespace spice::policy

// `cg-moe`: hits on the device, misses on the host; every miss is also sent to the pool for later tokens.
//
// Source: the label CG-MoE of the SPICE paper, taken to be "Efficient CPU-GPU Collaborative Inference for
// MoE-based LLMs on Memory-Limited Systems" (a cache on the GPU for hits, CPU threads for misses). What is
// known of it here does not say which misses enter the cache; all do, by the link's idle time. No constants.
#include "policy/placement_strategies.h"

namespace spice::policy {

namespace {

class CgMoe final : public Placement {
  public:
    [[nodiscard]] std::string_view name() const override { return "cg-moe"; }
    void place(const PlacementCall &call, const PlacementCosts &, std::span<Place> places) override {
        for (size_t i = 0; i < places.size(); ++i) {
            places[i] = has(call, i) ? Place::device : Place::host_fill;
        }
    }
};

} // namespace

std::unique_ptr<Placement> make_place_cg_moe() {
    return std::make_unique<CgMoe>();
}

} // namespace spice::policy

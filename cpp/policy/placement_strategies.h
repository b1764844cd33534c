// The strategies behind make_placement(), one file each. Only placement.cpp needs this.
#pragma once

#include "policy/placement.h"

namespace spice::policy {

std::unique_ptr<Placement> make_place_spice();
std::unique_ptr<Placement> make_place_all_host();
std::unique_ptr<Placement> make_place_all_fetch();
std::unique_ptr<Placement> make_place_static();
std::unique_ptr<Placement> make_place_cg_moe();
std::unique_ptr<Placement> make_place_fiddler();
std::unique_ptr<Placement> make_place_hybrimoe();
std::unique_ptr<Placement> make_place_adapmoe();

/// Whether the device has expert `i` or will have it without a fetch.
[[nodiscard]] inline bool has(const PlacementCall &call, size_t i) {
    return call.on_device[i] != PlacementCall::absent;
}

} // namespace spice::policy

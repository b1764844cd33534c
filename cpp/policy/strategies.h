// The strategies behind make_eviction(), one file each. Only eviction.cpp needs this.
#pragma once

#include "policy/eviction.h"

namespace spice::policy {

std::unique_ptr<Eviction> make_lru(const PoolShape &shape);

} // namespace spice::policy

// The strategies behind make_eviction(), one file each. Only eviction.cpp needs this. The shape is possible.
#pragma once

#include "policy/eviction.h"

namespace spice::policy {

std::unique_ptr<Eviction> make_on_demand(const PoolShape &shape);
std::unique_ptr<Eviction> make_lru(const PoolShape &shape);
std::unique_ptr<Eviction> make_lfu(const PoolShape &shape);
std::unique_ptr<Eviction> make_least_stale(const PoolShape &shape);
std::unique_ptr<Eviction> make_spice(const PoolShape &shape);

} // namespace spice::policy

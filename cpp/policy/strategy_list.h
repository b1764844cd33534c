// The strategies behind make_strategy(), one file each. Only strategy.cpp needs this. The shape is possible.
#pragma once

#include "policy/strategy.h"

namespace spice::policy {

using StrategyPtr = std::unique_ptr<Strategy>;

StrategyPtr strategy_on_demand(const PoolShape &pool);
StrategyPtr strategy_lru(const PoolShape &pool);
StrategyPtr strategy_lfu(const PoolShape &pool);
StrategyPtr strategy_least_stale(const PoolShape &pool);
StrategyPtr strategy_all_host(const PoolShape &pool);
StrategyPtr strategy_static(const PoolShape &pool);
StrategyPtr strategy_fiddler(const PoolShape &pool);
StrategyPtr strategy_cg_moe(const PoolShape &pool);
StrategyPtr strategy_mixtral_offloading(const PoolShape &pool);
StrategyPtr strategy_adapmoe(const PoolShape &pool);
StrategyPtr strategy_hybrimoe(const PoolShape &pool);
StrategyPtr strategy_moe_infinity(const PoolShape &pool);
StrategyPtr strategy_promoe(const PoolShape &pool);
StrategyPtr strategy_specprefetch(const PoolShape &pool);
StrategyPtr strategy_moe_spac(const PoolShape &pool);
StrategyPtr strategy_moe_speq(const PoolShape &pool);
StrategyPtr strategy_spice(const PoolShape &pool);

} // namespace spice::policy

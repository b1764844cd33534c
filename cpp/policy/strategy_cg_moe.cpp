// `cg-moe`: LRU over all layers on the device, misses on the host, which then fill the cache.
//
// Source: see placement_cg_moe.cpp. In the SPICE paper's Table 2 the label stands for plain LRU: the numbers
// of its simulator's `moe_offloading` policy are those of its `lru` (papers.md section 1). No constants.
#include "policy/strategy_base.h"
#include "policy/strategy_list.h"

namespace spice::policy {

StrategyPtr strategy_cg_moe(const PoolShape &pool) {
    return std::make_unique<SharedPool>("cg-moe", "lru", "cg-moe", pool);
}

} // namespace spice::policy

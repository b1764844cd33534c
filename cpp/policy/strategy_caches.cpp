// `on-demand`, `lru`, `lfu`, `least-stale`: a cache whose misses are fetched, and nothing else. The sources
// are named in the files of the evictions of the same names. No constants.
#include "policy/strategy_base.h"
#include "policy/strategy_list.h"

namespace spice::policy {

StrategyPtr strategy_on_demand(const PoolShape &pool) {
    return std::make_unique<SharedPool>("on-demand", "on-demand", "all-fetch", pool);
}
StrategyPtr strategy_lru(const PoolShape &pool) {
    return std::make_unique<SharedPool>("lru", "lru", "all-fetch", pool);
}
StrategyPtr strategy_lfu(const PoolShape &pool) {
    return std::make_unique<SharedPool>("lfu", "lfu", "all-fetch", pool);
}
StrategyPtr strategy_least_stale(const PoolShape &pool) {
    return std::make_unique<SharedPool>("least-stale", "least-stale", "all-fetch", pool);
}

} // namespace spice::policy

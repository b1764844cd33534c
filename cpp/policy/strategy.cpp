#include "policy/strategy.h"

#include "policy/strategy_list.h"

#include <array>
#include <limits>

namespace spice::policy {

namespace {

struct Entry {
    std::string_view name;
    StrategyPtr (*make)(const PoolShape &pool);
    bool split; ///< the pool is shared out: a slot for each layer is the least
};

constexpr std::array<Entry, 17> entries{{
    {"spice", strategy_spice, false},
    {"on-demand", strategy_on_demand, false},
    {"lru", strategy_lru, false},
    {"lfu", strategy_lfu, false},
    {"least-stale", strategy_least_stale, false},
    {"all-host", strategy_all_host, false},
    {"static", strategy_static, false},
    {"fiddler", strategy_fiddler, false},
    {"cg-moe", strategy_cg_moe, false},
    {"mixtral-offloading", strategy_mixtral_offloading, true},
    {"adapmoe", strategy_adapmoe, true},
    {"hybrimoe", strategy_hybrimoe, true},
    {"moe-infinity", strategy_moe_infinity, false},
    {"promoe", strategy_promoe, true},
    {"specprefetch", strategy_specprefetch, false},
    {"moe-spac", strategy_moe_spac, false},
    {"moe-speq", strategy_moe_speq, false},
}};

constexpr auto names = [] {
    std::array<std::string_view, entries.size()> out{};
    for (size_t i = 0; i < entries.size(); ++i) out[i] = entries[i].name;
    return out;
}();

} // namespace

std::unique_ptr<Strategy> make_strategy(std::string_view name, const PoolShape &pool) {
    if (pool.n_groups <= 0 || pool.n_experts <= 0 || pool.n_slots <= 0 || pool.top_k <= 0 ||
        pool.n_groups >= std::numeric_limits<int32_t>::max() / pool.n_experts) {
        return nullptr;
    }
    for (const Entry &entry : entries) {
        if (entry.name != name) continue;
        return entry.split && pool.n_slots < pool.n_groups ? nullptr : entry.make(pool);
    }
    return nullptr;
}

std::span<const std::string_view> strategy_names() {
    return names;
}

} // namespace spice::policy

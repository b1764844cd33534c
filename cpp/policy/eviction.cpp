#include "policy/eviction.h"

#include "policy/strategies.h"

#include <array>
#include <limits>

namespace spice::policy {

namespace {

using Factory = std::unique_ptr<Eviction> (*)(const PoolShape &);

constexpr std::array<std::string_view, 5> names{"spice", "least-stale", "lru", "lfu", "on-demand"};
constexpr std::array<Factory, 5> factories{make_spice, make_least_stale, make_lru, make_lfu, make_on_demand};
static_assert(names.size() == factories.size());

bool possible(const PoolShape &shape) {
    return shape.n_groups > 0 && shape.n_experts > 0 && shape.n_slots >= 0 &&
           shape.n_groups < std::numeric_limits<int32_t>::max() / shape.n_experts;
}

} // namespace

std::unique_ptr<Eviction> make_eviction(std::string_view name, const PoolShape &shape) {
    if (!possible(shape)) return nullptr;
    for (size_t i = 0; i < names.size(); ++i) {
        if (names[i] == name) return factories[i](shape);
    }
    return nullptr;
}

std::span<const std::string_view> eviction_names() {
    return names;
}

} // namespace spice::policy

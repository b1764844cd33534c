#include "policy/eviction.h"

#include "policy/strategies.h"

#include <array>
#include <limits>

namespace spice::policy {

namespace {

using Factory = std::unique_ptr<Eviction> (*)(const PoolShape &);

constexpr std::array<std::string_view, 1> names{"lru"};
constexpr std::array<Factory, 1> factories{make_lru};
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

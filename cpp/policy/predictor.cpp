#include "policy/predictor.h"

#include "policy/predictors.h"

#include <algorithm>
#include <array>

namespace spice::policy {

namespace {

constexpr std::array<std::string_view, 6> names = {"ensemble", "router",  "adapter",
                                                   "draft",    "history", "replay"};
constexpr int32_t limit = 1 << 16;

bool possible(const RoutingShape &shape) {
    return shape.n_groups > 0 && shape.n_groups <= limit && shape.n_experts > 0 && shape.n_experts <= limit &&
           shape.top_k > 0 && shape.top_k <= shape.n_experts && shape.max_horizon > 0 &&
           shape.max_horizon <= 64;
}

} // namespace

void Predictor::set_future(std::vector<FutureCall> /*calls*/, std::span<const float> /*recall*/,
                           uint64_t /*seed*/) {}

std::unique_ptr<Predictor> make_predictor(std::string_view name, const RoutingShape &shape) {
    if (std::find(names.begin(), names.end(), name) == names.end() || !possible(shape)) return nullptr;
    return name == "replay" ? make_replay_predictor(shape) : make_learned_predictor(name, shape);
}

std::span<const std::string_view> predictor_names() {
    return names;
}

} // namespace spice::policy

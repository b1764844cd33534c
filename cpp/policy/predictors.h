// The factories behind make_predictor(). Private to policy/.
#pragma once

#include "policy/predictor.h"

namespace spice::policy {

[[nodiscard]] std::unique_ptr<Predictor> make_learned_predictor(std::string_view name,
                                                                const RoutingShape &shape);
[[nodiscard]] std::unique_ptr<Predictor> make_replay_predictor(const RoutingShape &shape);

} // namespace spice::policy

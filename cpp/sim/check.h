// What is wrong with the arguments of the replay and of the simulator, if anything.
//
// Who calls: replay(), belady(), simulate(). Errors: Status with Code::unsupported that names the argument.
#pragma once

#include "sim/simulator.h"

namespace spice::sim {

[[nodiscard]] Status check_routing(const Routing &routing);
[[nodiscard]] Status check_simulation(const Routing &routing, const Machine &machine, const Model &model,
                                      const SimOptions &options);

} // namespace spice::sim

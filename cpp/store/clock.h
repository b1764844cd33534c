// Seconds of the steady clock: what every duration here is measured with. Thread: any.
#pragma once

#include <chrono>

namespace spice {

[[nodiscard]] inline double steady_now() {
    return std::chrono::duration<double>(std::chrono::steady_clock::now().time_since_epoch()).count();
}

} // namespace spice

// The emulated accelerator for tests: registered once in the process, with the settings of each test.
#pragma once

#include "check.h"
#include "emulator/emulator.h"

namespace test {

inline constexpr spice_emulator_settings no_costs = {.memory_bytes = uint64_t{1} << 30,
                                                     .pinned_bytes = uint64_t{1} << 30,
                                                     .upload_per_second = 0.0,
                                                     .download_per_second = 0.0,
                                                     .copy_latency_seconds = 0.0,
                                                     .pageable_speed = 1.0,
                                                     .compute_slowdown = 1.0,
                                                     .launch_seconds = 0.0,
                                                     .expert_bytes_per_second = 0.0,
                                                     .threads = 1};

inline void set_up_devices(const spice_emulator_settings &settings, int n) {
    static const int registered = spice_emulator_register(n);
    CHECK_EQ(registered, 0);
    for (int d = 0; d < n; ++d) CHECK_EQ(spice_emulator_configure(d, &settings), 0);
}

inline void set_up_device(const spice_emulator_settings &settings = no_costs) {
    set_up_devices(settings, 1);
}

} // namespace test

// The ggml tables of the emulated accelerator. Thread: any; registration lasts for the life of the process.
#pragma once

#include "emulator/device.h"

#include <cstddef>

namespace spice::emulator {

inline constexpr size_t max_devices = 4;

/// Registers devices EMU0 to EMU(n-1); false when n is no such number or it was done before.
[[nodiscard]] bool register_devices(int n);
/// nullptr when there is no such device.
[[nodiscard]] Device *device(int index);

} // namespace spice::emulator

// A ggml backend that is one stream of an emulated device. Thread: as ggml says of backends, one at a time.
#pragma once

#include "emulator/device.h"

#include "ggml-backend.h"

namespace spice::emulator {

/// nullptr when there is no memory.
[[nodiscard]] ggml_backend_t make_stream_backend(ggml_backend_dev_t handle, Device &device);

} // namespace spice::emulator

// The plug-in: one registration with one device of type ACCEL, which gives every llama context in the process
// a SPICE backend. Contexts of other models are not affected: the device claims only nodes on expert buffers.
//
// Thread: any; registration is done once and lasts for the life of the process, as ggml expects.
#pragma once

#include "backend/ggml_abi.h"
#include "store/status.h"

namespace spice {

/// Registers with ggml (idempotent). Errors: version, when the loaded ggml is not the one we were built for.
[[nodiscard]] Status register_plugin();

/// The device; valid before registration too.
[[nodiscard]] ggml_backend_dev_t plugin_device();

} // namespace spice

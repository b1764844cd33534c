// A short look at the machine before the first layer call: what the link, the device and the host do with
// this model's experts, so that placement by cost does not start from a guess.
//
// It sends a few slabs, multiplies by a few experts on the device and as many on the host, for one row and
// for many, and gives the times to DeviceCosts as its first measurements. At most about a second in all, less
// for small models; the slots must be empty. What cannot be measured (no memory, an operation that the device
// lacks) keeps its guess.
//
// Thread: whoever makes the tier, before anybody else uses slots. Blocks. Errors: none.
#pragma once

#include "runtime/device_costs.h"
#include "store/device_pool.h"

#include "ggml-backend.h"

#include <cstdint>
#include <span>
#include <vector>

namespace spice {

/// The slots of one size class on both sides, as one of its groups sees them.
struct ProbePlace {
    std::vector<ggml_tensor *> device; ///< slot tensors, by part
    std::vector<std::byte *> host;     ///< where each part of host slot 0 begins
    uint64_t host_stride = 0;          ///< bytes between host slots
    int32_t n_device = 0;              ///< slots
    int32_t n_host = 0;
    int32_t top_k = 0;
    uint64_t slab_bytes = 0;
};

void probe_costs(ggml_backend_dev_t device, const ProbePlace &place, int32_t n_threads, DeviceCosts &costs);

} // namespace spice

// How many bytes of weights per second ggml's dot products stream from memory, by quantisation: what a probe
// of the machine measures, since a processor that is fast on one type may be slow on another.
//
// Thread: any; blocks for about `seconds` and starts `n_threads` threads. Errors: unsupported (ggml-cpu has
// no dot product of that type), out_of_memory.
#pragma once

#include "store/status.h"

#include "ggml.h"

#include <cstdint>

namespace spice::compute {

/// All threads together. `bytes`: of the weights that are gone through, more than caches hold. `pause`: after
/// every 2 ms of work all threads sleep that long, as threads do that wait for a disk; the speed is that of
/// the time between. Processors that lower their clock when they idle are slower then.
[[nodiscard]] Result<double> dot_speed(ggml_type type, int32_t n_threads, double seconds, uint64_t bytes,
                                       double pause = 0.0);

} // namespace spice::compute

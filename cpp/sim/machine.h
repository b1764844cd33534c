// The machine and the model of a simulation, as plain numbers. Bytes, seconds, bytes per second.
//
// Who fills them: python/spice_moe/hardware.py from TOML files and GGUF headers; tests. No methods block.
#pragma once

#include "policy/placement.h"

#include <cstdint>
#include <string>
#include <vector>

namespace spice::sim {

/// What moves slabs between two tiers, one at a time.
struct LinkSpec {
    double bandwidth = 0.0; ///< bytes per second
    double latency = 0.0;   ///< seconds that each transfer adds
    double chunk = 0.0;     ///< bytes; a demand interrupts a load ahead at multiples of it. 0: never
    /// Reads that share the bandwidth at a time. Above 1, a transfer that follows another one has no latency
    /// of its own, and parts of slabs that are read at the same time arrive at the same time.
    int32_t in_flight = 1;
    [[nodiscard]] double seconds(double bytes) const { return latency + bytes / bandwidth; }
};

/// What computes experts. One row streams the weights from memory; further rows cost arithmetic.
struct EngineSpec {
    double stream = 0.0; ///< bytes of weights per second for one row
    double row = 0.0;    ///< bytes of weights times rows per second for many rows; at least `stream`
    /// Seconds of waits, launches and copies of activations: of each layer call that uses the host, of each
    /// launch on a device (policy/placement.h, finish_time()).
    double call = 0.0;

    [[nodiscard]] policy::ExpertCost cost(double bytes) const {
        return {bytes / stream - bytes / row, bytes / row};
    }
};

/// Watts. `idle`: of the whole machine, all the time; the others: what a part takes more while it is busy.
struct PowerSpec {
    double idle = 0.0;
    double host = 0.0;
    double device = 0.0;
    double link = 0.0;
    double disk = 0.0;
};

struct Machine {
    bool has_device = false; ///< false: memory is the fast pool, `disk` its link, `host` its engine
    EngineSpec host;
    EngineSpec device;
    LinkSpec link;           ///< memory to device
    LinkSpec disk;           ///< file to memory
    double layer_call = 0.0; ///< seconds of each layer beside weights: norms, attention over the context, ...
    double contention = 0.0; ///< how much slower the host computes while a transfer runs: 0.05 is 5 %
    /// How much slower the host computes when it had to wait all the time; in proportion for less: processors
    /// lower their clock when they idle.
    double drowsiness = 0.0;
    PowerSpec power; ///< zeros: not known
};

struct Model {
    std::vector<double> slab_bytes; ///< by MoE layer
    double other_bytes = 0.0;       ///< weights beside routed experts that every token reads, all layers
    double shared_bytes = 0.0;      ///< of these, of experts that every token uses (shared experts)
};

} // namespace spice::sim

// What the machine was seen to do with experts, for placement by cost: decayed averages over cold-start
// values.
//
// The shape of each cost (so much for each expert, so much for each row) is fixed by the slab's bytes; what
// is measured is how many times longer it takes here. Few rows and many rows (where ggml computes in another
// way) are measured apart. Thread: one at a time (the Engine's lock). No clock: the caller measures.
#pragma once

#include "policy/placement.h"

#include <algorithm>
#include <array>
#include <cstdint>
#include <span>

namespace spice {

class DeviceCosts {
  public:
    /// Rows of one expert from which on a call counts as one of many rows.
    static constexpr int32_t many_rows = 8;

    [[nodiscard]] policy::PlacementCosts get(uint64_t slab_bytes, bool many) const {
        const auto bytes = static_cast<double>(slab_bytes);
        const double host = host_[many].value * bytes / cold_host;
        const double device = device_[many].value * bytes / cold_device;
        return {.device = {device, 0.02 * device},
                .host = {0.85 * host, 0.15 * host},
                .device_call = device_[many].value * cold_call,
                .host_call = 0.0,
                .link_latency = cold_latency,
                .link_bandwidth = bandwidth_.value};
    }

    void link(uint64_t bytes, double seconds) {
        if (seconds > cold_latency) bandwidth_.add(static_cast<double>(bytes) / (seconds - cold_latency));
    }
    /// The experts of one call, with these rows each, took the host or the device `seconds`. `exact`: not
    /// only at most that long.
    void host(uint64_t slab_bytes, std::span<const int32_t> rows, double seconds) {
        add(host_, slab_bytes, rows, seconds, true,
            [](const auto &costs) { return std::pair(costs.host, 0.0); });
    }
    void device(uint64_t slab_bytes, std::span<const int32_t> rows, double seconds, bool exact) {
        add(device_, slab_bytes, rows, seconds, exact,
            [](const auto &costs) { return std::pair(costs.device, costs.device_call); });
    }

  private:
    // Cold start, until the first measurement: a discrete GPU of the middle class on PCIe 4.0 x8, and a CPU
    // with two channels of memory.
    static constexpr double cold_link = 10e9;
    static constexpr double cold_latency = 20e-6;
    static constexpr double cold_device = 150e9; ///< bytes of weights per second
    static constexpr double cold_call = 60e-6;
    static constexpr double cold_host = 12e9;

    struct Average {
        double value = 1.0;
        bool measured = false;
        void add(double sample) {
            constexpr double weight = 0.05; // a token of layers
            value = measured ? value + weight * (sample - value) : sample;
            measured = true;
        }
    };

    template <class Select>
    void add(std::array<Average, 2> &scales, uint64_t slab_bytes, std::span<const int32_t> rows,
             double seconds, bool exact, Select select) {
        if (rows.empty() || seconds <= 0.0) return;
        const bool many = std::ranges::max(rows) >= many_rows;
        const auto [cost, once] = select(get(slab_bytes, many));
        double predicted = once;
        for (const int32_t n : rows) predicted += cost.at(n);
        if (!exact && seconds >= predicted) return; // it may have been done long before
        Average &scale = scales[many];
        scale.add(scale.value * seconds / predicted);
    }

    std::array<Average, 2> host_;
    std::array<Average, 2> device_;
    Average bandwidth_{.value = cold_link, .measured = false};
};

} // namespace spice

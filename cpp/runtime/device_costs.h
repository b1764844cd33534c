// What the machine was seen to do with experts, for placement by cost: decayed averages over cold-start
// values.
//
// The shape of each cost (so much for each expert, so much for each row) is fixed by the slab's bytes; what
// is measured is how many times longer it takes here, and on a device what a launch takes beside. Few rows
// and many rows (where ggml computes in another way) are measured apart. Thread: one at a time (the Engine's
// lock). No clock: the caller measures.
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
        const Line device = device_[many].line();
        const double expert = device.slope * bytes / cold_device;
        return {.device = {expert, device_row * expert},
                .host = {0.85 * host, 0.15 * host},
                .device_call = device.start,
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
        if (rows.empty() || seconds <= 0.0) return;
        const bool many = is_many(rows);
        const policy::ExpertCost cost = get(slab_bytes, many).host;
        double predicted = 0.0;
        for (const int32_t n : rows) predicted += cost.at(n);
        host_[many].add(host_[many].value * seconds / predicted);
    }
    void device(uint64_t slab_bytes, std::span<const int32_t> rows, double seconds, bool exact) {
        if (rows.empty() || seconds <= 0.0) return;
        double work = 0.0; // what the cold start takes it for
        for (const int32_t n : rows) work += 1.0 + device_row * n;
        work *= static_cast<double>(slab_bytes) / cold_device;
        Launches &launches = device_[is_many(rows)];
        const Line line = launches.line();
        if (!exact && seconds >= line.start + line.slope * work) return; // it may have been done long before
        launches.add(work, seconds);
    }

  private:
    // Cold start, until the first measurement: a discrete GPU of the middle class on PCIe 4.0 x8, and a CPU
    // with two channels of memory.
    static constexpr double cold_link = 10e9;
    static constexpr double cold_latency = 20e-6;
    static constexpr double cold_device = 150e9; ///< bytes of weights per second
    static constexpr double cold_call = 60e-6;
    static constexpr double cold_host = 12e9;
    static constexpr double device_row = 0.02; ///< of an expert's time, for each row

    struct Average {
        double value = 1.0;
        bool measured = false;
        void add(double sample) {
            constexpr double weight = 0.05; // a token of layers
            value = measured ? value + weight * (sample - value) : sample;
            measured = true;
        }
    };

    struct Line {
        double start = cold_call; ///< seconds of a launch
        double slope = 1.0;       ///< seconds for one of the cold start's
    };
    /// seconds = start + slope * work, by least squares over decayed samples. Where they all have about the
    /// same work, the two are in the proportion that they had before.
    class Launches {
      public:
        void add(double work, double seconds) {
            if (weight_ == 0.0) { // the cold start is a guess of the proportion alone
                const double scale = seconds / (cold_call + work);
                line_ = {.start = scale * cold_call, .slope = scale};
            }
            constexpr double keep = 0.98; // some tokens of layers
            for (double *sum : {&weight_, &work_, &seconds_, &squares_, &products_}) *sum *= keep;
            weight_ += 1.0;
            work_ += work;
            seconds_ += seconds;
            squares_ += work * work;
            products_ += work * seconds;
            fit();
        }
        [[nodiscard]] Line line() const { return line_; }

      private:
        void fit() {
            const double mean_work = work_ / weight_;
            const double mean = seconds_ / weight_;
            const double variance = squares_ / weight_ - mean_work * mean_work;
            constexpr double few = 8.0;     // samples
            constexpr double spread = 0.01; // of the mean's square
            if (weight_ < few || variance < spread * mean_work * mean_work) {
                const double scale = mean / (line_.start + line_.slope * mean_work);
                line_ = {.start = scale * line_.start, .slope = scale * line_.slope};
                return;
            }
            // Neither is negative; noise must not make one of them so.
            const double slope = (products_ / weight_ - mean_work * mean) / variance;
            line_.slope = std::clamp(slope, 0.02 * mean / mean_work, mean / mean_work);
            line_.start = mean - line_.slope * mean_work;
        }

        double weight_ = 0.0, work_ = 0.0, seconds_ = 0.0, squares_ = 0.0, products_ = 0.0; ///< decayed sums
        Line line_;
    };
    static bool is_many(std::span<const int32_t> rows) { return std::ranges::max(rows) >= many_rows; }

    std::array<Average, 2> host_;
    std::array<Launches, 2> device_;
    Average bandwidth_{.value = cold_link, .measured = false};
};

} // namespace spice

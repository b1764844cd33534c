// When layer calls come: seconds per layer, and passes of decode that can be compared.
//
// A pass is one walk through all groups, of calls of the same few rows. Its seconds run from its first call
// to its last, so that what happens between tokens (sampling, a user who reads) does not count.
// Thread: one at a time. Nothing blocks; the caller reads the clock.
#pragma once

#include <cstdint>

namespace spice {

class PrefetchClock {
  public:
    explicit PrefetchClock(int32_t n_groups = 1) : n_groups_(n_groups) {}

    /// A call of `group` with `rows` tokens begins at `now` seconds. True when it is the first of a pass;
    /// then pass_seconds() is of the pass before.
    bool begin_call(int32_t group, int64_t rows, double now) {
        const bool first = group <= group_;
        if (first) {
            pass_seconds_ = n_calls_ == n_groups_ && same_rows_ ? last_ - start_ : 0.0;
            start_ = now;
            n_calls_ = 0;
            same_rows_ = rows == rows_; // of the pass before, too: neighbours are compared
            rows_ = rows;
        } else if (rows == rows_ && group == group_ + 1) {
            const double seconds = now - last_;
            constexpr double weight = 0.05; // a few tokens' worth of layers
            layer_seconds_ = layer_seconds_ > 0.0 && known_rows_ == rows
                                 ? layer_seconds_ + weight * (seconds - layer_seconds_)
                                 : seconds;
            known_rows_ = rows;
        } else {
            same_rows_ = false;
        }
        group_ = group;
        last_ = now;
        n_calls_ += 1;
        return first;
    }
    /// Of the pass that has just ended; 0 when it cannot be compared with its neighbours.
    [[nodiscard]] double pass_seconds() const { return pass_seconds_; }
    /// From one layer call to the next, a decayed average; 0 before the first.
    [[nodiscard]] double layer_seconds() const { return layer_seconds_; }

  private:
    int32_t n_groups_;
    int32_t group_ = -1;
    int32_t n_calls_ = 0;
    int64_t rows_ = 0;
    int64_t known_rows_ = 0;
    bool same_rows_ = false;
    double start_ = 0.0;
    double last_ = 0.0;
    double pass_seconds_ = 0.0;
    double layer_seconds_ = 0.0;
};

} // namespace spice

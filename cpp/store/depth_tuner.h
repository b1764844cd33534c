// How many reads to keep in flight: tries a few depths on the real reads and keeps the best.
//
// A probe at start would read bytes that nobody asked for; the first demand reads tell the same. Only
// stretches in which more reads were waiting than the depth allows are counted, since otherwise the disk is
// not the limit. Each depth gets `window_bytes` twice, in turns, because the speed of a disk changes from
// moment to moment; then the smallest depth within 5 % of the best stays: deeper queues only make a demand
// read wait behind others.
//
// Thread: all calls under the reader's lock. Nothing blocks.
#pragma once

#include <cstddef>
#include <cstdint>
#include <vector>

namespace spice {

class DepthTuner {
  public:
    static constexpr uint64_t window_bytes = uint64_t{96} << 20;
    static constexpr int turns = 2;

    /// Tried in this order; of two that are nearly as good the smaller stays. With one there is nothing to
    /// try.
    explicit DepthTuner(std::vector<int32_t> depths = {4});

    [[nodiscard]] int32_t depth() const { return depths_[current_]; }
    [[nodiscard]] bool tuned() const { return tuned_; }
    /// A read of `bytes` has ended at `now` seconds; `backlog`: others were waiting for their turn.
    void ended(uint64_t bytes, double now, bool backlog);

  private:
    void close_window();

    std::vector<int32_t> depths_;
    std::vector<double> best_; ///< bytes per second, of each depth's better window
    size_t current_ = 0;
    int turn_ = 0;
    bool tuned_ = false;
    bool counting_ = false; ///< there was a backlog when the read before this one ended
    double since_ = 0.0;
    uint64_t bytes_ = 0;
    double seconds_ = 0.0;
};

} // namespace spice

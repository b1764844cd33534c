// Puts each read of expert bytes on the timeline, on a track for each I/O thread.
//
// Thread: I/O threads call it. Nothing blocks for long. Errors: none.
#pragma once

#include "runtime/timeline.h"
#include "store/slab_reader.h"

namespace spice {

class ReadTimeline final : public ReadWatcher {
  public:
    explicit ReadTimeline(Timeline &timeline) : timeline_(timeline) {}

    [[nodiscard]] bool watching() const noexcept override { return timeline_.on(); }
    void watched(Priority priority, int32_t thread, double begin, double end) noexcept override {
        timeline_.add(
            Timeline::Track::read, [&] { return priority == Priority::demand ? "demand" : "ahead"; }, begin,
            end, thread);
    }

  private:
    Timeline &timeline_;
};

} // namespace spice

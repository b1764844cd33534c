// Wall time in which at least one compute thread waits for bytes. Overlapping waits count once.
//
// Thread: any. start/stop take a lock; they are called only when there is something to wait for.
#pragma once

#include "store/clock.h"

#include <mutex>

namespace spice {

class StallClock {
  public:
    class Wait {
      public:
        explicit Wait(StallClock &clock) : clock_(clock) { clock_.change(+1); }
        ~Wait() { clock_.change(-1); }
        Wait(const Wait &) = delete;
        Wait &operator=(const Wait &) = delete;

      private:
        StallClock &clock_;
    };

    [[nodiscard]] double seconds() const {
        const std::lock_guard lock(mutex_);
        return total_;
    }
    void reset() {
        const std::lock_guard lock(mutex_);
        total_ = 0.0;
    }

  private:
    void change(int by) {
        const double now = steady_now();
        const std::lock_guard lock(mutex_);
        if (waiting_ > 0) total_ += now - since_;
        since_ = now;
        waiting_ += by;
    }

    mutable std::mutex mutex_;
    double since_ = 0.0;
    int waiting_ = 0;
    double total_ = 0.0;
};

} // namespace spice

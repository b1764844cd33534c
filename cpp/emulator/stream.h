// One stream of the emulated device: a thread that runs what is queued, in order; and events between streams.
//
// Thread: push, record, wait and synchronize from any thread; synchronize blocks until everything queued
// before it has run. The destructor runs what is left.
#pragma once

#include <atomic>
#include <condition_variable>
#include <cstdint>
#include <deque>
#include <functional>
#include <memory>
#include <mutex>
#include <thread>

namespace spice::emulator {

/// A point in a stream that others wait for. A wait is for the latest record() before it.
class Event {
  public:
    void wait_for(uint64_t generation);
    void reached(uint64_t generation);
    [[nodiscard]] uint64_t next();
    [[nodiscard]] uint64_t latest() const;

  private:
    mutable std::mutex mutex_;
    std::condition_variable changed_;
    uint64_t recorded_ = 0;
    uint64_t reached_ = 0;
};

class Stream {
  public:
    Stream();
    ~Stream();
    Stream(const Stream &) = delete;
    Stream &operator=(const Stream &) = delete;

    void push(std::function<void()> task);
    void record(const std::shared_ptr<Event> &event);
    void wait(const std::shared_ptr<Event> &event);
    void synchronize();
    /// The same without giving up the processor, as drivers wait: one that slept computes slower for a while.
    void spin();

  private:
    void run();

    std::mutex mutex_;
    std::condition_variable changed_;
    std::deque<std::function<void()>> tasks_;
    bool busy_ = false;
    std::atomic<uint64_t> unfinished_{0}; ///< tasks
    bool stop_ = false;
    std::thread thread_; ///< last: uses everything above
};

} // namespace spice::emulator

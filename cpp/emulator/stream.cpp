#include "emulator/stream.h"

#include <algorithm>

#ifdef __linux__
#include <sys/prctl.h>
#endif

namespace spice::emulator {

void Event::wait_for(uint64_t generation) {
    std::unique_lock lock(mutex_);
    changed_.wait(lock, [&] { return reached_ >= generation; });
}

void Event::reached(uint64_t generation) {
    const std::lock_guard lock(mutex_);
    reached_ = std::max(reached_, generation);
    changed_.notify_all();
}

uint64_t Event::next() {
    const std::lock_guard lock(mutex_);
    return ++recorded_;
}

uint64_t Event::latest() const {
    const std::lock_guard lock(mutex_);
    return recorded_;
}

Stream::Stream() : thread_([this] { run(); }) {}

Stream::~Stream() {
    {
        const std::lock_guard lock(mutex_);
        stop_ = true;
    }
    changed_.notify_all();
    thread_.join();
}

void Stream::push(std::function<void()> task) {
    {
        const std::lock_guard lock(mutex_);
        tasks_.push_back(std::move(task));
        unfinished_ += 1;
    }
    changed_.notify_all();
}

void Stream::record(const std::shared_ptr<Event> &event) {
    push([event, generation = event->next()] { event->reached(generation); });
}

void Stream::wait(const std::shared_ptr<Event> &event) {
    push([event, generation = event->latest()] { event->wait_for(generation); });
}

void Stream::synchronize() {
    std::unique_lock lock(mutex_);
    changed_.wait(lock, [&] { return tasks_.empty() && !busy_; });
}

void Stream::spin() {
    while (unfinished_ > 0) {
    }
}

void Stream::run() {
#ifdef __linux__
    (void)prctl(PR_SET_TIMERSLACK, 1000UL); // sleeps stand for copies of tens of microseconds
#endif
    std::unique_lock lock(mutex_);
    for (;;) {
        changed_.wait(lock, [&] { return stop_ || !tasks_.empty(); });
        if (tasks_.empty()) return;
        const std::function<void()> task = std::move(tasks_.front());
        tasks_.pop_front();
        busy_ = true;
        lock.unlock();
        task();
        lock.lock();
        busy_ = false;
        unfinished_ -= 1;
        changed_.notify_all();
    }
}

} // namespace spice::emulator

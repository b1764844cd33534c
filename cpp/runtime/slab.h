// What the Engine knows of one expert: in which slot its bytes are, and which of its parts have arrived.
//
// A part's state is written by I/O threads (loading -> ready or failed) and read by compute threads;
// everything else is guarded by the Engine's lock.
#pragma once

#include "store/slab_reader.h"

#include <array>
#include <atomic>
#include <cstdint>

namespace spice {

inline constexpr size_t max_parts = 4; ///< gate, up, down, or gate_up, down

enum class PartState : uint32_t { absent, loading, ready, failed };

/// Told of every arrival, so that a compute thread can wait for whichever comes first.
class Arrivals {
  public:
    /// Keeps the latest error until taken. Call it before the failure can be seen, then note().
    void keep(const Status &error) noexcept;
    void note() noexcept;
    [[nodiscard]] uint32_t count() const { return count_.load(std::memory_order_acquire); }
    void wait_past(uint32_t seen) const { count_.wait(seen, std::memory_order_acquire); }
    [[nodiscard]] Status take_error();

  private:
    std::atomic<uint32_t> count_{0}; ///< 32 bits: what a futex waits on
    std::mutex mutex_;
    Status error_;
};

class Part final : public Completion {
  public:
    [[nodiscard]] PartState state() const { return state_.load(std::memory_order_acquire); }
    void set(PartState state) { state_.store(state, std::memory_order_release); }
    void start(Arrivals &arrivals) {
        arrivals_ = &arrivals;
        set(PartState::loading);
    }
    /// Blocks while loading; true when ready.
    [[nodiscard]] bool wait() const {
        PartState now = state();
        while (now == PartState::loading) {
            state_.wait(now, std::memory_order_acquire);
            now = state();
        }
        return now == PartState::ready;
    }
    void done(const Status &status) noexcept override {
        Arrivals &arrivals = *arrivals_; // after the store, the Part may be started again by another thread
        if (!status.ok()) arrivals.keep(status);
        state_.store(status.ok() ? PartState::ready : PartState::failed, std::memory_order_release);
        state_.notify_all();
        arrivals.note();
    }

  private:
    std::atomic<PartState> state_{PartState::absent};
    Arrivals *arrivals_ = nullptr;
};

struct Slab {
    int32_t slot = -1;
    int32_t pins = 0;   ///< layer calls that need it now
    bool ahead = false; ///< prefetched, and not used since
    uint64_t uses = 0;  ///< rows that it was multiplied with, ever
    std::array<Part, max_parts> parts;

    [[nodiscard]] bool busy(size_t n_parts) const { ///< an I/O thread writes to its slot
        for (size_t p = 0; p < n_parts; ++p) {
            if (parts[p].state() == PartState::loading) return true;
        }
        return false;
    }
    [[nodiscard]] bool complete(size_t n_parts) const {
        for (size_t p = 0; p < n_parts; ++p) {
            if (parts[p].state() != PartState::ready) return false;
        }
        return true;
    }
};

} // namespace spice

// Reads experts into free slots between the load and the first layer call: those that earlier runs used most.
//
// A few at a time, behind all demand reads, and nothing leaves the pool for them. A device that owns the
// layer gets a copy as long as it has room. Ends by itself when the list is done, no slot is free, or a layer
// call begins; what is queued by then is taken back.
//
// Thread: one of its own, which sleeps while reads run and takes the Engine's lock for short. The constructor
// does not block, the destructor waits for the thread, not for reads. Errors: none; what could not be read is
// read again on demand.
#pragma once

#include "policy/eviction.h"

#include <atomic>
#include <cstdint>
#include <thread>
#include <vector>

namespace spice {

class Engine;

class Preloader {
  public:
    /// `wanted`: by the Engine's groups, the most wanted first; all must exist. Throws std::system_error when
    /// no thread can be started.
    Preloader(Engine &engine, std::vector<policy::SlabId> wanted);
    ~Preloader();
    Preloader(const Preloader &) = delete;
    Preloader &operator=(const Preloader &) = delete;

  private:
    void run();
    [[nodiscard]] bool step(); ///< under the Engine's lock; false: done

    static constexpr size_t in_flight = 4;
    Engine &engine_;
    std::vector<policy::SlabId> wanted_;
    size_t next_ = 0;
    std::vector<policy::SlabId> reading_;
    std::atomic<bool> stop_{false};
    std::thread thread_; ///< last: it uses everything above
};

} // namespace spice

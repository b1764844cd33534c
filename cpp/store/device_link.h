// Slabs on their way from host to device memory: a stream of its own, in order, with a completion for each.
//
// An upload is queued on the link's backend instance (its own stream, where the device has streams) with
// ggml_backend_tensor_set_async and followed by an event. Other streams of the device wait for that event in
// order(); a thread of the link waits for it too and tells the owner, who may then give the source away. An
// upload may in turn wait for another stream's event, when that stream still reads what it overwrites. A
// device without events is waited for at once.
//
// Thread: submit and order from any thread, under a lock of their own; they do not block unless the device
// copies from pageable memory synchronously. `done` runs on the link's thread, or, for an upload that has no
// event, at the end of submit; it may submit more. Errors: make returns nullptr when the device gives no
// backend. A copy cannot fail in ggml's interface.
#pragma once

#include "ggml-backend.h"
#include "ggml-cpp.h"

#include <condition_variable>
#include <cstdint>
#include <deque>
#include <functional>
#include <memory>
#include <mutex>
#include <span>
#include <thread>
#include <vector>

namespace spice {

struct UploadPart {
    ggml_tensor *to = nullptr; ///< a slot tensor
    uint64_t offset = 0;       ///< of the slot in it
    const void *from = nullptr;
    uint64_t bytes = 0;
};

struct LinkCounters {
    uint64_t uploads = 0;
    uint64_t bytes = 0;
    double busy_seconds = 0.0; ///< wall time with at least one upload on the way
};

class DeviceLink {
  public:
    using Ticket = uint64_t; ///< counts uploads from 1; 0 is none
    /// Told of every upload that has ended, and from when to when it had the link (seconds, steady clock).
    using Done = std::function<void(Ticket, double begun, double ended)>;

    [[nodiscard]] static std::unique_ptr<DeviceLink> make(ggml_backend_dev_t device, Done done);
    ~DeviceLink(); ///< as finish()
    DeviceLink(const DeviceLink &) = delete;
    DeviceLink &operator=(const DeviceLink &) = delete;

    /// Waits for what is on the way, `done` included. Whoever owns the link calls it while `done` may still
    /// use the owner's pointer to the link. Nothing may be submitted any more, but by `done`.
    void finish();

    /// Queues the parts of one slab, behind `after` if that is not nullptr; the sources must stay until
    /// `done`. `named` gets the ticket before any completion can come.
    Ticket submit(std::span<const UploadPart> parts, ggml_backend_event_t after,
                  const std::function<void(Ticket)> &named);
    /// Whatever is queued on `stream` from now on waits for that upload and those before it.
    void order(ggml_backend_t stream, Ticket ticket);
    [[nodiscard]] LinkCounters counters() const;
    void reset_counters();

  private:
    struct Flight {
        Ticket ticket = 0;
        std::shared_ptr<ggml_backend_event> event;
        uint64_t bytes = 0;
        double since = 0.0;
    };

    DeviceLink() = default;
    void run();
    [[nodiscard]] std::shared_ptr<ggml_backend_event> new_event();

    ggml_backend_dev_t device_ = nullptr;
    ggml_backend_ptr stream_;
    Done done_;
    bool has_events_ = false;

    std::mutex submit_mutex_; ///< the order of the stream is the order of the tickets
    Ticket last_ = 0;

    mutable std::mutex mutex_; ///< guards everything below
    std::condition_variable changed_;
    std::deque<Flight> flights_; ///< on the way, by ticket
    std::vector<std::shared_ptr<ggml_backend_event>> spare_;
    LinkCounters counters_;
    double free_since_ = 0.0;
    bool stop_ = false;
    std::thread thread_; ///< last: uses everything above
};

} // namespace spice

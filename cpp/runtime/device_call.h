// The experts of one layer call that the device computes. They stay in their slots until it is destroyed.
//
// Thread: one compute thread. begin() and the destructor do not block, but for devices without events, whose
// copies are synchronous. Errors: none; what the device has no room for is left to the host.
#pragma once

#include "runtime/device_tier.h"

#include <optional>
#include <span>
#include <vector>

namespace spice {

class DeviceCall {
  public:
    DeviceCall() = default;
    ~DeviceCall();
    DeviceCall(const DeviceCall &) = delete;
    DeviceCall &operator=(const DeviceCall &) = delete;

    /// `ids`: the routed experts of all rows, with duplicates. Ids that do not exist are left to LayerCall.
    void begin(DeviceTier &tier, int32_t group, std::span<const int32_t> ids);

    [[nodiscard]] std::span<const DeviceExpert> resident() const { return resident_; }
    [[nodiscard]] bool takes(int32_t expert) const {
        return static_cast<size_t>(expert) < taken_.size() && taken_[static_cast<size_t>(expert)];
    }
    [[nodiscard]] bool empty() const { return resident_.empty() && chunks_.empty(); }

    // What is on its way, chunk after chunk. For each in turn: send(), DeviceTier::order() with the ticket,
    // the graph, and then, if is_waited_for(), a record of the event that the later send() gets.
    [[nodiscard]] size_t n_chunks() const { return chunks_.size(); }
    [[nodiscard]] std::span<const DeviceExpert> chunk(size_t c) const { return chunks_[c].experts; }
    /// The chunk whose slots it takes over: its graph must have been queued, and the event recorded.
    [[nodiscard]] std::optional<size_t> waits_for(size_t c) const { return chunks_[c].after; }
    [[nodiscard]] bool is_waited_for(size_t c) const;
    /// Sends what is not on the link yet, behind `after` if not nullptr.
    [[nodiscard]] DeviceLink::Ticket send(size_t c, ggml_backend_event_t after);

    struct Times {
        double host = 0.0;   ///< of the host's experts; 0: not measured
        double device = 0.0; ///< from the launch to the end of the wait
        double waited = 0.0; ///< of this, how long the host waited
    };
    void ended(const Times &times);
    /// The device will not compute its share after all: the call is empty then. What is on its way stays so.
    void give_up();

  private:
    struct Chunk {
        std::vector<DeviceExpert> experts;
        std::vector<DeviceTier::Upload> uploads; ///< not sent yet
        DeviceLink::Ticket ticket = 0;           ///< of the last that was
        bool passing = false;                    ///< in borrowed slots
        std::optional<size_t> after;
    };
    void release();
    // Under the Engine's lock:
    struct Asked { ///< of the call, while begin() runs
        std::span<const int32_t> experts;
        std::span<const policy::Place> places;
        size_t n_rows = 0;
        const policy::PlacementCosts &costs;
        uint64_t slab_bytes = 0;
    };
    void take(size_t i, const Asked &asked, int32_t slot, std::vector<DeviceExpert> &to);
    void fetch(const Asked &asked, std::span<const int32_t> order);
    void fetch_through(const Asked &asked, std::span<const size_t> wanted, size_t most);

    DeviceTier *tier_ = nullptr;
    int32_t group_ = 0;
    std::vector<DeviceExpert> resident_;
    std::vector<Chunk> chunks_;
    std::vector<bool> taken_;          ///< of each expert of the group
    std::vector<int32_t> borrowed_;    ///< slots that go back at the end
    std::vector<int32_t> device_rows_; ///< of each expert, for the costs
    std::vector<int32_t> host_rows_;
    bool host_complete_ = true; ///< no host expert had to be read from disk
    bool pure_ = true;          ///< nothing was on the link: the device's time is that of computing
};

} // namespace spice

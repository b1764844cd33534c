// The device tier of one Engine: experts in a bounded pool of device memory, and who computes which expert.
//
// For a layer call, DeviceCall::begin() asks the placement strategy where each routed expert is computed: on
// the device (its slab is there, or is sent there now), or on the host (everything that the DeviceCall does
// not take goes to a LayerCall as before). Slabs go up from the host pool's slots, which are pinned
// meanwhile, so a slab that is not in host memory is read and computed there first. When the link is idle,
// host-computed experts are sent up for later (fills), a few at a time, behind all fetches.
//
// Thread: begin and the destructor on a compute thread; they do not block, but for devices without events,
// whose copies are synchronous. Uploads end on the link's thread. State is guarded by the Engine's lock,
// which is never held while a device is called. Errors: see make; a device that fails a graph makes the call
// fail, and forget() empties the pool, because it cannot be known what else did not arrive.
#pragma once

#include "policy/eviction.h"
#include "policy/placement.h"
#include "runtime/device_costs.h"
#include "runtime/engine.h"
#include "store/device_link.h"
#include "store/device_pool.h"

#include <deque>
#include <memory>
#include <span>
#include <string>
#include <vector>

namespace spice {

/// What the device pool needs, and what it got.
struct DevicePlan {
    std::string device; ///< ggml's name; empty: there is none
    std::string description;
    uint64_t budget = 0;     ///< device bytes that all slots take
    uint64_t smallest = 0;   ///< the smallest budget that works
    uint64_t everything = 0; ///< the budget with room for every expert
    int64_t n_slots = 0;
    std::string placement;
    bool asynchronous = false; ///< copies and kernels of the device overlap with the host
};

struct DeviceCounters {
    uint64_t calls = 0;   ///< layer calls in which the device computed
    uint64_t hits = 0;    ///< routed experts whose slab was there
    uint64_t fetched = 0; ///< sent up for the call that needed them
    uint64_t host = 0;    ///< computed by the host
    uint64_t filled = 0;  ///< sent up for later calls
    uint64_t rows = 0;    ///< expert rows computed on the device
    uint64_t evictions = 0;
    uint64_t unfit = 0;        ///< layer calls whose block the device cannot compute as it is
    uint64_t refused = 0;      ///< layer calls that the device had no memory for: the host computed them
    double wait_seconds = 0.0; ///< the host waited for the device at the end of layer calls
    LinkCounters link;
    uint64_t resident_experts = 0;
    uint64_t resident_bytes = 0;
};

struct DeviceExpert {
    int32_t expert = 0;
    int32_t slot = 0;
};

class DeviceTier {
  public:
    /// The first device of type GPU, or nullptr.
    [[nodiscard]] static ggml_backend_dev_t find_device();
    /// What the pool would need there: everything but budget and n_slots.
    [[nodiscard]] static DevicePlan needs(const Engine &engine, ggml_backend_dev_t device);
    /// `placement`: a name of policy::placement_names(), empty for the default. Errors: budget (below the
    /// smallest), unsupported (no such strategy), out_of_memory.
    [[nodiscard]] static Result<std::unique_ptr<DeviceTier>>
    make(Engine &engine, ggml_backend_dev_t device, uint64_t budget, const std::string &placement);
    ~DeviceTier(); ///< waits for uploads
    DeviceTier(const DeviceTier &) = delete;
    DeviceTier &operator=(const DeviceTier &) = delete;

    [[nodiscard]] const DevicePlan &plan() const { return plan_; }
    [[nodiscard]] ggml_backend_dev_t device() const { return device_; }
    [[nodiscard]] ggml_tensor *slot_tensor(const ExpertTensor &tensor) const;
    /// Whatever is queued on `stream` from now on finds the slabs that late experts wait for.
    void order(ggml_backend_t stream) { link_->order(stream); }
    /// Drops every slab: after a failure of the device nothing in its memory is trusted.
    void forget();
    void count_unfit();   ///< a block that only the host can compute
    void count_refused(); ///< a layer call that the device had no memory for
    /// It is there or on its way. Under the Engine's lock.
    [[nodiscard]] bool has(int32_t group, int32_t expert) const;
    [[nodiscard]] DeviceCounters counters() const;
    void reset_counters();

  private:
    friend class DeviceCall;

    enum class State : uint8_t {
        absent,
        queued,  ///< has a slot, its upload is not submitted yet
        loading, ///< on the link: later work on the device can be ordered behind it
        ready,
    };
    struct DeviceSlab {
        int32_t slot = -1;
        int32_t pins = 0; ///< layer calls that use it
        State state = State::absent;
        bool doomed = false; ///< to leave as soon as nobody uses it
        double ends = 0.0;   ///< when a loading slab is expected
    };
    struct Group {
        std::vector<ggml_tensor *> parts;
        std::vector<DeviceSlab> slabs;
        uint64_t slab_bytes = 0;
    };
    struct SizeClass {
        DevicePool pool;
        std::unique_ptr<policy::Eviction> eviction;
    };
    struct Upload {
        int32_t group = 0;
        int32_t expert = 0;
        bool fill = false;
        DeviceLink::Ticket ticket = 0;
        std::vector<UploadPart> parts;
    };

    explicit DeviceTier(Engine &engine) : engine_(engine) {}

    // Under the Engine's lock:
    [[nodiscard]] DeviceSlab &slab(int32_t group, int32_t expert) {
        return groups_[static_cast<size_t>(group)].slabs[static_cast<size_t>(expert)];
    }
    [[nodiscard]] bool in_host_memory(int32_t group, int32_t expert) const;
    [[nodiscard]] bool give_slot(int32_t group, int32_t expert);
    void evict(int32_t group, int32_t expert);
    [[nodiscard]] Upload prepare(int32_t group, int32_t expert); ///< pins the host slab
    void queue_fill(int32_t group, int32_t expert, bool may_evict);
    void unpin_host(int32_t group, int32_t expert);
    [[nodiscard]] double link_free_at() const;

    // Without it:
    void submit(Upload upload);
    void uploaded(DeviceLink::Ticket ticket, double begun, double ended);
    void pump(); ///< submits a fill when the link is idle

    Engine &engine_;
    ggml_backend_dev_t device_ = nullptr;
    DevicePlan plan_;
    std::vector<Group> groups_; ///< as the Engine's
    std::vector<SizeClass> classes_;
    std::unique_ptr<policy::Placement> placement_;
    DeviceCosts costs_;
    DeviceCounters counters_;
    std::deque<Upload> flights_; ///< submitted, in order
    struct Fill {
        int32_t group = 0;
        int32_t expert = 0;
        bool may_evict = false; ///< else it takes an empty slot only
    };
    std::deque<Fill> fills_;
    size_t submitting_ = 0; ///< uploads that have a slot and no ticket yet
    bool stopping_ = false;

    // Scratch of begin():
    std::vector<int32_t> rows_;
    std::vector<double> on_device_;
    std::vector<double> in_memory_;
    std::vector<policy::Place> places_;
    std::vector<int32_t> order_;

    std::unique_ptr<DeviceLink> link_; ///< last: its thread uses everything above
};

/// The experts of one layer call that the device computes. They stay in their slots until it is destroyed.
class DeviceCall {
  public:
    DeviceCall() = default;
    ~DeviceCall();
    DeviceCall(const DeviceCall &) = delete;
    DeviceCall &operator=(const DeviceCall &) = delete;

    /// `ids`: the routed experts of all rows, with duplicates. Ids that do not exist are left to LayerCall.
    void begin(DeviceTier &tier, int32_t group, std::span<const int32_t> ids);

    [[nodiscard]] std::span<const DeviceExpert> resident() const { return resident_; }
    /// On their way: to be computed behind DeviceTier::order().
    [[nodiscard]] std::span<const DeviceExpert> late() const { return late_; }
    [[nodiscard]] bool takes(int32_t expert) const;
    [[nodiscard]] bool empty() const { return resident_.empty() && late_.empty(); }

    struct Times {
        double host = 0.0;   ///< of the host's experts; 0: not measured
        double device = 0.0; ///< from the launch to the end of the wait
        double waited = 0.0; ///< of this, how long the host waited
    };
    void ended(const Times &times);
    /// The device will not compute its share after all: the call is empty then. What is on its way stays so.
    void give_up();

  private:
    void release();

    DeviceTier *tier_ = nullptr;
    int32_t group_ = 0;
    std::vector<DeviceExpert> resident_;
    std::vector<DeviceExpert> late_;
    std::vector<int32_t> device_rows_; ///< of each expert, for the costs
    std::vector<int32_t> host_rows_;
    bool host_complete_ = true; ///< no host expert had to be read from disk
    bool pure_ = true;          ///< nothing was on the link: the device's time is that of computing
};

} // namespace spice

// One device of one Engine: experts of the layers that it owns in a bounded pool of its memory, and who
// computes which expert.
//
// For a layer call, DeviceCall::begin() (device_call.h) asks the placement strategy where each routed expert
// is computed: on the device (its slab is there, or is sent there now), or on the host (everything that the
// DeviceCall does not take goes to a LayerCall as before). Slabs go up from the host pool's slots, which are
// pinned meanwhile, so a slab that is not in host memory is read and computed there first. When the link is
// idle, experts that the next layers are predicted to use are sent up ahead (device_ahead.cpp), and then
// host-computed experts for later tokens (fills), one at a time, behind all fetches.
//
// What is sent comes in chunks, each computed as soon as it is there. A prompt asks for more of a layer than
// the pool should be given up for: what it does not have room for passes through a few slots that the call
// borrows, half of them computed while the other half is sent.
//
// Thread: any, but what says otherwise. Uploads end on the link's thread. State is guarded by the Engine's
// lock, which is never held while a device is called. Errors: see make; a device that fails a graph makes the
// call fail, and forget() empties the pool, because it cannot be known what else did not arrive.
//
// In parts: making it (device_tier_make.cpp), slots and uploads (device_tier.cpp), sending ahead
// (device_ahead.cpp), and its share of one layer call (device_call.h).
#pragma once

#include "policy/eviction.h"
#include "policy/load_ahead.h"
#include "policy/placement.h"
#include "runtime/ahead.h"
#include "runtime/device_costs.h"
#include "runtime/engine.h"
#include "store/device_link.h"
#include "store/device_pool.h"

#include <deque>
#include <map>
#include <memory>
#include <mutex>
#include <optional>
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
    // As the probe found it, bytes of experts per second; 0: there was none.
    double link_speed = 0.0;
    double device_speed = 0.0; ///< for one row
    double host_speed = 0.0;   ///< for one row
};

struct DeviceCounters {
    uint64_t calls = 0;           ///< layer calls in which the device computed
    uint64_t hits = 0;            ///< routed experts whose slab was there
    uint64_t fetched = 0;         ///< sent up for the call that needed them
    uint64_t passed = 0;          ///< of these, through slots that the call borrowed: they did not stay
    uint64_t host = 0;            ///< computed by the host
    uint64_t filled = 0;          ///< sent up for later calls
    uint64_t prefetched = 0;      ///< sent up ahead, for a layer that was predicted to use it
    uint64_t prefetch_used = 0;   ///< of these, there when a layer first needed them
    uint64_t prefetch_late = 0;   ///< of these, on their way then
    uint64_t prefetch_wasted = 0; ///< of these, evicted without having been needed
    uint64_t rows = 0;            ///< expert rows computed on the device
    uint64_t in_place = 0;        ///< layer calls whose activations the device had
    uint64_t evictions = 0;
    uint64_t unfit = 0;        ///< layer calls whose block the device cannot compute as it is
    uint64_t refused = 0;      ///< layer calls that the device had no memory for: the host computed them
    double wait_seconds = 0.0; ///< the host waited for the device at the end of layer calls
    LinkCounters link;
    uint64_t resident_experts = 0;
    uint64_t resident_bytes = 0;

    DeviceCounters &operator+=(const DeviceCounters &other); ///< those of another device
};

struct DeviceExpert {
    int32_t expert = 0;
    int32_t slot = 0;
    int32_t rows = 0;
};

class DeviceTier {
  public:
    /// The first device of type GPU, or nullptr.
    [[nodiscard]] static ggml_backend_dev_t find_device();
    /// What the pool would need there for these layers (all, if none are named): everything but budget and
    /// n_slots.
    [[nodiscard]] static DevicePlan needs(const Engine &engine, ggml_backend_dev_t device,
                                          std::span<const int32_t> layers = {});
    /// `placement`: a name of policy::placement_names(), empty for the default. Errors: budget (below the
    /// smallest), unsupported (no such strategy), out_of_memory.
    [[nodiscard]] static Result<std::unique_ptr<DeviceTier>> make(Engine &engine, ggml_backend_dev_t device,
                                                                  std::span<const int32_t> layers,
                                                                  uint64_t budget,
                                                                  const std::string &placement);
    [[nodiscard]] bool owns(int32_t group) const {
        return !groups_[static_cast<size_t>(group)].parts.empty();
    }
    ~DeviceTier(); ///< waits for uploads
    DeviceTier(const DeviceTier &) = delete;
    DeviceTier &operator=(const DeviceTier &) = delete;

    [[nodiscard]] const DevicePlan &plan() const { return plan_; }
    [[nodiscard]] ggml_backend_dev_t device() const { return device_; }
    [[nodiscard]] ggml_tensor *slot_tensor(const ExpertTensor &tensor) const;
    /// A weight that goes by expert, [n, n_expert] floats in host memory for good, as it is on the device:
    /// copied there at the first call, beside the pool. Any thread; blocks for the copy. Errors:
    /// out_of_memory.
    [[nodiscard]] Result<ggml_tensor *> on_device(const ggml_tensor &weight, int64_t n);
    /// Whatever is queued on `stream` from now on finds the slabs of that upload and those before it.
    void order(ggml_backend_t stream, DeviceLink::Ticket ticket) { link_->order(stream, ticket); }
    /// Drops every slab: after a failure of the device nothing in its memory is trusted.
    void forget();
    void count_unfit();    ///< a block that only the host can compute
    void count_in_place(); ///< a layer call whose activations the device had
    void count_refused();  ///< a layer call that the device had no memory for
    /// Sends it up when the link has nothing else to do, as long as a slot is empty. Under the Engine's lock,
    /// for a group that it owns.
    void want(int32_t group, int32_t expert);
    /// Sends something of what waits if the link is idle. Without the lock.
    void pump();
    /// It is there or on its way. Under the Engine's lock, for a group that it owns.
    [[nodiscard]] bool has(int32_t group, int32_t expert) const;

    // Sending ahead on predictions, for the Prefetcher (device_ahead.cpp). Under the Engine's lock:
    /// Whether there is anything to send, and a link that would idle: copies overlap with computing, the
    /// placement strategy loads ahead, and not every expert is on the device.
    [[nodiscard]] bool sends_ahead() const;
    /// How many layers ahead a call's experts must be known to be there in time.
    [[nodiscard]] int32_t ahead_depth(double layer_seconds, int32_t l_max) const;
    /// Plans anew what is sent ahead, of what these calls are predicted to use, nearest first; for no calls
    /// nothing is. pump() begins with it.
    void plan_ahead(std::span<const ComingCall> coming, double layer_seconds);
    [[nodiscard]] AheadReport ahead_report() const { return report_; }

    [[nodiscard]] DeviceCounters counters() const;
    void reset_counters();
    /// Measures what placement by cost starts from (device_probe.h). Before the first layer call.
    void probe(int32_t n_threads);

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
        bool doomed = false;           ///< to leave as soon as nobody uses it
        bool ahead = false;            ///< sent ahead, and not needed since
        double ends = 0.0;             ///< when a loading slab is expected
        DeviceLink::Ticket ticket = 0; ///< of its upload
    };
    struct Group {
        std::vector<ggml_tensor *> parts;
        std::vector<DeviceSlab> slabs;
        uint64_t slab_bytes = 0;
    };
    struct SizeClass { ///< empty where it owns no group of the class
        DevicePool pool;
        std::unique_ptr<policy::Eviction> eviction;
    };
    struct ClassNeeds {
        std::vector<std::vector<DevicePartShape>> shapes; ///< of each part, as its groups have it
        int32_t n_experts = 0;
        int32_t most = 0;  ///< slots of use
        int32_t least = 0; ///< slots that it cannot do without
    };
    enum class Why : uint8_t { fetch, fill, ahead };
    struct Upload {
        int32_t group = 0;
        int32_t expert = 0;
        Why why = Why::fetch;
        bool passing = false; ///< in a borrowed slot, which no DeviceSlab knows
        DeviceLink::Ticket ticket = 0;
        double ends = 0.0; ///< expected
        std::vector<UploadPart> parts;
    };

    explicit DeviceTier(Engine &engine) : engine_(engine) {}
    void set_up_ahead(); ///< once its groups are known
    [[nodiscard]] static std::vector<ClassNeeds>
    class_needs(const Engine &engine, ggml_backend_buffer_type_t type, std::span<const int32_t> layers);
    /// The most slots of the class that take no more than `room`; its least if none do.
    [[nodiscard]] static int32_t slots_within(ggml_backend_buffer_type_t type, const ClassNeeds &cls,
                                              uint64_t room);

    // Under the Engine's lock:
    [[nodiscard]] DeviceSlab &slab(int32_t group, int32_t expert) {
        return groups_[static_cast<size_t>(group)].slabs[static_cast<size_t>(expert)];
    }
    [[nodiscard]] bool in_host_memory(int32_t group, int32_t expert) const;
    /// Evicts if it must: for a demand if need be what the next layers are predicted to use, else never.
    [[nodiscard]] std::optional<int32_t> take_slot(int32_t size_class, bool demand);
    [[nodiscard]] bool give_slot(int32_t group, int32_t expert, bool demand);
    void evict(int32_t group, int32_t expert);
    [[nodiscard]] Upload prepare(int32_t group, int32_t expert, int32_t slot); ///< pins the host slab
    void queue_fill(int32_t group, int32_t expert, bool may_evict);
    void unpin_host(int32_t group, int32_t expert);
    [[nodiscard]] double link_free_at() const;
    /// A layer call needs the slab: had it been sent ahead?
    void note_need(int32_t group, DeviceSlab &it);
    [[nodiscard]] uint64_t slab_bytes(int32_t group) const {
        return groups_[static_cast<size_t>(group)].slab_bytes;
    }

    // Without it:
    DeviceLink::Ticket submit(Upload upload, ggml_backend_event_t after);
    void uploaded(DeviceLink::Ticket ticket, double begun, double ended);

    Engine &engine_;
    ggml_backend_dev_t device_ = nullptr;
    DevicePlan plan_;
    std::vector<Group> groups_; ///< as the Engine's; those of others are empty
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
    // Under the lock; false: stale, or nothing may leave for it.
    [[nodiscard]] bool begin_fill(const Fill &fill, Upload &upload);
    [[nodiscard]] bool begin_unasked(policy::SlabId id, Why why, Upload &upload);
    std::optional<policy::LoadAhead> load_ahead_; ///< its groups are the Engine's
    std::deque<policy::SlabId> ahead_;            ///< planned: what is needed first is sent first
    AheadReport report_;
    int32_t n_experts_ = 0; ///< of all its layers
    std::deque<Fill> fills_;
    std::deque<Fill> wanted_; ///< when there are no fills
    size_t submitting_ = 0;   ///< uploads that have a slot and no ticket yet
    bool stopping_ = false;

    // Scratch of begin():
    std::vector<int32_t> rows_;
    std::vector<double> on_device_;
    std::vector<double> in_memory_;
    std::vector<policy::Place> places_;
    std::vector<int32_t> order_;

    struct Beside {
        ggml_context_ptr context;
        ggml_backend_buffer_ptr buffer;
        ggml_tensor *tensor = nullptr;
    };
    std::mutex beside_mutex_;               ///< guards beside_
    std::map<const void *, Beside> beside_; ///< by the weight's address in host memory

    std::unique_ptr<DeviceLink> link_; ///< last: its thread uses everything above
};

} // namespace spice

// The Engine of one loaded model: keeps its experts in a bounded pool and makes those of a layer call
// resident. The only place where policy, store and compute meet.
//
// Slabs of one shape (same projections, same bytes) form a size class with one slot pool and one eviction
// strategy; the budget is shared between classes by their share of the model. A layer call (layer_call.h)
// pins what it needs, evicts what the strategy names, and queues demand reads; I/O threads fill the slots.
//
// Thread: any number of compute threads (one per llama context), each with its own LayerCalls; short sections
// under one lock, never while reading or computing. Everything const is safe anywhere.
// Errors: Status values; the last failure of the compute path is also kept for the binding (take_error),
// because ggml passes on only a failed status.
#pragma once

#include "policy/eviction.h"
#include "runtime/capture.h"
#include "runtime/prefetcher.h"
#include "runtime/preloader.h"
#include "runtime/read_timeline.h"
#include "runtime/slab.h"
#include "runtime/stall_clock.h"
#include "runtime/timeline.h"
#include "store/expert_index.h"
#include "store/gguf_model.h"
#include "store/slab_reader.h"
#include "store/slot_pool.h"

#include "ggml-backend.h"

#include <filesystem>
#include <map>
#include <memory>
#include <mutex>
#include <optional>
#include <span>
#include <string>
#include <unordered_map>
#include <utility>
#include <vector>

namespace spice {

class DeviceTier;
class Engine;
class SurrogateUse;

/// One stacked expert weight tensor as the backend sees it.
struct ExpertTensor {
    Engine *engine = nullptr;
    int32_t group = 0; ///< one routed bank of one layer
    size_t part = 0;   ///< which part of the slab
    const ExpertPart *info = nullptr;
};

/// The pool seen as a tensor of one part: expert weights at base + slot * stride.
struct SlotTensor {
    std::byte *base = nullptr;
    uint64_t stride = 0; ///< bytes between slots
    int32_t n_slots = 0;
};

/// Counters since the model was opened or reset; see python/spice_moe/stats.py for what each means.
struct Counters {
    uint64_t graph_calls = 0;
    uint64_t layer_calls = 0;
    uint64_t matmul_nodes = 0;
    uint64_t delegated_nodes = 0;
    uint64_t waves = 0;
    uint64_t expert_rows = 0;
    uint64_t early_nodes = 0;
    uint64_t preloaded = 0;
    uint64_t rows_direct = 0;
    uint64_t rows_batched = 0;
    uint64_t experts_requested = 0;
    uint64_t experts_missed = 0;
    uint64_t slabs_read = 0;
    uint64_t evictions = 0;
    uint64_t missed_bytes = 0;     ///< of experts that were not in a slot when a layer needed them
    uint64_t prefetched = 0;       ///< slabs queued ahead of need
    uint64_t prefetch_ready = 0;   ///< of these, complete when a layer needed them
    uint64_t prefetch_late = 0;    ///< of these, still on their way then
    uint64_t prefetch_dropped = 0; ///< of these, withdrawn before they were read
    uint64_t prefetch_wasted = 0;  ///< of these, evicted without having been needed
    uint64_t ready_bytes = 0;
    uint64_t late_bytes = 0;
    uint64_t wasted_bytes = 0;
    PrefetchCounters prefetch;
    uint64_t failures = 0;
    double stall_seconds = 0.0;
    ReaderCounters reader;
    uint64_t resident_experts = 0;
    uint64_t resident_bytes = 0;
    int32_t read_depth = 0;
};

struct EngineOptions {
    int64_t expert_used = 0;   ///< the user's override of expert_used_count, 0 for none
    int32_t io_threads = 0;    ///< reads in flight; 0 tunes it
    std::string eviction = {}; ///< a name of policy::eviction_names(); empty: the default
    bool direct_io = true;
    PrefetchOptions prefetch = {};
    bool sidecar_required = true;       ///< false: go on without one that cannot be used, and say so
    std::filesystem::path sidecar = {}; ///< what spice-fit made for this model; empty: none
    std::shared_ptr<FileOps> ops = {};  ///< null: real files
};

/// What the pool needs (after open) and what it got (after build_pool).
struct PoolPlan {
    uint64_t budget = 0;      ///< bytes that all slots take
    uint64_t smallest = 0;    ///< the smallest budget that works
    uint64_t everything = 0;  ///< the budget with room for every expert
    uint64_t working_set = 0; ///< slots that one token touches, in bytes
    int64_t n_slots = 0;
    int64_t n_experts = 0;
    int32_t n_classes = 0;
    std::string eviction;
    bool direct_io = false;
    uint64_t pinned = 0;     ///< of budget, memory that devices copy from at full speed
    std::string predictor;   ///< empty: nothing is read ahead
    uint64_t head_bytes = 0; ///< memory of the prediction heads, beside the budget
    std::string sidecar;     ///< the file whose heads are used; empty: none
    std::string head_reason; ///< why some layers are predicted from history alone
};

class Engine {
  public:
    /// Reads the headers of `path` (all split files) and checks the model. No expert byte is read. Errors:
    /// those of the headers; unsupported, for an unknown strategy.
    [[nodiscard]] static Result<std::shared_ptr<Engine>> open(const std::filesystem::path &path,
                                                              const EngineOptions &options);
    ~Engine();

    /// Makes the pool, before the first layer call: once the rest of the model is in memory, it is known what
    /// is left. `budget` in bytes, what exceeds everything is not taken. Errors: budget (below the smallest
    /// that works), out_of_memory, internal (called twice).
    /// `pinned`: a device's host buffer type, for as many bytes as `pinned_limit`; nullptr for none.
    [[nodiscard]] Status build_pool(uint64_t budget, ggml_backend_buffer_type_t pinned = nullptr,
                                    uint64_t pinned_limit = 0);

    /// Reads experts of routed banks, (layer, expert), the first first, into free slots until the first layer
    /// call begins (preloader.h). Once, after build_pool and every build_device_pool, which its thread would
    /// race with; does not block. Errors: internal (no pool, a second call, an expert that does not exist),
    /// out_of_memory (no thread).
    [[nodiscard]] Status preload(std::span<const std::pair<int32_t, int32_t>> experts);
    /// How many rows each expert of the routed banks was used for, by layer.
    [[nodiscard]] std::map<int32_t, std::vector<uint64_t>> uses() const;

    [[nodiscard]] const GgufModel &model() const { return model_; }
    [[nodiscard]] const ExpertIndex &index() const { return index_; }
    [[nodiscard]] const PoolPlan &plan() const { return plan_; }
    /// The record of an expert weight tensor by its GGUF name, or nullptr. Stable for the Engine's life.
    [[nodiscard]] const ExpertTensor *find(std::string_view name) const;
    [[nodiscard]] SlotTensor slot_tensor(const ExpertTensor &tensor) const;
    /// Bytes of an expert tensor straight from the file, for the rare caller that reads a weight back.
    [[nodiscard]] Status read_back(const ExpertTensor &tensor, uint64_t offset, std::span<std::byte> to);

    /// For fitting: what routed() was told, of every context.
    [[nodiscard]] Capture &capture() { return capture_; }

    /// Tells of a layer call, after its begin(): the experts of each row, [n_tokens][top_k], and from which
    /// hidden states the router chose them.
    void routed(int32_t group, const RouterInput &input, std::span<const int32_t> ids);
    /// Reads ahead for the layers after that call. On any one thread, before the call ends.
    void predict(int32_t group, const RouterInput &input, std::span<const int32_t> ids);

    [[nodiscard]] int32_t group_of(int32_t layer) const; ///< its routed bank; -1: no MoE layer
    /// The prefetcher, or nullptr when there is none.
    [[nodiscard]] Prefetcher *prefetcher() const { return prefetcher_.get(); }

    /// Makes the tier of a device, which owns these layers (all, if none are named), after build_pool and
    /// before preload() and the first layer call. Once for each device. `n_threads`: of the host, for a short
    /// probe of what both do with experts (device_probe.h); 0: none. Errors: DeviceTier::make's; internal (a
    /// layer that another device owns).
    [[nodiscard]] Status build_device_pool(ggml_backend_dev_t device, std::span<const int32_t> layers,
                                           uint64_t budget, const std::string &placement,
                                           int32_t n_threads = 0);
    /// The device that owns the group; nullptr: none does.
    [[nodiscard]] DeviceTier *device(int32_t group) const {
        return owners_.empty() ? nullptr : owners_[static_cast<size_t>(group)];
    }
    [[nodiscard]] std::span<const std::unique_ptr<DeviceTier>> devices() const { return devices_; }

    /// Reads stand-ins for experts from a sidecar. While no layer call runs. Errors: SurrogateSet::load's.
    [[nodiscard]] Status load_surrogates(const std::filesystem::path &sidecar);
    /// What stand-ins do; nullptr: this Engine has never been asked for any. make_surrogate_use(): from then
    /// on it is there; while no layer call runs.
    [[nodiscard]] SurrogateUse *surrogate_use() const { return surrogate_use_.get(); }
    SurrogateUse &make_surrogate_use();
    [[nodiscard]] int32_t top_k() const; ///< experts per token and layer, the most of any layer
    /// For each of the ids, 1 if the expert has no slot in memory and none is being read; ids that do not
    /// exist have none.
    [[nodiscard]] std::vector<uint8_t> absent(int32_t group, std::span<const int32_t> ids) const;

    [[nodiscard]] Timeline &timeline() { return timeline_; }
    [[nodiscard]] int32_t layer_of(int32_t group) const; ///< for messages

    struct GraphCount {
        uint64_t matmul_nodes = 0, delegated_nodes = 0, early_nodes = 0, waves = 0;
        uint64_t rows_direct = 0, rows_batched = 0;
    };
    void count_graph(const GraphCount &graph);
    void fail(Status status); ///< keeps the status for take_error() and counts it
    [[nodiscard]] std::optional<Status> take_error();
    [[nodiscard]] Counters counters() const;
    [[nodiscard]] uint64_t bytes_waiting() const {
        return reader_->bytes_waiting();
    } ///< of all reads not done
    void reset_counters();

  private:
    friend class LayerCall;
    friend class Prefetcher;
    friend class Preloader;
    friend class DeviceTier;
    friend class DeviceCall;

    struct Group {
        int32_t layer = 0;
        Bank bank = Bank::routed;
        int32_t size_class = 0;
        int32_t number = 0; ///< dense, within its class: what the strategy calls it
        int32_t n_expert = 0;
        std::vector<const ExpertTensor *> parts;    ///< in the order in which a block uses them
        std::array<uint64_t, max_parts> phase = {}; ///< of the part's bytes within its room in the slot
        std::unique_ptr<Slab[]> slabs;
    };
    struct SizeClass {
        std::vector<uint64_t> part_bytes;
        std::vector<uint64_t> part_room; ///< offset of each part's room in a slot
        uint64_t slot_bytes = 0;
        int64_t n_experts = 0; ///< of all its groups
        int32_t max_experts = 0;
        int32_t top_k = 0;           ///< experts per token and layer
        std::vector<int32_t> groups; ///< by their number in the class
        SlotPool pool;
        std::unique_ptr<policy::Eviction> eviction;
    };

    struct LinkSize { ///< what a layer call of the group moves
        double loads_per_call = 0.0;
        double slab_bytes = 0.0;
    };

    Engine() = default;
    [[nodiscard]] uint64_t slab_bytes(int32_t group) const;
    [[nodiscard]] LinkSize link_size(int32_t group) const;
    [[nodiscard]] Counters prefetch_bytes() const; ///< the counters alone
    /// Experts of the group that are nowhere and have at least that chance.
    [[nodiscard]] int32_t n_absent(int32_t group, std::span<const float> chances, float least) const;
    [[nodiscard]] bool some_missing() const; ///< some expert is not in memory
    void build_groups();
    void plan_pool(int64_t expert_used);
    [[nodiscard]] Status set_up_prefetch(const EngineOptions &options);

    // Under the lock:
    /// Evicts if it must, only what `may_leave` allows; false: nothing to evict.
    [[nodiscard]] bool give_slot(Group &group, int32_t expert, policy::Evictable may_leave);
    [[nodiscard]] bool give_slot(Group &group, int32_t expert) {
        return give_slot(group, expert, [](policy::SlabId) { return true; });
    }
    /// In memory, on its device, or on its way to either.
    [[nodiscard]] bool is_placed(int32_t group, int32_t expert) const;
    /// Queues the slab's reads behind all demand reads. False: it is there, or nothing may leave for it.
    bool prefetch(Group &group, int32_t expert, policy::Evictable may_leave);
    /// Takes back a prefetch none of whose reads has begun.
    bool withdraw(Group &group, int32_t expert);
    void used(const Group &group, Slab &slab); ///< a layer call needs it: was it prefetched in time?
    [[nodiscard]] int32_t n_free_slots() const;
    void evict(SizeClass &cls, policy::SlabId id);
    void request(Group &group, int32_t expert, size_t part, Priority priority);
    [[nodiscard]] std::byte *part_data(const Group &group, size_t part, int32_t slot) const;

    GgufModel model_;
    ExpertIndex index_;
    PoolPlan plan_;
    std::unordered_map<std::string_view, std::unique_ptr<ExpertTensor>> tensors_;
    Arrivals arrivals_;
    StallClock stalls_;
    Timeline timeline_;
    ReadTimeline read_timeline_{timeline_};
    Capture capture_;

    mutable std::mutex mutex_; ///< guards slabs' slots and pins, pools, strategies, counters
    std::vector<Group> groups_;
    std::vector<SizeClass> classes_;
    Counters counters_;
    std::optional<Status> error_;
    bool in_use_ = false; ///< a layer call has begun

    std::unique_ptr<Prefetcher> prefetcher_;
    double loads_per_call_ = 0.0; ///< a decayed average

    std::unique_ptr<SurrogateUse> surrogate_use_;
    std::unique_ptr<Preloader> preloader_;
    std::vector<std::unique_ptr<DeviceTier>> devices_; ///< their links' threads use everything above
    std::vector<DeviceTier *> owners_;                 ///< of each group; empty: there are no devices
    std::unique_ptr<SlabReader> reader_;               ///< last: its threads write to everything above
};

} // namespace spice

// Which slab leaves a full pool: the contract of the eviction strategies, and their factory.
//
// Who calls: the runtime's Engine for its pool, and sim/replay on recorded routing; a strategy never knows
// which. One object per pool. The order of the calls in one layer call is
//     begin_call(group, experts, weights)          once, before anything of it is loaded
//     victim(evictable), on_evict(it), on_load(x)  for each routed expert that is not resident
// and prefetches may put victim/on_evict/on_load between any two calls.
//
// Time: a strategy has no clock. It counts begin_calls; a *pass* is one walk through the groups, and begins
// when a begin_call names a group that is not above the one before it. Groups that are skipped are allowed.
//
// Thread: all calls from one thread at a time (whoever holds the Engine's lock). Nothing blocks, no I/O, no
// random numbers, no ggml: the same calls give the same victims everywhere. Memory is allocated in the
// factory only. Errors: none; ids outside the PoolShape, loading what is resident and evicting what is not
// are bugs of the caller (assert).
//
// Cost: measured 0.1 to 3 microseconds per layer call of one token (48 groups of 128 experts, up to 7
// victims), whatever the number of slots; `evictable` is asked once per victim for each slab that it refuses,
// so it should refuse few (the pinned slabs of the present call).
#pragma once

#include "policy/function_ref.h"

#include <cstddef>
#include <cstdint>
#include <memory>
#include <optional>
#include <span>
#include <string_view>

namespace spice::policy {

/// One slab: an expert of a bank. `group` numbers the MoE layers (banks) densely in execution order.
struct SlabId {
    int32_t group = 0;
    int32_t expert = 0;
    friend bool operator==(const SlabId &, const SlabId &) = default;
};

/// What a strategy must know of the pool that it serves.
struct PoolShape {
    int32_t n_groups = 0;
    int32_t n_experts = 0; ///< per group, the maximum
    int32_t n_slots = 0;   ///< how many slabs the pool can hold (about, if sizes are mixed): a hint
    int32_t top_k = 0; ///< experts per token, 0: unknown; tells the calls of many tokens from those of one

    /// Slabs numbered by group, then by expert.
    [[nodiscard]] size_t flat(SlabId id) const {
        return static_cast<size_t>(id.group) * static_cast<size_t>(n_experts) +
               static_cast<size_t>(id.expert);
    }
    [[nodiscard]] size_t n_slabs() const { return flat({n_groups, 0}); }
};

/// Which slabs may leave, or whether one is there.
using Evictable = FunctionRef<bool(SlabId)>;

class Eviction {
  public:
    Eviction() = default;
    Eviction(const Eviction &) = delete;
    Eviction &operator=(const Eviction &) = delete;
    virtual ~Eviction() = default;

    /// The name that make_eviction() knows it by.
    [[nodiscard]] virtual std::string_view name() const = 0;

    /// A layer call begins. `experts`: what it routes to, each once, in any order, resident or not.
    /// `weights`: for each of them its gate weight summed over the tokens of the call or, where gate weights
    /// are not known, the number of tokens that use it (only the relative size matters); empty when neither
    /// is known.
    virtual void begin_call(int32_t group, std::span<const int32_t> experts,
                            std::span<const float> weights) = 0;

    /// The slab takes a slot, on demand or by prefetch. Call it when the slot is given (the read may still
    /// run), so that victim() knows all that occupies the pool; a read that failed is an on_evict().
    virtual void on_load(SlabId id) = 0;

    /// The slab left its slot: a victim of this strategy, or for any other reason.
    virtual void on_evict(SlabId id) = 0;

    /// The slab that should leave next among those that are resident and evictable, or nullopt when there is
    /// none. Changes nothing that can be seen: the slab leaves with on_evict().
    [[nodiscard]] virtual std::optional<SlabId> victim(Evictable evictable) = 0;
};

/// The strategy of that name, or nullptr for a name not in eviction_names() or for an impossible shape (a
/// number below zero, no groups, no experts).
[[nodiscard]] std::unique_ptr<Eviction> make_eviction(std::string_view name, const PoolShape &shape);

/// The known names; the default first.
[[nodiscard]] std::span<const std::string_view> eviction_names();

} // namespace spice::policy

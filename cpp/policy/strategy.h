// A strategy: everything that is decided about experts, as one object with a name. Which slab leaves the fast
// pool, where the experts of a call are computed, what is loaded ahead, how long a draft is.
//
// Who calls: sim/ (the runtime composes the same Eviction, Placement and Predictor classes itself). The fast
// pool is the device's, or memory where there is no device. The order of the calls in one layer call is
//     begin_sequence()                              before the first call of a text
//     begin_call(call)                              once its routing is known
//     placement().place(...)
//     full(x), victim(x, ...), on_evict(it), on_load(x)   for each slab that takes a slot, now or later
//     plan(context, wanted)                         what to load ahead, replacing what waits from before
// With speculative decoding, before the layer calls of a step:
//     draft_length(costs)    how many tokens to draft; 0: none
//     draft_token(...)       after each drafted token; plan() follows
//     verified(...)          after the layer calls of the step
//
// Thread: one at a time per object. Nothing blocks, no clock, no I/O; the same calls give the same decisions.
// Errors: none; wrong numbers are bugs of the caller (assert).
#pragma once

#include "policy/eviction.h"
#include "policy/placement.h"
#include "policy/predictor.h"

#include <memory>
#include <optional>
#include <span>
#include <string_view>
#include <vector>

namespace spice::policy {

struct StrategyCall {
    int32_t group = 0;
    std::span<const int32_t> experts; ///< that it routes to, each once
    std::span<const int32_t> rows;    ///< tokens that use each of them
    std::span<const float> weights;   ///< gate weights summed over the tokens, or rows where none are known
    int32_t n_rows = 0;               ///< tokens of the call
};

/// How things stand when loads ahead are planned; times in seconds.
struct PlanContext {
    int32_t group = 0;           ///< of the present call; n_groups - 1 while a draft is made
    int32_t rows = 1;            ///< tokens of the present call
    double transfer = 0.0;       ///< of one slab to the fast pool
    double layer = 0.0;          ///< between the starts of two layer calls, lately
    double link_queued = 0.0;    ///< until the link has done what must go first
    double link_bandwidth = 0.0; ///< bytes per second
    double slab_bytes = 0.0;
    double draft_left = 0.0;               ///< until the draft is complete; 0 outside of one
    const PlacementCosts *costs = nullptr; ///< nullptr: there is no device, or nothing was placed yet
    Evictable present;                     ///< in the fast pool, or on its way there
    Predictor *predictor = nullptr;        ///< nullptr: there are no predictions
};

/// What a draft costs; seconds.
struct DraftCosts {
    double token = 0.0;      ///< to draft one token
    double transfer = 0.0;   ///< of one slab
    double layer = 0.0;      ///< of one layer call of one token without waiting for slabs
    double row = 0.0;        ///< that each further row adds to it
    double acceptance = 0.0; ///< the chance that a drafted token is accepted, lately
};

class Strategy {
  public:
    Strategy() = default;
    Strategy(const Strategy &) = delete;
    Strategy &operator=(const Strategy &) = delete;
    virtual ~Strategy() = default;

    [[nodiscard]] virtual std::string_view name() const = 0;
    [[nodiscard]] virtual Placement &placement() = 0;

    /// Another text begins; the pool stays as it is.
    virtual void begin_sequence() {}
    virtual void begin_call(const StrategyCall &call) = 0;
    /// Whether a slab must leave before `incoming` can take a slot.
    [[nodiscard]] virtual bool full(SlabId incoming) const = 0;
    /// Whether the pool is shared out over the layers, so that `incoming` can only take a slot of its own.
    [[nodiscard]] virtual bool split() const { return false; }
    virtual void on_load(SlabId id) = 0;
    virtual void on_evict(SlabId id) = 0;
    /// Who leaves for `incoming`; nullopt: nobody may, or it is not worth it (for a load ahead).
    [[nodiscard]] virtual std::optional<SlabId> victim(SlabId incoming, bool demand, Evictable evictable) = 0;

    /// What to load ahead, in order. Replaces what an earlier plan wanted and the link has not begun.
    virtual void plan(const PlanContext &, std::vector<SlabId> &) {}
    /// The farthest horizon whose predictions plan() asks for; 0: it needs no predictor.
    [[nodiscard]] virtual int32_t horizon() const { return 0; }
    /// The share of the experts that its published predictor names, by horizon: what a simulated one is
    /// given.
    [[nodiscard]] virtual std::span<const float> published_recall() const { return {}; }

    /// Residents to begin with, the first ones first, chosen from uses counted beforehand
    /// [n_groups][n_experts]; none: the pool starts empty.
    virtual void start_with(std::span<const int64_t>, std::vector<SlabId> &) {}

    [[nodiscard]] virtual int32_t draft_length(const DraftCosts &) { return 0; }
    /// The draft's guess of what its last token routes to: ids [n_groups][k].
    virtual void draft_token(std::span<const int32_t>, int32_t) {}
    /// Of `drafted` tokens `accepted` were right.
    virtual void verified(int32_t, int32_t) {}
};

/// The strategy of that name for a fast pool of that shape; nullptr for a name not in strategy_names(), an
/// impossible shape, or a pool that is too small for the strategy (split pools need a slot per group).
[[nodiscard]] std::unique_ptr<Strategy> make_strategy(std::string_view name, const PoolShape &pool);

/// The known names; the default first.
[[nodiscard]] std::span<const std::string_view> strategy_names();

} // namespace spice::policy

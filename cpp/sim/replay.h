// Replays recorded routing through a pool of slots: hits and misses of an eviction strategy, and Belady's
// optimum for the same calls (where calls go in waves: near it). No time, no bytes: one slab is one slot.
//
// How a call is served (the same for strategies and for Belady): it asks for each of its experts once.
// Resident ones are hits and are served first. When the call has at most `wave` experts, all of them are
// pinned until it ends; a larger one (prefill) lets its hits go once they are served, and takes its misses in
// waves of `wave` that are pinned one at a time. Every miss is loaded; a full pool evicts one slab for it
// that is not pinned.
//
// Who calls: the binding (bench/eviction.py, tests). Any thread; a call keeps no state and uses no other
// thread. Errors: Status with Code::unsupported, whose message names what is wrong with the arguments.
#pragma once

#include "store/status.h"

#include <cstdint>
#include <span>
#include <string_view>
#include <vector>

namespace spice::sim {

/// Recorded routing, borrowed. ids: [layers][tokens][top_k]; sequences are concatenated along tokens.
struct Routing {
    std::span<const int32_t> ids;
    std::span<const float> weights; ///< gate weights, same shape, or empty
    std::span<const int32_t> lens;  ///< tokens of each sequence
    int32_t n_layers = 0;
    int32_t n_tokens = 0;
    int32_t top_k = 0;
    int32_t n_experts = 0; ///< per layer
    /// Recorded predictions of layers ahead, or empty: [layers][tokens][n_horizons][n_named] experts that the
    /// layer `horizon` calls later was expected to use, -1: nobody, and the chance of each.
    std::span<const int32_t> predicted = {};
    std::span<const float> chances = {};
    int32_t n_horizons = 0;
    int32_t n_named = 0;
};

struct ReplayOptions {
    int32_t n_slots = 0; ///< one pool over all layers
    int32_t batch = 1;   ///< tokens of a sequence per call
    int32_t prefill =
        0;            ///< that many tokens at the start of each sequence are one call; -1: the whole sequence
    int32_t wave = 0; ///< slots that one call may pin; 0: all of them
    bool keep = false; ///< the pool and what the strategy learned outlive a sequence
};

/// Counts of (call, expert) pairs.
struct LayerHits {
    uint64_t hits = 0;
    uint64_t misses = 0;
    uint64_t prefill_hits = 0; ///< in the calls of ReplayOptions::prefill; not in the two above
    uint64_t prefill_misses = 0;
};

struct ReplayResult {
    std::vector<LayerHits> layers;
    uint64_t n_calls = 0;
};

[[nodiscard]] Result<ReplayResult> replay(const Routing &routing, const ReplayOptions &options,
                                          std::string_view strategy);

/// The most hits that any choice of victims can get, knowing the future. `per_layer`: the pool is split
/// equally, each layer has its own part (the first layers get what does not divide). A part that is
/// narrower than a call serves it in waves, which one pool with wave 0 need not do: only there can it have
/// more hits than one pool.
[[nodiscard]] Result<ReplayResult> belady(const Routing &routing, const ReplayOptions &options,
                                          bool per_layer);

} // namespace spice::sim

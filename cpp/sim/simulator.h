// Discrete-event simulation of a model on a machine: recorded routing, virtual time, the strategies of
// policy/.
//
// What takes time: the weights that every token reads; experts on the device and on the host, each engine one
// after the other; transfers, each link one after the other, demands ahead of loads ahead. A load ahead that
// arrives after its layer has begun is late, and the layer waits for it. Loads ahead take slots when they
// begin.
//
// Tiers. With a device: file -> memory -> device. Memory holds every expert, or `memory_slots` of them, and
// the rest comes from the file. Without a device: file -> memory, and the host computes.
//
// Kept simple, in favour of nobody: routing and predictions take no time; demands of one call are queued at
// its start in their final order, so that no load ahead slips into a gap between them; memory's own pool is
// filled by demands and plans alike.
//
// Who calls: the binding (spice-sim, bench/). Any thread; no state is kept between runs. Errors: Status with
// Code::unsupported that names the argument.
#pragma once

#include "sim/machine.h"
#include "sim/replay.h"
#include "store/status.h"

#include <cstdint>
#include <string>
#include <vector>

namespace spice::sim {

struct SimOptions {
    std::string strategy = "spice";
    int32_t slots = 0;                     ///< of the fast pool
    int32_t memory_slots = 0;              ///< with a device: experts that memory holds; 0: all of them
    std::string memory_eviction = "spice"; ///< who leaves memory, where it does not hold all
    int32_t batch = 1;                     ///< tokens of a sequence per decode step
    int32_t prefill = 0;         ///< tokens at the start of each sequence that are one call; -1: all
    int32_t prefill_batch = 512; ///< tokens of a prefill per call
    bool keep = true;            ///< pools and what was learned outlive a sequence
    /// policy::predictor_names(), "recorded": what the routing has, or "none"; empty: "replay" with the
    /// strategy's published recall.
    std::string predictor{};
    std::vector<float> recall{};    ///< of "replay", by horizon; empty: all of it (or what is published)
    int32_t draft = 0;              ///< tokens drafted per step for strategies that do not say so themselves
    double draft_seconds = 0.0;     ///< of one drafted token
    double acceptance = 0.75;       ///< chance that a drafted token is right, given that those before it are
    double fidelity = 0.9;          ///< share of a drafted token's experts that the target will use, too
    std::vector<int64_t> profile{}; ///< uses by [layer][expert] for strategies that start with a filled pool
    uint64_t seed = 1;
};

/// Counts of (call, expert) pairs of decode; times in seconds of virtual time.
struct SimResult {
    int64_t tokens = 0; ///< decoded; with a draft, those accepted and one more per step
    int64_t steps = 0;
    int64_t prefill_tokens = 0;
    double seconds = 0.0; ///< of decode
    double prefill_seconds = 0.0;
    double draft_seconds = 0.0; ///< part of `seconds`
    double other_seconds = 0.0; ///< part of `seconds`: everything beside routed experts and drafts
    int64_t hits = 0;           ///< ready in the fast pool
    int64_t late = 0;           ///< on the way there
    int64_t misses = 0;         ///< neither
    int64_t fetched = 0;        ///< of the misses, those sent to the fast pool at once
    int64_t hosted = 0;         ///< computed by the host, hits among them
    int64_t ahead = 0;          ///< slabs loaded ahead, fills among them; prefills included
    int64_t ahead_used = 0;
    int64_t ahead_wasted = 0; ///< evicted before any use
    int64_t planned = 0;      ///< of `ahead`, those that a strategy planned: on predictions, and not fills
    int64_t planned_used = 0;
    int64_t planned_wasted = 0;
    int64_t disk_demands = 0; ///< slabs read from the file for a call, where there is a device, too
    double link_bytes = 0.0;  ///< to the fast pool, decode and prefill
    double disk_bytes = 0.0;  ///< from the file, where there is a device
    double link_busy = 0.0;
    double disk_busy = 0.0;
    double device_busy = 0.0;
    double host_busy = 0.0;
    double total_seconds = 0.0; ///< decode and prefill
    double joules = 0.0;        ///< of decode, drafts included; 0 where the machine's power is not known
    double prefill_joules = 0.0;
};

[[nodiscard]] Result<SimResult> simulate(const Routing &routing, const Machine &machine, const Model &model,
                                         const SimOptions &options);

} // namespace spice::sim

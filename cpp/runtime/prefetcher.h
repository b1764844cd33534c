// Moves experts ahead of need: at each layer call it predicts what the next layers will route to, queues
// reads of what is not there, the likeliest first, and has what is in memory and not on its device sent up
// (device_ahead.cpp). Chances, depth, choice and whether it pays, for memory and for devices apart, are
// decided by policy/; what is measured (time, bandwidth) and what is done (slots, reads) is here.
//
// Thread: on_call() from the compute threads, after LayerCall::begin; one at a time through a lock of its
// own, the Engine's lock inside it for what it does to the pools. Nothing blocks but a device's copies from
// pageable memory. Cost: policy's and the heads', nothing where every expert is in memory and on its device.
// Errors: none; a prefetch that fails is read again on demand.
#pragma once

#include "compute/router_heads.h"
#include "policy/benefit_meter.h"
#include "policy/gating.h"
#include "policy/lookahead.h"
#include "policy/predictor.h"
#include "policy/prefetch_plan.h"
#include "runtime/ahead.h"
#include "runtime/capture.h"
#include "runtime/head_setup.h"
#include "runtime/prefetch_clock.h"

#include <cstdint>
#include <memory>
#include <mutex>
#include <optional>
#include <span>
#include <string>
#include <vector>

namespace spice {

class Engine;

struct PrefetchOptions {
    bool enabled = true;
    std::string predictor = {}; ///< a name of policy::predictor_names(); empty: the default
    bool always = false;        ///< do not turn off what does not pay: for benches
};

/// What predicting has come to, since the last reset.
struct PrefetchCounters {
    uint64_t calls = 0;           ///< layer calls that were predicted from
    uint64_t horizons = 0;        ///< layers that were predicted, of all calls
    uint64_t expected = 0;        ///< experts of the top-k predicted for the next layer
    uint64_t correct = 0;         ///< of these, routed to
    double seconds = 0.0;         ///< of one thread: predicting and planning, without the reads themselves
    bool on = false;              ///< now
    double saving = 0.0;          ///< measured share of the waiting; below zero: it costs
    uint64_t switches = 0;        ///< turned on or off
    bool device_on = false;       ///< sending ahead to devices, now
    double device_saving = 0.0;   ///< measured share of the layer calls' time
    uint64_t device_switches = 0; ///< turned on or off
};

class Prefetcher {
  public:
    /// `heads` as made for the Engine's model. Errors: unsupported, for a predictor that is not known or that
    /// needs heads which are not there.
    [[nodiscard]] static Result<std::unique_ptr<Prefetcher>> make(Engine &engine, HeadSet heads,
                                                                  const PrefetchOptions &options);

    /// A call of `group` routes [n_tokens][top_k] `ids`, chosen from `input`.
    void on_call(int32_t group, const RouterInput &input, std::span<const int32_t> ids);

    /// The chances that the group's next call uses each expert, as last predicted; empty: not predicted.
    [[nodiscard]] std::vector<float> forecast(int32_t group) const;

    /// For the `replay` predictor: what will be routed from the next call on, and how much of it is told.
    /// Errors: malformed (a group or an expert that does not exist); nothing is told then.
    [[nodiscard]] Status set_future(std::vector<policy::FutureCall> calls, std::span<const float> recall,
                                    uint64_t seed);

    [[nodiscard]] std::string_view predictor() const { return predictor_->name(); }
    [[nodiscard]] std::string_view reason() const { return heads_.reason; } ///< why layers have no heads
    [[nodiscard]] uint64_t bytes() const { return heads_.bytes(); }
    [[nodiscard]] PrefetchCounters counters() const;
    void reset_counters();

  private:
    struct Queued {
        int32_t group = 0;
        int32_t expert = 0;
        friend bool operator==(const Queued &, const Queued &) = default;
    };
    struct Forecast { ///< of one group's next call
        bool made = false;
        int32_t horizon = 0;
        std::vector<float> chances;
    };

    explicit Prefetcher(Engine &engine) : engine_(engine) {}
    void check_forecast(int32_t group, std::span<const int32_t> ids);
    void end_pass();
    void report_memory(double stalled);
    void report_devices(double stalled);
    struct Reach { ///< how many layers ahead: whether to look (0 or 1), and then how far was looked
        int32_t memory = 0;
        int32_t devices = 0;
    };
    [[nodiscard]] Reach looks(int64_t rows) const;
    [[nodiscard]] Reach predict(int32_t group, const RouterInput &input, std::span<const int32_t> ids,
                                Reach look);
    [[nodiscard]] std::span<const float> scores(int32_t group, int32_t horizon, const RouterInput &input,
                                                std::span<const int32_t> ids);
    [[nodiscard]] double act(int32_t group, int32_t depth);
    [[nodiscard]] double act_on_devices(int32_t group, int32_t depth);
    void take_back();
    [[nodiscard]] int32_t target(int32_t group, int32_t horizon) const {
        return (group + horizon) % n_groups_;
    }

    Engine &engine_;
    HeadSet heads_;
    std::shared_ptr<const compute::RouterHeads> used_heads_;
    policy::Gating gating_;
    policy::LookaheadOptions lookahead_;
    policy::PlanOptions plan_options_;
    int32_t n_groups_ = 0;
    int32_t n_experts_ = 0;
    int32_t top_k_ = 0;
    bool always_ = false;

    mutable std::mutex mutex_; ///< guards everything below
    std::unique_ptr<policy::Predictor> predictor_;
    std::optional<policy::PrefetchPlanner> planner_;
    std::optional<compute::HeadCall> head_call_;
    policy::BenefitMeter meter_;        ///< of reads
    policy::BenefitMeter device_meter_; ///< of copies to devices
    PrefetchClock clock_;
    PrefetchCounters counters_;
    std::vector<Forecast> forecasts_;        ///< by group
    std::vector<std::vector<int32_t>> last_; ///< by group: the experts of its last call's last token
    std::vector<Queued> queued_;             ///< submitted and not known to be read
    std::vector<Queued> taken_back_;
    std::vector<ComingCall> coming_; ///< scratch
    bool devices_planned_ = false;   ///< a device may have something to send ahead
    AheadReport seen_ahead_;
    std::vector<float> scores_; ///< [max_rows][n_experts]
    std::vector<float> scratch_;
    double seen_stalled_ = 0.0;
    double pass_predicting_ = 0.0; ///< seconds, in the present pass
    uint64_t seen_read_ = 0;
    uint64_t seen_missed_ = 0, seen_ready_ = 0, seen_late_ = 0, seen_wasted_ = 0;
};

} // namespace spice

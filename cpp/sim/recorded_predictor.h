// `recorded`: the predictor whose output is in the trace, as it was when the model ran.
//
// Who calls: the Simulator, at() before each begin_call(). Thread: one at a time; nothing blocks. Errors:
// none; the routing was checked.
#pragma once

#include "policy/predictor.h"
#include "sim/replay.h"

#include <algorithm>

namespace spice::sim {

class RecordedPredictor final : public policy::Predictor {
  public:
    RecordedPredictor(const Routing &routing, int32_t max_horizon)
        : r_(routing), max_horizon_(std::min(max_horizon, routing.n_horizons)) {}

    [[nodiscard]] std::string_view name() const override { return "recorded"; }
    [[nodiscard]] policy::ScoreSource scores() const override { return policy::ScoreSource::none; }
    [[nodiscard]] int32_t max_horizon() const override { return max_horizon_; }

    /// The next call is of tokens [from, to).
    void at(int32_t from, int32_t to) {
        from_ = from;
        to_ = to;
    }
    void begin_call(int32_t /*group*/, std::span<const int32_t> /*ids*/, int32_t /*rows*/) override {}

    /// Experts that were not named have no chance; of several rows, each is independent. False where nothing
    /// was named.
    bool predict(int32_t group, int32_t horizon, std::span<const float> scores,
                 std::span<float> out) override;

  private:
    const Routing &r_;
    int32_t max_horizon_;
    int32_t from_ = 0;
    int32_t to_ = 0;
};

} // namespace spice::sim

// From recorded routing to layer calls: the experts of a batch, and the steps of speculative decoding.
//
// Who calls: the Simulator and the replay. One object per run; no errors.
#pragma once

#include "policy/strategy.h"
#include "sim/simulator.h"

#include <span>
#include <vector>

namespace spice::sim {

class BatchBuilder {
  public:
    explicit BatchBuilder(const Routing &routing);

    /// Tokens [from, to) in one layer; valid until the next call.
    [[nodiscard]] policy::StrategyCall call(int32_t layer, int32_t from, int32_t to);

  private:
    const Routing &r_;
    std::vector<uint64_t> seen_; ///< by expert: the last round it was in
    std::vector<size_t> place_;
    uint64_t round_ = 0;
    std::vector<int32_t> experts_;
    std::vector<int32_t> rows_;
    std::vector<float> weights_;
};

/// What a draft guesses and how much of it is accepted: random, but a function of the seed and the token.
class DraftSteps {
  public:
    DraftSteps(const Routing &routing, const SimOptions &options)
        : r_(routing), options_(options),
          guess_(static_cast<size_t>(routing.n_layers) * static_cast<size_t>(routing.top_k)) {}

    /// How many of the `drafted` tokens after `at` are right: each with chance `acceptance`, up to the first
    /// that is wrong.
    [[nodiscard]] int32_t accepted(int32_t at, int32_t drafted) const;
    /// The experts that the draft names for a token, [layers][top_k]: each is the recorded one with chance
    /// `fidelity`, else any.
    [[nodiscard]] std::span<const int32_t> guessed(int32_t token);

  private:
    const Routing &r_;
    const SimOptions &options_;
    std::vector<int32_t> guess_;
};

} // namespace spice::sim

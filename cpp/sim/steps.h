// From recorded routing to layer calls: the experts of a batch, and the steps of speculative decoding.
//
// Who calls: the Simulator and the replay. One object per run; no errors.
#pragma once

#include "policy/strategy.h"
#include "sim/simulator.h"

#include <algorithm>
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

/// The steps of a sequence, and what a draft guesses and how much of it is accepted: random, but a function
/// of the seed and the token.
class Steps {
  public:
    Steps(const Routing &routing, const SimOptions &options)
        : r_(routing), options_(options),
          guess_(static_cast<size_t>(routing.n_layers) * static_cast<size_t>(routing.top_k)) {}

    /// How many of the `drafted` tokens after `at` are right: each with chance `acceptance`, up to the first
    /// that is wrong.
    [[nodiscard]] int32_t accepted(int32_t at, int32_t drafted) const;
    /// The experts that the draft names for a token, [layers][top_k]: each is the recorded one with chance
    /// `fidelity`, else any.
    [[nodiscard]] std::span<const int32_t> guessed(int32_t token);

    /// Calls `use(begin, end)` for the calls of the prefill of a sequence of tokens [from, to). Returns where
    /// decoding begins.
    template <class Use>
    int32_t for_each_prefill(int32_t from, int32_t to, const Use &use) const {
        const int32_t end =
            options_.prefill < 0 || options_.prefill > to - from ? to : from + options_.prefill;
        for (int32_t at = from; at < end;) {
            const int32_t next = at + std::min(options_.prefill_batch, end - at);
            use(at, next);
            at = next;
        }
        return end;
    }
    /// The same for the decode steps of tokens [from, to), when the strategy does not choose the draft's
    /// length.
    template <class Use>
    void for_each_step(int32_t from, int32_t to, const Use &use) const {
        for (int32_t at = from; at < to;) {
            const int32_t drafted = std::min(options_.draft, to - at - 1);
            const int32_t end = drafted > 0 ? at + 1 + drafted : std::min(at + options_.batch, to);
            use(at, end);
            at = drafted > 0 ? at + 1 + accepted(at, drafted) : end;
        }
    }

  private:
    const Routing &r_;
    const SimOptions &options_;
    std::vector<int32_t> guess_;
};

} // namespace spice::sim

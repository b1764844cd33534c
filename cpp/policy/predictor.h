// Which experts the next layers will use: calibrated chances, before their routers run.
//
// Who calls: the runtime's Prefetcher, the benches and the simulator; a predictor never knows which. One
// object per stream of layer calls. The order of the calls is
//     begin_call(group, ids, rows)           at every layer call, prefill included, once its routing is known
//     predict(group, horizon, scores, out)   any horizons of the present group, once each, any or none
// begin_call() also shows the predictor how good its earlier predictions for this group were, and it learns
// from that; there is nothing else to tell it. Groups may be skipped; a pass begins when a call's group is
// not above the one before it, and horizons past the last group mean the first groups of the next pass.
//
// Thread: all calls from one thread at a time. Nothing blocks, no I/O, no clock; the same calls give the same
// chances everywhere. Memory: allocated in the factory, bounded by RoutingHistory's bound plus
// (horizons + 1)^2 * max_rows * 3 floats per expert, and what set_future() is given.
// Errors: none; ids and horizons outside the shape are bugs of the caller (assert). Scores that are not
// finite count as the lowest.
//
// The predictors are one machine (online logistic mixing of features, Mixer) with some of its features:
//
//   name      scores()  features                                                    papers.md
//   ensemble  best      all of the below                                            the default
//   router    frozen    scores of the next routers on the present hidden state      AdapMoE, SPICE's draft
//   adapter   fitted    scores of fitted heads                                      SpecPrefetch, section 4
//   draft     fitted    scores, and which experts follow those of this pass         SPICE, section 1
//                       and of the token before
//   history   none      use, last use, which expert follows which: ids only         section 6
//   replay    none      the future itself (set_future), or a stated share of it     the oracle
#pragma once

#include "policy/routing_history.h"

#include <cstdint>
#include <memory>
#include <span>
#include <string_view>
#include <vector>

namespace spice::policy {

/// Which router scores a predictor wants to be given.
enum class ScoreSource : uint8_t {
    none,
    frozen, ///< the model's own routers
    fitted, ///< heads from a sidecar
    best,   ///< fitted where there are any, else frozen
};

/// One layer call of a recorded future: group, and ids [rows][k].
struct FutureCall {
    int32_t group = 0;
    int32_t rows = 1;
    std::vector<int32_t> ids;
};

class Predictor {
  public:
    static constexpr int32_t max_rows = 8; ///< calls of more rows teach, but nothing is predicted from them

    Predictor() = default;
    Predictor(const Predictor &) = delete;
    Predictor &operator=(const Predictor &) = delete;
    virtual ~Predictor() = default;

    /// The name that make_predictor() knows it by.
    [[nodiscard]] virtual std::string_view name() const = 0;
    [[nodiscard]] virtual ScoreSource scores() const = 0;
    /// Horizons that predict() knows: 1 .. max_horizon().
    [[nodiscard]] virtual int32_t max_horizon() const = 0;

    /// `group` routes `rows` tokens to ids [rows][k], k <= top_k, each row's experts distinct.
    virtual void begin_call(int32_t group, std::span<const int32_t> ids, int32_t rows) = 0;

    /// out[n_experts]: the chance that the call of group+horizon uses the expert for any of its rows, where
    /// `group` is that of the last begin_call(), and the rows are taken to be the same tokens.
    /// `scores`: ranking scores (gating.h) of group+horizon for each row, [rows][n_experts]; empty when there
    /// are none, and then history alone speaks. False, and zeros, when nothing can be said: the present call
    /// has more than max_rows rows, or the future is not known.
    virtual bool predict(int32_t group, int32_t horizon, std::span<const float> scores,
                         std::span<float> out) = 0;

    /// `replay` only, others ignore it: what will be routed, from the next begin_call() on. `recall`: for
    /// each horizon the share of it that is told, [max_horizon()], the rest replaced by wrong experts, drawn
    /// by a generator that starts from `seed`; empty: all of it.
    virtual void set_future(std::vector<FutureCall> calls, std::span<const float> recall, uint64_t seed);
};

/// The predictor of that name, or nullptr for a name not in predictor_names() or for an impossible shape (no
/// groups, no experts, top_k not in 1 .. n_experts, no horizon, more than 2^16 groups or experts).
[[nodiscard]] std::unique_ptr<Predictor> make_predictor(std::string_view name, const RoutingShape &shape);

/// The known names; the default first.
[[nodiscard]] std::span<const std::string_view> predictor_names();

} // namespace spice::policy

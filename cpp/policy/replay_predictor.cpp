// `replay`: the predictor that has been told the future. Bounds what any predictor can win, and shows what a
// stated recall would win. The recorded calls are followed in order; where the text takes another way than
// the recording, the predictions are simply wrong.
#include "policy/predictors.h"
#include "policy/split_mix.h"

#include <algorithm>
#include <cassert>
#include <utility>

namespace spice::policy {

namespace {

constexpr uint8_t used = 1;
constexpr uint8_t replacement = 2;

/// A fixed sequence from a seed.
class Random {
  public:
    explicit Random(uint64_t seed) : state_(seed) {}
    uint64_t next() { return split_mix(std::exchange(state_, state_ + split_mix_step)); }
    float uniform() { return static_cast<float>(next() >> 40) * 0x1.0p-24F; }

  private:
    uint64_t state_;
};

class ReplayPredictor final : public Predictor {
  public:
    explicit ReplayPredictor(const RoutingShape &shape)
        : n_groups_(shape.n_groups), max_horizon_(shape.max_horizon),
          recall_(static_cast<size_t>(shape.max_horizon), 1.0F), told_(static_cast<size_t>(shape.n_experts)) {
    }

    [[nodiscard]] std::string_view name() const override { return "replay"; }
    [[nodiscard]] ScoreSource scores() const override { return ScoreSource::none; }
    [[nodiscard]] int32_t max_horizon() const override { return max_horizon_; }

    void set_future(std::vector<FutureCall> calls, std::span<const float> recall, uint64_t seed) override {
        calls_ = std::move(calls);
        seed_ = seed;
        next_ = 0;
        known_ = false;
        std::fill(recall_.begin(), recall_.end(), 1.0F);
        for (size_t i = 0; i < std::min(recall.size(), recall_.size()); ++i) {
            recall_[i] = std::clamp(recall[i], 0.0F, 1.0F);
        }
    }

    void begin_call(int32_t group, std::span<const int32_t> /*ids*/, int32_t rows) override {
        // Calls that were not made this time (or not recorded) are passed over, within one walk.
        const size_t end = std::min(calls_.size(), next_ + static_cast<size_t>(n_groups_));
        for (size_t i = next_; i < end; ++i) {
            if (calls_[i].group != group) continue;
            next_ = i + 1;
            known_ = rows > 0 && rows <= max_rows;
            return;
        }
        known_ = false;
    }

    bool predict(int32_t group, int32_t horizon, std::span<const float> /*scores*/,
                 std::span<float> out) override {
        assert(horizon >= 1 && horizon <= max_horizon_);
        std::fill(out.begin(), out.end(), 0.0F);
        const size_t at = next_ + static_cast<size_t>(horizon) - 1;
        if (!known_ || at >= calls_.size() || calls_[at].group != (group + horizon) % n_groups_) return false;
        const float recall = recall_[static_cast<size_t>(horizon) - 1];
        Random random(seed_ ^ (static_cast<uint64_t>(at) << 8) ^ static_cast<uint64_t>(horizon));
        std::fill(told_.begin(), told_.end(), uint8_t{0});
        for (const int32_t expert : calls_[at].ids) told_[static_cast<size_t>(expert)] = used;
        int32_t replaced = 0;
        int32_t wrong = static_cast<int32_t>(std::count(told_.begin(), told_.end(), uint8_t{0}));
        for (size_t e = 0; e < told_.size(); ++e) {
            if (told_[e] != used) continue;
            if (recall >= 1.0F || random.uniform() < recall) {
                out[e] = recall;
            } else {
                ++replaced;
            }
        }
        for (; replaced > 0 && wrong > 0; --replaced, --wrong) { // the n-th of the wrong ones not yet told
            auto n = static_cast<int32_t>(random.next() % static_cast<uint64_t>(wrong));
            for (size_t e = 0; e < told_.size(); ++e) {
                if (told_[e] != 0 || n-- > 0) continue;
                told_[e] = replacement;
                out[e] = recall;
                break;
            }
        }
        return true;
    }

  private:
    int32_t n_groups_;
    int32_t max_horizon_;
    std::vector<float> recall_;
    std::vector<FutureCall> calls_;
    uint64_t seed_ = 0;
    size_t next_ = 0; ///< the call after the present one
    bool known_ = false;
    std::vector<uint8_t> told_; ///< scratch, by expert
};

} // namespace

std::unique_ptr<Predictor> make_replay_predictor(const RoutingShape &shape) {
    return std::make_unique<ReplayPredictor>(shape);
}

} // namespace spice::policy

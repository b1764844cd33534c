// `moe-speq`: a quantised copy of the model drafts and thereby names the experts that the verification will
// need; they are loaded during the draft; misses are fetched.
//
// Source: MoE-SpeQ, see moe_speq.h. Three phases: I, while the first tokens are drafted, nothing is loaded
// (what is cached serves them); II, the slabs that most drafted tokens name, as many as the link can bring
// until the draft is complete; III, after the draft, everything missing in layer order. Evicted is what the
// rest of the buffer names least, the one not used for longest among equals. The governor chooses the draft's
// length. Its copy of the experts takes memory from the cache: choose the number of slots accordingly.
// Constants: phase I is the first 0.2 k tokens (the successor's code, which also has at most 32 tokens);
// drafts of 1 to 16 tokens; phase II wants slabs that at least 2 tokens name; decay .25 of measured rates
// (successor's EMA).
#include "policy/moe_speq.h"
#include "policy/strategy_list.h"

#include <algorithm>

namespace spice::policy {

namespace {

constexpr int32_t most_drafted = 16;
constexpr double prime_share = 0.2;
constexpr int32_t confident = 2;
constexpr double rate = 0.25;

class MoeSpeq final : public Strategy {
  public:
    explicit MoeSpeq(const PoolShape &pool)
        : pool_(pool), buffer_(pool), used_(pool.n_slabs(), 0), placement_(make_placement("all-fetch")) {}

    [[nodiscard]] std::string_view name() const override { return "moe-speq"; }
    [[nodiscard]] Placement &placement() override { return *placement_; }

    void begin_call(const StrategyCall &call) override {
        buffer_.passed(call.group);
        for (const int32_t e : call.experts) used_[pool_.flat({call.group, e})] = ++stamp_;
        asked_ += static_cast<int64_t>(call.experts.size());
    }
    [[nodiscard]] bool full(SlabId) const override {
        return residents_.size() >= static_cast<size_t>(pool_.n_slots);
    }
    void on_load(SlabId id) override {
        ++loaded_;
        used_[pool_.flat(id)] = ++stamp_;
        residents_.push_back(id);
    }
    void on_evict(SlabId id) override {
        const auto it = std::find(residents_.begin(), residents_.end(), id);
        *it = residents_.back();
        residents_.pop_back();
    }
    [[nodiscard]] std::optional<SlabId> victim(SlabId incoming, bool demand, Evictable evictable) override {
        std::optional<SlabId> least;
        for (const SlabId id : residents_) {
            if (least && !(rank(id) < rank(*least))) continue;
            if (evictable(id)) least = id;
        }
        // A load ahead must not push out what more tokens name.
        if (!demand && least && buffer_.remaining(*least) >= buffer_.remaining(incoming)) return std::nullopt;
        return least;
    }

    void plan(const PlanContext &context, std::vector<SlabId> &wanted) override {
        if (buffer_.tokens() == 0) return;
        const bool drafting = context.draft_left > 0.0;
        if (drafting && buffer_.tokens() <= static_cast<int32_t>(prime_share * length_)) return;
        buffer_.missing(drafting ? confident : 1, !drafting, context.present, wanted);
        if (!drafting) return;
        const double room = std::max(0.0, context.draft_left - context.link_queued) / context.transfer;
        wanted.resize(std::min(wanted.size(), static_cast<size_t>(room)));
    }

    [[nodiscard]] int32_t draft_length(const DraftCosts &costs) override {
        buffer_.clear();
        if (asked_ > 0) {
            const double share = std::min(1.0, static_cast<double>(loaded_) / static_cast<double>(asked_));
            miss_rate_ += rate * (share - miss_rate_);
        }
        asked_ = loaded_ = 0;
        const speq::Cycle cycle{.draft_token = costs.token,
                                .transfer = costs.transfer,
                                .verify_fixed = (costs.layer - costs.row) * pool_.n_groups,
                                .verify_row = costs.row * pool_.n_groups,
                                .acceptance = costs.acceptance,
                                .n_groups = pool_.n_groups,
                                .n_experts = pool_.n_experts,
                                .top_k = pool_.top_k,
                                .miss_rate = miss_rate_};
        length_ = speq::best_length(cycle, most_drafted);
        return length_;
    }
    void draft_token(std::span<const int32_t> ids, int32_t k) override { buffer_.add(ids, k); }

  private:
    [[nodiscard]] std::pair<int32_t, uint64_t> rank(SlabId id) const {
        return {buffer_.remaining(id), used_[pool_.flat(id)]};
    }

    PoolShape pool_;
    speq::LookaheadBuffer buffer_;
    int32_t length_ = 1;
    double miss_rate_ = 0.5;
    int64_t asked_ = 0;  ///< slabs of the calls since the last draft began
    int64_t loaded_ = 0; ///< of them, those that had to be loaded, ahead or on demand
    uint64_t stamp_ = 0;
    std::vector<uint64_t> used_; ///< by flat number: last use or load
    std::vector<SlabId> residents_;
    std::unique_ptr<Placement> placement_;
};

} // namespace

StrategyPtr strategy_moe_speq(const PoolShape &pool) {
    return std::make_unique<MoeSpeq>(pool);
}

} // namespace spice::policy

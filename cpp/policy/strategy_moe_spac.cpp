// `moe-spac`: speculative decoding as the sensor. How often a verification uses an expert moves its utility
// level; levels decide what is on the device, what is loaded during the draft, and who leaves; the rest is
// the host's.
//
// Source: MoE-SpAc, see moe_spac.h. One pool for all layers, ordered by a score: levels + 1 for what the
// present layer computes (pins), 1 .. levels for what was loaded ahead at that level, 0 after its layer is
// done. Wanted, from the highest level down to the layer's threshold, nearest layer first; a slab comes in
// only for one of a lower score. Where the level below the threshold would be too many as a whole, as many of
// it as the balance allows come, too: else the pool would stay half empty.
// Constants: 5 levels, 8 drafted tokens (the paper's gamma), at most 32 wanted at a time.
#include "policy/moe_spac.h"
#include "policy/strategy_list.h"

#include <algorithm>
#include <array>

namespace spice::policy {

namespace {

constexpr int32_t drafted = 8;
constexpr size_t most_wanted = 32;
constexpr int32_t promotion_lasts = 4; ///< visits within which a reversal counts as a mistake
constexpr float nudge_step = 0.25F;

class MoeSpac final : public Strategy {
  public:
    explicit MoeSpac(const PoolShape &pool)
        : pool_(pool), n_(static_cast<size_t>(pool.n_experts)), slabs_(pool.n_slabs()),
          thresholds_(static_cast<size_t>(pool.n_groups), 1), room_(thresholds_.size(), 0),
          visits_(static_cast<size_t>(pool.n_groups), 0), active_(static_cast<size_t>(pool.n_groups), 0),
          placement_(make_placement("static")), uses_(n_, 0) {}

    [[nodiscard]] std::string_view name() const override { return "moe-spac"; }
    [[nodiscard]] Placement &placement() override { return *placement_; }

    void begin_call(const StrategyCall &call) override {
        group_ = call.group;
        const size_t g = static_cast<size_t>(call.group);
        active_[g] = static_cast<int32_t>(call.experts.size());
        const int32_t visit = ++visits_[g];
        std::fill(uses_.begin(), uses_.end(), 0);
        for (size_t i = 0; i < call.experts.size(); ++i)
            uses_[static_cast<size_t>(call.experts[i])] = call.rows[i];
        for (size_t e = 0; e < n_; ++e) {
            Slab &slab = slabs_[g * n_ + e];
            if (uses_[e] > 0 && !slab.resident && slab.level == thresholds_[g] - 1) {
                slab.boundaries.nudge -= nudge_step; // a demand miss just below the threshold
            }
            const int32_t level = spac::next_level(slab.level, uses_[e], slab.boundaries.up(call.n_rows),
                                                   slab.boundaries.down(call.n_rows));
            if (level > slab.level) slab.promoted = visit;
            if (level < slab.level && slab.promoted > 0 && visit - slab.promoted <= promotion_lasts) {
                slab.boundaries.nudge += nudge_step;
                slab.promoted = 0;
            }
            slab.level = level;
            slab.boundaries.observe(uses_[e]);
            if (slab.resident) slab.score = 0; // pinned until the layer is done, evictable then
        }
    }

    [[nodiscard]] bool full(SlabId) const override {
        return residents_.size() >= static_cast<size_t>(pool_.n_slots);
    }
    void on_load(SlabId id) override {
        Slab &slab = at(id);
        slab.resident = true;
        slab.score = id.group == group_ ? 0 : slab.level;
        slab.place = residents_.size();
        residents_.push_back(id);
    }
    void on_evict(SlabId id) override {
        Slab &slab = at(id);
        slab.resident = false;
        at(residents_.back()).place = slab.place;
        residents_[slab.place] = residents_.back();
        residents_.pop_back();
    }
    [[nodiscard]] std::optional<SlabId> victim(SlabId incoming, bool demand, Evictable evictable) override {
        std::optional<SlabId> lowest;
        const int32_t below = demand ? spac::levels + 2 : at(incoming).level;
        for (const SlabId id : residents_) {
            const Slab &slab = at(id);
            if (slab.score >= below || !evictable(id)) continue;
            if (!lowest || rank(id) < rank(*lowest)) lowest = id;
        }
        return lowest;
    }

    void plan(const PlanContext &context, std::vector<SlabId> &wanted) override {
        if (context.costs != nullptr) balance(context);
        left_ = room_;
        for (int32_t level = spac::levels; level >= 1; --level) {
            for (int32_t d = 1; d <= pool_.n_groups; ++d) {
                const int32_t group = (context.group + d) % pool_.n_groups;
                const size_t g = static_cast<size_t>(group);
                if (level + 1 < thresholds_[g]) continue;
                for (int32_t e = 0; e < pool_.n_experts; ++e) {
                    const SlabId id{group, e};
                    Slab &slab = at(id);
                    if (slab.level != level) continue;
                    if (level < thresholds_[g] && left_[g]-- <= 0) break;
                    if (slab.resident) {
                        if (group != context.group) slab.score = std::max(level, slab.score);
                        continue;
                    }
                    if (context.present(id)) continue;
                    wanted.push_back(id);
                    if (wanted.size() == most_wanted) return;
                }
            }
        }
    }

    [[nodiscard]] int32_t draft_length(const DraftCosts &costs) override {
        draft_seconds_ = drafted * costs.token;
        return drafted;
    }

  private:
    struct Slab {
        int32_t level = 0;
        int32_t score = 0; ///< of a resident
        int32_t promoted = 0;
        bool resident = false;
        size_t place = 0; ///< in residents_
        spac::Boundaries boundaries{.mean = 0.0F, .deviation = 1.0F, .nudge = 0.0F};
    };
    [[nodiscard]] Slab &at(SlabId id) { return slabs_[pool_.flat(id)]; }
    /// The set's order: score, then number.
    [[nodiscard]] std::pair<int32_t, size_t> rank(SlabId id) { return {at(id).score, pool_.flat(id)}; }

    /// The threshold of the present layer for the next step.
    void balance(const PlanContext &context) {
        const size_t g = static_cast<size_t>(context.group);
        std::array<int32_t, spac::levels + 1> histogram{};
        int32_t resident = 0;
        for (size_t e = 0; e < n_; ++e) {
            const Slab &slab = slabs_[g * n_ + e];
            ++histogram[static_cast<size_t>(slab.level)];
            resident += slab.resident && slab.level > 0 ? 1 : 0;
        }
        const int32_t rows =
            std::max(1, (context.rows * pool_.top_k + active_[g] / 2) / std::max(active_[g], 1));
        // The draft's window is shared by all layers.
        const double window = draft_seconds_ > 0.0 ? draft_seconds_ / pool_.n_groups : context.layer;
        const spac::Balance balance{.device_fixed = context.costs->device_call,
                                    .device_each = context.costs->device.at(rows),
                                    .host_each = context.costs->host.at(rows),
                                    .active = active_[g],
                                    .resident = resident,
                                    .loads = static_cast<int32_t>(window / context.transfer) + 1,
                                    .slots = pool_.n_slots / pool_.n_groups + 1};
        const int32_t hot = spac::balanced_hot(balance);
        thresholds_[g] = spac::threshold(histogram, hot);
        room_[g] = hot;
        for (int32_t u = thresholds_[g]; u <= spac::levels; ++u)
            room_[g] -= histogram[static_cast<size_t>(u)];
    }

    PoolShape pool_;
    size_t n_;
    int32_t group_ = -1;
    double draft_seconds_ = 0.0;
    std::vector<Slab> slabs_;
    std::vector<SlabId> residents_;
    std::vector<int32_t> thresholds_; ///< by layer
    std::vector<int32_t> room_;       ///< by layer: of the level below the threshold, as many may come, too
    std::vector<int32_t> left_;       ///< scratch
    std::vector<int32_t> visits_;
    std::vector<int32_t> active_; ///< experts of the layer's last call
    std::unique_ptr<Placement> placement_;
    std::vector<int32_t> uses_; ///< scratch
};

} // namespace

StrategyPtr strategy_moe_spac(const PoolShape &pool) {
    return std::make_unique<MoeSpac>(pool);
}

} // namespace spice::policy

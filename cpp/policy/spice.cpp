// `spice`, the default: the slab with the least chance of a hit for the time that it would have to wait for
// it.
//
// Layers are visited in a cycle. A slab of group g can be used next when g is visited next, `wait` layer
// calls from now (1 .. n_groups), and is used then with some probability p. Keeping it until then costs its
// slot for `wait` calls, and pays p hits; so the slab with the smallest p / wait leaves (the hit density of
// LHD, Beckmann et al., NSDI 2018, with the cycle known). Just passed layers wait longest and pay first,
// which is why a pool below one token's working set still gets hits where LRU has none.
//
// p is learned online for every slab, from a visit of its group to the next:
//     p = w_fast * fast + w_slow * slow + w_after * after
//   fast, slow  decayed averages of "was used at the visit" (fast: the last one or two tokens; slow: this
//               text)
//   after       the chance of the slab given the experts that the group used at this visit, from counts of
//               which expert followed which one visit later; each count row is mixed with `row_prior` visits
//               of `slow`
// All three start at top_k / n_experts.
//
// A call of many tokens (prefill, batches) touches many experts of a layer and says less about each: each use
// counts for its share of the call's weights (`weights`, else 1 / number) times top_k, at most 1. Where
// weights are known, it is evidence of several tokens and moves `slow` faster. Calls that touch more than a
// quarter of the experts neither teach nor ask the `after` counts.
//
// A call of several tokens that touches at least half of its layer's experts, and more than the pool holds if
// all layers do the same, belongs to a scan (a prompt). Which slabs stay then hardly changes how many hits
// the next scan has, but where they are changes its speed: a layer whose slabs are all there leaves the disk
// idle, one without any leaves the processor idle. So during a scan the slab comes from the group with the
// most residents, the one in hand aside, and groups end with equal shares of the pool.
//
// Constants: fitted on 20 prompts of the DeepSeek-V2-Lite trace and checked on other prompts and on four
// other models (docs/eviction.md). The optimum is flat: halving or doubling any of them costs at most 1.3 %
// more misses. Memory: n_groups * n_experts^2 bytes for the counts (0.8 MB for 48 groups of 128).
#include "policy/group_min.h"
#include "policy/strategies.h"

#include <cmath>
#include <utility>

namespace spice::policy {

namespace {

constexpr float alpha_fast = 0.6F;
constexpr float alpha_slow = 0.03F;
constexpr float alpha_batch_max = 0.5F; ///< the most that one call of many tokens moves `slow`
constexpr float w_fast = 0.3F;
constexpr float w_slow = 1.0F;
constexpr float w_after = 1.0F;
constexpr float row_prior = 2.0F;
constexpr uint8_t row_limit = 255; ///< a count row is halved when it has seen that many visits

class Spice final : public Eviction {
  public:
    explicit Spice(const PoolShape &shape)
        : n_groups_(static_cast<size_t>(shape.n_groups)), n_experts_(static_cast<size_t>(shape.n_experts)),
          n_slots_(static_cast<size_t>(shape.n_slots)), top_k_(shape.top_k),
          few_(std::max<size_t>(n_experts_ / 4, 1)), fast_(n_groups_ * n_experts_),
          slow_(n_groups_ * n_experts_), keep_(n_groups_ * n_experts_), rows_(n_groups_ * n_experts_),
          after_(n_groups_ * n_experts_ * n_experts_), last_(n_groups_ * few_), n_last_(n_groups_),
          n_residents_(n_groups_), scratch_(n_experts_), per_wait_(n_groups_ + 1), residents_(shape) {
        const float start =
            std::min(1.0F, static_cast<float>(std::max(top_k_, 1)) / static_cast<float>(n_experts_));
        std::fill(fast_.begin(), fast_.end(), start);
        std::fill(slow_.begin(), slow_.end(), start);
        std::fill(keep_.begin(), keep_.end(), (w_fast + w_slow + w_after) * start);
        for (size_t wait = 1; wait <= n_groups_; ++wait) per_wait_[wait] = 1.0F / static_cast<float>(wait);
    }

    [[nodiscard]] std::string_view name() const override { return "spice"; }

    void begin_call(int32_t group, std::span<const int32_t> experts,
                    std::span<const float> weights) override {
        group_ = group;
        scan_ = false;
        if (experts.empty()) return;
        const size_t g = static_cast<size_t>(group);
        if (top_k_ <= 0 || static_cast<int32_t>(experts.size()) < top_k_) {
            top_k_ = static_cast<int32_t>(experts.size()); // not told: the smallest call so far
        }
        scan_ = experts.size() > static_cast<size_t>(top_k_) && 2 * experts.size() >= n_experts_ &&
                experts.size() * n_groups_ > n_slots_;
        learn_averages(g, experts, weights);
        learn_followers(g, experts);
        estimate(g);
    }

    void on_load(SlabId id) override {
        residents_.insert(id, keep_[flat(id)]);
        ++n_residents_[static_cast<size_t>(id.group)];
    }
    void on_evict(SlabId id) override {
        residents_.erase(id);
        --n_residents_[static_cast<size_t>(id.group)];
    }

    [[nodiscard]] std::optional<SlabId> victim(Evictable evictable) override {
        const auto density = [this](int32_t group, float keep) {
            const int32_t ahead = group - group_;
            return keep * per_wait_[static_cast<size_t>(ahead > 0 ? ahead
                                                                  : ahead + static_cast<int32_t>(n_groups_))];
        };
        if (!scan_) return residents_.victim(density, evictable);
        const auto fullest_first = [&](int32_t group, float keep) {
            const int32_t n = group == group_ ? 0 : n_residents_[static_cast<size_t>(group)];
            return std::pair(-n, density(group, keep));
        };
        return residents_.victim(fullest_first, evictable);
    }

  private:
    [[nodiscard]] size_t flat(SlabId id) const {
        return static_cast<size_t>(id.group) * n_experts_ + static_cast<size_t>(id.expert);
    }

    void learn_averages(size_t g, std::span<const int32_t> experts, std::span<const float> weights) {
        const float n = static_cast<float>(experts.size());
        const float k = static_cast<float>(top_k_);
        const bool many = experts.size() > static_cast<size_t>(top_k_);
        float sum = 0.0F;
        if (many && weights.size() == experts.size()) {
            for (const float w : weights) sum += w;
        }
        const bool weighted = sum > 0.0F && std::isfinite(sum);
        const float alpha =
            weighted ? std::min(alpha_slow * n / k, std::max(alpha_batch_max, alpha_slow)) : alpha_slow;
        float *fast = &fast_[g * n_experts_];
        float *slow = &slow_[g * n_experts_];
        for (size_t e = 0; e < n_experts_; ++e) {
            fast[e] *= 1.0F - alpha_fast;
            slow[e] *= 1.0F - alpha;
        }
        for (size_t i = 0; i < experts.size(); ++i) {
            float use = 1.0F;
            if (weighted)
                use = std::clamp(k * weights[i] / sum, 0.0F, 1.0F);
            else if (many)
                use = k / n;
            fast[experts[i]] += alpha_fast * use;
            slow[experts[i]] += alpha * use;
        }
    }

    void learn_followers(size_t g, std::span<const int32_t> experts) {
        int32_t *last = &last_[g * few_];
        size_t &n_last = n_last_[g];
        if (experts.size() > few_) {
            n_last = 0;
            return;
        }
        for (size_t i = 0; i < n_last; ++i) {
            const size_t from = g * n_experts_ + static_cast<size_t>(last[i]);
            uint8_t *row = &after_[from * n_experts_];
            if (rows_[from] == row_limit) {
                rows_[from] /= 2;
                for (size_t e = 0; e < n_experts_; ++e) row[e] /= 2;
            }
            ++rows_[from];
            for (const int32_t expert : experts) ++row[expert]; // at most rows_[from]
        }
        std::copy(experts.begin(), experts.end(), last);
        n_last = experts.size();
    }

    void estimate(size_t g) {
        const float *fast = &fast_[g * n_experts_];
        const float *slow = &slow_[g * n_experts_];
        float *keep = &keep_[g * n_experts_];
        float own = 0.0F; // how much of `after` is `slow`
        std::fill(scratch_.begin(), scratch_.end(), 0.0F);
        const size_t n_last = n_last_[g];
        for (size_t i = 0; i < n_last; ++i) {
            const size_t from = g * n_experts_ + static_cast<size_t>(last_[g * few_ + i]);
            const uint8_t *row = &after_[from * n_experts_];
            const float share =
                1.0F / (static_cast<float>(n_last) * (static_cast<float>(rows_[from]) + row_prior));
            for (size_t e = 0; e < n_experts_; ++e) scratch_[e] += share * static_cast<float>(row[e]);
            own += share * row_prior;
        }
        if (n_last == 0) own = 1.0F;
        const float weight_slow = w_slow + w_after * own;
        for (size_t e = 0; e < n_experts_; ++e) {
            keep[e] = w_fast * fast[e] + weight_slow * slow[e] + w_after * scratch_[e];
        }
        residents_.update_group(static_cast<int32_t>(g), keep);
    }

    size_t n_groups_;
    size_t n_experts_;
    size_t n_slots_;
    int32_t top_k_;
    size_t few_; ///< calls of more experts than this are no use to the `after` counts
    int32_t group_ = -1;
    bool scan_ = false;
    std::vector<float> fast_;   ///< by flat number
    std::vector<float> slow_;   ///< by flat number
    std::vector<float> keep_;   ///< by flat number: p at the next visit, up to a common factor
    std::vector<uint8_t> rows_; ///< by flat number: visits counted in its row of after_
    std::vector<uint8_t>
        after_;                 ///< by flat number, then expert: how often that expert was used a visit later
    std::vector<int32_t> last_; ///< few_ per group: the experts of its last visit
    std::vector<size_t> n_last_;       ///< by group; 0: none, or too many
    std::vector<int32_t> n_residents_; ///< by group
    std::vector<float> scratch_;       ///< n_experts
    std::vector<float> per_wait_;      ///< 1 / wait
    GroupMin<float> residents_;
};

} // namespace

std::unique_ptr<Eviction> make_spice(const PoolShape &shape) {
    return std::make_unique<Spice>(shape);
}

} // namespace spice::policy

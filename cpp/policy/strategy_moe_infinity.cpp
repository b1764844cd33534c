// `moe-infinity`: loads ahead and evicts by how texts like this one used experts before.
//
// Source: MoE-Infinity (arXiv 2401.14361) and its code. Each text is a matrix of uses, layer x expert;
// finished ones are stored. The stored matrix nearest to the present one, by the mean over layers of the
// cosine of their rows, predicts: the expert's share of its layer's uses, times 1 - (x - l) / (L + 1) for
// layer x ahead of l. Evicted is the lowest product of the same decay, the share in the present text, and the
// frequency over all texts; what the present call uses is safe (pins). What is simpler here: the nearest
// matrix is looked for once per pass, not at each layer, and 64 are kept, the oldest forgotten; loads ahead
// look at most `deepest` layers on, and at most 2 top-k are wanted at a time.
#include "policy/group_min.h"
#include "policy/strategy_list.h"

#include <cmath>
#include <deque>

namespace spice::policy {

namespace {

constexpr size_t most_stored = 64;
constexpr int32_t deepest = 6;

class MoeInfinity final : public Strategy {
  public:
    explicit MoeInfinity(const PoolShape &pool)
        : pool_(pool), n_(static_cast<size_t>(pool.n_experts)), size_(pool.n_slabs()), current_(size_, 0.0F),
          frequency_(size_, 0.0F), keys_(n_), placement_(make_placement("all-fetch")), residents_(pool) {}

    [[nodiscard]] std::string_view name() const override { return "moe-infinity"; }
    [[nodiscard]] Placement &placement() override { return *placement_; }

    void begin_sequence() override {
        bool any = false;
        for (const float uses : current_) any = any || uses > 0.0F;
        if (any) stored_.push_back(current_);
        if (stored_.size() > most_stored) stored_.pop_front();
        std::fill(current_.begin(), current_.end(), 0.0F);
        nearest_ = nullptr;
    }

    void begin_call(const StrategyCall &call) override {
        if (call.group <= group_ || group_ < 0) find_nearest();
        group_ = call.group;
        const size_t row = static_cast<size_t>(call.group) * n_;
        for (size_t i = 0; i < call.experts.size(); ++i) {
            const size_t at = row + static_cast<size_t>(call.experts[i]);
            current_[at] += static_cast<float>(call.rows[i]);
            frequency_[at] += static_cast<float>(call.rows[i]);
        }
        float sum = 0.0F;
        for (size_t e = 0; e < n_; ++e) sum += current_[row + e];
        for (size_t e = 0; e < n_; ++e) {
            // An expert that this text has not used keeps a trace of its frequency, so that ties are broken.
            keys_[e] = (current_[row + e] / std::max(sum, 1.0F) + 1e-6F) * frequency_[row + e];
        }
        residents_.update_group(call.group, keys_.data());
        key_of_.resize(size_, 0.0F);
        std::copy(keys_.begin(), keys_.end(), key_of_.begin() + static_cast<std::ptrdiff_t>(row));
    }

    [[nodiscard]] bool full(SlabId) const override { return n_resident_ >= pool_.n_slots; }
    void on_load(SlabId id) override {
        ++n_resident_;
        residents_.insert(id, key_of_.empty() ? 0.0F : key_of_[pool_.flat(id)]);
    }
    void on_evict(SlabId id) override {
        --n_resident_;
        residents_.erase(id);
    }
    [[nodiscard]] std::optional<SlabId> victim(SlabId, bool, Evictable evictable) override {
        return residents_.victim([this](int32_t group, float key) { return key * decay(group); }, evictable);
    }

    void plan(const PlanContext &context, std::vector<SlabId> &wanted) override {
        if (nearest_ == nullptr) return;
        candidates_.clear();
        for (int32_t d = 1; d <= std::min(deepest, pool_.n_groups - 1 - context.group); ++d) {
            const int32_t group = context.group + d;
            const float *row = &(*nearest_)[static_cast<size_t>(group) * n_];
            float sum = 0.0F;
            for (size_t e = 0; e < n_; ++e) sum += row[e];
            if (sum <= 0.0F) continue;
            for (size_t e = 0; e < n_; ++e) {
                const SlabId id{group, static_cast<int32_t>(e)};
                if (row[e] > 0.0F && !context.present(id)) {
                    candidates_.push_back({row[e] / sum * decay(group), id});
                }
            }
        }
        const size_t most = std::min(candidates_.size(), static_cast<size_t>(2 * pool_.top_k));
        const auto end = candidates_.begin() + static_cast<std::ptrdiff_t>(most);
        std::partial_sort(candidates_.begin(), end, candidates_.end(), [this](const auto &a, const auto &b) {
            return a.first != b.first ? a.first > b.first : pool_.flat(a.second) < pool_.flat(b.second);
        });
        for (auto it = candidates_.begin(); it != end; ++it) wanted.push_back(it->second);
    }

  private:
    /// 1 for the present layer, less for those that come later in the cycle.
    [[nodiscard]] float decay(int32_t group) const {
        const int32_t ahead = group >= group_ ? group - group_ : group - group_ + pool_.n_groups;
        return 1.0F - static_cast<float>(ahead) / static_cast<float>(pool_.n_groups + 1);
    }

    void find_nearest() {
        nearest_ = nullptr;
        float best = 0.0F;
        for (const std::vector<float> &matrix : stored_) {
            float sum = 0.0F;
            for (size_t row = 0; row < size_; row += n_) {
                float ab = 0.0F;
                float aa = 0.0F;
                float bb = 0.0F;
                for (size_t e = row; e < row + n_; ++e) {
                    ab += current_[e] * matrix[e];
                    aa += current_[e] * current_[e];
                    bb += matrix[e] * matrix[e];
                }
                if (aa > 0.0F && bb > 0.0F) sum += ab / std::sqrt(aa * bb);
            }
            if (sum > best) {
                best = sum;
                nearest_ = &matrix;
            }
        }
    }

    PoolShape pool_;
    size_t n_;
    size_t size_;
    int32_t group_ = -1;
    int32_t n_resident_ = 0;
    std::vector<float> current_;   ///< uses in this text, by flat number
    std::vector<float> frequency_; ///< uses in all texts
    std::deque<std::vector<float>> stored_;
    const std::vector<float> *nearest_ = nullptr; ///< of stored_, or nothing alike
    std::vector<float> keys_;                     ///< scratch
    std::vector<float> key_of_;                   ///< by flat number
    std::vector<std::pair<float, SlabId>> candidates_;
    std::unique_ptr<Placement> placement_;
    GroupMin<float> residents_;
};

} // namespace

StrategyPtr strategy_moe_infinity(const PoolShape &pool) {
    return std::make_unique<MoeInfinity>(pool);
}

} // namespace spice::policy

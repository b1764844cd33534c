// The predictors that learn: `ensemble`, `router`, `adapter`, `draft` and `history` are one machine, with
// some of its features absent.
//
// A prediction for a call is kept until that call begins (or is known not to come), and then teaches the
// mixer. The features that depend on the source of the prediction are kept with it; those of the target's own
// history cannot have changed in between.
#include "policy/mixer.h"
#include "policy/predictors.h"

#include <algorithm>
#include <cassert>
#include <cmath>

namespace spice::policy {

namespace {

constexpr float score_limit = 6.0F; ///< standard deviations beyond which a score says no more
constexpr size_t n_before = 4;      ///< groups before the present one whose followers count, too

struct Kind {
    std::string_view name;
    ScoreSource scores;
    bool follows; ///< which experts follow which
    bool use;     ///< decayed and last use
};

constexpr std::array<Kind, 5> kinds = {{
    {"ensemble", ScoreSource::best, true, true},
    {"router", ScoreSource::frozen, false, false},
    {"adapter", ScoreSource::fitted, false, false},
    {"draft", ScoreSource::fitted, true, false},
    {"history", ScoreSource::none, true, true},
}};

/// The scores of a row, so that 0 lies between the k-th and the next and 1 is a standard deviation.
void standardise(std::span<const float> scores, size_t k, std::span<float> sorted, std::span<float> out) {
    float sum = 0.0F;
    size_t n = 0;
    for (const float score : scores) {
        if (!std::isfinite(score)) continue;
        sorted[n++] = score;
        sum += score;
    }
    if (n == 0) {
        std::fill(out.begin(), out.end(), 0.0F);
        return;
    }
    const float mean = sum / static_cast<float>(n);
    float squares = 0.0F;
    for (size_t i = 0; i < n; ++i) squares += (sorted[i] - mean) * (sorted[i] - mean);
    const float spread = std::sqrt(squares / static_cast<float>(n));
    float boundary = mean;
    if (k < n) {
        const auto kth = sorted.begin() + static_cast<ptrdiff_t>(k) - 1;
        const auto end = sorted.begin() + static_cast<ptrdiff_t>(n);
        std::nth_element(sorted.begin(), kth, end, std::greater<>());
        boundary = 0.5F * (*kth + *std::max_element(kth + 1, end));
    }
    const float scale = spread > 1e-20F && std::isfinite(spread) ? 1.0F / spread : 0.0F;
    for (size_t e = 0; e < scores.size(); ++e) {
        const float z = std::isfinite(scores[e]) ? (scores[e] - boundary) * scale : -score_limit;
        out[e] = std::isfinite(z) ? std::clamp(z, -score_limit, score_limit) : 0.0F;
    }
}

class LearnedPredictor final : public Predictor {
  public:
    LearnedPredictor(const Kind &kind, const RoutingShape &shape)
        : kind_(kind), n_groups_(static_cast<size_t>(shape.n_groups)),
          n_experts_(static_cast<size_t>(shape.n_experts)),
          n_horizons_(static_cast<size_t>(shape.max_horizon)),
          history_(shape, shape.max_horizon + static_cast<int32_t>(n_before)),
          n_cross_(static_cast<size_t>(history_.n_distances())),
          mixer_(2 * n_horizons_, n_groups_, n_experts_), used_(n_experts_), sorted_(n_experts_),
          cross_(kind.follows ? n_cross_ * n_cross_ : 0), pending_(n_horizons_ * n_horizons_) {
        for (Rows &rows : cross_) rows.values.resize(max_rows * n_experts_);
        for (Pending &pending : pending_) {
            pending.scores.resize(kind.scores != ScoreSource::none ? max_rows * n_experts_ : 0);
            pending.far.resize(kind.follows ? max_rows * n_experts_ : 0);
            pending.chances.resize(max_rows * n_experts_);
        }
        start_weights();
    }

    [[nodiscard]] std::string_view name() const override { return kind_.name; }
    [[nodiscard]] ScoreSource scores() const override { return kind_.scores; }
    [[nodiscard]] int32_t max_horizon() const override { return static_cast<int32_t>(n_horizons_); }

    void begin_call(int32_t group, std::span<const int32_t> ids, int32_t rows) override {
        const uint64_t pass = call_ / n_groups_ + (group <= previous_group_ ? 1 : 0);
        call_ = pass * n_groups_ + static_cast<size_t>(group);
        previous_group_ = group;
        rows_ = rows;
        k_ = rows > 0 ? ids.size() / static_cast<size_t>(rows) : 0;
        if (rows > 0 && rows <= max_rows) learn(ids);
        history_.begin_call(group, ids, rows);
        if (kind_.follows && rows > 0 && rows <= max_rows) find_followers(group);
    }

    bool predict([[maybe_unused]] int32_t group, int32_t horizon, std::span<const float> scores,
                 std::span<float> out) override {
        assert(group == previous_group_ && horizon >= 1 && horizon <= max_horizon());
        assert(out.size() == n_experts_);
        std::fill(out.begin(), out.end(), 0.0F);
        if (rows_ <= 0 || rows_ > max_rows || k_ == 0) return false;
        const auto n_rows = static_cast<size_t>(rows_);
        const bool scored = kind_.scores != ScoreSource::none && !scores.empty();
        assert(!scored || scores.size() == n_rows * n_experts_);
        const auto h = static_cast<size_t>(horizon);
        Pending &pending = pending_at(call_ + h, h);
        pending.call = call_ + h;
        pending.rows = rows_;
        pending.scored = scored;
        const size_t target = pending.call % n_groups_;
        for (size_t row = 0; row < n_rows; ++row) {
            if (scored) {
                standardise(scores.subspan(row * n_experts_, n_experts_), k_, sorted_,
                            span_of(pending.scores, row));
            }
            if (kind_.follows) sum_far(h, row, pending);
            const std::span<float> p = span_of(pending.chances, row);
            mixer_.mix(context(h, scored), target, features(h, row, pending), k_, p);
            for (size_t e = 0; e < n_experts_; ++e) out[e] = p[e] + out[e] * (1.0F - p[e]);
        }
        return true;
    }

  private:
    /// Values [max_rows][n_experts] that belong to one call.
    struct Rows {
        uint64_t call = ~uint64_t{0};
        int32_t rows = 0;
        std::vector<float> values;
    };
    struct Pending {
        uint64_t call = ~uint64_t{0};
        int32_t rows = 0;
        bool scored = false;
        std::vector<float> scores;  ///< [max_rows][n_experts], standardised
        std::vector<float> far;     ///< [max_rows][n_experts]: Feature::cross_far
        std::vector<float> chances; ///< [max_rows][n_experts]
    };

    /// About what the mixer learned on the five traces of papers.md section 7 (ids), and on scores with
    /// noise.
    void start_weights() {
        const Weights plain = {0.3F, 0.3F, 1.2F, 0.05F, 0.22F, 0.08F, 0.12F, 0.0F};
        const Weights scored = {0.1F, 0.1F, 0.3F, 0.02F, 0.1F, 0.03F, 0.03F, 4.0F};
        for (size_t h = 1; h <= n_horizons_; ++h) {
            mixer_.start(context(h, false), plain);
            mixer_.start(context(h, true), scored);
        }
    }

    [[nodiscard]] static size_t context(size_t horizon, bool scored) {
        return 2 * (horizon - 1) + (scored ? 1 : 0);
    }
    [[nodiscard]] std::span<float> span_of(std::vector<float> &values, size_t row) const {
        return {&values[row * n_experts_], n_experts_};
    }
    /// Calls are looked ahead to from at most n_horizons_ calls before, so that each has its place.
    Pending &pending_at(uint64_t call, size_t horizon) {
        return pending_[(call % n_horizons_) * n_horizons_ + horizon - 1];
    }
    [[nodiscard]] size_t cross_place(uint64_t call, size_t distance) const {
        return (call % n_cross_) * n_cross_ + distance - 1;
    }

    /// What follows the present call's experts at the calls to come.
    void find_followers(int32_t group) {
        for (size_t d = 1; d <= n_cross_; ++d) {
            Rows &rows = cross_[cross_place(call_ + d, d)];
            rows.call = call_ + d;
            rows.rows = rows_;
            for (int32_t row = 0; row < rows_; ++row) {
                history_.cross(group, static_cast<int32_t>(d), row,
                               span_of(rows.values, static_cast<size_t>(row)));
            }
        }
    }

    [[nodiscard]] const float *followers(uint64_t call, size_t distance, size_t row, int32_t n_rows) const {
        if (distance > n_cross_) return nullptr;
        const Rows &rows = cross_[cross_place(call, distance)];
        if (rows.call != call || rows.rows != n_rows) return nullptr;
        return &rows.values[row * n_experts_];
    }

    void sum_far(size_t horizon, size_t row, Pending &pending) {
        const std::span<float> far = span_of(pending.far, row);
        std::fill(far.begin(), far.end(), 0.0F);
        for (size_t before = 2; before <= n_before; ++before) {
            const float *values = followers(pending.call, horizon + before, row, pending.rows);
            if (values == nullptr) continue;
            for (size_t e = 0; e < n_experts_; ++e) far[e] += values[e];
        }
    }

    /// The features of pending.call, seen from `horizon` calls before it.
    [[nodiscard]] Features features(size_t horizon, size_t row, const Pending &pending) const {
        const auto target = static_cast<int32_t>(pending.call % n_groups_);
        Features all{};
        const auto set = [&all](Feature feature, const float *values) {
            all[static_cast<size_t>(feature)] = values;
        };
        if (kind_.use) {
            set(Feature::use, history_.use(target).data());
            set(Feature::long_use, history_.long_use(target).data());
            set(Feature::recent, history_.recent(target).data());
        }
        if (kind_.follows) {
            set(Feature::follow, history_.follow(target).data());
            set(Feature::cross, followers(pending.call, horizon, row, pending.rows));
            set(Feature::cross_before, followers(pending.call, horizon + 1, row, pending.rows));
            set(Feature::cross_far, &pending.far[row * n_experts_]);
        }
        if (pending.scored) set(Feature::score, &pending.scores[row * n_experts_]);
        return all;
    }

    /// The routing of call_ is known: what was predicted of it teaches.
    void learn(std::span<const int32_t> ids) {
        const size_t group = call_ % n_groups_;
        for (size_t h = 1; h <= n_horizons_; ++h) {
            Pending &pending = pending_at(call_, h);
            if (pending.call != call_ || pending.rows != rows_) continue;
            for (size_t row = 0; row < static_cast<size_t>(rows_); ++row) {
                const std::span<const int32_t> chosen = ids.subspan(row * k_, k_);
                for (const int32_t expert : chosen) used_[static_cast<size_t>(expert)] = 1.0F;
                mixer_.observe(features(h, row, pending), span_of(pending.chances, row), used_);
                for (const int32_t expert : chosen) used_[static_cast<size_t>(expert)] = 0.0F;
            }
            mixer_.step(context(h, pending.scored), group);
        }
    }

    Kind kind_;
    size_t n_groups_;
    size_t n_experts_;
    size_t n_horizons_;
    RoutingHistory history_;
    size_t n_cross_; ///< distances with counts of followers
    Mixer mixer_;
    uint64_t call_ = 0; ///< position in the walk: pass * n_groups + group
    int32_t previous_group_ = -1;
    int32_t rows_ = 0;
    size_t k_ = 0;
    std::vector<float> used_;      ///< all zero between calls
    std::vector<float> sorted_;    ///< scratch
    std::vector<Rows> cross_;      ///< by cross_place(call, distance)
    std::vector<Pending> pending_; ///< see pending_at()
};

} // namespace

std::unique_ptr<Predictor> make_learned_predictor(std::string_view name, const RoutingShape &shape) {
    const auto *kind =
        std::find_if(kinds.begin(), kinds.end(), [name](const Kind &k) { return k.name == name; });
    if (kind == kinds.end()) return nullptr;
    return std::make_unique<LearnedPredictor>(*kind, shape);
}

} // namespace spice::policy

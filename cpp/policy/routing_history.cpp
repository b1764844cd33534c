#include "policy/routing_history.h"

#include "policy/fast_math.h"

#include <algorithm>
#include <cassert>

namespace spice::policy {

namespace {

constexpr float alpha_slow = 0.03F;
constexpr float alpha_recent = 0.6F;
constexpr float alpha_batch_max = 0.5F; ///< the most that a call of many rows moves `slow`
constexpr float uniform_share = 0.05F;  ///< of the chance that `use` tells: no expert is impossible
constexpr float row_prior = 4.0F;       ///< visits of "as usual" that every count row starts with
constexpr uint8_t visit_limit = 255;    ///< a count row is halved when it has seen that many visits
constexpr float ratio_min = 1e-30F;     ///< products of ratios stay within floats
constexpr float ratio_max = 1e30F;

size_t horizons_that_fit(const RoutingShape &shape) {
    const int64_t n = shape.n_experts;
    const int64_t table = shape.n_groups * n * (n + 1);
    const int64_t fit = RoutingHistory::max_table_bytes / table - 1; // one table is for the next token
    return static_cast<size_t>(std::clamp<int64_t>(fit, 1, std::max(shape.max_horizon, 1)));
}

} // namespace

RoutingHistory::RoutingHistory(const RoutingShape &shape)
    : n_groups_(static_cast<size_t>(shape.n_groups)), n_experts_(static_cast<size_t>(shape.n_experts)),
      top_k_(static_cast<size_t>(shape.top_k)), n_horizons_(horizons_that_fit(shape)),
      slow_(n_groups_ * n_experts_), recent_(n_groups_ * n_experts_), use_(n_groups_ * n_experts_),
      inverse_(n_groups_ * n_experts_), follow_(n_groups_ * n_experts_), next_(n_groups_),
      later_(n_groups_ * n_horizons_), ids_(n_groups_ * max_rows * top_k_), n_rows_(n_groups_),
      n_used_(n_groups_), total_rows_(n_groups_), called_(n_groups_) {
    const float start = std::min(0.99F, static_cast<float>(top_k_) / static_cast<float>(n_experts_));
    std::fill(slow_.begin(), slow_.end(), start);
    std::fill(recent_.begin(), recent_.end(), start);
    std::fill(use_.begin(), use_.end(), fast_log(start / (1.0F - start)));
    std::fill(inverse_.begin(), inverse_.end(), 1.0F / start);
    for (auto *tables : {&next_, &later_}) {
        for (Table &table : *tables) {
            table.visits.resize(n_experts_);
            table.counts.resize(n_experts_ * n_experts_);
        }
    }
}

int64_t RoutingHistory::bytes() const {
    const size_t tables = (next_.size() + later_.size()) * n_experts_ * (n_experts_ + 1);
    const size_t floats = 5 * n_groups_ * n_experts_;
    return static_cast<int64_t>(tables + sizeof(float) * floats + sizeof(int32_t) * ids_.size());
}

std::span<const int32_t> RoutingHistory::row_of(size_t group, size_t row) const {
    return {&ids_[(group * max_rows + row) * top_k_], static_cast<size_t>(n_used_[group])};
}

void RoutingHistory::begin_call(int32_t group, std::span<const int32_t> ids, int32_t rows) {
    if (rows <= 0 || ids.empty()) return;
    const auto g = static_cast<size_t>(group);
    const auto all_rows = static_cast<size_t>(rows);
    const size_t k = ids.size() / all_rows;
    assert(group >= 0 && g < n_groups_ && k >= 1 && k <= top_k_ && k * all_rows == ids.size());
    const uint64_t pass = call_ / n_groups_ + (group <= previous_group_ ? 1 : 0);
    call_ = pass * n_groups_ + g;
    previous_group_ = group;

    learn_use(g, ids, all_rows);
    const size_t kept = std::min(all_rows, static_cast<size_t>(max_rows));
    const std::span<const int32_t> last = ids.last(kept * k);
    total_rows_[g] = rows;
    learn_tables(g, last, kept, k);
    called_[g] = call_;
    n_rows_[g] = static_cast<int32_t>(kept);
    n_used_[g] = static_cast<int32_t>(k);
    for (size_t row = 0; row < kept; ++row) {
        std::copy_n(&last[row * k], k, &ids_[(g * max_rows + row) * top_k_]);
    }
    log_ratio(next_[g], row_of(g, kept - 1), g, {&follow_[g * n_experts_], n_experts_});
}

void RoutingHistory::learn_use(size_t g, std::span<const int32_t> ids, size_t rows) {
    const float share = 1.0F / static_cast<float>(rows);
    const float alpha = std::min(alpha_slow * static_cast<float>(rows), alpha_batch_max);
    float *slow = &slow_[g * n_experts_];
    float *recent = &recent_[g * n_experts_];
    for (size_t e = 0; e < n_experts_; ++e) {
        slow[e] *= 1.0F - alpha;
        recent[e] *= 1.0F - alpha_recent;
    }
    for (const int32_t expert : ids) {
        slow[expert] += alpha * share;
        recent[expert] += alpha_recent * share;
    }
    const float uniform = uniform_share * static_cast<float>(top_k_) / static_cast<float>(n_experts_);
    float *use = &use_[g * n_experts_];
    float *inverse = &inverse_[g * n_experts_];
    for (size_t e = 0; e < n_experts_; ++e) {
        const float p = std::min((1.0F - uniform_share) * slow[e] + uniform, 0.99F);
        use[e] = fast_log(p / (1.0F - p));
        inverse[e] = 1.0F / p;
    }
}

void RoutingHistory::learn_tables(size_t g, std::span<const int32_t> ids, size_t rows, size_t k) {
    // The token before: the last row of the call before, then the rows of this one.
    if (n_rows_[g] > 0) count(next_[g], row_of(g, static_cast<size_t>(n_rows_[g]) - 1), ids.first(k));
    if (rows > 8) { // consecutive tokens of a prompt; a few rows may as well be sequences of a batch
        for (size_t row = 1; row < rows; ++row) {
            count(next_[g], ids.subspan((row - 1) * k, k), ids.subspan(row * k, k));
        }
    }
    for (size_t horizon = 1; horizon <= n_horizons_ && horizon <= call_; ++horizon) {
        const uint64_t from_call = call_ - horizon;
        const size_t from = from_call % n_groups_;
        if (n_rows_[from] == 0 || called_[from] != from_call || total_rows_[from] != total_rows_[g]) continue;
        Table &table = later_[from * n_horizons_ + horizon - 1];
        for (size_t row = 0; row < rows; ++row) count(table, row_of(from, row), ids.subspan(row * k, k));
    }
}

void RoutingHistory::count(Table &table, std::span<const int32_t> from, std::span<const int32_t> to) const {
    for (const int32_t first : from) {
        const auto f = static_cast<size_t>(first);
        uint8_t *row = &table.counts[f * n_experts_];
        if (table.visits[f] == visit_limit) {
            table.visits[f] /= 2;
            for (size_t e = 0; e < n_experts_; ++e) row[e] /= 2;
        }
        ++table.visits[f];
        for (const int32_t expert : to) ++row[expert]; // at most visits[f]
    }
}

void RoutingHistory::log_ratio(const Table &table, std::span<const int32_t> from, size_t target,
                               std::span<float> out) const {
    const float *inverse = &inverse_[target * n_experts_];
    std::fill(out.begin(), out.end(), 1.0F);
    for (const int32_t first : from) {
        const auto f = static_cast<size_t>(first);
        const uint8_t *row = &table.counts[f * n_experts_];
        const float norm = 1.0F / (static_cast<float>(table.visits[f]) + row_prior);
        for (size_t e = 0; e < n_experts_; ++e) {
            const float ratio = (static_cast<float>(row[e]) * inverse[e] + row_prior) * norm;
            out[e] = std::min(std::max(out[e] * ratio, ratio_min), ratio_max);
        }
    }
    for (float &value : out) value = fast_log(value);
}

void RoutingHistory::cross(int32_t group, int32_t horizon, int32_t row, std::span<float> out) const {
    assert(horizon >= 1 && horizon <= max_horizon() && row >= 0 && row < rows(group));
    const auto g = static_cast<size_t>(group);
    const auto h = static_cast<size_t>(horizon);
    log_ratio(later_[g * n_horizons_ + h - 1], row_of(g, static_cast<size_t>(row)), (g + h) % n_groups_, out);
}

} // namespace spice::policy

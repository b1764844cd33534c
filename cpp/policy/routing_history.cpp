#include "policy/routing_history.h"

#include "policy/fast_math.h"

#include <algorithm>
#include <array>
#include <cassert>
#include <type_traits>

namespace spice::policy {

namespace {

constexpr float alpha_slow = 0.03F;
constexpr float alpha_recent = 0.6F;
constexpr float alpha_batch_max = 0.5F; ///< the most that a call of many rows moves an average
constexpr float uniform_share = 0.05F;  ///< of a chance: no expert is impossible
constexpr float count_prior = 0.4F;     ///< added to a count and to what it would be as usual
constexpr uint8_t visit_limit = 90;     ///< a count row is halved when it has seen that many visits
constexpr float ratio_limit = 8.0F;     ///< beyond which a log ratio says no more

size_t distances_that_fit(const RoutingShape &shape, int32_t wanted) {
    const int64_t n = shape.n_experts;
    const int64_t table = shape.n_groups * n * (n + 1);
    const int64_t fit = RoutingHistory::max_table_bytes / table - 1; // one table is for the next token
    return static_cast<size_t>(std::clamp<int64_t>(fit, 1, std::max(wanted, 1)));
}

float with_uniform(float average, float uniform) {
    return (1.0F - uniform_share) * average + uniform_share * uniform;
}

float log_odds(float p) {
    return fast_log(p / (1.0F - p));
}

} // namespace

RoutingHistory::RoutingHistory(const RoutingShape &shape, int32_t n_distances)
    : n_groups_(static_cast<size_t>(shape.n_groups)), n_experts_(static_cast<size_t>(shape.n_experts)),
      top_k_(static_cast<size_t>(shape.top_k)), n_distances_(distances_that_fit(shape, n_distances)),
      uniform_(std::min(0.99F, static_cast<float>(top_k_) / static_cast<float>(n_experts_))),
      slow_(n_groups_ * n_experts_), long_(n_groups_ * n_experts_), seen_(n_groups_),
      recent_(n_groups_ * n_experts_), use_(n_groups_ * n_experts_), long_use_(n_groups_ * n_experts_),
      chance_(n_groups_ * n_experts_), follow_(n_groups_ * n_experts_), next_(n_groups_),
      later_(n_groups_ * n_distances_), ids_(n_groups_ * max_rows * top_k_), n_rows_(n_groups_),
      n_used_(n_groups_), total_rows_(n_groups_), called_(n_groups_) {
    // A count row holds limit / 2 .. limit visits, of which each expert gets top_k / n_experts per token.
    alpha_long_ = uniform_ / (0.75F * static_cast<float>(visit_limit));
    for (auto *average : {&slow_, &long_, &recent_}) std::fill(average->begin(), average->end(), uniform_);
    for (auto *odds : {&use_, &long_use_}) std::fill(odds->begin(), odds->end(), log_odds(uniform_));
    std::fill(chance_.begin(), chance_.end(), uniform_);
    for (auto *tables : {&next_, &later_}) {
        for (Table &table : *tables) {
            table.visits.resize(n_experts_);
            table.counts.resize(n_experts_ * n_experts_);
        }
    }
}

int64_t RoutingHistory::bytes() const {
    const size_t tables = (next_.size() + later_.size()) * n_experts_ * (n_experts_ + 1);
    const size_t floats = 8 * n_groups_ * n_experts_;
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
    const auto n_rows = static_cast<float>(rows);
    constexpr float few = 16.0F; // rows that the uniform start of `long` is worth
    seen_[g] += n_rows;
    const float alpha = std::min(alpha_slow * n_rows, alpha_batch_max);
    const float alpha_long =
        std::min(std::max(n_rows / (seen_[g] + few), alpha_long_ * n_rows), alpha_batch_max);
    float *slow = &slow_[g * n_experts_];
    float *whole = &long_[g * n_experts_];
    float *recent = &recent_[g * n_experts_];
    for (size_t e = 0; e < n_experts_; ++e) {
        slow[e] *= 1.0F - alpha;
        whole[e] *= 1.0F - alpha_long;
        recent[e] *= 1.0F - alpha_recent;
    }
    for (const int32_t expert : ids) {
        slow[expert] += alpha / n_rows;
        whole[expert] += alpha_long / n_rows;
        recent[expert] += alpha_recent / n_rows;
    }
    for (size_t e = 0; e < n_experts_; ++e) {
        const float p = with_uniform(whole[e], uniform_);
        use_[g * n_experts_ + e] = log_odds(with_uniform(slow[e], uniform_));
        long_use_[g * n_experts_ + e] = log_odds(p);
        chance_[g * n_experts_ + e] = p;
    }
}

void RoutingHistory::learn_tables(size_t g, std::span<const int32_t> ids, size_t rows, size_t k) {
    // The token before: the last row of the call before (unless this call's first rows were left out), then
    // the rows of this one.
    const bool whole = rows == static_cast<size_t>(total_rows_[g]);
    if (n_rows_[g] > 0 && whole)
        count(next_[g], row_of(g, static_cast<size_t>(n_rows_[g]) - 1), ids.first(k));
    if (rows > 8) { // consecutive tokens of a prompt; a few rows may as well be sequences of a batch
        for (size_t row = 1; row < rows; ++row) {
            count(next_[g], ids.subspan((row - 1) * k, k), ids.subspan(row * k, k));
        }
    }
    for (size_t distance = 1; distance <= n_distances_ && distance <= call_; ++distance) {
        const uint64_t from_call = call_ - distance;
        const size_t from = from_call % n_groups_;
        if (n_rows_[from] == 0 || called_[from] != from_call || total_rows_[from] != total_rows_[g]) continue;
        Table &table = later_[from * n_distances_ + distance - 1];
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
    // count + prior over what it would be as usual, visits * chance, + prior, multiplied over `from`; a block
    // of experts at a time, whose products stay in registers. The factors are 0.4 to 91: few are normal
    // floats.
    const float *chance = &chance_[target * n_experts_];
    constexpr size_t few = 6;
    const auto block = [&](size_t first, auto size) {
        std::array<float, size()> counted;
        std::array<float, size()> usual;
        std::array<float, size()> sum{};
        for (size_t begin = 0; begin < from.size(); begin += few) {
            counted.fill(1.0F);
            usual.fill(1.0F);
            for (const int32_t expert : from.subspan(begin, std::min(few, from.size() - begin))) {
                const auto f = static_cast<size_t>(expert);
                const uint8_t *counts = &table.counts[f * n_experts_ + first];
                const auto visits = static_cast<float>(table.visits[f]);
                for (size_t i = 0; i < size(); ++i) {
                    counted[i] *= static_cast<float>(counts[i]) + count_prior;
                    usual[i] *= visits * chance[first + i] + count_prior;
                }
            }
            for (size_t i = 0; i < size(); ++i) sum[i] += fast_log(counted[i] / usual[i]);
        }
        for (size_t i = 0; i < size(); ++i) out[first + i] = limit(sum[i], ratio_limit);
    };
    size_t e = 0;
    for (; e + 16 <= n_experts_; e += 16) block(e, std::integral_constant<size_t, 16>{});
    for (; e < n_experts_; ++e) block(e, std::integral_constant<size_t, 1>{});
}

void RoutingHistory::cross(int32_t group, int32_t distance, int32_t row, std::span<float> out) const {
    assert(distance >= 1 && distance <= n_distances() && row >= 0 && row < rows(group));
    const auto g = static_cast<size_t>(group);
    const auto d = static_cast<size_t>(distance);
    log_ratio(later_[g * n_distances_ + d - 1], row_of(g, static_cast<size_t>(row)), (g + d) % n_groups_,
              out);
}

} // namespace spice::policy

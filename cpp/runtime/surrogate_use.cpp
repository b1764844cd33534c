#include "runtime/surrogate_use.h"

#include <algorithm>
#include <cmath>

namespace spice {

Status SurrogateUse::set_surrogates(std::shared_ptr<const SurrogateSet> set) {
    if (on()) return {Code::internal, "stand-ins for experts cannot be exchanged while they are in use"};
    set_ = std::move(set);
    return {};
}

Status SurrogateUse::force(compute::SurrogateKind kind, float share, uint64_t seed) {
    if (kind != compute::SurrogateKind::drop && set_ == nullptr) {
        return {Code::unsupported, "there are no stand-ins for experts; load them with lore"};
    }
    const std::lock_guard lock(mutex_);
    forced_.emplace(share, seed);
    std::ranges::fill(n_rows_, 0);
    kind_ = kind;
    on_ = true;
    return {};
}

void SurrogateUse::turn_off() {
    const std::lock_guard lock(mutex_);
    on_ = false;
    forced_.reset();
}

const SurrogateLayer *SurrogateUse::layer(int32_t group) const {
    return set_ != nullptr && set_->layer(group).any() ? &set_->layer(group) : nullptr;
}

bool SurrogateUse::serves(int32_t group) const {
    return kind_ == compute::SurrogateKind::drop || layer(group) != nullptr;
}

void SurrogateUse::count_unfit() {
    const std::lock_guard lock(mutex_);
    counters_.unfit += 1;
}

bool SurrogateUse::choose(const RoutedRows &rows, std::span<uint8_t> taken) {
    const std::lock_guard lock(mutex_);
    if (!on() || rows.top_k == 0) return false;
    const SurrogateLayer *stand_ins = layer(rows.group);
    bool any = false;
    for (size_t first = 0; first < rows.ids.size(); first += rows.top_k) {
        row_.clear();
        for (size_t p = first; p < first + rows.top_k; ++p) {
            row_.push_back({.expert = rows.ids[p],
                            .gate = rows.gates[p],
                            .candidate = rows.elsewhere.empty() || rows.elsewhere[p] == 0});
        }
        const std::span<uint8_t> of_row = taken.subspan(first, rows.top_k);
        const uint64_t n = n_rows_[static_cast<size_t>(rows.group)]++;
        if (forced_) forced_->choose(rows.group, n, row_, of_row);
        count(stand_ins, row_, of_row);
        any = any || std::ranges::find(of_row, uint8_t{1}) != of_row.end();
    }
    return any;
}

void SurrogateUse::count(const SurrogateLayer *layer, std::span<const policy::RoutedPair> row,
                         std::span<const uint8_t> taken) {
    counters_.rows += 1;
    counters_.pairs += row.size();
    const float sum = policy::gate_sum(row);
    const compute::SurrogateKind kind = kind_;
    for (size_t i = 0; i < row.size(); ++i) {
        if (taken[i] == 0) continue;
        counters_.taken += 1;
        if (sum > 0.0F) counters_.mass += std::fabs(row[i].gate) / sum;
        if (layer == nullptr || layer->norm.empty() || !(layer->output > 0.0F)) continue;
        const auto expert = static_cast<size_t>(row[i].expert);
        const double error = kind == compute::SurrogateKind::full ? layer->error[expert] : 1.0;
        const double power =
            static_cast<double>(row[i].gate) * row[i].gate * error * layer->norm[expert] / layer->output;
        counters_.error += power;
        counters_.nats += power * layer->sensitivity;
    }
}

SurrogateCounters SurrogateUse::counters() const {
    const std::lock_guard lock(mutex_);
    return counters_;
}

void SurrogateUse::reset_counters() {
    const std::lock_guard lock(mutex_);
    counters_ = {};
}

} // namespace spice

#include "runtime/surrogate_use.h"

#include <algorithm>
#include <cmath>
#include <limits>

namespace spice {

Status SurrogateUse::set_surrogates(std::shared_ptr<const SurrogateSet> set) {
    if (on()) return {Code::internal, "stand-ins for experts cannot be exchanged while they are in use"};
    set_ = std::move(set);
    return {};
}

Status SurrogateUse::follow(const policy::SubstitutionRules &rules, int32_t top_k) {
    if (set_ == nullptr)
        return {Code::unsupported, "there are no stand-ins for experts; load them with lore"};
    if (std::isfinite(rules.budget) && !set_->calibrated()) {
        return {Code::unsupported, set_->path() + ": does not say what its stand-ins cost, so they cannot "
                                                  "be kept within a budget; fit them again with spice-fit"};
    }
    const std::lock_guard lock(mutex_);
    forced_.reset();
    policy::SubstitutionRules summed = rules; // what it spends is what each expert costs alone
    summed.budget = set_->curve().sum(rules.budget);
    rules_.emplace(summed, set_->n_layers(), top_k);
    kind_ = compute::SurrogateKind::full;
    only_missed_ = true;
    max_rows_ = rules.max_rows;
    on_ = true;
    return {};
}

Status SurrogateUse::force(compute::SurrogateKind kind, const policy::ForcedSubstitution &lot) {
    if (kind != compute::SurrogateKind::drop && set_ == nullptr) {
        return {Code::unsupported, "there are no stand-ins for experts; load them with lore"};
    }
    const std::lock_guard lock(mutex_);
    rules_.reset();
    forced_ = lot;
    only_missed_ = false;
    max_rows_ = std::numeric_limits<int32_t>::max();
    std::ranges::fill(n_rows_, 0);
    kind_ = kind;
    on_ = true;
    return {};
}

void SurrogateUse::turn_off() {
    const std::lock_guard lock(mutex_);
    on_ = false;
    forced_.reset();
    rules_.reset();
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
    pairs_.clear();
    for (size_t p = 0; p < rows.ids.size(); ++p) {
        const auto expert = static_cast<size_t>(rows.ids[p]);
        policy::RoutedPair &pair = pairs_.emplace_back();
        pair.expert = rows.ids[p];
        pair.gate = rows.gates[p];
        pair.candidate = rows.candidates[p] != 0;
        pair.confidence = expert < rows.forecast.size() ? rows.forecast[expert] : 0.0F;
        const bool bounded = rules_ && std::isfinite(rules_->rules().budget);
        const bool unknown = stand_ins == nullptr || !stand_ins->calibrated();
        pair.cost = bounded && unknown ? std::numeric_limits<float>::infinity()
                                       : static_cast<float>(cost(stand_ins, pair));
    }
    if (rules_) {
        rules_->choose(pairs_, rows.top_k, taken);
    } else {
        for (size_t first = 0; first < pairs_.size(); first += rows.top_k) {
            const uint64_t n = n_rows_[static_cast<size_t>(rows.group)]++;
            forced_->choose(rows.group, n, std::span(pairs_).subspan(first, rows.top_k),
                            taken.subspan(first, rows.top_k));
        }
    }
    count(rows.group, rows.top_k, taken);
    return std::ranges::find(taken, uint8_t{1}) != taken.end();
}

/// Expected nats of KL; 0 where not measured.
double SurrogateUse::cost(const SurrogateLayer *layer, const policy::RoutedPair &pair) const {
    return layer == nullptr ? 0.0 : layer->error_power(pair.expert, pair.gate, kind_) * layer->sensitivity;
}

void SurrogateUse::count(int32_t group, size_t top_k, std::span<const uint8_t> taken) {
    const SurrogateLayer *layer = this->layer(group);
    double nats = 0.0;
    counters_.rows += pairs_.size() / top_k;
    counters_.pairs += pairs_.size();
    for (size_t first = 0; first < pairs_.size(); first += top_k) {
        const std::span<const policy::RoutedPair> row = std::span(pairs_).subspan(first, top_k);
        const float sum = policy::gate_sum(row);
        for (size_t i = 0; i < top_k; ++i) {
            if (taken[first + i] == 0) continue;
            counters_.taken += 1;
            if (sum > 0.0F) counters_.mass += std::fabs(row[i].gate) / sum;
            if (layer != nullptr) counters_.error += layer->error_power(row[i].expert, row[i].gate, kind_);
            nats += cost(layer, row[i]);
        }
    }
    if (layer == nullptr) return;
    const auto n_rows = static_cast<double>(pairs_.size() / top_k);
    counters_.nats += account_.add(set_->curve(), group, n_rows, nats);
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

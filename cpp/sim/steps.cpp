#include "sim/steps.h"

#include "policy/split_mix.h"

namespace spice::sim {

namespace {

using policy::split_mix;

double uniform(uint64_t x) {
    return static_cast<double>(split_mix(x) >> 11) * 0x1.0p-53;
}

} // namespace

BatchBuilder::BatchBuilder(const Routing &routing)
    : r_(routing), seen_(static_cast<size_t>(routing.n_experts), 0),
      place_(static_cast<size_t>(routing.n_experts), 0) {}

policy::StrategyCall BatchBuilder::call(int32_t layer, int32_t from, int32_t to) {
    ++round_;
    experts_.clear();
    rows_.clear();
    weights_.clear();
    const size_t row = static_cast<size_t>(layer) * static_cast<size_t>(r_.n_tokens);
    const size_t k = static_cast<size_t>(r_.top_k);
    for (size_t i = (row + static_cast<size_t>(from)) * k; i < (row + static_cast<size_t>(to)) * k; ++i) {
        const size_t expert = static_cast<size_t>(r_.ids[i]);
        const float weight = r_.weights.empty() ? 1.0F : r_.weights[i];
        if (seen_[expert] != round_) {
            seen_[expert] = round_;
            place_[expert] = experts_.size();
            experts_.push_back(r_.ids[i]);
            rows_.push_back(1);
            weights_.push_back(weight);
        } else {
            ++rows_[place_[expert]];
            weights_[place_[expert]] += weight;
        }
    }
    return {layer, experts_, rows_, weights_, to - from};
}

int32_t Steps::accepted(int32_t at, int32_t drafted) const {
    int32_t n = 0;
    while (n < drafted) {
        const uint64_t which = static_cast<uint64_t>(at) << 8 | static_cast<uint64_t>(n);
        if (uniform(split_mix(options_.seed) ^ which) >= options_.acceptance) break;
        ++n;
    }
    return n;
}

std::span<const int32_t> Steps::guessed(int32_t token) {
    const size_t k = static_cast<size_t>(r_.top_k);
    for (size_t layer = 0; layer < static_cast<size_t>(r_.n_layers); ++layer) {
        const size_t from = (layer * static_cast<size_t>(r_.n_tokens) + static_cast<size_t>(token)) * k;
        for (size_t i = 0; i < k; ++i) {
            const uint64_t which = split_mix(options_.seed + 1) ^ (from + i);
            guess_[layer * k + i] =
                uniform(which) < options_.fidelity
                    ? r_.ids[from + i]
                    : static_cast<int32_t>(split_mix(split_mix(which)) % static_cast<uint64_t>(r_.n_experts));
        }
    }
    return guess_;
}

} // namespace spice::sim

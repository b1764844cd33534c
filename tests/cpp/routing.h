// Layer calls of a made-up routing, for tests that run a text through an Engine.
#pragma once

#include <cstdint>
#include <random>
#include <vector>

namespace test {

struct Call {
    int32_t layer = 0;
    std::vector<int32_t> ids;
};

/// Passes over layers of four experts, two different ones in each call. The same seed gives the same calls.
inline std::vector<Call> routing(int32_t n_layers, int n_passes, uint32_t seed) {
    std::mt19937 random(seed);
    std::vector<Call> calls;
    for (int pass = 0; pass < n_passes; ++pass) {
        for (int32_t layer = 0; layer < n_layers; ++layer) {
            const auto first = static_cast<int32_t>(random() % 4);
            calls.push_back({layer, {first, (first + 1 + static_cast<int32_t>(random() % 3)) % 4}});
        }
    }
    return calls;
}

} // namespace test

#include "runtime/capture.h"

#include <algorithm>
#include <string>
#include <utility>

namespace spice {

void Capture::start(uint64_t limit) {
    const std::lock_guard lock(mutex_);
    limit_ = limit;
    kept_ = 0;
    full_ = false;
    calls_.clear();
}

void Capture::stop() {
    start(0);
}

void Capture::add(int32_t layer, const RouterInput &input, std::span<const int32_t> ids) {
    const std::lock_guard lock(mutex_);
    if (limit_ == 0 || full_) return;
    const int64_t n_embd = input.data == nullptr ? 0 : input.n_embd;
    const auto n_hidden = static_cast<size_t>(n_embd * input.n_tokens);
    const uint64_t bytes = n_hidden * sizeof(float) + ids.size_bytes();
    if (bytes > limit_ - kept_) {
        full_ = true;
        return;
    }
    CapturedCall call{layer, input.n_tokens, n_embd, {}, {ids.begin(), ids.end()}};
    call.hidden.reserve(n_hidden);
    for (int64_t t = 0; t < input.n_tokens && n_embd > 0; ++t) {
        const std::span<const float> row = input.row(t);
        call.hidden.insert(call.hidden.end(), row.begin(), row.end());
    }
    calls_.push_back(std::move(call));
    kept_ += bytes;
}

Result<std::vector<CapturedCall>> Capture::take() {
    const std::lock_guard lock(mutex_);
    std::vector<CapturedCall> calls = std::exchange(calls_, {});
    kept_ = 0;
    if (std::exchange(full_, false)) {
        return Status(Code::out_of_memory, "more was captured than the limit of " + std::to_string(limit_) +
                                               " bytes; take it more often or give a higher limit");
    }
    return calls;
}

} // namespace spice

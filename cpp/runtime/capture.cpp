#include "runtime/capture.h"

#include <algorithm>
#include <string>
#include <utility>

namespace spice {

void Capture::start(uint64_t limit, bool outputs) {
    const std::lock_guard lock(mutex_);
    on_ = limit > 0;
    outputs_ = outputs;
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
    CapturedCall call;
    call.layer = layer;
    call.n_tokens = input.n_tokens;
    call.n_embd = n_embd;
    call.ids.assign(ids.begin(), ids.end());
    call.hidden.reserve(n_hidden);
    for (int64_t t = 0; t < input.n_tokens && n_embd > 0; ++t) {
        const std::span<const float> row = input.row(t);
        call.hidden.insert(call.hidden.end(), row.begin(), row.end());
    }
    calls_.push_back(std::move(call));
    kept_ += bytes;
}

CapturedCall *Capture::last(int32_t layer, uint64_t more_bytes) {
    if (limit_ == 0 || full_) return nullptr;
    const auto call = std::ranges::find(calls_.rbegin(), calls_.rend(), layer, &CapturedCall::layer);
    if (call == calls_.rend()) return nullptr;
    full_ = more_bytes > limit_ - kept_;
    if (full_) return nullptr;
    kept_ += more_bytes;
    return &*call;
}

void Capture::add_gates(int32_t layer, std::vector<float> gates) {
    const std::lock_guard lock(mutex_);
    if (CapturedCall *call = last(layer, gates.size() * sizeof(float))) call->gates = std::move(gates);
}

void Capture::add_outputs(int32_t layer, int64_t n_out, std::vector<float> rows) {
    const std::lock_guard lock(mutex_);
    if (CapturedCall *call = last(layer, rows.size() * sizeof(float))) {
        call->n_out = n_out;
        call->down = std::move(rows);
    }
}

void Capture::lose() noexcept {
    const std::lock_guard lock(mutex_);
    full_ = limit_ > 0;
}

Result<std::vector<CapturedCall>> Capture::take() {
    const std::lock_guard lock(mutex_);
    std::vector<CapturedCall> calls = std::exchange(calls_, {});
    kept_ = 0;
    if (std::exchange(full_, false)) {
        return Status(Code::out_of_memory, "more was captured than memory or the limit of " +
                                               std::to_string(limit_) +
                                               " bytes hold; take it more often or give a higher limit");
    }
    return calls;
}

} // namespace spice

// Keeps what routers read and chose, for fitting: the hidden states, routed experts and gate weights of layer
// calls, and on request what the experts gave.
//
// Off until start(). Kept until take(); at most `limit` bytes, what comes after is not kept and take() says
// so. Thread: add() from compute threads, the others from any; short sections under a lock of its own.
#pragma once

#include "store/status.h"

#include <atomic>
#include <cstdint>
#include <mutex>
#include <span>
#include <vector>

namespace spice {

/// The router inputs of one layer call, borrowed: `n_tokens` rows of `n_embd` floats, `stride` bytes apart.
/// Without data where the graph does not show them (an architecture that scales the experts' input).
struct RouterInput {
    const std::byte *data = nullptr;
    int64_t stride = 0;
    int64_t n_embd = 0;
    int64_t n_tokens = 0;

    [[nodiscard]] std::span<const float> row(int64_t token) const {
        return {reinterpret_cast<const float *>(data + token * stride), static_cast<size_t>(n_embd)};
    }
};

struct CapturedCall {
    int32_t layer = 0;
    int64_t n_tokens = 0;
    int64_t n_embd = 0;        ///< 0: without hidden states
    std::vector<float> hidden; ///< [n_tokens][n_embd]
    std::vector<int32_t> ids;  ///< [n_tokens][top_k]
    std::vector<float> gates;  ///< [n_tokens][top_k]; empty: the graph does not show them
    int64_t n_out = 0;         ///< 0: without outputs
    std::vector<float> down;   ///< [n_tokens][top_k][n_out], the down projection's product
};

class Capture {
  public:
    void start(uint64_t limit, bool outputs = false); ///< bytes; drops what was kept
    void stop();
    [[nodiscard]] bool on() const { return on_; }
    [[nodiscard]] bool wants_outputs() const { return outputs_; }
    /// Keeps a copy if started. `ids` is [n_tokens][top_k].
    void add(int32_t layer, const RouterInput &input, std::span<const int32_t> ids);
    /// To the layer's last call.
    void add_gates(int32_t layer, std::vector<float> gates);
    void add_outputs(int32_t layer, int64_t n_out, std::vector<float> rows);
    /// Something was not kept for want of memory: take() will say so.
    void lose() noexcept;
    /// What was kept, in the order of the calls. Errors: out_of_memory, when the limit was reached.
    [[nodiscard]] Result<std::vector<CapturedCall>> take();

  private:
    [[nodiscard]] CapturedCall *last(int32_t layer, uint64_t more_bytes); ///< under the lock

    std::atomic<bool> on_ = false;
    std::atomic<bool> outputs_ = false;
    std::mutex mutex_;
    uint64_t limit_ = 0; ///< 0: off
    uint64_t kept_ = 0;
    bool full_ = false;
    std::vector<CapturedCall> calls_;
};

} // namespace spice

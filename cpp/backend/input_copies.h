// What a split of ours reads of tensors that a device computed: copied to the host all at once, and known by
// where it still is on the device.
//
// llama.cpp's scheduler copies a split's inputs one after the other, each behind a wait for the device,
// unless the reading backend takes the copy on (`copy_async`). Taken on, the copies queue up behind what
// makes the tensors, and there is one wait, in wait(), when the split is computed. Until that split has been
// computed the tensors stay where they are, so that a device which computes experts takes its activations
// from there.
//
// Thread: the context's compute thread. wait() blocks. Errors: none; a copy that is not taken on is the
// scheduler's again.
#pragma once

#include "backend/ggml_abi.h"

#include <vector>

namespace spice {

class InputCopies {
  public:
    /// Queues the copy of `from` to `to`, on `device`'s stream. False: not from there, or not to host memory.
    [[nodiscard]] bool take(ggml_backend_t device, const ggml_tensor *from, ggml_tensor *to);
    /// All that was taken on has arrived.
    void wait();
    /// The split was computed: nothing of what was taken on can be relied on any more.
    void clear() { copies_.clear(); }

    /// The whole of `tensor`'s values, without gaps, on that device; nullptr: they are not there. The buffer
    /// that they are in: `buffer`.
    [[nodiscard]] void *on(ggml_backend_dev_t device, const ggml_tensor *tensor,
                           ggml_backend_buffer_t &buffer) const;

  private:
    struct Copy {
        ggml_backend_t stream;
        const ggml_tensor *from;
        const ggml_tensor *to;
        bool waited = false;
    };
    std::vector<Copy> copies_;
};

} // namespace spice

// The routed experts of one MoE block in one compute: pinned, read on demand, handed out as they arrive.
//
// Life: begin(), then for each projection of the block either wait() per expert (every expert has a slot), or
// next_wave()/wave_done() until next_wave() is empty, then the destructor. When the pool has fewer slots than
// the block routes to, the call is `streaming`: slots go from expert to expert, and a part is read only for
// the projection that uses it, so that every part is still read at most once.
//
// Thread: one compute thread calls begin, next_wave, wave_done and the destructor; wait() is for every thread
// of the graph. begin does not block; wait, next_wave and the destructor wait for reads. Errors: Status;
// after one, the call must be destroyed, and the next call works.
#pragma once

#include "runtime/engine.h"

#include <atomic>
#include <cstdint>
#include <span>
#include <vector>

namespace spice {

class LayerCall {
  public:
    LayerCall() = default;
    ~LayerCall();
    LayerCall(const LayerCall &) = delete;
    LayerCall &operator=(const LayerCall &) = delete;

    /// `ids`: the routed experts of all rows, any order, with duplicates. Errors: malformed (an id that does
    /// not exist).
    [[nodiscard]] Status begin(Engine &engine, int32_t group, std::span<const int32_t> ids);

    /// The experts of the call, each once; complete ones first, then in the order of their reads.
    [[nodiscard]] std::span<const int32_t> experts() const { return experts_; }
    [[nodiscard]] bool streaming() const { return streaming_; }
    /// True when the part of every expert is in its slot.
    [[nodiscard]] bool all_ready(size_t part) const;
    /// The slot of experts()[index]; -1 while it has none (streaming only).
    [[nodiscard]] int32_t slot(size_t index) const { return slab(index).slot; }
    /// Blocks until the part of experts()[index] has arrived; false when it will not.
    [[nodiscard]] bool wait(size_t index, size_t part);
    [[nodiscard]] const std::byte *weights(size_t index, size_t part) const;

    /// Indices of experts whose part has arrived and was not handed out before for this part; blocks until
    /// there is one; empty when all were handed out. Errors: those of reading.
    [[nodiscard]] Result<std::vector<size_t>> next_wave(size_t part);
    /// The wave was computed: a streaming call may give its slots to others.
    void wave_done(std::span<const size_t> wave);
    /// The first read error of this call, or ok. Internal, when an expert of a call that is not streaming was
    /// never asked for. In both cases rows were skipped, and nobody may take the result for one.
    [[nodiscard]] Status failure();

  private:
    friend struct LayerCallTest; ///< of tests/cpp/test_engine.cpp: makes a part absent
    [[nodiscard]] Slab &slab(size_t index) const {
        return group_->slabs[static_cast<size_t>(experts_[index])];
    }
    void pin(size_t index); ///< under the Engine's lock
    void unpin(size_t index);

    Engine *engine_ = nullptr;
    Engine::Group *group_ = nullptr;
    std::vector<int32_t> experts_;
    std::vector<bool> pinned_;
    bool streaming_ = false;
    std::atomic<bool> skipped_{false}; ///< a part did not come, though it may have since, for another call
    size_t wave_part_ = max_parts;     ///< the part that handed_out_ is about
    std::vector<bool> handed_out_;
};

} // namespace spice

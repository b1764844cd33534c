// The Engine of one loaded model: makes the experts of a layer call resident and says in which slots they
// are. The only place where policy, store and compute meet. In this version every slab is read at first use
// and stays, one pool per layer; a bounded pool with eviction replaces the pools behind the same calls.
//
// Thread: any number of compute threads (one per llama context) may call run/done at the same time; they
// take turns while slabs are read. run() blocks on disk. Everything const is safe anywhere.
// Errors: Status values; the last failure of the compute path is also kept for the binding (take_error),
// because ggml passes on only a failed status.
#pragma once

#include "store/expert_index.h"
#include "store/gguf_model.h"
#include "store/slab_reader.h"
#include "store/slot_pool.h"

#include <atomic>
#include <filesystem>
#include <memory>
#include <mutex>
#include <optional>
#include <span>
#include <string>
#include <unordered_map>
#include <vector>

namespace spice {

class Engine;

/// One stacked expert weight tensor as the backend sees it: where its part lies within the slots of a pool.
struct ExpertTensor {
    Engine *engine = nullptr;
    int32_t group = 0; ///< which pool: one routed bank of one layer
    const ExpertPart *part = nullptr;
    uint64_t slot_offset = 0; ///< byte offset of this part within each slot
};

/// What run() returns besides the slots: the slot tensor of the group.
struct SlotTensor {
    std::byte *base = nullptr;
    uint64_t stride = 0; ///< bytes between slots
    int32_t n_slots = 0;
};

/// Counters since the model was opened; see python/spice_moe/stats.py for what each means.
struct Counters {
    uint64_t graph_calls = 0;
    uint64_t layer_calls = 0;
    uint64_t matmul_nodes = 0;
    uint64_t delegated_nodes = 0;
    uint64_t expert_rows = 0;
    uint64_t experts_requested = 0;
    uint64_t experts_missed = 0;
    uint64_t slabs_read = 0;
    uint64_t bytes_read = 0;
    double read_seconds = 0.0;
    uint64_t failures = 0;
    uint64_t resident_experts = 0;
    uint64_t resident_bytes = 0;
};

class Engine {
  public:
    /// Reads the headers of `path` (all split files), checks the model, reserves address space. No expert
    /// byte is read. `expert_used`: the user's override of expert_used_count, 0 for none.
    [[nodiscard]] static Result<std::shared_ptr<Engine>> open(const std::filesystem::path &path,
                                                              int64_t expert_used, int32_t io_threads);

    [[nodiscard]] const GgufModel &model() const { return model_; }
    [[nodiscard]] const ExpertIndex &index() const { return index_; }
    /// The record of an expert weight tensor by its GGUF name, or nullptr. Stable for the Engine's life.
    [[nodiscard]] const ExpertTensor *find(std::string_view name) const;

    /// Makes every expert of `ids` (any order, duplicates allowed) of the group resident and pins it, reading
    /// what is missing; writes the slot of ids[i] to slots[i]. On error nothing stays pinned.
    [[nodiscard]] Status run(int32_t group, std::span<const int32_t> ids, std::span<int32_t> slots);
    /// Unpins what run() pinned for the same ids. `slots` as run() wrote them.
    void done(int32_t group, std::span<const int32_t> slots);
    [[nodiscard]] SlotTensor slot_tensor(int32_t group) const;

    /// Bytes of an expert tensor straight from the file, for the rare caller that reads a weight back.
    [[nodiscard]] Status read_back(const ExpertTensor &tensor, uint64_t offset, std::span<std::byte> to);

    void count_graph(uint64_t matmul_nodes, uint64_t delegated_nodes);
    void fail(Status status); ///< keeps the status for take_error() and counts it
    [[nodiscard]] std::optional<Status> take_error();
    [[nodiscard]] Counters counters() const;
    void reset_counters();

  private:
    struct Group {
        int32_t layer = 0;
        Bank bank = Bank::routed;
        uint64_t slab_bytes = 0;
        std::vector<const ExpertTensor *> parts;
        std::vector<int32_t> slot_of; ///< by expert; -1: not resident
        SlotPool pool;
    };
    Engine() = default;
    [[nodiscard]] Status build_groups();
    [[nodiscard]] Status load(Group &group, std::span<const int32_t> missing);

    GgufModel model_;
    ExpertIndex index_;
    std::unique_ptr<SlabReader> reader_;
    std::unordered_map<std::string_view, std::unique_ptr<ExpertTensor>> tensors_;

    mutable std::mutex mutex_; ///< guards everything below
    std::vector<Group> groups_;
    Counters counters_;
    std::optional<Status> error_;
};

} // namespace spice

// Where the bytes of every expert lie: file, offset, length, type and shape of each of its parts.
//
// Built from GGUF headers only (no tensor data is read). Any thread may read a built index; nothing blocks.
// Errors: Status of `GgufModel::open` (gguf_model.h) or of `ExpertIndex::build`, never an exception.
#pragma once

#include "store/gguf_model.h"
#include "store/status.h"

#include <cstdint>
#include <string>
#include <string_view>
#include <vector>

namespace spice {

/// Which routed set of a layer: the experts proper (`_exps`) or Grove's adjugate experts (`_chexps`).
enum class Bank : uint8_t { routed, adjugate };

/// The projection that a part belongs to.
enum class Projection : uint8_t { gate, up, down, gate_up };

/// What a part is. Weights are what SPICE moves; biases and scales are small and stay with llama.cpp.
enum class PartKind : uint8_t { weight, bias, scale };

/// One stacked expert tensor of the file; expert e occupies [offset + e*stride, offset + (e+1)*stride).
struct ExpertPart {
    Bank bank = Bank::routed;
    Projection projection = Projection::up;
    PartKind kind = PartKind::weight;
    std::string name;      ///< tensor name in the GGUF, for example "blk.3.ffn_up_exps.weight"
    uint32_t file = 0;     ///< index into GgufModel::files()
    uint64_t offset = 0;   ///< absolute byte offset in that file
    uint64_t stride = 0;   ///< bytes of one expert
    int32_t ggml_type = 0; ///< enum ggml_type
    int64_t n_in = 0;      ///< row length in elements (ne[0]); for bias and scale the vector length
    int64_t n_out = 0;     ///< rows per expert (ne[1]); 1 for bias and scale
    int32_t n_expert = 0;  ///< ne[2] (weights) or the last dimension (bias, scale)
};

/// All parts of one MoE layer, in file-name order. A layer's parts may lie in different split files.
struct LayerExperts {
    int32_t layer = 0;
    std::vector<ExpertPart> parts;
    [[nodiscard]] uint64_t
    slab_bytes(Bank bank) const; ///< bytes of all weight parts of one expert of the bank
};

class ExpertIndex {
  public:
    /// Finds every `blk.L.ffn_{gate,up,down,gate_up}_{exps,chexps}.{weight,bias,scale}` of the model.
    /// A model without any is dense: an empty index, not an error. Errors: `malformed` when the parts of a
    /// layer disagree (expert counts, widths), `unsupported` for a type that ggml-cpu cannot multiply.
    [[nodiscard]] static Result<ExpertIndex> build(const GgufModel &model);

    [[nodiscard]] bool dense() const { return layers_.empty(); }
    [[nodiscard]] const std::vector<LayerExperts> &layers() const { return layers_; }
    /// The part that holds this tensor, or nullptr.
    [[nodiscard]] const ExpertPart *find(std::string_view tensor_name) const;
    [[nodiscard]] uint64_t total_weight_bytes() const; ///< all experts of all layers, weights only
    [[nodiscard]] int64_t n_experts() const;           ///< sum over layers, routed bank

  private:
    std::vector<LayerExperts> layers_;
};

} // namespace spice

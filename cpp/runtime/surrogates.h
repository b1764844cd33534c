// The stand-ins for a model's experts, resident: what a sidecar's `lore.*` tensors hold, and what the fit
// measured of them.
//
// Thread: load() from one thread, blocks on disk; const afterwards. Errors: those of Sidecar::open and
// lore_tensors; io, truncated, out_of_memory; malformed for numbers that are not finite and for a curve that
// falls.
#pragma once

#include "compute/surrogate.h"
#include "policy/kl_curve.h"
#include "store/expert_index.h"
#include "store/gguf_model.h"
#include "store/mapping.h"
#include "store/sidecar_lore.h"

#include <cstdint>
#include <filesystem>
#include <memory>
#include <string>
#include <vector>

namespace spice {

/// Those of one group of the Engine.
struct SurrogateLayer {
    LoreShape shape;                     ///< n_expert 0: the group has none
    compute::SurrogateMatrices matrices; ///< into the set's memory
    std::vector<float> scale;
    std::vector<float> gate_scale;
    std::vector<float> offset;
    std::vector<float> error; ///< relative squared error of each expert's stand-in; 1 where not measured
    std::vector<float> norm;  ///< mean square norm of each expert's output; empty: not measured
    float output = 0.0F;      ///< mean square norm of the layer's routed output; 0: not measured
    float sensitivity = 0.0F; ///< nats of KL per unit of relative output error power; 0: not measured
    [[nodiscard]] bool any() const { return shape.n_expert > 0; }
    [[nodiscard]] bool calibrated() const { return !norm.empty() && output > 0.0F && sensitivity > 0.0F; }
    /// Expected squared error of a row's output, relative to its mean square, when the expert is replaced;
    /// 0 where not measured. What a row without the expert loses stands for `base`, which was not measured.
    [[nodiscard]] double error_power(int32_t expert, float gate, compute::SurrogateKind kind) const;
};

class SurrogateSet {
  public:
    /// `groups`: of the Engine, one entry each, layer -1 where a group has no stand-ins by construction.
    [[nodiscard]] static Result<std::shared_ptr<const SurrogateSet>> load(const std::filesystem::path &path,
                                                                          const GgufModel &model,
                                                                          const ExpertIndex &index,
                                                                          std::vector<LoreShape> groups);

    [[nodiscard]] const SurrogateLayer &layer(int32_t group) const {
        return layers_[static_cast<size_t>(group)];
    }
    [[nodiscard]] int32_t n_layers() const; ///< that have stand-ins
    [[nodiscard]] int64_t rank() const;     ///< the largest
    [[nodiscard]] bool calibrated() const;  ///< some layer is
    [[nodiscard]] uint64_t bytes() const { return memory_.bytes(); }
    [[nodiscard]] const std::string &path() const { return path_; }
    /// What they cost together; the sum of what each costs where the file does not say.
    [[nodiscard]] const policy::KlCurve &curve() const { return curve_; }

  private:
    std::string path_;
    policy::KlCurve curve_;
    Mapping memory_;
    std::vector<SurrogateLayer> layers_; ///< by group
};

} // namespace spice

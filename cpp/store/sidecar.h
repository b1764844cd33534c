// MODEL.spice.gguf: what spice-fit learned about one model, in a GGUF file. Format: docs/sidecar-format.md.
//
// open() checks the header; the tensors' data are read one at a time. Heads are named by the model's layer
// number and by the horizon, counted in MoE layers. Thread: any; open and read block on disk. Errors: those
// of GgufModel::open; malformed or unsupported (no sidecar, another version, shapes that contradict the
// model), and unsupported with the remedy when the sidecar was made for another model.
#pragma once

#include "store/gguf_model.h"
#include "store/routers.h"
#include "store/status.h"

#include <cstdint>
#include <filesystem>
#include <string>
#include <string_view>
#include <vector>

namespace spice {

/// One fitted head in the file: tensors `KIND.LAYER.HORIZON.PART`, null where absent.
struct SidecarHead {
    int32_t group = 0; ///< in the model it is for
    int32_t horizon = 1;
    const GgufTensor *full = nullptr;     ///< [n_out][n_embd]
    const GgufTensor *a = nullptr;        ///< [rank][n_embd]
    const GgufTensor *b = nullptr;        ///< [rank][n_out]
    const GgufTensor *present = nullptr;  ///< [n_in][n_out]
    const GgufTensor *previous = nullptr; ///< [n_out][n_out]
    const GgufTensor *bias = nullptr;     ///< [n_out]
};

class Sidecar {
  public:
    static constexpr int64_t version = 1;
    static constexpr int32_t max_horizon = 16;

    /// `routers`: of the model that the sidecar is for; `fingerprint` of the same.
    [[nodiscard]] static Result<Sidecar> open(const std::filesystem::path &path, const RouterSet &routers,
                                              std::string_view fingerprint);

    [[nodiscard]] const GgufModel &file() const { return file_; }
    /// Heads of a kind ("adapter" or "draft"); their pointers live as long as the Sidecar.
    [[nodiscard]] Result<std::vector<SidecarHead>> heads(std::string_view kind,
                                                         const RouterSet &routers) const;

  private:
    explicit Sidecar(GgufModel file) : file_(std::move(file)) {}
    GgufModel file_;
};

} // namespace spice

// One logical GGUF model, in one file or in several split files: metadata and tensor table, no tensor data.
//
// Every count, size and offset of the header is checked against the file before it is believed, so that a
// lying file gives a Status and neither a crash nor a huge allocation. Thread: any; open() reads the headers
// (blocks on disk), everything after is in memory and const.
#pragma once

#include "store/status.h"

#include <array>
#include <cstdint>
#include <filesystem>
#include <map>
#include <optional>
#include <string>
#include <string_view>
#include <unordered_map>
#include <variant>
#include <vector>

namespace spice {

/// A scalar or string value of the header. Arrays keep only their element type and count (tokenizer tables
/// are large and SPICE does not need them), except arrays of integers or booleans with at most 4096 elements
/// (per-layer hyper-parameters), which are kept as a vector.
struct GgufArray {
    uint32_t type = 0; ///< gguf element type
    uint64_t count = 0;
    std::vector<int64_t> ints; ///< see above
    // Of `tokenizer.ggml.tokens` only, whose texts are not kept, what check_model has to know of them:
    bool has_twins = false;    ///< a token occurs twice
    int32_t missing_byte = -1; ///< a byte without a token of its own ("<0x0A>"), although others have one
};
using GgufValue = std::variant<uint64_t, int64_t, double, bool, std::string, GgufArray>;

struct GgufTensor {
    std::string name;
    int32_t ggml_type = 0;                       ///< enum ggml_type, known to the linked ggml
    std::array<int64_t, 4> shape = {1, 1, 1, 1}; ///< ne, all >= 1
    int32_t n_dims = 1;
    uint32_t file = 0;   ///< index into files()
    uint64_t offset = 0; ///< absolute byte offset in that file; offset + bytes <= the file's size
    uint64_t bytes = 0;
};

struct GgufFile {
    std::filesystem::path path;
    uint64_t size = 0; ///< bytes
};

class GgufModel {
  public:
    /// Opens `path`; when it is a split file (`split.count` > 1) its siblings `name-0000i-of-0000n.gguf` too.
    /// Errors: not_found, not_gguf, truncated, malformed, unsupported (version, byte order, unknown tensor
    /// type), io. The message names the file, the offending number and what to do.
    [[nodiscard]] static Result<GgufModel> open(const std::filesystem::path &path);

    [[nodiscard]] const std::vector<GgufFile> &files() const { return files_; }
    [[nodiscard]] const std::vector<GgufTensor> &tensors() const { return tensors_; }
    [[nodiscard]] const GgufTensor *find(std::string_view name) const;

    /// Metadata of the first file.
    [[nodiscard]] const std::map<std::string, GgufValue, std::less<>> &metadata() const { return metadata_; }
    [[nodiscard]] std::optional<std::string> get_string(std::string_view key) const;
    /// An integer of any width and sign; for a per-layer array, its element at `layer` (0 when out of range).
    [[nodiscard]] std::optional<int64_t> get_int(std::string_view key, int32_t layer = 0) const;
    [[nodiscard]] std::string architecture() const; ///< general.architecture, "" when absent

  private:
    std::vector<GgufFile> files_;
    std::vector<GgufTensor> tensors_;
    std::unordered_map<std::string, size_t> by_name_;
    std::map<std::string, GgufValue, std::less<>> metadata_;
};

/// Refuses models that are valid GGUF but would crash llama.cpp (field reports: an F64 router, zero experts,
/// more experts used than there are, a head count of zero). `expert_used` is the user's override of
/// `<arch>.expert_used_count`, 0 for none. ok() does not promise that llama.cpp can run the model.
[[nodiscard]] Status check_model(const GgufModel &model, int64_t expert_used = 0);

} // namespace spice

#include "store/gguf_model.h"

#include "store/align.h"
#include "store/gguf_reader.h"

#include "ggml.h"
#include "gguf.h"

#include <algorithm>
#include <bit>
#include <cstdio>
#include <limits>
#include <new>
#include <stdexcept>

namespace spice {

namespace {

static_assert(std::endian::native == std::endian::little, "the headers are read as they lie in the file");

constexpr uint64_t k_max_key = 65535;
constexpr uint64_t k_min_alignment = 8;
constexpr uint64_t k_max_alignment = uint64_t{1} << 20;
constexpr uint64_t k_max_splits = 65535; // llama.cpp keeps the count in 16 bits
// The smallest a key-value pair or a tensor entry can be: what a count is compared with.
constexpr uint64_t k_min_pair_bytes = 8 + 1 + 4 + 1;
constexpr uint64_t k_min_tensor_bytes = 8 + 1 + 4 + 8 + 4 + 8;

/// One file's header. Types are kept where llama.cpp insists on them.
struct Header {
    GgufFile file;
    std::map<std::string, GgufValue, std::less<>> metadata;
    uint32_t split_no_type = GGUF_TYPE_COUNT;
    uint32_t alignment_type = GGUF_TYPE_COUNT;
    uint64_t n_tensors = 0;
    std::vector<GgufTensor> tensors;
};

bool read_pair(GgufReader &in, Header &header) {
    std::string key;
    if (!in.read_string(key)) return false;
    if (key.empty() || key.size() > k_max_key || key.find('\0') != std::string::npos) {
        return in.fail(Code::malformed, "a key of " + std::to_string(key.size()) +
                                            " bytes is not a valid name; the file is damaged");
    }
    uint32_t type = 0;
    if (!in.read(type)) return false;
    GgufValue value;
    if (!read_gguf_value(in, key, type, value)) return false;
    if (key == "split.no") header.split_no_type = type;
    if (key == GGUF_KEY_GENERAL_ALIGNMENT) header.alignment_type = type;
    if (!header.metadata.emplace(key, std::move(value)).second) {
        return in.fail(Code::malformed, "key " + shown(key) + " occurs twice; the file is damaged");
    }
    return true;
}

/// The tensor's type is known to the linked ggml and its shape gives a size without overflow.
bool measure(GgufReader &in, GgufTensor &tensor) {
    const std::string name = "tensor " + shown(tensor.name);
    if (tensor.ggml_type < 0 || tensor.ggml_type >= GGML_TYPE_COUNT ||
        ggml_type_size(static_cast<ggml_type>(tensor.ggml_type)) == 0) {
        return in.fail(Code::unsupported,
                       name + " has the type " + std::to_string(tensor.ggml_type) +
                           ", which this ggml does not know; use a model with another quantisation");
    }
    const auto type = static_cast<ggml_type>(tensor.ggml_type);
    const int64_t block = ggml_blck_size(type);
    if (tensor.shape[0] % block != 0) {
        return in.fail(Code::malformed, name + " has rows of " + std::to_string(tensor.shape[0]) +
                                            " elements, no multiple of the block of " +
                                            std::to_string(block) + " of " + ggml_type_name(type) +
                                            "; the file is damaged");
    }
    uint64_t elements = 1;
    bool overflow = false;
    for (const int64_t ne : tensor.shape) {
        overflow = overflow || __builtin_mul_overflow(elements, static_cast<uint64_t>(ne), &elements);
    }
    overflow = overflow || elements > static_cast<uint64_t>(std::numeric_limits<int64_t>::max());
    overflow = overflow || __builtin_mul_overflow(elements / static_cast<uint64_t>(block),
                                                  uint64_t{ggml_type_size(type)}, &tensor.bytes);
    if (overflow)
        return in.fail(Code::malformed, name + " is larger than any address space; the file is damaged");
    return true;
}

bool read_tensor(GgufReader &in, GgufTensor &tensor) {
    if (!in.read_string(tensor.name)) return false;
    const std::string name = "tensor " + shown(tensor.name);
    if (tensor.name.empty() || tensor.name.size() >= GGML_MAX_NAME ||
        tensor.name.find('\0') != std::string::npos) {
        return in.fail(Code::malformed, name + " has a name of " + std::to_string(tensor.name.size()) +
                                            " bytes; 1 to " + std::to_string(GGML_MAX_NAME - 1) +
                                            " are possible");
    }
    uint32_t n_dims = 0;
    if (!in.read(n_dims)) return false;
    if (n_dims < 1 || n_dims > GGML_MAX_DIMS) {
        return in.fail(Code::malformed,
                       name + " has " + std::to_string(n_dims) + " dimensions; 1 to 4 are possible");
    }
    tensor.n_dims = static_cast<int32_t>(n_dims);
    for (uint32_t i = 0; i < n_dims; ++i) {
        if (!in.read(tensor.shape[i])) return false;
        if (tensor.shape[i] < 1) {
            return in.fail(Code::malformed, name + " has the dimension " + std::to_string(tensor.shape[i]) +
                                                "; at least 1 is possible");
        }
    }
    return in.read(tensor.ggml_type) && in.read(tensor.offset) && measure(in, tensor);
}

bool read_start(GgufReader &in, uint64_t &n_tensors, uint64_t &n_pairs) {
    uint32_t magic = 0;
    uint32_t version = 0;
    if (in.size() < sizeof(magic) || !in.read(magic) || magic != 0x46554747) { // "GGUF"
        if (!in.ok() && in.status().code() != Code::truncated) return false;
        return in.fail(Code::not_gguf,
                       "is not a GGUF file (it does not begin with the letters GGUF); if it is a "
                       "git-lfs pointer or a web page, download the model itself");
    }
    if (!in.read(version)) return false;
    if (version != 0 && (version & 0xffff) == 0) {
        return in.fail(Code::unsupported, "is a big-endian GGUF file; convert it to little-endian "
                                          "(gguf_convert_endian.py of the gguf package)");
    }
    if (version != 2 && version != 3) {
        return in.fail(Code::unsupported,
                       "is of GGUF version " + std::to_string(version) + "; versions 2 and 3 can be read");
    }
    return in.read(n_tensors) && in.read(n_pairs) &&
           in.room_for(n_pairs, k_min_pair_bytes, "the number of keys") &&
           in.room_for(n_tensors, k_min_tensor_bytes, "the number of tensors");
}

bool find_alignment(GgufReader &in, const Header &header, uint64_t &alignment) {
    alignment = GGUF_DEFAULT_ALIGNMENT;
    const auto at = header.metadata.find(GGUF_KEY_GENERAL_ALIGNMENT);
    if (at == header.metadata.end()) return true;
    const auto *value = std::get_if<uint64_t>(&at->second);
    if (header.alignment_type != GGUF_TYPE_UINT32 || value == nullptr) {
        return in.fail(Code::malformed,
                       "general.alignment is not a 32-bit unsigned number; the file is damaged");
    }
    if (!std::has_single_bit(*value) || *value < k_min_alignment || *value > k_max_alignment) {
        return in.fail(Code::malformed, "general.alignment is " + std::to_string(*value) +
                                            "; a power of two from 8 to 1048576 is possible");
    }
    alignment = *value;
    return true;
}

/// Offsets become absolute; each tensor lies in the file, and no two share a byte.
bool place_tensors(GgufReader &in, Header &header, uint64_t alignment) {
    const uint64_t size = in.size();
    const uint64_t padded = align_up(in.position(), alignment);
    for (GgufTensor &tensor : header.tensors) {
        const std::string name = "tensor " + shown(tensor.name);
        if (tensor.offset % alignment != 0) {
            return in.fail(Code::malformed, name + " has the offset " + std::to_string(tensor.offset) +
                                                ", no multiple of the alignment " +
                                                std::to_string(alignment));
        }
        if (padded > size || tensor.offset > size - padded || tensor.bytes > size - padded - tensor.offset) {
            return in.fail(Code::truncated, name + " of " + std::to_string(tensor.bytes) +
                                                " bytes at data offset " + std::to_string(tensor.offset) +
                                                " ends after the file's " + std::to_string(size) +
                                                " bytes; the download is incomplete, repeat it");
        }
        tensor.offset += padded;
    }
    std::vector<const GgufTensor *> order;
    order.reserve(header.tensors.size());
    for (const GgufTensor &tensor : header.tensors) order.push_back(&tensor);
    std::sort(order.begin(), order.end(), [](const auto *a, const auto *b) { return a->offset < b->offset; });
    for (size_t i = 1; i < order.size(); ++i) {
        if (order[i - 1]->offset + order[i - 1]->bytes > order[i]->offset) {
            return in.fail(Code::malformed, "tensors " + shown(order[i - 1]->name) + " and " +
                                                shown(order[i]->name) + " overlap at byte " +
                                                std::to_string(order[i]->offset) +
                                                "; the file is damaged, download it again");
        }
    }
    return true;
}

Result<Header> read_header(const std::filesystem::path &path) {
    GgufReader in(path);
    Header header;
    uint64_t n_pairs = 0;
    uint64_t alignment = 0;
    bool good = in.ok() && read_start(in, header.n_tensors, n_pairs);
    for (uint64_t i = 0; good && i < n_pairs; ++i) good = read_pair(in, header);
    good = good && in.room_for(header.n_tensors, k_min_tensor_bytes, "the number of tensors") &&
           find_alignment(in, header, alignment);
    for (uint64_t i = 0; good && i < header.n_tensors; ++i) {
        GgufTensor tensor;
        good = read_tensor(in, tensor);
        if (good) header.tensors.push_back(std::move(tensor));
    }
    good = good && place_tensors(in, header, alignment);
    if (!good) return in.status();
    header.file.path = path;
    header.file.size = in.size();
    return header;
}

std::optional<int64_t> as_int(const GgufValue &value) {
    if (const auto *u = std::get_if<uint64_t>(&value)) {
        // Larger than any limit that a caller compares with, but not negative.
        return static_cast<int64_t>(std::min<uint64_t>(*u, std::numeric_limits<int64_t>::max()));
    }
    if (const auto *s = std::get_if<int64_t>(&value)) return *s;
    return std::nullopt;
}

std::optional<int64_t> int_of(const Header &header, std::string_view key) {
    const auto at = header.metadata.find(key);
    return at == header.metadata.end() ? std::nullopt : as_int(at->second);
}

std::string split_suffix(uint64_t number, uint64_t count) {
    std::array<char, 64> text{};
    std::snprintf(text.data(), text.size(), "-%05llu-of-%05llu.gguf", static_cast<unsigned long long>(number),
                  static_cast<unsigned long long>(count));
    return text.data();
}

/// The paths of all files of the split model, the opened one first; or what is wrong with it.
Result<std::vector<std::filesystem::path>> split_paths(const Header &header) {
    const std::filesystem::path &path = header.file.path;
    std::vector<std::filesystem::path> paths = {path};
    const int64_t count = int_of(header, "split.count").value_or(0);
    const int64_t number = int_of(header, "split.no").value_or(count > 1 ? -1 : 0);
    if (count <= 1 && number == 0) return paths;
    const auto wrong = [&](const std::string &what) {
        return Status(Code::malformed, path.string() + ": " + what);
    };
    if (count < 1 || count > static_cast<int64_t>(k_max_splits) || number < 0 || number >= count) {
        return wrong("split.no " + std::to_string(number) + " of split.count " + std::to_string(count) +
                     " is impossible; the file is damaged, download it again");
    }
    const std::string name = path.filename().string();
    const std::string suffix = split_suffix(static_cast<uint64_t>(number) + 1, static_cast<uint64_t>(count));
    const bool named = name.size() > suffix.size() && name.ends_with(suffix);
    const std::string stem = named ? name.substr(0, name.size() - suffix.size()) : "NAME";
    if (number != 0) {
        return wrong("is file " + std::to_string(number + 1) + " of a model of " + std::to_string(count) +
                     " files; open " + stem + split_suffix(1, static_cast<uint64_t>(count)));
    }
    if (!named) {
        return wrong("is the first file of a model of " + std::to_string(count) +
                     ", so its name has to end with " + suffix + "; rename it, and its siblings alike");
    }
    for (uint64_t i = 2; i <= static_cast<uint64_t>(count); ++i) {
        paths.push_back(path.parent_path() / (stem + split_suffix(i, static_cast<uint64_t>(count))));
        std::error_code
            error; // the existence first: parsing 100 siblings to find that the last is missing is slow
        if (!std::filesystem::exists(paths.back(), error)) {
            return Status(Code::not_found, paths.back().string() + ": no such file; it is file " +
                                               std::to_string(i) + " of " + std::to_string(count) + " of " +
                                               path.string());
        }
    }
    return paths;
}

} // namespace

Result<GgufModel> GgufModel::open(const std::filesystem::path &path) {
    try {
        GgufModel model;
        Result<Header> first = read_header(path);
        if (!first.ok()) return first.status();
        Result<std::vector<std::filesystem::path>> paths = split_paths(first.value());
        if (!paths.ok()) return paths.status();
        const std::optional<int64_t> n_tensors = int_of(first.value(), "split.tensors.count");
        const size_t count = paths.value().size();
        for (size_t i = 0; i < count; ++i) {
            Result<Header> read = i == 0 ? std::move(first) : read_header(paths.value()[i]);
            if (!read.ok()) return read.status();
            Header header = read.take();
            const std::string name = header.file.path.string();
            // llama.cpp asserts the type of split.no in the siblings, so another one would end the process.
            if (i > 0 && (header.split_no_type != GGUF_TYPE_UINT16 ||
                          int_of(header, "split.no") != static_cast<int64_t>(i) ||
                          int_of(header, "split.count").value_or(static_cast<int64_t>(count)) !=
                              static_cast<int64_t>(count))) {
                return Status(Code::malformed,
                              name + ": its split.no or split.count does not say that it is file " +
                                  std::to_string(i + 1) + " of " + std::to_string(count) +
                                  "; it belongs to another model, download it again");
            }
            for (GgufTensor &tensor : header.tensors) {
                tensor.file = static_cast<uint32_t>(i);
                if (!model.by_name_.emplace(tensor.name, model.tensors_.size()).second) {
                    return Status(Code::malformed, name + ": tensor " + shown(tensor.name) +
                                                       " occurs twice in the model; download it again");
                }
                model.tensors_.push_back(std::move(tensor));
            }
            model.files_.push_back(std::move(header.file));
            if (i == 0) model.metadata_ = std::move(header.metadata);
        }
        if (count > 1 && n_tensors != static_cast<int64_t>(model.tensors_.size())) {
            return Status(Code::malformed, path.string() + ": split.tensors.count says " +
                                               std::to_string(n_tensors.value_or(0)) + ", but the " +
                                               std::to_string(count) + " files hold " +
                                               std::to_string(model.tensors_.size()) +
                                               " tensors; download them again");
        }
        return model;
    } catch (const std::bad_alloc &) {
        return Status(Code::out_of_memory, path.string() + ": not enough memory for its header");
    } catch (const std::exception &error) {
        return Status(Code::internal, path.string() + ": " + error.what());
    }
}

const GgufTensor *GgufModel::find(std::string_view name) const {
    const auto at = by_name_.find(std::string(name));
    return at == by_name_.end() ? nullptr : &tensors_[at->second];
}

std::optional<std::string> GgufModel::get_string(std::string_view key) const {
    const auto at = metadata_.find(key);
    if (at == metadata_.end()) return std::nullopt;
    const auto *text = std::get_if<std::string>(&at->second);
    return text == nullptr ? std::nullopt : std::optional<std::string>(*text);
}

std::optional<int64_t> GgufModel::get_int(std::string_view key, int32_t layer) const {
    const auto at = metadata_.find(key);
    if (at == metadata_.end()) return std::nullopt;
    const auto *array = std::get_if<GgufArray>(&at->second);
    if (array == nullptr) return as_int(at->second);
    if (array->ints.size() != array->count)
        return std::nullopt; // not an array of integers, or too long to be kept
    if (layer < 0 || static_cast<uint64_t>(layer) >= array->count) return 0;
    return array->ints[static_cast<size_t>(layer)];
}

std::string GgufModel::architecture() const {
    return get_string("general.architecture").value_or("");
}

} // namespace spice

#include "store/tensor_data.h"

#include "store/gguf_reader.h"

#include "ggml.h"

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <fcntl.h>
#include <new>
#include <unistd.h>

namespace spice {

namespace {

/// A file descriptor that closes itself.
class Descriptor {
  public:
    explicit Descriptor(const std::filesystem::path &path)
        : fd_(::open(path.c_str(), O_RDONLY | O_CLOEXEC)) {}
    ~Descriptor() {
        if (fd_ >= 0) ::close(fd_);
    }
    Descriptor(const Descriptor &) = delete;
    Descriptor &operator=(const Descriptor &) = delete;
    [[nodiscard]] int get() const { return fd_; }

  private:
    int fd_;
};

} // namespace

Status read_bytes(const GgufModel &model, const GgufTensor &tensor, std::span<std::byte> to) {
    const std::filesystem::path &path = model.files()[tensor.file].path;
    const auto failed = [&](Code code, const std::string &why) {
        return Status(code, path.string() + ": reading tensor " + shown(tensor.name) + " of " +
                                std::to_string(tensor.bytes) + " bytes: " + why);
    };
    if (to.size() != tensor.bytes) return failed(Code::internal, "room for " + std::to_string(to.size()));
    const Descriptor file(path);
    if (file.get() < 0) return failed(Code::io, std::strerror(errno));
    size_t done = 0;
    while (done < to.size()) {
        const ssize_t got =
            ::pread(file.get(), to.data() + done, to.size() - done, static_cast<off_t>(tensor.offset + done));
        if (got < 0 && errno == EINTR) continue;
        if (got < 0) return failed(Code::io, std::string(std::strerror(errno)) + "; check the disk");
        if (got == 0) return failed(Code::truncated, "the file became shorter; restore it and load again");
        done += static_cast<size_t>(got);
    }
    return {};
}

Result<std::vector<float>> read_floats(const GgufModel &model, const GgufTensor &tensor) {
    const auto type = static_cast<ggml_type>(tensor.ggml_type);
    const ggml_to_float_t convert = ggml_get_type_traits(type)->to_float;
    if (type != GGML_TYPE_F32 && convert == nullptr) {
        return Status(Code::unsupported, model.files()[tensor.file].path.string() + ": tensor " +
                                             shown(tensor.name) + " has the type " + ggml_type_name(type) +
                                             ", which has no conversion to float");
    }
    try {
        size_t count = 1;
        for (const int64_t ne : tensor.shape) count *= static_cast<size_t>(ne);
        std::vector<float> values(count);
        if (type == GGML_TYPE_F32) {
            Status status = read_bytes(model, tensor, std::as_writable_bytes(std::span(values)));
            if (!status.ok()) return status;
            return values;
        }
        std::vector<std::byte> raw(tensor.bytes);
        if (Status status = read_bytes(model, tensor, raw); !status.ok()) return status;
        convert(raw.data(), values.data(), static_cast<int64_t>(count));
        return values;
    } catch (const std::bad_alloc &) {
        return Status(Code::out_of_memory, model.files()[tensor.file].path.string() + ": no memory for " +
                                               "tensor " + shown(tensor.name));
    }
}

} // namespace spice

#include "store/fingerprint.h"

#include "store/tensor_data.h"

#include "ggml.h"

#include <algorithm>
#include <array>
#include <bit>
#include <cstdio>
#include <cstring>
#include <new>
#include <vector>

namespace spice {

namespace {

/// Two lanes of 64 bits; words enter as multiply and rotate, and each string's length enters before it.
class Hash {
  public:
    void word(uint64_t value) {
        a_ = (a_ ^ value) * 0x9e3779b97f4a7c15u;
        a_ ^= a_ >> 32;
        b_ = (std::rotl(b_, 29) + value) * 0xc2b2ae3d27d4eb4fu;
    }
    void bytes(const void *data, size_t size) {
        word(size);
        const auto *at = static_cast<const std::byte *>(data);
        for (; size >= sizeof(uint64_t); size -= sizeof(uint64_t), at += sizeof(uint64_t)) {
            uint64_t value = 0;
            std::memcpy(&value, at, sizeof(value));
            word(value);
        }
        uint64_t rest = 0;
        if (size > 0) std::memcpy(&rest, at, size);
        word(rest);
    }
    void text(const std::string &value) { bytes(value.data(), value.size()); }
    [[nodiscard]] std::string digits() const {
        std::array<char, 33> out{};
        std::snprintf(out.data(), out.size(), "%016llx%016llx",
                      static_cast<unsigned long long>(mixed(a_ ^ std::rotl(b_, 17))),
                      static_cast<unsigned long long>(mixed(b_)));
        return out.data();
    }

  private:
    static uint64_t mixed(uint64_t v) {
        v = (v ^ (v >> 30)) * 0xbf58476d1ce4e5b9u;
        v = (v ^ (v >> 27)) * 0x94d049bb133111ebu;
        return v ^ (v >> 31);
    }
    uint64_t a_ = 0x5350494345u; // "SPICE"
    uint64_t b_ = 1;
};

} // namespace

Result<std::string> fingerprint(const GgufModel &model) {
    try {
        std::vector<const GgufTensor *> order;
        for (const GgufTensor &tensor : model.tensors()) order.push_back(&tensor);
        std::ranges::sort(order, {},
                          [](const GgufTensor *tensor) -> const std::string & { return tensor->name; });
        Hash hash;
        hash.text(model.architecture());
        std::vector<std::byte> data;
        for (const GgufTensor *tensor : order) {
            hash.text(tensor->name);
            hash.word(static_cast<uint64_t>(tensor->ggml_type));
            for (const int64_t ne : tensor->shape) hash.word(static_cast<uint64_t>(ne));
            if (tensor->name.find("ffn_gate_inp.") == std::string::npos) continue;
            data.resize(tensor->bytes);
            if (Status status = read_bytes(model, *tensor, data); !status.ok()) return status;
            hash.bytes(data.data(), data.size());
        }
        return hash.digits();
    } catch (const std::bad_alloc &) {
        return Status(Code::out_of_memory,
                      model.files().front().path.string() + ": no memory for reading its routers");
    }
}

} // namespace spice

// A stretch of anonymous memory or of mere address space, unmapped by the destructor.
//
// Thread: any; an object is used by one thread at a time. Nothing blocks. An allocation that failed is an
// empty Mapping: check `if (mapping)`.
#pragma once

#include <cstddef>
#include <cstdint>
#include <utility>

namespace spice {

class Mapping {
  public:
    enum class Kind : uint8_t {
        addresses, ///< no memory: every access is a fault
        lazy,      ///< memory comes with the first write to a page, however much is asked for; huge pages
        memory,    ///< counted by the system at once, as malloc is; huge pages
    };

    Mapping() = default;
    Mapping(Kind kind, uint64_t bytes);
    Mapping(Mapping &&other) noexcept { *this = std::move(other); }
    Mapping &operator=(Mapping &&other) noexcept {
        std::swap(base_, other.base_);
        std::swap(bytes_, other.bytes_);
        return *this;
    }
    ~Mapping();

    explicit operator bool() const { return base_ != nullptr; }
    [[nodiscard]] std::byte *base() const { return base_; }
    [[nodiscard]] uint64_t bytes() const { return bytes_; }

  private:
    std::byte *base_ = nullptr;
    uint64_t bytes_ = 0;
};

} // namespace spice

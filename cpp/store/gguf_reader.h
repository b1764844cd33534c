// A bounded cursor over the header of a GGUF file: nothing is read, and nothing allocated, before the count
// that asks for it has been compared with what is left of the file.
//
// pread with a window instead of mmap: a file that shrinks or a disk that fails gives a Status and not
// SIGBUS. Thread: one at a time; every call may block on disk. Errors are sticky: after the first failure all
// reads return false and status() keeps the reason.
#pragma once

#include "store/gguf_model.h"
#include "store/status.h"

#include <array>
#include <cstdint>
#include <cstring>
#include <filesystem>
#include <string>
#include <string_view>
#include <type_traits>
#include <vector>

namespace spice {

class GgufReader {
  public:
    explicit GgufReader(const std::filesystem::path &path);
    ~GgufReader();
    GgufReader(const GgufReader &) = delete;
    GgufReader &operator=(const GgufReader &) = delete;

    [[nodiscard]] bool ok() const { return status_.ok(); }
    [[nodiscard]] const Status &status() const { return status_; }
    [[nodiscard]] uint64_t size() const { return size_; }
    [[nodiscard]] uint64_t position() const { return window_at_ + cursor_; }
    [[nodiscard]] uint64_t remaining() const { return size_ - position(); }

    /// Keeps the first error. The message gets the file's name in front. Returns false.
    bool fail(Code code, const std::string &what);

    template <class T>
    bool read(T &value) {
        static_assert(std::is_arithmetic_v<T>);
        const char *bytes = take(sizeof(T));
        if (bytes == nullptr) return false;
        std::memcpy(&value, bytes, sizeof(T));
        return true;
    }

    /// A length and that many bytes, at most 256 MiB.
    bool read_string(std::string &value);
    /// The same, seen only until the next call; `scratch` holds strings longer than the window.
    bool view_string(std::string_view &value, std::string &scratch);
    bool skip(uint64_t bytes) {
        if (bytes > filled_ - cursor_) return skip_far(bytes);
        cursor_ += static_cast<size_t>(bytes);
        return true;
    }
    /// True when `count` items of at least `bytes_each` can still follow; otherwise fails with `what` in the
    /// message.
    bool room_for(uint64_t count, uint64_t bytes_each, std::string_view what) {
        return count <= remaining() / bytes_each || no_room(count, what);
    }

  private:
    /// The next bytes (at most the window's size), or nullptr. Inline, like skip: a vocabulary asks a million
    /// times.
    const char *take(size_t bytes) {
        if (bytes > filled_ - cursor_ && !refill(bytes)) return nullptr;
        const char *at = window_.data() + cursor_;
        cursor_ += bytes;
        return at;
    }
    bool read_length(uint64_t &length);
    bool skip_far(uint64_t bytes);
    bool past_end();
    bool no_room(uint64_t count, std::string_view what);
    bool refill(size_t bytes);
    bool copy(char *to, uint64_t bytes);

    std::string name_;
    Status status_;
    int fd_ = -1;
    uint64_t size_ = 0;
    std::vector<char> window_;
    uint64_t window_at_ = 0; ///< file offset of window_[0]
    size_t filled_ = 0;
    size_t cursor_ = 0;
};

/// A name from the file as it may stand in a message: bytes that are no printable ASCII would not survive the
/// way to Python.
std::string shown(std::string_view name);

/// The value of `key`, whose type was just read. Returns false after in.fail().
bool read_gguf_value(GgufReader &in, const std::string &key, uint32_t type, GgufValue &value);

} // namespace spice

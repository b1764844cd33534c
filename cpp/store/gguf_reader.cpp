#include "store/gguf_reader.h"

#include <algorithm>
#include <cerrno>
#include <fcntl.h>
#include <sys/stat.h>
#include <unistd.h>

namespace spice {

namespace {

constexpr size_t k_window = size_t{1} << 20;

std::string reason(int error) {
    return std::string(std::strerror(error));
}

} // namespace

GgufReader::GgufReader(const std::filesystem::path &path) : name_(path.string()) {
    struct stat info = {};
    // stat before open: opening a FIFO would wait for a writer.
    if (::stat(path.c_str(), &info) != 0) {
        const int error = errno;
        if (error == ENOENT || error == ENOTDIR) {
            fail(Code::not_found, "no such file; check the path");
        } else {
            fail(Code::io, "cannot be examined: " + reason(error));
        }
        return;
    }
    if (S_ISDIR(info.st_mode)) {
        fail(Code::not_gguf, "is a directory; give the path of the .gguf file in it");
        return;
    }
    if (!S_ISREG(info.st_mode)) {
        fail(Code::not_gguf, "is not a regular file; copy the model to a file first");
        return;
    }
    fd_ = ::open(path.c_str(), O_RDONLY | O_CLOEXEC);
    if (fd_ < 0) {
        const int error = errno;
        fail(error == ENOENT ? Code::not_found : Code::io, "cannot be opened: " + reason(error));
        return;
    }
    if (::fstat(fd_, &info) != 0) {
        fail(Code::io, "cannot be examined: " + reason(errno));
        return;
    }
    size_ = static_cast<uint64_t>(info.st_size);
    if (size_ == 0) {
        fail(Code::not_gguf, "is empty; download it again");
        return;
    }
    window_.resize(static_cast<size_t>(std::min<uint64_t>(size_, k_window)));
}

GgufReader::~GgufReader() {
    if (fd_ >= 0) ::close(fd_);
}

bool GgufReader::fail(Code code, const std::string &what) {
    if (status_.ok()) status_ = Status(code, name_ + ": " + what);
    return false;
}

bool GgufReader::refill(size_t bytes) {
    const size_t left = filled_ - cursor_;
    if (left > 0) std::memmove(window_.data(), window_.data() + cursor_, left);
    window_at_ += cursor_;
    cursor_ = 0;
    filled_ = left;
    while (filled_ < bytes) {
        const ssize_t got = ::pread(fd_, window_.data() + filled_, window_.size() - filled_,
                                    static_cast<off_t>(window_at_ + filled_));
        if (got < 0 && errno == EINTR) continue;
        if (got < 0)
            return fail(Code::io,
                        "read error at byte " + std::to_string(window_at_ + filled_) + ": " + reason(errno));
        if (got == 0)
            return fail(Code::truncated,
                        "the file became shorter while it was read; is it still being written?");
        filled_ += static_cast<size_t>(got);
    }
    return true;
}

const char *GgufReader::take(size_t bytes) {
    if (!ok()) return nullptr;
    if (bytes > remaining()) {
        fail(Code::truncated,
             "ends at byte " + std::to_string(size_) + ", inside its header; download it again");
        return nullptr;
    }
    if (filled_ - cursor_ < bytes && !refill(bytes)) return nullptr;
    const char *at = window_.data() + cursor_;
    cursor_ += bytes;
    return at;
}

bool GgufReader::copy(char *to, uint64_t bytes) {
    while (bytes > 0) {
        const size_t piece = static_cast<size_t>(std::min<uint64_t>(bytes, window_.size()));
        const char *from = take(piece);
        if (from == nullptr) return false;
        std::memcpy(to, from, piece);
        to += piece;
        bytes -= piece;
    }
    return true;
}

bool GgufReader::skip(uint64_t bytes) {
    if (!ok()) return false;
    if (bytes > remaining()) {
        return fail(Code::truncated,
                    "ends at byte " + std::to_string(size_) + ", inside its header; download it again");
    }
    if (bytes <= filled_ - cursor_) {
        cursor_ += static_cast<size_t>(bytes);
        return true;
    }
    window_at_ = position() + bytes;
    cursor_ = filled_ = 0;
    return true;
}

bool GgufReader::room_for(uint64_t count, uint64_t bytes_each, const std::string &what) {
    if (!ok()) return false;
    if (count > remaining() / bytes_each) {
        return fail(Code::malformed,
                    what + " says " + std::to_string(count) + ", but only " + std::to_string(remaining()) +
                        " bytes of the file are left; the file is damaged, download it again");
    }
    return true;
}

bool GgufReader::view_string(std::string_view &value, std::string &scratch) {
    uint64_t length = 0;
    if (!read(length) || !room_for(length, 1, "a string's length")) return false;
    if (length <= window_.size()) {
        const char *bytes = take(static_cast<size_t>(length));
        if (bytes == nullptr) return false;
        value = std::string_view(bytes, static_cast<size_t>(length));
        return true;
    }
    scratch.resize(static_cast<size_t>(length));
    if (!copy(scratch.data(), length)) return false;
    value = scratch;
    return true;
}

bool GgufReader::read_string(std::string &value) {
    uint64_t length = 0;
    if (!read(length) || !room_for(length, 1, "a string's length")) return false;
    value.resize(static_cast<size_t>(length));
    return copy(value.data(), length);
}

} // namespace spice

#include "store/gguf_reader.h"

#include "gguf.h"

#include <algorithm>
#include <cerrno>
#include <fcntl.h>
#include <functional>
#include <sys/stat.h>
#include <unistd.h>

namespace spice {

namespace {

constexpr size_t k_window = size_t{1} << 20;
constexpr uint64_t k_max_string = uint64_t{256} << 20; // whole tokenizers are kept in some

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
    if (!ok() || bytes > remaining()) return past_end();
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

bool GgufReader::past_end() {
    return fail(Code::truncated,
                "ends at byte " + std::to_string(size_) + ", inside its header; download it again");
}

bool GgufReader::skip_far(uint64_t bytes) {
    if (!ok() || bytes > remaining()) return past_end();
    window_at_ = position() + bytes;
    cursor_ = filled_ = 0;
    return true;
}

bool GgufReader::no_room(uint64_t count, std::string_view what) {
    return fail(Code::malformed, std::string(what) + " says " + std::to_string(count) + ", but only " +
                                     std::to_string(remaining()) +
                                     " bytes of the file are left; the file is damaged, download it again");
}

/// Files can be sparse, so that what is left of one bounds no allocation.
bool GgufReader::read_length(uint64_t &length) {
    if (!read(length) || !room_for(length, 1, "a string's length")) return false;
    return length <= k_max_string ||
           fail(Code::malformed, "a string of " + std::to_string(length) + " bytes; up to " +
                                     std::to_string(k_max_string) +
                                     " are possible; the file is damaged, download it again");
}

bool GgufReader::view_string(std::string_view &value, std::string &scratch) {
    uint64_t length = 0;
    if (!read_length(length)) return false;
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
    if (!read_length(length)) return false;
    value.resize(static_cast<size_t>(length));
    return copy(value.data(), length);
}

std::string shown(std::string_view name) {
    std::string text;
    for (const char c : name.substr(0, 80)) text += (c >= 0x20 && c < 0x7f) ? c : '?';
    if (name.size() > 80) text += "...";
    return "'" + text + "'";
}

namespace {

constexpr uint64_t k_max_ints = 4096;

template <class Stored, class Kept>
bool read_scalar(GgufReader &in, GgufValue &value) {
    Stored stored{};
    if (!in.read(stored)) return false;
    value = static_cast<Kept>(stored);
    return true;
}

uint64_t element_bytes(uint32_t type) {
    switch (type) {
    case GGUF_TYPE_UINT8:
    case GGUF_TYPE_INT8:
    case GGUF_TYPE_BOOL:
        return 1;
    case GGUF_TYPE_UINT16:
    case GGUF_TYPE_INT16:
        return 2;
    case GGUF_TYPE_UINT32:
    case GGUF_TYPE_INT32:
    case GGUF_TYPE_FLOAT32:
        return 4;
    case GGUF_TYPE_UINT64:
    case GGUF_TYPE_INT64:
    case GGUF_TYPE_FLOAT64:
        return 8;
    default:
        return 0;
    }
}

bool read_one(GgufReader &in, uint32_t type, GgufValue &value) {
    switch (type) {
    case GGUF_TYPE_UINT8:
        return read_scalar<uint8_t, uint64_t>(in, value);
    case GGUF_TYPE_UINT16:
        return read_scalar<uint16_t, uint64_t>(in, value);
    case GGUF_TYPE_UINT32:
        return read_scalar<uint32_t, uint64_t>(in, value);
    case GGUF_TYPE_UINT64:
        return read_scalar<uint64_t, uint64_t>(in, value);
    case GGUF_TYPE_INT8:
        return read_scalar<int8_t, int64_t>(in, value);
    case GGUF_TYPE_INT16:
        return read_scalar<int16_t, int64_t>(in, value);
    case GGUF_TYPE_INT32:
        return read_scalar<int32_t, int64_t>(in, value);
    case GGUF_TYPE_INT64:
        return read_scalar<int64_t, int64_t>(in, value);
    case GGUF_TYPE_FLOAT32:
        return read_scalar<float, double>(in, value);
    case GGUF_TYPE_FLOAT64:
        return read_scalar<double, double>(in, value);
    case GGUF_TYPE_BOOL: {
        uint8_t byte = 0; // any byte may stand in the file; only 0 and 1 may be read as bool
        if (!in.read(byte)) return false;
        value = byte != 0;
        return true;
    }
    case GGUF_TYPE_STRING: {
        std::string text;
        if (!in.read_string(text)) return false;
        value = std::move(text);
        return true;
    }
    default:
        return false;
    }
}

bool keep_ints(GgufReader &in, GgufArray &array) {
    array.ints.reserve(static_cast<size_t>(array.count));
    for (uint64_t i = 0; i < array.count; ++i) {
        GgufValue value;
        if (!read_one(in, array.type, value)) return false;
        int64_t kept = 0;
        if (const auto *u = std::get_if<uint64_t>(&value)) kept = static_cast<int64_t>(*u);
        if (const auto *s = std::get_if<int64_t>(&value)) kept = *s;
        if (const auto *b = std::get_if<bool>(&value)) kept = *b ? 1 : 0;
        array.ints.push_back(kept);
    }
    return true;
}

/// The byte of a token like "<0x0A>", or -1.
int32_t byte_of(std::string_view token) {
    if (token.size() != 6 || !token.starts_with("<0x") || token[5] != '>') return -1;
    int32_t byte = 0;
    for (const char c : token.substr(3, 2)) { // llama.cpp looks for capital letters only
        if ((c < '0' || c > '9') && (c < 'A' || c > 'F')) return -1;
        byte = byte * 16 + (c <= '9' ? c - '0' : c - 'A' + 10);
    }
    return byte;
}

bool skip_strings(GgufReader &in, uint64_t count) {
    uint64_t length = 0;
    for (uint64_t i = 0; i < count; ++i) {
        if (!in.read(length) || !in.room_for(length, 1, "a string's length") || !in.skip(length))
            return false;
    }
    return true;
}

/// Looks at the tokens with llama.cpp's eyes: up to the first NUL, and the empty ones are all different.
bool look_at_tokens(GgufReader &in, GgufArray &array) {
    std::vector<size_t> hashes; // 8 bytes for the 8 bytes of each length prefix: bounded by the file
    hashes.reserve(static_cast<size_t>(array.count));
    std::array<bool, 256> spelled{}; // "<0x41>"
    std::array<bool, 256> plain{};   // "A", which serves as well
    std::string scratch;
    for (uint64_t i = 0; i < array.count; ++i) {
        std::string_view text;
        if (!in.view_string(text, scratch)) return false;
        text = text.substr(0, text.find('\0'));
        if (text.empty()) continue;
        hashes.push_back(std::hash<std::string_view>{}(text));
        if (text.size() == 1) plain[static_cast<unsigned char>(text[0])] = true;
        if (const int32_t byte = byte_of(text); byte >= 0) spelled[static_cast<size_t>(byte)] = true;
    }
    std::sort(hashes.begin(), hashes.end());
    array.has_twins = std::adjacent_find(hashes.begin(), hashes.end()) != hashes.end();
    if (std::find(spelled.begin(), spelled.end(), true) == spelled.end()) return true;
    for (size_t byte = 0; byte < spelled.size() && array.missing_byte < 0; ++byte) {
        if (!spelled[byte] && !plain[byte]) array.missing_byte = static_cast<int32_t>(byte);
    }
    return true;
}

bool read_array(GgufReader &in, const std::string &key, GgufValue &value) {
    GgufArray array;
    if (!in.read(array.type) || !in.read(array.count)) return false;
    if (array.type == GGUF_TYPE_ARRAY) {
        return in.fail(Code::malformed,
                       "key " + shown(key) + " is an array of arrays, which no GGUF reader accepts");
    }
    const bool strings = array.type == GGUF_TYPE_STRING;
    const uint64_t each = strings ? 8 : element_bytes(array.type);
    if (each == 0) {
        return in.fail(Code::malformed, "key " + shown(key) + " is an array of the unknown type " +
                                            std::to_string(array.type) + "; the file is damaged");
    }
    if (!in.room_for(array.count, each, "the length of array " + shown(key))) return false;
    const bool floats = array.type == GGUF_TYPE_FLOAT32 || array.type == GGUF_TYPE_FLOAT64;
    bool read = false;
    if (strings) {
        read = key == "tokenizer.ggml.tokens" ? look_at_tokens(in, array) : skip_strings(in, array.count);
    } else if (!floats && array.count <= k_max_ints) {
        read = keep_ints(in, array);
    } else {
        read = in.skip(array.count * each);
    }
    value = std::move(array);
    return read;
}

} // namespace

bool read_gguf_value(GgufReader &in, const std::string &key, uint32_t type, GgufValue &value) {
    if (type == GGUF_TYPE_ARRAY) return read_array(in, key, value);
    if (type >= GGUF_TYPE_COUNT) {
        return in.fail(Code::malformed, "key " + shown(key) + " has the unknown type " +
                                            std::to_string(type) +
                                            "; the file is damaged or newer than this version");
    }
    return read_one(in, type, value);
}

} // namespace spice

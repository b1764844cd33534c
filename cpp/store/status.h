// Errors as values. C++ below the binding never throws on bad input: functions return Status or Result<T>,
// and the binding turns them into SpiceError subclasses (see python/spice_moe/errors.py).
#pragma once

#include <cstdint>
#include <string>
#include <utility>
#include <variant>

namespace spice {

enum class Code : int32_t {
    ok = 0,
    not_found,     ///< no such file                           -> FileNotFoundError too
    not_gguf,      ///< the file is something else             -> SpiceFormatError
    truncated,     ///< the file ends before its contents do   -> SpiceFormatError
    malformed,     ///< counts, sizes or offsets that lie      -> SpiceFormatError
    unsupported,   ///< valid, but not something we can run    -> SpiceUnsupportedError
    io,            ///< the disk or the kernel refused         -> SpiceIOError
    out_of_memory, ///< an allocation failed                   -> SpiceMemoryError
    version,       ///< not the ggml we were built for         -> SpiceVersionError
    internal,      ///< a bug of ours                          -> SpiceError
    budget,        ///< a memory budget that cannot work       -> SpiceBudgetError
    device,        ///< an accelerator failed                  -> SpiceDeviceError
};

/// A code and a sentence that names the file, the number and the remedy. Cheap to copy when ok.
class [[nodiscard]] Status {
  public:
    Status() = default;
    Status(Code code, std::string message) : code_(code), message_(std::move(message)) {}
    [[nodiscard]] bool ok() const { return code_ == Code::ok; }
    [[nodiscard]] Code code() const { return code_; }
    [[nodiscard]] const std::string &message() const { return message_; }

  private:
    Code code_ = Code::ok;
    std::string message_;
};

/// Either a value or the Status that says why there is none.
template <class T>
class [[nodiscard]] Result {
  public:
    Result(T value) : state_(std::in_place_index<0>, std::move(value)) {}
    Result(Status status) : state_(std::in_place_index<1>, std::move(status)) {}
    [[nodiscard]] bool ok() const { return state_.index() == 0; }
    [[nodiscard]] T &value() { return std::get<0>(state_); }
    [[nodiscard]] const T &value() const { return std::get<0>(state_); }
    [[nodiscard]] T &&take() { return std::get<0>(std::move(state_)); }
    [[nodiscard]] Status status() const { return ok() ? Status{} : std::get<1>(state_); }

  private:
    std::variant<T, Status> state_;
};

} // namespace spice

// Turns a failed ggml assertion into a C++ exception while a model is loaded.
//
// ggml_abort ends the process after a callback; the callback may throw instead, and llama.cpp's loader and
// context constructor catch std::exception and return NULL. Only for the thread that holds a guard, and only
// while it does; everywhere else ggml behaves as before (message, then abort). Not for compute: an exception
// cannot leave an OpenMP region.
#pragma once

#include <string>

namespace spice {

class AbortGuard {
  public:
    AbortGuard(); ///< guards nest
    ~AbortGuard();
    AbortGuard(const AbortGuard &) = delete;
    AbortGuard &operator=(const AbortGuard &) = delete;
    /// ggml's message when an assertion failed under this thread's guard, else "".
    [[nodiscard]] static const std::string &message();
};

} // namespace spice

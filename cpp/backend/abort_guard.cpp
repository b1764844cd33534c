#include "backend/abort_guard.h"

#include "ggml.h"

#include <cstdio>
#include <mutex>
#include <stdexcept>

namespace spice {

namespace {

thread_local int guards = 0;
thread_local std::string last_message;
ggml_abort_callback_t previous = nullptr;

void on_abort(const char *text) {
    if (guards > 0) {
        last_message = text;
        throw std::runtime_error(last_message);
    }
    if (previous != nullptr) {
        previous(text);
    } else {
        std::fprintf(stderr, "%s\n", text); // what ggml prints when no callback is set
    }
}

} // namespace

AbortGuard::AbortGuard() {
    static std::once_flag installed;
    std::call_once(installed, [] { previous = ggml_set_abort_callback(on_abort); });
    if (guards++ == 0) last_message.clear();
}

AbortGuard::~AbortGuard() {
    --guards;
}

const std::string &AbortGuard::message() {
    return last_message;
}

} // namespace spice

// A test harness of one header: TEST(name) { CHECK(...); } and RUN_TESTS() as the body of main.
// A failed check is printed and counted, the test goes on; main returns 1 when anything failed.
#pragma once

#include <cstdio>
#include <functional>
#include <iostream>
#include <sstream>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

namespace check {

struct State {
    std::vector<std::pair<std::string, std::function<void()>>> tests;
    int failures = 0;
    int checks = 0;
};

inline State &state() {
    static State the_state;
    return the_state;
}

struct Register {
    Register(const char *name, std::function<void()> body) {
        state().tests.emplace_back(name, std::move(body));
    }
};

inline void report(bool passed, const char *file, int line, const std::string &what) {
    ++state().checks;
    if (passed) return;
    ++state().failures;
    std::cerr << file << ":" << line << ": " << what << "\n";
}

template <class A, class B>
void report_equal(const A &a, const B &b, const char *file, int line, const char *text) {
    const bool passed = a == b;
    std::ostringstream what;
    if (!passed) what << text << ": " << a << " against " << b;
    report(passed, file, line, what.str());
}

/// Runs all tests, or those whose name contains the first argument.
inline int run(int argc, char **argv) {
    const std::string_view only = argc > 1 ? argv[1] : "";
    for (const auto &[name, body] : state().tests) {
        if (name.find(only) == std::string::npos) continue;
        const int before = state().failures;
        body();
        std::cerr << (state().failures == before ? "ok   " : "FAIL ") << name << "\n";
    }
    std::cerr << state().checks << " checks, " << state().failures << " failures\n";
    return state().failures == 0 && state().checks > 0 ? 0 : 1;
}

} // namespace check

#define TEST(name)                                                                                           \
    static void test_##name();                                                                               \
    static const check::Register register_##name(#name, test_##name);                                        \
    static void test_##name()
#define CHECK(condition) check::report(static_cast<bool>(condition), __FILE__, __LINE__, #condition)
#define CHECK_EQ(a, b) check::report_equal((a), (b), __FILE__, __LINE__, #a " == " #b)
#define RUN_TESTS()                                                                                          \
    int main(int argc, char **argv) {                                                                        \
        return check::run(argc, argv);                                                                       \
    }

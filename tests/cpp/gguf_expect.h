// What opening or checking a built file gives, and the checks on it that the tests of the GGUF index share.
#pragma once

#include "check.h"
#include "gguf_builder.h"

#include "store/gguf_model.h"

namespace test {

using spice::Code;
using spice::GgufModel;

inline std::ostream &print(std::ostream &out, Code code) {
    return out << static_cast<int>(code);
}

struct Outcome {
    Code code = Code::ok;
    std::string message;
};
inline std::ostream &operator<<(std::ostream &out, const Outcome &o) {
    return print(out, o.code) << " '" << o.message << "'";
}

inline Outcome outcome(const spice::Status &status) {
    return {status.code(), status.message()};
}

inline Outcome open_bytes(const std::string &bytes) {
    const test::TempDir dir;
    return outcome(GgufModel::open(dir.write("m.gguf", bytes)).status());
}

inline void expect(const Outcome &got, Code code, const std::string &part, int line) {
    std::ostringstream what;
    what << "expected code " << static_cast<int>(code) << " and '" << part << "', got " << got;
    check::report(got.code == code && got.message.find(part) != std::string::npos, __FILE__, line,
                  what.str());
}
#define EXPECT_OPEN(builder, code, part) expect(open_bytes((builder).bytes()), code, part, __LINE__)

inline Outcome check_built(const GgufBuilder &builder, int64_t used = 0) {
    const test::TempDir dir;
    const auto model = GgufModel::open(dir.write("m.gguf", builder.bytes()));
    return outcome(model.ok() ? spice::check_model(model.value(), used) : model.status());
}
#define EXPECT_CHECK(builder, code, part) expect(check_built(builder), code, part, __LINE__)

/// check_model of the good model after one change.
template <class Change>
inline Outcome check_changed(Change change, int64_t used = 0) {
    GgufBuilder b = good_model();
    change(b);
    return check_built(b, used);
}
#define EXPECT_CHANGED(statement, code, part)                                                                \
    expect(check_changed([](GgufBuilder &b) { statement; }), code, part, __LINE__)

} // namespace test

// Timeline: what is written, and that a span without memory is dropped and not thrown.
#include "check.h"
#include "gguf_builder.h"

#include "runtime/timeline.h"

#include <fstream>
#include <iterator>
#include <new>

using spice::Timeline;

TEST(spans_are_written_and_what_finds_no_memory_is_counted) {
    const test::TempDir dir;
    Timeline timeline;
    CHECK(!timeline.on());
    timeline.start();
    CHECK(timeline.on());
    const double now = Timeline::now();
    timeline.add(Timeline::Track::layer, [] { return "layer 3"; }, now, now + 0.5);
    timeline.add(Timeline::Track::read, [] { return "demand"; }, now, now + 0.5, 2);
    timeline.add(Timeline::Track::host, []() -> std::string { throw std::bad_alloc(); }, now, now + 0.5);
    const auto path = dir.path() / "timeline.json";
    CHECK(timeline.write(path).ok());
    std::ifstream in(path);
    const std::string text{std::istreambuf_iterator<char>(in), {}};
    for (const char *part :
         {"\"layer 3\"", "\"demand\"", "disk reads 3", "\"dropped\": \"1\"", "\"dur\": 500000.000"}) {
        CHECK(text.find(part) != std::string::npos);
    }
    CHECK(timeline.write(dir.path() / "no" / "such").code() == spice::Code::io);
}

RUN_TESTS()

// Sending ahead to a device, on the emulated accelerator: told the future by `replay`, experts are there when
// their layer comes; bytes stay right while copies, evictions and layer calls meet (run under ThreadSanitizer
// in CI); what has passed is not sent any more; prompts and turned-off predictions send nothing.
#include "check.h"
#include "device_fixture.h"
#include "routing.h"

#include <atomic>
#include <chrono>
#include <thread>

using spice::DeviceCall;
using spice::DeviceCounters;
using test::Call;
using test::new_stream;
using Fixture = test::DeviceFixture;

namespace {

constexpr int n_layers = 6;

/// Six layers of four experts, all of them in memory, half of them on the device.
std::unique_ptr<Fixture> make(const spice::PrefetchOptions &prefetch, double ram = 1.0, double vram = 0.5,
                              const std::string &placement = "spice",
                              const spice_emulator_settings &settings = test::no_costs) {
    auto f = std::make_unique<Fixture>(settings, test::good_model(n_layers).bytes(), prefetch);
    CHECK_EQ(f->build(ram, vram, placement).message(), "");
    return f;
}

void read_everything(const Fixture &f) {
    for (int32_t group = 0; group < n_layers; ++group) {
        spice::LayerCall call;
        CHECK(call.begin(*f.engine, group, std::vector<int32_t>{0, 1, 2, 3}).ok());
    }
}

void tell(const Fixture &f, const std::vector<Call> &calls) {
    std::vector<spice::policy::FutureCall> future;
    for (const Call &call : calls) future.push_back({call.layer, 1, call.ids});
    CHECK_EQ(f.engine->prefetcher()->set_future(std::move(future), {}, 0).message(), "");
}

/// Waits until nothing has been on the link for a while: what the time between two layers is for.
void let_it_send(const Fixture &f) {
    for (int idle = 0, i = 0; idle < 3 && i < 5000; ++i) {
        const DeviceCounters c = f.tier().counters();
        idle = c.link.uploads == c.fetched + c.filled + c.prefetched ? idle + 1 : 0;
        std::this_thread::sleep_for(std::chrono::microseconds(500));
    }
}

bool consistent(const DeviceCounters &c) {
    return c.prefetch_used + c.prefetch_late + c.prefetch_wasted <= c.prefetched &&
           c.prefetched <= c.prefetch_used + c.prefetch_late + c.prefetch_wasted + c.resident_experts;
}

} // namespace

TEST(what_is_foretold_is_on_the_device_in_time) {
    for (const double ram : {1.0, 0.7}) {
        const auto f = make({.predictor = "replay", .always = true}, ram);
        const ggml_backend_ptr stream = new_stream();
        if (ram == 1.0) read_everything(*f);
        const std::vector<Call> calls = test::routing(n_layers, 60, 3);
        tell(*f, calls);
        for (const Call &call : calls) {
            CHECK(f->call(stream.get(), call.layer, call.ids, 1));
            let_it_send(*f);
        }
        const DeviceCounters c = f->tier().counters();
        CHECK(consistent(c));
        CHECK(c.evictions > 50);
        CHECK(c.prefetch_used > 100);
        // An oracle's loads are of use, and none pushes out what a nearer layer needs.
        CHECK(c.prefetch_wasted <= c.prefetch_used / 10);
        CHECK(c.resident_bytes <= f->tier().plan().budget);
        if (ram == 1.0) CHECK(c.hits > 9 * (c.fetched + c.host));
    }
}

TEST(without_predictions_nothing_is_sent_ahead) {
    const std::vector<Call> calls = test::routing(n_layers, 20, 3);
    for (const int way : {0, 1, 2}) {
        const spice::PrefetchOptions off = {.enabled = false};
        const auto f = way == 0   ? make(off)
                       : way == 1 ? make({.predictor = "replay", .always = true}, 1.0, 0.5, "all-fetch")
                                  : make({.predictor = "replay", .always = true}, 1.0, 1.0); // room for all
        const ggml_backend_ptr stream = new_stream();
        read_everything(*f);
        if (way == 2) {
            for (int i = 0; i < 100 && f->tier().counters().resident_experts < 24; ++i) {
                for (int32_t group = 0; group < n_layers; ++group)
                    f->bring(stream.get(), group, {0, 1, 2, 3});
                let_it_send(*f); // a copy is counted before its slab is there: calls alone could overtake it
            }
            CHECK_EQ(f->tier().counters().resident_experts, 24u);
        }
        if (way > 0) tell(*f, calls);
        for (const Call &call : calls) {
            CHECK(f->call(stream.get(), call.layer, call.ids, 1));
            let_it_send(*f);
        }
        CHECK_EQ(f->tier().counters().prefetched, 0u);
        if (way > 0) CHECK_EQ(f->engine->counters().prefetch.calls, 0u); // not even predicted
    }
}

TEST(a_prompt_sends_nothing_ahead) {
    const auto f = make({.predictor = "ensemble", .always = true});
    const ggml_backend_ptr stream = new_stream();
    read_everything(*f);
    const std::vector<int32_t> prompt = {0, 1, 0, 2, 0, 3, 1, 2, 1, 3, 2, 3, 0, 1, 0, 2, 0, 3};
    for (int pass = 0; pass < 5; ++pass) {
        for (int32_t group = 0; group < n_layers; ++group) {
            CHECK(f->call(stream.get(), group, prompt, 9));
            let_it_send(*f);
        }
    }
    CHECK_EQ(f->tier().counters().prefetched, 0u);
    CHECK_EQ(f->engine->counters().prefetch.calls, 0u);
}

TEST(what_has_passed_is_not_sent_any_more) {
    spice_emulator_settings slow = test::no_costs;
    slow.copy_latency_seconds = 0.1; // for each part
    for (const bool prompt : {false, true}) {
        const auto f = make({.predictor = "replay", .always = true}, 1.0, 0.5, "spice", slow);
        const ggml_backend_ptr stream = new_stream();
        read_everything(*f);
        const auto predict = [&](int32_t group) {
            f->engine->predict(group, spice::RouterInput{.n_tokens = 1}, std::vector<int32_t>{0, 1});
            std::this_thread::sleep_for(std::chrono::milliseconds(5)); // what a layer seems to take
        };
        for (int32_t group = 0; group < n_layers; ++group) predict(group);
        tell(*f, {{0, {0, 1}}, {1, {0, 1}}, {2, {0, 1}}});
        predict(0);
        CHECK_EQ(f->tier().counters().prefetched, 0u); // nobody knows yet how long a layer takes
        predict(1);
        CHECK_EQ(f->tier().counters().prefetched, 1u); // the other one waits for the link
        DeviceCall call;
        if (prompt) { // which says nothing of the next calls
            const std::vector<int32_t> ids = {0, 1, 0, 1, 0, 1, 0, 1, 0, 1, 0, 1, 0, 1, 0, 1, 0, 1};
            f->engine->predict(1, spice::RouterInput{.n_tokens = 9}, ids);
        } else {
            call.begin(f->tier(), 2, std::vector<int32_t>{0, 1});
        }
        let_it_send(*f);
        const DeviceCounters c = f->tier().counters();
        CHECK_EQ(c.prefetched, 1u);
        CHECK_EQ(c.prefetch_late, prompt ? 0u : 1u);
        CHECK_EQ(c.prefetch_used, 0u);
    }
}

TEST(sending_ahead_turns_itself_off_and_on) {
    for (const bool pays : {false, true}) {
        const auto f = make({.predictor = "history"});
        const ggml_backend_ptr stream = new_stream();
        read_everything(*f);
        uint64_t predicted = 0;
        for (const Call &call : test::routing(n_layers, 120, 5)) {
            const uint64_t before = f->engine->counters().prefetch.calls;
            CHECK(f->call(stream.get(), call.layer, call.ids, 1, [&] {
                predicted = f->engine->counters().prefetch.calls;
                const bool quick = (predicted > before) == pays;
                return Fixture::Times{.host = quick ? 1.0 : 2.0, .device = 0.5, .waited = 0.0};
            }));
        }
        const spice::PrefetchCounters c = f->engine->counters().prefetch;
        CHECK_EQ(c.device_on, pays);
        CHECK(pays ? c.device_saving > 0.3 : c.device_saving < -0.3);
        CHECK(pays ? predicted > 400 : predicted < 300); // of 720
    }
}

TEST(two_contexts_calls_and_loads_ahead_meet) {
    spice_emulator_settings slow = test::no_costs;
    slow.copy_latency_seconds = 2e-5;
    for (const double ram : {1.0, 0.6}) {
        const auto f = make({.predictor = "ensemble", .always = true}, ram, 0.3, "spice", slow);
        if (ram == 1.0) read_everything(*f);
        std::atomic<int> right{0};
        std::vector<std::thread> threads;
        for (unsigned t = 0; t < 2; ++t) {
            threads.emplace_back([&f, &right, t] {
                const ggml_backend_ptr stream = new_stream();
                int n = 0;
                for (const Call &call : test::routing(n_layers, 40, t)) {
                    right += f->call(stream.get(), call.layer, call.ids, 1);
                    std::this_thread::sleep_for(std::chrono::microseconds(500)); // or no copy is in time
                    if (++n % 80 == 0) f->tier().forget();
                }
            });
        }
        for (std::thread &thread : threads) thread.join();
        CHECK_EQ(right.load(), 480);
        const DeviceCounters c = f->tier().counters();
        CHECK(c.prefetched > 0);
        CHECK(consistent(c));
    }
}

TEST(an_engine_may_go_while_it_sends_ahead) {
    spice_emulator_settings slow = test::no_costs;
    slow.copy_latency_seconds = 5e-5;
    for (int i = 0; i < 20; ++i) {
        const auto f = make({.predictor = "ensemble", .always = true}, 1.0, 0.9, "spice", slow);
        const ggml_backend_ptr stream = new_stream();
        read_everything(*f);
        for (const Call &call : test::routing(n_layers, 2, static_cast<uint32_t>(i)))
            CHECK(f->call(stream.get(), call.layer, call.ids, 1));
        std::this_thread::sleep_for(std::chrono::microseconds(20 * i));
    }
}

RUN_TESTS()

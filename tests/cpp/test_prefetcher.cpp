// Prefetcher: told the future by `replay`, experts are there when their layer comes; bytes stay right,
// budgets kept and counts consistent, also when reads fail or two contexts compute (run under ThreadSanitizer
// in CI).
#include "check.h"
#include "faulty_ops.h"
#include "gguf_builder.h"
#include "routing.h"

#include "runtime/engine.h"
#include "runtime/layer_call.h"

#include <chrono>
#include <cstring>
#include <thread>

using spice::Engine;
using spice::LayerCall;
using spice::RouterInput;
using test::Call;

namespace {

struct Fixture {
    test::TempDir dir{true};
    std::string bytes = test::good_model().bytes();
    std::shared_ptr<test::FaultyOps> ops = std::make_shared<test::FaultyOps>();
    std::shared_ptr<Engine> engine;

    explicit Fixture(int slots, const std::string &predictor = "replay") {
        const auto path = dir.write("m.gguf", bytes);
        auto opened = Engine::open(
            path, {.io_threads = 2, .prefetch = {.predictor = predictor, .always = true}, .ops = ops});
        CHECK_EQ(opened.status().message(), "");
        engine = opened.take();
        CHECK(engine->build_pool(engine->plan().everything / 8 * static_cast<uint64_t>(slots) + 64).ok());
    }

    [[nodiscard]] bool right(const LayerCall &call, size_t index, size_t part, int layer) const {
        static const char *names[] = {"gate", "up", "down"};
        const std::string name = "blk." + std::to_string(layer) + ".ffn_" + names[part] + "_exps.weight";
        const spice::ExpertPart &info = *engine->find(name)->info;
        const auto expert = static_cast<uint64_t>(call.experts()[index]);
        return std::memcmp(call.weights(index, part), bytes.data() + info.offset + expert * info.stride,
                           info.stride) == 0;
    }

    /// One layer call of one token. False when it failed or bytes are wrong. Any thread (no CHECK in here).
    bool call(int layer, const std::vector<int32_t> &ids) const {
        LayerCall call;
        if (!call.begin(*engine, layer, ids).ok()) return false;
        engine->predict(layer, RouterInput{.n_tokens = 1}, ids);
        if (call.streaming()) return true; // slots go from expert to expert: the engine's tests compute those
        bool good = true;
        for (size_t part = 0; part < 3; ++part) {
            for (size_t i = 0; i < call.experts().size(); ++i) {
                good = call.wait(i, part) && right(call, i, part, layer) && good;
            }
        }
        return good;
    }

    /// Waits until nothing is being read: what the time between two layers is for.
    void let_it_read() const {
        for (int i = 0; i < 2000; ++i) {
            if (engine->bytes_waiting() == 0) break;
            std::this_thread::sleep_for(std::chrono::milliseconds(1));
        }
        std::this_thread::sleep_for(std::chrono::milliseconds(2)); // the last one is told of its end
    }
};

void tell(const Fixture &f, const std::vector<Call> &calls) {
    std::vector<spice::policy::FutureCall> future;
    for (const Call &call : calls) future.push_back({call.layer, 1, call.ids});
    CHECK_EQ(f.engine->prefetcher()->set_future(std::move(future), {}, 0).message(), "");
}

bool consistent(const spice::Counters &c) {
    return c.prefetch_ready + c.prefetch_late + c.prefetch_wasted <= c.prefetched &&
           c.prefetched <= c.prefetch_ready + c.prefetch_late + c.prefetch_wasted + c.resident_experts;
}

} // namespace

TEST(what_is_foretold_is_there_in_time) {
    const Fixture f(5);
    CHECK_EQ(f.engine->plan().predictor, "replay");
    const std::vector<Call> calls = test::routing(2, 100, 3);
    tell(f, calls);
    for (const Call &call : calls) {
        CHECK(f.call(call.layer, call.ids));
        f.let_it_read();
    }
    const spice::Counters c = f.engine->counters();
    CHECK(c.prefetch_ready > 50);
    // A pool of 5 lets one load wait at a time, and a call needs two experts.
    CHECK(c.experts_missed < c.experts_requested / 4);
    CHECK(c.evictions > 50);
    CHECK(c.prefetch_wasted <= c.prefetch_ready / 10);
    CHECK(consistent(c));
    CHECK(c.resident_bytes <= f.engine->plan().budget);
    CHECK_EQ(c.prefetch.expected, c.prefetch.correct);
}

TEST(a_future_that_cannot_be_is_refused) {
    const Fixture f(5);
    for (const spice::policy::FutureCall &call : {spice::policy::FutureCall{0, 1, {1, 4}},
                                                  {0, 1, {-1, 1}},
                                                  {1, 1, {1 << 30}},
                                                  {2, 1, {0}},
                                                  {-1, 1, {0}}}) {
        const spice::Status status = f.engine->prefetcher()->set_future({{0, 1, {0, 1}}, call}, {}, 0);
        CHECK(status.code() == spice::Code::malformed);
    }
    for (const Call &call : test::routing(2, 10, 3)) CHECK(f.call(call.layer, call.ids));
    CHECK_EQ(f.engine->counters().prefetched, 0U); // nothing was told
}

TEST(every_predictor_serves_and_the_bytes_stay_right) {
    for (const std::string_view name : spice::policy::predictor_names()) {
        if (name == "adapter" || name == "draft") continue; // need a sidecar
        for (const int slots : {2, 3, 6, 8}) {
            const Fixture f(slots, std::string(name));
            for (const Call &call : test::routing(2, 60, 5)) {
                CHECK(slots == 2 || f.call(call.layer, call.ids));
            }
            CHECK(consistent(f.engine->counters()));
        }
    }
}

TEST(only_predictors_that_read_routers_keep_them) {
    CHECK_EQ(Fixture(5, "replay").engine->plan().head_bytes, 0U);
    CHECK_EQ(Fixture(5, "history").engine->plan().head_bytes, 0U);
    CHECK(Fixture(5, "router").engine->plan().head_bytes > 0);
}

TEST(predictors_that_need_fitted_heads_say_so) {
    const test::TempDir dir(true);
    const auto path = dir.write("m.gguf", test::good_model().bytes());
    for (const std::string name : {"adapter", "draft", "oracle of Delphi"}) {
        auto opened = Engine::open(path, {.prefetch = {.predictor = name}});
        CHECK(opened.status().code() == spice::Code::unsupported);
        CHECK(opened.status().message().find(name) != std::string::npos);
    }
}

TEST(a_failed_prefetch_costs_nothing) {
    const Fixture f(4);
    const std::vector<Call> calls = test::routing(2, 100, 9);
    tell(f, calls);
    std::atomic<bool> broken{false};
    f.ops->plan = [&](int, size_t) -> std::optional<ssize_t> {
        return broken ? std::optional<ssize_t>(-EIO) : std::nullopt;
    };
    for (const Call &call : calls) {
        LayerCall layer;
        CHECK(layer.begin(*f.engine, call.layer, call.ids).ok()); // demand reads are queued
        for (size_t i = 0; i < layer.experts().size(); ++i) {
            for (size_t part = 0; part < 3; ++part)
                CHECK(layer.wait(i, part) && f.right(layer, i, part, call.layer));
        }
        broken = true; // every read that is made ahead fails
        f.engine->predict(call.layer, RouterInput{.n_tokens = 1}, call.ids);
        f.let_it_read();
        broken = false;
        CHECK(layer.failure().ok());
    }
    const spice::Counters c = f.engine->counters();
    CHECK(c.prefetched > 0);
    CHECK_EQ(c.prefetch_ready, 0u); // none arrived
    CHECK_EQ(c.failures, 0u);
}

TEST(a_layer_without_a_router_is_looked_past) {
    const test::TempDir dir(true);
    const auto path = dir.write("m.gguf", test::good_model(4, 1).bytes());
    auto opened =
        Engine::open(path, {.io_threads = 2, .prefetch = {.predictor = "ensemble", .always = true}});
    CHECK_EQ(opened.status().message(), "");
    const auto engine = opened.take();
    CHECK(engine->plan().head_reason.find("layer 1") != std::string::npos);
    CHECK(engine->build_pool(engine->plan().everything / 2).ok());
    for (int pass = 0; pass < 100; ++pass) {
        for (const int layer : {0, 1, 2, 3}) {
            // The hidden state of a call is gone after it: reading it later is an error that sanitizers see.
            const std::vector<float> hidden(test::k_width, 0.5F);
            const std::vector<int32_t> ids = {0, 1};
            LayerCall call;
            CHECK(call.begin(*engine, layer, ids).ok());
            engine->predict(layer,
                            {.data = reinterpret_cast<const std::byte *>(hidden.data()),
                             .stride = static_cast<int64_t>(sizeof(float)) * test::k_width,
                             .n_embd = test::k_width,
                             .n_tokens = 1},
                            ids);
        }
    }
    const spice::PrefetchCounters c = engine->counters().prefetch;
    CHECK(c.horizons > c.calls); // further than the next layer, past the one without a router
}

TEST(two_contexts_at_once) {
    const Fixture f(6, "ensemble");
    std::vector<std::thread> threads;
    std::atomic<bool> good{true};
    for (uint32_t seed : {1u, 2u}) {
        threads.emplace_back([&f, &good, seed] {
            for (const Call &call : test::routing(2, 150, seed)) {
                if (!f.call(call.layer, call.ids)) good = false;
            }
        });
    }
    for (std::thread &thread : threads) thread.join();
    CHECK(good);
    CHECK(consistent(f.engine->counters()));
}

RUN_TESTS()

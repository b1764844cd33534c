// Engine and LayerCall: the right bytes in every slot under eviction, waves with too few slots, budgets,
// faults, and two compute threads at once (run under ThreadSanitizer in CI).
#include "check.h"
#include "faulty_ops.h"
#include "gguf_builder.h"

#include "runtime/engine.h"
#include "runtime/layer_call.h"

#include <cstring>
#include <random>
#include <thread>

using spice::Code;
using spice::Engine;
using spice::LayerCall;
using spice::Status;

namespace spice {
struct LayerCallTest {
    static void lose(const LayerCall &call, size_t index, size_t part) {
        call.slab(index).parts[part].set(PartState::absent);
    }
};
} // namespace spice

namespace {

struct Fixture {
    test::TempDir dir;
    std::string bytes;
    std::shared_ptr<test::FaultyOps> ops = std::make_shared<test::FaultyOps>();
    std::shared_ptr<Engine> engine;
    Status status;

    /// `slots`: how many experts the pool has room for; 0 makes no pool.
    explicit Fixture(int slots, const std::string &eviction = "", bool direct = false,
                     const test::GgufBuilder &model = test::good_model())
        : dir(!direct) {
        bytes = model.bytes();
        const auto path = dir.write("m.gguf", bytes);
        auto opened =
            Engine::open(path, {.io_threads = 2, .eviction = eviction, .direct_io = direct, .ops = ops});
        status = opened.status();
        if (!opened.ok()) return;
        engine = opened.take();
        const spice::PoolPlan &plan = engine->plan();
        if (slots > 0) status = engine->build_pool(plan.everything / 8 * static_cast<uint64_t>(slots) + 64);
    }

    /// Compares the part of an expert in memory with the file.
    [[nodiscard]] bool right(const LayerCall &call, size_t index, size_t part, int layer) const {
        static const char *names[] = {"gate", "up", "down"};
        const std::string name = "blk." + std::to_string(layer) + ".ffn_" + names[part] + "_exps.weight";
        const spice::ExpertPart &info = *engine->find(name)->info;
        const auto expert = static_cast<uint64_t>(call.experts()[index]);
        return std::memcmp(call.weights(index, part), bytes.data() + info.offset + expert * info.stride,
                           info.stride) == 0;
    }
};

/// What the backend does for few rows: waits for each expert, part by part.
bool compute_direct(const Fixture &f, LayerCall &call, int layer) {
    bool ok = true;
    for (size_t part = 0; part < 3; ++part) {
        for (size_t i = 0; i < call.experts().size(); ++i) {
            ok = call.wait(i, part) && f.right(call, i, part, layer) && ok;
        }
    }
    return ok;
}

/// What the backend does for many rows or too few slots; counts the experts handed out per part.
bool compute_waves(const Fixture &f, LayerCall &call, int layer, size_t expected) {
    bool ok = true;
    for (size_t part = 0; part < 3; ++part) {
        size_t seen = 0;
        for (;;) {
            auto wave = call.next_wave(part);
            if (!wave.ok()) return false;
            if (wave.value().empty()) break;
            for (const size_t i : wave.value()) ok = f.right(call, i, part, layer) && ok;
            seen += wave.value().size();
            call.wave_done(wave.value());
        }
        ok = ok && seen == expected;
    }
    return ok;
}

} // namespace

TEST(nothing_is_read_before_the_first_call) {
    const Fixture f(8);
    CHECK_EQ(f.status.message(), "");
    CHECK_EQ(f.ops->reads.load(), 0);
    CHECK_EQ(f.engine->plan().n_slots, 8);
}

TEST(every_expert_fits) {
    for (const bool direct : {false, true}) {
        const Fixture f(8, "", direct);
        for (int pass = 0; pass < 2; ++pass) {
            for (const int layer : {0, 1}) {
                LayerCall call;
                const std::vector<int32_t> ids = {3, 1, 1, 0, 3};
                CHECK_EQ(call.begin(*f.engine, layer, ids).message(), "");
                CHECK(!call.streaming());
                CHECK_EQ(call.experts().size(), 3u);
                CHECK(compute_direct(f, call, layer));
                CHECK(call.all_ready(2));
                CHECK(call.failure().ok());
            }
        }
        const spice::Counters c = f.engine->counters();
        CHECK_EQ(c.experts_requested, 12u);
        CHECK_EQ(c.experts_missed, 6u); // the second pass finds all of them
        CHECK_EQ(c.slabs_read, 6u);
        CHECK_EQ(c.evictions, 0u);
        CHECK_EQ(c.reader.bytes, 6 * 3 * uint64_t{test::k_width * test::k_hidden / 32 * 34});
    }
}

TEST(evicts_and_reads_again) {
    for (const std::string_view name : spice::policy::eviction_names()) {
        const Fixture f(3, std::string(name));
        CHECK_EQ(f.engine->plan().n_slots, 3);
        std::mt19937 random(5);
        for (int i = 0; i < 200; ++i) {
            const int layer = i % 2;
            LayerCall call;
            const std::vector<int32_t> ids = {static_cast<int32_t>(random() % 4),
                                              static_cast<int32_t>(random() % 4)};
            CHECK(call.begin(*f.engine, layer, ids).ok());
            CHECK(compute_direct(f, call, layer));
        }
        const spice::Counters c = f.engine->counters();
        CHECK(c.evictions > 0);
        CHECK_EQ(c.resident_experts, 3u);
        CHECK(c.resident_bytes <= f.engine->plan().budget);
    }
}

TEST(more_experts_than_slots) {
    for (const bool direct : {false, true}) {
        const Fixture f(2, "", direct);
        for (int i = 0; i < 20; ++i) {
            const int layer = i % 2;
            LayerCall call;
            const std::vector<int32_t> ids = {0, 1, 2, 3};
            CHECK(call.begin(*f.engine, layer, ids).ok());
            CHECK(call.streaming());
            CHECK(compute_waves(f, call, layer, 4));
        }
        // Each part of each expert at most once per call.
        CHECK(f.engine->counters().reader.bytes <=
              20 * 4 * 3 * uint64_t{test::k_width * test::k_hidden / 32 * 34});
        CHECK_EQ(f.engine->counters().resident_experts, 2u);
    }
}

TEST(an_expert_that_is_not_there_is_an_error) {
    const Fixture f(8);
    const std::vector<int32_t> ids = {0, 1};
    for (const bool lost : {true, false}) { // and the next call works
        LayerCall call;
        CHECK(call.begin(*f.engine, 0, ids).ok());
        CHECK(compute_direct(f, call, 0));
        CHECK(call.failure().ok());
        if (lost) spice::LayerCallTest::lose(call, 1, 2); // as a bug would leave it
        CHECK_EQ(call.wait(1, 2), !lost);
        CHECK(call.wait(0, 2));
        CHECK(call.failure().code() == (lost ? Code::internal : Code::ok));
    }
    const Fixture few(2); // streaming: what is not asked for yet is no error
    LayerCall call;
    CHECK(call.begin(*few.engine, 0, std::vector<int32_t>{0, 1, 2}).ok());
    CHECK(call.streaming());
    CHECK(call.failure().ok());
}

TEST(waves_without_streaming_hand_out_each_once) {
    const Fixture f(8);
    LayerCall call;
    const std::vector<int32_t> ids = {0, 1, 2, 3, 2, 2};
    CHECK(call.begin(*f.engine, 0, ids).ok());
    CHECK(!call.streaming());
    CHECK(compute_waves(f, call, 0, 4));
}

TEST(budgets) {
    const Fixture f(0);
    const spice::PoolPlan &plan = f.engine->plan();
    LayerCall early;
    CHECK(early.begin(*f.engine, 0, std::vector<int32_t>{0}).code() == Code::internal);
    const Status small = f.engine->build_pool(plan.smallest - 1);
    CHECK(small.code() == Code::budget);
    CHECK(small.message().find(std::to_string(plan.smallest)) != std::string::npos);
    CHECK(f.engine->build_pool(plan.smallest).ok());
    CHECK_EQ(plan.n_slots, 2);
    CHECK(plan.budget <= plan.smallest);
    CHECK(f.engine->build_pool(plan.smallest).code() == Code::internal);
    CHECK(plan.working_set == plan.everything / 2); // 2 of 4 experts
    const Fixture unknown(8, "no-such-strategy");
    CHECK(unknown.status.code() == Code::unsupported);
}

TEST(two_size_classes_share_the_budget_and_keep_it) {
    // The experts of layer 1 as F16: larger slabs, and a pool of their own.
    test::GgufBuilder builder = test::good_model();
    for (const char *name : {"gate", "up", "down"}) {
        builder.at("blk.1.ffn_" + std::string(name) + "_exps.weight").type = GGML_TYPE_F16;
    }
    for (const bool direct : {false, true}) {
        Fixture f(0, "", direct, builder);
        CHECK_EQ(f.status.message(), "");
        const spice::PoolPlan &plan = f.engine->plan();
        CHECK_EQ(plan.n_classes, 2);
        CHECK_EQ(plan.smallest, plan.everything / 2); // 2 of 4 experts of each class
        const uint64_t budget = plan.everything / 4 * 3;
        CHECK(f.engine->build_pool(budget).ok());
        CHECK(plan.budget <= budget);
        CHECK_EQ(plan.n_slots, 6); // 3 for each: by their share of the bytes
        uint64_t stride[2];
        for (const int layer : {0, 1}) {
            const auto slots = f.engine->slot_tensor(
                *f.engine->find("blk." + std::to_string(layer) + ".ffn_up_exps.weight"));
            CHECK_EQ(slots.n_slots, 3);
            stride[layer] = slots.stride;
        }
        CHECK(direct || stride[0] < stride[1]); // direct: both are padded to whole units
        CHECK_EQ(plan.budget, 3 * (stride[0] + stride[1]));

        std::mt19937 random(7);
        for (int i = 0; i < 200; ++i) {
            const int layer = i % 2;
            LayerCall call;
            if (i % 5 == 4) { // all experts: more than the class has slots
                CHECK(call.begin(*f.engine, layer, std::vector<int32_t>{0, 1, 2, 3}).ok());
                CHECK(call.streaming());
                CHECK(compute_waves(f, call, layer, 4));
            } else {
                const std::vector<int32_t> ids = {static_cast<int32_t>(random() % 4),
                                                  static_cast<int32_t>(random() % 4)};
                CHECK(call.begin(*f.engine, layer, ids).ok());
                CHECK(compute_direct(f, call, layer));
            }
            CHECK(f.engine->counters().resident_bytes <= plan.budget);
        }
        CHECK(f.engine->counters().evictions > 0);
        CHECK_EQ(f.engine->counters().resident_bytes, plan.budget);
    }
}

TEST(an_id_that_does_not_exist) {
    const Fixture f(8);
    for (const int32_t bad : {-1, 4, 1 << 30}) {
        LayerCall call;
        CHECK(call.begin(*f.engine, 0, std::vector<int32_t>{0, bad}).code() == Code::malformed);
    }
    LayerCall call;
    CHECK(call.begin(*f.engine, 0, std::vector<int32_t>{0}).ok());
    CHECK(compute_direct(f, call, 0));
}

TEST(a_read_error_fails_that_call_and_the_next_works) {
    const Fixture f(3);
    f.ops->plan = [](int, size_t) { return std::optional<ssize_t>(-EIO); };
    {
        LayerCall call;
        CHECK(call.begin(*f.engine, 0, std::vector<int32_t>{0, 1}).ok());
        CHECK(!call.wait(0, 0));
        CHECK(call.failure().code() == Code::io);
    }
    {
        LayerCall call;
        CHECK(call.begin(*f.engine, 0, std::vector<int32_t>{0, 1, 2, 3}).ok());
        auto wave = call.next_wave(0);
        CHECK(wave.status().code() == Code::io);
    }
    f.ops->plan = nullptr;
    for (int i = 0; i < 4; ++i) {
        LayerCall call;
        CHECK(call.begin(*f.engine, i % 2, std::vector<int32_t>{0, 1}).ok());
        CHECK(compute_direct(f, call, i % 2));
    }
}

TEST(a_failed_read_is_not_forgotten_when_another_call_reads_again) {
    const Fixture f(8);
    const std::vector<int32_t> ids = {0, 1};
    for (const bool waves : {false, true}) {
        f.ops->plan = [](int, size_t) { return std::optional<ssize_t>(-EIO); };
        LayerCall failed;
        CHECK(failed.begin(*f.engine, waves ? 1 : 0, ids).ok());
        if (waves) CHECK(!failed.next_wave(0).ok());
        for (size_t i = 0; i < ids.size() && !waves; ++i) CHECK(!failed.wait(i, 0));
        for (size_t part = 0; part < 3; ++part) { // all reads have ended, so that no other one fails
            for (size_t i = 0; i < ids.size(); ++i) CHECK(!failed.wait(i, part));
        }
        f.ops->plan = nullptr;
        LayerCall other; // of another context: it asks again for what failed
        CHECK(other.begin(*f.engine, waves ? 1 : 0, ids).ok());
        CHECK(compute_direct(f, other, waves ? 1 : 0));
        CHECK(other.failure().ok());
        CHECK(failed.failure().code() == Code::io); // rows of the first call were skipped all the same
    }
}

TEST(a_call_may_end_before_its_reads) {
    const Fixture f(3);
    for (int i = 0; i < 50; ++i) {
        LayerCall call;
        CHECK(call.begin(*f.engine, i % 2, std::vector<int32_t>{i % 4, (i + 1) % 4}).ok());
    }
    LayerCall call;
    CHECK(call.begin(*f.engine, 0, std::vector<int32_t>{0, 1}).ok());
    CHECK(compute_direct(f, call, 0));
}

TEST(two_compute_threads) {
    for (const int slots : {2, 3, 5, 8}) {
        const Fixture f(slots);
        std::atomic<int> wrong{0};
        const auto work = [&](uint32_t seed) {
            std::mt19937 random(seed);
            for (int i = 0; i < 150; ++i) {
                const auto layer = static_cast<int>(random() % 2);
                std::vector<int32_t> ids;
                for (uint32_t k = 0; k <= random() % 4; ++k)
                    ids.push_back(static_cast<int32_t>(random() % 4));
                LayerCall call;
                if (!call.begin(*f.engine, layer, ids).ok()) ++wrong;
                const size_t n = call.experts().size();
                const bool ok = call.streaming() || random() % 2 == 0 ? compute_waves(f, call, layer, n)
                                                                      : compute_direct(f, call, layer);
                if (!ok) ++wrong;
            }
        };
        std::thread other(work, 1u);
        work(2u);
        other.join();
        CHECK_EQ(wrong.load(), 0);
    }
}

TEST(weights_can_be_read_back) {
    const Fixture f(8);
    const spice::ExpertTensor &tensor = *f.engine->find("blk.1.ffn_up_exps.weight");
    std::vector<std::byte> to(100);
    CHECK(f.engine->read_back(tensor, 11, to).ok());
    CHECK(std::memcmp(to.data(), f.bytes.data() + tensor.info->offset + 11, 100) == 0);
    CHECK(f.engine->read_back(tensor, tensor.info->stride * 4 - 99, to).code() == Code::internal);
}

RUN_TESTS()

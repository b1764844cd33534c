// The device tier on the emulated accelerator: the right bytes in every slot of the device under eviction,
// uploads that are late, two compute threads at once (run under ThreadSanitizer in CI), and budgets.
#include "check.h"
#include "device_fixture.h"

#include "policy/placement.h"

#include <array>
#include <atomic>
#include <chrono>
#include <random>
#include <thread>

using spice::Code;
using spice::DeviceCall;
using spice::DeviceExpert;
using spice::DeviceTier;
using spice::Engine;
using test::new_stream;
using Fixture = test::DeviceFixture;

TEST(every_slot_holds_its_expert) {
    spice_emulator_settings slow = test::no_costs;
    slow.copy_latency_seconds = 2e-4;
    for (const std::string_view placement : spice::policy::placement_names()) {
        const Fixture f(slow);
        CHECK_EQ(f.build(1.0, 0.5, std::string(placement)).message(), "");
        const ggml_backend_ptr stream = new_stream();
        std::mt19937 random(1);
        for (int i = 0; i < 200; ++i) {
            const std::vector<int32_t> ids = {static_cast<int32_t>(random() % 4),
                                              static_cast<int32_t>(random() % 4)};
            CHECK(f.call(stream.get(), i % 2, ids));
        }
        const spice::DeviceCounters c = f.tier().counters();
        CHECK(c.resident_bytes <= f.tier().plan().budget);
        if (placement == "all-fetch") {
            CHECK(c.fetched > 0 && c.evictions > 0);
        }
        if (placement == "static") CHECK_EQ(c.evictions, 0u);
    }
}

TEST(small_pools_on_both_sides) {
    const Fixture f;
    CHECK_EQ(f.build(0.26, 0.26, "all-fetch").message(), "");
    const ggml_backend_ptr stream = new_stream();
    for (int i = 0; i < 100; ++i) CHECK(f.call(stream.get(), i % 2, {0, 1, 2, 3}));
}

TEST(a_prompt_passes_through_a_few_slots) {
    spice_emulator_settings slow = test::no_costs;
    slow.upload_per_second = 2e8;
    for (const bool events : {true, false}) {
        const Fixture f(slow, test::good_model(6).bytes());
        CHECK_EQ(f.build(1.0, 0.5, "all-fetch").message(), "");
        const ggml_backend_ptr stream = new_stream();
        const std::vector<int32_t> all = {0, 1, 2, 3, 3, 2, 1, 0};
        const auto pass = [&](int32_t n) {
            for (int32_t i = 0; i < 6 * n; ++i) {
                if (!events) CHECK_EQ(spice_emulator_fail(0, SPICE_EMULATOR_FAIL_EVENT, 1), 0);
                CHECK(f.call(stream.get(), i % 6, all));
            }
        };
        pass(3); // reads everything into memory, and fills the pool
        f.tier().reset_counters();
        pass(10);
        CHECK_EQ(spice_emulator_fail(0, SPICE_EMULATOR_FAIL_EVENT, 0), 0);
        const spice::DeviceCounters c = f.tier().counters();
        CHECK(c.passed > 20 && c.passed <= c.fetched);
        CHECK(c.hits > 40); // of 12 slots, 9 keep what they have
        CHECK_EQ(c.hits + c.fetched, 240u);
    }
}

TEST(a_prompt_that_is_given_up_gives_back_what_it_borrowed) {
    const Fixture f;
    CHECK_EQ(f.build(1.0, 0.5, "all-fetch").message(), "");
    const ggml_backend_ptr stream = new_stream();
    for (int i = 0; i < 3; ++i) f.bring(stream.get(), i % 2, {0, 1, 2, 3});
    const std::vector<int32_t> all = {0, 1, 2, 3, 0, 1, 2, 3};
    size_t chunks = 0;
    for (int i = 0; i < 20; ++i) {
        DeviceCall device;
        device.begin(f.tier(), i % 2, all);
        chunks += device.n_chunks();
        if (i % 3 == 0) device.give_up(); // nothing was sent but what waits for nobody
    }
    CHECK(chunks > 0);
    CHECK(f.call(stream.get(), 0, all));
}

TEST(two_devices_own_their_layers) {
    const Fixture f(test::no_costs, test::good_model(4).bytes());
    CHECK_EQ(f.engine->build_pool(f.engine->plan().everything).message(), "");
    const std::array<ggml_backend_dev_t, 2> devices = {ggml_backend_dev_by_name("EMU0"),
                                                       ggml_backend_dev_by_name("EMU1")};
    const std::array<std::vector<int32_t>, 2> layers = {std::vector<int32_t>{0, 2}, {1, 3}};
    for (size_t d = 0; d < 2; ++d) {
        const spice::DevicePlan needs = DeviceTier::needs(*f.engine, devices[d], layers[d]);
        CHECK_EQ(f.engine->build_device_pool(devices[d], layers[d], needs.everything, "").message(), "");
        CHECK_EQ(f.engine->devices()[d]->plan().n_slots, 8);
    }
    CHECK(f.engine->build_device_pool(devices[0], layers[0], 1 << 20, "").code() == Code::internal);
    CHECK(f.engine->device(0) == f.engine->devices()[0].get());
    CHECK(f.engine->device(3) == f.engine->devices()[1].get());
    CHECK(!f.engine->device(0)->owns(1) && f.engine->device(1)->owns(1));
    std::vector<std::thread> threads;
    std::atomic<int> right{0};
    for (unsigned t = 0; t < 2; ++t) {
        threads.emplace_back([&f, &right, &devices, t] {
            const std::array<ggml_backend_ptr, 2> streams = {
                ggml_backend_ptr(ggml_backend_dev_init(devices[0], nullptr)),
                ggml_backend_ptr(ggml_backend_dev_init(devices[1], nullptr))};
            std::mt19937 random(t);
            for (int i = 0; i < 80; ++i) {
                const std::vector<int32_t> ids = {static_cast<int32_t>(random() % 4),
                                                  static_cast<int32_t>(random() % 4)};
                right += f.call(streams[static_cast<size_t>(i % 2)].get(), i % 4, ids);
            }
        });
    }
    for (std::thread &thread : threads) thread.join();
    CHECK_EQ(right.load(), 160);
    for (const auto &tier : f.engine->devices()) CHECK(tier->counters().rows > 0);
}

TEST(two_threads_share_the_pool) {
    spice_emulator_settings slow = test::no_costs;
    slow.copy_latency_seconds = 1e-4;
    const Fixture f(slow);
    CHECK_EQ(f.build(0.8, 0.4, "all-fetch").message(), "");
    std::atomic<int> right{0};
    std::vector<std::thread> threads;
    for (unsigned t = 0; t < 2; ++t) {
        threads.emplace_back([&f, &right, t] {
            const ggml_backend_ptr stream = new_stream();
            std::mt19937 random(t);
            for (int i = 0; i < 150; ++i) {
                const std::vector<int32_t> ids = {static_cast<int32_t>(random() % 4),
                                                  static_cast<int32_t>(random() % 4)};
                right += f.call(stream.get(), i % 2, ids);
                if (i % 50 == 49) f.tier().forget();
            }
        });
    }
    for (std::thread &thread : threads) thread.join();
    CHECK_EQ(right.load(), 300);
}

TEST(ids_that_do_not_exist_are_left_to_the_host) {
    const Fixture f;
    CHECK_EQ(f.build(1.0, 1.0, "").message(), "");
    DeviceCall device;
    const std::vector<int32_t> ids = {0, -1};
    device.begin(f.tier(), 0, ids);
    CHECK(device.empty());
    DeviceCall none;
    none.begin(f.tier(), 0, {});
    CHECK(none.empty());
}

TEST(a_link_whose_events_run_out_goes_on) {
    const Fixture f;
    CHECK_EQ(f.build(1.0, 0.5, "cg-moe").message(), ""); // whose copies are fills: one submits the next
    const ggml_backend_ptr stream = new_stream();
    for (uint64_t i = 0; i < 60; ++i) {
        CHECK_EQ(spice_emulator_fail(0, SPICE_EMULATOR_FAIL_EVENT, 1), 0);
        CHECK(f.call(stream.get(), static_cast<int32_t>(i % 2), {0, 1, 2, 3}));
    }
    CHECK_EQ(spice_emulator_fail(0, SPICE_EMULATOR_FAIL_EVENT, 0), 0);
    CHECK(f.tier().counters().filled > 0);
}

TEST(an_engine_may_go_while_fills_run) {
    spice_emulator_settings slow = test::no_costs;
    slow.copy_latency_seconds = 5e-5;
    for (int i = 0; i < 60; ++i) {
        const Fixture f(slow);
        CHECK_EQ(f.build(1.0, 0.9, "cg-moe").message(), "");
        const ggml_backend_ptr stream = new_stream();
        for (int32_t group = 0; group < 2; ++group) CHECK(f.call(stream.get(), group, {0, 1, 2, 3}));
        std::this_thread::sleep_for(std::chrono::microseconds(20 * i));
    }
}

TEST(what_a_failure_doomed_is_not_used_again) {
    const Fixture f;
    CHECK_EQ(f.build(1.0, 1.0, "all-fetch").message(), "");
    const ggml_backend_ptr stream = new_stream();
    const std::vector<int32_t> ids = {0, 1};
    f.bring(stream.get(), 0, ids);
    DeviceCall user; // of another context
    user.begin(f.tier(), 0, ids);
    CHECK_EQ(user.resident().size(), 2u);
    f.tier().forget();
    DeviceCall next;
    next.begin(f.tier(), 0, ids);
    CHECK(next.empty());
}

TEST(a_call_that_the_device_gives_up_leaves_no_trace) {
    const Fixture f;
    CHECK_EQ(f.build(1.0, 1.0, "all-fetch").message(), "");
    const ggml_backend_ptr stream = new_stream();
    const std::vector<int32_t> ids = {0, 1, 1};
    f.bring(stream.get(), 0, ids);
    const uint64_t rows = f.engine->counters().expert_rows;
    {
        DeviceCall device;
        device.begin(f.tier(), 0, ids);
        CHECK_EQ(device.resident().size(), 2u);
        device.give_up();
        CHECK(device.empty() && !device.takes(0));
    }
    CHECK_EQ(f.engine->counters().expert_rows, rows);
    CHECK_EQ(f.tier().counters().refused, 1u);
    CHECK(f.call(stream.get(), 0, ids)); // its slots are free for others, its slabs still there
    f.tier().forget();
    CHECK_EQ(f.tier().counters().resident_experts, 0u);
}

TEST(device_pools_come_before_preloading) {
    const Fixture f;
    CHECK(f.engine->build_pool(f.engine->plan().everything).ok());
    CHECK(f.engine->preload(std::vector<std::pair<int32_t, int32_t>>{{0, 1}}).ok());
    const spice::Status late =
        f.engine->build_device_pool(spice::DeviceTier::find_device(), {}, uint64_t{1} << 29, "");
    CHECK(late.code() == spice::Code::internal && f.engine->devices().empty());
}

TEST(what_is_preloaded_goes_up_as_long_as_there_is_room) {
    const Fixture f;
    CHECK_EQ(f.build(1.0, 0.5, "static").message(), "");
    const std::vector<std::pair<int32_t, int32_t>> wanted = {{1, 3}, {0, 2}, {1, 0}, {0, 0}, {0, 1}, {1, 1}};
    CHECK_EQ(f.engine->preload(wanted).message(), "");
    const int64_t room = f.tier().plan().n_slots;
    for (int i = 0; i < 5000; ++i) {
        const spice::DeviceCounters c = f.tier().counters();
        if (c.link.uploads == static_cast<uint64_t>(room)) break;
        std::this_thread::sleep_for(std::chrono::milliseconds(1));
    }
    CHECK_EQ(f.tier().counters().resident_experts, static_cast<uint64_t>(room));
    DeviceCall device;
    device.begin(f.tier(), 1, std::vector<int32_t>{3});
    CHECK_EQ(device.resident().size(), 1u);
    CHECK_EQ(f.tier().counters().evictions, 0u);
}

TEST(a_budget_for_everything_holds_everything) {
    test::GgufBuilder model = test::good_model(5); // one layer of another size: a small size class
    for (const char *part : {"gate", "up", "down"}) {
        model.at("blk.4.ffn_" + std::string(part) + "_exps.weight").type = GGML_TYPE_F32;
    }
    const Fixture f(test::no_costs, model.bytes());
    CHECK_EQ(f.build(1.0, 1.0, "").message(), "");
    CHECK_EQ(f.tier().plan().n_slots, 20);
}

TEST(budgets) {
    {
        const Fixture f;
        CHECK(f.build(1.0, 0.01, "").code() == Code::budget);
    }
    {
        const Fixture f;
        CHECK(f.build(1.0, 1.0, "nonsense").code() == Code::unsupported);
    }
    {
        spice_emulator_settings full = test::no_costs;
        full.memory_bytes = 100;
        const Fixture f(full);
        CHECK(f.build(1.0, 1.0, "").code() == Code::out_of_memory);
    }
    const Fixture f;
    CHECK(f.engine->build_device_pool(DeviceTier::find_device(), {}, 1 << 20, "").code() == Code::internal);
}

RUN_TESTS()

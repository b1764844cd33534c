// The emulated accelerator through ggml's public device interface: what a device promises, and what a caller
// who does not wait gets. Run under ThreadSanitizer it also checks the emulator's own threads.
#include "check.h"
#include "emulated_device.h"

#include "ggml-backend.h"
#include "ggml-cpp.h"
#include "ggml-cpu.h"

#include <atomic>
#include <chrono>
#include <cmath>
#include <csetjmp>
#include <csignal>
#include <cstdint>
#include <cstring>
#include <numeric>
#include <thread>
#include <vector>

namespace {

/// The device in its default state; the first call of every test.
ggml_backend_dev_t the_device() {
    test::set_up_device();
    return ggml_backend_dev_by_name("EMU0");
}

spice_emulator_counters counters() {
    spice_emulator_counters now = {};
    CHECK_EQ(spice_emulator_read_counters(0, &now), 0);
    return now;
}

/// y = a * x for vectors of n floats in device memory, and a second stream.
struct Rig {
    ggml_backend_dev_t device = ggml_backend_dev_by_name("EMU0");
    ggml_backend_ptr stream{ggml_backend_dev_init(device, nullptr)};
    ggml_backend_ptr second{ggml_backend_dev_init(device, nullptr)};
    ggml_context_ptr context;
    ggml_tensor *a = nullptr;
    ggml_tensor *x = nullptr;
    ggml_tensor *y = nullptr;
    ggml_cgraph *graph = nullptr;
    ggml_backend_buffer_ptr buffer;
    std::vector<float> values;

    explicit Rig(int64_t n) : values(static_cast<size_t>(n)) {
        context.reset(ggml_init({.mem_size = size_t{1} << 20, .mem_buffer = nullptr, .no_alloc = true}));
        a = ggml_new_tensor_1d(context.get(), GGML_TYPE_F32, n);
        x = ggml_new_tensor_1d(context.get(), GGML_TYPE_F32, n);
        y = ggml_mul(context.get(), a, x);
        graph = ggml_new_graph(context.get());
        ggml_build_forward_expand(graph, y);
        buffer.reset(
            ggml_backend_alloc_ctx_tensors_from_buft(context.get(), ggml_backend_dev_buffer_type(device)));
        std::iota(values.begin(), values.end(), 1.0f);
    }
    void set(ggml_tensor *tensor, ggml_backend_t on) {
        ggml_backend_tensor_set_async(on, tensor, values.data(), 0, ggml_nbytes(tensor));
    }
    std::vector<float> get(const ggml_tensor *tensor) {
        std::vector<float> out(values.size());
        ggml_backend_tensor_get(tensor, out.data(), 0, ggml_nbytes(tensor));
        return out;
    }
};

bool all_nan(const std::vector<float> &values) {
    for (const float value : values) {
        if (!std::isnan(value)) return false;
    }
    return true;
}

sigjmp_buf after_fault;
void on_fault(int) {
    siglongjmp(after_fault, 1);
}

/// True when reading a byte there faults.
bool faults(const void *address) {
    struct sigaction action = {};
    struct sigaction before = {};
    action.sa_handler = on_fault;
    sigaction(SIGSEGV, &action, &before);
    bool fault = false;
    if (sigsetjmp(after_fault, 1) == 0) {
        (void)*static_cast<const volatile char *>(address);
    } else {
        fault = true;
    }
    sigaction(SIGSEGV, &before, nullptr);
    return fault;
}

} // namespace

TEST(the_host_cannot_touch_device_memory) {
    (void)the_device();
    Rig rig(64);
    CHECK(!ggml_backend_buffer_is_host(rig.buffer.get()));
    CHECK(faults(rig.x->data));
    CHECK(all_nan(rig.get(rig.x))); // fresh memory
}

TEST(copies_and_graphs_of_a_stream_are_ordered) {
    (void)the_device();
    Rig rig(4096);
    rig.set(rig.a, rig.stream.get());
    rig.set(rig.x, rig.stream.get());
    CHECK_EQ(ggml_backend_graph_compute_async(rig.stream.get(), rig.graph), GGML_STATUS_SUCCESS);
    std::vector<float> out(4096);
    ggml_backend_tensor_get_async(rig.stream.get(), rig.y, out.data(), 0, ggml_nbytes(rig.y));
    ggml_backend_synchronize(rig.stream.get());
    for (size_t i = 0; i < out.size(); ++i) CHECK_EQ(out[i], rig.values[i] * rig.values[i]);
}

TEST(the_graph_may_change_once_it_is_queued) {
    (void)the_device();
    Rig rig(4096);
    spice_emulator_settings slow = test::no_costs;
    slow.copy_latency_seconds = 0.02;
    CHECK_EQ(spice_emulator_configure(0, &slow), 0);
    rig.set(rig.a, rig.stream.get());
    rig.set(rig.x, rig.stream.get());
    CHECK_EQ(ggml_backend_graph_compute_async(rig.stream.get(), rig.graph), GGML_STATUS_SUCCESS);
    ggml_graph_clear(rig.graph);
    rig.y->src[0] = nullptr;
    ggml_backend_synchronize(rig.stream.get());
    CHECK_EQ(rig.get(rig.y)[2], 9.0f);
}

TEST(who_does_not_wait_gets_nan) {
    (void)the_device();
    Rig rig(1024);
    ggml_backend_tensor_set(rig.x, rig.values.data(), 0, ggml_nbytes(rig.x));
    spice_emulator_settings slow = test::no_costs;
    slow.copy_latency_seconds = 0.3;
    CHECK_EQ(spice_emulator_configure(0, &slow), 0);
    rig.set(rig.a, rig.stream.get());
    // The second stream is not ordered with the first.
    CHECK_EQ(ggml_backend_graph_compute(rig.second.get(), rig.graph), GGML_STATUS_SUCCESS);
    CHECK_EQ(spice_emulator_configure(0, &test::no_costs), 0);
    CHECK(all_nan(rig.get(rig.y)));

    CHECK_EQ(spice_emulator_configure(0, &slow), 0);
    std::vector<float> out(1024);
    ggml_backend_synchronize(rig.stream.get());
    ggml_backend_tensor_get_async(rig.stream.get(), rig.a, out.data(), 0, ggml_nbytes(rig.a));
    ggml_backend_synchronize(rig.stream.get());
    CHECK_EQ(out[7], 8.0f);
}

TEST(events_order_two_streams) {
    (void)the_device();
    Rig rig(1024);
    spice_emulator_settings slow = test::no_costs;
    slow.copy_latency_seconds = 0.01;
    CHECK_EQ(spice_emulator_configure(0, &slow), 0);
    ggml_backend_event_ptr ready(ggml_backend_event_new(rig.device));
    ggml_backend_event_ptr done(ggml_backend_event_new(rig.device));
    ggml_backend_event_synchronize(done.get()); // never recorded: nothing to wait for
    for (int round = 0; round < 5; ++round) {
        rig.values.assign(rig.values.size(), static_cast<float>(round + 2));
        rig.set(rig.a, rig.stream.get());
        rig.set(rig.x, rig.stream.get());
        ggml_backend_event_record(ready.get(), rig.stream.get());
        ggml_backend_event_wait(rig.second.get(), ready.get());
        CHECK_EQ(ggml_backend_graph_compute_async(rig.second.get(), rig.graph), GGML_STATUS_SUCCESS);
        ggml_backend_event_record(done.get(), rig.second.get());
        ggml_backend_event_synchronize(done.get());
        CHECK_EQ(rig.get(rig.y)[3], static_cast<float>((round + 2) * (round + 2)));
    }
}

TEST(copies_between_streams_are_ordered_with_both) {
    (void)the_device();
    Rig rig(1024);
    rig.set(rig.a, rig.stream.get());
    ggml_backend_tensor_copy_async(rig.stream.get(), rig.second.get(), rig.a, rig.x);
    CHECK_EQ(ggml_backend_graph_compute(rig.second.get(), rig.graph), GGML_STATUS_SUCCESS);
    CHECK_EQ(rig.get(rig.y)[4], 25.0f);
}

TEST(a_link_takes_its_time_and_streams_share_it) {
    (void)the_device();
    Rig rig(250'000); // 1 MB
    spice_emulator_settings slow = test::no_costs;
    slow.upload_per_second = 100e6;
    CHECK_EQ(spice_emulator_configure(0, &slow), 0);
    CHECK_EQ(spice_emulator_reset_counters(0), 0);
    const auto start = std::chrono::steady_clock::now();
    rig.set(rig.a, rig.stream.get());
    rig.set(rig.x, rig.second.get());
    const std::chrono::duration<double> queued = std::chrono::steady_clock::now() - start;
    ggml_backend_synchronize(rig.stream.get());
    ggml_backend_synchronize(rig.second.get());
    const std::chrono::duration<double> took = std::chrono::steady_clock::now() - start;
    CHECK(took.count() >= 0.02); // two copies of 10 ms, one after the other: sleeps are never short
    CHECK(queued.count() < took.count());
    CHECK_EQ(counters().upload_bytes, uint64_t{2'000'000});
    CHECK(std::abs(counters().upload_busy_seconds - 0.02) < 1e-6);
}

TEST(host_buffers_are_pinned_up_to_the_limit) {
    (void)the_device();
    Rig rig(1024);
    spice_emulator_settings tight = test::no_costs;
    tight.pinned_bytes = 10'000;
    CHECK_EQ(spice_emulator_configure(0, &tight), 0);
    const ggml_backend_buffer_type_t type = ggml_backend_dev_host_buffer_type(rig.device);
    const ggml_backend_buffer_ptr pinned(ggml_backend_buft_alloc_buffer(type, 8192));
    const ggml_backend_buffer_ptr ordinary(ggml_backend_buft_alloc_buffer(type, 8192));
    CHECK(ggml_backend_buffer_get_type(pinned.get()) == type);
    CHECK(ggml_backend_buffer_get_type(ordinary.get()) != type);
    CHECK(ggml_backend_buffer_is_host(pinned.get()));
    CHECK_EQ(spice_emulator_reset_counters(0), 0);
    std::memset(ggml_backend_buffer_get_base(pinned.get()), 0, 8192);
    ggml_backend_tensor_set_async(rig.stream.get(), rig.a, ggml_backend_buffer_get_base(pinned.get()), 0,
                                  4096);
    ggml_backend_tensor_set_async(rig.stream.get(), rig.x, rig.values.data(), 0, 4096);
    ggml_backend_synchronize(rig.stream.get());
    CHECK_EQ(counters().pinned_upload_bytes, uint64_t{4096});
    CHECK_EQ(counters().upload_bytes, uint64_t{8192});
}

TEST(memory_ends_at_the_limit_and_comes_back) {
    const ggml_backend_dev_t device = the_device();
    spice_emulator_settings small = test::no_costs;
    small.memory_bytes = 1 << 20;
    CHECK_EQ(spice_emulator_configure(0, &small), 0);
    size_t free = 0;
    size_t total = 0;
    const ggml_backend_buffer_type_t type = ggml_backend_dev_buffer_type(device);
    {
        const ggml_backend_buffer_ptr first(ggml_backend_buft_alloc_buffer(type, 700'000));
        CHECK(first != nullptr);
        ggml_backend_dev_memory(device, &free, &total);
        CHECK_EQ(total, size_t{1} << 20);
        CHECK_EQ(free, (size_t{1} << 20) - 700'000);
        CHECK(ggml_backend_buft_alloc_buffer(type, 700'000) == nullptr);
    }
    const ggml_backend_buffer_ptr again(ggml_backend_buft_alloc_buffer(type, 700'000));
    CHECK(again != nullptr);
}

TEST(injected_failures_happen_once) {
    (void)the_device();
    Rig rig(1024);
    const ggml_backend_buffer_type_t type = ggml_backend_dev_buffer_type(rig.device);
    CHECK_EQ(spice_emulator_fail(0, SPICE_EMULATOR_FAIL_ALLOCATION, 2), 0);
    for (const bool fails : {false, true, false}) {
        const ggml_backend_buffer_ptr buffer(ggml_backend_buft_alloc_buffer(type, 64));
        CHECK_EQ(buffer == nullptr, fails);
    }
    ggml_backend_tensor_set(rig.x, rig.values.data(), 0, ggml_nbytes(rig.x));
    CHECK_EQ(spice_emulator_fail(0, SPICE_EMULATOR_FAIL_COPY, 1), 0);
    rig.set(rig.a, rig.stream.get());
    ggml_backend_synchronize(rig.stream.get());
    CHECK(all_nan(rig.get(rig.a)));
    CHECK_EQ(ggml_backend_graph_compute(rig.stream.get(), rig.graph), GGML_STATUS_FAILED);
    CHECK_EQ(ggml_backend_graph_compute(rig.stream.get(), rig.graph), GGML_STATUS_SUCCESS);
    CHECK_EQ(spice_emulator_fail(0, SPICE_EMULATOR_FAIL_COMPUTE, 2), 0);
    CHECK_EQ(ggml_backend_graph_compute(rig.stream.get(), rig.graph), GGML_STATUS_SUCCESS);
    CHECK_EQ(ggml_backend_graph_compute(rig.stream.get(), rig.graph), GGML_STATUS_FAILED);
    CHECK_EQ(ggml_backend_graph_compute(rig.stream.get(), rig.graph), GGML_STATUS_SUCCESS);
}

TEST(a_graph_on_host_memory_is_refused) {
    (void)the_device();
    Rig rig(64);
    void *device_data = rig.x->data;
    rig.x->data = rig.values.data();
    CHECK_EQ(ggml_backend_graph_compute(rig.stream.get(), rig.graph), GGML_STATUS_FAILED);
    CHECK(std::strstr(spice_emulator_misuse(0), "not in the device's memory") != nullptr);
    rig.x->data = device_data;
}

TEST(many_threads_and_streams) {
    const ggml_backend_dev_t device = the_device();
    std::atomic<int> right{0};
    std::vector<std::thread> threads;
    for (int t = 0; t < 4; ++t) {
        threads.emplace_back([device, t, &right] {
            for (int round = 0; round < 20; ++round) {
                Rig rig(256 + t);
                rig.set(rig.a, rig.stream.get());
                ggml_backend_tensor_copy_async(rig.stream.get(), rig.second.get(), rig.a, rig.x);
                const ggml_status status = ggml_backend_graph_compute(rig.second.get(), rig.graph);
                right += status == GGML_STATUS_SUCCESS && rig.get(rig.y)[1] == 4.0f;
                size_t free = 0;
                size_t total = 0;
                ggml_backend_dev_memory(device, &free, &total);
            }
        });
    }
    for (std::thread &thread : threads) thread.join();
    CHECK_EQ(right.load(), 80);
}

TEST(products_by_experts_can_be_left_out_and_take_the_time_of_a_device) {
    const ggml_backend_dev_t device = the_device();
    const ggml_backend_ptr stream(ggml_backend_dev_init(device, nullptr));
    const ggml_context_ptr context(
        ggml_init({.mem_size = size_t{1} << 20, .mem_buffer = nullptr, .no_alloc = true}));
    ggml_tensor *experts = ggml_new_tensor_3d(context.get(), GGML_TYPE_F16, 64, 32, 5);
    ggml_tensor *x = ggml_new_tensor_3d(context.get(), GGML_TYPE_F32, 64, 1, 1);
    ggml_tensor *ids = ggml_new_tensor_2d(context.get(), GGML_TYPE_I32, 2, 1);
    ggml_tensor *product = ggml_mul_mat_id(context.get(), experts, x, ids);
    ggml_tensor *y = ggml_scale_bias(context.get(), product, 1.0f, 2.0f); // arithmetic that is done
    ggml_cgraph *graph = ggml_new_graph(context.get());
    ggml_build_forward_expand(graph, y);
    const ggml_backend_buffer_ptr buffer(
        ggml_backend_alloc_ctx_tensors_from_buft(context.get(), ggml_backend_dev_buffer_type(device)));
    const std::vector<float> ones(ggml_nelements(x), 1.0f);
    const std::vector<ggml_fp16_t> weights(ggml_nelements(experts), ggml_fp32_to_fp16(1.0f));
    const std::vector<int32_t> chosen = {4, 1};
    ggml_backend_tensor_set(experts, weights.data(), 0, ggml_nbytes(experts));
    ggml_backend_tensor_set(x, ones.data(), 0, ggml_nbytes(x));
    ggml_backend_tensor_set(ids, chosen.data(), 0, ggml_nbytes(ids));
    const auto result = [&] {
        std::vector<float> out(ggml_nelements(y));
        CHECK_EQ(ggml_backend_graph_compute(stream.get(), graph), GGML_STATUS_SUCCESS);
        ggml_backend_tensor_get(y, out.data(), 0, ggml_nbytes(y));
        return out;
    };
    CHECK(result() == std::vector<float>(64, 66.0f));
    spice_emulator_settings settings = test::no_costs;
    settings.launch_seconds = 0.001;
    settings.expert_bytes_per_second = 1.0e6; // two experts of 4 KiB: 8.192 ms
    CHECK_EQ(spice_emulator_configure(0, &settings), 0);
    CHECK_EQ(spice_emulator_reset_counters(0), 0);
    CHECK(result() == std::vector<float>(64, 2.0f));
    CHECK(std::abs(counters().compute_busy_seconds - 0.009192) < 1e-9);
    CHECK(counters().late_seconds >= 0.0);
    CHECK_EQ(counters().matmul_id_nodes, 1U);
}

TEST(numbers_that_make_no_sense_are_refused) {
    (void)the_device();
    spice_emulator_settings bad = test::no_costs;
    bad.compute_slowdown = 0.5;
    CHECK_EQ(spice_emulator_configure(0, &bad), -1);
    bad = test::no_costs;
    bad.expert_bytes_per_second = -1.0;
    CHECK_EQ(spice_emulator_configure(0, &bad), -1);
    bad = test::no_costs;
    bad.pageable_speed = 0.0;
    CHECK_EQ(spice_emulator_configure(0, &bad), -1);
    CHECK_EQ(spice_emulator_configure(1, &test::no_costs), -1);
    CHECK_EQ(spice_emulator_configure(-1, &test::no_costs), -1);
    CHECK_EQ(spice_emulator_register(1), -1); // twice
    CHECK_EQ(spice_emulator_fail(0, 7, 1), -1);
}

RUN_TESTS()

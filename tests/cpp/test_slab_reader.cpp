// SlabReader: every byte in its place for all alignments, demand before prefetch, and faults of the disk.
#include "check.h"
#include "faulty_ops.h"
#include "gguf_builder.h"

#include "store/slab_reader.h"

#include <algorithm>
#include <condition_variable>
#include <cstdlib>
#include <unistd.h>

using spice::Code;
using spice::Priority;
using spice::SlabReader;
using spice::Status;

namespace {

constexpr size_t file_bytes = 300'001; // no multiple of any unit

std::string pattern() {
    std::string bytes(file_bytes, '\0');
    uint32_t seed = 7;
    for (char &c : bytes) {
        seed = seed * 1664525u + 1013904223u;
        c = static_cast<char>(seed >> 24);
    }
    return bytes;
}

/// A file on a real disk, where O_DIRECT works if it works anywhere (TempDir prefers memory).
struct DiskFile {
    std::filesystem::path path;
    explicit DiskFile(const std::string &bytes) {
        std::string name = (std::filesystem::current_path() / "reader-XXXXXX").string();
        const int fd = mkstemp(name.data());
        if (fd < 0) std::abort();
        ::close(fd);
        path = name;
        std::ofstream(path, std::ios::binary) << bytes;
    }
    ~DiskFile() {
        std::error_code error;
        std::filesystem::remove(path, error);
    }
    DiskFile(const DiskFile &) = delete;
    DiskFile &operator=(const DiskFile &) = delete;
};

/// Collects the results of asynchronous reads.
struct Waiter final : spice::Completion {
    std::mutex mutex;
    std::condition_variable changed;
    int open = 0;
    Status error;
    void done(const Status &status) noexcept override {
        const std::lock_guard lock(mutex);
        if (!status.ok()) error = status;
        --open;
        changed.notify_all();
    }
    void wait() {
        std::unique_lock lock(mutex);
        changed.wait(lock, [&] { return open == 0; });
    }
};

struct Fixture {
    std::shared_ptr<test::FaultyOps> ops = std::make_shared<test::FaultyOps>();
    std::unique_ptr<SlabReader> reader;
    explicit Fixture(const std::filesystem::path &path, SlabReader::Options options = {}) {
        options.ops = ops;
        auto opened = SlabReader::open({path}, options);
        if (opened.ok()) reader = opened.take();
    }
};

/// A reader of one thread, which is in its first read (one byte, told to `first`) until let_go().
struct Held {
    DiskFile file{pattern()};
    std::mutex gate;
    std::vector<size_t> order; ///< bytes of each read
    Fixture f{file.path, {.n_threads = 1, .direct = false, .ops = nullptr}};
    std::vector<std::byte> to = std::vector<std::byte>(5000);

    explicit Held(Waiter &first) {
        gate.lock();
        f.ops->plan = [this](int number, size_t bytes) -> std::optional<ssize_t> {
            if (number == 0) {
                const std::lock_guard wait(gate);
            }
            order.push_back(bytes);
            return std::nullopt;
        };
        submit(0, 1, first, Priority::prefetch);
        while (f.ops->reads == 0) usleep(1000);
    }
    void submit(size_t at, size_t n, Waiter &waiter, Priority priority) {
        f.reader->submit({0, 0, std::span(to).subspan(at, n), &waiter}, priority);
    }
    void let_go() { gate.unlock(); }
};

} // namespace

TEST(bytes_arrive_at_every_alignment) {
    const std::string bytes = pattern();
    const DiskFile file(bytes);
    for (const bool direct : {true, false}) {
        const Fixture f(file.path, {.n_threads = 3, .direct = direct, .max_read = 8192, .ops = nullptr});
        CHECK(f.reader != nullptr);
        CHECK(direct || f.reader->alignment() == 1);
        std::vector<std::byte> room(file_bytes + 3 * 4096);
        const auto base = reinterpret_cast<uintptr_t>(room.data());
        std::byte *aligned = room.data() + (4096 - base % 4096);
        for (const size_t offset : {0u, 1u, 511u, 512u, 4096u, 100'003u}) {
            for (const size_t n : {1u, 512u, 5000u, 100'000u}) {
                for (const size_t shift : {offset % 4096, (offset + 33) % 4096}) { // in place, and copied
                    Waiter waiter;
                    waiter.open = 1;
                    std::byte *to = aligned + 4096 + shift;
                    f.reader->submit({0, offset, {to, n}, &waiter}, Priority::demand);
                    waiter.wait();
                    CHECK_EQ(waiter.error.message(), "");
                    CHECK(std::memcmp(to, bytes.data() + offset, n) == 0);
                }
            }
        }
        CHECK(direct || f.ops->forgotten > 0); // a buffered file must not fill the page cache
    }
}

TEST(end_of_file_is_read_and_not_passed) {
    const std::string bytes = pattern();
    const DiskFile file(bytes);
    const Fixture f(file.path);
    std::vector<std::byte> to(1000);
    CHECK_EQ(f.reader->read(0, file_bytes - 1000, to).message(), "");
    CHECK(std::memcmp(to.data(), bytes.data() + file_bytes - 1000, 1000) == 0);
    const Status past = f.reader->read(0, file_bytes - 999, to);
    CHECK(past.code() == Code::truncated);
    CHECK(past.message().find(file.path.string()) != std::string::npos);
}

TEST(faults) {
    const std::string bytes = pattern();
    const DiskFile file(bytes);
    std::vector<std::byte> to(50'000);
    const auto right = [&] { return std::memcmp(to.data(), bytes.data() + 77, to.size()) == 0; };

    const Fixture f(file.path, {.n_threads = 1, .direct = true, .max_read = 16384, .ops = nullptr});
    f.ops->plan = [](int number, size_t) -> std::optional<ssize_t> {
        return number % 2 == 0 ? std::optional<ssize_t>(-EINTR) : std::nullopt;
    };
    CHECK_EQ(f.reader->read(0, 77, to).message(), "");
    CHECK(right());

    f.ops->plan = [&](int, size_t bytes_asked) -> std::optional<ssize_t> { // stops short, but makes progress
        return static_cast<ssize_t>(std::max<size_t>(bytes_asked / 2, f.reader->alignment()));
    };
    std::ranges::fill(to, std::byte{0});
    CHECK_EQ(f.reader->read(0, 77, to).message(), "");
    CHECK(right());

    f.ops->plan = [](int, size_t) { return std::optional<ssize_t>(-EIO); };
    const Status failed = f.reader->read(0, 77, to);
    CHECK(failed.code() == Code::io);
    CHECK(failed.message().find("Input/output error") != std::string::npos);

    f.ops->plan = [](int, size_t) { return std::optional<ssize_t>(0); };
    CHECK(f.reader->read(0, 77, to).code() == Code::truncated);

    f.ops->plan = nullptr; // and the next call works
    std::ranges::fill(to, std::byte{0});
    CHECK_EQ(f.reader->read(0, 77, to).message(), "");
    CHECK(right());
}

TEST(demand_goes_first) {
    Waiter waiter;
    waiter.open = 5;
    Held held(waiter);
    held.submit(100, 20, waiter, Priority::prefetch);
    held.submit(200, 21, waiter, Priority::prefetch);
    held.submit(300, 10, waiter, Priority::demand);
    held.submit(400, 11, waiter, Priority::demand);
    held.let_go();
    waiter.wait();
    CHECK(held.order == (std::vector<size_t>{1, 10, 11, 20, 21}));
}

TEST(waiting_prefetches_can_be_promoted_and_withdrawn) {
    std::vector<Waiter> waiters(4);
    for (Waiter &waiter : waiters) waiter.open = 1;
    Held held(waiters[0]);
    const Fixture &f = held.f;
    for (size_t i = 1; i < 4; ++i) held.submit(100 * i, 10 * i, waiters[i], Priority::prefetch);
    CHECK_EQ(f.reader->bytes_waiting(), 61u);
    const auto withdraw = [&](std::vector<const spice::Completion *> which) {
        return f.reader->withdraw(which);
    };
    CHECK(!withdraw({&waiters[0], &waiters[1]})); // the first was begun: all or nothing
    CHECK(withdraw({&waiters[1]}));
    CHECK(!withdraw({&waiters[1]}));
    CHECK(f.reader->promote(waiters[3]));
    CHECK(!f.reader->promote(waiters[3]));
    CHECK(!withdraw({&waiters[3]})); // a demand read now
    CHECK_EQ(f.reader->bytes_waiting(), 51u);
    held.let_go();
    for (const size_t i : {0u, 2u, 3u}) waiters[i].wait();
    CHECK(held.order == (std::vector<size_t>{1, 30, 20}));
    CHECK_EQ(waiters[1].open, 1); // never told
    CHECK_EQ(f.reader->counters().bytes, 51u);
    CHECK_EQ(f.reader->counters().prefetched, 21u);
    CHECK_EQ(f.reader->bytes_waiting(), 0u);
}

TEST(few_prefetches_run_at_once) {
    const DiskFile file(pattern());
    const Fixture f(file.path, {.n_threads = 8, .prefetch_in_flight = 2, .direct = false, .ops = nullptr});
    std::atomic<int> running{0};
    std::atomic<int> most{0};
    f.ops->after = [&] { --running; };
    f.ops->plan = [&](int, size_t) -> std::optional<ssize_t> {
        const int now = ++running;
        most = std::max(most.load(), now);
        return std::nullopt;
    };
    Waiter waiter;
    waiter.open = 50;
    std::vector<std::byte> to(5000);
    for (size_t i = 0; i < 50; ++i) {
        f.reader->submit({0, 0, std::span(to).subspan(100 * i, 10), &waiter}, Priority::prefetch);
    }
    waiter.wait();
    CHECK(most >= 1);
    CHECK(most <= 2);
}

TEST(bandwidth_is_that_of_busy_time) {
    const DiskFile file(pattern());
    const Fixture f(file.path, {.n_threads = 1, .direct = false, .ops = nullptr});
    CHECK_EQ(f.reader->bandwidth(), 0.0);
    std::vector<std::byte> to(100'000);
    CHECK(f.reader->read(0, 0, to).ok());
    const double first = f.reader->bandwidth();
    CHECK(first > 0.0);
    f.ops->plan = [](int, size_t) -> std::optional<ssize_t> {
        usleep(50'000);
        return std::nullopt;
    };
    for (int i = 0; i < 5; ++i) CHECK(f.reader->read(0, 0, to).ok());
    CHECK(f.reader->bandwidth() < 2 * 100'000 / 0.05);
    CHECK(f.reader->bandwidth() < first);
}

TEST(closing_answers_what_is_queued) {
    const DiskFile file(pattern());
    Waiter waiter;
    waiter.open = 100;
    std::vector<std::byte> to(2000);
    {
        const Fixture f(file.path, {.n_threads = 2, .direct = false, .ops = nullptr});
        for (int i = 0; i < 100; ++i) {
            f.reader->submit({0, 0, std::span(to).subspan(static_cast<size_t>(i) * 20, 10), &waiter},
                             i % 2 == 0 ? Priority::demand : Priority::prefetch);
        }
    }
    CHECK_EQ(waiter.open, 0);
}

TEST(opening) {
    const test::TempDir dir;
    CHECK(SlabReader::open({dir.path() / "none"}, {}).status().code() == Code::not_found);
    const auto path =
        dir.write("memory", pattern()); // tmpfs where there is one: buffered or direct, it works
    auto opened = SlabReader::open({path}, {});
    CHECK(opened.ok());
    std::vector<std::byte> to(10);
    CHECK(opened.value()->read(0, 5, to).ok());
}

RUN_TESTS()

#include "check.h"
#include "gguf_builder.h"

#include "runtime/engine.h"
#include "runtime/surrogate_use.h"
#include "store/fingerprint.h"

#include <cmath>
#include <functional>
#include <random>

using namespace spice;

namespace {

constexpr int64_t k_rank = 3;
constexpr int64_t k_gated = 2;
constexpr int64_t k_n = test::k_experts;
constexpr int64_t k_w = test::k_width;

test::GgufBuilder good_sidecar(const std::string &print, const std::string &activation = "gelu") {
    test::GgufBuilder b;
    b.text("general.architecture", "spice-sidecar");
    b.u32("spice.version", 1);
    b.text("spice.fingerprint", print);
    b.text("spice.model", "test");
    b.text("spice.lore.activation", activation);
    b.tensor("lore.0.a", {k_w, k_rank, k_n}, GGML_TYPE_I8);
    b.tensor("lore.0.b", {k_w, k_rank, k_n}, GGML_TYPE_I8);
    b.tensor("lore.0.gate", {k_w, k_gated, k_n}, GGML_TYPE_I8);
    b.tensor("lore.0.scale", {k_rank, k_n});
    b.tensor("lore.0.gate_scale", {k_gated, k_n});
    b.tensor("lore.0.offset", {k_rank, k_n});
    b.tensor("lore.0.bias", {k_w, k_n}, GGML_TYPE_F16);
    b.tensor("lore.0.error", {k_n});
    b.tensor("lore.0.norm", {k_n});
    b.tensor("lore.0.output", {1});
    b.tensor("lore.0.sensitivity", {1});
    b.tensor("lore.1.bias", {k_w, k_n}, GGML_TYPE_F16);
    return b;
}

class Fixture {
  public:
    Fixture() {
        const auto path = dir_.write("m.gguf", test::good_model().bytes());
        print = fingerprint(GgufModel::open(path).take()).take();
        engine = Engine::open(path, {}).take();
        CHECK(engine->build_pool(engine->plan().everything).ok());
    }

    /// The builder's numbers are no halves and may be negative: these are 0.5, 1.5, 2.5, ... of each tensor,
    /// and 0, 1, 2, ... where it has integers.
    std::filesystem::path write(const test::GgufBuilder &sidecar) const {
        const auto path = dir_.write("s.gguf", sidecar.bytes());
        Result<GgufModel> file = GgufModel::open(path);
        if (!file.ok()) return path;
        std::string bytes = sidecar.bytes();
        for (const GgufTensor &t : file.value().tensors()) {
            const uint64_t size = t.ggml_type == GGML_TYPE_I8 ? 1 : t.ggml_type == GGML_TYPE_F16 ? 2 : 4;
            for (uint64_t i = 0; i * size < t.bytes; ++i) {
                const float v = static_cast<float>(i % 8) + 0.5F;
                if (t.ggml_type == GGML_TYPE_I8) {
                    bytes[t.offset + i] = static_cast<char>(i % 8);
                } else if (t.ggml_type == GGML_TYPE_F16) {
                    const ggml_fp16_t half = ggml_fp32_to_fp16(v);
                    std::memcpy(bytes.data() + t.offset + 2 * i, &half, 2);
                } else if (t.ggml_type == GGML_TYPE_F32) {
                    std::memcpy(bytes.data() + t.offset + 4 * i, &v, 4);
                }
            }
        }
        return dir_.write("s.gguf", bytes);
    }
    /// "" or the message.
    std::string load(const test::GgufBuilder &sidecar) const {
        return engine->load_surrogates(write(sidecar)).message();
    }
    [[nodiscard]] const test::TempDir &dir() const { return dir_; }

    std::string print;
    std::shared_ptr<Engine> engine;

  private:
    test::TempDir dir_;
};

bool contains(const std::string &text, const std::string &part) {
    return text.find(part) != std::string::npos;
}

} // namespace

TEST(a_good_file_is_read_into_memory) {
    const Fixture f;
    CHECK_EQ(f.load(good_sidecar(f.print)), "");
    const SurrogateUse *use = f.engine->surrogate_use();
    CHECK(use != nullptr && use->surrogates() != nullptr);
    const SurrogateSet &set = *use->surrogates();
    CHECK_EQ(set.n_layers(), 2);
    CHECK_EQ(set.rank(), k_rank);
    CHECK(set.bytes() >= static_cast<uint64_t>(2 * k_w * k_rank * k_n + 2 * 2 * k_w * k_n));
    const SurrogateLayer &layer = set.layer(0);
    CHECK(layer.calibrated() && set.calibrated());
    CHECK_EQ(layer.matrices.n_in, k_w);
    CHECK_EQ(layer.matrices.b[9], 1);
    CHECK_EQ(ggml_fp16_to_fp32(layer.matrices.bias[9]), 1.5F);
    CHECK_EQ(layer.matrices.n_gated, k_gated);
    CHECK(layer.matrices.activation == compute::SurrogateActivation::gelu);
    CHECK_EQ(layer.matrices.gate[10], 2);
    CHECK_EQ(layer.matrices.scale[5], 5.5F);
    CHECK_EQ(layer.matrices.gate_scale[4], 4.5F);
    CHECK_EQ(layer.matrices.offset[5], 5.5F);
    CHECK_EQ(layer.error[2], 2.5F);
    CHECK_EQ(layer.error_power(2, 0.5F, compute::SurrogateKind::full), 0.25 * 2.5 * 2.5 / 0.5);
    CHECK_EQ(layer.error_power(2, 0.5F, compute::SurrogateKind::drop), 0.25 * 2.5 / 0.5);
    const SurrogateLayer &bare = set.layer(1);
    CHECK(bare.any() && !bare.calibrated());
    CHECK(bare.matrices.a == nullptr && bare.matrices.bias != nullptr);
    CHECK_EQ(bare.error_power(0, 1.0F, compute::SurrogateKind::full), 0.0);
    CHECK(!use->on());
}

TEST(what_does_not_fit_is_refused) {
    const Fixture f;
    const auto refused = [&](const std::string &why, const std::function<void(test::GgufBuilder &)> &change) {
        test::GgufBuilder b = good_sidecar(f.print);
        change(b);
        const std::string message = f.load(b);
        CHECK(contains(message, why));
        CHECK(contains(message, "s.gguf"));
        if (!contains(message, why)) std::cerr << why << " / " << message << "\n";
    };
    const auto shape = [](const char *name, std::vector<int64_t> ne) {
        return [=](test::GgufBuilder &b) { b.at(name).shape = ne; };
    };
    refused("'lore.0.a' has the shape [31, 3, 4, 1], not [32, 3, 4, 1]",
            shape("lore.0.a", {31, k_rank, k_n}));
    refused("'lore.0.b' has the shape", shape("lore.0.b", {k_w, k_rank + 1, k_n}));
    refused("'lore.0.b' has the shape", shape("lore.0.b", {k_w, k_rank, k_n + 1}));
    refused("'lore.0.bias' has the shape", shape("lore.0.bias", {k_w, k_n - 1}));
    refused("'lore.0.norm' has the shape", shape("lore.0.norm", {1}));
    refused("'lore.0.output' has the shape", shape("lore.0.output", {2}));
    refused("'lore.0.offset' has the shape", shape("lore.0.offset", {k_rank - 1, k_n}));
    refused("'lore.0.scale' has the shape", shape("lore.0.scale", {k_rank, k_n - 1}));
    refused("'lore.0.gate_scale' has the shape", shape("lore.0.gate_scale", {k_rank, k_n}));
    refused("more rows in gate than in a", [](test::GgufBuilder &b) {
        b.at("lore.0.gate").shape = {k_w, k_rank + 1, k_n};
        b.at("lore.0.gate_scale").shape = {k_rank + 1, k_n};
    });
    refused("rank of 1025", [](test::GgufBuilder &b) {
        b.at("lore.0.a").shape = b.at("lore.0.b").shape = {k_w, 1025, k_n};
        b.at("lore.0.offset").shape = b.at("lore.0.scale").shape = {1025, k_n};
    });
    CHECK(contains(f.load(good_sidecar(f.print, "tanh")), "spice.lore.activation is"));
    const auto rename = [](const char *name, const char *to) {
        return [=](test::GgufBuilder &b) { b.at(name).name = to; };
    };
    for (const char *part : {"lore.0.a", "lore.0.b", "lore.0.scale"}) {
        refused("a, b and scale alone", rename(part, "other"));
    }
    for (const char *part : {"lore.0.gate", "lore.0.gate_scale"}) {
        refused("gate and gate_scale alone", rename(part, "other"));
    }
    refused("names no layer", rename("lore.1.bias", "lore.2.bias"));
    refused("names no layer", rename("lore.1.bias", "lore.-1.bias"));
    refused("names no layer", rename("lore.1.bias", "lore.x"));
    refused("is no part", rename("lore.1.bias", "lore.1.c"));
    refused("is no part", rename("lore.1.bias", "lore.1"));
    refused("is no part", rename("lore.1.bias", "lore.1bias"));
    refused("has the type f32, not i8", [](test::GgufBuilder &b) { b.at("lore.0.a").type = GGML_TYPE_F32; });
    refused("before this one", [](test::GgufBuilder &b) { b.at("lore.0.a").type = GGML_TYPE_F16; });
    refused("has the type f16, not f32",
            [](test::GgufBuilder &b) { b.at("lore.0.norm").type = GGML_TYPE_F16; });
    refused("'lore-kl.curve' is not [2, points]",
            [](test::GgufBuilder &b) { b.tensor("lore-kl.curve", {3, 2}); });
    refused("'lore-kl.curve' is not [2, points]",
            [](test::GgufBuilder &b) { b.tensor("lore-kl.curve", {2, 65}); });
    refused("'lore-kl.curve' is not [2, points]",
            [](test::GgufBuilder &b) { b.tensor("lore-kl.curve", {2, 2}, GGML_TYPE_F16); });
    refused("'lore-kl.curve' does not grow", // 0.5, 1.5, ... 7.5, and then 0.5 again
            [](test::GgufBuilder &b) { b.tensor("lore-kl.curve", {2, 5}); });
    refused("no low-rank stand-ins", [](test::GgufBuilder &b) { b.tensors.clear(); });
    refused("another model", [](test::GgufBuilder &b) { b.text("spice.fingerprint", "0"); });
    refused("version 2", [](test::GgufBuilder &b) { b.u32("spice.version", 2); });
    CHECK(f.engine->surrogate_use() == nullptr);
    CHECK(f.engine->load_surrogates(f.dir().path() / "none.gguf").code() == Code::not_found);
}

TEST(numbers_that_are_none_are_refused) {
    const Fixture f;
    for (const auto &[name, value] : {std::pair("lore.1.bias", NAN), std::pair("lore.0.scale", INFINITY),
                                      std::pair("lore.0.norm", -1.0F), std::pair("lore.0.error", INFINITY)}) {
        const auto path = f.write(good_sidecar(f.print));
        const GgufModel model = GgufModel::open(path).take();
        const GgufTensor &tensor = *model.find(name);
        std::fstream file(path, std::ios::in | std::ios::out | std::ios::binary);
        file.seekp(static_cast<std::streamoff>(tensor.offset + 4));
        if (tensor.ggml_type == GGML_TYPE_F16) {
            const ggml_fp16_t half = ggml_fp32_to_fp16(value);
            file.write(reinterpret_cast<const char *>(&half), sizeof(half));
        } else {
            file.write(reinterpret_cast<const char *>(&value), sizeof(value));
        }
        file.close();
        const std::string message = f.engine->load_surrogates(path).message();
        CHECK(contains(message, name) && contains(message, "not finite"));
    }
}

TEST(rules_need_stand_ins_and_a_budget_needs_their_cost) {
    const Fixture f;
    SurrogateUse &use = f.engine->make_surrogate_use();
    CHECK(use.follow({}, 2).code() == Code::unsupported);
    CHECK(use.force(compute::SurrogateKind::full, {1.0F, 0}).code() == Code::unsupported);
    CHECK(use.force(compute::SurrogateKind::drop, {1.0F, 0}).ok());
    CHECK(use.on() && use.serves(0));
    CHECK(f.engine->load_surrogates(f.write(good_sidecar(f.print))).code() == Code::internal); // in use
    use.turn_off();
    CHECK_EQ(f.load(good_sidecar(f.print)), "");
    CHECK(use.follow({.budget = 0.01}, 2).ok());
    use.turn_off();
    test::GgufBuilder bare = good_sidecar(f.print);
    bare.at("lore.0.sensitivity").name = "other";
    CHECK_EQ(f.load(bare), "");
    CHECK(use.follow({.budget = 0.01}, 2).code() == Code::unsupported);
    CHECK(use.follow({}, 2).ok());
}

TEST(the_account_of_what_was_replaced) {
    const Fixture f;
    CHECK_EQ(f.load(good_sidecar(f.print)), "");
    SurrogateUse &use = *f.engine->surrogate_use();
    CHECK(use.follow({.max_share = 0.3F, .max_mass = 1.0F}, 2).ok());
    const std::vector<int32_t> ids = {3, 1, 2, 0};
    const std::vector<float> gates = {0.75F, 0.25F, 0.5F, 0.5F};
    const std::vector<uint8_t> candidates(4, 1);
    std::vector<uint8_t> taken(4);
    CHECK(use.choose(
        {.group = 0, .top_k = 2, .ids = ids, .gates = gates, .candidates = candidates, .forecast = {}},
        taken));
    CHECK(taken == std::vector<uint8_t>({0, 1, 0, 0}));
    SurrogateCounters c = use.counters();
    CHECK_EQ(c.rows, 2u);
    CHECK_EQ(c.pairs, 4u);
    CHECK_EQ(c.taken, 1u);
    CHECK_EQ(c.mass, 0.25);
    CHECK_EQ(c.error, 0.0625 * 1.5 * 1.5 / 0.5);
    CHECK_EQ(c.nats, c.error * 0.5);
    const std::vector<float> forecast = {0.0F, 0.9F, 0.0F, 0.0F}; // expert 1 was expected
    CHECK(!use.choose(
        {.group = 0, .top_k = 2, .ids = ids, .gates = gates, .candidates = candidates, .forecast = forecast},
        taken));
    use.reset_counters();
    CHECK_EQ(use.counters().rows, 0u);
}

TEST(what_is_expected_and_the_budget_follow_the_curve) {
    const Fixture f;
    test::GgufBuilder sidecar = good_sidecar(f.print);
    sidecar.tensor("lore-kl.curve", {2, 2}); // (0.5, 1.5), (2.5, 3.5)
    CHECK_EQ(f.load(sidecar), "");
    SurrogateUse &use = *f.engine->surrogate_use();
    const std::vector<int32_t> ids = {3, 1};
    const std::vector<float> gates = {0.75F, 0.25F};
    const std::vector<uint8_t> candidates(2, 1);
    std::vector<uint8_t> taken(2);
    const auto choose = [&] {
        return use.choose(
            {.group = 0, .top_k = 2, .ids = ids, .gates = gates, .candidates = candidates, .forecast = {}},
            taken);
    };
    CHECK(use.force(compute::SurrogateKind::full, {1.0F, 0}).ok());
    CHECK(choose());
    const double alone = 0.0625 * 1.5 * 1.5 / 0.5 * 0.5;
    CHECK_EQ(use.counters().error, alone / 0.5);
    CHECK_EQ(use.counters().nats, 3 * alone); // on the line to the first point
    CHECK(choose());                          // the next token
    CHECK_EQ(use.counters().nats, 6 * alone);
    // It costs 3 * alone; with that as the budget the account holds it after some tokens, and never more.
    use.turn_off();
    use.reset_counters();
    CHECK(use.follow({.max_share = 1.0F, .max_mass = 1.0F, .budget = 3 * alone}, 2).ok());
    uint64_t rows = 0;
    while (rows < 400 && !choose()) ++rows;
    CHECK(rows > 0 && rows < 400);
    for (; rows < 400; ++rows) (void)choose();
    const SurrogateCounters c = use.counters();
    // Only one of two layers has costs: half of what comes in is for it.
    const double income = 3 * alone * static_cast<double>(c.rows) / 2;
    CHECK(c.nats <= income && c.nats > 0.5 * income);
}

TEST(absent_experts) {
    const Fixture f;
    CHECK(f.engine->absent(0, std::vector<int32_t>{2, 0, -1, 99}) == std::vector<uint8_t>({1, 1, 0, 0}));
    CHECK_EQ(f.engine->top_k(), 2);
}

RUN_TESTS()

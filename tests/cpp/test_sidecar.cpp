#include "check.h"
#include "gguf_builder.h"

#include "runtime/head_setup.h"
#include "store/expert_index.h"
#include "store/fingerprint.h"
#include "store/sidecar.h"

#include <cmath>
#include <random>

using namespace spice;

namespace {

constexpr int64_t k_embd = test::k_width;
constexpr int64_t k_out = test::k_experts;

test::GgufBuilder good_sidecar(const std::string &print) {
    test::GgufBuilder b;
    b.text("general.architecture", "spice-sidecar");
    b.u32("spice.version", 1);
    b.text("spice.fingerprint", print);
    b.text("spice.model", "test");
    b.tensor("draft.0.1.full", {k_embd, k_out});
    b.tensor("draft.0.1.present", {k_out, k_out});
    b.tensor("draft.0.1.previous", {k_out, k_out});
    b.tensor("draft.0.1.bias", {k_out});
    b.tensor("adapter.0.1.a", {k_embd, 3});
    b.tensor("adapter.0.1.b", {k_out, 3});
    b.tensor("recall", {4});
    return b;
}

struct Opened {
    GgufModel model;
    ExpertIndex index;
    std::string print;
};

Opened open_model(const std::filesystem::path &path) {
    Result<GgufModel> model = GgufModel::open(path);
    if (!model.ok()) std::abort();
    Result<ExpertIndex> index = ExpertIndex::build(model.value());
    Result<std::string> print = fingerprint(model.value());
    if (!index.ok() || !print.ok()) std::abort();
    return {model.take(), index.take(), print.take()};
}

Result<HeadSet> heads(const Opened &m, const std::filesystem::path &sidecar) {
    return make_heads(m.model, m.index, {.expert_used = 0, .max_horizon = 6, .sidecar = sidecar});
}

bool contains(const std::string &text, const std::string &part) {
    return text.find(part) != std::string::npos;
}

} // namespace

TEST(heads_of_a_model_and_its_sidecar) {
    const test::TempDir dir;
    const Opened m = open_model(dir.write("m.gguf", test::good_model().bytes()));
    const Result<HeadSet> plain = heads(m, {});
    CHECK(plain.ok());
    CHECK_EQ(plain.value().reason, "");
    CHECK(plain.value().frozen->has(0, 1));
    CHECK(!plain.value().frozen->has(1, 1));
    CHECK(plain.value().draft == nullptr);
    CHECK_EQ(plain.value().gating.top_k, 2);

    const Result<HeadSet> fitted = heads(m, dir.write("s.gguf", good_sidecar(m.print).bytes()));
    CHECK(fitted.ok());
    CHECK(fitted.value().draft->fitted(0, 1));
    CHECK(fitted.value().adapter->fitted(0, 1));
    CHECK(fitted.value().bytes() > plain.value().bytes());
}

TEST(a_lying_number_of_extra_layers_is_not_believed) {
    const test::TempDir dir;
    test::GgufBuilder builder = test::good_model();
    builder.set("llama.nextn_predict_layers", GGUF_TYPE_INT64, INT64_MIN); // 2 less it overflows
    const Opened m = open_model(dir.write("m.gguf", builder.bytes()));
    CHECK_EQ(find_routers(m.model, m.index, 0).reason, "");
}

TEST(a_sidecar_nobody_asked_for_is_left_out_with_a_reason) {
    const test::TempDir dir;
    const Opened m = open_model(dir.write("m.gguf", test::good_model().bytes()));
    const auto sidecar = dir.write("s.gguf", good_sidecar("of another model").bytes());
    CHECK(!heads(m, sidecar).ok());
    const Result<HeadSet> set = make_heads(m.model, m.index, {.sidecar = sidecar, .sidecar_required = false});
    CHECK_EQ(set.status().message(), "");
    CHECK(contains(set.value().sidecar_problem, "another model"));
    CHECK(set.value().frozen->has(0, 1));
    CHECK(set.value().draft == nullptr && set.value().adapter == nullptr);
}

TEST(unused_heads_are_let_go) {
    const test::TempDir dir;
    const Opened m = open_model(dir.write("m.gguf", test::good_model().bytes()));
    HeadSet set = heads(m, dir.write("s.gguf", good_sidecar(m.print).bytes())).take();
    const uint64_t all = set.bytes();
    set.keep_only(set.draft.get());
    CHECK(set.draft != nullptr && set.frozen == nullptr && set.adapter == nullptr);
    CHECK(set.bytes() < all);
    set.keep_only(nullptr);
    CHECK_EQ(set.bytes(), 0U);
}

TEST(a_model_without_routers_has_a_reason) {
    const test::TempDir dir;
    test::GgufBuilder b = test::good_model();
    std::erase_if(b.tensors, [](const test::Tensor &t) { return contains(t.name, "ffn_gate_inp"); });
    const Opened m = open_model(dir.write("m.gguf", b.bytes()));
    const Result<HeadSet> set = heads(m, {});
    CHECK(set.ok());
    CHECK(set.value().frozen == nullptr);
    CHECK(contains(set.value().reason, "layer 0: it has no ffn_gate_inp.weight"));
    CHECK_EQ(set.value().bytes(), 0u);
}

TEST(odd_routers_are_left_out_and_not_fatal) {
    const test::TempDir dir;
    test::GgufBuilder b = test::good_model();
    b.at("blk.1.ffn_gate_inp.weight").shape = {k_embd, k_out + 1};
    const Opened m = open_model(dir.write("m.gguf", b.bytes()));
    const Result<HeadSet> set = heads(m, {});
    CHECK(set.ok());
    CHECK(!set.value().frozen->has(0, 1));
    CHECK(contains(set.value().reason, "layer 1"));
}

TEST(fingerprints_tell_models_apart) {
    const test::TempDir dir;
    const std::string bytes = test::good_model().bytes();
    const std::string print = open_model(dir.write("m.gguf", bytes)).print;
    CHECK_EQ(print.size(), 32u);
    CHECK_EQ(open_model(dir.write("copy.gguf", bytes)).print, print);
    const Opened m = open_model(dir.path() / "m.gguf");
    std::string fine_tune = bytes; // one bit of one router
    fine_tune[m.model.find("blk.1.ffn_gate_inp.weight")->offset + 5] ^= 1;
    CHECK(open_model(dir.write("tuned.gguf", fine_tune)).print != print);
    std::string expert = bytes; // other tensors' bytes are not read
    expert[m.model.find("blk.1.ffn_up_exps.weight")->offset + 5] ^= 1;
    CHECK_EQ(open_model(dir.write("expert.gguf", expert)).print, print);
    test::GgufBuilder other = test::good_model();
    other.at("blk.1.ffn_up_exps.weight").type = GGML_TYPE_Q4_0;
    CHECK(open_model(dir.write("other.gguf", other.bytes())).print != print);
    // In two files it is the same model.
    const auto [first, second] = test::split_model(test::good_model(), 9);
    dir.write("p-00002-of-00002.gguf", second.bytes());
    const std::string split = open_model(dir.write("p-00001-of-00002.gguf", first.bytes())).print;
    CHECK_EQ(split.size(), 32u); // the builder fills tensors by position, so the bytes differ
}

TEST(wrong_sidecars_are_refused_with_a_remedy) {
    const test::TempDir dir;
    const Opened m = open_model(dir.write("m.gguf", test::good_model().bytes()));
    const auto refused = [&](const test::GgufBuilder &b, Code code, const std::string &text) {
        const Status status = heads(m, dir.write("s.gguf", b.bytes())).status();
        CHECK_EQ(static_cast<int>(status.code()), static_cast<int>(code));
        CHECK(contains(status.message(), text));
        if (!contains(status.message(), text)) std::cerr << status.message() << "\n";
    };
    refused(good_sidecar("0123"), Code::unsupported, "another model");
    refused(test::good_model(), Code::unsupported, "no sidecar");
    test::GgufBuilder b = good_sidecar(m.print);
    b.u32("spice.version", 2);
    refused(b, Code::unsupported, "version 2");
    for (const auto &[name, change] : std::vector<std::pair<std::string, std::string>>{
             {"draft.0.1.full", "draft.7.1.full"},  // no such layer
             {"draft.0.1.full", "draft.0.99.full"}, // no such horizon
             {"draft.0.1.full", "draft.0.x.full"},  //
             {"draft.0.1.full", "draft.1.1.full"},  // no layer behind the last
             {"draft.0.1.full", "draft.0.1.gru"},   // no such part
             {"adapter.0.1.b", "adapter.0.2.b"}}) { // half a pair
        b = good_sidecar(m.print);
        b.at(name).name = change;
        refused(b, Code::malformed, "fit");
    }
    for (const char *name : {"draft.0.1.full", "draft.0.1.present", "draft.0.1.bias", "adapter.0.1.b"}) {
        b = good_sidecar(m.print);
        b.at(name).shape.back() += 1;
        refused(b, Code::malformed, "does not fit the model");
    }
    b = good_sidecar(m.print); // numbers that are not finite
    std::string bytes = b.bytes();
    const Result<GgufModel> file = GgufModel::open(dir.write("s.gguf", bytes));
    const float infinite = INFINITY;
    std::memcpy(bytes.data() + file.value().find("draft.0.1.bias")->offset, &infinite, sizeof(infinite));
    CHECK(contains(heads(m, dir.write("s.gguf", bytes)).status().message(), "not finite"));
    CHECK_EQ(static_cast<int>(heads(m, dir.path() / "absent.gguf").status().code()),
             static_cast<int>(Code::not_found));
}

TEST(damaged_sidecars_give_a_status_or_heads) {
    const test::TempDir dir;
    const Opened m = open_model(dir.write("m.gguf", test::good_model().bytes()));
    const test::GgufBuilder builder = good_sidecar(m.print);
    const std::string good = builder.bytes();
    const size_t header = builder.data_offset();
    std::mt19937_64 random(1);
    int refused = 0;
    for (int i = 0; i < 3000; ++i) {
        std::string bytes = good;
        for (uint64_t n = 0; n <= random() % 3; ++n) {
            const size_t at = random() % (random() % 4 == 0 ? bytes.size() : header);
            switch (random() % 3) {
            case 0:
                bytes[at] = static_cast<char>(random());
                break;
            case 1:
                bytes[at] = static_cast<char>(bytes[at] ^ (1 << (random() % 8)));
                break;
            default:
                const uint64_t value = random() % 2 == 0 ? random() % 4 : UINT64_MAX >> (random() % 64);
                const size_t size = std::min<size_t>(random() % 2 == 0 ? 4 : 8, bytes.size() - at);
                std::memcpy(bytes.data() + at, &value, size);
            }
        }
        if (random() % 16 == 0) bytes.resize(random() % bytes.size());
        const Result<HeadSet> set = heads(m, dir.write("s.gguf", bytes));
        if (!set.ok()) {
            ++refused;
            CHECK(!set.status().message().empty());
            continue;
        }
        if (set.value().draft == nullptr || !set.value().draft->has(0, 1)) continue;
        compute::HeadCall call(*set.value().draft);
        const std::vector<float> h(k_embd, 1.0f);
        std::vector<float> out(k_out);
        call.start(h);
        CHECK(
            set.value().draft->scores(0, 1, std::vector<int32_t>{0, 3}, std::vector<int32_t>{1}, call, out));
    }
    CHECK(refused > 1000);
    CHECK(refused < 3000);
}

RUN_TESTS()

// ExpertIndex: the places of all experts of good models, whole and split inside a layer, and models that
// contradict themselves.
#include "check.h"
#include "gguf_builder.h"

#include "store/expert_index.h"

using spice::Bank;
using spice::Code;
using spice::ExpertIndex;
using spice::GgufModel;
using spice::PartKind;
using spice::Projection;
using test::GgufBuilder;
using test::good_model;

namespace {

struct Built {
    test::TempDir dir;
    GgufModel model;
    spice::Status status;
    ExpertIndex index;
    explicit Built(const GgufBuilder &b) { build(dir.write("m.gguf", b.bytes())); }
    explicit Built(const std::pair<GgufBuilder, GgufBuilder> &parts) {
        dir.write("m-00002-of-00002.gguf", parts.second.bytes());
        build(dir.write("m-00001-of-00002.gguf", parts.first.bytes()));
    }
    void build(const std::filesystem::path &path) {
        auto opened = GgufModel::open(path);
        status = opened.status();
        if (!opened.ok()) return;
        model = opened.take();
        auto made = ExpertIndex::build(model);
        status = made.status();
        if (made.ok()) index = made.take();
    }
};

template <class Change>
void expect_changed(Change change, Code code, const std::string &part, int line) {
    GgufBuilder b = good_model();
    change(b);
    const Built built(b);
    check::report(built.status.code() == code && built.status.message().find(part) != std::string::npos,
                  __FILE__, line, "expected '" + part + "', got '" + built.status.message() + "'");
}
#define EXPECT(statement, code, part) expect_changed([](GgufBuilder &b) { statement; }, code, part, __LINE__)

constexpr uint64_t k_stride = test::k_width * test::k_hidden / 32 * 34; // Q8_0

} // namespace

TEST(whole_file) {
    const GgufBuilder b = good_model();
    const Built built(b);
    CHECK_EQ(built.status.message(), "");
    const ExpertIndex &index = built.index;
    CHECK(!index.dense());
    CHECK_EQ(index.layers().size(), 2u);
    CHECK_EQ(index.n_experts(), 8);
    CHECK_EQ(index.total_weight_bytes(), 2 * 3 * 4 * k_stride);
    for (size_t layer = 0; layer < 2; ++layer) {
        CHECK_EQ(index.layers()[layer].layer, static_cast<int32_t>(layer));
        CHECK_EQ(index.layers()[layer].parts.size(), 3u);
        CHECK_EQ(index.layers()[layer].slab_bytes(Bank::routed), 3 * k_stride);
        CHECK_EQ(index.layers()[layer].slab_bytes(Bank::adjugate), 0u);
    }
    uint64_t at = b.data_offset();
    for (const test::Tensor &t : b.tensors) {
        const spice::ExpertPart *part = index.find(t.name);
        CHECK_EQ(part != nullptr, t.name.find("_exps") != std::string::npos);
        if (part != nullptr) {
            CHECK_EQ(part->name, t.name);
            CHECK_EQ(part->file, 0u);
            CHECK_EQ(part->offset, at);
            CHECK_EQ(part->stride, k_stride);
            CHECK_EQ(part->n_in, t.shape[0]);
            CHECK_EQ(part->n_out, t.shape[1]);
            CHECK_EQ(part->n_expert, 4);
            CHECK_EQ(part->ggml_type, static_cast<int>(GGML_TYPE_Q8_0));
            CHECK(part->kind == PartKind::weight && part->bank == Bank::routed);
        }
        at += (GgufBuilder::size_of(t) + 31) / 32 * 32;
    }
    CHECK(index.find("blk.0.ffn_gate_exps.weight")->projection == Projection::gate);
    CHECK(index.find("blk.0.ffn_up_exps.weight")->projection == Projection::up);
    CHECK(index.find("blk.1.ffn_down_exps.weight")->projection == Projection::down);
    CHECK(index.find("blk.2.ffn_down_exps.weight") == nullptr);
}

TEST(split_inside_a_layer) {
    const GgufBuilder whole = good_model();
    const auto parts = test::split_model(whole, 11);
    const Built built(parts);
    CHECK_EQ(built.status.message(), "");
    const Built one(whole);
    CHECK_EQ(built.index.n_experts(), one.index.n_experts());
    CHECK_EQ(built.index.total_weight_bytes(), one.index.total_weight_bytes());
    if (!built.status.ok()) return;
    CHECK_EQ(built.index.find("blk.0.ffn_gate_exps.weight")->file, 0u);
    CHECK_EQ(built.index.find("blk.0.ffn_down_exps.weight")->file, 1u);
    CHECK_EQ(built.index.find("blk.0.ffn_down_exps.weight")->offset, parts.second.data_offset());
    // The same bytes are where the index says, in either file.
    for (const auto &layer : built.index.layers()) {
        for (const auto &part : layer.parts) {
            std::ifstream file(built.model.files()[part.file].path, std::ios::binary);
            file.seekg(static_cast<std::streamoff>(part.offset + 3 * part.stride));
            std::string got(part.stride, '\0');
            CHECK(file.read(got.data(), static_cast<std::streamsize>(part.stride)).good());
        }
    }
}

TEST(dense_and_shared) {
    GgufBuilder b = good_model();
    std::erase_if(b.tensors, [](const auto &t) { return t.name.find("_exps") != std::string::npos; });
    b.tensor("blk.0.ffn_up_shexp.weight", {32, 64});
    b.tensor("blk.0.ffn_norm_exps.weight", {32});
    b.tensor("blk.0.ffn_up_exps.lora_a", {32, 4, 4});
    b.tensor("blk.0.ffn_up_exps.weight_x", {32, 4, 4});
    b.tensor("blk.00.ffn_up_exps.weight", {32, 4, 4});
    b.tensor("blk.99999999999.ffn_up_exps.weight", {32, 4, 4});
    b.tensor("blk.-1.ffn_up_exps.weight", {32, 4, 4});
    b.tensor("blk..ffn_up_exps.weight", {32, 4, 4});
    b.tensor("v.blk.0.ffn_up_exps.weight", {32, 4, 4});
    const Built built(b);
    CHECK_EQ(built.status.message(), "");
    CHECK(built.index.dense());
    CHECK_EQ(built.index.n_experts(), 0);
    CHECK_EQ(built.index.total_weight_bytes(), 0u);
}

TEST(other_layouts) {
    GgufBuilder b;
    b.text("general.architecture", "x");
    // gemma 4: fused gate and up, with scales
    b.tensor("blk.0.ffn_gate_up_exps.weight", {32, 128, 3});
    b.tensor("blk.0.ffn_down_exps.weight", {64, 32, 3});
    b.tensor("blk.0.ffn_down_exps.scale", {3});
    // nemotron-h: no gate, experts in a latent width
    b.tensor("blk.1.ffn_up_exps.weight", {8, 64, 5});
    b.tensor("blk.1.ffn_down_exps.weight", {64, 8, 5});
    // gpt-oss: biases
    b.tensor("blk.12.ffn_gate_exps.weight", {32, 64, 2}, GGML_TYPE_MXFP4);
    b.tensor("blk.12.ffn_up_exps.weight", {32, 64, 2}, GGML_TYPE_MXFP4);
    b.tensor("blk.12.ffn_down_exps.weight", {64, 32, 2}, GGML_TYPE_Q5_1);
    b.tensor("blk.12.ffn_gate_exps.bias", {64, 2});
    b.tensor("blk.12.ffn_up_exps.bias", {64, 2});
    b.tensor("blk.12.ffn_down_exps.bias", {32, 2});
    // grove: a second bank with fewer and narrower experts
    b.tensor("blk.12.ffn_gate_chexps.weight", {32, 16, 1});
    b.tensor("blk.12.ffn_up_chexps.weight", {32, 16, 1});
    b.tensor("blk.12.ffn_down_chexps.weight", {16, 32, 1});
    const Built built(b);
    CHECK_EQ(built.status.message(), "");
    if (!built.status.ok()) return;
    const ExpertIndex &index = built.index;
    CHECK_EQ(index.layers().size(), 3u);
    CHECK_EQ(index.layers()[2].layer, 12);
    CHECK_EQ(index.n_experts(), 3 + 5 + 2);
    CHECK(index.find("blk.0.ffn_gate_up_exps.weight")->projection == Projection::gate_up);
    const auto *scale = index.find("blk.0.ffn_down_exps.scale");
    CHECK(scale->kind == PartKind::scale && scale->n_expert == 3 && scale->stride == 4 && scale->n_in == 1);
    const auto *bias = index.find("blk.12.ffn_down_exps.bias");
    CHECK(bias->kind == PartKind::bias && bias->n_expert == 2 && bias->stride == 128 && bias->n_in == 32);
    CHECK_EQ(bias->n_out, 1);
    CHECK_EQ(index.layers()[2].parts.size(), 9u);
    // Weights alone: 2 MXFP4 projections of 17 bytes a block, one of Q5_1 of 24.
    CHECK_EQ(index.layers()[2].slab_bytes(Bank::routed), 2 * 64 * 17 + 64u * 24);
    CHECK_EQ(index.layers()[2].slab_bytes(Bank::adjugate), 3u * 32 * 16 * 4);
    CHECK_EQ(index.layers()[0].slab_bytes(Bank::routed), (32u * 128 + 64 * 32) * 4);
}

TEST(contradictions) {
    EXPECT(b.at("blk.1.ffn_up_exps.weight").shape = (std::vector<int64_t>{32, 64, 3}), Code::malformed,
           "3 experts");
    EXPECT(b.at("blk.1.ffn_gate_exps.weight").shape = (std::vector<int64_t>{32, 32, 4}), Code::malformed,
           "32x32");
    EXPECT(b.at("blk.1.ffn_up_exps.weight").shape = (std::vector<int64_t>{64, 64, 4}), Code::malformed,
           "64x64");
    EXPECT(b.at("blk.0.ffn_down_exps.weight").shape = (std::vector<int64_t>{32, 32, 4}), Code::malformed,
           "takes 32");
    EXPECT(b.at("blk.0.ffn_up_exps.weight").name = "other.weight", Code::malformed, "no up or gate_up");
    EXPECT(b.at("blk.0.ffn_down_exps.weight").name = "other.weight", Code::malformed, "no down");
    EXPECT(b.at("blk.0.ffn_up_exps.weight").name = "blk.0.ffn_gate_up_exps.weight", Code::malformed,
           "not twice");
    EXPECT(b.tensor("blk.0.ffn_up_exps.bias", {64, 3}), Code::malformed, "3 experts");
    EXPECT(b.tensor("blk.0.ffn_up_exps.bias", {32, 4}), Code::malformed, "32 elements");
    EXPECT(b.tensor("blk.0.ffn_up_exps.bias", {64, 4}), Code::ok, "");
    EXPECT(b.tensor("blk.0.ffn_up_exps.scale", {5}), Code::malformed, "5 experts");
    EXPECT(b.tensor("blk.0.ffn_gate_up_exps.bias", {64, 4}), Code::malformed, "no weight");
    EXPECT(b.at("blk.0.ffn_up_exps.weight").shape = (std::vector<int64_t>{32, 64, 2, 2}), Code::malformed,
           "shape");
    EXPECT(b.at("blk.0.ffn_up_exps.weight").type = GGML_TYPE_F64, Code::unsupported, "f64");
    EXPECT(b.at("blk.0.ffn_up_exps.weight").type = GGML_TYPE_I8, Code::unsupported, "i8");
}

RUN_TESTS()

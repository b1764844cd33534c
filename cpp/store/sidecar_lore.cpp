#include "store/sidecar_lore.h"

#include "store/gguf_reader.h"

#include "ggml.h"

#include <algorithm>
#include <charconv>
#include <map>
#include <string>
#include <utility>

namespace spice {

namespace {

constexpr std::string_view k_prefix = "lore.";
constexpr int64_t k_max_rank = 1024;
constexpr std::string_view k_curve = "lore-kl.curve"; // of a kind of its own, as it is of no layer
constexpr int64_t k_max_points = 64;

struct PartRule {
    std::string_view name;
    const GgufTensor *LoreTensors::*tensor;
    ggml_type type;
};

constexpr PartRule k_parts[] = {
    {"a", &LoreTensors::a, GGML_TYPE_I8},
    {"b", &LoreTensors::b, GGML_TYPE_I8},
    {"gate", &LoreTensors::gate, GGML_TYPE_I8},
    {"scale", &LoreTensors::scale, GGML_TYPE_F32},
    {"gate_scale", &LoreTensors::gate_scale, GGML_TYPE_F32},
    {"offset", &LoreTensors::offset, GGML_TYPE_F32},
    {"bias", &LoreTensors::bias, GGML_TYPE_F16},
    {"error", &LoreTensors::error, GGML_TYPE_F32},
    {"norm", &LoreTensors::norm, GGML_TYPE_F32},
    {"output", &LoreTensors::output, GGML_TYPE_F32},
    {"sensitivity", &LoreTensors::sensitivity, GGML_TYPE_F32},
};

Status wrong(const Sidecar &sidecar, const std::string &what) {
    return {Code::malformed, sidecar.file().files().front().path.string() + ": " + what};
}

std::string shape_text(std::span<const int64_t> shape) {
    std::string text = "[";
    for (size_t d = 0; d < shape.size(); ++d) text += (d > 0 ? ", " : "") + std::to_string(shape[d]);
    return text + "]";
}

/// "" or what is wrong with the layer's parts.
std::string misfit(const LoreTensors &lore) {
    const LoreShape &m = lore.shape;
    const std::string layer = "layer " + std::to_string(m.layer);
    const bool low_rank = lore.a != nullptr;
    if ((lore.b != nullptr) != low_rank || (lore.scale != nullptr) != low_rank) {
        return layer + " has some of the parts a, b and scale alone";
    }
    if ((lore.gate == nullptr) != (lore.gate_scale == nullptr)) {
        return layer + " has one of the parts gate and gate_scale alone";
    }
    std::string found;
    const auto check = [&](const GgufTensor *tensor, std::array<int64_t, 3> wanted) {
        if (tensor == nullptr || !found.empty()) return;
        const std::array<int64_t, 4> whole = {wanted[0], wanted[1], wanted[2], 1};
        if (tensor->shape == whole) return;
        found = "tensor " + shown(tensor->name) + " has the shape " + shape_text(tensor->shape) + ", not " +
                shape_text(whole);
    };
    const int64_t rank = lore.rank();
    check(lore.a, {m.n_in, rank, m.n_expert});
    check(lore.b, {m.n_out, rank, m.n_expert});
    check(lore.gate, {m.n_in, lore.gated(), m.n_expert});
    check(lore.scale, {rank, m.n_expert, 1});
    check(lore.gate_scale, {lore.gated(), m.n_expert, 1});
    check(lore.offset, {rank, m.n_expert, 1});
    check(lore.bias, {m.n_out, m.n_expert, 1});
    check(lore.error, {m.n_expert, 1, 1});
    check(lore.norm, {m.n_expert, 1, 1});
    check(lore.output, {1, 1, 1});
    check(lore.sensitivity, {1, 1, 1});
    if (!found.empty()) return found;
    if (lore.gated() > rank) return layer + " has more rows in gate than in a";
    if (rank > k_max_rank) {
        return layer + " has a rank of " + std::to_string(rank) + ", above " + std::to_string(k_max_rank);
    }
    return {};
}

} // namespace

Result<std::vector<LoreTensors>> lore_tensors(const Sidecar &sidecar, std::span<const LoreShape> model) {
    const std::string remedy = "; the file is damaged, fit it again";
    std::map<int32_t, LoreTensors> layers;
    for (const GgufTensor &tensor : sidecar.file().tensors()) {
        std::string_view rest = tensor.name;
        if (!rest.starts_with(k_prefix)) continue;
        rest.remove_prefix(k_prefix.size());
        int32_t layer = -1;
        const auto [end, error] = std::from_chars(rest.data(), rest.data() + rest.size(), layer);
        const auto shape = std::ranges::find(model, layer, &LoreShape::layer);
        if (error != std::errc{} || layer < 0 || shape == model.end()) {
            return wrong(sidecar, "tensor " + shown(tensor.name) + " names no layer with experts" + remedy);
        }
        rest.remove_prefix(static_cast<size_t>(end - rest.data()));
        if (!rest.empty()) rest.remove_prefix(1); // the dot
        const auto *const part = std::ranges::find(k_parts, rest, &PartRule::name);
        if (part == std::end(k_parts)) {
            return wrong(sidecar, "tensor " + shown(tensor.name) +
                                      " is no part of a stand-in; update SPICE, or fit the sidecar again");
        }
        if (part->type == GGML_TYPE_I8 && tensor.ggml_type == GGML_TYPE_F16) {
            return Status(Code::unsupported,
                          sidecar.file().files().front().path.string() +
                              ": its stand-ins are in F16, as versions of SPICE before this "
                              "one made them; fit them again with spice-fit --lore");
        }
        if (tensor.ggml_type != part->type) {
            return wrong(sidecar, "tensor " + shown(tensor.name) + " has the type " +
                                      ggml_type_name(static_cast<ggml_type>(tensor.ggml_type)) + ", not " +
                                      ggml_type_name(part->type) + remedy);
        }
        LoreTensors &lore = layers[layer];
        lore.shape = *shape;
        lore.*part->tensor = &tensor;
    }
    std::vector<LoreTensors> out;
    for (const auto &[layer, lore] : layers) {
        if (const std::string what = misfit(lore); !what.empty()) return wrong(sidecar, what + remedy);
        out.push_back(lore);
    }
    if (out.empty()) {
        return Status(Code::unsupported, sidecar.file().files().front().path.string() +
                                             ": has no low-rank stand-ins for experts; fit them with "
                                             "spice-fit --lore RANK, or load the model without lore");
    }
    return out;
}

Result<const GgufTensor *> lore_curve(const Sidecar &sidecar) {
    for (const GgufTensor &tensor : sidecar.file().tensors()) {
        if (tensor.name != k_curve) continue;
        const std::array<int64_t, 4> &s = tensor.shape;
        if (tensor.ggml_type != GGML_TYPE_F32 || s[0] != 2 || s[1] > k_max_points || s[2] * s[3] != 1) {
            return wrong(sidecar,
                         "tensor " + shown(tensor.name) + " is not [2, points] in F32, with at most " +
                             std::to_string(k_max_points) + " points; the file is damaged, fit it again");
        }
        return &tensor;
    }
    return static_cast<const GgufTensor *>(nullptr);
}

} // namespace spice

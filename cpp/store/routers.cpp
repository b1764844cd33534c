#include "store/routers.h"

#include "store/tensor_data.h"

#include <algorithm>
#include <cmath>
#include <initializer_list>

namespace spice {

namespace {

bool one_of(std::string_view name, std::initializer_list<std::string_view> names) {
    return std::ranges::find(names, name) != names.end();
}

/// Layers that llama.cpp computes for the token itself; numbers that lie are taken for 0.
int64_t n_layers(const GgufModel &model) {
    const std::string arch = model.architecture();
    const auto count = [&](const char *key) {
        return std::clamp<int64_t>(model.get_int(arch + key).value_or(0), 0, INT32_MAX);
    };
    return count(".block_count") - count(".nextn_predict_layers");
}

/// llama.cpp's gating where the header does not name one, or where its graph does not ask the header.
GatingKind default_gating(const GgufModel &model, std::string_view arch) {
    if (arch == "gpt-oss") return GatingKind::softmax_chosen;
    if (arch == "deepseek4") return GatingKind::sqrt_softplus;
    if (one_of(arch, {"afmoe", "cohere2moe", "glm-dsa", "glm4moe", "glm5-next", "hy_v3", "laguna", "llama4",
                      "mimo2", "nemotron_h_moe", "step35"})) {
        return GatingKind::sigmoid;
    }
    if (arch == "deepseek2") { // GLM 4.7 Lite goes under this name and says nothing
        const int64_t layers = n_layers(model);
        const GgufTensor *embedding = model.find("token_embd.weight");
        const bool glm =
            (layers == 47 || layers == 48) && embedding != nullptr && embedding->shape[1] == 154880;
        if (glm) return GatingKind::sigmoid;
    }
    return GatingKind::softmax;
}

/// Architectures whose graph takes `expert_gating_func` from the header; the others ignore the key.
bool asks_header(std::string_view arch) {
    return one_of(arch, {"afmoe",         "bailingmoe2", "bailingmoe3", "cohere2moe",   "deepseek2",
                         "deepseek2-ocr", "deepseek32",  "deepseek4",   "dots1",        "dots3note",
                         "exaone-moe",    "glm-dsa",     "glm4moe",     "glm5-next",    "hy_v3",
                         "hy_v4",         "kimi-k3",     "kimi-linear", "laguna",       "lfm2moe",
                         "minimax-m2",    "minimax-m3",  "mistral4",    "smallthinker", "step35"});
}

RouterGating find_gating(const GgufModel &model, int64_t expert_used) {
    const std::string arch = model.architecture();
    RouterGating gating;
    gating.kind = default_gating(model, arch);
    if (asks_header(arch)) {
        switch (model.get_int(arch + ".expert_gating_func").value_or(0)) {
        case 1:
            gating.kind = GatingKind::softmax;
            break;
        case 2:
            gating.kind = GatingKind::sigmoid;
            break;
        case 3:
            gating.kind = GatingKind::softmax_chosen;
            break;
        case 4:
            gating.kind = GatingKind::sqrt_softplus;
            break;
        default:
            break;
        }
    }
    const auto small = [](int64_t value) {
        return static_cast<int32_t>(std::clamp<int64_t>(value, 0, 1 << 20));
    };
    gating.top_k =
        small(expert_used > 0 ? expert_used : model.get_int(arch + ".expert_used_count").value_or(0));
    gating.n_groups = std::max(1, small(model.get_int(arch + ".expert_group_count").value_or(1)));
    gating.n_groups_used =
        std::clamp(small(model.get_int(arch + ".expert_group_used_count").value_or(1)), 1, gating.n_groups);
    return gating;
}

class Finder {
  public:
    explicit Finder(const GgufModel &model) : model_(model), arch_(model.architecture()) {}

    /// Fills everything but layer, n_expert and n_embd; why not, or nothing.
    std::string fill(RouterInfo &info) const {
        const GgufTensor *weight = at(info, "ffn_gate_inp.weight");
        if (weight == nullptr) return "it has no ffn_gate_inp.weight";
        if (arch_ == "llama4") return "its experts read their input times the gate weight";
        if (at(info, "ffn_gate_tid2eid.weight") != nullptr)
            return "its experts follow from the token's number";
        for (const char *down : {"ffn_latent_down.weight", "ffn_routed_down.weight"}) {
            if (at(info, down) != nullptr) return "its experts read a projection of what its router reads";
        }
        if (weight->shape[0] != info.n_embd) {
            return "its router reads " + std::to_string(weight->shape[0]) + " values, its experts " +
                   std::to_string(info.n_embd);
        }
        if (weight->shape[1] != info.n_expert || weight->shape[2] != 1 || weight->shape[3] != 1) {
            return "its router has " + std::to_string(weight->shape[1]) + " rows for " +
                   std::to_string(info.n_expert) + " experts";
        }
        info.bias = vector(info, "ffn_gate_inp.bias", info.n_expert);
        for (const char *name : {"exp_probs_b.bias", "exp_probs_b"}) {
            if (info.selection_bias == nullptr) info.selection_bias = vector(info, name, info.n_expert);
        }
        find_scales(info);
        info.weight = weight;
        return {};
    }

  private:
    [[nodiscard]] const GgufTensor *at(const RouterInfo &info, std::string_view name) const {
        return model_.find("blk." + std::to_string(info.layer) + "." + std::string(name));
    }
    [[nodiscard]] const GgufTensor *vector(const RouterInfo &info, std::string_view name,
                                           int64_t length) const {
        const GgufTensor *tensor = at(info, name);
        const bool fits = tensor != nullptr && tensor->shape[0] == length && tensor->shape[1] == 1 &&
                          tensor->shape[2] == 1 && tensor->shape[3] == 1;
        return fits ? tensor : nullptr;
    }

    void find_scales(RouterInfo &info) const {
        if (arch_ == "gemma4") {
            info.input_scale = vector(info, "pre_ffw_norm_2.weight", info.n_embd);
            info.router_scale = vector(info, "ffn_gate_inp.scale", info.n_embd);
            if (info.input_scale == nullptr || info.router_scale == nullptr) {
                info.input_scale = info.router_scale = nullptr;
            }
            info.router_factor = 1.0f / std::sqrt(static_cast<float>(info.n_embd));
            return;
        }
        if (one_of(arch_, {"nomic-bert-moe", "minimax-01"})) return; // they normalise after the addition
        for (const char *name :
             {"ffn_norm_exps", "ffn_norm", "post_attention_norm", "attn_output_norm", "attn_norm"}) {
            const std::string norm(name);
            if (at(info, norm + ".weight") == nullptr) continue;
            info.input_scale = info.router_scale = vector(info, norm + ".weight", info.n_embd);
            info.input_shift = info.router_shift = vector(info, norm + ".bias", info.n_embd);
            break;
        }
        if (arch_ == "smallthinker") info.router_scale = info.router_shift = nullptr;
    }

    const GgufModel &model_;
    std::string arch_;
};

} // namespace

RouterSet find_routers(const GgufModel &model, const ExpertIndex &index, int64_t expert_used) {
    RouterSet set;
    set.gating = find_gating(model, expert_used);
    const int64_t layers = n_layers(model);
    const Finder finder(model);
    bool two_banks = false;
    for (const LayerExperts &layer : index.layers()) {
        for (const Bank bank : {Bank::routed, Bank::adjugate}) {
            RouterInfo info;
            info.layer = layer.layer;
            for (const ExpertPart &part : layer.parts) {
                if (part.bank != bank || part.kind != PartKind::weight) continue;
                info.n_expert = part.n_expert;
                if (part.projection != Projection::down) info.n_embd = part.n_in;
            }
            if (info.n_expert == 0) continue;
            two_banks = two_banks || bank == Bank::adjugate;
            std::string why;
            if (layer.layer >= layers) {
                why = "it predicts a second token, which llama.cpp does not compute here";
            } else {
                why = finder.fill(info);
            }
            if (!why.empty() && set.reason.empty())
                set.reason = "layer " + std::to_string(layer.layer) + ": " + why;
            set.groups.push_back(info);
        }
    }
    const auto none = [&](const std::string &why) {
        for (RouterInfo &info : set.groups) info.weight = nullptr;
        set.reason = why;
    };
    if (two_banks) none("a layer has two banks of experts");
    if (set.gating.top_k < 1) none("the header does not say how many experts a token uses");
    return set;
}

Result<RouterData> read_router(const GgufModel &model, const RouterInfo &info) {
    RouterData data;
    Status first;
    const auto read = [&](const GgufTensor *tensor, std::vector<float> &to) {
        if (tensor == nullptr || !first.ok()) return;
        Result<std::vector<float>> values = read_floats(model, *tensor);
        if (!values.ok()) {
            first = values.status();
            return;
        }
        to = values.take();
    };
    read(info.weight, data.weight);
    read(info.bias, data.bias);
    read(info.selection_bias, data.selection_bias);
    read(info.input_scale, data.input_scale);
    read(info.input_shift, data.input_shift);
    read(info.router_scale, data.router_scale);
    read(info.router_shift, data.router_shift);
    if (!first.ok()) return first;
    for (float &value : data.router_scale) value *= info.router_factor;
    return data;
}

} // namespace spice

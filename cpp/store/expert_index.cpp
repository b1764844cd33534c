#include "store/expert_index.h"

#include "ggml-cpu.h"
#include "ggml.h"

#include <algorithm>
#include <charconv>
#include <limits>
#include <map>
#include <new>
#include <optional>

namespace spice {

namespace {

/// What a tensor's name says. Names are `blk.L.ffn_<projection>_<bank>.<kind>`; anything longer or shorter
/// (shared experts, adapters, input scales) is not ours.
struct PartName {
    int32_t layer = 0;
    Projection projection = Projection::up;
    Bank bank = Bank::routed;
    PartKind kind = PartKind::weight;
};

bool eat(std::string_view &text, std::string_view prefix) {
    if (!text.starts_with(prefix)) return false;
    text.remove_prefix(prefix.size());
    return true;
}

std::optional<PartName> parse_name(std::string_view text) {
    PartName name;
    if (!eat(text, "blk.")) return std::nullopt;
    const auto [end, error] = std::from_chars(text.data(), text.data() + text.size(), name.layer);
    if (error != std::errc{} || end == text.data() || name.layer < 0) return std::nullopt;
    const auto digits = static_cast<size_t>(end - text.data());
    if (digits > 1 && text[0] == '0') return std::nullopt; // "blk.07": llama.cpp never asks for that name
    text.remove_prefix(digits);
    if (!eat(text, ".ffn_")) return std::nullopt;
    // gate_up before gate: the longer name first.
    if (eat(text, "gate_up_")) {
        name.projection = Projection::gate_up;
    } else if (eat(text, "gate_")) {
        name.projection = Projection::gate;
    } else if (eat(text, "up_")) {
        name.projection = Projection::up;
    } else if (eat(text, "down_")) {
        name.projection = Projection::down;
    } else {
        return std::nullopt;
    }
    if (eat(text, "exps.")) {
        name.bank = Bank::routed;
    } else if (eat(text, "chexps.")) {
        name.bank = Bank::adjugate;
    } else {
        return std::nullopt;
    }
    if (text == "weight") {
        name.kind = PartKind::weight;
    } else if (text == "bias") {
        name.kind = PartKind::bias;
    } else if (text == "scale") {
        name.kind = PartKind::scale;
    } else {
        return std::nullopt;
    }
    return name;
}

Status wrong(const GgufModel &model, const ExpertPart &part, const std::string &what) {
    return {Code::malformed, model.files()[part.file].path.string() + ": " + part.name + " " + what +
                                 "; the file is damaged or badly converted, use another copy"};
}

/// The part a tensor is, with the one expert's size worked out.
Result<ExpertPart> make_part(const GgufModel &model, const GgufTensor &tensor, const PartName &name) {
    ExpertPart part;
    part.bank = name.bank;
    part.projection = name.projection;
    part.kind = name.kind;
    part.name = tensor.name;
    part.file = tensor.file;
    part.offset = tensor.offset;
    part.ggml_type = tensor.ggml_type;
    const auto &ne = tensor.shape;
    int64_t n_expert = 0;
    switch (part.kind) {
    case PartKind::weight:
        part.n_in = ne[0];
        part.n_out = ne[1];
        n_expert = ne[2];
        break;
    case PartKind::bias:
        part.n_in = ne[0];
        part.n_out = 1;
        n_expert = ne[1] * ne[2];
        break;
    case PartKind::scale:
        part.n_in = 1;
        part.n_out = 1;
        n_expert = ne[0] * ne[1] * ne[2];
        break;
    }
    if (ne[3] != 1 || n_expert > std::numeric_limits<int32_t>::max()) {
        return wrong(model, part,
                     "has the shape " + std::to_string(ne[0]) + "x" + std::to_string(ne[1]) + "x" +
                         std::to_string(ne[2]) + "x" + std::to_string(ne[3]) + ", not one of experts");
    }
    part.n_expert = static_cast<int32_t>(n_expert);
    part.stride = tensor.bytes / static_cast<uint64_t>(n_expert);
    const auto type = static_cast<ggml_type>(part.ggml_type);
    if (part.kind == PartKind::weight && ggml_get_type_traits_cpu(type)->vec_dot == nullptr) {
        return Status(Code::unsupported,
                      model.files()[part.file].path.string() + ": " + part.name + " has the type " +
                          ggml_type_name(type) +
                          ", which ggml-cpu cannot multiply; use a model with another quantisation");
    }
    return part;
}

const ExpertPart *weight_of(const LayerExperts &layer, Bank bank, Projection projection) {
    for (const ExpertPart &part : layer.parts) {
        if (part.bank == bank && part.projection == projection && part.kind == PartKind::weight) return &part;
    }
    return nullptr;
}

/// All parts of a bank have the same number of experts, and widths that fit each other. A gate is optional
/// (relu² experts), it may be fused with up, and the experts' outer width may differ from the model's (latent
/// MoE): none of that is compared with anything outside the bank.
Status check_bank(const GgufModel &model, const LayerExperts &layer, Bank bank) {
    const ExpertPart *gate = weight_of(layer, bank, Projection::gate);
    const ExpertPart *up = weight_of(layer, bank, Projection::up);
    const ExpertPart *down = weight_of(layer, bank, Projection::down);
    const ExpertPart *gate_up = weight_of(layer, bank, Projection::gate_up);
    const ExpertPart *first = nullptr;
    for (const ExpertPart &part : layer.parts) {
        if (part.bank != bank) continue;
        if (first == nullptr) first = &part;
        if (part.n_expert != first->n_expert) {
            return wrong(model, part,
                         "has " + std::to_string(part.n_expert) + " experts, but " + first->name + " has " +
                             std::to_string(first->n_expert));
        }
        const ExpertPart *weight = weight_of(layer, bank, part.projection);
        if (weight == nullptr) return wrong(model, part, "has no weight of the same projection beside it");
        if (part.kind == PartKind::bias && part.n_in != weight->n_out) {
            return wrong(model, part,
                         "has " + std::to_string(part.n_in) + " elements for each expert, but " +
                             weight->name + " has " + std::to_string(weight->n_out) + " rows");
        }
    }
    if (first == nullptr) return {};
    if (down == nullptr || (up == nullptr && gate_up == nullptr)) {
        return wrong(model, *first,
                     "has no " + std::string(down == nullptr ? "down" : "up or gate_up") +
                         " projection beside it");
    }
    if (gate != nullptr && up != nullptr && (gate->n_in != up->n_in || gate->n_out != up->n_out)) {
        return wrong(model, *gate,
                     "is " + std::to_string(gate->n_in) + "x" + std::to_string(gate->n_out) +
                         " for each expert, but " + up->name + " is " + std::to_string(up->n_in) + "x" +
                         std::to_string(up->n_out));
    }
    if (up != nullptr && down->n_in != up->n_out) {
        return wrong(model, *down,
                     "takes " + std::to_string(down->n_in) + " elements, but " + up->name + " gives " +
                         std::to_string(up->n_out));
    }
    // Halved and not doubled: twice a lying width could overflow.
    if (gate_up != nullptr && (gate_up->n_out % 2 != 0 || gate_up->n_out / 2 != down->n_in)) {
        return wrong(model, *gate_up,
                     "gives " + std::to_string(gate_up->n_out) + " elements, not twice the " +
                         std::to_string(down->n_in) + " that " + down->name + " takes");
    }
    return {};
}

} // namespace

uint64_t LayerExperts::slab_bytes(Bank bank) const {
    uint64_t bytes = 0;
    for (const ExpertPart &part : parts) {
        if (part.bank == bank && part.kind == PartKind::weight) bytes += part.stride;
    }
    return bytes;
}

Result<ExpertIndex> ExpertIndex::build(const GgufModel &model) {
    try {
        std::map<int32_t, LayerExperts> by_layer;
        for (const GgufTensor &tensor : model.tensors()) {
            const std::optional<PartName> name = parse_name(tensor.name);
            if (!name) continue;
            Result<ExpertPart> part = make_part(model, tensor, *name);
            if (!part.ok()) return part.status();
            LayerExperts &layer = by_layer[name->layer];
            layer.layer = name->layer;
            layer.parts.push_back(part.take());
        }
        ExpertIndex index;
        for (auto &[number, layer] : by_layer) {
            for (const Bank bank : {Bank::routed, Bank::adjugate}) {
                Status status = check_bank(model, layer, bank);
                if (!status.ok()) return status;
            }
            std::sort(layer.parts.begin(), layer.parts.end(),
                      [](const ExpertPart &a, const ExpertPart &b) { return a.name < b.name; });
            index.layers_.push_back(std::move(layer));
        }
        return index;
    } catch (const std::bad_alloc &) {
        return Status(Code::out_of_memory, "not enough memory for the index of the experts");
    } catch (const std::exception &error) {
        return Status(Code::internal, std::string("the index of the experts: ") + error.what());
    }
}

const ExpertPart *ExpertIndex::find(std::string_view tensor_name) const {
    const std::optional<PartName> name = parse_name(tensor_name);
    if (!name) return nullptr;
    const auto layer =
        std::lower_bound(layers_.begin(), layers_.end(), name->layer,
                         [](const LayerExperts &a, int32_t number) { return a.layer < number; });
    if (layer == layers_.end()) return nullptr;
    for (const ExpertPart &part : layer->parts) {
        if (part.name == tensor_name) return &part;
    }
    return nullptr;
}

uint64_t ExpertIndex::total_weight_bytes() const {
    uint64_t bytes = 0;
    for (const LayerExperts &layer : layers_) {
        for (const ExpertPart &part : layer.parts) {
            if (part.kind == PartKind::weight) bytes += part.stride * static_cast<uint64_t>(part.n_expert);
        }
    }
    return bytes;
}

int64_t ExpertIndex::n_experts() const {
    int64_t count = 0;
    for (const LayerExperts &layer : layers_) {
        for (const ExpertPart &part : layer.parts) {
            if (part.bank == Bank::routed && part.kind == PartKind::weight) {
                count += part.n_expert;
                break;
            }
        }
    }
    return count;
}

} // namespace spice

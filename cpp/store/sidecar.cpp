#include "store/sidecar.h"

#include "store/gguf_reader.h"

#include <charconv>
#include <map>
#include <optional>
#include <utility>

namespace spice {

namespace {

constexpr int64_t k_max_rank = 4096;

Status wrong(const GgufModel &file, const std::string &what, Code code = Code::malformed) {
    return {code, file.files().front().path.string() + ": " + what};
}

/// Takes the text up to the next dot off the front of `rest`.
std::string_view next_field(std::string_view &rest) {
    const size_t dot = rest.find('.');
    const std::string_view field = rest.substr(0, dot);
    rest = dot == std::string_view::npos ? std::string_view() : rest.substr(dot + 1);
    return field;
}

std::optional<int32_t> number(std::string_view text) {
    int32_t value = -1;
    const auto [end, error] = std::from_chars(text.data(), text.data() + text.size(), value);
    const bool whole = error == std::errc{} && end == text.data() + text.size() && value >= 0;
    return whole ? std::optional(value) : std::nullopt;
}

const GgufTensor **part_of(SidecarHead &head, std::string_view part) {
    if (part == "full") return &head.full;
    if (part == "a") return &head.a;
    if (part == "b") return &head.b;
    if (part == "present") return &head.present;
    if (part == "previous") return &head.previous;
    if (part == "bias") return &head.bias;
    return nullptr;
}

bool has_shape(const GgufTensor *tensor, int64_t ne0, int64_t ne1) {
    return tensor == nullptr || (tensor->shape[0] == ne0 && tensor->shape[1] == ne1 &&
                                 tensor->shape[2] == 1 && tensor->shape[3] == 1);
}

/// The parts agree with each other and with the model's layers.
bool fits(const SidecarHead &head, const RouterInfo &present, const RouterInfo &target) {
    const int64_t n_out = target.n_expert;
    const int64_t rank = head.a == nullptr ? 0 : head.a->shape[1];
    return present.n_embd == target.n_embd && (head.a == nullptr) == (head.b == nullptr) &&
           rank <= k_max_rank && has_shape(head.full, present.n_embd, n_out) &&
           has_shape(head.a, present.n_embd, rank) && has_shape(head.b, n_out, rank) &&
           has_shape(head.present, n_out, present.n_expert) && has_shape(head.previous, n_out, n_out) &&
           has_shape(head.bias, n_out, 1);
}

} // namespace

Result<Sidecar> Sidecar::open(const std::filesystem::path &path, const RouterSet &routers,
                              std::string_view fingerprint) {
    Result<GgufModel> opened = GgufModel::open(path);
    if (!opened.ok()) return opened.status();
    Sidecar sidecar(opened.take());
    const GgufModel &file = sidecar.file_;
    if (file.architecture() != "spice-sidecar") {
        return wrong(file,
                     "is no sidecar of SPICE but a model of architecture " + shown(file.architecture()) +
                         "; give a file that spice-fit wrote",
                     Code::unsupported);
    }
    const int64_t found = file.get_int("spice.version").value_or(0);
    if (found != version) {
        return wrong(file,
                     "has version " + std::to_string(found) + " of the sidecar format, this is version " +
                         std::to_string(version) + "; fit it again with spice-fit",
                     Code::unsupported);
    }
    const std::string made_for = file.get_string("spice.fingerprint").value_or("");
    if (made_for != fingerprint) {
        return wrong(file,
                     "was fitted for another model (" +
                         shown(file.get_string("spice.model").value_or("of unknown name")) +
                         ", fingerprint " + shown(made_for) + ", not " + shown(fingerprint) +
                         "); fit one for this model with spice-fit, or load it without the sidecar",
                     Code::unsupported);
    }
    for (const std::string_view kind : {"adapter", "draft"}) {
        if (Status status = sidecar.heads(kind, routers).status(); !status.ok()) return status;
    }
    return sidecar;
}

Result<std::vector<SidecarHead>> Sidecar::heads(std::string_view kind, const RouterSet &routers) const {
    std::map<int32_t, int32_t> group_of; // by layer; models with two banks in a layer have no heads
    for (size_t g = 0; g < routers.groups.size(); ++g) {
        group_of.emplace(routers.groups[g].layer, static_cast<int32_t>(g));
    }
    std::map<std::pair<int32_t, int32_t>, SidecarHead> heads;
    for (const GgufTensor &tensor : file_.tensors()) {
        std::string_view rest = tensor.name;
        if (next_field(rest) != kind) continue;
        const std::optional<int32_t> layer = number(next_field(rest));
        const std::optional<int32_t> horizon = number(next_field(rest));
        const auto group = layer ? group_of.find(*layer) : group_of.end();
        if (group == group_of.end() || !horizon || *horizon < 1 || *horizon > max_horizon) {
            return wrong(file_, "tensor " + shown(tensor.name) +
                                    " names no layer with experts, or no horizon of 1 to " +
                                    std::to_string(max_horizon) + "; the file is damaged, fit it again");
        }
        SidecarHead &head = heads[{group->second, *horizon}];
        head.group = group->second;
        head.horizon = *horizon;
        const GgufTensor **part = part_of(head, rest);
        if (part == nullptr) {
            return wrong(file_, "tensor " + shown(tensor.name) +
                                    " is no part of a head; update SPICE, or fit "
                                    "the sidecar again");
        }
        *part = &tensor;
    }
    std::vector<SidecarHead> out;
    for (const auto &[key, head] : heads) {
        const size_t target = static_cast<size_t>(head.group) + static_cast<size_t>(head.horizon);
        if (target >= routers.groups.size() ||
            routers.groups[static_cast<size_t>(head.group)].weight == nullptr ||
            routers.groups[target].weight == nullptr ||
            !fits(head, routers.groups[static_cast<size_t>(head.group)], routers.groups[target])) {
            return wrong(file_, "the " + std::string(kind) + " head of layer " +
                                    std::to_string(routers.groups[static_cast<size_t>(head.group)].layer) +
                                    ", horizon " + std::to_string(head.horizon) +
                                    " does not fit the model; the file is damaged, fit it again");
        }
        out.push_back(head);
    }
    return out;
}

} // namespace spice

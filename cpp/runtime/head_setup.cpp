#include "runtime/head_setup.h"

#include "store/fingerprint.h"
#include "store/sidecar.h"
#include "store/tensor_data.h"

#include <new>

namespace spice {

namespace {

using compute::FrozenRouters;
using compute::RouterHeads;

/// The routers that can be read; the first that cannot leaves its reason.
std::shared_ptr<FrozenRouters> read_all(const GgufModel &model, const RouterSet &set, HeadSet &out) {
    auto routers = std::make_shared<FrozenRouters>(static_cast<int32_t>(set.groups.size()));
    bool any = false;
    for (size_t g = 0; g < set.groups.size(); ++g) {
        const RouterInfo &info = set.groups[g];
        if (info.weight == nullptr) continue;
        Result<RouterData> read = read_router(model, info);
        Status status = read.status();
        if (status.ok()) {
            const RouterData &data = read.value();
            status = routers->add(static_cast<int32_t>(g), info.n_embd, info.n_expert,
                                  {.weight = data.weight,
                                   .bias = data.bias,
                                   .input_scale = data.input_scale,
                                   .input_shift = data.input_shift,
                                   .router_scale = data.router_scale,
                                   .router_shift = data.router_shift});
            if (status.ok()) out.selection_bias[g] = data.selection_bias;
        }
        any = any || status.ok();
        if (!status.ok() && out.reason.empty()) out.reason = status.message();
    }
    return any ? routers : nullptr;
}

Result<std::shared_ptr<const RouterHeads>> read_kind(const Sidecar &sidecar, std::string_view kind,
                                                     const RouterSet &set, int32_t max_horizon,
                                                     const std::shared_ptr<const FrozenRouters> &routers) {
    Result<std::vector<SidecarHead>> found = sidecar.heads(kind, set);
    if (!found.ok()) return found.status();
    if (found.value().empty()) return std::shared_ptr<const RouterHeads>();
    auto heads = std::make_shared<RouterHeads>(routers, max_horizon);
    for (const SidecarHead &head : found.value()) {
        if (head.horizon > max_horizon) continue;
        if (!heads->has(head.group, head.horizon))
            continue; // a router that could not be read: see the reason
        const GgufTensor *tensors[] = {head.full, head.a, head.b, head.present, head.previous, head.bias};
        std::vector<float> parts[std::size(tensors)];
        for (size_t p = 0; p < std::size(tensors); ++p) {
            if (tensors[p] == nullptr) continue;
            Result<std::vector<float>> values = read_floats(sidecar.file(), *tensors[p]);
            if (!values.ok()) return values.status();
            parts[p] = values.take();
        }
        const Status status = heads->set(head.group, head.horizon,
                                         {.full = parts[0],
                                          .a = parts[1],
                                          .b = parts[2],
                                          .present = parts[3],
                                          .previous = parts[4],
                                          .bias = parts[5]});
        if (!status.ok()) {
            return Status(status.code(), sidecar.file().files().front().path.string() + ": " +
                                             status.message() + "; the file is damaged, fit it again");
        }
    }
    return std::shared_ptr<const RouterHeads>(heads);
}

Status read_sidecar(const GgufModel &model, const RouterSet &set, const HeadOptions &options,
                    HeadSet &out) try {
    Result<std::string> print = fingerprint(model);
    if (!print.ok()) return print.status();
    Result<Sidecar> sidecar = Sidecar::open(options.sidecar, set, print.value());
    if (!sidecar.ok()) return sidecar.status();
    if (out.routers == nullptr) return {}; // nothing in it can be used; the reason is kept
    for (const auto &[kind, heads] : {std::pair("adapter", &out.adapter), std::pair("draft", &out.draft)}) {
        auto read = read_kind(sidecar.value(), kind, set, options.max_horizon, out.routers);
        if (!read.ok()) return read.status();
        *heads = read.take();
    }
    return {};
} catch (const std::bad_alloc &) {
    return {Code::out_of_memory, options.sidecar.string() + ": no memory for its heads"};
}

} // namespace

uint64_t HeadSet::bytes() const {
    uint64_t sum = routers == nullptr ? 0 : routers->bytes();
    for (const auto &heads : {frozen, adapter, draft}) sum += heads == nullptr ? 0 : heads->bytes();
    return sum;
}

void HeadSet::keep_only(const RouterHeads *used) {
    for (auto *heads : {&frozen, &adapter, &draft}) {
        if (heads->get() != used) heads->reset();
    }
    if (used == nullptr) routers.reset();
}

Result<HeadSet> make_heads(const GgufModel &model, const ExpertIndex &index, const HeadOptions &options) {
    HeadSet out;
    try {
        const RouterSet set = find_routers(model, index, options.expert_used);
        out.gating = set.gating;
        out.reason = set.reason;
        out.selection_bias.resize(set.groups.size());
        out.routers = read_all(model, set, out);
        if (out.routers != nullptr) {
            out.frozen = std::make_shared<RouterHeads>(out.routers, options.max_horizon);
        }
        if (options.sidecar.empty()) return out;
        if (Status status = read_sidecar(model, set, options, out); !status.ok()) {
            if (options.sidecar_required) return status;
            out.adapter = out.draft = nullptr;
            out.sidecar_problem = status.message();
        }
        return out;
    } catch (const std::bad_alloc &) {
        HeadSet none;
        none.reason = "no memory for prediction heads";
        none.gating = out.gating;
        none.selection_bias.resize(out.selection_bias.size());
        if (options.sidecar.empty()) return none;
        none.sidecar_problem = options.sidecar.string() + ": " + none.reason;
        if (options.sidecar_required) return Status(Code::out_of_memory, none.sidecar_problem);
        return none;
    }
}

} // namespace spice

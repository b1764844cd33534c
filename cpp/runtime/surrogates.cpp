#include "runtime/surrogates.h"

#include "store/align.h"
#include "store/fingerprint.h"
#include "store/gguf_reader.h"
#include "store/routers.h"
#include "store/tensor_data.h"

#include <algorithm>
#include <cmath>
#include <new>
#include <span>

namespace spice {

namespace {

constexpr uint64_t k_alignment = 64; // a cache line

uint64_t room(const GgufTensor *tensor) {
    return tensor == nullptr ? 0 : align_up(tensor->bytes, k_alignment);
}

Status not_finite(const Sidecar &sidecar, const GgufTensor &tensor) {
    return {Code::malformed, sidecar.file().files().front().path.string() + ": tensor " + shown(tensor.name) +
                                 " has numbers that are not finite, or negative ones where there can be none"
                                 "; the file is damaged, fit it again"};
}

/// Reads the part into memory at `next`, which moves on; nullptr where there is none.
Result<const std::byte *> read_part(const Sidecar &sidecar, const GgufTensor *tensor, std::byte *&next) {
    if (tensor == nullptr) return static_cast<const std::byte *>(nullptr);
    const std::span<std::byte> to(next, tensor->bytes);
    next += room(tensor);
    if (Status status = read_bytes(sidecar.file(), *tensor, to); !status.ok()) return status;
    return to.data();
}

/// Errors: malformed, where some half is infinite or no number.
Status check_halves(const Sidecar &sidecar, const GgufTensor *tensor, const uint16_t *values) {
    if (tensor == nullptr) return {};
    constexpr uint16_t exponent = 0x7c00; // all ones: infinite, or no number
    uint32_t bad = 0;                     // no early end, so that compilers use vectors
    for (const uint16_t half : std::span(values, tensor->bytes / sizeof(uint16_t))) {
        bad |= (half & exponent) == exponent ? 1 : 0;
    }
    return bad != 0 ? not_finite(sidecar, *tensor) : Status();
}

Result<std::vector<float>> read_numbers(const Sidecar &sidecar, const GgufTensor *tensor,
                                        bool may_be_negative) {
    if (tensor == nullptr) return std::vector<float>();
    Result<std::vector<float>> values = read_floats(sidecar.file(), *tensor);
    if (!values.ok()) return values;
    const auto good = [&](float v) { return std::isfinite(v) && (may_be_negative || v >= 0.0F); };
    if (!std::ranges::all_of(values.value(), good)) return not_finite(sidecar, *tensor);
    return values;
}

/// Of the neurons that are kept.
Result<compute::SurrogateActivation> activation_of(const Sidecar &sidecar) {
    using compute::SurrogateActivation;
    const std::string name = sidecar.file().get_string("spice.lore.activation").value_or("");
    if (name == "silu") return SurrogateActivation::silu;
    if (name == "gelu") return SurrogateActivation::gelu;
    if (name == "relu") return SurrogateActivation::relu;
    return Status(Code::unsupported, sidecar.file().files().front().path.string() +
                                         ": spice.lore.activation is " + shown(name) +
                                         ", which this version does not know; update SPICE, or fit it again");
}

Status read_layer(const Sidecar &sidecar, const LoreTensors &tensors, std::byte *&next, SurrogateLayer &out) {
    out.shape = tensors.shape;
    compute::SurrogateMatrices &m = out.matrices;
    m.n_in = tensors.shape.n_in;
    m.n_out = tensors.shape.n_out;
    m.rank = tensors.rank();
    m.n_gated = tensors.gated();
    if (m.n_gated > 0) {
        Result<compute::SurrogateActivation> activation = activation_of(sidecar);
        if (!activation.ok()) return activation.status();
        m.activation = activation.value();
    }
    for (const auto &[tensor, to] :
         {std::pair(tensors.a, &m.a), std::pair(tensors.b, &m.b), std::pair(tensors.gate, &m.gate)}) {
        Result<const std::byte *> part = read_part(sidecar, tensor, next);
        if (!part.ok()) return part.status();
        *to = reinterpret_cast<const int8_t *>(part.value());
    }
    Result<const std::byte *> bias = read_part(sidecar, tensors.bias, next);
    if (!bias.ok()) return bias.status();
    m.bias = reinterpret_cast<const uint16_t *>(bias.value());
    if (Status status = check_halves(sidecar, tensors.bias, m.bias); !status.ok()) return status;
    std::vector<float> output;
    std::vector<float> sensitivity;
    for (const auto &[tensor, to] :
         {std::pair(tensors.scale, &out.scale), std::pair(tensors.gate_scale, &out.gate_scale),
          std::pair(tensors.offset, &out.offset), std::pair(tensors.error, &out.error),
          std::pair(tensors.norm, &out.norm), std::pair(tensors.output, &output),
          std::pair(tensors.sensitivity, &sensitivity)}) {
        Result<std::vector<float>> values = read_numbers(sidecar, tensor, to == &out.offset);
        if (!values.ok()) return values.status();
        *to = values.take();
    }
    m.scale = out.scale.data();
    m.gate_scale = out.gate_scale.data();
    m.offset = out.offset.empty() ? nullptr : out.offset.data();
    if (out.error.empty()) out.error.assign(static_cast<size_t>(out.shape.n_expert), 1.0F);
    out.output = output.empty() ? 0.0F : output.front();
    out.sensitivity = sensitivity.empty() ? 0.0F : sensitivity.front();
    return {};
}

Result<policy::KlCurve> read_curve(const Sidecar &sidecar) {
    Result<const GgufTensor *> found = lore_curve(sidecar);
    if (!found.ok()) return found.status();
    if (found.value() == nullptr) return policy::KlCurve();
    Result<std::vector<float>> values = read_floats(sidecar.file(), *found.value());
    if (!values.ok()) return values.status();
    std::vector<policy::KlCurve::Point> points;
    for (size_t i = 0; i + 1 < values.value().size(); i += 2) {
        points.push_back({.sum = values.value()[i], .kl = values.value()[i + 1]});
    }
    if (!policy::KlCurve::valid(points)) {
        return Status(Code::malformed,
                      sidecar.file().files().front().path.string() + ": tensor " +
                          shown(found.value()->name) +
                          " does not grow from point to point; the file is damaged, fit it again");
    }
    return policy::KlCurve(std::move(points));
}

} // namespace

double SurrogateLayer::error_power(int32_t expert, float gate, compute::SurrogateKind kind) const {
    if (norm.empty() || !(output > 0.0F)) return 0.0;
    const auto e = static_cast<size_t>(expert);
    const double relative = kind == compute::SurrogateKind::full ? static_cast<double>(error[e]) : 1.0;
    return static_cast<double>(gate) * gate * relative * norm[e] / output;
}

bool SurrogateSet::calibrated() const {
    return std::ranges::any_of(layers_, &SurrogateLayer::calibrated);
}

Result<std::shared_ptr<const SurrogateSet>> SurrogateSet::load(const std::filesystem::path &path,
                                                               const GgufModel &model,
                                                               const ExpertIndex &index,
                                                               std::vector<LoreShape> groups) {
    try {
        Result<std::string> print = fingerprint(model);
        if (!print.ok()) return print.status();
        Result<Sidecar> opened = Sidecar::open(path, find_routers(model, index, 0), print.value());
        if (!opened.ok()) return opened.status();
        const Sidecar &sidecar = opened.value();
        Result<std::vector<LoreTensors>> found = lore_tensors(sidecar, groups);
        if (!found.ok()) return found.status();

        auto set = std::make_shared<SurrogateSet>();
        set->path_ = path.string();
        Result<policy::KlCurve> curve = read_curve(sidecar);
        if (!curve.ok()) return curve.status();
        set->curve_ = curve.take();
        uint64_t bytes = 0;
        for (const LoreTensors &t : found.value()) {
            for (const GgufTensor *part : {t.a, t.b, t.gate, t.bias}) bytes += room(part);
        }
        set->memory_ = Mapping(Mapping::Kind::memory, bytes);
        if (!set->memory_) throw std::bad_alloc();
        set->layers_.resize(groups.size());
        std::byte *next = set->memory_.base();
        for (const LoreTensors &tensors : found.value()) {
            const auto group = std::ranges::find(groups, tensors.shape.layer, &LoreShape::layer);
            SurrogateLayer &layer = set->layers_[static_cast<size_t>(group - groups.begin())];
            if (Status status = read_layer(sidecar, tensors, next, layer); !status.ok()) return status;
        }
        return std::shared_ptr<const SurrogateSet>(std::move(set));
    } catch (const std::bad_alloc &) {
        return Status(Code::out_of_memory, path.string() + ": no memory for its stand-ins of experts; load "
                                                           "the model without lore");
    }
}

int32_t SurrogateSet::n_layers() const {
    return static_cast<int32_t>(std::ranges::count_if(layers_, &SurrogateLayer::any));
}

int64_t SurrogateSet::rank() const {
    int64_t rank = 0;
    for (const SurrogateLayer &layer : layers_) rank = std::max(rank, layer.matrices.rank);
    return rank;
}

} // namespace spice

// An Engine with a device tier on the emulated accelerator, for tests: makes layer calls as the backend does
// and compares what is on the device with the file.
#pragma once

#include "check.h"
#include "emulated_device.h"
#include "gguf_builder.h"

#include "runtime/device_call.h"
#include "runtime/device_tier.h"
#include "runtime/engine.h"
#include "runtime/layer_call.h"

#include <cstring>
#include <functional>
#include <memory>
#include <string>
#include <thread>
#include <vector>

namespace test {

struct DeviceFixture {
    TempDir dir{true};
    std::string bytes;
    std::shared_ptr<spice::Engine> engine;

    explicit DeviceFixture(const spice_emulator_settings &settings = no_costs,
                           const std::string &model = good_model().bytes(),
                           const spice::PrefetchOptions &prefetch = {})
        : bytes(model) {
        set_up_devices(settings, 2);
        auto opened =
            spice::Engine::open(dir.write("m.gguf", bytes),
                                {.io_threads = 2, .direct_io = false, .prefetch = prefetch, .ops = nullptr});
        CHECK_EQ(opened.status().message(), "");
        engine = opened.take();
    }

    [[nodiscard]] spice::Status build(double ram, double vram, const std::string &placement) const {
        const auto everything = static_cast<double>(engine->plan().everything);
        if (auto status = engine->build_pool(static_cast<uint64_t>(ram * everything)); !status.ok())
            return status;
        const spice::DevicePlan needs = spice::DeviceTier::needs(*engine, spice::DeviceTier::find_device());
        return engine->build_device_pool(spice::DeviceTier::find_device(), {},
                                         static_cast<uint64_t>(vram * static_cast<double>(needs.everything)),
                                         placement);
    }

    [[nodiscard]] spice::DeviceTier &tier() const { return *engine->devices().front(); }

    /// Compares an expert's slot on the device with the file, part by part, behind the uploads.
    [[nodiscard]] bool right(ggml_backend_t stream, int32_t group, const spice::DeviceExpert &it) const {
        for (const char *part : {"gate", "up", "down"}) {
            const std::string name = "blk." + std::to_string(group) + ".ffn_" + part + "_exps.weight";
            const spice::ExpertTensor &tensor = *engine->find(name);
            const uint64_t stride = tensor.info->stride;
            std::string there(stride, '\0');
            ggml_backend_tensor_get_async(stream, engine->device(group)->slot_tensor(tensor), there.data(),
                                          static_cast<uint64_t>(it.slot) * stride, stride);
            ggml_backend_synchronize(stream);
            const char *file = bytes.data() + tensor.info->offset + static_cast<uint64_t>(it.expert) * stride;
            if (std::memcmp(there.data(), file, stride) != 0) return false;
        }
        return true;
    }

    /// Calls with these experts until they are on the device, every copy ended.
    void bring(ggml_backend_t stream, int32_t group, const std::vector<int32_t> &ids) const {
        for (int i = 0; i < 3; ++i) CHECK(call(stream, group, ids));
        for (;;) {
            const spice::DeviceCounters c = tier().counters();
            if (c.link.uploads == c.fetched + c.filled + c.prefetched) return;
            std::this_thread::yield();
        }
    }

    /// How long a layer call says that it took.
    using Times = spice::DeviceCall::Times;

    /// One layer call, as the backend makes it; `rows` > 0: of so many tokens, and predicted from.
    [[nodiscard]] bool call(
        ggml_backend_t stream, int32_t group, const std::vector<int32_t> &ids, int64_t rows = 0,
        const std::function<Times()> &times = [] {
            return Times{.host = 1e-5, .device = 1e-5, .waited = 0.0};
        }) const {
        spice::DeviceTier &tier = *engine->device(group);
        spice::DeviceCall device;
        device.begin(tier, group, ids);
        std::vector<int32_t> left = ids;
        std::erase_if(left, [&](int32_t id) { return device.takes(id); });
        spice::LayerCall host;
        if (!host.begin(*engine, group, left).ok()) return false;
        if (rows > 0) engine->predict(group, spice::RouterInput{.n_tokens = rows}, ids);
        bool ok = true;
        for (const spice::DeviceExpert &it : device.resident()) ok = right(stream, group, it) && ok;
        std::vector<ggml_backend_event_ptr> events(device.n_chunks()); // for those that others wait for
        for (size_t c = 0; c < device.n_chunks(); ++c) {
            const auto before = device.waits_for(c);
            ggml_backend_event_t done = before ? events[*before].get() : nullptr;
            if (before && done == nullptr) ggml_backend_synchronize(stream);
            tier.order(stream, device.send(c, done));
            for (const spice::DeviceExpert &it : device.chunk(c)) ok = right(stream, group, it) && ok;
            if (!device.is_waited_for(c)) continue;
            events[c].reset(ggml_backend_event_new(tier.device()));
            if (events[c] != nullptr) ggml_backend_event_record(events[c].get(), stream);
        }
        for (size_t part = 0; part < 3; ++part) {
            for (;;) {
                auto wave = host.next_wave(part);
                if (!wave.ok()) return false;
                if (wave.value().empty()) break;
                host.wave_done(wave.value());
            }
        }
        device.ended(times());
        return ok;
    }
};

inline ggml_backend_ptr new_stream() {
    return ggml_backend_ptr(ggml_backend_dev_init(spice::DeviceTier::find_device(), nullptr));
}

} // namespace test

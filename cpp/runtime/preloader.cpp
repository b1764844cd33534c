#include "runtime/preloader.h"

#include "runtime/device_tier.h"
#include "runtime/engine.h"

#include <mutex>
#include <utility>

namespace spice {

Preloader::Preloader(Engine &engine, std::vector<policy::SlabId> wanted)
    : engine_(engine), wanted_(std::move(wanted)), thread_([this] { run(); }) {}

Preloader::~Preloader() {
    stop_ = true;
    engine_.arrivals_.note();
    thread_.join();
}

void Preloader::run() {
    for (;;) {
        const uint32_t seen = engine_.arrivals_.count();
        {
            const std::lock_guard lock(engine_.mutex_);
            if (!step()) return;
        }
        for (const auto &device : engine_.devices()) device->pump();
        engine_.arrivals_.wait_past(seen);
    }
}

bool Preloader::step() {
    std::erase_if(reading_, [&](policy::SlabId id) {
        const Engine::Group &group = engine_.groups_[static_cast<size_t>(id.group)];
        Slab &slab = group.slabs[static_cast<size_t>(id.expert)];
        if (slab.busy(group.parts.size())) return false;
        if (std::exchange(slab.ahead, false))
            engine_.counters_.preloaded += 1; // no layer call has claimed it
        if (DeviceTier *device = engine_.device(id.group)) device->want(id.group, id.expert);
        return true;
    });
    if (stop_ || engine_.in_use_) {
        for (const policy::SlabId id : reading_) {
            engine_.withdraw(engine_.groups_[static_cast<size_t>(id.group)], id.expert);
        }
        return false;
    }
    const auto nothing = [](policy::SlabId) { return false; };
    for (; next_ < wanted_.size() && reading_.size() < in_flight; ++next_) {
        const policy::SlabId id = wanted_[next_];
        if (engine_.prefetch(engine_.groups_[static_cast<size_t>(id.group)], id.expert, nothing)) {
            reading_.push_back(id);
        }
    }
    return !reading_.empty();
}

} // namespace spice

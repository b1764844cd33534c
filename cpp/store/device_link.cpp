#include "store/device_link.h"

#include "store/clock.h"

#include <algorithm>

namespace spice {

std::unique_ptr<DeviceLink> DeviceLink::make(ggml_backend_dev_t device, Done done) {
    std::unique_ptr<DeviceLink> link(new DeviceLink);
    link->device_ = device;
    link->done_ = std::move(done);
    link->stream_.reset(ggml_backend_dev_init(device, nullptr));
    if (link->stream_ == nullptr) return nullptr;
    ggml_backend_dev_props properties = {};
    ggml_backend_dev_get_props(device, &properties);
    link->has_events_ = properties.caps.async && properties.caps.events && link->new_event() != nullptr;
    if (link->has_events_) link->thread_ = std::thread([it = link.get()] { it->run(); });
    return link;
}

DeviceLink::~DeviceLink() {
    finish();
}

void DeviceLink::finish() {
    {
        const std::lock_guard lock(mutex_);
        stop_ = true;
    }
    changed_.notify_all();
    if (thread_.joinable()) thread_.join();
}

std::shared_ptr<ggml_backend_event> DeviceLink::new_event() {
    {
        const std::lock_guard lock(mutex_);
        if (!spare_.empty()) {
            auto event = std::move(spare_.back());
            spare_.pop_back();
            return event;
        }
    }
    ggml_backend_event_t event = ggml_backend_event_new(device_);
    return event == nullptr ? nullptr : std::shared_ptr<ggml_backend_event>(event, ggml_backend_event_free);
}

DeviceLink::Ticket DeviceLink::submit(std::span<const UploadPart> parts, ggml_backend_event_t after,
                                      const std::function<void(Ticket)> &named) {
    Flight flight;
    Ticket ticket = 0;
    {
        const std::lock_guard in_order(submit_mutex_);
        flight.ticket = ticket = ++last_;
        named(ticket);
        flight.since = steady_now();
        if (after != nullptr) ggml_backend_event_wait(stream_.get(), after);
        for (const UploadPart &part : parts) {
            flight.bytes += part.bytes;
            ggml_backend_tensor_set_async(stream_.get(), part.to, part.from, part.offset, part.bytes);
        }
        if (has_events_) flight.event = new_event();
        if (flight.event != nullptr) {
            ggml_backend_event_record(flight.event.get(), stream_.get());
            {
                const std::lock_guard lock(mutex_);
                flights_.push_back(std::move(flight));
            }
            changed_.notify_all();
            return ticket;
        }
        ggml_backend_synchronize(stream_.get());
    }
    // Without our lock: `done` may submit the next one.
    const double ended = steady_now();
    {
        const std::lock_guard lock(mutex_);
        counters_.uploads += 1;
        counters_.bytes += flight.bytes;
        counters_.busy_seconds += ended - flight.since;
    }
    done_(ticket, flight.since, ended);
    return ticket;
}

void DeviceLink::order(ggml_backend_t stream, Ticket ticket) {
    const std::lock_guard in_order(submit_mutex_); // a ticket is given before its event is there
    std::shared_ptr<ggml_backend_event> event;
    {
        const std::lock_guard lock(mutex_);
        const auto flight = std::ranges::find(flights_, ticket, &Flight::ticket);
        if (flight == flights_.end()) return; // it has ended
        event = flight->event;
    }
    ggml_backend_event_wait(stream, event.get());
}

void DeviceLink::run() {
    std::unique_lock lock(mutex_);
    for (;;) {
        changed_.wait(lock, [&] { return stop_ || !flights_.empty(); });
        if (flights_.empty()) return;
        const Flight flight = flights_.front(); // stays there until it has ended, for order()
        lock.unlock();
        ggml_backend_event_synchronize(flight.event.get());
        const double ended = steady_now();
        const double begun = std::max(flight.since, free_since_);
        free_since_ = ended;
        lock.lock();
        auto event = std::move(flights_.front().event);
        flights_.pop_front();
        counters_.uploads += 1;
        counters_.bytes += flight.bytes;
        counters_.busy_seconds += ended - begun;
        if (event.use_count() == 2) spare_.push_back(std::move(event)); // else order() has it in hand
        lock.unlock();
        done_(flight.ticket, begun, ended);
        lock.lock();
    }
}

LinkCounters DeviceLink::counters() const {
    const std::lock_guard lock(mutex_);
    return counters_;
}

void DeviceLink::reset_counters() {
    const std::lock_guard lock(mutex_);
    counters_ = {};
}

} // namespace spice

// Where each expert of one layer call is computed: the contract of the placement strategies, and their
// factory.
//
// Who calls: the runtime's device tier and sim/, once per layer call, after the routing is known. The caller
// measures every duration (decayed averages; sim/ takes them from its hardware description); a strategy knows
// neither a clock nor a device.
//
// Thread: one at a time per object. Nothing blocks, no I/O, no random numbers. Memory is allocated only when
// a call is larger than any before it. Errors: none; spans of unequal length are bugs of the caller (assert).
//
// Cost: about 1 microsecond for a decoded token, at most about 30 for a prompt (64 experts).
#pragma once

#include <cstdint>
#include <limits>
#include <memory>
#include <span>
#include <string_view>
#include <vector>

namespace spice::policy {

enum class Place : uint8_t {
    device,    ///< it is in the device's pool, or on the link to it: compute it there
    fetch,     ///< send it to the device's pool now, ahead of every prefetch, and compute it there
    host,      ///< compute it on the host from its copy in memory
    host_fill, ///< the same, and send it to the pool as a prefetch, for later tokens
};

/// Seconds that one expert takes on an engine: fixed + per_row * rows.
struct ExpertCost {
    double fixed = 0.0;
    double per_row = 0.0;
    [[nodiscard]] double at(int32_t rows) const { return fixed + per_row * static_cast<double>(rows); }
};

/// What the machine does with the experts of this layer, in seconds and bytes per second.
struct PlacementCosts {
    ExpertCost device;         ///< one expert on the device, without the transfer
    ExpertCost host;           ///< one expert on the host, all its threads together
    double device_call = 0.0;  ///< once per launch on the device, see finish_time()
    double host_call = 0.0;    ///< once per call that computes anything on the host: 2 H rows / B, and waits
    double link_latency = 0.0; ///< of one slab's transfer
    double link_bandwidth = 1e9; ///< bytes per second from host to device

    [[nodiscard]] double transfer(uint64_t slab_bytes) const {
        return link_latency + static_cast<double>(slab_bytes) / link_bandwidth;
    }
};

/// One layer call. The spans are parallel; each expert occurs once. Times count from now, in seconds.
struct PlacementCall {
    static constexpr double absent = std::numeric_limits<double>::infinity();

    std::span<const int32_t> rows;       ///< tokens that use the expert, 1 or more
    std::span<const double> on_device;   ///< 0: in the pool; > 0: its transfer ends then; absent: neither
    std::span<const double> in_memory{}; ///< when the host has a copy (0: now); empty: it has all of them
    uint64_t slab_bytes = 0;
    double link_queued = 0.0;     ///< until the link is free for the first fetch
    double prefetch_queued = 0.0; ///< transfers of low priority that wait for the link

    [[nodiscard]] double memory_at(size_t i) const { return in_memory.empty() ? 0.0 : in_memory[i]; }
};

class Placement {
  public:
    Placement() = default;
    Placement(const Placement &) = delete;
    Placement &operator=(const Placement &) = delete;
    virtual ~Placement() = default;

    /// The name that make_placement() knows it by.
    [[nodiscard]] virtual std::string_view name() const = 0;

    /// Whether the runtime sends experts to the pool ahead of their layers on predictions (load_ahead.h). Of
    /// the strategies to compare with, none does; what theirs load ahead in the simulator is in their
    /// strategy_*.cpp.
    [[nodiscard]] virtual bool loads_ahead() const { return false; }

    /// Fills `places`, one for each expert of the call. Place::device is given only to experts that are not
    /// absent from the device; Place::fetch and host_fill only to absent ones.
    virtual void place(const PlacementCall &call, const PlacementCosts &costs, std::span<Place> places) = 0;
};

/// The fetched experts (numbers within the call) in the order in which they should take the link: by the time
/// their copy is in memory, then most rows first. For copies that are all there this is Johnson's rule (1954)
/// for two machines in a row, link and device, where every job takes the first one equally long: optimal.
void fetch_order(const PlacementCall &call, std::span<const Place> places, std::vector<int32_t> &order);

/// The experts that the host computes, in the same order.
void host_order(const PlacementCall &call, std::span<const Place> places, std::vector<int32_t> &order);

/// How many of n fetched experts one launch computes: as many as make their transfer a few times as long as
/// the launch. At least 1.
[[nodiscard]] int32_t fetches_per_launch(const PlacementCosts &costs, uint64_t slab_bytes, int32_t n);

/// When the call is done. The device computes in launches, one behind the other: what it has; what is on its
/// way, when the last of it is there; then what is fetched, in fetch_order(), fetches_per_launch() at a time.
/// The host computes its own one after the other meanwhile, most rows first. `order` is scratch.
[[nodiscard]] double finish_time(const PlacementCall &call, const PlacementCosts &costs,
                                 std::span<const Place> places, std::vector<int32_t> &order);

/// The strategy of that name, or nullptr for a name not in placement_names().
[[nodiscard]] std::unique_ptr<Placement> make_placement(std::string_view name);

/// The known names; the default first.
[[nodiscard]] std::span<const std::string_view> placement_names();

} // namespace spice::policy

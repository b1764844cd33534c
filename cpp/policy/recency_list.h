// Resident slabs in an order of arrival: a doubly linked list over the flat numbers of all slabs. Every
// operation takes constant time, memory is allocated once.
//
// Used inside the strategies of policy/; thread and errors as in eviction.h.
#pragma once

#include "policy/eviction.h"

#include <cassert>
#include <vector>

namespace spice::policy {

class RecencyList {
  public:
    explicit RecencyList(const PoolShape &shape)
        : n_experts_(shape.n_experts), end_(shape.n_groups * shape.n_experts),
          links_(static_cast<size_t>(end_) + 1) {
        links_.back() = {end_, end_};
    }

    [[nodiscard]] bool contains(SlabId id) const { return at(flat(id)).next != absent; }

    void push_newest(SlabId id) {
        assert(!contains(id));
        insert_before_end(flat(id));
    }

    void erase(SlabId id) {
        assert(contains(id));
        unlink(flat(id));
        at(flat(id)) = {};
    }

    void make_newest(SlabId id) {
        unlink(flat(id));
        insert_before_end(flat(id));
    }

    /// The first from the oldest on that `accept` takes.
    template <class Accept>
    [[nodiscard]] std::optional<SlabId> oldest(const Accept &accept) const {
        for (int32_t i = at(end_).next; i != end_; i = at(i).next) {
            const SlabId id{i / n_experts_, i % n_experts_};
            if (accept(id)) return id;
        }
        return std::nullopt;
    }

  private:
    static constexpr int32_t absent = -1;
    struct Link {
        int32_t previous = absent; ///< older
        int32_t next = absent;     ///< newer
    };
    [[nodiscard]] int32_t flat(SlabId id) const {
        assert(id.group >= 0 && id.expert >= 0 && id.expert < n_experts_);
        return id.group * n_experts_ + id.expert;
    }
    [[nodiscard]] Link &at(int32_t i) { return links_[static_cast<size_t>(i)]; }
    [[nodiscard]] const Link &at(int32_t i) const { return links_[static_cast<size_t>(i)]; }
    void unlink(int32_t i) {
        const Link link = at(i);
        at(link.previous).next = link.next;
        at(link.next).previous = link.previous;
    }
    void insert_before_end(int32_t i) {
        const int32_t last = at(end_).previous;
        at(i) = {last, end_};
        at(last).next = i;
        at(end_).previous = i;
    }

    int32_t n_experts_;
    int32_t end_;             ///< the list's ring closes here
    std::vector<Link> links_; ///< by flat number, and one for the end
};

} // namespace spice::policy

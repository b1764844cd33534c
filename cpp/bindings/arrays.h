// NumPy arrays and lists of names, as the bindings take and give them. Thread: holds the GIL.
#pragma once

#include <pybind11/numpy.h>
#include <pybind11/pybind11.h>

#include <cstddef>
#include <span>
#include <string_view>

namespace spice {

/// An argument that is converted to T and made contiguous where it is not.
template <class T>
using Array = pybind11::array_t<T, pybind11::array::c_style | pybind11::array::forcecast>;

template <class T>
std::span<const T> view(const Array<T> &array) {
    return {array.data(), static_cast<size_t>(array.size())};
}

inline pybind11::list to_list(std::span<const std::string_view> names) {
    pybind11::list out;
    for (const std::string_view name : names) out.append(pybind11::str(name.data(), name.size()));
    return out;
}

} // namespace spice

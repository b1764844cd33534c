// A failed Status as the SpiceError subclass of its code. Thread: holds the GIL.
#pragma once

#include "store/status.h"

#include <pybind11/pybind11.h>

#include <string>

namespace spice {

/// Throws py::error_already_set unless the status is ok.
inline void raise_if(const Status &status) {
    namespace py = pybind11;
    if (status.ok()) return;
    // The message may quote a damaged file, so it need not be UTF-8.
    const std::string &text = status.message();
    const auto message = py::reinterpret_steal<py::object>(
        PyUnicode_DecodeUTF8(text.data(), static_cast<Py_ssize_t>(text.size()), "replace"));
    py::object error = py::module_::import("spice_moe.errors")
                           .attr("from_code")(static_cast<int32_t>(status.code()), message);
    PyErr_SetObject(reinterpret_cast<PyObject *>(Py_TYPE(error.ptr())), error.ptr());
    throw py::error_already_set();
}

} // namespace spice

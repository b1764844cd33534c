// The device tier's part of the Python module: functions that module.cpp binds to Model. Thread: with the
// GIL.
#pragma once

#include "runtime/engine.h"

#include <pybind11/pybind11.h>

#include <string>

void bind_device(pybind11::module_ &m);
[[nodiscard]] pybind11::dict device_needs(const spice::Engine &engine);
[[nodiscard]] spice::Status build_device_pool(spice::Engine &engine, uint64_t budget,
                                              const std::string &placement);
[[nodiscard]] pybind11::dict device_pool(const spice::Engine &engine);
/// As Engine::build_pool, in memory that the device copies from at full speed, up to `pinned_limit` bytes.
[[nodiscard]] spice::Status build_pool(spice::Engine &engine, uint64_t budget, uint64_t pinned_limit);
void forget_device(spice::Engine &engine);
void add_device_stats(const spice::Engine &engine, pybind11::dict &out);
void reset_device_stats(spice::Engine &engine);

// The device tier's part of the Python module: functions that module.cpp binds to Model. Thread: with the
// GIL.
#pragma once

#include "runtime/engine.h"

#include <pybind11/pybind11.h>

#include <string>
#include <vector>

void bind_device(pybind11::module_ &m);
/// What a pool for these layers (all, if none are named) would need on the device of that name, or on the
/// first GPU for "". Where there is none, "device" is "".
[[nodiscard]] pybind11::dict device_needs(const spice::Engine &engine, const std::string &device,
                                          const std::vector<int32_t> &layers);
[[nodiscard]] spice::Status build_device_pool(spice::Engine &engine, const std::string &device,
                                              const std::vector<int32_t> &layers, uint64_t budget,
                                              const std::string &placement, int32_t n_threads);
/// What the pools got, in the order in which they were made.
[[nodiscard]] pybind11::list device_pools(const spice::Engine &engine);
/// As Engine::build_pool, in memory that the device copies from at full speed, up to `pinned_limit` bytes.
[[nodiscard]] spice::Status build_pool(spice::Engine &engine, uint64_t budget, const std::string &device,
                                       uint64_t pinned_limit);
void forget_devices(spice::Engine &engine);
void add_device_stats(const spice::Engine &engine, pybind11::dict &out);
void reset_device_stats(spice::Engine &engine);

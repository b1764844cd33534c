// What spice_moe._core.Model offers of low-rank stand-ins for experts, as functions of its Engine.
#pragma once

#include "runtime/engine.h"

#include <pybind11/pybind11.h>

#include <string>

/// `kind`: "drop", "base", "lore" or "off".
void set_substitution(spice::Engine &engine, const std::string &kind, double share, uint64_t seed,
                      int32_t layer, double max_share);
/// Lets stand-ins replace missed experts by the rules (policy/substitution.h).
void use_lore(spice::Engine &engine, float max_share, float max_mass, float max_confidence, double budget,
              bool prompts);
/// What is loaded; None: nothing.
[[nodiscard]] pybind11::object lore_plan(const spice::Engine &engine);
void add_lore_stats(const spice::Engine &engine, pybind11::dict &out);
void reset_lore_stats(const spice::Engine &engine);

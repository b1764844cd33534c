#include "emulator/backend.h"

#include <cstring>
#include <string>

using namespace spice::emulator;

int spice_emulator_register(int n_devices) {
    return register_devices(n_devices) ? 0 : -1;
}

int spice_emulator_configure(int index, const spice_emulator_settings *settings) {
    Device *it = device(index);
    if (it == nullptr || settings == nullptr || settings->memory_bytes == 0 || settings->threads < 1 ||
        settings->upload_per_second < 0.0 || settings->download_per_second < 0.0 ||
        settings->copy_latency_seconds < 0.0 || settings->launch_seconds < 0.0 ||
        settings->pageable_speed <= 0.0 || settings->pageable_speed > 1.0 ||
        settings->compute_slowdown < 1.0 || settings->expert_bytes_per_second < 0.0) {
        return -1;
    }
    it->configure(*settings);
    return 0;
}

int spice_emulator_fail(int index, int what, uint64_t nth) {
    Device *it = device(index);
    if (it == nullptr || what < SPICE_EMULATOR_FAIL_ALLOCATION || what > SPICE_EMULATOR_FAIL_EVENT) return -1;
    it->fail(static_cast<Failure>(what), nth);
    return 0;
}

int spice_emulator_read_counters(int index, spice_emulator_counters *counters) {
    Device *it = device(index);
    if (it == nullptr || counters == nullptr) return -1;
    *counters = it->counters();
    return 0;
}

int spice_emulator_reset_counters(int index) {
    Device *it = device(index);
    if (it == nullptr) return -1;
    it->reset_counters();
    return 0;
}

const char *spice_emulator_misuse(int index) {
    static thread_local std::string text;
    Device *it = device(index);
    text = it == nullptr ? "no such device" : it->misuse();
    return text.c_str();
}

// An emulated accelerator: a ggml backend whose memory the host cannot touch, for tests and benchmarks.
//
// It behaves like a discrete GPU to everyone who uses ggml's device interface: buffers are addresses without
// memory behind them (a host access faults), each backend instance is a stream with its own thread, copies
// and graphs are asynchronous and ordered within a stream only, and one link per direction is shared by all
// streams. The arithmetic is ggml-cpu's on the real bytes, so results are the CPU's to the last bit. What a
// copy will overwrite holds NaN until the copy ends, and its source is read at the end: whoever does not wait
// is seen.
//
// Its processors are the host's, so the time that its arithmetic takes says nothing about a device, and is
// taken from the host's. For benchmarks `expert_bytes_per_second` leaves the products by experts out: they
// are zero and take the time that a device of that speed needs, asleep. What routing reads must not depend on
// them then.
//
// This is the C interface of the shared library (ctypes, tests). Register once per process; devices stay.
// Thread: any. configure() holds for what is queued after it.
#pragma once

#include <stdint.h>

#ifdef __cplusplus
#define SPICE_EMULATOR_API extern "C" __attribute__((visibility("default")))
#else
#define SPICE_EMULATOR_API
#endif

typedef struct spice_emulator_settings {
    uint64_t memory_bytes;       /* device memory; allocations beyond it fail */
    uint64_t pinned_bytes;       /* host buffers beyond it fall back to ordinary memory */
    double upload_per_second;    /* bytes per second, host to device; 0: no limit */
    double download_per_second;  /* device to host */
    double copy_latency_seconds; /* of every copy */
    double pageable_speed;   /* share of the link's speed from and to memory that is not pinned, up to 1 */
    double compute_slowdown; /* 1: as fast as ggml-cpu; 3: three times its time */
    double launch_seconds;   /* added to every graph */
    /* 0: products by experts are computed. Else they are not: a graph takes launch_seconds and the bytes of
       the experts' weights at this speed, or as long as computing the rest of it takes (late_seconds) if that
       is more. Queued copies of quantised weights of several experts take their time, and leave nothing; who
       waits for the device spins. */
    double expert_bytes_per_second;
    int32_t threads; /* of ggml-cpu, for each stream */
} spice_emulator_settings;

typedef struct spice_emulator_counters {
    uint64_t upload_bytes, uploads;
    uint64_t pinned_upload_bytes; /* of upload_bytes, those from pinned memory */
    uint64_t download_bytes, downloads;
    uint64_t graphs, nodes;
    uint64_t matmul_id_nodes; /* of nodes, products by experts */
    double upload_busy_seconds, download_busy_seconds, compute_busy_seconds;
    double late_seconds; /* by which graphs took longer than the device would have */
    uint64_t memory_used, memory_peak, pinned_used;
} spice_emulator_counters;

enum {
    SPICE_EMULATOR_FAIL_ALLOCATION = 0, /* the allocation returns NULL */
    SPICE_EMULATOR_FAIL_COPY = 1,    /* of queued uploads of 4 KiB or more: the bytes stay NaN, and the next
                                        graph on the device fails */
    SPICE_EMULATOR_FAIL_COMPUTE = 2, /* the graph returns GGML_STATUS_FAILED */
    SPICE_EMULATOR_FAIL_EVENT = 3,   /* the new event is NULL */
};

/* Registers `n_devices` (1 to 4) devices EMU0.. of type GPU with ggml. 0, or -1: bad number, or done before.
 */
SPICE_EMULATOR_API int spice_emulator_register(int n_devices);
/* 0, or -1: no such device, or a number that makes no sense. */
SPICE_EMULATOR_API int spice_emulator_configure(int device, const spice_emulator_settings *settings);
/* The nth operation of that kind from now on fails, once (1 is the next one; 0 takes it back). */
SPICE_EMULATOR_API int spice_emulator_fail(int device, int what, uint64_t nth);
SPICE_EMULATOR_API int spice_emulator_read_counters(int device, spice_emulator_counters *counters);
SPICE_EMULATOR_API int spice_emulator_reset_counters(int device);
/* What a graph did since the last reset that no device could do (host memory as a source), or "". Valid until
 * the next such call. */
SPICE_EMULATOR_API const char *spice_emulator_misuse(int device);

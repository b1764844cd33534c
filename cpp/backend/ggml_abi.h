// The part of ggml's plug-in interface that the installed headers do not declare, in our own words.
//
// ggml calls a backend through five tables of function pointers. The wheel of llama-cpp-python installs the
// opaque types (ggml-backend.h) but not the tables, so their layout is declared here, for backend API
// version 2 as of ggml 0.25.3. Order, number and signatures of the members are the contract; names are ours.
// The binding refuses to register unless ggml_version() and the API version that the CPU backend reports are
// the ones below (see plugin.h): a changed layout would otherwise be called through silently.
//
// Members marked "may be null" are optional for ggml.
#pragma once

#include "ggml-backend.h"
#include "ggml.h"

#include <cstddef>
#include <cstdint>

namespace spice::abi {

inline constexpr int api_version = 2;

struct BufferTypeTable {
    const char *(*name)(ggml_backend_buffer_type_t);
    ggml_backend_buffer_t (*allocate)(ggml_backend_buffer_type_t, size_t bytes);
    size_t (*alignment)(ggml_backend_buffer_type_t);
    size_t (*max_bytes)(ggml_backend_buffer_type_t);                         // may be null: no limit
    size_t (*tensor_bytes)(ggml_backend_buffer_type_t, const ggml_tensor *); // may be null: ggml_nbytes
    bool (*is_host)(ggml_backend_buffer_type_t);                             // may be null: no
};

struct BufferTable {
    void (*free)(ggml_backend_buffer_t); // may be null
    void *(*base)(ggml_backend_buffer_t);
    ggml_status (*init_tensor)(ggml_backend_buffer_t, ggml_tensor *); // may be null
    void (*fill)(ggml_backend_buffer_t, ggml_tensor *, uint8_t value, size_t offset, size_t bytes);
    void (*write)(ggml_backend_buffer_t, ggml_tensor *, const void *from, size_t offset, size_t bytes);
    void (*read)(ggml_backend_buffer_t, const ggml_tensor *, void *to, size_t offset, size_t bytes);
    void (*write_2d)(ggml_backend_buffer_t, ggml_tensor *, const void *from, size_t offset, size_t bytes,
                     size_t copies, size_t stride_tensor, size_t stride_data); // may be null
    void (*read_2d)(ggml_backend_buffer_t, const ggml_tensor *, void *to, size_t offset, size_t bytes,
                    size_t copies, size_t stride_tensor, size_t stride_data);           // may be null
    bool (*copy_from)(ggml_backend_buffer_t, const ggml_tensor *from, ggml_tensor *to); // may be null
    void (*clear)(ggml_backend_buffer_t, uint8_t value);
    void (*reset)(ggml_backend_buffer_t); // may be null
};

struct StreamTable {
    const char *(*name)(ggml_backend_t);
    void (*free)(ggml_backend_t);
    // Asynchronous copies: all may be null (then ggml copies synchronously through the buffers).
    void (*write_async)(ggml_backend_t, ggml_tensor *, const void *, size_t offset, size_t bytes);
    void (*read_async)(ggml_backend_t, const ggml_tensor *, void *, size_t offset, size_t bytes);
    void (*write_2d_async)(ggml_backend_t, ggml_tensor *, const void *, size_t, size_t, size_t, size_t,
                           size_t);
    void (*read_2d_async)(ggml_backend_t, const ggml_tensor *, void *, size_t, size_t, size_t, size_t,
                          size_t);
    bool (*copy_async)(ggml_backend_t from, ggml_backend_t to, const ggml_tensor *, ggml_tensor *);
    void (*synchronize)(ggml_backend_t); // may be null when nothing is asynchronous
    // Reusable plans: ggml does not call them; null.
    ggml_backend_graph_plan_t (*plan_create)(ggml_backend_t, const ggml_cgraph *);
    void (*plan_free)(ggml_backend_t, ggml_backend_graph_plan_t);
    void (*plan_update)(ggml_backend_t, ggml_backend_graph_plan_t, const ggml_cgraph *);
    ggml_status (*plan_compute)(ggml_backend_t, ggml_backend_graph_plan_t);
    ggml_status (*compute)(ggml_backend_t, ggml_cgraph *);
    void (*event_record)(ggml_backend_t, ggml_backend_event_t);    // may be null
    void (*event_wait)(ggml_backend_t, ggml_backend_event_t);      // may be null
    void (*optimize)(ggml_backend_t, ggml_cgraph *, void *params); // may be null
};

struct DeviceTable {
    const char *(*name)(ggml_backend_dev_t);
    const char *(*description)(ggml_backend_dev_t);
    void (*memory)(ggml_backend_dev_t, size_t *free, size_t *total);
    enum ggml_backend_dev_type (*type)(ggml_backend_dev_t);
    void (*properties)(ggml_backend_dev_t, ggml_backend_dev_props *);
    ggml_backend_t (*make_backend)(ggml_backend_dev_t, const char *parameters);
    ggml_backend_buffer_type_t (*buffer_type)(ggml_backend_dev_t);
    ggml_backend_buffer_type_t (*host_buffer_type)(ggml_backend_dev_t); // may be null
    ggml_backend_buffer_t (*buffer_from_pointer)(ggml_backend_dev_t, void *, size_t bytes,
                                                 size_t max_tensor_bytes); // may be null
    bool (*supports_op)(ggml_backend_dev_t, const ggml_tensor *);
    bool (*supports_buffer_type)(ggml_backend_dev_t, ggml_backend_buffer_type_t);
    bool (*wants_offload)(ggml_backend_dev_t, const ggml_tensor *);      // may be null
    ggml_backend_event_t (*event_new)(ggml_backend_dev_t);               // may be null
    void (*event_free)(ggml_backend_dev_t, ggml_backend_event_t);        // may be null
    void (*event_synchronize)(ggml_backend_dev_t, ggml_backend_event_t); // may be null
};

struct RegistrationTable {
    const char *(*name)(ggml_backend_reg_t);
    size_t (*device_count)(ggml_backend_reg_t);
    ggml_backend_dev_t (*device)(ggml_backend_reg_t, size_t index);
    void *(*procedure)(ggml_backend_reg_t, const char *name); // may be null
};

} // namespace spice::abi

// The objects behind ggml's opaque handles.

struct ggml_backend_buffer_type {
    spice::abi::BufferTypeTable table;
    ggml_backend_dev_t device;
    void *context;
};

struct ggml_backend_buffer {
    spice::abi::BufferTable table;
    ggml_backend_buffer_type_t type;
    void *context;
    size_t bytes;
    enum ggml_backend_buffer_usage usage;
};

struct ggml_backend {
    ggml_guid_t guid;
    spice::abi::StreamTable table;
    ggml_backend_dev_t device;
    void *context;
};

struct ggml_backend_event {
    ggml_backend_dev_t device;
    void *context;
};

struct ggml_backend_device {
    spice::abi::DeviceTable table;
    ggml_backend_reg_t registration;
    void *context;
};

struct ggml_backend_reg {
    int api_version; // must stay the first member: plugin.cpp reads it from other backends
    spice::abi::RegistrationTable table;
    void *context;
};

extern "C" {
// Exported by libggml-base, declared in no installed header. Takes ownership of nothing.
GGML_API ggml_backend_buffer_t ggml_backend_buffer_init(ggml_backend_buffer_type_t type,
                                                        struct spice::abi::BufferTable table, void *context,
                                                        size_t bytes);
}

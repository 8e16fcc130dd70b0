/*
 * gdrapi.h: CPU mappings of GPU memory. Warpwire's header for its libgdrapi.so.2, source and binary
 * compatible with gdrcopy 2.6.
 *
 * SPDX-License-Identifier: MIT OR Apache-2.0
 *
 * Every function that returns int returns 0 or a positive errno, and on failure leaves its output
 * arguments unchanged. All functions are thread-safe. A handle that was never returned, or whose
 * object is gone, is EINVAL. A child process cannot use its parent's sessions (EINVAL) or mappings
 * (they are not inherited); it may open a session of its own.
 *
 * Environment:
 *   GDRCOPY_ENABLE_LOGGING   if set, errors are logged to stderr
 *   GDRCOPY_LOG_LEVEL        1 all, 2 information, 3 warnings, 4 errors only (the default)
 *   WARPWIRE_WINDOW          mapping method: dmabuf, rm or gdrdrv; unset: the best available
 */
#ifndef WARPWIRE_GDRAPI_H
#define WARPWIRE_GDRAPI_H
/* The include guard that programs test for. */
#define __GDRAPI_H__

#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>

/* The version of this interface, returned by both version functions. */
#define MAJOR_VERSION_SHIFT 16
#define MINOR_VERSION_MASK (((uint32_t)1 << MAJOR_VERSION_SHIFT) - 1)
#define GDR_API_MAJOR_VERSION 2
#define GDR_API_MINOR_VERSION 6
#define GDR_API_VERSION ((GDR_API_MAJOR_VERSION << MAJOR_VERSION_SHIFT) | GDR_API_MINOR_VERSION)
#define MINIMUM_GDRDRV_MAJOR_VERSION 2
#define MINIMUM_GDRDRV_MINOR_VERSION 0
#define MINIMUM_GDRDRV_VERSION \
    ((MINIMUM_GDRDRV_MAJOR_VERSION << MAJOR_VERSION_SHIFT) | MINIMUM_GDRDRV_MINOR_VERSION)

/* GPU pages: pinned ranges are reported in whole pages. */
#define GPU_PAGE_SHIFT 16
#define GPU_PAGE_SIZE (1UL << GPU_PAGE_SHIFT)
#define GPU_PAGE_OFFSET (GPU_PAGE_SIZE - 1)
#define GPU_PAGE_MASK (~GPU_PAGE_OFFSET)

#ifdef __cplusplus
extern "C" {
#endif

/* A session: a set of pinned ranges that are released together. */
struct gdr;
typedef struct gdr *gdr_t;

/* Opens a session. NULL if no GPU memory of this machine can be mapped. */
gdr_t gdr_open(void);

/* Waits for pending calls on a session, unpins everything and ends the session. */
int gdr_close(gdr_t g);

/* A pinned range of GPU memory. A handle is never 0. */
typedef struct gdr_mh_s {
    unsigned long h;
} gdr_mh_t;

/*
 * Pins size bytes of GPU memory at addr: any address, any size but 0. The memory stays valid until
 * it is unpinned, even if its owner frees it. The range may be rounded to GPU pages before the
 * call, even beyond the allocation. The tokens are ignored.
 *
 * EINVAL: no GPU memory at addr (host memory, freed, size 0). ENOTSUP: no mapping method works here
 * (for example managed memory); the log has the reason for each. ENOMEM, EACCES, EMFILE, EIO: as
 * usual.
 */
int gdr_pin_buffer(gdr_t g, unsigned long addr, size_t size, uint64_t p2p_token, uint32_t va_space,
                   gdr_mh_t *handle);

typedef enum gdr_pin_flags {
    GDR_PIN_FLAG_DEFAULT = 0,
    GDR_PIN_FLAG_FORCE_PCIE = 1 /* EINVAL: unsupported, see GDR_ATTR_SUPPORT_PIN_FLAG_FORCE_PCIE */
} gdr_pin_flags_t;

/* As gdr_pin_buffer, without the tokens. */
int gdr_pin_buffer_v2(gdr_t g, unsigned long addr, size_t size, uint32_t flags, gdr_mh_t *handle);

/* Unpins. An existing mapping is removed too, after pending copies through it. */
int gdr_unpin_buffer(gdr_t g, gdr_mh_t handle);

/* Whether a free has revoked the pinned memory. It never does: *flag is 0. */
int gdr_get_callback_flag(gdr_t g, gdr_mh_t handle, int *flag);

typedef enum gdr_mapping_type {
    GDR_MAPPING_TYPE_NONE = 0,
    GDR_MAPPING_TYPE_WC = 1,      /* write-combining */
    GDR_MAPPING_TYPE_CACHING = 2, /* as ordinary memory */
    GDR_MAPPING_TYPE_DEVICE = 3,  /* as device registers */
    GDR_MAPPING_TYPE_MAX
} gdr_mapping_type_t;

/*
 * Describes a pinned range. GPU address d is mapped at map_pointer + (d - va). The range va to
 * va + mapped_size is in whole GPU pages; only the pinned part that exists may be accessed.
 */
typedef struct gdr_info_v2 {
    uint64_t va;
    uint64_t mapped_size;
    uint32_t page_size;
    uint64_t tm_cycles;     /* 0 */
    uint32_t cycles_per_ms; /* 0 */
    unsigned mapped : 1;
    unsigned wc_mapping : 1;
    gdr_mapping_type_t mapping_type;
} gdr_info_v2_t;
typedef gdr_info_v2_t gdr_info_t;

int gdr_get_info_v2(gdr_t g, gdr_mh_t handle, gdr_info_v2_t *info);

/*
 * The library also exports a function of the old name, without mapping_type, for programs built
 * against older versions.
 */
#define gdr_get_info gdr_get_info_v2

/*
 * Maps a pinned range. *va corresponds to info.va, so for a pinned address that is a multiple of
 * GPU_PAGE_SIZE it is the mapping of that address. size is counted from the pinned address.
 * Addresses need not be aligned.
 *
 * EAGAIN: already mapped. EINVAL: size is 0 or more than mapped_size.
 */
int gdr_map(gdr_t g, gdr_mh_t handle, void **va, size_t size);

typedef enum gdr_map_flags { /* exactly one, not a bit mask */
    GDR_MAP_FLAG_DEFAULT = 0,
    GDR_MAP_FLAG_REQ_WC_MAPPING = 1,
    GDR_MAP_FLAG_REQ_CACHE_MAPPING = 2,
    GDR_MAP_FLAG_REQ_DEVICE_MAPPING = 3
} gdr_map_flags_t;

/* As gdr_map, with a required type; EINVAL if the platform maps the memory in another way. */
int gdr_map_v2(gdr_t g, gdr_mh_t handle, void **ptr_va, size_t size, int flags);

/*
 * Removes a mapping, given the pointer that gdr_map returned. EINVAL if the handle is invalid or
 * not mapped, or if size is too large. The mapping is always removed as a whole.
 */
int gdr_unmap(gdr_t g, gdr_mh_t handle, void *va, size_t size);

/*
 * Copies to and from a mapping, at any offset and of any size; 0 bytes is success. When the call
 * returns, writes are ordered before any later store. What a running kernel sees, and when, depends
 * on the kernel: see docs/gdrapi.md. EINVAL if the range is not inside what is pinned and mapped.
 */
int gdr_copy_to_mapping(gdr_mh_t handle, void *map_d_ptr, const void *h_ptr, size_t size);
int gdr_copy_from_mapping(gdr_mh_t handle, void *h_ptr, const void *map_d_ptr, size_t size);

/* Both return 2 and 6. There is no driver; its version is that of this interface. */
void gdr_runtime_get_version(int *major, int *minor);
int gdr_driver_get_version(gdr_t g, int *major, int *minor);

typedef enum gdr_attr {
    GDR_ATTR_USE_PERSISTENT_MAPPING = 1,      /* 1 */
    GDR_ATTR_SUPPORT_PIN_FLAG_FORCE_PCIE = 2, /* 0 */
    GDR_ATTR_USING_DMA_BUF_MMAP = 3,          /* 1: the library does not use gdrdrv */
    GDR_ATTR_MAX
} gdr_attr_t;

int gdr_get_attribute(gdr_t g, gdr_attr_t attr, int *v);

/* "None", "Write Combining", "Caching", "Device". */
int gdr_get_mapping_type_string(gdr_mapping_type_t mapping_type, const char **pstr);

#ifdef __cplusplus
}
#endif

#endif

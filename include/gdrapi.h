/*
 * gdrapi.h: CPU mappings of GPU memory. Warpwire's own header for its libgdrapi.so.2, compatible in source
 * and in binary form with gdrcopy 2.6.
 *
 * SPDX-License-Identifier: MIT OR Apache-2.0
 *
 * Every function that returns int returns 0 or a positive errno value, and on failure leaves what its
 * pointers lead to as it was. All of them may be called from any thread at any time. A handle that was never
 * given out, or whose object is gone, is EINVAL. A child process cannot use its parent's sessions (EINVAL) nor its
 * mappings (they are not there); it may open a session of its own.
 *
 * Environment:
 *   GDRCOPY_ENABLE_LOGGING   if it exists, say on stderr what went wrong
 *   GDRCOPY_LOG_LEVEL        1 everything, 2 information, 3 warnings, 4 errors only (the default)
 *   WARPWIRE_WINDOW          how memory is mapped: dmabuf, rm or gdrdrv; unset: the best there is
 */
#ifndef WARPWIRE_GDRAPI_H
#define WARPWIRE_GDRAPI_H
/* The guard that programs look for. */
#define __GDRAPI_H__

#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>

/* The version of this interface, which both version functions answer. */
#define MAJOR_VERSION_SHIFT 16
#define MINOR_VERSION_MASK (((uint32_t)1 << MAJOR_VERSION_SHIFT) - 1)
#define GDR_API_MAJOR_VERSION 2
#define GDR_API_MINOR_VERSION 6
#define GDR_API_VERSION ((GDR_API_MAJOR_VERSION << MAJOR_VERSION_SHIFT) | GDR_API_MINOR_VERSION)
#define MINIMUM_GDRDRV_MAJOR_VERSION 2
#define MINIMUM_GDRDRV_MINOR_VERSION 0
#define MINIMUM_GDRDRV_VERSION \
    ((MINIMUM_GDRDRV_MAJOR_VERSION << MAJOR_VERSION_SHIFT) | MINIMUM_GDRDRV_MINOR_VERSION)

/* The pages of a GPU: pinned ranges are reported in whole ones. */
#define GPU_PAGE_SHIFT 16
#define GPU_PAGE_SIZE (1UL << GPU_PAGE_SHIFT)
#define GPU_PAGE_OFFSET (GPU_PAGE_SIZE - 1)
#define GPU_PAGE_MASK (~GPU_PAGE_OFFSET)

#ifdef __cplusplus
extern "C" {
#endif

/* A session: a set of pins that end together. */
struct gdr;
typedef struct gdr *gdr_t;

/* Opens a session. NULL if no GPU memory of this machine can be mapped. */
gdr_t gdr_open(void);

/* Waits for the calls on a session, unpins all that it has, and ends it. */
int gdr_close(gdr_t g);

/* A pinned range of GPU memory. No handle is 0. */
typedef struct gdr_mh_s {
    unsigned long h;
} gdr_mh_t;

/*
 * Pins size bytes of GPU memory at addr: any address, any size but 0. The memory stays until it is unpinned, even
 * if its owner frees it. Rounding the range to GPU pages before the call is allowed, although it may
 * then pass the allocation. The tokens are ignored.
 *
 * EINVAL: no GPU memory there (host memory, freed, size 0). ENOTSUP: no way to map it works here (managed memory,
 * for one); the log says why for each. ENOMEM, EACCES, EMFILE, EIO: what they say.
 */
int gdr_pin_buffer(gdr_t g, unsigned long addr, size_t size, uint64_t p2p_token, uint32_t va_space,
                   gdr_mh_t *handle);

typedef enum gdr_pin_flags {
    GDR_PIN_FLAG_DEFAULT = 0,
    GDR_PIN_FLAG_FORCE_PCIE = 1 /* EINVAL: not offered, see GDR_ATTR_SUPPORT_PIN_FLAG_FORCE_PCIE */
} gdr_pin_flags_t;

/* The same without the tokens. */
int gdr_pin_buffer_v2(gdr_t g, unsigned long addr, size_t size, uint32_t flags, gdr_mh_t *handle);

/* Unpins. A mapping that is still there goes too, once copies through it have ended. */
int gdr_unpin_buffer(gdr_t g, gdr_mh_t handle);

/* Whether a free took the memory away under the pin. It never does: 0. */
int gdr_get_callback_flag(gdr_t g, gdr_mh_t handle, int *flag);

typedef enum gdr_mapping_type {
    GDR_MAPPING_TYPE_NONE = 0,
    GDR_MAPPING_TYPE_WC = 1,      /* write-combining */
    GDR_MAPPING_TYPE_CACHING = 2, /* as ordinary memory */
    GDR_MAPPING_TYPE_DEVICE = 3,  /* as device registers */
    GDR_MAPPING_TYPE_MAX
} gdr_mapping_type_t;

/*
 * What a pin is. The GPU address d is at map_pointer + (d - va). Of the range va .. va + mapped_size, in whole GPU
 * pages, what was pinned and exists is there; do not touch the rest.
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

/* The library also has a function of the old name, without mapping_type, for programs built long ago. */
#define gdr_get_info gdr_get_info_v2

/*
 * Maps a pin; *va stands for info.va, so that for an address that is a multiple of GPU_PAGE_SIZE it is the
 * address's own place. size is counted from the pinned address. Addresses need not be aligned.
 *
 * EAGAIN: it is mapped already. EINVAL: size is 0 or more than mapped_size.
 */
int gdr_map(gdr_t g, gdr_mh_t handle, void **va, size_t size);

typedef enum gdr_map_flags { /* one of these, not a sum */
    GDR_MAP_FLAG_DEFAULT = 0,
    GDR_MAP_FLAG_REQ_WC_MAPPING = 1,
    GDR_MAP_FLAG_REQ_CACHE_MAPPING = 2,
    GDR_MAP_FLAG_REQ_DEVICE_MAPPING = 3
} gdr_map_flags_t;

/* The same, with a wish; EINVAL if the platform maps the memory in another way. */
int gdr_map_v2(gdr_t g, gdr_mh_t handle, void **ptr_va, size_t size, int flags);

/*
 * Takes a mapping back, by the pointer that gdr_map gave: do not use it after. EINVAL if it is not mapped, or
 * not there, or not that large. It always goes as a whole.
 */
int gdr_unmap(gdr_t g, gdr_mh_t handle, void *va, size_t size);

/*
 * Copies to and from a mapping, at any offset and of any size; 0 bytes is success. Writes are on their way when the
 * call returns, before any later store. What a kernel that is already running sees, and when, is up to the kernel:
 * see docs/gdrapi.md. EINVAL if the range is not inside what is pinned and mapped.
 */
int gdr_copy_to_mapping(gdr_mh_t handle, void *map_d_ptr, const void *h_ptr, size_t size);
int gdr_copy_from_mapping(gdr_mh_t handle, void *h_ptr, const void *map_d_ptr, size_t size);

/* 2 and 6, both. There is no driver; who asks for its version wants to know what calls can do. */
void gdr_runtime_get_version(int *major, int *minor);
int gdr_driver_get_version(gdr_t g, int *major, int *minor);

typedef enum gdr_attr {
    GDR_ATTR_USE_PERSISTENT_MAPPING = 1,      /* 1 */
    GDR_ATTR_SUPPORT_PIN_FLAG_FORCE_PCIE = 2, /* 0 */
    GDR_ATTR_USING_DMA_BUF_MMAP = 3,          /* 1: there is no gdrdrv behind the library */
    GDR_ATTR_MAX
} gdr_attr_t;

int gdr_get_attribute(gdr_t g, gdr_attr_t attr, int *v);

/* "None", "Write Combining", "Caching", "Device". */
int gdr_get_mapping_type_string(gdr_mapping_type_t mapping_type, const char **pstr);

#ifdef __cplusplus
}
#endif

#endif

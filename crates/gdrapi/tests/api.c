/*
 * Every call of gdrapi.h, with valid and invalid input, from C.
 *
 *   api sim      on the simulated GPU (needs WARPWIRE_GDRAPI_SIM=1)
 *   api cuda     on the first NVIDIA GPU
 *   api absent   without either: gdr_open returns NULL
 *   api strict   with WARPWIRE_GDRAPI_STRICT=map,fork, on either
 *   api speed    measures the cost of small copies
 *
 * Exits with 0 and a line with the number of checks, or with 1 at the first failed check.
 */
#include "gdrapi.h"

#include <dirent.h>
#include <dlfcn.h>
#include <errno.h>
#include <pthread.h>
#include <setjmp.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/wait.h>
#include <time.h>
#include <unistd.h>

/* The old function, which the header's macro hides, and its structure. */
#undef gdr_get_info
typedef struct {
    uint64_t va, mapped_size;
    uint32_t page_size;
    uint64_t tm_cycles;
    uint32_t cycles_per_ms;
    unsigned mapped : 1;
    unsigned wc_mapping : 1;
} info_v1_t;
int gdr_get_info(gdr_t g, gdr_mh_t handle, info_v1_t *info);

/* Test helpers that no header declares. */
unsigned long warpwire_sim_alloc(size_t size);
int warpwire_sim_free(unsigned long address);
int warpwire_sim_read(unsigned long address, void *into, size_t size);
int warpwire_sim_write(unsigned long address, const void *from, size_t size);

static long checks;

static void check(int good, const char *what, int line) {
    if (!good) {
        fprintf(stderr, "api.c:%d: wrong: %s\n", line, what);
        _exit(1);
    }
    __atomic_add_fetch(&checks, 1, __ATOMIC_RELAXED);
}
#define CHECK(what) check(!!(what), #what, __LINE__)

/* ---- device memory ---- */

static unsigned long (*device_alloc)(size_t size);
static int (*device_free)(unsigned long address);
static int (*device_read)(unsigned long address, void *into, size_t size);
static int (*device_write)(unsigned long address, const void *from, size_t size);

static int (*cu_alloc)(unsigned long long *, size_t);
static int (*cu_free)(unsigned long long);
static int (*cu_read)(void *, unsigned long long, size_t);
static int (*cu_write)(unsigned long long, const void *, size_t);
static int (*cu_synchronize)(void);
static int (*cu_set_current)(void *);
static void *cu_context;

static unsigned long cuda_alloc(size_t size) {
    unsigned long long address = 0;
    cu_set_current(cu_context);
    return cu_alloc(&address, size) == 0 ? (unsigned long)address : 0;
}
static int cuda_free(unsigned long address) {
    cu_set_current(cu_context);
    return cu_free(address);
}
static int cuda_read(unsigned long address, void *into, size_t size) {
    cu_set_current(cu_context);
    return cu_read(into, address, size);
}
static int cuda_write(unsigned long address, const void *from, size_t size) {
    cu_set_current(cu_context);
    /* A small copy may still be in flight when the driver call returns. */
    int failed = cu_write(address, from, size);
    return failed ? failed : cu_synchronize();
}

static void *symbol(void *library, const char *name) {
    void *found = dlsym(library, name);
    if (!found) {
        fprintf(stderr, "libcuda.so.1 has no %s\n", name);
        exit(1);
    }
    return found;
}

static void use_cuda(void) {
    void *library = dlopen("libcuda.so.1", RTLD_NOW);
    if (!library) {
        fprintf(stderr, "%s\n", dlerror());
        exit(1);
    }
    int (*init)(unsigned) = (int (*)(unsigned))symbol(library, "cuInit");
    int (*retain)(void **, int) =
        (int (*)(void **, int))symbol(library, "cuDevicePrimaryCtxRetain");
    cu_set_current = (int (*)(void *))symbol(library, "cuCtxSetCurrent");
    cu_alloc = (int (*)(unsigned long long *, size_t))symbol(library, "cuMemAlloc_v2");
    cu_free = (int (*)(unsigned long long))symbol(library, "cuMemFree_v2");
    cu_read = (int (*)(void *, unsigned long long, size_t))symbol(library, "cuMemcpyDtoH_v2");
    cu_write =
        (int (*)(unsigned long long, const void *, size_t))symbol(library, "cuMemcpyHtoD_v2");
    cu_synchronize = (int (*)(void))symbol(library, "cuCtxSynchronize");
    CHECK(init(0) == 0);
    CHECK(retain(&cu_context, 0) == 0);
    device_alloc = cuda_alloc, device_free = cuda_free;
    device_read = cuda_read, device_write = cuda_write;
}

static void use_simulator(void) {
    device_alloc = warpwire_sim_alloc, device_free = warpwire_sim_free;
    device_read = warpwire_sim_read, device_write = warpwire_sim_write;
}

/* ---- helpers ---- */

static unsigned char pattern(size_t at, unsigned seed) {
    return (unsigned char)((at * 2654435761u >> 7) + seed);
}

static const gdr_mh_t NO_HANDLE = {0};

static gdr_mh_t forged(gdr_mh_t handle, unsigned long difference) {
    gdr_mh_t other = {handle.h + difference};
    return other;
}

static sigjmp_buf after_fault;

static void on_fault(int signal) {
    siglongjmp(after_fault, signal);
}

/* Whether a load from this address faults. */
static int faults(const volatile void *pointer) {
    struct sigaction action, segv, bus;
    memset(&action, 0, sizeof action);
    action.sa_handler = on_fault;
    sigaction(SIGSEGV, &action, &segv);
    sigaction(SIGBUS, &action, &bus);
    int faulted = sigsetjmp(after_fault, 1);
    if (!faulted)
        (void)*(const volatile unsigned char *)pointer;
    sigaction(SIGSEGV, &segv, NULL);
    sigaction(SIGBUS, &bus, NULL);
    return faulted != 0;
}

static int count_open_files(void) {
    int count = 0;
    DIR *folder = opendir("/proc/self/fd");
    while (readdir(folder))
        ++count;
    closedir(folder);
    return count;
}

static int count_mappings(void) {
    int count = 0, c;
    FILE *maps = fopen("/proc/self/maps", "r");
    while ((c = fgetc(maps)) != EOF)
        count += c == '\n';
    fclose(maps);
    return count;
}

/* ---- the tests ---- */

static void test_layout(void) {
    CHECK(sizeof(gdr_mh_t) == 8);
    CHECK(sizeof(gdr_info_t) == 48 && sizeof(info_v1_t) == 40);
    CHECK(offsetof(gdr_info_t, va) == 0 && offsetof(gdr_info_t, mapped_size) == 8);
    CHECK(offsetof(gdr_info_t, page_size) == 16 && offsetof(gdr_info_t, tm_cycles) == 24);
    CHECK(offsetof(gdr_info_t, cycles_per_ms) == 32 && offsetof(gdr_info_t, mapping_type) == 40);
    CHECK(GPU_PAGE_SIZE == 65536 && GPU_PAGE_SHIFT == 16 && GPU_PAGE_OFFSET == 65535);
    CHECK((0x12345678UL & GPU_PAGE_MASK) == 0x12340000UL);
    CHECK(GDR_API_VERSION == 0x20006 && MINOR_VERSION_MASK == 0xffff);
    CHECK(MINIMUM_GDRDRV_VERSION == 0x20000);
    CHECK(GDR_PIN_FLAG_FORCE_PCIE == 1 && GDR_MAPPING_TYPE_MAX == 4 && GDR_ATTR_MAX == 4);
    CHECK(GDR_MAP_FLAG_REQ_WC_MAPPING == 1 && GDR_MAP_FLAG_REQ_DEVICE_MAPPING == 3);
}

static void test_queries(void) {
    int major = 0, minor = 0, value = -1;
    gdr_runtime_get_version(&major, &minor);
    CHECK(major == GDR_API_MAJOR_VERSION && minor == GDR_API_MINOR_VERSION);
    gdr_runtime_get_version(NULL, NULL);

    gdr_t g = gdr_open();
    CHECK(g);
    major = minor = 0;
    CHECK(gdr_driver_get_version(g, &major, &minor) == 0 && major == 2 && minor == 6);
    CHECK(gdr_driver_get_version(g, NULL, &minor) == EINVAL);
    CHECK(gdr_driver_get_version(NULL, &major, &minor) == EINVAL);

    CHECK(gdr_get_attribute(g, GDR_ATTR_USE_PERSISTENT_MAPPING, &value) == 0 && value == 1);
    CHECK(gdr_get_attribute(g, GDR_ATTR_SUPPORT_PIN_FLAG_FORCE_PCIE, &value) == 0 && value == 0);
    CHECK(gdr_get_attribute(g, GDR_ATTR_USING_DMA_BUF_MMAP, &value) == 0 && value == 1);
    CHECK(gdr_get_attribute(g, GDR_ATTR_MAX, &value) == EINVAL);
    CHECK(gdr_get_attribute(g, (gdr_attr_t)0, &value) == EINVAL);
    CHECK(gdr_get_attribute(g, GDR_ATTR_USING_DMA_BUF_MMAP, NULL) == EINVAL);
    CHECK(gdr_get_attribute(NULL, GDR_ATTR_USING_DMA_BUF_MMAP, &value) == EINVAL);

    static const char *const names[] = {"None", "Write Combining", "Caching", "Device"};
    for (int type = 0; type < GDR_MAPPING_TYPE_MAX; ++type) {
        const char *name = NULL;
        CHECK(gdr_get_mapping_type_string((gdr_mapping_type_t)type, &name) == 0);
        CHECK(strcmp(name, names[type]) == 0);
        CHECK(gdr_get_mapping_type_string((gdr_mapping_type_t)type, NULL) == EINVAL);
    }
    const char *name = NULL;
    CHECK(gdr_get_mapping_type_string(GDR_MAPPING_TYPE_MAX, &name) == EINVAL && !name);
    CHECK(gdr_close(g) == 0);
    CHECK(gdr_close(g) == EINVAL);
    CHECK(gdr_close(NULL) == EINVAL);
    CHECK(gdr_get_attribute(g, GDR_ATTR_USING_DMA_BUF_MMAP, &value) == EINVAL);
}

static void test_lifecycle(void) {
    const size_t size = 4 * GPU_PAGE_SIZE;
    unsigned long d = device_alloc(size);
    CHECK(d && d % 256 == 0);
    gdr_t g = gdr_open();
    gdr_mh_t mh = NO_HANDLE;
    CHECK(gdr_pin_buffer(g, d, size, 0, 0, &mh) == 0 && mh.h != 0);

    gdr_info_t info;
    info_v1_t old;
    memset(&info, 0xff, sizeof info);
    memset(&old, 0xff, sizeof old);
    CHECK(gdr_get_info_v2(g, mh, &info) == 0);
    CHECK(info.va == (d & GPU_PAGE_MASK));
    CHECK(info.mapped_size % GPU_PAGE_SIZE == 0 && info.va + info.mapped_size >= d + size);
    CHECK(info.page_size == GPU_PAGE_SIZE && info.tm_cycles == 0 && info.cycles_per_ms == 0);
    CHECK(!info.mapped && !info.wc_mapping && info.mapping_type == GDR_MAPPING_TYPE_NONE);
    CHECK(gdr_get_info(g, mh, &old) == 0);
    CHECK(old.va == info.va && old.mapped_size == info.mapped_size && !old.mapped);

    int flag = -1;
    CHECK(gdr_get_callback_flag(g, mh, &flag) == 0 && flag == 0);
    CHECK(gdr_get_callback_flag(g, mh, NULL) == EINVAL);

    void *map = NULL;
    CHECK(gdr_map(g, mh, &map, size) == 0 && map);
    CHECK(gdr_get_info_v2(g, mh, &info) == 0);
    CHECK(info.mapped && info.mapping_type != GDR_MAPPING_TYPE_NONE);
    CHECK(info.wc_mapping == (info.mapping_type == GDR_MAPPING_TYPE_WC));
    CHECK(gdr_get_info(g, mh, &old) == 0 && old.mapped && old.wc_mapping == info.wc_mapping);

    /* The pointer can be dereferenced: words in both directions, and atomics. */
    volatile uint32_t *words = (volatile uint32_t *)((char *)map + (d - info.va));
    uint32_t seen = 0, value = 0xfeedf00d;
    words[0] = 0x12345678;
    words[size / 4 - 1] = 0x9abcdef0;
    __atomic_store_n((uint64_t *)&words[2], 77, __ATOMIC_RELEASE);
    __sync_synchronize();
    CHECK(device_read(d, &seen, 4) == 0 && seen == 0x12345678);
    CHECK(device_read(d + size - 4, &seen, 4) == 0 && seen == 0x9abcdef0);
    CHECK(device_read(d + 8, &seen, 4) == 0 && seen == 77);
    CHECK(device_write(d + 4096, &value, 4) == 0);
    CHECK(words[1024] == 0xfeedf00d);

    CHECK(gdr_unmap(g, mh, map, size) == 0);
    CHECK(gdr_get_info_v2(g, mh, &info) == 0 && !info.mapped);
    CHECK(gdr_unpin_buffer(g, mh) == 0);
    CHECK(gdr_get_info_v2(g, mh, &info) == EINVAL);
    CHECK(gdr_close(g) == 0);
    CHECK(device_free(d) == 0);
}

static void test_copies(void) {
    enum { SIZE = 3 * 65536 };
    static unsigned char host[SIZE], back[SIZE];
    unsigned long d = device_alloc(SIZE);
    gdr_t g = gdr_open();
    gdr_mh_t mh;
    gdr_info_t info;
    void *map;
    CHECK(gdr_pin_buffer_v2(g, d, SIZE, GDR_PIN_FLAG_DEFAULT, &mh) == 0);
    CHECK(gdr_get_info_v2(g, mh, &info) == 0);
    CHECK(gdr_map_v2(g, mh, &map, SIZE, GDR_MAP_FLAG_DEFAULT) == 0);
    char *at = (char *)map + (d - info.va);
    static const size_t sizes[] = {1, 2, 3, 4, 7, 8, 15, 16, 31, 64, 65, 255, 4096, 5001, 70001};
    for (unsigned s = 0; s < sizeof sizes / sizeof *sizes; ++s)
        for (size_t offset = 0; offset < 70; offset += 7) {
            size_t size = sizes[s];
            for (size_t i = 0; i < size; ++i)
                host[i + offset % 5] = pattern(i + offset, s);
            CHECK(gdr_copy_to_mapping(mh, at + offset, host + offset % 5, size) == 0);
            CHECK(device_read(d + offset, back, size) == 0);
            CHECK(memcmp(back, host + offset % 5, size) == 0);
            memset(back, 0, sizeof back);
            CHECK(gdr_copy_from_mapping(mh, back + offset % 3, at + offset, size) == 0);
            CHECK(memcmp(back + offset % 3, host + offset % 5, size) == 0);
        }
    CHECK(gdr_copy_to_mapping(mh, at, host, 0) == 0);
    CHECK(gdr_copy_from_mapping(mh, host, at, 0) == 0);

    CHECK(gdr_copy_to_mapping(mh, at, NULL, 4) == EINVAL);
    CHECK(gdr_copy_to_mapping(mh, NULL, host, 4) == EINVAL);
    CHECK(gdr_copy_from_mapping(mh, NULL, at, 4) == EINVAL);
    CHECK(gdr_copy_from_mapping(mh, host, NULL, 4) == EINVAL);
    CHECK(gdr_copy_to_mapping(mh, at + SIZE, host, 1) == EINVAL);
    CHECK(gdr_copy_to_mapping(mh, at + SIZE - 3, host, 4) == EINVAL);
    CHECK(gdr_copy_to_mapping(mh, at - 1, host, 4) == EINVAL);
    CHECK(gdr_copy_to_mapping(mh, at, host, SIZE + 1) == EINVAL);
    CHECK(gdr_copy_from_mapping(mh, host, at, (size_t)-1) == EINVAL);
    CHECK(gdr_copy_from_mapping(mh, host, at + 1, (size_t)-1) == EINVAL);
    CHECK(gdr_copy_to_mapping(NO_HANDLE, at, host, 4) == EINVAL);
    CHECK(gdr_copy_to_mapping(forged(mh, 1UL << 32), at, host, 4) == EINVAL);
    CHECK(gdr_unmap(g, mh, map, SIZE) == 0);
    CHECK(gdr_copy_to_mapping(mh, at, host, 4) == EINVAL);
    CHECK(gdr_copy_from_mapping(mh, host, at, 4) == EINVAL);
    CHECK(gdr_unpin_buffer(g, mh) == 0);
    CHECK(gdr_copy_to_mapping(mh, at, host, 4) == EINVAL);
    CHECK(gdr_close(g) == 0 && device_free(d) == 0);
}

static void test_bad_pins(void) {
    unsigned long d = device_alloc(GPU_PAGE_SIZE);
    static char ordinary[64];
    gdr_t g = gdr_open(), other = gdr_open();
    gdr_mh_t mh = {42}, mine;
    CHECK(gdr_pin_buffer(g, d, 0, 0, 0, &mh) == EINVAL);
    CHECK(gdr_pin_buffer(g, d, 64, 0, 0, NULL) == EINVAL);
    CHECK(gdr_pin_buffer(NULL, d, 64, 0, 0, &mh) == EINVAL);
    CHECK(gdr_pin_buffer((gdr_t)(uintptr_t)0x1234, d, 64, 0, 0, &mh) == EINVAL);
    CHECK(gdr_pin_buffer((gdr_t)ordinary, d, 64, 0, 0, &mh) == EINVAL);
    CHECK(gdr_pin_buffer(g, 0, 64, 0, 0, &mh) == EINVAL);
    CHECK(gdr_pin_buffer(g, (unsigned long)ordinary, 64, 0, 0, &mh) == EINVAL);
    CHECK(gdr_pin_buffer(g, d, (size_t)-1, 0, 0, &mh) == EINVAL);
    CHECK(gdr_pin_buffer(g, (unsigned long)-1, 1, 0, 0, &mh) == EINVAL);
    CHECK(gdr_pin_buffer(g, d, 1UL << 40, 0, 0, &mh) == EINVAL);
    CHECK(gdr_pin_buffer_v2(g, d, 64, GDR_PIN_FLAG_FORCE_PCIE, &mh) == EINVAL);
    CHECK(gdr_pin_buffer_v2(g, d, 64, 6, &mh) == EINVAL);
    CHECK(mh.h == 42);

    CHECK(gdr_pin_buffer(g, d, 64, 0, 0, &mine) == 0);
    void *map;
    gdr_info_t info;
    int flag;
    CHECK(gdr_unpin_buffer(other, mine) == EINVAL);
    CHECK(gdr_map(other, mine, &map, 64) == EINVAL);
    CHECK(gdr_get_info_v2(other, mine, &info) == EINVAL);
    CHECK(gdr_get_info_v2(g, mine, NULL) == EINVAL);
    CHECK(gdr_get_info(g, mine, NULL) == EINVAL);
    CHECK(gdr_get_callback_flag(other, mine, &flag) == EINVAL);
    gdr_mh_t bad[] = {NO_HANDLE, {1}, {~0UL}, {(unsigned long)ordinary}, forged(mine, 1),
                      forged(mine, 1UL << 32), {(unsigned long)g}};
    for (unsigned i = 0; i < sizeof bad / sizeof *bad; ++i) {
        CHECK(gdr_unpin_buffer(g, bad[i]) == EINVAL);
        CHECK(gdr_map(g, bad[i], &map, 64) == EINVAL);
        CHECK(gdr_unmap(g, bad[i], ordinary, 64) == EINVAL);
        CHECK(gdr_get_info_v2(g, bad[i], &info) == EINVAL);
    }
    CHECK(gdr_unpin_buffer(g, mine) == 0);
    CHECK(gdr_unpin_buffer(g, mine) == EINVAL);
    CHECK(gdr_close(g) == 0 && gdr_close(other) == 0);
    CHECK(device_free(d) == 0);
    g = gdr_open();
    CHECK(gdr_pin_buffer(g, d, 64, 0, 0, &mh) == EINVAL); /* freed */
    CHECK(gdr_close(g) == 0);
}

static void test_bad_maps(void) {
    const size_t size = 2 * GPU_PAGE_SIZE;
    unsigned long d = device_alloc(2 * size), a = (d + GPU_PAGE_OFFSET) & GPU_PAGE_MASK;
    gdr_t g = gdr_open();
    gdr_mh_t mh;
    gdr_info_t info;
    void *map = NULL, *again = NULL;
    char byte = 0;
    CHECK(gdr_pin_buffer(g, a, size, 0, 0, &mh) == 0);
    CHECK(gdr_unmap(g, mh, &byte, size) == EINVAL);
    CHECK(gdr_map(g, mh, NULL, size) == EINVAL);
    CHECK(gdr_map(g, mh, &map, 0) == EINVAL);
    CHECK(gdr_map(g, mh, &map, size + 1) == EINVAL);
    CHECK(gdr_map(g, mh, &map, (size_t)-1) == EINVAL);
    CHECK(gdr_map_v2(g, mh, &map, size, 4) == EINVAL);
    CHECK(gdr_map_v2(g, mh, &map, size, -1) == EINVAL);
    CHECK(gdr_map(NULL, mh, &map, size) == EINVAL);
    CHECK(map == NULL);

    /* The platform has one mapping type; the others are rejected. */
    int offered = 0;
    for (int type = GDR_MAP_FLAG_REQ_WC_MAPPING; type <= GDR_MAP_FLAG_REQ_DEVICE_MAPPING; ++type) {
        int outcome = gdr_map_v2(g, mh, &map, size, type);
        CHECK(outcome == 0 || outcome == EINVAL);
        if (outcome == 0) {
            CHECK(gdr_get_info_v2(g, mh, &info) == 0 && (int)info.mapping_type == type);
            CHECK(gdr_unmap(g, mh, map, size) == 0);
            ++offered;
        }
    }
    CHECK(offered == 1);

    CHECK(gdr_map(g, mh, &map, 4096) == 0);
    CHECK(gdr_map(g, mh, &again, size) == EAGAIN && again == NULL);
    CHECK(gdr_copy_to_mapping(mh, (char *)map + 4095, &byte, 1) == 0);
    CHECK(gdr_copy_to_mapping(mh, (char *)map + 4096, &byte, 1) == EINVAL);
    CHECK(gdr_unmap(g, mh, NULL, 4096) == EINVAL);
    CHECK(gdr_unmap(g, mh, &byte, 4096) == EINVAL);
    CHECK(gdr_unmap(g, mh, (char *)map + 4, 4096) == EINVAL);
    CHECK(gdr_unmap(g, mh, map, 0) == EINVAL);
    CHECK(gdr_unmap(g, mh, map, 4097) == EINVAL);
    CHECK(gdr_unmap(g, mh, map, 4096) == 0);
    CHECK(gdr_unmap(g, mh, map, 4096) == EINVAL);
    CHECK(gdr_map(g, mh, &map, size) == 0); /* once more */
    CHECK(gdr_unpin_buffer(g, mh) == 0);    /* while mapped */
    CHECK(faults(map));
    CHECK(gdr_close(g) == 0 && device_free(d) == 0);
}

/* Ranges as clients pin them: any address, rounded beyond the allocation. */
static void test_rounding(void) {
    const size_t length = 4 * 1024 * 1024 + 1000;
    unsigned long d = device_alloc(length);
    gdr_t g = gdr_open();
    struct {
        unsigned long from;
        size_t pinned, mapped;
        unsigned long touch; /* device address */
    } cases[] = {
        {d + 8, 4, 4, d + 8},
        {d + 70001, 4099, 4099, d + 74099},
        {d + GPU_PAGE_SIZE + 4096, 16, GPU_PAGE_SIZE, d + GPU_PAGE_SIZE + 4100},
        {(d + length - 8) & GPU_PAGE_MASK, GPU_PAGE_SIZE, GPU_PAGE_SIZE, d + length - 1}, /* UCX */
        {(d + length - 8) & GPU_PAGE_MASK, GPU_PAGE_SIZE + 500, GPU_PAGE_SIZE, d + length - 8},
        {d + length - 1, 1, 1, d + length - 1},
    };
    for (unsigned i = 0; i < sizeof cases / sizeof *cases; ++i) {
        gdr_mh_t mh;
        gdr_info_t info;
        void *map;
        unsigned char value = (unsigned char)(0xa0 + i), seen = 0;
        CHECK(gdr_pin_buffer(g, cases[i].from, cases[i].pinned, 0, 0, &mh) == 0);
        CHECK(gdr_get_info_v2(g, mh, &info) == 0);
        CHECK(info.va == (cases[i].from & GPU_PAGE_MASK));
        CHECK(info.mapped_size ==
              ((cases[i].from + cases[i].pinned + GPU_PAGE_OFFSET) & GPU_PAGE_MASK) - info.va);
        CHECK(gdr_map(g, mh, &map, cases[i].mapped) == 0);
        CHECK(gdr_map(g, mh, &map, cases[i].mapped) == EAGAIN);
        volatile unsigned char *at = (unsigned char *)map + (cases[i].touch - info.va);
        *at = value;
        __sync_synchronize();
        CHECK(device_read(cases[i].touch, &seen, 1) == 0 && seen == value);
        value ^= 0xff;
        CHECK(gdr_copy_to_mapping(mh, (void *)at, &value, 1) == 0);
        CHECK(device_read(cases[i].touch, &seen, 1) == 0 && seen == value);
        CHECK(*at == value);
        CHECK(gdr_copy_to_mapping(mh, (char *)map + info.mapped_size, &value, 1) == EINVAL);
        CHECK(gdr_unmap(g, mh, map, cases[i].mapped) == 0);
        CHECK(gdr_unpin_buffer(g, mh) == 0);
    }
    CHECK(gdr_close(g) == 0 && device_free(d) == 0);
}

/* Clients access more than they pinned: pplat pins 4 bytes of a larger allocation, maps 4, and
 * copies 8. */
static void test_pplat(void) {
    unsigned long memory = device_alloc(4 + GPU_PAGE_OFFSET), other = device_alloc(64);
    unsigned long d = (memory + GPU_PAGE_OFFSET) & GPU_PAGE_MASK;
    gdr_t g = gdr_open();
    gdr_mh_t mh;
    gdr_info_t info;
    void *map;
    uint64_t value = 0x1122334455667788, seen = 0;
    CHECK(gdr_pin_buffer(g, d, 4, 0, 0, &mh) == 0);
    CHECK(gdr_map(g, mh, &map, 4) == 0);
    CHECK(gdr_get_info_v2(g, mh, &info) == 0 && info.va == d && info.mapped_size == GPU_PAGE_SIZE);
    /* The last page of the allocation may end after 4 bytes. */
    size_t rest = memory + 4 + GPU_PAGE_OFFSET - d;
    if (rest >= 8) {
        CHECK(gdr_copy_to_mapping(mh, map, &value, 8) == 0);
        CHECK(device_read(d, &seen, 8) == 0 && seen == value);
        seen = 0;
        CHECK(gdr_copy_from_mapping(mh, &seen, map, 8) == 0 && seen == value);
    }
    /* Whole CPU pages are mapped, and memory that does not exist is not. */
    size_t mapped = rest < 4096 ? rest : 4096;
    CHECK(gdr_copy_to_mapping(mh, (char *)map + mapped - 1, &value, 1) == 0);
    CHECK(gdr_copy_to_mapping(mh, (char *)map + 4096, &value, 1) == EINVAL);
    CHECK(gdr_copy_to_mapping(mh, (char *)map - 1, &value, 1) == EINVAL);
    CHECK(gdr_unmap(g, mh, map, 4) == 0 && gdr_unpin_buffer(g, mh) == 0);
    /* A small allocation by itself ends where it ends, if it shares no page. */
    CHECK(gdr_pin_buffer(g, other, 4, 0, 0, &mh) == 0 && gdr_map(g, mh, &map, 4) == 0);
    CHECK(gdr_get_info_v2(g, mh, &info) == 0);
    char *at = (char *)map + (other - info.va);
    CHECK(gdr_copy_to_mapping(mh, at, &value, 8) == 0);
    CHECK(device_read(other, &seen, 8) == 0 && seen == value);
    CHECK(gdr_close(g) == 0 && device_free(memory) == 0 && device_free(other) == 0);
}

/* WARPWIRE_GDRAPI_STRICT=map,fork: as gdrcopy with its kernel module. */
static int run_strict(void) {
    unsigned long d = device_alloc(3 * GPU_PAGE_SIZE), a = (d + GPU_PAGE_OFFSET) & GPU_PAGE_MASK;
    gdr_t g = gdr_open();
    gdr_mh_t aligned, unaligned;
    void *map = NULL;
    int value = -1;
    CHECK(gdr_get_attribute(g, GDR_ATTR_USING_DMA_BUF_MMAP, &value) == 0 && value == 0);
    CHECK(gdr_pin_buffer(g, a, 8, 0, 0, &aligned) == 0);
    CHECK(gdr_pin_buffer(g, a + 8, 8, 0, 0, &unaligned) == 0);
    CHECK(gdr_map(g, unaligned, &map, 8) == EINVAL && map == NULL);
    CHECK(gdr_map(g, aligned, &map, 8) == 0);
    CHECK(gdr_close(g) == 0 && device_free(d) == 0);
    return 0;
}

/* The page below an allocation, as UCX and libfabric pin it; it is unmapped in the simulator. */
static void test_rounding_down(void) {
    unsigned long d = device_alloc(1000);
    gdr_t g = gdr_open();
    gdr_mh_t mh;
    gdr_info_t info;
    void *map;
    unsigned char value = 0x3c, seen = 0;
    CHECK(gdr_pin_buffer(g, d - 4096, 2 * 4096, 0, 0, &mh) == 0);
    CHECK(gdr_get_info_v2(g, mh, &info) == 0 && info.va == ((d - 4096) & GPU_PAGE_MASK));
    CHECK(gdr_map(g, mh, &map, 2 * 4096) == 0);
    ((volatile unsigned char *)map)[d + 999 - info.va] = value;
    CHECK(device_read(d + 999, &seen, 1) == 0 && seen == value);
    CHECK(gdr_copy_from_mapping(mh, &seen, (char *)map + (d + 999 - info.va), 1) == 0);
    CHECK(gdr_copy_from_mapping(mh, &seen, (char *)map + (d - 1 - info.va), 1) == EINVAL);
    CHECK(gdr_copy_from_mapping(mh, &seen, (char *)map + (d + 1000 - info.va), 1) == EINVAL);
    CHECK(gdr_pin_buffer(g, d - GPU_PAGE_SIZE, GPU_PAGE_SIZE, 0, 0, &mh) == EINVAL);
    CHECK(gdr_pin_buffer(g, d, 1000 + GPU_PAGE_SIZE + 1, 0, 0, &mh) == EINVAL);
    CHECK(gdr_close(g) == 0 && device_free(d) == 0);
}

/* Small buffers in one page, pinned as whole pages by clients that round. CUDA only: simulated
 * allocations share no pages. */
static void test_shared_pages(void) {
    enum { COUNT = 4 };
    unsigned long d[COUNT], first = -1UL, last = 0;
    for (int at = 0; at < COUNT; at++) {
        d[at] = device_alloc(100);
        first = d[at] < first ? d[at] : first;
        last = d[at] > last ? d[at] : last;
    }
    unsigned long start = first & GPU_PAGE_MASK;
    size_t size = ((last + 100 + GPU_PAGE_SIZE - 1) & GPU_PAGE_MASK) - start;
    if (size > 2u << 20) {
        printf("skipped: shared pages (small buffers are far apart here)\n");
        return;
    }
    gdr_t g = gdr_open();
    gdr_mh_t mh;
    gdr_info_t info;
    void *map = NULL;
    CHECK(gdr_pin_buffer(g, start, size, 0, 0, &mh) == 0);
    CHECK(gdr_map(g, mh, &map, size) == 0 && map);
    CHECK(gdr_get_info_v2(g, mh, &info) == 0 && info.va == start && info.mapped_size == size);
    for (int at = 0; at < COUNT; at++) {
        unsigned char host[100], back[100];
        memset(host, at + 1, sizeof host);
        CHECK(gdr_copy_to_mapping(mh, (char *)map + (d[at] - start), host, sizeof host) == 0);
        CHECK(device_read(d[at], back, sizeof back) == 0 && memcmp(host, back, sizeof host) == 0);
    }
    CHECK(gdr_unmap(g, mh, map, size) == 0 && gdr_unpin_buffer(g, mh) == 0 && gdr_close(g) == 0);
    for (int at = 0; at < COUNT; at++)
        CHECK(device_free(d[at]) == 0);
}

static void test_free_while_mapped(void) {
    const size_t size = GPU_PAGE_SIZE;
    unsigned long a = device_alloc(size), b = device_alloc(size);
    gdr_t g = gdr_open();
    gdr_mh_t first, second, twice;
    gdr_info_t info;
    void *map_a, *map_b;
    int flag = -1;
    uint32_t value = 0xabad1dea, seen = 0;
    CHECK(gdr_pin_buffer(g, a, size, 0, 0, &first) == 0);
    CHECK(gdr_pin_buffer(g, b, size, 0, 0, &second) == 0);
    CHECK(gdr_pin_buffer(g, a, size, 0, 0, &twice) == 0 && twice.h != first.h);
    CHECK(gdr_unpin_buffer(g, twice) == 0);
    CHECK(gdr_map(g, first, &map_a, size) == 0 && gdr_map(g, second, &map_b, size) == 0);
    CHECK(gdr_get_info_v2(g, first, &info) == 0);
    char *at = (char *)map_a + (a - info.va);
    CHECK(gdr_copy_to_mapping(first, at, &value, 4) == 0);
    CHECK(device_free(a) == 0);
    CHECK(*(volatile uint32_t *)at == value); /* pinned memory stays valid */
    CHECK(gdr_copy_from_mapping(first, &seen, at, 4) == 0 && seen == value);
    CHECK(gdr_get_callback_flag(g, first, &flag) == 0 && flag == 0);
    CHECK(gdr_get_info_v2(g, second, &info) == 0);
    at = (char *)map_b + (b - info.va);
    CHECK(gdr_copy_to_mapping(second, at, &value, 4) == 0);
    CHECK(device_read(b, &seen, 4) == 0 && seen == value);
    CHECK(gdr_unmap(g, first, map_a, size) == 0 && gdr_unpin_buffer(g, first) == 0);
    CHECK(faults(map_a));
    CHECK(gdr_close(g) == 0); /* while mapped */
    CHECK(faults(at));
    CHECK(gdr_copy_to_mapping(second, at, &value, 4) == EINVAL);
    CHECK(device_free(b) == 0);
}

static int run_in_child(int (*body)(void *), void *argument) {
    fflush(NULL);
    pid_t child = fork();
    if (child == 0)
        _exit(body(argument));
    int status = -1;
    waitpid(child, &status, 0);
    return status;
}

struct parent_state {
    gdr_t g;
    gdr_mh_t mh;
    char *map;
    unsigned long device;
    size_t size;
};

static int child_uses_handles(void *argument) {
    struct parent_state *p = argument;
    gdr_info_t info;
    gdr_mh_t mh;
    void *map;
    int value = 0;
    CHECK(gdr_get_info_v2(p->g, p->mh, &info) == EINVAL);
    CHECK(gdr_copy_to_mapping(p->mh, p->map, &value, 4) == EINVAL);
    CHECK(gdr_copy_from_mapping(p->mh, &value, p->map, 4) == EINVAL);
    CHECK(gdr_pin_buffer(p->g, p->device, p->size, 0, 0, &mh) == EINVAL);
    CHECK(gdr_map(p->g, p->mh, &map, p->size) == EINVAL);
    CHECK(gdr_unmap(p->g, p->mh, p->map, p->size) == EINVAL);
    CHECK(gdr_unpin_buffer(p->g, p->mh) == EINVAL);
    CHECK(gdr_close(p->g) == EINVAL);
    CHECK(faults(p->map));
    return 0;
}

static int child_starts_empty(void *argument) {
    struct parent_state *p = argument;
    unsigned long d = device_alloc(4096);
    gdr_t g = gdr_open();
    gdr_mh_t mh;
    void *map;
    uint32_t value = 99, seen = 0;
    CHECK(d && g && g != p->g);
    CHECK(gdr_pin_buffer(g, d, 4096, 0, 0, &mh) == 0 && mh.h != p->mh.h);
    CHECK(gdr_map(g, mh, &map, 4096) == 0);
    CHECK(gdr_copy_to_mapping(mh, map, &value, 4) == 0);
    CHECK(device_read(d, &seen, 4) == 0 && seen == 99);
    CHECK(gdr_copy_to_mapping(p->mh, p->map, &value, 4) == EINVAL);
    return gdr_close(g);
}

static void test_fork(int simulated) {
    struct parent_state p = {gdr_open(), NO_HANDLE, NULL, device_alloc(GPU_PAGE_SIZE),
                             GPU_PAGE_SIZE};
    uint32_t value = 0x600dd00d, seen = 0;
    void *map;
    gdr_info_t info;
    CHECK(gdr_pin_buffer(p.g, p.device, p.size, 0, 0, &p.mh) == 0);
    CHECK(gdr_map(p.g, p.mh, &map, p.size) == 0);
    CHECK(gdr_get_info_v2(p.g, p.mh, &info) == 0);
    p.map = (char *)map + (p.device - info.va);
    CHECK(gdr_copy_to_mapping(p.mh, p.map, &value, 4) == 0);
    CHECK(run_in_child(child_uses_handles, &p) == 0);
    if (simulated) /* CUDA does not work in a forked child */
        CHECK(run_in_child(child_starts_empty, &p) == 0);
    CHECK(gdr_copy_from_mapping(p.mh, &seen, p.map, 4) == 0 && seen == value);
    CHECK(gdr_close(p.g) == 0 && device_free(p.device) == 0);
}

/* ---- threads ---- */

enum { THREADS = 8, ROUNDS = 40 };

struct shared {
    gdr_t g;
    gdr_mh_t mh;
    char *map;
    unsigned long device;
    int stop, number;
};

static void *pin_and_copy(void *argument) {
    struct shared *s = argument;
    for (int round = 0; round < ROUNDS; ++round) {
        gdr_mh_t mh;
        gdr_info_t info;
        void *map;
        size_t size = 1024, offset = (size_t)s->number * size;
        unsigned char host[1024], back[1024];
        memset(host, s->number * 16 + round, sizeof host);
        CHECK(gdr_pin_buffer(s->g, s->device + offset, size, 0, 0, &mh) == 0);
        CHECK(gdr_map(s->g, mh, &map, size) == 0);
        CHECK(gdr_get_info_v2(s->g, mh, &info) == 0);
        char *at = (char *)map + (s->device + offset - info.va);
        CHECK(gdr_copy_to_mapping(mh, at, host, size) == 0);
        CHECK(gdr_copy_from_mapping(mh, back, at, size) == 0 && !memcmp(host, back, size));
        CHECK(gdr_unmap(s->g, mh, map, size) == 0);
        CHECK(gdr_unpin_buffer(s->g, mh) == 0);
    }
    return NULL;
}

static void *copy_until_closed(void *argument) {
    struct shared *s = argument;
    static unsigned char host[4096];
    long good = 0;
    int outcome;
    while ((outcome = gdr_copy_to_mapping(s->mh, s->map, host, sizeof host)) == 0)
        ++good;
    CHECK(outcome == EINVAL);
    gdr_mh_t mh;
    CHECK(gdr_pin_buffer(s->g, s->device, 64, 0, 0, &mh) == EINVAL);
    return good > 0 ? NULL : argument;
}

static void test_threads(void) {
    struct shared shared[THREADS];
    pthread_t threads[THREADS];
    unsigned long d = device_alloc(GPU_PAGE_SIZE);
    gdr_t g = gdr_open();
    gdr_mh_t mh;
    gdr_info_t info;
    void *map;
    for (int i = 0; i < THREADS; ++i) {
        struct shared s = {g, NO_HANDLE, NULL, d, 0, i};
        shared[i] = s;
        CHECK(pthread_create(&threads[i], NULL, pin_and_copy, &shared[i]) == 0);
    }
    for (int i = 0; i < THREADS; ++i)
        pthread_join(threads[i], NULL);

    /* Close while threads copy. */
    CHECK(gdr_pin_buffer(g, d, GPU_PAGE_SIZE, 0, 0, &mh) == 0 &&
          gdr_map(g, mh, &map, GPU_PAGE_SIZE) == 0);
    CHECK(gdr_get_info_v2(g, mh, &info) == 0);
    for (int i = 0; i < THREADS; ++i) {
        struct shared s = {g, mh, (char *)map + (d - info.va), d, 0, i};
        shared[i] = s;
        CHECK(pthread_create(&threads[i], NULL, copy_until_closed, &shared[i]) == 0);
    }
    usleep(50000);
    /* Fork while threads are inside the library. */
    struct parent_state p = {g, mh, shared[0].map, d, GPU_PAGE_SIZE};
    for (int i = 0; i < 10; ++i)
        CHECK(run_in_child(child_uses_handles, &p) == 0);
    CHECK(gdr_close(g) == 0);
    for (int i = 0; i < THREADS; ++i)
        pthread_join(threads[i], NULL);
    CHECK(device_free(d) == 0);
}

static void test_leaks(void) {
    unsigned long d = device_alloc(GPU_PAGE_SIZE);
    int files = 0, mappings = 0;
    for (int round = 0; round < 210; ++round) {
        if (round == 10)
            files = count_open_files(), mappings = count_mappings();
        gdr_t g = gdr_open();
        gdr_mh_t mh;
        void *map;
        CHECK(gdr_pin_buffer(g, d, GPU_PAGE_SIZE, 0, 0, &mh) == 0);
        CHECK(gdr_map(g, mh, &map, GPU_PAGE_SIZE) == 0);
        CHECK(gdr_pin_buffer(g, 64, 64, 0, 0, &mh) == EINVAL);
        CHECK(gdr_close(g) == 0);
    }
    /* CUDA opens and closes some of its own; a leak would be 200. */
    CHECK(count_open_files() <= files + 8);
    CHECK(count_mappings() <= mappings + 8);
    CHECK(device_free(d) == 0);
}

static int run_absent(void) {
    CHECK(gdr_open() == NULL);
    CHECK(warpwire_sim_alloc(64) == 0);
    CHECK(warpwire_sim_free(64) == ENOTSUP);
    gdr_mh_t mh = NO_HANDLE;
    CHECK(gdr_pin_buffer(NULL, 64, 64, 0, 0, &mh) == EINVAL);
    int major = 0, minor = 0;
    gdr_runtime_get_version(&major, &minor);
    CHECK(major == 2 && minor == 6);
    return 0;
}

static double now(void) {
    struct timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return (double)t.tv_sec * 1e6 + (double)t.tv_nsec / 1e3;
}

/* Measures the mean cost of a call in microseconds. */
static void measure(void) {
    static char host[65536];
    unsigned long d = device_alloc(sizeof host);
    gdr_t g = gdr_open();
    gdr_mh_t mh;
    gdr_info_t info;
    void *map;
    double start = now();
    CHECK(gdr_pin_buffer(g, d, sizeof host, 0, 0, &mh) == 0);
    printf("first pin of 64 KiB %10.3f us\n", now() - start);
    CHECK(gdr_unpin_buffer(g, mh) == 0);
    start = now();
    CHECK(gdr_pin_buffer(g, d, sizeof host, 0, 0, &mh) == 0);
    printf("pin of 64 KiB       %10.3f us\n", now() - start);
    CHECK(gdr_map(g, mh, &map, sizeof host) == 0 && gdr_get_info_v2(g, mh, &info) == 0);
    char *at = (char *)map + (d - info.va);
    for (size_t size = 4; size <= sizeof host; size *= 4) {
        int rounds = size < 4096 ? 100000 : 2000, reads = rounds / 20;
        start = now();
        for (int i = 0; i < rounds; ++i)
            gdr_copy_to_mapping(mh, at, host, size);
        double write = (now() - start) / rounds;
        start = now();
        for (int i = 0; i < reads; ++i)
            gdr_copy_from_mapping(mh, host, at, size);
        printf("%6zu bytes  to mapping %8.3f us  from mapping %8.3f us\n", size, write,
               (now() - start) / reads);
    }
    start = now();
    CHECK(gdr_unpin_buffer(g, mh) == 0);
    printf("unpin               %10.3f us\n", now() - start);
    CHECK(gdr_close(g) == 0 && device_free(d) == 0);
}

int main(int argc, char **argv) {
    const char *mode = argc > 1 ? argv[1] : "sim";
    const char *variable = getenv("WARPWIRE_GDRAPI_SIM");
    int simulated = variable && strcmp(variable, "1") == 0;
    if (strcmp(mode, "absent") == 0)
        return run_absent();
    if (strcmp(mode, "cuda") == 0)
        simulated = 0;
    if (simulated)
        use_simulator();
    else
        use_cuda();
    if (strcmp(mode, "strict") == 0)
        return run_strict();
    if (strcmp(mode, "speed") == 0) {
        measure();
        return 0;
    }
    test_layout();
    test_queries();
    test_lifecycle();
    test_copies();
    test_bad_pins();
    test_bad_maps();
    test_rounding();
    test_pplat();
    if (simulated)
        test_rounding_down();
    else
        test_shared_pages();
    test_free_while_mapped();
    test_fork(simulated);
    test_threads();
    test_leaks();
    printf("%s: all good, %ld checks\n", simulated ? "sim" : "cuda", checks);
    return 0;
}

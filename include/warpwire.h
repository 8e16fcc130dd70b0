/* Warpwire for C and C++: transfer agents, device memory, CPU windows, queue pairs and sockets for
 * kernels, and diagnosis.
 *
 * Works with C99 and C++11 and later. docs/c.md has examples, and says how to link.
 *
 * Rules of all functions:
 *  - A function that returns int returns WW_OK (0), or what its comment says, or a negative
 *    ww_status. After a negative one, ww_last_error() of the same thread has the reason.
 *  - On failure, output parameters are not written. A required pointer that is NULL, and a handle
 *    that does not exist (any more), is WW_INVALID_ARGUMENT. Handles are numbers: they are never
 *    dereferenced, and never reused.
 *  - Any thread may call any function, on the same handle too. The library calls nothing of yours.
 *  - Blocks that a function returns through `**` are freed with ww_free, each with one call: also
 *    a struct whose members point to texts. Bytes and texts end with a NUL that is not counted.
 *  - Handles may be released in any order, also after the agent or context was closed.
 *  - After fork, the child cannot use the library: all calls are WW_UNSUPPORTED.
 */
#ifndef WARPWIRE_H
#define WARPWIRE_H

#include <stddef.h>
#include <stdint.h>

#ifdef __cplusplus
extern "C" {
#endif

#define WW_VERSION_MAJOR 0
#define WW_VERSION_MINOR 2
#define WW_VERSION_PATCH 0
/* As a number that grows with the version: 0.2.0 is 200. */
#define WW_VERSION (WW_VERSION_MAJOR * 10000 + WW_VERSION_MINOR * 100 + WW_VERSION_PATCH)

/* ---- Status and errors ---------------------------------------------------------------------- */

typedef enum ww_status {
    WW_OK = 0,
    WW_IN_PROGRESS = 1,         /* a transfer goes on */
    WW_INVALID_ARGUMENT = -1,   /* the call cannot be right */
    WW_OUT_OF_RANGE = -2,       /* not within the memory */
    WW_MISALIGNED = -3,
    WW_OUT_OF_MEMORY = -4,
    WW_NOT_DEVICE_MEMORY = -5,  /* no device knows the address */
    WW_FREED = -6,              /* the memory was freed */
    WW_BUSY = -7,               /* in use; try again later */
    WW_UNAVAILABLE = -8,        /* a library, file or device is missing */
    WW_UNSUPPORTED = -9,        /* not possible here, or a peer of another version */
    WW_TIMEOUT = -10,           /* a deadline has passed */
    WW_CANCELLED = -11,
    WW_STREAM_FAILED = -12,
    WW_DEVICE_LOST = -13,
    WW_STALE = -14,             /* the peer was removed or restarted */
    WW_PEER_LOST = -15,         /* the peer does not answer, or refuses access */
    WW_PERMISSION_DENIED = -16,
    WW_MALFORMED = -17,         /* bytes or a text that cannot be parsed */
    WW_OS_ERROR = -18,          /* of the operating system: ww_error.code is an errno */
    WW_CUDA_ERROR = -19,        /* of the CUDA driver: ww_error.code is a CUresult */
    WW_INTERNAL = -20           /* a defect of the library */
} ww_status;

/* The reason of the last failure of this thread. No text is NULL. */
typedef struct ww_error {
    int status;                 /* a ww_status; WW_OK before the first failure */
    int code;                   /* with WW_OS_ERROR and WW_CUDA_ERROR; else 0 */
    const char *message;        /* one line: "cannot WHAT: WHY; FIX" */
    const char *what;           /* what failed, as it follows "cannot" */
    const char *why;            /* "" if there is nothing to say */
    const char *fix;            /* what to do about it; "" if nothing is known */
} ww_error;

/* Never NULL. The struct and its texts are valid until the next failure of this thread. */
const ww_error *ww_last_error(void);

/* The name of a status: "WW_TIMEOUT"; "unknown status" for other numbers. Static. */
const char *ww_status_name(int status);

/* WW_VERSION of the library in use. Programs need the same major and minor version before 1.0. */
uint32_t ww_version(void);

/* Frees a block that a function returned. NULL is ignored. */
void ww_free(void *block);

/* ---- Agents --------------------------------------------------------------------------------- */

typedef struct ww_agent ww_agent;       /* one end: a name, registered memory, peers */
typedef struct ww_memory ww_memory;     /* memory that is registered with an agent */
typedef struct ww_peer ww_peer;         /* another agent, as added to this one */
typedef struct ww_prepared ww_prepared; /* lists of ranges, checked and looked up */
typedef struct ww_transfer ww_transfer; /* a transfer that was posted */

/* Start with WW_AGENT_OPTIONS_INIT: zero means the default. */
typedef struct ww_agent_options {
    size_t size;                        /* sizeof(ww_agent_options) */
    const char *link;                   /* "auto", "udp", "shm", "device:NAME"; default:
                                           WARPWIRE_LINK, or auto */
    const char *address;                /* this machine's; default: WARPWIRE_ADDRESS, or by route */
    uint32_t engines;                   /* threads that process packets, 1 to 16, as many as peers
                                           have; default: WARPWIRE_ENGINES, or 1 */
    uint32_t queue_pairs;               /* per peer, 1 to 16; default 1 */
    uint32_t send_depth;                /* work requests in flight, 16 to 4096; default 1024 */
    uint32_t connect_timeout_ms;        /* default 10000 */
    uint64_t max_pending_notifications; /* bytes, before peers that notify wait; default 64 MiB */
} ww_agent_options;

#define WW_AGENT_OPTIONS_INIT { sizeof(ww_agent_options), 0, 0, 0, 0, 0, 0, 0 }

/* Opens an agent. Peers know it by its name, of 1 to 256 bytes. `options` may be NULL. */
int ww_agent_open(const char *name, const ww_agent_options *options, ww_agent **agent);

/* Closes an agent: transfers in progress end. Takes effect when calls of other threads on it have
 * returned. Its other handles still have to be released. */
int ww_agent_close(ww_agent *agent);

/* A descriptor that is readable when a transfer has ended or a notification has arrived, until
 * ww_agent_clear: for poll, epoll and event loops. It belongs to the agent: do not close it.
 * Returns the descriptor. */
int ww_agent_fd(const ww_agent *agent);

/* Makes the descriptor unreadable. Call it before looking at transfers and notifications. Returns
 * 1 if it was readable, else 0. */
int ww_agent_clear(ww_agent *agent);

/* The devices that it uses and the reason for each, one line each. */
int ww_agent_path(const ww_agent *agent, char **text);

/* ---- Memory --------------------------------------------------------------------------------- */

/* The address of a pointer, of this process or a device. */
#define WW_ADDRESS(pointer) ((uint64_t)(uintptr_t)(pointer))

/* What may be done with registered memory: a sum of these. */
#define WW_LOCAL_WRITE 1u  /* reads that are posted here write to it; needed for the others */
#define WW_REMOTE_READ 2u
#define WW_REMOTE_WRITE 4u
#define WW_REMOTE_ATOMIC 8u /* for ww_context_register alone: signals and atomics of kernels */
#define WW_ACCESS_ALL (WW_LOCAL_WRITE | WW_REMOTE_READ | WW_REMOTE_WRITE)

/* Registers `len` bytes at `address`: memory of this process, or of a GPU that this process uses,
 * whoever allocated it. It must stay allocated until ww_memory_deregister has succeeded. Peers that
 * are given the metadata of afterwards may access it. */
int ww_agent_register(ww_agent *agent, uint64_t address, uint64_t len, unsigned access,
                      ww_memory **memory);

typedef struct ww_memory_info {
    uint64_t address;
    uint64_t len;
    const char *kind;   /* "host", or the device: "cuda:0" */
    const char *path;   /* how the device reaches it */
    const char *why;    /* why not in a better way: one line per way that was tried */
} ww_memory_info;

/* What the memory is, and how it is reached. */
int ww_memory_describe(const ww_memory *memory, ww_memory_info **info);

/* Ends the registration: on success nothing accesses the memory any more. WW_BUSY if prepared lists
 * or transfers in progress use it: the registration then ends with the last of them. The handle is
 * released in either case. */
int ww_memory_deregister(ww_memory *memory);

/* What peers need: name, address, and all memory that is registered now. Any store or socket may
 * carry it. Whoever has it may access the memory. */
int ww_agent_metadata(const ww_agent *agent, void **bytes, size_t *len);

/* The same with this memory alone; with none it is the agent's address. */
int ww_agent_metadata_of(const ww_agent *agent, const ww_memory *const *memory, size_t count,
                         void **bytes, size_t *len);

/* ---- Peers ---------------------------------------------------------------------------------- */

/* Adds a peer, or what has changed of one: metadata of ww_agent_metadata replaces what was known of
 * its memory, metadata of ww_agent_metadata_of adds to it. A peer of the same name that has been
 * restarted is replaced, and its transfers fail. Starts to connect; transfers may be posted at
 * once. An agent may add itself. */
int ww_agent_add_peer(ww_agent *agent, const void *metadata, size_t len, ww_peer **peer);

/* A new handle of the peer with this name; WW_STALE if there is none. */
int ww_agent_find_peer(const ww_agent *agent, const char *name, ww_peer **peer);

/* Removes a peer: its transfers in progress end with WW_CANCELLED. WW_STALE if there is none. */
int ww_agent_remove_peer(ww_agent *agent, const char *name);

typedef struct ww_peer_info {
    const char *name;
    int is_connected;   /* it need not be: a transfer connects */
    const char *path;   /* how it is reached and why: a line per queue pair; "" if not connected */
} ww_peer_info;

int ww_peer_describe(const ww_peer *peer, ww_peer_info **info);

typedef struct ww_remote_memory {
    uint64_t address;   /* in the peer's process */
    uint64_t len;
    const char *kind;   /* what the peer says it is */
} ww_remote_memory;

/* The peer's memory, by what is known of it, sorted by address: `count` structs in one block. */
int ww_peer_memory(const ww_peer *peer, ww_remote_memory **memory, size_t *count);

/* Releases the handle; the peer remains. */
int ww_peer_release(ww_peer *peer);

/* ---- Transfers ------------------------------------------------------------------------------ */

/* A range of memory. */
typedef struct ww_range {
    uint64_t address;
    uint64_t len;
} ww_range;

/* Checks two lists of `count` ranges each, of equal lengths in pairs, and looks their registrations
 * up. The result may be posted many times, also concurrently, and keeps the local memory
 * registered. WW_OUT_OF_RANGE if a range is not in registered memory: the text has its index. */
int ww_agent_prepare(ww_agent *agent, const ww_peer *peer, const ww_range *local,
                     const ww_range *remote, size_t count, ww_prepared **prepared);

/* Releases prepared lists; transfers in progress keep what they need. */
int ww_prepared_release(ww_prepared *prepared);

typedef enum ww_op {
    WW_WRITE = 0,   /* from local memory to the peer's */
    WW_READ = 1     /* from the peer's memory to local memory */
} ww_op;

/* Start with WW_TRANSFER_OPTIONS_INIT. */
typedef struct ww_transfer_options {
    size_t size;                /* sizeof(ww_transfer_options) */
    const void *notification;   /* sent to the peer when all data is in place; NULL: none */
    size_t notification_len;    /* 0 to 1 MiB */
    uint64_t timeout_ms;        /* the transfer fails with WW_TIMEOUT then; 0: no deadline */
} ww_transfer_options;

#define WW_TRANSFER_OPTIONS_INIT { sizeof(ww_transfer_options), 0, 0, 0 }

/* Posts a transfer: a ww_op. `options` may be NULL. Returns as soon as it is queued. */
int ww_agent_post(ww_agent *agent, int op, const ww_prepared *prepared,
                  const ww_transfer_options *options, ww_transfer **transfer);

/* WW_OK if all data is in place and the notification is delivered, WW_IN_PROGRESS, or why it
 * failed: nothing of it is written then any more. Also makes progress. */
int ww_transfer_state(const ww_transfer *transfer);

/* Waits for the end: as ww_transfer_state, WW_IN_PROGRESS after `timeout_ms`. Negative: forever. */
int ww_transfer_wait(const ww_transfer *transfer, int64_t timeout_ms);

/* Posts a transfer in the order of a CUDA stream (cudaStream_t or CUstream; NULL is the default
 * stream) of `device`, such as "cuda:0": it starts when the stream gets to this point, and what
 * follows does not wait. A deadline counts from this call. */
int ww_agent_post_on_stream(ww_agent *agent, int op, const ww_prepared *prepared,
                            const ww_transfer_options *options, const char *device, void *stream,
                            ww_transfer **transfer);

/* Makes a CUDA stream wait: what follows starts when the transfer has ended, with success or not;
 * ww_transfer_state says which. Does not wait here. */
int ww_transfer_wait_on_stream(const ww_transfer *transfer, const char *device, void *stream);

/* Cancels it. It ends with WW_CANCELLED once what is in flight has ended, unless that completes it.
 * Does not wait. */
int ww_transfer_cancel(ww_transfer *transfer);

/* Releases the handle; the transfer goes on. */
int ww_transfer_release(ww_transfer *transfer);

/* ---- Notifications -------------------------------------------------------------------------- */

/* Sends up to 1 MiB. `transfer` may be NULL, where the outcome is of no interest. */
int ww_agent_notify(ww_agent *agent, const ww_peer *peer, const void *bytes, size_t len,
                    ww_transfer **transfer);

typedef struct ww_notification {
    const char *from;   /* the sender's name */
    const void *bytes;
    size_t len;
} ww_notification;

/* Takes the oldest notification, of any peer. Waits for one up to `timeout_ms`; 0: does not wait;
 * negative: forever. Stores NULL if there is none. */
int ww_agent_next_notification(ww_agent *agent, int64_t timeout_ms, ww_notification **notification);

/* ---- Device memory and CPU windows ---------------------------------------------------------- */

/* Allocates memory on a device: "cuda:0", or "sim:0", a simulated GPU for tests. */
int ww_device_alloc(const char *device, uint64_t len, uint64_t *address);

/* Frees it. WW_BUSY while it is registered. */
int ww_device_free(uint64_t address);

typedef struct ww_window ww_window; /* device memory, mapped for the CPU */

/* Maps device memory that any library has allocated. It must stay allocated meanwhile. */
int ww_window_open(uint64_t address, uint64_t len, ww_window **window);

typedef struct ww_window_info {
    void *pointer;          /* use aligned volatile or atomic accesses; valid until the close */
    uint64_t address;       /* on the device */
    uint64_t len;
    const char *path;       /* how it is mapped */
    const char *mapping;    /* the CPU's memory type */
    const char *why;        /* why not in a better way: one line each */
} ww_window_info;

int ww_window_describe(const ww_window *window, ww_window_info **info);

/* Copies to device memory, with the widest stores. */
int ww_window_write(ww_window *window, uint64_t offset, const void *from, size_t len);

/* Copies from device memory, with the widest loads. */
int ww_window_read(const ww_window *window, uint64_t offset, void *to, size_t len);

/* Unmaps it, when calls of other threads on it have returned. */
int ww_window_close(ww_window *window);

/* ---- Queue pairs for kernels: <warpwire/verbs.cuh> ------------------------------------------ */

typedef struct ww_context ww_context;       /* an RDMA device, and a protection domain */
typedef struct ww_mr ww_mr;                 /* memory that is registered with it */
typedef struct ww_kernel_qp ww_kernel_qp;   /* a queue pair that kernels post to */

/* Zero is the default of every member. */
typedef struct ww_context_options {
    size_t size;
    const char *link;       /* "auto", "udp", "shm", or "device:mlx5_0" for an RDMA device */
    const char *address;    /* IP address of this machine */
} ww_context_options;
#define WW_CONTEXT_OPTIONS_INIT {sizeof(ww_context_options), NULL, NULL}

/* Opens an RDMA device: a software one, with a thread that looks for the work of kernels, or
 * hardware. `options` may be NULL. */
int ww_context_open(const ww_context_options *options, ww_context **context);

/* Closes it when everything that was made with it is released. */
int ww_context_close(ww_context *context);

/* Registers `len` bytes at `address`: memory of this process, or of a GPU that this process uses,
 * whoever allocated it. It must stay allocated until ww_mr_deregister. */
int ww_context_register(ww_context *context, uint64_t address, uint64_t len, unsigned access,
                        ww_mr **mr);

typedef struct ww_mr_info {
    uint64_t address;   /* what kernels and peers use as its address */
    uint64_t len;
    uint32_t lkey;      /* for warpwire::Local */
    uint32_t rkey;      /* for warpwire::Remote, at the peer */
    const char *path;   /* how the device reaches it */
    const char *why;    /* why not in a better way: one line per way that was tried */
} ww_mr_info;

int ww_mr_describe(const ww_mr *mr, ww_mr_info **info);

/* Ends the registration: nothing accesses the memory any more. */
int ww_mr_deregister(ww_mr *mr);

/* Zero is the default of every member. */
typedef struct ww_kernel_qp_options {
    size_t size;
    uint32_t send_depth;        /* a power of two, 2 to 32768 */
    uint32_t receive_depth;     /* a power of two, 1 to 32768 */
    int is_single_poster;       /* one thread or group posts at a time, which is faster */
    int is_direct_off;          /* threads do not access mapped memory of the peer by themselves */
    int has_direct_atomics;     /* they apply atomic operations too: not atomic with respect to
                                 * those that the peer's HCA executes for other queue pairs */
} ww_kernel_qp_options;
#define WW_KERNEL_QP_OPTIONS_INIT {sizeof(ww_kernel_qp_options), 0, 0, 0, 0, 0}

/* Creates a queue pair for kernels of a device ("cuda:0"), in the primary context, as the CUDA
 * runtime uses it; or, if `device` is NULL, for CPU threads of this process that compile verbs.cuh
 * as C++. `options` may be NULL. */
int ww_kernel_qp_create(ww_context *context, const char *device,
                        const ww_kernel_qp_options *options, ww_kernel_qp **qp);

/* What the peer needs to connect: bytes that any store or socket may carry. */
int ww_kernel_qp_endpoint(const ww_kernel_qp *qp, void **bytes, size_t *len);

/* Connects it to the peer with this endpoint. What kernels posted before is sent then. */
int ww_kernel_qp_connect(ww_kernel_qp *qp, const void *endpoint, size_t len);

/* Its handle, the argument of kernels: a `warpwire::Qp *`. */
int ww_kernel_qp_handle(const ww_kernel_qp *qp, uint64_t *address);

/* The first failure that a kernel has noticed, with its cause; WW_OK if there was none. */
int ww_kernel_qp_check(const ww_kernel_qp *qp);

/* Ends all current and future waits of kernels, with kClosed. */
int ww_kernel_qp_close(ww_kernel_qp *qp);

/* Destroys it. Kernels that use it must have ended. */
int ww_kernel_qp_release(ww_kernel_qp *qp);

/* ---- Sockets for kernels: <warpwire/sock.cuh> ----------------------------------------------- */

typedef struct ww_sock_host ww_sock_host; /* the sockets of a device, with their thread */

/* Zero is the default of every member. */
typedef struct ww_sock_options {
    size_t size;
    uint64_t ring;      /* bytes of a socket's ring, per direction */
    uint64_t arena;     /* bytes of all rings, per direction; default: a ring for every socket */
    uint32_t sockets;   /* at most so many are open */
} ww_sock_options;
#define WW_SOCK_OPTIONS_INIT {sizeof(ww_sock_options), 0, 0, 0}

/* Starts sockets for the kernels of a device ("cuda:0"); or, if `device` is NULL, for CPU threads
 * of this process that compile sock.cuh as C++. `options` may be NULL. */
int ww_sock_host_start(const char *device, const ww_sock_options *options, ww_sock_host **host);

/* The argument of kernels: a `const warpwire::sock::Table *`. */
int ww_sock_host_table(const ww_sock_host *host, uint64_t *address);

/* Closes all sockets: calls of kernels fail with ECONNABORTED. */
int ww_sock_host_stop(ww_sock_host *host);

/* Frees their memory. Kernels that use them must have ended. */
int ww_sock_host_release(ww_sock_host *host);

/* ---- Diagnosis ------------------------------------------------------------------------------ */

/* What this machine can do, what stops it, and the fix: the report of `warpwire doctor --json`. */
int ww_doctor(char **json);

#ifdef __cplusplus
}
#endif

#endif

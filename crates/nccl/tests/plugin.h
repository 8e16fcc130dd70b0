/* NCCL's network interface as this test program sees it: written for the test, so that a mistake in
 * the library's own declarations does not repeat itself here. And two processes that are connected
 * by it. */
#ifndef PLUGIN_H
#define PLUGIN_H

#include "common.h"

/* One table for all versions: `any` is called through a cast to the version's type. */
typedef void (*any)(void);

struct net {
  const char *name;
  any init;
  int (*devices)(int *);
  int (*get_properties)(int, void *);
  any listen, connect;
  int (*accept)(void *, void **, void **);
  int (*reg_mr)(void *, void *, size_t, int, void **);
  int (*reg_mr_dma_buf)(void *, void *, size_t, int, uint64_t, int, void **);
  int (*dereg_mr)(void *, void *);
  any isend, irecv;
  int (*iflush)(void *, int, void **, int *, void **, void **);
  int (*test)(void *, int *, int *);
  int (*close_send)(void *);
  int (*close_recv)(void *);
  int (*close_listen)(void *);
  any get_device_mr, irecv_consumed;  /* v8 ends here: 152 bytes */
  any make_vdevice;                   /* v9, v10: 160 bytes */
  int (*finalize)(void *);
  any set_net_attr;                   /* v11, v12: 176 bytes */
};

_Static_assert(offsetof(struct net, make_vdevice) == 152, "v8");
_Static_assert(offsetof(struct net, finalize) == 160, "v9 and v10");
_Static_assert(sizeof(struct net) == 176, "v11 and v12");

/* --- the plugin, loaded by its symbol; one function for all versions of a call ---------------- */

static struct net *net;
static int version = 11;
static void *context;

static void find(void) {
  void *loaded = dlopen(library, RTLD_NOW | RTLD_LOCAL);
  if (!loaded) FAIL("%s", dlerror());
  char name[32];
  snprintf(name, sizeof name, "ncclNetPlugin_v%d", version);
  net = dlsym(loaded, name);
  if (!net) FAIL("%s", dlerror());
  CHECK(!strcmp(net->name, "Warpwire"));
}

static int init(void) {
  switch (version) {
    case 8: case 9: return ((int (*)(logger_t))net->init)(log_line);
    case 10: return ((int (*)(logger_t, void *))net->init)(log_line, NULL);
    default: {
      int config = -1;
      return ((int (*)(void **, uint64_t, int *, logger_t, void *))net->init)(
          &context, 7, &config, log_line, NULL);
    }
  }
}

static void load(void) {
  find();
  OK(init());
  int count = 0;
  OK(net->devices(&count));
  CHECK(count == 1);
}

static int net_listen(int device, void *handle, void **comm) {
  if (version <= 10) return ((int (*)(int, void *, void **))net->listen)(device, handle, comm);
  return ((int (*)(void *, int, void *, void **))net->listen)(context, device, handle, comm);
}

static int net_connect(int device, void *handle, void **comm) {
  void *device_comm = NULL;
  switch (version) {
    case 8: case 9:
      return ((int (*)(int, void *, void **, void **))net->connect)(device, handle, comm,
                                                                    &device_comm);
    case 10: {
      int config = -1;
      return ((int (*)(int, int *, void *, void **, void **))net->connect)(
          device, &config, handle, comm, &device_comm);
    }
    default:
      return ((int (*)(void *, int, void *, void **, void **))net->connect)(
          context, device, handle, comm, &device_comm);
  }
}

static int net_isend(void *comm, void *data, size_t size, int tag, void *memory, void **request) {
  switch (version) {
    case 8:
      return ((int (*)(void *, void *, int, int, void *, void **))net->isend)(
          comm, data, (int)size, tag, memory, request);
    case 9:
      return ((int (*)(void *, void *, size_t, int, void *, void **))net->isend)(
          comm, data, size, tag, memory, request);
    default:
      return ((int (*)(void *, void *, size_t, int, void *, void *, void **))net->isend)(
          comm, data, size, tag, memory, NULL, request);
  }
}

static int net_irecv(void *comm, int n, void **data, size_t *sizes, int *tags, void **memory,
                     void **request) {
  *request = (void *)1; /* NCCL's "completion is optional" */
  if (version == 8) {
    int small[MAX_GROUP + 1];
    for (int i = 0; i < n && i <= MAX_GROUP; i++) small[i] = (int)sizes[i];
    return ((int (*)(void *, int, void **, int *, int *, void **, void **))net->irecv)(
        comm, n, data, small, tags, memory, request);
  }
  if (version == 9)
    return ((int (*)(void *, int, void **, size_t *, int *, void **, void **))net->irecv)(
        comm, n, data, sizes, tags, memory, request);
  void *profile[MAX_GROUP + 1] = {0};
  return ((int (*)(void *, int, void **, size_t *, int *, void **, void **, void **))net->irecv)(
      comm, n, data, sizes, tags, memory, profile, request);
}

/* --- processes -------------------------------------------------------------- */

static int is_child;
static pid_t child;
static int channel;

/* Two processes from here on; the library is loaded in each of them. */
static void split(void) {
  int pair[2];
  OK(socketpair(AF_UNIX, SOCK_STREAM, 0, pair));
  child = fork();
  CHECK(child >= 0);
  is_child = child == 0;
  if (is_child) enter_namespace();
  channel = pair[is_child];
  close(pair[!is_child]);
}

static void put(const void *bytes, size_t len) {
  CHECK(write(channel, bytes, len) == (ssize_t)len);
}
static void get(void *bytes, size_t len) {
  for (size_t have = 0; have < len;) {
    ssize_t n = read(channel, (char *)bytes + have, len - have);
    if (n <= 0) FAIL("the other process has ended");
    have += (size_t)n;
  }
}
static void meet(void) {
  char byte = 1;
  put(&byte, 1);
  get(&byte, 1);
}

/* The child ends here, the parent looks at how. */
static void join(void) {
  if (is_child) _exit(0);
  int status;
  CHECK(waitpid(child, &status, 0) == child);
  if (!WIFEXITED(status) || WEXITSTATUS(status)) FAIL("the other process: %#x", status);
}

/* --- connections ------------------------------------------------------------------------------ */

struct end { void *send, *recv; };

/* Both processes call it, and get a connection in each direction. Handles move as NCCL moves them:
 * the memory is copied, and at times restored to what the peer sent. */
static struct end exchange(uint64_t seed) {
  char own[HANDLE_LEN + 8], theirs[HANDLE_LEN];
  memset(own, 0xee, sizeof own);
  void *listener = NULL;
  OK(net_listen(0, own, &listener));
  CHECK(listener && !memcmp(own + HANDLE_LEN, "\xee\xee\xee\xee\xee\xee\xee\xee", 8));
  put(own, HANDLE_LEN);
  get(theirs, HANDLE_LEN);
  memset(own, 0, sizeof own);
  struct end end = {0};
  char memory[2][HANDLE_LEN];
  memcpy(memory[0], theirs, HANDLE_LEN);
  int at = 0, calls = 0;
  while (!end.send || !end.recv) {
    sched_yield();
    uint64_t r = next_random(&seed);
    if (!end.send && r % 3) {
      OK(net_connect(0, memory[at], &end.send));
      calls++;
      if (r % 5 == 0) {
        memcpy(memory[!at], memory[at], HANDLE_LEN);
        memset(memory[at], 7, HANDLE_LEN);
        at = !at;
      }
      if (r % 7 == 0) memcpy(memory[at], theirs, HANDLE_LEN);
    } else if (!end.recv) {
      OK(net->accept(listener, &end.recv, NULL));
    }
  }
  CHECK(calls > 0);
  OK(net->close_listen(listener));
  return end;
}

static void close_end(struct end *end) {
  OK(net->close_send(end->send));
  OK(net->close_recv(end->recv));
}

/* Waits until a request is complete; as NCCL's thread, it yields when there is nothing to do. */
static int finish(void *request, int *sizes) {
  for (;;) {
    int done = 0, code = net->test(request, &done, sizes);
    if (code || done) return code;
    sched_yield();
  }
}

static void *must_recv(void *comm, int n, void **data, size_t *sizes, int *tags, void **memory) {
  void *request = NULL;
  for (; !request; sched_yield()) OK(net_irecv(comm, n, data, sizes, tags, memory, &request));
  CHECK(request != (void *)1);
  return request;
}

static void *must_send(void *comm, void *data, size_t size, int tag, void *memory) {
  void *request = NULL;
  for (; !request; sched_yield()) OK(net_isend(comm, data, size, tag, memory, &request));
  return request;
}

#endif

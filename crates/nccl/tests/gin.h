/* NCCL's interface for device-initiated networking as the test program sees it, and the ranks of a
 * communicator that use it: one process each. */
#ifndef GIN_H
#define GIN_H

#include "common.h"

#include <signal.h>
#include <stdbool.h>
#include <stdlib.h>
#include <sys/prctl.h>

enum { GIN_PROXY = 2, INC = 1, ADD = 2, MAX_RANKS = 4, QUEUE = 256 };

struct gin_v11 {
  const char *name;
  int (*init)(void **, uint64_t, logger_t);
  int (*devices)(int *);
  int (*get_properties)(int, struct props_v11 *);
  int (*listen)(void *, int, void *, void **);
  int (*connect)(void *, void **, int, int, void *, void **);
  int (*create_context)(void *, int, int, void **, void **);
  int (*reg_mr_sym)(void *, void *, size_t, int, uint64_t, void **, void **);
  int (*reg_mr_sym_dma_buf)(void *, void *, size_t, int, uint64_t, int, uint64_t, void **, void **);
  int (*dereg_mr_sym)(void *, void *);
  int (*destroy_context)(void *);
  int (*close_coll)(void *);
  int (*close_listen)(void *);
  int (*iput)(void *, uint64_t, void *, size_t, uint64_t, void *, uint32_t, void **);
  int (*iput_signal)(void *, uint64_t, void *, size_t, uint64_t, void *, uint32_t, uint64_t, void *,
                     uint64_t, uint32_t, void **);
  int (*test)(void *, void *, int *);
  int (*progress)(void *);
  int (*query_last_error)(void *, bool *);
  int (*finalize)(void *);
};

struct rma_config_v14 { int contexts, traffic_class, rank_stride; };

struct rma_v14 {
  const char *name;
  int (*init)(void **, uint64_t, logger_t);
  int (*devices)(int *);
  int (*get_properties)(int, struct props_v12 *);
  int (*listen)(void *, int, void *, void **);
  int (*connect)(void *, void **, int, int, void *, void **);
  int (*create_context)(void *, struct rma_config_v14 *, void **);
  int (*reg_mr_sym)(void *, void *, size_t, int, uint64_t, void **);
  int (*reg_mr_sym_dma_buf)(void *, void *, size_t, int, uint64_t, int, uint64_t, void **);
  int (*dereg_mr_sym)(void *, void *);
  int (*destroy_context)(void *);
  int (*close_coll)(void *);
  int (*close_listen)(void *);
  int (*iput)(void *, int, uint64_t, void *, size_t, uint64_t, void *, uint32_t, void **);
  int (*iput_signal)(void *, int, uint64_t, void *, size_t, uint64_t, void *, uint32_t, uint64_t,
                     void *, uint64_t, uint32_t, bool, void **);
  int (*iget)(void *, int, uint64_t, void *, size_t, uint64_t, void *, uint32_t, void **);
  int (*iflush)(void *, int, void *, uint32_t, void **);
  int (*test)(void *, void *, int *);
  int (*progress)(void *);
  int (*query_last_error)(void *, bool *);
  int (*finalize)(void *);
};

_Static_assert(sizeof(struct gin_v11) == 152, "GIN v11");
_Static_assert(sizeof(struct rma_v14) == 168, "RMA v14");

/* --- the plugin: one function for both versions of a call ------------------------------------- */

static int version = 11;
static struct gin_v11 *gin;
static struct rma_v14 *rma;
static void *instance;

static void load(void) {
  void *loaded = dlopen(library, RTLD_NOW | RTLD_LOCAL);
  if (!loaded) FAIL("%s", dlerror());
  gin = dlsym(loaded, "ncclGinPlugin_v11");
  rma = dlsym(loaded, "ncclRmaPlugin_v14");
  CHECK(gin && rma && !strcmp(gin->name, "Warpwire") && !strcmp(rma->name, "Warpwire"));
  int count = 0;
  OK(version == 11 ? gin->init(&instance, 7, log_line) : rma->init(&instance, 7, log_line));
  OK(version == 11 ? gin->devices(&count) : rma->devices(&count));
  CHECK(count == 1);
}

/* A communicator, with its contexts where the version has them. */
struct coll { void *comm, *context; int ranks, rank; };

static int gin_register(struct coll *coll, void *data, size_t size, int type, void **memory) {
  void *second = NULL;
  if (version != 11) return rma->reg_mr_sym(coll->comm, data, size, type, 0, memory);
  int code = gin->reg_mr_sym(coll->comm, data, size, type, 1, memory, &second);
  CHECK(second == *memory);
  return code;
}

static int gin_deregister(struct coll *coll, void *memory) {
  return (version == 11 ? gin->dereg_mr_sym : rma->dereg_mr_sym)(coll->comm, memory);
}

static int put(struct coll *coll, uint64_t from, void *source, size_t size, uint64_t to,
               void *target, uint32_t rank, void **request) {
  if (version == 11)
    return gin->iput(coll->comm, from, source, size, to, target, rank, request);
  return rma->iput(coll->context, (int)rank % 2, from, source, size, to, target, rank, request);
}

static int put_signal(struct coll *coll, uint64_t from, void *source, size_t size, uint64_t to,
                      void *target, uint32_t rank, uint64_t at, void *signals, uint64_t value,
                      uint32_t op, void **request) {
  if (version == 11)
    return gin->iput_signal(coll->comm, from, source, size, to, target, rank, at, signals, value,
                            op, request);
  return rma->iput_signal(coll->context, (int)rank % 2, from, source, size, to, target, rank, at,
                          signals, value, op, true, request);
}

static int test(struct coll *coll, void *request, int *done) {
  return (version == 11 ? gin->test : rma->test)(coll->comm, request, done);
}

static int progress(struct coll *coll) {
  return version == 11 ? gin->progress(coll->comm) : rma->progress(coll->context);
}

static int has_error(struct coll *coll) {
  bool error = true;
  OK(version == 11 ? gin->query_last_error(coll->comm, &error)
                   : rma->query_last_error(coll->context, &error));
  return error;
}

static int wait_done(struct coll *coll, void *request) {
  CHECK(request);
  for (;;) {
    int done = 5, code = test(coll, request, &done);
    if (code || done) return code;
    CHECK(done == 0);
    sched_yield();
  }
}

static void wait_word(struct coll *coll, volatile uint64_t *word, uint64_t value) {
  for (; __atomic_load_n(word, __ATOMIC_ACQUIRE) < value; sched_yield()) OK(progress(coll));
}

/* --- processes -------------------------------------------------------------------------------- */

/* What all processes share: NCCL's bootstrap. */
static struct shared {
  char handles[MAX_RANKS][HANDLE_LEN];
  volatile int arrived, generation;
} *shared;
static int rank, ranks;
static pid_t pids[MAX_RANKS];

static void become_ranks(int count) {
  shared = mmap(NULL, sizeof *shared, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0);
  CHECK(shared != MAP_FAILED);
  ranks = count;
  for (rank = 1; rank < count; rank++) {
    pids[rank] = fork();
    CHECK(pids[rank] >= 0);
    if (!pids[rank]) {
      prctl(PR_SET_PDEATHSIG, SIGKILL); /* if rank 0 fails */
      if (rank % 2) enter_namespace();
      return;
    }
  }
  rank = 0;
}

/* All ranks, or the first `count` of them. */
static void barrier_of(int count) {
  int generation = shared->generation;
  if (__atomic_add_fetch(&shared->arrived, 1, __ATOMIC_ACQ_REL) == count) {
    shared->arrived = 0;
    __atomic_store_n(&shared->generation, generation + 1, __ATOMIC_RELEASE);
  }
  while (__atomic_load_n(&shared->generation, __ATOMIC_ACQUIRE) == generation) usleep(100);
}

static void barrier(void) { barrier_of(ranks); }

/* Rank 0 looks at how the others end; `killed` is one that was. */
static void end_ranks(int killed) {
  if (rank) _exit(0);
  for (int i = 1; i < ranks; i++) {
    int status;
    CHECK(waitpid(pids[i], &status, 0) == pids[i]);
    if (i != killed && (!WIFEXITED(status) || WEXITSTATUS(status)))
      FAIL("rank %d: %#x", i, status);
  }
}

static int try_connect(struct coll *coll) {
  void *listener = NULL, *handles[MAX_RANKS];
  OK((version == 11 ? gin->listen : rma->listen)(instance, 0, shared->handles[rank], &listener));
  CHECK(listener);
  barrier();
  for (int i = 0; i < ranks; i++) handles[i] = shared->handles[i];
  *coll = (struct coll){.ranks = ranks, .rank = rank};
  void *other; /* NCCL passes another context to connect than to listen */
  OK(version == 11 ? gin->init(&other, 8, log_line) : rma->init(&other, 8, log_line));
  int code = (version == 11 ? gin->connect : rma->connect)(other, handles, ranks, rank, listener,
                                                           &coll->comm);
  OK((version == 11 ? gin->close_listen : rma->close_listen)(listener));
  CHECK(!code == !!coll->comm);
  if (!code && version != 11) {
    struct rma_config_v14 config = {.contexts = 2, .traffic_class = -1, .rank_stride = 1};
    OK(rma->create_context(coll->comm, &config, &coll->context));
  }
  return code;
}

static struct coll connect_ranks(void) {
  struct coll coll;
  OK(try_connect(&coll));
  return coll;
}

static void close_coll(struct coll *coll) {
  if (coll->context) OK(rma->destroy_context(coll->context));
  OK((version == 11 ? gin->close_coll : rma->close_coll)(coll->comm));
}

#endif

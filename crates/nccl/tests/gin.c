/* Plays NCCL's thread for device-initiated networking: the ranks of a communicator as processes.
 *
 *   gin LIBRARY MODE [VERSION [SEED]]         VERSION: 11 (GIN) or 14 (RMA)
 *
 * Prints "MODE: all good" and exits with 0, or says what went wrong. */
#define _GNU_SOURCE
#include "gin.h"

#include <dirent.h>

static uint64_t effort(uint64_t plain) {
  const char *text = getenv("PLUGIN_EFFORT");
  return plain * (text ? strtoull(text, NULL, 10) : 1);
}

/* The memory of a rank: a source, a target with a part for each rank, and signals. */
enum { SLOTS = 6, SLOT = 150000, PART = SLOTS * SLOT, SIGNALS = 64 };
struct memory {
  unsigned char *source, *target;
  volatile uint64_t *signals;
  void *source_id, *target_id, *signals_id;
};

static struct memory make_memory(struct coll *coll) {
  struct memory m = {region(PART * MAX_RANKS), region(PART * MAX_RANKS), region(SIGNALS * 8),
                     0, 0, 0};
  memset(m.target, 0xee, PART * MAX_RANKS);
  OK(gin_register(coll, m.source, PART * MAX_RANKS, HOST, &m.source_id));
  OK(gin_register(coll, m.target, PART * MAX_RANKS, HOST, &m.target_id));
  OK(gin_register(coll, (void *)m.signals, SIGNALS * 8, HOST, &m.signals_id));
  CHECK(m.source_id && m.target_id && m.signals_id && m.source_id != m.target_id);
  return m;
}

static void free_memory(struct coll *coll, struct memory *m) {
  OK(gin_deregister(coll, m->source_id));
  OK(gin_deregister(coll, m->target_id));
  OK(gin_deregister(coll, m->signals_id));
  munmap(m->source, PART * MAX_RANKS);
  munmap(m->target, PART * MAX_RANKS);
  munmap((void *)m->signals, SIGNALS * 8);
}

static unsigned char pattern(uint64_t seed, size_t at) {
  return (unsigned char)(mix(seed ^ at >> 3) >> (at & 7));
}

/* --- random puts ------------------------------------------------------------------------------ */

/* What all ranks know of the put of a slot: to whom, from and to where, with which signal. */
struct plan { int target; size_t from, to, size; int has_signal; uint32_t op; uint64_t value; };

static struct plan plan_of(uint64_t seed, uint64_t round, int source, int slot) {
  uint64_t r = mix(seed ^ mix(round * 64 + (uint64_t)source * 8 + (uint64_t)slot));
  static const size_t limits[] = {1, 9, 100, 5000, 40000, SLOT};
  struct plan plan = {.target = (int)(next_random(&r) % (uint64_t)ranks)};
  plan.size = next_random(&r) % limits[next_random(&r) % 6];
  plan.from = next_random(&r) % (SLOT - plan.size);
  plan.to = next_random(&r) % (SLOT - plan.size);
  plan.has_signal = next_random(&r) % 3 != 0;
  plan.op = next_random(&r) % 2 ? INC : ADD;
  plan.value = next_random(&r) % 1000;
  return plan;
}

/* Posts the puts of a round. The last to each rank is a signal of its own, behind all of them. */
static void put_round(struct coll *coll, struct memory *m, uint64_t seed, uint64_t round) {
  void *requests[SLOTS + MAX_RANKS] = {0};
  for (int slot = 0; slot < SLOTS; slot++) {
    struct plan plan = plan_of(seed, round, rank, slot);
    uint64_t from = (uint64_t)slot * SLOT + plan.from;
    uint64_t to = (uint64_t)rank * PART + (uint64_t)slot * SLOT + plan.to;
    for (size_t i = 0; i < plan.size; i++)
      m->source[from + i] = pattern(seed + round * 1000 + (uint64_t)(rank * 10 + slot), i);
    if (plan.has_signal)
      OK(put_signal(coll, from, m->source_id, plan.size, to, m->target_id, (uint32_t)plan.target,
                    (uint64_t)(8 * (8 + rank)), m->signals_id, plan.value, plan.op,
                    &requests[slot]));
    else
      OK(put(coll, from, m->source_id, plan.size, to, m->target_id, (uint32_t)plan.target,
             &requests[slot]));
  }
  for (int i = 0; i < ranks; i++)
    OK(put_signal(coll, 0, NULL, 0, 0, NULL, (uint32_t)i, (uint64_t)(8 * rank), m->signals_id, 77,
                  INC, &requests[SLOTS + i]));
  for (int left = SLOTS + ranks, i = 0; left; i = (i + 1) % (SLOTS + ranks)) {
    int done = 0;
    if (!requests[i]) continue;
    OK(test(coll, requests[i], &done));
    if (done) requests[i] = NULL, left--;
    else sched_yield();
  }
}

/* Looks at all that a rank has put here in a round, when its last signal has arrived. */
static void check_round(struct coll *coll, struct memory *m, uint64_t seed, uint64_t round,
                        int source, uint64_t *expected) {
  wait_word(coll, &m->signals[source], round + 1);
  for (int slot = 0; slot < SLOTS; slot++) {
    struct plan plan = plan_of(seed, round, source, slot);
    unsigned char *base = m->target + (size_t)source * PART + (size_t)slot * SLOT;
    size_t begin = plan.target == rank ? plan.to : 0;
    size_t end = plan.target == rank ? plan.to + plan.size : 0;
    if (plan.target == rank && plan.has_signal) *expected += plan.op == INC ? 1 : plan.value;
    for (size_t i = 0; i < SLOT; i++) {
      unsigned char wanted = 0xee;
      if (i >= begin && i < end)
        wanted = pattern(seed + round * 1000 + (uint64_t)(source * 10 + slot), i - begin);
      if (base[i] != wanted)
        FAIL("rank %d from %d: round %lu, slot %d, byte %zu of %zu to %zu", rank, source, round,
             slot, i, begin, end);
    }
    memset(base + begin, 0xee, end - begin);
  }
  CHECK(m->signals[source] == round + 1);
  if (m->signals[8 + source] != *expected)
    FAIL("signals of rank %d: %lu instead of %lu", source, m->signals[8 + source], *expected);
}

static void mode_random(uint64_t seed) {
  become_ranks(2 + (int)(seed % 3));
  load();
  struct coll coll = connect_ranks();
  struct memory m = make_memory(&coll);
  uint64_t expected[MAX_RANKS] = {0};
  barrier();
  for (uint64_t round = 0; round < effort(30); round++) {
    put_round(&coll, &m, seed, round);
    for (int source = 0; source < ranks; source++)
      check_round(&coll, &m, seed, round, source, &expected[source]);
    barrier();
  }
  CHECK(!has_error(&coll));
  free_memory(&coll, &m);
  close_coll(&coll);
  end_ranks(0);
}

/* --- data before its signal ------------------------------------------------------------------- */

static void mode_visible(uint64_t seed) {
  static const size_t sizes[] = {8, 64, 4096, 70000, 16};
  become_ranks(2);
  load();
  struct coll coll = connect_ranks();
  struct memory m = make_memory(&coll);
  barrier();
  for (uint64_t round = 1; round <= effort(4000); round++) {
    size_t size = sizes[(seed + round) % 5];
    volatile uint64_t *source = (volatile uint64_t *)m.source;
    volatile uint64_t *target = (volatile uint64_t *)m.target;
    void *request = NULL;
    if (rank == 1) {
      /* The very first look after the signal: every word must be there. */
      wait_word(&coll, &m.signals[0], round);
      for (size_t i = 0; i < size / 8; i++)
        if (target[i] != round * 3 + i) FAIL("round %lu, word %zu: %lu", round, i, target[i]);
      OK(put_signal(&coll, 0, NULL, 0, 0, NULL, 0, 8, m.signals_id, 1, ADD, &request));
    } else {
      for (size_t i = 0; i < size / 8; i++) source[i] = round * 3 + i;
      OK(put_signal(&coll, 0, m.source_id, size, 0, m.target_id, 1, 0, m.signals_id, 0, INC,
                    &request));
      wait_word(&coll, &m.signals[1], round);
    }
    OK(wait_done(&coll, request));
  }
  barrier();
  free_memory(&coll, &m);
  close_coll(&coll);
  end_ranks(0);
}

/* All ranks add to one word of each rank at once: nothing is lost, nothing comes twice. */
static void mode_signals(void) {
  become_ranks(MAX_RANKS);
  load();
  struct coll coll = connect_ranks();
  struct memory m = make_memory(&coll);
  barrier();
  enum { WINDOW = 40 };
  uint64_t count = effort(2000), own = 0;
  void *requests[WINDOW] = {0};
  for (uint64_t i = 0; i < count + WINDOW; i++) {
    void **request = &requests[i % WINDOW];
    if (*request) OK(wait_done(&coll, *request));
    *request = NULL;
    if (i >= count) continue;
    uint64_t value = (i * 7 + (uint64_t)rank) % 5;
    OK(put_signal(&coll, 0, NULL, 0, 0, NULL, (uint32_t)(i % (uint64_t)ranks), 8 * (SIGNALS - 1),
                  m.signals_id, value, i % 3 ? ADD : INC, request));
  }
  barrier();
  for (int source = 0; source < ranks; source++)
    for (uint64_t i = (uint64_t)rank; i < count; i += (uint64_t)ranks)
      own += i % 3 ? (i * 7 + (uint64_t)source) % 5 : 1;
  if (m.signals[SIGNALS - 1] != own) FAIL("%lu instead of %lu", m.signals[SIGNALS - 1], own);
  free_memory(&coll, &m);
  close_coll(&coll);
  end_ranks(0);
}

/* --- more operations than announced ----------------------------------------------------------- */

static void mode_full(void) {
  become_ranks(2);
  load();
  struct coll coll = connect_ranks();
  struct memory m = make_memory(&coll);
  static void *requests[4 * QUEUE];
  int room = version == 11 ? QUEUE : 3 * QUEUE;
  barrier();
  /* The engine, which these calls step, allocates until it has learned the mappings of the peer. */
  uint64_t rounds = 0;
  for (long found = 1; rank == 0 && (rounds < 3 || found); rounds++) {
    if (rounds == 50) FAIL("%ld allocations in each %d operations", found, room);
    long before = allocations;
    for (int i = 0; i < room; i++)
      OK(put_signal(&coll, 0, m.source_id, 100, 0, m.target_id, 1, 0, m.signals_id, 1, ADD,
                    &requests[i]));
    found = allocations - before;
    void *more = &more;
    EXPECT(INTERNAL_ERROR, put(&coll, 0, m.source_id, 8, 0, m.target_id, 1, &more));
    CHECK(!more && strstr(last_warning, "operations to rank 1"));
    OK(put(&coll, 0, m.source_id, 8, 0, m.target_id, 0, &more)); /* the other rank has room */
    OK(wait_done(&coll, more));
    before = allocations;
    for (int i = room - 1; i >= 0; i--) OK(wait_done(&coll, requests[i]));
    found += allocations - before;
    int done = 1;
    EXPECT(INTERNAL_ERROR, test(&coll, requests[0], &done));
    CHECK(!done);
  }
  if (rank == 0) {
    OK(put_signal(&coll, 0, NULL, 0, 0, NULL, 1, 8, m.signals_id, rounds * (uint64_t)room, ADD,
                  &requests[0]));
    OK(wait_done(&coll, requests[0]));
  }
  barrier();
  if (rank) CHECK(m.signals[0] >= 3 * (uint64_t)room && m.signals[0] == m.signals[1]);
  free_memory(&coll, &m);
  close_coll(&coll);
  end_ranks(0);
}

/* --- mistakes --------------------------------------------------------------------------------- */

static void wrong_operations(struct coll *coll, struct memory *m) {
  const uint64_t len = PART * MAX_RANKS;
  void *source = m->source_id, *target = m->target_id, *signals = m->signals_id;
  struct {
    uint64_t from; void *source; size_t size; uint64_t to; void *target; uint32_t rank; uint64_t at;
    void *signals; uint32_t op;
  } wrong[] = {
    {0, NULL, 8, 0, target, 1, 0, signals, INC},
    {0, source, 8, 0, NULL, 1, 0, signals, INC},
    {0, (void *)0x1234567, 8, 0, target, 1, 0, signals, INC},
    {0, source, 8, 0, (void *)(~0ul >> 1), 1, 0, signals, INC},
    {0, source, 8, 0, target, 2, 0, signals, INC},
    {0, source, 8, 0, target, ~0u, 0, signals, INC},
    {len - 7, source, 8, 0, target, 1, 0, signals, INC},
    {0, source, 8, len - 7, target, 1, 0, signals, INC},
    {~0ul, source, 8, 0, target, 1, 0, signals, INC},
    {0, source, 8, ~0ul - 3, target, 1, 0, signals, INC},
    {0, source, ~0ul, 0, target, 1, 0, signals, INC},
    {0, source, 8, 0, target, 1, 8 * SIGNALS, signals, INC},
    {0, source, 8, 0, target, 1, 8 * SIGNALS - 7, signals, INC},
    {0, source, 8, 0, target, 1, 4, signals, INC},
    {0, source, 8, 0, target, 1, 0, NULL, INC},
    {0, source, 8, 0, target, 1, 0, signals, 0},
    {0, source, 8, 0, target, 1, 0, signals, 3},
  };
  for (size_t i = 0; i < sizeof wrong / sizeof *wrong; i++) {
    void *request = &request;
    last_warning[0] = 0;
    int code = put_signal(coll, wrong[i].from, wrong[i].source, wrong[i].size, wrong[i].to,
                          wrong[i].target, wrong[i].rank, wrong[i].at, wrong[i].signals, 1,
                          wrong[i].op, &request);
    if (code != INVALID_ARGUMENT || request || !last_warning[0]) FAIL("mistake %zu: %d", i, code);
    if (i > 10) continue; /* those of the signal */
    request = &request;
    EXPECT(INVALID_ARGUMENT, put(coll, wrong[i].from, wrong[i].source, wrong[i].size, wrong[i].to,
                                 wrong[i].target, wrong[i].rank, &request));
    CHECK(!request);
  }
  void *request = NULL;
  int done = 7;
  EXPECT(INVALID_ARGUMENT, put(coll, 0, source, 8, 0, target, 1, NULL));
  EXPECT(INTERNAL_ERROR, test(coll, NULL, &done));
  EXPECT(INTERNAL_ERROR, test(coll, (void *)1, &done));
  EXPECT(INTERNAL_ERROR, test(coll, (void *)~0ul, &done));
  CHECK(!done);
  EXPECT(INVALID_ARGUMENT, test(coll, request, NULL));
  EXPECT(INVALID_ARGUMENT, gin_deregister(coll, (void *)0x5555));
}

static void mode_mistakes(void) {
  become_ranks(2);
  load();
  struct props_v11 v11;
  struct props_v12 v12;
  OK(gin->get_properties(0, &v11));
  OK(rma->get_properties(0, &v12));
  CHECK(v11.v9.device_type == GIN_PROXY && v11.v9.ptr_support == (HOST | CUDA));
  CHECK(v12.device_type == GIN_PROXY && v12.ptr_support == (HOST | CUDA) && v12.rail == -1);
  CHECK(v11.v9.max_recvs * 32 == QUEUE && v12.max_recvs * 32 == QUEUE);
  EXPECT(INVALID_ARGUMENT, gin->get_properties(1, &v11));
  CHECK(!gin->create_context && !gin->destroy_context && gin->finalize);
  struct coll coll = connect_ranks();
  void *listener, *made = &made, *handles[2] = {shared->handles[0], shared->handles[1]};
  char handle[HANDLE_LEN], zeros[HANDLE_LEN] = {0};
  OK(gin->listen(instance, 0, handle, &listener));
  EXPECT(INVALID_ARGUMENT, gin->connect(instance, handles, 0, 0, listener, &made));
  EXPECT(INVALID_ARGUMENT, gin->connect(instance, handles, 2, 2, listener, &made));
  EXPECT(INVALID_ARGUMENT, gin->connect(instance, handles, 2, -1, listener, &made));
  EXPECT(INVALID_ARGUMENT, gin->connect(instance, NULL, 2, 0, listener, &made));
  EXPECT(INVALID_ARGUMENT, gin->connect(instance, handles, 2, 0, NULL, &made));
  handles[1] = zeros;
  EXPECT(INVALID_ARGUMENT, gin->connect(instance, handles, 2, 0, listener, &made));
  CHECK(!made);
  OK(gin->close_listen(listener));
  struct memory m = make_memory(&coll);
  barrier();
  if (version != 11) {
    struct rma_config_v14 none = {0}, many = {.contexts = 1 << 20};
    EXPECT(INVALID_ARGUMENT, rma->create_context(coll.comm, &none, &made));
    EXPECT(INVALID_ARGUMENT, rma->create_context(coll.comm, &many, &made));
    EXPECT(INVALID_ARGUMENT, rma->create_context(coll.comm, NULL, &made));
    EXPECT(INVALID_ARGUMENT, rma->iput(coll.context, 2, 0, m.source_id, 8, 0, m.target_id, 1,
                                       &made));
    EXPECT(INVALID_ARGUMENT, rma->iget(coll.context, 0, 1, m.source_id, PART * MAX_RANKS, 0,
                                       m.target_id, 1, &made));
  }
  wrong_operations(&coll, &m);
  barrier();
  for (size_t i = 0; i < PART * MAX_RANKS; i++) CHECK(m.target[i] == 0xee);
  for (int i = 0; i < SIGNALS; i++) CHECK(!m.signals[i]);
  /* One rank cannot register: none can, and the next registration is all right. */
  void *memory = &memory;
  EXPECT(rank ? REMOTE_ERROR : INVALID_ARGUMENT,
         gin_register(&coll, rank ? m.source : NULL, 4096, HOST, &memory));
  CHECK(!memory && strstr(last_warning, "regist"));
  EXPECT(INVALID_ARGUMENT, gin_register(&coll, m.source, 4096, CUDA, &memory));
  EXPECT(INVALID_ARGUMENT, gin_register(&coll, m.source, 4096, 4, &memory));
  EXPECT(INVALID_ARGUMENT, gin_register(&coll, m.source, 0, HOST, &memory));
  CHECK(!memory);
  OK(gin_register(&coll, m.source, 4096, HOST, &memory));
  void *request = NULL;
  OK(put(&coll, 0, m.source_id, 0, 0, m.target_id, (uint32_t)!rank, &request));
  OK(wait_done(&coll, request));
  OK(gin_deregister(&coll, memory));
  EXPECT(INVALID_ARGUMENT, gin_deregister(&coll, memory));
  EXPECT(INVALID_ARGUMENT, put(&coll, 0, memory, 8, 0, m.target_id, (uint32_t)!rank, &request));
  OK(gin_deregister(&coll, NULL));
  CHECK(!has_error(&coll));
  barrier();
  free_memory(&coll, &m);
  close_coll(&coll);
  end_ranks(0);
}

/* Reads and flushes, which only RMA has. */
static void mode_gets(uint64_t seed) {
  become_ranks(3);
  load();
  struct coll coll = connect_ranks();
  struct memory m = make_memory(&coll);
  for (size_t i = 0; i < PART; i++) m.source[i] = pattern(seed + (uint64_t)rank, i);
  barrier();
  for (uint64_t i = 0; i < effort(50); i++) {
    uint64_t r = mix(seed ^ i);
    uint32_t from = (uint32_t)(next_random(&r) % 3);
    size_t size = next_random(&r) % 100000, at = next_random(&r) % (PART - size);
    void *requests[2] = {0};
    OK(rma->iget(coll.context, 1, at, m.source_id, size, 5, m.target_id, from, &requests[0]));
    OK(rma->iflush(coll.context, 0, m.signals_id, from, &requests[1]));
    OK(wait_done(&coll, requests[1]));
    int done = 0;
    OK(test(&coll, requests[0], &done));
    CHECK(done); /* the flush is behind it */
    for (size_t k = 0; k < size; k++) CHECK(m.target[5 + k] == pattern(seed + from, at + k));
    CHECK(m.target[5 + size] == 0xee);
    memset(m.target + 5, 0xee, size);
  }
  barrier();
  free_memory(&coll, &m);
  close_coll(&coll);
  end_ranks(0);
}

/* --- ends ------------------------------------------------------------------------------------- */

static int open_files(void) {
  DIR *folder = opendir("/proc/self/fd");
  CHECK(folder);
  int count = 0;
  while (readdir(folder)) count++;
  closedir(folder);
  return count;
}

/* Several communicators at once, closed in every order: none disturbs another, nothing is left. */
static void mode_closing(void) {
  become_ranks(3);
  load();
  int files = 0;
  for (int round = 0; round < 8; round++) {
    struct coll first = connect_ranks(), second = connect_ranks();
    struct memory m = make_memory(&first), other = make_memory(&second);
    void *request = NULL;
    uint32_t next = (uint32_t)((rank + 1) % ranks), before = (uint32_t)((rank + 2) % ranks);
    OK(put_signal(&first, 0, m.source_id, 5000, 0, m.target_id, next, 8 * (uint64_t)rank,
                  m.signals_id, 1, INC, &request));
    wait_word(&first, &m.signals[before], 1);
    if (round % 2) OK(wait_done(&first, request));
    else wait_done(&first, request); /* `next` may have closed; then this fails, and never hangs */
    if ((round + rank) % 3 == 1) usleep(20000);
    if (round & 2) free_memory(&first, &m);
    if (round % 2) barrier();
    close_coll(&first);
    OK(put_signal(&second, 0, other.source_id, 90000, 0, other.target_id, next, 8 * (uint64_t)rank,
                  other.signals_id, 1, INC, &request));
    wait_word(&second, &other.signals[before], 1);
    OK(wait_done(&second, request));
    barrier();
    close_coll(&second);
    barrier();
    /* By then each of up to three engines has served a communicator. */
    if (round == 3) files = open_files();
    for (int tries = 0; round > 3 && open_files() > files; tries++) {
      CHECK(tries < 20);
      usleep(50000);
    }
  }
  OK(version == 11 ? gin->finalize(instance) : rma->finalize(instance));
  end_ranks(0);
}

/* How much longer things may take than on an idle machine. */
static double slowdown(void) {
  const char *limit = getenv("PLUGIN_LIMIT");
  return limit ? atoi(limit) / 60.0 : 1;
}

/* The last rank is killed while others use it: they get an error, soon, and are usable. */
static void mode_killed(uint64_t seed) {
  become_ranks(3);
  load();
  struct coll coll;
  if (seed % 3 == 1) {
    /* before it connects */
    void *listener;
    if (rank == 2) {
      OK(gin->listen(instance, 0, shared->handles[rank], &listener));
      barrier();
      sleep(1);
      raise(SIGKILL);
    }
    double start = now();
    EXPECT(REMOTE_ERROR, try_connect(&coll));
    CHECK(now() - start < 6 * slowdown() && strstr(last_warning, "rank 2"));
    end_ranks(2);
    return;
  }
  coll = connect_ranks();
  struct memory m = make_memory(&coll);
  barrier();
  if (rank == 2) {
    usleep(100000);
    raise(SIGKILL);
  }
  double start = now();
  void *request = NULL;
  if (seed % 3 == 2) {
    /* while others register */
    void *memory = NULL;
    EXPECT(REMOTE_ERROR, gin_register(&coll, m.source, 4096, HOST, &memory));
    CHECK(!memory);
  } else {
    int code;
    do {
      code = put(&coll, 0, m.source_id, 70000, 0, m.target_id, 2, &request);
      if (!code) code = wait_done(&coll, request);
    } while (!code);
    CHECK(code == REMOTE_ERROR);
    EXPECT(REMOTE_ERROR, put(&coll, 0, m.source_id, 8, 0, m.target_id, 2, &request));
    CHECK(!request);
    while (!has_error(&coll)) progress(&coll);
    EXPECT(REMOTE_ERROR, progress(&coll));
  }
  CHECK(now() - start < 5 * slowdown());
  /* The other rank still is there. */
  OK(put_signal(&coll, 0, m.source_id, 5000, 0, m.target_id, (uint32_t)!rank, 0, m.signals_id, 1,
                INC, &request));
  OK(wait_done(&coll, request));
  while (!m.signals[0]) progress(&coll), sched_yield();
  barrier_of(2);
  free_memory(&coll, &m);
  close_coll(&coll);
  end_ranks(2);
}

/* --- speed ------------------------------------------------------------------------------------ */

/* Half of a round trip of a put with its signal. */
static void mode_latency(size_t size) {
  become_ranks(2);
  load();
  struct coll coll = connect_ranks();
  struct memory m = make_memory(&coll);
  uint64_t rounds = 20000;
  double start = 0;
  for (uint64_t i = 1; i <= rounds + 1000; i++) {
    void *request = NULL;
    if (i == 1001) start = now();
    if (rank) wait_word(&coll, &m.signals[0], i);
    OK(put_signal(&coll, 0, m.source_id, size, 0, m.target_id, (uint32_t)!rank, 0, m.signals_id, 1,
                  INC, &request));
    if (!rank) wait_word(&coll, &m.signals[0], i);
    OK(wait_done(&coll, request));
  }
  if (!rank) printf("%zu bytes: %.2f us\n", size, (now() - start) / (double)rounds / 2 * 1e6);
  barrier();
  free_memory(&coll, &m);
  close_coll(&coll);
  end_ranks(0);
}

int main(int count, char **arguments) {
  if (count < 3) FAIL("usage: gin LIBRARY MODE [VERSION [SEED|SIZE]]");
  library = arguments[1];
  const char *mode = arguments[2];
  if (count > 3) version = atoi(arguments[3]);
  if (version != 11 && version != 14) FAIL("version 11 or 14");
  uint64_t number = count > 4 ? strtoull(arguments[4], NULL, 0) : 1;
  show_log = getenv("PLUGIN_LOG") != NULL;
  const char *limit = getenv("PLUGIN_LIMIT");
  alarm(limit ? (unsigned)atoi(limit) : 120);
  if (!strcmp(mode, "random")) mode_random(number);
  else if (!strcmp(mode, "visible")) mode_visible(number);
  else if (!strcmp(mode, "signals")) mode_signals();
  else if (!strcmp(mode, "full")) mode_full();
  else if (!strcmp(mode, "mistakes")) mode_mistakes();
  else if (!strcmp(mode, "gets")) mode_gets(number);
  else if (!strcmp(mode, "closing")) mode_closing();
  else if (!strcmp(mode, "killed")) mode_killed(number);
  else if (!strcmp(mode, "latency")) mode_latency(number);
  else if (!strcmp(mode, "overrun")) mode_overrun();
  else FAIL("there is no mode %s", mode);
  printf("%s: all good\n", mode);
  return 0;
}

/* Plays NCCL: loads the plugin by its symbol, and uses it by NCCL's rules and against them.
 *
 *   plugin LIBRARY MODE [VERSION [SEED]]
 *
 * Prints "MODE: all good" and exits with 0, or says what went wrong. */
#define _GNU_SOURCE
#include "plugin.h"

#include <arpa/inet.h>
#include <dirent.h>
#include <pthread.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/socket.h>
#include <sys/wait.h>
#include <time.h>
#include <unistd.h>

/* --- random schedules ------------------------------------------------------------------------- */

enum { WINDOW = 24, ROOM = 300000 };

/* What both ends know of a group: its messages, their tags and sizes. */
struct group { int n; int tags[MAX_GROUP]; size_t rooms[MAX_GROUP], sizes[MAX_GROUP]; };

static struct group group_of(uint64_t seed, uint64_t number) {
  uint64_t r = mix(seed * 1000003 + number);
  struct group group = {.n = 1};
  if (next_random(&r) % 2) group.n = 1 + (int)(next_random(&r) % MAX_GROUP);
  for (int i = 0; i < group.n; i++) {
    group.tags[i] = (int)(next_random(&r) % 5) - 2; /* tags of a group may be equal */
    static const size_t limits[] = {1, 9, 100, 5000, 70000, ROOM};
    group.rooms[i] = next_random(&r) % limits[next_random(&r) % 6];
    group.sizes[i] = next_random(&r) % 3 ? group.rooms[i] : next_random(&r) % (group.rooms[i] + 1);
  }
  return group;
}

static unsigned char pattern(uint64_t seed, uint64_t group, int entry, size_t at) {
  return (unsigned char)(mix(seed ^ group << 20 ^ (uint64_t)entry << 16 ^ at >> 3) >> (at & 7));
}

static void fill(unsigned char *at, uint64_t seed, uint64_t group, int entry, size_t size) {
  for (size_t i = 0; i < size; i++) at[i] = pattern(seed, group, entry, i);
}

struct side {
  void *comm, *memory;
  unsigned char *buffer;
  uint64_t seed, random, groups;
};

/* Sends all groups, the messages of each in a random order. Of equal tags, the first receive gets
 * the first message. */
static void *sender(void *arguments) {
  struct side *side = arguments;
  struct { void *request; size_t size; } window[WINDOW] = {0};
  uint64_t number = 0;
  struct group group = group_of(side->seed, 0);
  unsigned used = 0;
  int outstanding = 0, entry = -1, place = -1;
  while (number < side->groups || outstanding) {
    int slot = (int)(next_random(&side->random) % WINDOW);
    sched_yield();
    if (window[slot].request) {
      int done = 0, size = -1;
      OK(net->test(window[slot].request, &done, next_random(&side->random) % 2 ? &size : NULL));
      if (!done) continue;
      CHECK(size == -1 || (size_t)size == window[slot].size);
      window[slot].request = NULL;
      outstanding--;
    } else if (number < side->groups) {
      if (entry < 0) {
        do entry = (int)(next_random(&side->random) % (uint64_t)group.n);
        while (used & 1u << entry);
        for (int i = group.n - 1; i >= 0; i--)
          if (group.tags[i] == group.tags[entry] && !(used & 1u << i)) entry = i;
        place = slot;
        fill(side->buffer + (size_t)place * ROOM, side->seed, number, entry, group.sizes[entry]);
      }
      OK(net_isend(side->comm, side->buffer + (size_t)place * ROOM, group.sizes[entry],
                   group.tags[entry], side->memory, &window[place].request));
      if (!window[place].request) continue;
      window[place].size = group.sizes[entry];
      outstanding++;
      used |= 1u << entry;
      entry = -1;
      if (used == (1u << group.n) - 1) used = 0, group = group_of(side->seed, ++number);
    }
  }
  return NULL;
}

/* Receives them, and compares every byte, also those that must not change. */
static void *receiver(void *arguments) {
  struct side *side = arguments;
  enum { GROUPS = WINDOW / MAX_GROUP };
  struct { void *request; uint64_t number; struct group group; } window[GROUPS] = {0};
  uint64_t posted = 0, done_groups = 0;
  while (done_groups < side->groups) {
    int slot = (int)(next_random(&side->random) % GROUPS);
    sched_yield();
    unsigned char *base = side->buffer + (size_t)slot * MAX_GROUP * ROOM;
    struct group *group = &window[slot].group;
    if (window[slot].request) {
      int done = 0, sizes[MAX_GROUP];
      memset(sizes, 0xff, sizeof sizes);
      OK(net->test(window[slot].request, &done, sizes));
      if (!done) continue;
      for (int i = 0; i < group->n; i++) {
        if ((size_t)sizes[i] != group->sizes[i])
          FAIL("group %lu, message %d: %d bytes instead of %zu", window[slot].number, i, sizes[i],
               group->sizes[i]);
        unsigned char *at = base + (size_t)i * ROOM;
        for (size_t k = 0; k < group->sizes[i]; k++)
          if (at[k] != pattern(side->seed, window[slot].number, i, k))
            FAIL("group %lu, message %d, byte %zu of %zu", window[slot].number, i, k,
                 group->sizes[i]);
        for (size_t k = group->sizes[i]; k < group->sizes[i] + 16 && k < ROOM; k++)
          CHECK(at[k] == 0xee);
      }
      window[slot].request = NULL;
      done_groups++;
    } else if (posted < side->groups) {
      *group = group_of(side->seed, posted);
      void *data[MAX_GROUP], *memory[MAX_GROUP];
      for (int i = 0; i < group->n; i++) {
        data[i] = base + (size_t)i * ROOM;
        memory[i] = side->memory;
        memset(data[i], 0xee, group->sizes[i] + 16 < ROOM ? group->sizes[i] + 16 : ROOM);
      }
      OK(net_irecv(side->comm, group->n, data, group->rooms, group->tags, memory,
                   &window[slot].request));
      if (window[slot].request) window[slot].number = posted++;
    }
  }
  return NULL;
}

static void pair(uint64_t seed, uint64_t groups) {
  struct end end = exchange(seed + (uint64_t)is_child);
  struct side out = {end.send, NULL, region((size_t)WINDOW * ROOM), mix(seed + (uint64_t)is_child),
                     mix(seed + 10), groups};
  struct side in = {end.recv, NULL, region((size_t)WINDOW * ROOM), mix(seed + (uint64_t)!is_child),
                    mix(seed + 20), groups};
  OK(net->reg_mr(out.comm, out.buffer, (size_t)WINDOW * ROOM, HOST, &out.memory));
  OK(net->reg_mr(in.comm, in.buffer, (size_t)WINDOW * ROOM, HOST, &in.memory));
  CHECK(out.memory && in.memory);
  pthread_t thread;
  OK(pthread_create(&thread, NULL, sender, &out));
  receiver(&in);
  OK(pthread_join(thread, NULL));
  OK(net->dereg_mr(out.comm, out.memory));
  OK(net->dereg_mr(in.comm, in.memory));
  close_end(&end);
  munmap(out.buffer, (size_t)WINDOW * ROOM);
  munmap(in.buffer, (size_t)WINDOW * ROOM);
}

static uint64_t effort(uint64_t plain) {
  const char *text = getenv("PLUGIN_EFFORT");
  return plain * (text ? strtoull(text, NULL, 10) : 1);
}

static void mode_random(uint64_t seed) {
  split();
  load();
  pair(seed, effort(60));
  meet();
  join();
}

/* Several communicators and threads at once. */
static void mode_threads(uint64_t seed) {
  enum { PAIRS = 3 };
  split();
  load();
  struct side sides[2 * PAIRS];
  struct end ends[PAIRS];
  pthread_t threads[2 * PAIRS];
  for (int i = 0; i < PAIRS; i++) {
    ends[i] = exchange(seed + (uint64_t)i);
    for (int in = 0; in < 2; in++) {
      struct side *side = &sides[2 * i + in];
      uint64_t direction = (uint64_t)(in ? !is_child : is_child);
      *side = (struct side){in ? ends[i].recv : ends[i].send, NULL, region((size_t)WINDOW * ROOM),
                            mix(seed + 100 * (uint64_t)i + direction), mix(seed), effort(20)};
      OK(net->reg_mr(side->comm, side->buffer, (size_t)WINDOW * ROOM, HOST, &side->memory));
    }
  }
  for (int i = 0; i < 2 * PAIRS; i++)
    OK(pthread_create(&threads[i], NULL, i % 2 ? receiver : sender, &sides[i]));
  for (int i = 0; i < 2 * PAIRS; i++) OK(pthread_join(threads[i], NULL));
  for (int i = 0; i < PAIRS; i++) close_end(&ends[i]);
  /* Memory may be deregistered after its communicator is closed. */
  for (int i = 0; i < 2 * PAIRS; i++) OK(net->dereg_mr(NULL, sides[i].memory));
  meet();
  join();
}

/* --- sizes, full queues, allocations ---------------------------------------------------------- */

static void mode_sizes(void) {
  split();
  load();
  struct end end = exchange(1);
  size_t sizes[] = {0, 1, 7, 8, 63, 64, 65, 4095, 4096, 4097, 65535, 65536, 65537, 131073,
                    (1 << 20) + 3, (4 << 20) - 1};
  size_t room = 4 << 20;
  unsigned char *buffer = region(room);
  void *comm = is_child ? end.send : end.recv, *memory;
  OK(net->reg_mr(comm, buffer, room, HOST, &memory));
  for (size_t i = 0; i < sizeof sizes / sizeof *sizes; i++) {
    size_t size = sizes[i];
    int got = -1, tag = (int)i;
    if (is_child) {
      for (size_t k = 0; k < size; k++) buffer[k] = (unsigned char)(k * 7 + i);
      OK(finish(must_send(comm, buffer, size, tag, size ? memory : NULL), &got));
    } else {
      void *data = buffer;
      memset(buffer, 0xee, room);
      OK(finish(must_recv(comm, 1, &data, &room, &tag, &memory), &got));
      for (size_t k = 0; k < room; k++)
        CHECK(buffer[k] == (k < size ? (unsigned char)(k * 7 + i) : 0xee));
    }
    CHECK((size_t)got == size);
  }
  OK(net->dereg_mr(comm, memory));
  close_end(&end);
  meet();
  join();
}

/* The largest message, in memory that is one page mapped many times. */
static void mode_huge(void) {
  enum { PIECE = 2 << 20 };
  size_t size = (size_t)1 << 31;
  split();
  load();
  struct end end = exchange(1);
  int file = memfd_create("huge", 0);
  OK(ftruncate(file, PIECE));
  char *buffer = mmap(NULL, size, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  CHECK(buffer != MAP_FAILED);
  for (size_t at = 0; at < size; at += PIECE)
    CHECK(mmap(buffer + at, PIECE, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_FIXED, file, 0) !=
          MAP_FAILED);
  void *comm = is_child ? end.send : end.recv, *memory, *data = buffer;
  OK(net->reg_mr(comm, buffer, size, HOST, &memory));
  if (is_child) memset(buffer, 0x5a, PIECE);
  int got = -1, tag = 3;
  OK(finish(is_child ? must_send(comm, buffer, size, tag, memory)
                     : must_recv(comm, 1, &data, &size, &tag, &memory), &got));
  CHECK(got == 0x7fffffff); /* an int does not hold more */
  for (size_t k = 0; k < PIECE; k++) CHECK(buffer[k] == 0x5a);
  if (is_child) {
    void *request;
    EXPECT(INVALID_ARGUMENT, net_isend(comm, buffer, size + 1, tag, memory, &request));
  }
  meet();
  close_end(&end);
  join();
}

/* Queues that are full refuse, and go on afterwards; requests allocate nothing. */
static void mode_full(void) {
  split();
  load();
  struct end end = exchange(1);
  enum { MOST = 2000 };
  static void *requests[MOST];
  static char buffer[4096];
  void *comm = is_child ? end.send : end.recv, *memory, *data = buffer;
  size_t size = 8;
  int tag = 0, posted = 0;
  OK(net->reg_mr(comm, buffer, sizeof buffer, HOST, &memory));
  if (is_child) {
    /* Nothing is posted yet: an isend must be tried again. */
    OK(net_isend(comm, buffer, 8, tag, memory, &requests[0]));
    CHECK(!requests[0]);
    meet();
    int count;
    get(&count, sizeof count);
    while (posted < count) requests[posted++] = must_send(comm, buffer, 8, tag, memory);
    OK(net_isend(comm, buffer, 8, tag, memory, &requests[posted]));
    CHECK(!requests[posted]);
    meet();
  } else {
    meet();
    while (posted < MOST) {
      OK(net_irecv(comm, 1, &data, &size, &tag, &memory, &requests[posted]));
      if (!requests[posted]) break;
      posted++;
    }
    CHECK(posted >= 32 && posted < MOST);
    put(&posted, sizeof posted);
    meet();
  }
  for (int i = posted - 1; i >= 0; i--) OK(finish(requests[i], NULL));
  /* A request that is complete is dead. */
  int done = 0;
  EXPECT(INTERNAL_ERROR, net->test(requests[0], &done, NULL));
  /* The engine, which these calls step, allocates until it has learned the mappings of the peer. */
  long mine = 1, theirs = 1;
  for (int batch = 0; mine || theirs; batch++) {
    if (batch == 50) FAIL("%ld allocations in each 300 requests, %ld at the peer", mine, theirs);
    mine = allocations;
    for (int i = 0; i < 300; i++)
      OK(finish(is_child ? must_send(comm, buffer, 8, tag, memory)
                         : must_recv(comm, 1, &data, &size, &tag, &memory), NULL));
    mine = allocations - mine;
    put(&mine, sizeof mine);
    get(&theirs, sizeof theirs);
  }
  meet();
  OK(net->dereg_mr(comm, memory));
  close_end(&end);
  join();
}

/* --- the end of a connection ------------------------------------------------------------------ */

/* Closes in every order, with and without requests outstanding, and leaves nothing behind. */
static int count_files(void) {
  int count = 0;
  DIR *folder = opendir("/proc/self/fd");
  while (readdir(folder)) count++;
  closedir(folder);
  return count;
}

static void mode_closing(void) {
  split();
  load();
  static char buffer[70000];
  int files = 0;
  for (int round = 0; round < (int)effort(32); round++) {
    if (round == 8) files = count_files();
    char own[HANDLE_LEN], theirs[HANDLE_LEN];
    struct end end = {0};
    void *listener, *memory[2], *data = buffer, *request;
    OK(net_listen(0, own, &listener));
    put(own, HANDLE_LEN);
    get(theirs, HANDLE_LEN);
    while (!end.send || !end.recv) {
    sched_yield();
      if (!end.send) OK(net_connect(0, theirs, &end.send));
      if (!end.recv) OK(net->accept(listener, &end.recv, NULL));
    }
    if (round & 1) OK(net->close_listen(listener));
    OK(net->reg_mr(end.send, buffer, sizeof buffer, HOST, &memory[0]));
    OK(net->reg_mr(end.recv, buffer, sizeof buffer, HOST, &memory[1]));
    size_t size = sizeof buffer;
    int tag = 1;
    if (round & 2) {
      /* A message on its way, and a receive that never gets one. */
      OK(net_irecv(end.recv, 1, &data, &size, &tag, &memory[1], &request));
      OK(net_isend(end.send, buffer, size, tag, memory[0], &request));
    }
    if (round & 4) OK(net->dereg_mr(end.send, memory[0]));
    if (round & 8) OK(net->close_send(end.send));
    if (round & 16) meet();
    OK(net->close_recv(end.recv));
    if (!(round & 8)) OK(net->close_send(end.send));
    if (!(round & 4)) OK(net->dereg_mr(end.send, memory[0]));
    OK(net->dereg_mr(end.recv, memory[1]));
    if (!(round & 1)) OK(net->close_listen(listener));
    meet();
  }
  /* Shared memory of the last connections is unmapped later. */
  if (count_files() > files + 8) FAIL("%d files instead of %d", count_files(), files);
  OK(version >= 11 ? net->finalize(context) : 0);
  join();
}

/* A receiver that closes right after its last message does not fail its sender, nor does one that
 * exits without closing anything. */
static void mode_last_words(uint64_t number) {
  split();
  load();
  struct end end = exchange(number);
  static char buffer[1 << 20];
  void *comm = is_child ? end.recv : end.send, *memory, *data = buffer;
  size_t size = sizeof buffer;
  int tag = 1;
  OK(net->reg_mr(comm, buffer, size, HOST, &memory));
  if (is_child) {
    OK(finish(must_recv(comm, 1, &data, &size, &tag, &memory), NULL));
    if (number % 2) OK(net->close_recv(comm));
    exit(0);
  }
  void *request = must_send(comm, buffer, size, tag, memory);
  usleep(20000);
  OK(finish(request, NULL));
  OK(net->close_send(comm));
  join();
}

/* The peer is killed: both directions end with an error, soon. */
static void mode_killed(void) {
  split();
  load();
  struct end end = exchange(1);
  static char buffer[1 << 20];
  void *memory[2], *data = buffer, *request[2] = {0};
  size_t size = sizeof buffer;
  int tag = 1;
  OK(net->reg_mr(end.send, buffer, size, HOST, &memory[0]));
  OK(net->reg_mr(end.recv, buffer, size, HOST, &memory[1]));
  request[1] = must_recv(end.recv, 1, &data, &size, &tag, &memory[1]);
  meet();
  if (is_child) for (;;) pause();
  kill(child, SIGKILL);
  double start = now();
  /* The child has posted a receive, so this may be on its way; then there is no other. */
  int code = SUCCESS;
  while (!code) {
    code = net_isend(end.send, buffer, size, tag, memory[0], &request[0]);
    if (!code && request[0]) code = finish(request[0], NULL);
  }
  CHECK(code == REMOTE_ERROR);
  EXPECT(REMOTE_ERROR, finish(request[1], NULL));
  CHECK(strstr(last_warning, "process has ended"));
  EXPECT(REMOTE_ERROR, net_irecv(end.recv, 1, &data, &size, &tag, &memory[1], &request[1]));
  fprintf(stderr, "the end was noticed after %.3f s\n", now() - start);
  close_end(&end);
  waitpid(child, NULL, 0);
}

/* A peer that is stopped is waited for, until it counts as lost. */
static void mode_stopped(void) {
  split();
  load();
  struct end end = exchange(1);
  static char buffer[4096];
  void *memory, *data = buffer;
  size_t size = sizeof buffer;
  int tag = 1;
  OK(net->reg_mr(end.recv, buffer, size, HOST, &memory));
  void *request = must_recv(end.recv, 1, &data, &size, &tag, &memory);
  meet();
  if (is_child) for (;;) pause();
  kill(child, SIGSTOP);
  double start = now();
  int done = 0, code = 0;
  while (!code && !done) {
    usleep(1000); /* it takes seconds */
    code = net->test(request, &done, NULL);
  }
  CHECK(code == REMOTE_ERROR && now() - start > 2);
  CHECK(strstr(last_warning, "RetryExceeded"));
  kill(child, SIGKILL);
  close_end(&end);
}

/* --- strangers and mistakes ------------------------------------------------------------------- */

static int dial(const char *handle) {
  struct sockaddr_in to = {.sin_family = AF_INET, .sin_addr.s_addr = htonl(INADDR_LOOPBACK)};
  memcpy(&to.sin_port, handle + 24, 2);
  int fd = socket(AF_INET, SOCK_STREAM, 0);
  OK(connect(fd, (struct sockaddr *)&to, sizeof to));
  return fd;
}

static void mode_strangers(void) {
  load();
  char handle[HANDLE_LEN], other[HANDLE_LEN];
  void *listener, *comm = NULL, *peer = NULL;
  OK(net_listen(0, handle, &listener));
  int fds[150];
  for (int i = 0; i < 150; i++) {
    fds[i] = dial(handle);
    /* Another protocol; a wrong secret; nothing at all. */
    static const char *texts[] = {"GET / HTTP/1.1\r\n\r\nand more", "warpncc1????????????????", ""};
    CHECK(write(fds[i], texts[i % 3], strlen(texts[i % 3])) >= 0);
    if (i % 10 == 0) shutdown(fds[i], SHUT_WR);
    if (i % 25 == 0) OK(net->accept(listener, &peer, NULL));
  }
  for (int i = 0; i < 1000 && !peer; i++) OK(net->accept(listener, &peer, NULL));
  CHECK(!peer);
  double start = now();
  while (!comm || !peer) {
    sched_yield();
    if (!comm) OK(net_connect(0, handle, &comm));
    if (!peer) OK(net->accept(listener, &peer, NULL));
  }
  CHECK(now() - start < 30);
  for (int i = 0; i < 150; i++) close(fds[i]);
  /* The same listener serves another, and a wrong secret gets nowhere. */
  void *second = NULL, *second_peer = NULL;
  memcpy(other, handle, HANDLE_LEN);
  other[40] ^= 1;
  for (int i = 0; i < 300; i++) {
    void *none = NULL;
    OK(net_connect(0, other, &none));
    OK(net->accept(listener, &second_peer, NULL));
    CHECK(!none && !second_peer);
    usleep(100);
  }
  while (!second || !second_peer) {
    sched_yield();
    if (!second) OK(net_connect(0, handle, &second));
    if (!second_peer) OK(net->accept(listener, &second_peer, NULL));
  }
  OK(net->close_listen(listener));
  /* Nothing listens any more. */
  int code = 0;
  while (!code) code = net_connect(0, handle, &comm);
  CHECK(code == REMOTE_ERROR && !comm);
}

static void mode_mistakes(void) {
  load();
  char handle[HANDLE_LEN];
  struct end end = {0};
  void *listener, *memory = NULL, *request = NULL, *none = NULL;
  OK(net_listen(0, handle, &listener));
  while (!end.send || !end.recv) {
    sched_yield();
    if (!end.send) OK(net_connect(0, handle, &end.send));
    if (!end.recv) OK(net->accept(listener, &end.recv, NULL));
  }
  union {
    struct props_v8 v8;
    struct props_v9 v9;
    struct props_v11 v11;
    struct props_v12 v12;
  } props;
  memset(&props, 0xee, sizeof props);
  for (int device = -1; device <= 1; device += 2) {
    EXPECT(INVALID_ARGUMENT, net->get_properties(device, &props));
    EXPECT(INVALID_ARGUMENT, net_listen(device, handle, &none));
    EXPECT(INVALID_ARGUMENT, net_connect(device, handle, &none));
  }
  EXPECT(INVALID_ARGUMENT, net->get_properties(0, NULL));
  OK(net->get_properties(0, &props));
  CHECK(!strcmp(props.v8.name, "warp0") && props.v8.ptr_support == HOST);
  int speed = version == 8 ? props.v8.speed : props.v9.speed;
  int recvs = version == 8 ? props.v8.max_recvs : props.v9.max_recvs;
  CHECK(speed >= 1000 && recvs == MAX_GROUP);
  if (version > 8) CHECK(props.v9.ndevs == 1 && props.v9.devs[0] == 0 && !props.v9.device_type);
  if (version > 8 && version < 12) CHECK(props.v9.max_p2p_bytes == 1 << 30);
  if (version == 11) CHECK(props.v11.max_multi_request_size == 1);
  if (version == 12) CHECK(props.v12.max_coll_bytes == 1 << 30 && props.v12.rail == -1);
  size_t size = 100, sizes[MAX_GROUP + 1] = {0};
  static char buffer[4096];
  void *data[MAX_GROUP + 1] = {buffer}, *memories[MAX_GROUP + 1] = {0};
  int tags[MAX_GROUP + 1] = {5}, done = 0;
  EXPECT(INVALID_ARGUMENT, net->devices(NULL));
  EXPECT(INVALID_ARGUMENT, net_listen(0, NULL, &none));
  EXPECT(INVALID_ARGUMENT, net_connect(0, NULL, &none));
  memset(handle, 0x11, sizeof handle);
  EXPECT(INVALID_ARGUMENT, net_connect(0, handle, &none));
  CHECK(strstr(last_warning, "handle"));
  EXPECT(INVALID_ARGUMENT, net->accept(NULL, &none, NULL));
  EXPECT(INVALID_ARGUMENT, net->reg_mr(NULL, buffer, size, HOST, &memory));
  EXPECT(INVALID_ARGUMENT, net->reg_mr(end.recv, NULL, size, HOST, &memory));
  EXPECT(INVALID_ARGUMENT, net->reg_mr(end.recv, buffer, 0, HOST, &memory));
  EXPECT(INVALID_USAGE, net->reg_mr(end.recv, buffer, size, CUDA, &memory));
  CHECK(!memory && strstr(last_warning, "only host memory is announced"));
  CHECK(strstr(last_warning, "Set WARPWIRE_NCCL_GDR=1"));
  EXPECT(INVALID_USAGE, net->reg_mr(end.recv, buffer, size, 4, &memory));
  EXPECT(INVALID_USAGE, net->reg_mr_dma_buf(end.recv, buffer, size, CUDA, 0, 0, &memory));
  EXPECT(INVALID_ARGUMENT, net->test(NULL, &done, NULL));
  EXPECT(INVALID_USAGE, net_isend(end.recv, buffer, 1, 5, NULL, &request));
  EXPECT(INVALID_USAGE, net_irecv(end.send, 1, data, sizes, tags, memories, &request));
  EXPECT(INVALID_ARGUMENT, net_irecv(end.recv, 0, data, sizes, tags, memories, &request));
  EXPECT(INVALID_ARGUMENT,
         net_irecv(end.recv, MAX_GROUP + 1, data, sizes, tags, memories, &request));
  sizes[0] = size;
  EXPECT(INVALID_ARGUMENT, net_irecv(end.recv, 1, data, sizes, tags, memories, &request));
  CHECK(!request);
  if (version == 8)
    EXPECT(INVALID_ARGUMENT, net_isend(end.send, buffer, (size_t)-5, 5, NULL, &request));
  OK(net->iflush(end.recv, 1, data, tags, memories, &request));
  CHECK(!request);
  /* A message that is longer than its receive. */
  OK(net->reg_mr(end.recv, buffer, sizeof buffer, HOST, &memories[0]));
  OK(net->reg_mr(end.send, buffer, sizeof buffer, HOST, &memory));
  void *receive = must_recv(end.recv, 1, data, sizes, tags, memories);
  int code;
  while (!(code = net_isend(end.send, buffer, 101, 5, memory, &request))) CHECK(!request);
  CHECK(code == INVALID_USAGE && strstr(last_warning, "101 bytes"));
  EXPECT(INVALID_ARGUMENT, net_isend(end.send, buffer, 100, 5, NULL, &request));
  CHECK(!request && strstr(last_warning, "memory handle"));
  /* Another tag waits for another receive; the right one goes. */
  OK(net_isend(end.send, buffer, 100, 6, memory, &request));
  CHECK(!request);
  request = must_send(end.send, buffer + 200, 100, 5, memory);
  OK(finish(request, NULL));
  OK(finish(receive, &done));
  CHECK(done == 100);
  OK(net->close_listen(listener));
  close_end(&end);
  OK(net->dereg_mr(NULL, memory));
  OK(net->dereg_mr(NULL, memories[0]));
  OK(net->dereg_mr(NULL, NULL));
}

/* GPU memory is announced (WARPWIRE_NCCL_GDR=1); this process has none. */
static void mode_gdr(void) {
  load();
  const char *level = getenv("PLUGIN_LEVEL");
  CHECK(!strcmp(getenv("NCCL_NET_GDR_LEVEL"), level ? level : "SYS"));
  CHECK(!strcmp(getenv("NCCL_NET_GDR_READ"), "0"));
  union { struct props_v8 v8; struct props_v9 v9; struct props_v12 v12; } props;
  OK(net->get_properties(0, &props));
  /* Version 8 cannot ask for flushes. */
  CHECK(props.v8.ptr_support == (version == 8 ? HOST : HOST | CUDA) && !props.v8.pci_path);
  if (version > 8) CHECK(props.v9.force_flush == 1);
  char handle[HANDLE_LEN];
  struct end end = {0};
  void *listener, *memory = NULL;
  OK(net_listen(0, handle, &listener));
  while (!end.send || !end.recv) {
    sched_yield();
    if (!end.send) OK(net_connect(0, handle, &end.send));
    if (!end.recv) OK(net->accept(listener, &end.recv, NULL));
  }
  static char buffer[4096];
  EXPECT(INVALID_ARGUMENT, net->reg_mr(end.recv, buffer, sizeof buffer, CUDA, &memory));
  CHECK(!memory && strstr(last_warning, "type CUDA (2)"));
  EXPECT(INVALID_ARGUMENT,
         net->reg_mr_dma_buf(end.send, buffer, sizeof buffer, CUDA, 0, -1, &memory));
  EXPECT(INVALID_USAGE, net->reg_mr(end.recv, buffer, sizeof buffer, 4, &memory));
  CHECK(!memory && strstr(last_warning, "host (1) and CUDA memory (2)"));
  OK(net->close_listen(listener));
  close_end(&end);
}

/* Settings that cannot be met: init fails, and says why. */
static void mode_settings(void) {
  find();
  CHECK(init() != SUCCESS);
  if (!strstr(last_warning, "WARPWIRE_NCCL_")) FAIL("%s", last_warning);
  int count;
  CHECK(net->devices(&count) != SUCCESS);
}

/* A child that was forked after init is refused, and does not disturb its parent. */
static void mode_forks(void) {
  split();
  load();
  struct end end = exchange(1);
  pid_t pid = fork();
  if (!pid) {
    int count = 0;
    CHECK(net->devices(&count) == INTERNAL_ERROR && strstr(last_warning, "forked"));
    exit(0);
  }
  int status;
  CHECK(waitpid(pid, &status, 0) == pid && WIFEXITED(status) && !WEXITSTATUS(status));
  static char buffer[5000];
  void *comm = is_child ? end.send : end.recv, *memory, *data = buffer;
  size_t size = sizeof buffer;
  int tag = 1;
  OK(net->reg_mr(comm, buffer, size, HOST, &memory));
  OK(finish(is_child ? must_send(comm, buffer, size, tag, memory)
                     : must_recv(comm, 1, &data, &size, &tag, &memory), NULL));
  meet();
  close_end(&end);
  join();
}

/* --- speed ------------------------------------------------------------------------------------ */

/* As many messages of `size` bytes as there are steps in NCCL's buffers, for some seconds. */
static void mode_bandwidth(size_t size) {
  enum { DEPTH = 8 };
  split();
  load();
  struct end end = exchange(1);
  char *buffer = region(size * DEPTH);
  void *comm = is_child ? end.send : end.recv, *memory, *requests[DEPTH] = {0};
  memset(buffer, 1, size * DEPTH);
  OK(net->reg_mr(comm, buffer, size * DEPTH, HOST, &memory));
  const char *text = getenv("PLUGIN_SECONDS");
  double start = 0, seconds = text ? atof(text) : 2;
  uint64_t count = 0, total = 0;
  int tag = 0, stop = 0;
  for (int i = 0; !stop || requests[i % DEPTH]; i++) {
    int at = i % DEPTH;
    if (requests[at]) {
      OK(finish(requests[at], NULL));
      requests[at] = NULL;
      if (++count == 64) start = now();
      total += count > 64 ? size : 0;
    }
    /* Both ends stop at the same message. */
    if (is_child && !stop && count > 64 && now() - start > seconds) stop = 1;
    if (is_child) {
      buffer[(size_t)at * size] = stop ? 9 : 1;
      requests[at] = must_send(comm, buffer + (size_t)at * size, size, tag, memory);
      if (stop) break;
    } else {
      void *data = buffer + (size_t)at * size;
      if (buffer[(size_t)at * size] == 9) break;
      requests[at] = must_recv(comm, 1, &data, &size, &tag, &memory);
    }
  }
  double took = now() - start;
  if (is_child) for (int i = 0; i < DEPTH; i++) if (requests[i]) OK(finish(requests[i], NULL));
  if (!is_child) printf("%zu bytes: %.2f GB/s, %.0f messages/s\n", size, (double)total / took / 1e9,
                        (double)(count - 64) / took);
  fflush(stdout);
  meet();
  close_end(&end);
  join();
}

/* Half of a round trip. */
static void mode_latency(size_t size) {
  split();
  load();
  struct end end = exchange(1);
  char *buffer = region(2 * size);
  void *memory[2], *data = buffer + size;
  int tag = 0;
  OK(net->reg_mr(end.send, buffer, 2 * size, HOST, &memory[0]));
  OK(net->reg_mr(end.recv, buffer, 2 * size, HOST, &memory[1]));
  double start = 0;
  int rounds = 20000;
  for (int i = -1000; i < rounds; i++) {
    if (i == 0) start = now();
    void *receive = must_recv(end.recv, 1, &data, &size, &tag, &memory[1]);
    if (is_child) OK(finish(receive, NULL));
    OK(finish(must_send(end.send, buffer, size, tag, memory[0]), NULL));
    if (!is_child) OK(finish(receive, NULL));
  }
  if (!is_child) printf("%zu bytes: %.2f us\n", size, (now() - start) / rounds / 2 * 1e6);
  fflush(stdout);
  meet();
  close_end(&end);
  join();
}

int main(int count, char **arguments) {
  if (count < 3) FAIL("usage: plugin LIBRARY MODE [VERSION [SEED|SIZE]]");
  library = arguments[1];
  const char *mode = arguments[2];
  if (count > 3) version = atoi(arguments[3]);
  uint64_t number = count > 4 ? strtoull(arguments[4], NULL, 0) : 1;
  show_log = getenv("PLUGIN_LOG") != NULL;
  const char *limit = getenv("PLUGIN_LIMIT");
  alarm(limit ? (unsigned)atoi(limit) : 120);
  signal(SIGPIPE, SIG_DFL);
  if (!strcmp(mode, "random")) mode_random(number);
  else if (!strcmp(mode, "threads")) mode_threads(number);
  else if (!strcmp(mode, "sizes")) mode_sizes();
  else if (!strcmp(mode, "huge")) mode_huge();
  else if (!strcmp(mode, "full")) mode_full();
  else if (!strcmp(mode, "closing")) mode_closing();
  else if (!strcmp(mode, "last_words")) mode_last_words(number);
  else if (!strcmp(mode, "killed")) mode_killed();
  else if (!strcmp(mode, "stopped")) mode_stopped();
  else if (!strcmp(mode, "strangers")) mode_strangers();
  else if (!strcmp(mode, "mistakes")) mode_mistakes();
  else if (!strcmp(mode, "settings")) mode_settings();
  else if (!strcmp(mode, "gdr")) mode_gdr();
  else if (!strcmp(mode, "overrun")) mode_overrun();
  else if (!strcmp(mode, "forks")) mode_forks();
  else if (!strcmp(mode, "bandwidth")) mode_bandwidth(number);
  else if (!strcmp(mode, "latency")) mode_latency(number);
  else FAIL("there is no mode %s", mode);
  printf("%s: all good\n", mode);
  return 0;
}

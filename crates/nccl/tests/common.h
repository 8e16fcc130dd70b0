/* What the test programs that play NCCL have in common: NCCL's codes and properties, written for
 * the tests, so that a mistake in the library's own declarations does not repeat itself here;
 * checks, NCCL's log, randomness, time. */
#ifndef COMMON_H
#define COMMON_H

#ifndef _GNU_SOURCE
#define _GNU_SOURCE
#endif

#include <dlfcn.h>
#include <fcntl.h>
#include <sched.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/socket.h>
#include <sys/wait.h>
#include <time.h>
#include <unistd.h>

enum { SUCCESS = 0, SYSTEM_ERROR = 2, INTERNAL_ERROR = 3, INVALID_ARGUMENT = 4, INVALID_USAGE = 5,
       REMOTE_ERROR = 6 };
enum { HANDLE_LEN = 128, MAX_GROUP = 8, HOST = 1, CUDA = 2 };

typedef void (*logger_t)(int level, unsigned long flags, const char *file, int line,
                         const char *format, ...);

struct props_v8 {
  char *name, *pci_path;
  uint64_t guid;
  int ptr_support, reg_is_global, speed, port;
  float latency;
  int max_comms, max_recvs, device_type, device_version;
};

struct props_v9 {
  char *name, *pci_path;
  uint64_t guid;
  int ptr_support, reg_is_global, force_flush, speed, port;
  float latency;
  int max_comms, max_recvs, device_type, device_version;
  int ndevs, devs[4];
  size_t max_p2p_bytes, max_coll_bytes;
};

struct props_v11 {
  struct props_v9 v9;
  int max_multi_request_size;
};

struct props_v12 {
  char *name, *pci_path;
  uint64_t guid;
  int ptr_support, reg_is_global, force_flush, speed, port;
  float latency;
  int max_comms, max_recvs, device_type, device_version;
  int ndevs, devs[8];
  size_t max_p2p_bytes, max_coll_bytes;
  int max_multi_request_size;
  int16_t rail, plane;
};

_Static_assert(sizeof(struct props_v8) == 64, "v8");
_Static_assert(sizeof(struct props_v9) == 104, "v9");
_Static_assert(sizeof(struct props_v11) == 112, "v11");
_Static_assert(sizeof(struct props_v12) == 128, "v12");

#define FAIL(...) (fprintf(stderr, "%s:%d: ", __FILE__, __LINE__), fprintf(stderr, __VA_ARGS__), \
                   fputc('\n', stderr), _exit(1))
#define CHECK(condition) do { if (!(condition)) FAIL("%s", #condition); } while (0)
#define OK(call) do { int code_ = (call); if (code_) FAIL("%s: %d", #call, code_); } while (0)
#define EXPECT(code, call) do { int code_ = (call); \
  if (code_ != (code)) FAIL("%s: %d instead of %s", #call, code_, #code); } while (0)

static const char *library;
static char last_warning[512];
static int show_log;

static void log_line(int level, unsigned long flags, const char *file, int line,
                     const char *format, ...) {
  (void)flags, (void)file, (void)line;
  va_list values;
  va_start(values, format);
  char text[512];
  vsnprintf(text, sizeof text, format, values);
  va_end(values);
  if (level == 2) memcpy(last_warning, text, sizeof text);
  if (show_log) fprintf(stderr, "%d: %s\n", level, text);
}

static uint64_t mix(uint64_t x) {
  x += 0x9e3779b97f4a7c15u;
  x = (x ^ (x >> 30)) * 0xbf58476d1ce4e5b9u;
  x = (x ^ (x >> 27)) * 0x94d049bb133111ebu;
  return x ^ (x >> 31);
}

static uint64_t next_random(uint64_t *state) { return mix((*state)++); }

static double now(void) {
  struct timespec t;
  clock_gettime(CLOCK_MONOTONIC, &t);
  return (double)t.tv_sec + (double)t.tv_nsec / 1e9;
}

/* Counts the allocations of a thread, also those of the library. A sanitizer has its own malloc. */
static __thread long allocations;
#ifndef __SANITIZE_ADDRESS__
extern void *__libc_malloc(size_t), *__libc_calloc(size_t, size_t), *__libc_realloc(void *, size_t);
void *malloc(size_t n) { allocations++; return __libc_malloc(n); }
void *calloc(size_t n, size_t m) { allocations++; return __libc_calloc(n, m); }
void *realloc(void *p, size_t n) { allocations++; return __libc_realloc(p, n); }
#endif

/* The other machine: a child moves to the network namespace PLUGIN_NETNS, if that is set. */
static void enter_namespace(void) {
  const char *path = getenv("PLUGIN_NETNS");
  if (!path) return;
  int file = open(path, O_RDONLY | O_CLOEXEC);
  if (file < 0 || setns(file, CLONE_NEWNET)) FAIL("%s cannot be entered", path);
  close(file);
}

/* A mistake that a sanitizer must find. */
static void mode_overrun(void) {
  volatile size_t size = 8;
  volatile char *bytes = malloc(size);
  bytes[size] = 1;
}

static void *region(size_t size) {
  void *at = mmap(NULL, size, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
  CHECK(at != MAP_FAILED);
  return at;
}

#endif

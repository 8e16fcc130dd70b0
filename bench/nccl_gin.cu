// Kernels that use NCCL's device-initiated networking (GIN), over whichever network NCCL has. One
// process is one rank; tools/h200-nccl-gin builds and starts them.
//
//   nccl_gin RANK RANKS ID_FILE ROUNDS
//
// 1. rounds: fill, put with signal, wait, compare every byte, barrier.
// 2. contexts: puts with additive signals and counters from a block per context, to every rank and
//    to itself; sums must be exact.
// 3. round trips of puts with signals.
// Exit status: 0; 3 if there is no device communicator; 1 for everything else.
#include <chrono>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <string>
#include <unistd.h>

#include <cuda_runtime.h>
#include <nccl.h>
#include <nccl_device.h>

#define CUDA(call)                                                                             \
  do {                                                                                         \
    cudaError_t code = (call);                                                                 \
    if (code != cudaSuccess) fail(#call, cudaGetErrorString(code));                            \
  } while (0)
#define NCCL(call)                                                                             \
  do {                                                                                         \
    ncclResult_t code = (call);                                                                \
    if (code != ncclSuccess) fail(#call, ncclGetErrorString(code));                            \
  } while (0)

static int rank;

static void fail(const char *what, const char *why) {
  fprintf(stderr, "rank %d: %s: %s\n", rank, what, why);
  _exit(1);
}

constexpr size_t WINDOW = 64 << 20;
constexpr int THREADS = 512, CONTEXTS = 4;
// Signals of a context. They begin with 0; a kernel cannot read what they begin with, because the
// other rank's kernel may run already.
constexpr ncclGinSignal_t ROUND = 0, SUM = 1, TRIP = 2;
constexpr int SIGNALS = 3;

struct Report {
  unsigned long long wrong, first_round, first_at;
  unsigned long long sums[CONTEXTS], counters[CONTEXTS];
};

__device__ __host__ inline uint32_t pattern(uint32_t from, uint32_t round, uint64_t at) {
  uint32_t x = (from * 0x9e3779b1u) ^ (round * 0x85ebca6bu) ^ (uint32_t)at * 0xc2b2ae35u;
  x ^= x >> 15;
  return x * 0x27d4eb2fu;
}

// Bytes of a round: short ones often, some up to 1 MiB, none aligned in particular.
__device__ inline size_t round_size(uint32_t round) {
  uint32_t r = pattern(7, round, 1);
  uint32_t limit = r % 16 == 0 ? 1u << 20 : r % 4 == 0 ? 1u << 16 : 1u << 12;
  return 1 + (r >> 8) % limit;
}

__device__ inline size_t round_offset(uint32_t round) { return pattern(9, round, 2) % 100000; }

__global__ void rounds(ncclDevComm comm, ncclWindow_t send, ncclWindow_t receive, uint8_t *out,
                       const uint8_t *in, uint32_t count, Report *report) {
  ncclGin gin{comm, 0};
  ncclGinBarrierSession<ncclCoopCta> barrier{ncclCoopCta(), gin, ncclTeamWorld(comm),
                                             comm.railGinBarrier, 0};
  uint32_t peer = (comm.rank + 1) % comm.nRanks, from = (comm.rank + comm.nRanks - 1) % comm.nRanks;
  for (uint32_t round = 1; round <= count; round++) {
    size_t size = round_size(round), at = round_offset(round);
    for (size_t i = threadIdx.x; i < size; i += blockDim.x)
      out[at + i] = (uint8_t)pattern(comm.rank, round, i);
    __syncthreads();
    gin.put(ncclTeamWorld(comm), peer, receive, at + 5, send, at, size, ncclGin_SignalInc{ROUND},
            ncclGin_None{}, ncclCoopCta());
    gin.waitSignal(ncclCoopCta(), ROUND, round);
    // The first look at the data after its signal.
    for (size_t i = threadIdx.x; i < size; i += blockDim.x) {
      if (in[at + 5 + i] == (uint8_t)pattern(from, round, i)) continue;
      if (atomicAdd(&report->wrong, 1ull) == 0) report->first_round = round, report->first_at = i;
    }
    // Nobody overwrites what is being compared.
    barrier.sync(ncclCoopCta(), cuda::memory_order_acq_rel, ncclGinFenceLevel::Relaxed);
  }
  gin.flush(ncclCoopCta());
}

// Block i uses context i: `count` puts of a word to each rank, each with SignalAdd of its number.
__global__ void contexts(ncclDevComm comm, ncclWindow_t send, ncclWindow_t receive, uint32_t count,
                         Report *report) {
  int context = blockIdx.x;
  if (context >= (int)comm.ginContextCount) return;
  ncclGin gin{comm, context};
  for (int peer = threadIdx.x / 32; peer < comm.nRanks; peer += blockDim.x / 32)
    for (uint32_t i = threadIdx.x % 32; i < count; i += 32)
      gin.put(ncclTeamWorld(comm), peer, receive, 8 * (size_t)(comm.rank * CONTEXTS + context),
              send, 8 * (size_t)i, 8, ncclGin_SignalAdd{SUM, i + 1}, ncclGin_CounterInc{0});
  uint64_t sum = (uint64_t)comm.nRanks * count * (count + 1) / 2;
  uint64_t puts = (uint64_t)comm.nRanks * count;
  gin.waitSignal(ncclCoopCta(), SUM, sum);
  gin.waitCounter(ncclCoopCta(), 0, puts);
  gin.flush(ncclCoopCta());
  if (threadIdx.x == 0) {
    report->sums[context] = gin.readSignal(SUM) - sum;
    report->counters[context] = gin.readCounter(0) - puts;
  }
}

__global__ void trips(ncclDevComm comm, ncclWindow_t send, ncclWindow_t receive, size_t size,
                      uint64_t before, uint32_t count) {
  ncclGin gin{comm, 0};
  int peer = 1 - comm.rank;
  for (uint32_t i = 1; i <= count; i++) {
    if (comm.rank == 1) gin.waitSignal(ncclCoopThread(), TRIP, before + i);
    if (size == 0) gin.signal(ncclTeamWorld(comm), peer, ncclGin_SignalInc{TRIP});
    else
      gin.put(ncclTeamWorld(comm), peer, receive, 0, send, 0, size, ncclGin_SignalInc{TRIP});
    if (comm.rank == 0) gin.waitSignal(ncclCoopThread(), TRIP, before + i);
  }
  gin.flush(ncclCoopThread());
}

static double now() {
  auto since = std::chrono::steady_clock::now().time_since_epoch();
  return std::chrono::duration<double>(since).count();
}

// A kernel that waits for a rank that has failed never ends: NCCL's own errors are looked at.
static void finish(ncclComm_t comm, cudaStream_t stream, const char *what) {
  double start = now();
  for (;;) {
    cudaError_t state = cudaStreamQuery(stream);
    if (state == cudaSuccess) return;
    if (state != cudaErrorNotReady) fail(what, cudaGetErrorString(state));
    ncclResult_t code = ncclSuccess;
    ncclCommGetAsyncError(comm, &code);
    if (code != ncclSuccess && code != ncclInProgress) fail(what, ncclGetErrorString(code));
    if (now() - start > 150) fail(what, "the kernel does not end");
    usleep(50);
  }
}

static ncclUniqueId shared_id(const std::string &path) {
  ncclUniqueId id;
  if (rank == 0) {
    NCCL(ncclGetUniqueId(&id));
    FILE *file = fopen((path + ".new").c_str(), "w");
    if (!file || fwrite(&id, sizeof id, 1, file) != 1 || fclose(file)) fail("write", path.c_str());
    if (rename((path + ".new").c_str(), path.c_str())) fail("rename", path.c_str());
    return id;
  }
  for (int tries = 0; tries < 600; tries++, usleep(100000)) {
    FILE *file = fopen(path.c_str(), "r");
    if (!file) continue;
    bool whole = fread(&id, sizeof id, 1, file) == 1;
    fclose(file);
    if (whole) return id;
  }
  fail("read", path.c_str());
  return id;
}

int main(int count, char **arguments) {
  if (count != 5) fail("usage", "nccl_gin RANK RANKS ID_FILE ROUNDS");
  rank = atoi(arguments[1]);
  int ranks = atoi(arguments[2]);
  uint32_t round_count = (uint32_t)atoi(arguments[4]);
  CUDA(cudaSetDevice(0));
  ncclComm_t comm;
  NCCL(ncclCommInitRank(&comm, ranks, shared_id(arguments[3]), rank));
  void *send, *receive;
  NCCL(ncclMemAlloc(&send, WINDOW));
  NCCL(ncclMemAlloc(&receive, WINDOW));
  CUDA(cudaMemset(send, 0, WINDOW));
  CUDA(cudaMemset(receive, 0, WINDOW));
  ncclWindow_t send_window, receive_window;
  NCCL(ncclCommWindowRegister(comm, send, WINDOW, &send_window, NCCL_WIN_COLL_SYMMETRIC));
  ncclDevCommRequirements needs = {};
  needs.railGinBarrierCount = 1;
  needs.ginContextCount = CONTEXTS;
  needs.ginSignalCount = SIGNALS;
  needs.ginCounterCount = 1;
  ncclDevComm device;
  double start = now();
  ncclResult_t made = ncclDevCommCreate(comm, &needs, &device);
  if (made != ncclSuccess) {
    printf("rank %d: no device communicator: %s (%s)\n", rank, ncclGetErrorString(made),
           ncclGetLastError(comm));
    fflush(stdout);
    _exit(3);
  }
  // One window before the device communicator, one after it: both ways are registered.
  NCCL(ncclCommWindowRegister(comm, receive, WINDOW, &receive_window, NCCL_WIN_COLL_SYMMETRIC));
  if (rank == 0) printf("%d contexts, set up in %.2f s\n", (int)device.ginContextCount,
                        now() - start);
  cudaStream_t stream;
  CUDA(cudaStreamCreateWithFlags(&stream, cudaStreamNonBlocking));
  Report result = {}, *report;
  CUDA(cudaMalloc(&report, sizeof *report));
  CUDA(cudaMemcpy(report, &result, sizeof result, cudaMemcpyHostToDevice));

  start = now();
  rounds<<<1, THREADS, 0, stream>>>(device, send_window, receive_window, (uint8_t *)send,
                                    (const uint8_t *)receive, round_count, report);
  CUDA(cudaGetLastError());
  finish(comm, stream, "rounds");
  double took = now() - start;
  CUDA(cudaMemcpy(&result, report, sizeof result, cudaMemcpyDeviceToHost));
  printf("rank %d: %u rounds in %.2f s, %.1f us each, %llu bytes wrong\n", rank, round_count, took,
         took / round_count * 1e6, result.wrong);
  if (result.wrong)
    printf("rank %d: first in round %llu at %llu\n", rank, result.first_round, result.first_at);

  start = now();
  contexts<<<CONTEXTS, 64, 0, stream>>>(device, send_window, receive_window, 1000, report);
  CUDA(cudaGetLastError());
  finish(comm, stream, "contexts");
  took = now() - start;
  CUDA(cudaMemcpy(&result, report, sizeof result, cudaMemcpyDeviceToHost));
  bool exact = true;
  for (int i = 0; i < (int)device.ginContextCount && i < CONTEXTS; i++)
    exact &= result.sums[i] == 0 && result.counters[i] == 0;
  double puts = 1000.0 * ranks * CONTEXTS;
  printf("rank %d: contexts: sums are %s, %.0f puts/s\n", rank, exact ? "exact" : "WRONG",
         puts / took);

  uint64_t trips_so_far = 0;
  for (size_t size : {0, 8, 1024, 16384, 65536, 1 << 20, 16 << 20}) {
    if (ranks != 2) break;
    uint32_t trip_count = size >= 1 << 20 ? 50 : 1000;
    for (int warm = 1; warm >= 0; warm--) {
      uint32_t n = warm ? trip_count / 10 : trip_count;
      start = now();
      trips<<<1, 1, 0, stream>>>(device, send_window, receive_window, size, trips_so_far, n);
      trips_so_far += n;
      CUDA(cudaGetLastError());
      finish(comm, stream, "trips");
      double half = (now() - start) / n / 2;
      if (!warm && rank == 0)
        printf("put of %8zu bytes with signal: %9.2f us one way, %6.2f GB/s\n", size, half * 1e6,
               (double)size / half / 1e9);
    }
  }
  fflush(stdout);
  bool good = !result.wrong && exact;
  NCCL(ncclDevCommDestroy(comm, &device));
  NCCL(ncclCommWindowDeregister(comm, send_window));
  NCCL(ncclCommWindowDeregister(comm, receive_window));
  NCCL(ncclMemFree(send));
  NCCL(ncclMemFree(receive));
  NCCL(ncclCommDestroy(comm));
  printf("rank %d: %s\n", rank, good ? "all good" : "WRONG");
  return good ? 0 : 1;
}

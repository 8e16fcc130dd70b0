// Groups of calling threads: a thread, a warp or a block. Included by the other headers; CUDA
// (nvcc, or NVRTC without any other header) and C++17 for CPU threads.
#ifndef WARPWIRE_GROUP_CUH
#define WARPWIRE_GROUP_CUH

#if defined(__CUDACC__) || defined(__CUDACC_RTC__)
#define WARPWIRE_CUDA 1
#define WARPWIRE_FN __device__ inline
// Too long to be inlined at every use.
#define WARPWIRE_CALL __device__ __noinline__ inline
// Before a loop that is not worth its unrolled size.
#define WARPWIRE_NO_UNROLL _Pragma("unroll 1")
#else
#define WARPWIRE_CUDA 0
#define WARPWIRE_FN inline
#define WARPWIRE_CALL inline
#define WARPWIRE_NO_UNROLL
#include <string.h>

#include <chrono>
#include <thread>
#endif

namespace warpwire {

typedef unsigned char u8;
typedef unsigned short u16;
typedef unsigned int u32;
typedef unsigned long long u64;
typedef long long i64;
static_assert(sizeof(u32) == 4 && sizeof(u64) == 8, "what is shared is made of words of these sizes");

constexpr u64 kNoTimeout = ~0ull;

// A single thread.
struct Thread {
    WARPWIRE_FN u32 rank() const { return 0; }
    WARPWIRE_FN u32 size() const { return 1; }
    WARPWIRE_FN void sync() const {}
    WARPWIRE_FN u64 broadcast(u64 mine) const { return mine; }  // the value of rank 0
    WARPWIRE_FN bool any(bool mine) const { return mine; }
};

#if WARPWIRE_CUDA
// All 32 lanes of a warp.
struct Warp {
    WARPWIRE_FN u32 rank() const {
        u32 lane;
        asm("mov.u32 %0, %%laneid;" : "=r"(lane));
        return lane;
    }
    WARPWIRE_FN u32 size() const { return 32; }
    WARPWIRE_FN void sync() const { __syncwarp(); }
    WARPWIRE_FN u64 broadcast(u64 mine) const {
        __syncwarp();  // __shfl_sync does not order memory
        return __shfl_sync(0xffffffffu, mine, 0);
    }
    WARPWIRE_FN bool any(bool mine) const { return __any_sync(0xffffffffu, mine); }
};

// All threads of a block.
struct Block {
    WARPWIRE_FN u32 rank() const { return threadIdx.x + blockDim.x * (threadIdx.y + blockDim.y * threadIdx.z); }
    WARPWIRE_FN u32 size() const { return blockDim.x * blockDim.y * blockDim.z; }
    WARPWIRE_FN void sync() const { __syncthreads(); }
    WARPWIRE_FN u64 broadcast(u64 mine) const {
        __shared__ u64 shared;
        if (rank() == 0) shared = mine;
        __syncthreads();
        u64 given = shared;
        __syncthreads();
        return given;
    }
    WARPWIRE_FN bool any(bool mine) const { return __syncthreads_or(mine); }
};
#else
// A CPU thread is its own warp and its own block.
typedef Thread Warp;
typedef Thread Block;
#endif

}  // namespace warpwire

#endif

// The copy agent: one resident block that copies on request between device and pinned host memory.
// mod.rs has the equivalent for the simulated GPU.

#include "../block_copy.cuh"

// The request slot, in device memory. The host writes it through a window, the sequence number
// last.
struct Request {
    volatile u64 sequence, to, from, len;
};

// Past the caches: the host reads and writes the same memory while the kernel runs.
struct Uncached {
    static __device__ uint4 load(const uint4 *from) { return __ldcv(from); }
    static __device__ void store(uint4 *to, uint4 value) { __stwt(to, value); }
    template <class T> static __device__ T load(const T *from) { return *(const volatile T *)from; }
    template <class T> static __device__ void store(T *to, T value) { *(volatile T *)to = value; }
};

// Loads the sequence number with acquire semantics: the rest of the request is visible after it.
static __device__ u64 acquire(volatile u64 *from) {
    u64 value;
    asm volatile("ld.acquire.sys.global.u64 %0, [%1];" : "=l"(value) : "l"(from) : "memory");
    return value;
}

// Serves requests whose sequence number differs from `last`, until one has the length ~0 (stop) or
// none has arrived for `idle_timeout` clock cycles.
extern "C" __global__ void copy_agent(u64 request, u64 done, u64 last, u64 idle_timeout) {
    __shared__ u64 sequence, to, from, len;
    Request *req = (Request *)request;
    for (;;) {
        if (threadIdx.x == 0) {
            long long start = clock64();
            u64 seen;
            while ((seen = acquire(&req->sequence)) == last &&
                   clock64() - start < (long long)idle_timeout) {}
            sequence = seen, to = req->to, from = req->from, len = req->len;
        }
        __syncthreads();
        if (sequence == last || len == ~0ull) return;
        block_copy<Uncached>(to, from, len);
        last = sequence;
        __syncthreads();
        if (threadIdx.x == 0) {
            // After the barrier this fence covers the stores of the whole block.
            __threadfence_system();
            *(volatile u64 *)done = last;
        }
    }
}

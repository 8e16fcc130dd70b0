// The copy agent: one resident block that copies on request between device and pinned host memory.
// mod.rs has the equivalent for the simulated GPU.

typedef unsigned long long u64;

// The request slot, in device memory. The host writes it through a window, the sequence number
// last.
struct Request {
    volatile u64 sequence, to, from, len;
};

static __device__ void copy(u64 to, u64 from, u64 len) {
    u64 head = (16 - to % 16) % 16;
    if (to % 16 != from % 16 || len < 16) head = len;  // no common alignment: byte by byte
    if (head > len) head = len;
    for (u64 i = threadIdx.x; i < head; i += blockDim.x)
        ((volatile unsigned char *)to)[i] = ((const volatile unsigned char *)from)[i];
    u64 blocks = (len - head) / 16;
    uint4 *into = (uint4 *)(to + head);
    const uint4 *source = (const uint4 *)(from + head);
    u64 i = threadIdx.x;
    for (; i + 3 * blockDim.x < blocks; i += 4 * blockDim.x) {
        uint4 a = __ldcv(source + i), b = __ldcv(source + i + blockDim.x);
        uint4 c = __ldcv(source + i + 2 * blockDim.x), d = __ldcv(source + i + 3 * blockDim.x);
        __stwt(into + i, a), __stwt(into + i + blockDim.x, b);
        __stwt(into + i + 2 * blockDim.x, c), __stwt(into + i + 3 * blockDim.x, d);
    }
    for (; i < blocks; i += blockDim.x) __stwt(into + i, __ldcv(source + i));
    for (u64 at = head + blocks * 16 + threadIdx.x; at < len; at += blockDim.x)
        ((volatile unsigned char *)to)[at] = ((const volatile unsigned char *)from)[at];
}

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
        copy(to, from, len);
        last = sequence;
        __syncthreads();
        if (threadIdx.x == 0) {
            // After the barrier this fence covers the stores of the whole block.
            __threadfence_system();
            *(volatile u64 *)done = last;
        }
    }
}

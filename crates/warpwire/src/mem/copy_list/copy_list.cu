// Many copies as one launch. mod.rs and queue.rs have the equivalents for the simulated GPU.

#include "../block_copy.cuh"

struct Range {
    u64 to, from, len;
};

struct Plain {
    template <class T> static __device__ T load(const T *from) { return *from; }
    template <class T> static __device__ void store(T *to, T value) { *to = value; }
};

// For ranges that fill the L2 cache: without these hints, what is written displaces what is still
// to be read.
struct Streaming {
    template <class T> static __device__ T load(const T *from) { return __ldcs(from); }
    template <class T> static __device__ void store(T *to, T value) { __stcs(to, value); }
};

// Each block copies every gridDim.x-th range.
static __device__ void copy_ranges(u64 list, u64 count) {
    const Range *ranges = (const Range *)list;
    for (u64 i = blockIdx.x; i < count; i += gridDim.x)
        block_copy<Plain>(ranges[i].to, ranges[i].from, ranges[i].len);
}

// The end of the kernel makes the copies visible.
extern "C" __global__ void __launch_bounds__(512) copy_list(u64 list, u64 count) {
    copy_ranges(list, count);
}

// The last word of a message: one store if it is whole.
static __device__ void copy_tail(const Range &tail) {
    if (tail.len == 8 && tail.to % 8 == 0 && tail.from % 8 == 0)
        *(volatile u64 *)tail.to = *(const volatile u64 *)tail.from;
    else
        for (u64 i = 0; i < tail.len; i++)
            ((volatile unsigned char *)tail.to)[i] = ((const volatile unsigned char *)tail.from)[i];
}

// Whether this is the last block to be done with its copies: then it sees those of all blocks.
// `arrived` is zero between launches.
static __device__ bool is_last_block(u64 arrived) {
    __shared__ bool is_last;
    __syncthreads();
    if (threadIdx.x == 0) {
        __threadfence();
        is_last = atomicAdd((unsigned int *)arrived, 1) == gridDim.x - 1;
        __threadfence();
    }
    __syncthreads();
    // Who sees a tail sees everything before it, also on another GPU or the CPU.
    if (is_last) __threadfence_system();
    return is_last;
}

// Ends a launch: who sees the number sees everything.
static __device__ void finish(u64 arrived, u64 done, u64 number) {
    __syncthreads();
    if (threadIdx.x == 0) {
        *(volatile unsigned int *)arrived = 0;
        __threadfence_system();
        *(volatile u64 *)done = number;
    }
}

// Copies the ranges, then the tails, then stores `number` to `done`.
extern "C" __global__ void __launch_bounds__(512)
copy_batch(u64 list, u64 count, u64 tails, u64 tail_count, u64 arrived, u64 done, u64 number) {
    copy_ranges(list, count);
    if (!is_last_block(arrived)) return;
    for (u64 i = threadIdx.x; i < tail_count; i += blockDim.x)
        copy_tail(((const Range *)tails)[i]);
    finish(arrived, done, number);
}

// The last bytes of a copy, in one aligned word.
static __device__ Range tail_of(const Range &range) {
    u64 len = range.len == 0 ? 0 : (range.to + range.len - 1) % 8 + 1;
    if (len > range.len) len = range.len;
    return {range.to + range.len - len, range.from + range.len - len, len};
}

// The same for up to four copies, some of which may be empty. They are parameters, because a read
// from host memory takes as long as a short copy.
extern "C" __global__ void __launch_bounds__(512)
copy_few(u64 to0, u64 from0, u64 len0, u64 to1, u64 from1, u64 len1, u64 to2, u64 from2, u64 len2,
         u64 to3, u64 from3, u64 len3, u64 chunk, u64 arrived, u64 done, u64 number) {
    const Range ranges[] = {
        {to0, from0, len0}, {to1, from1, len1}, {to2, from2, len2}, {to3, from3, len3}};
    u64 before = 0; // chunks of earlier ranges
#pragma unroll 1
    for (int k = 0; k < 4; k++) {
        Range range = ranges[k];
        u64 body = range.len - tail_of(range).len, count = (body + chunk - 1) / chunk;
        u64 i = (blockIdx.x + gridDim.x - before % gridDim.x) % gridDim.x;
        for (; i < count; i += gridDim.x) {
            u64 at = i * chunk, len = body - at < chunk ? body - at : chunk;
            block_copy<Streaming>(range.to + at, range.from + at, len);
        }
        before += count;
    }
    if (!is_last_block(arrived)) return;
#pragma unroll 1
    for (int k = 0; k < 4; k++)
        if (threadIdx.x == k) copy_tail(tail_of(ranges[k]));
    finish(arrived, done, number);
}

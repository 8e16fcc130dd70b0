// Many copies as one launch. mod.rs and queue.rs have the equivalents for the simulated GPU.

#include "../block_copy.cuh"

struct Range {
    u64 to, from, len;
};

struct Plain {
    template <class T> static __device__ T load(const T *from) { return *from; }
    template <class T> static __device__ void store(T *to, T value) { *to = value; }
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

// Copies the ranges, then the tails, then stores `number` to `done`: who sees a tail sees all
// ranges, and who sees the number sees everything. `arrived` is zero between launches.
extern "C" __global__ void __launch_bounds__(512)
copy_batch(u64 list, u64 count, u64 tails, u64 tail_count, u64 arrived, u64 done, u64 number) {
    __shared__ bool is_last;
    copy_ranges(list, count);
    __syncthreads();
    if (threadIdx.x == 0) {
        __threadfence_system();
        is_last = atomicAdd((unsigned int *)arrived, 1) == gridDim.x - 1;
        __threadfence_system();
    }
    __syncthreads();
    if (!is_last) return;
    for (u64 i = threadIdx.x; i < tail_count; i += blockDim.x)
        copy_tail(((const Range *)tails)[i]);
    __syncthreads();
    if (threadIdx.x == 0) {
        *(volatile unsigned int *)arrived = 0;
        __threadfence_system();
        *(volatile u64 *)done = number;
    }
}

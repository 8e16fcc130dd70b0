// Copies a range with all threads of a block. `Access` decides how memory is read and written:
//   template <class T> static __device__ T load(const T *from);
//   template <class T> static __device__ void store(T *to, T value);
#pragma once

typedef unsigned long long u64;

// `count` units of type T, four of them in flight per thread.
template <class Access, class T> static __device__ void copy_units(u64 to, u64 from, u64 count) {
    T *into = (T *)to;
    const T *source = (const T *)from;
    u64 i = threadIdx.x, step = blockDim.x;
    for (; i + 3 * step < count; i += 4 * step) {
        T a = Access::load(source + i), b = Access::load(source + i + step);
        T c = Access::load(source + i + 2 * step), d = Access::load(source + i + 3 * step);
        Access::store(into + i, a), Access::store(into + i + step, b);
        Access::store(into + i + 2 * step, c), Access::store(into + i + 3 * step, d);
    }
    for (; i < count; i += step) Access::store(into + i, Access::load(source + i));
}

// As units of type T between bytes before the first aligned address and after the last. Both
// addresses are equal modulo the size of T.
template <class Access, class T> static __device__ void copy_aligned(u64 to, u64 from, u64 len) {
    u64 head = (sizeof(T) - to % sizeof(T)) % sizeof(T);
    if (head > len) head = len;
    u64 count = (len - head) / sizeof(T), tail = head + count * sizeof(T);
    copy_units<Access, unsigned char>(to, from, head);
    copy_units<Access, T>(to + head, from + head, count);
    copy_units<Access, unsigned char>(to + tail, from + tail, len - tail);
}

template <class Access> static __device__ void block_copy(u64 to, u64 from, u64 len) {
    u64 apart = to ^ from;
    if (apart % 16 == 0) copy_aligned<Access, uint4>(to, from, len);
    else if (apart % 4 == 0) copy_aligned<Access, unsigned int>(to, from, len);
    else copy_units<Access, unsigned char>(to, from, len);
}

// Fills memory with a pattern that depends on a seed and on the position, and checks it.
// mod.rs has the same functions for the simulated GPU and for the CPU.

typedef unsigned long long u64;

static __device__ u64 pattern_word(u64 seed, u64 index) {
    u64 z = seed + (index + 1) * 0x9e3779b97f4a7c15ull;
    z = (z ^ (z >> 30)) * 0xbf58476d1ce4e5b9ull;
    z = (z ^ (z >> 27)) * 0x94d049bb133111ebull;
    return z ^ (z >> 31);
}

static __device__ u64 first_index() { return blockIdx.x * (u64)blockDim.x + threadIdx.x; }
static __device__ u64 stride() { return gridDim.x * (u64)blockDim.x; }

extern "C" __global__ void pattern_fill(u64 address, u64 len, u64 seed) {
    for (u64 i = first_index(); i < len / 8; i += stride())
        ((u64 *)address)[i] = pattern_word(seed, i);
    if (first_index() == 0)
        for (u64 at = len - len % 8; at < len; at++)
            ((unsigned char *)address)[at] = pattern_word(seed, at / 8) >> (at % 8 * 8);
}

// Adds the number of wrong words (the last, shorter one counts too) to the word at `wrong`.
extern "C" __global__ void pattern_check(u64 address, u64 len, u64 seed, u64 wrong) {
    u64 found = 0;
    for (u64 i = first_index(); i < len / 8; i += stride())
        found += ((const u64 *)address)[i] != pattern_word(seed, i);
    if (first_index() == 0 && len % 8) {
        bool same = true;
        for (u64 at = len - len % 8; at < len; at++)
            same &= ((const unsigned char *)address)[at] ==
                    (unsigned char)(pattern_word(seed, at / 8) >> (at % 8 * 8));
        found += !same;
    }
    if (found) atomicAdd_system((u64 *)wrong, found);
}

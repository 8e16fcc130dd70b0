// Keeps the device busy for a while; the twin for the simulated GPU stands in mod.rs.

typedef unsigned long long u64;

static __device__ u64 nanoseconds() {
    u64 now;
    asm volatile("mov.u64 %0, %%globaltimer;" : "=l"(now));
    return now;
}

extern "C" __global__ void spin(u64 time) {
    u64 start = nanoseconds();
    while (nanoseconds() - start < time) {
    }
}

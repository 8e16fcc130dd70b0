// Keeps the device busy for a given time; mod.rs has the equivalent for the simulated GPU.

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

// Kernels of the conformance suite; kernels.rs has the same kernels for the simulated GPU.

typedef unsigned long long u64;

// A grid-wide barrier: each block waits until all have arrived. Hangs unless all are resident.
extern "C" __global__ void meet(u64 arrived) {
    if (threadIdx.x == 0) {
        atomicAdd_system((u64 *)arrived, 1ull);
        while (*(volatile u64 *)arrived < gridDim.x) {}
    }
}

// Answers the host: for each i in 1..=rounds, waits until `ask` is at least i, then sets `answer`
// to i.
extern "C" __global__ void answer(u64 ask, u64 answer, u64 rounds) {
    for (u64 i = 1; i <= rounds; i++) {
        while (*(volatile u64 *)ask < i) {}
        __threadfence_system();
        *(volatile u64 *)answer = i;
        __threadfence_system();
    }
}

// Writes to the given address, which is not mapped.
extern "C" __global__ void trespass(u64 address) { *(volatile u64 *)address = 1; }

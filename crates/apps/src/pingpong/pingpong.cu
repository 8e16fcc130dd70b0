// Answers the host, one word per round; mod.rs has the equivalents for the simulated GPU.

typedef unsigned long long u64;

// For each i up to `rounds`, waits until `ask` is i, then sets `answer` to i. Returns if that takes
// longer than `idle_timeout` clock cycles, so that it does not run for ever if the host is gone.
template <typename Word>
static __device__ void answer_each(u64 ask, u64 answer, u64 rounds, u64 idle_timeout) {
    for (u64 i = 1; i <= rounds; i++) {
        long long start = clock64();
        for (unsigned looks = 1; *(volatile Word *)ask < (Word)i; looks++)
            if (looks % 256 == 0 && clock64() - start > (long long)idle_timeout) return;
        *(volatile Word *)answer = (Word)i;
        __threadfence_system();
    }
}

extern "C" __global__ void pingpong_32(u64 ask, u64 answer, u64 rounds, u64 idle_timeout) {
    answer_each<unsigned>(ask, answer, rounds, idle_timeout);
}

extern "C" __global__ void pingpong_64(u64 ask, u64 answer, u64 rounds, u64 idle_timeout) {
    answer_each<u64>(ask, answer, rounds, idle_timeout);
}

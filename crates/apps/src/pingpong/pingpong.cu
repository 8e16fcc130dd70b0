// Answers the host word by word; the twins for the simulated GPU stand in mod.rs.

typedef unsigned long long u64;

// For each i up to `rounds`, waits for `ask` to become i, then sets `answer` to i. Gives up when nothing
// has come for `patience` clock cycles, so that a host that went away does not leave it running.
template <typename Word>
static __device__ void answer_each(u64 ask, u64 answer, u64 rounds, u64 patience) {
    for (u64 i = 1; i <= rounds; i++) {
        long long start = clock64();
        for (unsigned looks = 1; *(volatile Word *)ask < (Word)i; looks++)
            if (looks % 256 == 0 && clock64() - start > (long long)patience) return;
        *(volatile Word *)answer = (Word)i;
        __threadfence_system();
    }
}

extern "C" __global__ void pingpong_32(u64 ask, u64 answer, u64 rounds, u64 patience) {
    answer_each<unsigned>(ask, answer, rounds, patience);
}

extern "C" __global__ void pingpong_64(u64 ask, u64 answer, u64 rounds, u64 patience) {
    answer_each<u64>(ask, answer, rounds, patience);
}

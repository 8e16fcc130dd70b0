// Ping-pong between kernels of two ranks, puts and gets, a relay without an HCA, and a kernel that
// busy-waits. mod.rs has the equivalents for the simulated GPU.
#include <warpwire/verbs.cuh>

using namespace warpwire;

static __device__ void take_time(u64 nanoseconds) {
    if (nanoseconds == 0) return;
    for (u64 start = detail::clock_ns(); detail::clock_ns() - start < nanoseconds;) {
    }
}

extern "C" __global__ void pingpong_compute(u64 nanoseconds) { take_time(nanoseconds); }

// One thread. The side that sends first puts `length` bytes and adds one to the peer's word, then
// waits until its own word is `start` plus the number of the round. The other side answers. A
// failure is stored to `report`.
extern "C" __global__ void pingpong_play(u64 qp, u64 report, u64 to, u64 rkey, u64 from, u64 lkey,
                                         u64 length, u64 word, u64 word_rkey, u64 own, u64 start,
                                         u64 rounds, u64 sends_first, u64 compute, u64 timeout) {
    Qp &pair = *(Qp *)qp;
    Status status = kOk;
    for (u64 round = 1; round <= rounds && status == kOk; round++) {
        if (!sends_first)
            status = wait_signal((const u64 *)own, Condition::AtLeast, start + round, timeout);
        if (status != kOk) break;
        take_time(compute);
        Ticket ticket = put_signal(pair, Remote{to, (u32)rkey}, Local{from, (u32)lkey}, length,
                                   Remote{word, (u32)word_rkey}, 1, Thread{}, timeout);
        status = ticket.status;
        if (sends_first && status == kOk)
            status = wait_signal((const u64 *)own, Condition::AtLeast, start + round, timeout);
    }
    if (status == kOk) status = quiet(pair, timeout);
    if (status != kOk) detail::compare_exchange((u64 *)report, 0, 1ull << 63 | (u32)status);
}

// One thread. `rounds` puts or gets, waiting for each before the next.
extern "C" __global__ void pingpong_move(u64 qp, u64 report, u64 there, u64 rkey, u64 here,
                                         u64 lkey, u64 length, u64 reads, u64 rounds, u64 compute,
                                         u64 timeout) {
    Qp &pair = *(Qp *)qp;
    Status status = kOk;
    for (u64 round = 0; round < rounds && status == kOk; round++) {
        take_time(compute);
        Remote remote{there, (u32)rkey};
        Local local{here, (u32)lkey};
        Ticket ticket = reads ? get(pair, local, remote, length, Thread{}, timeout)
                              : put(pair, remote, local, length, Thread{}, timeout);
        status = ticket.status == kOk ? wait(pair, ticket, timeout) : ticket.status;
    }
    if (status != kOk) detail::compare_exchange((u64 *)report, 0, 1ull << 63 | (u32)status);
}

// One thread, no queue pair: writes a value and a doorbell in host memory, which a host thread
// forwards, and waits for the answer in its own word.
extern "C" __global__ void pingpong_relay(u64 report, u64 bell, u64 own, u64 rounds,
                                          u64 sends_first, u64 timeout) {
    Status status = kOk;
    for (u64 round = 1; round <= rounds && status == kOk; round++) {
        if (!sends_first) status = wait_signal((const u64 *)own, Condition::AtLeast, round, timeout);
        if (status != kOk) break;
        ((volatile u64 *)bell)[8] = round;
        __threadfence_system();
        *(volatile u64 *)bell = round;
        if (sends_first) status = wait_signal((const u64 *)own, Condition::AtLeast, round, timeout);
    }
    if (status != kOk) detail::compare_exchange((u64 *)report, 0, 1ull << 63 | (u32)status);
}

// Kernels of the suite: every call of verbs.cuh, its failures, and many concurrent threads.
// calls.rs has the block functions for the simulated GPU. Results are written to words that the
// host reads.
#include "calls.hpp"

extern "C" __global__ void calls_active(u64 qp, u64 words, u64 mode) {
    if (mode == 0)
        act(*(Qp *)qp, (u64 *)words, Thread{});
    else if (mode == 1)
        act(*(Qp *)qp, (u64 *)words, Warp{});
    else
        act(*(Qp *)qp, (u64 *)words, Block{});
}

extern "C" __global__ void calls_passive(u64 qp, u64 words, u64 mode) {
    if (mode == 0)
        answer(*(Qp *)qp, (u64 *)words, Thread{});
    else if (mode == 1)
        answer(*(Qp *)qp, (u64 *)words, Warp{});
    else
        answer(*(Qp *)qp, (u64 *)words, Block{});
}

extern "C" __global__ void calls_fail(u64 qp, u64 words) { fail(*(Qp *)qp, (u64 *)words); }

extern "C" __global__ void calls_one(u64 qp, u64 words) { one(*(Qp *)qp, (u64 *)words); }

// Threads on shared queue pairs. In each round a thread writes the round to its own location and
// adds 1 to a counter of the peer, alone or (mode 1) with its whole warp; every 16th round it
// waits. Failures are counted in `wrong`. handles, lists: one of each per queue pair.
extern "C" __global__ void calls_storm(u64 handles, u64 lists, u64 pairs, u64 rounds, u64 mode, u64 wrong) {
    u64 thread = blockIdx.x * (u64)blockDim.x + threadIdx.x;
    u64 which = thread / 32 % pairs, failures = 0;
    Qp &qp = *((Qp **)handles)[which];
    const u64 *words = ((u64 **)lists)[which];
    u64 timeout = words[kAtTimeout];
    Remote target{words[kAtThere] + thread * 8, (u32)words[kAtThereKey]}, word{words[kAtWord], (u32)words[kAtWordKey]};
    for (u64 round = 1; round <= rounds; round++) {
        Ticket wrote, added;
        if (mode == 0) {
            wrote = put_inline(qp, target, &round, 8, Thread{}, timeout);
            added = signal(qp, word, 1, Thread{}, timeout);
        } else {
            wrote = put_inline(qp, target, &round, 8, each(Warp{}), timeout);
            added = signal(qp, word, 1, each(Warp{}), timeout);
        }
        failures += wrote.status != kOk;
        failures += added.status != kOk;
        if (round % 16 == 0 || round == rounds) failures += wait(qp, added, timeout) != kOk;
    }
    if (failures) atomicAdd_system((u64 *)wrong, failures);
}

// Side 0 writes i to the peer's word, and side 1 answers, for each i up to `rounds`. The status is
// written to `status_at`.
extern "C" __global__ void calls_ping(u64 qp, u64 list, u64 side, u64 rounds, u64 status_at) {
    const u64 *words = (const u64 *)list;
    u64 timeout = words[kAtTimeout];
    const u64 *mine = (const u64 *)words[kAtOwnWord];
    Remote word{words[kAtWord], (u32)words[kAtWordKey]};
    Status status = kOk;
    for (u64 i = 1; i <= rounds && status == kOk; i++) {
        if (side == 1) status = wait_signal(mine, Condition::AtLeast, i, timeout);
        if (status == kOk) status = put_inline(*(Qp *)qp, word, &i, 8, Thread{}, timeout).status;
        if (side == 0 && status == kOk) status = wait_signal(mine, Condition::AtLeast, i, timeout);
    }
    *(u64 *)status_at = (u32)status;
}

// The same without a queue pair: an entry of two words and a doorbell in pinned memory, which a CPU
// thread relays to the other side's word.
extern "C" __global__ void calls_relay(u64 side, u64 rounds, u64 bell, u64 word, u64 timeout, u64 status_at) {
    const u64 *mine = (const u64 *)word;
    Status status = kOk;
    for (u64 i = 1; i <= rounds && status == kOk; i++) {
        if (side == 1) status = wait_signal(mine, Condition::AtLeast, i, timeout);
        ((volatile u64 *)bell)[8] = i, ((volatile u64 *)bell)[9] = i;
        __threadfence_system();
        *(volatile u64 *)bell = i;
        if (side == 0 && status == kOk) status = wait_signal(mine, Condition::AtLeast, i, timeout);
    }
    *(u64 *)status_at = (u32)status;
}

extern "C" __global__ void calls_loop(u64 qp, u64 words, u64 rounds, u64 length) {
    if (blockDim.x == 1)
        repeat(*(Qp *)qp, (u64 *)words, rounds, length, Thread{});
    else if (blockDim.x == 32)
        repeat(*(Qp *)qp, (u64 *)words, rounds, length, Warp{});
    else
        repeat(*(Qp *)qp, (u64 *)words, rounds, length, Block{});
}

extern "C" __global__ void calls_order(u64 qp, u64 words, u64 rounds) { order(*(Qp *)qp, (u64 *)words, rounds); }

extern "C" __global__ void calls_exchange(u64 qp, u64 words) {
    if (blockDim.x == 1)
        exchange(*(Qp *)qp, (u64 *)words, Thread{});
    else if (blockDim.x == 32)
        exchange(*(Qp *)qp, (u64 *)words, Warp{});
    else
        exchange(*(Qp *)qp, (u64 *)words, Block{});
}

extern "C" __global__ void calls_hold(u64 qp, u64 words, u64 stubborn) { hold(*(Qp *)qp, (u64 *)words, stubborn); }

// As calls_ping, by stores to mapped memory.
extern "C" __global__ void calls_ping_mapped(u64 qp, u64 list, u64 side, u64 rounds, u64 status_at) {
    const u64 *words = (const u64 *)list;
    u64 timeout = words[kAtTimeout];
    const u64 *mine = (const u64 *)words[kAtOwnWord];
    Mapping word = map_remote(*(Qp *)qp, Remote{words[kAtWord], (u32)words[kAtWordKey]}, 8, kMapWrite);
    Status status = word.pointer ? kOk : kNotReady;
    for (u64 i = 1; i <= rounds && status == kOk; i++) {
        if (side == 1) status = wait_signal(mine, Condition::AtLeast, i, timeout);
        if (status == kOk) *(volatile u64 *)word.pointer = i;
        if (side == 0 && status == kOk) status = wait_signal(mine, Condition::AtLeast, i, timeout);
        if (i % 64 == 0 && status == kOk && is_revoked(word)) status = kClosed;
    }
    unmap(word);
    *(u64 *)status_at = (u32)status;
}

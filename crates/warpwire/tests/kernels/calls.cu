// Kernels of the suite: every call of verbs.cuh, its failures, and many threads at once. Their twins for the simulated GPU
// stand in calls.rs. What a kernel finds out goes to words that the host reads.
#include <warpwire/verbs.cuh>

using namespace warpwire;

// Places in the list of words that a kernel gets; `calls.rs` has the same.
enum Place {
    kAtHere,       // our memory, 64 KiB
    kAtHereKey,
    kAtThere,      // the peer's, 64 KiB
    kAtThereKey,
    kAtWord,       // a 64-bit word of the peer
    kAtWordKey,
    kAtOwnWord,    // the word of ours that the peer adds to
    kAtTimeout,
    kAtBadKey,
    kAtFindings = 16
};

template <class Group> struct Notes {
    u64 *words;
    int next;
    Group group;
    __device__ void note(u64 value) {
        if (group.rank() == 0) words[kAtFindings + next] = value;
        next++;
    }
};

template <class Group> static __device__ void act(Qp &qp, u64 *words, Group group) {
    Notes<Group> notes{words, 0, group};
    u64 timeout = words[kAtTimeout], value = 0x1122334455667788ull;
    Local here{words[kAtHere], (u32)words[kAtHereKey]};
    Remote there{words[kAtThere], (u32)words[kAtThereKey]}, word{words[kAtWord], (u32)words[kAtWordKey]};
    Local result{here.address + 8, here.lkey};
    notes.note(wait(qp, put(qp, there, here, 4096, group, timeout), timeout, group));
    notes.note(wait(qp, put_inline(qp, Remote{there.address + 4096, there.rkey}, &value, 8, group, timeout), timeout, group));
    notes.note(wait(qp, put_signal(qp, Remote{there.address + 8192, there.rkey}, here, 64, word, 5, group, timeout), timeout, group));
    notes.note(wait(qp, get(qp, Local{here.address + 16384, here.lkey}, Remote{there.address + 16384, there.rkey}, 4096, group, timeout), timeout, group));
    notes.note(wait(qp, fetch_add(qp, word, 7, result, group, timeout), timeout, group));
    notes.note(*(volatile u64 *)result.address);
    notes.note(wait(qp, compare_swap(qp, word, 12, 99, result, group, timeout), timeout, group));
    notes.note(*(volatile u64 *)result.address);
    notes.note(send(qp, here, 100, group, timeout).status);
    notes.note(send_imm(qp, here, 50, 77, group, timeout).status);
    notes.note(put_imm(qp, Remote{there.address + 12288, there.rkey}, here, 16, 88, group, timeout).status);
    Ticket last = put(qp, there, here, 0, group, timeout);
    notes.note(quiet(qp, timeout, group));
    notes.note(test(qp, last, group));
    notes.note(put_inline(qp, there, words, 29, group, timeout).status);
    notes.note(test(qp, Ticket{last.number + 1, kOk}, group));
}

template <class Group> static __device__ void answer(Qp &qp, u64 *words, Group group) {
    Notes<Group> notes{words, 0, group};
    u64 timeout = words[kAtTimeout];
    Local here{words[kAtHere] + 32768, (u32)words[kAtHereKey]};
    Ticket receives[3];
    for (u32 i = 0; i < 3; i++) receives[i] = post_receive(qp, Local{here.address + 256 * i, here.lkey}, 256, group, timeout);
    notes.note(wait_signal((const u64 *)words[kAtOwnWord], Condition::AtLeast, 5ull, timeout, group));
    for (u32 i = 0; i < 3; i++) {
        Arrival arrival = {0, 0, 0};
        notes.note(wait_receive(qp, receives[i], &arrival, timeout, group));
        notes.note((u64)arrival.length << 32 | arrival.has_imm << 31 | arrival.imm);
    }
}

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

// Three writes of which the second is under a wrong key; then how each ended, the last first.
extern "C" __global__ void calls_fail(u64 qp, u64 list) {
    u64 *words = (u64 *)list, timeout = words[kAtTimeout], value = 1;
    Qp &pair = *(Qp *)qp;
    Remote there{words[kAtThere], (u32)words[kAtThereKey]}, wrong{words[kAtThere], (u32)words[kAtBadKey]};
    Notes<Thread> notes{words, 0, Thread{}};
    Ticket first = put_inline(pair, there, &value, 8, Thread{}, timeout);
    Ticket second = put_inline(pair, wrong, &value, 8, Thread{}, timeout);
    Ticket third = put_inline(pair, there, &value, 8, Thread{}, timeout);
    notes.note(wait(pair, third, timeout));
    notes.note(wait(pair, second, timeout));
    notes.note(wait(pair, first, timeout));
    notes.note(quiet(pair, timeout));
    notes.note(put_inline(pair, there, &value, 8, Thread{}, timeout).status);
    notes.note(post_receive(pair, Local{words[kAtHere], (u32)words[kAtHereKey]}, 8, Thread{}, 0).status);
}

// One write; how posting it and waiting for it ended. For queue pairs of which nobody knows whether they live.
extern "C" __global__ void calls_one(u64 qp, u64 list) {
    u64 *words = (u64 *)list, timeout = words[kAtTimeout];
    Notes<Thread> notes{words, 0, Thread{}};
    Ticket ticket = put(*(Qp *)qp, Remote{words[kAtThere], (u32)words[kAtThereKey]}, Local{words[kAtHere], (u32)words[kAtHereKey]}, 8, Thread{}, timeout);
    notes.note(ticket.status);
    notes.note(wait(*(Qp *)qp, ticket, timeout));
}

// Threads on shared queue pairs. Each round of a thread writes the round to the thread's own place and adds 1 to a counter of
// the peer, alone or (mode 1) with its whole warp; every 16th round it waits. What fails is counted in `wrong`.
// handles, words: one of each for every queue pair.
extern "C" __global__ void calls_storm(u64 handles, u64 lists, u64 pairs, u64 rounds, u64 mode, u64 wrong) {
    u64 thread = blockIdx.x * (u64)blockDim.x + threadIdx.x;
    u64 which = thread / 32 % pairs, failures = 0;
    Qp &qp = *((Qp **)handles)[which];
    const u64 *words = ((u64 **)lists)[which];
    u64 timeout = words[kAtTimeout];
    Remote place{words[kAtThere] + thread * 8, (u32)words[kAtThereKey]}, word{words[kAtWord], (u32)words[kAtWordKey]};
    for (u64 round = 1; round <= rounds; round++) {
        Ticket wrote, added;
        if (mode == 0) {
            wrote = put_inline(qp, place, &round, 8, Thread{}, timeout);
            added = signal(qp, word, 1, Thread{}, timeout);
        } else {
            wrote = put_inline(qp, place, &round, 8, each(Warp{}), timeout);
            added = signal(qp, word, 1, each(Warp{}), timeout);
        }
        failures += wrote.status != kOk;
        failures += added.status != kOk;
        if (round % 16 == 0 || round == rounds) failures += wait(qp, added, timeout) != kOk;
    }
    if (failures) atomicAdd_system((u64 *)wrong, failures);
}

// Side 0 writes i to the peer's word, which side 1 answers, for each i up to `rounds`. Says at `ended` how it ended.
extern "C" __global__ void calls_ping(u64 qp, u64 list, u64 side, u64 rounds, u64 ended) {
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
    *(u64 *)ended = (u32)status;
}

// The same with nothing but words: an entry of two words and a doorbell in pinned memory, which a thread of the CPU carries to
// the other side's word.
extern "C" __global__ void calls_relay(u64 side, u64 rounds, u64 bell, u64 word, u64 timeout, u64 ended) {
    const u64 *mine = (const u64 *)word;
    Status status = kOk;
    for (u64 i = 1; i <= rounds && status == kOk; i++) {
        if (side == 1) status = wait_signal(mine, Condition::AtLeast, i, timeout);
        ((volatile u64 *)bell)[8] = i, ((volatile u64 *)bell)[9] = i;
        __threadfence_system();
        *(volatile u64 *)bell = i;
        if (side == 0 && status == kOk) status = wait_signal(mine, Condition::AtLeast, i, timeout);
    }
    *(u64 *)ended = (u32)status;
}

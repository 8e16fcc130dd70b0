// What the suite's kernels do, for CUDA (calls.cu) and for CPU threads (cpu.cpp).
#pragma once
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
    WARPWIRE_FN void note(u64 value) {
        if (group.rank() == 0) words[kAtFindings + next] = value;
        next++;
    }
};

template <class Group> WARPWIRE_FN void act(Qp &qp, u64 *words, Group group) {
    Notes<Group> notes{words, 0, group};
    u64 timeout = words[kAtTimeout], value = 0x1122334455667788ull;
    Local here{words[kAtHere], static_cast<u32>(words[kAtHereKey])};
    Remote there{words[kAtThere], static_cast<u32>(words[kAtThereKey])}, word{words[kAtWord], static_cast<u32>(words[kAtWordKey])};
    Local result{here.address + 8, here.lkey};
    notes.note(wait(qp, put(qp, there, here, 4096, group, timeout), timeout, group));
    notes.note(wait(qp, put_inline(qp, Remote{there.address + 4096, there.rkey}, &value, 8, group, timeout), timeout, group));
    notes.note(wait(qp, put_signal(qp, Remote{there.address + 8192, there.rkey}, here, 64, word, 5, group, timeout), timeout, group));
    notes.note(wait(qp, get(qp, Local{here.address + 16384, here.lkey}, Remote{there.address + 16384, there.rkey}, 4096, group, timeout), timeout, group));
    notes.note(wait(qp, fetch_add(qp, word, 7, result, group, timeout), timeout, group));
    notes.note(*reinterpret_cast<volatile u64 *>(result.address));
    notes.note(wait(qp, compare_swap(qp, word, 12, 99, result, group, timeout), timeout, group));
    notes.note(*reinterpret_cast<volatile u64 *>(result.address));
    notes.note(send(qp, here, 100, group, timeout).status);
    notes.note(send_imm(qp, here, 50, 77, group, timeout).status);
    notes.note(put_imm(qp, Remote{there.address + 12288, there.rkey}, here, 16, 88, group, timeout).status);
    Ticket last = put(qp, there, here, 0, group, timeout);
    notes.note(quiet(qp, timeout, group));
    notes.note(test(qp, last, group));
    notes.note(put_inline(qp, there, words, 29, group, timeout).status);
    notes.note(test(qp, Ticket{last.number + 1, kOk}, group));
}

template <class Group> WARPWIRE_FN void answer(Qp &qp, u64 *words, Group group) {
    Notes<Group> notes{words, 0, group};
    u64 timeout = words[kAtTimeout];
    Local here{words[kAtHere] + 32768, static_cast<u32>(words[kAtHereKey])};
    Ticket receives[3];
    for (u32 i = 0; i < 3; i++) receives[i] = post_receive(qp, Local{here.address + 256 * i, here.lkey}, 256, group, timeout);
    notes.note(wait_signal(reinterpret_cast<const u64 *>(words[kAtOwnWord]), Condition::AtLeast, 5ull, timeout, group));
    for (u32 i = 0; i < 3; i++) {
        Arrival arrival = {0, 0, 0};
        notes.note(wait_receive(qp, receives[i], &arrival, timeout, group));
        notes.note(static_cast<u64>(arrival.length) << 32 | arrival.has_imm << 31 | arrival.imm);
    }
}

// Three writes of which the second is under a wrong key; then how each ended, the last first.
WARPWIRE_FN void fail(Qp &pair, u64 *words) {
    u64 timeout = words[kAtTimeout], value = 1;
    Remote there{words[kAtThere], static_cast<u32>(words[kAtThereKey])}, wrong{words[kAtThere], static_cast<u32>(words[kAtBadKey])};
    Notes<Thread> notes{words, 0, Thread{}};
    Ticket first = put_inline(pair, there, &value, 8, Thread{}, timeout);
    Ticket second = put_inline(pair, wrong, &value, 8, Thread{}, timeout);
    Ticket third = put_inline(pair, there, &value, 8, Thread{}, timeout);
    notes.note(wait(pair, third, timeout));
    notes.note(wait(pair, second, timeout));
    notes.note(wait(pair, first, timeout));
    notes.note(quiet(pair, timeout));
    notes.note(put_inline(pair, there, &value, 8, Thread{}, timeout).status);
    notes.note(post_receive(pair, Local{words[kAtHere], static_cast<u32>(words[kAtHereKey])}, 8, Thread{}, 0).status);
}

// One write; how posting it and waiting for it ended. For queue pairs of which nobody knows whether they live.
WARPWIRE_FN void one(Qp &pair, u64 *words) {
    u64 timeout = words[kAtTimeout];
    Notes<Thread> notes{words, 0, Thread{}};
    Ticket ticket = put(pair, Remote{words[kAtThere], static_cast<u32>(words[kAtThereKey])}, Local{words[kAtHere], static_cast<u32>(words[kAtHereKey])}, 8, Thread{}, timeout);
    notes.note(ticket.status);
    notes.note(wait(pair, ticket, timeout));
}

// The suite's kernels, for CUDA (calls.cu) and for CPU threads (cpu.cpp).
#pragma once
#include <warpwire/verbs.cuh>

using namespace warpwire;

// Indices in a kernel's parameter list; `calls.rs` has the same.
enum ArgIndex {
    kAtHere,       // local memory, 64 KiB
    kAtHereKey,
    kAtThere,      // the peer's memory, 64 KiB
    kAtThereKey,
    kAtWord,       // a 64-bit word of the peer
    kAtWordKey,
    kAtOwnWord,    // the local word that the peer adds to
    kAtTimeout,
    kAtBadKey,
    kAtFindings = 16
};

template <class Group> struct Results {
    u64 *words;
    int next;
    Group group;
    WARPWIRE_FN void note(u64 value) {
        if (group.rank() == 0) words[kAtFindings + next] = value;
        next++;
    }
};

template <class Group> WARPWIRE_FN void act(Qp &qp, u64 *words, Group group) {
    Results<Group> results{words, 0, group};
    u64 timeout = words[kAtTimeout], value = 0x1122334455667788ull;
    Local here{words[kAtHere], static_cast<u32>(words[kAtHereKey])};
    Remote there{words[kAtThere], static_cast<u32>(words[kAtThereKey])}, word{words[kAtWord], static_cast<u32>(words[kAtWordKey])};
    Local result{here.address + 8, here.lkey};
    results.note(wait(qp, put(qp, there, here, 4096, group, timeout), timeout, group));
    results.note(wait(qp, put_inline(qp, Remote{there.address + 4096, there.rkey}, &value, 8, group, timeout), timeout, group));
    results.note(wait(qp, put_signal(qp, Remote{there.address + 8192, there.rkey}, here, 64, word, 5, group, timeout), timeout, group));
    results.note(wait(qp, get(qp, Local{here.address + 16384, here.lkey}, Remote{there.address + 16384, there.rkey}, 4096, group, timeout), timeout, group));
    results.note(wait(qp, fetch_add(qp, word, 7, result, group, timeout), timeout, group));
    results.note(*reinterpret_cast<volatile u64 *>(result.address));
    results.note(wait(qp, compare_swap(qp, word, 12, 99, result, group, timeout), timeout, group));
    results.note(*reinterpret_cast<volatile u64 *>(result.address));
    results.note(send(qp, here, 100, group, timeout).status);
    results.note(send_imm(qp, here, 50, 77, group, timeout).status);
    results.note(put_imm(qp, Remote{there.address + 12288, there.rkey}, here, 16, 88, group, timeout).status);
    Ticket last = put(qp, there, here, 0, group, timeout);
    results.note(quiet(qp, timeout, group));
    results.note(test(qp, last, group));
    results.note(put_inline(qp, there, words, 29, group, timeout).status);
    results.note(test(qp, Ticket{kDone - 1, kOk}, group));
}

template <class Group> WARPWIRE_FN void answer(Qp &qp, u64 *words, Group group) {
    Results<Group> results{words, 0, group};
    u64 timeout = words[kAtTimeout];
    Local here{words[kAtHere] + 32768, static_cast<u32>(words[kAtHereKey])};
    Ticket receives[3];
    for (u32 i = 0; i < 3; i++) receives[i] = post_receive(qp, Local{here.address + 256 * i, here.lkey}, 256, group, timeout);
    results.note(wait_signal(reinterpret_cast<const u64 *>(words[kAtOwnWord]), Condition::AtLeast, 5ull, timeout, group));
    for (u32 i = 0; i < 3; i++) {
        ReceivedMessage message = {0, 0, 0};
        results.note(wait_receive(qp, receives[i], &message, timeout, group));
        results.note(static_cast<u64>(message.length) << 32 | message.has_imm << 31 | message.imm);
    }
}

// Three writes, the second with a wrong key; then the status of each, the last first.
WARPWIRE_FN void fail(Qp &pair, u64 *words) {
    u64 timeout = words[kAtTimeout], value = 1;
    Remote there{words[kAtThere], static_cast<u32>(words[kAtThereKey])}, wrong{words[kAtThere], static_cast<u32>(words[kAtBadKey])};
    Results<Thread> results{words, 0, Thread{}};
    Ticket first = put_inline(pair, there, &value, 8, Thread{}, timeout);
    Ticket second = put_inline(pair, wrong, &value, 8, Thread{}, timeout);
    Ticket third = put_inline(pair, there, &value, 8, Thread{}, timeout);
    results.note(wait(pair, third, timeout));
    results.note(wait(pair, second, timeout));
    results.note(wait(pair, first, timeout));
    results.note(quiet(pair, timeout));
    results.note(put_inline(pair, there, &value, 8, Thread{}, timeout).status);
    results.note(post_receive(pair, Local{words[kAtHere], static_cast<u32>(words[kAtHereKey])}, 8, Thread{}, 0).status);
}

// One write; the status of posting it and of waiting for it. For queue pairs that may be closed.
WARPWIRE_FN void one(Qp &pair, u64 *words) {
    u64 timeout = words[kAtTimeout];
    Results<Thread> results{words, 0, Thread{}};
    Ticket ticket = put(pair, Remote{words[kAtThere], static_cast<u32>(words[kAtThereKey])}, Local{words[kAtHere], static_cast<u32>(words[kAtHereKey])}, 8, Thread{}, timeout);
    results.note(ticket.status);
    results.note(wait(pair, ticket, timeout));
}

// The status of a round trip that brought back something else.
constexpr i64 kMismatch = -9999;

// Puts bytes and gets them back, until all rounds are done or a call fails.
template <class Group> WARPWIRE_FN void repeat(Qp &qp, u64 *words, u64 rounds, u64 length, Group group) {
    Results<Group> results{words, 0, group};
    u64 timeout = words[kAtTimeout], done = 0;
    Local here{words[kAtHere], static_cast<u32>(words[kAtHereKey])}, back{here.address + 16384, here.lkey};
    Remote there{words[kAtThere], static_cast<u32>(words[kAtThereKey])};
    Status status = kOk;
    while (done < rounds && status == kOk) {
        if (group.rank() == 0) {
            *reinterpret_cast<volatile u64 *>(here.address) = done + 1;
            *reinterpret_cast<volatile u64 *>(here.address + length - 8) = done + 1;
        }
        status = wait(qp, put(qp, there, here, length, group, timeout), timeout, group);
        if (status == kOk) status = wait(qp, get(qp, back, there, length, group, timeout), timeout, group);
        if (status != kOk) break;
        bool wrong = *reinterpret_cast<volatile u64 *>(back.address) != done + 1 ||
                     *reinterpret_cast<volatile u64 *>(back.address + length - 8) != done + 1;
        if (group.any(wrong)) {
            results.note(done);
            results.note(static_cast<u64>(kMismatch));
            return;
        }
        done++;
    }
    results.note(done);
    results.note(static_cast<u64>(static_cast<i64>(status)));
}

// Writes 1, 2, 3, … to a word of the peer: by short puts, which may be direct, and by long ones,
// which are posted and not waited for.
WARPWIRE_FN void order(Qp &qp, u64 *words, u64 rounds) {
    Results<Thread> results{words, 0, Thread{}};
    u64 timeout = words[kAtTimeout];
    u32 lkey = static_cast<u32>(words[kAtHereKey]);
    Remote there{words[kAtThere], static_cast<u32>(words[kAtThereKey])};
    Status status = kOk;
    for (u64 round = 0; round < rounds && status == kOk; round++) {
        Local from{words[kAtHere] + 4096 * (round % 8), lkey};
        *reinterpret_cast<volatile u64 *>(from.address) = 3 * round + 1;
        put(qp, there, from, 1024, Thread{}, timeout);
        u64 second = 3 * round + 2, third = 3 * round + 3;
        put_inline(qp, there, &second, 8, Thread{}, timeout);
        if (round % 8 == 7) status = quiet(qp, timeout);
        put_inline(qp, there, &third, 8, Thread{}, timeout);
    }
    results.note(static_cast<u64>(static_cast<i64>(status)));
    results.note(static_cast<u64>(static_cast<i64>(quiet(qp, timeout))));
}

// Exchanges 4 KiB with the peer's memory by loads and stores, then stores 1 to its word. Results:
// whether it could be mapped, whether it is revoked.
template <class Group> WARPWIRE_FN void exchange(Qp &qp, u64 *words, Group group) {
    Results<Group> results{words, 0, group};
    Remote there{words[kAtThere], static_cast<u32>(words[kAtThereKey])}, word{words[kAtWord], static_cast<u32>(words[kAtWordKey])};
    Mapping memory = map_remote(qp, there, 65536, kMapRead | kMapWrite, group), signal = map_remote(qp, word, 8, kMapWrite, group);
    results.note(memory.pointer && signal.pointer);
    if (memory.pointer && signal.pointer) {
        const u64 *from = reinterpret_cast<const u64 *>(words[kAtHere]);
        volatile u64 *to = static_cast<volatile u64 *>(memory.pointer), *back = reinterpret_cast<volatile u64 *>(words[kAtHere] + 16384);
        for (u32 i = group.rank(); i < 512; i += group.size()) to[i] = from[i], back[i] = to[2048 + i];
        set_signal(static_cast<u64 *>(signal.pointer), 1, group);
    }
    results.note(is_revoked(memory));
    unmap(signal, group);
    unmap(memory, group);
    // For nothing: it has ended.
    unmap(memory, group);
}

// Stores 1, 2, 3, … to mapped memory until that is revoked or, if `stubborn`, until the own word is
// not 0. Results: the last number, whether the memory was revoked.
WARPWIRE_FN void hold(Qp &qp, u64 *words, u64 stubborn) {
    Results<Thread> results{words, 0, Thread{}};
    const volatile u64 *own = reinterpret_cast<const volatile u64 *>(words[kAtOwnWord]);
    Mapping memory = map_remote(qp, Remote{words[kAtThere], static_cast<u32>(words[kAtThereKey])}, 64, kMapWrite);
    u64 stored = 0;
    while (memory.pointer && (stubborn ? !*own : !is_revoked(memory))) *static_cast<volatile u64 *>(memory.pointer) = ++stored;
    results.note(stored);
    results.note(memory.pointer && is_revoked(memory));
    unmap(memory);
}

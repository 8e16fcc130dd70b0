// Verbs for GPU kernels: a running kernel posts work to a queue pair and waits for it, without the
// CPU.
//
// The host creates the queue pair (`KernelQp` in Rust) and passes its handle, an address, to the
// kernel. This header is CUDA (nvcc, or NVRTC without any other header) and C++17 for CPU threads
// (g++, clang++).
//
//   #include <warpwire/verbs.cuh>
//
//   __global__ void halo(warpwire::Qp *qp, unsigned long long mine, unsigned lkey,
//                        unsigned long long theirs, unsigned rkey, unsigned long long *arrived) {
//       using namespace warpwire;
//       fill_border((float *)mine);  // called by all threads of the block
//       // Write the block's border to the neighbour, then add 1 to the neighbour's word.
//       Ticket sent = put_signal(*qp, Remote{theirs, rkey}, Local{mine, lkey}, 4096,
//                                Remote{theirs + 4096, rkey}, 1, Block{});
//       // The neighbour's border has arrived when our own word has been incremented.
//       Status came = wait_signal(arrived, Condition::AtLeast, 1ull, 1000000000, Block{});
//       if (came != kOk) return;  // the host gets the reason: KernelQp::check
//       if (wait(*qp, sent, kDefaultTimeout, Block{}) != kOk) return;
//       use_border();
//   }
//
// Posting. put, put_inline, put_imm, put_signal, get, send, send_imm, fetch_add, compare_swap and
//   signal return a Ticket. Any number of threads may use one queue pair concurrently. If it is
//   full, they wait for room, up to their timeout. Work requests of one queue pair start in the
//   order of their tickets, and its writes and atomics reach the peer in that order. A work request
//   transfers at most 1 GiB; longer puts and gets are split.
// Waiting. wait, test, quiet; wait_receive, test_receive, next_receive; wait_signal. Timeouts are
//   in nanoseconds: 0 polls once, kNoTimeout waits without a limit. The default is kDefaultTimeout.
// Direct access. Where the peer's memory is mapped on this GPU, put, put_inline and get (and, as an
//   option of the queue pair, put_signal and atomics) are executed by the calling threads, unless
//   posted work is outstanding; they are complete when they return, and their ticket says so.
// Status. 0 is success. Positive: not ready, or timed out. Negative: failed. After the first
//   failure all later work completes with kFlushed, and posting fails immediately; the host must
//   create or connect the queue pair again.
// Groups. The last argument besides the timeout is the calling group. Thread{}: this thread. Warp{}
//   (all 32 lanes) and Block{}: all threads together, with the same arguments, for one operation;
//   it transfers what any of them wrote before. each(Warp{}), each(Block{}): all threads together,
//   one operation each, with one reservation and one doorbell for all of them.
// Memory order. What a thread (or its group) wrote before posting happens-before the transfer. What
//   arrived before a wait succeeded is visible after it, to all threads of the waiting group. A
//   signal implies that the put before it is complete.
//
// A queue pair created with `single_poster` is faster, and allows one thread (or one group) at a
// time to post; any thread may wait.
//
// Implementation: every entry is one WQEBB of 64 bytes and generates one CQE, so an operation's
// number is also the index of its WQE and of its CQE, modulo the queue's depth. A slot is reused
// only after its completion was seen and `completed` has passed it: a late waiter checks
// `completed` first, so it cannot mistake a later completion for its own.
#ifndef WARPWIRE_VERBS_CUH
#define WARPWIRE_VERBS_CUH

#include <warpwire/detail/words.cuh>

namespace warpwire {

// Result of an operation or a wait. Failures of work are the negated syndrome of the completion.
enum Status : int {
    kOk = 0,
    kNotReady = 1,   // timeout 0: not complete yet
    kTimeout = 2,  // the timeout expired
    kLocalLength = -0x01,
    kLocalOperation = -0x02,
    kLocalProtection = -0x04,
    kFlushed = -0x05,  // not started: earlier work failed
    kBadResponse = -0x10,
    kLocalAccess = -0x11,
    kRemoteInvalidRequest = -0x12,
    kRemoteAccess = -0x13,
    kRemoteOperation = -0x14,
    kRetryExceeded = -0x15,     // the peer does not answer
    kRnrRetryExceeded = -0x16,  // the peer posted no receive
    kRemoteAbort = -0x22,
    kClosed = -0x100,   // the host closed the queue pair
    kTooLong = -0x101,  // more bytes than one work request transfers
    kTooMany = -0x102,  // more entries than the queue has
    kTooLate = -0x103,  // the message arrived, but later receives have overwritten its CQE
    kStuck = -0x104,    // another thread reserved an earlier entry and did not fill it
    kBadTicket = -0x105,  // no such operation was posted
};

WARPWIRE_FN const char *name(Status status) {
    switch (status) {
    case kOk: return "ok";
    case kNotReady: return "not ready";
    case kTimeout: return "timed out";
    case kLocalLength: return "local length error";
    case kLocalOperation: return "local QP operation error";
    case kLocalProtection: return "local protection error";
    case kFlushed: return "work request flushed";
    case kBadResponse: return "bad response";
    case kLocalAccess: return "local access error";
    case kRemoteInvalidRequest: return "remote invalid request";
    case kRemoteAccess: return "remote access error";
    case kRemoteOperation: return "remote operation error";
    case kRetryExceeded: return "transport retry counter exceeded";
    case kRnrRetryExceeded: return "receiver-not-ready retry counter exceeded";
    case kRemoteAbort: return "remote aborted";
    case kClosed: return "the queue pair was closed";
    case kTooLong: return "too many bytes for one entry";
    case kTooMany: return "more entries than the queue has";
    case kTooLate: return "the completion was overwritten";
    case kStuck: return "an earlier entry was reserved and never filled";
    case kBadTicket: return "no such operation was posted";
    }
    return "general error";
}

constexpr u64 kDefaultTimeout = 10ull * 1000 * 1000 * 1000;  // ten seconds
constexpr u64 kMaxBytes = 1ull << 30;                 // per work request
constexpr u32 kMaxInline = 28;                        // bytes of a put_inline
#ifndef WARPWIRE_FILL_TIMEOUT
// How long a thread waits for other threads to fill the entries before its own.
#define WARPWIRE_FILL_TIMEOUT kDefaultTimeout
#endif

// Registered local memory, and registered memory of the peer.
struct Local {
    u64 address;
    u32 lkey;
};
struct Remote {
    u64 address;
    u32 rkey;
};

// Identifies posted work. If posting failed, `status` is the reason, and waiting returns it.
struct Ticket {
    u64 number;
    Status status;
};

// A received message.
struct ReceivedMessage {
    u32 length;
    u32 imm;      // valid if has_imm
    u32 has_imm;  // 1 if the message has immediate data
};

// How a word is compared. AtLeast is modular: the signed difference is not negative.
enum class Condition : u32 { AtLeast = 0, Equal = 1, And = 2, Nor = 3 };

// -------------------------------------------------------------------------------------------------
// The handle. `layout.rs` defines the same; both sides check sizes and offsets.

constexpr u32 kVersion = 2;
// Flag: the HCA needs the doorbell record before the doorbell (ConnectX does).
constexpr u32 kDbrecFirst = 1;
constexpr u32 kSinglePoster = 2;  // flag: the caller guarantees that one thread at a time posts
constexpr u32 kDirectAtomics = 4;  // flag: threads execute atomic operations too
constexpr u64 kNoFailure = ~0ull;
constexpr u64 kDone = ~0ull;  // number in the ticket of an operation that threads have executed

// Counters of one queue. Each 128-byte line has its own kind of writer.
struct QueueCounters {
    alignas(128) u64 reserved;  // entries reserved by threads
    // Twice the number of entries filled without a gap; plus one while a thread rings the doorbell.
    alignas(128) u64 published;
    alignas(128) u64 completed; // entries whose completion was seen, without a gap
    u64 failure;                // the first failure: number << 8 | syndrome; kNoFailure if none
    u32 closed;                 // set by the host or a failing thread to end all waits: -Status
    alignas(128) u64 taken;     // receives returned by next_receive
};

struct Qp {
    u64 send_queue;     // WQEBBs of 64 bytes
    u64 receive_queue;  // entries of receive_stride bytes
    u64 dbrec;         // the doorbell record
    u64 doorbell;
    u64 send_cq;
    u64 receive_cq;
    u64 sink;  // 8 bytes for results that are not needed
    u32 send_mask;     // entries of the send queue and of its CQ, minus one
    u32 receive_mask;  // entries of the receive queue and of its CQ, minus one
    u32 number;
    u32 receive_stride;
    u32 sink_lkey;
    u32 flags;
    u32 version;
    u32 unused;
    u64 direct;  // the table of memory that threads access by themselves; 0: none
    u64 unused_too[4];
    QueueCounters send;
    QueueCounters receive;
};

static_assert(sizeof(QueueCounters) == 512 && alignof(QueueCounters) == 128 && sizeof(Qp) == 1152, "as in layout.rs");
#ifndef __CUDACC_RTC__  // NVRTC has no offsetof
static_assert(__builtin_offsetof(QueueCounters, published) == 128 && __builtin_offsetof(QueueCounters, completed) == 256 &&
                  __builtin_offsetof(QueueCounters, failure) == 264 && __builtin_offsetof(QueueCounters, closed) == 272 &&
                  __builtin_offsetof(QueueCounters, taken) == 384 && __builtin_offsetof(Qp, send_mask) == 56 &&
                  __builtin_offsetof(Qp, version) == 80 && __builtin_offsetof(Qp, direct) == 88 && __builtin_offsetof(Qp, send) == 128 &&
                  __builtin_offsetof(Qp, receive) == 640,
              "as in layout.rs");
#endif

// -------------------------------------------------------------------------------------------------
// Groups: see group.cuh. Any type with rank, size, sync, broadcast and any is a group.

// The threads of a group, one operation each, posted together.
template <class Group> struct Each {
    Group group;
};
template <class Group> WARPWIRE_FN Each<Group> each(Group group) { return Each<Group>{group}; }

}  // namespace warpwire

#include <warpwire/detail/queue.cuh>
#include <warpwire/detail/direct.cuh>

namespace warpwire {

// -------------------------------------------------------------------------------------------------
// Posting

// Writes `length` bytes to the peer's memory.
template <class Group = Thread>
WARPWIRE_FN Ticket put(Qp &qp, Remote to, Local from, u64 length, Group group = Group(), u64 timeout = kDefaultTimeout) {
    if (qp.direct && detail::try_put(qp, to, from, length, group)) return detail::done_ticket();
    return detail::transfer(qp, detail::kWrite, detail::kWrite, 0, to, from, length, nullptr, group, timeout);
}

// Writes, then completes a receive of the peer with immediate data `imm`.
template <class Group = Thread>
WARPWIRE_FN Ticket put_imm(Qp &qp, Remote to, Local from, u64 length, u32 imm, Group group = Group(), u64 timeout = kDefaultTimeout) {
    return detail::transfer(qp, detail::kWrite, detail::kWriteImm, imm, to, from, length, nullptr, group, timeout);
}

// Writes, then adds to a 64-bit word of the peer: a peer that sees the new value has the data. The
// ticket is that of the addition.
template <class Group = Thread>
WARPWIRE_FN Ticket put_signal(Qp &qp, Remote to, Local from, u64 length, Remote word, u64 add, Group group = Group(),
                              u64 timeout = kDefaultTimeout) {
    if (detail::has_direct_atomics(qp) && detail::try_put_signal(qp, to, from, length, word, add, group)) return detail::done_ticket();
    detail::Entry then = detail::atomic_entry(detail::kFetchAdd, word, add, 0, Local{qp.sink, qp.sink_lkey});
    return detail::transfer(qp, detail::kWrite, detail::kWrite, 0, to, from, length, &then, group, timeout);
}

// Writes at most kMaxInline bytes, copied when posting from any memory (registers, shared memory).
template <class Group = Thread>
WARPWIRE_FN Ticket put_inline(Qp &qp, Remote to, const void *bytes, u32 length, Group group = Group(), u64 timeout = kDefaultTimeout) {
    if (qp.direct && length <= kMaxInline && detail::try_inline(qp, to, bytes, length, group)) return detail::done_ticket();
    detail::Entry e = detail::entry(detail::kWrite);
    detail::add_remote(e, to);
    u32 words[8] = {detail::big_endian(0x80000000u | length)};
    for (u32 i = 0; i < kMaxInline; i++)
        if (i < length && length <= kMaxInline) words[1 + i / 4] |= static_cast<u32>(static_cast<const u8 *>(bytes)[i]) << (8 * (i % 4));
    detail::add_segment(e, words[0], words[1], words[2], words[3]);
    if (length > 12) detail::add_segment(e, words[4], words[5], words[6], words[7]);
    return detail::post_if(length <= kMaxInline, qp, e, nullptr, group, timeout);
}

// Reads `length` bytes of the peer's memory.
template <class Group = Thread>
WARPWIRE_FN Ticket get(Qp &qp, Local to, Remote from, u64 length, Group group = Group(), u64 timeout = kDefaultTimeout) {
    if (qp.direct && detail::try_get(qp, to, from, length, group)) return detail::done_ticket();
    return detail::transfer(qp, detail::kRead, detail::kRead, 0, from, to, length, nullptr, group, timeout);
}

// Sends a message of at most kMaxBytes bytes into a receive of the peer.
template <class Group = Thread>
WARPWIRE_FN Ticket send(Qp &qp, Local from, u64 length, Group group = Group(), u64 timeout = kDefaultTimeout) {
    detail::Entry e = detail::entry(detail::kSend);
    detail::add_local(e, from, static_cast<u32>(length));
    return detail::post_if(length <= kMaxBytes, qp, e, nullptr, group, timeout);
}

// As send, with immediate data, which the peer's kernel gets as the same number.
template <class Group = Thread>
WARPWIRE_FN Ticket send_imm(Qp &qp, Local from, u64 length, u32 imm, Group group = Group(), u64 timeout = kDefaultTimeout) {
    detail::Entry e = detail::entry(detail::kSendImm, imm);
    detail::add_local(e, from, static_cast<u32>(length));
    return detail::post_if(length <= kMaxBytes, qp, e, nullptr, group, timeout);
}

// Adds to a 64-bit word of the peer; the previous value is written to `result`, 8 bytes.
template <class Group = Thread>
WARPWIRE_FN Ticket fetch_add(Qp &qp, Remote word, u64 add, Local result, Group group = Group(), u64 timeout = kDefaultTimeout) {
    if (detail::has_direct_atomics(qp) && detail::try_atomic(qp, word, result, detail::kFetchAdd, add, 0, group)) return detail::done_ticket();
    return detail::post(qp, detail::atomic_entry(detail::kFetchAdd, word, add, 0, result), nullptr, group, timeout);
}

// As fetch_add, without the result.
template <class Group = Thread>
WARPWIRE_FN Ticket signal(Qp &qp, Remote word, u64 add, Group group = Group(), u64 timeout = kDefaultTimeout) {
    return fetch_add(qp, word, add, Local{qp.sink, qp.sink_lkey}, group, timeout);
}

// Replaces `expected` by `desired`; the previous value is written to `result`, 8 bytes.
template <class Group = Thread>
WARPWIRE_FN Ticket compare_swap(Qp &qp, Remote word, u64 expected, u64 desired, Local result, Group group = Group(),
                                u64 timeout = kDefaultTimeout) {
    if (detail::has_direct_atomics(qp) && detail::try_atomic(qp, word, result, detail::kCompareSwap, desired, expected, group))
        return detail::done_ticket();
    return detail::post(qp, detail::atomic_entry(detail::kCompareSwap, word, desired, expected, result), nullptr, group,
                        timeout);
}

// Posts a receive for a message of at most `length` bytes. Messages arrive in ticket order.
template <class Group = Thread>
WARPWIRE_FN Ticket post_receive(Qp &qp, Local into, u32 length, Group group = Group(), u64 timeout = kDefaultTimeout) {
    if (length > kMaxBytes) return detail::refused(kTooLong);
    Ticket ticket = detail::refused(kOk);
    group.sync();
    if (group.rank() == 0) {
        QueueCounters &counters = qp.receive;
        ticket.status = detail::reserve(detail::receives(qp), 1, timeout, &ticket.number);
        if (ticket.status == kOk) {
            u64 at = qp.receive_queue + (ticket.number & qp.receive_mask) * qp.receive_stride;
            u32 key = length ? into.lkey : 0x100;  // length 0 with the invalid lkey ends the list
            detail::store_segment(at, detail::big_endian(length), detail::big_endian(key), detail::high(into.address),
                                  detail::low(into.address));
            if (qp.receive_stride > 16) detail::store_segment(at + 16, 0, detail::big_endian(0x100), 0, 0);
            ticket.status = detail::wait_for_predecessors(counters, ticket.number);
        }
        if (ticket.status == kOk) {
            detail::fence_system();
            u32 posted = static_cast<u32>(ticket.number + 1) & 0xffff;
            detail::store_system(reinterpret_cast<u32 *>(qp.dbrec), detail::big_endian(posted));
            detail::store_after_fence(&counters.published, (ticket.number + 1) << 1);
        }
    }
    ticket.number = group.broadcast(ticket.number);
    ticket.status = detail::broadcast(group, ticket.status);
    return ticket;
}

// -------------------------------------------------------------------------------------------------
// The peer's memory, mapped

// What threads do with memory that they map.
constexpr u32 kMapRead = detail::kReadRemote, kMapWrite = detail::kWriteRemote, kMapAtomic = detail::kAtomicRemote;

// Memory of the peer that this kernel may access like its own, from map_remote to unmap.
struct Mapping {
    void *pointer;  // null: not mapped
    detail::DirectEntry *entry;
    u32 rkey;
};

// Maps `length` bytes of the peer's memory, if threads may access it by themselves and everything
// that was posted is complete; otherwise `pointer` is null, and the memory must be accessed by put
// and get. All threads of the group get the mapping; other threads may use it too. Nothing orders
// loads and stores through it with work that is posted later.
//
// Until unmap, the owner cannot take the memory back: it waits for half a second. So call
// is_revoked more often than that, and unmap when it is true, and before the kernel ends.
template <class Group = Thread> WARPWIRE_FN Mapping map_remote(Qp &qp, Remote at, u64 length, u32 access, Group group = Group()) {
    u64 address = 0;
    group.sync();
    if (group.rank() == 0 && qp.direct && (!(access & kMapAtomic) || (qp.flags & kDirectAtomics))) {
        detail::DirectRange range = detail::remote_range(qp, at, length, access), none = detail::no_range();
        if (detail::enter(qp, range, none, none)) {
            detail::add_system(&detail::direct_table(qp)->operations, 1);
            address = range.address;
        }
    }
    address = group.broadcast(address);
    if (!address) return Mapping{nullptr, nullptr, at.rkey};
    return Mapping{reinterpret_cast<void *>(address), detail::remote_entry(qp, at.rkey), at.rkey};
}

// Whether the memory is to be unmapped: its owner takes it back, or the connection has ended.
WARPWIRE_FN bool is_revoked(const Mapping &mapping) {
    return !mapping.pointer || detail::load_system_relaxed(&mapping.entry->tag) >> 32 != mapping.rkey;
}

// Ends a mapping, once for each map_remote, when all threads that use it have arrived.
template <class Group = Thread> WARPWIRE_FN void unmap(Mapping &mapping, Group group = Group()) {
    group.sync();
    if (group.rank() == 0 && mapping.pointer) {
        detail::fence_system();
        detail::add_system(&mapping.entry->users, ~0ull);
    }
    mapping.pointer = nullptr;
}

// Stores to a word, mapped or not, which wait_signal waits for: who sees the value sees everything
// that the group has stored before.
template <class Group = Thread> WARPWIRE_FN void set_signal(u64 *word, u64 value, Group group = Group()) {
    group.sync();
    if (group.rank() == 0) {
        detail::fence_system();
        detail::store_system(word, value);
    }
}

// -------------------------------------------------------------------------------------------------
// Waiting

// Waits until the operation is complete: its data was acknowledged, or what it fetched has arrived.
template <class Group = Thread>
WARPWIRE_FN Status wait(Qp &qp, Ticket ticket, u64 timeout = kDefaultTimeout, Group group = Group()) {
    Status status = kOk;
    if (group.rank() == 0) status = detail::wait_thread(detail::sends(qp), ticket, timeout);
    return detail::broadcast(group, status);
}
// For work posted with each(…): every thread waits for its own operation.
template <class Group> WARPWIRE_FN Status wait(Qp &qp, Ticket ticket, u64 timeout, Each<Group>) {
    return detail::wait_thread(detail::sends(qp), ticket, timeout);
}

// Polls once: kOk, kNotReady, or the failure.
template <class Group = Thread> WARPWIRE_FN Status test(Qp &qp, Ticket ticket, Group group = Group()) {
    return wait(qp, ticket, 0, group);
}

// Waits until everything that any thread has posted before is complete. Returns the first failure.
template <class Group = Thread> WARPWIRE_FN Status quiet(Qp &qp, u64 timeout = kDefaultTimeout, Group group = Group()) {
    Status status = kOk;
    group.sync();
    if (group.rank() == 0) {
        u64 until = detail::filled(qp.send);
        if (until) status = detail::wait_thread(detail::sends(qp), Ticket{until - 1, kOk}, timeout);
        u64 failure = detail::load_gpu(&qp.send.failure);
        if (status < 0 && failure != kNoFailure) status = static_cast<Status>(-static_cast<int>(failure & 0xff));
    }
    return detail::broadcast(group, status);
}

// Waits for the message of a posted receive. Its length is available until the receive one lap of
// the queue later is posted; after that, kTooLate is returned.
template <class Group = Thread>
WARPWIRE_FN Status wait_receive(Qp &qp, Ticket ticket, ReceivedMessage *message, u64 timeout = kDefaultTimeout, Group group = Group()) {
    ReceivedMessage found = {0, 0, 0};
    Status status = kOk;
    if (group.rank() == 0) status = detail::wait_receive_thread(qp, ticket, &found, timeout);
    message->length = static_cast<u32>(group.broadcast(found.length));
    message->imm = static_cast<u32>(group.broadcast(found.imm));
    message->has_imm = static_cast<u32>(group.broadcast(found.has_imm));
    return detail::broadcast(group, status);
}

template <class Group = Thread>
WARPWIRE_FN Status test_receive(Qp &qp, Ticket ticket, ReceivedMessage *message, Group group = Group()) {
    return wait_receive(qp, ticket, message, 0, group);
}

// Waits for the next message that no other call of this function has returned; `number` is the
// receive that it arrived in. It may wait for a receive that is not posted yet.
WARPWIRE_CALL Status next_receive(Qp &qp, ReceivedMessage *message, u64 *number, u64 timeout = kDefaultTimeout) {
    detail::Deadline deadline(timeout);
    for (;;) {
        u64 next = detail::load_gpu(&qp.receive.taken);
        Status status = detail::wait_receive_thread(qp, Ticket{next, kOk}, message, 0);
        if (status != kNotReady && status != kBadTicket) {
            // Failures are not consumed: every caller gets them.
            if (status < 0 && status != kTooLate) return status;
            if (detail::compare_exchange(&qp.receive.taken, next, next + 1) != next) continue;
            *number = next;
            return status;
        }
        Status stop = deadline.stop(qp.receive);
        if (stop != kOk) return stop;
        detail::spin_pause();
    }
}

// Whether a word that holds `seen` satisfies the condition.
template <class Word> WARPWIRE_FN bool holds(Condition condition, Word seen, Word value) {
    switch (condition) {
    case Condition::AtLeast: return static_cast<Word>(seen - value) >> (8 * sizeof(Word) - 1) == 0;
    case Condition::Equal: return seen == value;
    case Condition::And: return (seen & value) != 0;
    case Condition::Nor: return static_cast<Word>(~(seen | value)) != 0;
    }
    return false;
}

// Waits until a word of local memory, 32 or 64 bits, satisfies the condition.
template <class Word, class Group = Thread>
WARPWIRE_FN Status wait_signal(const Word *word, Condition condition, Word value, u64 timeout = kDefaultTimeout, Group group = Group()) {
    static_assert(sizeof(Word) == 4 || sizeof(Word) == 8, "signals have 32 or 64 bits");
    Status status = kOk;
    if (group.rank() == 0) {
        detail::Deadline deadline(timeout);
        while (!holds(condition, detail::load_system(word), value)) {
            if (deadline.has_expired()) {
                status = deadline.status();
                break;
            }
            detail::spin_pause();
        }
    }
    return detail::broadcast(group, status);
}

}  // namespace warpwire

#endif

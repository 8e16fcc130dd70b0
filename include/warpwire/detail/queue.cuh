// Posting work to a queue and polling its completion. Part of verbs.cuh.
#ifndef WARPWIRE_DETAIL_QUEUE_CUH
#define WARPWIRE_DETAIL_QUEUE_CUH

namespace warpwire {
namespace detail {

// Timeout of a wait. The clock is not read before the 16th poll.
class Deadline {
  public:
    WARPWIRE_FN explicit Deadline(u64 limit) : limit_(limit), start_(0), polls_(0) {}
    WARPWIRE_FN bool has_expired() {
        if (limit_ == 0) return true;
        if (++polls_ % 16 != 0 || limit_ == kNoTimeout) return false;
        u64 now = clock_ns();
        if (start_ == 0) start_ = now;
        return now - start_ >= limit_;
    }
    WARPWIRE_FN Status status() const { return limit_ == 0 ? kNotReady : kTimeout; }
    // kOk to continue waiting, else why to stop. `closed` is checked every 16 polls.
    WARPWIRE_FN Status stop(const QueueCounters &counters) {
        bool over = has_expired();
        u32 closed = over || polls_ % 16 == 1 ? load_system_relaxed(&counters.closed) : 0;
        if (closed) return static_cast<Status>(-static_cast<int>(closed));
        return over ? status() : kOk;
    }

  private:
    u64 limit_, start_;
    u32 polls_;
};

// The parts of a send or receive queue that posting and waiting need.
struct Queue {
    QueueCounters *counters;
    u64 completions;
    u32 depth, flags;
};
WARPWIRE_FN Queue sends(Qp &qp) { return Queue{&qp.send, qp.send_cq, qp.send_mask + 1, qp.flags}; }
WARPWIRE_FN Queue receives(Qp &qp) { return Queue{&qp.receive, qp.receive_cq, qp.receive_mask + 1, qp.flags}; }

// Number of entries filled without a gap.
WARPWIRE_FN u64 filled(const QueueCounters &counters) { return load_gpu(&counters.published) >> 1; }

// Status of the completion of `number`: kOk, its failure, or kNotReady if it is not there. The
// caller must check `completed` to rule out a completion of a later lap.
WARPWIRE_FN Status poll_cqe(const Queue &queue, u64 number, ReceivedMessage *message = nullptr) {
    u64 at = queue.completions + (number & (queue.depth - 1)) * 64;
    u32 tail = load_system(reinterpret_cast<const u32 *>(at + 60));
    u32 code = tail >> 28, owner = tail >> 24 & 1, counter = (tail & 0xff) << 8 | (tail >> 8 & 0xff);
    if (code == 15 || owner != ((number & queue.depth) != 0) || counter != (number & 0xffff)) return kNotReady;
    if (code == 13 || code == 14) {
        u32 word = load_system(reinterpret_cast<const u32 *>(at + 52));
        u32 syndrome = word >> 24;
        return static_cast<Status>(-static_cast<int>(syndrome == 0 ? 0xff : syndrome));
    }
    if (message) {
        message->length = big_endian(load_system(reinterpret_cast<const u32 *>(at + 44)));
        message->has_imm = code == 1 || code == 3;
        message->imm = message->has_imm ? big_endian(load_system(reinterpret_cast<const u32 *>(at + 36))) : 0;
    }
    return kOk;
}

// Result of an operation that `completed` has passed.
WARPWIRE_FN Status outcome(const QueueCounters &counters, u64 number) {
    u64 failure = load_gpu(&counters.failure);
    if (failure == kNoFailure || number < failure >> 8) return kOk;
    if (number > failure >> 8) return kFlushed;
    return static_cast<Status>(-static_cast<int>(failure & 0xff));
}

// The completion of `number` is a failure: finds and records the first one, which has the cause.
// Completions arrive in order, so all before it are there, and none of their slots is reused while
// `completed` has not passed them.
WARPWIRE_CALL void record_failure(const Queue &queue, u64 number) {
    for (u32 tries = 0; tries < 64; tries++) {
        u64 at = load_gpu(&queue.counters->completed);
        if (load_gpu(&queue.counters->failure) != kNoFailure || at > number) return;
        Status found = kOk;
        while (at <= number && (found = poll_cqe(queue, at)) == kOk) at++;
        if (found < 0) {
            atomic_min(&queue.counters->failure, at << 8 | static_cast<u32>(-found));
            return;
        }
    }
    // Unreachable if completions arrive in order; record a failure in any case.
    atomic_min(&queue.counters->failure, number << 8 | 0xff);
}

// Whether everything up to `number` is complete; if so, advances `completed`.
WARPWIRE_FN bool advance_completed(const Queue &queue, u64 number) {
    Status found = poll_cqe(queue, number);
    if (found == kNotReady) return false;
    if (load_gpu(&queue.counters->completed) > number) return true;
    if (found < 0) record_failure(queue, number);
    atomic_max(&queue.counters->completed, number + 1);
    return true;
}

// Reserves `count` consecutive entries if there is room, else returns kNotReady; *first is their
// number in both cases.
WARPWIRE_FN Status try_reserve(const Queue &queue, u32 count, u64 *first) {
    QueueCounters &counters = *queue.counters;
    for (;;) {
        // Issued together; the acquire load is last, because loads after it would wait for it.
        u64 at = load_gpu_relaxed(&counters.reserved), failure = load_gpu_relaxed(&counters.failure);
        u32 closed = load_system_relaxed(&counters.closed);
        u64 completed = load_gpu(&counters.completed);
        *first = at;
        if (failure != kNoFailure) return kFlushed;
        if (closed) return static_cast<Status>(-static_cast<int>(closed));
        if (static_cast<long long>(at + count - completed) > static_cast<long long>(queue.depth)) return kNotReady;
        if (queue.flags & kSinglePoster) {
            store_after_fence(&counters.reserved, at + count);
            return kOk;
        }
        if (compare_exchange(&counters.reserved, at, at + count) == at) return kOk;
        backoff();  // another thread has made progress (lock-free)
    }
}

// As try_reserve, but waits for room. Nothing is reserved if it fails.
WARPWIRE_CALL Status reserve(const Queue &queue, u32 count, u64 timeout, u64 *first) {
    QueueCounters &counters = *queue.counters;
    if (count > queue.depth) return kTooMany;
    Deadline deadline(timeout);
    for (;;) {
        Status status = try_reserve(queue, count, first);
        if (status != kNotReady) return status;
        // Advance by half a lap if possible, so that few threads have to poll.
        u64 needed = *first + count - queue.depth, half_lap = needed + queue.depth / 2;
        if (half_lap <= filled(counters) && advance_completed(queue, half_lap - 1)) continue;
        if (advance_completed(queue, needed - 1)) continue;
        if (deadline.has_expired()) return deadline.status();
        backoff();
    }
}

// Waits until the entries before `first` are published.
WARPWIRE_FN Status wait_for_predecessors(QueueCounters &counters, u64 first) {
    Deadline deadline(WARPWIRE_FILL_TIMEOUT);
    while (load_gpu(&counters.published) != first << 1) {
        if (deadline.has_expired()) {
            store_system(&counters.closed, -kStuck);
            return kStuck;
        }
        backoff();
    }
    return kOk;
}

// The constants that posting needs, loaded once, before a fence that would delay loads.
struct Poster {
    u64 send_queue, dbrec, doorbell;
    u32 send_mask, number, flags;
};
WARPWIRE_FN Poster poster(const Qp &qp) { return Poster{qp.send_queue, qp.dbrec, qp.doorbell, qp.send_mask, qp.number, qp.flags}; }

WARPWIRE_FN void ring_doorbell(const Poster &qp, u64 until) {
    u32 index = static_cast<u32>(until) & 0xffff;
    if (qp.flags & kDbrecFirst) {
        store_system(reinterpret_cast<u32 *>(qp.dbrec + 4), big_endian(index));
        fence_system();
    }
    u64 bell = static_cast<u64>(big_endian(qp.number << 8)) << 32 | big_endian(index << 8);
    store_system(reinterpret_cast<u64 *>(qp.doorbell), bell);
}

// Publishes everything before `until`, for a single poster.
WARPWIRE_FN void publish_single_poster(Qp &qp, const Poster &poster, u64 until) {
    fence_system();
    ring_doorbell(poster, until);
    store_after_fence(&qp.send.published, until << 1);
}

// Publishes `count` filled entries from `first` on, after those before them. *rings: whether this
// thread must ring the doorbell; if not, the thread that is ringing does, as it checks again before
// it stops.
WARPWIRE_FN Status publish_in_order(QueueCounters &counters, u64 first, u32 count, bool *rings) {
    const u64 rests = first << 1, ringing = rests | 1, mine = (first + count) << 1 | 1;
    Deadline deadline(WARPWIRE_FILL_TIMEOUT);
    for (u64 wanted = rests;;) {
        u64 seen = compare_exchange(&counters.published, wanted, mine);
        *rings = wanted == rests;
        if (seen == wanted) return kOk;
        while (seen >> 1 != first) {
            if (deadline.has_expired()) {
                store_system(&counters.closed, -kStuck);
                return kStuck;
            }
            backoff();
            seen = load_gpu(&counters.published);
        }
        wanted = seen == ringing ? ringing : rests;
    }
}

// Publishes filled entries. One thread rings the doorbell for all that are ready.
WARPWIRE_CALL Status publish(Qp &qp, u64 first, u32 count) {
    QueueCounters &counters = qp.send;
    u64 until = first + count;
    Poster post = poster(qp);
    if (post.flags & kSinglePoster) {
        publish_single_poster(qp, post, until);
        return kOk;
    }
    fence_system();
    bool rings;
    Status joined = publish_in_order(counters, first, count, &rings);
    if (joined != kOk || !rings) return joined;
    for (;;) {
        ring_doorbell(post, until);
        u64 seen = compare_exchange(&counters.published, until << 1 | 1, until << 1);
        if (seen == (until << 1 | 1)) return kOk;
        until = seen >> 1;
        fence_system();  // orders the entries of other threads
    }
}

// A WQE of up to four 16-byte segments. Its control segment is completed when the number is known.
struct Entry {
    u32 words[16];
    u32 opcode, segments;
};

enum Opcode : u32 {
    kNop = 0x00,
    kSend = 0x0a,
    kSendImm = 0x0b,
    kWrite = 0x08,
    kWriteImm = 0x09,
    kRead = 0x10,
    kCompareSwap = 0x11,
    kFetchAdd = 0x12,
};

WARPWIRE_FN Entry entry(u32 opcode, u32 imm = 0) {
    Entry e = {};
    e.opcode = opcode;
    e.segments = 1;
    e.words[2] = 0x08000000u;  // byte 11: always signaled
    e.words[3] = big_endian(imm);
    return e;
}
WARPWIRE_FN void add_segment(Entry &e, u32 a, u32 b, u32 c, u32 d) {
    u32 *words = &e.words[4 * e.segments++];
    words[0] = a, words[1] = b, words[2] = c, words[3] = d;
}
WARPWIRE_FN u32 high(u64 v) { return big_endian(static_cast<u32>(v >> 32)); }
WARPWIRE_FN u32 low(u64 v) { return big_endian(static_cast<u32>(v)); }
WARPWIRE_FN void add_remote(Entry &e, Remote at) { add_segment(e, high(at.address), low(at.address), big_endian(at.rkey), 0); }
// The HCA reads a length of 0 as 2 GiB, so an empty data segment is left out.
WARPWIRE_FN void add_local(Entry &e, Local at, u32 length) {
    if (length) add_segment(e, big_endian(length), big_endian(at.lkey), high(at.address), low(at.address));
}
WARPWIRE_FN void add_operands(Entry &e, u64 first, u64 second) { add_segment(e, high(first), low(first), high(second), low(second)); }

WARPWIRE_FN void write_entry(const Poster &qp, u64 number, const Entry &e) {
    u64 at = qp.send_queue + (number & qp.send_mask) * 64;
    u32 index = static_cast<u32>(number) & 0xffff;
    store_segment(at, big_endian(index << 8 | e.opcode), big_endian(qp.number << 8 | e.segments), e.words[2], e.words[3]);
    // Unrolled by hand, so that the words stay in registers.
    if (e.segments > 1) store_segment(at + 16, e.words[4], e.words[5], e.words[6], e.words[7]);
    if (e.segments > 2) store_segment(at + 32, e.words[8], e.words[9], e.words[10], e.words[11]);
    if (e.segments > 3) store_segment(at + 48, e.words[12], e.words[13], e.words[14], e.words[15]);
}

WARPWIRE_FN Ticket refused(Status why) { return Ticket{0, why}; }

// Posts one operation of one or two entries, by one thread.
WARPWIRE_FN Ticket post_thread(Qp &qp, const Entry &a, const Entry *b, u64 timeout) {
    u64 first;
    u32 count = b ? 2 : 1;
    Status status = reserve(sends(qp), count, timeout, &first);
    if (status != kOk) return refused(status);
    Poster post = poster(qp);
    write_entry(post, first, a);
    if (b) write_entry(post, first + 1, *b);
    return Ticket{first + count - 1, publish(qp, first, count)};
}

// As post_thread, for a group: the barrier orders what any of its threads wrote before the post.
template <class Group> WARPWIRE_FN Ticket post(Qp &qp, const Entry &a, const Entry *b, Group group, u64 timeout) {
    Ticket ticket = refused(kOk);
    group.sync();
    if (group.rank() == 0) ticket = post_thread(qp, a, b, timeout);
    ticket.number = group.broadcast(ticket.number);
    ticket.status = static_cast<Status>(static_cast<int>(group.broadcast(static_cast<u64>(ticket.status))));
    return ticket;
}

// Posts one operation per thread of the group, with one reservation and one doorbell.
template <class Group> WARPWIRE_FN Ticket post(Qp &qp, const Entry &a, const Entry *b, Each<Group> each, u64 timeout) {
    Group group = each.group;
    u32 per = b ? 2 : 1, count = per * group.size();
    u64 first = 0;
    Status status = kOk;
    if (group.rank() == 0) status = reserve(sends(qp), count, timeout, &first);
    first = group.broadcast(first);
    status = static_cast<Status>(static_cast<int>(group.broadcast(static_cast<u64>(status))));
    if (status != kOk) return refused(status);
    u64 number = first + per * group.rank();
    Poster post = poster(qp);
    write_entry(post, number, a);
    if (b) write_entry(post, number + 1, *b);
    group.sync();
    if (group.rank() == 0) status = publish(qp, first, count);
    status = static_cast<Status>(static_cast<int>(group.broadcast(static_cast<u64>(status))));
    return Ticket{number + per - 1, status};
}

// Posts nothing if the operation does not fit. With each(…) all threads must take part, as the
// others wait for them, so a thread whose operation does not fit posts a NOP.
template <class Group>
WARPWIRE_FN Ticket post_if(bool fits, Qp &qp, const Entry &a, const Entry *b, Group group, u64 timeout) {
    return fits ? post(qp, a, b, group, timeout) : refused(kTooLong);
}
template <class Group>
WARPWIRE_FN Ticket post_if(bool fits, Qp &qp, const Entry &a, const Entry *b, Each<Group> each, u64 timeout) {
    Entry first = fits ? a : entry(kNop), second = b && fits ? *b : entry(kNop);
    Ticket ticket = post(qp, first, b ? &second : nullptr, each, timeout);
    if (!fits && ticket.status == kOk) ticket.status = kTooLong;
    return ticket;
}

// A transfer, split into pieces of kMaxBytes; the last has the opcode `last`, the others `piece`.
template <class Group>
WARPWIRE_FN Ticket transfer(Qp &qp, u32 piece, u32 last, u32 imm, Remote remote, Local local, u64 length, const Entry *then,
                            Group group, u64 timeout) {
    while (length > kMaxBytes) {
        Entry e = entry(piece);
        add_remote(e, remote);
        add_local(e, local, static_cast<u32>(kMaxBytes));
        Ticket ticket = post(qp, e, nullptr, group, timeout);
        if (ticket.status != kOk) return ticket;
        remote.address += kMaxBytes, local.address += kMaxBytes, length -= kMaxBytes;
    }
    Entry e = entry(last, imm);
    add_remote(e, remote);
    add_local(e, local, static_cast<u32>(length));
    return post(qp, e, then, group, timeout);
}
// With each(…) all threads must post the same number of entries, so nothing is split.
template <class Group>
WARPWIRE_FN Ticket transfer(Qp &qp, u32, u32 last, u32 imm, Remote remote, Local local, u64 length, const Entry *then,
                            Each<Group> each, u64 timeout) {
    Entry e = entry(last, imm);
    add_remote(e, remote);
    add_local(e, local, static_cast<u32>(length));
    return post_if(length <= kMaxBytes, qp, e, then, each, timeout);
}

WARPWIRE_FN Entry atomic_entry(u32 opcode, Remote word, u64 first, u64 second, Local result) {
    Entry e = entry(opcode);
    add_remote(e, word);
    add_operands(e, first, second);
    add_local(e, result, 8);
    return e;
}

template <class Group> WARPWIRE_FN Status broadcast(Group group, Status mine) {
    return static_cast<Status>(static_cast<int>(group.broadcast(static_cast<u64>(mine))));
}

WARPWIRE_CALL Status wait_thread(const Queue &queue, Ticket ticket, u64 timeout) {
    QueueCounters &counters = *queue.counters;
    if (ticket.status != kOk) return ticket.status;
    if (ticket.number == kDone) return kOk;
    if (ticket.number >= filled(counters)) return kBadTicket;
    Deadline deadline(timeout);
    for (;;) {
        if (load_gpu(&counters.completed) > ticket.number) return outcome(counters, ticket.number);
        Status found = poll_cqe(queue, ticket.number);
        if (found != kNotReady) {
            // It is the operation's own completion only if `completed` has not passed it; otherwise
            // it may be one of a later lap.
            if (load_gpu(&counters.completed) > ticket.number) return outcome(counters, ticket.number);
            if (found < 0) record_failure(queue, ticket.number);
            return found;
        }
        Status stop = deadline.stop(counters);
        if (stop != kOk) return stop;
        spin_pause();
    }
}

WARPWIRE_CALL Status wait_receive_thread(Qp &qp, Ticket ticket, ReceivedMessage *message, u64 timeout) {
    Queue queue = receives(qp);
    Status status = wait_thread(queue, ticket, timeout);
    if (status != kOk) return status;
    ReceivedMessage found = {0, 0, 0};
    Status seen = poll_cqe(queue, ticket.number, &found);
    // The slot is reused once the receive one lap later is posted.
    if (load_gpu(&queue.counters->reserved) > ticket.number + queue.depth || seen != kOk) return kTooLate;
    *message = found;
    return kOk;
}

}  // namespace detail
}  // namespace warpwire

#endif

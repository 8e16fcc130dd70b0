// Operations that threads execute by themselves, with loads and stores, where the peer's memory is
// mapped on this GPU. Part of verbs.cuh.
//
// The HCA fills a table: memory of the peer, and local memory, that kernels have used before. A
// thread announces its access in the entry, and then checks the entry's tag; the CPU clears the
// tag, and then looks for announcements. What is not in the table, or not allowed, is posted: the
// HCA then executes it or reports why not. So is everything that comes while posted work is
// outstanding, which keeps the order.
#ifndef WARPWIRE_DETAIL_DIRECT_CUH
#define WARPWIRE_DETAIL_DIRECT_CUH

namespace warpwire {
namespace detail {

// A registration: `kernel_table.rs` defines the same.
struct DirectEntry {
    u64 tag;      // key << 32 | number << 8 | access flags; 0: closed
    u64 users;    // threads that access the memory, or check whether they may
    u64 iova;     // its first address in work requests
    u64 length;
    u64 address;  // where it is
    u64 unused[3];
};
constexpr u32 kDirectSlots = 32;
struct DirectTable {
    DirectEntry remote[kDirectSlots];
    DirectEntry local[kDirectSlots];
    u64 operations;  // work requests that were executed here instead of being posted
    u64 unused[15];
};
static_assert(sizeof(DirectEntry) == 64 && sizeof(DirectTable) == 4224, "as in kernel_table.rs");

enum Access : u32 { kReadLocal = 0, kWriteLocal = 1, kReadRemote = 2, kWriteRemote = 4, kAtomicRemote = 8 };

// The ticket of an operation that was complete when it returned.
WARPWIRE_FN Ticket done_ticket() { return Ticket{kDone, kOk}; }

// Longer transfers are posted: the GPU's copies are faster than a few threads.
constexpr u64 kDirectBytesPerThread = 512;

// One range that an operation accesses. An entry of 0: none.
struct DirectRange {
    DirectEntry *entry;
    u64 at, length;
    u32 key, need;
    u64 address;  // where it is, once entered
};

WARPWIRE_FN DirectTable *direct_table(const Qp &qp) { return reinterpret_cast<DirectTable *>(qp.direct); }

WARPWIRE_FN DirectEntry *remote_entry(const Qp &qp, u32 rkey) { return &direct_table(qp)->remote[(rkey >> 8) % kDirectSlots]; }

WARPWIRE_FN DirectRange remote_range(const Qp &qp, Remote at, u64 length, u32 need) {
    return DirectRange{remote_entry(qp, at.rkey), at.address, length, at.rkey, need, 0};
}
WARPWIRE_FN DirectRange local_range(const Qp &qp, Local at, u64 length, u32 need) {
    return DirectRange{&direct_table(qp)->local[(at.lkey >> 8) % kDirectSlots], at.address, length, at.lkey, need, 0};
}
WARPWIRE_FN DirectRange no_range() { return DirectRange{nullptr, 0, 0, 0, 0, 0}; }

// The tag of an entry, with the range's key if there is no entry.
WARPWIRE_FN u64 load_tag(const DirectRange &range) {
    return range.entry ? load_system_relaxed(&range.entry->tag) : static_cast<u64>(range.key) << 32;
}
WARPWIRE_FN void announce(const DirectRange &range) {
    if (range.entry) add_system(&range.entry->users, 1);
}
WARPWIRE_FN void leave(const DirectRange &range) {
    if (range.entry) add_system(&range.entry->users, ~0ull);
}
// Whether the access is allowed, now that it is announced. The CPU stores the tag after the other
// words, and the tag was loaded before the last fence: these are the words of that tag, or of a
// later one.
WARPWIRE_FN bool is_allowed(DirectRange &range, u64 tag) {
    if (!range.entry) return true;
    u64 now = load_system_relaxed(&range.entry->tag), iova = load_system_relaxed(&range.entry->iova);
    u64 length = load_system_relaxed(&range.entry->length), address = load_system_relaxed(&range.entry->address);
    u64 offset = range.at - iova;
    range.address = address + offset;
    bool aligned = range.need != kAtomicRemote || range.at % 8 == 0;
    return now == tag && (tag & range.need) == range.need && offset <= length && range.length <= length - offset && aligned;
}

// Begins an operation on up to three ranges, by one thread; false if it must be posted.
WARPWIRE_CALL bool enter(Qp &qp, DirectRange &a, DirectRange &b, DirectRange &c) {
    QueueCounters &counters = qp.send;
    // Issued together; the acquire load is last, because loads after it would wait for it.
    u64 tag_a = load_tag(a), tag_b = load_tag(b), tag_c = load_tag(c);
    u64 reserved = load_gpu_relaxed(&counters.reserved), failure = load_gpu_relaxed(&counters.failure);
    u32 closed = load_system_relaxed(&counters.closed);
    u64 completed = load_gpu(&counters.completed);
    if (tag_a >> 32 != a.key || tag_b >> 32 != b.key || tag_c >> 32 != c.key) return false;
    if (completed < reserved) {
        if (!advance_completed(sends(qp), reserved - 1)) return false;
        failure = load_gpu(&counters.failure);
    }
    if (failure != kNoFailure || closed) return false;
    announce(a), announce(b), announce(c);
    // Also orders what was written before with the operation.
    fence_sequential();
    bool allowed = is_allowed(a, tag_a), allowed_b = is_allowed(b, tag_b), allowed_c = is_allowed(c, tag_c);
    if (allowed && allowed_b && allowed_c) return true;
    leave(a), leave(b), leave(c);
    return false;
}
// Ends it, after a fence.
WARPWIRE_FN void end(Qp &qp, const DirectRange &a, const DirectRange &b, const DirectRange &c, u32 count) {
    leave(a), leave(b), leave(c);
    add_system(&direct_table(qp)->operations, count);
}

// Copies with all threads of the group, in words as wide as both addresses allow.
template <class Word, class Group> WARPWIRE_FN void copy_words(u64 to, u64 from, u64 length, Group group) {
    u64 head = (0 - to) % sizeof(Word);
    if (head > length) head = length;
    u64 count = (length - head) / sizeof(Word), tail = head + count * sizeof(Word);
    for (u64 i = group.rank(); i < head; i += group.size()) copy_word<u8>(to + i, from + i);
    for (u64 i = group.rank(); i < count; i += group.size()) copy_word<Word>(to + head + i * sizeof(Word), from + head + i * sizeof(Word));
    for (u64 i = tail + group.rank(); i < length; i += group.size()) copy_word<u8>(to + i, from + i);
}
template <class Group> WARPWIRE_FN void copy_group(u64 to, u64 from, u64 length, Group group) {
    switch ((to ^ from) & 15) {
    case 0: return copy_words<Word16>(to, from, length, group);
    case 8: return copy_words<u64>(to, from, length, group);
    case 4:
    case 12: return copy_words<u32>(to, from, length, group);
    default: return copy_words<u8>(to, from, length, group);
    }
}

// Copies from one range to the other, then adds to the word of the third, if there is one. False if
// that must be posted.
template <class Group>
WARPWIRE_FN bool try_copy(Qp &qp, DirectRange to, DirectRange from, DirectRange word, u64 add, u64 length, Group group) {
    if (length > kDirectBytesPerThread * group.size()) return false;
    bool entered = false;
    group.sync();
    if (group.rank() == 0) entered = enter(qp, to, from, word);
    entered = group.broadcast(entered);
    if (!entered) return false;
    to.address = group.broadcast(to.address), from.address = group.broadcast(from.address);
    copy_group(to.address, from.address, length, group);
    group.sync();
    if (group.rank() == 0) {
        fence_system();
        if (word.entry) add_system(reinterpret_cast<u64 *>(word.address), add);
        end(qp, to, from, word, word.entry ? 2 : 1);
    }
    return true;
}
// With each(…) every thread has an operation of its own: all of them are executed here, or none.
template <class Group>
WARPWIRE_FN bool try_copy(Qp &qp, DirectRange to, DirectRange from, DirectRange word, u64 add, u64 length, Each<Group> each) {
    bool entered = length <= kDirectBytesPerThread && enter(qp, to, from, word);
    if (each.group.any(!entered)) {
        if (entered) leave(to), leave(from), leave(word);
        return false;
    }
    copy_group(to.address, from.address, length, Thread());
    fence_system();
    if (word.entry) add_system(reinterpret_cast<u64 *>(word.address), add);
    end(qp, to, from, word, word.entry ? 2 : 1);
    return true;
}

// Stores up to kMaxInline bytes of the calling thread.
WARPWIRE_FN bool try_inline_thread(Qp &qp, DirectRange to, const u8 *bytes, u32 length) {
    DirectRange none = no_range();
    if (!enter(qp, to, none, none)) return false;
    if (length == 8 && to.address % 8 == 0) {
        u64 word = 0;
        for (u32 i = 0; i < 8; i++) word |= static_cast<u64>(bytes[i]) << (8 * i);
        store_system(reinterpret_cast<u64 *>(to.address), word);
    } else {
        for (u32 i = 0; i < length; i++) store_byte(to.address + i, bytes[i]);
    }
    fence_system();
    end(qp, to, none, none, 1);
    return true;
}
template <class Group> WARPWIRE_FN bool try_inline(Qp &qp, DirectRange to, const void *bytes, u32 length, Group group) {
    bool entered = false;
    group.sync();
    if (group.rank() == 0) entered = try_inline_thread(qp, to, static_cast<const u8 *>(bytes), length);
    return group.broadcast(entered);
}
template <class Group> WARPWIRE_FN bool try_inline(Qp &, DirectRange, const void *, u32, Each<Group>) { return false; }

// Applies an atomic operation; the previous value is stored to `result`, if that is not empty.
WARPWIRE_FN bool try_atomic_thread(Qp &qp, DirectRange word, DirectRange result, u32 opcode, u64 first, u64 second) {
    DirectRange none = no_range();
    if (!enter(qp, word, result, none)) return false;
    u64 *at = reinterpret_cast<u64 *>(word.address);
    u64 previous = opcode == kFetchAdd ? fetch_add_system(at, first) : compare_exchange_system(at, second, first);
    if (result.entry) {
        for (u32 i = 0; i < 8; i++) store_byte(result.address + i, static_cast<u8>(previous >> (8 * i)));
    }
    fence_system();
    end(qp, word, result, none, 1);
    return true;
}
template <class Group>
WARPWIRE_FN bool try_atomic(Qp &qp, DirectRange word, DirectRange result, u32 opcode, u64 first, u64 second, Group group) {
    bool entered = false;
    group.sync();
    if (group.rank() == 0) entered = try_atomic_thread(qp, word, result, opcode, first, second);
    return group.broadcast(entered);
}
template <class Group>
WARPWIRE_FN bool try_atomic(Qp &, DirectRange, DirectRange, u32, u64, u64, Each<Group>) {
    return false;
}

WARPWIRE_FN bool has_direct_atomics(const Qp &qp) { return qp.direct && (qp.flags & kDirectAtomics); }

template <class Group> WARPWIRE_FN bool try_put(Qp &qp, Remote to, Local from, u64 length, Group group) {
    return try_copy(qp, remote_range(qp, to, length, kWriteRemote), local_range(qp, from, length, kReadLocal), no_range(), 0, length, group);
}
template <class Group>
WARPWIRE_FN bool try_put_signal(Qp &qp, Remote to, Local from, u64 length, Remote word, u64 add, Group group) {
    return try_copy(qp, remote_range(qp, to, length, kWriteRemote), local_range(qp, from, length, kReadLocal),
                    remote_range(qp, word, 8, kAtomicRemote), add, length, group);
}
template <class Group> WARPWIRE_FN bool try_get(Qp &qp, Local to, Remote from, u64 length, Group group) {
    return try_copy(qp, local_range(qp, to, length, kWriteLocal), remote_range(qp, from, length, kReadRemote), no_range(), 0, length, group);
}
template <class Group> WARPWIRE_FN bool try_inline(Qp &qp, Remote to, const void *bytes, u32 length, Group group) {
    return try_inline(qp, remote_range(qp, to, length, kWriteRemote), bytes, length, group);
}
template <class Group>
WARPWIRE_FN bool try_atomic(Qp &qp, Remote word, Local result, u32 opcode, u64 first, u64 second, Group group) {
    bool sinks = result.lkey == qp.sink_lkey && result.address == qp.sink;
    return try_atomic(qp, remote_range(qp, word, 8, kAtomicRemote), sinks ? no_range() : local_range(qp, result, 8, kWriteLocal), opcode, first,
                      second, group);
}

}  // namespace detail
}  // namespace warpwire

#endif

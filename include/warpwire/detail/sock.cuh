// What <warpwire/sock.cuh> is made of: words that the host changes, waiting, locks, rings. Functions named *_alone are
// run by one thread of the group.
#ifndef WARPWIRE_DETAIL_SOCK_CUH
#define WARPWIRE_DETAIL_SOCK_CUH

namespace warpwire {
namespace sock {
namespace detail {

enum Op : u32 { kSocket = 1, kBind, kListen, kConnect, kShutdown, kClose, kSetOption, kGetOption, kLocalName, kPeerName, kFail };

constexpr u32 kFree = 0, kCopying = 1, kSpan = 2, kGone = 3;                        // locks
constexpr u32 kFlagNonBlocking = 1, kFlagShutSend = 2, kFlagShutReceive = 4, kFlagWarp = 8;  // flags of a desk
constexpr u64 kGeneration = 0xffff;                                                 // of a state
constexpr u32 kReceiveErrorAt = 16, kSendErrorAt = 24;
constexpr u64 kIsDatagram = 1ull << 32, kListening = 1ull << 33, kConnecting = 1ull << 34, kConnected = 1ull << 35;
constexpr u64 kReceiveEnd = 1ull << 36, kSendEnd = 1ull << 37, kIsWarp = 1ull << 38, kResets = 1ull << 39;
constexpr u64 kLastCall = 10ull * 1000 * 1000 * 1000;  // how long close waits for calls of other groups

// ------------------------------------------------------------------------------------------------------------------
// Words that others change: the host (system), or other threads of this GPU (gpu).

#if WARPWIRE_CUDA
WARPWIRE_FN u64 load_system(const u64 *p) {
    u64 v;
    asm volatile("ld.acquire.sys.u64 %0, [%1];" : "=l"(v) : "l"(p) : "memory");
    return v;
}
WARPWIRE_FN u32 load_system(const u32 *p) {
    u32 v;
    asm volatile("ld.acquire.sys.u32 %0, [%1];" : "=r"(v) : "l"(p) : "memory");
    return v;
}
// Behind it, everything that this thread knows of is seen by the host before what it stores next.
WARPWIRE_FN void fence_system() { asm volatile("fence.acq_rel.sys;" ::: "memory"); }
WARPWIRE_FN void store_system(u64 *p, u64 v) { asm volatile("st.relaxed.sys.u64 [%0], %1;" ::"l"(p), "l"(v) : "memory"); }
WARPWIRE_FN void store_system(u32 *p, u32 v) { asm volatile("st.relaxed.sys.u32 [%0], %1;" ::"l"(p), "r"(v) : "memory"); }
WARPWIRE_FN u64 load_gpu(const u64 *p) {
    u64 v;
    asm volatile("ld.acquire.gpu.u64 %0, [%1];" : "=l"(v) : "l"(p) : "memory");
    return v;
}
WARPWIRE_FN u32 load_gpu(const u32 *p) {
    u32 v;
    asm volatile("ld.acquire.gpu.u32 %0, [%1];" : "=r"(v) : "l"(p) : "memory");
    return v;
}
WARPWIRE_FN void store_gpu(u64 *p, u64 v) { asm volatile("st.release.gpu.u64 [%0], %1;" ::"l"(p), "l"(v) : "memory"); }
WARPWIRE_FN void store_gpu(u32 *p, u32 v) { asm volatile("st.release.gpu.u32 [%0], %1;" ::"l"(p), "r"(v) : "memory"); }
WARPWIRE_FN u32 replace(u32 *p, u32 old, u32 next) {
    u32 seen;
    asm volatile("atom.acq_rel.gpu.cas.b32 %0, [%1], %2, %3;" : "=r"(seen) : "l"(p), "r"(old), "r"(next) : "memory");
    return seen;
}
WARPWIRE_FN u64 take_number(u64 *p) {
    u64 seen;
    asm volatile("atom.relaxed.gpu.add.u64 %0, [%1], 1;" : "=l"(seen) : "l"(p) : "memory");
    return seen;
}
WARPWIRE_FN u64 clock_ns() {
    u64 v;
    asm volatile("mov.u64 %0, %%globaltimer;" : "=l"(v));
    return v;
}
WARPWIRE_FN void step_back() { __nanosleep(32); }
#else
inline u64 load_system(const u64 *p) { return __atomic_load_n(p, __ATOMIC_ACQUIRE); }
inline u32 load_system(const u32 *p) { return __atomic_load_n(p, __ATOMIC_ACQUIRE); }
inline void fence_system() {}  // the stores below are releases
inline void store_system(u64 *p, u64 v) { __atomic_store_n(p, v, __ATOMIC_RELEASE); }
inline void store_system(u32 *p, u32 v) { __atomic_store_n(p, v, __ATOMIC_RELEASE); }
inline u64 load_gpu(const u64 *p) { return __atomic_load_n(p, __ATOMIC_ACQUIRE); }
inline u32 load_gpu(const u32 *p) { return __atomic_load_n(p, __ATOMIC_ACQUIRE); }
inline void store_gpu(u64 *p, u64 v) { __atomic_store_n(p, v, __ATOMIC_RELEASE); }
inline void store_gpu(u32 *p, u32 v) { __atomic_store_n(p, v, __ATOMIC_RELEASE); }
inline u32 replace(u32 *p, u32 old, u32 next) {
    __atomic_compare_exchange_n(p, &old, next, false, __ATOMIC_ACQ_REL, __ATOMIC_ACQUIRE);
    return old;
}
inline u64 take_number(u64 *p) { return __atomic_fetch_add(p, 1, __ATOMIC_RELAXED); }
inline u64 clock_ns() {
    auto now = std::chrono::steady_clock::now().time_since_epoch();
    return static_cast<u64>(std::chrono::duration_cast<std::chrono::nanoseconds>(now).count());
}
inline void step_back() { std::this_thread::yield(); }
#endif

WARPWIRE_FN u64 least(u64 a, u64 b) { return a < b ? a : b; }
WARPWIRE_FN u64 footprint(u64 length) { return (sizeof(Record) + length + sizeof(Record) - 1) / sizeof(Record) * sizeof(Record); }

// How a wait ends: with its time, or with the host.
class Waiter {
  public:
    WARPWIRE_FN explicit Waiter(u64 limit) : limit_(limit), start_(0), beat_(0), since_(0), looks_(0) {}
    // 0 to look again, else why not.
    WARPWIRE_CALL i64 step(const Table &table) {
        if (limit_ == 0) return -kEagain;
        step_back();
        if (++looks_ % 32 != 1) return 0;
        const Pulse *pulse = reinterpret_cast<const Pulse *>(table.pulse);
        if (load_system(&pulse->closed)) return -kEconnaborted;
        u64 now = clock_ns(), beat = load_system(&pulse->beat);
        if (start_ == 0) start_ = now;
        if (since_ == 0 || beat != beat_) beat_ = beat, since_ = now;
        if (now - since_ > table.silence_ms * 1000000ull) return -kEconnaborted;
        return limit_ != kForEver && now - start_ >= limit_ ? -kEtimedout : 0;
    }

  private:
    u64 limit_, start_, beat_, since_;
    u32 looks_;
};

// ------------------------------------------------------------------------------------------------------------------
// Finding a socket

struct Found {
    Inbox *inbox;
    Outbox *outbox;
    Desk *desk;
    u32 generation;  // 0: there is no such socket
    int handle;
};

WARPWIRE_FN Found find(const Table &table, int socket) {
    u32 index = static_cast<u32>(socket) & 0xffff, generation = static_cast<u32>(socket) >> 16;
    if (socket < 0 || index >= table.sockets || generation == 0) return Found{nullptr, nullptr, nullptr, 0, socket};
    return Found{reinterpret_cast<Inbox *>(table.inbox) + index, reinterpret_cast<Outbox *>(table.outbox) + index,
                 reinterpret_cast<Desk *>(table.desks) + index, generation, socket};
}

// Its state, or 0 if the handle is not open any more. Counters that are read later are not older than the state.
WARPWIRE_FN u64 look(const Found &found) {
    if (!found.generation || load_gpu(&found.desk->generation) != found.generation) return 0;
    u64 state = load_system(&found.inbox->state);
    return (state & kGeneration) == found.generation ? state : 0;
}

WARPWIRE_FN i64 receive_error(u64 state) { return static_cast<i64>(state >> kReceiveErrorAt & 0xff); }
WARPWIRE_FN i64 send_error(u64 state) { return static_cast<i64>(state >> kSendErrorAt & 0xff); }

WARPWIRE_FN u64 patience(const Found &found, const u64 *timeout) {
    if (load_gpu(&found.desk->flags) & kFlagNonBlocking) return 0;
    u64 limit = load_gpu(timeout);
    return limit ? limit : kForEver;
}

WARPWIRE_CALL void take_desk(const Table &table, int socket) {
    Found found = find(table, socket);
    Desk *desk = found.desk;
    if (!desk) return;
    store_gpu(&desk->flags, load_system(&found.inbox->state) & kIsWarp ? kFlagWarp : 0u);
    store_gpu(&desk->reported, 0ull);
    store_gpu(&desk->post_lock, kFree);
    store_gpu(&desk->berth, 0u);
    store_gpu(&desk->sent, 0ull);
    store_gpu(&desk->consumed, 0ull);
    store_gpu(&desk->send_timeout, 0ull);
    store_gpu(&desk->receive_timeout, 0ull);
    store_gpu(&desk->send_lock, kFree);
    store_gpu(&desk->receive_lock, kFree);
    store_gpu(&desk->generation, static_cast<u32>(socket) >> 16);
}

// 1: the lock is ours. 0: another has it. Below 0: the socket is closed, or another by now.
WARPWIRE_FN i64 try_lock(const Found &found, u32 *lock) {
    u32 before = replace(lock, kFree, kCopying);
    if (before == kGone) return -kEbadf;
    if (before != kFree) return 0;
    if (load_gpu(&found.desk->generation) == found.generation) return 1;
    store_gpu(lock, kFree);
    return -kEbadf;
}

WARPWIRE_FN void change_flags(Desk *desk, u32 clear, u32 set) {
    u32 before = load_gpu(&desk->flags);
    for (;;) {
        u32 seen = replace(&desk->flags, before, (before & ~clear) | set);
        if (seen == before) return;
        before = seen;
    }
}

// ------------------------------------------------------------------------------------------------------------------
// Asking the host

WARPWIRE_CALL i64 ask(const Table &table, Op op, int handle, u64 value, u32 option, Address address, Address *name) {
    if (load_system(&reinterpret_cast<const Pulse *>(table.pulse)->closed)) return -kEconnaborted;
    u64 ticket = take_number(reinterpret_cast<u64 *>(table.ticket));
    u64 slot = ticket % table.slots, lap = ticket / table.slots;
    u64 *turn = reinterpret_cast<u64 *>(table.turns) + slot;
    Waiter waiter(kForEver);
    while (load_gpu(turn) != lap)
        if (i64 stop = waiter.step(table)) return stop;
    Request *request = reinterpret_cast<Request *>(table.requests) + slot;
    request->op = op, request->handle = handle, request->value = value, request->option = option;
    request->address = address;
    fence_system();
    store_system(&request->number, ticket + 1);
    const Reply *reply = reinterpret_cast<const Reply *>(table.replies) + slot;
    while (load_system(&reply->number) != ticket + 1)
        if (i64 stop = waiter.step(table)) return stop;
    i64 result = static_cast<i64>(load_system(reinterpret_cast<const u64 *>(&reply->result)));
    if (name && result >= 0) {
        const u64 *from = reinterpret_cast<const u64 *>(&reply->address);
        u64 words[3] = {load_system(from), load_system(from + 1), load_system(from + 2)};
        name->family = static_cast<u16>(words[0]), name->port = static_cast<u16>(words[0] >> 16);
        name->scope = static_cast<u32>(words[0] >> 32);
        for (u32 i = 0; i < 16; i++) name->ip[i] = static_cast<u8>(words[1 + i / 8] >> (i % 8 * 8));
    }
    store_gpu(turn, lap + 1);
    return result;
}

template <class Group> WARPWIRE_FN int shared(Group group, i64 mine) {
    return static_cast<int>(static_cast<i64>(group.share(static_cast<u64>(mine))));
}

template <class Group>
WARPWIRE_FN int ask_about(const Table &table, Op op, int socket, u64 value, u32 option, Address address, Address *name, Group group) {
    i64 result = 0;
    group.sync();
    if (group.rank() == 0) result = look(find(table, socket)) ? ask(table, op, socket, value, option, address, name) : -kEbadf;
    return shared(group, result);
}

}  // namespace detail
}  // namespace sock
}  // namespace warpwire

#include <warpwire/detail/warp.cuh>

namespace warpwire {
namespace sock {
namespace detail {

WARPWIRE_CALL i64 connect_alone(const Table &table, int socket, Address to) {
    Found found = find(table, socket);
    if (!look(found)) return -kEbadf;
    i64 result = ask(table, kConnect, socket, 0, 0, to, nullptr);
    if (result < 0) return result;
    Waiter waiter(patience(found, &found.desk->send_timeout));
    for (;;) {
        u64 state = look(found);
        if (!state) return -kEbadf;
        if (send_error(state)) return -send_error(state);
        if (state & kConnected) return 0;
        if (i64 stop = waiter.step(table)) return stop == -kEagain ? -kEinprogress : stop;
    }
}

WARPWIRE_CALL i64 shutdown_alone(const Table &table, int socket, How how) {
    Found found = find(table, socket);
    if (!look(found)) return -kEbadf;
    i64 result = ask(table, kShutdown, socket, static_cast<u64>(how), 0, no_address(), nullptr);
    if (result < 0) return result;
    if (how != kShutReceive && load_gpu(&found.desk->flags) & kFlagWarp) end_sending(table, found);
    change_flags(found.desk, 0, (how != kShutSend ? kFlagShutReceive : 0) | (how != kShutReceive ? kFlagShutSend : 0));
    return 0;
}

WARPWIRE_CALL i64 close_alone(const Table &table, int socket) {
    Found found = find(table, socket);
    u64 state = look(found);
    if (!state) return -kEbadf;
    u32 *locks[2] = {&found.desk->send_lock, &found.desk->receive_lock};
    for (u32 *lock : locks)
        if (load_gpu(lock) == kSpan) return -kEbusy;
    if (replace(&found.desk->generation, found.generation, 0) != found.generation) return -kEbadf;
    // From here on no call begins; those that copy now are waited for.
    for (u32 *lock : locks) {
        Waiter waiter(kLastCall);
        while (replace(lock, kFree, kGone) != kFree)
            if (i64 stop = waiter.step(table)) return stop;
    }
    return ask(table, kClose, socket, end_both(table, found, state), 0, no_address(), nullptr);
}

WARPWIRE_CALL i64 set_alone(const Table &table, int socket, Option option, i64 value) {
    Found found = find(table, socket);
    if (!look(found)) return -kEbadf;
    if (option == kNonBlocking) {
        change_flags(found.desk, value ? 0 : kFlagNonBlocking, value ? kFlagNonBlocking : 0);
        return 0;
    }
    if (option == kSendTimeout || option == kReceiveTimeout) {
        if (value < 0) return -kEinval;
        store_gpu(option == kSendTimeout ? &found.desk->send_timeout : &found.desk->receive_timeout, static_cast<u64>(value));
        return 0;
    }
    return ask(table, kSetOption, socket, static_cast<u64>(value), option, no_address(), nullptr);
}

WARPWIRE_CALL i64 get_alone(const Table &table, int socket, Option option) {
    Found found = find(table, socket);
    if (!look(found)) return -kEbadf;
    if (option == kNonBlocking) return load_gpu(&found.desk->flags) & kFlagNonBlocking;
    if (option == kSendTimeout) return static_cast<i64>(load_gpu(&found.desk->send_timeout));
    if (option == kReceiveTimeout) return static_cast<i64>(load_gpu(&found.desk->receive_timeout));
    return ask(table, kGetOption, socket, 0, option, no_address(), nullptr);
}

// ------------------------------------------------------------------------------------------------------------------
// Rings

// What a group copies, with the lock of that direction held; nothing is held if `advance` is 0.
struct Turn {
    i64 result;   // bytes, or the negative of an errno
    u64 ring;     // address
    u64 size;
    u64 at;       // counter of the first byte
    u64 advance;  // what the counter grows by
};

template <class Group> WARPWIRE_FN Turn shared(Group group, Turn mine) {
    Turn all;
    all.result = static_cast<i64>(group.share(static_cast<u64>(mine.result)));
    all.advance = group.share(mine.advance);
    if (!all.advance) return Turn{all.result, 0, 0, 0, 0};
    all.ring = group.share(mine.ring), all.size = group.share(mine.size), all.at = group.share(mine.at);
    return all;
}
template <class Group> WARPWIRE_FN Span shared(Group group, Span mine) {
    Span all;
    all.bytes = reinterpret_cast<void *>(group.share(reinterpret_cast<u64>(mine.bytes)));
    all.length = static_cast<i64>(group.share(static_cast<u64>(mine.length)));
    return all;
}

#if WARPWIRE_CUDA
// Rings are global memory that others write; a user's buffer may be any memory.
template <bool kFromRing, class Word> WARPWIRE_FN Word load_word(const Word *p) {
    if constexpr (kFromRing) return __ldcv(p);
    else return *p;
}
// By words of one width, to which both sides are aligned.
template <bool kFromRing, class Word, class Group> WARPWIRE_FN void copy_words(Group group, u8 *to, const u8 *from, u64 words) {
    Word *into = reinterpret_cast<Word *>(to);
    const Word *source = reinterpret_cast<const Word *>(from);
    u64 step = group.size(), i = group.rank();
    if constexpr (sizeof(Word) == 16) {
        for (; i + 3 * step < words; i += 4 * step) {
            Word a = load_word<kFromRing>(source + i), b = load_word<kFromRing>(source + i + step);
            Word c = load_word<kFromRing>(source + i + 2 * step), d = load_word<kFromRing>(source + i + 3 * step);
            into[i] = a, into[i + step] = b, into[i + 2 * step] = c, into[i + 3 * step] = d;
        }
    }
    for (; i < words; i += step) into[i] = load_word<kFromRing>(source + i);
}
template <bool kFromRing, class Group> WARPWIRE_CALL void copy(Group group, u8 *to, const u8 *from, u64 length) {
    u64 apart = (reinterpret_cast<u64>(to) ^ reinterpret_cast<u64>(from)) & 15;
    u64 width = apart == 0 ? 16 : apart % 8 == 0 ? 8 : apart % 4 == 0 ? 4 : 1;
    u64 head = least((0 - reinterpret_cast<u64>(to)) & (width - 1), length), words = (length - head) / width;
    copy_words<kFromRing, u8>(group, to, from, head);
    if (width == 16) copy_words<kFromRing, uint4>(group, to + head, from + head, words);
    else if (width == 8) copy_words<kFromRing, u64>(group, to + head, from + head, words);
    else if (width == 4) copy_words<kFromRing, u32>(group, to + head, from + head, words);
    else copy_words<kFromRing, u8>(group, to + head, from + head, words);
    u64 done = head + words * width;
    copy_words<kFromRing, u8>(group, to + done, from + done, length - done);
}
#else
template <bool kFromRing, class Group> inline void copy(Group, u8 *to, const u8 *from, u64 length) {
    if (length) __builtin_memcpy(to, from, length);
}
#endif

template <class Group> WARPWIRE_FN void copy_in(Group group, const Turn &turn, const u8 *from) {
    u64 place = turn.at & (turn.size - 1), length = static_cast<u64>(turn.result), first = least(length, turn.size - place);
    copy<false>(group, reinterpret_cast<u8 *>(turn.ring + place), from, first);
    copy<false>(group, reinterpret_cast<u8 *>(turn.ring), from + first, length - first);
}
template <class Group> WARPWIRE_FN void copy_out(Group group, const Turn &turn, u8 *into) {
    u64 place = turn.at & (turn.size - 1), length = static_cast<u64>(turn.result), first = least(length, turn.size - place);
    copy<true>(group, into, reinterpret_cast<const u8 *>(turn.ring + place), first);
    copy<true>(group, into + first, reinterpret_cast<const u8 *>(turn.ring), length - first);
}

// Why nothing can be sent on a socket in that state, or 0.
WARPWIRE_FN i64 may_send(const Found &found, u64 state) {
    if (!state) return -kEbadf;
    if (send_error(state)) return -send_error(state);
    if (state & kSendEnd || load_gpu(&found.desk->flags) & kFlagShutSend) return -kEpipe;
    return state & (kConnected | kConnecting | kIsDatagram) ? 0 : -kEnotconn;
}

// Waits for room, and takes the lock. A record that says to whom is written before a datagram.
WARPWIRE_CALL Turn begin_send(const Table &table, int socket, u64 length, const Address *to) {
    Found found = find(table, socket);
    u64 state = look(found);
    if (!state) return Turn{-kEbadf, 0, 0, 0, 0};
    bool datagram = state & kIsDatagram;
    u64 size = load_system(&found.inbox->send_size), needs = datagram ? footprint(length) : least(length, 1);
    if (to && !datagram) return Turn{-kEisconn, 0, 0, 0, 0};
    if (datagram && !to && !(state & kConnected)) return Turn{-kEdestaddrreq, 0, 0, 0, 0};
    if (datagram && (length > load_system(&found.inbox->longest) || needs > size)) return Turn{-kEmsgsize, 0, 0, 0, 0};
    Waiter waiter(patience(found, &found.desk->send_timeout));
    for (;;) {
        state = look(found);
        if (i64 error = may_send(found, state)) return Turn{error, 0, 0, 0, 0};
        if (!(state & kConnecting) && !datagram && length == 0) return Turn{0, 0, 0, 0, 0};
        i64 locked = 0;
        i64 free = state & kConnecting ? 0 : room(table, found, state);
        if (free < 0) return Turn{free, 0, 0, 0, 0};
        if (!(state & kConnecting) && static_cast<u64>(free) >= needs) locked = try_lock(found, &found.desk->send_lock);
        if (locked < 0) return Turn{locked, 0, 0, 0, 0};
        if (locked) {
            free = room(table, found, state);
            u64 fits = free < 0 ? 0 : static_cast<u64>(free), sent = load_gpu(&found.desk->sent), ring = load_system(&found.inbox->send_ring);
            size = load_system(&found.inbox->send_size);
            if (fits >= needs && datagram) {
                Record *record = reinterpret_cast<Record *>(ring + (sent & (size - 1)));
                record->value = static_cast<u32>(length), record->error = 0;
                record->address = to ? *to : no_address();
                return Turn{static_cast<i64>(length), ring, size, sent + sizeof(Record), needs};
            }
            if (fits >= needs) return Turn{static_cast<i64>(least(length, fits)), ring, size, sent, least(length, fits)};
            store_gpu(&found.desk->send_lock, kFree);
        }
        if (i64 stop = waiter.step(table)) return Turn{stop, 0, 0, 0, 0};
    }
}

// To the host, or to the peer by writing it there.
WARPWIRE_FN void publish_sent(const Table &table, const Found &found, u64 ring, u64 size, u64 count) {
    u64 before = load_gpu(&found.desk->sent), sent = before + count;
    store_gpu(&found.desk->sent, sent);
    if (load_gpu(&found.desk->flags) & kFlagWarp) {
        post_sent(table, found, ring, size, before, sent);
        return;
    }
    fence_system();
    store_system(&found.outbox->sent, static_cast<u32>(sent));
}
WARPWIRE_FN void tell_consumed(const Found &found, u64 consumed) {
    store_gpu(&found.desk->consumed, consumed);
    fence_system();
    store_system(&found.outbox->consumed, static_cast<u32>(consumed));
}
WARPWIRE_FN void publish_consumed(const Table &table, const Found &found, u64 consumed) {
    if (!(load_gpu(&found.desk->flags) & kFlagWarp)) {
        tell_consumed(found, consumed);
        return;
    }
    store_gpu(&found.desk->consumed, consumed);
    report(table, found, consumed);
}

WARPWIRE_CALL void end_send(const Table &table, int socket, const Turn &turn) {
    Found found = find(table, socket);
    publish_sent(table, found, turn.ring, turn.size, turn.advance);
    store_gpu(&found.desk->send_lock, kFree);
}
WARPWIRE_CALL void end_receive(const Table &table, int socket, const Turn &turn) {
    Found found = find(table, socket);
    publish_consumed(table, found, load_gpu(&found.desk->consumed) + turn.advance);
    store_gpu(&found.desk->receive_lock, kFree);
}

// More than 0: so much can be received. 0: the end. -kEagain: nothing yet. Else why never.
WARPWIRE_FN i64 readable(const Table &table, const Found &found) {
    u64 state = look(found);
    if (!state) return -kEbadf;
    i64 waiting = available(table, found, &state);
    if (waiting) return waiting;
    if (load_gpu(&found.desk->flags) & kFlagShutReceive) return 0;
    if (receive_error(state)) return -receive_error(state);
    if (state & kReceiveEnd) return 0;
    return state & (kConnected | kConnecting | kIsDatagram) ? -kEagain : -kEnotconn;
}

// Waits for something to receive, and takes the lock: how much there is, 0 at the end (without the lock), or why not.
WARPWIRE_CALL i64 lock_readable(const Table &table, const Found &found) {
    if (!found.generation || !look(found)) return -kEbadf;
    Waiter waiter(patience(found, &found.desk->receive_timeout));
    for (;;) {
        i64 waiting = readable(table, found);
        if (waiting <= 0 && waiting != -kEagain) return waiting;
        i64 locked = waiting > 0 ? try_lock(found, &found.desk->receive_lock) : 0;
        if (locked < 0) return locked;
        if (locked) {
            u64 state = look(found);
            waiting = available(table, found, &state);
            if (waiting > 0) return waiting;
            store_gpu(&found.desk->receive_lock, kFree);
        }
        if (i64 stop = waiter.step(table)) return stop;
    }
}

WARPWIRE_CALL void read_record(const Found &found, u64 at, Record *into) {
    u64 ring = load_system(&found.inbox->receive_ring), size = load_system(&found.inbox->receive_size);
    Turn turn = {sizeof(Record), ring, size, at, 0};
    copy_out(Thread(), turn, reinterpret_cast<u8 *>(into));
}

WARPWIRE_CALL Turn begin_receive(const Table &table, int socket, u64 length, Address *from) {
    Found found = find(table, socket);
    u64 state = look(found);
    if (!state) return Turn{-kEbadf, 0, 0, 0, 0};
    bool datagram = state & kIsDatagram;
    if (!datagram && length == 0) return Turn{0, 0, 0, 0, 0};
    if (state & kListening) return Turn{-kEnotconn, 0, 0, 0, 0};
    i64 available = lock_readable(table, found);
    if (available <= 0) return Turn{available, 0, 0, 0, 0};
    u64 ring = load_system(&found.inbox->receive_ring), size = load_system(&found.inbox->receive_size);
    u64 at = load_gpu(&found.desk->consumed);
    if (!datagram) {
        u64 count = least(length, static_cast<u64>(available));
        return Turn{static_cast<i64>(count), ring, size, at, count};
    }
    Record record;
    read_record(found, at, &record);
    if (from) *from = record.address;
    i64 result = record.error ? -static_cast<i64>(record.error) : static_cast<i64>(least(length, record.value));
    return Turn{result, ring, size, at + sizeof(Record), footprint(record.value)};
}

WARPWIRE_CALL i64 accept_alone(const Table &table, int listener, Address *from) {
    Found found = find(table, listener);
    u64 state = look(found);
    if (!state) return -kEbadf;
    if (!(state & kListening)) return -kEinval;
    Waiter waiter(patience(found, &found.desk->receive_timeout));
    for (;;) {
        state = look(found);
        if (!state) return -kEbadf;
        if (receive_error(state)) return -receive_error(state);
        u64 received = load_system(&found.inbox->received), consumed = load_gpu(&found.desk->consumed);
        i64 locked = received != consumed ? try_lock(found, &found.desk->receive_lock) : 0;
        if (locked < 0) return locked;
        if (locked) {
            consumed = load_gpu(&found.desk->consumed);  // another group may have been faster
            Record record;
            if (received != consumed) {
                read_record(found, consumed, &record);
                tell_consumed(found, consumed + sizeof(Record));
            }
            store_gpu(&found.desk->receive_lock, kFree);
            if (received != consumed) {
                take_desk(table, static_cast<int>(record.value));
                if (from) *from = record.address;
                return record.value;
            }
        }
        if (i64 stop = waiter.step(table)) return stop;
    }
}

// ------------------------------------------------------------------------------------------------------------------
// Spans

WARPWIRE_FN Span no_span(i64 why) { return Span{nullptr, why}; }

WARPWIRE_CALL Span borrow_alone(const Table &table, int socket, u64 most) {
    Found found = find(table, socket);
    u64 state = look(found);
    if (!state) return no_span(-kEbadf);
    if (state & kIsDatagram) return no_span(-kEopnotsupp);
    if (state & kListening) return no_span(-kEnotconn);
    i64 available = lock_readable(table, found);
    if (available <= 0) return no_span(available);
    u64 size = load_system(&found.inbox->receive_size), place = load_gpu(&found.desk->consumed) & (size - 1);
    u64 length = least(least(static_cast<u64>(available), size - place), most);
    store_gpu(&found.desk->receive_lock, length ? kSpan : kFree);
    return Span{reinterpret_cast<void *>(load_system(&found.inbox->receive_ring) + place), static_cast<i64>(length)};
}

WARPWIRE_CALL i64 give_back_alone(const Table &table, int socket, u64 used) {
    Found found = find(table, socket);
    if (!look(found)) return -kEbadf;
    if (load_gpu(&found.desk->receive_lock) != kSpan) return -kEinval;
    u64 consumed = load_gpu(&found.desk->consumed);
    u64 state = look(found);
    if (used > received(found, &state) - consumed) return -kEinval;
    publish_consumed(table, found, consumed + used);
    store_gpu(&found.desk->receive_lock, kFree);
    return 0;
}

WARPWIRE_CALL Span reserve_alone(const Table &table, int socket, u64 most) {
    Found found = find(table, socket);
    u64 state = look(found);
    if (!state) return no_span(-kEbadf);
    if (state & kIsDatagram) return no_span(-kEopnotsupp);
    if (most == 0) return no_span(-kEinval);
    Turn turn = begin_send(table, socket, most, nullptr);
    if (turn.result <= 0) return no_span(turn.result);
    u64 place = turn.at & (turn.size - 1);
    store_gpu(&found.desk->send_lock, kSpan);
    return Span{reinterpret_cast<void *>(turn.ring + place), static_cast<i64>(least(static_cast<u64>(turn.result), turn.size - place))};
}

WARPWIRE_CALL i64 commit_alone(const Table &table, int socket, u64 filled) {
    Found found = find(table, socket);
    if (!look(found)) return -kEbadf;
    if (load_gpu(&found.desk->send_lock) != kSpan) return -kEinval;
    i64 free = room(table, found, load_system(&found.inbox->state));
    if (free < 0 || load_gpu(&found.desk->flags) & kFlagEnded) {  // what the peer was told is not changed
        store_gpu(&found.desk->send_lock, kFree);
        return free < 0 ? free : -kEpipe;
    }
    if (filled > static_cast<u64>(free)) return -kEinval;
    if (filled) publish_sent(table, found, load_system(&found.inbox->send_ring), load_system(&found.inbox->send_size), filled);
    store_gpu(&found.desk->send_lock, kFree);
    return 0;
}

// ------------------------------------------------------------------------------------------------------------------

// Everything that there is to tell of a socket.
WARPWIRE_CALL u32 ready(const Table &table, int socket) {
    Found found = find(table, socket);
    u64 state = look(found);
    if (!state) return kNval;
    u32 events = 0;
    i64 waiting = available(table, found, &state), free = room(table, found, state);
    if (waiting < 0 || free < 0) return kErr | kIn | kOut | kHup;  // the peer lies, and the socket has ended for that
    bool no_more = state & kReceiveEnd, no_send = state & kSendEnd;
    if (waiting || no_more) events |= kIn;
    if (no_more) events |= kRdhup;
    if (receive_error(state) || send_error(state)) events |= kErr | kOut;
    if (no_more && no_send) events |= kHup;
    u64 needs = state & kIsDatagram ? 2 * sizeof(Record) : 1;
    if (state & (kConnected | kIsDatagram) && !no_send && static_cast<u64>(free) >= needs) events |= kOut;
    return events;
}

}  // namespace detail
}  // namespace sock
}  // namespace warpwire

#endif

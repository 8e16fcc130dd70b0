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
constexpr u64 kLongestDatagram = 65507;                // what UDP carries over IPv4
constexpr u32 kQuickLooks = 16;                        // at one word, before all others are looked at
constexpr u64 kLastCall = 10ull * 1000 * 1000 * 1000;  // how long close waits for calls of other groups

// ------------------------------------------------------------------------------------------------------------------
// Words that others change: the host (system), or other threads of this GPU (gpu).
//
// A load waits for the memory behind the caches, and what follows a `load_` waits for it; several `peek_`s in a row wait once.
// So a call peeks at everything that needs no order among itself, then loads the one word that the next step hangs on.

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
WARPWIRE_FN u64 peek_system(const u64 *p) {
    u64 v;
    asm volatile("ld.relaxed.sys.u64 %0, [%1];" : "=l"(v) : "l"(p) : "memory");
    return v;
}
WARPWIRE_FN u32 peek_system(const u32 *p) {
    u32 v;
    asm volatile("ld.relaxed.sys.u32 %0, [%1];" : "=r"(v) : "l"(p) : "memory");
    return v;
}
WARPWIRE_FN u64 peek_gpu(const u64 *p) {
    u64 v;
    asm volatile("ld.relaxed.gpu.u64 %0, [%1];" : "=l"(v) : "l"(p) : "memory");
    return v;
}
WARPWIRE_FN u32 peek_gpu(const u32 *p) {
    u32 v;
    asm volatile("ld.relaxed.gpu.u32 %0, [%1];" : "=r"(v) : "l"(p) : "memory");
    return v;
}
// For who holds a lock: the next holder sees it, since freeing the lock comes behind it.
WARPWIRE_FN void put_gpu(u64 *p, u64 v) { asm volatile("st.relaxed.gpu.u64 [%0], %1;" ::"l"(p), "l"(v) : "memory"); }
// Takes a lock if it is free, and gives what it was.
WARPWIRE_FN u32 take(u32 *lock) {
    u32 seen;
    asm volatile("atom.acquire.gpu.cas.b32 %0, [%1], 0, 1;" : "=r"(seen) : "l"(lock) : "memory");
    return seen;
}
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
// Tests let threads change places before each of these (WARPWIRE_STEP).
inline void step_before() { WARPWIRE_STEP(); }
inline u64 load_system(const u64 *p) { return step_before(), __atomic_load_n(p, __ATOMIC_ACQUIRE); }
inline u32 load_system(const u32 *p) { return step_before(), __atomic_load_n(p, __ATOMIC_ACQUIRE); }
inline void fence_system() {}  // the stores below are releases
inline void store_system(u64 *p, u64 v) { step_before(), __atomic_store_n(p, v, __ATOMIC_RELEASE); }
inline void store_system(u32 *p, u32 v) { step_before(), __atomic_store_n(p, v, __ATOMIC_RELEASE); }
inline u64 load_gpu(const u64 *p) { return step_before(), __atomic_load_n(p, __ATOMIC_ACQUIRE); }
inline u32 load_gpu(const u32 *p) { return step_before(), __atomic_load_n(p, __ATOMIC_ACQUIRE); }
inline void store_gpu(u64 *p, u64 v) { step_before(), __atomic_store_n(p, v, __ATOMIC_RELEASE); }
inline void store_gpu(u32 *p, u32 v) { step_before(), __atomic_store_n(p, v, __ATOMIC_RELEASE); }
inline u64 peek_system(const u64 *p) { return step_before(), __atomic_load_n(p, __ATOMIC_RELAXED); }
inline u32 peek_system(const u32 *p) { return step_before(), __atomic_load_n(p, __ATOMIC_RELAXED); }
inline u64 peek_gpu(const u64 *p) { return step_before(), __atomic_load_n(p, __ATOMIC_RELAXED); }
inline u32 peek_gpu(const u32 *p) { return step_before(), __atomic_load_n(p, __ATOMIC_RELAXED); }
inline void put_gpu(u64 *p, u64 v) { step_before(), __atomic_store_n(p, v, __ATOMIC_RELAXED); }
inline u32 take(u32 *lock) {
    step_before();
    u32 seen = kFree;
    __atomic_compare_exchange_n(lock, &seen, kCopying, false, __ATOMIC_ACQUIRE, __ATOMIC_ACQUIRE);
    return seen;
}
inline u32 replace(u32 *p, u32 old, u32 next) {
    step_before();
    __atomic_compare_exchange_n(p, &old, next, false, __ATOMIC_ACQ_REL, __ATOMIC_ACQUIRE);
    return old;
}
inline u64 take_number(u64 *p) { return __atomic_fetch_add(p, 1, __ATOMIC_RELAXED); }
inline u64 clock_ns() {
    auto now = std::chrono::steady_clock::now().time_since_epoch();
    return static_cast<u64>(std::chrono::duration_cast<std::chrono::nanoseconds>(now).count());
}
// A thread that waits on the CPU. Beside busy processes each yield costs a time slice, while a thread that sleeps keeps
// its claim to the processor: yields end with the first slow one, and sleeps grow with the wait.
inline void step_back() {
    constexpr u64 kSameWait = 2000000, kSlowYield = 100000, kMinSleep = 20000, kMaxSleep = 1000000;
    thread_local u64 last = 0, since = 0;
    thread_local bool contended = false;
    const u64 before = clock_ns();
    if (before - last > kSameWait) since = before, contended = false;
    if (!contended) {
        std::this_thread::yield();
        last = clock_ns();
        contended = last - before > kSlowYield || last - since > kMaxSleep;
        return;
    }
    u64 sleep = (before - since) / 8;
    sleep = sleep < kMinSleep ? kMinSleep : sleep > kMaxSleep ? kMaxSleep : sleep;
    std::this_thread::sleep_for(std::chrono::nanoseconds(sleep));
    last = clock_ns();
}
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
        if (++looks_ % 32 != 0) return 0;
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
    u32 index = static_cast<u32>(socket) & 0xffff, generation = static_cast<u32>(socket) >> 16, sockets = table.sockets;
    u64 inbox = table.inbox, outbox = table.outbox, desks = table.desks;  // all at once
    if (socket < 0 || index >= sockets || generation == 0) return Found{nullptr, nullptr, nullptr, 0, socket};
    return Found{reinterpret_cast<Inbox *>(inbox) + index, reinterpret_cast<Outbox *>(outbox) + index,
                 reinterpret_cast<Desk *>(desks) + index, generation, socket};
}

// Its state, or 0 if the handle is not open any more. Counters that are read later are not older than the state.
WARPWIRE_FN u64 look(const Found &found) {
    if (!found.generation || load_gpu(&found.desk->generation) != found.generation) return 0;
    u64 state = load_system(&found.inbox->state);
    return (state & kGeneration) == found.generation ? state : 0;
}

WARPWIRE_FN i64 receive_error(u64 state) { return static_cast<i64>(state >> kReceiveErrorAt & 0xff); }
WARPWIRE_FN i64 send_error(u64 state) { return static_cast<i64>(state >> kSendErrorAt & 0xff); }

WARPWIRE_FN u64 patience(u32 flags, u64 timeout) { return flags & kFlagNonBlocking ? 0 : timeout ? timeout : kForEver; }
WARPWIRE_FN u64 patience(const Found &found, const u64 *timeout) {
    u32 flags = peek_gpu(&found.desk->flags);
    return patience(flags, load_gpu(timeout));
}

// All that a call wants to know of a socket before it has a lock: hints, but for the state, which is as in `look`.
struct Sight {
    u64 state, sent, consumed, patience;
    u32 flags;
};
WARPWIRE_FN Sight see(const Found &found, u64 Desk::*timeout) {
    if (!found.generation) return Sight{0, 0, 0, 0, 0};
    const Desk *desk = found.desk;
    u32 generation = peek_gpu(&desk->generation), flags = peek_gpu(&desk->flags);
    u64 sent = peek_gpu(&desk->sent), consumed = peek_gpu(&desk->consumed), limit = peek_gpu(&(desk->*timeout));
    u64 state = load_system(&found.inbox->state);
    bool open = generation == found.generation && (state & kGeneration) == generation;
    return Sight{open ? state : 0, sent, consumed, patience(flags, limit), flags};
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

// What a call knows of a direction whose lock it has.
struct Held {
    u64 ours, theirs;    // the counter that only the holder changes, and the other end's
    u64 ring, size;
    u64 reported;        // of receiving in the family `warp`
    u32 report_at, flags, berth;
};

// Free bytes of the send ring; more than its size if the peer lies.
WARPWIRE_FN u64 free_of(const Held &held, u64 size) { return held.theirs > held.ours ? ~0ull : size - (held.ours - held.theirs); }

// 1: the lock is ours. 0: another has it. Below 0: the socket is closed, or another by now.
WARPWIRE_FN i64 hold(const Found &found, u32 *lock, const u64 *ours, const u64 *theirs, Held *held) {
    u32 before = take(lock);
    if (before == kGone) return -kEbadf;
    if (before != kFree) return 0;
    const Desk *desk = found.desk;
    u32 generation = peek_gpu(&desk->generation);
    held->ours = peek_gpu(ours), held->reported = peek_gpu(&desk->reported);
    held->flags = peek_gpu(&desk->flags), held->berth = peek_gpu(&desk->berth);
    held->theirs = load_system(theirs);
    if (generation == found.generation) return 1;
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
    if (how != kShutSend && load_gpu(&found.desk->flags) & kFlagWarp) end_receiving(table, found);
    return 0;
}

// What was sent and read, for the host to count: where a request has an address.
WARPWIRE_FN Address bytes_so_far(const Found &found) {
    Address bytes = no_address();
    u64 sent = load_gpu(&found.desk->sent), consumed = load_gpu(&found.desk->consumed);
    for (u32 i = 0; i < 8; i++) bytes.ip[i] = static_cast<u8>(sent >> (8 * i)), bytes.ip[8 + i] = static_cast<u8>(consumed >> (8 * i));
    return bytes;
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
    return ask(table, kClose, socket, end_both(table, found, state), 0, bytes_so_far(found), nullptr);
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
WARPWIRE_FN Turn no_turn(i64 result) { return Turn{result, 0, 0, 0, 0}; }

// Gives all of a group what its first thread has.
template <class Group, u32 kCount> WARPWIRE_FN void share_all(Group group, u64 (&words)[kCount]) {
    for (u32 i = 0; i < kCount; i++) words[i] = group.share(words[i]);
}
#if WARPWIRE_CUDA
template <u32 kCount> WARPWIRE_FN void share_all(Block group, u64 (&words)[kCount]) {
    __shared__ u64 given[kCount];
    if (group.rank() == 0)
        for (u32 i = 0; i < kCount; i++) given[i] = words[i];
    group.sync();
    for (u32 i = 0; i < kCount; i++) words[i] = given[i];
    group.sync();
}
#endif

template <class Group> WARPWIRE_FN Turn shared(Group group, Turn mine) {
    u64 words[5] = {static_cast<u64>(mine.result), mine.ring, mine.size, mine.at, mine.advance};
    share_all(group, words);
    return Turn{static_cast<i64>(words[0]), words[1], words[2], words[3], words[4]};
}
template <class Group> WARPWIRE_FN Span shared(Group group, Span mine) {
    u64 words[2] = {reinterpret_cast<u64>(mine.bytes), static_cast<u64>(mine.length)};
    share_all(group, words);
    return Span{reinterpret_cast<void *>(words[0]), static_cast<i64>(words[1])};
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

// Why nothing can be sent on a socket, or 0.
WARPWIRE_FN i64 may_send(const Sight &sight) {
    u64 state = sight.state;
    if (!state) return -kEbadf;
    if (send_error(state)) return -send_error(state);
    if (state & kSendEnd || sight.flags & kFlagShutSend) return -kEpipe;
    return state & (kConnected | kConnecting | kIsDatagram) ? 0 : -kEnotconn;
}

// Waits for room, and takes the lock. A record that says to whom is written before a datagram.
WARPWIRE_CALL Turn begin_send(const Table &table, const Found &found, u64 length, const Address *to, Held *held) {
    Sight sight = see(found, &Desk::send_timeout);
    if (!sight.state) return no_turn(-kEbadf);
    bool datagram = sight.state & kIsDatagram;
    if (to && !datagram) return no_turn(-kEisconn);
    if (datagram && !to && !(sight.state & kConnected)) return no_turn(-kEdestaddrreq);
    u64 needs = datagram ? footprint(length) : least(length, 1);
    for (Waiter waiter(sight.patience);;) {
        u64 ring = peek_system(&found.inbox->send_ring), size = peek_system(&found.inbox->send_size);
        u64 taken = load_system(&found.inbox->taken);
        if (i64 error = may_send(sight)) return no_turn(error);
        if (datagram && (length > kLongestDatagram || needs > size)) return no_turn(-kEmsgsize);
        bool ready = !(sight.state & kConnecting);
        if (ready && needs == 0) return no_turn(0);
        i64 locked = 0;
        if (ready && size - (sight.sent - taken) >= needs)
            locked = hold(found, &found.desk->send_lock, &found.desk->sent, &found.inbox->taken, held);
        if (locked < 0) return no_turn(locked);
        if (locked) {
            u64 sent = held->ours, free = free_of(*held, size);
            if (free <= size && free >= needs) {
                if (!datagram) return Turn{static_cast<i64>(least(length, free)), ring, size, sent, least(length, free)};
                Record *record = reinterpret_cast<Record *>(ring + (sent & (size - 1)));
                record->value = static_cast<u32>(length), record->error = 0;
                record->address = to ? *to : no_address();
                return Turn{static_cast<i64>(length), ring, size, sent + sizeof(Record), needs};
            }
            store_gpu(&found.desk->send_lock, kFree);
            if (free > size) return no_turn(no_room(table, found, *held));
        }
        if (i64 stop = waiter.step(table)) return no_turn(stop);
        sight = see(found, &Desk::send_timeout);
    }
}

// To the host, or to the peer by writing it there.
WARPWIRE_FN void publish_sent(const Table &table, const Found &found, const Held &held, u64 ring, u64 size, u64 sent) {
    put_gpu(&found.desk->sent, sent);
    if (held.flags & kFlagWarp) {
        post_sent(table, found, held.berth, ring, size, held.ours, sent);
        return;
    }
    fence_system();
    store_system(&found.outbox->sent, static_cast<u32>(sent));
}
WARPWIRE_FN void tell_consumed(const Found &found, u64 consumed) {
    put_gpu(&found.desk->consumed, consumed);
    fence_system();
    store_system(&found.outbox->consumed, static_cast<u32>(consumed));
}
WARPWIRE_FN void publish_consumed(const Table &table, const Found &found, const Held &held, u64 consumed) {
    if (!(held.flags & kFlagWarp)) {
        tell_consumed(found, consumed);
        return;
    }
    put_gpu(&found.desk->consumed, consumed);
    if (consumed - held.reported >= held.report_at || held.flags & kFlagShutReceive) report(table, found, held.berth, consumed);
}

WARPWIRE_CALL void end_send(const Table &table, const Found &found, const Held &held, const Turn &turn) {
    publish_sent(table, found, held, turn.ring, turn.size, held.ours + turn.advance);
    store_gpu(&found.desk->send_lock, kFree);
}
WARPWIRE_CALL void end_receive(const Table &table, const Found &found, const Held &held, const Turn &turn) {
    publish_consumed(table, found, held, held.ours + turn.advance);
    store_gpu(&found.desk->receive_lock, kFree);
}

// Why nothing will come on a socket whose ring is empty: 0 at the end. -kEagain: something may.
WARPWIRE_FN i64 why_empty(const Sight &sight, bool ended) {
    u64 state = sight.state;
    if (sight.flags & kFlagShutReceive) return 0;
    if (receive_error(state)) return -receive_error(state);
    if (ended || state & kReceiveEnd) return 0;
    return state & (kConnected | kConnecting | kIsDatagram) ? -kEagain : -kEnotconn;
}

// Waits for something to receive, and takes the lock: how much there is, 0 at the end (without the lock), or why not.
WARPWIRE_CALL i64 lock_readable(const Table &table, const Found &found, const Sight &first, Held *held) {
    Sight sight = first;
    for (Waiter waiter(sight.patience);;) {
        if (!sight.state) return -kEbadf;
        const Inbox *inbox = found.inbox;
        u64 ended = is_warp(sight.state) ? kEnded : 0;
        held->ring = peek_system(&inbox->receive_ring), held->size = peek_system(&inbox->receive_size);
        held->report_at = peek_system(&inbox->report_at);
        u64 word = load_system(&inbox->received);
        if ((word & ~ended) != sight.consumed) {
            i64 locked = hold(found, &found.desk->receive_lock, &found.desk->consumed, &inbox->received, held);
            if (locked < 0) return locked;
            if (locked) {
                u64 waiting = (held->theirs & ~ended) - held->ours;
                if (waiting && (!ended || waiting <= held->size)) return static_cast<i64>(waiting);
                store_gpu(&found.desk->receive_lock, kFree);
                if (waiting) return give_up(table, found, kEproto);  // the peer lies
            }
        } else {
            i64 why = why_empty(sight, word & ended);
            if (why != -kEagain) return why;
            // What is waited for comes by this word alone; all else changes seldom.
            for (u32 i = 0; i < kQuickLooks && sight.patience; i++)
                if (load_system(&inbox->received) != word) break;
        }
        if (i64 stop = waiter.step(table)) return stop;
        sight = see(found, &Desk::receive_timeout);
    }
}

WARPWIRE_CALL void read_record(const Held &held, Record *into) {
    copy_out(Thread(), Turn{sizeof(Record), held.ring, held.size, held.ours, 0}, reinterpret_cast<u8 *>(into));
}

WARPWIRE_CALL Turn begin_receive(const Table &table, const Found &found, u64 length, Address *from, Held *held) {
    Sight sight = see(found, &Desk::receive_timeout);
    if (!sight.state) return no_turn(-kEbadf);
    bool datagram = sight.state & kIsDatagram;
    if (!datagram && length == 0) return no_turn(0);
    if (sight.state & kListening) return no_turn(-kEnotconn);
    i64 available = lock_readable(table, found, sight, held);
    if (available <= 0) return no_turn(available);
    if (!datagram) {
        u64 count = least(length, static_cast<u64>(available));
        return Turn{static_cast<i64>(count), held->ring, held->size, held->ours, count};
    }
    Record record;
    read_record(*held, &record);
    if (from) *from = record.address;
    i64 result = record.error ? -static_cast<i64>(record.error) : static_cast<i64>(least(length, record.value));
    return Turn{result, held->ring, held->size, held->ours + sizeof(Record), footprint(record.value)};
}

WARPWIRE_CALL i64 accept_alone(const Table &table, int listener, Address *from) {
    Found found = find(table, listener);
    Sight sight = see(found, &Desk::receive_timeout);
    if (!sight.state) return -kEbadf;
    if (!(sight.state & kListening)) return -kEinval;
    for (Waiter waiter(sight.patience);;) {
        if (!sight.state) return -kEbadf;
        if (receive_error(sight.state)) return -receive_error(sight.state);
        Held held;
        held.ring = peek_system(&found.inbox->receive_ring), held.size = peek_system(&found.inbox->receive_size);
        i64 locked = 0;
        if (load_system(&found.inbox->received) != sight.consumed)
            locked = hold(found, &found.desk->receive_lock, &found.desk->consumed, &found.inbox->received, &held);
        if (locked < 0) return locked;
        if (locked) {
            Record record;
            bool some = held.theirs != held.ours;  // another group may have been faster
            if (some) {
                read_record(held, &record);
                tell_consumed(found, held.ours + sizeof(Record));
            }
            store_gpu(&found.desk->receive_lock, kFree);
            if (some) {
                take_desk(table, static_cast<int>(record.value));
                if (from) *from = record.address;
                return record.value;
            }
        }
        if (i64 stop = waiter.step(table)) return stop;
        sight = see(found, &Desk::receive_timeout);
    }
}

// ------------------------------------------------------------------------------------------------------------------
// Spans

WARPWIRE_FN Span no_span(i64 why) { return Span{nullptr, why}; }

WARPWIRE_CALL Span borrow_alone(const Table &table, int socket, u64 most) {
    Found found = find(table, socket);
    Sight sight = see(found, &Desk::receive_timeout);
    if (!sight.state) return no_span(-kEbadf);
    if (sight.state & kIsDatagram) return no_span(-kEopnotsupp);
    if (sight.state & kListening) return no_span(-kEnotconn);
    Held held;
    i64 available = lock_readable(table, found, sight, &held);
    if (available <= 0) return no_span(available);
    u64 place = held.ours & (held.size - 1), length = least(least(static_cast<u64>(available), held.size - place), most);
    store_gpu(&found.desk->receive_lock, length ? kSpan : kFree);
    return Span{reinterpret_cast<void *>(held.ring + place), static_cast<i64>(length)};
}

// What is known of a direction whose span is out, for the one who has it.
WARPWIRE_FN Held held_span(const Found &found, const u64 *ours, const u64 *theirs) {
    Held held;
    held.ours = peek_gpu(ours), held.reported = peek_gpu(&found.desk->reported);
    held.flags = peek_gpu(&found.desk->flags), held.berth = peek_gpu(&found.desk->berth);
    held.report_at = peek_system(&found.inbox->report_at);
    held.theirs = load_system(theirs);
    return held;
}

WARPWIRE_CALL i64 give_back_alone(const Table &table, int socket, u64 used) {
    Found found = find(table, socket);
    u64 state = look(found);
    if (!state) return -kEbadf;
    if (load_gpu(&found.desk->receive_lock) != kSpan) return -kEinval;
    Held held = held_span(found, &found.desk->consumed, &found.inbox->received);
    if (used > (held.theirs & ~(is_warp(state) ? kEnded : 0)) - held.ours) return -kEinval;
    publish_consumed(table, found, held, held.ours + used);
    store_gpu(&found.desk->receive_lock, kFree);
    return 0;
}

WARPWIRE_CALL Span reserve_alone(const Table &table, int socket, u64 most) {
    Found found = find(table, socket);
    u64 state = look(found);
    if (!state) return no_span(-kEbadf);
    if (state & kIsDatagram) return no_span(-kEopnotsupp);
    if (most == 0) return no_span(-kEinval);
    Held held;
    Turn turn = begin_send(table, found, most, nullptr, &held);
    if (turn.result <= 0) return no_span(turn.result);
    u64 place = turn.at & (turn.size - 1);
    store_gpu(&found.desk->send_lock, kSpan);
    return Span{reinterpret_cast<void *>(turn.ring + place), static_cast<i64>(least(static_cast<u64>(turn.result), turn.size - place))};
}

WARPWIRE_CALL i64 commit_alone(const Table &table, int socket, u64 filled) {
    Found found = find(table, socket);
    if (!look(found)) return -kEbadf;
    if (load_gpu(&found.desk->send_lock) != kSpan) return -kEinval;
    u64 ring = peek_system(&found.inbox->send_ring), size = peek_system(&found.inbox->send_size);
    Held held = held_span(found, &found.desk->sent, &found.inbox->taken);
    u64 free = free_of(held, size);
    if (free > size || held.flags & kFlagEnded) {  // the peer reads no more, or lies; or it was told of the end, which is not taken back
        store_gpu(&found.desk->send_lock, kFree);
        return free > size ? no_room(table, found, held) : -kEpipe;
    }
    if (filled > free) return -kEinval;
    if (filled) publish_sent(table, found, held, ring, size, held.ours + filled);
    store_gpu(&found.desk->send_lock, kFree);
    return 0;
}

// ------------------------------------------------------------------------------------------------------------------

// How full the rings seem to be: hints, since other groups use them meanwhile. What a peer says is judged by who has the lock.
struct Levels {
    u64 waiting, free;
    bool ended;
};
WARPWIRE_FN Levels levels(const Found &found, const Sight &sight) {
    const Inbox *inbox = found.inbox;
    u64 sends = peek_system(&inbox->send_size), receives = peek_system(&inbox->receive_size), taken = peek_system(&inbox->taken);
    u64 word = load_system(&inbox->received), ended = is_warp(sight.state) ? word & kEnded : 0;
    return Levels{least((word ^ ended) - sight.consumed, receives), least(sends - (sight.sent - taken), sends), ended != 0};
}

// Everything that there is to tell of a socket.
WARPWIRE_CALL u32 ready(const Table &table, int socket) {
    Found found = find(table, socket);
    Sight sight = see(found, &Desk::receive_timeout);
    u64 state = sight.state;
    if (!state) return kNval;
    u32 events = 0;
    Levels level = levels(found, sight);
    bool no_more = level.ended || state & kReceiveEnd, no_send = state & kSendEnd;
    if (level.waiting || no_more) events |= kIn;
    if (no_more) events |= kRdhup;
    if (receive_error(state) || send_error(state)) events |= kErr | kOut;
    if (no_more && no_send) events |= kHup;
    u64 needs = state & kIsDatagram ? 2 * sizeof(Record) : 1;
    if (state & (kConnected | kIsDatagram) && !no_send && level.free >= needs) events |= kOut;
    return events;
}

}  // namespace detail
}  // namespace sock
}  // namespace warpwire

#endif

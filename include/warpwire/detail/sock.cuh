// Implementation of <warpwire/sock.cuh>: memory accesses, waiting, locks, rings. Functions named
// *_thread are run by one thread of the group.
#ifndef WARPWIRE_DETAIL_SOCK_CUH
#define WARPWIRE_DETAIL_SOCK_CUH

namespace warpwire {
namespace sock {
namespace detail {

enum RequestOp : u32 { kSocket = 1, kBind, kListen, kConnect, kShutdown, kClose, kSetOption, kGetOption, kLocalName, kPeerName, kFail };

constexpr u32 kUnlocked = 0, kLocked = 1, kSpanOut = 2, kSocketClosed = 3;  // states of a lock
// Flags of a device state.
constexpr u32 kFlagNonBlocking = 1, kFlagShutSend = 2, kFlagShutReceive = 4, kFlagWarp = 8;
constexpr u64 kGeneration = 0xffff;  // bits of the state word, as all that follow
constexpr u32 kReceiveErrorAt = 16, kSendErrorAt = 24;
constexpr u64 kIsDatagram = 1ull << 32, kListening = 1ull << 33, kConnecting = 1ull << 34, kConnected = 1ull << 35;
constexpr u64 kReceiveEnd = 1ull << 36, kSendEnd = 1ull << 37, kIsWarp = 1ull << 38, kResetOnClose = 1ull << 39;
constexpr u64 kLongestDatagram = 65507;  // maximum UDP payload over IPv4
constexpr u32 kFastPolls = 16;           // polls of one word before all others are checked
// How long close waits for calls of other groups.
constexpr u64 kCloseTimeout = 10ull * 1000 * 1000 * 1000;

// -------------------------------------------------------------------------------------------------
// Words that are written by the host (sys scope) or by other threads of this GPU (gpu scope).
//
// A load goes to memory behind the caches, and everything after an acquire load waits for it, while
// several relaxed loads in a row wait once. So a call first loads relaxed what needs no order among
// itself, then acquires the one word that the next step depends on.

using warpwire::detail::clock_ns;
using warpwire::detail::compare_exchange;
using warpwire::detail::fence_system;
using warpwire::detail::fetch_increment;
using warpwire::detail::load_gpu;
using warpwire::detail::load_gpu_relaxed;
using warpwire::detail::load_system;
using warpwire::detail::load_system_relaxed;
using warpwire::detail::poll_backoff;
using warpwire::detail::store_gpu;
using warpwire::detail::store_gpu_relaxed;
using warpwire::detail::store_system;
using warpwire::detail::try_lock;

WARPWIRE_FN u64 min_u64(u64 a, u64 b) { return a < b ? a : b; }
WARPWIRE_FN u64 footprint(u64 length) { return (sizeof(Record) + length + sizeof(Record) - 1) / sizeof(Record) * sizeof(Record); }

// Ends a wait on timeout, or when the host is gone.
class Waiter {
  public:
    WARPWIRE_FN explicit Waiter(u64 limit) : limit_(limit), start_(0), last_count_(0), since_(0), polls_(0) {}
    // 0 to poll again, else a negated errno.
    WARPWIRE_CALL i64 step(const Table &table) {
        if (limit_ == 0) return -kEagain;
        poll_backoff();
        if (++polls_ % 32 != 0) return 0;
        const Heartbeat *heartbeat = reinterpret_cast<const Heartbeat *>(table.heartbeat);
        if (load_system(&heartbeat->closed)) return -kEconnaborted;
        u64 now = clock_ns(), count = load_system(&heartbeat->count);
        if (start_ == 0) start_ = now;
        if (since_ == 0 || count != last_count_) last_count_ = count, since_ = now;
        if (now - since_ > table.heartbeat_timeout_ms * 1000000ull) return -kEconnaborted;
        return limit_ != kNoTimeout && now - start_ >= limit_ ? -kEtimedout : 0;
    }

  private:
    u64 limit_, start_, last_count_, since_;
    u32 polls_;
};

// -------------------------------------------------------------------------------------------------
// Finding a socket

struct SocketRef {
    HostSocketState *host_state;
    DeviceCounters *device_counters;
    DeviceSocketState *device_state;
    u32 generation;  // 0: no such socket
    int handle;
};

WARPWIRE_FN SocketRef find(const Table &table, int socket) {
    u32 index = static_cast<u32>(socket) & 0xffff, generation = static_cast<u32>(socket) >> 16, sockets = table.sockets;
    u64 host_state = table.host_state, device_counters = table.device_counters, device_states = table.device_states;
    if (socket < 0 || index >= sockets || generation == 0) return SocketRef{nullptr, nullptr, nullptr, 0, socket};
    return SocketRef{reinterpret_cast<HostSocketState *>(host_state) + index, reinterpret_cast<DeviceCounters *>(device_counters) + index,
                 reinterpret_cast<DeviceSocketState *>(device_states) + index, generation, socket};
}

// The state word, or 0 if the handle is not open. Counters loaded later are at least as new.
WARPWIRE_FN u64 load_state(const SocketRef &ref) {
    if (!ref.generation || load_gpu(&ref.device_state->generation) != ref.generation) return 0;
    u64 state = load_system(&ref.host_state->state);
    return (state & kGeneration) == ref.generation ? state : 0;
}

WARPWIRE_FN i64 receive_error(u64 state) { return static_cast<i64>(state >> kReceiveErrorAt & 0xff); }
WARPWIRE_FN i64 send_error(u64 state) { return static_cast<i64>(state >> kSendErrorAt & 0xff); }

WARPWIRE_FN u64 wait_limit(u32 flags, u64 timeout) { return flags & kFlagNonBlocking ? 0 : timeout ? timeout : kNoTimeout; }
WARPWIRE_FN u64 wait_limit(const SocketRef &ref, const u64 *timeout) {
    u32 flags = load_gpu_relaxed(&ref.device_state->flags);
    return wait_limit(flags, load_gpu(timeout));
}

// What a call loads before it takes a lock: hints, except the state, which is as in `load_state`.
struct StateSnapshot {
    u64 state, sent, consumed, wait_limit;
    u32 flags;
};
WARPWIRE_FN StateSnapshot take_snapshot(const SocketRef &ref, u64 DeviceSocketState::*timeout) {
    if (!ref.generation) return StateSnapshot{0, 0, 0, 0, 0};
    const DeviceSocketState *device_state = ref.device_state;
    u32 generation = load_gpu_relaxed(&device_state->generation), flags = load_gpu_relaxed(&device_state->flags);
    u64 sent = load_gpu_relaxed(&device_state->sent), consumed = load_gpu_relaxed(&device_state->consumed), limit = load_gpu_relaxed(&(device_state->*timeout));
    u64 state = load_system(&ref.host_state->state);
    bool open = generation == ref.generation && (state & kGeneration) == generation;
    return StateSnapshot{open ? state : 0, sent, consumed, wait_limit(flags, limit), flags};
}

WARPWIRE_CALL void init_device_state(const Table &table, int socket) {
    SocketRef ref = find(table, socket);
    DeviceSocketState *device_state = ref.device_state;
    if (!device_state) return;
    store_gpu(&device_state->flags, load_system(&ref.host_state->state) & kIsWarp ? kFlagWarp : 0u);
    store_gpu(&device_state->reported, 0ull);
    store_gpu(&device_state->post_lock, kUnlocked);
    store_gpu(&device_state->qp_slot, 0u);
    store_gpu(&device_state->sent, 0ull);
    store_gpu(&device_state->consumed, 0ull);
    store_gpu(&device_state->send_timeout, 0ull);
    store_gpu(&device_state->receive_timeout, 0ull);
    store_gpu(&device_state->send_lock, kUnlocked);
    store_gpu(&device_state->receive_lock, kUnlocked);
    store_gpu(&device_state->generation, static_cast<u32>(socket) >> 16);
}

// What a call knows about a direction whose lock it holds.
struct HeldRing {
    u64 local_count, remote_count;    // written by the holder of the lock, and by the other end
    u64 ring, size;
    u64 reported;        // receiving on `warp` sockets
    u32 report_at, flags, qp_slot;
    // Sending on `warp` sockets, if the group itself stores to the peer: its ring and its counter.
    bool stores;
    warpwire::detail::DirectRange peer_ring, peer_count;
};

// Free bytes of the send ring; more than its size if the peer's counter is impossible.
WARPWIRE_FN u64 free_of(const HeldRing &held, u64 size) { return held.remote_count > held.local_count ? ~0ull : size - (held.local_count - held.remote_count); }

// 1: the lock is taken. 0: another group holds it. Negative: the socket is closed or was replaced.
WARPWIRE_FN i64 lock_ring(const SocketRef &ref, u32 *lock, const u64 *local_count, const u64 *remote_count, HeldRing *held) {
    u32 before = try_lock(lock);
    if (before == kSocketClosed) return -kEbadf;
    if (before != kUnlocked) return 0;
    const DeviceSocketState *device_state = ref.device_state;
    u32 generation = load_gpu_relaxed(&device_state->generation);
    held->local_count = load_gpu_relaxed(local_count), held->reported = load_gpu_relaxed(&device_state->reported);
    held->flags = load_gpu_relaxed(&device_state->flags), held->qp_slot = load_gpu_relaxed(&device_state->qp_slot);
    held->remote_count = load_system(remote_count);
    if (generation == ref.generation) return 1;
    store_gpu(lock, kUnlocked);
    return -kEbadf;
}

WARPWIRE_FN void change_flags(DeviceSocketState *device_state, u32 clear, u32 set) {
    u32 before = load_gpu(&device_state->flags);
    for (;;) {
        u32 seen = compare_exchange(&device_state->flags, before, (before & ~clear) | set);
        if (seen == before) return;
        before = seen;
    }
}

// -------------------------------------------------------------------------------------------------
// Requests to the host

WARPWIRE_CALL i64 request_host(const Table &table, RequestOp op, int handle, u64 value, u32 option, const Address *address, Address *name) {
    if (load_system(&reinterpret_cast<const Heartbeat *>(table.heartbeat)->closed)) return -kEconnaborted;
    u64 ticket = fetch_increment(reinterpret_cast<u64 *>(table.ticket));
    u64 slot = ticket % table.slots, lap = ticket / table.slots;
    u64 *slot_lap = reinterpret_cast<u64 *>(table.slot_laps) + slot;
    Waiter waiter(kNoTimeout);
    while (load_gpu(slot_lap) != lap)
        if (i64 stop = waiter.step(table)) return stop;
    Request *request = reinterpret_cast<Request *>(table.requests) + slot;
    request->op = op, request->handle = handle, request->value = value, request->option = option;
    request->address = address ? *address : no_address();
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
        WARPWIRE_NO_UNROLL
        for (u32 i = 0; i < 16; i++) name->ip[i] = static_cast<u8>(words[1 + i / 8] >> (i % 8 * 8));
    }
    store_gpu(slot_lap, lap + 1);
    return result;
}

template <class Group> WARPWIRE_FN int broadcast(Group group, i64 mine) {
    return static_cast<int>(static_cast<i64>(group.broadcast(static_cast<u64>(mine))));
}

// A request about an open socket.
WARPWIRE_CALL i64 request_thread(const Table &table, RequestOp op, int socket, u64 value, const Address *address, Address *name) {
    return load_state(find(table, socket)) ? request_host(table, op, socket, value, 0, address, name) : -kEbadf;
}

template <class Group>
WARPWIRE_FN int request_for(const Table &table, RequestOp op, int socket, u64 value, const Address *address, Address *name, Group group) {
    i64 result = 0;
    group.sync();
    if (group.rank() == 0) result = request_thread(table, op, socket, value, address, name);
    return broadcast(group, result);
}

}  // namespace detail
}  // namespace sock
}  // namespace warpwire

#include <warpwire/detail/warp.cuh>

namespace warpwire {
namespace sock {
namespace detail {

WARPWIRE_CALL i64 connect_thread(const Table &table, int socket, const Address &to) {
    SocketRef ref = find(table, socket);
    if (!load_state(ref)) return -kEbadf;
    i64 result = request_host(table, kConnect, socket, 0, 0, &to, nullptr);
    if (result < 0) return result;
    Waiter waiter(wait_limit(ref, &ref.device_state->send_timeout));
    for (;;) {
        u64 state = load_state(ref);
        if (!state) return -kEbadf;
        if (send_error(state)) return -send_error(state);
        if (state & kConnected) return 0;
        if (i64 stop = waiter.step(table)) return stop == -kEagain ? -kEinprogress : stop;
    }
}

WARPWIRE_CALL i64 shutdown_thread(const Table &table, int socket, ShutdownHow how) {
    SocketRef ref = find(table, socket);
    if (!load_state(ref)) return -kEbadf;
    i64 result = request_host(table, kShutdown, socket, static_cast<u64>(how), 0, nullptr, nullptr);
    if (result < 0) return result;
    if (how != kShutReceive && load_gpu(&ref.device_state->flags) & kFlagWarp) end_sending(table, ref);
    change_flags(ref.device_state, 0, (how != kShutSend ? kFlagShutReceive : 0) | (how != kShutReceive ? kFlagShutSend : 0));
    if (how != kShutSend && load_gpu(&ref.device_state->flags) & kFlagWarp) end_receiving(table, ref);
    return 0;
}

// Total bytes sent and read, for the host's statistics, in the place of a request's address.
WARPWIRE_FN Address bytes_so_far(const SocketRef &ref) {
    Address bytes = no_address();
    u64 sent = load_gpu(&ref.device_state->sent), consumed = load_gpu(&ref.device_state->consumed);
    WARPWIRE_NO_UNROLL
    for (u32 i = 0; i < 8; i++) bytes.ip[i] = static_cast<u8>(sent >> (8 * i)), bytes.ip[8 + i] = static_cast<u8>(consumed >> (8 * i));
    return bytes;
}

WARPWIRE_CALL i64 close_thread(const Table &table, int socket) {
    SocketRef ref = find(table, socket);
    u64 state = load_state(ref);
    if (!state) return -kEbadf;
    u32 *locks[2] = {&ref.device_state->send_lock, &ref.device_state->receive_lock};
    for (u32 *lock : locks)
        if (load_gpu(lock) == kSpanOut) return -kEbusy;
    if (compare_exchange(&ref.device_state->generation, ref.generation, 0) != ref.generation) return -kEbadf;
    // No call can begin from here on; wait for those that are copying.
    for (u32 *lock : locks) {
        Waiter waiter(kCloseTimeout);
        while (compare_exchange(lock, kUnlocked, kSocketClosed) != kUnlocked)
            if (i64 stop = waiter.step(table)) return stop;
    }
    Address bytes = bytes_so_far(ref);
    return request_host(table, kClose, socket, finish_close(table, ref, state), 0, &bytes, nullptr);
}

WARPWIRE_CALL i64 set_thread(const Table &table, int socket, SockOption option, i64 value) {
    SocketRef ref = find(table, socket);
    if (!load_state(ref)) return -kEbadf;
    if (option == kNonBlocking) {
        change_flags(ref.device_state, value ? 0 : kFlagNonBlocking, value ? kFlagNonBlocking : 0);
        return 0;
    }
    if (option == kSendTimeout || option == kReceiveTimeout) {
        if (value < 0) return -kEinval;
        store_gpu(option == kSendTimeout ? &ref.device_state->send_timeout : &ref.device_state->receive_timeout, static_cast<u64>(value));
        return 0;
    }
    return request_host(table, kSetOption, socket, static_cast<u64>(value), option, nullptr, nullptr);
}

WARPWIRE_CALL i64 get_thread(const Table &table, int socket, SockOption option) {
    SocketRef ref = find(table, socket);
    if (!load_state(ref)) return -kEbadf;
    if (option == kNonBlocking) return load_gpu(&ref.device_state->flags) & kFlagNonBlocking;
    if (option == kSendTimeout) return static_cast<i64>(load_gpu(&ref.device_state->send_timeout));
    if (option == kReceiveTimeout) return static_cast<i64>(load_gpu(&ref.device_state->receive_timeout));
    return request_host(table, kGetOption, socket, 0, option, nullptr, nullptr);
}

// -------------------------------------------------------------------------------------------------
// Rings

// What a group copies, with the lock of that direction held; no lock is held if `advance` is 0.
struct RingCopy {
    i64 result;   // bytes, or a negated errno
    u64 ring;     // address
    u64 size;
    u64 at;       // counter of the first byte
    u64 advance;  // increment of the counter
};
WARPWIRE_FN RingCopy no_copy(i64 result) { return RingCopy{result, 0, 0, 0, 0}; }

// Broadcasts the words of the first thread to the group.
template <class Group, u32 kCount> WARPWIRE_FN void broadcast_all(Group group, u64 (&words)[kCount]) {
    for (u32 i = 0; i < kCount; i++) words[i] = group.broadcast(words[i]);
}
#if WARPWIRE_CUDA
template <u32 kCount> WARPWIRE_FN void broadcast_all(Block group, u64 (&words)[kCount]) {
    __shared__ u64 given[kCount];
    if (group.rank() == 0)
        for (u32 i = 0; i < kCount; i++) given[i] = words[i];
    group.sync();
    for (u32 i = 0; i < kCount; i++) words[i] = given[i];
    group.sync();
}
#endif

template <class Group> WARPWIRE_FN RingCopy broadcast(Group group, RingCopy mine) {
    u64 words[5] = {static_cast<u64>(mine.result), mine.ring, mine.size, mine.at, mine.advance};
    broadcast_all(group, words);
    return RingCopy{static_cast<i64>(words[0]), words[1], words[2], words[3], words[4]};
}
template <class Group> WARPWIRE_FN RingSpan broadcast(Group group, RingSpan mine) {
    u64 words[2] = {reinterpret_cast<u64>(mine.bytes), static_cast<u64>(mine.length)};
    broadcast_all(group, words);
    return RingSpan{reinterpret_cast<void *>(words[0]), static_cast<i64>(words[1])};
}

#if WARPWIRE_CUDA
// Rings are global memory that the host or the HCA writes; a user's buffer may be any memory.
template <bool kFromRing, class Word> WARPWIRE_FN Word load_word(const Word *p) {
    if constexpr (kFromRing) return __ldcv(p);
    else return *p;
}
// Copies words of one width; both sides are aligned to it.
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
    u64 misalignment = (reinterpret_cast<u64>(to) ^ reinterpret_cast<u64>(from)) & 15;
    u64 width = misalignment == 0 ? 16 : misalignment % 8 == 0 ? 8 : misalignment % 4 == 0 ? 4 : 1;
    u64 head = min_u64((0 - reinterpret_cast<u64>(to)) & (width - 1), length), words = (length - head) / width;
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

template <class Group> WARPWIRE_FN void copy_in(Group group, const RingCopy &ring_copy, const u8 *from) {
    u64 offset = ring_copy.at & (ring_copy.size - 1), length = static_cast<u64>(ring_copy.result), first = min_u64(length, ring_copy.size - offset);
    copy<false>(group, reinterpret_cast<u8 *>(ring_copy.ring + offset), from, first);
    copy<false>(group, reinterpret_cast<u8 *>(ring_copy.ring), from + first, length - first);
}
template <class Group> WARPWIRE_FN void copy_out(Group group, const RingCopy &ring_copy, u8 *into) {
    u64 offset = ring_copy.at & (ring_copy.size - 1), length = static_cast<u64>(ring_copy.result), first = min_u64(length, ring_copy.size - offset);
    copy<true>(group, into, reinterpret_cast<const u8 *>(ring_copy.ring + offset), first);
    copy<true>(group, into + first, reinterpret_cast<const u8 *>(ring_copy.ring), length - first);
}

// Why nothing can be sent on a socket: a negated errno, or 0 if it can.
WARPWIRE_FN i64 check_sendable(const StateSnapshot &snapshot) {
    u64 state = snapshot.state;
    if (!state) return -kEbadf;
    if (send_error(state)) return -send_error(state);
    if (state & kSendEnd || snapshot.flags & kFlagShutSend) return -kEpipe;
    return state & (kConnected | kConnecting | kIsDatagram) ? 0 : -kEnotconn;
}

// Waits for room and takes the lock. For a datagram, writes the record with its destination. With
// `may_store`, the ring is that of the peer, if it is mapped.
WARPWIRE_CALL RingCopy begin_send(const Table &table, const SocketRef &ref, u64 length, const Address *to, bool may_store, HeldRing *held) {
    StateSnapshot snapshot = take_snapshot(ref, &DeviceSocketState::send_timeout);
    if (!snapshot.state) return no_copy(-kEbadf);
    bool datagram = snapshot.state & kIsDatagram;
    if (to && !datagram) return no_copy(-kEisconn);
    if (datagram && !to && !(snapshot.state & kConnected)) return no_copy(-kEdestaddrreq);
    u64 needs = datagram ? footprint(length) : min_u64(length, 1);
    for (Waiter waiter(snapshot.wait_limit);;) {
        u64 ring = load_system_relaxed(&ref.host_state->send_ring), size = load_system_relaxed(&ref.host_state->send_size);
        u64 taken = load_system(&ref.host_state->taken);
        if (i64 error = check_sendable(snapshot)) return no_copy(error);
        if (datagram && (length > kLongestDatagram || needs > size)) return no_copy(-kEmsgsize);
        bool ready = !(snapshot.state & kConnecting);
        if (ready && needs == 0) return no_copy(0);
        i64 locked = 0;
        if (ready && size - (snapshot.sent - taken) >= needs)
            locked = lock_ring(ref, &ref.device_state->send_lock, &ref.device_state->sent, &ref.host_state->taken, held);
        if (locked < 0) return no_copy(locked);
        if (locked) {
            u64 sent = held->local_count, free = free_of(*held, size);
            if (free <= size && free >= needs) {
                held->stores = may_store && begin_stores(table, held);
                if (held->stores) ring = held->peer_ring.address, size = held->peer_ring.length;
                if (!datagram) return RingCopy{static_cast<i64>(min_u64(length, free)), ring, size, sent, min_u64(length, free)};
                Record *record = reinterpret_cast<Record *>(ring + (sent & (size - 1)));
                record->value = static_cast<u32>(length), record->error = 0;
                record->address = to ? *to : no_address();
                return RingCopy{static_cast<i64>(length), ring, size, sent + sizeof(Record), needs};
            }
            store_gpu(&ref.device_state->send_lock, kUnlocked);
            if (free > size) return no_copy(no_room(table, ref, *held));
        }
        if (i64 stop = waiter.step(table)) return no_copy(stop);
        snapshot = take_snapshot(ref, &DeviceSocketState::send_timeout);
    }
}

// Sets the activity flag of the socket, after its counters: the host reads only counters whose flag
// is set. The fence orders the flag behind the counters; the host clears it before it reads them.
WARPWIRE_FN void notify_host(const Table &table, const SocketRef &ref) {
    u32 flag = (static_cast<u32>(ref.handle) & 0xffff) >> table.activity_shift;
    fence_system();
    store_system(reinterpret_cast<u32 *>(table.activity) + flag, 1u);
}

// Publishes the bytes sent to the host, or, by RDMA, to the peer.
WARPWIRE_FN void publish_sent(const Table &table, const SocketRef &ref, const HeldRing &held, u64 ring, u64 size, u64 sent) {
    store_gpu_relaxed(&ref.device_state->sent, sent);
    if (held.stores) {
        end_stores(table, held, sent);
        return;
    }
    if (held.flags & kFlagWarp) {
        post_sent(table, ref, held.qp_slot, ring, size, held.local_count, sent);
        return;
    }
    fence_system();
    store_system(&ref.device_counters->sent, static_cast<u32>(sent));
    notify_host(table, ref);
}
WARPWIRE_FN void publish_consumed_to_host(const Table &table, const SocketRef &ref, u64 consumed) {
    store_gpu_relaxed(&ref.device_state->consumed, consumed);
    fence_system();
    store_system(&ref.device_counters->consumed, static_cast<u32>(consumed));
    notify_host(table, ref);
}
WARPWIRE_FN void publish_consumed(const Table &table, const SocketRef &ref, const HeldRing &held, u64 consumed) {
    if (!(held.flags & kFlagWarp)) {
        publish_consumed_to_host(table, ref, consumed);
        return;
    }
    store_gpu_relaxed(&ref.device_state->consumed, consumed);
    if (consumed - held.reported >= held.report_at || held.flags & kFlagShutReceive) report(table, ref, held.qp_slot, consumed);
}

WARPWIRE_CALL void end_send(const Table &table, const SocketRef &ref, const HeldRing &held, const RingCopy &ring_copy) {
    publish_sent(table, ref, held, ring_copy.ring, ring_copy.size, held.local_count + ring_copy.advance);
    store_gpu(&ref.device_state->send_lock, kUnlocked);
}
WARPWIRE_CALL void end_receive(const Table &table, const SocketRef &ref, const HeldRing &held, const RingCopy &ring_copy) {
    publish_consumed(table, ref, held, held.local_count + ring_copy.advance);
    store_gpu(&ref.device_state->receive_lock, kUnlocked);
}

// What a receive on an empty ring returns: 0 at the end, -kEagain if data may still arrive.
WARPWIRE_FN i64 why_empty(const StateSnapshot &snapshot, bool ended) {
    u64 state = snapshot.state;
    if (snapshot.flags & kFlagShutReceive) return 0;
    if (receive_error(state)) return -receive_error(state);
    if (ended || state & kReceiveEnd) return 0;
    return state & (kConnected | kConnecting | kIsDatagram) ? -kEagain : -kEnotconn;
}

// Waits for data and takes the lock. Returns the bytes available, 0 at the end (without the lock),
// or a negated errno.
WARPWIRE_CALL i64 lock_readable(const Table &table, const SocketRef &ref, const StateSnapshot &first, HeldRing *held) {
    StateSnapshot snapshot = first;
    for (Waiter waiter(snapshot.wait_limit);;) {
        if (!snapshot.state) return -kEbadf;
        const HostSocketState *host_state = ref.host_state;
        u64 ended = is_warp(snapshot.state) ? kFin : 0;
        held->ring = load_system_relaxed(&host_state->receive_ring), held->size = load_system_relaxed(&host_state->receive_size);
        held->report_at = load_system_relaxed(&host_state->report_at);
        u64 word = load_system(&host_state->received);
        if ((word & ~ended) != snapshot.consumed) {
            i64 locked = lock_ring(ref, &ref.device_state->receive_lock, &ref.device_state->consumed, &host_state->received, held);
            if (locked < 0) return locked;
            if (locked) {
                u64 waiting = (held->remote_count & ~ended) - held->local_count;
                if (waiting && (!ended || waiting <= held->size)) return static_cast<i64>(waiting);
                store_gpu(&ref.device_state->receive_lock, kUnlocked);
                if (waiting) return give_up(table, ref, kEproto);  // an impossible counter
            }
        } else {
            i64 why = why_empty(snapshot, word & ended);
            if (why != -kEagain) return why;
            // Data is announced by this word only; everything else rarely changes.
            for (u32 i = 0; i < kFastPolls && snapshot.wait_limit; i++)
                if (load_system(&host_state->received) != word) break;
        }
        if (i64 stop = waiter.step(table)) return stop;
        snapshot = take_snapshot(ref, &DeviceSocketState::receive_timeout);
    }
}

// Records are aligned to their size, so none wraps.
WARPWIRE_CALL void read_record(const HeldRing &held, Record *into) {
    const u64 *from = reinterpret_cast<const u64 *>(held.ring + (held.local_count & (held.size - 1)));
    u64 words[4] = {load_system_relaxed(from), load_system_relaxed(from + 1), load_system_relaxed(from + 2), load_system_relaxed(from + 3)};
    static_assert(sizeof words == sizeof(Record), "all of it is read");
    memcpy(into, words, sizeof words);
}

WARPWIRE_CALL RingCopy begin_receive(const Table &table, const SocketRef &ref, u64 length, Address *from, HeldRing *held) {
    StateSnapshot snapshot = take_snapshot(ref, &DeviceSocketState::receive_timeout);
    if (!snapshot.state) return no_copy(-kEbadf);
    bool datagram = snapshot.state & kIsDatagram;
    if (!datagram && length == 0) return no_copy(0);
    if (snapshot.state & kListening) return no_copy(-kEnotconn);
    i64 available = lock_readable(table, ref, snapshot, held);
    if (available <= 0) return no_copy(available);
    if (!datagram) {
        u64 count = min_u64(length, static_cast<u64>(available));
        return RingCopy{static_cast<i64>(count), held->ring, held->size, held->local_count, count};
    }
    Record record;
    read_record(*held, &record);
    if (from) *from = record.address;
    i64 result = record.error ? -static_cast<i64>(record.error) : static_cast<i64>(min_u64(length, record.value));
    return RingCopy{result, held->ring, held->size, held->local_count + sizeof(Record), footprint(record.value)};
}

WARPWIRE_CALL i64 accept_thread(const Table &table, int listener, Address *from) {
    SocketRef ref = find(table, listener);
    StateSnapshot snapshot = take_snapshot(ref, &DeviceSocketState::receive_timeout);
    if (!snapshot.state) return -kEbadf;
    if (!(snapshot.state & kListening)) return -kEinval;
    for (Waiter waiter(snapshot.wait_limit);;) {
        if (!snapshot.state) return -kEbadf;
        if (receive_error(snapshot.state)) return -receive_error(snapshot.state);
        HeldRing held;
        held.ring = load_system_relaxed(&ref.host_state->receive_ring), held.size = load_system_relaxed(&ref.host_state->receive_size);
        i64 locked = 0;
        if (load_system(&ref.host_state->received) != snapshot.consumed)
            locked = lock_ring(ref, &ref.device_state->receive_lock, &ref.device_state->consumed, &ref.host_state->received, &held);
        if (locked < 0) return locked;
        if (locked && held.remote_count != held.local_count) {
            Record record;
            read_record(held, &record);
            publish_consumed_to_host(table, ref, held.local_count + sizeof(Record));
            store_gpu(&ref.device_state->receive_lock, kUnlocked);
            init_device_state(table, static_cast<int>(record.value));
            if (from) *from = record.address;
            return record.value;
        }
        if (locked) store_gpu(&ref.device_state->receive_lock, kUnlocked);  // another group won
        if (i64 stop = waiter.step(table)) return stop;
        snapshot = take_snapshot(ref, &DeviceSocketState::receive_timeout);
    }
}

// -------------------------------------------------------------------------------------------------
// Spans

WARPWIRE_FN RingSpan no_span(i64 why) { return RingSpan{nullptr, why}; }

WARPWIRE_CALL RingSpan borrow_thread(const Table &table, int socket, u64 max_len) {
    SocketRef ref = find(table, socket);
    StateSnapshot snapshot = take_snapshot(ref, &DeviceSocketState::receive_timeout);
    if (!snapshot.state) return no_span(-kEbadf);
    if (snapshot.state & kIsDatagram) return no_span(-kEopnotsupp);
    if (snapshot.state & kListening) return no_span(-kEnotconn);
    HeldRing held;
    i64 available = lock_readable(table, ref, snapshot, &held);
    if (available <= 0) return no_span(available);
    u64 offset = held.local_count & (held.size - 1), length = min_u64(min_u64(static_cast<u64>(available), held.size - offset), max_len);
    store_gpu(&ref.device_state->receive_lock, length ? kSpanOut : kUnlocked);
    return RingSpan{reinterpret_cast<void *>(held.ring + offset), static_cast<i64>(length)};
}

// The state of a direction whose span the caller holds.
WARPWIRE_FN HeldRing held_span(const SocketRef &ref, const u64 *local_count, const u64 *remote_count) {
    HeldRing held;
    held.local_count = load_gpu_relaxed(local_count), held.reported = load_gpu_relaxed(&ref.device_state->reported);
    held.flags = load_gpu_relaxed(&ref.device_state->flags), held.qp_slot = load_gpu_relaxed(&ref.device_state->qp_slot);
    held.report_at = load_system_relaxed(&ref.host_state->report_at), held.stores = false;
    held.remote_count = load_system(remote_count);
    return held;
}

WARPWIRE_CALL i64 consume_thread(const Table &table, int socket, u64 used) {
    SocketRef ref = find(table, socket);
    u64 state = load_state(ref);
    if (!state) return -kEbadf;
    if (load_gpu(&ref.device_state->receive_lock) != kSpanOut) return -kEinval;
    HeldRing held = held_span(ref, &ref.device_state->consumed, &ref.host_state->received);
    if (used > (held.remote_count & ~(is_warp(state) ? kFin : 0)) - held.local_count) return -kEinval;
    publish_consumed(table, ref, held, held.local_count + used);
    store_gpu(&ref.device_state->receive_lock, kUnlocked);
    return 0;
}

WARPWIRE_CALL RingSpan reserve_thread(const Table &table, int socket, u64 max_len) {
    SocketRef ref = find(table, socket);
    u64 state = load_state(ref);
    if (!state) return no_span(-kEbadf);
    if (state & kIsDatagram) return no_span(-kEopnotsupp);
    if (max_len == 0) return no_span(-kEinval);
    HeldRing held;
    RingCopy ring_copy = begin_send(table, ref, max_len, nullptr, false, &held);
    if (ring_copy.result <= 0) return no_span(ring_copy.result);
    u64 offset = ring_copy.at & (ring_copy.size - 1);
    store_gpu(&ref.device_state->send_lock, kSpanOut);
    return RingSpan{reinterpret_cast<void *>(ring_copy.ring + offset), static_cast<i64>(min_u64(static_cast<u64>(ring_copy.result), ring_copy.size - offset))};
}

WARPWIRE_CALL i64 commit_thread(const Table &table, int socket, u64 filled) {
    SocketRef ref = find(table, socket);
    if (!load_state(ref)) return -kEbadf;
    if (load_gpu(&ref.device_state->send_lock) != kSpanOut) return -kEinval;
    u64 ring = load_system_relaxed(&ref.host_state->send_ring), size = load_system_relaxed(&ref.host_state->send_size);
    HeldRing held = held_span(ref, &ref.device_state->sent, &ref.host_state->taken);
    u64 free = free_of(held, size);
    // The peer reads no more, its counter is impossible, or FIN, with the final length, was posted.
    if (free > size || held.flags & kFlagFin) {
        store_gpu(&ref.device_state->send_lock, kUnlocked);
        return free > size ? no_room(table, ref, held) : -kEpipe;
    }
    if (filled > free) return -kEinval;
    if (filled) publish_sent(table, ref, held, ring, size, held.local_count + filled);
    store_gpu(&ref.device_state->send_lock, kUnlocked);
    return 0;
}

// -------------------------------------------------------------------------------------------------

// Fill levels of the rings: hints, as other groups use them concurrently, and the peer's counters
// are validated under the lock only.
struct Levels {
    u64 waiting, free;
    bool ended;
};
WARPWIRE_FN Levels levels(const SocketRef &ref, const StateSnapshot &snapshot) {
    const HostSocketState *host_state = ref.host_state;
    u64 sends = load_system_relaxed(&host_state->send_size), receives = load_system_relaxed(&host_state->receive_size), taken = load_system_relaxed(&host_state->taken);
    u64 word = load_system(&host_state->received), ended = is_warp(snapshot.state) ? word & kFin : 0;
    return Levels{min_u64((word ^ ended) - snapshot.consumed, receives), min_u64(sends - (snapshot.sent - taken), sends), ended != 0};
}

// All current events of a socket.
WARPWIRE_CALL u32 ready(const Table &table, int socket) {
    SocketRef ref = find(table, socket);
    StateSnapshot snapshot = take_snapshot(ref, &DeviceSocketState::receive_timeout);
    u64 state = snapshot.state;
    if (!state) return kNval;
    u32 events = 0;
    Levels level = levels(ref, snapshot);
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

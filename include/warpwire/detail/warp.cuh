// The `warp` family: the caller writes into the peer's ring and counters through its own queue
// pair, or stores there by itself if they are mapped on this GPU (direct.cuh). Part of sock.cuh.
//
// The peer's HCA writes two counters here, `received` and `taken` of the host state, and neither is
// trusted: an impossible value aborts the connection.
#ifndef WARPWIRE_DETAIL_WARP_CUH
#define WARPWIRE_DETAIL_WARP_CUH

namespace warpwire {
namespace sock {
namespace detail {

constexpr u64 kFin = 1ull << 63;         // in `received`: end of the stream
constexpr u64 kReadClosed = 1ull << 63;  // in `taken`: the receiver reads no more
// How long posting waits for other groups that post, and for room in the send queue.
constexpr u64 kPostTimeout = 10ull * 1000 * 1000 * 1000;
constexpr u32 kFlagFin = 16;  // flag of a device state: FIN was posted

// The peer's addresses and keys.
struct PeerInfo {
    u64 ring, received, taken;
    u32 ring_key, received_key, taken_key, ring_size, send_key, qp_slot;
    u64 more[2];
};
struct QpDescriptor {  // written by the host
    u64 constants[16];
    PeerInfo peer;
};
struct QpSlot {  // used by kernels only; initialised from a QpDescriptor
    Qp qp;
    PeerInfo peer;
};
static_assert(sizeof(PeerInfo) == 64 && sizeof(QpDescriptor) == 192 && sizeof(QpSlot) == 1280, "as in layout.rs");

WARPWIRE_FN bool is_warp(u64 state) { return (state & (kIsWarp | kListening)) == kIsWarp; }

// Requests the host to abort the connection.
WARPWIRE_CALL i64 give_up(const Table &table, const SocketRef &ref, i64 why) {
    i64 result = request_host(table, kFail, ref.handle, static_cast<u64>(why), 0, nullptr, nullptr);
    return result == -kEconnaborted ? result : -why;
}

// Why nothing fits into the peer's ring: it reads no more, or its counter is impossible. The caller
// holds the lock.
WARPWIRE_CALL i64 no_room(const Table &table, const SocketRef &ref, const HeldRing &held) {
    bool read_closed = held.remote_count & kReadClosed && (held.remote_count & ~kReadClosed) <= held.local_count;
    return read_closed ? -kEpipe : give_up(table, ref, kEproto);
}

// The QP slot with this number, which is its index plus one.
WARPWIRE_FN QpSlot *slot_at(const Table &table, u32 qp_slot) { return reinterpret_cast<QpSlot *>(table.qp_slots) + (qp_slot - 1); }

// Initialises the QP slot, on first use.
WARPWIRE_CALL QpSlot *init_qp_slot(const Table &table, const SocketRef &ref, const QpDescriptor *qp_descriptor) {
    u32 number = load_system(&qp_descriptor->peer.qp_slot);
    QpSlot *qp_slot = reinterpret_cast<QpSlot *>(table.qp_slots) + number;
    u64 *words = reinterpret_cast<u64 *>(qp_slot);
    WARPWIRE_NO_UNROLL
    for (u32 i = 0; i < 16; i++) words[i] = load_system(&qp_descriptor->constants[i]);
    WARPWIRE_NO_UNROLL
    for (u32 i = 16; i < sizeof(Qp) / 8; i++) words[i] = 0;
    const u64 *source = reinterpret_cast<const u64 *>(&qp_descriptor->peer);
    u64 *target = reinterpret_cast<u64 *>(&qp_slot->peer);
    WARPWIRE_NO_UNROLL
    for (u32 i = 0; i < sizeof(PeerInfo) / 8; i++) target[i] = load_system(source + i);
    qp_slot->qp.send.failure = qp_slot->qp.receive.failure = kNoFailure;
    store_gpu(&ref.device_state->qp_slot, number + 1);
    return qp_slot;
}
// The QP slot, or null if it is not initialised.
WARPWIRE_FN QpSlot *qp_slot_of(const Table &table, const SocketRef &ref) {
    u32 number = load_gpu(&ref.device_state->qp_slot);
    return number ? slot_at(table, number) : nullptr;
}

// The result of reserving entries, with the lock for posting held.
struct PostReservation {
    QpSlot *qp_slot;  // null if it failed; then the connection was aborted
    u64 first;
    warpwire::detail::Poster poster;
    PeerInfo peer;
};

// The slow path of begin_post: the QP slot is not initialised, or there is no room. The lock is
// held.
WARPWIRE_CALL PostReservation begin_slow_post(const Table &table, const SocketRef &ref, u32 count) {
    i64 why = kEnotconn;
    QpSlot *qp_slot = qp_slot_of(table, ref);
    if (!qp_slot)
        if (const QpDescriptor *qp_descriptor = reinterpret_cast<const QpDescriptor *>(load_system(&ref.host_state->qp_descriptor))) qp_slot = init_qp_slot(table, ref, qp_descriptor);
    if (qp_slot) {
        Waiter waiter(kPostTimeout);
        for (;;) {
            u64 first;
            Status status = warpwire::detail::reserve(warpwire::detail::sends(qp_slot->qp), count, 0, &first);
            if (status == kOk) return PostReservation{qp_slot, first, warpwire::detail::poster(qp_slot->qp), qp_slot->peer};
            why = kEconnreset;
            if (status != kNotReady || send_error(load_system(&ref.host_state->state))) break;
            if (i64 stop = waiter.step(table)) {
                why = -stop;
                break;
            }
        }
    }
    store_gpu(&ref.device_state->post_lock, kUnlocked);
    give_up(table, ref, why);
    return PostReservation{nullptr, 0, {}, {}};
}

// Takes the lock for posting and reserves `count` entries. `qp_slot` is the word of the device
// state, as loaded before.
WARPWIRE_FN PostReservation begin_post(const Table &table, const SocketRef &ref, u32 qp_slot, u32 count) {
    Waiter waiter(kPostTimeout);
    while (try_lock(&ref.device_state->post_lock) != kUnlocked)
        if (waiter.step(table)) return PostReservation{nullptr, 0, {}, {}};
    if (qp_slot) {
        PostReservation post;
        post.qp_slot = slot_at(table, qp_slot);
        post.poster = warpwire::detail::poster(post.qp_slot->qp), post.peer = post.qp_slot->peer;
        if (warpwire::detail::try_reserve(warpwire::detail::sends(post.qp_slot->qp), count, &post.first) == kOk) return post;
    }
    return begin_slow_post(table, ref, count);
}

// Rings the doorbell and releases the lock.
WARPWIRE_FN void end_post(const SocketRef &ref, const PostReservation &post, u32 count) {
    warpwire::detail::publish_single_poster(post.qp_slot->qp, post.poster, post.first + count);
    store_gpu(&ref.device_state->post_lock, kUnlocked);
}

// Stores a value to a counter that was entered, after what any thread of the group has stored, and
// leaves the ranges.
WARPWIRE_FN void store_counter(Qp &qp, const warpwire::detail::DirectRange &counter, const warpwire::detail::DirectRange &other, u64 value, u32 count) {
    fence_system();
    store_system(reinterpret_cast<u64 *>(counter.address), value);
    fence_system();
    warpwire::detail::end(qp, counter, other, warpwire::detail::no_range(), count);
}

// Enters a counter, and the ring if there is one. An HCA can write a counter anywhere, but a store
// needs an aligned address.
WARPWIRE_FN bool enter_counter(Qp &qp, warpwire::detail::DirectRange &counter, warpwire::detail::DirectRange &ring) {
    warpwire::detail::DirectRange none = warpwire::detail::no_range();
    if (!warpwire::detail::enter(qp, counter, ring, none)) return false;
    if (counter.address % 8 == 0) return true;
    warpwire::detail::leave(counter), warpwire::detail::leave(ring);
    return false;
}

// Begins to store into the peer's ring and counter, by one thread; false if it must be posted. The
// lock for sending is held.
WARPWIRE_CALL bool begin_stores(const Table &table, HeldRing *held) {
    if (!(held->flags & kFlagWarp) || !held->qp_slot) return false;
    QpSlot *slot = slot_at(table, held->qp_slot);
    if (!slot->qp.direct) return false;
    const PeerInfo &peer = slot->peer;
    held->peer_ring = warpwire::detail::remote_range(slot->qp, Remote{peer.ring, peer.ring_key}, peer.ring_size, warpwire::detail::kWriteRemote);
    held->peer_count = warpwire::detail::remote_range(slot->qp, Remote{peer.received, peer.received_key}, 8, warpwire::detail::kWriteRemote);
    return enter_counter(slot->qp, held->peer_count, held->peer_ring);
}
// Ends it, with the new counter.
WARPWIRE_CALL void end_stores(const Table &table, const HeldRing &held, u64 sent) {
    store_counter(slot_at(table, held.qp_slot)->qp, held.peer_count, held.peer_ring, sent, 2);
}

WARPWIRE_FN void write_span(const PostReservation &post, u64 number, u64 ring, u64 size, u64 from, u64 to) {
    const PeerInfo &peer = post.peer;
    warpwire::detail::Entry e = warpwire::detail::entry(warpwire::detail::kWrite);
    warpwire::detail::add_remote(e, Remote{peer.ring + (from & (peer.ring_size - 1)), peer.ring_key});
    warpwire::detail::add_local(e, Local{ring + (from & (size - 1)), peer.send_key}, static_cast<u32>(to - from));
    warpwire::detail::write_entry(post.poster, number, e);
}
WARPWIRE_FN void write_word(const PostReservation &post, u64 number, u64 at, u32 key, u64 value) {
    warpwire::detail::Entry e = warpwire::detail::entry(warpwire::detail::kWrite);
    warpwire::detail::add_remote(e, Remote{at, key});
    warpwire::detail::add_segment(e, warpwire::detail::big_endian(0x80000000u | 8), static_cast<u32>(value), static_cast<u32>(value >> 32), 0);
    warpwire::detail::write_entry(post.poster, number, e);
}

// Posts the bytes of the ring between two counters, then the new counter.
WARPWIRE_CALL void post_sent(const Table &table, const SocketRef &ref, u32 qp_slot, u64 ring, u64 size, u64 from, u64 to) {
    // The peer's ring size is a multiple of ours, so it wraps only where ours does.
    u64 wrap = min_u64(to, (from | (size - 1)) + 1);
    u32 count = wrap < to ? 3 : 2;
    PostReservation post = begin_post(table, ref, qp_slot, count);
    if (!post.qp_slot) return;
    write_span(post, post.first, ring, size, from, wrap);
    if (wrap < to) write_span(post, post.first + 1, ring, size, wrap, to);
    write_word(post, post.first + count - 1, post.peer.received, post.peer.received_key, to);
    end_post(ref, post, count);
}

// The bytes sent, with FIN, or else those consumed.
WARPWIRE_FN u64 counter_value(const SocketRef &ref, bool fin, u64 consumed) {
    if (fin) return load_gpu(&ref.device_state->sent) | kFin;
    return load_gpu(&ref.device_state->flags) & kFlagShutReceive ? consumed | kReadClosed : consumed;
}
// Stores that counter of the peer, or posts it. What may change until the entry is reserved, such
// as flags, is loaded afterwards.
WARPWIRE_CALL void post_counter(const Table &table, const SocketRef &ref, u32 qp_slot, bool fin, u64 consumed) {
    if (qp_slot && slot_at(table, qp_slot)->qp.direct) {
        QpSlot *slot = slot_at(table, qp_slot);
        Remote at{fin ? slot->peer.received : slot->peer.taken, fin ? slot->peer.received_key : slot->peer.taken_key};
        warpwire::detail::DirectRange no_ring = warpwire::detail::no_range();
        warpwire::detail::DirectRange counter = warpwire::detail::remote_range(slot->qp, at, 8, warpwire::detail::kWriteRemote);
        if (enter_counter(slot->qp, counter, no_ring)) {
            store_counter(slot->qp, counter, no_ring, counter_value(ref, fin, consumed), 1);
            return;
        }
    }
    PostReservation post = begin_post(table, ref, qp_slot, 1);
    if (!post.qp_slot) return;
    const PeerInfo &peer = post.peer;
    write_word(post, post.first, fin ? peer.received : peer.taken, fin ? peer.received_key : peer.taken_key, counter_value(ref, fin, consumed));
    end_post(ref, post, 1);
}

// Posts FIN once.
WARPWIRE_CALL void post_fin(const Table &table, const SocketRef &ref) {
    if (load_gpu(&ref.device_state->flags) & kFlagFin) return;
    change_flags(ref.device_state, 0, kFlagFin);
    post_counter(table, ref, load_gpu(&ref.device_state->qp_slot), true, 0);
}

// Posts the consumed count to the peer. The caller holds the lock for receiving.
WARPWIRE_CALL void report(const Table &table, const SocketRef &ref, u32 qp_slot, u64 consumed) {
    store_gpu_relaxed(&ref.device_state->reported, consumed);
    post_counter(table, ref, qp_slot, false, consumed);
}

// Posts FIN after groups that are copying have finished. Does not wait for a reserved span.
WARPWIRE_CALL void end_sending(const Table &table, const SocketRef &ref) {
    Waiter waiter(kCloseTimeout);
    u32 before;
    while ((before = compare_exchange(&ref.device_state->send_lock, kUnlocked, kLocked)) == kLocked)
        if (waiter.step(table)) return;
    post_fin(table, ref);
    if (before == kUnlocked) store_gpu(&ref.device_state->send_lock, kUnlocked);
}

// Notifies the peer that no more will be read, after groups that are copying have finished. If a
// span is borrowed, consume does it: the flag is set already.
WARPWIRE_CALL void end_receiving(const Table &table, const SocketRef &ref) {
    Waiter waiter(kCloseTimeout);
    u32 before;
    while ((before = compare_exchange(&ref.device_state->receive_lock, kUnlocked, kLocked)) == kLocked)
        if (waiter.step(table)) return;
    if (before != kUnlocked) return;
    report(table, ref, load_gpu(&ref.device_state->qp_slot), load_gpu(&ref.device_state->consumed));
    store_gpu(&ref.device_state->receive_lock, kUnlocked);
}

// Before the close request: posts FIN if needed; returns the number of work requests posted.
WARPWIRE_CALL u64 finish_close(const Table &table, const SocketRef &ref, u64 state) {
    if (!is_warp(state) || !(state & kConnected)) return 0;
    if (!(state & kResetOnClose) && !send_error(state)) post_fin(table, ref);
    QpSlot *qp_slot = qp_slot_of(table, ref);
    return qp_slot ? warpwire::detail::filled(qp_slot->qp.send) : 0;
}

}  // namespace detail
}  // namespace sock
}  // namespace warpwire

#endif

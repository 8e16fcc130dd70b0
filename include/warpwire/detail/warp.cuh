// The family `warp`: the caller itself writes into the peer's ring and words, by a queue pair of its own. Part of sock.cuh.
//
// What the peer's device writes here is two counters, `received` and `taken` of the inbox, and neither is believed: one that
// cannot be true ends the connection.
#ifndef WARPWIRE_DETAIL_WARP_CUH
#define WARPWIRE_DETAIL_WARP_CUH

namespace warpwire {
namespace sock {
namespace detail {

constexpr u64 kFin = 1ull << 63;                              // in `received`: no more will come
constexpr u64 kReadClosed = 1ull << 63;                               // in `taken`: no more will be read
constexpr u64 kPostTimeout = 10ull * 1000 * 1000 * 1000;            // how long posting waits for others, and for room
constexpr u32 kFlagFin = 16;                                  // flag of a desk: the peer was told of the end

// Where the peer may be written to.
struct PeerInfo {
    u64 ring, received, taken;
    u32 ring_key, received_key, taken_key, ring_size, send_key, qp_slot;
    u64 more[2];
};
struct QpDescriptor {  // written by the host
    u64 constants[16];
    PeerInfo peer;
};
struct QpSlot {  // of kernels only, made from a wire line
    Qp qp;
    PeerInfo peer;
};
static_assert(sizeof(PeerInfo) == 64 && sizeof(QpDescriptor) == 192 && sizeof(QpSlot) == 1280, "as in layout.rs");

WARPWIRE_FN bool is_warp(u64 state) { return (state & (kIsWarp | kListening)) == kIsWarp; }

// Has the host end a connection that is of no use.
WARPWIRE_CALL i64 give_up(const Table &table, const SocketRef &ref, i64 why) {
    i64 result = request_host(table, kFail, ref.handle, static_cast<u64>(why), 0, no_address(), nullptr);
    return result == -kEconnaborted ? result : -why;
}

// Why nothing fits into the peer's ring, for who holds the lock: it reads no more, or it lies.
WARPWIRE_CALL i64 no_room(const Table &table, const SocketRef &ref, const HeldRing &held) {
    bool read_closed = held.remote_count & kReadClosed && (held.remote_count & ~kReadClosed) <= held.local_count;
    return read_closed ? -kEpipe : give_up(table, ref, kEproto);
}

// Makes the berth, when it is first needed.
WARPWIRE_CALL QpSlot *init_qp_slot(const Table &table, const SocketRef &ref, const QpDescriptor *qp_descriptor) {
    u32 number = load_system(&qp_descriptor->peer.qp_slot);
    QpSlot *qp_slot = reinterpret_cast<QpSlot *>(table.qp_slots) + number;
    u64 *words = reinterpret_cast<u64 *>(qp_slot);
    for (u32 i = 0; i < 16; i++) words[i] = load_system(&qp_descriptor->constants[i]);
    for (u32 i = 16; i < sizeof(Qp) / 8; i++) words[i] = 0;
    const u64 *source = reinterpret_cast<const u64 *>(&qp_descriptor->peer);
    u64 *target = reinterpret_cast<u64 *>(&qp_slot->peer);
    for (u32 i = 0; i < sizeof(PeerInfo) / 8; i++) target[i] = load_system(source + i);
    qp_slot->qp.send.failure = qp_slot->qp.receive.failure = kNoFailure;
    store_gpu(&ref.device_state->qp_slot, number + 1);
    return qp_slot;
}
// The berth, if it is made.
WARPWIRE_FN QpSlot *qp_slot_of(const Table &table, const SocketRef &ref) {
    u32 number = load_gpu(&ref.device_state->qp_slot);
    return number ? reinterpret_cast<QpSlot *>(table.qp_slots) + (number - 1) : nullptr;
}

// What posting needs, when the lock for it is held and so many entries are taken.
struct PostReservation {
    QpSlot *qp_slot;  // null if it cannot be, and then the connection has ended
    u64 first;
    warpwire::detail::Poster poster;
    PeerInfo peer;
};

// The same where it takes longer: the berth is not made, or there is no room. The lock is held.
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

// Takes the lock for posting and so many entries. `qp_slot` is the desk's word as it was seen before.
WARPWIRE_FN PostReservation begin_post(const Table &table, const SocketRef &ref, u32 qp_slot, u32 count) {
    Waiter waiter(kPostTimeout);
    while (try_lock(&ref.device_state->post_lock) != kUnlocked)
        if (waiter.step(table)) return PostReservation{nullptr, 0, {}, {}};
    if (qp_slot) {
        PostReservation post;
        post.qp_slot = reinterpret_cast<QpSlot *>(table.qp_slots) + (qp_slot - 1);
        post.poster = warpwire::detail::poster(post.qp_slot->qp), post.peer = post.qp_slot->peer;
        if (warpwire::detail::try_reserve(warpwire::detail::sends(post.qp_slot->qp), count, &post.first) == kOk) return post;
    }
    return begin_slow_post(table, ref, count);
}

// Rings for what was filled.
WARPWIRE_FN void end_post(const SocketRef &ref, const PostReservation &post, u32 count) {
    warpwire::detail::publish_single_poster(post.qp_slot->qp, post.poster, post.first + count);
    store_gpu(&ref.device_state->post_lock, kUnlocked);
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

// Sends what the ring holds from one counter to another, and says so.
WARPWIRE_CALL void post_sent(const Table &table, const SocketRef &ref, u32 qp_slot, u64 ring, u64 size, u64 from, u64 to) {
    // The peer's ring is a multiple of ours: it ends where ours does, or not at all.
    u64 wrap = min_u64(to, (from | (size - 1)) + 1);
    u32 count = wrap < to ? 3 : 2;
    PostReservation post = begin_post(table, ref, qp_slot, count);
    if (!post.qp_slot) return;
    write_span(post, post.first, ring, size, from, wrap);
    if (wrap < to) write_span(post, post.first + 1, ring, size, wrap, to);
    write_word(post, post.first + count - 1, post.peer.received, post.peer.received_key, to);
    end_post(ref, post, count);
}

// Says that no more will come.
WARPWIRE_CALL void post_fin(const Table &table, const SocketRef &ref) {
    if (load_gpu(&ref.device_state->flags) & kFlagFin) return;
    change_flags(ref.device_state, 0, kFlagFin);
    PostReservation post = begin_post(table, ref, load_gpu(&ref.device_state->qp_slot), 1);
    if (!post.qp_slot) return;
    write_word(post, post.first, post.peer.received, post.peer.received_key, load_gpu(&ref.device_state->sent) | kFin);
    end_post(ref, post, 1);
}

// Tells the peer what was taken, by who holds the lock for receiving.
WARPWIRE_CALL void report(const Table &table, const SocketRef &ref, u32 qp_slot, u64 consumed) {
    store_gpu_relaxed(&ref.device_state->reported, consumed);
    PostReservation post = begin_post(table, ref, qp_slot, 1);
    if (!post.qp_slot) return;
    u64 read_closed = load_gpu(&ref.device_state->flags) & kFlagShutReceive ? kReadClosed : 0;
    write_word(post, post.first, post.peer.taken, post.peer.taken_key, consumed | read_closed);
    end_post(ref, post, 1);
}

// Tells the peer that no more will come, once those who copy now are done. A span that is out is not waited for.
WARPWIRE_CALL void end_sending(const Table &table, const SocketRef &ref) {
    Waiter waiter(kCloseTimeout);
    u32 before;
    while ((before = compare_exchange(&ref.device_state->send_lock, kUnlocked, kLocked)) == kLocked)
        if (waiter.step(table)) return;
    post_fin(table, ref);
    if (before == kUnlocked) store_gpu(&ref.device_state->send_lock, kUnlocked);
}

// Tells the peer that no more will be read, once those who copy now are done; the desk says so already. Who has a span tells it
// with that.
WARPWIRE_CALL void end_receiving(const Table &table, const SocketRef &ref) {
    Waiter waiter(kCloseTimeout);
    u32 before;
    while ((before = compare_exchange(&ref.device_state->receive_lock, kUnlocked, kLocked)) == kLocked)
        if (waiter.step(table)) return;
    if (before != kUnlocked) return;
    report(table, ref, load_gpu(&ref.device_state->qp_slot), load_gpu(&ref.device_state->consumed));
    store_gpu(&ref.device_state->receive_lock, kUnlocked);
}

// What close does before it asks the host: how many operations were posted.
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

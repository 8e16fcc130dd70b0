// The family `warp`: the caller itself writes into the peer's ring and words, by a queue pair of its own. Part of sock.cuh.
//
// What the peer's device writes here is two counters, `received` and `taken` of the inbox, and neither is believed: one that
// cannot be true ends the connection.
#ifndef WARPWIRE_DETAIL_WARP_CUH
#define WARPWIRE_DETAIL_WARP_CUH

namespace warpwire {
namespace sock {
namespace detail {

constexpr u64 kEnded = 1ull << 63;                              // in `received`: no more will come
constexpr u64 kPosting = 10ull * 1000 * 1000 * 1000;            // how long posting waits for others, and for room
constexpr u32 kFlagEnded = 16;                                  // flag of a desk: the peer was told of the end

// Where the peer may be written to.
struct Peer {
    u64 ring, received, taken;
    u32 ring_key, received_key, taken_key, ring_size, send_key, berth;
    u64 more[2];
};
struct Wire {  // written by the host
    u64 constants[16];
    Peer peer;
};
struct Berth {  // of kernels only, made from a wire line
    Qp qp;
    Peer peer;
};
static_assert(sizeof(Peer) == 64 && sizeof(Wire) == 192 && sizeof(Berth) == 1280, "as in layout.rs");

WARPWIRE_FN bool is_warp(u64 state) { return (state & (kIsWarp | kListening)) == kIsWarp; }

// Has the host end a connection that is of no use.
WARPWIRE_CALL i64 give_up(const Table &table, const Found &found, i64 why) {
    i64 told = ask(table, kFail, found.handle, static_cast<u64>(why), 0, no_address(), nullptr);
    return told == -kEconnaborted ? told : -why;
}

// Bytes that came, by a state that was looked at before; the peer's word about the end becomes part of that.
WARPWIRE_FN u64 received(const Found &found, u64 *state) {
    u64 word = load_system(&found.inbox->received);
    if (!is_warp(*state) || !(word & kEnded)) return word;
    *state |= kReceiveEnd;
    return word & ~kEnded;
}

// Bytes that wait in the ring, or why there will be none: the peer lies.
WARPWIRE_FN i64 available(const Table &table, const Found &found, u64 *state) {
    u64 waiting = received(found, state) - load_gpu(&found.desk->consumed);
    if (waiting && is_warp(*state) && waiting > load_system(&found.inbox->receive_size)) return give_up(table, found, kEproto);
    return static_cast<i64>(waiting);
}

// Free bytes of the send ring, or why there are none: the peer lies.
WARPWIRE_FN i64 room(const Table &table, const Found &found, u64 state) {
    u64 size = load_system(&found.inbox->send_size), taken = load_system(&found.inbox->taken);
    u64 sent = load_gpu(&found.desk->sent), outstanding = sent - taken;
    if (is_warp(state) && (taken > sent || outstanding > size)) return give_up(table, found, kEproto);
    return static_cast<i64>(size - outstanding);
}

// Makes the berth, when it is first needed.
WARPWIRE_CALL Berth *board(const Table &table, const Found &found, const Wire *wire) {
    u32 number = load_system(&wire->peer.berth);
    Berth *berth = reinterpret_cast<Berth *>(table.berths) + number;
    u64 *words = reinterpret_cast<u64 *>(berth);
    for (u32 i = 0; i < 16; i++) words[i] = load_system(&wire->constants[i]);
    for (u32 i = 16; i < sizeof(Qp) / 8; i++) words[i] = 0;
    const u64 *said = reinterpret_cast<const u64 *>(&wire->peer);
    u64 *kept = reinterpret_cast<u64 *>(&berth->peer);
    for (u32 i = 0; i < sizeof(Peer) / 8; i++) kept[i] = load_system(said + i);
    berth->qp.send.failure = berth->qp.receive.failure = kNoFailure;
    store_gpu(&found.desk->berth, number + 1);
    return berth;
}
// The berth, if it is made.
WARPWIRE_FN Berth *berth_of(const Table &table, const Found &found) {
    u32 number = load_gpu(&found.desk->berth);
    return number ? reinterpret_cast<Berth *>(table.berths) + (number - 1) : nullptr;
}

// Takes so many entries, with the lock for posting held; null if that cannot be, and then the connection has ended.
WARPWIRE_CALL Berth *begin_post(const Table &table, const Found &found, u32 count, u64 *first) {
    Waiter turn(kPosting);
    while (replace(&found.desk->post_lock, kFree, kCopying) != kFree)
        if (turn.step(table)) return nullptr;
    i64 why = kEnotconn;
    Berth *berth = berth_of(table, found);
    if (!berth)
        if (const Wire *wire = reinterpret_cast<const Wire *>(load_system(&found.inbox->wire))) berth = board(table, found, wire);
    if (berth) {
        Waiter waiter(kPosting);
        for (;;) {
            Status status = warpwire::detail::reserve(warpwire::detail::sends(berth->qp), count, 0, first);
            if (status == kOk) return berth;
            why = kEconnreset;
            if (status != kNotYet || send_error(load_system(&found.inbox->state))) break;
            if (i64 stop = waiter.step(table)) {
                why = -stop;
                break;
            }
        }
    }
    store_gpu(&found.desk->post_lock, kFree);
    give_up(table, found, why);
    return nullptr;
}

// Rings for what was filled.
WARPWIRE_FN void end_post(const Found &found, Berth *berth, u64 first, u32 count) {
    warpwire::detail::publish(berth->qp, first, count);
    store_gpu(&found.desk->post_lock, kFree);
}

WARPWIRE_FN void write_span(Berth *berth, u64 number, u64 ring, u64 size, u64 from, u64 to) {
    const Peer &peer = berth->peer;
    warpwire::detail::Entry e = warpwire::detail::entry(warpwire::detail::kWrite);
    warpwire::detail::add_remote(e, Remote{peer.ring + (from & (peer.ring_size - 1)), peer.ring_key});
    warpwire::detail::add_local(e, Local{ring + (from & (size - 1)), peer.send_key}, static_cast<u32>(to - from));
    warpwire::detail::write_entry(berth->qp, number, e);
}
WARPWIRE_FN void write_word(Berth *berth, u64 number, u64 at, u32 key, u64 value) {
    warpwire::detail::Entry e = warpwire::detail::entry(warpwire::detail::kWrite);
    warpwire::detail::add_remote(e, Remote{at, key});
    warpwire::detail::add_segment(e, warpwire::detail::big_endian(0x80000000u | 8), static_cast<u32>(value), static_cast<u32>(value >> 32), 0);
    warpwire::detail::write_entry(berth->qp, number, e);
}

// Sends what the ring holds from one counter to another, and says so.
WARPWIRE_CALL void post_sent(const Table &table, const Found &found, u64 ring, u64 size, u64 from, u64 to) {
    u64 first;
    // The peer's ring is a multiple of ours: it ends where ours does, or not at all.
    u64 turn = least(to, (from | (size - 1)) + 1);
    u32 count = turn < to ? 3 : 2;
    Berth *berth = begin_post(table, found, count, &first);
    if (!berth) return;
    write_span(berth, first, ring, size, from, turn);
    if (turn < to) write_span(berth, first + 1, ring, size, turn, to);
    write_word(berth, first + count - 1, berth->peer.received, berth->peer.received_key, to);
    end_post(found, berth, first, count);
}

// Says that no more will come.
WARPWIRE_CALL void post_end(const Table &table, const Found &found) {
    if (load_gpu(&found.desk->flags) & kFlagEnded) return;
    change_flags(found.desk, 0, kFlagEnded);
    u64 first;
    Berth *berth = begin_post(table, found, 1, &first);
    if (!berth) return;
    write_word(berth, first, berth->peer.received, berth->peer.received_key, load_gpu(&found.desk->sent) | kEnded);
    end_post(found, berth, first, 1);
}

// Tells the peer what was taken, if that is worth it.
WARPWIRE_CALL void report(const Table &table, const Found &found, u64 consumed) {
    if (consumed - load_gpu(&found.desk->reported) < load_system(&found.inbox->report_at)) return;
    store_gpu(&found.desk->reported, consumed);
    u64 first;
    Berth *berth = begin_post(table, found, 1, &first);
    if (!berth) return;
    write_word(berth, first, berth->peer.taken, berth->peer.taken_key, consumed);
    end_post(found, berth, first, 1);
}

// Tells the peer that no more will come, once those who copy now are done. A span that is out is not waited for.
WARPWIRE_CALL void end_sending(const Table &table, const Found &found) {
    Waiter waiter(kLastCall);
    u32 before;
    while ((before = replace(&found.desk->send_lock, kFree, kCopying)) == kCopying)
        if (waiter.step(table)) return;
    post_end(table, found);
    if (before == kFree) store_gpu(&found.desk->send_lock, kFree);
}

// What close does before it asks the host: how many operations were posted.
WARPWIRE_CALL u64 end_both(const Table &table, const Found &found, u64 state) {
    if (!is_warp(state) || !(state & kConnected)) return 0;
    if (!(state & kResets) && !send_error(state)) post_end(table, found);
    Berth *berth = berth_of(table, found);
    return berth ? warpwire::detail::filled(berth->qp.send) : 0;
}

}  // namespace detail
}  // namespace sock
}  // namespace warpwire

#endif

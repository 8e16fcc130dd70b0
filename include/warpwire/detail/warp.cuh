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
constexpr u64 kDeaf = 1ull << 63;                               // in `taken`: no more will be read
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

// Why nothing fits into the peer's ring, for who holds the lock: it reads no more, or it lies.
WARPWIRE_CALL i64 no_room(const Table &table, const Found &found, const Held &held) {
    bool deaf = held.theirs & kDeaf && (held.theirs & ~kDeaf) <= held.ours;
    return deaf ? -kEpipe : give_up(table, found, kEproto);
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

// What posting needs, when the lock for it is held and so many entries are taken.
struct Post {
    Berth *berth;  // null if it cannot be, and then the connection has ended
    u64 first;
    warpwire::detail::Poster poster;
    Peer peer;
};

// The same where it takes longer: the berth is not made, or there is no room. The lock is held.
WARPWIRE_CALL Post begin_slow_post(const Table &table, const Found &found, u32 count) {
    i64 why = kEnotconn;
    Berth *berth = berth_of(table, found);
    if (!berth)
        if (const Wire *wire = reinterpret_cast<const Wire *>(load_system(&found.inbox->wire))) berth = board(table, found, wire);
    if (berth) {
        Waiter waiter(kPosting);
        for (;;) {
            u64 first;
            Status status = warpwire::detail::reserve(warpwire::detail::sends(berth->qp), count, 0, &first);
            if (status == kOk) return Post{berth, first, warpwire::detail::poster(berth->qp), berth->peer};
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
    return Post{nullptr, 0, {}, {}};
}

// Takes the lock for posting and so many entries. `berth` is the desk's word as it was seen before.
WARPWIRE_FN Post begin_post(const Table &table, const Found &found, u32 berth, u32 count) {
    Waiter turn(kPosting);
    while (take(&found.desk->post_lock) != kFree)
        if (turn.step(table)) return Post{nullptr, 0, {}, {}};
    if (berth) {
        Post post;
        post.berth = reinterpret_cast<Berth *>(table.berths) + (berth - 1);
        post.poster = warpwire::detail::poster(post.berth->qp), post.peer = post.berth->peer;
        if (warpwire::detail::reserve_at_once(warpwire::detail::sends(post.berth->qp), count, &post.first) == kOk) return post;
    }
    return begin_slow_post(table, found, count);
}

// Rings for what was filled.
WARPWIRE_FN void end_post(const Found &found, const Post &post, u32 count) {
    warpwire::detail::publish_alone(post.berth->qp, post.poster, post.first + count);
    store_gpu(&found.desk->post_lock, kFree);
}

WARPWIRE_FN void write_span(const Post &post, u64 number, u64 ring, u64 size, u64 from, u64 to) {
    const Peer &peer = post.peer;
    warpwire::detail::Entry e = warpwire::detail::entry(warpwire::detail::kWrite);
    warpwire::detail::add_remote(e, Remote{peer.ring + (from & (peer.ring_size - 1)), peer.ring_key});
    warpwire::detail::add_local(e, Local{ring + (from & (size - 1)), peer.send_key}, static_cast<u32>(to - from));
    warpwire::detail::write_entry(post.poster, number, e);
}
WARPWIRE_FN void write_word(const Post &post, u64 number, u64 at, u32 key, u64 value) {
    warpwire::detail::Entry e = warpwire::detail::entry(warpwire::detail::kWrite);
    warpwire::detail::add_remote(e, Remote{at, key});
    warpwire::detail::add_segment(e, warpwire::detail::big_endian(0x80000000u | 8), static_cast<u32>(value), static_cast<u32>(value >> 32), 0);
    warpwire::detail::write_entry(post.poster, number, e);
}

// Sends what the ring holds from one counter to another, and says so.
WARPWIRE_CALL void post_sent(const Table &table, const Found &found, u32 berth, u64 ring, u64 size, u64 from, u64 to) {
    // The peer's ring is a multiple of ours: it ends where ours does, or not at all.
    u64 turn = least(to, (from | (size - 1)) + 1);
    u32 count = turn < to ? 3 : 2;
    Post post = begin_post(table, found, berth, count);
    if (!post.berth) return;
    write_span(post, post.first, ring, size, from, turn);
    if (turn < to) write_span(post, post.first + 1, ring, size, turn, to);
    write_word(post, post.first + count - 1, post.peer.received, post.peer.received_key, to);
    end_post(found, post, count);
}

// Says that no more will come.
WARPWIRE_CALL void post_end(const Table &table, const Found &found) {
    if (load_gpu(&found.desk->flags) & kFlagEnded) return;
    change_flags(found.desk, 0, kFlagEnded);
    Post post = begin_post(table, found, load_gpu(&found.desk->berth), 1);
    if (!post.berth) return;
    write_word(post, post.first, post.peer.received, post.peer.received_key, load_gpu(&found.desk->sent) | kEnded);
    end_post(found, post, 1);
}

// Tells the peer what was taken, by who holds the lock for receiving.
WARPWIRE_CALL void report(const Table &table, const Found &found, u32 berth, u64 consumed) {
    put_gpu(&found.desk->reported, consumed);
    Post post = begin_post(table, found, berth, 1);
    if (!post.berth) return;
    u64 deaf = load_gpu(&found.desk->flags) & kFlagShutReceive ? kDeaf : 0;
    write_word(post, post.first, post.peer.taken, post.peer.taken_key, consumed | deaf);
    end_post(found, post, 1);
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

// Tells the peer that no more will be read, once those who copy now are done; the desk says so already. Who has a span tells it
// with that.
WARPWIRE_CALL void end_receiving(const Table &table, const Found &found) {
    Waiter waiter(kLastCall);
    u32 before;
    while ((before = replace(&found.desk->receive_lock, kFree, kCopying)) == kCopying)
        if (waiter.step(table)) return;
    if (before != kFree) return;
    report(table, found, load_gpu(&found.desk->berth), load_gpu(&found.desk->consumed));
    store_gpu(&found.desk->receive_lock, kFree);
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

// Servers with several workers: the control words for the host, the listener, and the loop that
// serves connections. serving.rs is the equivalent for the simulated GPU.
//
// A server defines a struct Setup, whose words are named as they are used here, and beside it:
//   counts_of(setup)                   its counters, among them `clients` and `closed`
//   kind_of(setup)                     the kind of its sockets
//   full_reply(setup)                  what a client gets that finds the server full
//   process(setup, worker, c, group)   consumes the input of a connection and appends to its output
#ifndef WARPWIRE_SERVING_CUH
#define WARPWIRE_SERVING_CUH

#include <warpwire/sock.cuh>

namespace serving {

using namespace warpwire;
using namespace warpwire::sock;

struct Control {  // in pinned memory: the host writes stop, the kernel the others
    u64 stop, listener, failed;
    Address name;
};
// A connection, followed by buffers for input (setup.in_size bytes) and output.
struct Connection {
    int socket;
    u32 in_length, out_at, out_length, closing, unused;
    u64 since;  // when partial input or unsent output was first seen
};
static_assert(sizeof(Control) == 48 && sizeof(Connection) == 32, "as in serving.rs");

struct FullReply {
    const void *bytes;
    u64 length;
};

constexpr u64 kPollTimeout = 50ull * 1000 * 1000;

WARPWIRE_FN u8 *in_of(Connection *c) { return reinterpret_cast<u8 *>(c + 1); }
template <class Setup> WARPWIRE_FN u8 *out_of(const Setup &setup, Connection *c) { return in_of(c) + setup.in_size; }

// Adds, and returns the previous value.
WARPWIRE_FN u64 count(u64 *word, u64 by) {
#if WARPWIRE_CUDA
    return atomicAdd(word, by);
#else
    return __atomic_fetch_add(word, by, __ATOMIC_RELAXED);
#endif
}

// Returns the listener, which the first worker opens and the others wait for; negative on failure.
template <class Group>
WARPWIRE_CALL int open_listener(const Table &table, Control *control, const Address &address, SocketKind kind, u32 worker, Group group) {
    if (worker == 0) {
        int listener = sock::socket(table, static_cast<Family>(address.family), kind, group);
        i64 failed = listener < 0 ? listener : bind(table, listener, address, group);
        if (!failed) failed = listen(table, listener, 1024, group);
        if (!failed) failed = sock::set(table, listener, kNonBlocking, 1, group);
        Address name = no_address();
        if (!failed) failed = local_name(table, listener, &name, group);
        group.sync();
        if (group.rank() == 0) {
            control->name = name;
            sock::detail::fence_system();
            if (failed) sock::detail::store_system(&control->failed, static_cast<u64>(-failed));
            else sock::detail::store_system(&control->listener, static_cast<u64>(listener) + 1);
        }
        return failed ? -1 : listener;
    }
    u64 listener = 0;
    if (group.rank() == 0)
        while (!(listener = sock::detail::load_system(&control->listener)) && !sock::detail::load_system(&control->failed) &&
               !sock::detail::load_system(&control->stop))
            sock::detail::poll_backoff();
    return static_cast<int>(group.broadcast(listener)) - 1;
}

template <class Group> WARPWIRE_FN u32 field(Group group, const u32 *word) { return static_cast<u32>(group.broadcast(*word)); }

// Sends the pending output; false if the connection is to be closed.
template <class Setup, class Group>
WARPWIRE_CALL bool flush(const Table &table, const Setup &setup, Connection *c, Group group) {
    u32 at = field(group, &c->out_at), length = field(group, &c->out_length);
    if (at < length) {
        i64 sent = send(table, c->socket, out_of(setup, c) + at, length - at, group);
        if (sent < 0 && sent != -kEagain) return false;
        at += sent > 0 ? static_cast<u32>(sent) : 0;
    }
    group.sync();
    bool empty = at == length;
    if (group.rank() == 0) c->out_at = empty ? 0 : at, c->out_length = empty ? 0 : length;
    group.sync();
    return !(empty && field(group, &c->closing));
}

// Receives and processes input, and sends output; false if the connection is to be closed.
template <class Setup, class Group>
WARPWIRE_CALL bool converse(const Table &table, const Setup &setup, u32 worker, Connection *c, bool readable, Group group) {
    u64 now = group.rank() == 0 ? sock::detail::clock_ns() : 0;
    u32 have = field(group, &c->in_length);
    if (readable && have < setup.in_size && !field(group, &c->out_length)) {
        i64 count = recv(table, c->socket, in_of(c) + have, setup.in_size - have, group);
        if (count == 0 || (count < 0 && count != -kEagain)) return false;
        if (group.rank() == 0 && count > 0) c->in_length = have + static_cast<u32>(count);
    }
    group.sync();
    process(setup, worker, c, group);
    if (!flush(table, setup, c, group)) return false;
    bool late = false;
    if (group.rank() == 0) {
        bool busy = c->in_length || c->out_length;
        if (!busy) c->since = 0;
        else if (!c->since) c->since = now;
        late = busy && now - c->since > setup.idle_timeout;
    }
    return !group.any(late);
}

// Admits a client, or rejects it if the server is full or this worker has no free slot; 1 if
// admitted.
template <class Setup, class Group>
WARPWIRE_CALL u32 greet(const Table &table, const Setup &setup, int socket, Connection *c, Group group) {
    sock::set(table, socket, kNonBlocking, 1, group);
    bool welcome = false;
    if (c && group.rank() == 0) {
        welcome = count(&counts_of(setup)->clients, 1) < setup.max_clients;
        if (!welcome) count(&counts_of(setup)->clients, ~0ull);
    }
    if (!group.any(welcome)) {
        FullReply full = full_reply(setup);
        send(table, socket, full.bytes, full.length, group);
        close(table, socket, group);
        return 0;
    }
    if (group.rank() == 0) *c = Connection{socket, 0, 0, 0, 0, 0, 0};
    group.sync();
    return 1;
}

// One worker: accepts and serves connections until the host stops the server.
template <class Setup, class Group> WARPWIRE_CALL void serve(const Setup &setup, u32 worker, Group group) {
    const Table &table = *reinterpret_cast<const Table *>(setup.table);
    Control *control = reinterpret_cast<Control *>(setup.control);
    PollEntry *list = reinterpret_cast<PollEntry *>(setup.connections) + worker * (setup.per_worker + 1);
    u64 lists = (setup.workers * (setup.per_worker + 1) * sizeof(PollEntry) + 15) / 16 * 16;
    u8 *connections = reinterpret_cast<u8 *>(setup.connections + lists) + worker * setup.per_worker * setup.connection_size;
    auto at = [&](u32 i) { return reinterpret_cast<Connection *>(connections + i * setup.connection_size); };
    int listener = open_listener(table, control, setup.address, kind_of(setup), worker, group);
    if (listener < 0) return;
    u32 mine = 0;
    for (;;) {
        u64 clients = group.broadcast(group.rank() == 0 ? sock::detail::load_gpu(&counts_of(setup)->clients) : 0);
        if (group.broadcast(group.rank() == 0 ? sock::detail::load_system(&control->stop) : 0)) break;
        // Workers with no more than their share of clients accept the next one; if the server is
        // full, all of them accept, to reject.
        bool full = clients >= setup.max_clients, takes = full || (mine < setup.per_worker && mine * setup.workers <= clients);
        group.sync();
        for (u32 i = group.rank(); i < mine; i += group.size()) list[i] = PollEntry{at(i)->socket, at(i)->out_length ? kOut : kIn, 0};
        if (group.rank() == 0) list[mine] = PollEntry{listener, kIn, 0};
        i64 found = poll(table, list, mine + takes, takes ? kPollTimeout : kPollTimeout / 10, group);
        if (found < 0) return;
        bool arrived = takes && group.broadcast(list[mine].revents) != 0;
        WARPWIRE_NO_UNROLL
        for (u32 i = mine; i-- > 0;) {
            u32 events = static_cast<u32>(group.broadcast(list[i].revents));
            Connection *c = at(i);
            bool open = events ? converse(table, setup, worker, c, events & ~static_cast<u32>(kOut), group) : true;
            bool late = false;
            if (!events && group.rank() == 0) late = c->since && sock::detail::clock_ns() - c->since > setup.idle_timeout;
            if (open && !group.any(late)) continue;
            close(table, c->socket, group);
            group.sync();
            if (group.rank() == 0) count(&counts_of(setup)->clients, ~0ull), count(&counts_of(setup)->closed, 1);
            mine--;
            if (i != mine) {
                // Move the last connection, and its list entry, to the free slot.
                sock::detail::copy<false>(group, reinterpret_cast<u8 *>(c), reinterpret_cast<u8 *>(at(mine)), setup.connection_size);
                if (group.rank() == 0) list[i] = list[mine];
            }
            group.sync();
        }
        if (!arrived) continue;
        int socket = accept(table, listener, nullptr, group);
        if (socket < 0) continue;
        mine += greet(table, setup, socket, mine < setup.per_worker ? at(mine) : nullptr, group);
    }
    WARPWIRE_NO_UNROLL
    for (u32 i = 0; i < mine; i++) close(table, at(i)->socket, group);
    if (worker == 0) close(table, listener, group);
}

}  // namespace serving

#endif

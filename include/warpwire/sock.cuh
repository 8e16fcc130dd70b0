// Sockets for GPU kernels: a threadblock connects, accepts, sends and receives as a process does.
//
// The host serves them (`SockHost` in Rust) and passes the address of its table to the kernel. This
// header is CUDA (nvcc, or NVRTC without any other header) and C++17 for CPU threads (g++,
// clang++).
//
//   #include <warpwire/sock.cuh>
//
//   __global__ void echo(const warpwire::sock::Table *table) {
//       using namespace warpwire::sock;
//       __shared__ char buffer[4096];
//       int listener = socket(*table, kIpv4, kStream);
//       if (listener < 0 || bind(*table, listener, ipv4(0, 0, 0, 0, 7)) < 0) return;
//       if (listen(*table, listener, 16) < 0) return;
//       for (;;) {
//           int peer = accept(*table, listener);  // called by all threads of the block
//           if (peer < 0) return;                 // -ECONNABORTED when the host has ended
//           long long count;
//           while ((count = recv(*table, peer, buffer, sizeof buffer)) > 0)
//               send(*table, peer, buffer, count);
//           close(*table, peer);
//       }
//   }
//
// Results. 0 or more: a count of bytes or a handle. Negative: a negated errno (Linux's numbers):
//   kEagain        the socket is non-blocking, and the call would block
//   kEtimedout     the timeout expired, or the peer did not answer
//   kEconnaborted  the host is gone
//   kEbadf         the socket is not open; a generation in the handle rules out reuse
//   kEbusy         close: a span is reserved or borrowed
// Streams. recv returns available bytes, at most as many as requested, and 0 at the end. send on a
//   blocking socket sends everything; if it fails or times out after a part, it returns that part.
// Datagrams. send_to and recv_from transfer one datagram; bytes beyond the buffer are discarded.
// Families. kStream and kDatagram are TCP and UDP, to any peer. kWarpStream is a stream between
//   kernels and CPU programs that use the library: the sender writes into the peer's ring by RDMA,
//   without the host. All calls are the same for both. There are no datagrams over RDMA: `socket`
//   refuses every other kind with kEsocktnosupport.
// Groups. The last argument is the calling group: Block{}, the default: all threads of the block
//   together, with the same arguments; Warp{}: all lanes of a warp; Thread{}: this thread. All
//   threads of the group get the result.
// Sharing. Any number of groups may use one socket. One group at a time uses a direction; others
//   wait, or get kEagain. A send that is longer than the ring may interleave with another one.
// Waiting. Every blocking call returns: on timeout (kSendTimeout, kReceiveTimeout), when the peer
//   closes or resets the connection, when another group closes the socket, and when the host ends.
// Zero-copy. borrow returns received bytes in the ring, consume ends it; reserve returns a part of
//   the send ring to be filled, commit sends it. A span ends at the end of the ring, so it may be
//   shorter than requested.
#ifndef WARPWIRE_SOCK_CUH
#define WARPWIRE_SOCK_CUH

#include <warpwire/verbs.cuh>

namespace warpwire {
namespace sock {

enum Errno : int {
    kEintr = 4, kEbadf = 9, kEagain = 11, kEbusy = 16, kEinval = 22, kEmfile = 24, kEpipe = 32, kEnosys = 38,
    kEproto = 71, kEilseq = 84, kEdestaddrreq = 89, kEmsgsize = 90, kEnoprotoopt = 92, kEsocktnosupport = 94,
    kEopnotsupp = 95, kEafnosupport = 97, kEaddrinuse = 98, kEaddrnotavail = 99, kEnetunreach = 101,
    kEconnaborted = 103, kEconnreset = 104, kEnobufs = 105, kEisconn = 106, kEnotconn = 107,
    kEtimedout = 110, kEconnrefused = 111, kEhostunreach = 113, kEalready = 114, kEinprogress = 115,
};

enum Family : int { kIpv4 = 4, kIpv6 = 6 };
// TCP streams and UDP datagrams through the host; `warp` streams: RDMA between the rings of both
// ends.
enum SocketKind : int { kStream = 1, kDatagram = 2, kWarpStream = 3 };
enum ShutdownHow : int { kShutReceive = 0, kShutSend = 1, kShutBoth = 2 };

// Socket options; `layout.rs` has the same numbers and documents them.
enum SockOption : u32 {
    kNonBlocking = 1, kSendTimeout, kReceiveTimeout, kSendBuffer, kReceiveBuffer, kNoDelay, kLinger, kError,
    kReuseAddress, kKeepAlive, kBroadcast, kV6Only,
};

// Event bits of poll, with Linux's values.
enum Events : u16 { kIn = 0x1, kOut = 0x4, kErr = 0x8, kHup = 0x10, kNval = 0x20, kRdhup = 0x2000 };

// An address. The port is in host byte order, the IP address in network byte order.
struct Address {
    u16 family;  // kIpv4, kIpv6, or 0 for none
    u16 port;
    u32 scope;
    u8 ip[16];
};

struct PollEntry {
    int socket;
    u16 events;
    u16 revents;  // requested events that are ready; kErr, kHup, kNval in any case
};

// A contiguous part of a ring that the caller owns until it commits or consumes it.
struct RingSpan {
    void *bytes;
    i64 length;  // 0: end of the stream; negative: a negated errno
};

WARPWIRE_FN Address no_address() { return Address{0, 0, 0, {0}}; }
WARPWIRE_FN Address ipv4(u8 a, u8 b, u8 c, u8 d, u16 port) {
    return Address{kIpv4, port, 0, {a, b, c, d, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0}};
}
// From the eight groups of the text form: ipv6(0, 0, 0, 0, 0, 0, 0, 1, port) is ::1.
WARPWIRE_FN Address ipv6(u16 a, u16 b, u16 c, u16 d, u16 e, u16 f, u16 g, u16 h, u16 port) {
    u16 groups[8] = {a, b, c, d, e, f, g, h};
    Address address = Address{kIpv6, port, 0, {0}};
    for (int i = 0; i < 8; i++) address.ip[2 * i] = static_cast<u8>(groups[i] >> 8), address.ip[2 * i + 1] = static_cast<u8>(groups[i]);
    return address;
}

// -------------------------------------------------------------------------------------------------
// Memory shared with the host; `layout.rs` defines and documents the same.

constexpr u32 kVersion = 5;

struct Table {
    u32 version, sockets, slots, heartbeat_timeout_ms;
    u64 host_state, device_counters, device_states, requests, replies, slot_laps, ticket, heartbeat, qp_slots, activity;
    u32 activity_shift, unused[7];
};
struct Heartbeat {
    u64 count;
    u32 closed, unused;
};
// Written by the host; `received` and `taken` of `warp` sockets by the peer's HCA.
struct HostSocketState {
    u64 state, received, taken, receive_ring, send_ring;
    u32 receive_size, send_size;
    u64 qp_descriptor;
    u32 report_at, unused;
};
struct DeviceCounters {  // written by kernels, polled by the host
    u32 sent, consumed;
};
struct DeviceSocketState {  // used by kernels only
    u32 generation, flags;
    u64 sent, consumed;
    u32 send_lock, receive_lock;
    u64 send_timeout, receive_timeout, reported;
    u32 post_lock, qp_slot;
};
struct Request {
    u64 number;
    u32 op;
    int handle;
    u64 value;
    u32 option, unused;
    Address address;
    u64 more;
};
struct Reply {
    u64 number;
    i64 result;
    Address address;
    u64 unused[3];
};
struct Record {  // header of a datagram, or an accepted connection
    u32 value, error;
    Address address;
};
static_assert(sizeof(Address) == 24 && sizeof(Table) == 128 && sizeof(HostSocketState) == 64 && sizeof(DeviceCounters) == 8, "as in layout.rs");
static_assert(sizeof(DeviceSocketState) == 64 && sizeof(Request) == 64 && sizeof(Reply) == 64 && sizeof(Record) == 32, "as in layout.rs");
static_assert(sizeof(PollEntry) == 8, "as in the tests");

}  // namespace sock
}  // namespace warpwire

#include <warpwire/detail/sock.cuh>

namespace warpwire {
namespace sock {

// -------------------------------------------------------------------------------------------------
// Create, bind, connect, close, options

template <class Group = Block> WARPWIRE_FN int socket(const Table &table, Family family, SocketKind kind, Group group = Group()) {
    i64 made = 0;
    if (group.rank() == 0) {
        made = detail::request_host(table, detail::kSocket, 0, static_cast<u64>(family) | static_cast<u64>(kind) << 8, 0, nullptr, nullptr);
        if (made >= 0) detail::init_device_state(table, static_cast<int>(made));
    }
    return detail::broadcast(group, made);
}

// Binds to a local address; with port 0 the system chooses one (see local_name).
template <class Group = Block> WARPWIRE_FN int bind(const Table &table, int socket, Address address, Group group = Group()) {
    return detail::request_for(table, detail::kBind, socket, 0, &address, nullptr, group);
}

// Up to `backlog` connections, clamped to 1 to 4096, wait for accept.
template <class Group = Block> WARPWIRE_FN int listen(const Table &table, int socket, u32 backlog, Group group = Group()) {
    return detail::request_for(table, detail::kListen, socket, backlog, nullptr, nullptr, group);
}

// Accepts a connection; blocks until there is one. `from`, if given, is set to the peer's address.
template <class Group = Block> WARPWIRE_FN int accept(const Table &table, int listener, Address *from = nullptr, Group group = Group()) {
    i64 made = 0;
    group.sync();
    if (group.rank() == 0) made = detail::accept_thread(table, listener, from);
    return detail::broadcast(group, made);
}

// Connects a stream, or sets the peer of a datagram socket. A non-blocking stream returns
// -kEinprogress.
template <class Group = Block> WARPWIRE_FN int connect(const Table &table, int socket, Address to, Group group = Group()) {
    i64 result = 0;
    if (group.rank() == 0) result = detail::connect_thread(table, socket, to);
    return detail::broadcast(group, result);
}

// Shuts down a direction. Bytes that were sent before are still delivered.
template <class Group = Block> WARPWIRE_FN int shutdown(const Table &table, int socket, ShutdownHow how, Group group = Group()) {
    i64 result = 0;
    group.sync();
    if (group.rank() == 0) result = detail::shutdown_thread(table, socket, how);
    return detail::broadcast(group, result);
}

// Closes a socket. Bytes that were sent are still delivered; calls of other groups return -kEbadf.
template <class Group = Block> WARPWIRE_FN int close(const Table &table, int socket, Group group = Group()) {
    i64 result = 0;
    group.sync();
    if (group.rank() == 0) result = detail::close_thread(table, socket);
    return detail::broadcast(group, result);
}

template <class Group = Block> WARPWIRE_FN int set(const Table &table, int socket, SockOption option, i64 value, Group group = Group()) {
    i64 result = 0;
    group.sync();
    if (group.rank() == 0) result = detail::set_thread(table, socket, option, value);
    return detail::broadcast(group, result);
}

// The value, or a negated errno. The only negative value is -1 (kLinger); no option fails with
// EPERM, so they cannot be confused.
template <class Group = Block> WARPWIRE_FN i64 get(const Table &table, int socket, SockOption option, Group group = Group()) {
    i64 result = 0;
    group.sync();
    if (group.rank() == 0) result = detail::get_thread(table, socket, option);
    return static_cast<i64>(group.broadcast(static_cast<u64>(result)));
}

template <class Group = Block> WARPWIRE_FN int local_name(const Table &table, int socket, Address *name, Group group = Group()) {
    return detail::request_for(table, detail::kLocalName, socket, 0, nullptr, name, group);
}
template <class Group = Block> WARPWIRE_FN int peer_name(const Table &table, int socket, Address *name, Group group = Group()) {
    return detail::request_for(table, detail::kPeerName, socket, 0, nullptr, name, group);
}

// -------------------------------------------------------------------------------------------------
// Send and receive

template <class Group = Block> WARPWIRE_CALL i64 send(const Table &table, int socket, const void *bytes, u64 length, Group group = Group()) {
    u64 done = 0;
    detail::SocketRef ref = detail::find(table, socket);
    group.sync();  // so that what any thread of the group wrote is sent
    for (;;) {
        detail::RingCopy ring_copy = detail::RingCopy();
        detail::HeldRing held;
        if (group.rank() == 0) ring_copy = detail::begin_send(table, ref, length - done, nullptr, true, &held);
        ring_copy = detail::broadcast(group, ring_copy);
        if (ring_copy.result < 0) return done ? static_cast<i64>(done) : ring_copy.result;
        if (ring_copy.advance) {
            detail::copy_in(group, ring_copy, static_cast<const u8 *>(bytes) + done);
            group.sync();
            if (group.rank() == 0) detail::end_send(table, ref, held, ring_copy);
        }
        done += static_cast<u64>(ring_copy.result);
        if (done >= length) return static_cast<i64>(done);
    }
}

// Sends one datagram to an address.
template <class Group = Block>
WARPWIRE_FN i64 send_to(const Table &table, int socket, const void *bytes, u64 length, Address to, Group group = Group()) {
    detail::SocketRef ref = detail::find(table, socket);
    detail::RingCopy ring_copy = detail::RingCopy();
    detail::HeldRing held;
    group.sync();
    if (group.rank() == 0) ring_copy = detail::begin_send(table, ref, length, &to, false, &held);
    ring_copy = detail::broadcast(group, ring_copy);
    if (ring_copy.result < 0) return ring_copy.result;
    detail::copy_in(group, ring_copy, static_cast<const u8 *>(bytes));
    group.sync();
    if (group.rank() == 0) detail::end_send(table, ref, held, ring_copy);
    return ring_copy.result;
}

// Receives available bytes; blocks until there are some. 0 at the end. `from`, if given, is set to
// the sender of a datagram.
template <class Group = Block>
WARPWIRE_CALL i64 recv_from(const Table &table, int socket, void *into, u64 length, Address *from, Group group = Group()) {
    detail::SocketRef ref = detail::find(table, socket);
    detail::RingCopy ring_copy = detail::RingCopy();
    detail::HeldRing held;
    group.sync();  // no thread of the group still reads `into`
    if (group.rank() == 0) ring_copy = detail::begin_receive(table, ref, length, from, &held);
    ring_copy = detail::broadcast(group, ring_copy);
    if (!ring_copy.advance) return ring_copy.result;
    if (ring_copy.result > 0) detail::copy_out(group, ring_copy, static_cast<u8 *>(into));
    group.sync();
    if (group.rank() == 0) detail::end_receive(table, ref, held, ring_copy);
    return ring_copy.result;
}
template <class Group = Block> WARPWIRE_FN i64 recv(const Table &table, int socket, void *into, u64 length, Group group = Group()) {
    return recv_from(table, socket, into, length, nullptr, group);
}

// Receives until `into` is full or the stream ends or fails; returns the number of bytes received.
template <class Group = Block> WARPWIRE_FN i64 recv_all(const Table &table, int socket, void *into, u64 length, Group group = Group()) {
    u64 done = 0;
    while (done < length) {
        i64 count = recv(table, socket, static_cast<u8 *>(into) + done, length - done, group);
        if (count <= 0) return done ? static_cast<i64>(done) : count;
        done += static_cast<u64>(count);
    }
    return static_cast<i64>(done);
}

// Borrows up to `max_len` received bytes in the ring.
template <class Group = Block> WARPWIRE_FN RingSpan borrow(const Table &table, int socket, u64 max_len, Group group = Group()) {
    RingSpan span = {nullptr, 0};
    group.sync();
    if (group.rank() == 0) span = detail::borrow_thread(table, socket, max_len);
    return detail::broadcast(group, span);
}
// Ends a borrowed span: the first `used` bytes are consumed, the others are received again.
template <class Group = Block> WARPWIRE_FN int consume(const Table &table, int socket, u64 used, Group group = Group()) {
    i64 result = 0;
    group.sync();
    if (group.rank() == 0) result = detail::consume_thread(table, socket, used);
    return detail::broadcast(group, result);
}
// Reserves up to `max_len` bytes of the send ring.
template <class Group = Block> WARPWIRE_FN RingSpan reserve(const Table &table, int socket, u64 max_len, Group group = Group()) {
    RingSpan span = {nullptr, 0};
    group.sync();
    if (group.rank() == 0) span = detail::reserve_thread(table, socket, max_len);
    return detail::broadcast(group, span);
}
// Sends the first `filled` bytes of the reserved span; 0 only ends the reservation.
template <class Group = Block> WARPWIRE_FN int commit(const Table &table, int socket, u64 filled, Group group = Group()) {
    i64 result = 0;
    group.sync();
    if (group.rank() == 0) result = detail::commit_thread(table, socket, filled);
    return detail::broadcast(group, result);
}

// Waits until an entry has an event or the timeout (nanoseconds, or kNoTimeout) expires, and
// returns the number of entries with events. Events that were not requested do not end the wait.
// The list must be in memory that all threads of the group can access.
template <class Group = Block>
WARPWIRE_CALL int poll(const Table &table, PollEntry *list, u32 count, u64 timeout, Group group = Group()) {
    detail::Waiter waiter(timeout);
    for (;;) {
        bool mine = false;
        group.sync();
        for (u32 i = group.rank(); i < count; i += group.size()) {
            u32 revents = detail::ready(table, list[i].socket) & (list[i].events | kErr | kHup | kNval);
            list[i].revents = static_cast<u16>(revents);
            mine |= revents != 0;
        }
        if (group.any(mine)) break;
        i64 stop = 0;
        if (group.rank() == 0) stop = waiter.step(table);
        stop = detail::broadcast(group, stop);
        if (stop == -kEagain || stop == -kEtimedout) return 0;
        if (stop) return static_cast<int>(stop);
    }
    i64 ready = 0;
    group.sync();
    if (group.rank() == 0)
        for (u32 i = 0; i < count; i++) ready += list[i].revents != 0;
    return detail::broadcast(group, ready);
}

}  // namespace sock
}  // namespace warpwire

#endif

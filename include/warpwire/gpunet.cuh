// GPUnet's API on top of <warpwire/sock.cuh>: kernels written for it compile with a changed
// include.
//
// Differences: the end of a stream is 0, a reset or a dead host is a negated errno, and events that
// were not requested do not end gpoll. A loop that receives until it has everything must therefore
// end at 0, which GPUnet never returned.
//
// Setup, once: the host calls `SockHost::use_gpunet` with the loaded module before the kernel
// starts, and the kernel is unchanged; or the kernel calls gpunet_use(table) first, in each module.
// With kWarpStream, streams use RDMA, to kernels and to programs that use this library.
//
// Stream calls are made by all threads of a block together; single_thread_* by one thread. Between
// BEGIN_SINGLE_THREAD_PART and END_SINGLE_THREAD_PART one thread of the block runs, and the others
// wait.
#ifndef WARPWIRE_GPUNET_CUH
#define WARPWIRE_GPUNET_CUH

#include <warpwire/sock.cuh>

#if WARPWIRE_CUDA
#define WARPWIRE_GPUNET_GLOBAL static __device__
#else
#define WARPWIRE_GPUNET_GLOBAL static
#endif

typedef unsigned char uchar;  // used by GPUnet programs for buffers

// The address of the table: set by the host through the symbol, or by the kernel with gpunet_use.
WARPWIRE_GPUNET_GLOBAL unsigned long long warpwire_gpunet_table;

WARPWIRE_FN const warpwire::sock::Table &gpunet_table() {
    return *reinterpret_cast<const warpwire::sock::Table *>(warpwire_gpunet_table);
}

// Kind of streams: kStream (TCP through the host) or kWarpStream (RDMA, as GPUnet's own).
WARPWIRE_GPUNET_GLOBAL unsigned warpwire_gpunet_kind = warpwire::sock::kStream;

WARPWIRE_FN warpwire::sock::SocketKind gpunet_kind() { return static_cast<warpwire::sock::SocketKind>(warpwire_gpunet_kind); }
WARPWIRE_FN void gpunet_use(unsigned long long table, warpwire::sock::SocketKind kind = warpwire::sock::kStream) {
    warpwire_gpunet_table = table;
    warpwire_gpunet_kind = kind;
}

// -------------------------------------------------------------------------------------------------
// Addresses, as in C. NVRTC has no system headers; otherwise their types are used.

#if !defined(__CUDACC_RTC__)
#include <netinet/in.h>
#include <poll.h>
#include <stdio.h>
#include <sys/socket.h>
#else
#ifndef AF_INET
#define AF_INET 2
#endif
#ifndef AF_INET6
#define AF_INET6 10
#endif
#ifndef SOCK_STREAM
#define SOCK_STREAM 1
#define SOCK_DGRAM 2
#endif
#ifndef SHUT_RDWR
#define SHUT_RD 0
#define SHUT_WR 1
#define SHUT_RDWR 2
#endif
#ifndef POLLIN
#define POLLIN 0x1
#define POLLOUT 0x4
#define POLLERR 0x8
#define POLLHUP 0x10
#define POLLNVAL 0x20
#endif
struct in_addr {
    unsigned int s_addr;
};
struct sockaddr {
    unsigned short sa_family;
    char sa_data[14];
};
struct sockaddr_in {
    unsigned short sin_family, sin_port;  // the port in network byte order
    in_addr sin_addr;
    unsigned char sin_zero[8];
};
#endif

WARPWIRE_FN warpwire::sock::Address gpunet_address(const sockaddr_in *from) {
    unsigned short port = static_cast<unsigned short>(from->sin_port >> 8 | from->sin_port << 8);
    unsigned int ip = from->sin_addr.s_addr;  // network byte order: the first byte is the lowest
    return warpwire::sock::ipv4(static_cast<unsigned char>(ip), static_cast<unsigned char>(ip >> 8),
                                static_cast<unsigned char>(ip >> 16), static_cast<unsigned char>(ip >> 24), port);
}
WARPWIRE_FN void gpunet_name(sockaddr_in *into, const warpwire::sock::Address &from) {
    into->sin_family = AF_INET;
    into->sin_port = static_cast<unsigned short>(from.port >> 8 | from.port << 8);
    into->sin_addr.s_addr = from.ip[0] | from.ip[1] << 8 | from.ip[2] << 16 | static_cast<unsigned int>(from.ip[3]) << 24;
}

// -------------------------------------------------------------------------------------------------
// Code for one thread of the block

#if WARPWIRE_CUDA
#define GPUNET_IS_FIRST (threadIdx.x + threadIdx.y + threadIdx.z == 0)
#define GPUNET_SYNC __syncthreads()
#else
#define GPUNET_IS_FIRST true
#define GPUNET_SYNC (void)0
#endif
#define BEGIN_SINGLE_THREAD_PART GPUNET_SYNC; if (GPUNET_IS_FIRST) {
#define END_SINGLE_THREAD_PART } GPUNET_SYNC;
#define BEGIN_SINGLE_THREAD BEGIN_SINGLE_THREAD_PART
#define END_SINGLE_THREAD END_SINGLE_THREAD_PART

// -------------------------------------------------------------------------------------------------
// Streams

// Creates an IPv4 socket; only `kind` is used.
WARPWIRE_FN int gsocket(int, int kind, int) {
    using namespace warpwire::sock;
    return warpwire::sock::socket(gpunet_table(), kIpv4, kind == SOCK_DGRAM ? kDatagram : gpunet_kind());
}

// Connects a new stream; called by all threads of the block.
WARPWIRE_FN int gconnect_in(const sockaddr_in *to) {
    using namespace warpwire::sock;
    int made = warpwire::sock::socket(gpunet_table(), kIpv4, gpunet_kind());
    if (made < 0) return made;
    int result = warpwire::sock::connect(gpunet_table(), made, gpunet_address(to));
    if (result == 0) return made;
    warpwire::sock::close(gpunet_table(), made);
    return result;
}
WARPWIRE_FN int gconnect_bounce_in(const sockaddr_in *to) { return gconnect_in(to); }
WARPWIRE_FN int gconnect_ib(const sockaddr_in *to) { return gconnect_in(to); }
// Sets the peer of a datagram socket.
WARPWIRE_FN int gconnect_in(int sock, const sockaddr_in *to) { return warpwire::sock::connect(gpunet_table(), sock, gpunet_address(to)); }

// Binds and listens; called by one thread.
WARPWIRE_FN int single_thread_gbind_in(const sockaddr_in *at) {
    using namespace warpwire::sock;
    int made = warpwire::sock::socket(gpunet_table(), kIpv4, gpunet_kind(), warpwire::Thread());
    if (made < 0) return made;
    int result = warpwire::sock::bind(gpunet_table(), made, gpunet_address(at), warpwire::Thread());
    if (result == 0) result = warpwire::sock::listen(gpunet_table(), made, 256, warpwire::Thread());
    if (result == 0) return made;
    warpwire::sock::close(gpunet_table(), made, warpwire::Thread());
    return result;
}
WARPWIRE_FN int single_thread_gbind_bounce_in(const sockaddr_in *at) { return single_thread_gbind_in(at); }
WARPWIRE_FN int single_thread_gbind(const sockaddr *at, unsigned long) {
    if (at->sa_family != AF_INET) return -warpwire::sock::kEafnosupport;
    return single_thread_gbind_in(reinterpret_cast<const sockaddr_in *>(at));
}

WARPWIRE_FN int gaccept(int listener) { return warpwire::sock::accept(gpunet_table(), listener); }
// Accepts a connection if one is waiting, else returns -11 (EAGAIN); for listeners used by one
// block.
WARPWIRE_FN int gaccept_nb(int listener) {
    warpwire::sock::PollEntry one = {listener, warpwire::sock::kIn, 0};
    if (warpwire::sock::poll(gpunet_table(), &one, 1, 0, warpwire::Thread()) == 0) one.socket = -warpwire::sock::kEagain;
    // All threads of the block must agree: broadcast the first thread's result.
    int ready = static_cast<int>(static_cast<long long>(warpwire::Block().broadcast(static_cast<unsigned long long>(static_cast<long long>(one.socket)))));
    return ready < 0 ? ready : warpwire::sock::accept(gpunet_table(), listener);
}

WARPWIRE_FN int gsend(int sock, const void *bytes, unsigned long long length) {
    return static_cast<int>(warpwire::sock::send(gpunet_table(), sock, bytes, length));
}
WARPWIRE_FN int grecv(int sock, void *into, unsigned long long length) {
    return static_cast<int>(warpwire::sock::recv(gpunet_table(), sock, into, length));
}
WARPWIRE_FN int single_thread_gshutdown(int sock, int how = SHUT_RDWR) {
    return warpwire::sock::shutdown(gpunet_table(), sock, static_cast<warpwire::sock::ShutdownHow>(how), warpwire::Thread());
}
WARPWIRE_FN int single_thread_gclose(int sock) { return warpwire::sock::close(gpunet_table(), sock, warpwire::Thread()); }
WARPWIRE_FN int gshutdown(int sock, int how) {
    return warpwire::sock::shutdown(gpunet_table(), sock, static_cast<warpwire::sock::ShutdownHow>(how));
}
WARPWIRE_FN int gclose(int sock) { return warpwire::sock::close(gpunet_table(), sock); }

// Whether calls block; if not, they return -11 (EAGAIN) instead.
WARPWIRE_FN int gsetsock_block(int sock, bool block) {
    return warpwire::sock::set(gpunet_table(), sock, warpwire::sock::kNonBlocking, !block);
}
WARPWIRE_FN bool ggetsock_block(int sock) { return warpwire::sock::get(gpunet_table(), sock, warpwire::sock::kNonBlocking) == 0; }

// -------------------------------------------------------------------------------------------------
// Datagrams, always over UDP

WARPWIRE_FN int gsendto(int sock, const void *bytes, unsigned long long length, const sockaddr_in *to) {
    return static_cast<int>(warpwire::sock::send_to(gpunet_table(), sock, bytes, length, gpunet_address(to)));
}
WARPWIRE_FN int grecvfrom(int sock, void *into, unsigned long long length, sockaddr_in *from) {
    warpwire::sock::Address name = warpwire::sock::no_address();
    int count = static_cast<int>(warpwire::sock::recv_from(gpunet_table(), sock, into, length, &name));
    if (from && count >= 0 && GPUNET_IS_FIRST) gpunet_name(from, name);
    GPUNET_SYNC;
    return count;
}

// -------------------------------------------------------------------------------------------------
// Poll. The list must be in memory that all threads of the block can access. The timeout is in
// nanoseconds; negative means none.

struct gpollfd {
    int fd;
    short events, revents;
    unsigned rbytes, wbytes;  // set to the bytes that can be received and sent
};

WARPWIRE_FN void gpunet_poll_one(gpollfd *entry) {
    using namespace warpwire::sock::detail;
    unsigned asked = static_cast<unsigned short>(entry->events) | warpwire::sock::kErr | warpwire::sock::kHup | warpwire::sock::kNval;
    entry->revents = static_cast<short>(ready(gpunet_table(), entry->fd) & asked);
    entry->rbytes = entry->wbytes = 0;
    SocketRef ref = find(gpunet_table(), entry->fd);
    StateSnapshot snapshot = take_snapshot(ref, &warpwire::sock::DeviceSocketState::receive_timeout);
    if (!(snapshot.state & kConnected)) return;
    Levels level = levels(ref, snapshot);
    entry->rbytes = static_cast<unsigned>(level.waiting);
    if (!(snapshot.state & kSendEnd)) entry->wbytes = static_cast<unsigned>(level.free);
}

WARPWIRE_FN int gpoll(gpollfd *list, unsigned long count, long long nanoseconds) {
    warpwire::Block block;
    warpwire::sock::detail::Waiter waiter(nanoseconds < 0 ? warpwire::kNoTimeout : static_cast<warpwire::u64>(nanoseconds));
    for (;;) {
        bool mine = false;
        block.sync();
        for (unsigned long i = block.rank(); i < count; i += block.size()) {
            gpunet_poll_one(&list[i]);
            mine |= list[i].revents != 0;
        }
        if (block.any(mine)) break;
        warpwire::i64 stop = 0;
        if (block.rank() == 0) stop = waiter.step(gpunet_table());
        stop = warpwire::sock::detail::broadcast(block, stop);
        if (stop == -warpwire::sock::kEagain || stop == -warpwire::sock::kEtimedout) return 0;
        if (stop) return static_cast<int>(stop);
    }
    warpwire::i64 ready_count = 0;
    block.sync();
    if (block.rank() == 0)
        for (unsigned long i = 0; i < count; i++) ready_count += list[i].revents != 0;
    return warpwire::sock::detail::broadcast(block, ready_count);
}

// -------------------------------------------------------------------------------------------------
// Helpers used by GPUnet's samples

struct gtimeval {
    long tv_sec, tv_usec;
};
// The device's clock; called by all threads of the block. Only differences are meaningful.
WARPWIRE_FN void ggettimeofday(gtimeval *into) {
    unsigned long long now = warpwire::Block().broadcast(warpwire::sock::detail::clock_ns());
    if (GPUNET_IS_FIRST) into->tv_sec = static_cast<long>(now / 1000000000), into->tv_usec = static_cast<long>(now % 1000000000 / 1000);
    GPUNET_SYNC;
}
// c = a - b
WARPWIRE_FN void gtimersub(const gtimeval *a, const gtimeval *b, gtimeval *c) {
    long micros = a->tv_usec - b->tv_usec;
    c->tv_sec = a->tv_sec - b->tv_sec - (micros < 0 ? 1 : 0);
    c->tv_usec = micros < 0 ? micros + 1000000 : micros;
}
// Prints a line with up to four numbers; called by one thread.
WARPWIRE_FN void gprintf4_single(const char *text, int a, int b, int c, int d) { printf(text, a, b, c, d); }

#endif

// Small programs that use sockets inside kernels: a server that echoes, discards or answers HTTP,
// and a benchmark client. blocks.rs has the equivalents for the simulated GPU; mod.rs defines the
// setup.
#include <warpwire/sock.cuh>

using namespace warpwire;
using namespace warpwire::sock;

namespace {

// As in mod.rs.
struct Setup {
    u64 table, control, buffers, buffer_size, mode, size, rounds, timeout, kind;
    Address address;
};
struct Control {  // in pinned memory: the host writes stop, the kernel the others
    u64 stop, listener, failed, nanoseconds, bytes, connections, unused;
    Address name;
};
static_assert(sizeof(Setup) == 96 && sizeof(Control) == 80, "as in mod.rs");

enum Mode : u64 { kEcho = 0, kSink = 1, kHttp = 2, kPing = 3, kPush = 4, kPull = 5, kTalk = 6 };

WARPWIRE_FN void say(u64 *word, u64 value) {
    sock::detail::fence_system();
    sock::detail::store_system(word, value);
}

template <class Group> WARPWIRE_CALL int open_listener(const Table &table, const Setup &setup, u32 worker, Group group) {
    Control *control = reinterpret_cast<Control *>(setup.control);
    if (worker) {
        u64 listener = 0;
        if (group.rank() == 0)
            while (!(listener = sock::detail::load_system(&control->listener)) && !sock::detail::load_system(&control->failed) &&
                   !sock::detail::load_system(&control->stop))
                sock::detail::poll_backoff();
        return static_cast<int>(group.broadcast(listener)) - 1;
    }
    int listener = sock::socket(table, static_cast<Family>(setup.address.family), static_cast<SocketKind>(setup.kind), group);
    i64 failed = listener < 0 ? listener : bind(table, listener, setup.address, group);
    if (!failed) failed = listen(table, listener, 256, group);
    if (!failed) failed = set(table, listener, kReceiveTimeout, static_cast<i64>(setup.timeout), group);
    Address name = no_address();
    if (!failed) failed = local_name(table, listener, &name, group);
    if (group.rank() == 0) {
        control->name = name;
        say(failed ? &control->failed : &control->listener, failed ? static_cast<u64>(-failed) : static_cast<u64>(listener) + 1);
    }
    return failed ? -1 : listener;
}

template <class Group> WARPWIRE_FN bool stopped(const Control *control, Group group) {
    return group.broadcast(group.rank() == 0 ? sock::detail::load_system(&control->stop) : 0) != 0;
}

// Reads a request up to its empty line, then replies with a fixed body.
template <class Group> WARPWIRE_CALL void answer_http(const Table &table, const Setup &setup, int peer, u8 *buffer, Group group) {
    const char *head = "HTTP/1.1 200 OK\r\nContent-Type: text/plain\r\nConnection: close\r\nContent-Length: ";
    const char *body = "hello from a kernel\n";
    u64 have = 0;
    bool whole = false;
    while (!whole && have < setup.buffer_size / 2) {
        i64 count = recv(table, peer, buffer + have, setup.buffer_size / 2 - have, group);
        if (count <= 0) return;
        have += static_cast<u64>(count);
        bool mine = false;
        for (u64 i = group.rank(); i + 3 < have; i += group.size())
            mine |= buffer[i] == '\r' && buffer[i + 1] == '\n' && buffer[i + 2] == '\r' && buffer[i + 3] == '\n';
        whole = group.any(mine);
    }
    u8 *out = buffer + setup.buffer_size / 2;
    u64 length = 0;
    if (group.rank() == 0) {
        if (!whole) head = "HTTP/1.1 431 Request Header Fields Too Large\r\nConnection: close\r\nContent-Length: ";
        while (*head) out[length++] = static_cast<u8>(*head++);
        for (const char *text = "20\r\n\r\n"; *text; text++) out[length++] = static_cast<u8>(*text);
        while (*body) out[length++] = static_cast<u8>(*body++);
    }
    send(table, peer, out, group.broadcast(length), group);
}

template <class Group> WARPWIRE_CALL u64 serve_one(const Table &table, const Setup &setup, int peer, u8 *buffer, Group group) {
    Control *control = reinterpret_cast<Control *>(setup.control);
    u64 total = 0;
    if (setup.mode == kHttp) {
        set(table, peer, kReceiveTimeout, 5000000000ll, group);
        answer_http(table, setup, peer, buffer, group);
        return 0;
    }
    set(table, peer, kReceiveTimeout, static_cast<i64>(setup.timeout), group);
    for (;;) {
        i64 count = recv(table, peer, buffer, setup.buffer_size, group);
        if (count == -kEtimedout && !stopped(control, group)) continue;
        if (count == 0 && setup.mode == kSink) send(table, peer, buffer, 1, group);
        if (count <= 0) return total;
        total += static_cast<u64>(count);
        if (setup.mode == kEcho && send(table, peer, buffer, static_cast<u64>(count), group) < 0) return total;
    }
}

template <class Group> WARPWIRE_CALL void serve(const Setup &setup, u32 worker, Group group) {
    const Table &table = *reinterpret_cast<const Table *>(setup.table);
    Control *control = reinterpret_cast<Control *>(setup.control);
    u8 *buffer = reinterpret_cast<u8 *>(setup.buffers + worker * setup.buffer_size);
    int listener = open_listener(table, setup, worker, group);
    while (listener >= 0 && !stopped(control, group)) {
        int peer = accept(table, listener, nullptr, group);
        if (peer == -kEtimedout || peer == -kEagain) continue;
        if (peer < 0) return;
        serve_one(table, setup, peer, buffer, group);
        close(table, peer, group);
    }
    if (listener >= 0 && worker == 0) close(table, listener, group);
}

// Ping: `rounds` round trips. Push: `rounds` messages, acknowledged by one byte. Pull: receives
// `rounds` messages. Talk: one request, then everything that the peer sends until it closes.
template <class Group> WARPWIRE_CALL i64 measure(const Table &table, const Setup &setup, int peer, u8 *buffer, u64 *bytes, Group group) {
    if (setup.mode == kTalk) {
        i64 sent = send(table, peer, buffer, setup.size, group);
        while (sent >= 0 && *bytes < setup.buffer_size) {
            i64 came = recv(table, peer, buffer + *bytes, setup.buffer_size - *bytes, group);
            if (came <= 0) return came;
            *bytes += static_cast<u64>(came);
        }
        return sent;
    }
    for (u64 round = 0; round < setup.rounds; round++) {
        if (setup.mode == kPing || setup.mode == kPush) {
            i64 sent = send(table, peer, buffer, setup.size, group);
            if (sent < 0) return sent;
            *bytes += static_cast<u64>(sent);
        }
        if (setup.mode == kPing || setup.mode == kPull) {
            i64 came = recv_all(table, peer, buffer, setup.size, group);
            if (came < 0) return came;
            if (static_cast<u64>(came) < setup.size) return -kEpipe;
            *bytes += setup.mode == kPull ? static_cast<u64>(came) : 0;
        }
    }
    if (setup.mode != kPush) return 0;
    i64 result = shutdown(table, peer, kShutSend, group);
    if (result < 0) return result;
    result = recv_all(table, peer, buffer, 1, group);
    return result == 1 ? 0 : result < 0 ? result : -kEpipe;
}

template <class Group> WARPWIRE_CALL void run_client(const Setup &setup, Group group) {
    const Table &table = *reinterpret_cast<const Table *>(setup.table);
    Control *control = reinterpret_cast<Control *>(setup.control);
    u8 *buffer = reinterpret_cast<u8 *>(setup.buffers);
    u64 bytes = 0, begun = 0, ended = 0;
    int peer = sock::socket(table, static_cast<Family>(setup.address.family), static_cast<SocketKind>(setup.kind), group);
    i64 result = peer;
    if (peer >= 0) result = set(table, peer, kReceiveTimeout, static_cast<i64>(setup.timeout), group);
    if (result >= 0) result = set(table, peer, kSendTimeout, static_cast<i64>(setup.timeout), group);
    if (result >= 0) result = connect(table, peer, setup.address, group);
    if (result >= 0) {
        begun = sock::detail::clock_ns();
        result = measure(table, setup, peer, buffer, &bytes, group);
        ended = sock::detail::clock_ns();
    }
    if (peer >= 0) close(table, peer, group);
    if (group.rank() == 0) {
        control->nanoseconds = ended - begun, control->bytes = bytes;
        if (result < 0) say(&control->failed, static_cast<u64>(-result));
        say(&control->connections, 1);
    }
}

}  // namespace

#if WARPWIRE_CUDA
extern "C" __global__ void sock_serve(u64 setup) { serve(*reinterpret_cast<const Setup *>(setup), blockIdx.x, Block()); }
extern "C" __global__ void sock_client(u64 setup) { run_client(*reinterpret_cast<const Setup *>(setup), Block()); }
#else
extern "C" void sock_serve_thread(u64 setup, u64 worker) { serve(*reinterpret_cast<const Setup *>(setup), static_cast<u32>(worker), Block()); }
extern "C" void sock_client_thread(u64 setup) { run_client(*reinterpret_cast<const Setup *>(setup), Block()); }
#endif

// Scripted kernels: blocks, or threads, that run the commands of a test; see scripted.rs.
#include <warpwire/gpunet.cuh>

using namespace warpwire;
using namespace warpwire::sock;

namespace {

enum Command : u64 {
    kDoSocket = 1, kDoBind, kDoListen, kDoAccept, kDoConnect, kDoSend, kDoRecv, kDoSendTo, kDoRecvFrom, kDoPoll, kDoShutdown,
    kDoClose, kDoSet, kDoGet, kDoLocalName, kDoPeerName, kDoBorrow, kDoConsume, kDoReserve, kDoCommit, kDoStreamOut,
    kDoStreamIn, kDoEcho, kDoEchoMany, kDoStop, kDoGpunet, kDoGpunetDatagrams,
};

struct CommandSlot {
    u64 number, done, op, args[7], result, second;
    Address address, found;
};
static_assert(sizeof(CommandSlot) == 144, "as in scripted.rs");

WARPWIRE_FN u64 pattern_word(u64 seed, u64 index) {
    u64 z = seed + (index + 1) * 0x9e3779b97f4a7c15ull;
    z = (z ^ (z >> 30)) * 0xbf58476d1ce4e5b9ull;
    z = (z ^ (z >> 27)) * 0x94d049bb133111ebull;
    return z ^ (z >> 31);
}
WARPWIRE_FN u8 pattern_byte(u64 seed, u64 at) { return static_cast<u8>(pattern_word(seed, at / 8) >> (at % 8 * 8)); }
WARPWIRE_FN u64 scramble(u64 &state) {
    state ^= state << 13;
    state ^= state >> 7;
    state ^= state << 17;
    return state;
}

template <class Group> WARPWIRE_CALL i64 stream_out(const Table &table, int socket, u64 seed, u64 total, u64 most, u8 *buffer, Group group) {
    u64 random = seed | 1, done = 0;
    while (done < total) {
        u64 piece = warpwire::sock::detail::min_u64(1 + scramble(random) % most, total - done);
        group.sync();
        for (u64 i = group.rank(); i < piece; i += group.size()) buffer[i] = pattern_byte(seed, done + i);
        i64 sent = send(table, socket, buffer, piece, group);
        if (sent < 0) return sent;
        done += static_cast<u64>(sent);
    }
    return static_cast<i64>(done);
}

template <class Group> WARPWIRE_CALL i64 stream_in(const Table &table, int socket, u64 seed, u64 total, u64 most, u8 *buffer, Group group) {
    u64 random = seed | 1, done = 0;
    while (done < total) {
        u64 piece = warpwire::sock::detail::min_u64(1 + scramble(random) % most, total - done);
        i64 count = recv(table, socket, buffer, piece, group);
        if (count < 0) return count;
        if (count == 0) break;
        bool wrong = false;
        for (u64 i = group.rank(); i < static_cast<u64>(count); i += group.size()) wrong |= buffer[i] != pattern_byte(seed, done + i);
        if (group.any(wrong)) return -kEilseq;
        done += static_cast<u64>(count);
    }
    return static_cast<i64>(done);
}

template <class Group> WARPWIRE_CALL i64 echo(const Table &table, int socket, u8 *buffer, Group group) {
    i64 total = 0;
    for (;;) {
        i64 count = recv(table, socket, buffer, 4096, group);
        if (count <= 0) return count < 0 ? count : total;
        i64 sent = send(table, socket, buffer, static_cast<u64>(count), group);
        if (sent < 0) return sent;
        total += sent;
    }
}

// The handles are at the start of the buffer, followed by the poll list and the data.
template <class Group> WARPWIRE_CALL i64 echo_many(const Table &table, u64 count, u8 *buffer, Group group) {
    const int *handles = reinterpret_cast<const int *>(buffer);
    PollEntry *list = reinterpret_cast<PollEntry *>(buffer + (64 << 10));
    u8 *bytes = buffer + (256 << 10);
    for (u64 i = group.rank(); i < count; i += group.size()) list[i] = PollEntry{handles[i], kIn, 0};
    u64 open = count;
    i64 total = 0;
    while (open) {
        i64 found = poll(table, list, static_cast<u32>(open), kNoTimeout, group);
        if (found < 0) return found;
        for (u64 i = 0; i < open;) {
            group.sync();
            PollEntry entry = list[i];
            group.sync();
            if (!entry.revents) {
                i++;
                continue;
            }
            i64 got = recv(table, entry.socket, bytes, 4096, group);
            if (got < 0) return got;
            if (got > 0) {
                total += send(table, entry.socket, bytes, static_cast<u64>(got), group);
                i++;
                continue;
            }
            close(table, entry.socket, group);
            open--;
            if (group.rank() == 0) list[i] = list[open];
        }
    }
    return total;
}

template <class Group> WARPWIRE_FN RingSpan show_or_fill(const Table &table, u64 op, int socket, u64 most, u8 *here, Group group) {
    RingSpan span = op == kDoBorrow ? borrow(table, socket, most, group) : reserve(table, socket, most, group);
    u8 *bytes = static_cast<u8 *>(span.bytes);
    for (i64 i = group.rank(); i < span.length; i += group.size()) {
        if (op == kDoBorrow) here[i] = bytes[i];
        else bytes[i] = here[i];
    }
    group.sync();
    return span;
}

// An echo client with GPUnet's calls, run by a block: the last message is compared.
WARPWIRE_CALL i64 gpunet_client(const Table &table, SocketKind kind, Address to, u64 messages, u64 size, u8 *buffer) {
    BEGIN_SINGLE_THREAD_PART
    gpunet_use(reinterpret_cast<u64>(&table), kind);
    END_SINGLE_THREAD_PART
    sockaddr_in there;
    gpunet_name(&there, to);
    int sock = gconnect_in(&there);
    i64 result = sock < 0 ? sock : 0;
    Block block;
    for (u64 i = 0; i < messages && result >= 0; i++) {
        for (u64 at = block.rank(); at < size; at += block.size()) buffer[at] = pattern_byte(i, at);
        int sent = 0, came = 0, count = 0;
        while (sent < static_cast<int>(size) && (count = gsend(sock, buffer + sent, size - static_cast<u64>(sent))) > 0) sent += count;
        for (u64 at = block.rank(); at < size; at += block.size()) buffer[at] = 0;
        while (count > 0 && came < static_cast<int>(size) && (count = grecv(sock, buffer + came, size - static_cast<u64>(came))) > 0) came += count;
        bool wrong = came != static_cast<int>(size);
        for (u64 at = block.rank(); at < size; at += block.size()) wrong |= buffer[at] != pattern_byte(i, at);
        result = count < 0 ? count : block.any(wrong) ? -kEilseq : result + came;
    }
    BEGIN_SINGLE_THREAD_PART
    if (sock >= 0) single_thread_gclose(sock);
    END_SINGLE_THREAD_PART
    return result;
}

// As gpunet_client, with datagrams.
WARPWIRE_CALL i64 gpunet_datagrams(const Table &table, SocketKind streams, Address to, u64 messages, u64 size, u8 *buffer) {
    BEGIN_SINGLE_THREAD_PART
    gpunet_use(reinterpret_cast<u64>(&table), streams);
    END_SINGLE_THREAD_PART
    sockaddr_in there, from;
    gpunet_name(&there, to);
    gpunet_name(&from, no_address());
    int sock = gsocket(AF_INET, SOCK_DGRAM, 0);
    i64 result = sock < 0 ? sock : 0;
    Block block;
    for (u64 i = 0; i < messages && result >= 0; i++) {
        for (u64 at = block.rank(); at < size; at += block.size()) buffer[at] = pattern_byte(i, at);
        int count = gsendto(sock, buffer, size, &there);
        for (u64 at = block.rank(); at < size; at += block.size()) buffer[at] = 0;
        if (count >= 0) count = grecvfrom(sock, buffer, size, &from);
        bool stranger = from.sin_port != there.sin_port || from.sin_addr.s_addr != there.sin_addr.s_addr;
        bool wrong = count != static_cast<int>(size) || (block.rank() == 0 && stranger);
        for (u64 at = block.rank(); at < size; at += block.size()) wrong |= buffer[at] != pattern_byte(i, at);
        result = count < 0 ? count : block.any(wrong) ? -kEilseq : result + count;
    }
    BEGIN_SINGLE_THREAD_PART
    if (sock >= 0) single_thread_gclose(sock);
    END_SINGLE_THREAD_PART
    return result;
}

// Runs one command, with all threads of the group. Rank 0 writes the result.
template <class Group> WARPWIRE_FN i64 run(const Table &table, CommandSlot *slot, u8 *buffer, Address to, Group group) {
    u64 op = slot->op;
    const u64 *args = slot->args;
    int socket = static_cast<int>(static_cast<u32>(args[0]));
    u8 *here = buffer + args[1];
    switch (op) {
    case kDoSocket: return sock::socket(table, args[0] == 6 ? kIpv6 : kIpv4, static_cast<SocketKind>(args[1]), group);
    case kDoBind: return bind(table, socket, to, group);
    case kDoListen: return listen(table, socket, static_cast<u32>(args[1]), group);
    case kDoAccept: return accept(table, socket, &slot->found, group);
    case kDoConnect: return connect(table, socket, to, group);
    case kDoSend: return send(table, socket, here, args[2], group);
    case kDoRecv: return recv(table, socket, here, args[2], group);
    case kDoSendTo: return to.family ? send_to(table, socket, here, args[2], to, group) : send(table, socket, here, args[2], group);
    case kDoRecvFrom: return recv_from(table, socket, here, args[2], &slot->found, group);
    case kDoPoll: return poll(table, reinterpret_cast<PollEntry *>(buffer), static_cast<u32>(args[1]), args[2], group);
    case kDoShutdown: return shutdown(table, socket, static_cast<ShutdownHow>(args[1]), group);
    case kDoClose: return close(table, socket, group);
    case kDoSet: return set(table, socket, static_cast<SockOption>(args[1]), static_cast<i64>(args[2]), group);
    case kDoGet: return get(table, socket, static_cast<SockOption>(args[1]), group);
    case kDoLocalName: return local_name(table, socket, &slot->found, group);
    case kDoPeerName: return peer_name(table, socket, &slot->found, group);
    case kDoBorrow:
    case kDoReserve: {
        RingSpan span = show_or_fill(table, op, socket, args[2], here, group);
        if (group.rank() == 0) slot->second = reinterpret_cast<u64>(span.bytes);
        return span.length;
    }
    case kDoConsume: return consume(table, socket, args[2], group);
    case kDoCommit: return commit(table, socket, args[2], group);
    case kDoStreamOut: return stream_out(table, socket, args[1], args[2], args[3], buffer, group);
    case kDoStreamIn: return stream_in(table, socket, args[1], args[2], args[3], buffer, group);
    case kDoEcho: return echo(table, socket, buffer, group);
    case kDoGpunet: return gpunet_client(table, static_cast<SocketKind>(args[0]), to, args[1], args[2], buffer);
    case kDoGpunetDatagrams: return gpunet_datagrams(table, static_cast<SocketKind>(args[0]), to, args[1], args[2], buffer);
    case kDoEchoMany: return echo_many(table, args[1], buffer, group);
    }
    return -kEnosys;
}

template <class Group> WARPWIRE_FN void serve(const Table &table, CommandSlot *slot, u8 *buffer, Group group) {
    using namespace warpwire::sock::detail;
    for (u64 last = 0;;) {
        u64 number = 0;
        if (group.rank() == 0)
            while ((number = load_system(&slot->number)) == last) poll_backoff();
        last = group.broadcast(number);
        bool stop = group.broadcast(group.rank() == 0 ? load_system(&slot->op) : 0) == kDoStop;
        i64 result = 0;
        if (!stop) {
            Address to = slot->address;
            result = run(table, slot, buffer, to, group);
        }
        group.sync();
        if (group.rank() == 0) {
            slot->result = static_cast<u64>(result);
            fence_system();
            store_system(&slot->done, last);
        }
        if (stop) return;
    }
}

}  // namespace

#if WARPWIRE_CUDA
extern "C" __global__ void scripted(u64 table, u64 command_slots, u64 buffers) {
    CommandSlot *slot = reinterpret_cast<CommandSlot *>(command_slots + blockIdx.x * 256ull);
    u8 *buffer = reinterpret_cast<u8 *>(buffers + blockIdx.x * (1ull << 20));
    serve(*reinterpret_cast<const Table *>(table), slot, buffer, Block());
}
#else
extern "C" void scripted_thread(u64 table, u64 command_slot, u64 buffer) {
    serve(*reinterpret_cast<const Table *>(table), reinterpret_cast<CommandSlot *>(command_slot), reinterpret_cast<u8 *>(buffer), Block());
}
#endif

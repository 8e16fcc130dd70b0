// A similarity server inside a kernel: clients send a vector and get the most similar ones of those
// in device memory. Each block is a worker with its own connections. worker.rs has the equivalent
// for the simulated GPU; mod.rs defines the layout, wire.rs the wire format.
//
// Rank 0 of a block decides; the whole block copies and searches. Network input is not trusted: a
// query's header is validated before the rest is received, and an invalid query gets an error reply
// and closes its connection.
#include <warpwire/sock.cuh>

#include "../serving.cuh"

using namespace warpwire;
using namespace warpwire::sock;
using namespace serving;

namespace {

// As in mod.rs.
struct Setup {
    u64 table, vectors, vector_count, dimension, max_k, connections, connection_size, in_size;
    u64 per_worker, workers, idle_timeout, control, max_clients, counts, kind, workspaces, workspace_size;
    Address address;
};
struct Counts {  // in device memory
    u64 clients, queries, refused, closed;
};
struct Match {
    u32 id;
    float score;
};
struct Head {
    u32 magic, word, count, zero;  // of a query: k, dimension; of an answer: status, matches
};
struct Workspace {  // per worker; followed by the best matches, then candidates
    u32 found, kept;
    u64 unused;
};
static_assert(sizeof(Setup) == 160 && sizeof(Match) == 8 && sizeof(Head) == 16 && sizeof(Workspace) == 16, "as in mod.rs");

constexpr u32 kMagic = 0x4d495357, kVectorsPerThread = 8;
enum Status : u32 { kFound = 0, kNoQuery = 1, kWrongDimension = 2, kWrongCount = 3, kNotFinite = 4, kFull = 5 };
enum Verdict : u64 { kMore = 0, kWhole = 1, kRefused = 2 };

WARPWIRE_FN Counts *counts_of(const Setup &setup) { return reinterpret_cast<Counts *>(setup.counts); }
WARPWIRE_FN SocketKind kind_of(const Setup &setup) { return static_cast<SocketKind>(setup.kind); }
WARPWIRE_FN FullReply full_reply(const Setup &) {
    static const Head kReply = {kMagic, kFull, 0, 0};
    return FullReply{&kReply, sizeof kReply};
}
WARPWIRE_FN const float *query_of(Connection *c) { return reinterpret_cast<const float *>(in_of(c) + sizeof(Head)); }

// Fused multiply-add with one rounding, as in worker.rs.
WARPWIRE_FN float multiply_add(float a, float b, float sum) {
#if WARPWIRE_CUDA
    return __fmaf_rn(a, b, sum);
#else
    return __builtin_fmaf(a, b, sum);
#endif
}
WARPWIRE_FN u32 take_number(u32 *word) {
#if WARPWIRE_CUDA
    return atomicAdd(word, 1u);
#else
    return (*word)++;
#endif
}
WARPWIRE_FN bool is_finite(float value) { return value - value == 0.0f; }

// NaN never ranks before another match.
WARPWIRE_FN bool beats(Match a, Match b) { return a.score > b.score || (a.score == b.score && a.id < b.id); }

// ------------------------------------------------------------------------------------------------
// The search

// Inserts candidates into the best matches; rank 0 only. There are many in the first rounds, few
// later.
WARPWIRE_CALL void choose(Workspace *workspace, Match *best, const Match *candidates, u32 k) {
    u32 kept = workspace->kept, found = workspace->found;
    for (u32 i = 0; i < found; i++) {
        Match one = candidates[i];
        if (kept == k && !beats(one, best[k - 1])) continue;
        u32 at = kept < k ? kept++ : k - 1;
        for (; at > 0 && beats(one, best[at - 1]); at--) best[at] = best[at - 1];
        best[at] = one;
    }
    workspace->kept = kept, workspace->found = 0;
}

// Finds the best k matches, leaves them behind the worker's Workspace, and returns their number.
template <class Group> WARPWIRE_CALL u32 search(const Setup &setup, Workspace *workspace, const float *query, u32 k, Group group) {
    Match *best = reinterpret_cast<Match *>(workspace + 1);
    u64 count = setup.vector_count, dimension = setup.dimension;
    Match *candidates = best + (setup.max_k < count ? setup.max_k : count);
    const float *vectors = reinterpret_cast<const float *>(setup.vectors);
    if (k > count) k = static_cast<u32>(count);
    if (group.rank() == 0) workspace->found = 0, workspace->kept = 0;
    group.sync();
    u64 round = static_cast<u64>(group.size()) * kVectorsPerThread;
    for (u64 first = 0; first < count; first += round) {
        bool full = workspace->kept == k;
        Match bar = full ? best[k - 1] : Match{0, 0};
        for (u32 i = 0; i < kVectorsPerThread; i++) {
            u64 id = first + static_cast<u64>(i) * group.size() + group.rank();
            if (id >= count) break;
            Match one = {static_cast<u32>(id), 0.0f};
            for (u64 part = 0; part < dimension; part++) one.score = multiply_add(query[part], vectors[part * count + id], one.score);
            if (full ? beats(one, bar) : one.score == one.score) candidates[take_number(&workspace->found)] = one;
        }
        group.sync();
        if (group.rank() == 0 && workspace->found) choose(workspace, best, candidates, k);
        group.sync();
    }
    return workspace->kept;
}

// ------------------------------------------------------------------------------------------------
// Connections

WARPWIRE_CALL void put_head(const Setup &setup, Connection *c, u32 status, u32 count) {
    *reinterpret_cast<Head *>(out_of(setup, c)) = Head{kMagic, status, count, 0};
    c->out_length = static_cast<u32>(sizeof(Head) + count * sizeof(Match));
    c->in_length = 0;
}

WARPWIRE_CALL void refuse(const Setup &setup, Connection *c, u32 status) {
    put_head(setup, c, status, 0);
    c->closing = 1;
    count(&counts_of(setup)->refused, 1);
}

// Whether a query is complete and valid; rank 0 only.
WARPWIRE_CALL u64 check_head(const Setup &setup, Connection *c) {
    if (c->in_length < sizeof(Head)) return kMore;
    Head head = *reinterpret_cast<const Head *>(in_of(c));
    u32 status = head.magic != kMagic || head.zero         ? kNoQuery
                 : head.count != setup.dimension           ? kWrongDimension
                 : head.word == 0 || head.word > setup.max_k ? kWrongCount
                                                           : kFound;
    if (status != kFound) {
        refuse(setup, c, status);
        return kRefused;
    }
    return c->in_length < setup.in_size ? kMore : kWhole;
}

// Replies to a complete query.
template <class Group> WARPWIRE_CALL void process(const Setup &setup, u32 worker, Connection *c, Group group) {
    Workspace *workspace = reinterpret_cast<Workspace *>(setup.workspaces + worker * setup.workspace_size);
    u64 verdict = group.broadcast(group.rank() == 0 ? check_head(setup, c) : 0);
    if (verdict != kWhole) return;
    const float *query = query_of(c);
    bool wrong = false;
    for (u64 part = group.rank(); part < setup.dimension; part += group.size()) wrong |= !is_finite(query[part]);
    if (group.any(wrong)) {
        if (group.rank() == 0) refuse(setup, c, kNotFinite);
        group.sync();
        return;
    }
    u32 k = static_cast<u32>(group.broadcast(reinterpret_cast<const Head *>(in_of(c))->word));
    u32 kept = search(setup, workspace, query, k, group);
    const Match *best = reinterpret_cast<const Match *>(workspace + 1);
    Match *out = reinterpret_cast<Match *>(out_of(setup, c) + sizeof(Head));
    for (u32 i = group.rank(); i < kept; i += group.size()) out[i] = best[i];
    if (group.rank() == 0) {
        put_head(setup, c, kFound, kept);
        count(&counts_of(setup)->queries, 1);
    }
    group.sync();
}

// ------------------------------------------------------------------------------------------------
// A client: sends one query after the other and stores the replies for the host

// As in client.rs.
struct Client {
    u64 table, kind, queries, query_size, answers, answer_size, count, result, timeout;
    Address server;
};
static_assert(sizeof(Client) == 96, "as in client.rs");
constexpr i64 kEproto = 71;

// Sends one query and receives its reply; 0 or a negative errno.
template <class Group> WARPWIRE_CALL i64 ask(const Table &table, const Client &client, int socket, u64 number, Group group) {
    i64 sent = send(table, socket, reinterpret_cast<const u8 *>(client.queries + number * client.query_size), client.query_size, group);
    if (sent < 0) return sent;
    Head *head = reinterpret_cast<Head *>(client.answers + number * client.answer_size);
    i64 got = recv_all(table, socket, head, sizeof(Head), group);
    if (got != static_cast<i64>(sizeof(Head))) return got < 0 ? got : -kEconnreset;
    group.sync();
    bool strange = head->magic != kMagic || head->word != kFound || head->count > (client.answer_size - sizeof(Head)) / sizeof(Match);
    if (group.any(strange)) return -kEproto;
    u64 rest = group.broadcast(head->count) * sizeof(Match);
    got = recv_all(table, socket, head + 1, rest, group);
    return got == static_cast<i64>(rest) ? 0 : got < 0 ? got : -kEconnreset;
}

template <class Group> WARPWIRE_CALL void ask_all(const Client &client, Group group) {
    const Table &table = *reinterpret_cast<const Table *>(client.table);
    int socket = sock::socket(table, static_cast<Family>(client.server.family), static_cast<SocketKind>(client.kind), group);
    i64 failed = socket < 0 ? socket : sock::set(table, socket, kReceiveTimeout, static_cast<i64>(client.timeout), group);
    if (!failed) failed = sock::set(table, socket, kSendTimeout, static_cast<i64>(client.timeout), group);
    if (!failed) failed = connect(table, socket, client.server, group);
    u64 done = 0;
    while (!failed && done < client.count)
        if (!(failed = ask(table, client, socket, done, group))) done++;
    if (socket >= 0) close(table, socket, group);
    if (group.rank() == 0) {
        u64 *result = reinterpret_cast<u64 *>(client.result);
        sock::detail::store_system(&result[0], done);
        sock::detail::store_system(&result[1], static_cast<u64>(-failed));
    }
}

}  // namespace

#if WARPWIRE_CUDA
extern "C" __global__ void similarity_client(u64 client) { ask_all(*reinterpret_cast<const Client *>(client), Block()); }
extern "C" __global__ void similarity_server(u64 setup) { serve(*reinterpret_cast<const Setup *>(setup), blockIdx.x, Block()); }
#else
extern "C" void similarity_client_thread(u64 client, u64) { ask_all(*reinterpret_cast<const Client *>(client), Block()); }
extern "C" void similarity_server_thread(u64 setup, u64 worker) {
    serve(*reinterpret_cast<const Setup *>(setup), static_cast<u32>(worker), Block());
}
#endif

// Tests of sock.cuh on CPU threads, with a model of the host: it answers requests, and moves bytes
// between the two sockets of a pair. All of it is C++, so that ThreadSanitizer can check locks,
// rings and requests. tools/header-tests builds it with sanitizers and runs it; an argument names
// the cases to run.
#include "harness.hpp"
#include <warpwire/sock.cuh>

#include "model.hpp"

using namespace warpwire;
using namespace warpwire::sock;

namespace {

constexpr u64 kRing = 4096;
constexpr u32 kSockets = 64;
constexpr u32 kActivityShift = 3;

// The model of the host. Sockets 2n and 2n + 1 are a pair; the last one is a listener.
class Host {
  public:
    explicit Host(u32 slots) : slots_(slots) {
        table = Table();
        table.version = sock::kVersion, table.sockets = kSockets, table.slots = slots, table.heartbeat_timeout_ms = 60000;
        table.host_state = at(host_state_), table.device_counters = at(device_counters_), table.device_states = at(device_states_), table.ticket = at(&ticket_), table.heartbeat = at(&heartbeat_);
        table.activity = at(activity_), table.activity_shift = kActivityShift;
        requests_.resize(slots), replies_.resize(slots), slot_laps_.resize(slots);
        table.requests = at(requests_.data()), table.replies = at(replies_.data()), table.slot_laps = at(slot_laps_.data());
        rings_.resize(2 * kSockets * kRing);
        thread_ = std::thread([this] { serve(); });
    }
    ~Host() {
        stop_.store(true, std::memory_order_release);
        thread_.join();
    }

    // A stream whose peer is the next socket.
    std::pair<int, int> streams() {
        CHECK_EQ(sock::socket(table, kIpv4, kStream, Thread()) & 1, 0);
        return {handle(used_ - 2), handle(used_ - 1)};
    }

    Table table;
    std::atomic<u32> closed{0};

  private:
    template <class T> static u64 at(T *p) { return reinterpret_cast<u64>(p); }
    int handle(u32 index) const { return static_cast<int>(generation_[index] << 16 | index); }

    void serve() {
        for (u64 count = 1; !stop_.load(std::memory_order_acquire); count++) {
            sock::detail::store_system(&heartbeat_.count, count);
            // Without a request or a set flag nothing is looked at: a flag that a call fails to set
            // ends the test by its timeout.
            bool active = answer();
            for (u32 &flag : activity_) active |= take(&flag);
            for (u32 index = 0; active && index < kSockets; index++) carry(index);
            sched_yield();
        }
    }

    // Takes a flag: it is cleared before the counters are read.
    static bool take(u32 *flag) { return sock::detail::load_system(flag) && __atomic_exchange_n(flag, 0, __ATOMIC_SEQ_CST); }

    bool answer() {
        Request *request = &requests_[next_ % slots_];
        if (sock::detail::load_system(&request->number) != next_ + 1) return false;
        i64 result = 0;
        u32 index = static_cast<u32>(request->handle) & 0xffff;
        if (request->op == sock::detail::kSocket) result = open_pair();
        else if (request->op == sock::detail::kListen) listen(index);
        else if (request->op == sock::detail::kClose) close(index);
        Reply *reply = &replies_[next_ % slots_];
        sock::detail::store_system(reinterpret_cast<u64 *>(&reply->result), static_cast<u64>(result));
        sock::detail::store_system(&reply->number, ++next_);
        return true;
    }

    // Two connected sockets; returns the handle of the first, and the test uses the second as well.
    i64 open_pair() {
        u32 index = 0;
        while (index < kSockets && (open_[index] || open_[index + 1])) index += 2;
        if (index == kSockets) return -kEmfile;
        for (u32 one : {index, index + 1}) {
            generation_[one] = generation_[one] % 0x7fff + 1, open_[one] = true;
            sent_[one] = consumed_[one] = received_[one] = taken_[one] = 0;
            sock::detail::store_system(&device_counters_[one].sent, 0u), sock::detail::store_system(&device_counters_[one].consumed, 0u);
            HostSocketState *host_state = &host_state_[one];
            sock::detail::store_system(&host_state->received, 0ull), sock::detail::store_system(&host_state->taken, 0ull);
            sock::detail::store_system(&host_state->receive_ring, at(&rings_[2 * one * kRing])), sock::detail::store_system(&host_state->send_ring, at(&rings_[(2 * one + 1) * kRing]));
            sock::detail::store_system(&host_state->receive_size, static_cast<u32>(kRing)), sock::detail::store_system(&host_state->send_size, static_cast<u32>(kRing));
            sock::detail::store_system(&host_state->state, generation_[one] | sock::detail::kConnected);
        }
        used_ = index + 2;
        return handle(index);
    }

    // Makes the socket a listener whose ring is full of connections: each record is a unique
    // handle.
    void listen(u32 index) {
        for (u32 i = 0; i < kRing / sizeof(Record); i++) {
            Record record = {i + 1, 0, no_address()};
            std::memcpy(&rings_[2 * index * kRing + i * sizeof(Record)], &record, sizeof record);
        }
        received_[index] = kRing;
        sock::detail::store_system(&host_state_[index].state, generation_[index] | sock::detail::kListening);
        sock::detail::store_system(&host_state_[index].received, received_[index]);
    }

    void close(u32 index) {
        open_[index] = false;
        sock::detail::store_system(&host_state_[index].state, 0ull);
        u32 peer = index ^ 1;
        if (open_[peer]) sock::detail::store_system(&host_state_[peer].state, generation_[peer] | sock::detail::kConnected | sock::detail::kReceiveEnd);
        closed++;
    }

    // Moves sent bytes into the peer's ring, as far as there is room.
    void carry(u32 from) {
        u32 to = from ^ 1;
        if (!open_[from] || !open_[to]) return;
        sent_[from] += sock::detail::load_system(&device_counters_[from].sent) - static_cast<u32>(sent_[from]);
        consumed_[to] += sock::detail::load_system(&device_counters_[to].consumed) - static_cast<u32>(consumed_[to]);
        u64 count = sock::detail::min_u64(sent_[from] - taken_[from], kRing - (received_[to] - consumed_[to]));
        if (!count) return;
        const u8 *source = &rings_[(2 * from + 1) * kRing];
        for (u64 i = 0; i < count; i++) rings_[2 * to * kRing + (received_[to] + i) % kRing] = source[(taken_[from] + i) % kRing];
        received_[to] += count, taken_[from] += count;
        sock::detail::store_system(&host_state_[to].received, received_[to]);
        sock::detail::store_system(&host_state_[from].taken, taken_[from]);
    }

    u32 slots_, used_ = 0;  // written by serve, read after its reply
    u64 next_ = 0, ticket_ = 0;
    Heartbeat heartbeat_ = {};
    HostSocketState host_state_[kSockets] = {};
    DeviceCounters device_counters_[kSockets] = {};
    u32 activity_[kSockets >> kActivityShift] = {};
    DeviceSocketState device_states_[kSockets] = {};
    std::vector<Request> requests_;
    std::vector<Reply> replies_;
    std::vector<u64> slot_laps_;
    std::vector<u8> rings_;
    u32 generation_[kSockets] = {};
    bool open_[kSockets + 1] = {};
    u64 sent_[kSockets] = {}, consumed_[kSockets] = {}, received_[kSockets] = {}, taken_[kSockets] = {};
    std::atomic<bool> stop_{false};
    std::thread thread_;
};

void join_all(std::vector<std::thread> &threads) {
    for (std::thread &thread : threads) thread.join();
    threads.clear();
}

// A pair with both device states initialised, and a receive timeout.
struct Pair {
    Host host;
    int ends[2];
    explicit Pair(u32 slots = 8) : host(slots) {
        auto [one, other] = host.streams();
        sock::detail::init_device_state(host.table, other);
        ends[0] = one, ends[1] = other;
        for (int end : ends) CHECK_EQ(sock::set(host.table, end, kReceiveTimeout, 2000000, Thread()), 0);
    }
};

// Several threads send words into one socket, and several receive them from its peer, in both
// directions. Words stay whole, as the ring size is a multiple of theirs; each arrives once.
void groups_share_both_ends_of_a_stream() {
    constexpr u32 kThreads = 3, kWords = 6000;
    Pair pair;
    const Table &table = pair.host.table;
    std::atomic<u64> sums[2] = {{0}, {0}};
    std::atomic<u32> counts[2] = {{0}, {0}};
    std::vector<std::thread> threads;
    for (u32 way = 0; way < 2; way++) {
        int from = pair.ends[way], to = pair.ends[1 - way];
        for (u32 t = 0; t < kThreads; t++) {
            threads.emplace_back([&, from, t] {
                for (u64 i = t; i < kWords; i += kThreads) CHECK_EQ(sock::send(table, from, &i, sizeof i, Thread()), 8);
            });
            threads.emplace_back([&, to, way] {
                u64 word;
                while (counts[way].load() < kWords) {
                    i64 got = sock::recv(table, to, &word, sizeof word, Thread());
                    CHECK(got == 8 || got == -kEtimedout, "%lld", got);
                    if (got == 8) sums[way] += word, counts[way]++;
                }
            });
        }
    }
    join_all(threads);
    for (auto &sum : sums) CHECK_EQ(sum.load(), static_cast<u64>(kWords) * (kWords - 1) / 2);
}

// Spans of both rings, by two threads per side; unused spans are returned and come again.
void spans_are_one_at_a_time() {
    constexpr u32 kWords = 3000;
    Pair pair;
    const Table &table = pair.host.table;
    std::atomic<u32> next{0}, came{0};
    std::atomic<u64> sum{0};
    std::vector<std::thread> threads;
    for (u32 t = 0; t < 2; t++) {
        threads.emplace_back([&] {
            for (;;) {
                RingSpan span = sock::reserve(table, pair.ends[0], 64, Thread());
                CHECK(span.length >= 8, "%lld", span.length);
                u32 i = next++;
                u64 word = i, filled = i < kWords ? sizeof word : 0;
                std::memcpy(span.bytes, &word, filled);
                CHECK_EQ(sock::commit(table, pair.ends[0], filled, Thread()), 0);
                if (!filled) return;
            }
        });
        threads.emplace_back([&, t] {
            while (came.load() < kWords) {
                RingSpan span = sock::borrow(table, pair.ends[1], 24, Thread());
                if (span.length == -kEtimedout) continue;
                CHECK(span.length >= 8, "%lld", span.length);
                u64 word;
                std::memcpy(&word, span.bytes, sizeof word);
                bool back = (word + t) % 7 == 0 && came.load() + 64 < kWords;  // consumes nothing
                if (!back) sum += word, came++;
                CHECK_EQ(sock::consume(table, pair.ends[1], back ? 0 : 8, Thread()), 0);
            }
        });
    }
    join_all(threads);
    CHECK_EQ(sum.load(), static_cast<u64>(kWords) * (kWords - 1) / 2);
}

// More threads than request slots, and reuse of handles.
void requests_take_turns() {
    constexpr u32 kThreads = 5, kRounds = 150;
    Host host(2);
    std::vector<std::thread> threads;
    for (u32 t = 0; t < kThreads; t++)
        threads.emplace_back([&] {
            for (u32 i = 0; i < kRounds; i++) {
                int made = sock::socket(host.table, kIpv4, kStream, Thread()), other = made + 1;
                CHECK(made >= 0, "%d", made);
                // The peer's generation is the same, and it belongs to this thread as well.
                sock::detail::init_device_state(host.table, other);
                CHECK_EQ(sock::send(host.table, made, &i, sizeof i, Thread()), 4);
                u32 word = 0;
                CHECK_EQ(sock::recv_all(host.table, other, &word, sizeof word, Thread()), 4);
                CHECK_EQ(word, i);
                CHECK_EQ(sock::close(host.table, other, Thread()), 0);
                CHECK_EQ(sock::recv(host.table, made, &word, sizeof word, Thread()), 0);
                CHECK_EQ(sock::close(host.table, made, Thread()), 0);
                CHECK_EQ(sock::close(host.table, made, Thread()), -kEbadf);
            }
        });
    join_all(threads);
    CHECK_EQ(host.closed.load(), 2 * kThreads * kRounds);
}

// Each connection of a listener is accepted by one thread.
void accepting_gives_each_connection_once() {
    Host host(4);
    int listener = host.streams().first;
    CHECK_EQ(sock::listen(host.table, listener, 8, Thread()), 0);
    CHECK_EQ(sock::set(host.table, listener, kReceiveTimeout, 20000000, Thread()), 0);
    std::atomic<u32> taken{0};
    std::atomic<u64> sum{0};
    std::vector<std::thread> threads;
    for (u32 t = 0; t < 4; t++)
        threads.emplace_back([&] {
            for (;;) {
                int made = sock::accept(host.table, listener, nullptr, Thread());
                if (made == -kEtimedout) return;
                CHECK(made > 0, "%d", made);
                sum += static_cast<u64>(made), taken++;
            }
        });
    join_all(threads);
    constexpr u64 kAll = kRing / sizeof(Record);
    CHECK_EQ(taken.load(), kAll);
    CHECK_EQ(sum.load(), kAll * (kAll + 1) / 2);
}

// A socket is closed under threads that send, receive and poll: each call returns, and none touches
// its successor.
void closing_ends_the_calls_of_others() {
    for (u32 round = 0; round < 30; round++) {
        Pair pair;
        const Table &table = pair.host.table;
        int socket = pair.ends[0];
        CHECK_EQ(sock::set(table, socket, kReceiveTimeout, 0, Thread()), 0);
        std::vector<std::thread> threads;
        threads.emplace_back([&] {
            u8 bytes[512] = {};
            for (i64 sent = 0; sent >= 0;) sent = sock::send(table, socket, bytes, sizeof bytes, Thread());
        });
        threads.emplace_back([&] {
            u8 bytes[64];
            CHECK_EQ(sock::recv(table, socket, bytes, sizeof bytes, Thread()), -kEbadf);
        });
        threads.emplace_back([&] {
            PollEntry polled = {socket, kIn, 0};
            CHECK_EQ(sock::poll(table, &polled, 1, kNoTimeout, Thread()), 1);
            CHECK_EQ(polled.revents, kNval);
        });
        std::this_thread::sleep_for(std::chrono::milliseconds(round % 4));
        CHECK_EQ(sock::close(table, socket, Thread()), 0);
        join_all(threads);
    }
}

const Case kCases[] = {
    CASE(groups_share_both_ends_of_a_stream), CASE(spans_are_one_at_a_time), CASE(requests_take_turns),
    CASE(accepting_gives_each_connection_once), CASE(closing_ends_the_calls_of_others),
};

}  // namespace

int main(int count, char **names) { return run_cases(kCases, count, names); }

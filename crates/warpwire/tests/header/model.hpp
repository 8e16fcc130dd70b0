// A model of an HCA for tests of verbs.cuh on CPU threads: it consumes WQEs, works on memory of
// this process, and writes CQEs. An invalid WQE ends the program.
#pragma once
#include <pthread.h>

#include <atomic>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <memory>
#include <thread>
#include <vector>

#include <warpwire/verbs.cuh>

#define CHECK(condition, ...)                                                              \
    do {                                                                                   \
        if (!(condition)) {                                                                \
            std::fprintf(stderr, "%s:%d: %s is false; ", __FILE__, __LINE__, #condition);  \
            std::fprintf(stderr, __VA_ARGS__);                                             \
            std::fprintf(stderr, "\n");                                                    \
            std::abort();                                                                  \
        }                                                                                  \
    } while (0)
#define CHECK_EQ(left, right)                                                                                         \
    do {                                                                                                              \
        long long left_ = (long long)(left), right_ = (long long)(right);                                             \
        CHECK(left_ == right_, "%s is %lld (%#llx), %s is %lld (%#llx)", #left, left_, left_, #right, right_, right_); \
    } while (0)

namespace model {

using namespace warpwire;

constexpr u32 kKey = 0x1234, kBadKey = 0xbad, kNowhere = 0x5555;  // kNowhere: nothing is copied

inline u32 be(u32 v) { return __builtin_bswap32(v); }
inline u64 be64(const u32 *words) { return static_cast<u64>(be(words[0])) << 32 | be(words[1]); }

// A queue pair with its queues, as the host would create it.
struct Pair {
    Qp *qp;
    Pair *peer = nullptr;
    u32 depth, receive_depth;
    std::vector<u32> sent_lengths;  // of writes, in order
    u64 doorbells = 0;                  // number of doorbell changes seen

    Pair(u32 number, u32 depth, u32 receive_depth, u64 start = 0, u32 flags = 0) : depth(depth), receive_depth(receive_depth) {
        memory_ = static_cast<char *>(std::aligned_alloc(128, size()));
        std::memset(memory_, 0, size());
        char *at = memory_;
        auto take = [&](size_t bytes) {
            char *mine = at;
            at += (bytes + 127) / 128 * 128;
            return reinterpret_cast<u64>(mine);
        };
        qp = reinterpret_cast<Qp *>(take(sizeof(Qp)));
        qp->send_queue = take(depth * 64), qp->receive_queue = take(receive_depth * 32);
        qp->dbrec = take(64), qp->doorbell = take(512), qp->sink = take(8);
        qp->send_cq = take(depth * 64), qp->receive_cq = take(receive_depth * 64);
        std::memset(reinterpret_cast<void *>(qp->send_cq), 0xff, depth * 64);
        std::memset(reinterpret_cast<void *>(qp->receive_cq), 0xff, receive_depth * 64);
        qp->send_mask = depth - 1, qp->receive_mask = receive_depth - 1;
        qp->number = number, qp->receive_stride = 32, qp->sink_lkey = kKey, qp->flags = flags, qp->version = kVersion;
        for (QueueCounters *counters : {&qp->send, &qp->receive}) {
            counters->reserved = counters->completed = counters->taken = start;
            counters->published = start << 1;
            counters->failure = kNoFailure;
        }
        consumed_ = rung_ = received_ = start;
        u32 index = static_cast<u32>(start) & 0xffff;
        *reinterpret_cast<u64 *>(qp->doorbell) = static_cast<u64>(be(number << 8)) << 32 | be(index << 8);
        reinterpret_cast<u32 *>(qp->dbrec)[0] = reinterpret_cast<u32 *>(qp->dbrec)[1] = be(index);
    }
    ~Pair() { std::free(memory_); }
    Pair(const Pair &) = delete;

    // Executes what the doorbell announces; false if there was nothing.
    bool step() {
        u64 bell = __atomic_load_n(reinterpret_cast<u64 *>(qp->doorbell), __ATOMIC_ACQUIRE);
        CHECK_EQ(be(static_cast<u32>(bell >> 32)), qp->number << 8);
        u32 index = be(static_cast<u32>(bell)) >> 8;
        u32 new_entries = (index - static_cast<u32>(rung_)) & 0xffff;
        CHECK(new_entries <= depth, "the doorbell went from %llu to index %u, depth %u", rung_, index, depth);
        if (new_entries) {
            doorbells++;
            rung_ += new_entries;
            if (qp->flags & kDbrecFirst) {
                u32 dbrec = be(__atomic_load_n(reinterpret_cast<u32 *>(qp->dbrec) + 1, __ATOMIC_ACQUIRE));
                CHECK(((dbrec - index) & 0xffff) < 0x8000, "the record %u is behind the doorbell %u", dbrec, index);
            }
        }
        if (consumed_ == rung_) return false;
        return execute();
    }

  private:
    size_t size() const { return (sizeof(Qp) + depth * 128 + receive_depth * 96 + 8 * 512 + 127) / 128 * 128; }

    bool execute() {
        u32 words[16];
        const u32 *source = reinterpret_cast<const u32 *>(qp->send_queue + (consumed_ & (depth - 1)) * 64);
        std::memcpy(words, source, 16);
        u32 opcode = be(words[0]) & 0xff, segments = be(words[1]) & 0x3f;
        CHECK_EQ(be(words[0]) >> 8, consumed_ & 0xffff);
        CHECK_EQ(be(words[1]) >> 8, qp->number);
        CHECK(segments >= 1 && segments <= 4, "%u segments", segments);
        CHECK_EQ(words[2] >> 24, 0x08);
        std::memcpy(words, source, segments * 16);
        u32 syndrome = failed_ ? 5 : work(words, opcode, segments);
        if (syndrome == kNoReceive) return false;
        complete(qp->send_cq, depth, consumed_, syndrome ? 13 : 0, syndrome, 0, 0);
        if (syndrome && !failed_) {
            failed_ = true;
            flush();
        }
        consumed_++;
        return true;
    }

    static constexpr u32 kNoReceive = 0x1000;

    // Executes a WQE; returns a syndrome, or kNoReceive if the peer has no receive yet.
    u32 work(const u32 *words, u32 opcode, u32 segments) {
        u64 there = segments > 1 ? be64(words + 4) : 0;
        u32 rkey = segments > 1 ? be(words[6]) : 0;
        switch (opcode) {
        case 0x00: CHECK_EQ(segments, 1); return 0;
        case 0x08:
        case 0x09: {
            if (rkey != kKey && rkey != kNowhere) return 0x13;
            u32 length = 0, syndrome = payload(words + 8, segments - 2, rkey == kNowhere ? 0 : there, &length);
            if (syndrome) return syndrome;
            sent_lengths.push_back(length);
            return opcode == 0x08 ? 0 : peer->arrive(1, nullptr, 0, length, words[3]);
        }
        case 0x0a:
        case 0x0b: {
            const void *from = reinterpret_cast<const void *>(segments > 1 ? be64(words + 6) : 0);
            u32 length = segments > 1 ? be(words[4]) : 0;
            if (segments > 1 && be(words[5]) != kKey) return 0x04;
            return peer->arrive(opcode == 0x0a ? 2 : 3, from, length, length, words[3]);
        }
        case 0x10: {
            if (rkey != kKey && segments > 2) return 0x13;
            if (segments > 2) std::memcpy(reinterpret_cast<void *>(be64(words + 10)), reinterpret_cast<void *>(there), be(words[8]));
            return 0;
        }
        case 0x11:
        case 0x12: {
            if (rkey != kKey) return 0x13;
            CHECK_EQ(segments, 4);
            CHECK_EQ(be(words[12]), 8);
            u64 *word = reinterpret_cast<u64 *>(there), old = 0;
            u64 operand = be64(words + 8), expected = be64(words + 10);
            if (opcode == 0x12)
                old = __atomic_fetch_add(word, operand, __ATOMIC_ACQ_REL);
            else if (!__atomic_compare_exchange_n(word, &(old = expected), operand, false, __ATOMIC_ACQ_REL, __ATOMIC_ACQUIRE)) {
            }
            __atomic_store_n(reinterpret_cast<u64 *>(be64(words + 14)), old, __ATOMIC_RELAXED);
            return 0;
        }
        }
        CHECK(false, "opcode %#x", opcode);
        return 2;
    }

    // Copies a WQE's payload to `to`, unless that is null.
    u32 payload(const u32 *words, u32 segments, u64 to, u32 *length) {
        if (segments == 0) return 0;
        bool is_inline = be(words[0]) >> 31;
        *length = be(words[0]) & 0x7fffffff;
        CHECK_EQ(segments, is_inline ? (4 + *length + 15) / 16 : 1);
        const void *from = is_inline ? static_cast<const void *>(words + 1) : reinterpret_cast<void *>(be64(words + 2));
        if (!is_inline && be(words[1]) != kKey && be(words[1]) != kNowhere) return 0x04;
        // Whole words, as an HCA writes them: a thread may be polling one.
        if (to && *length == 8 && to % 8 == 0) {
            u64 word;
            std::memcpy(&word, from, 8);
            __atomic_store_n(reinterpret_cast<u64 *>(to), word, __ATOMIC_RELEASE);
        } else if (to)
            std::memcpy(reinterpret_cast<void *>(to), from, *length);
        return 0;
    }

    u32 arrive(u32 code, const void *from, u32 copied, u32 length, u32 imm) {
        u32 posted = be(__atomic_load_n(reinterpret_cast<u32 *>(qp->dbrec), __ATOMIC_ACQUIRE));
        if (((posted - static_cast<u32>(received_)) & 0xffff) == 0) return kNoReceive;
        const u32 *entry = reinterpret_cast<const u32 *>(qp->receive_queue + (received_ & (receive_depth - 1)) * qp->receive_stride);
        u32 room = be(entry[0]), key = be(entry[1]);
        CHECK(room == 0 || key == kKey, "key %#x", key);
        CHECK_EQ(be(entry[5]), 0x100);
        bool fits = copied <= room;
        if (fits && copied) std::memcpy(reinterpret_cast<void *>(be64(entry + 2)), from, copied);
        complete(qp->receive_cq, receive_depth, received_++, fits ? code : 14, fits ? 0 : 1, length, imm);
        return fits ? 0 : 0x12;
    }

    void flush() {
        u32 posted = be(__atomic_load_n(reinterpret_cast<u32 *>(qp->dbrec), __ATOMIC_ACQUIRE));
        while (((posted - static_cast<u32>(received_)) & 0xffff) != 0)
            complete(qp->receive_cq, receive_depth, received_++, 14, 5, 0, 0);
    }

    void complete(u64 queue, u32 entries, u64 number, u32 code, u32 syndrome, u32 length, u32 imm) {
        u32 *cqe = reinterpret_cast<u32 *>(queue + (number & (entries - 1)) * 64);
        __atomic_store_n(cqe + 9, imm, __ATOMIC_RELAXED);
        __atomic_store_n(cqe + 11, be(length), __ATOMIC_RELAXED);
        __atomic_store_n(cqe + 13, syndrome << 24, __ATOMIC_RELAXED);
        u32 counter = static_cast<u32>(number) & 0xffff, owner = (number & entries) != 0;
        u32 tail = counter >> 8 | (counter & 0xff) << 8 | (code << 4 | owner) << 24;
        __atomic_store_n(cqe + 15, tail, __ATOMIC_RELEASE);
    }

    char *memory_;
    u64 consumed_, rung_, received_;
    bool failed_ = false;
};

// A thread that steps all pairs until it is dropped; it can be paused.
class Device {
  public:
    explicit Device(std::vector<Pair *> pairs) : pairs_(std::move(pairs)), thread_([this] { run(); }) {}
    ~Device() {
        stop_ = true;
        thread_.join();
    }
    // Returns when the thread has seen it, between two steps.
    void hold(bool held) {
        held_ = held;
        while (holding_ != held) std::this_thread::yield();
    }

  private:
    void run() {
        while (!stop_) {
            bool worked = false;
            holding_ = held_.load();
            if (!holding_)
                for (Pair *pair : pairs_) worked |= pair->step();
            if (!worked) std::this_thread::yield();
        }
    }
    std::vector<Pair *> pairs_;
    std::atomic<bool> stop_{false}, held_{false}, holding_{false};
    std::thread thread_;
};

// Two connected pairs, and the model that serves both.
struct Link {
    Pair a, b;
    Device device;
    Link(u32 depth, u64 start = 0, u32 flags = 0) : a(0x123, depth, 16, start, flags), b(0x456, depth, 16, start, flags), device((join(), std::vector<Pair *>{&a, &b})) {}

  private:
    void join() { a.peer = &b, b.peer = &a; }
};

// CPU threads as a group, synchronised by a barrier.
class ThreadGroup {
  public:
    explicit ThreadGroup(u32 size) : size_(size) { pthread_barrier_init(&barrier_, nullptr, size); }
    ~ThreadGroup() { pthread_barrier_destroy(&barrier_); }
    void sync() { pthread_barrier_wait(&barrier_); }
    u64 shared_ = 0;
    std::atomic<bool> any_{false};
    const u32 size_;

  private:
    pthread_barrier_t barrier_;
};
struct GroupMember {
    ThreadGroup *thread_group = nullptr;
    u32 number = 0;
    u32 rank() const { return number; }
    u32 size() const { return thread_group->size_; }
    void sync() const { thread_group->sync(); }
    u64 broadcast(u64 mine) const {
        if (number == 0) thread_group->shared_ = mine;
        thread_group->sync();
        u64 given = thread_group->shared_;
        thread_group->sync();
        return given;
    }
    bool any(bool mine) const {
        if (mine) thread_group->any_ = true;
        thread_group->sync();
        bool given = thread_group->any_;
        thread_group->sync();
        if (number == 0) thread_group->any_ = false;
        thread_group->sync();
        return given;
    }
};

// Runs `body(number)` on `threads` threads.
template <class Body> void in_parallel(u32 threads, Body body) {
    std::vector<std::thread> all;
    for (u32 number = 0; number < threads; number++) all.emplace_back([=, &body] { body(number); });
    for (std::thread &one : all) one.join();
}

template <class T> u64 address(const T *memory) { return reinterpret_cast<u64>(memory); }

}  // namespace model

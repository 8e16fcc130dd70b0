// Tests of what threads execute by themselves (detail/direct.cuh), on CPU threads. The test plays
// the CPU that fills the table and revokes its entries; the model of the HCA executes the rest.
// tools/header-tests builds it with sanitizers and runs it; an argument names the cases to run.
#include "harness.hpp"
#include "model.hpp"

using namespace model;
using detail::DirectEntry;
using detail::DirectTable;

namespace {

constexpr u64 kSoon = 60ull * 1000 * 1000 * 1000;
constexpr u32 kAll = 0xf;

// A table, and a pair of queue pairs whose first one uses it. Keys of entries are kKey, which the
// model takes too.
struct Direct {
    alignas(64) DirectTable table = {};
    Link link{16};
    u64 opened = 0;

    Direct() {
        link.a.qp->direct = address(&table);
        link.a.qp->flags |= kDirectAtomics;
    }
    Qp &qp() { return *link.a.qp; }
    static u32 slot(u32 key) { return (key >> 8) % detail::kDirectSlots; }
    // `iova` is what work requests name.
    void open(DirectEntry &entry, u64 iova, void *memory, u64 length, u32 access) {
        __atomic_store_n(&entry.iova, iova, __ATOMIC_RELAXED);
        __atomic_store_n(&entry.length, length, __ATOMIC_RELAXED);
        __atomic_store_n(&entry.address, address(static_cast<char *>(memory)), __ATOMIC_RELAXED);
        __atomic_store_n(&entry.tag, static_cast<u64>(kKey) << 32 | ++opened << 8 | access, __ATOMIC_SEQ_CST);
    }
    void open_remote(u64 iova, void *memory, u64 length, u32 access = kAll) { open(table.remote[slot(kKey)], iova, memory, length, access); }
    void open_local(u64 iova, void *memory, u64 length, u32 access = kAll) { open(table.local[slot(kKey)], iova, memory, length, access); }
    // As the host does it: true once nobody is inside.
    static bool revoke(DirectEntry &entry) {
        __atomic_store_n(&entry.tag, 0, __ATOMIC_SEQ_CST);
        return __atomic_load_n(&entry.users, __ATOMIC_SEQ_CST) == 0;
    }
    u64 operations() const { return __atomic_load_n(&table.operations, __ATOMIC_RELAXED); }
    u64 posted() { return __atomic_load_n(&qp().send.reserved, __ATOMIC_RELAXED); }
    bool is_unused() const {
        for (const DirectEntry &entry : table.remote)
            if (entry.users) return false;
        for (const DirectEntry &entry : table.local)
            if (entry.users) return false;
        return true;
    }
};

// The registrations' addresses differ from where the memory is.
constexpr u64 kThere = 0x7000000000, kHere = 0x5000000000;

void copies_of_every_length_and_alignment() {
    Direct direct;
    alignas(64) static u8 from[2048], to[2048], back[2048];
    for (u32 i = 0; i < sizeof from; i++) from[i] = static_cast<u8>(i * 31 + (i >> 8));
    direct.open_remote(kThere, to, sizeof to);
    direct.open_local(kHere, from, sizeof from);
    u64 made = 0;
    for (u64 length = 0; length <= 512; length += length < 40 ? 1 : 59)
        for (u64 first : {0, 1, 4, 8, 15})
            for (u64 second : {0, 2, 4, 8, 16}) {
                std::memset(to, 0xee, sizeof to);
                Ticket ticket = put(direct.qp(), Remote{kThere + 64 + second, kKey}, Local{kHere + 64 + first, kKey}, length);
                CHECK_EQ(ticket.number, kDone);
                CHECK_EQ(wait(direct.qp(), ticket), kOk);
                for (u64 i = 0; i < sizeof to; i++) {
                    bool inside = i >= 64 + second && i < 64 + second + length;
                    CHECK_EQ(to[i], inside ? from[i - second + first] : 0xee);
                }
                made++;
            }
    direct.open_local(kHere, back, sizeof back);
    for (u32 i = 0; i < sizeof to; i++) to[i] = static_cast<u8>(i * 7);
    CHECK_EQ(get(direct.qp(), Local{kHere + 3, kKey}, Remote{kThere + 8, kKey}, 500).number, kDone);
    CHECK(std::memcmp(back + 3, to + 8, 500) == 0 && back[503] == 0 && back[2] == 0, "a get");
    for (u32 length = 0; length <= kMaxInline; length++) {
        std::memset(to, 0xee, sizeof to);
        CHECK_EQ(put_inline(direct.qp(), Remote{kThere + 8, kKey}, from, length).number, kDone);
        CHECK(std::memcmp(to + 8, from, length) == 0 && to[8 + length] == 0xee && to[7] == 0xee, "inline");
        made++;
    }
    CHECK_EQ(direct.operations(), made + 1);
    CHECK_EQ(direct.posted(), 0);
    CHECK(direct.is_unused(), "a user is left");
}

void atomics_and_signals() {
    Direct direct;
    static u64 words[8], results[8];
    u64 data = 77;
    direct.open_remote(kThere, words, sizeof words);
    direct.open_local(kHere, results, sizeof results);
    words[0] = 5;
    CHECK_EQ(fetch_add(direct.qp(), Remote{kThere, kKey}, 7, Local{kHere, kKey}).number, kDone);
    CHECK(words[0] == 12 && results[0] == 5, "%llu, %llu", words[0], results[0]);
    CHECK_EQ(compare_swap(direct.qp(), Remote{kThere, kKey}, 12, 99, Local{kHere + 8, kKey}).number, kDone);
    CHECK(words[0] == 99 && results[1] == 12, "%llu, %llu", words[0], results[1]);
    CHECK_EQ(compare_swap(direct.qp(), Remote{kThere, kKey}, 12, 1, Local{kHere + 8, kKey}).number, kDone);
    CHECK(words[0] == 99 && results[1] == 99, "%llu, %llu", words[0], results[1]);
    CHECK_EQ(signal(direct.qp(), Remote{kThere, kKey}, 1).number, kDone);
    CHECK_EQ(words[0], 100);
    results[2] = data;
    CHECK_EQ(put_signal(direct.qp(), Remote{kThere + 16, kKey}, Local{kHere + 16, kKey}, 8, Remote{kThere + 8, kKey}, 3).number, kDone);
    CHECK(words[2] == data && words[1] == 3, "%llu, %llu", words[2], words[1]);
    CHECK_EQ(direct.operations(), 6);
    CHECK(direct.posted() == 0 && direct.is_unused(), "posted, or used");
}

// What must not be executed here is posted; the model refuses it, or executes it.
void what_is_not_allowed_is_posted() {
    struct Try {
        u64 there, here, length;
        u32 rkey, lkey, remote_access;
    };
    const Try tries[] = {
        {kThere, kHere, 8, kBadKey, kKey, kAll},            // another key
        {kThere, kHere, 8, kKey, kBadKey, kAll},
        {kThere, kHere, 8, kKey ^ 0x100, kKey, kAll},       // in the next slot
        {kThere - 1, kHere, 8, kKey, kKey, kAll},           // before the registration
        {kThere + 57, kHere, 8, kKey, kKey, kAll},          // behind it
        {kThere, kHere + 60, 8, kKey, kKey, kAll},
        {kThere + 64, kHere, 1, kKey, kKey, kAll},
        {~0ull - 3, kHere, 8, kKey, kKey, kAll},            // wraps around
        {kThere, kHere, 8, kKey, kKey, kAll ^ 4},           // no remote write
        {kThere, kHere, 513, kKey, kKey, kAll},             // too long for one thread
    };
    for (const Try &one : tries) {
        Direct direct;
        alignas(64) u8 to[64] = {}, from[64] = {1, 2, 3};
        direct.open_remote(kThere, to, sizeof to, one.remote_access);
        direct.open_local(kHere, from, sizeof from);
        direct.link.device.hold(true);
        Ticket ticket = put(direct.qp(), Remote{one.there, one.rkey}, Local{one.here, one.lkey}, one.length, Thread{}, kSoon);
        CHECK_EQ(ticket.number, 0);
        CHECK_EQ(direct.posted(), 1);
        CHECK(direct.operations() == 0 && direct.is_unused() && to[0] == 0, "executed");
    }
    // Unaligned atomics, atomics without the flag, and everything behind posted work.
    Direct direct;
    static u64 words[4] = {}, mine[4] = {};
    direct.open_remote(kThere, words, sizeof words);
    direct.open_local(kHere, mine, sizeof mine);
    direct.link.device.hold(true);
    CHECK_EQ(signal(direct.qp(), Remote{kThere + 4, kKey}, 1).number, 0);
    CHECK_EQ(put_inline(direct.qp(), Remote{kThere, kKey}, mine, 8).number, 1);
    CHECK_EQ(direct.operations(), 0);
    Direct plain;
    plain.open_remote(kThere, words, sizeof words);
    plain.open_local(kHere, mine, sizeof mine);
    plain.qp().flags &= ~kDirectAtomics;
    plain.link.device.hold(true);
    CHECK_EQ(put_inline(plain.qp(), Remote{kThere, kKey}, mine, 8).number, kDone);
    CHECK_EQ(signal(plain.qp(), Remote{kThere, kKey}, 1).number, 0);
    CHECK_EQ(plain.operations(), 1);
}

void direct_work_waits_for_nothing_and_follows_what_was_posted() {
    Direct direct;
    static u64 words[4] = {}, mine[4] = {1, 2, 3, 4};
    // Registered at its own address, so that the model can execute it too.
    direct.open_remote(address(words), words, sizeof words);
    direct.open_local(address(mine), mine, sizeof mine);
    for (u64 round = 1; round <= 2000; round++) {
        // A message is always posted.
        if (round % 3 == 0) CHECK_EQ(put_imm(direct.qp(), Remote{0, kNowhere}, Local{address(mine), kKey}, 0, 1).status, kOk);
        if (round % 3 == 0) CHECK_EQ(post_receive(*direct.link.b.qp, Local{0, kKey}, 0).status, kOk);
        mine[0] = round;
        Ticket ticket = put(direct.qp(), Remote{address(words), kKey}, Local{address(mine), kKey}, 8, Thread{}, kSoon);
        CHECK_EQ(wait(direct.qp(), ticket, kSoon), kOk);
        CHECK_EQ(__atomic_load_n(words, __ATOMIC_ACQUIRE), round);
    }
    CHECK_EQ(quiet(direct.qp(), kSoon), kOk);
    CHECK(direct.operations() >= 1000, "%llu", direct.operations());
    // After a failure nothing is executed any more.
    u64 before = direct.operations();
    CHECK_EQ(wait(direct.qp(), put_inline(direct.qp(), Remote{0, kBadKey}, mine, 8), kSoon), kRemoteAccess);
    CHECK_EQ(put_inline(direct.qp(), Remote{address(words), kKey}, mine, 8).status, kFlushed);
    CHECK_EQ(direct.operations(), before);
}

void groups_copy_together() {
    constexpr u32 kThreads = 4, kRounds = 200;
    Direct direct;
    alignas(64) static u8 from[4096], to[4096];
    static u64 sum = 0;
    direct.open_remote(kThere, to, sizeof to);
    direct.open_local(kHere, from, sizeof from);
    ThreadGroup thread_group(kThreads);
    in_parallel(kThreads, [&](u32 number) {
        GroupMember me{&thread_group, number};
        for (u32 round = 1; round <= kRounds; round++) {
            for (u32 i = number; i < 2000; i += kThreads) from[i] = static_cast<u8>(i + round);
            Ticket ticket = put(direct.qp(), Remote{kThere + round % 16, kKey}, Local{kHere, kKey}, 2000, me);
            CHECK_EQ(ticket.number, kDone);
            for (u32 i = 0; i < 2000; i++) CHECK_EQ(to[i + round % 16], static_cast<u8>(i + round));
            me.sync();
            ticket = put(direct.qp(), Remote{kThere + 2048 + 8 * number, kKey}, Local{kHere + number, kKey}, 1, each(me));
            CHECK_EQ(ticket.number, kDone);
            CHECK_EQ(wait(direct.qp(), ticket, kSoon, each(me)), kOk);
            CHECK_EQ(to[2048 + 8 * number], from[number]);
            me.sync();
        }
    });
    CHECK_EQ(direct.operations(), kRounds * (1 + kThreads));
    CHECK(direct.posted() == 0 && direct.is_unused() && sum == 0, "posted, or used");
}

// The owner takes the memory back, again and again, and gives other memory: no byte is stored after
// it has seen nobody inside.
void revoked_memory_is_not_touched() {
    constexpr u32 kThreads = 3, kRounds = 300;
    Direct direct;
    static u64 places[2][kThreads], mine[kThreads];
    std::atomic<bool> stop{false};
    std::atomic<u64> failures{0};
    direct.open_local(kHere, mine, sizeof mine);
    std::vector<std::thread> threads;
    for (u32 number = 0; number < kThreads; number++)
        threads.emplace_back([&, number] {
            for (u64 round = 1; !stop; round++) {
                __atomic_store_n(&mine[number], round, __ATOMIC_RELAXED);
                detail::DirectRange to = detail::remote_range(direct.qp(), Remote{kThere + 8 * number, kKey}, 8, detail::kWriteRemote);
                detail::DirectRange from = detail::local_range(direct.qp(), Local{kHere + 8 * number, kKey}, 8, detail::kReadLocal);
                detail::try_copy(direct.qp(), to, from, detail::no_range(), 0, 8, Thread{});
            }
        });
    DirectEntry &entry = direct.table.remote[Direct::slot(kKey)];
    u64 last = 0;
    for (u32 round = 0; round < kRounds; round++) {
        u64 *place = places[round % 2];
        direct.open_remote(kThere, place, sizeof places[0]);
        // Somebody has used it.
        u64 before = last;
        while ((last = direct.operations()) == before) sched_yield();
        while (!Direct::revoke(entry)) sched_yield();
        for (u32 i = 0; i < kThreads; i++) __atomic_store_n(&place[i], 0xdead, __ATOMIC_RELAXED);
        for (u32 i = 0; i < 20; i++) sched_yield();
        for (u32 i = 0; i < kThreads; i++) failures += __atomic_load_n(&place[i], __ATOMIC_RELAXED) != 0xdead;
    }
    stop = true;
    for (std::thread &one : threads) one.join();
    CHECK_EQ(failures.load(), 0);
    CHECK(direct.is_unused(), "a user is left");
}

void mapped_memory() {
    Direct direct;
    static u64 words[8];
    DirectEntry &entry = direct.table.remote[Direct::slot(kKey)];
    CHECK(!map_remote(direct.qp(), Remote{kThere, kKey}, 8, kMapWrite).pointer, "not in the table");
    direct.open_remote(kThere, words, sizeof words, 2 | 4);
    Mapping mapping = map_remote(direct.qp(), Remote{kThere + 8, kKey}, 16, kMapRead | kMapWrite);
    CHECK_EQ(address(static_cast<char *>(mapping.pointer)), address(reinterpret_cast<char *>(&words[1])));
    CHECK(entry.users == 1 && !is_revoked(mapping), "%llu", entry.users);
    Mapping refused[] = {
        map_remote(direct.qp(), Remote{kThere + 8, kKey}, 16, kMapAtomic),  // access that it lacks
        map_remote(direct.qp(), Remote{kThere, kKey}, sizeof words + 1, kMapRead),
        map_remote(direct.qp(), Remote{kThere - 1, kKey}, 8, kMapRead),
        map_remote(direct.qp(), Remote{kThere, kKey ^ 1}, 8, kMapRead),
    };
    for (Mapping &one : refused) {
        CHECK(!one.pointer && is_revoked(one), "mapped");
        unmap(one);
    }
    CHECK_EQ(entry.users, 1);
    set_signal(static_cast<u64 *>(mapping.pointer), 7);
    CHECK_EQ(words[1], 7);
    // The owner waits, and memory that is taken back cannot be mapped again.
    CHECK(!Direct::revoke(entry) && is_revoked(mapping), "revoked");
    CHECK(!map_remote(direct.qp(), Remote{kThere + 8, kKey}, 8, kMapWrite).pointer, "revoked");
    unmap(mapping);
    CHECK(Direct::revoke(entry) && direct.is_unused(), "a user is left");
    // Atomics need the option; what was posted must be complete.
    direct.open_remote(kThere, words, sizeof words);
    direct.qp().flags &= ~kDirectAtomics;
    CHECK(!map_remote(direct.qp(), Remote{kThere, kKey}, 8, kMapAtomic).pointer, "without the option");
    direct.link.device.hold(true);
    CHECK_EQ(put_imm(direct.qp(), Remote{0, kNowhere}, Local{0, kKey}, 0, 1).status, kOk);
    CHECK(!map_remote(direct.qp(), Remote{kThere, kKey}, 8, kMapWrite).pointer && direct.is_unused(), "posted work");
}

// Groups map, signal and unmap, while the owner takes the memory back again and again.
void mapped_memory_is_not_touched_after_it_was_revoked() {
    constexpr u32 kThreads = 2, kGroups = 2, kRounds = 200;
    Direct direct;
    static u64 places[2][kThreads * kGroups];
    std::atomic<bool> stop{false};
    std::atomic<u64> mapped{0};
    ThreadGroup thread_groups[kGroups] = {ThreadGroup(kThreads), ThreadGroup(kThreads)};
    std::thread owner([&] {
        DirectEntry &entry = direct.table.remote[Direct::slot(kKey)];
        u64 failures = 0;
        for (u32 round = 0; round < kRounds; round++) {
            u64 *place = places[round % 2], before = mapped;
            direct.open_remote(kThere, place, sizeof places[0]);
            while (mapped == before) sched_yield();
            while (!Direct::revoke(entry)) sched_yield();
            for (u32 i = 0; i < kThreads * kGroups; i++) __atomic_store_n(&place[i], 0xdead, __ATOMIC_RELAXED);
            for (u32 i = 0; i < 20; i++) sched_yield();
            for (u32 i = 0; i < kThreads * kGroups; i++) failures += __atomic_load_n(&place[i], __ATOMIC_RELAXED) != 0xdead;
        }
        stop = true;
        CHECK_EQ(failures, 0);
    });
    in_parallel(kThreads * kGroups, [&](u32 number) {
        GroupMember me{&thread_groups[number / kThreads], number % kThreads};
        bool ended = false;
        while (!ended) {
            Mapping mapping = map_remote(direct.qp(), Remote{kThere, kKey}, 8 * kThreads * kGroups, kMapWrite, me);
            if (mapping.pointer) mapped++;
            for (u64 round = 1; !me.any(is_revoked(mapping)); round++) {
                u64 *words = static_cast<u64 *>(mapping.pointer);
                __atomic_store_n(&words[number], round, __ATOMIC_RELAXED);
                set_signal(&words[number / kThreads * kThreads], round, me);
            }
            unmap(mapping, me);
            ended = me.any(stop);
        }
    });
    owner.join();
    CHECK(direct.is_unused(), "a user is left");
}

const Case kCases[] = {
    CASE(copies_of_every_length_and_alignment), CASE(atomics_and_signals), CASE(what_is_not_allowed_is_posted),
    CASE(direct_work_waits_for_nothing_and_follows_what_was_posted), CASE(groups_copy_together),
    CASE(revoked_memory_is_not_touched), CASE(mapped_memory), CASE(mapped_memory_is_not_touched_after_it_was_revoked),
};

}  // namespace

int main(int count, char **names) { return run_cases(kCases, count, names); }

// Tests of verbs.cuh on CPU threads, with a model of the HCA as the consumer of the queues.
// tools/header-tests builds it with sanitizers and runs it; an argument names the cases to run.
#include "harness.hpp"
#define WARPWIRE_FILL_TIMEOUT (3ull * 1000 * 1000 * 1000)
#include "every_call.hpp"
#include "model.hpp"

using namespace model;

namespace {

constexpr u64 kSecond = 1000ull * 1000 * 1000, kSoon = 60 * kSecond;

// WQEs and doorbells equal bytes recorded from other writers of such queues.
void entries_are_those_of_the_vectors() {
    Pair pair(0x123, 8, 2, 5);
    Ticket write = put(*pair.qp, Remote{0x7f0000001000, 0x1234}, Local{0x7fee00002000, 0x5678}, 256);
    Ticket add = fetch_add(*pair.qp, Remote{0x7f0000002000, 0x1234}, 7, Local{0x7fee00003000, 0x5678});
    CHECK_EQ(write.number, 5);
    CHECK_EQ(add.number, 6);
    const u32 wanted_write[12] = {0x00000508, 0x00012303, 0x00000008, 0, 0x00007f00, 0x00001000, 0x1234, 0, 0x100, 0x5678, 0x7fee, 0x2000};
    const u32 wanted_add[16] = {0x00000612, 0x00012304, 0x00000008, 0, 0x00007f00, 0x00002000, 0x1234, 0, 0, 7, 0, 0, 8, 0x5678, 0x7fee, 0x3000};
    const u32 *queue = reinterpret_cast<const u32 *>(pair.qp->send_queue);
    for (int i = 0; i < 12; i++) CHECK_EQ(be(queue[5 * 16 + i]), wanted_write[i]);
    for (int i = 0; i < 16; i++) CHECK_EQ(be(queue[6 * 16 + i]), wanted_add[i]);
    const u32 *bell = reinterpret_cast<const u32 *>(pair.qp->doorbell);
    CHECK_EQ(be(bell[0]), 0x00000700);
    CHECK_EQ(be(bell[1]), 0x00012300);
    Pair strict(0x123, 8, 2, 6, kDbrecFirst);
    signal(*strict.qp, Remote{0, 1}, 1);
    CHECK_EQ(be(reinterpret_cast<u32 *>(strict.qp->dbrec)[1]), 7);
}

void every_call_transfers_its_data(u64 start) {
    Link link(8, start);
    Qp &qp = *link.a.qp, &other = *link.b.qp;
    u64 from[4] = {1, 2, 3, 4}, to[4] = {}, word = 40, result = 0;
    Local here{address(from), kKey};
    Remote there{address(to), kKey}, counter{address(&word), kKey};
    CHECK_EQ(wait(qp, put(qp, there, here, 32)), kOk);
    CHECK_EQ(to[3], 4);
    from[0] = 9;
    CHECK_EQ(wait(qp, put_signal(qp, there, here, 8, counter, 2)), kOk);
    CHECK_EQ(to[0], 9);
    CHECK_EQ(word, 42);
    to[1] = 77;
    CHECK_EQ(wait(qp, get(qp, Local{address(from), kKey}, Remote{address(to), kKey}, 16)), kOk);
    CHECK_EQ(from[1], 77);
    CHECK_EQ(wait(qp, fetch_add(qp, counter, 8, Local{address(&result), kKey})), kOk);
    CHECK_EQ(result, 42);
    CHECK_EQ(wait(qp, compare_swap(qp, counter, 50, 7, Local{address(&result), kKey})), kOk);
    CHECK_EQ(wait(qp, compare_swap(qp, counter, 50, 8, Local{address(&result), kKey})), kOk);
    CHECK_EQ(result, 7);
    CHECK_EQ(word, 7);
    ReceivedMessage message;
    Ticket first = post_receive(other, Local{address(to), kKey}, 32), second = post_receive(other, Local{0, 0}, 0);
    CHECK_EQ(test_receive(other, first, &message), kNotReady);
    CHECK_EQ(send_imm(qp, here, 24, 0x01020304).status, kOk);
    CHECK_EQ(put_imm(qp, there, here, 8, 5).status, kOk);
    CHECK_EQ(wait_receive(other, first, &message), kOk);
    CHECK(message.length == 24 && message.imm == 0x01020304 && message.has_imm, "length %u, imm %x", message.length, message.imm);
    CHECK_EQ(wait_receive(other, second, &message), kOk);
    CHECK(message.length == 8 && message.imm == 5 && message.has_imm, "length %u, imm %x", message.length, message.imm);
    Ticket third = post_receive(other, Local{address(to), kKey}, 32);
    CHECK_EQ(send(qp, here, 0).status, kOk);
    CHECK_EQ(wait_receive(other, third, &message), kOk);
    CHECK(message.length == 0 && !message.has_imm, "length %u", message.length);
    CHECK_EQ(quiet(qp), kOk);
    CHECK_EQ(quiet(other), kOk);
}

void every_call() {
    // Also where the 16-bit WQE counter, and the lower 32 bits of the counters, wrap.
    for (u64 start : {0ull, 65530ull, (1ull << 32) - 5}) every_call_transfers_its_data(start);
}

void inline_puts_of_every_length() {
    Link link(4);
    for (u32 length = 0; length <= kMaxInline; length++) {
        u8 from[kMaxInline], to[kMaxInline] = {};
        for (u32 i = 0; i < kMaxInline; i++) from[i] = static_cast<u8>(i + length + 1);
        CHECK_EQ(wait(*link.a.qp, put_inline(*link.a.qp, Remote{address(to), kKey}, from, length)), kOk);
        for (u32 i = 0; i < kMaxInline; i++) CHECK_EQ(to[i], i < length ? from[i] : 0);
    }
    u8 more[64] = {};
    Ticket refused = put_inline(*link.a.qp, Remote{address(more), kKey}, more, kMaxInline + 1);
    CHECK_EQ(refused.status, kTooLong);
    CHECK_EQ(wait(*link.a.qp, refused), kTooLong);
}

void long_transfers_are_split_and_empty_ones_are_posted() {
    Link link(4);
    Qp &qp = *link.a.qp;
    CHECK_EQ(wait(qp, put(qp, Remote{0, kNowhere}, Local{0, kNowhere}, (5ull << 29) + 3)), kOk);
    CHECK_EQ(wait(qp, put(qp, Remote{0, kNowhere}, Local{0, kNowhere}, 0)), kOk);
    CHECK_EQ(wait(qp, put(qp, Remote{0, kNowhere}, Local{0, kNowhere}, kMaxBytes)), kOk);
    const std::vector<u32> wanted = {1u << 30, 1u << 30, (1u << 29) + 3, 0, 1u << 30};
    CHECK(link.a.sent_lengths == wanted, "%zu entries", link.a.sent_lengths.size());
    CHECK_EQ(send(qp, Local{0, kKey}, kMaxBytes + 1).status, kTooLong);
    CHECK_EQ(send_imm(qp, Local{0, kKey}, kMaxBytes + 1, 1).status, kTooLong);
    CHECK_EQ(post_receive(qp, Local{0, kKey}, (1u << 30) + 1).status, kTooLong);
}

// Many threads on few queue pairs: nothing is lost or duplicated, each sees its own completion.
void many_threads(u32 depth, u64 start, u32 threads, u32 rounds, u32 flags) {
    Link link(depth, start, flags);
    std::vector<u64> places(threads * 2), results(threads);
    u64 sum = 0, last = 0;
    in_parallel(threads, [&](u32 number) {
        Qp &qp = number % 2 ? *link.a.qp : *link.b.qp;
        Ticket late = {};
        for (u64 round = 1; round <= rounds; round++) {
            u64 value = round << 8 | number;
            Ticket wrote = put_inline(qp, Remote{address(&places[number * 2]), kKey}, &value, 8, Thread{}, kSoon);
            CHECK_EQ(wrote.status, kOk);
            if (round == 1) late = wrote;
            Ticket added = fetch_add(qp, Remote{address(&sum), kKey}, number + 1, Local{address(&results[number]), kKey}, Thread{}, kSoon);
            CHECK_EQ(wait(qp, round % 3 ? added : wrote, kSoon), kOk);
            // The write is visible at the peer before the addition completes.
            if (round % 3) CHECK_EQ(__atomic_load_n(&places[number * 2], __ATOMIC_ACQUIRE), value);
            if (round % 64 == 0) CHECK_EQ(quiet(qp, kSoon), kOk);
        }
        CHECK_EQ(quiet(qp, kSoon), kOk);
        CHECK_EQ(wait(qp, late, 0), kOk);  // many laps later
        __atomic_fetch_add(&last, 1, __ATOMIC_RELAXED);
    });
    CHECK_EQ(sum, static_cast<u64>(rounds) * threads * (threads + 1) / 2);
    CHECK_EQ(last, threads);
    u64 posted = detail::filled(link.a.qp->send) + detail::filled(link.b.qp->send) - 2 * start;
    CHECK_EQ(posted, 2ull * rounds * threads);
    CHECK(link.a.doorbells + link.b.doorbells <= posted, "%llu rings", link.a.doorbells + link.b.doorbells);
}

void many_threads_share_queue_pairs() {
    many_threads(16, 0, 16, 600, 0);
    many_threads(4, 65500, 8, 400, kDbrecFirst);
    many_threads(64, (1ull << 32) - 700, 12, 600, 0);
    many_threads(2, 0, 5, 300, 0);
}

// All threads post and then only wait: an entry without a doorbell would never complete.
void one_thread_alone() {
    Link link(8, 65500, kSinglePoster);
    Qp &qp = *link.a.qp;
    u64 word = 0, result = 0;
    for (u64 round = 0; round < 500; round++) {
        Ticket ticket = fetch_add(qp, Remote{address(&word), kKey}, 1, Local{address(&result), kKey});
        if (round % 5 == 0) {
            CHECK_EQ(wait(qp, ticket, kSoon), kOk);
            CHECK_EQ(result, round);
        }
        CHECK_EQ(post_receive(*link.b.qp, Local{0, 0}, 0).status, kOk);
        CHECK_EQ(send(qp, Local{0, kKey}, 0).status, kOk);
    }
    CHECK_EQ(quiet(qp, kSoon), kOk);
    CHECK_EQ(word, 500);
    link.device.hold(true);
    for (int i = 0; i < 8; i++) CHECK_EQ(signal(qp, Remote{address(&word), kKey}, 1, Thread{}, kSoon).status, kOk);
    // The device may have been executing an entry when it was held.
    auto last = signal(qp, Remote{address(&word), kKey}, 1, Thread{}, 0).status;
    if (last == kOk) last = signal(qp, Remote{address(&word), kKey}, 1, Thread{}, 0).status;
    CHECK_EQ(last, kNotReady);
}

void no_doorbell_is_lost() {
    constexpr u32 kThreads = 4;
    const u32 rounds = is_full_effort() ? 2000 : 300;
    for (u32 depth : {4u, 64u}) {
        Link link(depth);
        ThreadGroup thread_group(kThreads);
        u64 word = 0;
        in_parallel(kThreads, [&](u32) {
            for (u32 round = 0; round < rounds; round++) {
                thread_group.sync();
                Ticket ticket = signal(*link.a.qp, Remote{address(&word), kKey}, 1);
                CHECK_EQ(wait(*link.a.qp, ticket, 5 * kSecond), kOk);
            }
        });
        CHECK_EQ(word, rounds * kThreads);
    }
}

void a_full_queue_blocks_and_times_out() {
    Link link(8);
    Qp &qp = *link.a.qp;
    u64 word = 0, one = 1;
    link.device.hold(true);
    std::vector<Ticket> posted;
    for (int i = 0; i < 8; i++) posted.push_back(signal(qp, Remote{address(&word), kKey}, 1));
    for (Ticket ticket : posted) CHECK_EQ(ticket.status, kOk);
    CHECK_EQ(put_inline(qp, Remote{address(&word), kKey}, &one, 8, Thread{}, 0).status, kNotReady);
    CHECK_EQ(put_inline(qp, Remote{address(&word), kKey}, &one, 8, Thread{}, 2000000).status, kTimeout);
    CHECK_EQ(test(qp, posted[0]), kNotReady);
    CHECK_EQ(wait(qp, posted[7], 2000000), kTimeout);
    CHECK_EQ(quiet(qp, 2000000), kTimeout);
    CHECK_EQ(qp.send.reserved, 8);  // timed-out posts reserve nothing
    link.device.hold(false);
    CHECK_EQ(wait(qp, signal(qp, Remote{address(&word), kKey}, 1), kSoon), kOk);
    CHECK_EQ(word, 9);
    CHECK_EQ(wait(qp, Ticket{9, kOk}), kBadTicket);
    // Receive queues fill up in the same way.
    for (u32 i = 0; i < link.a.receive_depth; i++) CHECK_EQ(post_receive(qp, Local{address(&word), kKey}, 8).status, kOk);
    CHECK_EQ(post_receive(qp, Local{address(&word), kKey}, 8, Thread{}, 0).status, kNotReady);
    ReceivedMessage message;
    CHECK_EQ(wait_receive(qp, Ticket{0, kOk}, &message, 2000000), kTimeout);
    CHECK_EQ(wait_receive(qp, Ticket{16, kOk}, &message, 0), kBadTicket);
}

void a_failure_is_reported_with_its_cause() {
    Link link(8);
    Qp &qp = *link.a.qp;
    u64 word = 0;
    Ticket receive = post_receive(qp, Local{address(&word), kKey}, 8);
    link.device.hold(true);
    Ticket good = signal(qp, Remote{address(&word), kKey}, 1), bad = signal(qp, Remote{address(&word), kBadKey}, 1);
    Ticket after = signal(qp, Remote{address(&word), kKey}, 1);
    link.device.hold(false);
    CHECK_EQ(wait(qp, after, kSoon), kFlushed);  // the first look records the first failure
    CHECK_EQ(wait(qp, bad, kSoon), kRemoteAccess);
    CHECK_EQ(wait(qp, good, kSoon), kOk);
    CHECK_EQ(quiet(qp, kSoon), kRemoteAccess);
    CHECK_EQ(qp.send.failure, bad.number << 8 | 0x13);
    CHECK_EQ(signal(qp, Remote{address(&word), kKey}, 1, Thread{}, kNoTimeout).status, kFlushed);
    ReceivedMessage message;
    CHECK_EQ(wait_receive(qp, receive, &message, kSoon), kFlushed);
    CHECK_EQ(next_receive(qp, &message, &receive.number, kSoon), kFlushed);
    CHECK_EQ(post_receive(qp, Local{address(&word), kKey}, 8).status, kFlushed);
    CHECK_EQ(word, 1);

    Link other(8);
    Ticket small = post_receive(*other.b.qp, Local{address(&word), kKey}, 4);
    Ticket sent = send(*other.a.qp, Local{address(&word), kKey}, 8);
    CHECK_EQ(wait(*other.a.qp, sent, kSoon), kRemoteInvalidRequest);
    CHECK_EQ(wait_receive(*other.b.qp, small, &message, kSoon), kLocalLength);
}

// One operation fails while all threads post and wait: all waits end, and agree on the results.
void a_failure_reaches_all_threads() {
    for (u32 trial = 0; trial < 24; trial++) {
        Link link(8 << trial % 3, trial % 2 ? 65530 : 0);
        Qp &qp = *link.a.qp;
        u64 word = 0;
        u64 first_bad = ~0ull;
        std::vector<std::vector<std::pair<u64, Status>>> seen(8);
        in_parallel(8, [&](u32 number) {
            for (u32 round = 0;; round++) {
                bool bad = number == trial % 8 && round == 20 + trial;
                Ticket ticket = signal(qp, Remote{address(&word), bad ? kBadKey : kKey}, 1, Thread{}, kSoon);
                if (ticket.status != kOk) {
                    CHECK_EQ(ticket.status, kFlushed);
                    break;
                }
                if (bad) __atomic_store_n(&first_bad, ticket.number, __ATOMIC_RELAXED);
                if (round % 2 == number % 2) seen[number].emplace_back(ticket.number, wait(qp, ticket, kSoon));
            }
        });
        for (const auto &list : seen)
            for (auto [number, status] : list) {
                Status wanted = number < first_bad ? kOk : number == first_bad ? kRemoteAccess : kFlushed;
                CHECK(status == wanted, "%llu ended with %s, the first failure is %llu", number, name(status), first_bad);
            }
        CHECK_EQ(qp.send.failure, first_bad << 8 | 0x13);
    }
}

void closing_wakes_all_waiters() {
    Link link(4);
    Qp &qp = *link.a.qp;
    u64 word = 0;
    link.device.hold(true);
    Ticket receive = post_receive(qp, Local{address(&word), kKey}, 8);
    Ticket sent[4];
    for (Ticket &one : sent) one = signal(qp, Remote{address(&word), kKey}, 1);
    std::atomic<u32> woken{0};
    std::thread closer([&] {
        std::this_thread::sleep_for(std::chrono::milliseconds(30));
        detail::store_system(&qp.send.closed, 0x100);
        detail::store_system(&qp.receive.closed, 0x100);
    });
    in_parallel(5, [&](u32 number) {
        ReceivedMessage message;
        u64 which;
        Status status = number == 0   ? wait(qp, sent[0], kNoTimeout)
                        : number == 1 ? wait_receive(qp, receive, &message, kNoTimeout)
                        : number == 2 ? next_receive(qp, &message, &which, kNoTimeout)
                        : number == 3 ? quiet(qp, kNoTimeout)
                                      : signal(qp, Remote{address(&word), kKey}, 1, Thread{}, kNoTimeout).status;
        CHECK_EQ(status, kClosed);
        woken++;
    });
    closer.join();
    CHECK_EQ(woken, 5);
    CHECK_EQ(test(qp, sent[0]), kClosed);
}

void an_entry_that_is_never_filled_closes_the_queue() {
    Link link(8);
    Qp &qp = *link.a.qp;
    u64 word = 0, taken;
    CHECK_EQ(detail::reserve(detail::sends(qp), 1, 0, &taken), kOk);
    CHECK_EQ(signal(qp, Remote{address(&word), kKey}, 1).status, kStuck);
    CHECK_EQ(signal(qp, Remote{address(&word), kKey}, 1).status, kStuck);
}

void groups_post_once_and_each_for_itself() {
    constexpr u32 kThreads = 4, kRounds = 100;
    Link link(16, 65520);
    Qp &qp = *link.a.qp;
    ThreadGroup thread_group(kThreads);
    u64 sum = 0, results[kThreads] = {};
    u32 data[kThreads] = {}, arrived[kThreads] = {};
    in_parallel(kThreads, [&](u32 number) {
        GroupMember me{&thread_group, number};
        for (u32 round = 1; round <= kRounds; round++) {
            data[number] = round;  // each thread writes a part of the data
            Ticket ticket = put_signal(qp, Remote{address(arrived), kKey}, Local{address(data), kKey}, sizeof data, Remote{address(&sum), kKey}, 1, me, kSoon);
            CHECK_EQ(wait(qp, ticket, kSoon, me), kOk);
            for (u32 part : arrived) CHECK_EQ(part, round);
            me.sync();
            Ticket mine = fetch_add(qp, Remote{address(&sum), kKey}, 1000, Local{address(&results[number]), kKey}, each(me), kSoon);
            CHECK_EQ(wait(qp, mine, kSoon, each(me)), kOk);
            CHECK_EQ(results[number] % 1000, round);
            mine = put_signal(qp, Remote{address(&arrived[number]), kKey}, Local{address(&data[number]), kKey}, 4, Remote{address(&sum), kKey}, 0, each(me), kSoon);
            CHECK_EQ(wait(qp, mine, kSoon, each(me)), kOk);
            me.sync();
        }
        // One operation does not fit: it is not executed, the others are.
        u8 bytes[64] = {};
        Ticket mine = put_inline(qp, Remote{address(&arrived[number]), kKey}, bytes, number == 2 ? 64 : 4, each(me), kSoon);
        CHECK_EQ(mine.status, number == 2 ? kTooLong : kOk);
        CHECK_EQ(quiet(qp, kSoon, me), kOk);
        CHECK_EQ(arrived[number], number == 2 ? kRounds : 0);
        CHECK_EQ(wait_signal(&sum, Condition::AtLeast, sum, kSoon, me), kOk);
        ReceivedMessage message;
        Ticket receive = post_receive(*link.b.qp, Local{address(arrived), kKey}, 16, me, kSoon);
        if (number == 0) CHECK_EQ(send_imm(qp, Local{address(data), kKey}, 16, 9).status, kOk);
        CHECK_EQ(wait_receive(*link.b.qp, receive, &message, kSoon, me), kOk);
        CHECK(message.length == 16 && message.imm == 9, "length %u", message.length);
        me.sync();
    });
    CHECK_EQ(sum, kRounds + 1000ull * kRounds * kThreads);
    Link tiny(2);
    in_parallel(kThreads, [&](u32 number) {
        GroupMember me{&thread_group, number};
        CHECK_EQ(signal(*tiny.a.qp, Remote{address(&sum), kKey}, 1, each(me)).status, kTooMany);
    });
}

void receives_are_returned_in_order_and_once() {
    constexpr u32 kMessages = 2000, kTakers = 3;
    Link link(8, 65000);
    Qp &from = *link.a.qp, &to = *link.b.qp;
    std::vector<std::atomic<u32>> seen(kMessages);
    std::atomic<u32> taken{0};
    u64 data = 0, room[16];
    in_parallel(kTakers + 2, [&](u32 number) {
        if (number == 0) {
            for (u32 i = 0; i < kMessages; i++) CHECK_EQ(send_imm(from, Local{address(&data), kKey}, i % 9, i, Thread{}, kSoon).status, kOk);
        } else if (number == 1) {
            for (u32 i = 0; i < kMessages; i++) {
                // At most one lap ahead of the consumers: a length is available for one lap.
                while (taken + 8 < i) std::this_thread::yield();
                CHECK_EQ(post_receive(to, Local{address(&room[i % 16]), kKey}, 8, Thread{}, kSoon).status, kOk);
            }
        } else {
            while (taken < kMessages) {
                ReceivedMessage message;
                u64 which;
                Status status = next_receive(to, &message, &which, 1000000);
                if (status == kTimeout) continue;
                CHECK_EQ(status, kOk);
                CHECK_EQ(message.imm, which - 65000);
                CHECK_EQ(message.length, message.imm % 9);
                CHECK_EQ(seen[message.imm]++, 0);
                taken++;
            }
        }
    });
    CHECK_EQ(taken, kMessages);
    // A wait one lap later gets kTooLate.
    Ticket old = post_receive(to, Local{address(&room), kKey}, 8);
    for (u32 i = 0; i < 16; i++) {
        CHECK_EQ(send(from, Local{address(&data), kKey}, 8, Thread{}, kSoon).status, kOk);
        CHECK_EQ(post_receive(to, Local{address(&room), kKey}, 8, Thread{}, kSoon).status, kOk);
    }
    ReceivedMessage message;
    CHECK_EQ(wait_receive(to, old, &message, kSoon), kTooLate);
}

template <class Word> void conditions_of() {
    const Word top = static_cast<Word>(~static_cast<Word>(0));
    struct { Condition condition; Word seen, value; bool holds; } rows[] = {
        {Condition::AtLeast, 5, 5, true}, {Condition::AtLeast, 4, 5, false}, {Condition::AtLeast, 1, static_cast<Word>(top - 1), true},
        {Condition::AtLeast, static_cast<Word>(top - 1), 1, false}, {Condition::Equal, 7, 7, true}, {Condition::Equal, 8, 7, false},
        {Condition::And, 6, 2, true}, {Condition::And, 4, 2, false}, {Condition::And, 0, top, false},
        {Condition::Nor, 0, 0, true}, {Condition::Nor, top, 0, false}, {Condition::Nor, static_cast<Word>(top << 4), 15, false},
        {Condition::Nor, static_cast<Word>(top << 4), 7, true},
    };
    for (auto row : rows) CHECK_EQ(wait_signal(&row.seen, row.condition, row.value, 0), row.holds ? kOk : kNotReady);
    Word word = 0;
    CHECK_EQ(wait_signal(&word, Condition::Equal, Word(1), 2000000), kTimeout);
    std::thread other([&] { __atomic_store_n(&word, Word(1), __ATOMIC_RELEASE); });
    CHECK_EQ(wait_signal(&word, Condition::Equal, Word(1), kSoon), kOk);
    other.join();
}

void signals_of_both_widths_mean_all_four_conditions() {
    conditions_of<u32>();
    conditions_of<u64>();
}

const Case kCases[] = {
    CASE(entries_are_those_of_the_vectors), CASE(every_call), CASE(inline_puts_of_every_length),
    CASE(long_transfers_are_split_and_empty_ones_are_posted), CASE(many_threads_share_queue_pairs), CASE(one_thread_alone), CASE(no_doorbell_is_lost),
    CASE(a_full_queue_blocks_and_times_out), CASE(a_failure_is_reported_with_its_cause), CASE(a_failure_reaches_all_threads),
    CASE(closing_wakes_all_waiters), CASE(an_entry_that_is_never_filled_closes_the_queue),
    CASE(groups_post_once_and_each_for_itself), CASE(receives_are_returned_in_order_and_once),
    CASE(signals_of_both_widths_mean_all_four_conditions),
};

}  // namespace

int main(int count, char **names) { return run_cases(kCases, count, names); }

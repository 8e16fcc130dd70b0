// The header's code on CPU threads, as a library for the suite: the software HCA consumes what they
// post.
#include "../header/model.hpp"
#include "calls.hpp"

extern "C" {

// Sizes and offsets, to be compared with those of Rust.
void cpu_layout(u64 *out) {
    u64 all[] = {sizeof(Qp), sizeof(QueueCounters), __builtin_offsetof(Qp, send_queue), __builtin_offsetof(Qp, receive_queue),
                 __builtin_offsetof(Qp, dbrec), __builtin_offsetof(Qp, doorbell), __builtin_offsetof(Qp, send_cq),
                 __builtin_offsetof(Qp, receive_cq), __builtin_offsetof(Qp, sink), __builtin_offsetof(Qp, send_mask),
                 __builtin_offsetof(Qp, receive_mask), __builtin_offsetof(Qp, number), __builtin_offsetof(Qp, receive_stride),
                 __builtin_offsetof(Qp, sink_lkey), __builtin_offsetof(Qp, flags), __builtin_offsetof(Qp, version),
                 __builtin_offsetof(Qp, send), __builtin_offsetof(Qp, receive), __builtin_offsetof(QueueCounters, reserved),
                 __builtin_offsetof(QueueCounters, published), __builtin_offsetof(QueueCounters, completed), __builtin_offsetof(QueueCounters, failure),
                 __builtin_offsetof(QueueCounters, closed), __builtin_offsetof(QueueCounters, taken), kVersion, kNoFailure, kSinglePoster,
                 kDbrecFirst};
    std::memcpy(out, all, sizeof all);
}

// The name of a status.
const char *cpu_name(int status) { return name(static_cast<Status>(status)); }

void cpu_active(Qp *qp, u64 *words) { act(*qp, words, Thread{}); }
void cpu_passive(Qp *qp, u64 *words) { answer(*qp, words, Thread{}); }
void cpu_fail(Qp *qp, u64 *words) { fail(*qp, words); }
void cpu_one(Qp *qp, u64 *words) { one(*qp, words); }

// The same calls by groups of threads; each thread reads its own list, and the first one's results
// count.
void cpu_active_by_group(Qp *qp, u64 *words, u32 members) {
    model::ThreadGroup thread_group(members);
    model::in_parallel(members, [&](u32 number) { act(*qp, words, model::GroupMember{&thread_group, number}); });
}

// As calls_storm: `threads` threads, in groups of four that post together if `together`. Returns
// the number of failures.
u64 cpu_storm(Qp **qps, u64 **lists, u64 pairs, u32 threads, u64 rounds, u64 together) {
    std::atomic<u64> failures{0};
    std::vector<std::unique_ptr<model::ThreadGroup>> thread_groups;
    for (u32 number = 0; number < threads / 4; number++) thread_groups.push_back(std::make_unique<model::ThreadGroup>(4));
    model::in_parallel(threads, [&](u32 thread) {
        u64 which = thread / 4 % pairs;
        Qp &qp = *qps[which];
        const u64 *words = lists[which];
        u64 timeout = words[kAtTimeout];
        model::GroupMember me{thread_groups[thread / 4].get(), thread % 4};
        Remote target{words[kAtThere] + thread * 8, static_cast<u32>(words[kAtThereKey])};
        Remote word{words[kAtWord], static_cast<u32>(words[kAtWordKey])};
        for (u64 round = 1; round <= rounds; round++) {
            Ticket wrote = together ? put_inline(qp, target, &round, 8, each(me), timeout) : put_inline(qp, target, &round, 8, Thread{}, timeout);
            Ticket added = together ? signal(qp, word, 1, each(me), timeout) : signal(qp, word, 1, Thread{}, timeout);
            failures += (wrote.status != kOk) + (added.status != kOk);
            if (round % 16 == 0 || round == rounds) failures += wait(qp, added, timeout) != kOk;
        }
    });
    return failures;
}
}

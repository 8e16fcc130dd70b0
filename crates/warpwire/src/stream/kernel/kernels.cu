// One-thread kernels that a stream runs and a graph replays: each run posts or waits anew.
// kernels.rs has the equivalents for the simulated GPU. On failure a kernel returns, so that the
// stream continues, and reports to the host.
#include <warpwire/verbs.cuh>

using namespace warpwire;

// Identifies the reporting kernel; `KERNELS` in kernels.rs has the names in this order.
enum KernelId : u64 {
    kPut,
    kPutImm,
    kPutSignal,
    kGet,
    kSendMessage,
    kAtomic,
    kWait,
    kPostReceive,
    kReceive,
    kWaitSignal
};

static __device__ void report(u64 at, KernelId id, Status status) {
    if (status == kOk) return;
    // Keep only the first failure: the others follow from it.
    detail::compare_exchange((u64 *)at, 0, 1ull << 63 | id << 32 | (u32)status);
    detail::fence_system();
}

extern "C" __global__ void stream_put(u64 qp, u64 at, u64 to, u64 rkey, u64 from, u64 lkey, u64 length, u64 timeout) {
    Ticket ticket = put(*(Qp *)qp, Remote{to, (u32)rkey}, Local{from, (u32)lkey}, length, Thread{}, timeout);
    report(at, kPut, ticket.status);
}

extern "C" __global__ void stream_put_imm(u64 qp, u64 at, u64 to, u64 rkey, u64 from, u64 lkey, u64 length, u64 imm, u64 timeout) {
    Ticket ticket = put_imm(*(Qp *)qp, Remote{to, (u32)rkey}, Local{from, (u32)lkey}, length, (u32)imm, Thread{}, timeout);
    report(at, kPutImm, ticket.status);
}

extern "C" __global__ void stream_put_signal(u64 qp, u64 at, u64 to, u64 rkey, u64 from, u64 lkey, u64 length, u64 word,
                                             u64 word_rkey, u64 add, u64 timeout) {
    Ticket ticket = put_signal(*(Qp *)qp, Remote{to, (u32)rkey}, Local{from, (u32)lkey}, length,
                               Remote{word, (u32)word_rkey}, add, Thread{}, timeout);
    report(at, kPutSignal, ticket.status);
}

extern "C" __global__ void stream_get(u64 qp, u64 at, u64 to, u64 lkey, u64 from, u64 rkey, u64 length, u64 timeout) {
    Ticket ticket = get(*(Qp *)qp, Local{to, (u32)lkey}, Remote{from, (u32)rkey}, length, Thread{}, timeout);
    report(at, kGet, ticket.status);
}

extern "C" __global__ void stream_send(u64 qp, u64 at, u64 from, u64 lkey, u64 length, u64 has_imm, u64 imm, u64 timeout) {
    Local memory{from, (u32)lkey};
    Ticket ticket = has_imm ? send_imm(*(Qp *)qp, memory, length, (u32)imm, Thread{}, timeout)
                            : send(*(Qp *)qp, memory, length, Thread{}, timeout);
    report(at, kSendMessage, ticket.status);
}

// Adds `first`, or replaces `first` by `second`. Key 0x100 (invalid) discards the result.
extern "C" __global__ void stream_atomic(u64 qp, u64 at, u64 word, u64 rkey, u64 swaps, u64 first, u64 second, u64 result,
                                         u64 lkey, u64 timeout) {
    Qp &pair = *(Qp *)qp;
    Remote remote{word, (u32)rkey};
    Local local = lkey == 0x100 ? Local{pair.sink, pair.sink_lkey} : Local{result, (u32)lkey};
    Ticket ticket = swaps ? compare_swap(pair, remote, first, second, local, Thread{}, timeout)
                          : fetch_add(pair, remote, first, local, Thread{}, timeout);
    report(at, kAtomic, ticket.status);
}

extern "C" __global__ void stream_wait(u64 qp, u64 at, u64 timeout) { report(at, kWait, quiet(*(Qp *)qp, timeout)); }

extern "C" __global__ void stream_post_receive(u64 qp, u64 at, u64 into, u64 lkey, u64 length, u64 timeout) {
    report(at, kPostReceive, post_receive(*(Qp *)qp, Local{into, (u32)lkey}, (u32)length, Thread{}, timeout).status);
}

// Stores length, immediate, has_imm and status at `message`, unless that is 0.
extern "C" __global__ void stream_receive(u64 qp, u64 at, u64 message, u64 timeout) {
    ReceivedMessage found = {0, 0, 0};
    u64 number;
    Status status = next_receive(*(Qp *)qp, &found, &number, timeout);
    if (message) {
        u32 *words = (u32 *)message;
        words[0] = found.length, words[1] = found.imm, words[2] = found.has_imm, words[3] = (u32)status;
    }
    report(at, kReceive, status);
}

// Each run waits for a value `step` greater than that of the previous run, which is kept in
// `counter`.
extern "C" __global__ void stream_wait_signal(u64 at, u64 word, u64 width, u64 counter, u64 step, u64 timeout) {
    u64 wanted = *(u64 *)counter + step;
    *(u64 *)counter = wanted;
    Status status = width == 4 ? wait_signal((const u32 *)word, Condition::AtLeast, (u32)wanted, timeout)
                               : wait_signal((const u64 *)word, Condition::AtLeast, wanted, timeout);
    report(at, kWaitSignal, status);
}

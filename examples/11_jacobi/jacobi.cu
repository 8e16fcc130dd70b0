// One step of a Jacobi solver on the rows of one rank; with `exchange`, also the halo exchange with
// the ranks above and below. kernel.rs has the same kernel for the simulated GPU.
#include <warpwire/verbs.cuh>

using namespace warpwire;

// A neighbour, in the layout that solver.rs writes.
struct Neighbour {
    u64 qp;       // 0 if there is no neighbour
    u64 to[2];    // address of our row in each of its two grids
    u64 rkey;
    u64 word;     // its counter of rows from us
    u64 word_rkey;
    u64 own;      // our counter of rows from it
};

struct Exchange {
    Neighbour up, down;
    u64 lkey;
    u64 finished;  // finished blocks, summed over all steps
    u64 report;
    u64 timeout;
};

static __device__ void check(const Exchange &exchange, Status status) {
    if (status != kOk) detail::compare_exchange((u64 *)exchange.report, 0, 1ull << 63 | (u32)status);
}

static __device__ void wait_row(const Exchange &exchange, const Neighbour &neighbour, u64 step) {
    if (neighbour.qp && step) check(exchange, wait_signal((const u64 *)neighbour.own, Condition::AtLeast, step, exchange.timeout));
}

static __device__ void send_row(const Exchange &exchange, const Neighbour &neighbour, u64 row, u64 bytes, u64 step) {
    if (!neighbour.qp) return;
    Ticket ticket = put_signal(*(Qp *)neighbour.qp, Remote{neighbour.to[(step + 1) % 2], (u32)neighbour.rkey},
                               Local{row, (u32)exchange.lkey}, bytes, Remote{neighbour.word, (u32)neighbour.word_rkey}, 1, Thread{},
                               exchange.timeout);
    check(exchange, ticket.status);
}

extern "C" __global__ void jacobi_step(u64 from, u64 to, u64 rows, u64 columns, u64 step, u64 exchange_at) {
    const float *old = (const float *)from;
    float *next = (float *)to;
    const Exchange *exchange = (const Exchange *)exchange_at;
    for (u64 row = 1 + blockIdx.x; row <= rows; row += gridDim.x) {
        if (exchange && threadIdx.x == 0) {
            if (row == 1) wait_row(*exchange, exchange->up, step);
            if (row == rows) wait_row(*exchange, exchange->down, step);
        }
        __syncthreads();
        for (u64 column = 1 + threadIdx.x; column + 1 < columns; column += blockDim.x) {
            u64 at = row * columns + column;
            // The HCA writes the halos, so they must bypass L1, which is not coherent with it.
            float above = __ldcg(&old[at - columns]), below = __ldcg(&old[at + columns]);
            next[at] = ((above + below) + (old[at - 1] + old[at + 1])) * 0.25f;
        }
    }
    if (!exchange) return;
    detail::fence_system();
    __syncthreads();
    if (threadIdx.x == 0) {
        u64 before = atomicAdd((u64 *)exchange->finished, 1);
        detail::fence_system();
        // The last block to finish sends: all rows are complete.
        if (before + 1 == gridDim.x * (step + 1)) {
            send_row(*exchange, exchange->up, to + columns * 4, columns * 4, step);
            send_row(*exchange, exchange->down, to + rows * columns * 4, columns * 4, step);
        }
    }
}

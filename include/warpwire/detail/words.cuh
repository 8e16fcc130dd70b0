// Memory accesses with ordering and scope, for CUDA and for the CPU. Part of verbs.cuh.
//
// Counters are shared by the threads of one GPU (gpu scope); queues, doorbells and signals are
// shared with the HCA, the host and peers (sys scope).
#ifndef WARPWIRE_DETAIL_WORDS_CUH
#define WARPWIRE_DETAIL_WORDS_CUH

#include <warpwire/group.cuh>

namespace warpwire {

namespace detail {

#if WARPWIRE_CUDA
WARPWIRE_FN u64 load_relaxed(const u64 *p) {
    u64 v;
    asm volatile("ld.relaxed.gpu.u64 %0, [%1];" : "=l"(v) : "l"(p) : "memory");
    return v;
}
WARPWIRE_FN u64 load_acquire(const u64 *p) {
    u64 v;
    asm volatile("ld.acquire.gpu.u64 %0, [%1];" : "=l"(v) : "l"(p) : "memory");
    return v;
}
// Also written by the host: sys scope.
WARPWIRE_FN u32 load_closed(const u32 *p) {
    u32 v;
    asm volatile("ld.relaxed.sys.u32 %0, [%1];" : "=r"(v) : "l"(p) : "memory");
    return v;
}
WARPWIRE_FN void store_closed(u32 *p, u32 v) {
    asm volatile("st.relaxed.sys.u32 [%0], %1;" ::"l"(p), "r"(v) : "memory");
}
// For a word that only its current owner writes, directly after a fence.
WARPWIRE_FN void store_after_fence(u64 *p, u64 v) {
    asm volatile("st.relaxed.gpu.u64 [%0], %1;" ::"l"(p), "l"(v) : "memory");
}
// Replaces `old` by `next`; returns the previous value.
WARPWIRE_FN u64 compare_exchange(u64 *p, u64 old, u64 next) {
    u64 seen;
    asm volatile("atom.acq_rel.gpu.cas.b64 %0, [%1], %2, %3;" : "=l"(seen) : "l"(p), "l"(old), "l"(next) : "memory");
    return seen;
}
WARPWIRE_FN void atomic_max(u64 *p, u64 v) {
    asm volatile("fence.acq_rel.gpu;\n\tred.relaxed.gpu.max.u64 [%0], %1;" ::"l"(p), "l"(v) : "memory");
}
WARPWIRE_FN void atomic_min(u64 *p, u64 v) {
    asm volatile("fence.acq_rel.gpu;\n\tred.relaxed.gpu.min.u64 [%0], %1;" ::"l"(p), "l"(v) : "memory");
}
// Queues, doorbells and signals: sys scope.
WARPWIRE_FN u32 system_load(const u32 *p) {
    u32 v;
    asm volatile("ld.acquire.sys.u32 %0, [%1];" : "=r"(v) : "l"(p) : "memory");
    return v;
}
WARPWIRE_FN u64 system_load(const u64 *p) {
    u64 v;
    asm volatile("ld.acquire.sys.u64 %0, [%1];" : "=l"(v) : "l"(p) : "memory");
    return v;
}
WARPWIRE_FN void system_fence() { asm volatile("fence.acq_rel.sys;" ::: "memory"); }
// Call system_fence first.
WARPWIRE_FN void system_store(u32 *p, u32 v) { asm volatile("st.relaxed.sys.u32 [%0], %1;" ::"l"(p), "r"(v) : "memory"); }
WARPWIRE_FN void system_store(u64 *p, u64 v) { asm volatile("st.relaxed.sys.u64 [%0], %1;" ::"l"(p), "l"(v) : "memory"); }
WARPWIRE_FN void store_segment(u64 at, u32 a, u32 b, u32 c, u32 d) {
    asm volatile("st.v4.u32 [%0], {%1, %2, %3, %4};" ::"l"(at), "r"(a), "r"(b), "r"(c), "r"(d) : "memory");
}
WARPWIRE_FN u32 big_endian(u32 v) { return __byte_perm(v, 0, 0x0123); }
WARPWIRE_FN u64 clock_ns() {
    u64 v;
    asm volatile("mov.u64 %0, %%globaltimer;" : "=l"(v));
    return v;
}
// For contended atomics: lets other threads make progress.
WARPWIRE_FN void backoff() { __nanosleep(64); }
// Between two polls of a word that is written from outside this GPU.
WARPWIRE_FN void spin_pause() {}
#else
// Tests switch threads here.
#ifndef WARPWIRE_YIELD_POINT
#define WARPWIRE_YIELD_POINT()
#endif
inline u64 load_relaxed(const u64 *p) {
    WARPWIRE_YIELD_POINT();
    return __atomic_load_n(p, __ATOMIC_RELAXED);
}
inline u64 load_acquire(const u64 *p) {
    WARPWIRE_YIELD_POINT();
    return __atomic_load_n(p, __ATOMIC_ACQUIRE);
}
inline u32 load_closed(const u32 *p) {
    WARPWIRE_YIELD_POINT();
    return __atomic_load_n(p, __ATOMIC_RELAXED);
}
inline void store_closed(u32 *p, u32 v) {
    WARPWIRE_YIELD_POINT();
    __atomic_store_n(p, v, __ATOMIC_RELAXED);
}
inline void store_after_fence(u64 *p, u64 v) {
    WARPWIRE_YIELD_POINT();
    __atomic_store_n(p, v, __ATOMIC_RELEASE);
}
inline u64 compare_exchange(u64 *p, u64 old, u64 next) {
    WARPWIRE_YIELD_POINT();
    __atomic_compare_exchange_n(p, &old, next, false, __ATOMIC_ACQ_REL, __ATOMIC_ACQUIRE);
    return old;
}
inline void atomic_max(u64 *p, u64 v) {
    WARPWIRE_YIELD_POINT();
    u64 seen = __atomic_load_n(p, __ATOMIC_RELAXED);
    while (seen < v && !__atomic_compare_exchange_n(p, &seen, v, true, __ATOMIC_ACQ_REL, __ATOMIC_RELAXED)) {
    }
}
inline void atomic_min(u64 *p, u64 v) {
    WARPWIRE_YIELD_POINT();
    u64 seen = __atomic_load_n(p, __ATOMIC_RELAXED);
    while (seen > v && !__atomic_compare_exchange_n(p, &seen, v, true, __ATOMIC_ACQ_REL, __ATOMIC_RELAXED)) {
    }
}
inline u32 system_load(const u32 *p) {
    WARPWIRE_YIELD_POINT();
    return __atomic_load_n(p, __ATOMIC_ACQUIRE);
}
inline u64 system_load(const u64 *p) {
    WARPWIRE_YIELD_POINT();
    return __atomic_load_n(p, __ATOMIC_ACQUIRE);
}
inline void system_fence() {}  // the stores below are releases
inline void system_store(u32 *p, u32 v) {
    WARPWIRE_YIELD_POINT();
    __atomic_store_n(p, v, __ATOMIC_RELEASE);
}
inline void system_store(u64 *p, u64 v) {
    WARPWIRE_YIELD_POINT();
    __atomic_store_n(p, v, __ATOMIC_RELEASE);
}
inline void store_segment(u64 at, u32 a, u32 b, u32 c, u32 d) {
    u32 *p = reinterpret_cast<u32 *>(at);
    p[0] = a, p[1] = b, p[2] = c, p[3] = d;
}
inline u32 big_endian(u32 v) { return __builtin_bswap32(v); }
inline u64 clock_ns() {
    auto now = std::chrono::steady_clock::now().time_since_epoch();
    return static_cast<u64>(std::chrono::duration_cast<std::chrono::nanoseconds>(now).count());
}
// Waiting on the CPU. Next to busy processes each yield costs a time slice, while a sleeping thread
// keeps its claim to the processor: yielding ends with the first slow yield, and sleeps grow with
// the wait.
inline void backoff() {
    constexpr u64 kSameWait = 2000000, kSlowYield = 100000, kYielding = 1000000;
    constexpr u64 kMinSleep = 20000, kMaxSleep = 100000;
    thread_local u64 last = 0, since = 0;
    thread_local bool contended = false;
    const u64 before = clock_ns();
    if (before - last > kSameWait) since = before, contended = false;
    if (!contended) {
        std::this_thread::yield();
        last = clock_ns();
        contended = last - before > kSlowYield || last - since > kYielding;
        return;
    }
    u64 sleep = (before - since) / 8;
    sleep = sleep < kMinSleep ? kMinSleep : sleep > kMaxSleep ? kMaxSleep : sleep;
    std::this_thread::sleep_for(std::chrono::nanoseconds(sleep));
    last = clock_ns();
}
inline void spin_pause() { backoff(); }
#endif

}  // namespace detail
}  // namespace warpwire

#endif

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
// Words of this GPU's threads.
WARPWIRE_FN u64 load_gpu(const u64 *p) {
    u64 v;
    asm volatile("ld.acquire.gpu.u64 %0, [%1];" : "=l"(v) : "l"(p) : "memory");
    return v;
}
WARPWIRE_FN u32 load_gpu(const u32 *p) {
    u32 v;
    asm volatile("ld.acquire.gpu.u32 %0, [%1];" : "=r"(v) : "l"(p) : "memory");
    return v;
}
WARPWIRE_FN u64 load_gpu_relaxed(const u64 *p) {
    u64 v;
    asm volatile("ld.relaxed.gpu.u64 %0, [%1];" : "=l"(v) : "l"(p) : "memory");
    return v;
}
WARPWIRE_FN u32 load_gpu_relaxed(const u32 *p) {
    u32 v;
    asm volatile("ld.relaxed.gpu.u32 %0, [%1];" : "=r"(v) : "l"(p) : "memory");
    return v;
}
WARPWIRE_FN void store_gpu(u64 *p, u64 v) {
    asm volatile("st.release.gpu.u64 [%0], %1;" ::"l"(p), "l"(v) : "memory");
}
WARPWIRE_FN void store_gpu(u32 *p, u32 v) {
    asm volatile("st.release.gpu.u32 [%0], %1;" ::"l"(p), "r"(v) : "memory");
}
// For the holder of a lock: the next holder sees the value, as the unlock is a release after it.
WARPWIRE_FN void store_gpu_relaxed(u64 *p, u64 v) {
    asm volatile("st.relaxed.gpu.u64 [%0], %1;" ::"l"(p), "l"(v) : "memory");
}
// For a word that only its current owner writes, directly after a fence.
WARPWIRE_FN void store_after_fence(u64 *p, u64 v) {
    asm volatile("st.relaxed.gpu.u64 [%0], %1;" ::"l"(p), "l"(v) : "memory");
}
// Replaces `old` by `next`; returns the previous value.
WARPWIRE_FN u64 compare_exchange(u64 *p, u64 old, u64 next) {
    u64 seen;
    asm volatile("atom.acq_rel.gpu.cas.b64 %0, [%1], %2, %3;"
                 : "=l"(seen)
                 : "l"(p), "l"(old), "l"(next)
                 : "memory");
    return seen;
}
WARPWIRE_FN u32 compare_exchange(u32 *p, u32 old, u32 next) {
    u32 seen;
    asm volatile("atom.acq_rel.gpu.cas.b32 %0, [%1], %2, %3;"
                 : "=r"(seen)
                 : "l"(p), "r"(old), "r"(next)
                 : "memory");
    return seen;
}
// Changes a lock from 0, free, to 1; returns the previous state.
WARPWIRE_FN u32 try_lock(u32 *lock) {
    u32 seen;
    asm volatile("atom.acquire.gpu.cas.b32 %0, [%1], 0, 1;" : "=r"(seen) : "l"(lock) : "memory");
    return seen;
}
WARPWIRE_FN u64 fetch_increment(u64 *p) {
    u64 seen;
    asm volatile("atom.relaxed.gpu.add.u64 %0, [%1], 1;" : "=l"(seen) : "l"(p) : "memory");
    return seen;
}
WARPWIRE_FN void atomic_max(u64 *p, u64 v) {
    asm volatile("fence.acq_rel.gpu;\n\tred.relaxed.gpu.max.u64 [%0], %1;" ::"l"(p), "l"(v)
                 : "memory");
}
WARPWIRE_FN void atomic_min(u64 *p, u64 v) {
    asm volatile("fence.acq_rel.gpu;\n\tred.relaxed.gpu.min.u64 [%0], %1;" ::"l"(p), "l"(v)
                 : "memory");
}
// Words that the host, the HCA or a peer reads or writes: sys scope.
WARPWIRE_FN u64 load_system(const u64 *p) {
    u64 v;
    asm volatile("ld.acquire.sys.u64 %0, [%1];" : "=l"(v) : "l"(p) : "memory");
    return v;
}
WARPWIRE_FN u32 load_system(const u32 *p) {
    u32 v;
    asm volatile("ld.acquire.sys.u32 %0, [%1];" : "=r"(v) : "l"(p) : "memory");
    return v;
}
WARPWIRE_FN u64 load_system_relaxed(const u64 *p) {
    u64 v;
    asm volatile("ld.relaxed.sys.u64 %0, [%1];" : "=l"(v) : "l"(p) : "memory");
    return v;
}
WARPWIRE_FN u32 load_system_relaxed(const u32 *p) {
    u32 v;
    asm volatile("ld.relaxed.sys.u32 %0, [%1];" : "=r"(v) : "l"(p) : "memory");
    return v;
}
// What this thread has seen or written is visible to the host before its next stores.
WARPWIRE_FN void fence_system() { asm volatile("fence.acq_rel.sys;" ::: "memory"); }
// Ordered by a fence_system before it.
WARPWIRE_FN void store_system(u64 *p, u64 v) {
    asm volatile("st.relaxed.sys.u64 [%0], %1;" ::"l"(p), "l"(v) : "memory");
}
WARPWIRE_FN void store_system(u32 *p, u32 v) {
    asm volatile("st.relaxed.sys.u32 [%0], %1;" ::"l"(p), "r"(v) : "memory");
}
// Orders stores and loads before it with those after it, also a store with a later load.
WARPWIRE_FN void fence_sequential() { asm volatile("fence.sc.sys;" ::: "memory"); }
// Ordered by a fence before them.
WARPWIRE_FN void add_system(u64 *p, u64 v) {
    asm volatile("red.relaxed.sys.add.u64 [%0], %1;" ::"l"(p), "l"(v) : "memory");
}
WARPWIRE_FN u64 fetch_add_system(u64 *p, u64 v) {
    u64 seen;
    asm volatile("atom.relaxed.sys.add.u64 %0, [%1], %2;" : "=l"(seen) : "l"(p), "l"(v) : "memory");
    return seen;
}
WARPWIRE_FN u64 compare_exchange_system(u64 *p, u64 old, u64 next) {
    u64 seen;
    asm volatile("atom.relaxed.sys.cas.b64 %0, [%1], %2, %3;" : "=l"(seen) : "l"(p), "l"(old), "l"(next) : "memory");
    return seen;
}
// Words that may be copied from memory which others write: not from this multiprocessor's cache.
struct Word16 {
    u64 low, high;
};
template <class Word> WARPWIRE_FN void copy_word(u64 to, u64 from);
template <> WARPWIRE_FN void copy_word<Word16>(u64 to, u64 from) {
    asm volatile("{\n\t.reg .u64 a, b;\n\tld.volatile.v2.u64 {a, b}, [%1];\n\tst.volatile.v2.u64 [%0], {a, b};\n\t}" ::"l"(to), "l"(from)
                 : "memory");
}
template <> WARPWIRE_FN void copy_word<u64>(u64 to, u64 from) { *reinterpret_cast<volatile u64 *>(to) = *reinterpret_cast<volatile u64 *>(from); }
template <> WARPWIRE_FN void copy_word<u32>(u64 to, u64 from) { *reinterpret_cast<volatile u32 *>(to) = *reinterpret_cast<volatile u32 *>(from); }
template <> WARPWIRE_FN void copy_word<u8>(u64 to, u64 from) { *reinterpret_cast<volatile u8 *>(to) = *reinterpret_cast<volatile u8 *>(from); }
WARPWIRE_FN void store_byte(u64 to, u8 v) { *reinterpret_cast<volatile u8 *>(to) = v; }
WARPWIRE_FN void store_segment(u64 at, u32 a, u32 b, u32 c, u32 d) {
    asm volatile("st.v4.u32 [%0], {%1, %2, %3, %4};" ::"l"(at), "r"(a), "r"(b), "r"(c), "r"(d)
                 : "memory");
}
WARPWIRE_FN u32 big_endian(u32 v) { return __byte_perm(v, 0, 0x0123); }
WARPWIRE_FN u64 clock_ns() {
    u64 v;
    asm volatile("mov.u64 %0, %%globaltimer;" : "=l"(v));
    return v;
}
// For contended atomics: lets other threads make progress.
WARPWIRE_FN void backoff() { __nanosleep(64); }
// Between two polls of several words.
WARPWIRE_FN void poll_backoff() { __nanosleep(32); }
// Between two polls of a word that is written from outside this GPU.
WARPWIRE_FN void spin_pause() {}
#else
// Tests switch threads here.
#ifndef WARPWIRE_YIELD_POINT
#define WARPWIRE_YIELD_POINT()
#endif
inline void yield_point() { WARPWIRE_YIELD_POINT(); }
inline u64 load_gpu(const u64 *p) { return yield_point(), __atomic_load_n(p, __ATOMIC_ACQUIRE); }
inline u32 load_gpu(const u32 *p) { return yield_point(), __atomic_load_n(p, __ATOMIC_ACQUIRE); }
inline u64 load_gpu_relaxed(const u64 *p) { return yield_point(), __atomic_load_n(p, __ATOMIC_RELAXED); }
inline u32 load_gpu_relaxed(const u32 *p) { return yield_point(), __atomic_load_n(p, __ATOMIC_RELAXED); }
inline void store_gpu(u64 *p, u64 v) { yield_point(), __atomic_store_n(p, v, __ATOMIC_RELEASE); }
inline void store_gpu(u32 *p, u32 v) { yield_point(), __atomic_store_n(p, v, __ATOMIC_RELEASE); }
inline void store_gpu_relaxed(u64 *p, u64 v) { yield_point(), __atomic_store_n(p, v, __ATOMIC_RELAXED); }
inline void store_after_fence(u64 *p, u64 v) { yield_point(), __atomic_store_n(p, v, __ATOMIC_RELEASE); }
inline u64 compare_exchange(u64 *p, u64 old, u64 next) {
    yield_point();
    __atomic_compare_exchange_n(p, &old, next, false, __ATOMIC_ACQ_REL, __ATOMIC_ACQUIRE);
    return old;
}
inline u32 compare_exchange(u32 *p, u32 old, u32 next) {
    yield_point();
    __atomic_compare_exchange_n(p, &old, next, false, __ATOMIC_ACQ_REL, __ATOMIC_ACQUIRE);
    return old;
}
inline u32 try_lock(u32 *lock) {
    yield_point();
    u32 seen = 0;
    __atomic_compare_exchange_n(lock, &seen, 1, false, __ATOMIC_ACQUIRE, __ATOMIC_ACQUIRE);
    return seen;
}
inline u64 fetch_increment(u64 *p) { return __atomic_fetch_add(p, 1, __ATOMIC_RELAXED); }
inline void atomic_max(u64 *p, u64 v) {
    yield_point();
    u64 seen = __atomic_load_n(p, __ATOMIC_RELAXED);
    while (seen < v && !__atomic_compare_exchange_n(p, &seen, v, true, __ATOMIC_ACQ_REL, __ATOMIC_RELAXED)) {
    }
}
inline void atomic_min(u64 *p, u64 v) {
    yield_point();
    u64 seen = __atomic_load_n(p, __ATOMIC_RELAXED);
    while (seen > v && !__atomic_compare_exchange_n(p, &seen, v, true, __ATOMIC_ACQ_REL, __ATOMIC_RELAXED)) {
    }
}
inline u64 load_system(const u64 *p) { return yield_point(), __atomic_load_n(p, __ATOMIC_ACQUIRE); }
inline u32 load_system(const u32 *p) { return yield_point(), __atomic_load_n(p, __ATOMIC_ACQUIRE); }
inline u64 load_system_relaxed(const u64 *p) { return yield_point(), __atomic_load_n(p, __ATOMIC_RELAXED); }
inline u32 load_system_relaxed(const u32 *p) { return yield_point(), __atomic_load_n(p, __ATOMIC_RELAXED); }
inline void fence_system() {}  // the stores below are releases
inline void store_system(u64 *p, u64 v) { yield_point(), __atomic_store_n(p, v, __ATOMIC_RELEASE); }
inline void store_system(u32 *p, u32 v) { yield_point(), __atomic_store_n(p, v, __ATOMIC_RELEASE); }
#ifdef __SANITIZE_THREAD__
inline void fence_sequential() {}  // not known to it; on x86 the addition before is a fence
#else
inline void fence_sequential() { __atomic_thread_fence(__ATOMIC_SEQ_CST); }
#endif
inline void add_system(u64 *p, u64 v) { yield_point(), __atomic_fetch_add(p, v, __ATOMIC_SEQ_CST); }
inline u64 fetch_add_system(u64 *p, u64 v) { return yield_point(), __atomic_fetch_add(p, v, __ATOMIC_ACQ_REL); }
inline u64 compare_exchange_system(u64 *p, u64 old, u64 next) { return compare_exchange(p, old, next); }
typedef u64 Word16;  // the widest that has an atomic access
template <class Word> inline void copy_word(u64 to, u64 from) {
    yield_point();
    __atomic_store_n(reinterpret_cast<Word *>(to), __atomic_load_n(reinterpret_cast<Word *>(from), __ATOMIC_RELAXED), __ATOMIC_RELAXED);
}
inline void store_byte(u64 to, u8 v) { __atomic_store_n(reinterpret_cast<u8 *>(to), v, __ATOMIC_RELAXED); }
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
inline void poll_backoff() { backoff(); }
inline void spin_pause() { backoff(); }
#endif

}  // namespace detail
}  // namespace warpwire

#endif

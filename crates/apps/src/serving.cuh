// Code shared by servers with several workers: the control words for the host, and the listener.
// serving.rs is the equivalent for the simulated GPU.
#ifndef WARPWIRE_SERVING_CUH
#define WARPWIRE_SERVING_CUH

#include <warpwire/sock.cuh>

namespace serving {

using namespace warpwire;
using namespace warpwire::sock;

struct Control {  // in pinned memory: the host writes stop, the kernel the others
    u64 stop, listener, failed;
    Address name;
};
static_assert(sizeof(Control) == 48, "as in serving.rs");

// Adds, and returns the previous value.
WARPWIRE_FN u64 count(u64 *word, u64 by) {
#if WARPWIRE_CUDA
    return atomicAdd(word, by);
#else
    return __atomic_fetch_add(word, by, __ATOMIC_RELAXED);
#endif
}

// Returns the listener, which the first worker opens and the others wait for; negative on failure.
template <class Group>
WARPWIRE_CALL int open_listener(const Table &table, Control *control, const Address &address, SocketKind kind, u32 worker, Group group) {
    if (worker == 0) {
        int listener = sock::socket(table, static_cast<Family>(address.family), kind, group);
        i64 failed = listener < 0 ? listener : bind(table, listener, address, group);
        if (!failed) failed = listen(table, listener, 1024, group);
        if (!failed) failed = sock::set(table, listener, kNonBlocking, 1, group);
        Address name = no_address();
        if (!failed) failed = local_name(table, listener, &name, group);
        group.sync();
        if (group.rank() == 0) {
            control->name = name;
            sock::detail::fence_system();
            if (failed) sock::detail::store_system(&control->failed, static_cast<u64>(-failed));
            else sock::detail::store_system(&control->listener, static_cast<u64>(listener) + 1);
        }
        return failed ? -1 : listener;
    }
    u64 listener = 0;
    if (group.rank() == 0)
        while (!(listener = sock::detail::load_system(&control->listener)) && !sock::detail::load_system(&control->failed) &&
               !sock::detail::load_system(&control->stop))
            sock::detail::poll_backoff();
    return static_cast<int>(group.broadcast(listener)) - 1;
}

}  // namespace serving

#endif

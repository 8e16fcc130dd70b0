// Uses every call of verbs.cuh with every kind of group, so that compilers see all of it.
#include <warpwire/verbs.cuh>

template <class Group>
WARPWIRE_FN int every_call(warpwire::Qp &qp, warpwire::Local here, warpwire::Remote there, const unsigned *narrow,
                           const unsigned long long *wide, Group group) {
    using namespace warpwire;
    u64 value = 7, number = 0;
    ReceivedMessage message;
    Ticket last = put(qp, there, here, 4096, group, kDefaultTimeout);
    int sum = wait(qp, last, kDefaultTimeout, group) + test(qp, last, group);
    sum += put_inline(qp, there, &value, 8, group, 0).status + put_imm(qp, there, here, 16, 5, group, 0).status;
    sum += put_signal(qp, there, here, 3ull << 30, there, 1, group, 0).status + get(qp, here, there, 0, group, 0).status;
    sum += send(qp, here, 8, group, 0).status + send_imm(qp, here, 8, 5, group, 0).status + signal(qp, there, 1, group, 0).status;
    sum += fetch_add(qp, there, 1, here, group, 0).status + compare_swap(qp, there, 1, 2, here, group, 0).status;
    Ticket receive = post_receive(qp, here, 64, group, 0);
    sum += wait_receive(qp, receive, &message, kDefaultTimeout, group) + test_receive(qp, receive, &message, group);
    sum += next_receive(qp, &message, &number, 0) + quiet(qp, kDefaultTimeout, group) + static_cast<int>(message.length + number);
    sum += wait_signal(narrow, Condition::AtLeast, 1u, 0, group) + wait_signal(wide, Condition::Nor, 1ull, kNoTimeout, group);
    Mapping mapping = map_remote(qp, there, 64, kMapRead | kMapWrite | kMapAtomic, group);
    if (!is_revoked(mapping)) set_signal(static_cast<u64 *>(mapping.pointer), 1, group);
    unmap(mapping, group);
    return sum + name(kOk)[0];
}

template <class Group>
WARPWIRE_FN int every_call_of_each(warpwire::Qp &qp, warpwire::Local here, warpwire::Remote there, Group group) {
    using namespace warpwire;
    u64 value = 7;
    auto all = each(group);
    Ticket last = put(qp, there, here, 64, all);
    int sum = wait(qp, last, kDefaultTimeout, all) + test(qp, last, all) + put_inline(qp, there, &value, 8, all).status;
    sum += put_imm(qp, there, here, 16, 5, all).status + put_signal(qp, there, here, 16, there, 1, all).status;
    sum += get(qp, here, there, 16, all).status + send(qp, here, 8, all).status + send_imm(qp, here, 8, 5, all).status;
    sum += fetch_add(qp, there, 1, here, all).status + compare_swap(qp, there, 1, 2, here, all).status;
    return sum + signal(qp, there, 1, all).status;
}

#if WARPWIRE_CUDA
extern "C" __global__ void every_call_on_a_gpu(warpwire::Qp *qp, warpwire::Local here, warpwire::Remote there,
                                               const unsigned *narrow, const unsigned long long *wide, int *sum) {
    *sum = every_call(*qp, here, there, narrow, wide, warpwire::Thread{}) +
           every_call(*qp, here, there, narrow, wide, warpwire::Warp{}) +
           every_call(*qp, here, there, narrow, wide, warpwire::Block{}) +
           every_call_of_each(*qp, here, there, warpwire::Warp{}) + every_call_of_each(*qp, here, there, warpwire::Block{});
}
#endif

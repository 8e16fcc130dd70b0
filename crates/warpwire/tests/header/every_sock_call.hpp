// Uses every call of sock.cuh with every kind of group, and those of gpunet.cuh, together with
// verbs.cuh, so that compilers see all of it.
#include <warpwire/gpunet.cuh>
#include <warpwire/verbs.cuh>

template <class Group> WARPWIRE_FN long long every_sock_call(const warpwire::sock::Table &table, char *bytes, Group group) {
    using namespace warpwire::sock;
    Address name = ipv6(0, 0, 0, 0, 0, 0, 0, 1, 9);
    int one = warpwire::sock::socket(table, kIpv6, kStream, group);
    long long sum = warpwire::sock::bind(table, one, name, group) + warpwire::sock::listen(table, one, 5, group);
    sum += warpwire::sock::accept(table, one, &name, group) + warpwire::sock::connect(table, one, ipv4(127, 0, 0, 1, 9), group);
    sum += local_name(table, one, &name, group) + peer_name(table, one, &name, group) + set(table, one, kNoDelay, 1, group);
    sum += get(table, one, kError, group) + warpwire::sock::send(table, one, bytes, 5, group) + warpwire::sock::recv(table, one, bytes, 5, group);
    sum += send_to(table, one, bytes, 5, name, group) + recv_from(table, one, bytes, 5, &name, group) + recv_all(table, one, bytes, 5, group);
    sum += borrow(table, one, 5, group).length + consume(table, one, 5, group) + reserve(table, one, 5, group).length;
    sum += commit(table, one, 5, group) + warpwire::sock::shutdown(table, one, kShutBoth, group);
    PollEntry *list = reinterpret_cast<PollEntry *>(bytes);
    return sum + warpwire::sock::poll(table, list, 1, 1000, group) + warpwire::sock::close(table, one, group);
}

WARPWIRE_FN long long every_gpunet_call(const sockaddr_in *there, sockaddr_in *from, char *bytes, gpollfd *list) {
    int one = gconnect_in(there), two = single_thread_gbind_in(there), three = gsocket(AF_INET, SOCK_DGRAM, 0);
    long long sum = gconnect_bounce_in(there) + gconnect_in(three, there) + single_thread_gbind_bounce_in(there);
    sum += single_thread_gbind(reinterpret_cast<const sockaddr *>(there), sizeof *there) + gaccept(two) + gaccept_nb(two);
    sum += gsend(one, bytes, 5) + grecv(one, bytes, 5) + gsendto(three, bytes, 5, there) + grecvfrom(three, bytes, 5, from);
    gtimeval now, then, between;
    ggettimeofday(&now), ggettimeofday(&then), gtimersub(&then, &now, &between);
    sum += gconnect_ib(there) + between.tv_usec + static_cast<long long>(list->rbytes) + list->wbytes;
    sum += gpoll(list, 1, -1) + gsetsock_block(one, false) + ggetsock_block(one) + gshutdown(one, 1) + gclose(one);
    BEGIN_SINGLE_THREAD_PART
    gprintf4_single("%d sockets\n", 3, 0, 0, 0);
    sum += single_thread_gshutdown(one) + single_thread_gshutdown(two, SHUT_RDWR) + single_thread_gclose(two);
    END_SINGLE_THREAD_PART
    return sum;
}

#if WARPWIRE_CUDA
extern "C" __global__ void use_every_sock_call(const warpwire::sock::Table *table, char *bytes, long long *sum, sockaddr_in *there) {
    gpunet_use(reinterpret_cast<unsigned long long>(table));
    *sum = every_sock_call(*table, bytes, warpwire::Thread{}) + every_sock_call(*table, bytes, warpwire::Warp{}) +
           every_sock_call(*table, bytes, warpwire::Block{}) + every_gpunet_call(there, there, bytes, reinterpret_cast<gpollfd *>(bytes));
}
#endif

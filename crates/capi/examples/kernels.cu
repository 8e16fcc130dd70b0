// Kernels that send to each other, and to a TCP server: the host program in CUDA C++.
//
//   nvcc -std=c++17 kernels.cu $(pkg-config --cflags --libs warpwire) -o kernels
//   c++ -std=c++17 -pthread -x c++ kernels.cu $(pkg-config --cflags --libs warpwire) -o kernels
//
// The second has CPU threads in place of kernels, and needs no GPU.
#include <arpa/inet.h>
#include <sys/socket.h>
#include <unistd.h>

#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <thread>

#include <warpwire.h>
#include <warpwire/sock.cuh>
#include <warpwire/verbs.cuh>

using warpwire::Local;
using warpwire::Remote;
using u64 = unsigned long long;

constexpr u64 kBytes = 1 << 20;

static void check(int status) {
    if (status >= 0) return;
    std::fprintf(stderr, "%s\n", ww_last_error()->message);
    std::exit(1);
}

#ifdef __CUDACC__
#define KERNEL __global__ void
static const char *const kDevice = "cuda:0";
using Group = warpwire::Block;

// Runs two kernels at the same time, and waits for both.
template <class One, class Other> static void run(One one, Other other) {
    cudaStream_t streams[2];
    for (cudaStream_t &stream : streams) cudaStreamCreateWithFlags(&stream, cudaStreamNonBlocking);
    one(streams[0]);
    other(streams[1]);
    for (cudaStream_t stream : streams) {
        cudaError_t status = cudaStreamSynchronize(stream);
        if (status != cudaSuccess) {
            std::fprintf(stderr, "%s\n", cudaGetErrorString(status));
            std::exit(1);
        }
    }
}
#define LAUNCH(kernel, ...) [&](cudaStream_t stream) { kernel<<<1, 128, 0, stream>>>(__VA_ARGS__); }
#else
#define KERNEL static void
static const char *const kDevice = nullptr;
using Group = warpwire::Thread;

template <class One, class Other> static void run(One one, Other other) {
    std::thread first(one), second(other);
    first.join();
    second.join();
}
#define LAUNCH(kernel, ...) [&] { kernel(__VA_ARGS__); }
#endif

// Writes to the peer's memory, then adds 1 to a word there.
KERNEL send_block(warpwire::Qp *qp, Local from, Remote to, Remote arrived) {
    warpwire::Ticket ticket = warpwire::put_signal(*qp, to, from, kBytes, arrived, 1, Group{});
    warpwire::wait(*qp, ticket, warpwire::kDefaultTimeout, Group{});
}

// Waits for the word; the data is there when it changes.
KERNEL receive_block(const u64 *arrived, const unsigned char *block, u64 *sum) {
    using warpwire::Condition;
    if (warpwire::wait_signal(arrived, Condition::AtLeast, 1ull, warpwire::kDefaultTimeout, Group{})) return;
    if (Group{}.rank() != 0) return;
    u64 total = 0;
    for (u64 at = 0; at < kBytes; at++) total += block[at];
    *sum = total;
}

// Sends a line to a TCP server.
KERNEL greet(const warpwire::sock::Table *table, unsigned port) {
    using namespace warpwire::sock;
    const char line[] = "hello from a kernel\n";
    int socket_number = socket(*table, kIpv4, kStream, Group{});
    if (connect(*table, socket_number, ipv4(127, 0, 0, 1, static_cast<unsigned short>(port)), Group{}) == 0)
        send(*table, socket_number, line, sizeof line - 1, Group{});
    close(*table, socket_number, Group{});
}

KERNEL nothing() {}

// One end: a device, a queue pair, and memory for a block, a word and a sum.
struct End {
    ww_context *context = nullptr;
    ww_kernel_qp *qp = nullptr;
    ww_mr *mr = nullptr;
    unsigned char *memory = nullptr;
    ww_mr_info *info = nullptr;

    End() {
        ww_context_options options = WW_CONTEXT_OPTIONS_INIT;
        options.address = "127.0.0.1";
        check(ww_context_open(&options, &context));
        check(ww_kernel_qp_create(context, kDevice, nullptr, &qp));
        const u64 len = kBytes + 4096;
#ifdef __CUDACC__
        cudaMalloc(&memory, len);
        cudaMemset(memory, 0, len);
#else
        memory = static_cast<unsigned char *>(std::calloc(1, len));
#endif
        check(ww_context_register(context, WW_ADDRESS(memory), len, WW_ACCESS_ALL | WW_REMOTE_ATOMIC, &mr));
        check(ww_mr_describe(mr, &info));
    }

    warpwire::Qp *handle() const {
        uint64_t address;
        check(ww_kernel_qp_handle(qp, &address));
        return reinterpret_cast<warpwire::Qp *>(address);
    }

    void connect_to(const End &peer) const {
        void *endpoint;
        size_t len;
        check(ww_kernel_qp_endpoint(peer.qp, &endpoint, &len));
        check(ww_kernel_qp_connect(qp, endpoint, len));
        ww_free(endpoint);
    }

    void release() {
        check(ww_kernel_qp_check(qp));
        check(ww_kernel_qp_close(qp));
        check(ww_kernel_qp_release(qp));
        check(ww_mr_deregister(mr));
        check(ww_context_close(context));
        ww_free(info);
    }
};

static void copy_in(unsigned char *to, const unsigned char *from, u64 len) {
#ifdef __CUDACC__
    cudaMemcpy(to, from, len, cudaMemcpyHostToDevice);
#else
    std::memcpy(to, from, len);
#endif
}

static u64 word_of(const unsigned char *memory) {
    u64 word;
#ifdef __CUDACC__
    cudaMemcpy(&word, memory, sizeof word, cudaMemcpyDeviceToHost);
#else
    std::memcpy(&word, memory, sizeof word);
#endif
    return word;
}

static void by_rdma() {
    End here, there;
    here.connect_to(there);
    there.connect_to(here);
    unsigned char *pattern = static_cast<unsigned char *>(std::malloc(kBytes));
    u64 wanted = 0;
    for (u64 at = 0; at < kBytes; at++) wanted += pattern[at] = static_cast<unsigned char>(at * 7 + at / 251);
    copy_in(here.memory, pattern, kBytes);
    Local from{here.info->address, here.info->lkey};
    Remote to{there.info->address, there.info->rkey}, arrived{there.info->address + kBytes, there.info->rkey};
    u64 *word = reinterpret_cast<u64 *>(there.memory + kBytes);
    std::printf("memory: %s\n", there.info->path);
    run(LAUNCH(send_block, here.handle(), from, to, arrived), LAUNCH(receive_block, word, there.memory, word + 8));
    u64 sum = word_of(there.memory + kBytes + 64);
    std::printf("1 MiB from kernel to kernel: %s\n", sum == wanted ? "correct" : "WRONG");
    here.release();
    there.release();
    std::free(pattern);
    if (sum != wanted) std::exit(1);
}

static void by_socket() {
    int listener = ::socket(AF_INET, SOCK_STREAM, 0);
    sockaddr_in name{};
    name.sin_family = AF_INET;
    name.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
    socklen_t len = sizeof name;
    if (::bind(listener, reinterpret_cast<sockaddr *>(&name), len) || ::listen(listener, 1) ||
        getsockname(listener, reinterpret_cast<sockaddr *>(&name), &len)) {
        std::perror("listen");
        std::exit(1);
    }
    ww_sock_host *host;
    uint64_t table;
    ww_sock_options options = WW_SOCK_OPTIONS_INIT;
    options.sockets = 16;
    check(ww_sock_host_start(kDevice, &options, &host));
    check(ww_sock_host_table(host, &table));
    const auto *sockets = reinterpret_cast<const warpwire::sock::Table *>(table);
    run(LAUNCH(greet, sockets, ntohs(name.sin_port)), LAUNCH(nothing));
    int peer = ::accept(listener, nullptr, nullptr);
    char line[64] = "";
    size_t count = 0;
    for (ssize_t more; count < sizeof line - 1 && (more = ::read(peer, line + count, sizeof line - 1 - count)) > 0;)
        count += static_cast<size_t>(more);
    std::printf("by TCP: %s", line);
    ::close(peer);
    ::close(listener);
    check(ww_sock_host_stop(host));
    check(ww_sock_host_release(host));
    if (std::strcmp(line, "hello from a kernel\n") != 0) std::exit(1);
}

int main() {
    by_rdma();
    by_socket();
    return 0;
}

// The GPUnet client as C++ on a thread: definitions of CUDA's keywords for a block of one thread.
#include <assert.h>

#define __global__ static
#define __shared__ static thread_local
static void __syncthreads() {}

#include "echo_client.cu"

extern "C" void echo_client_thread(unsigned long long table, unsigned long long kind, unsigned long long server,
                                   unsigned long long outcome, unsigned long long messages) {
    gpunet_use(table, static_cast<warpwire::sock::SocketKind>(kind));
    echo_client(reinterpret_cast<sockaddr_in *>(server), reinterpret_cast<Outcome *>(outcome), static_cast<int>(messages));
}

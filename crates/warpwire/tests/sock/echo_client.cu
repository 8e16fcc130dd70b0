// An echo client written for GPUnet: the calls, macros and types of the client in GPUnet's README,
// in its order, and nothing of Warpwire except the include. The host sets the address of the
// sockets.
#include <warpwire/gpunet.cuh>

#define MESSAGE_SIZE 6000

// The number of messages echoed correctly, and the errno of the call that ended it, or 0.
struct Outcome {
    int echoed, error;
};

__global__ void echo_client(struct sockaddr_in *server, Outcome *outcome, int messages) {
    __shared__ int sock;
    __shared__ uchar message[MESSAGE_SIZE];
    __shared__ int differing;
    int ret = 0, number;

    while ((sock = gconnect_in(server)) < 0) {};
    assert(sock >= 0);

    for (number = 0; number < messages; number++) {
        int sent = 0, came = 0;

        BEGIN_SINGLE_THREAD_PART {
            for (int i = 0; i < MESSAGE_SIZE; i++) message[i] = (uchar)(i * 7 + number);
        } END_SINGLE_THREAD_PART;

        do {
            ret = gsend(sock, message + sent, MESSAGE_SIZE - sent);
            if (ret < 0) {
                goto over;
            } else {
                sent += ret;
            }
        } while (sent < MESSAGE_SIZE);

        __syncthreads();

        do {
            ret = grecv(sock, message + came, MESSAGE_SIZE - came);
            if (ret <= 0) {
                goto over;
            } else {
                came += ret;
            }
        } while (came < MESSAGE_SIZE);

        BEGIN_SINGLE_THREAD_PART {
            differing = 0;
            for (int i = 0; i < MESSAGE_SIZE; i++) differing += message[i] != (uchar)(i * 7 + number);
            outcome->echoed += differing == 0;
        } END_SINGLE_THREAD_PART;
    }

over:
    BEGIN_SINGLE_THREAD_PART {
        outcome->error = ret < 0 ? ret : 0;
        single_thread_gclose(sock);
    } END_SINGLE_THREAD_PART;
}

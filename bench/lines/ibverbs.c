/* 1 MiB from one process to another with libibverbs: an RDMA write with immediate data. */
#include <errno.h>
#include <infiniband/verbs.h>

#include "sides.h"

enum { PORT = 1, GID_INDEX = 0, PSN = 0 };

/* What the other side has to know; both are of one byte order. */
struct endpoint {
    union ibv_gid gid;
    uint16_t lid;
    uint32_t qpn;
    uint32_t rkey;
    uint64_t address;
};

struct device {
    struct ibv_context *context;
    struct ibv_pd *pd;
    struct ibv_mr *mr;
    struct ibv_cq *cq;
    struct ibv_qp *qp;
    enum ibv_mtu mtu;
    struct endpoint endpoint;
};

static uint8_t memory[LEN];

static void check(int error, const char *what) {
    if (error != 0) fail(what, strerror(error));
}

static void check_pointer(const void *pointer, const char *what) {
    if (pointer == NULL) fail(what, strerror(errno));
}

static void open_device(struct device *device) {
    int count;
    struct ibv_device **list = ibv_get_device_list(&count);
    check_pointer(list, "list devices");
    if (count == 0) fail("open a device", "there is none");
    device->context = ibv_open_device(list[0]);
    check_pointer(device->context, "open a device");
    ibv_free_device_list(list);
    device->pd = ibv_alloc_pd(device->context);
    check_pointer(device->pd, "allocate a protection domain");
    device->mr =
        ibv_reg_mr(device->pd, memory, LEN, IBV_ACCESS_LOCAL_WRITE | IBV_ACCESS_REMOTE_WRITE);
    check_pointer(device->mr, "register memory");
    device->cq = ibv_create_cq(device->context, 1, NULL, NULL, 0);
    check_pointer(device->cq, "create a completion queue");
    struct ibv_qp_init_attr attr = {
        .send_cq = device->cq,
        .recv_cq = device->cq,
        .cap = {.max_send_wr = 1, .max_recv_wr = 1, .max_send_sge = 1, .max_recv_sge = 1},
        .qp_type = IBV_QPT_RC,
    };
    device->qp = ibv_create_qp(device->pd, &attr);
    check_pointer(device->qp, "create a queue pair");
}

static void describe(struct device *device) {
    struct ibv_port_attr port;
    check(ibv_query_port(device->context, PORT, &port), "query the port");
    device->mtu = port.active_mtu;
    struct endpoint *own = &device->endpoint;
    own->lid = port.lid;
    if (ibv_query_gid(device->context, PORT, GID_INDEX, &own->gid) != 0) {
        fail("query the GID", strerror(errno));
    }
    own->qpn = device->qp->qp_num;
    own->rkey = device->mr->rkey;
    own->address = (uintptr_t)memory;
}

static void modify_to_init(struct device *device) {
    struct ibv_qp_attr attr = {
        .qp_state = IBV_QPS_INIT,
        .port_num = PORT,
        .qp_access_flags = IBV_ACCESS_REMOTE_WRITE,
    };
    int mask = IBV_QP_STATE | IBV_QP_PKEY_INDEX | IBV_QP_PORT | IBV_QP_ACCESS_FLAGS;
    check(ibv_modify_qp(device->qp, &attr, mask), "modify the queue pair to INIT");
}

static void connect_qp(struct device *device, const struct endpoint *peer) {
    struct ibv_qp_attr attr = {
        .qp_state = IBV_QPS_RTR,
        .path_mtu = device->mtu,
        .dest_qp_num = peer->qpn,
        .rq_psn = PSN,
        .max_dest_rd_atomic = 1,
        .min_rnr_timer = 12,
        .ah_attr =
            {
                .is_global = 1,
                .grh = {.dgid = peer->gid, .sgid_index = GID_INDEX, .hop_limit = 64},
                .dlid = peer->lid,
                .port_num = PORT,
            },
    };
    int mask = IBV_QP_STATE | IBV_QP_AV | IBV_QP_PATH_MTU | IBV_QP_DEST_QPN | IBV_QP_RQ_PSN |
               IBV_QP_MAX_DEST_RD_ATOMIC | IBV_QP_MIN_RNR_TIMER;
    check(ibv_modify_qp(device->qp, &attr, mask), "modify the queue pair to RTR");
    attr = (struct ibv_qp_attr){
        .qp_state = IBV_QPS_RTS,
        .sq_psn = PSN,
        .timeout = 14,
        .retry_cnt = 7,
        .rnr_retry = 7,
        .max_rd_atomic = 1,
    };
    mask = IBV_QP_STATE | IBV_QP_SQ_PSN | IBV_QP_TIMEOUT | IBV_QP_RETRY_CNT | IBV_QP_RNR_RETRY |
           IBV_QP_MAX_QP_RD_ATOMIC;
    check(ibv_modify_qp(device->qp, &attr, mask), "modify the queue pair to RTS");
}

static void wait_for_completion(struct device *device, const char *what) {
    struct ibv_wc wc;
    int count;
    while ((count = ibv_poll_cq(device->cq, 1, &wc)) == 0) check_time(what);
    if (count < 0) fail(what, "the completion queue cannot be polled");
    if (wc.status != IBV_WC_SUCCESS) fail(what, ibv_wc_status_str(wc.status));
}

static void close_device(struct device *device) {
    check(ibv_destroy_qp(device->qp), "destroy the queue pair");
    check(ibv_destroy_cq(device->cq), "destroy the completion queue");
    check(ibv_dereg_mr(device->mr), "deregister memory");
    check(ibv_dealloc_pd(device->pd), "deallocate the protection domain");
    if (ibv_close_device(device->context) != 0) fail("close the device", strerror(errno));
}

static void target(int socket) {
    struct device device = {0};
    struct endpoint peer;
    open_device(&device);
    describe(&device);
    modify_to_init(&device);
    struct ibv_recv_wr wr = {0}, *bad;
    check(ibv_post_recv(device.qp, &wr, &bad), "post a receive");
    receive_all(socket, &peer, sizeof peer);
    connect_qp(&device, &peer);
    /* The other side writes as soon as it has this. */
    send_all(socket, &device.endpoint, sizeof device.endpoint);
    wait_for_completion(&device, "receive the immediate data");
    verify(memory);
    /* The acknowledgement may have to be sent again. */
    while (!has_ended(socket)) check_time("wait for the initiator");
    close_device(&device);
}

static void initiator(int socket) {
    struct device device = {0};
    struct endpoint peer;
    fill(memory);
    open_device(&device);
    describe(&device);
    modify_to_init(&device);
    send_all(socket, &device.endpoint, sizeof device.endpoint);
    receive_all(socket, &peer, sizeof peer);
    connect_qp(&device, &peer);
    struct ibv_sge sge = {.addr = (uintptr_t)memory, .length = LEN, .lkey = device.mr->lkey};
    struct ibv_send_wr wr = {
        .sg_list = &sge,
        .num_sge = 1,
        .opcode = IBV_WR_RDMA_WRITE_WITH_IMM,
        .send_flags = IBV_SEND_SIGNALED,
        .wr.rdma = {.remote_addr = peer.address, .rkey = peer.rkey},
    };
    struct ibv_send_wr *bad;
    check(ibv_post_send(device.qp, &wr, &bad), "post the write");
    wait_for_completion(&device, "write");
    close_device(&device);
}

int main(int argc, char **argv) { return run(argc, argv, target, initiator); }

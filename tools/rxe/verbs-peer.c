// A scripted verbs peer: executes one verb per line of standard input, and answers each with a
// line.
//
// Tests run it on another implementation of RDMA (rxe in a guest) and so control each step of the
// peer. Every answer begins with "ok", "none" (timeout) or "error". Numbers are written as in C.
//
//   gid HEX                                  -> index of that GID; waits, as the table fills late
//   memory LEN ACCESS                        -> number, address, lkey, rkey
//   srq | qp own|srq                         -> number, queue pair number
//   connect Q QPN GID MTU SEND_PSN RECEIVE_PSN TIMEOUT RETRY RNR_RETRY MIN_RNR READS
//   fill M OFFSET LEN SEED | check M OFFSET LEN SEED | put M OFFSET WORD | get M OFFSET
//   window Q M                               a memory window of type 2 over that memory -> rkey
//   receive Q|srq ID M OFFSET LEN
//   post Q ID OP M OFFSET LEN ADDRESS RKEY FIRST SECOND FLAGS
//   poll MS                                  -> id, status, opcode, length, immediate or key, queue
//                                            pair, flags
//   arm SOLICITED | event MS                 completion events
//   state Q | destroy Q | async MS | dereg M
#include <arpa/inet.h>
#include <endian.h>
#include <errno.h>
#include <infiniband/verbs.h>
#include <poll.h>
#include <rdma/ib_user_verbs.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>
#include <unistd.h>

enum { MOST = 64, DEPTH = 256, WORDS = 16, LONGEST_LINE = 512 };

struct memory {
    struct ibv_mr *mr;
    uint8_t *bytes;
    size_t len;
};

static struct ibv_context *device;
static struct ibv_pd *pd;
static struct ibv_comp_channel *channel;
static struct ibv_cq *cq;
static struct ibv_srq *srq;
static struct ibv_qp *qps[MOST];
static struct memory memories[MOST];
static int qp_count, memory_count, gid_index;

static void failed(const char *what) { printf("error %s: %s\n", what, strerror(errno)); }

static void answered(int code, const char *what) {
    if (code == 0) {
        printf("ok\n");
        return;
    }
    errno = code < 0 ? errno : code;
    failed(what);
}

static uint64_t number(char **words, int at) { return words[at] ? strtoull(words[at], NULL, 0) : 0; }

static double seconds(void) {
    struct timespec now;
    clock_gettime(CLOCK_MONOTONIC, &now);
    return now.tv_sec + now.tv_nsec * 1e-9;
}

// The same pattern as in the tests.
static uint8_t pattern(uint64_t seed, uint64_t i) { return seed * 31 + i * 7 + (i >> 8) * 13 + (i >> 16) * 5; }

static struct memory *memory_of(char **words, int at) {
    uint64_t n = number(words, at);
    return n < (uint64_t)memory_count ? &memories[n] : NULL;
}

static struct ibv_qp *qp_of(char **words, int at) {
    uint64_t n = number(words, at);
    return n < (uint64_t)qp_count ? qps[n] : NULL;
}

static int parse_gid(const char *text, union ibv_gid *gid) {
    if (!text || strlen(text) != 32)
        return -1;
    for (int i = 0; i < 16; i++) {
        unsigned byte;
        if (sscanf(text + 2 * i, "%2x", &byte) != 1)
            return -1;
        gid->raw[i] = byte;
    }
    return 0;
}

static void find_gid(char **words) {
    union ibv_gid wanted, found;
    if (parse_gid(words[1], &wanted)) {
        printf("error not a GID\n");
        return;
    }
    for (double end = seconds() + 5; seconds() < end; usleep(20000))
        for (int index = 0; index < 32; index++)
            if (!ibv_query_gid(device, 1, index, &found) && !memcmp(&wanted, &found, 16)) {
                gid_index = index;
                printf("ok %d\n", index);
                return;
            }
    printf("error no such GID\n");
}

static void make_memory(char **words) {
    size_t len = number(words, 1);
    struct memory *m = &memories[memory_count];
    if (memory_count == MOST || posix_memalign((void **)&m->bytes, 4096, len ? len : 1)) {
        printf("error no memory\n");
        return;
    }
    memset(m->bytes, 0, len);
    m->len = len;
    m->mr = ibv_reg_mr(pd, m->bytes, len, number(words, 2));
    if (!m->mr) {
        failed("ibv_reg_mr");
        return;
    }
    printf("ok %d %llu %u %u\n", memory_count++, (unsigned long long)(uintptr_t)m->bytes, m->mr->lkey, m->mr->rkey);
}

static void make_srq(void) {
    struct ibv_srq_init_attr attr = {.attr = {.max_wr = DEPTH, .max_sge = 1}};
    srq = ibv_create_srq(pd, &attr);
    answered(srq ? 0 : -1, "ibv_create_srq");
}

static void make_qp(char **words) {
    struct ibv_qp_init_attr attr = {
        .send_cq = cq, .recv_cq = cq, .qp_type = IBV_QPT_RC, .sq_sig_all = 1,
        .srq = words[1] && !strcmp(words[1], "srq") ? srq : NULL,
        .cap = {.max_send_wr = DEPTH, .max_recv_wr = DEPTH, .max_send_sge = 1, .max_recv_sge = 1, .max_inline_data = 64},
    };
    struct ibv_qp_attr init = {
        .qp_state = IBV_QPS_INIT, .port_num = 1,
        .qp_access_flags = IBV_ACCESS_REMOTE_READ | IBV_ACCESS_REMOTE_WRITE | IBV_ACCESS_REMOTE_ATOMIC,
    };
    struct ibv_qp *qp = qp_count < MOST ? ibv_create_qp(pd, &attr) : NULL;
    if (!qp) {
        failed("ibv_create_qp");
        return;
    }
    int code = ibv_modify_qp(qp, &init, IBV_QP_STATE | IBV_QP_PKEY_INDEX | IBV_QP_PORT | IBV_QP_ACCESS_FLAGS);
    if (code) {
        answered(code, "modify to INIT");
        return;
    }
    qps[qp_count] = qp;
    printf("ok %d %u\n", qp_count++, qp->qp_num);
}

static enum ibv_mtu mtu_of(uint64_t bytes) {
    return bytes >= 4096 ? IBV_MTU_4096 : bytes >= 2048 ? IBV_MTU_2048 : bytes >= 1024 ? IBV_MTU_1024
         : bytes >= 512 ? IBV_MTU_512 : IBV_MTU_256;
}

static void connect_qp(char **words) {
    struct ibv_qp *qp = qp_of(words, 1);
    union ibv_gid gid;
    if (!qp || parse_gid(words[3], &gid)) {
        printf("error no such queue pair, or not a GID\n");
        return;
    }
    struct ibv_qp_attr rtr = {
        .qp_state = IBV_QPS_RTR, .path_mtu = mtu_of(number(words, 4)), .dest_qp_num = number(words, 2),
        .rq_psn = number(words, 6), .max_dest_rd_atomic = number(words, 11), .min_rnr_timer = number(words, 10),
        .ah_attr = {.is_global = 1, .port_num = 1, .grh = {.dgid = gid, .sgid_index = gid_index, .hop_limit = 64}},
    };
    struct ibv_qp_attr rts = {
        .qp_state = IBV_QPS_RTS, .sq_psn = number(words, 5), .timeout = number(words, 7),
        .retry_cnt = number(words, 8), .rnr_retry = number(words, 9), .max_rd_atomic = number(words, 11),
    };
    int code = ETIMEDOUT;
    // The kernel resolves the peer's address, with a short timeout.
    for (int tries = 0; code == ETIMEDOUT && tries < 5; tries++)
        code = ibv_modify_qp(qp, &rtr, IBV_QP_STATE | IBV_QP_AV | IBV_QP_PATH_MTU | IBV_QP_DEST_QPN | IBV_QP_RQ_PSN
                                           | IBV_QP_MAX_DEST_RD_ATOMIC | IBV_QP_MIN_RNR_TIMER);
    if (code) {
        answered(code, "modify to RTR");
        return;
    }
    answered(ibv_modify_qp(qp, &rts, IBV_QP_STATE | IBV_QP_SQ_PSN | IBV_QP_TIMEOUT | IBV_QP_RETRY_CNT
                                         | IBV_QP_RNR_RETRY | IBV_QP_MAX_QP_RD_ATOMIC), "modify to RTS");
}

static void touch_memory(char **words) {
    struct memory *m = memory_of(words, 1);
    uint64_t offset = number(words, 2), value = number(words, 3), seed = number(words, 4);
    int is_range = words[0][0] == 'f' || words[0][0] == 'c';
    uint64_t len = is_range ? value : 8;
    if (!m || offset > m->len || len > m->len - offset) {
        printf("error outside of the memory\n");
        return;
    }
    switch (words[0][0]) {
    case 'f':
        for (uint64_t i = 0; i < len; i++)
            m->bytes[offset + i] = pattern(seed, i);
        break;
    case 'c':
        for (uint64_t i = 0; i < len; i++)
            if (m->bytes[offset + i] != pattern(seed, i)) {
                printf("error byte %llu is %#x, not %#x\n", (unsigned long long)i, m->bytes[offset + i], pattern(seed, i));
                return;
            }
        break;
    case 'p':
        memcpy(m->bytes + offset, &value, 8);
        break;
    default:
        memcpy(&value, m->bytes + offset, 8);
        printf("ok %llu\n", (unsigned long long)value);
        return;
    }
    printf("ok\n");
}

static void make_window(char **words) {
    struct ibv_qp *qp = qp_of(words, 1);
    struct memory *m = memory_of(words, 2);
    struct ibv_mw *window = qp && m ? ibv_alloc_mw(pd, IBV_MW_TYPE_2) : NULL;
    if (!window) {
        failed("ibv_alloc_mw");
        return;
    }
    struct ibv_send_wr bind = {.opcode = IBV_WR_BIND_MW, .send_flags = IBV_SEND_SIGNALED}, *bad;
    bind.bind_mw.mw = window;
    bind.bind_mw.rkey = ibv_inc_rkey(window->rkey);
    bind.bind_mw.bind_info = (struct ibv_mw_bind_info){
        .mr = m->mr, .addr = (uintptr_t)m->bytes, .length = m->len, .mw_access_flags = IBV_ACCESS_REMOTE_WRITE,
    };
    int code = ibv_post_send(qp, &bind, &bad);
    struct ibv_wc wc = {0};
    for (double end = seconds() + 5; !code && ibv_poll_cq(cq, 1, &wc) == 0 && seconds() < end; usleep(200))
        ;
    if (code || wc.status || wc.opcode != IBV_WC_BIND_MW)
        printf("error bind: %s\n", code ? strerror(code) : ibv_wc_status_str(wc.status));
    else
        printf("ok %u\n", bind.bind_mw.rkey);
}

static void receive(char **words) {
    struct memory *m = memory_of(words, 3);
    if (!m) {
        printf("error no such memory\n");
        return;
    }
    struct ibv_sge range = {(uintptr_t)m->bytes + number(words, 4), number(words, 5), m->mr->lkey};
    struct ibv_recv_wr wr = {.wr_id = number(words, 2), .sg_list = &range, .num_sge = range.length ? 1 : 0}, *bad;
    if (!strcmp(words[1], "srq")) {
        answered(ibv_post_srq_recv(srq, &wr, &bad), "ibv_post_srq_recv");
        return;
    }
    struct ibv_qp *qp = qp_of(words, 1);
    answered(qp ? ibv_post_recv(qp, &wr, &bad) : EINVAL, "ibv_post_recv");
}

static const struct {
    const char *name;
    enum ibv_wr_opcode opcode;
} OPS[] = {
    {"send", IBV_WR_SEND}, {"send_imm", IBV_WR_SEND_WITH_IMM}, {"send_inv", IBV_WR_SEND_WITH_INV},
    {"write", IBV_WR_RDMA_WRITE}, {"write_imm", IBV_WR_RDMA_WRITE_WITH_IMM}, {"read", IBV_WR_RDMA_READ},
    {"cas", IBV_WR_ATOMIC_CMP_AND_SWP}, {"fadd", IBV_WR_ATOMIC_FETCH_AND_ADD},
};

static void post(char **words) {
    struct ibv_qp *qp = qp_of(words, 1);
    struct memory *m = memory_of(words, 4);
    struct ibv_send_wr wr = {.wr_id = number(words, 2), .send_flags = number(words, 11)}, *bad;
    size_t op = 0, ops = sizeof OPS / sizeof *OPS;
    while (op < ops && words[3] && strcmp(words[3], OPS[op].name))
        op++;
    if (!qp || !m || op == ops) {
        printf("error no such queue pair, memory or operation\n");
        return;
    }
    struct ibv_sge range = {(uintptr_t)m->bytes + number(words, 5), number(words, 6), m->mr->lkey};
    wr.sg_list = &range;
    wr.num_sge = range.length ? 1 : 0;
    wr.opcode = OPS[op].opcode;
    uint64_t address = number(words, 7), key = number(words, 8), first = number(words, 9);
    if (wr.opcode == IBV_WR_ATOMIC_CMP_AND_SWP || wr.opcode == IBV_WR_ATOMIC_FETCH_AND_ADD) {
        wr.wr.atomic.remote_addr = address;
        wr.wr.atomic.rkey = key;
        wr.wr.atomic.compare_add = first;
        wr.wr.atomic.swap = number(words, 10);
    } else {
        wr.wr.rdma.remote_addr = address;
        wr.wr.rdma.rkey = key;
        if (wr.opcode == IBV_WR_SEND_WITH_INV)
            wr.invalidate_rkey = first;
        else
            wr.imm_data = htonl(first);
    }
    answered(ibv_post_send(qp, &wr, &bad), "ibv_post_send");
}

// Rings the doorbells of all queue pairs, without new work. rxe's requester stops after 128 packets
// without an ACK, and at a fence, and notes without a lock that its completer must wake it: if the
// ACK comes between the test and the note, nothing wakes it but the next doorbell.
static void wake_requesters(void) {
    for (int n = 0; n < qp_count; n++) {
        if (!qps[n])
            continue;
        struct ib_uverbs_post_send_resp unused;
        struct {
            struct ib_uverbs_cmd_hdr header;
            struct ib_uverbs_post_send post;
        } command = {
            .header = {.command = IB_USER_VERBS_CMD_POST_SEND, .in_words = sizeof command / 4, .out_words = sizeof unused / 4},
            .post = {.response = (uintptr_t)&unused, .qp_handle = qps[n]->handle, .wqe_size = sizeof(struct ib_uverbs_send_wr)},
        };
        if (write(device->cmd_fd, &command, sizeof command) < 0)
            fprintf(stderr, "cannot ring a doorbell: %s\n", strerror(errno));
    }
}

static void take_completion(char **words) {
    // rxe returns the kernel's flags, in which "with invalidate" is another bit.
    const unsigned invalidated = IBV_WC_WITH_INV | 1 << 2;
    struct ibv_wc wc = {0};
    double end = seconds() + number(words, 1) * 1e-3, wake = seconds() + 3;
    int found;
    // Yield: the guest has one CPU, and rxe needs it.
    while ((found = ibv_poll_cq(cq, 1, &wc)) == 0 && seconds() < end) {
        if (seconds() > wake) {
            wake_requesters();
            wake += 3;
        }
        usleep(200);
    }
    if (found == 0)
        printf("none\n");
    else if (found < 0)
        printf("error ibv_poll_cq\n");
    else
        printf("ok %llu %d %d %u %u %u %u\n", (unsigned long long)wc.wr_id, wc.status, wc.opcode, wc.byte_len,
               wc.wc_flags & invalidated ? wc.invalidated_rkey : ntohl(wc.imm_data), wc.qp_num, wc.wc_flags);
}

static int is_readable(int fd, int ms) {
    struct pollfd one = {.fd = fd, .events = POLLIN};
    return poll(&one, 1, ms) == 1;
}

static void take_event(char **words) {
    struct ibv_cq *from;
    void *unused;
    if (!is_readable(channel->fd, number(words, 1))) {
        printf("none\n");
        return;
    }
    int code = ibv_get_cq_event(channel, &from, &unused);
    if (!code)
        ibv_ack_cq_events(from, 1);
    answered(code, "ibv_get_cq_event");
}

static void take_async_event(char **words) {
    struct ibv_async_event event;
    if (!is_readable(device->async_fd, number(words, 1))) {
        printf("none\n");
        return;
    }
    if (ibv_get_async_event(device, &event)) {
        failed("ibv_get_async_event");
        return;
    }
    printf("ok %d\n", event.event_type);
    ibv_ack_async_event(&event);
}

static void query_state(char **words) {
    struct ibv_qp *qp = qp_of(words, 1);
    struct ibv_qp_attr attr;
    struct ibv_qp_init_attr init;
    if (!qp || ibv_query_qp(qp, &attr, IBV_QP_STATE, &init))
        failed("ibv_query_qp");
    else
        printf("ok %d\n", attr.qp_state);
}

static void destroy(char **words) {
    struct ibv_qp *qp = qp_of(words, 1);
    answered(qp ? ibv_destroy_qp(qp) : EINVAL, "ibv_destroy_qp");
    if (qp)
        qps[number(words, 1)] = NULL;
}

static void deregister(char **words) {
    struct memory *m = memory_of(words, 1);
    answered(m ? ibv_dereg_mr(m->mr) : EINVAL, "ibv_dereg_mr");
}

static void execute(char **words) {
    const char *verb = words[0];
    int touches = !strcmp(verb, "fill") || !strcmp(verb, "check") || !strcmp(verb, "put") || !strcmp(verb, "get");
    if (touches) touch_memory(words);
    else if (!strcmp(verb, "gid")) find_gid(words);
    else if (!strcmp(verb, "memory")) make_memory(words);
    else if (!strcmp(verb, "srq")) make_srq();
    else if (!strcmp(verb, "qp")) make_qp(words);
    else if (!strcmp(verb, "connect")) connect_qp(words);
    else if (!strcmp(verb, "window")) make_window(words);
    else if (!strcmp(verb, "receive") && words[1]) receive(words);
    else if (!strcmp(verb, "post")) post(words);
    else if (!strcmp(verb, "poll")) take_completion(words);
    else if (!strcmp(verb, "arm")) answered(ibv_req_notify_cq(cq, number(words, 1)), "ibv_req_notify_cq");
    else if (!strcmp(verb, "event")) take_event(words);
    else if (!strcmp(verb, "async")) take_async_event(words);
    else if (!strcmp(verb, "state")) query_state(words);
    else if (!strcmp(verb, "destroy")) destroy(words);
    else if (!strcmp(verb, "dereg")) deregister(words);
    else printf("error no such verb: %s\n", verb);
}

static int open_device(const char *name) {
    struct ibv_device **all = ibv_get_device_list(NULL);
    for (int i = 0; all && all[i]; i++)
        if (!strcmp(ibv_get_device_name(all[i]), name))
            device = ibv_open_device(all[i]);
    pd = device ? ibv_alloc_pd(device) : NULL;
    channel = pd ? ibv_create_comp_channel(device) : NULL;
    cq = channel ? ibv_create_cq(device, 4 * DEPTH, NULL, channel, 0) : NULL;
    return cq ? 0 : -1;
}

int main(int count, char **given) {
    char line[LONGEST_LINE];
    setvbuf(stdout, NULL, _IOLBF, 0);
    if (open_device(count > 1 ? given[1] : "rxe0")) {
        failed("open the device");
        return 1;
    }
    printf("ok ready\n");
    while (fgets(line, sizeof line, stdin)) {
        char *words[WORDS] = {0}, *rest = line;
        for (int i = 0; i < WORDS - 1 && (words[i] = strtok_r(rest, " \n", &rest)); i++)
            ;
        if (words[0])
            execute(words);
    }
    return 0;
}

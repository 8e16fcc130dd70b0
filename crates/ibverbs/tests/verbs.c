// Calls the library as C programs do, with the system's header: every kind of object, what each
// call returns, and what it refuses. `verbs MODE` runs one part; it prints "MODE: all good".
#define _GNU_SOURCE
#include <errno.h>
#include <fcntl.h>
#include <infiniband/verbs.h>
#include <poll.h>
#include <pthread.h>
#include <signal.h>
#include <stdatomic.h>
#include <stdbool.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/wait.h>
#include <time.h>
#include <unistd.h>

#define CHECK(condition)                                                                          \
  do {                                                                                            \
    if (!(condition)) {                                                                           \
      fprintf(stderr, "line %d: %s (errno %d: %s)\n", __LINE__, #condition, errno,               \
              strerror(errno));                                                                   \
      exit(1);                                                                                    \
    }                                                                                             \
  } while (0)
// The call returns this errno value, and sets errno to it.
#define REFUSED(call, value) CHECK((errno = 0, (call)) == (value) && errno == (value))
// The call returns null and sets errno.
#define NONE(call, value) CHECK((errno = 0, (call)) == NULL && errno == (value))
// The call returns -1 and sets errno.
#define MINUS(call, value) CHECK((errno = 0, (call)) == -1 && errno == (value))

static struct ibv_context *context;
static struct ibv_pd *pd;
static struct ibv_mr *mr;
static char *memory;
enum { LEN = 1 << 16, ALL = IBV_ACCESS_LOCAL_WRITE | IBV_ACCESS_REMOTE_WRITE |
                            IBV_ACCESS_REMOTE_READ | IBV_ACCESS_REMOTE_ATOMIC };

static void open_first(void) {
  int count = -1;
  struct ibv_device **list = ibv_get_device_list(&count);
  CHECK(list && count == 1 && list[0] && !list[1]);
  context = ibv_open_device(list[0]);
  CHECK(context && context->device == list[0]);
  ibv_free_device_list(list); // the device stays valid
  CHECK(!strcmp(ibv_get_device_name(context->device), "warp0"));
  pd = ibv_alloc_pd(context);
  CHECK(pd && pd->context == context);
  CHECK(!posix_memalign((void **)&memory, 4096, LEN));
  memset(memory, 0, LEN);
  mr = ibv_reg_mr(pd, memory, LEN, ALL);
  CHECK(mr && mr->addr == memory && mr->length == LEN && mr->pd == pd);
}

static void close_first(void) {
  REFUSED(ibv_dealloc_pd(pd), EBUSY);
  CHECK(!ibv_dereg_mr(mr) && !ibv_dealloc_pd(pd) && !ibv_close_device(context));
  free(memory);
}

static struct ibv_cq *new_cq(int entries, struct ibv_comp_channel *channel) {
  struct ibv_cq *cq = ibv_create_cq(context, entries, (void *)0x1234, channel, 0);
  CHECK(cq && cq->cqe >= entries && cq->cq_context == (void *)0x1234);
  return cq;
}

static struct ibv_qp *new_qp(enum ibv_qp_type type, struct ibv_cq *cq, struct ibv_srq *srq) {
  struct ibv_qp_init_attr init = { .send_cq = cq, .recv_cq = cq, .srq = srq, .qp_type = type,
    .cap = { .max_send_wr = 16, .max_recv_wr = 16, .max_send_sge = 3, .max_recv_sge = 2,
             .max_inline_data = 100 } };
  struct ibv_qp *qp = ibv_create_qp(pd, &init);
  CHECK(qp && init.cap.max_send_wr >= 16 && init.cap.max_inline_data >= 100);
  CHECK(qp->state == IBV_QPS_RESET && qp->qp_type == type && qp->pd == pd);
  return qp;
}

static struct ibv_ah_attr self_path(void) {
  union ibv_gid gid;
  CHECK(!ibv_query_gid(context, 1, 0, &gid));
  return (struct ibv_ah_attr){ .is_global = 1, .port_num = 1,
                               .grh = { .dgid = gid, .hop_limit = 1 } };
}

static int to_init(struct ibv_qp *qp) {
  struct ibv_qp_attr attr = { .qp_state = IBV_QPS_INIT, .port_num = 1, .qkey = 0x11,
    .qp_access_flags = IBV_ACCESS_REMOTE_WRITE | IBV_ACCESS_REMOTE_READ | IBV_ACCESS_REMOTE_ATOMIC };
  int mask = IBV_QP_STATE | IBV_QP_PKEY_INDEX | IBV_QP_PORT;
  return ibv_modify_qp(qp, &attr,
                       mask | (qp->qp_type == IBV_QPT_UD ? IBV_QP_QKEY : IBV_QP_ACCESS_FLAGS));
}

static void connect_to(struct ibv_qp *qp, struct ibv_ah_attr path, uint32_t number) {
  CHECK(!to_init(qp) && qp->state == IBV_QPS_INIT);
  struct ibv_qp_attr rtr = { .qp_state = IBV_QPS_RTR, .path_mtu = IBV_MTU_512, .rq_psn = 7,
    .dest_qp_num = number, .ah_attr = path, .max_dest_rd_atomic = 4, .min_rnr_timer = 1 };
  CHECK(!ibv_modify_qp(qp, &rtr, IBV_QP_STATE | IBV_QP_AV | IBV_QP_PATH_MTU | IBV_QP_DEST_QPN |
    IBV_QP_RQ_PSN | IBV_QP_MAX_DEST_RD_ATOMIC | IBV_QP_MIN_RNR_TIMER) && qp->state == IBV_QPS_RTR);
  struct ibv_qp_attr rts = { .qp_state = IBV_QPS_RTS, .sq_psn = 7, .timeout = 18, .retry_cnt = 7,
    .rnr_retry = 7, .max_rd_atomic = 4 };
  CHECK(!ibv_modify_qp(qp, &rts, IBV_QP_STATE | IBV_QP_SQ_PSN | IBV_QP_TIMEOUT | IBV_QP_RETRY_CNT |
    IBV_QP_RNR_RETRY | IBV_QP_MAX_QP_RD_ATOMIC) && qp->state == IBV_QPS_RTS);
}

static void to_rts_ud(struct ibv_qp *qp) {
  CHECK(!to_init(qp));
  struct ibv_qp_attr attr = { .qp_state = IBV_QPS_RTR };
  CHECK(!ibv_modify_qp(qp, &attr, IBV_QP_STATE));
  attr.qp_state = IBV_QPS_RTS;
  CHECK(!ibv_modify_qp(qp, &attr, IBV_QP_STATE | IBV_QP_SQ_PSN));
}

static struct ibv_wc next(struct ibv_cq *cq) {
  struct ibv_wc wc;
  time_t start = time(NULL);
  for (;;) {
    int found = ibv_poll_cq(cq, 1, &wc);
    CHECK(found >= 0 && time(NULL) - start < 60);
    if (found) return wc;
  }
}

static struct ibv_sge at(size_t offset, uint32_t length) {
  return (struct ibv_sge){ (uintptr_t)memory + offset, length, mr->lkey };
}

static int post_recv(struct ibv_qp *qp, uint64_t id, struct ibv_sge sge) {
  struct ibv_recv_wr wr = { .wr_id = id, .sg_list = &sge, .num_sge = 1 }, *bad;
  return ibv_post_recv(qp, &wr, &bad);
}

static int post_send(struct ibv_qp *qp, uint64_t id, int opcode, struct ibv_sge sge, size_t to) {
  struct ibv_send_wr wr = { .wr_id = id, .sg_list = &sge, .num_sge = 1, .opcode = opcode,
    .send_flags = IBV_SEND_SIGNALED, .wr.rdma = { (uintptr_t)memory + to, mr->rkey } }, *bad;
  return ibv_post_send(qp, &wr, &bad);
}

static void queries(void) {
  struct ibv_device_attr device;
  CHECK(!ibv_query_device(context, &device) && device.vendor_id && device.phys_port_cnt == 1);
  struct ibv_device_attr_ex device_ex;
  CHECK(!ibv_query_device_ex(context, NULL, &device_ex) && device_ex.phys_port_cnt_ex == 1 &&
        device_ex.orig_attr.max_qp == device.max_qp);
  struct ibv_port_attr port;
  CHECK(!ibv_query_port(context, 1, &port) && port.state == IBV_PORT_ACTIVE &&
        port.link_layer == IBV_LINK_LAYER_ETHERNET && port.gid_tbl_len == 1);
  REFUSED(ibv_query_port(context, 2, &port), EINVAL);
  union ibv_gid gid;
  CHECK(!ibv_query_gid(context, 1, 0, &gid) && (gid.raw[10] == 0xff || gid.raw[0]));
  CHECK(!ibv_query_gid(context, 1, 1, &gid) && !gid.global.interface_id);
  MINUS(ibv_query_gid(context, 1, -1, &gid), EINVAL);
  MINUS(ibv_query_gid(context, 0, 0, &gid), EINVAL);
  struct ibv_gid_entry entry, table[4];
  CHECK(!ibv_query_gid_ex(context, 1, 0, &entry, 0) && entry.gid_type == IBV_GID_TYPE_ROCE_V2);
  REFUSED(ibv_query_gid_ex(context, 1, 1, &entry, 0), ENODATA);
  REFUSED(ibv_query_gid_ex(context, 1, 0, &entry, 1), EINVAL);
  CHECK(ibv_query_gid_table(context, table, 4, 0) == 1 && table[0].port_num == 1);
  CHECK(ibv_query_gid_table(context, table, 0, 0) < 0);
  uint16_t pkey;
  CHECK(!ibv_query_pkey(context, 1, 0, &pkey) && pkey == 0xffff);
  MINUS(ibv_query_pkey(context, 1, 1, &pkey), EINVAL);
  CHECK(ibv_get_pkey_index(context, 1, 0xffff) == 0);
  CHECK(ibv_get_pkey_index(context, 1, 0x7fff) == -1);
  CHECK(ibv_get_device_guid(context->device) && ibv_get_device_index(context->device) == 0);
  CHECK(!strcmp(ibv_wc_status_str(IBV_WC_RETRY_EXC_ERR), "transport retry count exceeded"));
  CHECK(ibv_event_type_str(999) && ibv_node_type_str(-5) && ibv_port_state_str(77));
  CHECK(!ibv_fork_init() && ibv_is_fork_initialized() == IBV_FORK_UNNEEDED);
  // Null pointers are refused, not followed.
  NONE(ibv_open_device(NULL), EINVAL);
  NONE(ibv_alloc_pd(NULL), EINVAL);
  NONE(ibv_create_comp_channel(NULL), EINVAL);
  REFUSED(ibv_close_device(NULL), EINVAL);
  REFUSED(ibv_dealloc_pd(NULL), EINVAL);
  REFUSED(ibv_destroy_qp(NULL), EINVAL);
  REFUSED(ibv_query_device(context, NULL), EINVAL);
  MINUS(ibv_query_gid(context, 1, 0, NULL), EINVAL);
  REFUSED(ibv_modify_qp(NULL, NULL, 0), EINVAL);
  ibv_ack_cq_events(NULL, 1);
  ibv_free_device_list(NULL);
}

static void regions(void) {
  NONE(ibv_reg_mr(NULL, memory, 64, 0), EINVAL);
  NONE(ibv_reg_mr(pd, memory, 0, 0), EINVAL);
  NONE(ibv_reg_mr(pd, (void *)4096, 64, 0), EFAULT);
  NONE(ibv_reg_mr(pd, memory, 64, IBV_ACCESS_REMOTE_WRITE), EINVAL); // without local write
  volatile int unknown = 1 << 15;
  NONE(ibv_reg_mr(pd, memory, 64, unknown), EINVAL);
  NONE(ibv_reg_mr(pd, NULL, SIZE_MAX, IBV_ACCESS_ON_DEMAND), EOPNOTSUPP);
  volatile int relaxed = IBV_ACCESS_LOCAL_WRITE | IBV_ACCESS_RELAXED_ORDERING;
  struct ibv_mr *other = ibv_reg_mr(pd, memory, 64, relaxed);
  CHECK(other && other->lkey != mr->lkey && !ibv_dereg_mr(other));
  NONE(ibv_reg_dmabuf_mr(pd, 0, 4096, 0, -1, 0), EBADF); // how programs ask for support
  NONE(ibv_reg_dmabuf_mr(pd, 0, 4096, 0, 987, 0), EBADF);
  NONE(ibv_alloc_null_mr(pd), EOPNOTSUPP);
  // A changed registration has new keys.
  other = ibv_reg_mr(pd, memory, 64, IBV_ACCESS_LOCAL_WRITE);
  struct ibv_pd *second = ibv_alloc_pd(context);
  uint32_t old = other->rkey;
  CHECK(!ibv_rereg_mr(other, IBV_REREG_MR_CHANGE_TRANSLATION | IBV_REREG_MR_CHANGE_PD |
        IBV_REREG_MR_CHANGE_ACCESS, second, memory + 4096, 4096, ALL));
  CHECK(other->pd == second && other->addr == memory + 4096 && other->length == 4096);
  CHECK(other->rkey == old && other->lkey == old);
  REFUSED(ibv_dealloc_pd(second), EBUSY);
  CHECK(ibv_rereg_mr(other, 0, NULL, NULL, 0, 0) == -1 && errno == EINVAL);
  CHECK(ibv_rereg_mr(other, 1 << 8, NULL, NULL, 0, 0) == -1);
  CHECK(ibv_rereg_mr(other, IBV_REREG_MR_CHANGE_TRANSLATION, NULL, NULL, 0, 0) < 0);
  CHECK(other->length == 4096 && !ibv_dereg_mr(other) && !ibv_dealloc_pd(second));
  // Parent and thread domains.
  struct ibv_td_init_attr td_attr = { 0 };
  struct ibv_td *td = ibv_alloc_td(context, &td_attr);
  struct ibv_parent_domain_init_attr parent_attr = { .pd = pd, .td = td };
  struct ibv_pd *parent = ibv_alloc_parent_domain(context, &parent_attr);
  CHECK(td && parent && parent->context == context);
  other = ibv_reg_mr(parent, memory, 64, 0);
  CHECK(other && ibv_dealloc_pd(parent) == EBUSY);
  CHECK(!ibv_dereg_mr(other) && !ibv_dealloc_pd(parent) && !ibv_dealloc_td(td));
  parent_attr.pd = NULL;
  NONE(ibv_alloc_parent_domain(context, &parent_attr), EINVAL);
  struct ibv_context *elsewhere = ibv_open_device(context->device);
  parent_attr = (struct ibv_parent_domain_init_attr){ .pd = pd };
  NONE(ibv_alloc_parent_domain(elsewhere, &parent_attr), EINVAL); // the domain of another device
  CHECK(!ibv_close_device(elsewhere));
}

// A queue pair that is connected to itself, without acknowledgements.
static void unreliable(void) {
  struct ibv_cq *cq = new_cq(64, NULL);
  struct ibv_qp *qp = new_qp(IBV_QPT_UC, cq, NULL);
  struct ibv_qp_attr attr = { .qp_state = IBV_QPS_RTR, .path_mtu = IBV_MTU_512,
    .dest_qp_num = qp->qp_num, .rq_psn = 77, .ah_attr = self_path() };
  int rtr = IBV_QP_STATE | IBV_QP_AV | IBV_QP_PATH_MTU | IBV_QP_DEST_QPN | IBV_QP_RQ_PSN;
  CHECK(!to_init(qp));
  REFUSED(ibv_modify_qp(qp, &attr, rtr | IBV_QP_MAX_DEST_RD_ATOMIC), EINVAL);
  CHECK(!ibv_modify_qp(qp, &attr, rtr));
  attr = (struct ibv_qp_attr){ .qp_state = IBV_QPS_RTS, .sq_psn = 77 };
  CHECK(!ibv_modify_qp(qp, &attr, IBV_QP_STATE | IBV_QP_SQ_PSN) && qp->state == IBV_QPS_RTS);
  memset(memory, 'u', 4096);
  CHECK(!post_recv(qp, 1, at(8192, 4096)) && !post_send(qp, 2, IBV_WR_SEND, at(0, 3000), 0));
  struct ibv_wc wc[2] = { next(cq), next(cq) };
  struct ibv_wc *got = wc[0].wr_id == 1 ? &wc[0] : &wc[1];
  CHECK(got->opcode == IBV_WC_RECV && got->byte_len == 3000);
  CHECK(!memcmp(memory, memory + 8192, 3000));
  CHECK(!post_send(qp, 3, IBV_WR_RDMA_WRITE, at(0, 2000), 4096) && next(cq).wr_id == 3);
  // A message behind it shows that the write has come.
  CHECK(!post_recv(qp, 4, at(8192, 64)) && !post_send(qp, 5, IBV_WR_SEND, at(0, 8), 0));
  wc[0] = next(cq), wc[1] = next(cq);
  CHECK(!memcmp(memory, memory + 4096, 2000));
  // Without receive a message is lost, and nobody is told.
  CHECK(!post_send(qp, 6, IBV_WR_SEND, at(0, 8), 0));
  wc[0] = next(cq);
  CHECK(wc[0].wr_id == 6 && wc[0].status == IBV_WC_SUCCESS);
  // What it does not have fails.
  CHECK(!post_send(qp, 7, IBV_WR_RDMA_READ, at(0, 8), 4096));
  wc[0] = next(cq);
  CHECK(wc[0].wr_id == 7 && wc[0].status == IBV_WC_LOC_QP_OP_ERR);
  CHECK(!ibv_destroy_qp(qp) && !ibv_destroy_cq(cq));
}

// A write through a window by a queue pair that is connected to itself; its status.
static int through(struct ibv_qp *qp, struct ibv_cq *cq, uint32_t rkey, uint64_t to) {
  struct ibv_sge sge = at(0, 8);
  struct ibv_send_wr wr = { .wr_id = 77, .sg_list = &sge, .num_sge = 1,
    .opcode = IBV_WR_RDMA_WRITE, .send_flags = IBV_SEND_SIGNALED,
    .wr.rdma = { to, rkey } }, *bad;
  CHECK(!ibv_post_send(qp, &wr, &bad));
  struct ibv_wc wc = next(cq);
  CHECK(wc.wr_id == 77);
  return wc.status;
}

// Memory windows of both types.
static void windows(void) {
  struct ibv_device_attr device;
  CHECK(!ibv_query_device(context, &device) && device.max_mw > 1000);
  CHECK(device.device_cap_flags & IBV_DEVICE_MEM_WINDOW);
  CHECK(device.device_cap_flags & IBV_DEVICE_MEM_WINDOW_TYPE_2B);
  NONE(ibv_alloc_mw(pd, 3), EINVAL);
  struct ibv_cq *cq = new_cq(64, NULL);
  struct ibv_qp *qp = new_qp(IBV_QPT_RC, cq, NULL);
  connect_to(qp, self_path(), qp->qp_num);
  struct ibv_mr *owner = ibv_reg_mr(pd, memory, LEN, IBV_ACCESS_LOCAL_WRITE | IBV_ACCESS_MW_BIND);
  struct ibv_mw *one = ibv_alloc_mw(pd, IBV_MW_TYPE_1), *two = ibv_alloc_mw(pd, IBV_MW_TYPE_2);
  CHECK(owner && one && two && one->pd == pd && one->context == context);
  CHECK(one->type == IBV_MW_TYPE_1 && two->type == IBV_MW_TYPE_2);
  uint64_t place = (uintptr_t)memory + 4096;
  struct ibv_mw_bind bind = { .wr_id = 1, .send_flags = IBV_SEND_SIGNALED, .bind_info = {
    .mr = owner, .addr = place, .length = 64, .mw_access_flags = IBV_ACCESS_REMOTE_WRITE } };
  // Type 1: the library chooses the key.
  CHECK(ibv_bind_mw(qp, two, &bind) == EINVAL); // by the header
  REFUSED(ibv_bind_mw(NULL, one, &bind), EINVAL);
  struct ibv_mw_bind wrong = bind;
  wrong.bind_info.mw_access_flags = IBV_ACCESS_REMOTE_WRITE | IBV_ACCESS_ZERO_BASED;
  REFUSED(ibv_bind_mw(qp, one, &wrong), EINVAL);
  wrong.bind_info.mw_access_flags = IBV_ACCESS_ON_DEMAND;
  REFUSED(ibv_bind_mw(qp, one, &wrong), EINVAL);
  wrong = bind;
  wrong.bind_info.mr = NULL;
  CHECK(ibv_bind_mw(qp, one, &wrong) == EINVAL);
  uint32_t unbound = one->rkey;
  CHECK(!ibv_bind_mw(qp, one, &bind) && one->rkey != unbound);
  struct ibv_wc wc = next(cq);
  CHECK(wc.wr_id == 1 && wc.status == IBV_WC_SUCCESS && wc.opcode == IBV_WC_BIND_MW);
  strcpy(memory, "through");
  CHECK(through(qp, cq, one->rkey, place) == IBV_WC_SUCCESS && !strcmp(memory + 4096, "through"));
  REFUSED(ibv_dereg_mr(owner), EBUSY);
  CHECK(ibv_rereg_mr(owner, IBV_REREG_MR_CHANGE_ACCESS, NULL, NULL, 0, ALL) && errno == EBUSY);
  // Bound to nothing, it is invalid, and the region can go.
  bind.bind_info.length = 0;
  CHECK(!ibv_bind_mw(qp, one, &bind) && next(cq).status == IBV_WC_SUCCESS);
  // Type 2: the program chooses the key; zero-based. Bound and used in one list.
  struct ibv_sge sge = at(0, 8);
  struct ibv_send_wr write = { .wr_id = 3, .sg_list = &sge, .num_sge = 1,
    .opcode = IBV_WR_RDMA_WRITE, .send_flags = IBV_SEND_SIGNALED, .wr.rdma = { 8, 0 } }, *bad;
  struct ibv_send_wr wr = { .wr_id = 2, .next = &write, .opcode = IBV_WR_BIND_MW,
    .send_flags = IBV_SEND_SIGNALED, .bind_mw = { .mw = two, .rkey = ibv_inc_rkey(two->rkey),
      .bind_info = { .mr = owner, .addr = place, .length = 64,
        .mw_access_flags = IBV_ACCESS_REMOTE_WRITE | IBV_ACCESS_ZERO_BASED } } };
  write.wr.rdma.rkey = wr.bind_mw.rkey;
  CHECK(!ibv_post_send(qp, &wr, &bad));
  wc = next(cq);
  CHECK(wc.wr_id == 2 && wc.status == IBV_WC_SUCCESS && wc.opcode == IBV_WC_BIND_MW);
  CHECK(next(cq).status == IBV_WC_SUCCESS && !strcmp(memory + 4104, "through"));
  // The peer's message invalidates it.
  CHECK(!post_recv(qp, 4, at(8192, 64)));
  struct ibv_send_wr invalidate = { .wr_id = 5, .opcode = IBV_WR_SEND_WITH_INV,
    .send_flags = IBV_SEND_SIGNALED, .invalidate_rkey = wr.bind_mw.rkey };
  CHECK(!ibv_post_send(qp, &invalidate, &bad));
  struct ibv_wc both[2] = { next(cq), next(cq) };
  struct ibv_wc *got = both[0].wr_id == 4 ? &both[0] : &both[1];
  CHECK(got->opcode == IBV_WC_RECV && got->wc_flags & IBV_WC_WITH_INV);
  CHECK(got->invalidated_rkey == wr.bind_mw.rkey);
  // So does its owner.
  wr.next = NULL;
  wr.bind_mw.rkey = ibv_inc_rkey(wr.bind_mw.rkey);
  CHECK(!ibv_post_send(qp, &wr, &bad) && next(cq).status == IBV_WC_SUCCESS);
  CHECK(through(qp, cq, wr.bind_mw.rkey, 16) == IBV_WC_SUCCESS);
  REFUSED(ibv_dereg_mr(owner), EBUSY);
  struct ibv_send_wr local = { .wr_id = 6, .opcode = IBV_WR_LOCAL_INV,
    .send_flags = IBV_SEND_SIGNALED, .invalidate_rkey = wr.bind_mw.rkey };
  CHECK(!ibv_post_send(qp, &local, &bad));
  wc = next(cq);
  CHECK(wc.wr_id == 6 && wc.status == IBV_WC_SUCCESS && wc.opcode == IBV_WC_LOCAL_INV);
  // Refused when posted: another window's key, a window of type 1, none, another domain.
  struct ibv_send_wr broken = wr;
  broken.bind_mw.rkey ^= 1 << 8;
  CHECK(ibv_post_send(qp, &broken, &bad) == EINVAL && bad == &broken);
  broken = wr, broken.bind_mw.mw = one, broken.bind_mw.rkey = one->rkey;
  CHECK(ibv_post_send(qp, &broken, &bad) == EINVAL);
  broken.bind_mw.mw = NULL;
  CHECK(ibv_post_send(qp, &broken, &bad) == EINVAL);
  struct ibv_pd *second = ibv_alloc_pd(context);
  struct ibv_mw *foreign = ibv_alloc_mw(second, IBV_MW_TYPE_2);
  CHECK(foreign && ibv_dealloc_pd(second) == EBUSY);
  broken.bind_mw.mw = foreign, broken.bind_mw.rkey = foreign->rkey;
  CHECK(ibv_post_send(qp, &broken, &bad) == EPERM);
  CHECK(!ibv_dealloc_mw(foreign) && !ibv_dealloc_pd(second));
  // Failures of work end the queue pair; this one is both ends, so its work may be flushed first.
  CHECK(through(qp, cq, wr.bind_mw.rkey, 16) != IBV_WC_SUCCESS);
  CHECK(!ibv_destroy_qp(qp));
  qp = new_qp(IBV_QPT_RC, cq, NULL);
  connect_to(qp, self_path(), qp->qp_num);
  wr.bind_mw.bind_info.mr = mr; // which does not permit windows
  CHECK(!ibv_post_send(qp, &wr, &bad));
  wc = next(cq);
  CHECK(wc.wr_id == 2 && wc.status == IBV_WC_MW_BIND_ERR);
  CHECK(!ibv_destroy_qp(qp));
  // With ibv_wr_*; a window that is deallocated is invalid.
  struct ibv_qp_init_attr_ex init = { .send_cq = cq, .recv_cq = cq, .qp_type = IBV_QPT_RC,
    .pd = pd, .cap = { 16, 16, 2, 2, 64 },
    .comp_mask = IBV_QP_INIT_ATTR_PD | IBV_QP_INIT_ATTR_SEND_OPS_FLAGS,
    .send_ops_flags = IBV_QP_EX_WITH_BIND_MW | IBV_QP_EX_WITH_LOCAL_INV };
  qp = ibv_create_qp_ex(context, &init);
  CHECK(qp);
  connect_to(qp, self_path(), qp->qp_num);
  struct ibv_qp_ex *ex = ibv_qp_to_qp_ex(qp);
  uint32_t key = ibv_inc_rkey(wr.bind_mw.rkey);
  struct ibv_mw_bind_info info = { .mr = owner, .addr = place, .length = 64,
    .mw_access_flags = IBV_ACCESS_REMOTE_WRITE };
  ibv_wr_start(ex);
  ex->wr_flags = IBV_SEND_SIGNALED;
  ex->wr_id = 10, ibv_wr_bind_mw(ex, two, key, &info);
  ex->wr_id = 11, ibv_wr_local_inv(ex, key);
  ex->wr_id = 12, ibv_wr_bind_mw(ex, two, ibv_inc_rkey(key), &info);
  CHECK(!ibv_wr_complete(ex));
  for (uint64_t id = 10; id < 13; id++) {
    wc = next(cq);
    CHECK(wc.wr_id == id && wc.status == IBV_WC_SUCCESS);
    CHECK(wc.opcode == (id == 11 ? IBV_WC_LOCAL_INV : IBV_WC_BIND_MW));
  }
  ibv_wr_start(ex);
  ibv_wr_bind_mw(ex, one, one->rkey, &info);
  CHECK(ibv_wr_complete(ex) == EINVAL);
  CHECK(!ibv_dealloc_mw(two));
  CHECK(through(qp, cq, ibv_inc_rkey(key), place) != IBV_WC_SUCCESS);
  CHECK(!ibv_dealloc_mw(one) && !ibv_dereg_mr(owner));
  CHECK(!ibv_destroy_qp(qp) && !ibv_destroy_cq(cq));
}

// Every operation on a queue pair that is connected to itself; lists; refusals.
static void operations(void) {
  NONE(ibv_create_cq(context, 0, NULL, NULL, 0), EINVAL);
  NONE(ibv_create_cq(context, -1, NULL, NULL, 0), EINVAL);
  NONE(ibv_create_cq(context, 1 << 30, NULL, NULL, 0), EINVAL);
  NONE(ibv_create_cq(context, 16, NULL, NULL, 1), EINVAL); // vectors
  struct ibv_cq *cq = new_cq(64, NULL);
  struct ibv_qp *qp = new_qp(IBV_QPT_RC, cq, NULL);
  struct ibv_qp_init_attr init = { .send_cq = cq, .recv_cq = cq, .qp_type = IBV_QPT_RAW_PACKET };
  NONE(ibv_create_qp(pd, &init), EOPNOTSUPP);
  init.qp_type = IBV_QPT_RC;
  init.cap.max_send_wr = 1 << 20;
  NONE(ibv_create_qp(pd, &init), EINVAL);
  init.cap = (struct ibv_qp_cap){ .max_inline_data = 1 << 20 };
  NONE(ibv_create_qp(pd, &init), EINVAL);
  init.cap = (struct ibv_qp_cap){ .max_send_sge = 99 };
  NONE(ibv_create_qp(pd, &init), EINVAL);
  init = (struct ibv_qp_init_attr){ .qp_type = IBV_QPT_RC };
  NONE(ibv_create_qp(pd, &init), EINVAL); // no queues
  CHECK(post_send(qp, 1, IBV_WR_SEND, at(0, 8), 0) == EINVAL); // before RTS
  CHECK(post_recv(qp, 1, at(0, 8)) == EINVAL);                 // in RESET
  struct ibv_qp_attr attr = { .qp_state = IBV_QPS_RTS };
  REFUSED(ibv_modify_qp(qp, &attr, IBV_QP_STATE), EINVAL);
  attr.qp_state = 99;
  REFUSED(ibv_modify_qp(qp, &attr, IBV_QP_STATE), EINVAL);
  attr = (struct ibv_qp_attr){ .qp_state = IBV_QPS_INIT, .port_num = 3 };
  REFUSED(ibv_modify_qp(qp, &attr, IBV_QP_STATE | IBV_QP_PKEY_INDEX | IBV_QP_PORT |
                        IBV_QP_ACCESS_FLAGS), EINVAL);
  REFUSED(ibv_modify_qp(qp, &attr, 1 << 30), EINVAL);
  CHECK(!to_init(qp));
  // Without GID there is no path, and longer packets than the link's are refused.
  attr = (struct ibv_qp_attr){ .qp_state = IBV_QPS_RTR, .path_mtu = 9, .ah_attr = self_path() };
  int rtr = IBV_QP_STATE | IBV_QP_AV | IBV_QP_PATH_MTU | IBV_QP_DEST_QPN | IBV_QP_RQ_PSN |
            IBV_QP_MAX_DEST_RD_ATOMIC | IBV_QP_MIN_RNR_TIMER;
  REFUSED(ibv_modify_qp(qp, &attr, rtr), EINVAL);
  attr.path_mtu = IBV_MTU_256;
  attr.ah_attr.is_global = 0;
  REFUSED(ibv_modify_qp(qp, &attr, rtr), EINVAL);
  attr.qp_state = IBV_QPS_RESET;
  CHECK(!ibv_modify_qp(qp, &attr, IBV_QP_STATE) && qp->state == IBV_QPS_RESET);
  connect_to(qp, self_path(), qp->qp_num);
  struct ibv_qp_init_attr made;
  CHECK(!ibv_query_qp(qp, &attr, IBV_QP_STATE, &made) && attr.qp_state == IBV_QPS_RTS);
  CHECK(attr.dest_qp_num == qp->qp_num && attr.timeout == 18 && attr.path_mtu == IBV_MTU_512);
  CHECK(made.send_cq == cq && made.cap.max_send_sge == 3 && attr.cap.max_send_wr == 16);

  strcpy(memory, "hello");
  CHECK(!post_recv(qp, 10, at(1024, 512)) && !post_send(qp, 11, IBV_WR_SEND, at(0, 6), 0));
  struct ibv_wc wc[2] = { next(cq), next(cq) };
  struct ibv_wc *got = wc[0].wr_id == 10 ? &wc[0] : &wc[1];
  CHECK(got->opcode == IBV_WC_RECV && got->byte_len == 6 && got->qp_num == qp->qp_num);
  CHECK(!strcmp(memory + 1024, "hello"));
  CHECK(!post_send(qp, 12, IBV_WR_RDMA_WRITE, at(0, 6), 2048) && next(cq).wr_id == 12);
  CHECK(!strcmp(memory + 2048, "hello"));
  CHECK(!post_send(qp, 13, IBV_WR_RDMA_READ, at(4096, 6), 2048));
  CHECK(next(cq).opcode == IBV_WC_RDMA_READ && !strcmp(memory + 4096, "hello"));
  memset(memory + 8192, 7, 16384); // more than one packet
  CHECK(!post_send(qp, 99, IBV_WR_RDMA_WRITE, at(8192, 16384), 32768) && next(cq).wr_id == 99);
  CHECK(!memcmp(memory + 8192, memory + 32768, 16384));
  // A key that the peer knows survives a change of its registration.
  struct ibv_mr *region = ibv_reg_mr(pd, memory, 64, IBV_ACCESS_LOCAL_WRITE);
  uint32_t known = region->rkey;
  CHECK(!ibv_rereg_mr(region, IBV_REREG_MR_CHANGE_TRANSLATION | IBV_REREG_MR_CHANGE_ACCESS, NULL,
                      memory + 6144, 512, ALL));
  struct ibv_sge six = at(0, 6);
  struct ibv_send_wr write = { .wr_id = 9, .sg_list = &six, .num_sge = 1,
    .opcode = IBV_WR_RDMA_WRITE, .send_flags = IBV_SEND_SIGNALED,
    .wr.rdma = { (uintptr_t)memory + 6144, known } }, *refused = NULL;
  CHECK(!ibv_post_send(qp, &write, &refused) && next(cq).wr_id == 9);
  CHECK(!strcmp(memory + 6144, "hello") && !ibv_dereg_mr(region));
  // An immediate value, inline, gathered from two places.
  CHECK(!post_recv(qp, 14, at(1024, 512)));
  struct ibv_sge two[] = { at(0, 5), { (uintptr_t)", world", 8, 0 } };
  struct ibv_send_wr wr = { .wr_id = 15, .sg_list = two, .num_sge = 2, .imm_data = 0x01020304,
    .opcode = IBV_WR_RDMA_WRITE_WITH_IMM, .send_flags = IBV_SEND_INLINE,
    .wr.rdma = { (uintptr_t)memory + 8192, mr->rkey } }, *bad = NULL;
  CHECK(!ibv_post_send(qp, &wr, &bad));
  wc[0] = next(cq);
  CHECK(wc[0].wr_id == 14 && wc[0].opcode == IBV_WC_RECV_RDMA_WITH_IMM);
  CHECK(wc[0].imm_data == 0x01020304 && wc[0].wc_flags == IBV_WC_WITH_IMM);
  CHECK(!strcmp(memory + 8192, "hello, world"));
  // Atomics.
  uint64_t *word = (uint64_t *)(memory + 512);
  *word = 40;
  struct ibv_sge result = at(520, 8);
  wr = (struct ibv_send_wr){ .wr_id = 16, .sg_list = &result, .num_sge = 1,
    .opcode = IBV_WR_ATOMIC_FETCH_AND_ADD, .send_flags = IBV_SEND_SIGNALED,
    .wr.atomic = { (uintptr_t)word, 2, 0, mr->rkey } };
  CHECK(!ibv_post_send(qp, &wr, &bad) && next(cq).opcode == IBV_WC_FETCH_ADD && *word == 42);
  wr.opcode = IBV_WR_ATOMIC_CMP_AND_SWP;
  wr.wr.atomic.compare_add = 42;
  wr.wr.atomic.swap = 7;
  CHECK(!ibv_post_send(qp, &wr, &bad) && next(cq).opcode == IBV_WC_COMP_SWAP && *word == 7);
  CHECK(word[1] == 42);

  // A list is posted up to the first request that is refused, and `bad` names that one.
  struct ibv_sge one = at(0, 6), many[9];
  for (int i = 0; i < 9; i++) many[i] = at(0, 1);
  struct ibv_send_wr list[3] = {
    { .wr_id = 20, .next = &list[1], .sg_list = &one, .num_sge = 1, .opcode = IBV_WR_RDMA_WRITE,
      .send_flags = IBV_SEND_SIGNALED, .wr.rdma = { (uintptr_t)memory + 9000, mr->rkey } },
    { .wr_id = 21, .next = &list[2], .sg_list = many, .num_sge = 9, .opcode = IBV_WR_RDMA_WRITE },
    { .wr_id = 22, .sg_list = &one, .num_sge = 1, .opcode = IBV_WR_RDMA_WRITE } };
  CHECK(ibv_post_send(qp, list, &bad) == EINVAL && bad == &list[1]);
  CHECK(next(cq).wr_id == 20 && ibv_poll_cq(cq, 1, wc) == 0);
  list[1].num_sge = -1;
  CHECK(ibv_post_send(qp, &list[1], &bad) == EINVAL && bad == &list[1]);
  list[1].num_sge = 1, list[1].opcode = 77;
  CHECK(ibv_post_send(qp, &list[1], &bad) == EINVAL);
  list[1].opcode = IBV_WR_RDMA_WRITE, list[1].sg_list = NULL;
  CHECK(ibv_post_send(qp, &list[1], &bad) == EINVAL);
  list[1].sg_list = &one, list[1].send_flags = 1 << 20;
  CHECK(ibv_post_send(qp, &list[1], &bad) == EINVAL);
  one.length = 200, list[2].send_flags = IBV_SEND_INLINE; // more than max_inline_data
  CHECK(ibv_post_send(qp, &list[2], &bad) == EINVAL && bad == &list[2]);
  // A full queue is ENOMEM: here of receives.
  for (uint32_t i = 0; i < made.cap.max_recv_wr; i++) CHECK(!post_recv(qp, 30, at(0, 8)));
  CHECK(post_recv(qp, 31, at(0, 8)) == ENOMEM);
  REFUSED(ibv_destroy_cq(cq), EBUSY);
  MINUS(ibv_poll_cq(cq, 1, NULL), EINVAL);
  MINUS(ibv_poll_cq(cq, -1, wc), EINVAL);
  CHECK(ibv_poll_cq(cq, 0, NULL) == 0);
  // Receives are flushed by the error state.
  attr.qp_state = IBV_QPS_ERR;
  CHECK(!ibv_modify_qp(qp, &attr, IBV_QP_STATE));
  CHECK(next(cq).status == IBV_WC_WR_FLUSH_ERR);
  struct ibv_ece ece = { .vendor_id = 1 };
  REFUSED(ibv_query_ece(qp, &ece), EOPNOTSUPP);
  REFUSED(ibv_set_ece(qp, &ece), EOPNOTSUPP);
  union ibv_gid group = { { 0 } };
  REFUSED(ibv_attach_mcast(qp, &group, 0), EOPNOTSUPP);
  CHECK(ibv_qp_to_qp_ex(qp) == NULL);
  CHECK(!ibv_destroy_qp(qp));
  // Resizing keeps what is there.
  qp = new_qp(IBV_QPT_RC, cq, NULL);
  connect_to(qp, self_path(), qp->qp_num);
  for (int i = 0; i < 5; i++) CHECK(!post_send(qp, 40 + i, IBV_WR_RDMA_WRITE, at(0, 6), 2048));
  REFUSED(ibv_resize_cq(cq, 0), EINVAL);
  REFUSED(ibv_resize_cq(cq, -4), EINVAL);
  CHECK(!ibv_resize_cq(cq, 1000) && cq->cqe >= 1000);
  // Less than there are completions, once they are there.
  int status;
  while (!(status = ibv_resize_cq(cq, 2))) usleep(1000);
  CHECK(status == EINVAL);
  for (int i = 0; i < 5; i++) CHECK(next(cq).wr_id == 40 + (uint64_t)i);
  CHECK(!ibv_resize_cq(cq, 2) && cq->cqe >= 2);
  CHECK(!ibv_destroy_qp(qp) && !ibv_destroy_cq(cq));
}

static void *later(void *qp) {
  usleep(50000);
  CHECK(!post_send(qp, 51, IBV_WR_SEND, at(0, 6), 0));
  return NULL;
}

static void *ack_later(void *cq) {
  usleep(100000);
  memory[0] = 'x';
  ibv_ack_cq_events(cq, 2);
  return NULL;
}

static void channels(void) {
  struct ibv_comp_channel *channel = ibv_create_comp_channel(context);
  CHECK(channel && channel->fd >= 0);
  struct ibv_cq *cq = new_cq(16, channel), *other = new_cq(16, channel), *found;
  struct ibv_qp *qp = new_qp(IBV_QPT_RC, cq, NULL);
  connect_to(qp, self_path(), qp->qp_num);
  void *cq_context;
  struct ibv_context *second = ibv_open_device(context->device);
  NONE(ibv_create_cq(second, 16, NULL, channel, 0), EINVAL); // the channel of another device
  CHECK(!ibv_close_device(second));
  CHECK(channel->refcnt == 2);
  REFUSED(ibv_destroy_comp_channel(channel), EBUSY);
  int flags = fcntl(channel->fd, F_GETFL);
  CHECK(!fcntl(channel->fd, F_SETFL, flags | O_NONBLOCK));
  MINUS(ibv_get_cq_event(channel, &found, &cq_context), EAGAIN);
  CHECK(!ibv_req_notify_cq(cq, 0));
  CHECK(!post_send(qp, 50, IBV_WR_RDMA_WRITE, at(0, 6), 2048));
  struct pollfd ready = { channel->fd, POLLIN, 0 };
  CHECK(poll(&ready, 1, 60000) == 1);
  CHECK(!ibv_get_cq_event(channel, &found, &cq_context) && found == cq);
  CHECK(cq_context == (void *)0x1234 && next(cq).wr_id == 50);
  MINUS(ibv_get_cq_event(channel, &found, &cq_context), EAGAIN);
  // Blocking, for a solicited message.
  CHECK(!fcntl(channel->fd, F_SETFL, flags));
  CHECK(!post_recv(qp, 52, at(0, 64)) && !ibv_req_notify_cq(cq, 0));
  pthread_t thread;
  CHECK(!pthread_create(&thread, NULL, later, qp));
  CHECK(!ibv_get_cq_event(channel, &found, &cq_context) && found == cq);
  pthread_join(thread, NULL);
  next(cq), next(cq);
  CHECK(!ibv_destroy_qp(qp) && !ibv_destroy_cq(other));
  // Destroying waits until both events are acknowledged.
  memory[0] = 0;
  CHECK(!pthread_create(&thread, NULL, ack_later, cq));
  CHECK(!ibv_destroy_cq(cq) && memory[0] == 'x');
  pthread_join(thread, NULL);
  CHECK(channel->refcnt == 0 && !ibv_destroy_comp_channel(channel));
}

static void shared_receives(void) {
  struct ibv_srq_init_attr init = { .attr = { .max_wr = 0, .max_sge = 1 } };
  NONE(ibv_create_srq(pd, &init), EINVAL);
  init.attr.max_wr = 1 << 20;
  NONE(ibv_create_srq(pd, &init), EINVAL);
  init.attr = (struct ibv_srq_attr){ .max_wr = 8, .max_sge = 1 };
  struct ibv_srq *srq = ibv_create_srq(pd, &init);
  CHECK(srq && srq->pd == pd);
  struct ibv_cq *cq = new_cq(32, NULL);
  struct ibv_qp *qp = new_qp(IBV_QPT_RC, cq, srq);
  connect_to(qp, self_path(), qp->qp_num);
  CHECK(post_recv(qp, 1, at(0, 8)) == EINVAL); // receives go to the shared queue
  struct ibv_sge sge = at(1024, 64);
  struct ibv_recv_wr list[2] = { { .wr_id = 60, .next = &list[1], .sg_list = &sge, .num_sge = 1 },
                                 { .wr_id = 61, .sg_list = &sge, .num_sge = 2 } }, *bad = NULL;
  CHECK(ibv_post_srq_recv(srq, list, &bad) == EINVAL && bad == &list[1]);
  list[1].num_sge = 1;
  CHECK(!ibv_post_srq_recv(srq, &list[1], &bad));
  struct ibv_srq_attr attr = { .srq_limit = 2 };
  CHECK(!ibv_modify_srq(srq, &attr, IBV_SRQ_LIMIT));
  CHECK(!ibv_query_srq(srq, &attr) && attr.max_wr == 8 && attr.srq_limit == 2);
  REFUSED(ibv_modify_srq(srq, &attr, IBV_SRQ_MAX_WR), EOPNOTSUPP);
  REFUSED(ibv_modify_srq(srq, &attr, 1 << 9), EINVAL);
  uint32_t number;
  CHECK(!ibv_get_srq_num(srq, &number));
  CHECK(!post_send(qp, 62, IBV_WR_SEND, at(0, 6), 0));
  next(cq), next(cq);
  // The limit's event, once; then the one of a queue pair that fails.
  struct ibv_async_event event;
  CHECK(!ibv_get_async_event(context, &event) && event.event_type == IBV_EVENT_SRQ_LIMIT_REACHED);
  CHECK(event.element.srq == srq);
  ibv_ack_async_event(&event);
  CHECK(!ibv_query_srq(srq, &attr) && attr.srq_limit == 0);
  struct ibv_qp_attr error = { .qp_state = IBV_QPS_ERR };
  CHECK(!ibv_modify_qp(qp, &error, IBV_QP_STATE));
  CHECK(!ibv_get_async_event(context, &event) && event.event_type == IBV_EVENT_QP_LAST_WQE_REACHED);
  CHECK(event.element.qp == qp);
  ibv_ack_async_event(&event);
  int flags = fcntl(context->async_fd, F_GETFL);
  CHECK(!fcntl(context->async_fd, F_SETFL, flags | O_NONBLOCK));
  MINUS(ibv_get_async_event(context, &event), EAGAIN);
  REFUSED(ibv_destroy_srq(srq), EBUSY);
  CHECK(!ibv_destroy_qp(qp) && !ibv_destroy_srq(srq) && !ibv_destroy_cq(cq));
  struct ibv_srq_init_attr_ex ex = { .attr = { .max_wr = 4, .max_sge = 1 }, .pd = pd,
    .comp_mask = IBV_SRQ_INIT_ATTR_TYPE | IBV_SRQ_INIT_ATTR_PD, .srq_type = IBV_SRQT_BASIC };
  srq = ibv_create_srq_ex(context, &ex);
  CHECK(srq && !ibv_destroy_srq(srq));
  ex.srq_type = IBV_SRQT_XRC;
  NONE(ibv_create_srq_ex(context, &ex), EOPNOTSUPP);
}

static void datagrams(void) {
  struct ibv_cq *cq = new_cq(32, NULL);
  struct ibv_qp *qp = new_qp(IBV_QPT_UD, cq, NULL);
  to_rts_ud(qp);
  struct ibv_ah_attr path = self_path();
  struct ibv_ah *ah = ibv_create_ah(pd, &path);
  CHECK(ah && ah->pd == pd);
  path.is_global = 0;
  NONE(ibv_create_ah(pd, &path), EINVAL);
  path = self_path();
  path.port_num = 2;
  NONE(ibv_create_ah(pd, &path), EINVAL);
  strcpy(memory, "datagram");
  CHECK(!post_recv(qp, 70, at(1024, 1024)));
  struct ibv_sge sge = at(0, 9);
  struct ibv_send_wr wr = { .wr_id = 71, .sg_list = &sge, .num_sge = 1, .imm_data = 5,
    .opcode = IBV_WR_SEND_WITH_IMM, .send_flags = IBV_SEND_SIGNALED,
    .wr.ud = { ah, qp->qp_num, 0x11 } }, *bad;
  CHECK(!ibv_post_send(qp, &wr, &bad));
  struct ibv_wc wc[2] = { next(cq), next(cq) };
  struct ibv_wc *got = wc[0].wr_id == 70 ? &wc[0] : &wc[1];
  CHECK(got->byte_len == 49 && got->src_qp == qp->qp_num && got->imm_data == 5);
  CHECK(got->wc_flags == (IBV_WC_GRH | IBV_WC_WITH_IMM) && !strcmp(memory + 1064, "datagram"));
  // The way back.
  struct ibv_grh *grh = (struct ibv_grh *)(memory + 1024);
  struct ibv_ah_attr back;
  CHECK(!ibv_init_ah_from_wc(context, 1, got, grh, &back) && back.is_global);
  path = self_path();
  CHECK(!memcmp(&back.grh.dgid, &path.grh.dgid, 16));
  struct ibv_ah *reply = ibv_create_ah_from_wc(pd, got, grh, 1);
  CHECK(reply);
  got->wc_flags = 0;
  MINUS(ibv_init_ah_from_wc(context, 1, got, grh, &back), EINVAL);
  CHECK(!post_recv(qp, 72, at(2048, 1024)));
  wr.wr.ud.ah = reply;
  CHECK(!ibv_post_send(qp, &wr, &bad) && !ibv_destroy_ah(reply));
  next(cq), next(cq);
  CHECK(!strcmp(memory + 2088, "datagram"));
  wr.wr.ud.ah = NULL;
  CHECK(ibv_post_send(qp, &wr, &bad) == EINVAL && bad == &wr);
  CHECK(!ibv_destroy_ah(ah) && !ibv_destroy_qp(qp) && !ibv_destroy_cq(cq));
}

static void extended(void) {
  struct ibv_cq_init_attr_ex cq_attr = { .cqe = 16, .wc_flags = IBV_WC_STANDARD_FLAGS };
  struct ibv_cq_ex *cq = ibv_create_cq_ex(context, &cq_attr);
  CHECK(cq);
  cq_attr.wc_flags |= IBV_WC_EX_WITH_COMPLETION_TIMESTAMP;
  NONE(ibv_create_cq_ex(context, &cq_attr), EOPNOTSUPP);
  struct ibv_modify_cq_attr moderate = { IBV_CQ_ATTR_MODERATE, { 4, 4 } };
  CHECK(!ibv_modify_cq(ibv_cq_ex_to_cq(cq), &moderate));
  struct ibv_qp_init_attr_ex init = { .send_cq = ibv_cq_ex_to_cq(cq), .qp_type = IBV_QPT_RC,
    .recv_cq = ibv_cq_ex_to_cq(cq), .pd = pd, .cap = { 16, 16, 2, 2, 64 },
    .comp_mask = IBV_QP_INIT_ATTR_PD | IBV_QP_INIT_ATTR_SEND_OPS_FLAGS,
    .send_ops_flags = IBV_QP_EX_WITH_RDMA_WRITE | IBV_QP_EX_WITH_SEND |
                      IBV_QP_EX_WITH_ATOMIC_FETCH_AND_ADD | IBV_QP_EX_WITH_RDMA_READ };
  struct ibv_qp *qp = ibv_create_qp_ex(context, &init);
  CHECK(qp);
  struct ibv_qp_ex *ex = ibv_qp_to_qp_ex(qp);
  CHECK(ex && ibv_cq_ex_to_cq(cq) == qp->send_cq);
  init.send_ops_flags = IBV_QP_EX_WITH_TSO;
  NONE(ibv_create_qp_ex(context, &init), EOPNOTSUPP);
  init.comp_mask = IBV_QP_INIT_ATTR_PD | IBV_QP_INIT_ATTR_RX_HASH;
  NONE(ibv_create_qp_ex(context, &init), EOPNOTSUPP);
  // No flags are the same as none given.
  init.comp_mask = IBV_QP_INIT_ATTR_PD | IBV_QP_INIT_ATTR_CREATE_FLAGS;
  init.create_flags = IBV_QP_CREATE_BLOCK_SELF_MCAST_LB;
  NONE(ibv_create_qp_ex(context, &init), EOPNOTSUPP);
  init.create_flags = 0;
  struct ibv_qp *plain = ibv_create_qp_ex(context, &init);
  CHECK(plain && !ibv_destroy_qp(plain));
  connect_to(qp, self_path(), qp->qp_num);
  CHECK(!post_recv(qp, 80, at(1024, 64)));
  strcpy(memory, "extended");
  uint64_t *word = (uint64_t *)(memory + 512);
  *word = 5;
  ibv_wr_start(ex);
  ex->wr_id = 81, ex->wr_flags = IBV_SEND_SIGNALED;
  ibv_wr_rdma_write(ex, mr->rkey, (uintptr_t)memory + 2048);
  ibv_wr_set_sge(ex, mr->lkey, (uintptr_t)memory, 9);
  ex->wr_id = 82;
  ibv_wr_send(ex);
  struct ibv_data_buf parts[2] = { { "in", 2 }, { "line", 5 } };
  ibv_wr_set_inline_data_list(ex, 2, parts);
  ex->wr_id = 83;
  ibv_wr_atomic_fetch_add(ex, mr->rkey, (uintptr_t)word, 3);
  ibv_wr_set_sge(ex, mr->lkey, (uintptr_t)(word + 1), 8);
  CHECK(!ibv_wr_complete(ex));
  struct ibv_poll_cq_attr poll_attr = { 0 };
  int left = 4, status;
  while (left) {
    while ((status = ibv_start_poll(cq, &poll_attr)) == ENOENT);
    CHECK(!status);
    do {
      CHECK(cq->status == IBV_WC_SUCCESS && ibv_wc_read_qp_num(cq) == qp->qp_num);
      enum ibv_wc_opcode expected = cq->wr_id == 80   ? IBV_WC_RECV
                                    : cq->wr_id == 81 ? IBV_WC_RDMA_WRITE
                                    : cq->wr_id == 82 ? IBV_WC_SEND
                                                      : IBV_WC_FETCH_ADD;
      CHECK(ibv_wc_read_opcode(cq) == expected && !ibv_wc_read_vendor_err(cq));
      if (cq->wr_id == 80) CHECK(ibv_wc_read_byte_len(cq) == 7 && !ibv_wc_read_wc_flags(cq));
      CHECK(!ibv_wc_read_sl(cq) && !ibv_wc_read_slid(cq) && !ibv_wc_read_src_qp(cq));
      left--;
    } while (!(status = ibv_next_poll(cq)));
    CHECK(status == ENOENT);
    ibv_end_poll(cq);
  }
  CHECK(!strcmp(memory + 1024, "inline") && !strcmp(memory + 2048, "extended"));
  CHECK(*word == 8 && word[1] == 5);
  // A mistake anywhere posts nothing; after an abort, nothing either.
  ibv_wr_start(ex);
  ibv_wr_rdma_write(ex, mr->rkey, (uintptr_t)memory);
  ibv_wr_set_sge(ex, mr->lkey, (uintptr_t)memory, 8);
  ibv_wr_rdma_write(ex, mr->rkey, (uintptr_t)memory);
  ibv_wr_set_inline_data(ex, memory, 10000);
  CHECK(ibv_wr_complete(ex) == EINVAL);
  ibv_wr_start(ex);
  ibv_wr_set_sge(ex, mr->lkey, (uintptr_t)memory, 8); // of no request
  CHECK(ibv_wr_complete(ex) == EINVAL);
  ibv_wr_start(ex);
  ibv_wr_send_tso(ex, memory, 8, 8);
  CHECK(ibv_wr_complete(ex) == EOPNOTSUPP);
  ibv_wr_start(ex);
  ibv_wr_rdma_write(ex, mr->rkey, (uintptr_t)memory);
  ibv_wr_abort(ex);
  struct ibv_wc wc;
  usleep(20000);
  CHECK(ibv_poll_cq(ibv_cq_ex_to_cq(cq), 1, &wc) == 0);
  CHECK(!ibv_destroy_qp(qp) && !ibv_destroy_cq(ibv_cq_ex_to_cq(cq)));
}

// A child of fork is refused, and harmless to its parent.
static atomic_bool polls;

static void *poll_until_told(void *cq) {
  struct ibv_wc wc;
  while (atomic_load(&polls)) CHECK(ibv_poll_cq(cq, 1, &wc) == 0);
  return NULL;
}

// Another thread holds the library's locks now and then, also while the process forks.
static void forks(void) {
  struct ibv_cq *cq = new_cq(16, NULL);
  struct ibv_qp *qp = new_qp(IBV_QPT_RC, cq, NULL);
  connect_to(qp, self_path(), qp->qp_num);
  pthread_t poller;
  atomic_store(&polls, true);
  CHECK(!pthread_create(&poller, NULL, poll_until_told, cq));
  for (int i = 0; i < 20; i++) {
    pid_t child = fork();
    if (!child) {
      struct ibv_wc wc;
      alarm(60); // instead of waiting for ever
      if (ibv_poll_cq(cq, 1, &wc) != -1 || errno != EIO) _exit(1);
      if (post_send(qp, 1, IBV_WR_SEND, at(0, 8), 0) != EIO) _exit(2);
      if (ibv_destroy_qp(qp) != EIO) _exit(3);
      exit(0); // with the handlers
    }
    int status;
    CHECK(waitpid(child, &status, 0) == child && !status);
  }
  atomic_store(&polls, false);
  CHECK(!pthread_join(poller, NULL));
  CHECK(system("true") == 0);
  CHECK(!post_send(qp, 90, IBV_WR_RDMA_WRITE, at(0, 6), 2048) && next(cq).wr_id == 90);
  CHECK(!ibv_destroy_qp(qp) && !ibv_destroy_cq(cq));
}

// A program closes the device first, and destroys its objects after that: nothing may be freed
// that they still need.
static void wrong_order(void) {
  struct ibv_comp_channel *channel = ibv_create_comp_channel(context);
  struct ibv_cq *cq = new_cq(16, channel);
  struct ibv_srq_init_attr init = { .attr = { .max_wr = 4, .max_sge = 1 } };
  struct ibv_srq *srq = ibv_create_srq(pd, &init);
  struct ibv_qp *qp = new_qp(IBV_QPT_RC, cq, srq), *ud = new_qp(IBV_QPT_UD, cq, NULL);
  struct ibv_ah_attr path = self_path();
  struct ibv_ah *ah = ibv_create_ah(pd, &path);
  connect_to(qp, path, qp->qp_num);
  to_rts_ud(ud);
  CHECK(channel && srq && ah && !ibv_close_device(context));
  CHECK(!post_send(qp, 5, IBV_WR_RDMA_WRITE, at(0, 8), 2048) && next(cq).wr_id == 5);
  REFUSED(ibv_destroy_cq(cq), EBUSY);
  CHECK(!ibv_destroy_qp(qp) && !ibv_destroy_qp(ud) && !ibv_destroy_ah(ah));
  CHECK(!ibv_destroy_srq(srq) && !ibv_destroy_cq(cq) && !ibv_destroy_comp_channel(channel));
}

static void nap(int signal) { (void)signal; }

// Waiting for an event is interrupted like a read: by handlers without SA_RESTART only.
static void signals(void) {
  struct ibv_async_event event;
  struct sigaction restart = { .sa_handler = nap, .sa_flags = SA_RESTART }, plain = { .sa_handler = nap };
  CHECK(!sigaction(SIGUSR1, &restart, NULL) && !sigaction(SIGALRM, &plain, NULL));
  struct timespec start, end;
  clock_gettime(CLOCK_MONOTONIC, &start);
  ualarm(50000, 50000); // again: the first may come before the wait
  MINUS(ibv_get_async_event(context, &event), EINTR);
  ualarm(0, 0);
  // The library's threads take no signals, so that this thread gets those of the process.
  sigset_t usr1, before;
  sigemptyset(&usr1);
  sigaddset(&usr1, SIGUSR1);
  CHECK(!pthread_sigmask(SIG_BLOCK, &usr1, &before) && !kill(getpid(), SIGUSR1));
  usleep(10000);
  CHECK(!sigpending(&usr1) && sigismember(&usr1, SIGUSR1) == 1);
  CHECK(!pthread_sigmask(SIG_SETMASK, &before, NULL));
  clock_gettime(CLOCK_MONOTONIC, &end);
}

// Sender and receiver in two processes; the receiver exits right after its completion, without
// destroying anything. The sender's work must succeed nevertheless.
static void ends(int is_receiver) {
  struct ibv_cq *cq = new_cq(16, NULL);
  struct ibv_qp *qp = new_qp(IBV_QPT_RC, cq, NULL);
  uint32_t number;
  printf("%u\n", qp->qp_num);
  fflush(stdout);
  CHECK(scanf("%u", &number) == 1);
  connect_to(qp, self_path(), number);
  if (is_receiver) CHECK(!post_recv(qp, 1, at(0, 64)));
  printf("ready\n");
  fflush(stdout);
  char line[16];
  CHECK(scanf("%15s", line) == 1);
  if (!is_receiver) CHECK(!post_send(qp, 2, IBV_WR_SEND, at(0, 6), 0));
  CHECK(next(cq).status == IBV_WC_SUCCESS);
  exit(0);
}

int main(int count, char **arguments) {
  const char *mode = count > 1 ? arguments[1] : "";
  struct { const char *name; void (*run)(void); } parts[] = {
    { "queries", queries }, { "regions", regions }, { "operations", operations },
    { "unreliable", unreliable }, { "windows", windows },
    { "channels", channels }, { "shared_receives", shared_receives }, { "datagrams", datagrams },
    { "extended", extended }, { "forks", forks }, { "signals", signals },
    { "wrong_order", wrong_order } };
  open_first();
  if (!strcmp(mode, "sender")) ends(0);
  if (!strcmp(mode, "receiver")) ends(1);
  for (size_t i = 0; i < sizeof parts / sizeof *parts; i++)
    if (!strcmp(mode, parts[i].name)) {
      parts[i].run();
      close_first();
      printf("%s: all good\n", mode);
      return 0;
    }
  fprintf(stderr, "no part %s\n", mode);
  return 2;
}

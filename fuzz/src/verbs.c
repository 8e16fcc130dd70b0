// Plays a script of calls to libibverbs, as a C program makes them with the system's header.
//
// Handles are live and pointers valid or null; everything else comes from the script: the order of
// calls, attributes, masks, opcodes, flags, keys, lengths. Invariants: no call crashes or hangs; a
// work request completes once at most, and a receive within its length; memory that no key gives
// access to does not change; in the right order, every object can be destroyed; and a connection
// beside all this still works.
#define _GNU_SOURCE
#include <errno.h>
#include <fcntl.h>
#include <infiniband/verbs.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <time.h>

#define MUST(condition)                                                                            \
  do {                                                                                             \
    if (!(condition)) {                                                                            \
      fprintf(stderr, "verbs.c:%d: %s (errno %d)\n", __LINE__, #condition, errno);                 \
      abort();                                                                                     \
    }                                                                                              \
  } while (0)

// ---- the script ----

static const uint8_t *input;
static size_t left;

static uint8_t u8(void) { return left ? left--, *input++ : 0; }
static uint32_t u32(void) { return u8() | u8() << 8 | u8() << 16 | (uint32_t)u8() << 24; }
static uint64_t u64(void) { return u32() | (uint64_t)u32() << 32; }
static unsigned below(unsigned count) { return u8() % count; }
static int rarely(void) { return u8() % 32 == 31; }
// A number that is mostly small, sometimes at the edge of something.
static uint32_t size(void) {
  static const uint32_t edges[] = { 16, 17, 512, 513, 16384, 16385, 32767, 32768, 1u << 31, ~0u };
  return rarely() ? edges[below(10)] : below(17);
}

// ---- objects ----

enum { MAX = 6, LEN = 1 << 14, DEPTH = 4096 };

#define LIST(kind, name)                                                                           \
  static struct kind *name[MAX];                                                                   \
  static int name##_count;                                                                         \
  static struct kind *any_##name(void) {                                                           \
    return name##_count && !rarely() ? name[below(name##_count)] : NULL;                           \
  }                                                                                                \
  static void keep_##name(struct kind *made) {                                                     \
    if (made) name[name##_count++] = made;                                                         \
  }                                                                                                \
  static void drop_##name(struct kind *gone) {                                                     \
    for (int i = 0; i < name##_count; i++)                                                         \
      if (name[i] == gone) name[i--] = name[--name##_count];                                       \
  }
LIST(ibv_pd, pds)
LIST(ibv_td, tds)
LIST(ibv_mr, mrs)
LIST(ibv_mw, mws)
LIST(ibv_comp_channel, channels)
LIST(ibv_cq, cqs)
LIST(ibv_srq, srqs)
LIST(ibv_qp, qps)
LIST(ibv_ah, ahs)

// What outlives a script: two open devices with a domain each, and a connection between them.
static struct ibv_context *contexts[2];
static struct ibv_pd *own[2], *hidden[2];
static struct ibv_mr *secrets[2], *quiet_mrs[2];
static struct ibv_cq *quiet_cqs[2];
static struct ibv_qp *quiet[2];
// Buffers of LEN bytes, for scripts, for secrets and for the connection, with inaccessible pages
// between them.
static uint8_t *buffers[6];

static struct ibv_context *any_context(void) { return rarely() ? NULL : contexts[below(2)]; }
static struct ibv_pd *any_pd(void) {
  struct ibv_pd *pd = any_pds();
  return pd || rarely() ? pd : own[below(2)];
}
static uint8_t *any_address(void) {
  switch (below(8)) {
  case 0: return NULL;
  case 1: return buffers[2 + below(2)] + below(64); // a secret
  case 2: return buffers[below(2)] + LEN - below(64);
  case 3: return (uint8_t *)(uintptr_t)u64();
  default: return buffers[below(2)] + below(256) * 16;
  }
}
static uint32_t any_length(void) { return rarely() ? u32() : below(8) ? below(256) : LEN; }
static uint32_t any_key(int is_remote) { // of anything
  struct ibv_mr *mr = below(16) ? any_mrs() : secrets[below(2)];
  struct ibv_mw *mw = any_mws();
  if (is_remote && mw && !below(4)) return mw->rkey;
  return !mr || rarely() ? u32() : is_remote ? mr->rkey : mr->lkey;
}

// Work requests are numbered: each completes once at most.
static uint32_t generation, posted;
static uint32_t lengths[DEPTH]; // of receives
static uint8_t completed[DEPTH];
static uint64_t next_id(uint32_t length) {
  uint32_t number = posted++ % DEPTH;
  lengths[number] = length;
  completed[number] = 0;
  return (uint64_t)generation << 32 | number;
}
static void check_completion(uint64_t id, uint32_t status, int is_receive, uint32_t length) {
  MUST(id >> 32 == generation && (uint32_t)id < DEPTH);
  MUST(!completed[(uint32_t)id]);
  completed[(uint32_t)id] = 1;
  MUST(status <= IBV_WC_GENERAL_ERR + 2 && ibv_wc_status_str(status));
  if (is_receive && !status) MUST(length <= lengths[(uint32_t)id]);
}

// ---- events: every one is acknowledged before an object is destroyed ----

static struct ibv_cq *event_cqs[4];
static struct ibv_async_event async_events[4];
static int event_count, async_count;

static void acknowledge(void) {
  for (; event_count; event_count--) ibv_ack_cq_events(event_cqs[event_count - 1], 1 + below(2) * 7);
  for (; async_count; async_count--) ibv_ack_async_event(&async_events[async_count - 1]);
}
static void take_events(void) {
  struct ibv_comp_channel *channel = any_channels();
  void *cq_context;
  if (channel && event_count < 4 && !ibv_get_cq_event(channel, &event_cqs[event_count], &cq_context))
    event_count++;
  if (async_count < 4 && !ibv_get_async_event(contexts[below(2)], &async_events[async_count]))
    MUST(ibv_event_type_str(async_events[async_count++].event_type));
  if (below(2)) acknowledge();
}

// ---- creation ----

static void make_domain(void) {
  struct ibv_context *context = any_context();
  struct ibv_parent_domain_init_attr parent = { .pd = any_pd(), .td = any_tds(),
    .comp_mask = rarely() ? u32() : 0 };
  struct ibv_td_init_attr td = { .comp_mask = rarely() };
  if (!context) return;
  switch (below(3)) {
  case 0: if (pds_count < MAX) keep_pds(ibv_alloc_pd(context)); break;
  case 1: if (pds_count < MAX) keep_pds(ibv_alloc_parent_domain(context, &parent)); break;
  case 2: if (tds_count < MAX) keep_tds(ibv_alloc_td(context, &td)); break;
  }
}

static int any_access(void) { return rarely() ? (int)u32() : below(4) ? 0xf : u8(); }

static void make_region(void) {
  struct ibv_pd *pd = any_pd();
  uint8_t *addr = buffers[below(2)] + below(16) * 64;
  size_t len = LEN - (addr - buffers[0]) % LEN % 1024 - below(4) * 1024;
  if (!pd || mrs_count == MAX) return;
  int access = any_access();
  switch (below(8)) {
  case 0: keep_mrs(ibv_reg_mr_iova2(pd, addr, 1024, u64(), access)); break;
  case 1: keep_mrs(ibv_reg_dmabuf_mr(pd, u64(), 4096, 0, below(2) ? -1 : contexts[0]->async_fd, access)); break;
  case 2: keep_mrs(ibv_reg_mr(pd, below(2) ? NULL : addr, below(2) ? 0 : SIZE_MAX - below(64), access)); break;
  case 3: keep_mrs(ibv_reg_mr(pd, addr, LEN + 4096, access)); break; // into the next page
  default: keep_mrs(ibv_reg_mr(pd, addr, 1024 + len % (LEN - 2048), access)); break;
  }
}

static void change_region(void) {
  struct ibv_mr *mr = any_mrs();
  if (!mr) return;
  ibv_rereg_mr(mr, rarely() ? (int)u32() : u8() & 7, any_pds(), buffers[below(2)] + below(16),
               below(8) ? 2048 : u32(), any_access());
}

static void make_queue(void) {
  struct ibv_context *context = any_context();
  struct ibv_comp_channel *channel = any_channels();
  if (!context || cqs_count == MAX) return;
  if (below(2)) {
    keep_cqs(ibv_create_cq(context, (int)size(), NULL, channel, rarely() ? (int)u32() : 0));
    return;
  }
  struct ibv_cq_init_attr_ex attr = { .cqe = size(), .channel = channel,
    .comp_vector = rarely() ? u32() : 0, .wc_flags = rarely() ? u64() : IBV_WC_STANDARD_FLAGS,
    .comp_mask = rarely() ? u32() : below(2), .flags = rarely() ? u32() : below(2) };
  struct ibv_cq_ex *cq = ibv_create_cq_ex(context, &attr);
  if (cq) {
    cq->cq_context = cq; // marks it as extended
    keep_cqs(ibv_cq_ex_to_cq(cq));
  }
}

static void make_srq(void) {
  struct ibv_pd *pd = any_pd();
  if (!pd || srqs_count == MAX) return;
  struct ibv_srq_init_attr attr = { .attr = { .max_wr = size(), .max_sge = size(), .srq_limit = size() } };
  struct ibv_srq_init_attr_ex ex = { .attr = attr.attr, .pd = pd, .cq = any_cqs(),
    .srq_type = rarely() ? u8() : IBV_SRQT_BASIC,
    .comp_mask = rarely() ? u32() : IBV_SRQ_INIT_ATTR_PD | IBV_SRQ_INIT_ATTR_TYPE };
  keep_srqs(below(2) ? ibv_create_srq(pd, &attr) : ibv_create_srq_ex(pd->context, &ex));
}

static void change_srq(void) {
  struct ibv_srq *srq = any_srqs();
  struct ibv_srq_attr attr = { .max_wr = size(), .srq_limit = size() };
  uint32_t number;
  if (!srq) return;
  ibv_modify_srq(srq, &attr, rarely() ? (int)u32() : IBV_SRQ_LIMIT);
  ibv_get_srq_num(srq, &number);
  MUST(!ibv_query_srq(srq, &attr));
}

static void make_qp(void) {
  static const uint8_t types[] = { IBV_QPT_RC, IBV_QPT_RC, IBV_QPT_UD, IBV_QPT_UC };
  struct ibv_pd *pd = any_pd();
  if (!pd || qps_count == MAX) return;
  // Mostly of the domain's device, as they must be.
  struct ibv_cq *send_cq = any_cqs(), *recv_cq = any_cqs();
  if (below(4) && send_cq && recv_cq && recv_cq->context != send_cq->context) recv_cq = send_cq;
  if (below(4) && send_cq && send_cq->context != pd->context) pd = own[pd == own[0]];
  struct ibv_qp_init_attr init = { .send_cq = send_cq, .recv_cq = recv_cq,
    .srq = below(3) ? NULL : any_srqs(), .qp_type = rarely() ? u8() : types[below(4)],
    .sq_sig_all = below(2),
    .cap = { size(), size(), size(), size(), size() } };
  struct ibv_qp_init_attr_ex ex = { .send_cq = init.send_cq, .recv_cq = init.recv_cq, .srq = init.srq,
    .cap = init.cap, .qp_type = init.qp_type, .sq_sig_all = init.sq_sig_all, .pd = pd,
    .comp_mask = rarely() ? u32() : IBV_QP_INIT_ATTR_PD | IBV_QP_INIT_ATTR_SEND_OPS_FLAGS,
    .send_ops_flags = rarely() ? u64() : init.qp_type == IBV_QPT_RC ? 0x7f : 0xc };
  keep_qps(below(2) ? ibv_create_qp(pd, &init) : ibv_create_qp_ex(pd->context, &ex));
}

// ---- states ----

static union ibv_gid address;
static struct ibv_ah_attr path(void) {
  return (struct ibv_ah_attr){ .is_global = 1, .port_num = 1, .grh = { .dgid = address, .hop_limit = 8 } };
}

// Moves a queue pair towards RTS, as far as it can go.
static void start(struct ibv_qp *qp, uint32_t peer, uint8_t timeout) {
  int is_rc = qp->qp_type == IBV_QPT_RC, is_ud = qp->qp_type == IBV_QPT_UD;
  struct ibv_qp_attr attr = { .qp_state = IBV_QPS_INIT, .port_num = 1, .qkey = 7, .qp_access_flags = 0xf,
    .path_mtu = IBV_MTU_256 + below(5), .dest_qp_num = peer, .rq_psn = 5, .sq_psn = 5,
    .max_rd_atomic = 4, .max_dest_rd_atomic = 4, .min_rnr_timer = 1, .timeout = timeout,
    .retry_cnt = 1, .rnr_retry = 1, .ah_attr = path() };
  int mask = IBV_QP_STATE | IBV_QP_PKEY_INDEX | IBV_QP_PORT;
  if (ibv_modify_qp(qp, &attr, mask | (is_ud ? IBV_QP_QKEY : IBV_QP_ACCESS_FLAGS))) return;
  attr.qp_state = IBV_QPS_RTR;
  mask = IBV_QP_AV | IBV_QP_PATH_MTU | IBV_QP_DEST_QPN | IBV_QP_RQ_PSN;
  if (is_rc) mask |= IBV_QP_MAX_DEST_RD_ATOMIC | IBV_QP_MIN_RNR_TIMER;
  if (ibv_modify_qp(qp, &attr, IBV_QP_STATE | (is_ud ? 0 : mask))) return;
  attr.qp_state = IBV_QPS_RTS;
  mask = IBV_QP_STATE | IBV_QP_SQ_PSN;
  if (is_rc) mask |= IBV_QP_TIMEOUT | IBV_QP_RETRY_CNT | IBV_QP_RNR_RETRY | IBV_QP_MAX_QP_RD_ATOMIC;
  ibv_modify_qp(qp, &attr, mask);
}

static void connect_some(void) {
  struct ibv_qp *one = any_qps(), *two = any_qps();
  if (!one || !two) return;
  start(one, two->qp_num, 1 + below(4));
  if (one != two) start(two, one->qp_num, 1 + below(4));
}

static void change_qp(void) {
  struct ibv_qp *qp = any_qps(), *other = any_qps();
  struct ibv_qp_attr attr;
  if (!qp) return;
  memset(&attr, below(4) ? 0 : u8(), sizeof attr);
  attr.qp_state = u8() % 8;
  attr.cur_qp_state = u8() % 8;
  attr.path_mtu = u8() % 7;
  attr.dest_qp_num = other && !rarely() ? other->qp_num : u32();
  attr.qp_access_flags = u8();
  attr.port_num = !rarely();
  attr.timeout = u8() % 8;
  attr.max_rd_atomic = u8();
  attr.max_dest_rd_atomic = u8();
  attr.ah_attr = path();
  if (rarely()) memset(&attr.ah_attr, u8(), sizeof attr.ah_attr);
  int mask = IBV_QP_STATE;
  if (below(2)) mask |= u32() & 0x3ffffff;
  if (rarely()) mask = (int)u32();
  ibv_modify_qp(qp, &attr, mask);
}

static void query(void) {
  struct ibv_qp *qp = any_qps();
  struct ibv_qp_attr attr;
  struct ibv_qp_init_attr init;
  struct ibv_device_attr_ex device;
  struct ibv_port_attr port;
  struct ibv_gid_entry entry;
  union ibv_gid gid;
  uint16_t pkey;
  struct ibv_context *context = contexts[below(2)];
  if (qp) MUST(!ibv_query_qp(qp, &attr, (int)u32(), &init));
  ibv_query_device_ex(context, NULL, &device);
  ibv_query_port(context, u8() % 3, &port);
  ibv_query_gid(context, u8() % 3, (int)u32(), &gid);
  ibv_query_gid_ex(context, u8() % 3, u8() % 3, &entry, rarely());
  ibv_query_gid_table(context, &entry, u8() % 2, 0);
  ibv_query_pkey(context, u8() % 3, u8() % 3, &pkey);
  ibv_get_pkey_index(context, u8() % 3, pkey);
  ibv_event_type_str(u8());
  ibv_wc_status_str(u8());
  ibv_node_type_str(u8());
  ibv_port_state_str(u8());
  ibv_rate_to_mbps(u8());
  ibv_rate_to_mult(u8());
}

static void make_ah(void) {
  struct ibv_pd *pd = any_pd();
  if (!pd || ahs_count == MAX) return;
  struct ibv_ah_attr attr = path();
  struct ibv_wc wc = { .wc_flags = u8() };
  struct ibv_grh grh;
  memset(&grh, u8(), sizeof grh);
  if (rarely()) memset(&attr, u8(), sizeof attr);
  keep_ahs(below(4) ? ibv_create_ah(pd, &attr) : ibv_create_ah_from_wc(pd, &wc, below(2) ? &grh : NULL, u8() % 3));
}

// ---- work ----

// A range, mostly within a region of this device, or of the other one if it is for the peer.
static struct ibv_sge range(struct ibv_context *context, int is_remote) {
  int first = mrs_count ? below(mrs_count) : 0;
  for (int i = 0; i < mrs_count && below(8); i++) {
    struct ibv_mr *mr = mrs[(first + i) % mrs_count];
    if ((mr->context == context) == !is_remote && mr->length >= 1024)
      return (struct ibv_sge){ (uintptr_t)mr->addr + below(64) * 8, below(8) ? 8 : below(256) * 2,
        is_remote ? mr->rkey : mr->lkey };
  }
  return (struct ibv_sge){ (uintptr_t)any_address(), any_length(), any_key(is_remote) };
}

static uint32_t fill(struct ibv_context *context, struct ibv_sge *list, int count) {
  uint32_t total = 0;
  for (int i = 0; i < count; i++) total += (list[i] = range(context, 0)).length;
  return total;
}

// Inline data is read while the work is posted: these addresses are valid.
static void fill_inline(struct ibv_sge *list, int count) {
  for (int i = 0; i < count; i++)
    list[i] = (struct ibv_sge){ (uintptr_t)buffers[below(2)] + below(256), below(8) ? below(80) : LEN - 256, u32() };
}

static void post_sends(void) {
  struct ibv_send_wr list[4], *bad = NULL;
  struct ibv_sge entries[4][4];
  struct ibv_qp *qp = any_qps(), *other = any_qps();
  int count = 1 + below(4);
  if (!qp) return;
  memset(list, 0, sizeof list);
  for (int i = 0; i < count; i++) {
    struct ibv_send_wr *wr = &list[i];
    struct ibv_mw *mw = any_mws();
    int sges = below(4) ? 1 + below(2) : below(5);
    struct ibv_sge remote = range(qp->context, 1);
    wr->next = i + 1 < count ? wr + 1 : NULL;
    wr->wr_id = next_id(0);
    wr->opcode = rarely() ? u32() : below(below(4) ? 7 : IBV_WR_DRIVER1 + 1);
    wr->send_flags = rarely() ? u32() : u8() & 0xf;
    wr->imm_data = wr->opcode == IBV_WR_SEND_WITH_INV || wr->opcode == IBV_WR_LOCAL_INV ? any_key(1) : u32();
    wr->sg_list = sges || below(2) ? entries[i] : NULL;
    wr->num_sge = !rarely() ? sges : below(2) ? -1 : 5; // more than any queue here was made for
    if (wr->send_flags & IBV_SEND_INLINE) fill_inline(entries[i], 4);
    else fill(qp->context, entries[i], 4);
    if (wr->num_sge == 5) wr->num_sge = 1 << 20;
    if (qp->qp_type == IBV_QPT_UD) {
      wr->wr.ud.ah = any_ahs();
      wr->wr.ud.remote_qpn = other && !rarely() ? other->qp_num : u32();
      wr->wr.ud.remote_qkey = rarely() ? u32() : 7;
    } else if (wr->opcode == IBV_WR_BIND_MW) {
      if (!mw) wr->opcode = IBV_WR_SEND;
      wr->bind_mw.mw = mw;
      wr->bind_mw.rkey = rarely() ? u32() : mw ? ibv_inc_rkey(mw->rkey) : 0;
      wr->bind_mw.bind_info = (struct ibv_mw_bind_info){ any_mrs(), (uintptr_t)any_address(), any_length(), any_access() };
    } else if (wr->opcode == IBV_WR_ATOMIC_CMP_AND_SWP || wr->opcode == IBV_WR_ATOMIC_FETCH_AND_ADD) {
      wr->wr.atomic.remote_addr = remote.addr & (rarely() ? ~0ul : ~7ul);
      wr->wr.atomic.compare_add = u8();
      wr->wr.atomic.rkey = remote.lkey;
    } else {
      wr->wr.rdma.remote_addr = remote.addr;
      wr->wr.rdma.rkey = remote.lkey;
    }
  }
  if (ibv_post_send(qp, list, &bad)) MUST(bad >= list && bad < list + count);
}

static void post_receives(void) {
  struct ibv_recv_wr list[4], *bad = NULL;
  struct ibv_sge entries[4][4];
  struct ibv_qp *qp = any_qps();
  struct ibv_srq *srq = any_srqs();
  int count = 1 + below(4), is_shared = below(2);
  if (is_shared ? !srq : !qp) return;
  for (int i = 0; i < count; i++) {
    int sges = below(4) ? 1 : below(4);
    uint32_t total = fill(is_shared ? srq->context : qp->context, entries[i], sges);
    list[i] = (struct ibv_recv_wr){ .wr_id = next_id(total), .next = i + 1 < count ? &list[i + 1] : NULL,
      .sg_list = sges || below(2) ? entries[i] : NULL, .num_sge = rarely() ? 1 << 20 : sges };
  }
  if (is_shared ? ibv_post_srq_recv(srq, list, &bad) : ibv_post_recv(qp, list, &bad))
    MUST(bad >= list && bad < list + count);
}

// `ibv_wr_*`: calls in any order between start and end.
static void build(void) {
  struct ibv_qp *qp = any_qps(), *other = any_qps();
  struct ibv_qp_ex *ex = qp ? ibv_qp_to_qp_ex(qp) : NULL;
  struct ibv_sge entries[4];
  struct ibv_data_buf parts[3];
  struct ibv_mw *mw = any_mws();
  struct ibv_mw_bind_info info = { any_mrs(), (uintptr_t)any_address(), any_length(), any_access() };
  struct ibv_ah *ah = any_ahs();
  if (!ex) return;
  ibv_wr_start(ex);
  for (int calls = 1 + below(8); calls; calls--) {
    struct ibv_sge remote = range(qp->context, 1), local = range(qp->context, 0);
    ex->wr_id = next_id(0);
    ex->wr_flags = rarely() ? u32() : u8() & 7;
    switch (below(20)) {
    case 0: ibv_wr_send(ex); break;
    case 1: ibv_wr_send_imm(ex, u32()); break;
    case 2: ibv_wr_send_inv(ex, any_key(1)); break;
    case 3: ibv_wr_rdma_write(ex, remote.lkey, remote.addr); break;
    case 4: ibv_wr_rdma_write_imm(ex, remote.lkey, remote.addr, u32()); break;
    case 5: ibv_wr_rdma_read(ex, remote.lkey, remote.addr); break;
    case 6: ibv_wr_atomic_cmp_swp(ex, remote.lkey, remote.addr & ~7ul, u8(), u8()); break;
    case 7: ibv_wr_atomic_fetch_add(ex, remote.lkey, remote.addr, u8()); break;
    case 8: ibv_wr_local_inv(ex, any_key(1)); break;
    case 9: if (mw) ibv_wr_bind_mw(ex, mw, ibv_inc_rkey(mw->rkey), &info); break;
    case 10: ibv_wr_send_tso(ex, buffers[0], u8(), u8()); break;
    case 11: ibv_wr_set_ud_addr(ex, ah, other && !rarely() ? other->qp_num : u32(), rarely() ? u32() : 7); break;
    case 12: ibv_wr_set_xrc_srqn(ex, u32()); break;
    case 13: ibv_wr_set_inline_data(ex, buffers[0], below(8) ? below(80) : LEN); break;
    case 14:
      for (int i = 0; i < 3; i++) parts[i] = (struct ibv_data_buf){ buffers[1] + below(200), below(200) };
      ibv_wr_set_inline_data_list(ex, rarely() ? 0 : 3, parts);
      break;
    case 15: fill(qp->context, entries, 4); ibv_wr_set_sge_list(ex, rarely() ? (size_t)1 << 40 : below(5), entries); break;
    default: ibv_wr_set_sge(ex, local.lkey, local.addr, local.length); break;
    }
  }
  if (below(8)) ibv_wr_complete(ex);
  else ibv_wr_abort(ex);
}

static void windows(void) {
  struct ibv_pd *pd = any_pd();
  struct ibv_mw *mw = any_mws();
  struct ibv_qp *qp = any_qps();
  struct ibv_mw_bind bind = { .wr_id = next_id(0), .send_flags = u8() & 7,
    .bind_info = { any_mrs(), (uintptr_t)any_address(), any_length(), any_access() } };
  switch (below(3)) {
  case 0: if (pd && mws_count < MAX) keep_mws(ibv_alloc_mw(pd, below(3))); break;
  case 1: if (qp && mw && mw->context->ops.bind_mw) ibv_bind_mw(qp, mw, &bind); break;
  case 2: if (mw && !ibv_dealloc_mw(mw)) drop_mws(mw); break;
  }
}

static int is_extended(struct ibv_cq *cq) { return cq->cq_context == cq; }

static void poll(struct ibv_cq *cq, int most) {
  if (!cq) return;
  if (!is_extended(cq)) {
    struct ibv_wc list[20];
    int found = ibv_poll_cq(cq, most, list);
    MUST(found <= most);
    for (int i = 0; i < found; i++)
      check_completion(list[i].wr_id, list[i].status, list[i].opcode == IBV_WC_RECV, list[i].byte_len);
    return;
  }
  struct ibv_cq_ex *ex = (struct ibv_cq_ex *)cq; // as it was created
  struct ibv_poll_cq_attr attr = { .comp_mask = rarely() };
  if (ibv_start_poll(ex, &attr)) return;
  do {
    int is_receive = ibv_wc_read_opcode(ex) == IBV_WC_RECV;
    check_completion(ex->wr_id, ex->status, is_receive, ibv_wc_read_byte_len(ex));
    ibv_wc_read_imm_data(ex);
    ibv_wc_read_qp_num(ex);
    ibv_wc_read_src_qp(ex);
    ibv_wc_read_wc_flags(ex);
    ibv_wc_read_slid(ex);
    ibv_wc_read_sl(ex);
    ibv_wc_read_vendor_err(ex);
    ibv_wc_read_dlid_path_bits(ex);
  } while (--most > 0 && !ibv_next_poll(ex));
  ibv_end_poll(ex);
}

static void change_queue(void) {
  struct ibv_cq *cq = any_cqs();
  struct ibv_modify_cq_attr attr = { .attr_mask = rarely() ? u32() : 1 };
  if (!cq) return;
  switch (below(3)) {
  case 0: ibv_resize_cq(cq, (int)size()); break;
  case 1: ibv_modify_cq(cq, &attr); break;
  case 2: ibv_req_notify_cq(cq, below(2)); break;
  }
}

static void make_channel(void) {
  struct ibv_context *context = any_context();
  struct ibv_comp_channel *made = context && channels_count < MAX ? ibv_create_comp_channel(context) : NULL;
  if (made) MUST(!fcntl(made->fd, F_SETFL, O_NONBLOCK));
  keep_channels(made);
}

// Destroys something; what is in use stays.
#define DESTROY(list, call) do { void *gone = any_##list(); if (gone && !call(gone)) drop_##list(gone); } while (0)
static void destroy(void) {
  acknowledge();
  switch (below(9)) {
  case 0: DESTROY(pds, ibv_dealloc_pd); break;
  case 1: DESTROY(tds, ibv_dealloc_td); break;
  case 2: DESTROY(mrs, ibv_dereg_mr); break;
  case 3: DESTROY(channels, ibv_destroy_comp_channel); break;
  case 4: DESTROY(cqs, ibv_destroy_cq); break;
  case 5: DESTROY(srqs, ibv_destroy_srq); break;
  case 6: DESTROY(ahs, ibv_destroy_ah); break;
  default: DESTROY(qps, ibv_destroy_qp); break;
  }
}

// Destroys all, users before what they use.
#define DESTROY_ALL(list, call) while (list##_count) MUST(!call(list[--list##_count]))
static void destroy_all(void) {
  acknowledge();
  DESTROY_ALL(qps, ibv_destroy_qp);
  DESTROY_ALL(ahs, ibv_destroy_ah);
  DESTROY_ALL(srqs, ibv_destroy_srq);
  DESTROY_ALL(mws, ibv_dealloc_mw);
  DESTROY_ALL(mrs, ibv_dereg_mr);
  DESTROY_ALL(cqs, ibv_destroy_cq);
  DESTROY_ALL(channels, ibv_destroy_comp_channel);
  // Parent domains are younger than their domains, but `drop` moves the last one forward.
  for (int tries = 0; pds_count; tries++) {
    MUST(tries < MAX * MAX);
    struct ibv_pd *pd = pds[tries % pds_count];
    if (!ibv_dealloc_pd(pd)) drop_pds(pd);
  }
  DESTROY_ALL(tds, ibv_dealloc_td);
  // Events of objects that are gone.
  struct ibv_async_event event;
  for (int i = 0; i < 2; i++)
    while (!ibv_get_async_event(contexts[i], &event)) ibv_ack_async_event(&event);
}

// ---- the harness ----

static void prepare(void) {
  int count;
  for (int i = 0; i < 6; i++) {
    uint8_t *map = mmap(NULL, LEN + 2 * 4096, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    MUST(map != MAP_FAILED && !mprotect(map + 4096, LEN, PROT_READ | PROT_WRITE));
    buffers[i] = map + 4096;
    memset(buffers[i], 0x50 + i, LEN);
  }
  struct ibv_device **list = ibv_get_device_list(&count);
  MUST(list && count == 1);
  for (int i = 0; i < 2; i++) {
    MUST(contexts[i] = ibv_open_device(list[0]));
    MUST(!fcntl(contexts[i]->async_fd, F_SETFL, O_NONBLOCK));
    MUST((own[i] = ibv_alloc_pd(contexts[i])) && (hidden[i] = ibv_alloc_pd(contexts[i])));
    MUST(secrets[i] = ibv_reg_mr(hidden[i], buffers[2 + i], LEN, IBV_ACCESS_LOCAL_WRITE));
    MUST(quiet_mrs[i] = ibv_reg_mr(hidden[i], buffers[4 + i], LEN, IBV_ACCESS_LOCAL_WRITE));
    MUST(quiet_cqs[i] = ibv_create_cq(contexts[i], 16, NULL, NULL, 0));
    struct ibv_qp_init_attr init = { .send_cq = quiet_cqs[i], .recv_cq = quiet_cqs[i], .qp_type = IBV_QPT_RC,
      .cap = { 4, 4, 1, 1, 0 } };
    MUST(quiet[i] = ibv_create_qp(hidden[i], &init));
  }
  ibv_free_device_list(list);
  MUST(!ibv_query_gid(contexts[0], 1, 0, &address));
  for (int i = 0; i < 2; i++) start(quiet[i], quiet[1 - i]->qp_num, 18);
  MUST(quiet[0]->state == IBV_QPS_RTS && quiet[1]->state == IBV_QPS_RTS);
}

static void check_quiet_connection(void) {
  struct ibv_sge from = { (uintptr_t)buffers[4], 64, quiet_mrs[0]->lkey };
  struct ibv_sge into = { (uintptr_t)buffers[5], 64, quiet_mrs[1]->lkey };
  struct ibv_recv_wr receive = { .wr_id = 1, .sg_list = &into, .num_sge = 1 }, *bad_receive;
  struct ibv_send_wr send = { .wr_id = 2, .sg_list = &from, .num_sge = 1, .opcode = IBV_WR_SEND,
    .send_flags = IBV_SEND_SIGNALED }, *bad_send;
  struct ibv_wc wc;
  memset(buffers[4], generation, 64);
  MUST(!ibv_post_recv(quiet[1], &receive, &bad_receive) && !ibv_post_send(quiet[0], &send, &bad_send));
  time_t begun = time(NULL);
  for (int done = 0; done != 3;) {
    for (int i = 0; i < 2; i++)
      if (ibv_poll_cq(quiet_cqs[i], 1, &wc) > 0) {
        MUST(wc.status == IBV_WC_SUCCESS && wc.wr_id == (i ? 1 : 2));
        done |= 1 << i;
      }
    MUST(time(NULL) - begun < 8);
  }
  MUST(!memcmp(buffers[4], buffers[5], 64));
}

static void step(void) {
  switch (below(24)) {
  case 0: make_domain(); break;
  case 1: case 2: make_region(); break;
  case 3: change_region(); break;
  case 4: make_channel(); break;
  case 5: make_queue(); break;
  case 6: make_srq(); break;
  case 7: change_srq(); break;
  case 8: make_qp(); break;
  case 9: case 10: connect_some(); break;
  case 11: change_qp(); break;
  case 12: query(); break;
  case 13: make_ah(); break;
  case 14: case 15: post_sends(); break;
  case 16: case 17: post_receives(); break;
  case 18: build(); break;
  case 19: windows(); break;
  case 20: change_queue(); break;
  case 21: take_events(); break;
  case 22: destroy(); break;
  default:
    for (int rounds = 1 + below(8); rounds; rounds--)
      for (int i = 0; i < cqs_count; i++) poll(cqs[i], 1 + below(20));
  }
}

// Something to work with: memory, a queue and a queue pair of each device, connected.
static void begin(void) {
  static const uint8_t types[] = { IBV_QPT_RC, IBV_QPT_RC, IBV_QPT_UC, IBV_QPT_UD };
  uint8_t type = types[below(4)];
  for (int i = 0; i < 2; i++) {
    keep_mrs(ibv_reg_mr(own[i], buffers[i], LEN, 0xf));
    keep_cqs(ibv_create_cq(contexts[i], 16, NULL, NULL, 0));
    struct ibv_qp_init_attr init = { .send_cq = cqs[i], .recv_cq = cqs[i], .qp_type = type,
      .cap = { 8, 8, 2, 2, 64 } };
    keep_qps(ibv_create_qp(own[i], &init));
    struct ibv_ah_attr attr = path();
    keep_ahs(ibv_create_ah(own[i], &attr));
  }
  if (qps_count < 2) return; // a kind that the library does not have
  for (int i = 0; i < 2; i++) start(qps[i], qps[1 - i]->qp_num, 3);
}

void verbs_script(const uint8_t *bytes, size_t count) {
  if (!contexts[0]) prepare();
  input = bytes, left = count, posted = 0, generation = (generation + 1) & 0xffff;
  begin();
  for (int steps = 0; left && steps < 64; steps++) step();
  destroy_all();
  check_quiet_connection();
  for (int i = 2; i < 4; i++)
    for (int at = 0; at < LEN; at++) MUST(buffers[i][at] == 0x50 + i);
}

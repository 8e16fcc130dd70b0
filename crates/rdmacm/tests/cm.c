/* The connection manager as C programs call it. Both ends are in this process; the argument chooses
 * a part. */
#include <arpa/inet.h>
#include <errno.h>
#include <fcntl.h>
#include <poll.h>
#include <pthread.h>
#include <rdma/rdma_cma.h>
#include <rdma/rdma_verbs.h>
#include <rdma/rsocket.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/wait.h>
#include <unistd.h>

#define CHECK(what)                                                                    \
  do {                                                                                 \
    if (!(what)) {                                                                     \
      fprintf(stderr, "%s:%d: %s, errno %d\n", __FILE__, __LINE__, #what, errno);      \
      exit(1);                                                                         \
    }                                                                                  \
  } while (0)
#define FAILS(call, expected)                                                          \
  do {                                                                                 \
    errno = 0;                                                                         \
    CHECK((long)(call) == -1);                                                         \
    CHECK(errno == (expected));                                                        \
  } while (0)

static struct sockaddr_in loopback(int port) {
  struct sockaddr_in at = {.sin_family = AF_INET, .sin_port = htons(port)};
  at.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
  return at;
}

static struct rdma_cm_event *take(struct rdma_event_channel *channel, enum rdma_cm_event_type type) {
  struct rdma_cm_event *event;
  CHECK(!rdma_get_cm_event(channel, &event));
  if (event->event != type) {
    fprintf(stderr, "%s instead of %s, status %d\n", rdma_event_str(event->event),
            rdma_event_str(type), event->status);
    exit(1);
  }
  return event;
}

static void skip(struct rdma_event_channel *channel, enum rdma_cm_event_type type) {
  CHECK(!rdma_ack_cm_event(take(channel, type)));
}

static int is_readable(struct rdma_event_channel *channel) {
  struct pollfd set = {.fd = channel->fd, .events = POLLIN};
  return poll(&set, 1, 0) == 1;
}

static void add_qp(struct rdma_cm_id *id, enum ibv_qp_type type) {
  struct ibv_qp_init_attr attr = {.qp_type = type, .sq_sig_all = 1};
  attr.cap = (struct ibv_qp_cap){8, 8, 1, 1, 0};
  CHECK(!rdma_create_qp(id, NULL, &attr));
  CHECK(id->qp && id->pd && id->send_cq && id->recv_cq && id->qp->state == (type == IBV_QPT_UD ? IBV_QPS_RTS : IBV_QPS_INIT));
}

static struct rdma_cm_id *listener(struct rdma_event_channel *channel, enum rdma_port_space ps) {
  struct rdma_cm_id *id;
  struct sockaddr_in any = loopback(0);
  CHECK(!rdma_create_id(channel, &id, (void *)7, ps));
  CHECK(!rdma_bind_addr(id, (void *)&any));
  CHECK(id->verbs && id->pd && id->port_num == 1 && rdma_get_src_port(id) != 0);
  CHECK(!rdma_listen(id, 4));
  return id;
}

/* An id whose address and route to a listener are resolved. */
static struct rdma_cm_id *active(struct rdma_event_channel *channel, struct rdma_cm_id *to) {
  struct rdma_cm_id *id;
  struct sockaddr_in at = loopback(ntohs(rdma_get_src_port(to)));
  CHECK(!rdma_create_id(channel, &id, (void *)9, to->ps));
  CHECK(!rdma_resolve_addr(id, NULL, (void *)&at, 2000));
  skip(channel, RDMA_CM_EVENT_ADDR_RESOLVED);
  CHECK(id->verbs == to->verbs && id->port_num == 1);
  CHECK(!rdma_resolve_route(id, 2000));
  skip(channel, RDMA_CM_EVENT_ROUTE_RESOLVED);
  CHECK(id->route.num_paths == 1 && id->route.path_rec->mtu > 0);
  CHECK(rdma_get_dst_port(id) == at.sin_port && rdma_get_src_port(id) != 0);
  CHECK(rdma_get_local_addr(id)->sa_family == AF_INET);
  return id;
}

static void exchange(struct rdma_cm_id *from, struct rdma_cm_id *to) {
  char *data = calloc(2, 64);
  struct ibv_mr *mr = ibv_reg_mr(from->pd, data, 128, IBV_ACCESS_LOCAL_WRITE);
  struct ibv_wc wc;
  CHECK(mr);
  strcpy(data, "hello");
  CHECK(!rdma_post_recv(to, NULL, data + 64, 64, mr));
  CHECK(!rdma_post_send(from, NULL, data, 64, mr, 0));
  CHECK(rdma_get_send_comp(from, &wc) == 1 && wc.status == IBV_WC_SUCCESS);
  CHECK(rdma_get_recv_comp(to, &wc) == 1 && wc.status == IBV_WC_SUCCESS && wc.byte_len == 64);
  CHECK(!strcmp(data + 64, "hello"));
  CHECK(!ibv_dereg_mr(mr));
  free(data);
}

static void destroy(struct rdma_cm_id *id) {
  rdma_destroy_qp(id);
  CHECK(!id->qp && !id->send_cq && !id->recv_cq);
  CHECK(!rdma_destroy_id(id));
}

static void connections(void) {
  struct rdma_event_channel *channel = rdma_create_event_channel();
  CHECK(channel && !is_readable(channel));
  CHECK(!fcntl(channel->fd, F_SETFL, fcntl(channel->fd, F_GETFL) | O_NONBLOCK));
  struct rdma_cm_event *event;
  FAILS(rdma_get_cm_event(channel, &event), EAGAIN);
  CHECK(!fcntl(channel->fd, F_SETFL, fcntl(channel->fd, F_GETFL) & ~O_NONBLOCK));
  struct rdma_cm_id *passive = listener(channel, RDMA_PS_TCP), *id = active(channel, passive);
  add_qp(id, IBV_QPT_RC);

  struct rdma_conn_param param = {.private_data = "ask", .private_data_len = 3, .responder_resources = 3,
      .initiator_depth = 5, .retry_count = 6, .rnr_retry_count = 7};
  CHECK(!rdma_connect(id, &param));
  FAILS(rdma_connect(id, &param), EINVAL);
  event = take(channel, RDMA_CM_EVENT_CONNECT_REQUEST);
  CHECK(event->listen_id == passive && event->status == 0);
  const struct rdma_conn_param *asked = &event->param.conn;
  CHECK(asked->private_data_len == 56 && !memcmp(asked->private_data, "ask\0\0", 5));
  CHECK(asked->responder_resources == 5 && asked->initiator_depth == 3);
  CHECK(asked->retry_count == 6 && asked->rnr_retry_count == 7 && asked->qp_num == id->qp->qp_num);
  struct rdma_cm_id *child = event->id;
  CHECK(child->context == (void *)7 && child->channel == channel && child->verbs && child->ps == RDMA_PS_TCP);
  CHECK(rdma_get_src_port(child) == rdma_get_src_port(passive));
  CHECK(rdma_get_dst_port(child) == rdma_get_src_port(id));
  CHECK(!rdma_ack_cm_event(event));
  /* A queue pair of the program's own is connected before the answer: as the request asks. */
  struct ibv_qp_attr early = {.qp_state = IBV_QPS_RTS};
  int early_mask;
  CHECK(!rdma_init_qp_attr(child, &early, &early_mask));
  CHECK(early.retry_cnt == 6 && early.rnr_retry == 7 && early.max_rd_atomic == 3);
  add_qp(child, IBV_QPT_RC);
  struct rdma_conn_param answer = {.private_data = "yes", .private_data_len = 3, .responder_resources = 2,
      .initiator_depth = RDMA_MAX_INIT_DEPTH, .rnr_retry_count = 7};
  CHECK(!rdma_accept(child, &answer));
  CHECK(child->qp->state == IBV_QPS_RTS);
  event = take(channel, RDMA_CM_EVENT_ESTABLISHED);
  CHECK(event->id == id && event->param.conn.private_data_len == 196);
  CHECK(!strcmp(event->param.conn.private_data, "yes") && event->param.conn.initiator_depth == 2);
  CHECK(id->qp->state == IBV_QPS_RTS);
  CHECK(!rdma_ack_cm_event(event));
  event = take(channel, RDMA_CM_EVENT_ESTABLISHED);
  CHECK(event->id == child);
  CHECK(!rdma_ack_cm_event(event));

  /* What was agreed: neither side has more reads outstanding than the other answers. */
  struct ibv_qp_attr attr;
  struct ibv_qp_init_attr init;
  CHECK(!ibv_query_qp(id->qp, &attr, 0, &init));
  CHECK(attr.max_rd_atomic == 2 && attr.max_dest_rd_atomic == 3 && attr.retry_cnt == 6);
  CHECK(!ibv_query_qp(child->qp, &attr, 0, &init));
  CHECK(attr.max_rd_atomic == 3 && attr.max_dest_rd_atomic == 2 && attr.retry_cnt == 6);
  exchange(id, child);
  exchange(child, id);

  /* A connection on a channel of its own. */
  struct rdma_event_channel *other = rdma_create_event_channel();
  CHECK(!rdma_migrate_id(child, other) && child->channel == other);
  CHECK(!rdma_disconnect(id));
  skip(channel, RDMA_CM_EVENT_DISCONNECTED);
  CHECK(id->qp->state == IBV_QPS_ERR);
  skip(other, RDMA_CM_EVENT_DISCONNECTED);
  CHECK(!rdma_disconnect(child) && child->qp->state == IBV_QPS_ERR && !is_readable(other));
  destroy(child);
  destroy(id);

  /* A peer that goes away without a word, and one that refuses. */
  id = active(channel, passive);
  add_qp(id, IBV_QPT_RC);
  CHECK(!rdma_connect(id, &param));
  event = take(channel, RDMA_CM_EVENT_CONNECT_REQUEST);
  child = event->id;
  CHECK(!rdma_ack_cm_event(event));
  destroy(id);
  /* Until the library has read the end of the connection, the request is still open. */
  while (rdma_establish(child) && errno == EINVAL) usleep(1000);
  add_qp(child, IBV_QPT_RC);
  CHECK(!is_readable(channel));
  FAILS(rdma_accept(child, &answer), ECONNRESET);
  destroy(child);
  id = active(channel, passive);
  add_qp(id, IBV_QPT_RC);
  CHECK(!rdma_connect(id, &param));
  event = take(channel, RDMA_CM_EVENT_CONNECT_REQUEST);
  CHECK(!rdma_reject(event->id, "no", 2));
  CHECK(!rdma_destroy_id(event->id) && !rdma_ack_cm_event(event));
  event = take(channel, RDMA_CM_EVENT_REJECTED);
  CHECK(event->id == id && event->status == 28 && event->param.conn.private_data_len == 148);
  CHECK(!strcmp(event->param.conn.private_data, "no"));
  CHECK(!rdma_ack_cm_event(event));
  destroy(id);

  /* A listener that is gone: requests that were not taken are refused. */
  id = active(channel, passive);
  add_qp(id, IBV_QPT_RC);
  CHECK(!rdma_connect(id, &param));
  for (int i = 0; i < 1000 && !is_readable(channel); i++) usleep(1000);
  CHECK(is_readable(channel) && !rdma_destroy_id(passive));
  event = take(channel, RDMA_CM_EVENT_REJECTED);
  CHECK(event->status == 28 && !rdma_ack_cm_event(event));
  destroy(id);
  rdma_destroy_event_channel(other);
  rdma_destroy_event_channel(channel);
}

/* A program that connects its queue pairs itself. */
static void own_queue_pairs(void) {
  struct rdma_event_channel *channel = rdma_create_event_channel();
  struct rdma_cm_id *passive = listener(channel, RDMA_PS_TCP), *id = active(channel, passive);
  struct rdma_conn_param param = {.qp_num = 0x800042, .responder_resources = 1, .initiator_depth = 1};
  CHECK(!rdma_connect(id, &param));
  struct rdma_cm_event *event = take(channel, RDMA_CM_EVENT_CONNECT_REQUEST);
  struct rdma_cm_id *child = event->id;
  CHECK(event->param.conn.qp_num == 0x800042 && !rdma_ack_cm_event(event));
  struct ibv_qp_attr attr = {.qp_state = IBV_QPS_RTR};
  int mask = 0;
  CHECK(!rdma_init_qp_attr(child, &attr, &mask));
  CHECK(attr.dest_qp_num == 0x800042 && attr.ah_attr.is_global && (mask & IBV_QP_AV) && (mask & IBV_QP_DEST_QPN));
  FAILS(rdma_establish(id), EINVAL);
  param.qp_num = 0x800043;
  CHECK(!rdma_accept(child, &param));
  event = take(channel, RDMA_CM_EVENT_CONNECT_RESPONSE);
  CHECK(event->id == id && event->param.conn.qp_num == 0x800043 && !rdma_ack_cm_event(event));
  attr.qp_state = IBV_QPS_RTS;
  CHECK(!rdma_init_qp_attr(id, &attr, &mask) && (mask & IBV_QP_SQ_PSN) && attr.max_rd_atomic == 1);
  CHECK(!is_readable(channel));
  CHECK(!rdma_establish(id));
  event = take(channel, RDMA_CM_EVENT_ESTABLISHED);
  CHECK(event->id == child && !rdma_ack_cm_event(event));
  CHECK(!rdma_disconnect(child));
  skip(channel, RDMA_CM_EVENT_DISCONNECTED);
  skip(channel, RDMA_CM_EVENT_DISCONNECTED);
  CHECK(!rdma_destroy_id(child) && !rdma_destroy_id(id) && !rdma_destroy_id(passive));
  rdma_destroy_event_channel(channel);
}

/* A message waits for a receive request that comes late, also if the retries are limited. */
static void late_receives(void) {
  for (int retries = 0; retries <= 5; retries += 5) {
    struct rdma_event_channel *channel = rdma_create_event_channel();
    struct rdma_cm_id *passive = listener(channel, RDMA_PS_TCP), *id = active(channel, passive);
    add_qp(id, IBV_QPT_RC);
    struct rdma_conn_param param = {.retry_count = 7, .rnr_retry_count = retries};
    CHECK(!rdma_connect(id, &param));
    struct rdma_cm_event *event = take(channel, RDMA_CM_EVENT_CONNECT_REQUEST);
    struct rdma_cm_id *child = event->id;
    CHECK(!rdma_ack_cm_event(event));
    add_qp(child, IBV_QPT_RC);
    CHECK(!rdma_accept(child, &param));
    skip(channel, RDMA_CM_EVENT_ESTABLISHED);
    skip(channel, RDMA_CM_EVENT_ESTABLISHED);
    struct rdma_cm_id *both[] = {id, child};
    for (int from = 0; from < 2; from++) {
      char data[128] = "late";
      struct ibv_mr *mr = ibv_reg_mr(id->pd, data, 128, IBV_ACCESS_LOCAL_WRITE);
      struct ibv_wc wc;
      CHECK(mr && !rdma_post_send(both[from], NULL, data, 64, mr, 0));
      usleep(300000);
      CHECK(!rdma_post_recv(both[!from], NULL, data + 64, 64, mr));
      CHECK(rdma_get_send_comp(both[from], &wc) == 1);
      CHECK(wc.status == (retries ? IBV_WC_SUCCESS : IBV_WC_RNR_RETRY_EXC_ERR));
      if (!retries) break;
      CHECK(rdma_get_recv_comp(both[!from], &wc) == 1 && wc.status == IBV_WC_SUCCESS);
      CHECK(!strcmp(data + 64, "late") && !ibv_dereg_mr(mr));
    }
    CHECK(!rdma_disconnect(id));
    skip(channel, RDMA_CM_EVENT_DISCONNECTED);
    skip(channel, RDMA_CM_EVENT_DISCONNECTED);
    destroy(child), destroy(id);
    CHECK(!rdma_destroy_id(passive));
    rdma_destroy_event_channel(channel);
  }
}

static void datagrams(void) {
  struct rdma_event_channel *channel = rdma_create_event_channel();
  struct rdma_cm_id *passive = listener(channel, RDMA_PS_UDP), *id = active(channel, passive);
  add_qp(id, IBV_QPT_UD);
  struct rdma_conn_param param = {.private_data = "ask", .private_data_len = 3};
  CHECK(!rdma_connect(id, &param));
  struct rdma_cm_event *event = take(channel, RDMA_CM_EVENT_CONNECT_REQUEST);
  CHECK(event->param.ud.private_data_len == 180 && !strcmp(event->param.ud.private_data, "ask"));
  struct rdma_cm_id *child = event->id;
  CHECK(!rdma_ack_cm_event(event));
  add_qp(child, IBV_QPT_UD);
  param.qp_num = child->qp->qp_num;
  CHECK(!rdma_accept(child, &param));
  event = take(channel, RDMA_CM_EVENT_ESTABLISHED);
  const struct rdma_ud_param *ud = &event->param.ud;
  CHECK(event->id == id && ud->qp_num == child->qp->qp_num && ud->qkey == RDMA_UDP_QKEY);
  CHECK(ud->private_data_len == 136 && !strcmp(ud->private_data, "ask"));
  struct ibv_ah_attr path = ud->ah_attr;
  struct ibv_ah *ah = ibv_create_ah(id->pd, &path);
  CHECK(ah);
  char *data = calloc(3, 64);
  struct ibv_mr *mr = ibv_reg_mr(id->pd, data, 192, IBV_ACCESS_LOCAL_WRITE);
  struct ibv_wc wc;
  strcpy(data, "datagram");
  CHECK(!rdma_post_recv(child, NULL, data + 64, 104, mr));
  CHECK(!rdma_post_ud_send(id, NULL, data, 64, mr, 0, ah, ud->qp_num));
  CHECK(rdma_get_recv_comp(child, &wc) == 1 && wc.status == IBV_WC_SUCCESS);
  CHECK(!strcmp(data + 104, "datagram") && wc.src_qp == id->qp->qp_num);
  CHECK(rdma_get_send_comp(id, &wc) == 1 && wc.status == IBV_WC_SUCCESS);
  CHECK(!ibv_destroy_ah(ah) && !ibv_dereg_mr(mr) && !rdma_ack_cm_event(event));
  free(data);
  FAILS(rdma_disconnect(id), EINVAL);
  CHECK(!is_readable(channel));
  destroy(child);
  destroy(id);
  CHECK(!rdma_destroy_id(passive));
  rdma_destroy_event_channel(channel);
}

static void *serve(void *argument) {
  struct rdma_cm_id *passive = argument, *id;
  CHECK(!rdma_get_request(passive, &id));
  CHECK(id->event && id->event->event == RDMA_CM_EVENT_CONNECT_REQUEST && id->qp);
  char data[64];
  struct ibv_mr *mr = rdma_reg_msgs(id, data, sizeof data);
  struct ibv_wc wc;
  CHECK(mr && !rdma_post_recv(id, NULL, data, sizeof data, mr));
  CHECK(!rdma_accept(id, NULL));
  CHECK(id->event->event == RDMA_CM_EVENT_ESTABLISHED);
  CHECK(rdma_get_recv_comp(id, &wc) == 1 && wc.status == IBV_WC_SUCCESS && !strcmp(data, "synchronous"));
  CHECK(!rdma_post_send(id, NULL, data, sizeof data, mr, 0));
  CHECK(rdma_get_send_comp(id, &wc) == 1 && wc.status == IBV_WC_SUCCESS);
  CHECK(!rdma_disconnect(id));
  CHECK(!rdma_dereg_mr(mr));
  rdma_destroy_ep(id);
  return NULL;
}

static void synchronous(void) {
  struct rdma_addrinfo hints = {.ai_port_space = RDMA_PS_TCP, .ai_flags = RAI_PASSIVE}, *info;
  struct ibv_qp_init_attr attr = {.sq_sig_all = 1};
  attr.cap = (struct ibv_qp_cap){4, 4, 1, 1, 16};
  CHECK(!rdma_getaddrinfo("127.0.0.1", "0", &hints, &info));
  CHECK(info->ai_src_len == sizeof(struct sockaddr_in) && !info->ai_dst_addr && info->ai_qp_type == IBV_QPT_RC);
  struct rdma_cm_id *passive, *id;
  CHECK(!rdma_create_ep(&passive, info, NULL, &attr));
  rdma_freeaddrinfo(info);
  CHECK(passive->pd && passive->pd->context == passive->verbs);
  CHECK(!rdma_listen(passive, 0));
  pthread_t server;
  CHECK(!pthread_create(&server, NULL, serve, passive));

  char port[8];
  snprintf(port, sizeof port, "%d", ntohs(rdma_get_src_port(passive)));
  hints.ai_flags = 0;
  CHECK(!rdma_getaddrinfo("127.0.0.1", port, &hints, &info) && info->ai_dst_len && info->ai_src_len);
  attr = (struct ibv_qp_init_attr){.sq_sig_all = 1};
  attr.cap = (struct ibv_qp_cap){4, 4, 1, 1, 16};
  CHECK(!rdma_create_ep(&id, info, NULL, &attr));
  rdma_freeaddrinfo(info);
  CHECK(id->qp && id->pd && id->channel);
  char data[64] = "synchronous", back[64];
  struct ibv_mr *mr = rdma_reg_msgs(id, data, sizeof data), *mr_back = rdma_reg_msgs(id, back, sizeof back);
  struct ibv_wc wc;
  CHECK(mr && mr_back && !rdma_post_recv(id, NULL, back, sizeof back, mr_back));
  CHECK(!rdma_connect(id, NULL));
  CHECK(id->event->event == RDMA_CM_EVENT_ESTABLISHED);
  CHECK(!rdma_post_send(id, NULL, data, sizeof data, mr, 0));
  CHECK(rdma_get_recv_comp(id, &wc) == 1 && wc.status == IBV_WC_SUCCESS && !strcmp(back, data));
  CHECK(rdma_get_send_comp(id, &wc) == 1);
  CHECK(!pthread_join(server, NULL));
  CHECK(!rdma_disconnect(id));
  CHECK(id->event->event == RDMA_CM_EVENT_DISCONNECTED);
  FAILS(rdma_disconnect(id), EINVAL);
  CHECK(!rdma_dereg_mr(mr) && !rdma_dereg_mr(mr_back));
  rdma_destroy_ep(id);
  rdma_destroy_ep(passive);
}

static void *ack_later(void *event) {
  usleep(50000);
  CHECK(!rdma_ack_cm_event(event));
  return NULL;
}

static void refusals(void) {
  struct rdma_event_channel *channel = rdma_create_event_channel();
  struct rdma_cm_id *id, *passive = listener(channel, RDMA_PS_TCP);
  struct sockaddr_in at = loopback(0), far = loopback(0);
  FAILS(rdma_create_id(channel, NULL, NULL, RDMA_PS_TCP), EINVAL);
  FAILS(rdma_create_id(channel, &id, NULL, RDMA_PS_IPOIB), EPROTONOSUPPORT);
  FAILS(rdma_destroy_id(NULL), EINVAL);
  FAILS(rdma_get_cm_event(NULL, NULL), EINVAL);
  FAILS(rdma_ack_cm_event(NULL), EINVAL);
  FAILS(rdma_connect(NULL, NULL), EINVAL);
  rdma_destroy_ep(NULL);
  rdma_destroy_qp(NULL);
  rdma_freeaddrinfo(NULL);
  rdma_free_devices(NULL);
  CHECK(rdma_get_src_port(NULL) == 0);

  CHECK(!rdma_create_id(channel, &id, NULL, RDMA_PS_TCP));
  FAILS(rdma_bind_addr(id, NULL), EINVAL);
  far.sin_addr.s_addr = inet_addr("198.51.100.77");
  FAILS(rdma_bind_addr(id, (void *)&far), ENODEV);
  FAILS(rdma_resolve_addr(id, NULL, NULL, 100), EINVAL);
  FAILS(rdma_resolve_addr(id, (void *)&far, (void *)&at, 100), ENODEV);
  FAILS(rdma_resolve_route(id, 100), ENODEV);
  FAILS(rdma_connect(id, NULL), ENODEV);
  FAILS(rdma_accept(id, NULL), ENODEV);
  FAILS(rdma_disconnect(id), EINVAL);
  FAILS(rdma_reject(id, NULL, 0), EINVAL);
  FAILS(rdma_establish(id), EINVAL);
  struct rdma_cm_id *none;
  FAILS(rdma_get_request(passive, &none), EINVAL);
  struct ibv_qp_init_attr attr = {.qp_type = IBV_QPT_UD};
  FAILS(rdma_create_qp(id, NULL, &attr), ENODEV);
  FAILS(rdma_create_qp(passive, NULL, &attr), EINVAL);
  CHECK(!rdma_notify(id, IBV_EVENT_COMM_EST));

  /* Options: known ones with the right length. */
  uint8_t byte = 16;
  int number = 1;
  CHECK(!rdma_set_option(id, RDMA_OPTION_ID, RDMA_OPTION_ID_TOS, &byte, 1));
  CHECK(!rdma_set_option(id, RDMA_OPTION_ID, RDMA_OPTION_ID_ACK_TIMEOUT, &byte, 1));
  CHECK(!rdma_set_option(id, RDMA_OPTION_ID, RDMA_OPTION_ID_REUSEADDR, &number, 4));
  CHECK(!rdma_set_option(id, RDMA_OPTION_ID, RDMA_OPTION_ID_AFONLY, &number, 4));
  byte = 32;
  FAILS(rdma_set_option(id, RDMA_OPTION_ID, RDMA_OPTION_ID_ACK_TIMEOUT, &byte, 1), EINVAL);
  FAILS(rdma_set_option(id, RDMA_OPTION_ID, RDMA_OPTION_ID_TOS, &number, 4), EINVAL);
  FAILS(rdma_set_option(id, RDMA_OPTION_ID, RDMA_OPTION_ID_AFONLY, NULL, 4), EINVAL);
  FAILS(rdma_set_option(id, RDMA_OPTION_ID, 99, &number, 4), ENOSYS);
  FAILS(rdma_set_option(id, RDMA_OPTION_IB, RDMA_OPTION_IB_PATH, &number, 4), ENOSYS);
  CHECK(!rdma_destroy_id(id));

  /* Too much private data; and a port where nothing listens. */
  char data[200] = "";
  id = active(channel, passive);
  add_qp(id, IBV_QPT_RC);
  attr.qp_type = IBV_QPT_RC;
  FAILS(rdma_create_qp(id, NULL, &attr), EINVAL);
  struct rdma_conn_param param = {.private_data = data, .private_data_len = 57};
  FAILS(rdma_connect(id, &param), EINVAL);
  CHECK(!rdma_destroy_id(passive));
  CHECK(!rdma_connect(id, NULL));
  struct rdma_cm_event *event = take(channel, RDMA_CM_EVENT_REJECTED);
  CHECK(event->status == 8);
  /* An id waits until its events are acknowledged. */
  pthread_t thread;
  CHECK(!pthread_create(&thread, NULL, ack_later, event));
  destroy(id);
  CHECK(!pthread_join(thread, NULL));

  struct rdma_addrinfo *info;
  FAILS(rdma_getaddrinfo(NULL, NULL, NULL, &info), EINVAL);
  FAILS(rdma_getaddrinfo("127.0.0.1", "no such service", NULL, &info), ENODATA);
  FAILS(rdma_getaddrinfo("127.0.0.1", "1", NULL, NULL), EINVAL);
  FAILS(rdma_join_multicast(id, (void *)&at, NULL), EOPNOTSUPP);
  FAILS(rsocket(AF_INET, SOCK_STREAM, 0), EOPNOTSUPP);
  FAILS(rsend(3, data, 1, 0), EOPNOTSUPP);
  CHECK(rpoll(NULL, 0, 0) == 0);
  CHECK(!strcmp(rdma_event_str(RDMA_CM_EVENT_UNREACHABLE), "RDMA_CM_EVENT_UNREACHABLE"));
  CHECK(!strcmp(rdma_event_str(99), "UNKNOWN EVENT"));
  rdma_destroy_event_channel(channel);
}

static void devices(void) {
  int number = 0;
  struct ibv_context **list = rdma_get_devices(&number), **again = rdma_get_devices(NULL);
  CHECK(list && number == 1 && list[0] && !list[1] && again[0] == list[0]);
  struct ibv_port_attr port;
  CHECK(!ibv_query_port(list[0], 1, &port) && port.state == IBV_PORT_ACTIVE);
  rdma_free_devices(list);
  rdma_free_devices(again);
  /* Hints without a name: the addresses are copied. */
  struct sockaddr_in at = loopback(5);
  struct rdma_addrinfo hints = {.ai_dst_addr = (void *)&at, .ai_dst_len = sizeof at, .ai_port_space = RDMA_PS_UDP}, *info;
  CHECK(!rdma_getaddrinfo(NULL, NULL, &hints, &info));
  CHECK(info->ai_dst_addr != (void *)&at && !memcmp(info->ai_dst_addr, &at, sizeof at));
  CHECK(info->ai_qp_type == IBV_QPT_UD && info->ai_port_space == RDMA_PS_UDP);
  rdma_freeaddrinfo(info);
}

static int stranger(int port, const void *text, size_t len) {
  struct sockaddr_in at = loopback(port);
  int fd = socket(AF_INET, SOCK_STREAM, 0);
  CHECK(fd >= 0 && !connect(fd, (void *)&at, sizeof at));
  CHECK(send(fd, text, len, MSG_NOSIGNAL) == (ssize_t)len);
  return fd;
}

/* Strangers at a listener's TCP port: nothing that they send has an effect. */
static void strangers(void) {
  struct rdma_event_channel *channel = rdma_create_event_channel();
  struct rdma_cm_id *passive = listener(channel, RDMA_PS_TCP);
  int rdma = ntohs(rdma_get_src_port(passive)), tcp = 1024 + (rdma - 1024 + 9973) % 64512;
  /* A request without private data: the fields of docs/ibverbs.md. */
  unsigned char text[] = {'w', 'w', 'c', 'm', 1, 1, 0, 41, 1, rdma >> 8, rdma, 0, 9, 0, 0, 1, 2, 0, 0, 0, 7,
      0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0xff, 0xff, 127, 0, 0, 1, 3, 0, 0, 0, 0, 1, 1, 0, 7, 7, 0, 0};
  CHECK(sizeof text == 49);
  int silent = stranger(tcp, "", 0), part = stranger(tcp, text, 20), bad[5];
  char answer;
  bad[0] = stranger(tcp, "GET / HTTP/1.0\r\n\r\n", 18);
  text[4] = 9; /* another version */
  bad[1] = stranger(tcp, text, sizeof text);
  text[4] = 1, text[10] ^= 1; /* another port */
  bad[2] = stranger(tcp, text, sizeof text);
  text[10] ^= 1, text[33] = 198; /* another machine's address: 198.0.0.1 */
  bad[3] = stranger(tcp, text, sizeof text);
  text[33] = 127, text[8] = 2; /* another port space */
  bad[4] = stranger(tcp, text, sizeof text);
  for (int i = 0; i < 5; i++) {
    while (recv(bad[i], &answer, 1, 0) > 0) { /* a refusal, or just the end */
    }
    close(bad[i]);
  }
  CHECK(!is_readable(channel));
  text[8] = 1; /* and the same request, right */
  int good = stranger(tcp, text, sizeof text);
  struct rdma_cm_event *event = take(channel, RDMA_CM_EVENT_CONNECT_REQUEST);
  CHECK(event->param.conn.qp_num == 0x102);
  CHECK(!rdma_reject(event->id, NULL, 0) && !rdma_destroy_id(event->id) && !rdma_ack_cm_event(event));
  CHECK(recv(good, &answer, 1, 0) == 1 && answer == 'w');
  close(good);

  /* A reply that is none, or names another machine, is a refusal. */
  for (int i = 0; i < 2; i++) {
    struct sockaddr_in at = loopback(0);
    socklen_t len = sizeof at;
    int fd = socket(AF_INET, SOCK_STREAM, 0);
    CHECK(!bind(fd, (void *)&at, sizeof at) && !listen(fd, 1) && !getsockname(fd, (void *)&at, &len));
    struct rdma_cm_id *id;
    CHECK(!rdma_create_id(channel, &id, NULL, RDMA_PS_TCP));
    at.sin_port = htons(1024 + (ntohs(at.sin_port) - 1024 + 64512 - 9973) % 64512);
    CHECK(!rdma_resolve_addr(id, NULL, (void *)&at, 100));
    skip(channel, RDMA_CM_EVENT_ADDR_RESOLVED);
    CHECK(!rdma_resolve_route(id, 100));
    skip(channel, RDMA_CM_EVENT_ROUTE_RESOLVED);
    struct rdma_conn_param param = {.qp_num = 0x800001};
    CHECK(!rdma_connect(id, &param));
    int peer = accept(fd, NULL, NULL);
    unsigned char reply[] = {'w', 'w', 'c', 'm', 1, 2, 0, 36, 0, 0, 1, 2, 0, 0, 0, 7, 0, 0, 0, 0, 0, 0, 0, 0,
        0, 0, 0xff, 0xff, 198, 51, 100, 9, 3, 0, 0, 0, 0, 1, 1, 0, 7, 7, 0, 0};
    CHECK(sizeof reply == 44);
    CHECK(send(peer, i ? (void *)reply : "HTTP/1.0 400 Bad Request\r\n\r\n", i ? 44 : 28, 0) > 0);
    event = take(channel, RDMA_CM_EVENT_REJECTED);
    CHECK(event->id == id && event->status == 28 && !rdma_ack_cm_event(event));
    CHECK(!rdma_destroy_id(id));
    close(peer);
    close(fd);
  }
  /* Those that are not done with their request after five seconds are sent away. */
  CHECK(recv(silent, &answer, 1, 0) == 0 && recv(part, &answer, 1, 0) == 0);
  close(part);
  close(silent);
  CHECK(!is_readable(channel) && !rdma_destroy_id(passive));
  rdma_destroy_event_channel(channel);
}

static void shared_receives(void) {
  struct rdma_event_channel *channel = rdma_create_event_channel();
  struct rdma_cm_id *id = active(channel, listener(channel, RDMA_PS_TCP));
  struct ibv_srq_init_attr attr = {.attr = {.max_wr = 4, .max_sge = 1}};
  CHECK(!rdma_create_srq(id, NULL, &attr) && id->srq && id->pd);
  FAILS(rdma_create_srq(id, NULL, &attr), EINVAL);
  struct ibv_qp_init_attr_ex ex = {.qp_type = IBV_QPT_RC, .comp_mask = IBV_QP_INIT_ATTR_PD, .pd = id->pd};
  ex.cap = (struct ibv_qp_cap){4, 0, 1, 0, 0};
  CHECK(!rdma_create_qp_ex(id, &ex) && id->qp->srq == id->srq);
  rdma_destroy_qp(id);
  rdma_destroy_srq(id);
  CHECK(!id->qp && !id->srq);
  struct ibv_srq_init_attr_ex xrc = {.comp_mask = IBV_SRQ_INIT_ATTR_TYPE, .srq_type = IBV_SRQT_XRC};
  FAILS(rdma_create_srq_ex(id, &xrc), EOPNOTSUPP);
  CHECK(!rdma_destroy_id(id));
}

static void forks(void) {
  struct rdma_event_channel *channel = rdma_create_event_channel();
  struct rdma_cm_id *passive = listener(channel, RDMA_PS_TCP);
  pid_t child = fork();
  if (!child) {
    struct rdma_cm_id *id;
    FAILS(rdma_create_id(channel, &id, NULL, RDMA_PS_TCP), EIO);
    FAILS(rdma_destroy_id(passive), EIO);
    _exit(0);
  }
  int status;
  CHECK(waitpid(child, &status, 0) == child && status == 0);
  CHECK(!rdma_destroy_id(active(channel, passive)) && !rdma_destroy_id(passive));
  rdma_destroy_event_channel(channel);
}

/* For a peer that is killed. */
static void server(void) {
  struct rdma_event_channel *channel = rdma_create_event_channel();
  struct rdma_cm_id *passive = listener(channel, RDMA_PS_TCP);
  printf("%d\n", ntohs(rdma_get_src_port(passive)));
  fflush(stdout);
  struct rdma_cm_event *event = take(channel, RDMA_CM_EVENT_CONNECT_REQUEST);
  struct rdma_cm_id *id = event->id;
  CHECK(!rdma_ack_cm_event(event));
  add_qp(id, IBV_QPT_RC);
  CHECK(!rdma_accept(id, NULL));
  skip(channel, RDMA_CM_EVENT_ESTABLISHED);
  printf("established\n");
  fflush(stdout);
  skip(channel, RDMA_CM_EVENT_DISCONNECTED);
  destroy(id);
}

static void client(int port) {
  struct rdma_event_channel *channel = rdma_create_event_channel();
  struct rdma_cm_id *id;
  struct sockaddr_in at = loopback(port);
  CHECK(!rdma_create_id(channel, &id, NULL, RDMA_PS_TCP) && !rdma_resolve_addr(id, NULL, (void *)&at, 100));
  skip(channel, RDMA_CM_EVENT_ADDR_RESOLVED);
  CHECK(!rdma_resolve_route(id, 100));
  skip(channel, RDMA_CM_EVENT_ROUTE_RESOLVED);
  add_qp(id, IBV_QPT_RC);
  CHECK(!rdma_connect(id, NULL));
  skip(channel, RDMA_CM_EVENT_ESTABLISHED);
  printf("established\n");
  fflush(stdout);
  skip(channel, RDMA_CM_EVENT_DISCONNECTED);
  destroy(id);
}

int main(int count, char **words) {
  const char *part = count > 1 ? words[1] : "";
  if (count > 2) {
    client(atoi(words[2]));
    return 0;
  }
#define PART(name) \
  if (!strcmp(part, #name)) name();
  PART(connections)
  PART(own_queue_pairs)
  PART(late_receives)
  PART(datagrams)
  PART(synchronous)
  PART(refusals)
  PART(devices)
  PART(strangers)
  PART(shared_receives)
  PART(forks)
  PART(server)
  printf("%s: all good\n", part);
  return 0;
}

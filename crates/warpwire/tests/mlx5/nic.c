/* A fake libibverbs and libmlx5 with one ConnectX, for tests on machines without one. The queues
 * are in ConnectX format, at the addresses that mlx5dv_init_obj returns. A thread executes their
 * WQEs when the doorbell register is written, as the hardware does. It aborts if the doorbell is
 * ahead of the doorbell record.
 *
 * Supported operations are RDMA write, send and NOP. Keys are not checked, except that 0xbad fails.
 * Layouts come from rdma-core's headers, which verifies the library's own declarations. */
#include <endian.h>
#include <errno.h>
#include <pthread.h>
#include <stdatomic.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>
#include <sys/eventfd.h>
#include <infiniband/verbs.h>
#include <infiniband/mlx5dv.h>

#undef ibv_query_port
#undef ibv_reg_mr
#undef ibv_reg_mr_iova

enum { PAGE = 4096, MAX_QPS = 64, BAD_KEY = 0xbad, FLUSHED = 5, REMOTE_ACCESS = 0x13 };

struct cq {
	struct ibv_cq_ex ibv; /* starts like struct ibv_cq */
	struct mlx5_cqe64 *entries;
	uint32_t count, written, ignores_overrun;
	__be32 *record;
};

struct qp {
	struct ibv_qp ibv;
	struct ibv_qp_cap cap;
	uint8_t *send, *receive;
	uint32_t wqebbs, receives, stride, done, taken, peer, state;
	__be32 *record;
	uint64_t *doorbell, rung;
	struct cq *cqs[2];
};

static struct ibv_device devices[2];
static uint8_t *uar;
static struct qp *pairs[MAX_QPS];
static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;
static pthread_t nic;
static atomic_int running;

static void die(const char *why)
{
	fprintf(stderr, "nic: %s\n", why);
	abort();
}

static void *pages(size_t len)
{
	void *memory = NULL;
	if (posix_memalign(&memory, PAGE, (len + PAGE - 1) / PAGE * PAGE))
		die("no memory");
	memset(memory, 0, len);
	return memory;
}

static uint32_t power_of_two(uint32_t n)
{
	uint32_t power = 1;
	while (power < n)
		power *= 2;
	return power;
}

static void complete(struct cq *cq, uint32_t qpn, int code, uint16_t counter, uint32_t opcode, uint32_t bytes, int syndrome)
{
	struct mlx5_cqe64 *entry = &cq->entries[cq->written % cq->count];
	uint32_t consumed = be32toh(atomic_load((_Atomic uint32_t *)cq->record)) & 0xffffff;
	if (!cq->ignores_overrun && cq->written - consumed >= cq->count)
		die("a completion queue overran");
	memset(entry, 0, 63);
	entry->byte_cnt = htobe32(bytes);
	entry->wqe_counter = htobe16(counter);
	entry->sop_drop_qpn = htobe32(opcode << 24 | qpn);
	if (syndrome)
		((struct mlx5_err_cqe *)entry)->syndrome = syndrome;
	uint8_t own = code << 4 | (cq->written / cq->count & 1);
	atomic_store((_Atomic uint8_t *)&entry->op_own, own);
	cq->written++;
}

static struct qp *find(uint32_t number)
{
	for (int n = 0; n < MAX_QPS; n++)
		if (pairs[n] && pairs[n]->ibv.qp_num == number)
			return pairs[n];
	return NULL;
}

/* Copies the data segments of a WQE, by address or inline, to `into`. Returns the length. */
static uint32_t gather(const uint8_t *segment, const uint8_t *end, uint8_t *into)
{
	uint32_t total = 0;
	while (segment < end) {
		const struct mlx5_wqe_data_seg *data = (const void *)segment;
		uint32_t len = be32toh(data->byte_count);
		const void *from = (const void *)(uintptr_t)be64toh(data->addr);
		if (len >> 31) {
			len &= 0x7fffffff;
			from = segment + 4;
			segment += (4 + len + 15) / 16 * 16;
		} else {
			segment += 16;
		}
		memcpy(into + total, from, len);
		total += len;
	}
	return total;
}

static int deliver(struct qp *to, const uint8_t *bytes, uint32_t len)
{
	uint32_t posted = be32toh(atomic_load((_Atomic uint32_t *)&to->record[0])) & 0xffff;
	if ((uint16_t)(posted - to->taken) == 0)
		return 0;
	const uint8_t *entry = to->receive + to->taken % to->receives * to->stride;
	uint32_t left = len;
	for (uint32_t at = 0; left && at < to->stride; at += 16) {
		const struct mlx5_wqe_data_seg *data = (const void *)(entry + at);
		uint32_t part = be32toh(data->byte_count);
		part = part < left ? part : left;
		memcpy((void *)(uintptr_t)be64toh(data->addr), bytes + len - left, part);
		left -= part;
	}
	complete(to->cqs[1], to->ibv.qp_num, MLX5_CQE_RESP_SEND, to->taken, 0, len, 0);
	to->taken++;
	return 1;
}

/* Executes the next WQE. Returns 0 if it must wait for a receive. */
static int execute(struct qp *qp)
{
	static uint8_t entry[1024], bytes[1 << 20];
	uint32_t slot = qp->done % qp->wqebbs;
	const struct mlx5_wqe_ctrl_seg *first = (const void *)(qp->send + slot * 64);
	uint32_t segments = be32toh(first->qpn_ds) & 0x3f, opcode = be32toh(first->opmod_idx_opcode) & 0xff;
	for (uint32_t n = 0; n < segments; n++)
		memcpy(entry + n * 16, qp->send + (slot * 64 + n * 16) % (qp->wqebbs * 64), 16);
	if (be32toh(first->qpn_ds) >> 8 != qp->ibv.qp_num || (be32toh(first->opmod_idx_opcode) >> 8 & 0xffff) != (qp->done & 0xffff))
		die("a WQE has a wrong queue pair number or index");
	int failed = qp->state == IBV_QPS_ERR ? FLUSHED : 0;
	uint32_t len = 0;
	if (!failed && opcode == MLX5_OPCODE_RDMA_WRITE) {
		const struct mlx5_wqe_raddr_seg *remote = (const void *)(entry + 16);
		len = gather(entry + 32, entry + segments * 16, bytes);
		if (be32toh(remote->rkey) == BAD_KEY)
			failed = REMOTE_ACCESS;
		else
			memcpy((void *)(uintptr_t)be64toh(remote->raddr), bytes, len);
	} else if (!failed && opcode == MLX5_OPCODE_SEND) {
		struct qp *to = find(qp->peer);
		len = gather(entry + 16, entry + segments * 16, bytes);
		if (!to || !deliver(to, bytes, len))
			return 0;
	} else if (!failed && opcode != MLX5_OPCODE_NOP) {
		die("an unsupported operation");
	}
	if (failed)
		qp->state = IBV_QPS_ERR;
	complete(qp->cqs[0], qp->ibv.qp_num, failed ? MLX5_CQE_REQ_ERR : MLX5_CQE_REQ, qp->done, opcode, len, failed);
	qp->done += (segments + 3) / 4;
	return 1;
}

static void serve(struct qp *qp)
{
	uint64_t rung = atomic_load((_Atomic uint64_t *)qp->doorbell);
	uint32_t posted = be32toh(atomic_load((_Atomic uint32_t *)&qp->record[1])) & 0xffff;
	if (rung != qp->rung) {
		uint32_t words[2];
		memcpy(words, &rung, 8);
		if (be32toh(words[1]) >> 8 != qp->ibv.qp_num)
			die("a doorbell has the number of another queue pair");
		if ((int16_t)(posted - (uint16_t)(be32toh(words[0]) >> 8)) < 0)
			die("the doorbell was rung before the doorbell record was written");
		qp->rung = rung;
	}
	uint32_t producer;
	memcpy(&producer, &qp->rung, 4);
	while ((uint16_t)((be32toh(producer) >> 8) - qp->done) && (int16_t)((be32toh(producer) >> 8) - qp->done) > 0)
		if (!execute(qp))
			break;
	while (qp->state == IBV_QPS_ERR && qp->receives &&
	       (uint16_t)(be32toh(atomic_load((_Atomic uint32_t *)&qp->record[0])) - qp->taken)) {
		complete(qp->cqs[1], qp->ibv.qp_num, MLX5_CQE_RESP_ERR, qp->taken, 0, 0, FLUSHED);
		qp->taken++;
	}
}

static void *work(void *unused)
{
	(void)unused;
	while (atomic_load(&running)) {
		pthread_mutex_lock(&lock);
		for (int n = 0; n < MAX_QPS; n++)
			if (pairs[n] && pairs[n]->state >= IBV_QPS_RTR)
				serve(pairs[n]);
		pthread_mutex_unlock(&lock);
		usleep(50);
	}
	return NULL;
}

/* libibverbs */

struct ibv_device **ibv_get_device_list(int *count)
{
	static struct ibv_device *list[3] = { &devices[0], &devices[1], NULL };
	strcpy(devices[0].name, "nic_0");
	strcpy(devices[0].dev_name, "nic0");
	strcpy(devices[1].name, "other_0");
	devices[0].transport_type = devices[1].transport_type = IBV_TRANSPORT_IB;
	*count = 2;
	return list;
}

void ibv_free_device_list(struct ibv_device **list) { (void)list; }
__be64 ibv_get_device_guid(struct ibv_device *device) { (void)device; return htobe64(0x1234); }

static int poll_cq(struct ibv_cq *cq, int count, struct ibv_wc *wc)
{
	(void)cq, (void)count, (void)wc;
	die("ibv_poll_cq was called");
	return 0;
}

static int notify(struct ibv_cq *cq, int solicited) { (void)cq, (void)solicited; return 0; }

static int post_send(struct ibv_qp *qp, struct ibv_send_wr *wr, struct ibv_send_wr **bad)
{
	(void)qp, (void)wr, (void)bad;
	die("ibv_post_send was called");
	return 0;
}

static int post_receive(struct ibv_qp *qp, struct ibv_recv_wr *wr, struct ibv_recv_wr **bad)
{
	(void)qp, (void)wr, (void)bad;
	die("ibv_post_recv was called");
	return 0;
}

struct ibv_context *ibv_open_device(struct ibv_device *device)
{
	struct ibv_context *opened = calloc(1, sizeof *opened);
	opened->device = device;
	opened->async_fd = eventfd(0, 0);
	opened->ops.poll_cq = poll_cq;
	opened->ops.req_notify_cq = notify;
	opened->ops.post_send = post_send;
	opened->ops.post_recv = post_receive;
	pthread_mutex_lock(&lock);
	if (!uar)
		uar = pages(PAGE);
	pthread_mutex_unlock(&lock);
	if (!atomic_exchange(&running, 1))
		pthread_create(&nic, NULL, work, NULL);
	return opened;
}

int ibv_close_device(struct ibv_context *closed)
{
	close(closed->async_fd);
	free(closed);
	return 0;
}

int ibv_query_device(struct ibv_context *of, struct ibv_device_attr *attr)
{
	(void)of;
	memset(attr, 0, sizeof *attr);
	attr->phys_port_cnt = 1;
	attr->max_qp_rd_atom = attr->max_qp_init_rd_atom = 16;
	return 0;
}

int ibv_query_port(struct ibv_context *of, uint8_t number, struct _compat_ibv_port_attr *compat)
{
	struct ibv_port_attr *attr = (struct ibv_port_attr *)compat;
	(void)of;
	if (number != 1)
		return EINVAL;
	attr->state = IBV_PORT_ACTIVE;
	attr->max_mtu = attr->active_mtu = IBV_MTU_4096;
	attr->gid_tbl_len = 1;
	attr->link_layer = IBV_LINK_LAYER_ETHERNET;
	return 0;
}

ssize_t _ibv_query_gid_table(struct ibv_context *of, struct ibv_gid_entry *entries, size_t max_entries, uint32_t flags, size_t size)
{
	static const uint8_t gid[16] = { [10] = 0xff, 0xff, 10, 0, 0, 7 };
	(void)of, (void)flags, (void)size;
	if (max_entries == 0)
		return 0;
	memset(entries, 0, sizeof *entries);
	memcpy(entries->gid.raw, gid, 16);
	entries->port_num = 1;
	entries->gid_type = IBV_GID_TYPE_ROCE_V2;
	return 1;
}

struct ibv_pd *ibv_alloc_pd(struct ibv_context *of)
{
	struct ibv_pd *pd = calloc(1, sizeof *pd);
	pd->context = of;
	return pd;
}

int ibv_dealloc_pd(struct ibv_pd *pd) { free(pd); return 0; }

struct ibv_mr *ibv_reg_mr(struct ibv_pd *pd, void *address, size_t len, int access)
{
	struct ibv_mr *mr = calloc(1, sizeof *mr);
	(void)access;
	*mr = (struct ibv_mr){ .context = pd->context, .pd = pd, .addr = address, .length = len, .lkey = 0x77, .rkey = 0x78 };
	return mr;
}

int ibv_dereg_mr(struct ibv_mr *mr) { free(mr); return 0; }

struct ibv_comp_channel *ibv_create_comp_channel(struct ibv_context *of)
{
	struct ibv_comp_channel *channel = calloc(1, sizeof *channel);
	channel->context = of;
	channel->fd = eventfd(0, 0);
	return channel;
}

int ibv_destroy_comp_channel(struct ibv_comp_channel *channel)
{
	close(channel->fd);
	free(channel);
	return 0;
}

static struct cq *make_cq(uint32_t entries, int ignores_overrun)
{
	static uint32_t number = 3;
	struct cq *cq = calloc(1, sizeof *cq);
	cq->count = power_of_two(entries + 1);
	cq->entries = pages(cq->count * 64);
	for (uint32_t n = 0; n < cq->count; n++)
		cq->entries[n].op_own = MLX5_CQE_INVALID << 4 | 1;
	cq->record = pages(8);
	cq->ignores_overrun = ignores_overrun;
	cq->ibv.handle = number++;
	return cq;
}

struct ibv_cq *ibv_create_cq(struct ibv_context *of, int entries, void *cq_context, struct ibv_comp_channel *channel, int vector)
{
	(void)of, (void)cq_context, (void)channel, (void)vector;
	return (struct ibv_cq *)make_cq(entries, 0);
}

int ibv_destroy_cq(struct ibv_cq *ended)
{
	struct cq *cq = (struct cq *)ended;
	free(cq->entries);
	free(cq->record);
	free(cq);
	return 0;
}

struct ibv_qp *ibv_create_qp(struct ibv_pd *pd, struct ibv_qp_init_attr *attr)
{
	(void)pd, (void)attr;
	errno = EINVAL; /* would scatter small messages into CQEs, which direct verbs do not read */
	return NULL;
}

int ibv_destroy_qp(struct ibv_qp *ended)
{
	struct qp *qp = (struct qp *)ended;
	pthread_mutex_lock(&lock);
	for (int n = 0; n < MAX_QPS; n++)
		if (pairs[n] == qp)
			pairs[n] = NULL;
	pthread_mutex_unlock(&lock);
	free(qp->send);
	free(qp->receive);
	free(qp->record);
	free(qp);
	return 0;
}

int ibv_modify_qp(struct ibv_qp *changed, struct ibv_qp_attr *attr, int mask)
{
	struct qp *qp = (struct qp *)changed;
	pthread_mutex_lock(&lock);
	if (mask & IBV_QP_DEST_QPN)
		qp->peer = attr->dest_qp_num;
	if (mask & IBV_QP_STATE)
		qp->state = attr->qp_state;
	pthread_mutex_unlock(&lock);
	return 0;
}

int ibv_query_qp(struct ibv_qp *asked, struct ibv_qp_attr *attr, int mask, struct ibv_qp_init_attr *init)
{
	(void)mask, (void)init;
	attr->qp_state = ((struct qp *)asked)->state;
	return 0;
}

/* libmlx5 */

bool mlx5dv_is_supported(struct ibv_device *device) { return device == &devices[0]; }

struct ibv_cq_ex *mlx5dv_create_cq(struct ibv_context *of, struct ibv_cq_init_attr_ex *attr, struct mlx5dv_cq_init_attr *dv)
{
	(void)of;
	if (attr->comp_mask != IBV_CQ_INIT_ATTR_MASK_FLAGS || attr->flags != IBV_CREATE_CQ_ATTR_IGNORE_OVERRUN || dv->comp_mask) {
		errno = EINVAL;
		return NULL;
	}
	return &make_cq(attr->cqe, 1)->ibv;
}

struct ibv_qp *mlx5dv_create_qp(struct ibv_context *of, struct ibv_qp_init_attr_ex *attr, struct mlx5dv_qp_init_attr *dv)
{
	static uint32_t number = 0x100;
	struct qp *qp = calloc(1, sizeof *qp);
	int n = 0;
	if (attr->comp_mask != IBV_QP_INIT_ATTR_PD || dv->comp_mask != MLX5DV_QP_INIT_ATTR_MASK_QP_CREATE_FLAGS ||
	    dv->create_flags != MLX5DV_QP_CREATE_DISABLE_SCATTER_TO_CQE)
		die("a queue pair with scatter to CQE");
	/* WQE size as libmlx5 computes it: control, remote address and atomic segments, then data
	 * segments or inline bytes. */
	uint32_t ranges = attr->cap.max_send_sge * 16, bytes = (4 + attr->cap.max_inline_data + 15) / 16 * 16;
	uint32_t size = (48 + (ranges > bytes ? ranges : bytes) + 63) / 64 * 64;
	qp->wqebbs = power_of_two(attr->cap.max_send_wr * size) / 64;
	qp->receives = power_of_two(attr->cap.max_recv_wr);
	qp->stride = power_of_two(attr->cap.max_recv_sge * 16);
	qp->send = pages(qp->wqebbs * 64);
	qp->receive = pages(qp->receives * qp->stride);
	qp->record = pages(8);
	qp->cqs[0] = (struct cq *)attr->send_cq;
	qp->cqs[1] = (struct cq *)attr->recv_cq;
	qp->ibv.context = of;
	pthread_mutex_lock(&lock);
	qp->ibv.qp_num = number++;
	while (n < MAX_QPS && pairs[n])
		n++;
	if (n == MAX_QPS)
		die("too many queue pairs");
	qp->doorbell = (uint64_t *)(uar + 0x800) + n;
	*qp->doorbell = 0;
	pairs[n] = qp;
	pthread_mutex_unlock(&lock);
	return &qp->ibv;
}

int mlx5dv_init_obj(struct mlx5dv_obj *object, uint64_t obj_type)
{
	if (obj_type == MLX5DV_OBJ_CQ) {
		struct cq *cq = (struct cq *)object->cq.in;
		*object->cq.out = (struct mlx5dv_cq){ .buf = cq->entries, .dbrec = cq->record, .cqe_cnt = cq->count, .cqe_size = 64,
						      .cqn = cq->ibv.handle };
		return 0;
	}
	struct qp *qp = (struct qp *)object->qp.in;
	*object->qp.out = (struct mlx5dv_qp){
		.dbrec = qp->record,
		.sq = { .buf = qp->send, .wqe_cnt = qp->wqebbs, .stride = 64 },
		.rq = { .buf = qp->receive, .wqe_cnt = qp->receives, .stride = qp->stride },
		.bf = { .reg = qp->doorbell, .size = 0 },
	};
	return obj_type == MLX5DV_OBJ_QP ? 0 : EINVAL;
}

/* 1 MiB from one process to another with UCX: a put and an active message. */
#include <ucp/api/ucp.h>

#include "sides.h"

enum { WRITTEN = 1 };

static uint8_t memory[LEN];

static void check(ucs_status_t status, const char *what) {
    if (status != UCS_OK) fail(what, ucs_status_string(status));
}

static void open_worker(ucp_context_h *context, ucp_worker_h *worker) {
    ucp_config_t *config;
    check(ucp_config_read(NULL, NULL, &config), "read the configuration");
    ucp_params_t params = {
        .field_mask = UCP_PARAM_FIELD_FEATURES,
        .features = UCP_FEATURE_RMA | UCP_FEATURE_AM,
    };
    check(ucp_init(&params, config, context), "open a context");
    ucp_config_release(config);
    ucp_worker_params_t worker_params = {
        .field_mask = UCP_WORKER_PARAM_FIELD_THREAD_MODE,
        .thread_mode = UCS_THREAD_MODE_SINGLE,
    };
    check(ucp_worker_create(*context, &worker_params, worker), "create a worker");
}

static ucs_status_t on_written(void *arg, const void *header, size_t header_len, void *data,
                               size_t len, const ucp_am_recv_param_t *param) {
    (void)header, (void)header_len, (void)data, (void)len, (void)param;
    *(int *)arg = 1;
    return UCS_OK;
}

static void target(int socket) {
    ucp_context_h context;
    ucp_worker_h worker;
    ucp_mem_h registered;
    ucp_address_t *address;
    void *key;
    size_t address_len, key_len;
    int is_written = 0;

    open_worker(&context, &worker);
    ucp_am_handler_param_t handler = {
        .field_mask = UCP_AM_HANDLER_PARAM_FIELD_ID | UCP_AM_HANDLER_PARAM_FIELD_CB |
                      UCP_AM_HANDLER_PARAM_FIELD_ARG,
        .id = WRITTEN,
        .cb = on_written,
        .arg = &is_written,
    };
    check(ucp_worker_set_am_recv_handler(worker, &handler), "set a handler");
    ucp_mem_map_params_t params = {
        .field_mask = UCP_MEM_MAP_PARAM_FIELD_ADDRESS | UCP_MEM_MAP_PARAM_FIELD_LENGTH,
        .address = memory,
        .length = LEN,
    };
    check(ucp_mem_map(context, &params, &registered), "register memory");
    check(ucp_rkey_pack(context, registered, &key, &key_len), "pack the key");
    check(ucp_worker_get_address(worker, &address, &address_len), "get the address");
    uint64_t remote = (uintptr_t)memory;
    send_bytes(socket, address, address_len);
    send_bytes(socket, key, key_len);
    send_all(socket, &remote, sizeof remote);
    while (!is_written) {
        ucp_worker_progress(worker);
        check_time("receive the message");
    }
    verify(memory);
    /* To flush and close its endpoint, the other side needs this one. */
    while (!has_ended(socket)) {
        ucp_worker_progress(worker);
        check_time("wait for the initiator");
    }
    ucp_rkey_buffer_release(key);
    ucp_worker_release_address(worker, address);
    check(ucp_mem_unmap(context, registered), "deregister memory");
    ucp_worker_destroy(worker);
    ucp_cleanup(context);
}

static void wait_for(ucp_worker_h worker, ucs_status_ptr_t request, const char *what) {
    if (!UCS_PTR_IS_PTR(request)) {
        check(UCS_PTR_STATUS(request), what);
        return;
    }
    ucs_status_t status = UCS_INPROGRESS;
    while (status == UCS_INPROGRESS) {
        ucp_worker_progress(worker);
        check_time(what);
        status = ucp_request_check_status(request);
    }
    ucp_request_free(request);
    check(status, what);
}

static void initiator(int socket) {
    ucp_context_h context;
    ucp_worker_h worker;
    ucp_ep_h endpoint;
    ucp_rkey_h rkey;
    uint64_t remote;
    size_t len;

    fill(memory);
    open_worker(&context, &worker);
    void *address = receive_bytes(socket, &len);
    void *key = receive_bytes(socket, &len);
    receive_all(socket, &remote, sizeof remote);
    ucp_ep_params_t params = {
        .field_mask = UCP_EP_PARAM_FIELD_REMOTE_ADDRESS | UCP_EP_PARAM_FIELD_ERR_HANDLING_MODE,
        .address = address,
        .err_mode = UCP_ERR_HANDLING_MODE_PEER,
    };
    check(ucp_ep_create(worker, &params, &endpoint), "create an endpoint");
    check(ucp_ep_rkey_unpack(endpoint, key, &rkey), "unpack the key");
    ucp_request_param_t none = {0};
    wait_for(worker, ucp_put_nbx(endpoint, memory, LEN, remote, rkey, &none), "write");
    /* A put that has ended is not at the peer yet, and the message could overtake it. */
    wait_for(worker, ucp_ep_flush_nbx(endpoint, &none), "flush");
    wait_for(worker, ucp_am_send_nbx(endpoint, WRITTEN, NULL, 0, NULL, 0, &none), "send");
    ucp_rkey_destroy(rkey);
    wait_for(worker, ucp_ep_close_nbx(endpoint, &none), "close the endpoint");
    free(address);
    free(key);
    ucp_worker_destroy(worker);
    ucp_cleanup(context);
}

int main(int argc, char **argv) { return run(argc, argv, target, initiator); }

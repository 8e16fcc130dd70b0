/* What kernels are given, made by a C program: input that is refused, each with its status. The
 * example kernels.cu uses the same objects as they are meant. */
#include "check.h"

static char memory[8192];

static void contexts(void) {
    ww_context_options options = WW_CONTEXT_OPTIONS_INIT;
    ww_context *context = NULL;
    ww_mr *mr = NULL;
    ww_mr_info *info = NULL;
    FAILS(WW_INVALID_ARGUMENT, "context", ww_context_open(NULL, NULL));
    options.size = 1;
    FAILS(WW_INVALID_ARGUMENT, "INIT", ww_context_open(&options, &context));
    options.size = sizeof options;
    options.link = "pigeon";
    FAILS(WW_MALFORMED, "pigeon", ww_context_open(&options, &context));
    options.link = "udp";
    options.address = "nowhere";
    FAILS(WW_MALFORMED, "no IP address", ww_context_open(&options, &context));
    CHECK(context == NULL);
    options.address = "127.0.0.1";
    OK(ww_context_open(&options, &context));

    FAILS(WW_INVALID_ARGUMENT, "unknown",
          ww_context_register(context, WW_ADDRESS(memory), 100, 16, &mr));
    FAILS(WW_INVALID_ARGUMENT, "",
          ww_context_register(context, WW_ADDRESS(memory), 0, WW_ACCESS_ALL, &mr));
    FAILS(WW_INVALID_ARGUMENT, "mr",
          ww_context_register(context, WW_ADDRESS(memory), 100, WW_ACCESS_ALL, NULL));
    FAILS(WW_INVALID_ARGUMENT, "", /* a remote right without the local one */
          ww_context_register(context, WW_ADDRESS(memory), 100, WW_REMOTE_ATOMIC, &mr));
    CHECK(mr == NULL);
    OK(ww_context_register(context, WW_ADDRESS(memory), 100, WW_ACCESS_ALL | WW_REMOTE_ATOMIC,
                           &mr));
    FAILS(WW_INVALID_ARGUMENT, "info", ww_mr_describe(mr, NULL));
    OK(ww_mr_describe(mr, &info));
    CHECK(info->address == WW_ADDRESS(memory) && info->len == 100 && info->path[0] != 0);
    ww_free(info);
    OK(ww_context_close(context));
    FAILS(WW_INVALID_ARGUMENT, "released", ww_context_close(context));
    FAILS(WW_INVALID_ARGUMENT, "released",
          ww_context_register(context, WW_ADDRESS(memory), 100, WW_ACCESS_ALL, &mr));
    OK(ww_mr_deregister(mr)); /* after its context */
    FAILS(WW_INVALID_ARGUMENT, "released", ww_mr_deregister(mr));
    FAILS(WW_INVALID_ARGUMENT, "NULL", ww_mr_describe(NULL, &info));
}

static void queue_pairs(void) {
    static const char *const wrong[] = {
        "", "{}", "no endpoint", "{\"version\":1}", "[1,2,3]",
        "{\"version\":1,\"address\":\"here\",\"qpn\":1,\"psn\":1,\"mtu\":1024,\"max_rd_atomic\":1}",
    };
    static const char later[] =
        "{\"version\":2,\"address\":\"127.0.0.1:9\",\"qpn\":1,\"psn\":1,\"mtu\":1024,"
        "\"max_rd_atomic\":1}";
    ww_context_options at = WW_CONTEXT_OPTIONS_INIT;
    ww_kernel_qp_options options = WW_KERNEL_QP_OPTIONS_INIT;
    ww_context *context;
    ww_kernel_qp *qp = NULL, *other;
    uint64_t handle = 0;
    void *endpoint = NULL, *theirs;
    size_t len, their_len, each;
    char *longest = malloc(100000);
    at.address = "127.0.0.1";
    OK(ww_context_open(&at, &context));
    FAILS(WW_INVALID_ARGUMENT, "", ww_kernel_qp_create(NULL, NULL, NULL, &qp));
    FAILS(WW_INVALID_ARGUMENT, "qp", ww_kernel_qp_create(context, NULL, NULL, NULL));
    CHECK(ww_kernel_qp_create(context, "tape:0", NULL, &qp) < 0);
    CHECK(strstr(ww_last_error()->message, "tape:0") != NULL);
    options.send_depth = 3;
    FAILS(WW_INVALID_ARGUMENT, "3", ww_kernel_qp_create(context, NULL, &options, &qp));
    options.send_depth = 1u << 31;
    FAILS(WW_INVALID_ARGUMENT, "", ww_kernel_qp_create(context, NULL, &options, &qp));
    CHECK(qp == NULL);
    options.send_depth = 64;
    options.receive_depth = 16;
    options.is_single_poster = 1;
    OK(ww_kernel_qp_create(context, NULL, &options, &qp));
    OK(ww_kernel_qp_create(context, NULL, NULL, &other));

    FAILS(WW_INVALID_ARGUMENT, "address", ww_kernel_qp_handle(qp, NULL));
    OK(ww_kernel_qp_handle(qp, &handle));
    CHECK(handle != 0);
    FAILS(WW_INVALID_ARGUMENT, "len", ww_kernel_qp_endpoint(qp, &endpoint, NULL));
    CHECK(endpoint == NULL);
    for (each = 0; each < sizeof wrong / sizeof *wrong; each++)
        FAILS(WW_MALFORMED, "endpoint", ww_kernel_qp_connect(qp, wrong[each], strlen(wrong[each])));
    FAILS(WW_UNSUPPORTED, "version 2", ww_kernel_qp_connect(qp, later, strlen(later)));
    FAILS(WW_INVALID_ARGUMENT, "NULL", ww_kernel_qp_connect(qp, NULL, 10));
    CHECK(longest != NULL);
    memset(longest, ' ', 100000);
    FAILS(WW_MALFORMED, "100000 bytes", ww_kernel_qp_connect(qp, longest, 100000));
    free(longest);
    OK(ww_kernel_qp_endpoint(qp, &endpoint, &len));
    OK(ww_kernel_qp_endpoint(other, &theirs, &their_len));
    OK(ww_kernel_qp_connect(qp, theirs, their_len));
    OK(ww_kernel_qp_connect(other, endpoint, len));
    CHECK(ww_kernel_qp_connect(qp, theirs, their_len) < 0); /* it is connected */
    ww_free(endpoint);
    ww_free(theirs);
    OK(ww_kernel_qp_check(qp));
    OK(ww_kernel_qp_close(qp));
    OK(ww_kernel_qp_close(qp));
    CHECK(ww_kernel_qp_check(qp) < 0); /* closed */
    OK(ww_context_close(context));
    OK(ww_kernel_qp_release(qp));
    OK(ww_kernel_qp_release(other));
    FAILS(WW_INVALID_ARGUMENT, "released", ww_kernel_qp_release(qp));
    FAILS(WW_INVALID_ARGUMENT, "released", ww_kernel_qp_check(qp));
}

static void sockets(void) {
    ww_sock_options options = WW_SOCK_OPTIONS_INIT;
    ww_sock_host *host = NULL;
    uint64_t table = 0;
    FAILS(WW_INVALID_ARGUMENT, "host", ww_sock_host_start("sim:0", NULL, NULL));
    FAILS(WW_INVALID_ARGUMENT, "host", ww_sock_host_start(NULL, NULL, NULL));
    CHECK(ww_sock_host_start("tape:0", NULL, &host) < 0);
    options.sockets = 70000;
    FAILS(WW_INVALID_ARGUMENT, "70000", ww_sock_host_start("sim:0", &options, &host));
    options.sockets = 4;
    options.arena = 4097;
    FAILS(WW_INVALID_ARGUMENT, "4097", ww_sock_host_start("sim:0", &options, &host));
    CHECK(host == NULL);
    options.arena = 0;
    OK(ww_sock_host_start("sim:0", &options, &host));
    FAILS(WW_INVALID_ARGUMENT, "address", ww_sock_host_table(host, NULL));
    OK(ww_sock_host_table(host, &table));
    CHECK(table != 0);
    OK(ww_sock_host_stop(host));
    OK(ww_sock_host_stop(host));
    OK(ww_sock_host_release(host));
    FAILS(WW_INVALID_ARGUMENT, "released", ww_sock_host_stop(host));
}

int main(void) {
    ww_agent_options options = WW_AGENT_OPTIONS_INIT;
    ww_agent *agent;
    ww_memory *registered;
    mode = "kernels";
    contexts();
    queue_pairs();
    sockets();
    options.address = "127.0.0.1";
    OK(ww_agent_open("agent", &options, &agent));
    FAILS(WW_INVALID_ARGUMENT, "ww_context_register",
          ww_agent_register(agent, WW_ADDRESS(memory), 100, WW_ACCESS_ALL | WW_REMOTE_ATOMIC,
                            &registered));
    OK(ww_agent_close(agent));
    printf("kernels: all good\n");
    return 0;
}

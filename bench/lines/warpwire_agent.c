/* 1 MiB from one process to another with an agent of warpwire.h. */
#include <warpwire.h>

#include "sides.h"

static uint8_t memory[LEN];

static void check(int status) {
    if (status < 0) fail(ww_last_error()->what, ww_last_error()->why);
}

static void target(int socket) {
    ww_agent *agent;
    ww_memory *registered;
    ww_notification *notification;
    void *metadata;
    size_t len;

    check(ww_agent_open("target", NULL, &agent));
    check(ww_agent_register(agent, WW_ADDRESS(memory), LEN, WW_ACCESS_ALL, &registered));
    check(ww_agent_metadata(agent, &metadata, &len));
    send_bytes(socket, metadata, len);
    check(ww_agent_next_notification(agent, TIMEOUT * 1000, &notification));
    if (notification == NULL) fail("receive the notification", "timed out");
    verify(memory);
    ww_free(notification);
    ww_free(metadata);
    check(ww_memory_deregister(registered));
    check(ww_agent_close(agent));
}

static void initiator(int socket) {
    ww_agent *agent;
    ww_memory *registered;
    ww_peer *peer;
    ww_remote_memory *remote;
    ww_prepared *prepared;
    ww_transfer *transfer;
    size_t len, count;

    fill(memory);
    check(ww_agent_open("initiator", NULL, &agent));
    check(ww_agent_register(agent, WW_ADDRESS(memory), LEN, WW_LOCAL_WRITE, &registered));
    void *metadata = receive_bytes(socket, &len);
    check(ww_agent_add_peer(agent, metadata, len, &peer));
    check(ww_peer_memory(peer, &remote, &count));
    if (count != 1) fail("write", "the target has not registered one piece of memory");
    ww_range from = {WW_ADDRESS(memory), LEN}, to = {remote[0].address, LEN};
    check(ww_agent_prepare(agent, peer, &from, &to, 1, &prepared));
    ww_transfer_options options = WW_TRANSFER_OPTIONS_INIT;
    options.notification = "written";
    options.notification_len = 7;
    options.timeout_ms = TIMEOUT * 1000;
    check(ww_agent_post(agent, WW_WRITE, prepared, &options, &transfer));
    check(ww_transfer_wait(transfer, -1));
    free(metadata);
    ww_free(remote);
    check(ww_transfer_release(transfer));
    check(ww_prepared_release(prepared));
    check(ww_peer_release(peer));
    check(ww_memory_deregister(registered));
    check(ww_agent_close(agent));
}

int main(int argc, char **argv) { return run(argc, argv, target, initiator); }

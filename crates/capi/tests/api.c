/* Tests libwarpwire as a C program uses it.
 *
 *   api one MEMORY      two agents in this process: lists, notifications, the descriptor, windows
 *   api two LINK        an agent in each of two processes
 *   api killed LINK     the peer's process is killed during transfers
 *   api cancel          cancelled transfers, and those with a deadline
 *   api bad             input that is refused, each with its status
 *   api fork            the library in a forked child
 *   api threads         errors of two threads do not mix
 */
#define _POSIX_C_SOURCE 200809L
#include <poll.h>
#include <pthread.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/wait.h>
#include <time.h>
#include <unistd.h>
#include <warpwire.h>

#include "check.h"

#define MIB (1u << 20)
#define COUNT 1000

static ww_agent *open_agent(const char *name, const char *link) {
    ww_agent_options options = WW_AGENT_OPTIONS_INIT;
    ww_agent *agent = NULL;
    options.link = link;
    options.address = "127.0.0.1";
    OK(ww_agent_open(name, &options, &agent));
    CHECK(agent != NULL);
    return agent;
}

static ww_peer *add(ww_agent *agent, ww_agent *other) {
    void *metadata = NULL;
    size_t len = 0;
    ww_peer *peer = NULL;
    OK(ww_agent_metadata(other, &metadata, &len));
    CHECK(len > 0 && ((char *)metadata)[len] == 0);
    OK(ww_agent_add_peer(agent, metadata, len, &peer));
    ww_free(metadata);
    return peer;
}

static unsigned char pattern(unsigned seed, size_t at) {
    return (unsigned char)(at * 7 + at / 251 + seed * 101);
}

/* ---- memory of either kind ------------------------------------------------------------------- */

typedef struct buffer {
    uint64_t address, len;
    unsigned char *host; /* NULL for a device's memory */
    ww_window *window;
    ww_memory *memory;
} buffer;

static buffer allocate(ww_agent *agent, const char *where, uint64_t len) {
    buffer made;
    memset(&made, 0, sizeof made);
    made.len = len;
    if (strcmp(where, "host") == 0) {
        made.host = malloc(len);
        CHECK(made.host != NULL);
        memset(made.host, 0, len);
        made.address = WW_ADDRESS(made.host);
    } else {
        OK(ww_device_alloc(where, len, &made.address));
        OK(ww_window_open(made.address, len, &made.window));
    }
    OK(ww_agent_register(agent, made.address, len, WW_ACCESS_ALL, &made.memory));
    return made;
}

static void fill(buffer *to, unsigned seed) {
    unsigned char *bytes = malloc(to->len);
    size_t at;
    CHECK(bytes != NULL);
    for (at = 0; at < to->len; at++) bytes[at] = pattern(seed, at);
    if (to->host) memcpy(to->host, bytes, to->len);
    else OK(ww_window_write(to->window, 0, bytes, to->len));
    free(bytes);
}

static unsigned char *contents(const buffer *of) {
    unsigned char *bytes = malloc(of->len);
    CHECK(bytes != NULL);
    if (of->host) memcpy(bytes, of->host, of->len);
    else OK(ww_window_read(of->window, 0, bytes, of->len));
    return bytes;
}

static void check_contents(const buffer *of, unsigned seed) {
    unsigned char *bytes = contents(of);
    size_t at;
    for (at = 0; at < of->len; at++) CHECK(bytes[at] == pattern(seed, at));
    free(bytes);
}

static void discard(buffer *of) {
    OK(ww_memory_deregister(of->memory));
    if (of->host) {
        free(of->host);
        return;
    }
    OK(ww_window_close(of->window));
    OK(ww_device_free(of->address));
}

/* ---- two agents in one process --------------------------------------------------------------- */

/* Writes every piece of `from` to the mirrored place of `to`, and reads it back into order. */
static void lists(ww_agent *alice, ww_peer *bob, buffer *from, buffer *to, buffer *back) {
    static ww_range local[COUNT], remote[COUNT];
    uint64_t piece = from->len / COUNT;
    ww_prepared *prepared = NULL;
    ww_transfer *transfer = NULL;
    ww_transfer_options options = WW_TRANSFER_OPTIONS_INIT;
    unsigned char *bytes;
    size_t at, index;
    for (index = 0; index < COUNT; index++) {
        local[index].address = from->address + index * piece;
        remote[index].address = to->address + (COUNT - 1 - index) * piece;
        local[index].len = remote[index].len = piece;
    }
    fill(from, 1);
    OK(ww_agent_prepare(alice, bob, local, remote, COUNT, &prepared));
    options.notification = "written";
    options.notification_len = 7;
    OK(ww_agent_post(alice, WW_WRITE, prepared, &options, &transfer));
    OK(ww_transfer_wait(transfer, 20000));
    OK(ww_transfer_state(transfer));
    OK(ww_transfer_release(transfer));
    OK(ww_prepared_release(prepared));
    bytes = contents(to);
    for (index = 0; index < COUNT; index++)
        for (at = 0; at < piece; at++)
            CHECK(bytes[(COUNT - 1 - index) * piece + at] == pattern(1, index * piece + at));
    free(bytes);

    for (index = 0; index < COUNT; index++) local[index].address = back->address + index * piece;
    OK(ww_agent_prepare(alice, bob, local, remote, COUNT, &prepared));
    /* Twice with the same lists. */
    for (index = 0; index < 2; index++) {
        OK(ww_agent_post(alice, WW_READ, prepared, NULL, &transfer));
        while (ww_transfer_state(transfer) == WW_IN_PROGRESS) {
        }
        OK(ww_transfer_state(transfer));
        OK(ww_transfer_release(transfer));
    }
    /* Prepared lists keep the memory registered. */
    OK(ww_prepared_release(prepared));
    check_contents(back, 1);
}

static void notifications(ww_agent *alice, ww_agent *bob, ww_peer *peer) {
    ww_notification *got = NULL;
    struct pollfd poll_fd;
    char *longer = malloc(100000);
    CHECK(longer != NULL);
    OK(ww_agent_next_notification(bob, 10000, &got));
    CHECK(got && got->len == 7 && memcmp(got->bytes, "written", 8) == 0);
    CHECK(strcmp(got->from, "alice") == 0);
    ww_free(got);
    OK(ww_agent_next_notification(bob, 0, &got));
    CHECK(got == NULL);
    OK(ww_agent_next_notification(bob, 10, &got));
    CHECK(got == NULL);

    /* The descriptor becomes readable. */
    while (ww_agent_clear(bob) == 1) {
    }
    poll_fd.fd = ww_agent_fd(bob);
    poll_fd.events = POLLIN;
    CHECK(poll_fd.fd >= 0);
    memset(longer, 'x', 100000);
    OK(ww_agent_notify(alice, peer, longer, 100000, NULL));
    CHECK(poll(&poll_fd, 1, 10000) == 1 && (poll_fd.revents & POLLIN));
    CHECK(ww_agent_clear(bob) == 1);
    OK(ww_agent_next_notification(bob, 10000, &got));
    CHECK(got && got->len == 100000 && memcmp(got->bytes, longer, 100000) == 0);
    ww_free(got);
    OK(ww_agent_notify(alice, peer, NULL, 0, NULL));
    OK(ww_agent_next_notification(bob, -1, &got));
    CHECK(got && got->len == 0);
    ww_free(got);
    free(longer);
}

static void describe(ww_agent *alice, ww_peer *peer, buffer *from, buffer *to, const char *where) {
    ww_memory_info *memory = NULL;
    ww_peer_info *info = NULL;
    ww_remote_memory *remote = NULL;
    ww_peer *again = NULL;
    char *path = NULL;
    size_t count = 0;
    OK(ww_agent_path(alice, &path));
    CHECK(strlen(path) > 0);
    ww_free(path);
    OK(ww_memory_describe(from->memory, &memory));
    CHECK(memory->address == from->address && memory->len == from->len);
    CHECK(strcmp(memory->kind, where) == 0 && strlen(memory->path) > 0 && memory->why);
    ww_free(memory);
    OK(ww_peer_describe(peer, &info));
    CHECK(strcmp(info->name, "bob") == 0 && info->is_connected == 1 && strlen(info->path) > 0);
    ww_free(info);
    OK(ww_peer_memory(peer, &remote, &count));
    CHECK(count == 1 && remote->address == to->address && remote->len == to->len);
    CHECK(strcmp(remote->kind, where) == 0);
    ww_free(remote);
    OK(ww_agent_find_peer(alice, "bob", &again));
    OK(ww_peer_release(again));
    FAILS(WW_STALE, "carol", ww_agent_find_peer(alice, "carol", &again));
}

/* Memory that is registered again has other keys: metadata of it replaces the old ones. */
static void register_again(ww_agent *alice, ww_agent *bob, buffer *from, buffer *to) {
    void *metadata = NULL;
    size_t len = 0;
    ww_peer *peer = NULL;
    ww_prepared *prepared = NULL;
    ww_transfer *transfer = NULL;
    ww_remote_memory *remote = NULL;
    const ww_memory *list[1];
    ww_range here, there;
    int round;
    for (round = 0; round < 3; round++) {
        OK(ww_memory_deregister(to->memory));
        OK(ww_agent_register(bob, to->address, to->len, WW_ACCESS_ALL, &to->memory));
        list[0] = to->memory;
        OK(ww_agent_metadata_of(bob, list, 1, &metadata, &len));
        OK(ww_agent_add_peer(alice, metadata, len, &peer));
        ww_free(metadata);
        OK(ww_peer_memory(peer, &remote, &len));
        CHECK(len == 1);
        ww_free(remote);
        here.address = from->address;
        there.address = to->address;
        here.len = there.len = from->len;
        fill(from, 10 + (unsigned)round);
        OK(ww_agent_prepare(alice, peer, &here, &there, 1, &prepared));
        OK(ww_agent_post(alice, WW_WRITE, prepared, NULL, &transfer));
        OK(ww_transfer_wait(transfer, 20000));
        check_contents(to, 10 + (unsigned)round);
        OK(ww_transfer_release(transfer));
        OK(ww_prepared_release(prepared));
        OK(ww_peer_release(peer));
    }
}

static void one(const char *where) {
    ww_agent *alice = open_agent("alice", "auto"), *bob = open_agent("bob", "auto");
    buffer from = allocate(alice, where, MIB - MIB % COUNT);
    buffer back = allocate(alice, where, from.len), to = allocate(bob, where, from.len);
    ww_peer *peer = add(alice, bob), *own;
    ww_transfer *transfer = NULL;
    ww_prepared *prepared = NULL;
    ww_range here, there;
    lists(alice, peer, &from, &to, &back);
    notifications(alice, bob, peer);
    describe(alice, peer, &from, &to, where);
    register_again(alice, bob, &from, &to);

    /* An agent as its own peer. */
    own = add(alice, alice);
    here.address = from.address;
    there.address = back.address;
    here.len = there.len = from.len;
    fill(&from, 3);
    OK(ww_agent_prepare(alice, own, &here, &there, 1, &prepared));
    OK(ww_agent_post(alice, WW_WRITE, prepared, NULL, &transfer));
    OK(ww_transfer_wait(transfer, 20000));
    check_contents(&back, 3);
    /* In use. */
    if (!from.host) FAILS(WW_BUSY, "", ww_device_free(from.address));
    OK(ww_transfer_release(transfer));
    OK(ww_prepared_release(prepared));
    OK(ww_peer_release(own));

    OK(ww_agent_remove_peer(alice, "bob"));
    FAILS(WW_STALE, "bob", ww_agent_remove_peer(alice, "bob"));
    OK(ww_peer_release(peer));
    discard(&from);
    discard(&back);
    discard(&to);
    OK(ww_agent_close(alice));
    OK(ww_agent_close(bob));
}

/* ---- two processes --------------------------------------------------------------------------- */

static void put_all(int fd, const void *bytes, size_t len) {
    const char *at = bytes;
    while (len > 0) {
        ssize_t put = write(fd, at, len);
        CHECK(put > 0);
        at += put;
        len -= (size_t)put;
    }
}

static void get_all(int fd, void *bytes, size_t len) {
    char *at = bytes;
    while (len > 0) {
        ssize_t got = read(fd, at, len);
        CHECK(got > 0);
        at += got;
        len -= (size_t)got;
    }
}

/* The peer's process: serves its memory, and answers notifications, until "end". */
static void serve(int pipe, const char *link) {
    ww_agent *agent = open_agent("server", link);
    buffer memory = allocate(agent, "host", 4 * MIB);
    void *metadata = NULL;
    size_t len = 0;
    ww_notification *got = NULL;
    ww_peer *client = NULL;
    fill(&memory, 5);
    OK(ww_agent_metadata(agent, &metadata, &len));
    put_all(pipe, &len, sizeof len);
    put_all(pipe, metadata, len);
    ww_free(metadata);
    for (;;) {
        OK(ww_agent_next_notification(agent, 30000, &got));
        CHECK(got && strcmp(got->from, "client") == 0);
        if (strcmp(got->bytes, "end") == 0) break;
        if (strcmp(got->bytes, "written") == 0) {
            check_contents(&memory, 6);
            OK(ww_agent_notify(agent, client, "seen", 4, NULL));
        } else { /* the client's metadata */
            OK(ww_agent_add_peer(agent, got->bytes, got->len, &client));
        }
        ww_free(got);
    }
    ww_free(got);
    OK(ww_peer_release(client));
    discard(&memory);
    OK(ww_agent_close(agent));
    exit(0);
}

/* Starts the peer's process, before this one uses the library, and reads its metadata. */
static pid_t start_server(const char *link, char **metadata, size_t *len) {
    int ends[2];
    pid_t child;
    CHECK(pipe(ends) == 0);
    child = fork();
    CHECK(child >= 0);
    if (child == 0) {
        close(ends[0]);
        serve(ends[1], link);
    }
    close(ends[1]);
    get_all(ends[0], len, sizeof *len);
    *metadata = malloc(*len);
    CHECK(*metadata != NULL);
    get_all(ends[0], *metadata, *len);
    close(ends[0]);
    return child;
}

static ww_prepared *prepare_all(ww_agent *agent, ww_peer *peer, const buffer *memory) {
    ww_remote_memory *remote = NULL;
    ww_prepared *prepared = NULL;
    ww_range here, there;
    size_t count = 0;
    OK(ww_peer_memory(peer, &remote, &count));
    CHECK(count == 1 && remote->len == memory->len);
    here.address = memory->address;
    there.address = remote->address;
    here.len = there.len = memory->len;
    ww_free(remote);
    OK(ww_agent_prepare(agent, peer, &here, &there, 1, &prepared));
    return prepared;
}

static void two(const char *link) {
    char *metadata;
    size_t len;
    pid_t child = start_server(link, &metadata, &len);
    ww_agent *agent = open_agent("client", link);
    buffer memory = allocate(agent, "host", 4 * MIB);
    ww_transfer_options options = WW_TRANSFER_OPTIONS_INIT;
    ww_notification *got = NULL;
    ww_transfer *transfer = NULL;
    ww_prepared *prepared;
    ww_peer *server = NULL;
    void *own = NULL;
    int status = 0;
    OK(ww_agent_add_peer(agent, metadata, len, &server));
    free(metadata);
    OK(ww_agent_metadata_of(agent, NULL, 0, &own, &len));
    OK(ww_agent_notify(agent, server, own, len, NULL));
    ww_free(own);
    prepared = prepare_all(agent, server, &memory);
    OK(ww_agent_post(agent, WW_READ, prepared, NULL, &transfer));
    OK(ww_transfer_wait(transfer, 20000));
    OK(ww_transfer_release(transfer));
    check_contents(&memory, 5);
    fill(&memory, 6);
    options.notification = "written";
    options.notification_len = 7;
    OK(ww_agent_post(agent, WW_WRITE, prepared, &options, &transfer));
    OK(ww_transfer_wait(transfer, -1));
    OK(ww_transfer_release(transfer));
    OK(ww_agent_next_notification(agent, 20000, &got));
    CHECK(got && strcmp(got->from, "server") == 0 && strcmp(got->bytes, "seen") == 0);
    ww_free(got);
    /* The server may be gone before it has acknowledged this. */
    OK(ww_agent_notify(agent, server, "end", 3, NULL));
    CHECK(waitpid(child, &status, 0) == child && status == 0);
    OK(ww_prepared_release(prepared));
    OK(ww_peer_release(server));
    discard(&memory);
    OK(ww_agent_close(agent));
}

static void killed(const char *link) {
    char *metadata;
    size_t len;
    pid_t child = start_server(link, &metadata, &len);
    ww_agent *agent = open_agent("client", link);
    buffer memory = allocate(agent, "host", 4 * MIB);
    ww_transfer *transfer = NULL;
    ww_prepared *prepared;
    ww_peer *server = NULL;
    int round, status = WW_OK;
    OK(ww_agent_add_peer(agent, metadata, len, &server));
    prepared = prepare_all(agent, server, &memory);
    for (round = 0; status == WW_OK; round++) {
        CHECK(round < 100000);
        if (round == 20) CHECK(kill(child, SIGKILL) == 0);
        status = ww_agent_post(agent, round % 2 ? WW_WRITE : WW_READ, prepared, NULL, &transfer);
        if (status == WW_OK) {
            status = ww_transfer_wait(transfer, 30000);
            OK(ww_transfer_release(transfer));
        }
    }
    CHECK(round > 20 && status < 0);
    CHECK(ww_last_error()->status == status && strlen(ww_last_error()->why) > 0);
    printf("killed: %s\n", ww_last_error()->message);
    CHECK(waitpid(child, NULL, 0) == child);
    free(metadata);
    OK(ww_prepared_release(prepared));
    OK(ww_peer_release(server));
    discard(&memory);
    OK(ww_agent_close(agent));
}

/* ---- cancellation and deadlines -------------------------------------------------------------- */

/* In reverse, so that no two pieces are merged: more work requests than are in flight at once. */
static ww_prepared *prepare_pieces(ww_agent *agent, ww_peer *peer, buffer *from, buffer *to) {
    static ww_range local[COUNT], remote[COUNT];
    uint64_t piece = from->len / COUNT;
    ww_prepared *prepared = NULL;
    size_t index;
    for (index = 0; index < COUNT; index++) {
        local[index].address = from->address + (COUNT - 1 - index) * piece;
        remote[index].address = to->address + (COUNT - 1 - index) * piece;
        local[index].len = remote[index].len = piece;
    }
    OK(ww_agent_prepare(agent, peer, local, remote, COUNT, &prepared));
    return prepared;
}

static void cancel(void) {
    ww_agent *alice = open_agent("alice", "udp"), *bob = open_agent("bob", "udp");
    buffer from = allocate(alice, "host", 32u * 1000 * COUNT);
    buffer to = allocate(bob, "host", from.len);
    ww_peer *peer = add(alice, bob);
    ww_prepared *prepared = prepare_pieces(alice, peer, &from, &to);
    ww_transfer *transfers[20];
    ww_transfer_options options = WW_TRANSFER_OPTIONS_INIT;
    int index, status;
    for (index = 0; index < 20; index++)
        OK(ww_agent_post(alice, WW_WRITE, prepared, NULL, &transfers[index]));
    /* The last one is far behind the others. */
    CHECK(ww_transfer_wait(transfers[19], 0) == WW_IN_PROGRESS);
    for (index = 19; index >= 0; index--) OK(ww_transfer_cancel(transfers[index]));
    for (index = 19; index >= 0; index--) {
        status = ww_transfer_wait(transfers[index], 30000);
        CHECK(status == WW_CANCELLED || (index < 19 && status == WW_OK));
        CHECK(ww_transfer_state(transfers[index]) == status);
        OK(ww_transfer_release(transfers[index]));
    }
    options.timeout_ms = 1;
    for (index = 0; index < 20; index++)
        OK(ww_agent_post(alice, WW_WRITE, prepared, &options, &transfers[index]));
    FAILS(WW_TIMEOUT, "", ww_transfer_wait(transfers[19], 30000));
    for (index = 0; index < 20; index++) {
        CHECK(ww_transfer_wait(transfers[index], 30000) <= 0);
        OK(ww_transfer_release(transfers[index]));
    }
    /* The agents work as before. */
    fill(&from, 9);
    OK(ww_agent_post(alice, WW_WRITE, prepared, NULL, &transfers[0]));
    OK(ww_transfer_wait(transfers[0], 60000));
    check_contents(&to, 9);
    OK(ww_transfer_release(transfers[0]));
    /* Its own peer is closed: transfers end with a cause. */
    discard(&to);
    OK(ww_agent_close(bob));
    status = ww_agent_post(alice, WW_WRITE, prepared, NULL, &transfers[0]);
    if (status == WW_OK) {
        status = ww_transfer_wait(transfers[0], 60000);
        OK(ww_transfer_release(transfers[0]));
    }
    CHECK(status < 0);
    OK(ww_prepared_release(prepared));
    OK(ww_peer_release(peer));
    discard(&from);
    OK(ww_agent_close(alice));
}

/* ---- refused input --------------------------------------------------------------------------- */

static void bad_agents(void) {
    ww_agent_options options = WW_AGENT_OPTIONS_INIT;
    ww_agent *agent = (ww_agent *)&options; /* stays as it is */
    char long_name[300];
    memset(long_name, 'x', sizeof long_name);
    long_name[299] = 0;
    FAILS(WW_INVALID_ARGUMENT, "name", ww_agent_open(NULL, NULL, &agent));
    FAILS(WW_INVALID_ARGUMENT, "agent", ww_agent_open("a", NULL, NULL));
    FAILS(WW_INVALID_ARGUMENT, "empty", ww_agent_open("", NULL, &agent));
    FAILS(WW_INVALID_ARGUMENT, "256", ww_agent_open(long_name, NULL, &agent));
    FAILS(WW_INVALID_ARGUMENT, "control", ww_agent_open("a\033[2J", NULL, &agent));
    FAILS(WW_MALFORMED, "UTF-8", ww_agent_open("a\xff", NULL, &agent));
    options.size = 3;
    FAILS(WW_INVALID_ARGUMENT, "INIT", ww_agent_open("a", &options, &agent));
    options.size = sizeof options;
    options.link = "tokenring";
    FAILS(WW_MALFORMED, "tokenring", ww_agent_open("a", &options, &agent));
    options.link = NULL;
    options.address = "here";
    FAILS(WW_MALFORMED, "here", ww_agent_open("a", &options, &agent));
    options.address = "192.0.2.1"; /* for documentation: no machine has it */
    CHECK(ww_agent_open("a", &options, &agent) < 0);
    options.address = "127.0.0.1";
    options.queue_pairs = 17;
    FAILS(WW_INVALID_ARGUMENT, "queue_pairs", ww_agent_open("a", &options, &agent));
    CHECK(agent == (ww_agent *)&options);
    FAILS(WW_INVALID_ARGUMENT, "ww_agent", ww_agent_close(NULL));
    FAILS(WW_INVALID_ARGUMENT, "ww_agent", ww_agent_close(agent));
    FAILS(WW_INVALID_ARGUMENT, "ww_agent", ww_agent_fd(NULL));
    FAILS(WW_INVALID_ARGUMENT, "ww_agent", ww_agent_clear(NULL));
}

static void bad_memory(ww_agent *agent, buffer *good) {
    ww_memory *memory = NULL;
    uint64_t address = 0;
    ww_window *window = NULL;
    char byte = 0;
    FAILS(WW_INVALID_ARGUMENT, "memory",
          ww_agent_register(agent, good->address, 1, WW_ACCESS_ALL, NULL));
    FAILS(WW_INVALID_ARGUMENT, "access", ww_agent_register(agent, good->address, 1, 16, &memory));
    FAILS(WW_INVALID_ARGUMENT, "local-write",
          ww_agent_register(agent, good->address, 1, WW_REMOTE_WRITE, &memory));
    FAILS(WW_INVALID_ARGUMENT, "", ww_agent_register(agent, good->address, 0, 7, &memory));
    CHECK(ww_agent_register(agent, 0, 4096, 7, &memory) < 0);
    CHECK(ww_agent_register(agent, UINT64_MAX - 10, 4096, 7, &memory) < 0);
    FAILS(WW_INVALID_ARGUMENT, "ww_memory", ww_memory_deregister(NULL));
    FAILS(WW_INVALID_ARGUMENT, "ww_memory", ww_memory_deregister((ww_memory *)agent));

    FAILS(WW_INVALID_ARGUMENT, "tpu", ww_device_alloc("tpu:0", 1, &address));
    FAILS(WW_INVALID_ARGUMENT, "device", ww_device_alloc(NULL, 1, &address));
    FAILS(WW_INVALID_ARGUMENT, "address", ww_device_alloc("sim:0", 1, NULL));
    CHECK(ww_device_alloc("sim:0", 0, &address) < 0);
    CHECK(ww_device_alloc("sim:0", UINT64_MAX, &address) < 0);
    FAILS(WW_INVALID_ARGUMENT, "ww_device_alloc", ww_device_free(good->address));
    CHECK(ww_window_open(good->address, 16, &window) < 0);
    OK(ww_device_alloc("sim:0", 4096, &address));
    CHECK(ww_window_open(address, 4097, &window) < 0);
    CHECK(ww_window_open(address, 0, &window) < 0);
    OK(ww_window_open(address, 4096, &window));
    FAILS(WW_OUT_OF_RANGE, "", ww_window_write(window, 4096, &byte, 1));
    FAILS(WW_OUT_OF_RANGE, "", ww_window_read(window, UINT64_MAX, &byte, 1));
    FAILS(WW_INVALID_ARGUMENT, "NULL", ww_window_read(window, 0, NULL, 1));
    OK(ww_window_read(window, 0, NULL, 0));
    OK(ww_window_close(window));
    FAILS(WW_INVALID_ARGUMENT, "ww_window", ww_window_write(window, 0, &byte, 1));
    FAILS(WW_INVALID_ARGUMENT, "ww_window", ww_window_close(window));
    OK(ww_device_free(address));
    FAILS(WW_INVALID_ARGUMENT, "freed", ww_device_free(address));
}

static void bad_peers(ww_agent *alice, ww_agent *bob) {
    char *metadata = NULL, *changed;
    size_t len = 0, at;
    unsigned seed = 1;
    int round;
    ww_peer *peer = NULL;
    OK(ww_agent_metadata(bob, (void **)&metadata, &len));
    FAILS(WW_MALFORMED, "empty", ww_agent_add_peer(alice, NULL, 0, &peer));
    FAILS(WW_INVALID_ARGUMENT, "metadata", ww_agent_add_peer(alice, NULL, 1, &peer));
    FAILS(WW_INVALID_ARGUMENT, "peer", ww_agent_add_peer(alice, metadata, len, NULL));
    for (at = 0; at + 2 < len; at++)
        FAILS(WW_MALFORMED, "again", ww_agent_add_peer(alice, metadata, at, &peer));
    /* Random bytes in between: refused, or another peer; never a crash. */
    changed = malloc(len);
    CHECK(changed != NULL);
    for (round = 0; round < 500; round++) {
        memcpy(changed, metadata, len);
        seed = seed * 1103515245u + 12345u;
        changed[(seed >> 8) % len] = (char)(seed >> 24);
        if (ww_agent_add_peer(alice, changed, len, &peer) == WW_OK) OK(ww_peer_release(peer));
    }
    free(changed);
    ww_free(metadata);
    FAILS(WW_INVALID_ARGUMENT, "bytes", ww_agent_metadata(bob, NULL, &len));
    FAILS(WW_INVALID_ARGUMENT, "len", ww_agent_metadata(bob, (void **)&metadata, NULL));
}

static void bad_transfers(ww_agent *alice, ww_agent *bob, buffer *from, buffer *to) {
    ww_peer *peer = add(alice, bob), *other = add(bob, alice);
    ww_transfer_options options = WW_TRANSFER_OPTIONS_INIT;
    ww_prepared *prepared = NULL;
    ww_transfer *transfer = NULL;
    ww_notification *got = NULL;
    ww_range here, there;
    const ww_memory *list[1];
    void *bytes = NULL;
    size_t len = 0;
    here.address = from->address;
    there.address = to->address;
    here.len = there.len = 4096;
    FAILS(WW_INVALID_ARGUMENT, "local", ww_agent_prepare(alice, peer, NULL, &there, 1, &prepared));
    FAILS(WW_INVALID_ARGUMENT, "ww_peer", ww_agent_prepare(alice, NULL, &here, &there, 1, &prepared));
    FAILS(WW_INVALID_ARGUMENT, "another agent",
          ww_agent_prepare(alice, other, &here, &there, 1, &prepared));
    there.len = 4095;
    FAILS(WW_INVALID_ARGUMENT, "4095", ww_agent_prepare(alice, peer, &here, &there, 1, &prepared));
    there.len = 4096;
    here.address = 4096;
    FAILS(WW_OUT_OF_RANGE, "range 0", ww_agent_prepare(alice, peer, &here, &there, 1, &prepared));
    here.address = from->address + from->len - 4095;
    FAILS(WW_OUT_OF_RANGE, "range 0", ww_agent_prepare(alice, peer, &here, &there, 1, &prepared));
    here.address = from->address;
    there.address = UINT64_MAX;
    FAILS(WW_OUT_OF_RANGE, "bob", ww_agent_prepare(alice, peer, &here, &there, 1, &prepared));
    there.address = to->address;
    OK(ww_agent_prepare(alice, peer, &here, &there, 1, &prepared));
    FAILS(WW_INVALID_ARGUMENT, "operation 2", ww_agent_post(alice, 2, prepared, NULL, &transfer));
    FAILS(WW_INVALID_ARGUMENT, "another agent",
          ww_agent_post(bob, WW_WRITE, prepared, NULL, &transfer));
    FAILS(WW_INVALID_ARGUMENT, "transfer", ww_agent_post(alice, WW_WRITE, prepared, NULL, NULL));
    FAILS(WW_INVALID_ARGUMENT, "ww_prepared", ww_agent_post(alice, WW_WRITE, NULL, NULL, &transfer));
    options.notification_len = 1;
    FAILS(WW_INVALID_ARGUMENT, "notification",
          ww_agent_post(alice, WW_WRITE, prepared, &options, &transfer));
    options.notification = from->host;
    options.notification_len = MIB + 1;
    FAILS(WW_INVALID_ARGUMENT, "1048576",
          ww_agent_post(alice, WW_WRITE, prepared, &options, &transfer));
    FAILS(WW_INVALID_ARGUMENT, "device",
          ww_agent_post_on_stream(alice, WW_WRITE, prepared, NULL, NULL, NULL, &transfer));
    FAILS(WW_INVALID_ARGUMENT, "operation 7",
          ww_agent_post_on_stream(alice, 7, prepared, NULL, "sim:0", NULL, &transfer));
    FAILS(WW_INVALID_ARGUMENT, "no stream of this number",
          ww_agent_post_on_stream(alice, WW_WRITE, prepared, NULL, "sim:0", NULL, &transfer));
    FAILS(WW_INVALID_ARGUMENT, "ww_transfer", ww_transfer_wait_on_stream(NULL, "sim:0", NULL));
    /* The peer has deregistered its memory since. */
    OK(ww_memory_deregister(to->memory));
    OK(ww_agent_post(alice, WW_WRITE, prepared, NULL, &transfer));
    CHECK(ww_transfer_wait(transfer, 30000) < 0);
    CHECK(ww_last_error()->status < 0);
    OK(ww_transfer_release(transfer));
    OK(ww_agent_register(bob, to->address, to->len, WW_ACCESS_ALL, &to->memory));
    /* In use by prepared lists; the registration ends with them. */
    FAILS(WW_BUSY, "prepared", ww_memory_deregister(from->memory));
    FAILS(WW_INVALID_ARGUMENT, "ww_memory", ww_memory_deregister(from->memory));
    OK(ww_prepared_release(prepared));
    FAILS(WW_INVALID_ARGUMENT, "ww_prepared", ww_prepared_release(prepared));
    OK(ww_agent_register(alice, from->address, from->len, WW_ACCESS_ALL, &from->memory));
    list[0] = from->memory;
    FAILS(WW_INVALID_ARGUMENT, "another agent", ww_agent_metadata_of(bob, list, 1, &bytes, &len));
    FAILS(WW_INVALID_ARGUMENT, "ww_transfer", ww_transfer_state(NULL));
    FAILS(WW_INVALID_ARGUMENT, "ww_transfer", ww_transfer_wait(transfer, 0));
    FAILS(WW_INVALID_ARGUMENT, "ww_transfer", ww_transfer_cancel(transfer));
    FAILS(WW_INVALID_ARGUMENT, "notification", ww_agent_next_notification(alice, 0, NULL));
    FAILS(WW_INVALID_ARGUMENT, "bytes", ww_agent_notify(alice, peer, NULL, 5, NULL));
    OK(ww_peer_release(peer));
    OK(ww_peer_release(other));
    FAILS(WW_INVALID_ARGUMENT, "ww_peer", ww_agent_notify(alice, peer, "x", 1, NULL));
    (void)got;
}

static void bad(void) {
    ww_agent *alice, *bob;
    buffer from, to;
    CHECK(ww_last_error()->status == WW_OK && strlen(ww_last_error()->message) == 0);
    bad_agents();
    alice = open_agent("alice", "auto");
    bob = open_agent("bob", "auto");
    from = allocate(alice, "host", MIB + 1);
    to = allocate(bob, "host", MIB);
    bad_memory(alice, &from);
    bad_peers(alice, bob);
    bad_transfers(alice, bob, &from, &to);
    FAILS(WW_INVALID_ARGUMENT, "json", ww_doctor(NULL));
    ww_free(NULL);
    CHECK(strcmp(ww_status_name(WW_PEER_LOST), "WW_PEER_LOST") == 0);
    CHECK(strcmp(ww_status_name(77), "unknown status") == 0);
    OK(ww_agent_close(alice));
    FAILS(WW_INVALID_ARGUMENT, "released", ww_agent_close(alice));
    discard(&from); /* after its agent */
    discard(&to);
    OK(ww_agent_close(bob));
}

/* ---- processes and threads ------------------------------------------------------------------- */

static void forked(void) {
    ww_agent *agent = open_agent("alice", "auto");
    int status = 0;
    pid_t child = fork();
    CHECK(child >= 0);
    if (child == 0) {
        ww_agent *other = NULL;
        FAILS(WW_UNSUPPORTED, "forked", ww_agent_open("bob", NULL, &other));
        FAILS(WW_UNSUPPORTED, "forked", ww_agent_close(agent));
        exit(0);
    }
    CHECK(waitpid(child, &status, 0) == child && status == 0);
    OK(ww_agent_close(agent));
}

static void *other_thread(void *unused) {
    (void)unused;
    CHECK(ww_last_error()->status == WW_OK);
    FAILS(WW_INVALID_ARGUMENT, "ww_transfer", ww_transfer_state(NULL));
    return NULL;
}

static void threads(void) {
    pthread_t thread;
    char *json = NULL;
    FAILS(WW_INVALID_ARGUMENT, "ww_window", ww_window_close(NULL));
    CHECK(pthread_create(&thread, NULL, other_thread, NULL) == 0);
    CHECK(pthread_join(thread, NULL) == 0);
    CHECK(strstr(ww_last_error()->message, "ww_window") != NULL);
    CHECK(strcmp(ww_last_error()->what, "use a ww_window") == 0);
    CHECK(strcmp(ww_last_error()->why, "it is NULL") == 0);
    OK(ww_doctor(&json));
    CHECK(json[0] == '{' && strstr(json, "\"verdicts\"") != NULL);
    ww_free(json);
}

int main(int argc, char **argv) {
    mode = argc > 1 ? argv[1] : "";
    CHECK(ww_version() == WW_VERSION);
    if (!strcmp(mode, "one") && argc > 2) one(argv[2]);
    else if (!strcmp(mode, "two") && argc > 2) two(argv[2]);
    else if (!strcmp(mode, "killed") && argc > 2) killed(argv[2]);
    else if (!strcmp(mode, "cancel")) cancel();
    else if (!strcmp(mode, "bad")) bad();
    else if (!strcmp(mode, "fork")) forked();
    else if (!strcmp(mode, "threads")) threads();
    else return 2;
    printf("%s: all good\n", mode);
    return 0;
}

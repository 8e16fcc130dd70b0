/* What all C programs of this folder have in common, and what is not counted: the two sides, a
 * socket between them for addresses and keys, the data, and the end after an error.
 *
 *     PROGRAM target PORT             listens there
 *     PROGRAM initiator PORT HOST     connects, and tries again while nothing listens
 */
#ifndef SIDES_H
#define SIDES_H

#include <netdb.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/socket.h>
#include <time.h>
#include <unistd.h>

#define LEN (1u << 20)
#define TIMEOUT 20 /* seconds, for the whole program */

static inline void fail(const char *what, const char *why) {
    fprintf(stderr, "cannot %s: %s\n", what, why);
    exit(1);
}

/* For loops that wait: fails when the time is over. */
static inline void check_time(const char *what) {
    static time_t end;
    struct timespec now;
    clock_gettime(CLOCK_MONOTONIC, &now);
    if (end == 0) end = now.tv_sec + TIMEOUT;
    if (now.tv_sec > end) fail(what, "timed out");
}

static inline uint8_t pattern(size_t at) { return (uint8_t)(at * 7 + (at >> 8) * 13 + 1); }

static inline void fill(uint8_t *memory) {
    for (size_t at = 0; at < LEN; at++) memory[at] = pattern(at);
}

static inline void verify(const uint8_t *memory) {
    for (size_t at = 0; at < LEN; at++) {
        if (memory[at] != pattern(at)) fail("verify the data", "a byte is wrong");
    }
    printf("verified %u bytes\n", LEN);
}

static inline void send_all(int socket, const void *bytes, size_t len) {
    for (const char *at = bytes; len > 0;) {
        ssize_t sent = send(socket, at, len, MSG_NOSIGNAL);
        if (sent <= 0) fail("send to the other side", "it is gone");
        at += sent;
        len -= (size_t)sent;
    }
}

static inline void receive_all(int socket, void *bytes, size_t len) {
    if (recv(socket, bytes, len, MSG_WAITALL) != (ssize_t)len) {
        fail("receive from the other side", "it is gone");
    }
}

/* Bytes with their length. */
static inline void send_bytes(int socket, const void *bytes, size_t len) {
    uint64_t prefix = len;
    send_all(socket, &prefix, sizeof prefix);
    send_all(socket, bytes, len);
}

/* The result is freed by the caller. */
static inline void *receive_bytes(int socket, size_t *len) {
    uint64_t prefix;
    receive_all(socket, &prefix, sizeof prefix);
    void *bytes = prefix <= LEN ? malloc(prefix + 1) : NULL;
    if (bytes == NULL) fail("receive from the other side", "no such length");
    receive_all(socket, bytes, prefix);
    *len = prefix;
    return bytes;
}

/* Whether the other side has ended. */
static inline int has_ended(int socket) {
    char byte;
    return recv(socket, &byte, 1, MSG_DONTWAIT) == 0;
}

static inline int listen_at(const struct addrinfo *address) {
    int listener = socket(address->ai_family, SOCK_STREAM, 0), on = 1;
    setsockopt(listener, SOL_SOCKET, SO_REUSEADDR, &on, sizeof on);
    if (bind(listener, address->ai_addr, address->ai_addrlen) != 0 || listen(listener, 1) != 0) {
        fail("listen", "the port is in use");
    }
    int accepted = accept(listener, NULL, NULL);
    if (accepted < 0) fail("accept", "no connection");
    close(listener);
    return accepted;
}

static inline int connect_to(const struct addrinfo *address) {
    for (;;) {
        int connected = socket(address->ai_family, SOCK_STREAM, 0);
        if (connect(connected, address->ai_addr, address->ai_addrlen) == 0) return connected;
        close(connected);
        check_time("connect to the target");
        usleep(10000);
    }
}

static inline int run(int argc, char **argv, void (*target)(int), void (*initiator)(int)) {
    int is_target = argc == 3 && strcmp(argv[1], "target") == 0;
    if (!is_target && !(argc == 4 && strcmp(argv[1], "initiator") == 0)) {
        fail("start", "the arguments are: target PORT, or: initiator PORT HOST");
    }
    struct addrinfo hints = {.ai_family = AF_INET, .ai_flags = is_target ? AI_PASSIVE : 0};
    struct addrinfo *address;
    int status = getaddrinfo(is_target ? NULL : argv[3], argv[2], &hints, &address);
    if (status != 0) fail("look up the host", gai_strerror(status));
    check_time("start");
    int socket = is_target ? listen_at(address) : connect_to(address);
    freeaddrinfo(address);
    (is_target ? target : initiator)(socket);
    close(socket);
    return 0;
}

#endif

/* Assertions of the C tests, with the library's last error. */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <warpwire.h>

static const char *mode;

#define CHECK(condition)                                                                      \
    do {                                                                                      \
        if (!(condition)) {                                                                   \
            const ww_error *error = ww_last_error();                                          \
            fprintf(stderr, "%s:%d: %s: %s\n  last error: %s: %s\n", __FILE__, __LINE__,     \
                    mode, #condition, ww_status_name(error->status), error->message);         \
            exit(1);                                                                          \
        }                                                                                     \
    } while (0)
#define OK(call) CHECK((call) == WW_OK)

/* The call fails with this status, and the reason is recorded. */
#define FAILS(wanted, text, call)                                                             \
    do {                                                                                      \
        int status_ = (call);                                                                 \
        CHECK(status_ == (wanted));                                                           \
        CHECK(ww_last_error()->status == (wanted));                                           \
        CHECK(strstr(ww_last_error()->message, (text)) != NULL);                              \
        CHECK(strncmp(ww_last_error()->message, "cannot ", 7) == 0);                          \
    } while (0)

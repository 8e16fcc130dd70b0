// What the header's tests share: yields at random, and the runner of cases. Included before the
// headers under test.
#pragma once
#include <sched.h>

#include <cstdio>
#include <cstdlib>
#include <cstring>

// Yields at random at the yield points of the header.
inline void maybe_yield() {
    static thread_local unsigned state = static_cast<unsigned>(reinterpret_cast<unsigned long long>(&state) >> 12);
    state = state * 1664525 + 1013904223;
    if (state >> 28 == 0) sched_yield();
}
#define WARPWIRE_YIELD_POINT() maybe_yield()

// False in ./ci.sh, which sets how much is tried: on a busy machine each round waits for its turn.
inline bool is_full_effort() {
    const char *effort = std::getenv("WARPWIRE_EFFORT");
    return !effort || std::strcmp(effort, "full") == 0;
}

struct Case {
    const char *name;
    void (*run)();
};
#define CASE(function) {#function, function}

// Runs the cases whose names contain one of the arguments, or all; the exit status is 2 if there is
// none.
template <int N> int run_cases(const Case (&cases)[N], int count, char **names) {
    int ran = 0;
    for (const Case &one : cases) {
        bool wanted = count == 1;
        for (int i = 1; i < count; i++) wanted |= std::strstr(one.name, names[i]) != nullptr;
        if (!wanted) continue;
        std::printf("%s ... ", one.name);
        std::fflush(stdout);
        one.run();
        std::printf("ok\n");
        ran++;
    }
    return ran ? 0 : 2;
}

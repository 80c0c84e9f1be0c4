/* A copying library that copies nothing: it says what it was offered, and takes or declines it as the environment says. */
#define _GNU_SOURCE
#include "../../include/forebay_copy.h"
#include <dlfcn.h>
#include <stdio.h>
#include <stdlib.h>
#include <unistd.h>

typedef int (*enqueue_t)(uint64_t, uint64_t, size_t, void *);
static void *(*real)(void *, const char *);
static void *driver;

static int number(const char *name, int otherwise) {
    const char *value = getenv(name);
    return value ? atoi(value) : otherwise;
}

static int32_t copy(const forebay_pair *pairs, uint64_t count, uint32_t direction, void *stream, uint32_t flags,
                    int32_t *result) {
    uint64_t bytes = 0;
    for (uint64_t i = 0; i < count; i++) bytes += pairs[i].bytes;
    printf("offer %lu->%lu count %lu bytes %lu direction %u stream %lu flags %u\n", pairs[0].from, pairs[0].to, count, bytes,
           direction, (uintptr_t)stream, flags);
    if (getenv("DOUBLE_COPIES")) { /* by the driver, as the real one does, and the first also as it should not */
        enqueue_t enqueue = (enqueue_t)dlsym(driver, "cuMemcpyAsync");
        enqueue(pairs[0].to, pairs[0].from, pairs[0].bytes, stream);
        enqueue = (enqueue_t)real(driver, "cuMemcpyAsync");
        for (uint64_t i = 0; i < count; i++) enqueue(pairs[i].to, pairs[i].from, pairs[i].bytes, stream);
        if (flags & FOREBAY_SYNCHRONOUS) ((int (*)(void *))real(driver, "cuStreamSynchronize"))(stream);
    }
    fflush(stdout);
    *result = number("DOUBLE_RESULT", 0);
    return number("DOUBLE_DECLINES", 0);
}

static int32_t enable_peer(void *peer, uint32_t flags, int32_t (*enable)(void *, uint32_t)) {
    printf("told of enable\n");
    return enable(peer, flags);
}
static int32_t disable_peer(void *peer, int32_t (*disable)(void *)) {
    printf("told of disable\n");
    return disable(peer);
}
static void reset(int32_t device) { printf("told of reset %d\n", device); }

const forebay_copy_api *forebay_copy_open(void *(*real_dlsym)(void *, const char *), void *libcuda, int lines) {
    static forebay_copy_api api = {FOREBAY_COPY_ABI, sizeof api, 1 << 20, copy, enable_peer, disable_peer, reset};
    (void)lines;
    real = real_dlsym;
    driver = libcuda;
    printf("open\n");
    if (getenv("DOUBLE_ALLOCATES")) {
        uint64_t at;
        printf("allocated %d\n", ((int (*)(uint64_t *, size_t))real(libcuda, "cuMemAlloc_v2"))(&at, 4096));
        ((int (*)(uint64_t))real(libcuda, "cuMemFree_v2"))(at);
    }
    fflush(stdout);
    if (getenv("DOUBLE_WAITS")) { /* for a copy that another thread makes meanwhile */
        volatile int *copies = real(libcuda, "driver_copies");
        for (int i = 0; i < 30000 && !*copies; i++) usleep(1000);
    }
    api.abi = number("DOUBLE_ABI", FOREBAY_COPY_ABI);
    return getenv("DOUBLE_STAYS_OUT") ? NULL : &api;
}

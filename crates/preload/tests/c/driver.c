/* A driver of which only the entry points matter: each says that it was called, with its arguments. */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <stdint.h>

static int initialised;
static int quiet(void) {
    static int known = -1;
    if (known < 0) known = getenv("DRIVER_QUIET") != NULL;
    return known;
}
volatile int driver_copies;
#define SAY(...) do { if (!quiet()) { printf(__VA_ARGS__); fflush(stdout); } } while (0)

int cuInit(unsigned flags) { (void)flags; initialised = 1; return 0; }
int cuCtxGetCurrent(void **context) {
    *context = getenv("DRIVER_NO_CONTEXT") ? NULL : (void *)77;
    return initialised ? 0 : 3;
}
int cuStreamIsCapturing(void *stream, int *status) {
    const char *captured = getenv("DRIVER_CAPTURED");
    *status = 0;
    if (!captured) return 0;
    if (!stream) return 906;
    *status = (uintptr_t)stream == strtoul(captured, NULL, 0);
    return 0;
}
int cuThreadExchangeStreamCaptureMode(int *mode) {
    static int now;
    int old = now;
    now = *mode;
    *mode = old;
    SAY("driver capture mode %d\n", now);
    return 0;
}

#define FINISHED(name) int name(uint64_t to, uint64_t from, size_t bytes) { \
    SAY("driver " #name " %lu %lu %zu\n", to, from, bytes); return 0; }
#define ENQUEUED(name) int name(uint64_t to, uint64_t from, size_t bytes, void *stream) { \
    SAY("driver " #name " %lu %lu %zu %lu\n", to, from, bytes, (uintptr_t)stream); \
    driver_copies++; \
    return 0; }
#define BATCHED(name) int name(uint64_t *to, uint64_t *from, size_t *bytes, size_t count, void *attributes, size_t *starts, \
        size_t attribute_count, size_t *failed, void *stream) { \
    (void)to; (void)from; (void)bytes; (void)attributes; (void)starts; (void)attribute_count; *failed = 5; \
    SAY("driver " #name " %zu %lu\n", count, (uintptr_t)stream); return 1; }
#define BATCHED_V2(name) int name(uint64_t *to, uint64_t *from, size_t *bytes, size_t count, void *attributes, size_t *starts, \
        size_t attribute_count, void *stream) { \
    (void)to; (void)from; (void)bytes; (void)attributes; (void)starts; (void)attribute_count; \
    SAY("driver " #name " %zu %lu\n", count, (uintptr_t)stream); return 0; }

FINISHED(cuMemcpy) FINISHED(cuMemcpy_ptds) FINISHED(cuMemcpyHtoD_v2) FINISHED(cuMemcpyHtoD_v2_ptds)
FINISHED(cuMemcpyDtoH_v2) FINISHED(cuMemcpyDtoH_v2_ptds)
ENQUEUED(cuMemcpyAsync) ENQUEUED(cuMemcpyAsync_ptsz) ENQUEUED(cuMemcpyHtoDAsync_v2) ENQUEUED(cuMemcpyHtoDAsync_v2_ptsz)
ENQUEUED(cuMemcpyDtoHAsync_v2) ENQUEUED(cuMemcpyDtoHAsync_v2_ptsz)
BATCHED(cuMemcpyBatchAsync) BATCHED(cuMemcpyBatchAsync_ptsz) BATCHED_V2(cuMemcpyBatchAsync_v2) BATCHED_V2(cuMemcpyBatchAsync_v2_ptsz)
static int unknown_batch(void) { SAY("driver unknown batch\n"); return 0; }

int cuGetProcAddress(const char *name, void **found, int version, uint64_t flags);
int cuGetProcAddress_v2(const char *name, void **found, int version, uint64_t flags, int *status) {
    int threads = flags == 2;
    *found = NULL;
    if (!strcmp(name, "cuGetProcAddress")) *found = version >= 12000 ? (void *)cuGetProcAddress_v2 : (void *)cuGetProcAddress;
#define TWIN(base, one, two) if (!strcmp(name, base)) *found = threads ? (void *)two : (void *)one;
    TWIN("cuMemcpy", cuMemcpy, cuMemcpy_ptds)
    TWIN("cuMemcpyAsync", cuMemcpyAsync, cuMemcpyAsync_ptsz)
    TWIN("cuMemcpyHtoD", cuMemcpyHtoD_v2, cuMemcpyHtoD_v2_ptds)
    TWIN("cuMemcpyDtoH", cuMemcpyDtoH_v2, cuMemcpyDtoH_v2_ptds)
    TWIN("cuMemcpyHtoDAsync", cuMemcpyHtoDAsync_v2, cuMemcpyHtoDAsync_v2_ptsz)
    TWIN("cuMemcpyDtoHAsync", cuMemcpyDtoHAsync_v2, cuMemcpyDtoHAsync_v2_ptsz)
    if (!strcmp(name, "cuMemcpyBatchAsync")) {
        if (version >= 14000) *found = (void *)unknown_batch;
        else if (version >= 13000) *found = threads ? (void *)cuMemcpyBatchAsync_v2_ptsz : (void *)cuMemcpyBatchAsync_v2;
        else *found = threads ? (void *)cuMemcpyBatchAsync_ptsz : (void *)cuMemcpyBatchAsync;
    }
    if (status) *status = *found ? 0 : 1;
    return *found ? 0 : 500;
}
int cuGetProcAddress(const char *name, void **found, int version, uint64_t flags) {
    return cuGetProcAddress_v2(name, found, version, flags, NULL);
}

/* A program of the CUDA runtime that moves bytes there and back, in the ways that its arguments name, and checks them. */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <pthread.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

extern int cudaMallocHost(void **at, size_t bytes);
extern int cudaMalloc(void **at, size_t bytes);
extern int cudaStreamCreateWithFlags(void **stream, unsigned flags);
extern int cudaStreamSynchronize(void *stream);
extern int cudaStreamSynchronize_ptsz(void *stream);
extern int cudaStreamBeginCapture(void *stream, int mode);
extern int cudaStreamEndCapture(void *stream, void **graph);
extern int cudaMemcpy(void *to, const void *from, size_t bytes, int kind);
extern int cudaMemcpyAsync(void *to, const void *from, size_t bytes, int kind, void *stream);
extern int cudaMemcpyAsync_ptsz(void *to, const void *from, size_t bytes, int kind, void *stream);
extern int cudaMemcpyBatchAsync(const void **to, const void **from, const size_t *bytes, size_t count, void *attributes,
                                size_t *starts, size_t attribute_count, void *stream);
extern int cudaMemsetAsync(void *at, int value, size_t bytes, void *stream);
extern int cuMemcpyHtoDAsync_v2(uint64_t to, const void *from, size_t bytes, void *stream);
extern int cuStreamWaitValue64_v2(void *stream, uint64_t at, uint64_t value, unsigned flags);
extern int cuMemCreate(uint64_t *handle, size_t bytes, const void *properties, uint64_t flags);
extern int cuMemAddressReserve(uint64_t *at, size_t bytes, size_t alignment, uint64_t hint, uint64_t flags);
extern int cuMemMap(uint64_t at, size_t bytes, size_t offset, uint64_t handle, uint64_t flags);
extern int cuMemSetAccess(uint64_t at, size_t bytes, const void *accesses, size_t count);

enum { HOST_TO_DEVICE = 1, DEVICE_TO_HOST = 2, ANY = 4, PIECES = 4 };
static const size_t bytes = 8 << 20;
static char *source, *target, *device;
static void *stream, *captured;

static void check(const char *what, int result) {
    if (result == 0) return;
    printf("%s gives %d\n", what, result);
    exit(1);
}
#define CHECK(call) check(#call, call)

static uint64_t counted(const char *name) {
    return ((uint64_t(*)(const char *))dlsym(RTLD_DEFAULT, "fake_cuda_stat"))(name);
}
/* What came or went over links of other GPUs than the program's own. */
static uint64_t relayed(void) {
    return counted("bytes.h2d.1") + counted("bytes.h2d.2") + counted("bytes.d2h.1") + counted("bytes.d2h.2");
}

static void move_batch(char *to, char *from) {
    struct { unsigned order, source[2], target[2], flags; } attributes = {1, {0, 0}, {0, 0}, 0};
    const void *tos[PIECES], *froms[PIECES];
    size_t sizes[PIECES], start = 0;
    for (int i = 0; i < PIECES; i++) {
        tos[i] = to + i * (bytes / PIECES);
        froms[i] = from + i * (bytes / PIECES);
        sizes[i] = bytes / PIECES;
    }
    CHECK(cudaMemcpyBatchAsync(tos, froms, sizes, PIECES, &attributes, &start, 1, stream));
    CHECK(cudaStreamSynchronize(stream));
}
static void copy_pageable(void);
static void move(const char *way) {
    if (!strcmp(way, "sync")) {
        CHECK(cudaMemcpy(device, source, bytes, HOST_TO_DEVICE));
        CHECK(cudaMemcpy(target, device, bytes, ANY));
    } else if (!strcmp(way, "pageable")) {
        copy_pageable();
    } else if (!strcmp(way, "small")) {
        CHECK(cudaMemcpy(device, source, bytes, HOST_TO_DEVICE));
        for (size_t at = 0; at < bytes; at += bytes / 8)
            CHECK(cudaMemcpyAsync(target + at, device + at, bytes / 8, DEVICE_TO_HOST, stream));
        CHECK(cudaStreamSynchronize(stream));
    } else if (!strcmp(way, "stream")) {
        CHECK(cudaMemcpyAsync(device, source, bytes, HOST_TO_DEVICE, stream));
        CHECK(cudaMemcpyAsync(target, device, bytes, DEVICE_TO_HOST, stream));
        CHECK(cudaStreamSynchronize(stream));
    } else if (!strcmp(way, "thread")) {
        CHECK(cudaMemcpyAsync_ptsz(device, source, bytes, ANY, NULL));
        CHECK(cudaMemcpyAsync_ptsz(target, device, bytes, DEVICE_TO_HOST, NULL));
        CHECK(cudaStreamSynchronize_ptsz(NULL));
    } else if (!strcmp(way, "batch")) {
        move_batch(device, source);
        move_batch(target, device);
    } else if (!strcmp(way, "link")) {
        CHECK(cuMemcpyHtoDAsync_v2((uint64_t)device, source, bytes, stream));
        CHECK(cudaMemcpyAsync(target, device, bytes, DEVICE_TO_HOST, stream));
        CHECK(cudaStreamSynchronize(stream));
    } else {
        printf("unknown way %s\n", way);
        exit(2);
    }
}

/* Copies until the copying library has taken one: it starts in the background. */
static void start(void) {
    for (int i = 0; i < 6000 && relayed() == 0; i++) {
        CHECK(cudaMemcpyAsync(device, source, bytes, HOST_TO_DEVICE, stream));
        CHECK(cudaStreamSynchronize(stream));
        usleep(10000);
    }
    printf("%s\n", relayed() ? "started" : "NOT STARTED");
}
/* Memory that only its own GPU reaches, in place of what every GPU reaches. */
static void close_memory(void) {
    struct { int kind, handles, place, gpu; uint64_t rest[2]; } properties = {1, 0, 1, 0, {0, 0}};
    struct { int place, gpu, access; } access = {1, 0, 3};
    uint64_t handle, at;
    CHECK(cuMemCreate(&handle, bytes, &properties, 0));
    CHECK(cuMemAddressReserve(&at, bytes, 0, 0, 0));
    CHECK(cuMemMap(at, bytes, 0, handle, 0));
    CHECK(cuMemSetAccess(at, bytes, &access, 1));
    device = (char *)at;
}

static volatile uint64_t *word;
static void *release_later(void *unused) {
    usleep(50000);
    *word = 1;
    return unused;
}
/* A copy that the caller waits for comes after what is in other streams that wait for the default stream. */
static void copy_after_others(void) {
    void *other;
    pthread_t releasing;
    CHECK(cudaMallocHost((void **)&word, 8));
    *word = 0;
    CHECK(cudaStreamCreateWithFlags(&other, 0));
    CHECK(cuStreamWaitValue64_v2(other, (uint64_t)word, 1, 0));
    CHECK(cudaMemsetAsync(device, 0x5a, bytes, other));
    check("pthread_create", pthread_create(&releasing, NULL, release_later, NULL));
    CHECK(cudaMemcpy(target, device, bytes, DEVICE_TO_HOST));
    size_t right = 0;
    while (right < bytes && target[right] == 0x5a) right++;
    printf("after others %s\n", right == bytes && *word == 1 ? "right" : "WRONG");
    pthread_join(releasing, NULL);
}
/* Ends the program while copies are under way. */
static void leave(void) {
    for (int i = 0; i < 8; i++) CHECK(cudaMemcpyAsync(device, source, bytes, HOST_TO_DEVICE, stream));
    CHECK(cudaMemcpyAsync(target, device, bytes, DEVICE_TO_HOST, stream));
    printf("leaving\n");
    exit(0);
}
static void copy_pageable(void) {
    char *plain = malloc(bytes);
    memcpy(plain, source, bytes);
    CHECK(cudaMemcpy(device, plain, bytes, HOST_TO_DEVICE));
    CHECK(cudaMemcpy(target, device, bytes, DEVICE_TO_HOST));
    free(plain);
}

int main(int count, char **ways) {
    void *graph = NULL;
    CHECK(cudaMallocHost((void **)&source, bytes));
    CHECK(cudaMallocHost((void **)&target, bytes));
    CHECK(cudaMalloc((void **)&device, bytes));
    CHECK(cudaStreamCreateWithFlags(&stream, 1));
    CHECK(cudaStreamCreateWithFlags(&captured, 1));
    for (int i = 1; i < count; i++) {
        if (!strcmp(ways[i], "capture")) { CHECK(cudaStreamBeginCapture(captured, 0)); continue; }
        if (!strcmp(ways[i], "copy_in_capture")) {
            CHECK(cudaMemcpyAsync(device, source, bytes, HOST_TO_DEVICE, captured));
            continue;
        }
        if (!strcmp(ways[i], "start")) { start(); continue; }
        if (!strcmp(ways[i], "closed")) { close_memory(); continue; }
        if (!strcmp(ways[i], "after")) { copy_after_others(); continue; }
        if (!strcmp(ways[i], "leave")) leave();
        if (!strcmp(ways[i], "end")) { CHECK(cudaStreamEndCapture(captured, &graph)); continue; }
        for (size_t at = 0; at < bytes; at++) source[at] = (char)(at * 31 + at / 4096 + i);
        memset(target, 0, bytes);
        uint64_t before = relayed();
        move(ways[i]);
        printf("%s %s\n", ways[i], memcmp(source, target, bytes) ? "WRONG" : "right");
        printf("%s relayed %lu\n", ways[i], relayed() - before);
        fflush(stdout);
    }
    printf("misuse %lu\n", ((uint64_t(*)(void))dlsym(RTLD_DEFAULT, "fake_cuda_misuse"))());
    return 0;
}

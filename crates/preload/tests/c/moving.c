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
extern int cudaSetDevice(int device);
extern int cudaDeviceReset(void);
extern int cudaDeviceEnablePeerAccess(int peer, unsigned flags);
extern int cudaDeviceDisablePeerAccess(int peer);
extern int cudaHostRegister(void *at, size_t bytes, unsigned flags);
extern int cudaMemsetAsync(void *at, int value, size_t bytes, void *stream);
extern int cuMemcpyHtoDAsync_v2(uint64_t to, const void *from, size_t bytes, void *stream);
extern int cuMemcpyHtoD_v2(uint64_t to, const void *from, size_t bytes);
extern int cuMemcpyDtoHAsync_v2(void *to, uint64_t from, size_t bytes, void *stream);
extern int cuDeviceGet(int *device, int ordinal);
extern int cuDevicePrimaryCtxGetState(int device, unsigned *flags, int *active);
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

/* By pages of one size, which lie backwards on the GPU. */
static void move_pages(char *to, char *from, size_t page, int backwards_to) {
    struct { unsigned order, source[2], target[2], flags; } attributes = {1, {0, 0}, {0, 0}, 0};
    size_t count = bytes / page, start = 0;
    const void **tos = malloc(count * sizeof *tos), **froms = malloc(count * sizeof *froms);
    size_t *sizes = malloc(count * sizeof *sizes);
    for (size_t i = 0; i < count; i++) {
        tos[i] = to + (backwards_to ? count - 1 - i : i) * page;
        froms[i] = from + (backwards_to ? i : count - 1 - i) * page;
        sizes[i] = page;
    }
    CHECK(cudaMemcpyBatchAsync(tos, froms, sizes, count, &attributes, &start, 1, stream));
    CHECK(cudaStreamSynchronize(stream));
    free(tos), free(froms), free(sizes);
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
    } else if (!strcmp(way, "pages64") || !strcmp(way, "pages16")) {
        size_t page = (size_t)atoi(way + 5) << 10;
        move_pages(device, source, page, 1);
        move_pages(target, device, page, 0);
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

/* What was relayed, once nothing is any more. */
static uint64_t quiet(void) {
    uint64_t before, now = relayed();
    do {
        before = now;
        usleep(10000);
        now = relayed();
    } while (now != before);
    return now;
}
/* Copies until the copying library has taken two: it starts in the background, and what it moves itself then, while it checks
   the GPUs, may look like one. */
static void start(void) {
    int in_a_row = 0;
    for (int i = 0; i < 6000 && in_a_row < 2; i++) {
        uint64_t before = quiet();
        CHECK(cudaMemcpyAsync(device, source, bytes, HOST_TO_DEVICE, stream));
        CHECK(cudaStreamSynchronize(stream));
        in_a_row = relayed() - before < bytes / 2 ? 0 : in_a_row + 1;
    }
    printf("%s\n", in_a_row == 2 ? "started" : "NOT STARTED");
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

/* Copies for as long as a start takes that ends with no relay: until the library has made what it needs on as many GPUs, and some
 * more. */
static void warm(unsigned gpus) {
    int more = 20;
    for (int i = 0; i < 6000 && more > 0; i++) {
        CHECK(cudaMemcpyAsync(device, source, bytes, HOST_TO_DEVICE, stream));
        CHECK(cudaStreamSynchronize(stream));
        usleep(10000);
        if (counted("live.events") >= 128 * gpus) more--;
    }
}
/* Turns access between GPU 0 and 1 on or off as the program's own, and says what that gives. */
static void access_peers(const char *what) {
    int enables = !strncmp(what, "enable", 6);
    int there = strchr(what, '>') != NULL, gpu = there ? 0 : 1, peer = 1 - gpu;
    CHECK(cudaSetDevice(gpu));
    int result = enables ? cudaDeviceEnablePeerAccess(peer, 0) : cudaDeviceDisablePeerAccess(peer);
    printf("%s gives %d\n", what, result);
    CHECK(cudaSetDevice(0));
}
static void say_contexts(void) {
    printf("contexts");
    for (int i = 0; i < 3; i++) {
        int device = 0, active = 0;
        unsigned flags = 0;
        CHECK(cuDeviceGet(&device, i));
        CHECK(cuDevicePrimaryCtxGetState(device, &flags, &active));
        printf(" %d", active);
    }
    printf("\n");
}
/* Calls that the driver refuses, and what they give. */
static void refused(void) {
    struct { unsigned order, source[2], target[2], flags; } attributes = {1, {0, 0}, {0, 0}, 0};
    const void *tos[2] = {device, device}, *froms[2] = {source, source};
    size_t sizes[2] = {bytes, 0}, start = 0;
    printf("refused: an empty copy in a batch %d\n",
           cudaMemcpyBatchAsync(tos, froms, sizes, 2, &attributes, &start, 1, stream));
    printf("refused: to a GPU, from a GPU %d\n", cuMemcpyHtoDAsync_v2((uint64_t)device, device, bytes, stream));
    printf("refused: to a GPU, to the host %d\n", cuMemcpyHtoD_v2((uint64_t)target, device, bytes));
    printf("refused: from a GPU, from the host %d\n", cuMemcpyDtoHAsync_v2(device, (uint64_t)source, bytes, stream));
    char *plain = aligned_alloc(4096, bytes);
    memset(plain, 1, bytes);
    CHECK(cudaHostRegister(plain, bytes / 2, 1));
    CHECK(cudaHostRegister(plain + bytes / 2, bytes / 2, 1));
    printf("refused: over two registrations %d\n", cudaMemcpyAsync(device, plain, bytes, HOST_TO_DEVICE, stream));
    CHECK(cudaStreamSynchronize(stream));
}
static void make(void) {
    CHECK(cudaMallocHost((void **)&source, bytes));
    CHECK(cudaMallocHost((void **)&target, bytes));
    CHECK(cudaMalloc((void **)&device, bytes));
    CHECK(cudaStreamCreateWithFlags(&stream, 1));
    CHECK(cudaStreamCreateWithFlags(&captured, 1));
}
/* Descriptor 2 is a file of the program's from now on. */
static void take_descriptor_2(void) {
    close(2);
    if (!freopen(getenv("OWN_FILE"), "w", stderr) || fileno(stderr) != 2) exit(3);
}

int main(int count, char **ways) {
    void *graph = NULL;
    make();
    for (int i = 1; i < count; i++) {
        if (!strcmp(ways[i], "capture")) { CHECK(cudaStreamBeginCapture(captured, 0)); continue; }
        if (!strcmp(ways[i], "copy_in_capture")) {
            CHECK(cudaMemcpyAsync(device, source, bytes, HOST_TO_DEVICE, captured));
            continue;
        }
        if (!strcmp(ways[i], "start")) { start(); continue; }
        if (!strncmp(ways[i], "warm", 4)) { warm((unsigned)atoi(ways[i] + 4)); continue; }
        if (!strncmp(ways[i], "enable", 6) || !strncmp(ways[i], "disable", 7)) { access_peers(ways[i]); continue; }
        if (!strcmp(ways[i], "contexts")) { say_contexts(); continue; }
        if (!strcmp(ways[i], "refused")) { refused(); continue; }
        if (!strcmp(ways[i], "own2")) { take_descriptor_2(); continue; }
        if (!strcmp(ways[i], "reset")) { CHECK(cudaDeviceReset()); make(); continue; }
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

/* A program of the CUDA runtime that moves bytes there and back, in the ways that its arguments name, and checks them. */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

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
extern int cuMemcpyHtoDAsync_v2(uint64_t to, const void *from, size_t bytes, void *stream);

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
static void move(const char *way) {
    if (!strcmp(way, "sync")) {
        CHECK(cudaMemcpy(device, source, bytes, HOST_TO_DEVICE));
        CHECK(cudaMemcpy(target, device, bytes, ANY));
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
        if (!strcmp(ways[i], "end")) { CHECK(cudaStreamEndCapture(captured, &graph)); continue; }
        for (size_t at = 0; at < bytes; at++) source[at] = (char)(at * 31 + at / 4096 + i);
        memset(target, 0, bytes);
        move(ways[i]);
        printf("%s %s\n", ways[i], memcmp(source, target, bytes) ? "WRONG" : "right");
        fflush(stdout);
    }
    printf("misuse %lu\n", ((uint64_t(*)(void))dlsym(RTLD_DEFAULT, "fake_cuda_misuse"))());
    return 0;
}

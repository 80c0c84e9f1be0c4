/* The part of the CUDA runtime that finds the driver, as libcudart does. */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <stdint.h>
#include <stddef.h>

typedef int (*query_t)(const char *, void **, int, uint64_t, int *);
static int (*enqueue)(uint64_t, uint64_t, size_t, void *);

int cudaMemcpyAsync(void *to, const void *from, size_t bytes, int kind, void *stream) {
    (void)kind;
    if (!enqueue) {
        query_t query = (query_t)dlsym(dlopen("libcuda.so.1", RTLD_NOW), "cuGetProcAddress_v2");
        void *found;
        int status;
        query("cuGetProcAddress", &found, 12000, 0, &status);
        query = (query_t)found;
        query("cuMemcpyAsync", &found, 4000, 0, &status);
        enqueue = (int (*)(uint64_t, uint64_t, size_t, void *))found;
    }
    return enqueue((uint64_t)to, (uint64_t)from, bytes, stream);
}

/* A program that copies as its arguments say: each is one step. */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <pthread.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/wait.h>
#include <time.h>
#include <unistd.h>

typedef int (*finish_t)(uint64_t, uint64_t, size_t);
typedef int (*enqueue_t)(uint64_t, uint64_t, size_t, void *);
typedef int (*batch_t)(uint64_t *, uint64_t *, size_t *, size_t, void *, size_t *, size_t, size_t *, void *);
typedef int (*batch_v2_t)(uint64_t *, uint64_t *, size_t *, size_t, void *, size_t *, size_t, void *);
typedef int (*query_t)(const char *, void **, int, uint64_t);
typedef int (*query_v2_t)(const char *, void **, int, uint64_t, int *);

static size_t bytes = 4 << 20;
static void *stream = (void *)7;
static unsigned source_order = 1;

static void *driver(void) {
    void *handle = dlopen("libcuda.so.1", RTLD_NOW);
    if (!handle) { printf("no driver\n"); exit(0); }
    return handle;
}
static void *ask(const char *name, int version, uint64_t flags) {
    query_v2_t query = (query_v2_t)dlsym(driver(), "cuGetProcAddress_v2");
    void *found = NULL;
    int status;
    query(name, &found, version, flags, &status);
    return found;
}
static void run_batch(int version, uint64_t flags) {
    struct { unsigned order, source[2], target[2], flags; } attributes = {source_order, {0, 0}, {0, 0}, 0};
    uint64_t to[4] = {100, 200, 300, 400}, from[4] = {10, 20, 30, 40};
    size_t sizes[4] = {bytes / 4, bytes / 4, bytes / 4, bytes / 4}, starts[1] = {0}, failed = 99;
    void *found = ask("cuMemcpyBatchAsync", version, flags);
    int result;
    if (version < 13000) result = ((batch_t)found)(to, from, sizes, 4, &attributes, starts, 1, &failed, stream);
    else result = ((batch_v2_t)found)(to, from, sizes, 4, &attributes, starts, 1, stream);
    printf("result %d failed %zd\n", result, (ssize_t)failed);
}
static void spend(void) {
    enqueue_t enqueue = (enqueue_t)dlsym(driver(), "cuMemcpyHtoDAsync_v2");
    double best = 1e9;
    for (int round = 0; round < 20; round++) {
        struct timespec start, end;
        clock_gettime(CLOCK_MONOTONIC, &start);
        for (int i = 0; i < 100000; i++) enqueue(1, 2, bytes, stream);
        clock_gettime(CLOCK_MONOTONIC, &end);
        double ns = ((end.tv_sec - start.tv_sec) * 1e9 + (end.tv_nsec - start.tv_nsec)) / 100000;
        if (ns < best) best = ns;
    }
    printf("ns %.1f\n", best);
}
static void *copy_once(void *nothing) {
    ((enqueue_t)dlsym(driver(), "cuMemcpyHtoDAsync_v2"))(1, 2, bytes, stream);
    return nothing;
}
static void two_threads(void) {
    pthread_t other;
    pthread_create(&other, NULL, copy_once, NULL);
    copy_once(NULL);
    pthread_join(other, NULL);
}
#ifdef LINKED
extern int cuMemcpyHtoDAsync_v2(uint64_t, uint64_t, size_t, void *);
#endif
#ifdef RUNTIME
extern int cudaMemcpyAsync(void *, const void *, size_t, int, void *);
#endif

static void step(const char *what) {
    int version = 0;
    unsigned long flags = 0;
    char name[64];
    if (sscanf(what, "bytes=%zu", &bytes) == 1 || sscanf(what, "order=%u", &source_order) == 1) return;
    if (sscanf(what, "stream=%lu", &flags) == 1) { stream = (void *)flags; return; }
    if (!strcmp(what, "init")) { ((int (*)(unsigned))dlsym(driver(), "cuInit"))(0); return; }
#ifdef LINKED
    if (!strcmp(what, "link")) { cuMemcpyHtoDAsync_v2(1, 2, bytes, stream); return; }
#endif
#ifdef RUNTIME
    if (!strcmp(what, "runtime")) { cudaMemcpyAsync((void *)1, (void *)2, bytes, 4, stream); return; }
    if (!strcmp(what, "versioned")) {
        int (*copy)(void *, const void *, size_t, int, void *) =
            (int (*)(void *, const void *, size_t, int, void *))dlvsym(RTLD_DEFAULT, "cudaMemcpyAsync", "libcudart.so.13");
        copy((void *)1, (void *)2, bytes, 4, stream);
        return;
    }
#endif
    if (!strcmp(what, "handle")) { ((enqueue_t)dlsym(driver(), "cuMemcpyHtoDAsync_v2"))(1, 2, bytes, stream); return; }
    if (!strcmp(what, "compare")) { /* whether the whole program finds what the driver's handle does, and the C library's dlsym */
        void *whole = dlsym(RTLD_DEFAULT, "cuMemcpyHtoDAsync_v2"), *own = dlsym(driver(), "cuMemcpyHtoDAsync_v2");
        void *lookup = dlsym(RTLD_DEFAULT, "dlsym"), *of_libc = dlsym(dlopen("libc.so.6", RTLD_LAZY), "dlsym");
        printf("driver's %d, C library's %d\n", whole == own, lookup == of_libc);
        return;
    }
    if (!strcmp(what, "finish")) { printf("result %d\n", ((finish_t)dlsym(driver(), "cuMemcpyDtoH_v2"))(1, 2, bytes)); return; }
    if (!strcmp(what, "default") || !strcmp(what, "program")) {
        void *found = dlsym(what[0] == 'd' ? RTLD_DEFAULT : dlopen(NULL, RTLD_LAZY), "cuMemcpyHtoDAsync_v2");
        if (found) ((enqueue_t)found)(1, 2, bytes, stream);
        else printf("not found: %s\n", dlerror());
        return;
    }
    if (sscanf(what, "batch:%d:%lu", &version, &flags) == 2) { run_batch(version, flags); return; }
    if (sscanf(what, "ask:%63[^:]:%d:%lu", name, &version, &flags) == 3) {
        void *found = ask(name, version, flags);
        if (strstr(name, "Async")) ((enqueue_t)found)(1, 2, bytes, stream);
        else ((finish_t)found)(1, 2, bytes);
        return;
    }
    if (!strcmp(what, "ask1")) { /* by the first cuGetProcAddress, found through the second */
        void *found;
        ((query_t)ask("cuGetProcAddress", 11030, 0))("cuMemcpyHtoDAsync", &found, 3020, 0);
        ((enqueue_t)found)(1, 2, bytes, stream);
        return;
    }
    if (!strcmp(what, "threads")) { two_threads(); return; }
    if (!strcmp(what, "time")) { spend(); return; }
    if (!strcmp(what, "fork")) { /* the child goes on with the next steps; the parent waits, and ends */
        int status = 0;
        fflush(NULL);
        pid_t child = fork();
        if (child == 0) { printf("child\n"); return; }
        waitpid(child, &status, 0);
        exit(!WIFEXITED(status) || WEXITSTATUS(status));
    }
    printf("unknown step %s\n", what);
    exit(2);
}

int main(int count, char **steps) {
    for (int i = 1; i < count; i++) {
        step(steps[i]);
        fflush(stdout);
    }
    return 0;
}

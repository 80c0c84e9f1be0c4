/* Another interposer. It wraps one copy, and with -DHOOKS_DLSYM also answers dlsym, as HAMi-core does. */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <stdint.h>
#include <stdio.h>
#include <string.h>

typedef int (*enqueue_t)(uint64_t, uint64_t, size_t, void *);
static enqueue_t next;

int cuMemcpyHtoDAsync_v2(uint64_t to, uint64_t from, size_t bytes, void *stream) {
    printf("other interposer\n");
    fflush(stdout);
#ifdef LOOKS_AT_HANDLE
    if (!next) next = (enqueue_t)dlsym(dlopen("libcuda.so.1", RTLD_LAZY), "cuMemcpyHtoDAsync_v2");
#else
    if (!next) next = (enqueue_t)dlsym(RTLD_NEXT, "cuMemcpyHtoDAsync_v2");
#endif
    if (!next) next = (enqueue_t)dlsym(dlopen("libcuda.so.1", RTLD_LAZY), "cuMemcpyHtoDAsync_v2");
    return next(to, from, bytes, stream);
}

#ifdef HOOKS_DLSYM
typedef void *(*dlsym_t)(void *, const char *);
void *dlsym(void *handle, const char *name) {
    static dlsym_t real;
    if (!real) real = (dlsym_t)dlvsym(RTLD_NEXT, "dlsym", DLSYM_VERSION);
    if (handle != RTLD_NEXT && !strcmp(name, "cuMemcpyHtoDAsync_v2")) {
        void *found = real(handle, name);
        if (found && !next && found != (void *)cuMemcpyHtoDAsync_v2) next = (enqueue_t)found;
        return found ? (void *)cuMemcpyHtoDAsync_v2 : NULL;
    }
    return real(handle, name);
}
#endif

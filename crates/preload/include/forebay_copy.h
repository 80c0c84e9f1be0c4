/* What libforebay_preload.so asks of the library that copies, libforebay_cuda.so. docs/preload.md has the rules in words. */
#ifndef FOREBAY_COPY_H
#define FOREBAY_COPY_H
#include <stdint.h>

#define FOREBAY_COPY_ABI 2

enum { FOREBAY_HOST_TO_DEVICE = 0, FOREBAY_DEVICE_TO_HOST = 1, FOREBAY_DIRECTION_UNKNOWN = 2 };
enum { FOREBAY_SYNCHRONOUS = 1, FOREBAY_PER_THREAD_DEFAULT_STREAM = 2 };

/* Why a copy was declined. Any other value above 0 declines as well. */
enum {
    FOREBAY_SMALL = 1,         /* below what several links are worth */
    FOREBAY_CAPTURING = 2,     /* the stream, or the legacy stream, is part of a capture */
    FOREBAY_PAGEABLE = 3,      /* host memory that is not pinned or registered */
    FOREBAY_MANAGED = 4,       /* managed memory */
    FOREBAY_NO_RELAY = 5,      /* no other GPU may carry for this one */
    FOREBAY_RELAYS_BUSY = 6,   /* those that may have work of their own */
    FOREBAY_SAME_KIND = 7,     /* both sides are host memory, or both are device memory */
    FOREBAY_OTHER_CONTEXT = 8, /* a context that is not the device's primary one, or not the stream's */
    FOREBAY_FAULT = 9,         /* a fault of ours */
    FOREBAY_OFF = 10,          /* switched off */
    FOREBAY_STARTING = 11,     /* still starting: a later copy may be taken */
    FOREBAY_UNTRUSTED = 12,    /* all GPUs that could carry for this one were seen to move wrong bytes */
    FOREBAY_DRIVER_JUDGES = 13, /* the driver would refuse it, or might */
};

/* Addresses as the caller gave them. */
typedef struct {
    uint64_t from, to, bytes;
} forebay_pair;

typedef struct {
    uint32_t abi, size; /* FOREBAY_COPY_ABI, sizeof(forebay_copy_api) */
    /* `copy` is never called for fewer bytes in all. It is read for each copy and may change at any time. */
    uint64_t min_bytes;
    /* 0: taken, and *result is what the driver's call would have returned. The copies are in the stream's order, or, with
     * FOREBAY_SYNCHRONOUS, finished. Above 0: declined, nothing was done. `pairs` are the caller's until the call returns. */
    int32_t (*copy)(const forebay_pair *pairs, uint64_t count, uint32_t direction, void *stream, uint32_t flags,
                    int32_t *result);
    /* The program's cuCtxEnablePeerAccess and cuCtxDisablePeerAccess in its current context, with the function that it would have
     * called: access that the library needs stays, and the program is answered as if the library were not there. */
    int32_t (*enable_peer)(void *peer, uint32_t flags, int32_t (*real)(void *peer, uint32_t flags));
    int32_t (*disable_peer)(void *peer, int32_t (*real)(void *peer));
    /* The program is about to reset the primary context of a device: the library uses nothing of it from then on. */
    void (*reset)(int32_t device);
} forebay_copy_api;

/* The one symbol of the copying library. Called once, on a thread that has a current context and whose stream is not
 * captured, in relaxed capture mode. `real_dlsym` never gives a function of the preload. `lines` is an open descriptor for what
 * it has to say, or below 0. NULL: stay out of this process. */
const forebay_copy_api *forebay_copy_open(void *(*real_dlsym)(void *handle, const char *name), void *libcuda, int lines);

#endif

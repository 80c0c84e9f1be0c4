// Publishes requests of a ring in host memory that name checksums (docs/reference/ring.md): the checksum of each layer is joined from
// the remainders that forebay_checksums left, written as the slot's contexts, and published by one store. Nothing waits for anything.
//
// Rebuilt and checked by build.sh; the PTX beside this file is what is shipped.

#include "crc32c.cuh"

struct Range {
    u64 at;
    u64 bytes;
};

// An armed request whose contexts are the layers of a slot.
struct Commit {
    // Where its contexts lie, of 16 bytes each, and its sequence word.
    ulonglong2 *contexts;
    u64 *word;
    u64 value;
    // The ranges of all layers, one after another, and the remainder of each.
    const Range *ranges;
    const u32 *remainders;
    // Of each layer the place of its first range, and behind the last one where that ends.
    const u32 *starts;
    u64 layers;
};

__device__ u32 checksum(const Commit &commit, u32 layer) {
    u32 sum = ~0u, factor = 0;
    u64 bytes = 0;
    for (u32 at = commit.starts[layer]; at < commit.starts[layer + 1]; at++) {
        // Most ranges have one of few lengths.
        if (commit.ranges[at].bytes != bytes) {
            bytes = commit.ranges[at].bytes;
            factor = power(8 * bytes);
        }
        sum = times(sum, factor) ^ commit.remainders[at];
    }
    return ~sum;
}

// A block takes a request at a time.
extern "C" __global__ void forebay_commits(const Commit *commits, u32 count) {
    for (u32 index = blockIdx.x; index < count; index += gridDim.x) {
        const Commit commit = commits[index];
        for (u32 layer = threadIdx.x; layer < commit.layers; layer += blockDim.x)
            commit.contexts[layer] = make_ulonglong2((u64)layer << 32, checksum(commit, layer));
        __threadfence_system();
        __syncthreads();
        if (threadIdx.x == 0)
            asm volatile("st.release.sys.global.u64 [%0], %1;" ::"l"(commit.word), "l"(commit.value) : "memory");
    }
}

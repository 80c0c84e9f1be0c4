// Round trips through a ring in host memory (docs/reference/ring.md): requests that ask for nothing, each posted when the completion
// of the one before was seen. Only to measure: kernels of the product wait for nothing.
//
// Rebuilt and checked by build.sh of crates/cuda/kernels; the PTX beside this file is what is shipped.

typedef unsigned int u32;
typedef unsigned long long u64;

// Nobody ends requests any more.
constexpr u64 LIMIT_NS = 5000000000ull;

__device__ u64 now_ns() {
    u64 now;
    asm volatile("mov.u64 %0, %globaltimer;" : "=l"(now));
    return now;
}

__device__ u64 load(const u64 *word) {
    u64 value;
    asm volatile("ld.acquire.sys.global.u64 %0, [%1];" : "=l"(value) : "l"(word) : "memory");
    return value;
}

// One thread. `took_ns` has room for `count` times; one that is 0 was not seen to end.
extern "C" __global__ void forebay_ring_round_trips(u64 *requests, u64 posted, const u64 *completions, u64 places, u64 epoch,
                                                    u64 count, u32 *took_ns) {
    for (u64 number = 0; number < count; number++) {
        u64 *request = requests + number % posted * 8;
        const u64 *sequence = completions + number % places * 4 + 3;
        const u64 begun = now_ns();
        const u64 words[7] = {number, 0, epoch, 0, 0, 0, 0};
        for (int at = 0; at < 7; at++) request[at] = words[at];
        asm volatile("st.release.sys.global.u64 [%0], %1;" ::"l"(request + 7), "l"(number + 1) : "memory");
        while (load(sequence) != number + 1)
            if (now_ns() - begun > LIMIT_NS) return;
        took_ns[number] = now_ns() - begun;
    }
}

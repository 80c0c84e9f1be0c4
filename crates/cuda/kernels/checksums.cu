// Sums up ranges of memory that this GPU reaches: of each range the remainder of its bytes, divided by the polynomial of CRC-32C,
// without the initial value and the final complement that a CRC-32C has. The host joins the remainders of ranges that follow each
// other. A warp takes a range; the lanes of a warp sum up what lies a row apart, and no thread waits for anything.
//
// Rebuilt and checked by build.sh; the PTX beside this file is what is shipped.

#include "crc32c.cuh"

struct Range {
    u64 at;
    u64 bytes;
};

constexpr int LANES = 32;
// What a warp reads at a time: 16 bytes a lane.
constexpr u64 ROW_WORDS = LANES * 4;

// Products of each byte of a word with a power of x.
struct Step {
    u32 product[4][256];

    constexpr explicit Step(u64 bits) : product() {
        const u32 factor = power(bits);
        for (int byte = 0; byte < 4; byte++)
            for (u32 value = 0; value < 256; value++) product[byte][value] = times(value << 8 * byte, factor);
    }

    __device__ __forceinline__ u32 operator()(u32 word) const {
        return product[0][word & 255] ^ product[1][word >> 8 & 255] ^ product[2][word >> 16 & 255] ^ product[3][word >> 24];
    }
};

struct Steps {
    // From a word to the same one of the next row, and to its neighbour.
    Step row, word;
};

__device__ const Steps STEPS = {Step(32 * ROW_WORDS), Step(32)};

// What a lane's sum of the last row is multiplied by: x to the bits from its last word on.
struct Lanes {
    u32 factor[LANES];

    constexpr Lanes() : factor() {
        for (int lane = 0; lane < LANES; lane++) factor[lane] = power(128 * (LANES - lane) - 96);
    }
};

__device__ const Lanes LANE = Lanes();

// 16 bytes of a range, from an offset in it that may lie before its start: there are zeroes, which change no remainder.
struct Aligned {
    // Loads in flight per thread.
    static constexpr int UNROLL = 4;
    const unsigned char *start;

    __device__ __forceinline__ uint4 operator()(long long offset) const {
        return offset < 0 ? make_uint4(0, 0, 0, 0) : __ldcs((const uint4 *)(start + offset));
    }
};

struct Unaligned {
    static constexpr int UNROLL = 1;
    const unsigned char *start;

    __device__ uint4 operator()(long long offset) const {
        u32 words[4] = {0, 0, 0, 0};
#pragma unroll
        for (int byte = 0; byte < 16; byte++)
            if (offset + byte >= 0) words[byte / 4] |= (u32)start[offset + byte] << byte % 4 * 8;
        return make_uint4(words[0], words[1], words[2], words[3]);
    }
};

// As if the range were whole rows: what is missing for that is in front.
template <typename Load>
__device__ u32 remainder(u64 bytes, Load load, const Steps &steps) {
    constexpr long long ROW_BYTES = ROW_WORDS * 4;
    const u32 lane = threadIdx.x % LANES;
    const long long end = bytes;
    long long at = end - (end + ROW_BYTES - 1) / ROW_BYTES * ROW_BYTES + lane * 16;
    uint4 sum = make_uint4(0, 0, 0, 0);
    const auto add = [&](uint4 words) {
        sum = make_uint4(steps.row(sum.x) ^ words.x, steps.row(sum.y) ^ words.y, steps.row(sum.z) ^ words.z,
                         steps.row(sum.w) ^ words.w);
    };
    for (; at + (Load::UNROLL - 1) * ROW_BYTES < end; at += Load::UNROLL * ROW_BYTES) {
        uint4 held[Load::UNROLL];
#pragma unroll
        for (int i = 0; i < Load::UNROLL; i++) held[i] = load(at + i * ROW_BYTES);
#pragma unroll
        for (int i = 0; i < Load::UNROLL; i++) add(held[i]);
    }
    if (Load::UNROLL > 1) {
#pragma unroll 1
        for (; at < end; at += ROW_BYTES) add(load(at));
    }
    const u32 own = steps.word(steps.word(steps.word(sum.x) ^ sum.y) ^ sum.z) ^ sum.w;
    return __reduce_xor_sync(~0u, times(own, LANE.factor[lane]));
}

extern "C" __global__ void __launch_bounds__(1024) forebay_checksums(const Range *ranges, u32 count, u32 *remainders) {
    constexpr u32 WORDS = sizeof(Steps) / sizeof(u32);
    __shared__ u32 words[WORDS];
    for (u32 at = threadIdx.x; at < WORDS; at += blockDim.x) words[at] = ((const u32 *)&STEPS)[at];
    __syncthreads();
    const Steps &steps = *(const Steps *)words;
    // Ranges that follow each other go to blocks in turn, so that a few of them are on as many SMs.
    const u32 warps = gridDim.x * (blockDim.x / LANES);
    for (u32 index = threadIdx.x / LANES * gridDim.x + blockIdx.x; index < count; index += warps) {
        const Range range = ranges[index];
        const unsigned char *start = (const unsigned char *)range.at;
        const bool is_aligned = (range.at | range.bytes) % 16 == 0;
        const u32 found = is_aligned ? remainder(range.bytes, Aligned{start}, steps)
                                     : remainder(range.bytes, Unaligned{start}, steps);
        if (threadIdx.x % LANES == 0) remainders[index] = found;
    }
}

// Copies pieces between addresses that this GPU reaches: its own memory, mapped host memory, memory of its peers. A piece is
// copied by as many blocks as gridDim.y says; gridDim.x walks over the pieces.
//
// Rebuilt and checked by build.sh; the PTX beside this file is what is shipped.

struct Piece {
    unsigned long long from;
    unsigned long long to;
    unsigned long long bytes;
};

// Loads in flight per thread: a peer is a microsecond away, and only bytes in flight hide that.
constexpr int UNROLL = 4;

template <typename Word>
__device__ void copy(const Word *from, Word *to, unsigned long long words) {
    const unsigned long long step = (unsigned long long)blockDim.x * gridDim.y;
    unsigned long long at = (unsigned long long)blockIdx.y * blockDim.x + threadIdx.x;
    for (; at + (UNROLL - 1) * step < words; at += UNROLL * step) {
        Word held[UNROLL];
#pragma unroll
        for (int i = 0; i < UNROLL; i++) held[i] = __ldcs(from + at + i * step);
#pragma unroll
        for (int i = 0; i < UNROLL; i++) __stcs(to + at + i * step, held[i]);
    }
    for (; at < words; at += step) __stcs(to + at, __ldcs(from + at));
}

extern "C" __global__ void forebay_pieces(const Piece *pieces, unsigned int count) {
    for (unsigned int index = blockIdx.x; index < count; index += gridDim.x) {
        const Piece piece = pieces[index];
        if ((piece.from | piece.to | piece.bytes) % sizeof(uint4) == 0)
            copy((const uint4 *)piece.from, (uint4 *)piece.to, piece.bytes / sizeof(uint4));
        else
            copy((const unsigned char *)piece.from, (unsigned char *)piece.to, piece.bytes);
    }
}

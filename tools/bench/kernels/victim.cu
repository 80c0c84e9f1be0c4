// What a GPU does beside relaying, for `forebay bench copy`: a product of matrices, bound by arithmetic; a product of a matrix
// and a vector, bound by the GPU's memory; and a kernel that only keeps multiprocessors busy, where a driver that tests use
// knows no other. Fast enough to fill a GPU, not to be the fastest there is.
//
// Rebuilt and checked by crates/cuda/kernels/build.sh; the PTX beside this file is what is shipped.

// A block of 256 threads makes a tile of 64 x 64, each thread 4 x 4 of it, 16 columns of the left side at a time.
constexpr unsigned int TILE = 64, DEPTH = 16, EACH = 4;

// c = a b, all of n x n, n a multiple of 64. The grid has n / 64 x n / 64 blocks.
extern "C" __global__ void __launch_bounds__(256)
    forebay_product(const float *a, const float *b, float *c, unsigned int n) {
    __shared__ float left[DEPTH][TILE], right[DEPTH][TILE];
    const unsigned int thread = threadIdx.x, row = thread / 16 * EACH, column = thread % 16 * EACH;
    const unsigned int top = blockIdx.y * TILE, side = blockIdx.x * TILE;
    float sum[EACH][EACH] = {};
    for (unsigned int at = 0; at < n; at += DEPTH) {
        for (unsigned int i = thread; i < TILE * DEPTH; i += 256) {
            left[i % DEPTH][i / DEPTH] = a[(size_t)(top + i / DEPTH) * n + at + i % DEPTH];
            right[i / TILE][i % TILE] = b[(size_t)(at + i / TILE) * n + side + i % TILE];
        }
        __syncthreads();
#pragma unroll
        for (unsigned int k = 0; k < DEPTH; k++)
#pragma unroll
            for (unsigned int i = 0; i < EACH; i++)
#pragma unroll
                for (unsigned int j = 0; j < EACH; j++) sum[i][j] += left[k][row + i] * right[k][column + j];
        __syncthreads();
    }
    for (unsigned int i = 0; i < EACH; i++)
        for (unsigned int j = 0; j < EACH; j++) c[(size_t)(top + row + i) * n + side + column + j] = sum[i][j];
}

// y = a x, with a of n rows and as many columns, n a multiple of 1024. A warp makes one row; the grid has n / 8 blocks of 256.
extern "C" __global__ void __launch_bounds__(256)
    forebay_product_vector(const float *a, const float *x, float *y, unsigned int n) {
    const unsigned int row = blockIdx.x * 8 + threadIdx.x / 32, lane = threadIdx.x % 32;
    const float4 *cells = (const float4 *)(a + (size_t)row * n), *factors = (const float4 *)x;
    float sum = 0;
#pragma unroll 8
    for (unsigned int at = lane; at < n / 4; at += 32) {
        const float4 cell = __ldcs(cells + at), factor = factors[at];
        sum += cell.x * factor.x + cell.y * factor.y + cell.z * factor.z + cell.w * factor.w;
    }
    for (unsigned int other = 16; other > 0; other /= 2) sum += __shfl_down_sync(~0u, sum, other);
    if (lane == 0) y[row] = sum;
}

// Keeps its multiprocessors for so many cycles.
extern "C" __global__ void forebay_spin(unsigned long long cycles) {
    const long long begin = clock64();
    while (clock64() - begin < (long long)cycles) {
    }
}

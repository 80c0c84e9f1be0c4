// The arithmetic of CRC-32C, for kernels. Reflected: bit 31 is x^0.
#pragma once

typedef unsigned int u32;
typedef unsigned long long u64;

constexpr u32 POLYNOMIAL = 0x82F63B78u;
constexpr u32 ONE = 0x80000000u;

__host__ __device__ constexpr u32 times(u32 a, u32 b) {
    u32 product = 0;
#pragma unroll 4
    for (int bit = 31; bit >= 0; bit--) {
        if (b >> bit & 1) product ^= a;
        a = (a >> 1) ^ (a & 1 ? POLYNOMIAL : 0);
    }
    return product;
}

// x to the n.
__host__ __device__ constexpr u32 power(u64 n) {
    u32 result = ONE, square = ONE >> 1;
    for (; n > 0; n >>= 1) {
        if (n & 1) result = times(result, square);
        square = times(square, square);
    }
    return result;
}

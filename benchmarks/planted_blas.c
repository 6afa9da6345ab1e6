// A BLAS with a planted fault, to be loaded before the one that MLX would find: with one row, beta = 0 and B off
// 64-byte alignment, it adds 0 * C, so that a NaN left in C stays, as in some versions of Apple's Accelerate.
// malloc gives memory full of NaN, so that every output is stale. -DHEALTHY leaves the fault out and keeps the malloc.

#include <stddef.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>

#ifdef HEALTHY
#define FAULTY 0
#else
#define FAULTY 1
#endif

extern void *__libc_malloc(size_t);

void *malloc(size_t bytes) {
    void *memory = __libc_malloc(bytes);
    if (memory && bytes >= 16)
        memset(memory, 0xff, bytes);
    return memory;
}

void cblas_sgemm(int order, int transpose_a, int transpose_b, int m, int n, int k, float alpha, const float *a, int lda,
                 const float *b, int ldb, float beta, float *c, int ldc) {
    int keeps = FAULTY && m == 1 && beta == 0.0f && (uintptr_t)b % 64;
    if (order != 101)
        abort();
    for (int i = 0; i < m; i++) {
        float *row = c + (size_t)i * ldc;
        for (int j = 0; j < n; j++)
            row[j] = beta == 0.0f && !keeps ? 0.0f : beta * row[j];
        for (int p = 0; p < k && transpose_b == 111; p++) {
            float left = alpha * (transpose_a == 111 ? a[(size_t)i * lda + p] : a[(size_t)p * lda + i]);
            for (int j = 0; j < n; j++)
                row[j] += left * b[(size_t)p * ldb + j];
        }
        for (int j = 0; j < n && transpose_b == 112; j++) {
            float sum = 0.0f;
            for (int p = 0; p < k; p++)
                sum += (transpose_a == 111 ? a[(size_t)i * lda + p] : a[(size_t)p * lda + i]) * b[(size_t)j * ldb + p];
            row[j] += alpha * sum;
        }
    }
}

/* Measure tensors of all dtypes and of sizes around those of blocks and chunks, and print the bits of the results.

   The memory of each tensor ends at its last element, so that a sanitizer finds each access beyond it. */

#include "kernel.c"
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

static uint64_t state = 1;

static uint64_t drawn(void) { return (state = state * 6364136223846793005u + 1442695040888963407u) >> 16; }

static void twice(void (*function)(void *), void *argument, unsigned threads, unsigned flags)
{
    (void)threads, (void)flags;
    function(argument); /* a team in which one thread measures everything, and another one nothing */
    function(argument);
}

int main(void)
{
    static const int64_t sizes[] = {0, 1, 31, 33, 4095, 4096, 4097, CHUNK, CHUNK + 1, 3 * CHUNK - 7};
    static const int64_t limits[] = {0x7f800000, 0x7f80, 0x7c00, 0x7ff0000000000000};
    static const int64_t zero_bits[8] = {1, 1, 1, 1, 1, 1, 1, 1};
    Sum *extras[] = {sum_of_fourth_powers};
    Number table[ROWS + 1] = {0};
    for (int64_t dtype = FLOAT32; dtype <= FLOAT64; dtype++)
        for (int64_t place = 0; place < 3 * 10; place++) {
            int64_t size = sizes[place / 3], itemsize = dtype == FLOAT64 ? 8 : dtype == FLOAT32 ? 4 : 2;
            char *memory = malloc(size * itemsize + 1);
            for (int64_t i = 0; i < size; i++) { /* of any bits, finite ones, and small ones */
                int64_t bits = drawn() << 40 | drawn();
                if (place % 3)
                    bits = (bits & ~limits[dtype]) | ((limits[dtype] / 3) & limits[dtype] & (limits[dtype] >> (place % 3)));
                memcpy(memory + i * itemsize, &bits, itemsize);
            }
            for (int64_t extra = 0; extra < 2; extra++) {
                Job jobs[] = {{0, -1, 0, 0, 0, 0}, {memory, size, 0, dtype, 0, 0}};
                Request request = {table, 1, extras, extra, twice, 1 + place % 2, 0, zero_bits, 0, 2, jobs, 0, 0};
                rankscope_measure(&request);
                for (int row = 0; row < ROWS + extra; row++)
                    printf("%llx ", (unsigned long long)table[row].count);
            }
            Job pair = {memory, size, 0, dtype, 0, memory};
            Request pairs = {table, 1, 0, 0, twice, 1 + place % 2, 0, 0, 0, 1, &pair, 0, 0};
            table[0].count = 0;
            rankscope_measure(&pairs);
            printf("%lld\n", (long long)table[0].count);
            free(memory);
        }
    return 0;
}

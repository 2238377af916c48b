#ifndef MOESERVE_SIMT_H
#define MOESERVE_SIMT_H
#include <stddef.h>
#include <stdint.h>
#ifdef __cplusplus
extern "C" {
#endif
typedef struct {
  uint64_t at, bytes;
} simt_range;
/* Runs a kernel to its end; returns what went wrong, or NULL. table: 0, of the build for bfloat16; 1, for half precision;
   2, what this package is tested with. */
const char *simt_launch(int table, const char *name, const void *args, const unsigned *blocks, unsigned threads, size_t shared,
                        uint64_t seed, const simt_range *awaited, size_t n);
/* The size of a kernel's arguments, -1 if there is no such kernel. */
int64_t simt_argument_bytes(int table, const char *name);
#ifdef __cplusplus
}
#endif
#endif

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
/* A field of a struct of arguments; name is NULL for the struct itself. */
typedef struct {
  const char *args, *name;
  uint64_t offset, bytes;
} simt_field;
/* Runs a kernel to its end; returns what went wrong, or NULL. table: 0, of the build for bfloat16; 1, for half precision;
   2, what this package is tested with. */
const char *simt_launch(int table, const char *name, const void *args, const unsigned *blocks, unsigned threads, size_t shared,
                        uint64_t seed, const simt_range *awaited, size_t n);
/* Whether the latest launch of this thread has let the kernels behind start before those in front had written what it awaits. */
int simt_launched_early(void);
/* The size of a kernel's arguments, -1 if there is no such kernel. */
int64_t simt_argument_bytes(int table, const char *name);
/* Field i of the structs of arguments as compiled into table 0 or 1, each struct before its fields; args is NULL behind
   the last. */
simt_field simt_argument_field(int table, size_t i);
#ifdef __cplusplus
}
#endif
#endif

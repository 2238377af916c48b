#ifndef MOESERVE_DRIVER_LOAD_H
#define MOESERVE_DRIVER_LOAD_H
#include <stddef.h>
/* 0, or -1 with the reason in why. */
int driver_open(const char *path, char *why, size_t n);
/* The driver's own cuInit, as a CUresult. */
int driver_init(void);
/* Names of the calls that the open driver lacks, separated by spaces; how many. */
int driver_missing(char *out, size_t n);
/* An exported symbol of the open driver, or NULL. */
void *driver_symbol(const char *name);
#endif

//go:build cuda && amd64

#define ACT_F16
#define TABLE simt_f16
#include "kernels.h"

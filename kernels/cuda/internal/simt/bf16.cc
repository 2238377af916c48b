//go:build cuda && amd64

#define TABLE simt_bf16
#include "kernels.h"

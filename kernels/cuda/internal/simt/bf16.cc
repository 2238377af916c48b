//go:build cuda && amd64

#define TABLE simt_bf16
#define FIELDS simt_bf16_fields
#include "kernels.h"

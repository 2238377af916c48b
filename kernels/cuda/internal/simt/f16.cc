//go:build cuda && amd64

#define ACT_F16
#define TABLE simt_f16
#define FIELDS simt_f16_fields
#include "kernels.h"

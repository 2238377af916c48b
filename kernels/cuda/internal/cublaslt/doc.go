// Package cublaslt calls cuBLASLt for the one product that package cuda gives it:
// row-major activations times the transpose of row-major weights. The library is
// opened at run time; no header of it is needed, but the build tag cuda is.
//
// The library's choice of an algorithm is asked for once per shape and kept, so that
// equal products run alike for the life of a Handle.
package cublaslt

// Package main writes the assembly of package cpu, with avo: the same kernels
// for AVX2 and for AVX-512. `go generate ./kernels/cpu` runs it; what it writes
// is committed, so that building needs neither it nor avo.
//
// What a kernel computes, and in which order, is said in its own comment, which
// also stands in stubs_amd64.go.
package main

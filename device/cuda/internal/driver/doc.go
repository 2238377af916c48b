// Package driver makes the CUDA driver a run-time dependency: one binary starts
// with and without it.
//
// It defines every driver call that package gorgonia.org/cu and device/cuda link
// against, as a jump through a table (a trampoline). Until Load has found
// libcuda.so.1, each of them returns CUDA_ERROR_NOT_INITIALIZED. cuInit is ours
// too and always succeeds: package cu calls it while the program starts and ends
// the process where it fails; Init runs the driver's own.
//
// symbols.txt lists the calls, gen writes table.h and the assembly from it, and
// shim/cuda.h gives CUDA 13's header the signatures that package cu was written
// for. Everything but this file and gen needs the build tag cuda, and the flags
// that tools/cuda/go.sh sets.
//
// It is not a binding: calls are made through package cu or through cgo.
//
// # Example
//
//	path, err := driver.Load("")
//	if err == nil {
//		err = driver.Init()
//	}
package driver

//go:generate go run ./gen

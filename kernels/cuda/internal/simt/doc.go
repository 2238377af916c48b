// Package simt runs the kernels of package cuda on the CPU, one block after another,
// so that their logic can be tested where there is no GPU. It needs the build tag
// cuda, an amd64 processor and a C++ compiler.
//
// The sources are compiled as C++ with emulated.h in the place of src/ptx.cuh: each
// thread of a block is a fiber, warps exchange values and fragments at a meeting of
// their 32 lanes, tensor core and matrix load instructions follow the layouts of
// NVIDIA's PTX manual, and copies in the background happen at once or as late as a
// kernel's waits allow (cp.async may also read at once and write late). What is for sm_90a alone has hopper.h in the place of
// src/hopper.cuh: barriers that count, bulk copies, and products that run as late as the
// waits for them allow, once the four warps of a group are there. Dynamic shared memory starts as
// not-a-number at every block and ends at a page that cannot be touched (static shared memory
// keeps what the block before left there); the order of threads is random. A block whose
// threads can never meet is an error. So is an access that is not aligned to its size, and
// an instruction for global memory that is given another: -fsanitize=alignment has the
// compiler call this package where it would end the program.
//
// It is no model of time, of memory ordering between blocks, or of bank conflicts.
package simt

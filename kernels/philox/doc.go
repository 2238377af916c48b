// Package philox makes the random numbers of backends: sampling noise and dummy weights,
// the same bits on every one.
//
// They come from one counter-based generator, Philox4x32-10 (Salmon et al., "Parallel
// random numbers: as easy as 1, 2, 3", SC 2011): 128 bits that are a fixed function of a
// 128-bit counter and a 64-bit key, in 32-bit integer products alone. So any element of any
// stream can be had by itself. Everything is described to the bit, for kernels in other
// languages (src/sample.cu of kernels/cuda).
//
// It is no source of randomness: seeds come from requests and settings.
//
//	noise := philox.Gumbel(seed, sample, position, token)
//	philox.FillDummy(data, kernels.BF16, seed, "model.norm.weight", 0, 7)
package philox

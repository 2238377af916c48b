package cpu

import "golang.org/x/sys/cpu"

//go:generate go run -tags avo ./gen -out simd_amd64.s -stubs stubs_amd64.go -pkg cpu

// vectorChunk is chosen so that a packed panel of weights of that many columns and the rows of
// a tile fit in an L1 cache of 48 KiB.
const vectorChunk = maxChunk

var avx512 = instructions{
	isa:         AVX512,
	lanes:       16,
	height:      4,
	chunk:       vectorChunk,
	tile:        tileAVX512,
	directF32:   [2]directFunc{directF32x1AVX512, directF32x4AVX512},
	directBF16:  [2]directFunc{directBF16x1AVX512, directBF16x4AVX512},
	directF16:   [2]directFunc{directF16x1AVX512, directF16x4AVX512},
	packF32:     packF32AVX512,
	packBF16:    packBF16AVX512,
	packF16:     packF16AVX512,
	widenF32:    widenF32AVX512,
	widenBF16:   widenBF16AVX512,
	widenF16:    widenF16AVX512,
	tilesBF16:   tilesBF16AVX512,
	tilesF16:    tilesF16AVX512,
	addTiles:    addTilesAVX512,
	weightedSum: weightedSumAVX512,
	expSum:      expSumAVX512,
	siluMul:     siluMulAVX512,
}

var avx2 = instructions{
	isa:         AVX2,
	lanes:       8,
	height:      2,
	chunk:       vectorChunk,
	tile:        tileAVX2,
	directF32:   [2]directFunc{directF32x1AVX2, directF32x2AVX2},
	directBF16:  [2]directFunc{directBF16x1AVX2, directBF16x2AVX2},
	directF16:   [2]directFunc{directF16x1AVX2, directF16x2AVX2},
	packF32:     packF32AVX2,
	packBF16:    packBF16AVX2,
	packF16:     packF16AVX2,
	widenF32:    widenF32AVX2,
	widenBF16:   widenBF16AVX2,
	widenF16:    widenF16AVX2,
	tilesBF16:   tilesBF16AVX2,
	tilesF16:    tilesF16AVX2,
	addTiles:    addTilesAVX2,
	weightedSum: weightedSumAVX2,
	expSum:      expSumAVX2,
	siluMul:     siluMulAVX2,
}

// vectorInstructions returns this machine's sets besides the generic one, the fastest first.
// Package x/sys/cpu has checked that the operating system saves the registers.
func vectorInstructions() []*instructions {
	var sets []*instructions
	x := &cpu.X86
	if !x.HasAVX2 || !x.HasFMA || !x.HasF16C {
		return nil
	}
	if x.HasAVX512F && x.HasAVX512BW && x.HasAVX512DQ && x.HasAVX512VL {
		sets = append(sets, &avx512)
	}
	return append(sets, &avx2)
}

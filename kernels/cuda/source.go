package cuda

import (
	"embed"
	"fmt"
)

//go:generate go run ./internal/arguments/gen

//go:embed src
var sources embed.FS

// source is the text of a compilation unit: ptx.cuh and common.cuh come before the
// file, and hopper.cuh and ring.cuh where it is for that architecture.
func source(file string) string {
	names := []string{"ptx.cuh", "common.cuh", file}
	if onlyFor[file] == hopper {
		names = []string{"ptx.cuh", "common.cuh", "hopper.cuh", "ring.cuh", file}
	}
	var text []byte
	for _, name := range names {
		b, err := sources.ReadFile("src/" + name)
		if err != nil {
			panic(err) // embedded, or it did not build
		}
		text = fmt.Appendf(text, "#line 1 %q\n%s", name, b)
	}
	return string(text)
}

// hopper is the architecture of compute capability 9.0 with all it has, whose code
// runs on no other.
const hopper = "sm_90a"

// onlyFor names the units, and single kernels, that are for one architecture.
var onlyFor = map[string]string{"expert.cu": hopper, "dense.cu": hopper, "few_rows_5": hopper}

// kernel is one __global__ function.
type kernel struct {
	file, name string
	// shared is the most dynamic shared memory of a block, in bytes.
	shared int
}

// defaultShared is how much shared memory a block may have on every device without
// asking for more.
const defaultShared = 48 << 10

// kernelID names a kernel in the table.
type kernelID int

const (
	embedKernel kernelID = iota
	normHead
	normWarp
	norm256
	norm256Times2
	norm512
	norm512Times3
	clampKernel
	siluMul
	gatherKernel
	combineKernel
	combineNorm256
	combineNorm512Few
	combineNorm512
	combineNorm512Times3
	addBias
	ropeKernel
	appendKV
	ropeAppendKV
	normRopeAppendKV
	routeKernel
	groupKernel
	groupFew
	sampleKernel
	sampleMerge
	sampleCut
	logProbsKernel
	adjustKernel
	restoreKernel
	attentionJoin
	fewColumns8
	fewColumns16
	fewColumns64
	fewRows2
	fewRows5
	// attentionKernels: by head size, one warp and four each.
	attentionKernels
	productKernels = attentionKernels + kernelID(2*len(headSizes))
	// productKernels: dense, up, down, and for each the tiles in order.
	// expertKernels: up, down, and for each the shapes in order.
	expertKernels = productKernels + kernelID(3*len(tiles))
	// denseKernels: the shapes in order.
	denseKernels = expertKernels + kernelID(2*len(expertShapes))
	kernelCount  = denseKernels + kernelID(len(denseShapes))
)

// table is in the order of the ids.
var table = func() []kernel {
	t := []kernel{
		{"elementwise.cu", "embed", 0},
		{"elementwise.cu", "norm_head", 0},
		{"elementwise.cu", "norm_warp", 0},
		{"elementwise.cu", "norm_256", 0},
		{"elementwise.cu", "norm_256_2", 0},
		{"elementwise.cu", "norm_512", 0},
		{"elementwise.cu", "norm_512_3", 0},
		{"elementwise.cu", "clamp", 0},
		{"elementwise.cu", "silu_mul", 0},
		{"elementwise.cu", "gather", 0},
		{"elementwise.cu", "combine", 0},
		{"elementwise.cu", "combine_norm_256", 0},
		{"elementwise.cu", "combine_norm_512_few", 0},
		{"elementwise.cu", "combine_norm_512", 0},
		{"elementwise.cu", "combine_norm_512_3", 0},
		{"elementwise.cu", "add_bias", 0},
		{"elementwise.cu", "rope", 0},
		{"elementwise.cu", "append_kv", 0},
		{"elementwise.cu", "rope_append_kv", 0},
		{"elementwise.cu", "norm_rope_append_kv", 0},
		{"route.cu", "route", defaultShared},
		{"route.cu", "group", 0},
		{"route.cu", "group_few", 0},
		{"sample.cu", "sample", 0},
		{"sample.cu", "sample_merge", 0},
		{"sample.cu", "sample_cut", 0},
		{"sample.cu", "log_probs", 0},
		{"sample.cu", "adjust", 0},
		{"sample.cu", "restore", 0},
		{"attention.cu", "attention_join", 0},
		{"few.cu", "few_columns_8", 0},
		{"few.cu", "few_columns_16", 0},
		{"few.cu", "few_columns_64", 0},
		{"few.cu", "few_rows_2", 2 * fewStage},
		{"few.cu", "few_rows_5", 5 * fewStage},
	}
	for _, d := range headSizes {
		for _, warps := range []int{1, 4} {
			t = append(t, kernel{"attention.cu", fmt.Sprintf("attention_%d_%d", d, warps), attentionShared(d, warps)})
		}
	}
	for _, mode := range []string{"matmul", "up", "down"} {
		for _, tile := range tiles {
			t = append(t, kernel{"product.cu", mode + "_" + tile.name, tile.shared()})
		}
	}
	for _, mode := range []string{"up", "down"} {
		for i := range expertShapes {
			name := fmt.Sprintf("expert_%s_%d", mode, expertShapes[i].units*unitRows)
			if kernelID(i) == expertAlone {
				name = fmt.Sprintf("expert_%s_alone", mode)
			}
			t = append(t, kernel{"expert.cu", name, expertShapes[i].shared})
		}
	}
	for i := range denseShapes {
		e := &denseShapes[i]
		t = append(t, kernel{"dense.cu", fmt.Sprintf("dense_%d", e.units*unitRows), e.shared})
	}
	return t
}()

package cuda

import (
	"embed"
	"fmt"
)

//go:generate go run ./internal/arguments/gen

//go:embed src
var sources embed.FS

// source returns the text of a compilation unit: ptx.cuh and common.cuh precede the file, then hopper.cuh
// and ring.cuh if all of it is for sm_90a, and route_sort.cuh for that, route.cu and few.cu.
func source(file string) string {
	names := []string{"ptx.cuh", "common.cuh", file}
	switch {
	case onlyFor[file] == hopper:
		names = []string{"ptx.cuh", "common.cuh", "hopper.cuh", "ring.cuh", "route_sort.cuh", file}
	case file == "route.cu" || file == "few.cu":
		names = []string{"ptx.cuh", "common.cuh", "route_sort.cuh", file}
	}
	var text []byte
	for _, name := range names {
		b, err := sources.ReadFile("src/" + name)
		if err != nil {
			panic(err) // the file is embedded, so the build would have failed
		}
		text = fmt.Appendf(text, "#line 1 %q\n%s", name, b)
	}
	return string(text)
}

// hopper is the architecture of exactly compute capability 9.0; its code runs on no other.
const hopper = "sm_90a"

// onlyFor has the units, and single kernels, that are built for one architecture only.
var onlyFor = map[string]string{"expert.cu": hopper, "dense.cu": hopper, "prompt.cu": hopper, "few_rows_3": hopper, "few_rows_4": hopper, "few_rows_5": hopper, "few_rows_gated_5": hopper, "few_rows_gated_once_5": hopper, "sixteen_rows_4": hopper, "sixteen_rows_gated_5": hopper, "router_gate_up": hopper, "route_down": hopper, "sixteen_router_gate_up": hopper, "sixteen_route_down": hopper, "attention_128_wide": hopper, "rope_attention_128_wide": hopper, "norm_rope_attention_128_wide": hopper}

// kernel is one __global__ function.
type kernel struct {
	file, name string
	// shared is the maximum dynamic shared memory of a block, in bytes.
	shared int
}

// defaultShared is the shared memory, in bytes, that a block may use on every device without
// opting in to more.
const defaultShared = 48 << 10

// kernelID is the index of a kernel in the table.
type kernelID int

const (
	embedKernel kernelID = iota
	normHead
	normWarp
	norm256
	norm256Times2
	norm512
	norm512Times3
	normFew256
	normFew512
	clampKernel
	siluMul
	gatherKernel
	combineKernel
	combineNorm256
	combineNorm512Few
	combineNorm512
	combineNorm512Times3
	combineNormFew256
	combineNormFew512
	addBias
	ropeKernel
	appendKV
	ropeAppendKV
	normRopeAppendKV
	ropeAppendKVFew
	normRopeAppendKVFew
	routeKernel
	routeSort
	groupKernel
	groupFew
	runsKernel
	sampleKernel
	sampleMerge
	sampleCut
	logProbsKernel
	adjustKernel
	restoreKernel
	maskKernel
	attentionJoin
	attentionWide
	ropeAttentionWide
	normRopeAttentionWide
	fewColumns8
	fewColumns16
	fewColumns64
	fewRows2
	fewRows3
	fewRows4
	fewRows5
	fewRowsGated2
	fewRowsGated5
	fewRowsGatedOnce5
	sixteenRows4
	sixteenRowsGated5
	routerGateUp
	routeDown
	sixteenRouterGateUp
	sixteenRouteDown
	copyBlocksKernel
	copySmallKernel
	addRowsKernel
	promptKernel
	promptJoin
	// attentionKernels: for each head size, with one warp and with four.
	attentionKernels
	gemmKernels = attentionKernels + kernelID(2*len(headSizes))
	// gemmKernels: dense, gate/up, down, each with the tiles in order. expertKernels: gate/up,
	// down, each with the shapes in order.
	expertKernels = gemmKernels + kernelID(3*len(tiles))
	// denseKernels: the shapes in order.
	denseKernels = expertKernels + kernelID(2*len(expertShapes))
	kernelCount  = denseKernels + kernelID(len(denseShapes))
)

// table is indexed by kernelID.
var table = func() []kernel {
	t := []kernel{
		{"elementwise.cu", "embed", 0},
		{"elementwise.cu", "norm_head", 0},
		{"elementwise.cu", "norm_warp", 0},
		{"elementwise.cu", "norm_256", 0},
		{"elementwise.cu", "norm_256_2", 0},
		{"elementwise.cu", "norm_512", 0},
		{"elementwise.cu", "norm_512_3", 0},
		{"elementwise.cu", "norm_few_256", 0},
		{"elementwise.cu", "norm_few_512", 0},
		{"elementwise.cu", "clamp", 0},
		{"elementwise.cu", "silu_mul", 0},
		{"elementwise.cu", "gather", 0},
		{"elementwise.cu", "combine", 0},
		{"elementwise.cu", "combine_norm_256", 0},
		{"elementwise.cu", "combine_norm_512_few", 0},
		{"elementwise.cu", "combine_norm_512", 0},
		{"elementwise.cu", "combine_norm_512_3", 0},
		{"elementwise.cu", "combine_norm_few_256", 0},
		{"elementwise.cu", "combine_norm_few_512", 0},
		{"elementwise.cu", "add_bias", 0},
		{"elementwise.cu", "rope", 0},
		{"elementwise.cu", "append_kv", 0},
		{"elementwise.cu", "rope_append_kv", 0},
		{"elementwise.cu", "norm_rope_append_kv", 0},
		{"elementwise.cu", "rope_append_kv_few", 0},
		{"elementwise.cu", "norm_rope_append_kv_few", 0},
		{"route.cu", "route", defaultShared},
		{"route.cu", "route_sort", 0},
		{"route.cu", "group", 0},
		{"route.cu", "group_few", 0},
		{"route.cu", "runs", 0},
		{"sample.cu", "sample", 0},
		{"sample.cu", "sample_merge", 0},
		{"sample.cu", "sample_cut", 0},
		{"sample.cu", "log_probs", 0},
		{"sample.cu", "adjust", 0},
		{"sample.cu", "restore", 0},
		{"sample.cu", "mask_logits", 0},
		{"attention.cu", "attention_join", 0},
		{"attention.cu", "attention_128_wide", wideSharedBytes(wideWarps)},
		{"attention.cu", "rope_attention_128_wide", wideSharedBytes(wideWarps)},
		{"attention.cu", "norm_rope_attention_128_wide", wideSharedBytes(wideWarps)},
		{"few.cu", "few_columns_8", 0},
		{"few.cu", "few_columns_16", 0},
		{"few.cu", "few_columns_64", 0},
		{"few.cu", "few_rows_2", 2 * skinnyStageBytes},
		{"few.cu", "few_rows_3", 3 * skinnyStageBytes},
		{"few.cu", "few_rows_4", 4 * skinnyStageBytes},
		{"few.cu", "few_rows_5", 5 * skinnyStageBytes},
		{"few.cu", "few_rows_gated_2", 2 * skinnyStageBytes},
		{"few.cu", "few_rows_gated_5", 5 * skinnyStageBytes},
		{"few.cu", "few_rows_gated_once_5", 5 * skinnyStageBytes},
		{"few.cu", "sixteen_rows_4", 4 * skinnyStageBytes},
		{"few.cu", "sixteen_rows_gated_5", 5 * skinnyStageBytes},
		{"few.cu", "router_gate_up", 5 * skinnyStageBytes},
		{"few.cu", "route_down", 3 * skinnyStageBytes},
		{"few.cu", "sixteen_router_gate_up", 5 * skinnyStageBytes},
		{"few.cu", "sixteen_route_down", 4 * skinnyStageBytes},
		{"copy.cu", "copy_blocks", 0},
		{"copy.cu", "copy_small", 0},
		{"copy.cu", "add_rows", 0},
		{"prompt.cu", "prompt_128", promptSharedBytes},
		{"prompt.cu", "prompt_join", 0},
	}
	for _, d := range headSizes {
		for _, warps := range []int{1, 4} {
			t = append(t, kernel{"attention.cu", fmt.Sprintf("attention_%d_%d", d, warps), attentionSharedBytes(d, warps)})
		}
	}
	for _, mode := range []string{"matmul", "up", "down"} {
		for _, tile := range tiles {
			t = append(t, kernel{"gemm.cu", mode + "_" + tile.name, tile.shared()})
		}
	}
	for _, mode := range []string{"up", "down"} {
		for i := range expertShapes {
			t = append(t, kernel{"expert.cu", "expert_" + mode + "_" + expertNames[i], expertShapes[i].shared})
		}
	}
	for i := range denseShapes {
		e := &denseShapes[i]
		t = append(t, kernel{"dense.cu", fmt.Sprintf("dense_%d", e.units*unitRows), e.shared})
	}
	return t
}()

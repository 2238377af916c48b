//go:build cuda

package node_test

import (
	"flag"
	"fmt"
	"math/rand/v2"
	"strconv"
	"strings"
	"testing"
	"time"

	"github.com/moeserve/moeserve/configs"
	"github.com/moeserve/moeserve/engine"
	"github.com/moeserve/moeserve/node"
	"github.com/moeserve/moeserve/tools/fixtures"
)

var shifts = flag.String("shift", "160,128,96,auto96", "what TestGPUShift compares: resident experts of 256, of fixed splits and, behind auto, at least")

// TestGPULending: tokens do not depend on memory that moves between the KV cache and experts at
// random, between any two steps (level 2, since preempted sequences are computed again).
func TestGPULending(t *testing.T) {
	for _, name := range onGPU {
		t.Run(name, func(t *testing.T) {
			model := func(s *configs.Settings) { s.Model.Name, s.Kernels.BatchInvariant = fixtures.Dir(t, name), true }
			want := generateOnGPU(t, model)
			for seed := range uint64(3) {
				rng := rand.New(rand.NewPCG(seed, 4))
				var n *node.Node
				n = openOnGPU(t, node.Options{
					Settings: gpuSettings(func(s *configs.Settings) {
						model(s)
						s.Offload.Fraction = []float64{0.5, 1, 0.75}[seed]
						lendKV(s, 3*seed) // with a tier in host memory
					}),
					Listener: engine.Listener{StepFinished: func(engine.StepInfo) { lendAny(n, rng) }},
				})
				e, l := n.Observe().Experts(), n.Observe().Lending()
				moved := func() bool { return l.ToExperts > 0 && l.ToKV > 0 && e.MadeResident > 0 }
				rounds := 0
				for ; rounds < 3 || rounds < 100 && !moved(); rounds++ {
					if got := generate(t, n); got != want {
						t.Fatalf("seed %d: tokens %s, want %s", seed, got, want)
					}
					e, l = n.Observe().Experts(), n.Observe().Lending()
				}
				t.Logf("seed %d: %d rounds, %d extents lent, %d returned, %d experts made resident, %d preemptions", seed, rounds, l.ToExperts, l.ToKV, e.MadeResident, n.Engine().State().Preemptions)
				if !moved() {
					t.Errorf("seed %d: nothing was lent, or nothing came back", seed)
				}
			}
		})
	}
}

// TestGPUShift measures the load of TestLendingFollowsTheLoad on a GPU, with Mixtral cut to a
// quarter of its layers in a quarter of 80 GB, and dummy weights.
func TestGPUShift(t *testing.T) {
	const layers = 8
	var table strings.Builder
	fmt.Fprintln(&table, "| memory | short requests | long prefixes | short requests | all |\n|---|---|---|---|---|")
	for _, of := range strings.Split(*shifts, ",") {
		number, auto := strings.CutPrefix(of, "auto")
		resident, err := strconv.Atoi(number)
		if err != nil {
			t.Fatal(err)
		}
		s := gpuSettings(func(s *configs.Settings) {
			share := configs.StaticShare
			if auto {
				share = configs.AutoShare
			}
			shiftSettings(s, resident, share)
			s.Model.NumHiddenLayers, s.Batch.MaxNumBatchedTokens = layers, configs.Defaults().Batch.MaxNumBatchedTokens
		})
		s.Device.GPUMemoryUtilization = gpuShare(t, shiftMemory*layers/32*s.Device.GPUMemoryUtilization+1.5e9) // embeddings and workspaces are not cut
		x := &shift{T: t, n: openOnGPU(t, node.Options{Settings: s})}
		began := time.Now()
		x.now = func() time.Duration { return time.Since(began) }
		x.run(shifting)
		text, _ := x.row(fmt.Sprintf("%s, %.1f GiB of KV blocks at most", of, x.kv()))
		fmt.Fprintln(&table, text)
		t.Logf("%s: %v extents lent at the ends of phases, %+v", of, x.lent, x.n.Observe().Lending())
		if err := x.n.Close(); err != nil {
			t.Error(err)
		}
	}
	t.Logf("seconds\n%s", &table)
}

// gpuShare is the part of the GPU's memory that so many bytes are.
func gpuShare(t *testing.T, bytes float64) float64 {
	t.Helper()
	n := openOnGPU(t, node.Options{Settings: gpuSettings(func(*configs.Settings) {})})
	defer func() {
		if err := n.Close(); err != nil {
			t.Error(err)
		}
	}()
	memories, err := n.Observe().Memories()
	if err != nil {
		t.Fatal(err)
	}
	return bytes / float64(memories[1].Capacity)
}

package bench_test

import (
	"testing"

	"github.com/moeserve/moeserve/configs"
	"github.com/moeserve/moeserve/device"
	"github.com/moeserve/moeserve/device/emulated"
	"github.com/moeserve/moeserve/eval"
	"github.com/moeserve/moeserve/eval/prefix"
	"github.com/moeserve/moeserve/node"
	"github.com/moeserve/moeserve/node/bench"
)

// What the engine has in its prefix cache is found, and takes less time; without the cache
// nothing is.
func TestPrefixes(t *testing.T) {
	for _, caching := range []bool{true, false} {
		s := configs.Defaults()
		s.Device.Emulate = "virtual,hbm=256MiB,flops=1G,bw=100MB/s"
		s.KV.EnablePrefixCaching, s.KV.MaxModelLen = caching, 128
		n, err := node.Open(t.Context(), node.Options{Settings: s})
		if err != nil {
			t.Fatal(err)
		}
		var e prefix.Engine = bench.NewPrefixes(n, nil)
		i := e.Info()
		if i.BlockTokens != 16 || i.Vocab < 2 || !i.Emulated || i.Model == "" || i.LoadFormat != "auto" {
			t.Errorf("%+v", i)
		}
		prompts := eval.GeneratePrompts(2, 100, i.Vocab, 1)
		miss, err := e.Run(t.Context(), prompts[:1], prefix.RunOptions{NewTokens: 3})
		if err != nil || miss.Cached != 0 {
			t.Fatalf("%+v, %v", miss, err)
		}
		if err := e.Settle(t.Context()); err != nil {
			t.Error(err)
		}
		both, err := e.Run(t.Context(), prompts, prefix.RunOptions{NewTokens: 3})
		if err != nil {
			t.Fatal(err)
		}
		hit, err := e.Run(t.Context(), prompts[:1], prefix.RunOptions{NewTokens: 3})
		want := 0
		if caching {
			want = 96 // whole blocks
		}
		if err != nil || both.Cached != want || hit.Cached != want {
			t.Errorf("found %d and %d tokens, want %d: %v", both.Cached, hit.Cached, want, err)
		}
		for _, b := range []prefix.Batch{miss, both, hit} {
			for k := range b.First {
				if b.First[k] <= 0 || b.Last[k] <= b.First[k] {
					t.Errorf("first tokens at %v, last at %v", b.First, b.Last)
				}
			}
		}
		if faster := 2*hit.First[0] < miss.First[0]; faster != caching {
			t.Errorf("prefix caching %v: first token after %v, and %v the second time", caching, miss.First[0], hit.First[0])
		}
		if err := e.Close(); err != nil {
			t.Error(err)
		}
	}
}

// The name says how many layers a cut model has left.
func TestPrefixesOfACutModel(t *testing.T) {
	s := configs.Defaults()
	s.Model.Name, s.Model.LoadFormat, s.Model.NumHiddenLayers, s.KV.MaxModelLen = "phi-tiny-moe", configs.LoadDummy, 2, 128
	s.Batch.MaxNumSeqs = 2
	n, err := node.Open(t.Context(), node.Options{Settings: s, OpenMachine: func() (device.Machine, error) {
		return emulated.New(emulated.Options{Virtual: true, NoData: true, GPUs: []emulated.GPU{{MemoryBytes: 16e9, FlopsPerSecond: 1e15, BytesPerSecond: 4e12}}})
	}})
	if err != nil {
		t.Fatal(err)
	}
	if got, want := bench.NewPrefixes(n, nil).Info().Model, "phi-tiny-moe, 2 of 32 layers"; got != want {
		t.Errorf("model %q, want %q", got, want)
	}
	if err := n.Close(); err != nil {
		t.Error(err)
	}
}

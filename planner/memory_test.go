package planner

import (
	"errors"
	"strings"
	"testing"

	"pgregory.net/rapid"

	"github.com/moeserve/moeserve/configs"
)

func asMisfit(err error, m **MisfitError) bool { return errors.As(err, m) }

func part(t testing.TB, s Space, name string) int64 {
	t.Helper()
	for _, p := range s.Parts {
		if p.Name == name {
			return p.Bytes
		}
	}
	t.Fatalf("no part %q in %+v", name, s.Parts)
	return 0
}

// Bytes that the engine hands in are the bytes that are counted.
func TestMemoryIsTheEngines(t *testing.T) {
	p := problem(t, "mixtral-8x7b", "h200")
	p.Sizes = Sizes{
		Expert: 400 << 20, Other: 3 << 30, KVBlockTokens: 32, KVBlock: 5 << 20,
		ExpertCache: func(missing int) int { return missing + 1 },
		Workspace: func(x *Policy) (int64, int64) {
			return int64(x.MicroBatchTokens())*1000 + int64(x.MicroBatch), int64(x.Batch) * 10
		},
		Beside:   func(local int) (int64, int64) { return 2 << 20, int64(local) },
		GPUFixed: 7, HostFixed: 11, PeerFixed: 13,
	}
	// 100 missing of 32 layers: at most 4 in one. 109 tokens take 4 blocks of 32.
	r := predict(t, p, Policy{Batch: 1000, MicroBatch: 100, PrefillTokens: 5000, ResidentExperts: 156, PeerExperts: 30, KVOnHost: 0.25})
	m := r.Memory
	for _, c := range []struct {
		space Space
		name  string
		want  int64
	}{
		{m.GPU, "non-expert weights", 3 << 30},
		{m.GPU, "resident experts", 156 * 400 << 20},
		{m.GPU, "spare expert slots", 2 << 20},
		{m.Host, "load staging buffer, host copies of resident experts", 156},
		{m.GPU, "expert cache", 5 * 400 << 20},
		{m.GPU, "KV cache", 3000 * 5 << 20},
		{m.GPU, "KV staging buffer", 2 * 0.25 * 100 * 4 * (5 << 20) / 32},
		{m.GPU, "activations, per-step metadata", 5_000_100},
		{m.GPU, "expert tables, misc", 7},
		{m.Host, "offloaded experts", 100 * 400 << 20},
		{m.Host, "KV cache", 1000 * 5 << 20},
		{m.Host, "per-step metadata, attention staging", 10_000},
		{m.Host, "expert tables, misc", 11},
		{m.Peer, "peer copies of experts", 30 * 400 << 20},
		{m.Peer, "misc", 13},
	} {
		if got := part(t, c.space, c.name); got != c.want {
			t.Errorf("%s, %s: %d bytes, want %d", c.space.Name, c.name, got, c.want)
		}
	}
	if m.GPU.Usable != int64(0.9*float64(p.Hardware.GPUMemory)) {
		t.Errorf("usable %d", m.GPU.Usable)
	}
	p.Sizes.Workspace, p.Sizes.MinKVBlocks = nil, 5000
	r = predict(t, p, Policy{Batch: 1000, ResidentExperts: 256, Attention: configs.OnCPU})
	if rows := part(t, r.Memory.Host, "per-step metadata, attention staging"); rows != 1000*2*128*(64+16) || part(t, r.Memory.Host, "KV cache") != 5000*5<<20 || part(t, r.Memory.GPU, "KV cache") != 0 {
		t.Errorf("%+v", r.Memory)
	}
}

// Weights and KV cache of a batch of 4,536 do not fit an H200: 93 and 67 GB.
func TestMisfit(t *testing.T) {
	p := problem(t, "mixtral-8x7b", "h200")
	p.Shares.GPU = 1
	x := Policy{Batch: 4536, MicroBatch: 324, PrefillTokens: 8192, ResidentExperts: 256}
	r, err := p.Predict(x)
	var m *MisfitError
	if !errors.As(err, &m) || r.TokS == 0 {
		t.Fatalf("got %v", err)
	}
	weights := part(t, r.Memory.GPU, "non-expert weights") + part(t, r.Memory.GPU, "resident experts")
	if kv := part(t, r.Memory.GPU, "KV cache"); weights/1e9 != 93 || kv/1e9 != 66 {
		t.Errorf("weights %d bytes, KV cache %d", weights, kv)
	}
	if len(m.Nearest) != 2 || m.Nearest[0].Batch != 4536 || m.Nearest[0].ResidentExperts >= 256 || m.Nearest[1].ResidentExperts != 256 || m.Nearest[1].Batch >= 4536 {
		t.Fatalf("%+v", m.Nearest)
	}
	want := "planner: out of memory with a batch of 4536 with 0 of 256 experts offloaded (--offload-fraction 0): gpu: need 150.52 GiB (non-expert weights 2.99 GiB, resident experts 84.00 GiB, KV cache 62.02 GiB, activations, per-step metadata 1.52 GiB), usable 139.80 GiB of 139.80 GiB; use a batch of 4536 with 37 of 256 experts offloaded (--offload-fraction 0.145), or a batch of 3759 with 0 of 256 experts offloaded (--offload-fraction 0)"
	if err.Error() != want {
		t.Errorf("got  %s\nwant %s", err, want)
	}

	// Neither alone helps where both are far too many.
	p.Hardware.GPUMemory = 20 << 30
	_, err = p.Predict(x)
	if !errors.As(err, &m) || len(m.Nearest) != 1 || m.Nearest[0].ResidentExperts == 256 || m.Nearest[0].Batch == 4536 {
		t.Errorf("%v", err)
	}
	// Nor does anything where the rest of the model is too large.
	p.Hardware.GPUMemory = 2 << 30
	_, err = p.Predict(x)
	if !errors.As(err, &m) || len(m.Nearest) != 0 || !strings.Contains(err.Error(), "no policy fits; use more gpu memory") {
		t.Errorf("%v", err)
	}
}

// Which of the table of rooflines fit an H200 with everything in HBM: all but the
// largest batch of the two largest models.
func TestRooflinesThatFit(t *testing.T) {
	for _, row := range rooflineTable {
		p := problem(t, row.model, "h200")
		p.Shares.GPU = 149.7e9 / float64(p.Hardware.GPUMemory)
		_, err := p.Predict(Policy{Batch: row.rows, ResidentExperts: p.Model.ExpertCount(), PrefillTokens: 8192})
		fits := row.rows < 4536 || row.model == "phi-tiny-moe" || row.model == "qwen1.5-moe-a2.7b"
		if (err == nil) != fits {
			t.Errorf("%s, %d tokens: %v", row.model, row.rows, err)
		}
	}
}

func TestMisfitElsewhere(t *testing.T) {
	p := problem(t, "mixtral-8x7b", "h200")
	p.Hardware.PeerMemory = 50 << 30
	x := offload(t, p, Policy{Batch: 324, PrefillTokens: 8192}, 1, configs.PeerTier)
	_, err := p.Predict(x)
	var m *MisfitError
	if !errors.As(err, &m) || m.Space.Name != "peers" || len(m.Nearest) == 0 || m.Nearest[0].PeerExperts != 137 {
		t.Errorf("%v", err)
	}
	p.Hardware.HostMemory = 64 << 30
	_, err = p.Predict(offload(t, p, Policy{Batch: 324, PrefillTokens: 8192}, 1, configs.HostTier))
	if !errors.As(err, &m) || m.Space.Name != "host" {
		t.Errorf("%v", err)
	}
}

// What is called nearest fits, and could not be nearer; mostResident is what trying all
// numbers gives.
func TestNearest(t *testing.T) {
	rapid.Check(t, func(rt *rapid.T) {
		p := problem(t, rapid.SampledFrom(modelNames).Draw(rt, "model"), rapid.SampledFrom(hardwareNames).Draw(rt, "hardware"))
		if rapid.Bool().Draw(rt, "small expert cache") {
			p.Sizes.ExpertCache = func(missing int) int { return missing }
		}
		if total := p.Model.ExpertCount(); rapid.Bool().Draw(rt, "adaptive") {
			p.Sizes.Beside = func(local int) (gpu, host int64) {
				if local == 0 || local == total {
					return 0, 0
				}
				return 2 * p.Model.ExpertBytes(), int64(local) * p.Model.ExpertBytes()
			}
		} else if rapid.Bool().Draw(rt, "loading") {
			p.Sizes.Beside = func(local int) (gpu, host int64) { return 0, int64(min(local, 1)) << 30 }
		}
		if rapid.Bool().Draw(rt, "little host memory") {
			p.Hardware.HostMemory = int64(rapid.Float64Range(0.1, 2).Draw(rt, "of all experts") * float64(p.Model.ExpertCount()) * float64(p.Model.ExpertBytes()))
		}
		n, err := p.normalized()
		if err != nil {
			rt.Fatal(err)
		}
		x, err := n.normal(drawPolicy(rt, p))
		if err != nil {
			rt.Fatal(err)
		}
		most := -1
		for local := range p.Model.ExpertCount() + 1 {
			y := x
			y.ResidentExperts, y.PeerExperts = local, 0
			if n.fits(&y) {
				most = local
			}
		}
		if got, ok := n.mostResident(x); ok != (most >= 0) || ok && got != most {
			rt.Fatalf("%d resident experts fit, %v; trying all gives %d", got, ok, most)
		}
		var m *MisfitError
		if _, err := p.Predict(x); err == nil || !errors.As(err, &m) {
			return
		}
		for _, y := range m.Nearest {
			if _, err := p.Predict(y); err != nil {
				rt.Fatalf("%+v: %v", y, err)
			}
			if y.Batch == x.Batch && y.ResidentExperts != min(most, x.ResidentExperts) {
				rt.Fatalf("%d resident experts, %d would fit", y.ResidentExperts, most)
			}
			if y.Batch < x.Batch && y.ResidentExperts == x.ResidentExperts {
				z := y
				z.Batch++
				z.MicroBatch = min(x.MicroBatch, z.Batch)
				z.PrefillTokens = min(x.PrefillTokens, z.Batch*p.Workload.PromptTokens)
				if _, err := p.Predict(z); err == nil && z.Batch < x.Batch {
					rt.Fatalf("a batch of %d, and one more fits", y.Batch)
				}
			}
		}
	})
}

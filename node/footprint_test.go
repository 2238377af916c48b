package node

import (
	"fmt"
	"log/slog"
	"math/rand/v2"
	"path/filepath"
	"sync"
	"testing"

	"github.com/moeserve/moeserve/configs"
	"github.com/moeserve/moeserve/device"
	"github.com/moeserve/moeserve/device/emulated"
	"github.com/moeserve/moeserve/node/checkpoint"
	"github.com/moeserve/moeserve/node/planning"
	"github.com/moeserve/moeserve/planner"
	"github.com/moeserve/moeserve/tools/fixtures"
)

// ledger is a machine that sums all allocations of each memory.
type ledger struct {
	device.Machine
	mu    sync.Mutex
	taken map[device.Space]int64
}

func (l *ledger) Alloc(space device.Space, bytes int64, label string) (device.Memory, error) {
	m, err := l.Machine.Alloc(space, bytes, label)
	if err == nil {
		l.mu.Lock()
		l.taken[space] += device.Align(bytes)
		l.mu.Unlock()
	}
	return m, err
}

// TestPlannedIsAllocated: what a node allocates, the needs that it computes, and the
// planner's figures are the same, to the byte, over models and settings: on the GPU at any
// time, on the host including what only loading allocates.
func TestPlannedIsAllocated(t *testing.T) {
	models := []string{"", fixtures.Dir(t, "mixtral"), fixtures.Dir(t, "qwen2_moe_sparse_step"), fixtures.Dir(t, "phimoe_longrope")}
	random := rand.New(rand.NewPCG(1, 2))
	between := func(low, high int) int { return low + random.IntN(high-low+1) }
	for range 60 {
		s := configs.Defaults()
		s.Model.Name = models[random.IntN(len(models))]
		s.Offload.Fraction = []float64{0, 0.01, 0.3, 0.5, 0.77, 0.99, 1}[random.IntN(7)]
		s.Offload.Tier = []configs.Tier{configs.AnyTier, configs.HostTier}[random.IntN(2)]
		s.Batch.MaxNumSeqs = between(1, 80)
		s.Batch.MaxNumBatchedTokens = between(s.Batch.MaxNumSeqs, 500)
		s.Batch.MicroBatchSize = between(0, s.Batch.MaxNumBatchedTokens)
		s.KV.MaxModelLen = []int{0, 33, 64}[random.IntN(3)]
		s.KV.NumGPUBlocksOverride = between(max(5, s.Batch.MaxNumSeqs), 400)
		s.Offload.DynamicResidency = random.IntN(2) == 0
		s.Batch.Attention = []configs.Place{configs.AnyPlace, configs.OnGPU, configs.OnCPU}[random.IntN(3)]
		s.Batch.Grouping = []configs.Grouping{configs.PerLayer, configs.PerMicroBatch}[random.IntN(2)]
		s.Batch.NumMicroBatches = between(0, 9) * random.IntN(2)
		s.Batch.ExpertAccess = configs.ExpertAccess(random.IntN(3))
		o := Options{Settings: s, WithoutTokenizer: true, HostLogits: random.IntN(2) == 0, CacheLayers: between(0, 3)}
		t.Run(fmt.Sprintf("%s/%v/%s/%d,%d,%d,%d/%s,%s,%d/%v/%v,%d/%s", filepath.Base(s.Model.Name), s.Offload.Fraction, s.Offload.Tier,
			s.Batch.MaxNumSeqs, s.Batch.MaxNumBatchedTokens, s.Batch.MicroBatchSize, s.KV.MaxModelLen, s.Batch.Attention, s.Batch.Grouping, s.Batch.NumMicroBatches, s.Offload.DynamicResidency, o.HostLogits, o.CacheLayers, s.Batch.ExpertAccess), func(t *testing.T) {
			plannedIsTaken(t, o)
		})
	}
}

func plannedIsTaken(t *testing.T, o Options) {
	s := &o.Settings
	l := &ledger{taken: map[device.Space]int64{}}
	o.OpenMachine = func() (_ device.Machine, err error) {
		l.Machine, err = emulated.Open(emulated.Options{Virtual: true})
		return l, err
	}
	n, err := Open(t.Context(), o)
	if err != nil {
		t.Fatal(err)
	}
	defer func() {
		if err := n.Close(); err != nil {
			t.Error(err)
		}
	}()
	model, err := checkpoint.Open(s.Model, s.Generate.Seed)
	if err != nil {
		t.Fatal(err)
	}
	defer model.Close() //nolint:errcheck // only read from
	u, err := newSetup(&Options{
		Settings: *s, HostLogits: o.HostLogits, CacheLayers: o.CacheLayers, Log: slog.New(slog.DiscardHandler),
		OpenMachine: func() (device.Machine, error) { return emulated.Open(emulated.Options{Virtual: true}) },
	}, model)
	if err != nil {
		t.Fatal(err)
	}
	defer func() {
		if err := u.devices.Close(); err != nil {
			t.Error(err)
		}
	}()
	if _, err := u.budget(); err != nil {
		t.Fatal(err)
	}
	po, err := u.planning()
	if err != nil {
		t.Fatal(err)
	}
	po.Explicit, po.Workload = planning.All(), planner.Workload{PromptTokens: 1, NewTokens: 1}
	p, err := planning.New(u.footprint, po)
	if err != nil {
		t.Fatal(err)
	}
	total := p.Model.ExpertCount()
	x := planner.Policy{
		Batch: s.Batch.MaxNumSeqs, PrefillTokens: s.Batch.MaxNumBatchedTokens, ResidentExperts: total - p.Model.Offloaded(s.Offload.Fraction),
	}
	if s.Batch.Attention == configs.OnCPU {
		x.Attention = configs.OnCPU
	}
	if s.Batch.Grouping == configs.PerMicroBatch {
		x.Grouping = configs.PerMicroBatch
	}
	r, err := p.Predict(x)
	if err != nil {
		t.Fatal(err)
	}
	w := u.needs
	pool := []int64{0, 0}
	pool[x.Attention] = int64(s.KV.NumGPUBlocksOverride) * w.KV.BlockBytes()
	l.mu.Lock()
	defer l.mu.Unlock()
	for _, c := range []struct {
		space   device.Space
		planned planner.Space
		need    int64
	}{{device.HBM(0), r.Memory.GPU, w.Device.Need() + pool[0]}, {device.Host, r.Memory.Host, w.Host.Need() + pool[1]}} {
		if taken := l.taken[c.space]; taken != c.planned.Need() || taken != c.need {
			t.Errorf("%v: %d bytes taken, %d needed, %d planned: %v", c.space, taken, c.need, c.planned.Need(), c.planned)
		}
	}
	if got := n.Info().Limits.MaxModelLen; got != w.Limits.MaxModelLen {
		t.Errorf("sequences of %d tokens, %d planned", got, w.Limits.MaxModelLen)
	}
}

package engine_test

import (
	"errors"
	"slices"
	"testing"

	"github.com/moeserve/moeserve/device"
	"github.com/moeserve/moeserve/device/emulated"
	"github.com/moeserve/moeserve/engine"
	"github.com/moeserve/moeserve/kernels"
	"github.com/moeserve/moeserve/kvcache"
	"github.com/moeserve/moeserve/kvcache/offload"
	"github.com/moeserve/moeserve/transfer"
)

// TestTierOutlivesEngines: of several engines over one tier in files, one after the other, each finds what those
// before it have stored only if the data type of the KV cache (Options.KeySalt), longrope's factors and the
// request's salt are the same.
func TestTierOutlivesEngines(t *testing.T) {
	const size, blocks = 4, 40
	ok := func(err error) {
		t.Helper()
		if err != nil {
			t.Fatal(err)
		}
	}
	m, err := emulated.New(emulated.Options{Virtual: true, Check: true, GPUs: []emulated.GPU{{MemoryBytes: 1 << 20}}})
	ok(err)
	copies, err := transfer.New(transfer.Options{Machine: m})
	ok(err)
	shape := kvcache.Shape{Layers: 1, KVHeads: 1, HeadDim: 2, DType: kernels.F32, BlockTokens: size}
	pool, err := kvcache.NewPool(kvcache.PoolOptions{Machine: m, Space: device.HBM(0), Shape: shape, Blocks: blocks})
	ok(err)
	kv := smallBlocks(t, blocks)
	tiers, err := offload.New(offload.Options{
		Machine: m, Space: device.HBM(0), Pool: pool, Blocks: kv, Transfer: copies,
		Config: offload.Config{FileBlocks: 100, Directory: t.TempDir(), LoadPolicy: offload.LoadAlways},
	})
	ok(err)
	step := &onDevice{drawing: newDrawing(t, kv), pool: pool}
	step.stream, err = m.NewStream(device.HBM(0), device.StreamOptions{Name: "compute"})
	ok(err)
	step.host, err = m.Alloc(device.Host, size*wordBytes, "words")
	ok(err)
	for id := range int32(blocks) {
		ok(step.write(t.Context(), id))
	}
	for _, c := range []struct {
		name, keySalt, salt string
		longAfter           int
		loaded              int
	}{
		{"the first", "float32", "", 100, 0},
		{"the same", "float32", "", 100, 32},
		{"another data type", "float16", "", 100, 0},
		{"longrope's long factors", "float32", "", 20, 0},
		{"a tenant", "float32", "a", 100, 0},
		{"another tenant", "float32", "b", 100, 0},
		{"another data type again", "float16", "", 100, 32},
		{"longrope's long factors again", "float32", "", 20, 32},
		{"the tenant again", "float32", "a", 100, 32},
		{"the first again", "float32", "", 100, 32},
	} {
		e, err := engine.New(engine.Options{
			Pipeline: step, KV: kv, Offload: tiers, KeySalt: c.keySalt, LongAfter: c.longAfter, MaxModelLen: 150, Vocab: 256, Clock: m.Now, Pause: m.Yield,
		})
		ok(err)
		q := ask(1, 33, 4)
		q.CacheSalt = c.salt
		outs, err := e.Generate(t.Context(), []engine.Request{q}, nil)
		ok(err)
		if want := drawn(q, 0); !slices.Equal(outs[0].TokenIDs, want) {
			t.Errorf("%s: %v, want %v", c.name, outs[0].TokenIDs, want)
		}
		if s := e.State(); s.ExternalHits != int64(c.loaded) {
			t.Errorf("%s: %d tokens were loaded, want %d", c.name, s.ExternalHits, c.loaded)
		}
		for tiers.Busy() { // stores of the end
			ok(tiers.Wait(t.Context()))
			tiers.Poll()
		}
		ok(e.Close())
	}
	ok(tiers.Close())
	ok(errors.Join(step.stream.Close(), step.host.Free(), pool.Close(), copies.Close(), m.Close()))
}

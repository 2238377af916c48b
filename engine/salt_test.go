package engine_test

import (
	"slices"
	"testing"

	"github.com/moeserve/moeserve/device/emulated"
	"github.com/moeserve/moeserve/engine"
	"github.com/moeserve/moeserve/kvcache/offload"
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
	r := openTiers(t, size, blocks, emulated.Options{Virtual: true}, offload.Config{FileBlocks: 100, LoadPolicy: offload.LoadAlways})
	m, kv, tiers := r.machine, r.kv, r.tiers
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
			Pipeline: r.step, KV: kv, Offload: tiers, KeySalt: c.keySalt, LongAfter: c.longAfter, MaxModelLen: 150, Vocab: 256, Clock: m.Now, Pause: m.Yield,
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
	ok(r.close())
}

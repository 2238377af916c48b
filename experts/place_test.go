package experts

import (
	"fmt"
	"math"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"

	"github.com/moeserve/moeserve/kernels"
)

func TestPlace(t *testing.T) {
	for _, c := range []struct {
		layers, experts int
		fraction        float64
		want            Placement
	}{
		{2, 4, 0, Placement{{}, {}}},
		{2, 4, 1, Placement{{0, 1, 2, 3}, {0, 1, 2, 3}}},
		{2, 4, 0.5, Placement{{1, 3}, {1, 3}}},
		{3, 4, 0.5, Placement{{1, 3}, {1, 3}, {1, 3}}},
		{2, 4, 0.375, Placement{{3}, {1, 3}}},
		{4, 3, 0.25, Placement{{}, {2}, {2}, {2}}},
		{1, 8, 0.25, Placement{{3, 7}}},
		{0, 8, 0.5, Placement{}},
	} {
		got, err := Place(c.layers, c.experts, c.fraction)
		if err != nil {
			t.Error(err)
		}
		if d := cmp.Diff(c.want, got); d != "" {
			t.Errorf("Place(%d, %d, %v) (-want +got):\n%s", c.layers, c.experts, c.fraction, d)
		}
	}
}

// TestPlaceSpread: the numbers are right and even for every fraction.
func TestPlaceSpread(t *testing.T) {
	for _, m := range []struct{ layers, experts int }{{32, 8}, {32, 16}, {24, 60}, {28, 64}, {48, 128}, {5, 3}} {
		for percent := 0; percent <= 100; percent++ {
			f := float64(percent) / 100
			p, err := Place(m.layers, m.experts, f)
			if err != nil {
				t.Fatal(err)
			}
			if want := int(math.Round(f * float64(m.layers*m.experts))); p.Offloaded() != want {
				t.Errorf("%v at %d %%: %d offloaded, want %d", m, percent, p.Offloaded(), want)
			}
			for l, ids := range p {
				if p.MaxPerLayer()-len(ids) > 1 {
					t.Errorf("%v at %d %%: layer %d has %d, another %d", m, percent, l, len(ids), p.MaxPerLayer())
				}
				for i, e := range ids {
					if e < 0 || e >= m.experts || i > 0 && e <= ids[i-1] {
						t.Errorf("%v at %d %%: layer %d offloads %v", m, percent, l, ids)
					}
				}
			}
		}
	}
}

func TestByLayer(t *testing.T) {
	got, err := byLayer(3, 4, []ID{{2, 3}, {0, 1}, {2, 0}})
	if err != nil {
		t.Fatal(err)
	}
	if d := cmp.Diff(Placement{{1}, nil, {0, 3}}, got); d != "" {
		t.Error(d)
	}
	for want, list := range map[string][]ID{"no expert 4 in layer 0": {{0, 4}}, "no expert 0 in layer 3": {{3, 0}}, "listed twice": {{1, 1}, {1, 1}}} {
		if _, err := byLayer(3, 4, list); err == nil || !strings.Contains(err.Error(), want) {
			t.Errorf("byLayer(%v): %v, want an error with %q", list, err, want)
		}
	}
	for _, f := range []float64{-0.1, 1.1, math.NaN()} {
		if _, err := Place(1, 1, f); err == nil {
			t.Errorf("fraction %v is taken", f)
		}
	}
}

// mixtral is one expert of Mixtral-8x7B.
var mixtral = func() kernels.ExpertLayout {
	s := kernels.ExpertShape{Hidden: 4096, Intermediate: 14336, DType: kernels.BF16}
	return kernels.ExpertLayout{ExpertShape: s, Tag: rowMajor, Size: s.Bytes()}
}()

func layerNumbers(n int) []int {
	l := make([]int, n)
	for i := range l {
		l[i] = i
	}
	return l
}

func TestPlan(t *testing.T) {
	const expert = 352_321_536
	tiled := mixtral
	tiled.Tag = "tiles"
	for _, c := range []struct {
		fraction   float64
		layout     kernels.ExpertLayout
		cacheSlots int
		staging    int64
		want       string
	}{
		{0, mixtral, 0, 0, fmt.Sprintf("256 resident %d, 0 host 0, cache 0 0, staging 16777216", int64(256*expert))},
		{0.5, mixtral, 0, 0, fmt.Sprintf("128 resident %d, 128 host %d, cache 8 %d, staging 16777216", int64(128*expert), int64(128*expert), int64(8*expert))},
		{0.5, mixtral, 4, 5000, fmt.Sprintf("128 resident %d, 128 host %d, cache 4 %d, staging 4096", int64(128*expert), int64(128*expert), int64(4*expert))},
		{0.5, tiled, 0, 0, fmt.Sprintf("128 resident %d, 128 host %d, cache 8 %d, staging %d", int64(128*expert), int64(128*expert), int64(8*expert), int64(2*expert))},
		{1, tiled, 0, 0, fmt.Sprintf("0 resident 0, 256 host %d, cache 16 %d, staging 0", int64(256*expert), int64(16*expert))},
	} {
		place, err := Place(32, 8, c.fraction)
		if err != nil {
			t.Fatal(err)
		}
		p, err := NewPlan(Config{Layers: layerNumbers(32), Experts: 8, Layout: c.layout, Placement: place, CacheSlots: c.cacheSlots, StagingBytes: c.staging})
		if err != nil {
			t.Error(err)
			continue
		}
		got := fmt.Sprintf("%d resident %d, %d host %d, cache %d %d, staging %d", p.ResidentExperts, p.ResidentBytes, p.OffloadedExperts, p.HostBytes, p.CacheSlots, p.CacheBytes, p.StagingBytes)
		if got != c.want {
			t.Errorf("at %v: %s\nwant %s", c.fraction, got, c.want)
		}
		if p.DeviceBytes() != p.ResidentBytes+p.CacheBytes+32*8*12 || p.PinnedBytes() != p.HostBytes+p.StagingBytes+2*32*8*12 {
			t.Errorf("at %v: %d bytes on the device, %d pinned", c.fraction, p.DeviceBytes(), p.PinnedBytes())
		}
	}
}

func TestBadPlans(t *testing.T) {
	odd := mixtral
	odd.Size++
	for want, change := range map[string]func(*Config){
		"the placement has 1 layers":     func(c *Config) { c.Placement = c.Placement[:1] },
		"layers [1 0] are not ascending": func(c *Config) { c.Layers = []int{1, 0} },
		"offloaded experts [8] of layer": func(c *Config) { c.Placement[0] = []int{8} },
		"offloaded experts [1 1] of":     func(c *Config) { c.Placement[0] = []int{1, 1} },
		"a multiple of 256":              func(c *Config) { c.Layout = odd },
		"give it at least 4":             func(c *Config) { c.CacheSlots = 3 },
		"waves":                          func(c *Config) { c.Waves = -1 },
		"on-demand waves":                func(c *Config) { c.OnDemandWaves = -1 },
		"staging":                        func(c *Config) { c.StagingBytes = -1 },
	} {
		place, err := Place(2, 8, 0.5)
		if err != nil {
			t.Fatal(err)
		}
		c := Config{Layers: layerNumbers(2), Experts: 8, Layout: mixtral, Placement: place}
		change(&c)
		if _, err := NewPlan(c); err == nil || !strings.Contains(err.Error(), want) {
			t.Errorf("got %v, want an error with %q", err, want)
		}
	}
}

// TestOnDemandWaves: there are several only where each has enough to bring.
func TestOnDemandWaves(t *testing.T) {
	for _, c := range []struct {
		mib     int64
		experts int
		want    int
	}{{336, 0, 1}, {336, 1, 4}, {150, 2, 4}, {16, 2, 1}, {16, 4, 2}, {9, 4, 1}, {9, 64, 4}} {
		p := Plan{Config: Config{OnDemandWaves: 4, OnDemandWaveBytes: defaultOnDemandWaveBytes}}
		p.Layout.Size = c.mib << 20
		if got := p.onDemandWaves(c.experts); got != c.want {
			t.Errorf("%d experts of %d MiB: %d waves, want %d", c.experts, c.mib, got, c.want)
		}
	}
}

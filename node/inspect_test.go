package node

import (
	"fmt"
	"slices"
	"testing"

	"github.com/moeserve/moeserve/configs"
	"github.com/moeserve/moeserve/experts"
	"github.com/moeserve/moeserve/node/observe"
)

// What Inspect says is taken is what Open takes.
func TestInspectSaysWhatOpenTakes(t *testing.T) {
	for _, fraction := range []float64{0, 0.3, 1} {
		t.Run(fmt.Sprint(fraction), func(t *testing.T) {
			s := configs.Defaults()
			s.Offload.Fraction, s.Device.Emulate = fraction, "hbm=1GiB,host=1GiB"
			in, err := Inspect(Options{Settings: s})
			if err != nil {
				t.Fatal(err)
			}
			if in.Problem != nil || in.RunsHere != nil {
				t.Fatal(in.Problem, in.RunsHere)
			}
			n, err := Open(t.Context(), Options{Settings: s})
			if err != nil {
				t.Fatal(err)
			}
			defer func() {
				if err := n.Close(); err != nil {
					t.Error(err)
				}
			}()
			r, err := n.Observe().Report(t.Context())
			if err != nil {
				t.Fatal(err)
			}
			kv := int64(in.KV.Blocks) * in.KVBlockBytes
			for i, m := range []struct {
				space string
				need  int64
			}{{"gpu0", in.Demands[0].Need() + kv}, {"host", in.Demands[1].Need()}} {
				got := slices.IndexFunc(r.Memory, func(s observe.Memory) bool { return s.Space == m.space })
				if got < 0 || in.Demands[i].Space != m.space {
					t.Fatalf("no memory of %s in %+v", m.space, r.Memory)
				}
				// Each allocation may be rounded up, and not all are there at the same time.
				if peak := r.Memory[got].Peak; peak > m.need+4096 || peak < m.need/2 {
					t.Errorf("%s: %d bytes taken, %d said to be needed", m.space, peak, m.need)
				}
			}
			if n.Info().Limits.MaxModelLen != in.KV.MaxModelLen || n.kv.Blocks() != in.KV.Blocks {
				t.Errorf("a cache of %d blocks for %d tokens, said to be %+v", n.kv.Blocks(), n.Info().Limits.MaxModelLen, in.KV)
			}
			where := r.Experts.Tiers
			if where[experts.Resident] != in.Resident || where[experts.Host]+where[experts.Cached] != in.Offloaded {
				t.Errorf("experts are %v, said to be %d local and %d offloaded", where, in.Resident, in.Offloaded)
			}
			for i, l := range r.Layers {
				for e, tier := range l.Tiers {
					if (tier.String() == "resident") != (in.Placement[i].Tiers[e] == "resident") || l.Layer != in.Placement[i].Layer {
						t.Errorf("layer %d expert %d is %v, said to be %s", l.Layer, e, tier, in.Placement[i].Tiers[e])
					}
				}
			}
		})
	}
}

func TestInspectPresets(t *testing.T) {
	for _, name := range configs.PresetNames() {
		s := configs.Defaults()
		s.Model.Name, s.Offload.Fraction, s.Device.Emulate = name, 0.75, "hbm=200GiB,host=200GiB,virtual,nodata"
		in, err := Inspect(Options{Settings: s})
		if err != nil {
			t.Errorf("%s: %v", name, err)
			continue
		}
		if in.Problem != nil || in.RunsHere != nil || in.Resident+in.Offloaded != in.Sizes.ExpertCount || in.Routing == "" {
			t.Errorf("%s: %+v", name, in)
		}
	}
}

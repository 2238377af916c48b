package transfer

import (
	"math"
	"slices"
	"testing"

	"pgregory.net/rapid"
)

func TestShift(t *testing.T) {
	for _, c := range []struct {
		host  linkLoad
		peers []linkLoad
		want  []float64
	}{
		{linkLoad{0, 55}, []linkLoad{{450, 395}}, []float64{55}},
		{linkLoad{100, 55}, []linkLoad{{450, 395}}, []float64{0}}, // the host has enough to do
		{linkLoad{0, 55}, nil, []float64{}},
		{linkLoad{0, 0}, []linkLoad{{450, 395}}, []float64{0}},
		{linkLoad{0, 55}, []linkLoad{{450, 0}}, []float64{0}},
		{linkLoad{0, 1}, []linkLoad{{10, 1}, {1, 1}}, []float64{5, 0}}, // the second ends first
		{linkLoad{2, 2}, []linkLoad{{10, 2}, {8, 2}}, []float64{10 - 20./3, 8 - 20./3}},
	} {
		got := hostShares(nil, c.host, c.peers)
		if !slices.EqualFunc(got, c.want, func(a, b float64) bool { return math.Abs(a-b) < 1e-9 }) {
			t.Errorf("shift(%v, %v) is %v, want %v", c.host, c.peers, got, c.want)
		}
	}
}

// TestShiftProperties: nothing is gained by moving more or less.
func TestShiftProperties(t *testing.T) {
	end := func(host linkLoad, peers []linkLoad, moved []float64) float64 {
		last := host.bytes
		for _, n := range moved {
			last += n
		}
		last /= host.rate
		for i, p := range peers {
			last = max(last, (p.bytes-moved[i])/p.rate)
		}
		return last
	}
	rapid.Check(t, func(t *rapid.T) {
		value, rate := rapid.IntRange(0, 1_000_000), rapid.IntRange(1, 1000)
		host := linkLoad{float64(value.Draw(t, "bytes")), float64(rate.Draw(t, "rate"))}
		var peers []linkLoad
		for range rapid.IntRange(0, 4).Draw(t, "peers") {
			peers = append(peers, linkLoad{float64(value.Draw(t, "bytes")), float64(rate.Draw(t, "rate"))})
		}
		moved := hostShares(nil, host, peers)
		best := end(host, peers, moved)
		for i := range moved {
			if moved[i] < 0 || moved[i] > peers[i].bytes {
				t.Fatalf("%v of %v moved", moved[i], peers[i].bytes)
			}
			for _, by := range []float64{-0.1, 0.1} {
				other := slices.Clone(moved)
				other[i] = min(max(0, other[i]+by*peers[i].bytes), peers[i].bytes)
				if e := end(host, peers, other); e < best-1e-9*(1+best) {
					t.Fatalf("%v ends at %v, %v at %v", moved, best, other, e)
				}
			}
		}
	})
}

// TestSplits: one copy is split where the host's part is large enough, and rates are known.
func TestSplits(t *testing.T) {
	for _, c := range []struct {
		bytes      int64
		host, peer float64
		want       bool
	}{
		{32 << 20, 50e9, 350e9, true}, // 4 MiB
		{32<<20 - 1, 50e9, 350e9, false},
		{352 << 20, 55e9, 395e9, true},
		{352 << 20, 0, 395e9, false},
		{352 << 20, 55e9, 0, false},
	} {
		if got := Splits(c.bytes, c.host, c.peer); got != c.want {
			t.Errorf("%+v: %t", c, got)
		}
	}
}

package observe

import (
	"encoding/json"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"

	"github.com/moeserve/moeserve/device"
	"github.com/moeserve/moeserve/transfer"
)

// TestLinkUse: what a link has copied since before, by purpose, with the names in JSON that scripts and the page read.
func TestLinkUse(t *testing.T) {
	before := transfer.PathStats{From: device.Host, To: device.HBM(0), Bytes: 10, Busy: time.Second}
	before.ByPriority[transfer.Demand], before.ByPriority[transfer.Rebalance] = 7, 3
	now := before
	now.Bytes, now.Busy = 36, 1500*time.Millisecond
	now.ByPriority[transfer.Demand], now.ByPriority[transfer.KVLoad] = 18, 15
	for _, c := range []struct {
		use  LinkUse
		want string
	}{
		{linkUse(now, before), `{"src":"host","dst":"gpu0","bytes":26,"bytes_by_purpose":{"demand":11,"kv-load":15},"busy_seconds":0.5}`},
		{linkUse(now, transfer.PathStats{}), `{"src":"host","dst":"gpu0","bytes":36,"bytes_by_purpose":{"demand":18,"kv-load":15,"migration":3},"busy_seconds":1.5}`},
		{linkUse(now, now), `{"src":"host","dst":"gpu0","bytes":0,"busy_seconds":0}`},
	} {
		if got, err := json.Marshal(c.use); err != nil || string(got) != c.want {
			t.Errorf("%v: %s, want %s", err, got, c.want)
		}
	}
}

// TestBound: the bound of steps of 10 seconds.
func TestBound(t *testing.T) {
	link := func(src, dst string, busy float64, bytes map[string]int64) LinkUse {
		l := LinkUse{Source: src, Destination: dst, ByPurpose: bytes, BusySeconds: busy}
		for _, n := range bytes {
			l.Bytes += n
		}
		return l
	}
	demand, prefetch := map[string]int64{"demand": 4}, map[string]int64{"prefetch": 4}
	for name, c := range map[string]struct {
		stalls map[string]float64
		links  []LinkUse
		gap    float64
		want   Bound
	}{
		"nothing but computing": {nil, nil, 0, Bound{By: "compute", Share: 1}},
		"short waits":           {map[string]float64{"router-sync": 2, "launch-bound": 1}, nil, 0, Bound{By: "compute", Share: 0.7}},
		"a long wait":           {map[string]float64{"router-sync": 5, "launch-bound": 1}, nil, 0, Bound{By: "router-sync", Share: 0.5}},
		"waits of one length":   {map[string]float64{"router-sync": 5, "launch-bound": 5}, nil, 0, Bound{By: "launch-bound", Share: 0.5}},
		"the busiest link": {
			map[string]float64{"expert-copy": 6},
			[]LinkUse{link("host", "gpu0", 7, demand), link("gpu1", "gpu0", 9, prefetch), link("gpu2", "gpu0", 8, demand)},
			0,
			Bound{By: "link", Source: "gpu1", Destination: "gpu0", Share: 0.9},
		},
		"a link that is less busy than the GPU": {
			map[string]float64{"expert-copy": 2},
			[]LinkUse{link("host", "gpu0", 7, demand)},
			0,
			Bound{By: "compute", Share: 0.8},
		},
		"a link that is busier than the GPU": {
			map[string]float64{"expert-copy": 2},
			[]LinkUse{link("host", "gpu0", 9, demand)},
			0,
			Bound{By: "link", Source: "host", Destination: "gpu0", Share: 0.9},
		},
		"copies that nothing waited for": {
			map[string]float64{"router-sync": 4},
			[]LinkUse{link("host", "gpu0", 9, prefetch)},
			0,
			Bound{By: "compute", Share: 0.6},
		},
		"a wait longer than its link was busy": {
			map[string]float64{"expert-copy": 6},
			[]LinkUse{link("host", "gpu0", 3, demand)},
			0,
			Bound{By: "link", Source: "host", Destination: "gpu0", Share: 0.3},
		},
		"a wait in which links did little": {
			map[string]float64{"expert-copy": 6},
			[]LinkUse{link("host", "gpu0", 2, demand)},
			0,
			Bound{By: "expert-copy", Share: 0.6},
		},
		"a link that is busy with other copies": {
			map[string]float64{"expert-copy": 5, "router-sync": 1},
			[]LinkUse{link("host", "gpu0", 8, map[string]int64{"demand": 1, "kv-store": 2, "migration": 5}), link("gpu0", "host", 10, map[string]int64{"kv-store": 9})},
			0,
			Bound{By: "expert-copy", Share: 0.5},
		},
		"loads of KV blocks": {
			map[string]float64{"kv-load": 6},
			[]LinkUse{link("host", "gpu0", 8, map[string]int64{"kv-load": 3, "prefetch": 1})},
			0,
			Bound{By: "link", Source: "host", Destination: "gpu0", Share: 0.6},
		},
		"loads of KV blocks that nothing waited for": {
			map[string]float64{"expert-copy": 6},
			[]LinkUse{link("host", "gpu0", 8, map[string]int64{"kv-load": 3, "prefetch": 1})},
			0,
			Bound{By: "expert-copy", Share: 0.6},
		},
		"a pause before the step": {
			map[string]float64{"expert-copy": 6},
			[]LinkUse{link("host", "gpu0", 28, demand)},
			20,
			Bound{By: "link", Source: "host", Destination: "gpu0", Share: 0.8},
		},
		"a long pause before the step": {
			map[string]float64{"expert-copy": 3},
			[]LinkUse{link("host", "gpu0", 28, demand)},
			1000,
			Bound{By: "compute", Share: 0.7},
		},
		"a link that was busy before the step began": {
			map[string]float64{"expert-copy": 6},
			[]LinkUse{link("host", "gpu0", 12, demand)},
			0,
			Bound{By: "link", Source: "host", Destination: "gpu0", Share: 1},
		},
	} {
		s := Step{Seconds: 10, Stalls: c.stalls, Links: c.links}
		if diff := cmp.Diff(&c.want, s.bound(c.gap)); diff != "" {
			t.Errorf("%s: %s", name, diff)
		}
	}
	if b := (&Step{}).bound(0); b != nil {
		t.Errorf("a step that took no time is bound by %+v", b)
	}
}

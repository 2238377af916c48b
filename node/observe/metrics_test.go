package observe

import (
	"encoding/json"
	"strings"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"

	"github.com/moeserve/moeserve/device"
	"github.com/moeserve/moeserve/experts"
	"github.com/moeserve/moeserve/harvest"
	"github.com/moeserve/moeserve/metrics"
	"github.com/moeserve/moeserve/pipeline"
	"github.com/moeserve/moeserve/rebalancer/lending"
	"github.com/moeserve/moeserve/transfer"
)

// The values of all metrics; the golden file of cmd/moeserve has their help and types.
func TestCollect(t *testing.T) {
	e := Experts{Tiers: map[experts.Tier]int{experts.Resident: 6, experts.Peer: 1, experts.Host: 1}, ResidentExperts: 6, Stats: experts.Stats{
		Uses: experts.ByTier{experts.Resident: 5, experts.Peer: 4}, Hits: 21, Misses: 22, OnCPU: 24, Prefetched: 23, Fetched: experts.FetchedBytes{experts.Host: 6}, ReadInPlace: experts.FetchedBytes{experts.Peer: 15},
		Promoted: 9, Demoted: 2, Revoked: 3, Swapped: 8, MigratedBytes: 10, MadeResident: 13, Offloaded: 14, PrefetchPredicted: 11, PrefetchUsed: 12,
	}}
	l := Links{
		{PathStats: transfer.PathStats{From: device.Host, To: device.HBM(0), Bytes: 8, Busy: 1500 * time.Millisecond, RelayedBytes: 7, Retired: true, ByPriority: [transfer.Priorities]int64{transfer.Demand: 5, transfer.Rebalance: 2, 7: 1}}},
		{PathStats: transfer.PathStats{From: device.HBM(1), To: device.HBM(0), Bytes: 9}},
	}
	m := Memories{{Space: "host", Capacity: 30, Allocated: 31, Peak: 32}}
	h := Harvest{
		Peers:   []harvest.PeerUsage{{Space: device.HBM(1), Used: 13, Free: 14, FreeInSlabs: 1, Draining: 2, Reading: harvest.Reading{OtherProcesses: 3}}},
		Clients: map[string]harvest.ClientUsage{"kv": {Bytes: 12, Displaced: 7, Revocations: map[harvest.Reason]int64{harvest.ReasonPressure: 15}}},
	}
	p := Pipeline{Graphs: pipeline.GraphStats{Captured: 17, Launched: 18, Ahead: 13, Discarded: 2}, Steps: pipeline.StepsByAccess{Copied: 19, Direct: 20, OnCPU: 30}}
	p.Stalls[pipeline.ExpertCopy] = 16.5e9
	for _, c := range []struct {
		collector metrics.Collector
		want      string
	}{
		{collector[Experts]{func() Experts { return e }}, `moeserve_expert_cpu_uses_total 24
moeserve_expert_fetch_bytes_total{tier="host"} 6
moeserve_expert_fetch_bytes_total{tier="peer"} 0
moeserve_expert_hits_total 21
moeserve_expert_migration_bytes_total 10
moeserve_expert_misses_total 22
moeserve_expert_moves_total{move="demoted"} 2
moeserve_expert_moves_total{move="made_resident"} 13
moeserve_expert_moves_total{move="offloaded"} 14
moeserve_expert_moves_total{move="promoted"} 9
moeserve_expert_moves_total{move="revoked"} 3
moeserve_expert_moves_total{move="swapped"} 8
moeserve_expert_prefetch_predicted_total 11
moeserve_expert_prefetch_used_total 12
moeserve_expert_prefetches_total 23
moeserve_expert_read_in_place_bytes_total{tier="host"} 0
moeserve_expert_read_in_place_bytes_total{tier="peer"} 15
moeserve_expert_uses_total{tier="cached"} 0
moeserve_expert_uses_total{tier="host"} 0
moeserve_expert_uses_total{tier="peer"} 4
moeserve_expert_uses_total{tier="resident"} 5
moeserve_experts{tier="cached"} 0
moeserve_experts{tier="host"} 1
moeserve_experts{tier="peer"} 1
moeserve_experts{tier="resident"} 6
moeserve_offload_fraction 0.25
`},
		{collector[Links]{func() Links { return l }}, `moeserve_copy_busy_seconds_total{dst="gpu0",src="gpu1"} 0
moeserve_copy_busy_seconds_total{dst="gpu0",src="host"} 1.5
moeserve_copy_bytes_total{dst="gpu0",src="gpu1"} 9
moeserve_copy_bytes_total{dst="gpu0",src="host"} 8
moeserve_copy_purpose_bytes_total{dst="gpu0",purpose="demand",src="gpu1"} 0
moeserve_copy_purpose_bytes_total{dst="gpu0",purpose="demand",src="host"} 5
moeserve_copy_purpose_bytes_total{dst="gpu0",purpose="kv-load",src="gpu1"} 0
moeserve_copy_purpose_bytes_total{dst="gpu0",purpose="kv-load",src="host"} 0
moeserve_copy_purpose_bytes_total{dst="gpu0",purpose="kv-store",src="gpu1"} 0
moeserve_copy_purpose_bytes_total{dst="gpu0",purpose="kv-store",src="host"} 0
moeserve_copy_purpose_bytes_total{dst="gpu0",purpose="migration",src="gpu1"} 0
moeserve_copy_purpose_bytes_total{dst="gpu0",purpose="migration",src="host"} 2
moeserve_copy_purpose_bytes_total{dst="gpu0",purpose="prefetch",src="gpu1"} 0
moeserve_copy_purpose_bytes_total{dst="gpu0",purpose="prefetch",src="host"} 0
moeserve_copy_purpose_bytes_total{dst="gpu0",purpose="priority(7)",src="host"} 1
moeserve_relay_retired{dst="gpu0",src="host"} 1
moeserve_relayed_bytes_total{dst="gpu0",src="host"} 7
`},
		{collector[Memories]{func() Memories { return m }}, `moeserve_memory_capacity_bytes{device="host"} 30
moeserve_memory_used_bytes{device="host"} 31
`},
		{collector[Harvest]{func() Harvest { return h }}, `moeserve_harvest_bytes{device="gpu1",state="draining"} 2
moeserve_harvest_bytes{device="gpu1",state="free"} 14
moeserve_harvest_bytes{device="gpu1",state="other_processes"} 3
moeserve_harvest_bytes{device="gpu1",state="slab_free"} 1
moeserve_harvest_bytes{device="gpu1",state="used"} 13
moeserve_harvest_client_bytes{client="kv"} 12
moeserve_harvest_displaced_bytes_total{client="kv"} 7
moeserve_harvest_revocations_total{client="kv",reason="external"} 0
moeserve_harvest_revocations_total{client="kv",reason="policy"} 0
moeserve_harvest_revocations_total{client="kv",reason="pressure"} 15
moeserve_harvest_revocations_total{client="kv",reason="shutdown"} 0
moeserve_harvest_revocations_total{client="kv",reason="unhealthy"} 0
`},
		{collector[Lending]{func() Lending {
			return Lending{lending.Stats{Extents: 9, ExtentBytes: 10, Lent: 3, Withdrawing: 1, Returning: 2, ToExperts: 20, ToKV: 14}}
		}}, `moeserve_kv_lent_bytes{state="lent"} 30
moeserve_kv_lent_bytes{state="returning"} 20
moeserve_kv_lent_bytes{state="withdrawing"} 10
moeserve_kv_lent_moves_bytes_total{to="experts"} 200
moeserve_kv_lent_moves_bytes_total{to="kv"} 140
`},
		{collector[Lending]{func() Lending { return Lending{} }}, ""},
		{collector[Pipeline]{func() Pipeline { return p }}, `moeserve_graph_captures_total 17
moeserve_graph_launches_total 18
moeserve_stall_seconds_total{cause="cpu-attention"} 0
moeserve_stall_seconds_total{cause="cpu-experts"} 0
moeserve_stall_seconds_total{cause="expert-copy"} 16.5
moeserve_stall_seconds_total{cause="kv-copy"} 0
moeserve_stall_seconds_total{cause="kv-load"} 0
moeserve_stall_seconds_total{cause="launch-bound"} 0
moeserve_stall_seconds_total{cause="router-sync"} 0
moeserve_steps_ahead_total{result="discarded"} 2
moeserve_steps_ahead_total{result="used"} 13
moeserve_steps_total{access="copy"} 19
moeserve_steps_total{access="cpu"} 30
moeserve_steps_total{access="direct"} 20
`},
	} {
		var text, values strings.Builder
		if err := metrics.Write(&text, c.collector); err != nil {
			t.Fatal(err)
		}
		for line := range strings.Lines(text.String()) {
			if !strings.HasPrefix(line, "#") {
				values.WriteString(line)
			}
		}
		if diff := cmp.Diff(c.want, values.String()); diff != "" {
			t.Error(diff)
		}
	}
}

// The names in JSON are those that scripts read.
func TestExpertsJSON(t *testing.T) {
	data, err := json.Marshal(Experts{Tiers: map[experts.Tier]int{experts.Resident: 1}, ResidentExperts: 2, PeerCopies: 3, Stats: experts.Stats{Failed: 4}})
	want := `{"tiers":{"resident":1},"resident_experts":2,"peer_copies":3,"uses":{`
	if err != nil || !strings.HasPrefix(string(data), want) || !strings.Contains(string(data), `"failed_fetches":4`) {
		t.Errorf("%v: %s", err, data)
	}
}

func TestOffloadFraction(t *testing.T) {
	for _, c := range []struct {
		e    Experts
		want float64
	}{
		{Experts{Tiers: map[experts.Tier]int{experts.Resident: 3, experts.Cached: 1}, ResidentExperts: 3}, .25},
		{Experts{}, 0},
	} {
		if got := c.e.OffloadFraction(); got != c.want {
			t.Errorf("%+v: %v, want %v", c.e, got, c.want)
		}
	}
}

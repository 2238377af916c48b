package observe

import (
	"encoding/json"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"

	"github.com/moeserve/moeserve/device"
	"github.com/moeserve/moeserve/experts"
	"github.com/moeserve/moeserve/harvest"
	"github.com/moeserve/moeserve/metrics"
	"github.com/moeserve/moeserve/pipeline"
)

func TestCollect(t *testing.T) {
	e := Experts{Tiers: map[experts.Tier]int{experts.Resident: 7, experts.Peer: 1}, Stats: experts.Stats{
		Uses: experts.ByTier{experts.Resident: 5, experts.Peer: 4}, Fetched: experts.FetchedBytes{experts.Host: 6},
		Promoted: 9, Demoted: 2, Revoked: 3, Swapped: 8, MigratedBytes: 10, PrefetchPredicted: 11, PrefetchUsed: 12,
	}}
	l := Links{{From: device.Host, To: device.HBM(0), Bytes: 8}, {From: device.HBM(1), To: device.HBM(0), Bytes: 9}}
	h := Harvest{
		Peers:       []harvest.PeerUsage{{Space: device.HBM(1), Used: 13, Free: 14, FreeInSlabs: 1, Draining: 2, Reading: harvest.Reading{OtherProcesses: 3}}},
		Revocations: map[string]int64{"pressure": 15},
	}
	p := Pipeline{Graphs: pipeline.GraphStats{Captured: 17, Launched: 18}}
	p.Stalls[pipeline.ExpertCopy] = 16.5e9
	for _, c := range []struct {
		collector metrics.Collector
		want      string
	}{
		{collector[Experts]{func() Experts { return e }}, `# HELP moeserve_expert_fetch_bytes_total Bytes of experts fetched.
# TYPE moeserve_expert_fetch_bytes_total counter
moeserve_expert_fetch_bytes_total{tier="cached"} 0
moeserve_expert_fetch_bytes_total{tier="host"} 6
moeserve_expert_fetch_bytes_total{tier="peer"} 0
moeserve_expert_fetch_bytes_total{tier="resident"} 0
# HELP moeserve_expert_migration_bytes_total Bytes copied so that experts live elsewhere.
# TYPE moeserve_expert_migration_bytes_total counter
moeserve_expert_migration_bytes_total 10
# HELP moeserve_expert_moves_total Changes of where experts live.
# TYPE moeserve_expert_moves_total counter
moeserve_expert_moves_total{move="demoted"} 2
moeserve_expert_moves_total{move="promoted"} 9
moeserve_expert_moves_total{move="revoked"} 3
moeserve_expert_moves_total{move="swapped"} 8
# HELP moeserve_expert_prefetch_predicted_total Experts not in GPU memory for good that the next layer's router would have chosen, and so are fetched ahead.
# TYPE moeserve_expert_prefetch_predicted_total counter
moeserve_expert_prefetch_predicted_total 11
# HELP moeserve_expert_prefetch_used_total Those guessed experts that were then chosen.
# TYPE moeserve_expert_prefetch_used_total counter
moeserve_expert_prefetch_used_total 12
# HELP moeserve_expert_uses_total How often an expert was where a layer needed it.
# TYPE moeserve_expert_uses_total counter
moeserve_expert_uses_total{tier="cached"} 0
moeserve_expert_uses_total{tier="host"} 0
moeserve_expert_uses_total{tier="peer"} 4
moeserve_expert_uses_total{tier="resident"} 5
# HELP moeserve_experts Experts that are in a tier.
# TYPE moeserve_experts gauge
moeserve_experts{tier="cached"} 0
moeserve_experts{tier="host"} 0
moeserve_experts{tier="peer"} 1
moeserve_experts{tier="resident"} 7
`},
		{collector[Links]{func() Links { return l }}, `# HELP moeserve_path_bytes_total Bytes copied between two memories.
# TYPE moeserve_path_bytes_total counter
moeserve_path_bytes_total{path="gpu1>gpu0"} 9
moeserve_path_bytes_total{path="host>gpu0"} 8
`},
		{collector[Harvest]{func() Harvest { return h }}, `# HELP moeserve_harvest_bytes Memory of a peer, by who has it.
# TYPE moeserve_harvest_bytes gauge
moeserve_harvest_bytes{device="gpu1",state="free"} 14
moeserve_harvest_bytes{device="gpu1",state="leaving"} 2
moeserve_harvest_bytes{device="gpu1",state="other"} 3
moeserve_harvest_bytes{device="gpu1",state="unused"} 1
moeserve_harvest_bytes{device="gpu1",state="used"} 13
# HELP moeserve_harvest_revocations_total Pieces of borrowed memory that were revoked.
# TYPE moeserve_harvest_revocations_total counter
moeserve_harvest_revocations_total{reason="pressure"} 15
`},
		{collector[Pipeline]{func() Pipeline { return p }}, `# HELP moeserve_graph_captures_total Decode steps that were taken down as a CUDA graph.
# TYPE moeserve_graph_captures_total counter
moeserve_graph_captures_total 17
# HELP moeserve_graph_launches_total Decode steps that ran as a CUDA graph.
# TYPE moeserve_graph_launches_total counter
moeserve_graph_launches_total 18
# HELP moeserve_stall_seconds_total For how long the compute device stood still within steps.
# TYPE moeserve_stall_seconds_total counter
moeserve_stall_seconds_total{cause="cpu-attention"} 0
moeserve_stall_seconds_total{cause="expert-copy"} 16.5
moeserve_stall_seconds_total{cause="kv-copy"} 0
moeserve_stall_seconds_total{cause="kv-load"} 0
moeserve_stall_seconds_total{cause="launch-bound"} 0
moeserve_stall_seconds_total{cause="router-sync"} 0
`},
	} {
		var got strings.Builder
		if err := metrics.Write(&got, c.collector); err != nil || got.String() != c.want {
			t.Errorf("%v: %s", err, cmp.Diff(c.want, got.String()))
		}
	}
}

func TestLines(t *testing.T) {
	e := Experts{Placed: map[experts.Tier]int{experts.Resident: 24, experts.Peer: 4, experts.Host: 20}, Stats: experts.Stats{
		Uses: experts.ByTier{experts.Resident: 50, experts.Cached: 6, experts.Peer: 7, experts.Host: 8}, Misses: 15, Prefetched: 9,
		PrefetchPredicted: 5, PrefetchUsed: 4, Swapped: 1, Promoted: 4, Demoted: 2, Revoked: 3,
	}}
	h := Harvest{Peers: []harvest.PeerUsage{{Space: device.HBM(1), Used: 1024, FreeInSlabs: 1024}}, Revocations: map[string]int64{"policy": 0, "pressure": 3}}
	want := `experts	48: 24 local for good, 24 offloaded (fraction 0.5), 4 of them with peers
wanted	56 times there (50 local, 6 still in the ring), 15 times fetched (7 from peers, 8 from the host, 9 ahead of need)
predicted	5 by the next layer's router, 4 of them right
swapped	1 experts became local in place of others
peers	2.00 KiB of gpu1 borrowed; 4 copies came, 2 were given back, 3 revoked
revoked	pieces of borrowed memory: 3 for pressure`
	if got := strings.Join(e.Lines("fraction 0.5", false, &h), "\n"); got != want {
		t.Errorf("%s", got)
	}
	quiet := Experts{Placed: map[experts.Tier]int{experts.Resident: 2}, Stats: experts.Stats{Uses: experts.ByTier{experts.Resident: 1}}}
	want = `experts	2: 2 local, 0 offloaded (resident-experts)
wanted	1 times there (1 local, 0 still in the ring), 0 times fetched (0 ahead of need)`
	if got := strings.Join(quiet.Lines("resident-experts", true, &Harvest{}), "\n"); got != want {
		t.Errorf("%s", got)
	}
}

// The names in JSON are those that scripts read.
func TestExpertsJSON(t *testing.T) {
	data, err := json.Marshal(Experts{Tiers: map[experts.Tier]int{experts.Resident: 1}, Stats: experts.Stats{Uses: experts.ByTier{experts.Cached: 2}, Failed: 3}})
	want := `{"tiers":{"resident":1},"homes":null,"uses":{"cached":2,"host":0,"peer":0,"resident":0},"hits":0,"misses":0,"hit_rate":0,"prefetched":0,"failed_fetches":3,` +
		`"fetched_bytes":{"host":0,"peer":0},"prefetch_predicted":0,"prefetch_used":0,"promoted":0,"demoted":0,"revoked":0,"swapped":0,"migrated_bytes":0}`
	if err != nil || string(data) != want {
		t.Errorf("%v: %s", err, data)
	}
}

package observe

import (
	"encoding/json"
	"strings"
	"testing"

	"github.com/prometheus/client_golang/prometheus"
	"github.com/prometheus/client_golang/prometheus/testutil"

	"github.com/moeserve/moeserve/device"
	"github.com/moeserve/moeserve/experts"
	"github.com/moeserve/moeserve/harvest"
	"github.com/moeserve/moeserve/pipeline"
)

func TestCollect(t *testing.T) {
	e := Experts{Where: map[experts.Tier]int{experts.Local: 7, experts.Peer: 1}, Stats: experts.Stats{
		Hits: experts.ByTier{experts.Local: 5, experts.Peer: 4}, Fetched: experts.ByTier{experts.Host: 6},
		Promoted: 9, Demoted: 2, Revoked: 3, Swapped: 8, MovedBytes: 10, Guessed: 11, GuessedRight: 12,
	}}
	l := Links{{From: device.Host, To: device.HBM(0), Bytes: 8}, {From: device.HBM(1), To: device.HBM(0), Bytes: 9}}
	h := Harvest{
		Peers:       []harvest.PeerUsage{{Space: device.HBM(1), Used: 13, Free: 14, Unused: 1, Leaving: 2, Reading: harvest.Reading{Other: 3}}},
		Revocations: map[string]int64{"pressure": 15},
	}
	p := Pipeline{Graphs: pipeline.GraphStats{Captured: 17, Launched: 18}}
	p.Stalls[pipeline.ExpertCopy] = 16.5e9
	for _, c := range []struct {
		collector prometheus.Collector
		want      string
	}{
		{collector[Experts]{func() Experts { return e }, expertDescs}, `
# HELP moeserve_expert_fetch_bytes_total Bytes of experts fetched.
# TYPE moeserve_expert_fetch_bytes_total counter
moeserve_expert_fetch_bytes_total{tier="host"} 6
moeserve_expert_fetch_bytes_total{tier="local"} 0
moeserve_expert_fetch_bytes_total{tier="peer"} 0
moeserve_expert_fetch_bytes_total{tier="ring"} 0
# HELP moeserve_expert_guesses_right_total Those guessed experts that were then chosen.
# TYPE moeserve_expert_guesses_right_total counter
moeserve_expert_guesses_right_total 12
# HELP moeserve_expert_guesses_total Experts not in GPU memory for good that the next layer's router would have chosen, and so are fetched ahead.
# TYPE moeserve_expert_guesses_total counter
moeserve_expert_guesses_total 11
# HELP moeserve_expert_hits_total How often an expert was where a layer needed it.
# TYPE moeserve_expert_hits_total counter
moeserve_expert_hits_total{tier="host"} 0
moeserve_expert_hits_total{tier="local"} 5
moeserve_expert_hits_total{tier="peer"} 4
moeserve_expert_hits_total{tier="ring"} 0
# HELP moeserve_expert_moves_total Changes of where experts live.
# TYPE moeserve_expert_moves_total counter
moeserve_expert_moves_total{move="demoted"} 2
moeserve_expert_moves_total{move="promoted"} 9
moeserve_expert_moves_total{move="revoked"} 3
moeserve_expert_moves_total{move="swapped"} 8
# HELP moeserve_expert_resident Experts that are in a tier.
# TYPE moeserve_expert_resident gauge
moeserve_expert_resident{tier="host"} 0
moeserve_expert_resident{tier="local"} 7
moeserve_expert_resident{tier="peer"} 1
moeserve_expert_resident{tier="ring"} 0
# HELP moeserve_rebalanced_bytes_total Bytes copied so that experts live elsewhere.
# TYPE moeserve_rebalanced_bytes_total counter
moeserve_rebalanced_bytes_total 10
`},
		{collector[Links]{func() Links { return l }, linkDescs}, `
# HELP moeserve_path_bytes_total Bytes copied between two memories.
# TYPE moeserve_path_bytes_total counter
moeserve_path_bytes_total{path="gpu1>gpu0"} 9
moeserve_path_bytes_total{path="host>gpu0"} 8
`},
		{collector[Harvest]{func() Harvest { return h }, harvestDescs}, `
# HELP moeserve_harvest_bytes Memory of a peer, by who has it.
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
		{collector[Pipeline]{func() Pipeline { return p }, pipelineDescs}, `
# HELP moeserve_pipeline_graph_captures_total Decode steps that were taken down as a CUDA graph.
# TYPE moeserve_pipeline_graph_captures_total counter
moeserve_pipeline_graph_captures_total 17
# HELP moeserve_pipeline_graph_launches_total Decode steps that ran as a CUDA graph.
# TYPE moeserve_pipeline_graph_launches_total counter
moeserve_pipeline_graph_launches_total 18
# HELP moeserve_pipeline_stall_seconds_total For how long the compute device stood still within steps.
# TYPE moeserve_pipeline_stall_seconds_total counter
moeserve_pipeline_stall_seconds_total{cause="cpu-attention"} 0
moeserve_pipeline_stall_seconds_total{cause="expert-copy"} 16.5
moeserve_pipeline_stall_seconds_total{cause="host-enqueue"} 0
moeserve_pipeline_stall_seconds_total{cause="kv-copy"} 0
moeserve_pipeline_stall_seconds_total{cause="kv-load"} 0
moeserve_pipeline_stall_seconds_total{cause="router-ask"} 0
`},
	} {
		if err := testutil.CollectAndCompare(c.collector, strings.NewReader(c.want)); err != nil {
			t.Error(err)
		}
	}
}

func TestLines(t *testing.T) {
	e := Experts{Homes: map[experts.Tier]int{experts.Local: 24, experts.Peer: 4, experts.Host: 20}, Stats: experts.Stats{
		Hits: experts.ByTier{experts.Local: 50, experts.Ring: 6, experts.Peer: 7, experts.Host: 8}, Misses: 15, Prefetched: 9,
		Guessed: 5, GuessedRight: 4, Swapped: 1, Promoted: 4, Demoted: 2, Revoked: 3,
	}}
	h := Harvest{Peers: []harvest.PeerUsage{{Space: device.HBM(1), Used: 1024, Unused: 1024}}, Revocations: map[string]int64{"policy": 0, "pressure": 3}}
	want := `experts	48: 24 local for good, 24 offloaded (fraction 0.5), 4 of them with peers
wanted	56 times there (50 local, 6 still in the ring), 15 times fetched (7 from peers, 8 from the host, 9 ahead of need)
guessed	5 by the next layer's router, 4 of them right
swapped	1 experts became local in place of others
peers	2.00 KiB of gpu1 borrowed; 4 copies came, 2 were given back, 3 revoked
revoked	pieces of borrowed memory: 3 for pressure`
	if got := strings.Join(e.Lines("fraction 0.5", false, &h), "\n"); got != want {
		t.Errorf("%s", got)
	}
	quiet := Experts{Homes: map[experts.Tier]int{experts.Local: 2}, Stats: experts.Stats{Hits: experts.ByTier{experts.Local: 1}}}
	want = `experts	2: 2 local, 0 offloaded (local-experts)
wanted	1 times there (1 local, 0 still in the ring), 0 times fetched (0 ahead of need)`
	if got := strings.Join(quiet.Lines("local-experts", true, &Harvest{}), "\n"); got != want {
		t.Errorf("%s", got)
	}
}

// The names in JSON are those that scripts read.
func TestExpertsJSON(t *testing.T) {
	data, err := json.Marshal(Experts{Where: map[experts.Tier]int{experts.Local: 1}, Stats: experts.Stats{Hits: experts.ByTier{experts.Ring: 2}, Failed: 3}})
	want := `{"where":{"local":1},"homes":null,"hits":{"host":0,"local":0,"peer":0,"ring":2},"misses":0,"prefetched":0,"failed_fetches":3,` +
		`"fetched_bytes":{"host":0,"local":0,"peer":0,"ring":0},"guessed":0,"guessed_right":0,"promoted":0,"demoted":0,"revoked":0,"swapped":0,"moved_bytes":0}`
	if err != nil || string(data) != want {
		t.Errorf("%v: %s", err, data)
	}
}

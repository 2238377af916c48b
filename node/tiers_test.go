package node_test

import (
	"errors"
	"fmt"
	"math/rand/v2"
	"os"
	"path/filepath"
	"strconv"
	"strings"
	"testing"
	"time"

	"github.com/moeserve/moeserve/configs"
	"github.com/moeserve/moeserve/device"
	"github.com/moeserve/moeserve/device/emulated"
	"github.com/moeserve/moeserve/engine"
	"github.com/moeserve/moeserve/experts"
	"github.com/moeserve/moeserve/harvest"
	"github.com/moeserve/moeserve/node"
	"github.com/moeserve/moeserve/node/observe"
	"github.com/moeserve/moeserve/tools/fixtures"
	"github.com/moeserve/moeserve/tools/racedetector"
)

// tierCase is one way to run the requests.
type tierCase struct {
	model    string
	fraction float64
	tier     configs.Tier
	policy   string
	// peers that lend, as in the setting.
	peers string
	adapt bool
	// ring is for how many layers there is room.
	ring int
	// trace of other tenants: none, a saw-tooth, or made up.
	trace string
	// trouble that is made on the way.
	trouble string
	// schedule of the virtual machine; under 0: the wall clock.
	schedule emulated.Schedule
	// lax: devices are as lax as CUDA. fences is the value at which fences begin.
	lax    bool
	fences uint32
	seed   uint64
	// lends: the KV cache is small, has tiers or not, and lends memory to experts and gets it back
	// between any two steps.
	lends bool
	// access to experts of steps of few tokens.
	access configs.ExpertAccess
}

func (c tierCase) String() string {
	return fmt.Sprintf("%s fraction=%v tier=%s policy=%s peers=%s adapt=%t ring=%d trace=%s trouble=%s schedule=%d lax=%t fences=%#x seed=%d lends=%t access=%s",
		c.model, c.fraction, c.tier, c.policy, c.peers, c.adapt, c.ring, c.trace, c.trouble, c.schedule, c.lax, c.fences, c.seed, c.lends, c.access)
}

// troubles: a revocation of everything now and then, at any point of what is under
// way; memory refused to harvest; copies from, to or of anything that fail or stall;
// a peer that is lost.
var troubles = []string{"none", "revoked", "refused", "fetch fails", "move fails", "stalled", "lost"}

// fenceStarts are values at which fences begin: at 0, and soon before they pass half of
// their range, or begin again.
var fenceStarts = []uint32{0, 1<<31 - 100, 1<<32 - 100}

// anyTierCase draws one.
func anyTierCase(rng *rand.Rand) tierCase {
	pick := func(of ...string) string { return of[rng.IntN(len(of))] }
	c := tierCase{
		model: pick(sameOn...), fraction: []float64{0.25, 0.5, 0.75, 1}[rng.IntN(4)], tier: []configs.Tier{configs.AnyTier, configs.PeerTier, configs.PeerTier, configs.HostTier}[rng.IntN(4)],
		policy: pick("best-fit", "locality", "fairness", "interference", "stability"), peers: pick("1", "1,2", "auto"),
		adapt: rng.IntN(3) == 0, ring: 1 + rng.IntN(2), trace: pick("none", "none", "saw", "generated"), trouble: pick(troubles...),
		schedule: emulated.Schedule(rng.IntN(4) - 1), seed: rng.Uint64() % 1000,
		lax: rng.IntN(2) == 0, fences: fenceStarts[rng.IntN(len(fenceStarts))], lends: rng.IntN(2) == 0,
		access: configs.ExpertAccess(rng.IntN(3)), // of emulated devices auto is copy
	}
	if c.fraction == 1 {
		c.adapt = false
	}
	if c.tier == configs.PeerTier && c.trace == "generated" { // in which others may hold too much at the start
		c.trace = "saw"
	}
	return c
}

// sawTooth writes a trace in which others take so many bytes of one peer and half of that of
// another, and leave again, every few steps.
func sawTooth(t *testing.T, period time.Duration, tooth int) string {
	t.Helper()
	var b strings.Builder
	b.WriteString("time_s,peer,bytes\n")
	for i := range 400 {
		bytes := 0
		if i%2 == 1 {
			bytes = tooth
		}
		at := strconv.FormatFloat((time.Duration(i) * period).Seconds(), 'f', -1, 64)
		fmt.Fprintf(&b, "%s,1,%d\n%s,2,%d\n", at, bytes, at, bytes/2)
	}
	file := filepath.Join(t.TempDir(), "saw.csv")
	if err := os.WriteFile(file, []byte(b.String()), 0o600); err != nil {
		t.Fatal(err)
	}
	return file
}

const peerBytes = 64 << 20

// outcome is what a case did beside tokens.
type outcome struct {
	digest  string
	experts observe.Experts
	harvest observe.Harvest
	retried int64
	// lent are the extents of the KV cache that were lent, and preempted the sequences.
	lent, preempted int64
}

// runTiers runs the requests, all at once and then two of them alone, for which only routed
// experts are fetched.
func runTiers(t *testing.T, c tierCase) outcome {
	t.Helper()
	o := emulated.Options{
		Check: true, Virtual: c.schedule >= 0, Schedule: max(c.schedule, 0), Seed: c.seed, LikeCUDA: c.lax, FenceStart: c.fences,
		HostLink: emulated.Link{BytesPerSecond: 1e9, Latency: 10 * time.Microsecond},
		PeerLink: emulated.Link{BytesPerSecond: 5e9, Latency: 10 * time.Microsecond},
		GPUs:     []emulated.GPU{{MemoryBytes: 1 << 30}, {MemoryBytes: peerBytes}, {MemoryBytes: peerBytes}},
	}
	s := configs.Defaults()
	s.Batch.MaxNumBatchedTokens, s.Batch.ExpertAccess = 192, c.access
	s.Model.Name, s.Offload.Fraction, s.Offload.Tier, s.Harvest.Policy = fixtures.Dir(t, c.model), c.fraction, c.tier, c.policy
	s.Device.Peers, s.Offload.DynamicResidency, s.Harvest.Headroom = c.peers, c.adapt, "1KiB"
	switch c.trace {
	case "saw":
		// Others need more than is free, and ask; or take what is free, so that the headroom is not met.
		tooth := peerBytes - 1<<10
		if c.seed%2 == 1 {
			tooth, s.Harvest.Headroom = 20<<20, "48MiB"
		}
		s.Harvest.AvailabilityTrace = sawTooth(t, 300*time.Microsecond, tooth)
	case "generated":
		s.Harvest.AvailabilityTrace = fmt.Sprintf("generated:%d", c.seed)
	}
	if c.lax {
		o.TimeFailures = 0.2
	}
	if c.lends {
		lendKV(&s, c.seed)
	}
	m, err := emulated.New(o)
	if err != nil {
		t.Fatal(err)
	}
	steps := 0
	var n *node.Node
	swaps := rand.New(rand.NewPCG(c.seed, 12))
	n, err = node.Open(t.Context(), node.Options{
		Settings: s, CacheLayers: c.ring, OpenMachine: func() (device.Machine, error) { return m, nil },
		Listener: engine.Listener{StepFinished: func(engine.StepInfo) {
			if steps++; steps == 4 && c.trouble == "lost" {
				if err := m.Lose(1); err != nil {
					t.Error(err)
				}
			}
			if c.adapt { // beside the rebalancer, which has seen few uses
				swapAny(t, n.Store(), swaps)
			}
			if c.lends {
				lendAny(n, swaps)
				targetAny(t, n, swaps)
			}
		}},
	})
	if err != nil {
		t.Fatalf("%v: %v", c, err)
	}
	defer func() {
		if err := n.Close(); err != nil && (c.trouble != "lost" || !errors.Is(err, device.ErrLost)) {
			t.Errorf("%v: close: %v", c, err)
		}
	}()
	stop := makeTrouble(t, c, n, m)
	vocab := n.Info().Config.Vocab
	outs, err := n.Engine().Generate(t.Context(), requests(vocab), nil)
	for _, i := range []int{1, 3} {
		if err != nil {
			break
		}
		var more []engine.Output
		more, err = n.Engine().Generate(t.Context(), requests(vocab)[i:i+1], nil)
		outs = append(outs, more...)
	}
	stop()
	if err != nil {
		t.Fatalf("%v: %v", c, err)
	}
	state := n.Engine().State()
	return outcome{digest(outs), n.Observe().Experts(), n.Observe().Harvest(), state.Retried, n.Observe().Lending().ToExperts, state.Preemptions}
}

// lendKV makes the KV cache small, with or without tiers below it, and has it lend memory.
func lendKV(s *configs.Settings, seed uint64) {
	s.KV.ExpertsShare, s.KV.MaxModelLen, s.KV.BlockSize = configs.AutoShare, 128, 8
	s.KV.NumGPUBlocksOverride = 16 + 12 + int(seed%40)
	if seed%5 == 0 {
		s.Batch.SchedulingPolicy, s.Batch.FairGranularity = configs.FairScheduling, 2
	}
	switch seed % 3 {
	case 0:
		s.KV.TransferConfig = `{"kv_connector_extra_config": {"num_cpu_blocks": 20}}`
	case 1:
		s.KV.TransferConfig = `{"kv_connector_extra_config": {"num_gpu_blocks": 10, "num_cpu_blocks": 6, "block_size_factor": 2}}`
	}
}

// swapAny swaps a resident expert and an offloaded one of the same layer.
func swapAny(t *testing.T, s *experts.Store, rng *rand.Rand) {
	t.Helper()
	placed := s.Placed()
	layer := rng.IntN(len(placed))
	var resident, offloaded []int
	for e, p := range placed[layer] {
		if p.Tier == experts.Resident {
			resident = append(resident, e)
		} else {
			offloaded = append(offloaded, e)
		}
	}
	if len(resident) == 0 || len(offloaded) == 0 {
		return
	}
	in := experts.ID{Layer: layer, Expert: offloaded[rng.IntN(len(offloaded))]}
	out := experts.ID{Layer: layer, Expert: resident[rng.IntN(len(resident))]}
	if err := s.Swap(in, out); err != nil && !errors.Is(err, experts.ErrBusy) {
		t.Error(err)
	}
}

// lendAny moves memory between the KV cache and experts, and experts into it.
func lendAny(n *node.Node, rng *rand.Rand) {
	n.KVLender().Move(rng.IntN(7) - 3)
	for range 3 {
		p := n.Store().Plan()
		id := experts.ID{Layer: rng.IntN(len(p.Layers)), Expert: rng.IntN(p.Experts)}
		_ = n.Store().MakeResident(id) // it may be already, or have no place
	}
}

// targetAny gives the offload fraction a target now and then, or takes it away.
func targetAny(t *testing.T, n *node.Node, rng *rand.Rand) {
	t.Helper()
	var target *float64
	switch rng.IntN(8) {
	case 0:
	case 1, 2:
		f := rng.Float64() * n.Offloading().Highest
		target = &f
	default:
		return
	}
	if err := n.SetOffloadFraction(target); err != nil {
		t.Error(err)
	}
}

// makeTrouble starts the faults of the case. The function it returns ends them.
func makeTrouble(t *testing.T, c tierCase, n *node.Node, m *emulated.Machine) (stop func()) {
	t.Helper()
	stop = func() {}
	fault := func(f emulated.Fault) { stop = m.Inject(&f).Release }
	peer := func(s device.Space) bool { return s != device.Host && s != device.HBM(0) }
	switch c.trouble {
	case "revoked":
		if n.Harvest() != nil {
			stop = revoke(t, n, m, c.seed)
		}
	case "refused":
		fault(emulated.Fault{Kind: emulated.RefuseAlloc, Times: -1, Chance: 0.5, Match: func(p emulated.Point) bool { return peer(p.Space) }})
	case "fetch fails":
		fault(emulated.Fault{Kind: emulated.FailCopy, Skip: int(c.seed) % 7, Times: 2 + int(c.seed)%5, Match: func(p emulated.Point) bool { return fetch(p) && (peer(p.From) || c.seed%2 == 0) }})
	case "move fails":
		fault(emulated.Fault{Kind: emulated.FailCopy, Times: -1, Chance: 0.3, Match: func(p emulated.Point) bool { return peer(p.To) }})
	case "stalled":
		fault(emulated.Fault{Kind: emulated.StallCopy, Times: -1, Chance: 0.1, For: 100 * time.Microsecond, Match: func(p emulated.Point) bool { return peer(p.From) || peer(p.To) || fetch(p) }})
	case "lost":
		// It goes between two steps (runTiers), while copies are under way.
		fault(emulated.Fault{Kind: emulated.StallCopy, Skip: int(c.seed) % 20, For: 10 * time.Microsecond, Match: func(p emulated.Point) bool { return fetch(p) && p.From == device.HBM(1) }})
	}
	return stop
}

// revoke lets a neighbor ask for memory back over and over, wherever copies and
// compute are by then.
func revoke(t *testing.T, n *node.Node, m *emulated.Machine, seed uint64) (stop func()) {
	t.Helper()
	s, err := m.NewStream(device.Host, device.StreamOptions{Name: "neighbor"})
	if err != nil {
		t.Fatal(err)
	}
	rng := rand.New(rand.NewPCG(seed, 11))
	for range 300 {
		peer, bytes := device.HBM(1+rng.IntN(2)), int64(1+rng.IntN(peerBytes))
		if err := s.(device.Executor).Execute(device.Work{Name: "reclaim", Host: true, Run: func(device.Access) error {
			if !m.Capabilities().Timed {
				time.Sleep(200 * time.Microsecond)
			}
			_, _ = n.Harvest().Reclaim(peer, bytes, 0) // it may be no peer
			return nil
		}}); err != nil {
			t.Fatal(err)
		}
	}
	return func() {
		if err := errors.Join(s.Synchronize(t.Context()), s.Close()); err != nil {
			t.Error(err)
		}
	}
}

// TestSameTokensOverTiers: fractions, tiers, policies, peers, other tenants, faults and
// schedules change when and from where experts are fetched, and nothing else.
func TestSameTokensOverTiers(t *testing.T) {
	cases := racedetector.Fewer(100, 25)
	if text, ok := os.LookupEnv("MOESERVE_TIER_CASES"); ok {
		n, err := strconv.Atoi(text)
		if err != nil || n <= 0 {
			t.Fatalf("MOESERVE_TIER_CASES is %q and must be a number over 0", text)
		}
		cases = n
	}
	want := map[string]string{}
	for _, name := range sameOn {
		want[name] = runTiers(t, tierCase{model: name, tier: configs.HostTier, policy: "best-fit", peers: "auto", trace: "none", trouble: "none"}).digest
	}
	seen := map[string]int{}
	rng := rand.New(rand.NewPCG(5, 2))
	for range cases {
		c := anyTierCase(rng)
		got := runTiers(t, c)
		if got.digest != want[c.model] {
			t.Errorf("%v: tokens %s, want %s", c, got.digest, want[c.model])
		}
		count := func(what string, yes bool) {
			if yes {
				seen[what]++
			}
		}
		count("from peers", got.experts.Fetched[experts.Peer] > 0)
		count("from peers and host", got.experts.Fetched[experts.Peer] > 0 && got.experts.Fetched[experts.Host] > 0)
		count("peers read in place", got.experts.ReadInPlace[experts.Peer] > 0)
		count("host read in place", got.experts.ReadInPlace[experts.Host] > 0)
		count("read in place, lost", got.experts.ReadInPlace[experts.Peer] > 0 && c.trouble == "lost")
		count("steps run again", got.retried > 0)
		count("used prefetches", got.experts.PrefetchUsed > 0)
		count("swapped", got.experts.Swapped > 0)
		count("steps run again, lax", got.retried > 0 && c.lax)
		count("lent", got.lent > 0)
		count("resident in lent memory", got.experts.MadeResident > 0)
		count("preempted", got.preempted > 0)
		for reason, n := range got.harvest.Revocations {
			count(reason, n > 0)
		}
	}
	t.Logf("%d cases: %v", cases, seen)
	if racedetector.Enabled {
		return // so few need not have everything
	}
	for _, what := range []string{
		"from peers", "from peers and host", "peers read in place", "host read in place", "read in place, lost", "steps run again", "used prefetches", "swapped", "steps run again, lax", "lent", "resident in lent memory", "preempted",
		harvest.ReasonPressure.String(), harvest.ReasonExternal.String(), harvest.ReasonUnhealthy.String(),
	} {
		if seen[what] == 0 {
			t.Errorf("no case with %s", what)
		}
	}
}

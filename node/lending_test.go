package node_test

import (
	"errors"
	"fmt"
	"math"
	"math/rand/v2"
	"strings"
	"testing"
	"time"

	"github.com/moeserve/moeserve/configs"
	"github.com/moeserve/moeserve/device"
	"github.com/moeserve/moeserve/device/emulated"
	"github.com/moeserve/moeserve/engine"
	"github.com/moeserve/moeserve/node"
	"github.com/moeserve/moeserve/node/fault"
	"github.com/moeserve/moeserve/tools/racedetector"
)

// The scenario: Mixtral on a GPU of 80 GB, and requests that shift: first many short ones, for
// which each step fetches the experts that are not resident; then turns of conversations with long
// prefixes, which are found in the KV cache if it is large enough; then short ones again.
const (
	shiftMemory       = 80e9
	shiftHost         = 55e9 // bytes per second
	shiftBatch        = 32
	shiftShort        = 96 // steps of each phase of short requests
	shiftConversation = 24
	shiftPrefix       = 6144 // tokens
	shiftTurns        = 200
	shiftTogether     = 4
	shiftTokens       = 2 // of an answer
)

// shift is a node for the scenario.
type shift struct {
	*testing.T
	n *node.Node
	// now is the clock.
	now func() time.Duration
	// took is how long each phase took; lent the extents at its end.
	took []time.Duration
	lent []int
}

// openShift opens it with so many of Mixtral's 256 experts resident from the start on.
func openShift(t *testing.T, resident int, share string, change ...func(*configs.Settings)) *shift {
	t.Helper()
	s := configs.Defaults()
	shiftSettings(&s, resident, share)
	for _, c := range change {
		c(&s)
	}
	x := &shift{T: t}
	var m *emulated.Machine
	var err error
	x.n, err = node.Open(t.Context(), node.Options{
		Settings: s, DeviceTime: true,
		OpenMachine: func() (_ device.Machine, err error) {
			m, err = emulated.New(emulated.Options{
				Virtual: true, NoData: true, HostLink: emulated.Link{BytesPerSecond: shiftHost},
				GPUs: []emulated.GPU{{MemoryBytes: shiftMemory, FlopsPerSecond: 800e12, BytesPerSecond: 3.35e12}},
			})
			return m, err
		},
	})
	if err != nil {
		t.Fatal(err)
	}
	x.now = m.Now
	t.Cleanup(func() {
		if err := x.n.Close(); err != nil {
			t.Error(err)
		}
	})
	return x
}

func shiftSettings(s *configs.Settings, resident int, share string) {
	s.Model.Name, s.Model.LoadFormat, s.Offload.Fraction = "mixtral-8x7b", configs.LoadDummy, 1-float64(resident)/256
	s.KV.MaxModelLen, s.KV.ExpertsShare, s.Batch.MaxNumSeqs = 8192, share, shiftBatch
}

func (x *shift) generate(rs []engine.Request) {
	x.Helper()
	if _, err := x.n.Engine().Generate(x.Context(), rs, nil); err != nil {
		x.Fatal(err)
	}
}

// prompt has tokens that no other number's has.
func prompt(number, tokens int) []int32 {
	ids := make([]int32, tokens)
	for i := range ids {
		ids[i] = int32(3 + (number*7919+i*31+i*i%17)%31000)
	}
	ids[0] = int32(3 + number%31000)
	return ids
}

// short runs short requests.
func (x *shift) short(number int) {
	x.Helper()
	var rs []engine.Request
	for i := range shiftBatch {
		rs = append(rs, request(prompt(10_000+number*shiftBatch+i, 64), shiftShort))
	}
	x.generate(rs)
}

// turns runs turns of conversations, a few at a time.
func (x *shift) turns() {
	x.Helper()
	rng := rand.New(rand.NewPCG(5, 8))
	for turn := 0; turn < shiftTurns; turn += shiftTogether {
		var rs []engine.Request
		for i := range shiftTogether {
			p := append(prompt(rank(rng, shiftConversation, 0.5), shiftPrefix), prompt(1000+turn+i, 32)...)
			rs = append(rs, request(p, shiftTokens))
		}
		x.generate(rs)
	}
}

// rank draws one of n ranks with a probability that falls by a power of the rank.
func rank(rng *rand.Rand, n int, exponent float64) int {
	for {
		r := rng.IntN(n)
		if rng.Float64() < math.Pow(float64(r+1), -exponent) {
			return r
		}
	}
}

// shifting is a load of short requests, long prefixes, and short requests.
var shifting = []bool{false, true, false}

// run runs phases, each of long prefixes or of short requests.
func (x *shift) run(long []bool) {
	x.Helper()
	for phase, long := range long {
		began := x.now()
		if long {
			x.turns()
		} else {
			x.short(2 * phase)
			x.short(2*phase + 1)
		}
		x.took = append(x.took, x.now()-began)
		x.lent = append(x.lent, x.n.Observe().Lending().Lent)
	}
}

// row is a line of the table.
func (x *shift) row(name string) (text string, all time.Duration) {
	for _, d := range x.took {
		text += fmt.Sprintf(" %.1f |", d.Seconds())
		all += d
	}
	return "| " + name + " |" + text + fmt.Sprintf(" %.1f |", all.Seconds()), all
}

// shiftSplits are the numbers of resident experts of fixed splits.
var shiftSplits = []int{172}

// shiftLeast are the numbers of those that are resident at least, where memory is lent.
var shiftLeast = []int{96}

// TestLendingFollowsTheLoad: where memory of the KV cache is lent by worth, a load that shifts takes
// less time than with any fixed split, and the memory moves about once for each shift.
func TestLendingFollowsTheLoad(t *testing.T) {
	if racedetector.Enabled {
		t.Skip("minutes with the race detector: TestSameTokensOverTiers lends memory, too")
	}
	t.Parallel()
	var table strings.Builder
	fmt.Fprintln(&table, "| memory | short requests | long prefixes | short requests | all |\n|---|---|---|---|---|")
	best := time.Duration(math.MaxInt64)
	for _, n := range shiftSplits {
		x := openShift(t, n, configs.StaticShare)
		x.run(shifting)
		text, all := x.row(fmt.Sprintf("%d experts resident, %.1f GiB of KV blocks", n, x.kv()))
		fmt.Fprintln(&table, text)
		best = min(best, all)
	}
	for _, n := range shiftLeast {
		x := openShift(t, n, configs.AutoShare)
		x.run(shifting)
		text, all := x.row(fmt.Sprintf("**by worth**, %d experts resident at least, %.1f GiB of KV blocks at most", n, x.kv()))
		fmt.Fprintln(&table, text)
		l := x.n.Observe().Lending()
		t.Logf("%d of %d extents are lent at the ends of phases; %d were lent and %d returned in all", x.lent, l.Extents, l.ToExperts, l.ToKV)
		if all > best*95/100 {
			t.Errorf("it takes %v, and %v with the best fixed split", all, best)
		}
		if n := l.Extents; x.lent[0] < n*9/10 || x.lent[1] > n/4 || x.lent[2] < n*9/10 || l.ToExperts > int64(3*n) {
			t.Errorf("%d of %d extents are lent at the ends of phases, %d in all", x.lent, n, l.ToExperts)
		}
	}
	t.Logf("seconds\n%s", &table)
}

// kv is the size of the KV cache, in GiB.
func (x *shift) kv() float64 {
	return float64(int64(x.n.KV().Blocks())*x.n.Info().Sizes.KVBlock) / (1 << 30)
}

// Settings that leave nothing to share are refused, or reported.
func TestLendingSettings(t *testing.T) {
	s := configs.Defaults()
	s.KV.ExpertsShare, s.Batch.Attention = configs.AutoShare, configs.OnCPU
	if _, err := node.Open(t.Context(), node.Options{Settings: s}); !errors.Is(err, fault.ErrConfig) || !strings.Contains(err.Error(), "use --attention gpu") {
		t.Errorf("with attention on the CPU: %v", err)
	}
	s.Batch.Attention, s.Plan.Policy, s.Offload.Fraction = configs.AnyPlace, configs.PlannedPolicy, 0.5 // a plan has it on the GPU
	planned, err := node.Open(t.Context(), node.Options{Settings: s, Explicit: func(key string) bool { return key == "offload-fraction" || key == "kv-experts-share" }})
	if err != nil {
		t.Fatal(err)
	}
	if planned.Observe().KV().Lent == nil {
		t.Error("with a planned policy it lends nothing")
	}
	if err := planned.Close(); err != nil {
		t.Error(err)
	}
	for _, c := range []struct {
		fraction float64
		blocks   int
		lends    bool
	}{{0.5, 0, true}, {0, 0, false}, {0.5, 16, false}} {
		s := configs.Defaults()
		s.KV.ExpertsShare, s.Offload.Fraction, s.KV.NumGPUBlocksOverride, s.KV.MaxModelLen = configs.AutoShare, c.fraction, c.blocks, 256
		n, err := node.Open(t.Context(), node.Options{Settings: s})
		if err != nil {
			t.Fatal(err)
		}
		if lends := n.Observe().KV().Lent != nil; lends != c.lends {
			t.Errorf("%+v: lends %t", c, lends)
		}
		if err := n.Close(); err != nil {
			t.Error(err)
		}
	}
}

package pipeline

import (
	"errors"
	"fmt"
	"math/rand/v2"
	"testing"
	"time"

	"github.com/moeserve/moeserve/configs"
	"github.com/moeserve/moeserve/device"
	"github.com/moeserve/moeserve/device/emulated"
	"github.com/moeserve/moeserve/tools/racedetector"
)

func TestLaunchPolicy(t *testing.T) {
	const ms = time.Millisecond
	var p launchPolicy
	now := time.Duration(0)
	for i, c := range []struct {
		tokens       int
		linkTime     time.Duration // of the step before
		step, waited time.Duration // of this one; step 0: it fails
		want         bool
	}{
		{100, 5 * ms, 10 * ms, 0, false}, // no step before
		{100, 7 * ms, 10 * ms, 0, true},
		{100, 8 * ms, 10 * ms, 2 * ms, false}, // too much link time
		{100, 7 * ms, 10 * ms, 0, false},      // too much for the step before without its waits
		{100, 0, 10 * ms, 0, false},           // no copies
		{74, 5 * ms, 10 * ms, 0, false},       // too few tokens for a comparison
		{98, 5 * ms, 10 * ms, 0, true},        // about as many tokens
		{132, 5 * ms, 10 * ms, 0, false},
		{132, 5 * ms, 0, 0, true},
		{132, 1 * ms, 10 * ms, 0, false}, // the link time is of a failed step
		{132, 5 * ms, 10 * ms, 0, true},
	} {
		p.begin(now, c.tokens, c.linkTime)
		if p.singleLaunch != c.want {
			t.Errorf("step %d, %+v: single launch: %v", i, c, p.singleLaunch)
		}
		if now += c.step; c.step > 0 {
			p.end(now, c.waited)
		} else {
			p.fail()
		}
		now += ms
	}
}

// TestSingleLaunchSameResults: a step gives the same bits whether a layer's experts run in
// one launch or in waves, in all plans and when copies fail.
func TestSingleLaunchSameResults(t *testing.T) {
	want := newRig(t, "mixtral", 0, emulated.Options{Virtual: true}, Options{SmallBatchTokens: -1}).run()
	for i, mo := range machines(t) {
		for j, o := range []Options{
			{}, {MicroBatchTokens: 3}, {HostAttention: host}, {Grouping: configs.PerMicroBatch, MicroBatches: 2}, {HostAttention: host, Grouping: configs.PerMicroBatch, MicroBatches: 3},
		} {
			t.Run(fmt.Sprintf("%d %d", i, j), func(t *testing.T) {
				if racedetector.Enabled && (i+j)%2 > 0 {
					t.Skip("every second case under the race detector")
				}
				o.SmallBatchTokens = -1
				if mo.Virtual { // otherwise copies take real time
					mo.HostLink, mo.PeerLink = emulated.Link{BytesPerSecond: 1e9}, emulated.Link{BytesPerSecond: 4e9}
				}
				peers := []device.Space{device.HBM(1)}[:i%2]
				r := newRig(t, "mixtral", []float64{0.5, 0.75}[j%2], mo, o, peers...)
				if i%3 > 0 {
					defer r.m.Inject(&emulated.Fault{Kind: emulated.FailCopy, Match: fetch, Times: -1, Chance: 0.04 * float64(i%3)}).Release()
				}
				random := rand.New(rand.NewPCG(uint64(i), uint64(j)))
				singleLaunches := 0
				r.before = func(step int) {
					if r.p.launchPolicy.singleLaunch {
						singleLaunches++
					}
					// The link time is less, or more, than this.
					r.p.launchPolicy.lastTokens = []int{1, 7, 17, 3, 3, 1, 1}[step]
					r.p.launchPolicy.lastBusy = []time.Duration{1, time.Hour}[random.IntN(2)]
				}
				for range 2 {
					if d := r.run().differs(want); d != "" {
						t.Fatal(d)
					}
				}
				if singleLaunches == 0 {
					t.Error("no layer ran in a single launch")
				}
			})
		}
	}
}

// TestLaunchPolicyAfterFailure: the link time of a step that failed early does not count as
// that of a whole step.
func TestLaunchPolicyAfterFailure(t *testing.T) {
	r := newRig(t, "mixtral", 0.5, emulated.Options{
		Virtual: true, GPUs: []emulated.GPU{{BytesPerSecond: 400e6}}, HostLink: emulated.Link{BytesPerSecond: 100e6},
	}, Options{SmallBatchTokens: -1})
	step := r.decoding(5)
	for at := range 6 {
		if step(at); r.p.launchPolicy.singleLaunch {
			t.Fatalf("step %d: single launch, with a link time of %v", at, r.store.LinkTime())
		}
	}
	fault := r.m.Inject(&emulated.Fault{Kind: emulated.FailCopy, Match: own})
	defer fault.Release()
	table := r.kv.NewTable()
	defer table.Release(false)
	reserve(t, table, 8)
	one := &Step{}
	for range 5 {
		one.Sequences = append(one.Sequences, Sequence{Tokens: []int32{1}, Table: table, LogitRows: 1})
	}
	if _, err := r.p.Step(t.Context(), one); !errors.Is(err, ErrStepFailed) {
		t.Fatal(err)
	}
	_, err := r.p.Step(t.Context(), one)
	check(t, err)
	t.Logf("link time %v", r.store.LinkTime())
	if r.p.launchPolicy.singleLaunch {
		t.Error("single launch after a failed step")
	}
}

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
)

func TestPace(t *testing.T) {
	const ms = time.Millisecond
	var p pace
	now := time.Duration(0)
	for i, c := range []struct {
		rows         int
		links        time.Duration // of the step before
		step, waited time.Duration // of this one; step 0: it fails
		want         bool
	}{
		{100, 5 * ms, 10 * ms, 0, false}, // nothing is known
		{100, 7 * ms, 10 * ms, 0, true},
		{100, 8 * ms, 10 * ms, 2 * ms, false}, // links were at work for too long
		{100, 7 * ms, 10 * ms, 0, false},      // and now, beside what was not waited
		{100, 0, 10 * ms, 0, false},           // nothing is copied
		{74, 5 * ms, 10 * ms, 0, false},       // another kind of step
		{98, 5 * ms, 10 * ms, 0, true},        // about the same
		{132, 5 * ms, 10 * ms, 0, false},
		{132, 5 * ms, 0, 0, true},
		{132, 1 * ms, 10 * ms, 0, false}, // the links' time is that of a step that failed
		{132, 5 * ms, 10 * ms, 0, true},
	} {
		p.begin(now, c.rows, c.links)
		if p.together != c.want {
			t.Errorf("step %d, %+v: together: %v", i, c, p.together)
		}
		if now += c.step; c.step > 0 {
			p.end(now, c.waited)
		} else {
			p.fail()
		}
		now += ms
	}
}

// TestSameTogether: a step gives the same bits whether all experts of a layer are launched
// at once or in waves, in steps of every order, and where copies fail.
func TestSameTogether(t *testing.T) {
	want := newRig(t, "mixtral", 0, emulated.Options{Virtual: true}, Options{SmallBatchTokens: -1}).run()
	for i, mo := range machines(t) {
		for j, o := range []Options{
			{}, {MicroBatchTokens: 3}, {HostAttention: host}, {Grouping: configs.PerMicroBatch, MicroBatches: 2}, {HostAttention: host, Grouping: configs.PerMicroBatch, MicroBatches: 3},
		} {
			t.Run(fmt.Sprintf("%d %d", i, j), func(t *testing.T) {
				o.SmallBatchTokens = -1
				if mo.Virtual { // else copies take the time that they take
					mo.HostLink, mo.PeerLink = emulated.Link{BytesPerSecond: 1e9}, emulated.Link{BytesPerSecond: 4e9}
				}
				peers := []device.Space{device.HBM(1)}[:i%2]
				r := newRig(t, "mixtral", []float64{0.5, 0.75}[j%2], mo, o, peers...)
				if i%3 > 0 {
					defer r.m.Inject(&emulated.Fault{Kind: emulated.FailCopy, Match: fetch, Times: -1, Chance: 0.04 * float64(i%3)}).Release()
				}
				random := rand.New(rand.NewPCG(uint64(i), uint64(j)))
				together := 0
				r.before = func(step int) {
					if r.p.pace.together {
						together++
					}
					// Whatever the links do takes less, or more, than that.
					r.p.pace.workedRows = []int{1, 7, 17, 3, 3, 1, 1}[step]
					r.p.pace.worked = []time.Duration{1, time.Hour}[random.IntN(2)]
				}
				for range 2 {
					if d := r.run().differs(want); d != "" {
						t.Fatal(d)
					}
				}
				if together == 0 {
					t.Error("experts were never launched together")
				}
			})
		}
	}
}

// TestPaceBehindFailure: what links did in a step that failed early does not say that
// copies are short.
func TestPaceBehindFailure(t *testing.T) {
	r := newRig(t, "mixtral", 0.5, emulated.Options{
		Virtual: true, GPUs: []emulated.GPU{{BytesPerSecond: 400e6}}, HostLink: emulated.Link{BytesPerSecond: 100e6},
	}, Options{SmallBatchTokens: -1})
	step := r.decoding(5)
	for at := range 6 {
		if step(at); r.p.pace.together {
			t.Fatalf("step %d: all experts are launched together, and links are at work for %v", at, r.store.LinkTime())
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
	t.Logf("links were at work for %v", r.store.LinkTime())
	if r.p.pace.together {
		t.Error("all experts are launched together")
	}
}

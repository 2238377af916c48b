package transfer

import (
	"sync/atomic"
	"testing"
	"time"

	"pgregory.net/rapid"
)

// TestPacer: when chunks are due. With 1 GB/s and the margin, 1,150,000 bytes take 1 ms.
func TestPacer(t *testing.T) {
	const (
		chunk = 1_150_000
		ms    = time.Millisecond
	)
	p := pacer{profile: 1e9}
	var due [4]atomic.Int64
	want := func(when string, want ...time.Duration) {
		t.Helper()
		for i, w := range want {
			if got := time.Duration(due[i].Load()); (got - w).Abs() > time.Microsecond {
				t.Errorf("%s: chunk %d is due at %v, want %v", when, i, got, w)
			}
		}
	}
	p.launch(10*ms, chunk, &due[0])
	p.launch(10*ms, chunk, &due[1])
	p.launch(10*ms, chunk/2, &due[2])
	want("launched", 11*ms, 12*ms, 12*ms+ms/2)
	p.land(11*ms+ms/5, &due[0])
	want("the first has landed later", 11*ms, 12*ms+ms/5, 12*ms+ms*7/10)
	p.land(12*ms, &due[2])
	want("the third is seen before the second", 11*ms, 12*ms+ms/5)
	p.launch(12*ms, chunk, &due[3])
	want("another one", 11*ms, 12*ms+ms/5, 12*ms+ms*7/10, 13*ms+ms/5)
	p.launch(14*ms, chunk, &due[0])
	want("the one before is overdue", 15*ms)
	p.drop(14*ms, &due[1])
	want("one has failed", 0, 12*ms+ms/5, 12*ms+ms*7/10, 0)
	p.land(15*ms, &due[3])
	p.land(17*ms, &due[0])
	p.land(17*ms, &due[0])
	if len(p.flight) != 0 || p.rate != p.profile {
		t.Errorf("%d chunks are in flight, at a rate of %v", len(p.flight), p.rate)
	}
	p.launch(20*ms, chunk/100, &due[0])
	p.launch(20*ms, chunk*99/100, &due[1])
	want("soon, and one behind it", 0, 21*ms)
	p.land(20*ms+ms/2, &due[0])
	p.launch(22*ms, chunk/100, &due[2])
	p.land(23*ms, &due[1])
	want("soon, now", 0, 20*ms+ms*149/100, 0)
	p.land(23*ms, &due[2])

	// What the host has seen at once, since it was late before, is not much faster than the link.
	p.launch(30*ms, chunk, &due[0])
	p.launch(30*ms, chunk, &due[1])
	p.land(33*ms, &due[0])
	p.land(33*ms, &due[1])
	if p.rate != p.profile*paceMargin {
		t.Errorf("after one chunk in no time: %v", p.rate)
	}
	p.launch(40*ms, chunk, &due[0])
	p.land(42*ms, &due[0])
	if p.rate >= p.profile*paceMargin || p.rate <= p.profile {
		t.Errorf("after one at half the rate: %v", p.rate)
	}

	unknown := pacer{}
	unknown.launch(ms, 1<<40, &due[0])
	unknown.land(2*ms, &due[0])
	want("the rate is unknown", 0)
	if unknown.rate != 0 || len(unknown.flight) != 0 {
		t.Errorf("without a rate: %+v", unknown)
	}
}

// host is one that looks when chunks are due, and jitter later, at a link with depth chunks in flight. It
// returns how long after their landing it has seen the last chunks, and how long before it has looked for
// them, at most; the rate is the link's, in bytes per second.
func (p *pacer) host(rate float64, depth, chunks int, bytes int64, jitter func() time.Duration) (late, early time.Duration) {
	due := make([]atomic.Int64, depth)
	landed := make([]time.Duration, depth)
	var now, end time.Duration
	launch := func(i int) {
		p.launch(now, bytes, &due[i])
		end = max(end, now) + time.Duration(float64(bytes)/rate*1e9)
		landed[i] = end
	}
	for i := range due {
		launch(i)
	}
	for n := range chunks {
		i := n % depth
		told := max(now, time.Duration(due[i].Load()))
		now = max(told, landed[i]) + jitter()
		if n >= chunks-8 {
			late, early = max(late, now-landed[i]), max(early, landed[i]-told)
		}
		p.land(now, &due[i])
		launch(i)
	}
	return late, early
}

// TestPacerHeals: whatever the topology says of the rate, after some chunks the host is not late; where it
// is right, the host does not look much too soon either.
func TestPacerHeals(t *testing.T) {
	const rate, bytes = 55e9, 8 << 20
	exact := func() time.Duration { return 0 }
	for _, c := range []struct {
		profile      float64
		chunks       int
		late, sooner time.Duration
	}{
		{rate, 8, 0, 21 * time.Microsecond},
		{rate, 1000, 0, 21 * time.Microsecond},
		{rate * 1.3, 1000, 0, 52 * time.Microsecond},
		{rate / 1.1, 8, 0, 21 * time.Microsecond},
		{rate / 2, 8, time.Millisecond, 30 * time.Microsecond}, // not healed yet
		{rate / 2, 80, 0, 30 * time.Microsecond},
		{rate / 8, 80, 0, 30 * time.Microsecond},
	} {
		for _, depth := range []int{1, 2, 3} {
			p := pacer{profile: c.profile}
			late, early := p.host(rate, depth, c.chunks, bytes, exact)
			if late > c.late || early > c.sooner || c.late > 0 && late == 0 {
				t.Errorf("%.3g GB/s in place of 55, depth %d: %v late after %d chunks, want %v, or %v early, want %v",
					c.profile/1e9, depth, late, c.chunks, c.late, early, c.sooner)
			}
		}
	}
}

// TestPacerProperties: a host that sees chunks late now and then is not late because of that: with the
// right rate, no chunk is due after it has landed unless the one before was seen late.
func TestPacerProperties(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		const rate = 55e9
		p := pacer{profile: rate * rapid.Float64Range(1, 1.5).Draw(t, "profile")}
		bytes, depth := rapid.Int64Range(1<<20, 64<<20).Draw(t, "bytes"), rapid.IntRange(1, 4).Draw(t, "depth")
		longest := time.Duration(rapid.Int64Range(0, int64(100*time.Microsecond)).Draw(t, "jitter"))
		late, _ := p.host(rate, depth, 100, bytes, func() time.Duration {
			return time.Duration(rapid.Int64Range(0, int64(longest)).Draw(t, "late"))
		})
		if late > 2*longest+1 { // what a chunk was seen late delays the next one's due time, less the margin
			t.Fatalf("%v late, with reports that are late by %v", late, longest)
		}
		if p.rate > p.profile*100 {
			t.Fatalf("the rate is %v GB/s", p.rate/1e9)
		}
	})
}

// TestPacerAllocates: nothing.
func TestPacerAllocates(t *testing.T) {
	p := pacer{profile: 1e9}
	var due [3]atomic.Int64
	now := time.Duration(0)
	for i := range due {
		p.launch(now, 1<<20, &due[i])
	}
	if n := testing.AllocsPerRun(200, func() {
		for i := range due {
			now += time.Millisecond
			p.land(now, &due[i])
			p.launch(now, 1<<20, &due[i])
		}
	}); n > 0 {
		t.Errorf("%v allocations", n)
	}
}

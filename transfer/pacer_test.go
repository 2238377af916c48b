package transfer

import (
	"testing"
	"time"

	"pgregory.net/rapid"

	"github.com/moeserve/moeserve/device"
)

// TestPacer: when chunks are due. With 1 GB/s and the margin, 1,150,000 bytes take 1 ms.
func TestPacer(t *testing.T) {
	const (
		chunk = 1_150_000
		ms    = time.Millisecond
	)
	p := pacer{profile: 1e9}
	var due [4]device.Due
	want := func(when string, want ...time.Duration) {
		t.Helper()
		for i, w := range want {
			if got := time.Duration(due[i].NotBefore.Load()); (got - w).Abs() > time.Microsecond {
				t.Errorf("%s: chunk %d is due at %v, want %v", when, i, got, w)
			}
		}
	}
	// land is what the host does that has last looked in vain at a time; 0: never.
	land := func(now, pending time.Duration, i int) {
		due[i].Pending.Store(int64(pending))
		p.land(now, &due[i])
	}
	p.launch(0, chunk, &due[0])
	p.launch(0, chunk, &due[1])
	want("nothing has landed yet", 0, 0)
	land(ms*12/10, ms*11/10, 0)
	want("the first took as long as it was reckoned to", 0, ms*21/10)
	land(3*ms, 3*ms, 1)

	p.launch(10*ms, chunk, &due[0])
	p.launch(10*ms, chunk, &due[1])
	p.launch(10*ms, chunk/2, &due[2])
	want("launched", 11*ms, 12*ms, 12*ms+ms/2)
	land(11*ms+ms/5, 11*ms+ms/10, 0)
	want("the first has landed later", 11*ms, 12*ms+ms/10, 12*ms+ms*6/10)
	land(12*ms, 0, 2)
	want("the third is seen before the second", 11*ms, 12*ms+ms/10)
	p.launch(12*ms, chunk, &due[3])
	want("another one", 11*ms, 12*ms+ms/10, 12*ms+ms*6/10, 13*ms+ms/10)
	p.launch(14*ms, chunk, &due[0])
	want("the one before is overdue", 15*ms)
	p.drop(14*ms, &due[1])
	want("one has failed", 0, 12*ms+ms/10, 12*ms+ms*6/10, 0)
	land(15*ms, 14*ms, 3)
	land(17*ms, 17*ms, 0)
	land(17*ms, 17*ms, 0)
	if len(p.flight) != 0 || p.rate != p.profile {
		t.Errorf("%d chunks are in flight, at a rate of %v", len(p.flight), p.rate)
	}
	p.launch(20*ms, chunk/100, &due[0])
	p.launch(20*ms, chunk*99/100, &due[1])
	want("soon, and one behind it", 0, 21*ms)
	land(20*ms+ms/2, 20*ms+ms/2, 0)
	p.launch(22*ms, chunk/100, &due[2])
	land(23*ms, 22*ms, 1)
	want("soon, now", 0, 20*ms+ms*149/100, 0)
	land(23*ms, 23*ms, 2)

	// One that had landed when it was looked for first: nobody knows by how much the rate is too low.
	p.launch(25*ms, chunk, &due[0])
	p.launch(25*ms, chunk, &due[1])
	land(26*ms+1, 0, 0)
	want("the first had landed", 26*ms, 0)
	land(27*ms, 26*ms, 1)
	p.launch(28*ms, chunk, &due[0])
	want("the second was looked for in vain too early to tell", 0)
	land(29*ms+1, 29*ms, 0)
	p.launch(29*ms+1, chunk, &due[0])
	want("the third took as long as it was reckoned to, by a rate that is an eighth of the margin higher now", 29_869_566*time.Nanosecond)
	land(31*ms, 31*ms, 0)

	// One behind an end that was seen in time tells the rate, by the margin at most.
	p.launch(40*ms, chunk, &due[0])
	p.launch(40*ms, chunk, &due[1])
	land(43*ms, 43*ms, 0)
	land(43*ms+ms/2, 43*ms+ms/2, 1)
	if p.rate != p.profile*paceMargin {
		t.Errorf("after one chunk in half the time: %v", p.rate)
	}
	p.launch(50*ms, chunk, &due[0])
	land(52*ms, 52*ms, 0)
	if p.rate >= p.profile*paceMargin || p.rate <= p.profile {
		t.Errorf("after one at half the rate: %v", p.rate)
	}

	// Chunks that are seen at once do not make the link think that it is ever faster, and small ones tell nothing.
	at := 60 * ms
	for range 400 {
		p.launch(at, chunk, &due[0])
		p.launch(at, chunk, &due[1])
		at += 23 * ms / 10
		land(at, at-ms/2, 0)
		land(at, at-ms/2, 1)
	}
	if p.rate != p.profile {
		t.Errorf("after pairs of chunks that were seen at once, late: %v", p.rate)
	}
	for _, trusted := range []bool{true, false} {
		p.trusted = trusted
		p.launch(at, chunk/100, &due[0])
		if land(at+1, 0, 0); p.trusted != trusted {
			t.Errorf("a small chunk makes it %v what the host is told", p.trusted)
		}
	}

	unknown := pacer{}
	unknown.launch(ms, 1<<40, &due[0])
	unknown.land(2*ms, &due[0])
	want("the rate is unknown", 0)
	if unknown.rate != 0 || len(unknown.flight) != 0 {
		t.Errorf("without a rate: %+v", unknown)
	}
}

// looker is a host that copies chunks over a link of rate bytes per second, depth of them in flight. It looks
// every so often, but not before a chunk is due; where sleeps is set, it sleeps until 20 us before that, wakes
// so much later than it wanted, and then looks all the time, or sleeps for nap between two looks and wakes late.
type looker struct {
	rate   float64
	depth  int
	bytes  int64
	every  time.Duration
	sleeps bool
	late   func() time.Duration
	nap    time.Duration
}

// run copies chunks, and returns how long that takes for each, the mean of how long after its landing one is seen,
// and the fraction of the time for which the host sleeps or has nothing to look for. p is nil for a host that is told nothing.
func (l *looker) run(p *pacer, chunks int) (each, seen time.Duration, idle float64) {
	due, landed := make([]device.Due, l.depth), make([]time.Duration, l.depth)
	var now, end, lateness, rested time.Duration
	launch := func(i int) {
		if p != nil {
			p.launch(now, l.bytes, &due[i])
		}
		end = max(end, now) + time.Duration(float64(l.bytes)/l.rate*1e9)
		landed[i] = end
	}
	for i := range due {
		launch(i)
	}
	for n := range chunks {
		i := n % l.depth
		notBefore, pending := time.Duration(due[i].NotBefore.Load()), time.Duration(0)
		every := l.every
		if notBefore > now+40*time.Microsecond && l.sleeps {
			rested += notBefore - 20*time.Microsecond - now
			now, every = notBefore-20*time.Microsecond+l.late(), time.Microsecond/2
			if l.nap > 0 {
				every = l.nap + l.late()
			}
		}
		for {
			if now >= notBefore {
				if now >= landed[i] {
					break
				}
				pending = now
			}
			// The first look that may find something, on the host's own grid.
			k := max(1, (max(notBefore, landed[i]-every)-now)/every)
			now += k * every
		}
		lateness += now - landed[i]
		due[i].Pending.Store(int64(pending))
		if p != nil {
			p.land(now, &due[i])
		}
		launch(i)
	}
	return now / time.Duration(chunks), lateness / time.Duration(chunks), float64(rested) / float64(now)
}

// TestPacerCostsNoTime: a host that looks only for chunks that are due copies as fast as one that looks for all,
// however seldom it looks, and whatever the topology says of the rate.
func TestPacerCostsNoTime(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		l := looker{
			rate: 55e9, depth: rapid.IntRange(1, 4).Draw(t, "depth"), bytes: rapid.Int64Range(4<<20, 64<<20).Draw(t, "bytes"),
			every: time.Duration(rapid.IntRange(1, 50_000).Draw(t, "every")), late: func() time.Duration { return 0 },
		}
		ratio := rapid.Float64Range(0.1, 2).Draw(t, "profile")
		const chunks = 400
		want, late, _ := l.run(nil, chunks)
		got, told, _ := l.run(&pacer{profile: ratio * l.rate}, chunks)
		if got > want*1001/1000+1 || told > late+l.every/100+1 {
			t.Fatalf("a chunk takes %v and is seen %v late; %v and %v where all are looked for", got, told, want, late)
		}
	})
}

// TestPacerSaves: a host that sleeps until a chunk is due copies at the link's rate, though it wakes late, and sleeps
// for much of the time, if the topology is right or its rate too low by not more than the margin heals; it does not sleep where
// the link is slower than its rate says, as then it is told too early.
func TestPacerSaves(t *testing.T) {
	us := time.Microsecond
	for _, c := range []struct {
		ratio float64 // the profile's rate over the link's
		late  time.Duration
		bytes int64
		idle  float64 // at least
		nap   time.Duration
	}{
		{1, 0, 8 << 20, 0.6, 0},
		{1, 15 * us, 8 << 20, 0.6, 0},
		{1, 35 * us, 8 << 20, 0.5, 0},
		{1, 60 * us, 8 << 20, 0.2, 0},
		{1, 15 * us, 64 << 20, 0.8, 0},
		{0.9, 15 * us, 8 << 20, 0.6, 0},
		{0.5, 15 * us, 8 << 20, 0.6, 0},
		{0.1, 15 * us, 8 << 20, 0.6, 0},
		{1.3, 15 * us, 8 << 20, 0.4, 0},
		{2, 15 * us, 8 << 20, 0, 0},
		{1, 6 * us, 8 << 20, 0.5, 20 * us}, // in a long wait, on a machine whose sleeps end 6 us late
		{0.97, 6 * us, 8 << 20, 0.5, 20 * us},
		{1.05, 6 * us, 8 << 20, 0.5, 20 * us},
	} {
		for _, depth := range []int{2, 3, 4} {
			l := looker{rate: 55e9, depth: depth, bytes: c.bytes, every: us / 2, sleeps: true, late: func() time.Duration { return c.late }, nap: c.nap}
			const chunks = 1000
			real := time.Duration(float64(c.bytes) / l.rate * 1e9)
			got, _, idle := l.run(&pacer{profile: c.ratio * l.rate}, chunks)
			if got > real*1002/1000+real/chunks || idle < c.idle {
				t.Errorf("a profile of %v of the rate, woken %v late, depth %d: a chunk takes %v, want %v; asleep for %.2f of the time, want %v",
					c.ratio, c.late, depth, got, real, idle, c.idle)
			}
		}
	}
}

// TestPacerAllocates: nothing.
func TestPacerAllocates(t *testing.T) {
	p := pacer{profile: 1e9}
	var due [3]device.Due
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

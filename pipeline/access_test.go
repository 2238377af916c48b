package pipeline

import (
	"errors"
	"fmt"
	"log/slog"
	"math"
	"math/rand/v2"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/moeserve/moeserve/configs"
	"github.com/moeserve/moeserve/device"
	"github.com/moeserve/moeserve/device/emulated"
	"github.com/moeserve/moeserve/experts"
	"github.com/moeserve/moeserve/tools/racedetector"
)

// TestInPlaceSameResults: steps whose kernels read experts in place give the same results as
// steps whose experts are all resident, kernel by kernel and as graphs, wherever the experts
// are; every small step is one, and most are graphs. Its uses are those of the routed experts.
func TestInPlaceSameResults(t *testing.T) {
	for i, name := range sameOn {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			const steps = 120
			seed := uint64(i)
			plain := newRig(t, name, 0, emulated.Options{Virtual: true}, Options{})
			want := plain.generate(seed, steps, nil)
			for j, mo := range machines(t) {
				for _, peers := range [][]device.Space{nil, {device.HBM(1), device.HBM(2)}} {
					o := Options{ExpertAccess: configs.DirectAccess, MicroBatchTokens: []int{0, 3}[j%2]}
					if j%3 == 0 {
						o.Graphs = 5
					}
					fraction := []float64{0.25, 0.5, 1}[j%3]
					what := fmt.Sprintf("fraction %v, %v, %d graphs, %+v", fraction, peers, o.Graphs, mo)
					r := newRig(t, name, fraction, mo, o, peers...)
					if got := r.generate(seed, steps, nil); got != want {
						t.Fatalf("%s: %s", what, firstDifference(got, want))
					}
					by, graphs, now := r.p.StepsByAccess(), r.p.Graphs(), r.store.Stats()
					if by.Direct < steps/2 || by.Copied == 0 || by.Direct+by.Copied != steps {
						t.Errorf("%s: %+v of %d steps", what, by, steps)
					}
					if o.Graphs > 0 && (graphs.Launched < by.Direct/2 || graphs.Failed > 0) {
						t.Errorf("%s: %+v of %d steps in place", what, graphs, by.Direct)
					}
					from, none := experts.Host, experts.Peer
					if len(peers) > 0 {
						from, none = none, from
					}
					// Of a model with one layer of experts the expert cache comes to have all of them.
					cached := name == "qwen2_moe_sparse_step" && now.Uses[experts.Cached] > 0
					if now.ReadInPlace[from] == 0 && !cached || now.ReadInPlace[none] != 0 {
						t.Errorf("%s: %v bytes were read in place", what, now.ReadInPlace)
					}
				}
			}
		})
	}
}

// TestInPlaceTokens: steps of up to MaxInPlaceTokens tokens are in place with DirectAccess, and
// none with CopyAccess, or where kernels cannot read host memory, which the log says.
func TestInPlaceTokens(t *testing.T) {
	const knownAccess = configs.ExpertAccess(100) // auto, with rates that are known
	for _, c := range []struct {
		set  configs.ExpertAccess
		mo   emulated.Options
		want int
		log  string
	}{
		{configs.DirectAccess, emulated.Options{}, MaxInPlaceTokens, ""},
		{configs.CopyAccess, emulated.Options{}, 0, ""},
		{configs.AutoAccess, emulated.Options{}, 0, ""},
		{configs.DirectAccess, emulated.Options{NotMapped: []device.Space{device.Host}}, 0, "experts are not read in place"},
		{knownAccess, emulated.Options{}, MaxInPlaceTokens, ""},
		{knownAccess, emulated.Options{NotMapped: []device.Space{device.Host}}, 0, "experts are not read in place"},
		{configs.DirectAccess, emulated.Options{NoData: true}, 0, "experts are not read in place"},
	} {
		var log strings.Builder
		c.mo.Virtual = true
		o := Options{ExpertAccess: c.set, Log: slog.New(slog.NewTextHandler(&log, nil))}
		if c.set == knownAccess {
			o.ExpertAccess, o.AccessModel = configs.AutoAccess, accessModel(1, 1)
			o.AccessModel.RoundTrip = time.Second // so that it reads in place what it can
		}
		r := newRig(t, "mixtral", 0.5, c.mo, o)
		for _, tokens := range []int{1, MaxInPlaceTokens, MaxInPlaceTokens + 1, 64} {
			if got := r.p.planFor(tokens).inPlace; got != (tokens <= c.want) {
				t.Errorf("%s, %+v: a step of %d tokens is in place: %t", c.set, c.mo, tokens, got)
			}
		}
		if (c.log == "") != (log.Len() == 0) || !strings.Contains(log.String(), c.log) || strings.Count(log.String(), "\n") > 1 {
			t.Errorf("%s, %+v: the log has %q, want %q", c.set, c.mo, log.String(), c.log)
		}
	}
}

// TestInPlaceFailures: copies of step metadata fail at random, and a peer is lost while steps
// read its memory: no result changes, and the peer is not read again.
func TestInPlaceFailures(t *testing.T) {
	racedetector.SkipSequential(t) // in virtual time
	const steps = 120
	want := newRig(t, "mixtral", 0, emulated.Options{Virtual: true}, Options{}).generate(4, steps, nil)
	for _, graphs := range []int{-1, 4} {
		r := newRig(t, "mixtral", 0.75, emulated.Options{Virtual: true, Seed: 3, Check: graphs < 0}, Options{ExpertAccess: configs.DirectAccess, Graphs: graphs}, device.HBM(1), device.HBM(2))
		faults := r.m.Inject(&emulated.Fault{
			Kind: emulated.FailCopy, Chance: 0.03, Times: -1,
			Match: func(p emulated.Point) bool { return p.Stream == "compute" },
		})
		failed, lost := 0, false
		retry := func(err error) bool {
			failed++
			lost = lost || errors.Is(err, device.ErrLost)
			return errors.Is(err, ErrStepFailed)
		}
		if got := r.generate(4, steps, retry); got != want {
			t.Fatal(firstDifference(got, want))
		}
		if faults.Hits() == 0 || failed == 0 {
			t.Errorf("%d copies failed, and %d steps", faults.Hits(), failed)
		}
		before := r.store.Stats().ReadInPlace
		if before[experts.Peer] == 0 {
			t.Errorf("%v bytes read in place", before)
		}
		for i := range 2 {
			check(t, r.m.Lose(1+i))
		}
		if got := r.generate(4, steps, retry); got != want {
			t.Fatal(firstDifference(got, want))
		}
		if now := r.store.Stats().ReadInPlace; !lost || now[experts.Host] == before[experts.Host] {
			t.Errorf("a step found a peer lost: %t; %v bytes read in place before, %v after", lost, before, now)
		}
	}
}

// TestAutoAccessSameResults: whatever is chosen from step to step, by a model and by times that the
// devices' rates make differ from it, the results are the same; both ways occur.
func TestAutoAccessSameResults(t *testing.T) {
	racedetector.SkipSequential(t) // in virtual time
	const steps = 150
	want := newRig(t, "mixtral", 0, emulated.Options{Virtual: true}, Options{}).generate(4, steps, nil)
	m := accessModel(1, 1)
	m.Experts, m.TopK, m.Layers = 8, 2, 2
	for _, peers := range [][]device.Space{nil, {device.HBM(1)}} {
		mo := emulated.Options{
			Virtual: true, Check: true, HostLink: emulated.Link{BytesPerSecond: 1e9, Latency: time.Microsecond}, PeerLink: emulated.Link{BytesPerSecond: 5e9},
			GPUs: []emulated.GPU{{FlopsPerSecond: 1e12, BytesPerSecond: 1e10}, {}},
		}
		r := newRig(t, "mixtral", 0.5, mo, Options{AccessModel: m, Graphs: 4}, peers...)
		for range 3 {
			if got := r.generate(4, steps, nil); got != want {
				t.Fatal(firstDifference(got, want))
			}
		}
		by := r.p.StepsByAccess()
		t.Logf("peers %v: %+v, %+v", peers, by, r.p.Graphs())
		measured := slices.ContainsFunc(r.p.access.sizes, func(t accessTimes) bool { return t.n[byCopy] > 0 && t.n[inPlace] > 0 })
		if !measured || by.Direct == 0 || by.Copied == 0 || by.Direct+by.Copied != 3*steps {
			t.Errorf("peers %v: %+v of %d steps", peers, by, 3*steps)
		}
	}
}

// accessModel is of a model of 64 experts on a machine whose kernels read at these shares of the rates
// of copies.
func accessModel(host, peer float64) AccessModel {
	return AccessModel{
		Experts: 64, TopK: 4, Layers: 24, ExpertBytes: 17 << 20, Offloaded: 0.5, MemoryRate: 4.6e12, RoundTrip: 13 * time.Microsecond, MaxHold: 50 * time.Millisecond,
		Host: Link{CopyRate: 55e9, ReadRate: host * 55e9, CopyStart: 7 * time.Microsecond, ReadStart: 5 * time.Microsecond},
		Peer: Link{CopyRate: 394e9, ReadRate: peer * 394e9, CopyStart: 9 * time.Microsecond, ReadStart: 4 * time.Microsecond},
	}
}

// TestAccessModel compares with times computed by hand.
func TestAccessModel(t *testing.T) {
	m := accessModel(0.8, 0.95)
	bytes := 0.5 * 4 * (17 << 20) // of two experts
	if got := m.Missing(1); math.Abs(got/bytes-1) > 1e-9 {
		t.Errorf("a token misses %.0f bytes a layer, want %.0f", got, bytes)
	}
	if got := m.Missing(1000) / (17 << 20); math.Abs(got-32) > 0.01 {
		t.Errorf("many tokens miss %.3f experts, want 32", got)
	}
	near := func(got time.Duration, want float64) bool { return math.Abs(got.Seconds()/want-1) < 1e-6 }
	copied, read := m.Predict(1, true, 0)
	if !near(copied, 24*(13e-6+bytes/4.6e12+7e-6+1.08*bytes/55e9)) || !near(read, 24*(5e-6+bytes/(0.8*55e9))) {
		t.Errorf("from the host: %v by copies, %v in place", copied, read)
	}
	if read < copied {
		t.Errorf("from the host: %v in place, which is 20 %% slower, and %v by copies", read, copied)
	}
	copied, read = m.Predict(1, true, 1)
	if !near(copied, 24*(13e-6+bytes/4.6e12+9e-6+1.08*bytes/394e9)) || !near(read, 24*(4e-6+bytes/(0.95*394e9))) || read >= copied {
		t.Errorf("from peers: %v by copies, %v in place", copied, read)
	}
	copied, read = m.Predict(1, true, 0.5) // the host's half takes longer
	if !near(copied, 24*(13e-6+bytes/4.6e12+7e-6+1.08*bytes/2/55e9)) || !near(read, 24*(5e-6+bytes/2/(0.8*55e9))) {
		t.Errorf("from both: %v by copies, %v in place", copied, read)
	}
	all := bytes * 16 // all 32 offloaded experts, not two
	copied, read = m.Predict(1, false, 1)
	if !near(copied, 24*(9e-6+all/394e9)) || !near(read, 24*(4e-6+bytes/(0.95*394e9))) {
		t.Errorf("from peers: %v by copies of all experts, %v in place", copied, read)
	}
	m.Peer.ReadRate = 0 // peers cannot be read: the host's copies are
	if _, read = m.Predict(1, true, 1); !near(read, 24*(5e-6+bytes/(0.8*55e9))) {
		t.Errorf("from peers that cannot be read: %v in place", read)
	}
	if m.Host.ReadRate = 0; m.Known() {
		t.Error("a model without the rate of reads is complete")
	}
}

// TestAccessFailedSteps: the uses of a step that failed do not count for the step that is run again.
func TestAccessFailedSteps(t *testing.T) {
	r := newRig(t, "mixtral", 1, emulated.Options{Virtual: true}, Options{ExpertAccess: configs.CopyAccess})
	table := r.kv.NewTable()
	reserve(t, table, 8)
	defer table.Release(false)
	r.m.Inject(&emulated.Fault{Kind: emulated.FailCopy, Match: own, Skip: 9, Times: 1})
	step := &Step{Sequences: []Sequence{{Tokens: []int32{1}, Table: table, LogitRows: 1}}}
	if _, err := r.p.Step(t.Context(), step); !errors.Is(err, ErrStepFailed) {
		t.Fatalf("with a failed copy: %v", err)
	}
	if used := r.store.OffloadedUses(); used == 0 || r.p.offloadedUses != used {
		t.Errorf("%d uses before the step that is run again, counted are %d", used, r.p.offloadedUses)
	}
}

// TestAccessCPUExperts: with a fraction of the experts on the CPU, auto leaves steps of few tokens to it.
func TestAccessCPUExperts(t *testing.T) {
	r := newRig(t, "mixtral", 1, emulated.Options{Virtual: true}, Options{AccessModel: accessModel(2, 1), CPUExperts: host, CPUShare: cpuShare(1)})
	r.run()
	if by, s := r.p.StepsByAccess(), r.store.Stats(); by.Direct != 0 || s.OnCPU == 0 {
		t.Errorf("%+v of the steps, %+v", by, s)
	}
}

// TestAccessHold: steps that would hold peers' memory for longer than they may
// copy, except where they are told not to; without peer copies nothing is held.
func TestAccessHold(t *testing.T) {
	m := accessModel(1, 1)
	m.ExpertBytes = 352 << 20
	for _, x := range []struct {
		set   configs.ExpertAccess
		peers float64
		hold  time.Duration
		want  access
	}{
		{configs.AutoAccess, 0, 50 * time.Millisecond, inPlace},
		{configs.AutoAccess, 0.5, 50 * time.Millisecond, byCopy},
		{configs.AutoAccess, 0.5, time.Second, inPlace},
		{configs.AutoAccess, 0.5, 0, inPlace},
		{configs.DirectAccess, 0.5, 50 * time.Millisecond, inPlace},
	} {
		m.MaxHold = x.hold
		c := accessChooser{setting: x.set, possible: true, limit: MaxInPlaceTokens, model: m}
		if got := c.choose(1, true, x.peers); got != x.want {
			_, hold := m.Predict(1, true, x.peers)
			t.Errorf("%s, %v of the experts on peers, %v in place where %v is allowed: chosen %d, want %d", x.set, x.peers, hold, x.hold, got, x.want)
		}
	}
}

// TestAccessChooser: whatever the model says, steps take at most 3 % longer than with the better
// of the two ways alone, over machines whose times differ from the model's by up to 40 %, and where
// the number of offloaded experts differs by 10 % from step to step. Where the two ways are within
// 15 % of each other, that holds from the first 24 steps on.
func TestAccessChooser(t *testing.T) {
	racedetector.SkipSequential(t)
	random := rand.New(rand.NewPCG(1, 2))
	worst, worstFirst := 0.0, 0.0
	for range 400 {
		c := accessChooser{setting: configs.AutoAccess, possible: true, limit: MaxInPlaceTokens, model: accessModel(0.8+0.4*random.Float64(), 0.8+0.4*random.Float64())}
		c.model.Layers = 1 // so that no step holds peers' memory for long
		tokens, peers, onDemand := 1+random.IntN(MaxInPlaceTokens), random.Float64(), random.IntN(4) > 0
		byCopies, inThePlace := c.model.Predict(tokens, onDemand, peers)
		truth := [accesses]float64{byCopies.Seconds() * (0.7 + 0.7*random.Float64()), inThePlace.Seconds() * (0.7 + 0.7*random.Float64())}
		base := 0.1 * truth[0] // the rest of a step
		near := math.Abs(truth[0]/truth[1]-1) < 0.15
		var sum float64
		var each [accesses]float64
		const steps = 4000
		for i := range steps {
			a := c.choose(tokens, onDemand, peers)
			load := max(0.2, 1+0.1*random.NormFloat64())
			loads := [accesses]float64{load, load}
			if !onDemand {
				loads = [accesses]float64{1, 1 + 0.2*(load-1)} // nearly all experts are selected
			}
			for w := range each {
				each[w] += base + truth[w]*loads[w]
			}
			took := (base + truth[a]*loads[a]) * (1 + 0.01*random.NormFloat64())
			sum += base + truth[a]*loads[a]
			c.took(time.Duration(took*float64(time.Second)), int64(1000*load))
			if slower := sum / min(each[0], each[1]); i == 23 && near {
				worstFirst = max(worstFirst, slower)
			}
		}
		worst = max(worst, sum/min(each[0], each[1]))
		if by := [...]int64{c.steps[0].Load(), c.steps[1].Load()}; by[0]+by[1] != int64(steps) {
			t.Fatalf("%d and %d steps of %d", by[0], by[1], steps)
		}
	}
	t.Logf("at most %.2f %% slower, in the first 24 steps of similar ways %.2f %%", 100*(worst-1), 100*(worstFirst-1))
	if worst > 1.03 || worstFirst > 1.03 {
		t.Errorf("steps take %.3f times as long as the better way, in the first 24 steps of similar ways %.3f times", worst, worstFirst)
	}
}

// TestAccessChooserWithCPU: with experts on the CPU, steps take at most 2 % longer than with the best of four ways
// alone, behind the first 200 (in which all are measured), with a constant number of tokens, over machines on which each takes up to twice as long as by the model, or half, from
// step to step by 5 % more or less.
func TestAccessChooserWithCPU(t *testing.T) {
	racedetector.SkipSequential(t)
	random := rand.New(rand.NewPCG(3, 4))
	worst := 0.0
	var won [accesses]int
	for range 400 {
		c := accessChooser{setting: configs.AutoAccess, possible: random.IntN(4) > 0, limit: MaxInPlaceTokens, cpuLimit: 60, model: accessModel(0.8+0.4*random.Float64(), 1)}
		c.model.Layers, c.model.CPURate, c.model.CPUStart = 1, 110e9, 50*time.Microsecond
		tokens := 1 + random.IntN(60)
		if !c.possible && random.IntN(2) == 0 {
			c.setting = configs.CopyAccess
		}
		c.divides = c.possible && random.IntN(3) > 0
		byCopies, inThePlace := c.model.Predict(tokens, true, 0)
		truth := [accesses]float64{byCopies.Seconds(), inThePlace.Seconds(), c.model.PredictOnCPU(tokens, 0).Seconds(), byCopies.Seconds()}
		for a := range truth {
			truth[a] *= math.Exp2(2*random.Float64() - 1)
		}
		truth[inPlace] *= 0.6 // by the model it is rarely the best
		possible := func(a access) bool {
			return (a != inPlace || c.possible && tokens <= c.limit) && (a != wholeExperts || c.divides)
		}
		best := access(0)
		for a := range truth {
			if possible(access(a)) && truth[a] < truth[best] {
				best = access(a)
			}
		}
		won[best]++
		var sum float64
		const first, steps = 200, 4000
		for i := range first + steps {
			a := c.choose(tokens, true, 0)
			if !possible(a) {
				t.Fatalf("a step of %d tokens takes way %d", tokens, a)
			}
			if i >= first {
				sum += truth[a]
			}
			c.took(time.Duration(truth[a]*(1+0.05*random.NormFloat64())*float64(time.Second)), 1000)
		}
		worst = max(worst, sum/(steps*truth[best]))
	}
	t.Logf("at most %.2f %% slower; the best ways: %v", 100*(worst-1), won)
	if worst > 1.02 || slices.Contains(won[:], 0) {
		t.Errorf("steps take %.3f times as long as by the best way; the best ways: %v", worst, won)
	}
}

// TestAccessChooserChangingTokens: where the number of tokens changes so often that no probe counts, few steps are probes.
func TestAccessChooserChangingTokens(t *testing.T) {
	for _, pattern := range [][]int{{3, 4}, {3, 3, 4, 4}, {1, 2, 3, 4, 5}} {
		c := accessChooser{setting: configs.AutoAccess, possible: true, limit: MaxInPlaceTokens, cpuLimit: 60, model: accessModel(1, 1)}
		c.model.Layers, c.model.CPURate, c.model.CPUStart = 1, 110e9, 50*time.Microsecond
		const steps = 4000
		var chosen [accesses]int
		for i := range steps {
			chosen[c.choose(pattern[i%len(pattern)], true, 0)]++
			c.took(time.Millisecond, 1000)
		}
		if most := slices.Max(chosen[:]); steps-most > steps/20 {
			t.Errorf("tokens %v: ways %v of %d steps", pattern, chosen, steps)
		}
	}
}

// TestAccessChooserOutlier: a step that takes ten times as long, once, changes nothing; where all take twice as long
// from then on, the other way is taken.
func TestAccessChooserOutlier(t *testing.T) {
	for _, c := range []struct {
		slow int
		want access
	}{{1, byCopy}, {40, inPlace}} {
		x := accessChooser{setting: configs.AutoAccess, possible: true, limit: MaxInPlaceTokens, model: accessModel(0.8, 1)}
		truth := [accesses]time.Duration{10 * time.Millisecond, 14 * time.Millisecond}
		for range 60 {
			x.took(truth[x.choose(1, true, 0)], 40)
		}
		for range c.slow {
			took := truth[x.choose(1, true, 0)]
			if x.chosen == byCopy {
				if took *= 2; c.slow == 1 {
					took *= 5
				}
			}
			x.took(took, 40)
		}
		if got := x.choose(1, true, 0); got != c.want {
			t.Errorf("behind %d slow steps the way is %d, want %d", c.slow, got, c.want)
		}
	}
}

// TestAccessPredictsCPU: with experts on the CPU, copies take the time in which both bring their parts.
func TestAccessPredictsCPU(t *testing.T) {
	m := AccessModel{
		Experts: 8, TopK: 2, Layers: 10, ExpertBytes: 100e6, Offloaded: 0.5, MemoryRate: 1e15,
		Host: Link{CopyRate: 50e9, ReadRate: 45e9}, CPURate: 100e9, CPUStart: 100 * time.Microsecond,
	}
	missing := m.Missing(1)
	link := (1 + mispredicted) * missing / 50e9
	with, _ := m.Predict(1, true, 0)
	// The CPU has a share of the bytes after which both end together.
	share := (link - 100e-6) / (link + missing/100e9)
	if cpu := 100e-6 + share*missing/100e9; math.Abs(cpu-(1-share)*link) > 1e-9 || math.Abs(with.Seconds()-10*cpu) > 1e-6 {
		t.Errorf("predicted %v with the CPU, want 10 layers of %v s or %v s", with, cpu, (1-share)*link)
	}
	if alone := 10 * (100e-6 + missing/100e9); math.Abs(m.PredictOnCPU(1, 0).Seconds()-alone) > 1e-6 {
		t.Errorf("predicted %v on the CPU alone, want %v s", m.PredictOnCPU(1, 0), alone)
	}
	m.CPUStart = time.Second
	late, _ := m.Predict(1, true, 0)
	m.CPURate = 0
	if without, _ := m.Predict(1, true, 0); late != without || with >= without {
		t.Errorf("predicted %v with the CPU, %v if it starts late, %v without", with, late, without)
	}
}

// TestAccessAgain: a step is known to be in place without a choice only behind some that were chosen so, while none is
// measured, and where peers' memory is not held for too long.
func TestAccessAgain(t *testing.T) {
	for _, set := range []configs.ExpertAccess{configs.AutoAccess, configs.DirectAccess} {
		c := accessChooser{setting: set, possible: true, limit: MaxInPlaceTokens, model: accessModel(0.5, 1)}
		c.model.MaxHold = 20 * time.Millisecond
		chosen, known := 0, 0
		for i := range 2 * probeInterval {
			if c.again(4, 10*time.Millisecond) {
				known++
				c.repeat()
			} else if chosen++; c.choose(4, true, 0) != inPlace && set == configs.DirectAccess {
				t.Fatalf("step %d is not in place", i)
			}
			if c.again(3, 0) || c.again(4, 21*time.Millisecond) {
				t.Fatalf("%v: step %d of other tokens, or that holds memory for too long, is known to be in place", set, i)
			}
			took := 10 * time.Millisecond
			if c.chosen == byCopy {
				took = 12 * time.Millisecond
			}
			c.took(took, 4)
		}
		probes := c.steps[byCopy].Load()
		t.Logf("%v: %d steps chosen, %d known to be in place, %d copied", set, chosen, known, probes)
		if set == configs.AutoAccess && (probes < 2*probeSteps || probes > 3*probeSteps) || chosen > 60 {
			t.Errorf("%v: %d steps were chosen, %d copied", set, chosen, probes)
		}
	}
}

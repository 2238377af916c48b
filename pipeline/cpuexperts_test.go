package pipeline

import (
	"errors"
	"math"
	"slices"
	"testing"
	"time"

	"github.com/moeserve/moeserve/configs"
	"github.com/moeserve/moeserve/device"
	"github.com/moeserve/moeserve/device/emulated"
	"github.com/moeserve/moeserve/experts"
)

// cpuShare is a share for a rig, with rates at which CPU and link both get experts.
func cpuShare(fraction float64) *experts.CPUShare {
	return experts.NewCPUShare(fraction, experts.CPURate{BytesPerSecond: 200e6, FlopsPerSecond: 400e6, Latency: 10 * time.Microsecond})
}

// linked is a machine whose link from the host has a rate.
func linked(o emulated.Options) emulated.Options {
	o.HostLink = emulated.Link{BytesPerSecond: 100e6}
	return o
}

// TestCPUExpertsSameResults: on the same backend a step gives the same bits whichever of the missing
// experts the CPU computes, however the machine schedules its work, also with attention on the CPU.
func TestCPUExpertsSameResults(t *testing.T) {
	for _, name := range sameOn {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			want := newRig(t, name, 0, emulated.Options{Virtual: true}, Options{SmallBatchTokens: -1}).run()
			for i, mo := range machines(t) {
				for j, share := range [][]float64{{1, experts.AutoCPUShare}, {experts.AutoCPUShare, 0.5}}[i%2] {
					o := Options{CPUExperts: host, CPUShare: cpuShare(share), SmallBatchTokens: 64 * (1 - j), MicroBatchTokens: []int{0, 2, 7}[i%3]}
					if (i+j)%3 == 2 {
						o.HostAttention = host
					}
					r := newRig(t, name, []float64{0.5, 1}[(i+j)%2], linked(mo), o)
					if d := r.run().differs(want); d != "" {
						t.Errorf("the CPU computes %v, %+v: %s", share, mo, d)
					}
					if s := r.store.Stats(); s.OnCPU == 0 || share == 1 && s.OnCPU != s.Misses {
						t.Errorf("the CPU computes %v, %+v: %+v", share, mo, s)
					}
				}
			}
		})
	}
}

// TestAllOnCPUSameResults: steps whose experts in host memory the CPU computes alone, between others, give the same
// results, and fetch nothing from there.
func TestAllOnCPUSameResults(t *testing.T) {
	model := accessModel(1, 1)
	model.Host.ReadRate, model.CPURate, model.CPUStart = 1, 110e9, 50*time.Microsecond
	for _, peers := range [][]device.Space{nil, {device.HBM(1)}} {
		for i, mo := range machines(t) {
			const steps = 60
			want := newRig(t, "mixtral", 0, emulated.Options{Virtual: true}, Options{SmallBatchTokens: -1}).generate(4, steps, nil)
			o := Options{CPUExperts: host, CPUShare: cpuShare(experts.AutoCPUShare), SmallBatchTokens: 64, MicroBatchTokens: []int{0, 7}[i%2], AccessModel: model, ExpertAccess: configs.CopyAccess}
			mo.NotMapped = []device.Space{device.Host} // so that no expert is divided, which rounds otherwise
			r := newRig(t, "mixtral", 0.5, linked(mo), o, peers...)
			if got := r.generate(4, steps, nil); got != want {
				t.Errorf("peers %v, machine %d: %s", peers, i, firstDifference(got, want))
			}
			if by := r.p.StepsByAccess(); by.OnCPU == 0 || by.Copied == 0 || by.OnCPU+by.Copied != steps {
				t.Errorf("peers %v, machine %d: %+v of %d steps", peers, i, by, steps)
			}
			// From here on, all of them.
			r.p.access.sizes = nil
			r.p.access.model.MemoryRate = 1e6
			before := r.store.Stats()
			if got := r.generate(4, steps, nil); got != want {
				t.Errorf("peers %v, machine %d: %s", peers, i, firstDifference(got, want))
			}
			// Experts on peers are predicted and fetched all the same.
			if now := r.store.Stats(); len(peers) == 0 && now.OnCPU == before.OnCPU || now.Fetched[experts.Host] != before.Fetched[experts.Host] ||
				(now.PrefetchPredicted > before.PrefetchPredicted) != (len(peers) > 0) || (now.Prefetched > before.Prefetched) != (len(peers) > 0) {
				t.Errorf("peers %v, machine %d: %+v before, %+v after; %+v", peers, i, before, now, r.p.StepsByAccess())
			}
		}
	}
}

// TestFractionOnePredicts: where the CPU computes all experts in host memory, only those on peers are predicted.
func TestFractionOnePredicts(t *testing.T) {
	for _, peers := range [][]device.Space{nil, {device.HBM(1)}} {
		r := newRig(t, "mixtral", 1, linked(emulated.Options{Virtual: true}), Options{CPUExperts: host, CPUShare: cpuShare(1), SmallBatchTokens: 64}, peers...)
		r.generate(4, 60, nil)
		if s := r.store.Stats(); (s.PrefetchPredicted > 0) != (len(peers) > 0) || (s.Prefetched > 0) != (len(peers) > 0) {
			t.Errorf("peers %v: %+v", peers, s)
		}
	}
}

// TestStartedAhead: where the host is slower than the devices, the CPU gets its experts as soon as the host has the
// router's selection, before the host has enqueued the rest of the layer; the results are the same.
func TestStartedAhead(t *testing.T) {
	const steps = 20
	want := newRig(t, "mixtral", 0, emulated.Options{Virtual: true}, Options{SmallBatchTokens: -1}).generate(4, steps, nil)
	r := newRig(t, "mixtral", 0.5, emulated.Options{}, Options{CPUExperts: lateBackend{host}, CPUShare: cpuShare(0.5), SmallBatchTokens: 64})
	if got := r.generate(4, steps, nil); got != want {
		t.Fatal(firstDifference(got, want))
	}
	if s := r.store.Stats(); r.p.enqueuer.ahead == 0 || s.OnCPU == 0 {
		t.Errorf("%d layers ahead of %d steps, %+v", r.p.enqueuer.ahead, steps, s)
	}
}

// TestDividedExperts: kernels compute with a part of an expert, which they read in host memory, and the CPU
// with the rest. The results are those of whole experts up to the order of sums, however the machine
// schedules its work, and where copies fail.
func TestDividedExperts(t *testing.T) {
	// Copies are predicted to be much faster than steps whose kernels read all experts in place.
	model := accessModel(1, 1)
	model.Host.ReadRate = 1
	for _, name := range []string{"mixtral", "phimoe"} {
		want := newRig(t, name, 0, emulated.Options{Virtual: true}, Options{SmallBatchTokens: -1}).run()
		for i, mo := range machines(t) {
			o := Options{
				CPUExperts: host, CPUShare: cpuShare(experts.AutoCPUShare), SmallBatchTokens: 64, MicroBatchTokens: []int{0, 7}[i%2],
				ExpertAccess: configs.AutoAccess, AccessModel: model,
			}
			mo.Host.BytesPerSecond = 100e6 // a CPU that takes no time would get all
			r := newRig(t, name, []float64{1, 0.5}[i%2], linked(mo), o)
			var fault emulated.Fault
			if i%3 == 2 {
				fault = emulated.Fault{Kind: emulated.FailCopy, Match: own, Times: -1, Chance: 0.05}
				r.m.Inject(&fault)
			}
			got := r.run()
			if !slices.Equal(got.tokens, want.tokens) {
				t.Errorf("%s, %+v: tokens %v, want %v", name, mo, got.tokens, want.tokens)
			}
			for j, x := range got.logits {
				if d := math.Abs(float64(x - want.logits[j])); d > 1e-5 {
					t.Fatalf("%s, %+v: logit %d is %v, want %v", name, mo, j, x, want.logits[j])
				}
			}
			if s := r.store.Stats(); s.OnCPU == 0 || s.ReadInPlace[experts.Host] == 0 || s.ReadInPlace[experts.Host] != s.ReadDivided {
				t.Errorf("%s, %+v: no expert was divided: %+v", name, mo, s)
			}
			if i%3 == 2 {
				if fault.Hits() == 0 {
					t.Errorf("%+v: no fault was injected", mo)
				}
				fault.Release()
			}
		}
	}
}

// TestWholeExpertsTried: some steps divide no expert, as that is measured, too; they count as copied.
func TestWholeExpertsTried(t *testing.T) {
	model := accessModel(1, 1)
	model.Host.ReadRate, model.CPURate, model.CPUStart = 1, 110e9, 50*time.Microsecond
	mo := linked(emulated.Options{Virtual: true})
	mo.Host.BytesPerSecond = 100e6
	r := newRig(t, "mixtral", 1, mo, Options{
		CPUExperts: host, CPUShare: cpuShare(experts.AutoCPUShare), SmallBatchTokens: 64, ExpertAccess: configs.AutoAccess, AccessModel: model,
	})
	whole, divided := 0, 0
	step := r.decoding(4)
	for at := 1; at <= 60; at++ {
		before, read := r.p.access.steps[wholeExperts].Load(), r.store.Stats().ReadDivided
		step(at)
		switch now := r.store.Stats().ReadDivided; {
		case r.p.access.steps[wholeExperts].Load() == before && now > read:
			divided++
		case r.p.access.steps[wholeExperts].Load() > before:
			if whole++; now > read {
				t.Errorf("%d bytes of divided experts were read in a step without any", now-read)
			}
		}
	}
	if by := r.p.StepsByAccess(); whole == 0 || divided == 0 || by.Copied < int64(whole+divided) {
		t.Errorf("%d steps of whole experts, %d with divided ones: %+v", whole, divided, by)
	}
}

// TestDividedExpertsMeasured: what kernels take for a part of an expert is measured. Emulated ones take no time
// for links; these take longer than is assumed of the link, as memory is slow.
func TestDividedExpertsMeasured(t *testing.T) {
	model := accessModel(1, 1)
	model.Host.ReadRate = 1
	mo := linked(emulated.Options{Virtual: true, GPUs: []emulated.GPU{{BytesPerSecond: 20e6}}})
	r := newRig(t, "mixtral", 1, mo, Options{
		CPUExperts: host, CPUShare: cpuShare(experts.AutoCPUShare), SmallBatchTokens: 64, ExpertAccess: configs.AutoAccess, AccessModel: model,
	})
	r.run()
	x, ok := r.store.MissTimes()
	if s := r.store.Stats(); s.ReadDivided == 0 || !ok || x.ReadByte < 2/mo.HostLink.BytesPerSecond {
		t.Errorf("%d bytes were read, with these estimates: %+v", s.ReadDivided, x)
	}
}

// TestFetchedExpertsMeasured: what kernels take for experts that the link has copied counts as the link's time,
// as the CPU's ends with its results.
func TestFetchedExpertsMeasured(t *testing.T) {
	byByte := func(memory float64) float64 {
		mo := linked(emulated.Options{Virtual: true, GPUs: []emulated.GPU{{BytesPerSecond: memory}}})
		mo.Host.BytesPerSecond = 50e6
		r := newRig(t, "mixtral", 1, mo, Options{CPUExperts: host, CPUShare: cpuShare(experts.AutoCPUShare), SmallBatchTokens: 64})
		r.run()
		x, ok := r.store.MissTimes()
		if s := r.store.Stats(); s.Fetched[experts.Host] == 0 || !ok {
			t.Errorf("%d bytes were copied: %+v", s.Fetched[experts.Host], x)
		}
		return x.LinkByte
	}
	// Each byte is written and read.
	if slow, fast := byByte(20e6), byByte(20e9); slow-fast < 1/20e6/2 {
		t.Errorf("a byte takes %v s with slow GPU memory, %v with fast", slow, fast)
	}
}

// TestCPUExpertsReset: nothing of a failed step's layer is measured, or added, in the next one.
func TestCPUExpertsReset(t *testing.T) {
	r := newRig(t, "mixtral", 1, emulated.Options{Virtual: true}, Options{CPUExperts: host, CPUShare: cpuShare(1), SmallBatchTokens: 64})
	h := r.p.cpu
	h.work, h.readBytes, h.pairs, h.added = []experts.ComputedExpert{{Rows: 1, Share: 1}}, 1, []int{1}, []int{2}
	check(t, h.Reset(t.Context()))
	if len(h.work)+len(h.pairs)+len(h.added) > 0 || h.readBytes != 0 {
		t.Errorf("%v, %d bytes, pairs %v and %v are left", h.work, h.readBytes, h.pairs, h.added)
	}
}

// TestCPUExpertsFetchLess: what the CPU computes is not fetched, nor prefetched because it was
// predicted.
func TestCPUExpertsFetchLess(t *testing.T) {
	stats := func(fraction float64) experts.Stats {
		r := newRig(t, "mixtral", 1, linked(emulated.Options{Virtual: true, Check: true}), Options{CPUExperts: host, CPUShare: cpuShare(fraction), SmallBatchTokens: 64})
		r.run()
		return r.store.Stats()
	}
	none, half, all, auto := stats(0), stats(0.5), stats(1), stats(experts.AutoCPUShare)
	if none.OnCPU != 0 || none.Fetched[experts.Host] == 0 {
		t.Errorf("with none on the CPU: %+v", none)
	}
	if all.OnCPU == 0 || all.Fetched[experts.Host] != 0 {
		t.Errorf("with all on the CPU: %+v", all)
	}
	for _, s := range []experts.Stats{half, auto} {
		if s.OnCPU == 0 || s.Fetched[experts.Host] == 0 || s.Fetched[experts.Host] >= none.Fetched[experts.Host] {
			t.Errorf("with some on the CPU: %+v", s)
		}
	}
}

// TestCPUExpertsOverlap: with experts divided between CPU and link, a step is faster than with
// either alone.
func TestCPUExpertsOverlap(t *testing.T) {
	step := func(fraction float64) time.Duration {
		mo := emulated.Options{Virtual: true, GPUs: []emulated.GPU{{BytesPerSecond: 4e9}}, HostLink: emulated.Link{BytesPerSecond: 100e6}, Host: emulated.GPU{BytesPerSecond: 150e6}}
		r := newRig(t, "qwen2_moe", 1, mo, Options{CPUExperts: host, CPUShare: cpuShare(fraction), SmallBatchTokens: 64})
		table := r.kv.NewTable()
		reserve(t, table, 64)
		defer table.Release(false)
		// The expert cache is empty, and holds all experts afterwards.
		began := r.m.Now()
		_, err := r.p.Step(t.Context(), &Step{Sequences: []Sequence{{Tokens: []int32{1, 6, 21, 46, 81, 126, 181, 246}, Table: table, LogitRows: 1}}})
		check(t, err)
		return r.m.Now() - began
	}
	link, cpu, both := step(0), step(1), step(experts.AutoCPUShare)
	t.Logf("a step takes %v with all experts over the link, %v with all on the CPU, %v with both", link, cpu, both)
	if both > min(link, cpu)*9/10 {
		t.Errorf("a step takes %v with experts on CPU and link, %v over the link, %v on the CPU", both, link, cpu)
	}
}

// TestCPUExpertsFaults fails copies of a step, those to and from the CPU's experts among them.
func TestCPUExpertsFaults(t *testing.T) {
	want := newRig(t, "mixtral", 0, emulated.Options{Virtual: true}, Options{SmallBatchTokens: -1}).run()
	for i, f := range []emulated.Fault{
		{Kind: emulated.FailCopy, Match: fetch, Times: -1, Chance: 0.1},
		{Kind: emulated.FailCopy, Match: own, Skip: 5, Times: 3},
		{Kind: emulated.FailCopy, Match: own, Times: -1, Chance: 0.05},
		{Kind: emulated.StallCopy, Match: own, Times: -1, Chance: 0.2, For: time.Millisecond},
	} {
		for k, mo := range machines(t) {
			share := 0.5
			if i > 0 && (i+k)%2 == 1 { // then the CPU, which takes no time here, may get all
				share = experts.AutoCPUShare
			}
			r := newRig(t, "mixtral", 0.75, linked(mo), Options{CPUExperts: host, CPUShare: cpuShare(share), SmallBatchTokens: 64})
			fault := f
			r.m.Inject(&fault)
			if d := r.run().differs(want); d != "" {
				t.Errorf("%+v, %+v: %s", f, mo, d)
			}
			if fault.Hits() == 0 {
				t.Errorf("%+v, %+v: no fault was injected", f, mo)
			}
			fault.Release()
		}
	}
}

// TestCPUExpertsFail: a step fails if the host's experts have failed, even if no fence reports it.
// Afterwards the same steps give the same results.
func TestCPUExpertsFail(t *testing.T) {
	want := newRig(t, "mixtral", 0, emulated.Options{Virtual: true}, Options{SmallBatchTokens: -1}).run()
	r := newRig(t, "mixtral", 1, emulated.Options{Virtual: true, Check: true}, Options{CPUExperts: host, CPUShare: cpuShare(1), SmallBatchTokens: 64})
	table := r.kv.NewTable()
	reserve(t, table, 8)
	stream := &late{Executor: r.p.cpu.host, failAfter: r.p.o.config().Layers}
	r.p.cpu.host = stream
	step := &Step{Sequences: []Sequence{{Tokens: []int32{1}, Table: table, LogitRows: 1}}}
	if _, err := r.p.Step(t.Context(), step); !errors.Is(err, errLate) || stream.failAfter != 0 {
		t.Errorf("experts on the CPU fail: %v", err)
	}
	table.Release(false)
	if d := r.run().differs(want); d != "" {
		t.Error(d)
	}
}

// TestCPUExpertsOptions: which pipelines have experts on the CPU, and the memory for them.
func TestCPUExpertsOptions(t *testing.T) {
	for _, c := range []struct {
		fraction   float64
		smallBatch int
		want       bool
		tokens     int // maximum of a step on demand: 4 rows for each of 8 experts, of which a token has 2
	}{{0.5, 0, true, 16}, {0.5, 3, true, 3}, {0.5, -1, false, 0}, {0, 0, false, 0}} {
		r := newRig(t, "mixtral", c.fraction, emulated.Options{Virtual: true}, Options{CPUExperts: host, CPUShare: cpuShare(1), SmallBatchTokens: c.smallBatch})
		if got := r.p.cpu != nil; got != c.want || r.p.plans.onDemand != c.tokens {
			t.Errorf("%+v: experts on the CPU: %v, steps of up to %d tokens", c, got, r.p.plans.onDemand)
		}
		if r.p.cpu != nil {
			usage, err := r.m.Usage(device.Host)
			check(t, err)
			if n := r.p.o.CPUExpertBytes(r.p.o.config(), r.p.o.KV.Shape().DType, r.p.o.Limits); n != r.p.cpu.memory.Bytes() || n <= 0 || n > usage.Allocated {
				t.Errorf("%+v: %d bytes, allocated are %d", c, n, r.p.cpu.memory.Bytes())
			}
		}
	}
}

package tenancy_test

import (
	"bytes"
	"context"
	"errors"
	"os"
	"slices"
	"strings"
	"testing"
	"time"

	"go.uber.org/goleak"

	"github.com/moeserve/moeserve/eval"
	"github.com/moeserve/moeserve/eval/tenancy"
)

func TestMain(m *testing.M) { goleak.VerifyTestMain(m) }

func TestParseSteps(t *testing.T) {
	got, err := tenancy.ParseSteps("8GiB, 25%,free+1MiB,free+10%,0")
	want := []tenancy.Step{
		{Text: "8GiB", Bytes: 8 << 30},
		{Text: "25%", Share: 0.25},
		{Text: "free+1MiB", Bytes: 1 << 20, BeyondFree: true},
		{Text: "free+10%", Share: 0.1, BeyondFree: true},
		{Text: "0"},
	}
	if err != nil || !slices.Equal(got, want) {
		t.Errorf("%+v, %v", got, err)
	}
	for _, text := range []string{"", "x", "101%", "-1%", "8GiB,", "free+", "NaN%"} {
		if got, err := tenancy.ParseSteps(text); !errors.Is(err, eval.ErrInput) {
			t.Errorf("%q: %+v, %v", text, got, err)
		}
	}
}

// machine is an engine and a tenant on a peer of 100 bytes, with a clock that a decode step advances by 1 s, and
// by 1 s more where nothing is borrowed. The engine holds 60 bytes, less what the tenant lacks to its demand, which
// it gets in the second step behind; 10 stay free.
type machine struct {
	now        time.Duration
	held, want int64
	waits      int
	borrowed   int64
	sampled    [][]int32
	drift      bool // tokens change once the tenant holds something
	refuse     bool
	works      bool
	released   []tenancy.Release
	closed     int
	// paced: the clock is none of steps, and what the engine releases is released 30 ms into the step.
	paced bool
	watch func(now time.Duration) time.Duration
}

func (m *machine) Info() eval.Info {
	rates := eval.RatesVirtual
	if m.paced {
		rates = eval.RatesPaced
	}
	return eval.Info{Model: "fake", DType: "bfloat16", KeepsData: true, Machine: eval.Machine{Device: "fake", Emulated: true, Emulation: &eval.Emulation{Rates: rates}}}
}

func (m *machine) Batch(prompts [][]int32, newTokens int) (eval.Batch, error) {
	for range prompts {
		m.sampled = append(m.sampled, make([]int32, newTokens))
	}
	return m, nil
}
func (m *machine) Counts(context.Context) (eval.Counts, error) { return eval.Counts{}, nil }
func (m *machine) Now() time.Duration                          { return m.now }
func (m *machine) Prefill(context.Context) error               { return nil }
func (m *machine) Tokens() [][]int32                           { return m.sampled }
func (m *machine) Peer() (tenancy.Memory, error) {
	return tenancy.Memory{Capacity: 100, Others: m.held, Borrowed: m.borrowed, Free: 100 - m.held - m.borrowed, Headroom: 10}, nil
}

func (m *machine) Released() []tenancy.Release {
	r := m.released
	m.released = nil
	return r
}

func (m *machine) Borrowing() tenancy.Borrowing {
	return tenancy.Borrowing{Peer: "gpu1", OffloadFraction: 0.5, ExpertAccess: "auto", DeadlineSeconds: 0.1}
}
func (m *machine) Close() {}

func (m *machine) Watch(f func(now time.Duration) time.Duration) (stop func()) {
	m.watch = f
	return func() { m.watch = nil }
}

// pass lets time pass within a step.
func (m *machine) pass(d time.Duration) {
	for end := m.now + d; m.now < end; m.now += time.Millisecond {
		if m.watch != nil {
			m.watch(m.now)
		}
	}
}

func (m *machine) Decode(_ context.Context, from, to int) error {
	for at := from; at < to; at++ {
		for i := range m.sampled {
			m.sampled[i][at] = int32(10*i + at)
			if m.drift && m.held > 0 {
				m.sampled[i][at]++
			}
		}
		rest := 970 * time.Millisecond
		if m.borrowed == 0 {
			rest += time.Second
		}
		m.pass(30 * time.Millisecond)
		release := m.waits > 0 || m.paced
		if lacks := m.want + m.borrowed + 10 - 100; lacks > 0 && m.borrowed > 0 && release {
			take := min(lacks, m.borrowed)
			m.borrowed -= take
			m.released = append(m.released, tenancy.Release{Took: 50 * time.Millisecond})
		}
		m.pass(rest)
		m.waits++
	}
	return nil
}

// tenant is the machine's.
type tenant struct{ *machine }

func (t tenant) Hold(bytes int64) error {
	t.want, t.waits = bytes, 0
	return nil
}

func (t tenant) Advance() (bool, time.Duration, bool, error) {
	if t.want+t.borrowed <= 100 {
		t.held = t.want
		return true, 7 * time.Millisecond, false, nil
	}
	return false, 0, t.refuse, nil
}

func (t tenant) Work(_ context.Context, kind string, _ time.Duration) (float64, error) {
	if !t.works {
		return 0, tenancy.ErrNoWork
	}
	return map[string]float64{"bf16 product": 100, "HBM loop": 50}[kind], nil
}

func (t tenant) Close() error {
	t.closed++
	return nil
}

func measure(t *testing.T, m *machine, steps string) (*tenancy.Result, error) {
	t.Helper()
	s, err := tenancy.ParseSteps(steps)
	if err != nil {
		t.Fatal(err)
	}
	m.borrowed = 60
	r := &tenancy.Result{}
	err = tenancy.Measure(t.Context(), tenancy.Options{
		Node: node{m}, Tenant: tenant{m}, Prompts: [][]int32{{1}, {2}}, NewTokens: 5, Steps: s, Every: 10 * time.Second, Samples: 8,
	}, r)
	return r, err
}

// node closes what batches do not.
type node struct{ *machine }

func (node) Close() error { return nil }

func TestMeasure(t *testing.T) {
	m := &machine{works: true}
	r, err := measure(t, m, "20%,free+30%,100%,0")
	if err != nil {
		t.Fatal(err)
	}
	if r.QuietTokS != 2 || r.CapacityBytes != 100 || r.HeadroomBytes != 10 || r.Passes < 8 || len(r.TokensSHA256) != 64 || r.Model != "fake" || r.Requests != 2 {
		t.Errorf("%+v", r)
	}
	type change struct {
		bytes, free   int64
		got, restored float64
	}
	var got []change
	for _, c := range r.Changes {
		if c.GotSeconds == nil || c.RestoredSeconds == nil || c.CallSeconds != 0.007 {
			t.Fatalf("%+v", c)
		}
		got = append(got, change{c.Bytes, c.FreeBytes, *c.GotSeconds, *c.RestoredSeconds})
	}
	// 20 of 40 free at once; 70 once 40 have been released, in the second step behind; all of it; none.
	want := []change{{20, 40, 0, 0}, {70, 20, 2, 2}, {100, 10, 2, 2}, {0, 0, 0, 0}}
	if !slices.Equal(got, want) {
		t.Errorf("%+v, want %+v", got, want)
	}
	if r.ReleasedSlabs != 2 || r.LateSlabs != 0 || r.SlowestRelease != 0.05 {
		t.Errorf("%+v", r)
	}
	// Samples every 5 s; a step takes twice as long without borrowed memory.
	last := r.Samples[len(r.Samples)-1]
	if first := r.Samples[0]; len(r.Samples) < 6 || first.DecodeTokS != 2 || first.OthersBytes != 20 || first.BorrowedBytes != 60 || first.FreeBytes != 20 || last.DecodeTokS != 1 || last.Seconds < 40 {
		t.Errorf("%+v", r.Samples)
	}
	if len(r.Work) != 2 || r.Work[0].Alone != 100 || r.Work[0].Loss != 0 || r.Work[1].Limit != 0.18 {
		t.Errorf("%+v", r.Work)
	}
	for _, x := range r.Targets() {
		if !x.Met {
			t.Errorf("missed: %s", x.What)
		}
	}
	r.LateSlabs, r.Work[1].Loss = 1, 0.2
	missed := 0
	for _, x := range r.Targets() {
		if !x.Met {
			missed++
		}
	}
	if missed != 2 {
		t.Errorf("%d targets are missed, want 2: %+v", missed, r.Targets())
	}
	var table, svg bytes.Buffer
	if err := errors.Join(tenancy.WriteTable(&table, r), tenancy.Plot(&svg, "svg", r)); err != nil {
		t.Fatal(err)
	}
	for _, text := range []string{"free+30%", "target MISSED: 1 of 2 slabs", "target met: the same tokens", "target MISSED: HBM loop: 20.0 % lost"} {
		if !strings.Contains(table.String(), text) {
			t.Errorf("the table has no %q:\n%s", text, table.String())
		}
	}
	if err := tenancy.Plot(&svg, "gif", r); !errors.Is(err, eval.ErrInput) {
		t.Error(err)
	}
}

// What happens within a decode step of a second is seen when it happens, but on a virtual clock.
func TestWithinSteps(t *testing.T) {
	r, err := measure(t, &machine{paced: true}, "20%,35%,free+30%,0")
	if err != nil {
		t.Fatal(err)
	}
	ms := func(s *float64) int { return int(1e3**s + 0.5) }
	var got [][3]int
	for _, c := range r.Changes {
		if c.GotSeconds == nil || c.RestoredSeconds == nil {
			t.Fatalf("%+v", c)
		}
		got = append(got, [3]int{ms(c.GotSeconds), ms(c.RestoredSeconds), ms(&c.ShortSeconds)})
	}
	// 20 and 35 of 40 are free at once; the headroom is missing then. 30 more are released at once.
	if want := [][3]int{{0, 0, 0}, {0, 30, 30}, {30, 30, 0}, {0, 0, 0}}; !slices.Equal(got, want) {
		t.Errorf("%v, want %v", got, want)
	}
	if x := r.Targets()[2]; !x.Met || !strings.Contains(x.What, "at most 0.030 s, and may be for 0.1 s") {
		t.Errorf("%+v", x)
	}
	r.Changes[1].ShortSeconds = 0.2
	if x := r.Targets()[2]; x.Met {
		t.Errorf("%+v", x)
	}
}

func TestTokensMustNotChange(t *testing.T) {
	if _, err := measure(t, &machine{drift: true}, "20%,0"); !errors.Is(err, eval.ErrTokens) {
		t.Error(err)
	}
}

// A tenant that is refused holds what it held before.
func TestRefused(t *testing.T) {
	r, err := measure(t, &machine{refuse: true}, "20%,90%,free+1%")
	if err != nil {
		t.Fatal(err)
	}
	if c := r.Changes; !c[1].Refused || c[1].GotSeconds != nil || c[2].Bytes <= 20 {
		t.Errorf("%+v", c)
	}
	if x := r.Targets()[1]; x.Met {
		t.Errorf("%+v", x)
	}
	if len(r.Work) != 0 {
		t.Errorf("%+v", r.Work)
	}
}

func TestBadOptions(t *testing.T) {
	if err := tenancy.Measure(t.Context(), tenancy.Options{}, &tenancy.Result{}); !errors.Is(err, eval.ErrInput) {
		t.Error(err)
	}
}

// script is a tenant in a shell, which answers as tools/cuda/tenant.py does.
const script = `echo '{"ready": true}'
while read -r line; do case $line in
*999*) echo '{"refused": true, "ms": 3}' ;;
*hold*) echo '{"held": 7, "ms": 12.5}' ;;
*HBM*) echo '{"error": "no HBM"}' ;;
*work*) echo '{"rate": 42}' ;;
esac; done`

func TestProcess(t *testing.T) {
	p, err := tenancy.StartProcess(t.Context(), script, os.Stderr)
	if err != nil {
		t.Fatal(err)
	}
	wait := func() (done bool, took time.Duration, refused bool, err error) {
		for !done && !refused && err == nil {
			done, took, refused, err = p.Advance()
		}
		return done, took, refused, err
	}
	if err := p.Hold(7); err != nil {
		t.Fatal(err)
	}
	if done, took, refused, err := wait(); !done || took != 12500*time.Microsecond || refused || err != nil {
		t.Error(done, took, refused, err)
	}
	// One whose answer nobody has looked at.
	if err := errors.Join(p.Hold(8), p.Hold(999)); err != nil {
		t.Fatal(err)
	}
	if done, _, refused, err := wait(); done || !refused || err != nil {
		t.Error(done, refused, err)
	}
	if rate, err := p.Work(t.Context(), "bf16 product", time.Second); rate != 42 || err != nil {
		t.Error(rate, err)
	}
	if _, err := p.Work(t.Context(), "HBM loop", time.Second); err == nil || !strings.Contains(err.Error(), "no HBM") {
		t.Error(err)
	}
	if err := p.Close(); err != nil {
		t.Error(err)
	}
	for command, want := range map[string]string{
		"echo hello": `the tenant's answer "hello": it is not JSON`,
		"exit 3":     "has ended",
		"echo '{\"error\": \"no PyTorch here\"}'": "no PyTorch here",
	} {
		if p, err := tenancy.StartProcess(t.Context(), command, os.Stderr); err == nil || !strings.Contains(err.Error(), want) {
			t.Errorf("%s: %v, %v", command, p, err)
		}
	}
	// One that ends in between.
	if p, err = tenancy.StartProcess(t.Context(), `echo '{"ready": true}'; read line`, os.Stderr); err != nil {
		t.Fatal(err)
	}
	if err := p.Hold(1); err != nil {
		t.Fatal(err)
	}
	if _, _, _, err := wait(); err == nil || !strings.Contains(err.Error(), "has ended") {
		t.Error(err)
	}
	p.Close()
}

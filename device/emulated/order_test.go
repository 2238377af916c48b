package emulated

import (
	"errors"
	"fmt"
	"math/rand/v2"
	"testing"

	"github.com/moeserve/moeserve/device"
)

// node is one thing that happened in a random program: an operation, or a step of
// the host.
type node struct {
	name  string
	after []*node
	// block is the memory touched, -1 for none.
	block  int
	writes bool
}

// reaches says whether n comes behind m by the program's own waits.
func (n *node) reaches(m *node, seen map[*node]bool) bool {
	if n == m {
		return true
	}
	if seen[n] {
		return false
	}
	seen[n] = true
	for _, a := range n.after {
		if a.reaches(m, seen) {
			return true
		}
	}
	return false
}

// TestCheckAgainstGraph runs random programs and compares what the check finds with
// all paths through the graph of the program's waits: it finds something if and only
// if some pair is unordered, and every pair it names is.
func TestCheckAgainstGraph(t *testing.T) {
	clean, racy := 0, 0
	for seed := range uint64(120) {
		for _, o := range []Options{
			{Virtual: true, Check: true},
			{Virtual: true, Check: true, Schedule: Lazy},
			{Virtual: true, Check: true, Schedule: Random, Seed: seed},
			{Check: true},
		} {
			// Half of the programs are ordered well enough that few pairs race.
			if randomProgram(t, o, seed, seed%4 != 0, seed%2 == 0) {
				racy++
			} else {
				clean++
			}
		}
	}
	if clean < 100 || racy < 100 {
		t.Errorf("%d programs without and %d with a mistake: too few of one kind to tell", clean, racy)
	}
}

// randomProgram reports whether the program has an unordered pair. careful programs
// mostly wait for the right thing; prune makes the check forget all it may after
// each operation.
func randomProgram(t *testing.T, o Options, seed uint64, careful, prune bool) bool {
	t.Helper()
	var m *Machine
	o.Report = func(Finding) {}
	if prune {
		o.Trace = func(Trace) { m.check.prune() }
	}
	m, err := New(o)
	if err != nil {
		t.Fatal(err)
	}
	ok := func(err error) {
		t.Helper()
		if err != nil {
			t.Fatalf("seed %d: %v", seed, err)
		}
	}
	const streams, blocks, block = 4, 4, 16
	rng := rand.New(rand.NewPCG(seed, 3))
	mem, err := m.Alloc(device.Host, blocks*block, "blocks")
	ok(err)
	mem.Write(0, mem.Bytes())

	var all []*node
	host := &node{name: "start", block: -1}
	act := func(n *node) *node { all = append(all, n); return n }
	hostStep := func(name string, after ...*node) *node {
		host = act(&node{name: name, block: -1, after: append(after, host)})
		return host
	}
	var sts []device.Executor
	last := make([]*node, streams)
	for i := range streams {
		s, err := m.NewStream(device.HBM(i%2), device.StreamOptions{Name: fmt.Sprint(i)})
		ok(err)
		sts = append(sts, s.(device.Executor))
		last[i] = &node{name: "idle", block: -1}
	}
	// enqueue notes an operation of stream i.
	enqueue := func(i int, n *node) *node {
		n.after = append(n.after, last[i], host)
		last[i] = act(n)
		return n
	}
	type mark struct {
		n     *node
		e     device.Event
		fence device.Fence
	}
	var marks []mark
	// Fences that stream 0, which waits for nothing, is still to signal.
	type debt struct {
		f device.Fence
		n *node
	}
	var debts []debt
	settle := func() {
		for _, d := range debts {
			ok(sts[0].SignalFence(d.f, 1))
			d.n.after = append(d.n.after, enqueue(0, &node{name: "signal", block: -1}))
		}
		debts = nil
	}
	steps := 12 + rng.IntN(25)
	for step := range steps {
		i := rng.IntN(streams)
		kind := rng.IntN(12)
		if careful && step%2 == 1 {
			// Order this stream behind a late mark, and go on.
			kind = 5
		}
		switch {
		case kind < 4:
			b, w := rng.IntN(blocks), rng.IntN(3) == 0
			n := enqueue(i, &node{name: fmt.Sprintf("launch \"%d\"", step), block: b, writes: w})
			work := device.Work{Name: fmt.Sprint(step)}
			r := []device.Range{mem.Range(int64(b)*block+rng.Int64N(4), 10)}
			if w {
				work.Writes = r
			} else {
				work.Reads = r
			}
			ok(sts[i].Execute(work))
			k := mark{n: n}
			if rng.IntN(2) == 0 {
				k.e, err = m.NewEvent()
				ok(err)
				ok(sts[i].Record(k.e))
			} else {
				k.fence, err = m.NewFence("mark")
				ok(err)
				ok(sts[i].SignalFence(k.fence, 1))
			}
			marks = append(marks, k)
		case kind < 9:
			if len(marks) == 0 || i == 0 {
				continue
			}
			k := marks[len(marks)-1-rng.IntN(min(2, len(marks)))]
			if k.e != nil {
				ok(sts[i].Wait(k.e))
			} else {
				ok(sts[i].WaitFence(k.fence, 1))
			}
			enqueue(i, &node{name: "wait", block: -1, after: []*node{k.n}})
		case kind == 9:
			if i == 0 {
				continue
			}
			f, err := m.NewFence("debt")
			ok(err)
			ok(sts[i].WaitFence(f, 1))
			debts = append(debts, debt{f, enqueue(i, &node{name: "wait", block: -1})})
		case kind == 10:
			settle()
			if len(marks) == 0 || rng.IntN(2) == 0 {
				ok(sts[i].Synchronize(t.Context()))
				hostStep("synchronize", last[i])
				continue
			}
			k := marks[rng.IntN(len(marks))]
			if k.e != nil {
				ok(k.e.Synchronize(t.Context()))
			} else {
				ok(k.fence.Wait(t.Context(), 1))
			}
			hostStep("learn", k.n)
		case kind == 11:
			b, w := rng.IntN(blocks), rng.IntN(3) == 0
			n := hostStep("read")
			n.block, n.writes = b, w
			if w {
				n.name = "write"
				mem.Write(int64(b)*block+5, 1)
			} else {
				mem.Read(int64(b)*block+5, 1)
			}
		}
	}
	settle()
	var errs []error
	for _, s := range sts {
		errs = append(errs, s.Synchronize(t.Context()))
	}
	ok(errors.Join(errs...))

	type pair [2]string
	races := map[pair]bool{}
	for i, a := range all {
		for _, b := range all[:i] {
			if a.block < 0 || a.block != b.block || !a.writes && !b.writes {
				continue
			}
			if !a.reaches(b, map[*node]bool{}) && !b.reaches(a, map[*node]bool{}) {
				races[pair{a.name, b.name}] = true
				races[pair{b.name, a.name}] = true
			}
		}
	}
	found := m.Findings()
	for _, f := range found {
		if f.Kind != Unordered || !races[pair{f.First.Name, f.Second.Name}] {
			t.Errorf("seed %d, %+v: not true: %v", seed, o.Schedule, f)
		}
	}
	if len(races) > 0 && len(found) == 0 {
		t.Errorf("seed %d, %+v: found none of %v", seed, o.Schedule, races)
	}
	ok(mem.Free())
	ok(m.Close())
	return len(races) > 0
}

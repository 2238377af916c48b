package scheduler

import (
	"fmt"
	"slices"
	"strings"
	"testing"

	"github.com/cockroachdb/datadriven"
	"pgregory.net/rapid"

	"github.com/moeserve/moeserve/kvcache"
)

// stored are the blocks of a sequence of which more lies in another tier than in the
// cache: that must be loaded first.
type stored struct {
	*kvcache.Table
	tokens int
	in     *account
}

func (b *stored) Match(most int) (tokens int, at Cached) {
	have := b.Table.Match(most)
	switch n := min(b.tokens, most); {
	case n <= have:
		return have, Ready
	case b.in.onItsWay > 0:
		b.Table.Release(true)
		return 0, MustWait
	default:
		return n, MustLoad
	}
}

func (b *stored) Release(keep bool) {
	if b.in.copies && len(b.Blocks()) > 0 {
		blocks := slices.Clone(b.Blocks())
		b.in.Hold(blocks)
		b.in.held = append(b.in.held, blocks)
	}
	b.Table.Release(keep)
}

// account is a cache, and the sequences that have blocks of it.
type account struct {
	*kvcache.Manager
	*Scheduler
	// Where onItsWay is above 0, what lies in another tier cannot be loaded yet.
	onItsWay int
	// copies of blocks that are released begin; held are the blocks of each.
	copies bool
	held   [][]int32
}

// endCopies ends the first n copies.
func (a *account) endCopies(n int) {
	for _, blocks := range a.held[:n] {
		a.Unhold(blocks)
	}
	a.held = a.held[n:]
}

func newAccount(t interface{ Fatal(...any) }, l Limits, p Policy, blocks, blockTokens int) *account {
	return newAccountOf(t, l, p, kvcache.ManagerOptions{Blocks: blocks, BlockTokens: blockTokens})
}

func newAccountOf(t interface{ Fatal(...any) }, l Limits, p Policy, o kvcache.ManagerOptions) *account {
	m, err := kvcache.NewManager(o)
	if err != nil {
		t.Fatal(err)
	}
	l.CacheTokens = m.Capacity()
	return &account{Manager: m, Scheduler: New(l, p)}
}

// add adds a sequence that begins as all others of its prefix, if it has one, and of
// which so many tokens are stored elsewhere.
func (a *account) add(id ID, tokens, most, priority int, prefix string, inStore int) {
	x := a.NewTable()
	if prefix != "" {
		k := kvcache.RootKey([]byte(prefix))
		var keys []kvcache.Key
		for i := range most / a.BlockTokens() {
			k = k.Next([]int32{int32(i)})
			keys = append(keys, k)
		}
		x.Identify(keys)
	}
	a.Add(id, &stored{x, inStore, a}, tokens, most, priority)
}

// pace lets steps that decode have so many prompt tokens.
type pace int

func (p pace) PromptTokens(_ Mix, _ int) int { return int(p) }

// TestScript runs histories: `new rows=… sequences=… blocks=… block-tokens=… [policy=…]
// [granularity=…] [pace=…]`, `add id=… tokens=… most=… [priority=…] [prefix=…] [stored=…]`, `remove id=…`, `restart id=…`
// (computes all again), `loaded id=… tokens=…` and `step [times=…]`, which plans, prints
// the plan and does as it says. Sequences of one prefix have the same tokens; stored are
// first tokens that can be loaded, but not after `on-its-way n=1`. After `copies hold`, blocks
// that are released are held, until `copies end`.
func TestScript(t *testing.T) {
	var script *account
	datadriven.RunTest(t, "testdata/script", func(t *testing.T, d *datadriven.TestData) string {
		switch d.Cmd {
		case "new":
			var l Limits
			var blocks, blockTokens int
			d.ScanArgs(t, "rows", &l.StepTokens)
			d.ScanArgs(t, "sequences", &l.Sequences)
			d.ScanArgs(t, "blocks", &blocks)
			d.ScanArgs(t, "block-tokens", &blockTokens)
			var policy string
			var p Policy
			if paced := 0; d.HasArg("pace") {
				d.ScanArgs(t, "pace", &paced)
				l.Pace = pace(paced)
			}
			d.MaybeScanArgs(t, "policy", &policy)
			d.MaybeScanArgs(t, "granularity", &p.Granularity)
			p.Order = map[string]Order{"": FCFS, "priority": ByPriority, "fair": Fair}[policy]
			script = newAccount(t, l, p, blocks, blockTokens)
		case "add":
			var id, tokens, most, priority, inStore int
			var prefix string
			d.ScanArgs(t, "id", &id)
			d.ScanArgs(t, "tokens", &tokens)
			d.ScanArgs(t, "most", &most)
			d.MaybeScanArgs(t, "priority", &priority)
			d.MaybeScanArgs(t, "prefix", &prefix)
			d.MaybeScanArgs(t, "stored", &inStore)
			script.add(ID(id), tokens, most, priority, prefix, inStore)
		case "on-its-way":
			d.ScanArgs(t, "n", &script.onItsWay)
		case "copies":
			script.copies = d.HasArg("hold")
			script.endCopies(len(script.held))
		case "loaded":
			var id, tokens int
			d.ScanArgs(t, "id", &id)
			d.ScanArgs(t, "tokens", &tokens)
			script.Loaded(ID(id), tokens)
		case "remove", "restart":
			var id int
			d.ScanArgs(t, "id", &id)
			if d.Cmd == "restart" {
				script.Restart(ID(id))
				break
			}
			running, loading := script.Running(), script.Loading()
			script.Remove(ID(id), true)
			switch {
			case script.Running() < running:
				return "ran\n" + script.state()
			case script.Loading() < loading:
				return "loaded\n" + script.state()
			}
			return "waited\n" + script.state()
		case "step":
			times := 1
			d.MaybeScanArgs(t, "times", &times)
			var b strings.Builder
			for range times {
				p := script.Plan()
				script.carryOut(p)
				b.WriteString(format(p))
			}
			return b.String() + script.state()
		default:
			t.Fatalf("unknown command %q", d.Cmd)
		}
		return script.state()
	})
}

func (a *account) carryOut(p Plan) {
	for _, c := range p.Chunks {
		if c.Sample {
			a.Done(c, 1)
		} else {
			a.Done(c, 0)
		}
	}
}

func format(p Plan) string {
	var b strings.Builder
	for _, id := range p.Preempted {
		fmt.Fprintf(&b, "preempt %d; ", id)
	}
	for _, id := range p.Admitted {
		fmt.Fprintf(&b, "admit %d; ", id)
	}
	for _, l := range p.Loads {
		fmt.Fprintf(&b, "load %d of %d; ", l.Tokens, l.ID)
	}
	for _, c := range p.Chunks {
		fmt.Fprintf(&b, "%d: [%d,%d)", c.ID, c.From, c.To)
		if c.Sample {
			b.WriteString(" draw")
		}
		b.WriteString("; ")
	}
	if b.Len() == 0 {
		return "nothing\n"
	}
	return strings.TrimSuffix(b.String(), "; ") + "\n"
}

func (a *account) state() string {
	s := fmt.Sprintf("running %d, waiting %d, ", a.Running(), a.Waiting())
	if n := a.Loading(); n > 0 {
		s += fmt.Sprintf("loading %d, ", n)
	}
	return s + fmt.Sprintf("%d blocks free\n", a.Free())
}

// TestHistories plays random histories and checks after every step what always
// holds: rows, places and blocks are never exceeded, chunks go on where the cache
// ends, the policy decides who is preempted, and everything that is not removed ends. Some
// sequences begin alike, and of some a part is loaded, as far as loads succeed. Blocks are withdrawn
// and restored at any time.
func TestHistories(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		l := Limits{StepTokens: rapid.IntRange(1, 24).Draw(t, "rows"), Sequences: rapid.IntRange(1, 6).Draw(t, "sequences")}
		if paced := rapid.IntRange(0, 24).Draw(t, "pace"); paced > 0 {
			l.Pace = pace(paced - 1) // 0 is as 1: prompts do not starve
		}
		blockTokens := rapid.IntRange(1, 5).Draw(t, "block tokens")
		policy := Policy{Order: rapid.SampledFrom([]Order{FCFS, ByPriority, Fair}).Draw(t, "order"), Granularity: rapid.IntRange(1, 12).Draw(t, "granularity")}
		o := kvcache.ManagerOptions{BlockTokens: blockTokens, Extents: rapid.IntRange(0, 3).Draw(t, "extents"), ExtentBlocks: rapid.IntRange(1, 3).Draw(t, "extent blocks")}
		o.Blocks = rapid.IntRange(1, 12).Draw(t, "blocks") + o.Extents*o.ExtentBlocks
		a := newAccountOf(t, l, policy, o)
		type model struct {
			tokens, computed, most int
			priority               int
			prefix                 string
			since                  int // tokens sampled since it was admitted
			loading                int // tokens, of one that loads
			admitted               bool
		}
		live := map[ID]*model{}
		next := ID(0)
		// A load has failed: blocks that were shared are then computed again into others. Or blocks
		// were withdrawn that were promised.
		failed := false
		arrive := rapid.IntRange(1, 12).Draw(t, "arrivals")
		for step := 0; len(live) > 0 || arrive > 0; step++ {
			if step > 5000 {
				t.Fatalf("%d sequences never end", len(live))
			}
			if arrive > 0 && rapid.Bool().Draw(t, "arrives") {
				arrive--
				most := rapid.IntRange(1, a.Capacity()).Draw(t, "most")
				m := &model{tokens: rapid.IntRange(1, most).Draw(t, "tokens"), most: most, priority: rapid.IntRange(-3, 3).Draw(t, "priority"), prefix: rapid.SampledFrom([]string{"", "a", "b"}).Draw(t, "prefix")}
				live[next] = m
				a.add(next, m.tokens, m.most, m.priority, m.prefix, rapid.SampledFrom([]int{0, 0, 1, 2}).Draw(t, "stored blocks")*blockTokens)
				next++
			}
			loading := false
			for id := range next {
				if m := live[id]; m != nil && m.loading > 0 {
					loading = true
					if rapid.IntRange(0, 3).Draw(t, "is loaded") == 0 {
						m.computed = rapid.IntRange(0, m.loading/blockTokens).Draw(t, "loaded blocks") * blockTokens
						failed = failed || m.computed < m.loading
						m.loading, m.admitted = 0, false
						a.Loaded(id, m.computed)
					}
				}
			}
			if x := rapid.IntRange(0, 5).Draw(t, "extent"); x < o.Extents {
				if a.Extent(x).Withdrawn {
					a.Restore(x)
				} else {
					a.Withdraw(x)
					failed = true
				}
			}
			a.onItsWay = rapid.SampledFrom([]int{0, 0, 1}).Draw(t, "on its way")
			a.copies = rapid.Bool().Draw(t, "copies")
			a.endCopies(rapid.IntRange(0, len(a.held)).Draw(t, "copies that end"))
			if len(live) > 0 && rapid.IntRange(0, 9).Draw(t, "removes") == 0 {
				for id := range next { // the lowest that lives
					if live[id] != nil {
						a.Remove(id, true)
						delete(live, id)
						break
					}
				}
			}
			if n := a.Lacking(); n > 0 && (n <= a.Free() || a.Waiting() == 0) {
				t.Fatalf("%d blocks are lacking, and %d free", n, a.Free())
			}
			p := a.Plan()
			for _, id := range p.Preempted {
				if live[id].loading > 0 {
					t.Fatalf("%d was preempted while it loads", id)
				}
				q := live[id]
				q.computed, q.admitted = 0, false
				if policy.Order == Fair && !failed && q.since < policy.Granularity && q.tokens < q.most {
					t.Fatalf("%d was preempted after %d tokens of its %d", id, q.since, policy.Granularity)
				}
				for other, m := range live {
					later := policy.Order == FCFS && other > id || policy.Order == ByPriority && (m.priority > q.priority || m.priority == q.priority && other > id)
					if later && m.computed > 0 {
						t.Fatalf("%d was preempted before %d", id, other)
					}
				}
			}
			for _, id := range p.Admitted {
				live[id].admitted, live[id].since = true, 0
			}
			for _, x := range p.Loads {
				m := live[x.ID]
				if m.loading = x.Tokens; x.Tokens < 1 || x.Tokens >= m.tokens || !slices.Contains(p.Admitted, x.ID) {
					t.Fatalf("load %+v of %+v", x, m)
				}
			}
			rows := 0
			for _, c := range p.Chunks {
				m := live[c.ID]
				if m.admitted && c.From%blockTokens == 0 && (m.prefix != "" || c.From == 0) {
					m.computed = c.From // what others have computed
				}
				if c.From != m.computed || c.To <= c.From || c.To > m.tokens || c.Sample != (c.To == m.tokens) || m.loading > 0 {
					t.Fatalf("chunk %+v of %+v", c, m)
				}
				rows += c.To - c.From
				m.computed, m.admitted = c.To, false
				switch {
				case c.Sample && m.tokens < m.most:
					m.tokens++
					m.since++
					a.Done(c, 1)
				case c.Sample:
					a.Done(c, 0)
					a.Remove(c.ID, true)
					delete(live, c.ID)
				default:
					a.Done(c, 0)
				}
			}
			if rows > l.StepTokens || a.Running()+a.Loading() > l.Sequences || a.Free() < 0 || a.Running()+a.Loading()+a.Waiting() != len(live) {
				t.Fatalf("%d rows, %d running, %d loading, %d waiting of %d, %d blocks free under %+v", rows, a.Running(), a.Loading(), a.Waiting(), len(live), a.Free(), l)
			}
			if len(p.Chunks) == 0 && len(live) > 0 && !loading && len(p.Loads) == 0 && a.onItsWay == 0 && len(a.held) == 0 {
				t.Fatalf("nothing to do with %d sequences", len(live))
			}
			if len(live) == 0 && a.Free()+a.Held() != a.Present() {
				t.Fatalf("%d of %d blocks free with nothing left", a.Free(), a.Present())
			}
		}
	})
}

// prompts adds sequences that sample one token after a prompt, and returns after how many
// steps each has it, with the number of preemptions.
func prompts(t *testing.T, a *account, tokens ...int) (steps []int, preempted int64) {
	t.Helper()
	for i, n := range tokens {
		a.add(ID(i), n, n+1, 0, "", 0)
	}
	steps = make([]int, len(tokens))
	for step := 1; a.Running()+a.Waiting() > 0; step++ {
		p := a.Plan()
		if len(p.Chunks) == 0 || step > 1000 {
			t.Fatalf("step %d: %+v with %s", step, p, a.state())
		}
		sum := 0
		for _, c := range p.Chunks {
			sum += c.To - c.From
			a.Done(c, 0)
			if c.Sample {
				steps[c.ID] = step
				a.Remove(c.ID, true)
			}
		}
		if left := slices.Index(steps, 0); left >= 0 && sum < a.limits.StepTokens && a.Waiting() > 0 {
			t.Errorf("step %d has %d tokens of %d though sequence %d waits: %+v", step, sum, a.limits.StepTokens, left, p.Chunks)
		}
	}
	return steps, a.Preemptions()
}

// TestShortPromptsOvertake: a short prompt that comes behind long ones does not wait for
// their end, and the first of the long ones loses at most a quarter of its tokens by that.
func TestShortPromptsOvertake(t *testing.T) {
	limits := Limits{StepTokens: 100, Sequences: 16}
	for _, c := range []struct {
		name         string
		tokens, want []int
	}{
		{"one long prompt", []int{1000, 20}, []int{11, 1}},
		{"two long prompts", []int{1000, 1000, 20}, []int{11, 21, 1}},
		{"more short ones than fit", []int{1000, 20, 20, 20}, []int{11, 1, 2, 3}},
		{"a long one ends", []int{130, 1000, 20}, []int{2, 12, 1}},
		{"too long to be short", []int{1000, 60, 20}, []int{11, 11, 1}},
		{"alike", []int{60, 60, 60}, []int{1, 2, 2}},
		{"alike and long", []int{300, 300, 300}, []int{3, 6, 9}},
	} {
		got, _ := prompts(t, newAccount(t, limits, Policy{}, 1000, 4), c.tokens...)
		if !slices.Equal(got, c.want) {
			t.Errorf("%s: prompts of %v tokens end after %v steps, want %v", c.name, c.tokens, got, c.want)
		}
	}
}

// TestShortPromptsDoNotStarveLongOnes: while short prompts keep coming, a long one has three
// quarters of the tokens.
func TestShortPromptsDoNotStarveLongOnes(t *testing.T) {
	a := newAccount(t, Limits{StepTokens: 100, Sequences: 16}, Policy{}, 1000, 4)
	a.add(0, 1000, 1001, 0, "", 0)
	next := ID(1)
	for step := 1; ; step++ {
		for range 10 {
			a.add(next, 20, 21, 0, "", 0)
			next++
		}
		done := false
		for _, c := range a.Plan().Chunks {
			a.Done(c, 0)
			if c.Sample {
				done = done || c.ID == 0
				a.Remove(c.ID, true)
			}
		}
		if done {
			if step > 14 { // 1000 / 75
				t.Errorf("the long prompt ends after %d steps", step)
			}
			return
		}
	}
}

// TestNoAdmissionAgainstPromisedBlocks: a second long prompt waits while the first needs the
// blocks that are still free, and so is not computed twice. Those behind it wait with it.
func TestNoAdmissionAgainstPromisedBlocks(t *testing.T) {
	a := newAccount(t, Limits{StepTokens: 100, Sequences: 16}, Policy{}, 200, 4) // 800 tokens
	steps, preempted := prompts(t, a, 600, 600, 20)
	if want := []int{6, 13, 7}; preempted != 0 || !slices.Equal(steps, want) {
		t.Errorf("prompts end after %v steps with %d preemptions, want %v and none", steps, preempted, want)
	}
}

// impatient does not wait for copies.
type impatient struct{ *stored }

func (impatient) WillReserve(int, int) bool { return false }

// TestHeldBlocksCauseNoPreemption: where the blocks of a preempted sequence are still copied, the
// others wait for them. Without that each sequence in turn is preempted for the same block.
func TestHeldBlocksCauseNoPreemption(t *testing.T) {
	for _, waits := range []bool{true, false} {
		a := newAccount(t, Limits{StepTokens: 64, Sequences: 4}, Policy{}, 6, 4)
		for id := range ID(3) {
			b := &stored{a.NewTable(), 0, a}
			if waits {
				a.Add(id, b, 7, 20, 0)
			} else {
				a.Add(id, impatient{b}, 7, 20, 0)
			}
		}
		a.copies = true
		for range 4 {
			a.carryOut(a.Plan())
		}
		if n := a.Preemptions(); waits != (n == 1) {
			t.Errorf("waits: %v, %d preemptions", waits, n)
		}
	}
}

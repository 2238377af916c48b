package tier_test

import (
	"fmt"
	"strings"
	"testing"

	"github.com/cockroachdb/datadriven"
	"go.uber.org/goleak"

	"github.com/moeserve/moeserve/kvcache"
	"github.com/moeserve/moeserve/kvcache/tier"
)

func TestMain(m *testing.M) { goleak.VerifyTestMain(m) }

// key is the key that a name stands for.
func key(name string) (k kvcache.Key) {
	copy(k[:], name)
	return k
}

func name(k kvcache.Key) string { return strings.TrimRight(string(k[:]), "\x00") }

// keysOf are the names of keys.
func keysOf(keys []kvcache.Key) (all string) {
	for _, k := range keys {
		all += name(k)
	}
	return all
}

// TestScript runs histories of a tier. Keys are letters, and loads and stores are named in the
// first argument, where the command begins or ends one:
//
//	new blocks=… [policy=…]
//	store a bcd                 prepares the store a of keys b, c and d
//	stored a [failed] [only=…]  completes it, or of it the keys named
//	load a bcd
//	loaded a [failed] [only=…]
//	touch bcd
//	lookup bcd
//	lose b
//	reset
//
// and prints what came of it, the events, the numbers of blocks, and ARC's lists, the least recent
// first.
func TestScript(t *testing.T) {
	datadriven.Walk(t, "testdata/script", func(t *testing.T, path string) {
		var m *tier.Manager
		stores, loads := map[string]tier.Store{}, map[string]tier.Load{}
		loaded := map[string]string{} // names of a load's keys
		datadriven.RunTest(t, path, func(t *testing.T, d *datadriven.TestData) string {
			arg := func(i int) string { return d.CmdArgs[i].Key }
			keys := func(i int) (all []kvcache.Key) {
				for _, c := range arg(i) {
					all = append(all, key(string(c)))
				}
				return all
			}
			var only string
			d.MaybeScanArgs(t, "only", &only)
			var out strings.Builder
			switch d.Cmd {
			case "new":
				o := tier.Options{Medium: "CPU"}
				d.ScanArgs(t, "blocks", &o.Blocks)
				d.MaybeScanArgs(t, "policy", &o.Policy)
				var err error
				if m, err = tier.New(o); err != nil {
					t.Fatal(err)
				}
				clear(stores)
				clear(loads)
			case "store":
				s, ok := m.PrepareStore(keys(1))
				stores[arg(0)] = s
				switch {
				case !ok:
					out.WriteString("refused\n")
				case len(s.Keys) == 0:
					out.WriteString("nothing to store\n")
				default:
					for _, v := range s.Evicted {
						fmt.Fprintf(&out, "evict %s from %d, ", name(v.Key), v.ID)
					}
					out.WriteString("store")
					for i, k := range s.Keys {
						fmt.Fprintf(&out, " %s:%d", name(k), s.IDs[i])
					}
					out.WriteString("\n")
				}
			case "stored":
				s := stores[arg(0)]
				if only != "" {
					s.IDs = part(s.IDs, func(i int) bool { return strings.Contains(only, name(s.Keys[i])) })
				}
				m.CompleteStore(s, !d.HasArg("failed"))
			case "load":
				l, err := m.PrepareLoad(keys(1))
				loads[arg(0)], loaded[arg(0)] = l, arg(1)
				if err != nil {
					fmt.Fprintln(&out, err)
				} else {
					fmt.Fprintln(&out, "load from", l.IDs)
				}
			case "loaded":
				l := loads[arg(0)]
				if only != "" {
					l.IDs = part(l.IDs, func(i int) bool { return strings.Contains(only, loaded[arg(0)][i:i+1]) })
				}
				if err := m.CompleteLoad(l, !d.HasArg("failed")); err != nil {
					fmt.Fprintln(&out, err)
				}
			case "touch":
				m.Touch(keys(0))
			case "lookup":
				for _, k := range keys(0) {
					fmt.Fprintf(&out, "%s: %v\n", name(k), m.Lookup(k))
				}
				return out.String()
			case "lose":
				for _, k := range keys(0) {
					if !m.Lose(k) {
						fmt.Fprintf(&out, "%s is not there\n", name(k))
					}
				}
			case "reset":
				m.Reset()
			default:
				t.Fatalf("unknown command %q", d.Cmd)
			}
			for _, e := range m.TakeEvents() {
				out.WriteString(format(e))
			}
			s := m.Stats()
			fmt.Fprintf(&out, "%d free, %d evictable, %d pinned, %d pending", s.Free, s.Evictable, s.Pinned, s.Pending)
			if s.Quarantined > 0 {
				fmt.Fprintf(&out, ", %d quarantined", s.Quarantined)
			}
			fmt.Fprintf(&out, "; %d allocated, %d evicted, %d freed, %d stored, %d loaded\n", s.Allocated, s.Evicted, s.Freed, s.Stored, s.Loaded)
			if p, lists, ok := m.ARCState(); ok {
				fmt.Fprintf(&out, "p %.4g, T1 %s, T2 %s, B1 %s, B2 %s\n", p, keysOf(lists[0]), keysOf(lists[1]), keysOf(lists[2]), keysOf(lists[3]))
			}
			return out.String()
		})
	})
}

// part returns the ids at the places where keep is true.
func part(ids []int32, keep func(i int) bool) (some []int32) {
	for i, id := range ids {
		if keep(i) {
			some = append(some, id)
		}
	}
	return some
}

func format(e kvcache.Event) string {
	switch {
	case len(e.Stored) > 0 && len(e.Removed) == 0:
		return fmt.Sprintf("event: %s stored %s\n", e.Medium, keysOf(e.Stored))
	case len(e.Removed) > 0 && len(e.Stored) == 0:
		return fmt.Sprintf("event: %s removed %s\n", e.Medium, keysOf(e.Removed))
	}
	return fmt.Sprintf("event: %+v, of both or neither\n", e)
}

// TestOptions: an unusable tier is refused with what to do about it.
func TestOptions(t *testing.T) {
	for _, c := range []struct {
		o    tier.Options
		want string
	}{
		{tier.Options{Medium: "CPU"}, "tier: Blocks is 0; it must be from 1 to 2147483646"},
		{tier.Options{Medium: "CPU", Blocks: 1 << 31}, "tier: Blocks is 2147483648; it must be from 1 to 2147483646"},
		{tier.Options{Blocks: 1}, "tier: Medium is empty; it must name the tier in events"},
		{tier.Options{Blocks: 1, Medium: "CPU", Policy: "fifo"}, `tier: eviction policy "fifo" is unknown; it must be one of arc, lru`},
	} {
		if _, err := tier.New(c.o); err == nil || err.Error() != c.want {
			t.Errorf("%+v: error %v, want %s", c.o, err, c.want)
		}
	}
	own := func(blocks int) tier.Eviction { return tier.NewLRU(blocks) }
	for _, o := range []tier.Options{{}, {Policy: "lru"}, {Policy: "arc"}, {NewEviction: own}, {Policy: "own", NewEviction: own}} {
		o.Blocks, o.Medium = 1, "CPU"
		if _, err := tier.New(o); err != nil {
			t.Errorf("policy %q: %v", o.Policy, err)
		}
	}
}

// TestState: states have names.
func TestState(t *testing.T) {
	if got := fmt.Sprint(tier.Miss, tier.Hit, tier.HitPending, tier.State(7)); got != "miss hit pending State(7)" {
		t.Error(got)
	}
}

// TestWithhold: withheld blocks are free, and stores evict others in their place.
func TestWithhold(t *testing.T) {
	m, err := tier.New(tier.Options{Blocks: 6, Medium: "CPU"})
	if err != nil {
		t.Fatal(err)
	}
	store := func(names ...string) (evicted string, ok bool) {
		var keys []kvcache.Key
		for _, n := range names {
			keys = append(keys, key(n))
		}
		s, ok := m.PrepareStore(keys)
		m.CompleteStore(s, true)
		for _, e := range s.Evicted {
			evicted += name(e.Key)
		}
		return evicted, ok
	}
	m.Withhold(3)
	for _, step := range []struct {
		names    []string
		withhold int
		evicted  string
		ok       bool
		free     int
	}{
		{[]string{"a", "b", "c", "d"}, 3, "", false, 6},
		{[]string{"a", "b"}, 3, "", true, 4},
		{[]string{"c", "d"}, 3, "a", true, 3},
		{[]string{"e"}, 5, "b", true, 3},
		{[]string{"f", "g", "h", "i"}, 5, "", false, 3},
		{[]string{"f", "g", "h"}, 0, "", true, 0},
	} {
		m.Withhold(step.withhold)
		evicted, ok := store(step.names...)
		if evicted != step.evicted || ok != step.ok || m.Stats().Free != step.free {
			t.Errorf("%v with %d withheld: %q evicted, ok %t, %+v", step.names, step.withhold, evicted, ok, m.Stats())
		}
	}
}

// TestDiscardEvents: a tier whose events nobody takes does not gather them.
func TestDiscardEvents(t *testing.T) {
	m, err := tier.New(tier.Options{Blocks: 1, Medium: "CPU", DiscardEvents: true})
	if err != nil {
		t.Fatal(err)
	}
	s, _ := m.PrepareStore([]kvcache.Key{key("a")})
	m.CompleteStore(s, true)
	m.Lose(key("a"))
	if e := m.TakeEvents(); len(e) > 0 || m.Stats().Stored != 1 {
		t.Errorf("events %v, %+v", e, m.Stats())
	}
}

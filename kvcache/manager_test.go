package kvcache_test

import (
	"fmt"
	"maps"
	"slices"
	"strings"
	"testing"

	"github.com/cockroachdb/datadriven"
	"go.uber.org/goleak"
	"pgregory.net/rapid"

	"github.com/moeserve/moeserve/kvcache"
)

func TestMain(m *testing.M) { goleak.VerifyTestMain(m) }

func newManager(t interface{ Fatal(...any) }, blocks, blockTokens int) *kvcache.Manager {
	m, err := kvcache.NewManager(kvcache.ManagerOptions{Blocks: blocks, BlockTokens: blockTokens})
	if err != nil {
		t.Fatal(err)
	}
	return m
}

// chain is the keys of the full blocks of tokens.
func chain(salt string, tokens []int32, blockTokens int) []kvcache.Key {
	k := kvcache.RootKey([]byte(salt))
	var keys []kvcache.Key
	for ; len(tokens) >= blockTokens; tokens = tokens[blockTokens:] {
		k = k.Next(tokens[:blockTokens])
		keys = append(keys, k)
	}
	return keys
}

// TestManagerScript runs histories of tables, which are named in the first word:
//
//	new blocks=… block-tokens=…    an account
//	a tokens=abcd… [salt=…]        letters are the tokens; their blocks have keys
//	a match [most=…]               takes what is there
//	a room tokens=…                whether there are blocks
//	a reserve tokens=…
//	a fill tokens=…
//	a release [keep]
//
// and prints what came of it, and what is free.
func TestManagerScript(t *testing.T) {
	var m *kvcache.Manager
	var tables map[string]*kvcache.Table
	known := map[string]int{}
	datadriven.RunTest(t, "testdata/manager", func(t *testing.T, d *datadriven.TestData) string {
		number := func(name string, otherwise int) int {
			d.MaybeScanArgs(t, name, &otherwise)
			return otherwise
		}
		if d.Cmd == "new" {
			m, tables = newManager(t, number("blocks", 0), number("block-tokens", 0)), map[string]*kvcache.Table{}
			return fmt.Sprintf("%d free\n", m.Free())
		}
		x := tables[d.Cmd]
		if x == nil {
			x = m.NewTable()
			tables[d.Cmd] = x
		}
		out := ""
		switch d.CmdArgs[0].Key {
		case "tokens":
			var text, salt string
			d.ScanArgs(t, "tokens", &text)
			d.MaybeScanArgs(t, "salt", &salt)
			var ids []int32
			for _, r := range text {
				ids = append(ids, r)
			}
			x.Identify(chain(salt, ids, m.BlockTokens()))
			known[d.Cmd] = len(ids)
			return ""
		case "match":
			out = fmt.Sprintf("%d tokens", x.Match(number("most", known[d.Cmd])))
		case "room":
			return fmt.Sprintln(x.CanReserve(number("tokens", 0), number("leave", 0)))
		case "reserve":
			out = fmt.Sprint(x.Reserve(number("tokens", 0)))
		case "fill":
			x.SetFilled(number("tokens", 0))
			out = "filled"
		case "release":
			x.Release(d.HasArg("keep"))
			out = "released"
		default:
			t.Fatalf("unknown command %q", d.CmdArgs[0].Key)
		}
		var all []*kvcache.Table
		for _, x := range tables {
			all = append(all, x)
		}
		if err := m.Check(all...); err != nil {
			t.Error(err)
		}
		return fmt.Sprintf("%s; blocks %v; %d free\n", out, x.Blocks(), m.Free())
	})
}

// TestManagerMachine: tables match, reserve, fill and release in any order, with tokens
// that often begin alike. What a table says is filled holds just what its own tokens make
// of it, and blocks are never lost.
func TestManagerMachine(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		b := rapid.IntRange(1, 3).Draw(t, "block tokens")
		extents, size := rapid.IntRange(0, 3).Draw(t, "extents"), rapid.IntRange(1, 3).Draw(t, "extent blocks")
		m, err := kvcache.NewManager(kvcache.ManagerOptions{
			Blocks: rapid.IntRange(6, 14).Draw(t, "blocks") + extents*size, BlockTokens: b, Extents: extents, ExtentBlocks: size, Events: true,
		})
		if err != nil {
			t.Fatal(err)
		}
		found := map[kvcache.Key]bool{} // by the events
		// The memory of the blocks: what a position holds is made of all tokens up to it.
		memory := make([]string, m.Blocks()*b)
		type sequence struct {
			*kvcache.Table
			salt             string
			tokens           []int32
			filled, reserved int
			most             int // of the last match
			hasKeys          bool
		}
		var all []*sequence
		var tables []*kvcache.Table
		for range 4 {
			all = append(all, &sequence{Table: m.NewTable()})
			tables = append(tables, all[len(all)-1].Table)
		}
		begin := func(t *rapid.T, s *sequence) {
			s.salt = rapid.SampledFrom([]string{"", "", "other"}).Draw(t, "salt")
			// All begin alike, and go on alike or not from some place on.
			s.tokens = make([]int32, rapid.IntRange(2, 6).Draw(t, "full blocks")*b+rapid.IntRange(0, 1).Draw(t, "more"))
			for i := rapid.SampledFrom([]int{0, b, 3 * b, 12 * b}).Draw(t, "differs from"); i < len(s.tokens); i++ {
				s.tokens[i] = 1
			}
			s.Identify(nil)
			s.most = len(s.tokens)
			if s.hasKeys = rapid.SampledFrom([]bool{true, true, true, false}).Draw(t, "has keys"); s.hasKeys {
				s.Identify(chain(s.salt, s.tokens, b))
				s.SetTokens(s.tokens)
			}
		}
		content := func(s *sequence, p int) string { return fmt.Sprint(s.salt, s.tokens[:p+1]) }
		at := func(s *sequence, p int) *string { return &memory[int(s.Blocks()[p/b])*b+p%b] }
		some := func(t *rapid.T) *sequence { return rapid.SampledFrom(all).Draw(t, "sequence") }
		for _, s := range all {
			begin(t, s)
		}
		match := func(t *rapid.T, s *sequence) {
			most := len(s.tokens) - rapid.IntRange(0, 2).Draw(t, "less")
			n := s.Match(most)
			if n > most || n%b != 0 || len(s.Blocks()) != n/b {
				t.Fatalf("%d tokens of at most %d in %v", n, most, s.Blocks())
			}
			s.filled, s.reserved, s.most = n, n, most
		}
		reserve := func(t *rapid.T, s *sequence, n int) {
			before, free, room := slices.Clone(s.Blocks()), m.Free(), s.CanReserve(n, 0)
			if s.Reserve(n) != room {
				t.Fatalf("room: %v, and the opposite came", room)
			}
			if !room {
				if !slices.Equal(s.Blocks(), before) || m.Free() != free || free >= max(0, n-s.filled+b-1) {
					t.Fatalf("refused %d tokens behind %d with %d free: blocks %v, then %v, %d free", n, s.filled, free, before, s.Blocks(), m.Free())
				}
				return
			}
			if len(s.Blocks()) < max(len(before), (n+b-1)/b) || !slices.Equal(s.Blocks()[:s.filled/b], before[:s.filled/b]) {
				t.Fatalf("blocks %v for %d tokens, before %v", s.Blocks(), n, before)
			}
			s.reserved = max(s.reserved, n)
		}
		// matchable: what a sequence has just written can be matched, back to its last withdrawn block, which cannot.
		matchable := func(s *sequence) {
			found := m.Found()
			for i := s.filled/b - 1; i >= 0 && s.hasKeys; i-- {
				for x := range extents {
					first, n := m.ExtentBlocks(x)
					if id := s.Blocks()[i]; id >= first && id < first+int32(n) && m.Extent(x).Withdrawn {
						return
					}
				}
				if k := chain(s.salt, s.tokens, b)[i]; !found[k] {
					t.Fatalf("block %d of %v is full, and not found", i, s.Blocks())
				}
			}
		}
		write := func(s *sequence) {
			full := s.filled / b
			for _, c := range m.Copies() {
				copy(memory[int(c.Dst)*b:int(c.Dst+1)*b], memory[int(c.Src)*b:int(c.Src+1)*b])
			}
			m.Copied()
			for p := s.filled; p < s.reserved; p++ {
				*at(s, p) = content(s, p)
			}
			s.filled = s.reserved
			if s.SetFilled(s.filled); s.filled/b > full {
				matchable(s)
			}
		}
		type hold struct {
			blocks  []int32
			content []string
		}
		var holds []hold
		t.Repeat(map[string]func(*rapid.T){
			"match": func(t *rapid.T) {
				if s := some(t); len(s.Blocks()) == 0 {
					match(t, s)
				}
			},
			"fork": func(t *rapid.T) {
				s, from := some(t), some(t)
				if len(s.Blocks()) > 0 || from.filled == 0 {
					return
				}
				n := 0
				for n < min(from.filled, len(s.tokens)) && content(s, n) == content(from, n) {
					n++
				}
				n = rapid.IntRange(0, n).Draw(t, "tokens")
				s.Fork(from.Table, n)
				s.filled, s.reserved = n, n
				if rapid.Bool().Draw(t, "goes on") {
					reserve(t, s, min(n+1, len(s.tokens)))
				}
			},
			"may": func(t *rapid.T) { // it never says no where there would be room
				s := some(t)
				if len(s.Blocks()) > 0 {
					return
				}
				n, leave := rapid.IntRange(0, len(s.tokens)+2*b).Draw(t, "tokens"), rapid.IntRange(0, 4).Draw(t, "leave")
				may, lacks, free := s.MayReserve(n, leave), s.Lacks(n, leave), m.Free()
				s.Match(s.most)
				can := s.CanReserve(n, leave)
				if !may && can {
					t.Fatalf("%d tokens could not be reserved with %d blocks left, and could behind %d: %d free", n, leave, len(s.Blocks())*b, m.Free())
				}
				if can && lacks > 0 || !can && lacks == 0 && s.most == len(s.tokens) && len(s.Blocks())*b <= n || lacks > 0 && lacks <= free {
					t.Fatalf("%d tokens with %d blocks left: %v behind %d; %d free blocks were said to be needed, of %d", n, leave, can, len(s.Blocks())*b, lacks, free)
				}
				s.Release(true)
			},
			"reserve": func(t *rapid.T) {
				s := some(t)
				reserve(t, s, rapid.IntRange(0, len(s.tokens)).Draw(t, "tokens"))
			},
			"write": func(t *rapid.T) { write(some(t)) },
			"run": func(t *rapid.T) {
				s := some(t)
				if len(s.Blocks()) == 0 {
					match(t, s)
				}
				reserve(t, s, len(s.tokens))
				write(s)
			},
			"again": func(t *rapid.T) {
				s := some(t)
				n := rapid.IntRange(0, s.filled/b).Draw(t, "blocks") * b
				s.SetFilled(n)
				if s.filled = n; rapid.Bool().Draw(t, "with other values") && n == 0 {
					s.salt += "'"
					s.hasKeys = true
					s.Identify(chain(s.salt, s.tokens, b))
				}
				s.reserved = s.filled
			},
			"release": func(t *rapid.T) {
				s := some(t)
				keep := rapid.Bool().Draw(t, "keep")
				s.Release(keep)
				s.filled, s.reserved = 0, 0
				if len(s.Blocks()) > 0 {
					t.Fatalf("still has %v", s.Blocks())
				}
				if rapid.Bool().Draw(t, "ends") {
					begin(t, s)
				}
			},
			"drop": func(t *rapid.T) {
				if rapid.IntRange(0, 3).Draw(t, "drops") > 0 {
					return
				}
				m.DropCached()
				used := map[int32]bool{}
				for _, s := range all {
					for _, id := range s.Blocks() {
						used[id] = true
					}
				}
				x := m.NewTable()
				for _, s := range all {
					x.Identify(chain(s.salt, s.tokens, b))
					x.Match(len(s.tokens))
					for _, id := range x.Blocks() {
						if !used[id] {
							t.Fatalf("block %d, which no sequence uses, is found", id)
						}
					}
					x.Release(true)
				}
			},
			"hold": func(t *rapid.T) {
				s := some(t)
				if n := s.filled / b; n > 0 {
					from := rapid.IntRange(0, n-1).Draw(t, "from")
					blocks := slices.Clone(s.Blocks()[from:n])
					m.Hold(blocks)
					h := hold{blocks: blocks}
					for _, id := range blocks {
						h.content = append(h.content, memory[int(id)*b:int(id+1)*b]...)
					}
					holds = append(holds, h)
				}
			},
			"unhold": func(t *rapid.T) {
				if len(holds) > 0 {
					i := rapid.IntRange(0, len(holds)-1).Draw(t, "hold")
					m.Unhold(holds[i].blocks)
					holds = slices.Delete(holds, i, i+1)
				}
			},
			"withdraw": func(t *rapid.T) {
				if x, ok := m.LeastUsed(); ok {
					if rapid.Bool().Draw(t, "any") {
						x = rapid.IntRange(0, extents-1).Draw(t, "extent")
					}
					if !m.Extent(x).Withdrawn {
						m.Withdraw(x)
					}
				}
			},
			"restore": func(t *rapid.T) {
				if extents == 0 {
					return
				}
				if x := rapid.IntRange(0, extents-1).Draw(t, "extent"); m.Extent(x).Withdrawn {
					m.Restore(x)
				}
			},
			"": func(t *rapid.T) {
				if err := m.Check(tables...); err != nil {
					t.Fatal(err)
				}
				for _, e := range m.TakeEvents() {
					apply(t, found, e, b)
				}
				if !maps.Equal(found, m.Found()) {
					t.Fatalf("by the events %d keys are found; %d are", len(found), len(m.Found()))
				}
				for x := range extents { // others write to what nothing uses
					if s := m.Extent(x); s.Withdrawn && s.Busy == 0 {
						first, n := m.ExtentBlocks(x)
						for p := int(first) * b; p < (int(first)+n)*b; p++ {
							memory[p] = "an expert's"
						}
					}
				}
				for _, h := range holds {
					for i, want := range h.content {
						if got := memory[int(h.blocks[i/b])*b+i%b]; got != want {
							t.Fatalf("block %d is held, and holds %q, before %q", h.blocks[i/b], got, want)
						}
					}
				}
				for i, s := range all {
					for p := range s.filled {
						id := s.Blocks()[p/b]
						for _, c := range slices.Backward(m.Copies()) { // to be made
							if c.Dst == id {
								id = c.Src
							}
						}
						if got := memory[int(id)*b+p%b]; got != content(s, p) {
							t.Fatalf("position %d of sequence %d is in block %d, which holds %q, want %q", p, i, s.Blocks()[p/b], got, content(s, p))
						}
					}
				}
			},
		})
	})
}

// apply applies an event to the set of keys that are found. Where it has tokens, they make the keys of those of the
// parent.
func apply(t interface{ Fatalf(string, ...any) }, found map[kvcache.Key]bool, e kvcache.Event, blockTokens int) {
	if e.Medium != kvcache.MediumGPU || (len(e.Stored) > 0) == (len(e.Removed) > 0) {
		t.Fatalf("event of medium %q stores %d blocks and removes %d", e.Medium, len(e.Stored), len(e.Removed))
	}
	for i, k := range e.Stored {
		if found[k] {
			t.Fatalf("key %x is stored twice", k[:4])
		}
		found[k] = true
		if len(e.Tokens) == 0 || i == 0 && e.Parent == (kvcache.Key{}) {
			continue // the first key's parent has a salt
		}
		parent := e.Parent
		if i > 0 {
			parent = e.Stored[i-1]
		}
		if parent.Next(e.Tokens[i*blockTokens:(i+1)*blockTokens]) != k {
			t.Fatalf("key %x is not that of its tokens behind key %x", k[:4], parent[:4])
		}
	}
	for _, k := range e.Removed {
		if !found[k] {
			t.Fatalf("key %x is removed, and not stored", k[:4])
		}
		delete(found, k)
	}
}

// TestKeptAsLongAsThereIsRoom: content of freed blocks is found until all other free
// blocks are used, and then goes from the end of the prefix that was freed first.
func TestKeptAsLongAsThereIsRoom(t *testing.T) {
	m := newManager(t, 8, 2)
	first, second, other := m.NewTable(), m.NewTable(), m.NewTable()
	for i, x := range []*kvcache.Table{first, second} {
		x.Identify(chain("", []int32{int32(i), 1, 2, 3, 4, 5}, 2))
		if !x.Reserve(6) {
			t.Fatal("no room")
		}
		x.SetFilled(6)
	}
	first.Release(true)
	second.Release(true)
	// Two blocks were never used; of the six others the first's go first, its last block first.
	for used, want := range [][2]int{{6, 6}, {6, 6}, {6, 6}, {4, 6}, {2, 6}, {0, 6}, {0, 4}, {0, 2}, {0, 0}} {
		if !other.Reserve(2 * used) {
			t.Fatalf("no %d blocks of %d", used, m.Blocks())
		}
		// What is asked for goes to the end of the order: so ask in that order.
		for i, x := range []*kvcache.Table{first, second} {
			if got := x.Match(6); got != want[i] {
				t.Errorf("with %d blocks used %d tokens of %d are found, want %d", used, got, i, want[i])
			}
			x.Release(true)
		}
	}
}

// TestWithdraw: blocks of a withdrawn extent are neither allocated nor matched. Those that are
// used stay so until they are released, and are then not free. Capacity counts what can never be
// withdrawn.
func TestWithdraw(t *testing.T) {
	m, err := kvcache.NewManager(kvcache.ManagerOptions{Blocks: 8, BlockTokens: 1, Extents: 3, ExtentBlocks: 2})
	if err != nil {
		t.Fatal(err)
	}
	check := func(what string, free, present int) {
		t.Helper()
		if m.Free() != free || m.Present() != present {
			t.Errorf("%s: %d blocks are free of %d, want %d of %d", what, m.Free(), m.Present(), free, present)
		}
	}
	x, y := m.NewTable(), m.NewTable()
	x.Identify(chain("", []int32{1, 2, 3, 4, 5}, 1))
	if m.Capacity() != 2 || !x.Reserve(5) || !slices.Equal(x.Blocks(), []int32{0, 1, 2, 3, 4}) {
		t.Fatalf("blocks %v of a capacity of %d: those of no extent come first", x.Blocks(), m.Capacity())
	}
	x.SetFilled(5)
	if e, ok := m.LeastUsed(); e != 2 || !ok {
		t.Errorf("extent %d is used least", e)
	}
	m.Withdraw(1) // blocks 4, which is used, and 5
	m.Withdraw(2)
	check("withdrawn", 0, 5)
	if s := m.Extent(1); s != (kvcache.ExtentState{Withdrawn: true, Busy: 1}) {
		t.Errorf("extent 1: %+v", s)
	}
	if y.Reserve(1) {
		t.Errorf("block %v is allocated", y.Blocks())
	}
	y.Identify(chain("", []int32{1, 2, 3, 4, 5}, 1))
	if n := y.Match(5); n != 4 {
		t.Errorf("%d tokens are matched, want the 4 that are not withdrawn", n)
	}
	y.Release(true)
	x.Release(true)
	check("released", 4, 4)
	m.Restore(1)
	check("restored", 6, 6)
	if !x.Reserve(6) {
		t.Error("restored blocks are not allocated")
	}
	// What a copy still holds of a withdrawn extent, here block 4, will not be free.
	last := x.Blocks()[:1]
	m.Hold(last)
	x.Release(false)
	if y := m.NewTable(); y.CanReserve(6, 0) || !y.WillReserve(6, 0) {
		t.Errorf("%d blocks are free, and one is held", m.Free())
	}
	m.Withdraw(1)
	if y := m.NewTable(); y.WillReserve(5, 0) || !y.WillReserve(4, 0) {
		t.Error("a block of a withdrawn extent is waited for")
	}
	m.Unhold(last)
	check("no longer held", 4, 4)
}

// TestReuse: hits of blocks that would be evicted soon are cold, and those of blocks that were
// evicted or withdrawn are lost, each once.
func TestReuse(t *testing.T) {
	m, err := kvcache.NewManager(kvcache.ManagerOptions{Blocks: 9, BlockTokens: 1, Extents: 2, ExtentBlocks: 4})
	if err != nil {
		t.Fatal(err)
	}
	use := func(prompts ...int32) {
		t.Helper()
		for _, p := range prompts {
			x := m.NewTable()
			x.Identify(chain("", []int32{p}, 1))
			x.Match(1)
			if !x.Reserve(1) {
				t.Fatal("no room")
			}
			x.SetFilled(1)
			x.Release(true)
		}
	}
	use(0, 1, 2, 3, 4, 5, 6, 7, 8) // all blocks
	if r := m.Reuse(); r.Cached != 9 || r.Hits != 0 {
		t.Errorf("%+v", r)
	}
	use(8, 0) // nothing is cold before a block was evicted
	use(9)    // in place of 1
	use(9, 2)
	want := kvcache.Reuse{Hits: 4, ColdHits: 1, Lost: 1, MaxLost: 8, Cached: 9}
	if r := m.Reuse(); r != want {
		t.Errorf("%+v, want %+v", r, want)
	}
	x := m.NewTable()
	x.Identify(chain("", []int32{1}, 1))
	for range 2 { // a request that waits looks again
		x.Match(1)
		x.Release(true)
	}
	want.LostHits, want.LateHits, want.Lost = 1, 1, 0
	if r := m.Reuse(); r != want {
		t.Errorf("%+v, want %+v", r, want)
	}
	m.Withdraw(1)
	if r := m.Reuse(); r.Lost != 4 || r.Cached != 5 {
		t.Errorf("%+v: withdrawn blocks are lost", r)
	}
}

// TestHold: a released block that a copy holds is not allocated, can be matched, and is
// free once the last copy has ended.
func TestHold(t *testing.T) {
	m := newManager(t, 2, 2)
	x, y := m.NewTable(), m.NewTable()
	for _, s := range []*kvcache.Table{x, y} {
		s.Identify(chain("", []int32{1, 2, 3, 4}, 2))
	}
	x.Reserve(4)
	x.SetFilled(4)
	blocks := slices.Clone(x.Blocks())
	m.Hold(blocks)
	m.Hold(blocks[:1])
	x.Release(true)
	if m.Free() != 0 || m.Held() != 2 || y.Reserve(1) {
		t.Errorf("%d free, %d held", m.Free(), m.Held())
	}
	if n := y.Match(4); n != 4 || m.Held() != 0 || y.Missing(5) != 1 {
		t.Errorf("%d tokens matched, %d held", n, m.Held())
	}
	y.Release(false)
	m.Unhold(blocks)
	if m.Free() != 1 || m.Held() != 1 {
		t.Errorf("%d free, %d held", m.Free(), m.Held())
	}
	m.Unhold(blocks[:1])
	if n := y.Match(4); n != 0 || m.Free() != 2 || m.Held() != 0 {
		t.Errorf("%d tokens matched, %d free, %d held", n, m.Free(), m.Held())
	}
}

// TestWillReserve: it counts blocks that transfers hold, and not those that are yet to be copied
// within the pool, which may wait for the reservation itself.
func TestWillReserve(t *testing.T) {
	m := newManager(t, 4, 2)
	x, y, z := m.NewTable(), m.NewTable(), m.NewTable()
	x.Reserve(3)
	x.SetFilled(3)
	blocks := slices.Clone(x.Blocks())
	for _, s := range []*kvcache.Table{y, z} {
		s.Fork(x, 3)
		if !s.Reserve(4) {
			t.Fatal("no room")
		}
	}
	if want := []kvcache.Copy{{Src: 1, Dst: 2}, {Src: 1, Dst: 3}}; !slices.Equal(m.Copies(), want) {
		t.Errorf("copies %v, want %v", m.Copies(), want)
	}
	x.Release(true)
	if m.Held() != 1 || y.Reserve(5) || y.WillReserve(5, 0) {
		t.Errorf("%d held; a sequence would wait for its own copy", m.Held())
	}
	m.Hold(blocks[1:])
	if !y.WillReserve(5, 0) || y.WillReserve(5, 1) {
		t.Error("a block that a transfer holds will be free")
	}
	m.Unhold(blocks[1:])
	z.Release(true) // with its copy
	if want := []kvcache.Copy{{Src: 1, Dst: 2}}; !slices.Equal(m.Copies(), want) || m.Free() != 1 {
		t.Errorf("copies %v, want %v; %d blocks free", m.Copies(), want, m.Free())
	}
	m.Copied()
	if m.Held() != 0 || m.Free() != 2 || !y.Reserve(5) {
		t.Errorf("%d held and %d free once copied", m.Held(), m.Free())
	}
}

func TestMisuse(t *testing.T) {
	for want, f := range map[string]func(*kvcache.Table){
		"match of a sequence with 2 blocks":                          func(x *kvcache.Table) { x.Match(4) },
		"9 tokens are filled after 6, in blocks of 4; 8":             func(x *kvcache.Table) { x.SetFilled(9) },
		"5 tokens are filled after 6":                                func(x *kvcache.Table) { x.SetFilled(5) },
		"4 tokens are filled after 0, in blocks of 4; 0":             func(x *kvcache.Table) { x.SetFilled(0); x.SetFilled(4) },
		"fork of 7 tokens of a sequence with 6 to one with 0 blocks": func(x *kvcache.Table) { x.Manager().NewTable().Fork(x, 7) },
		"fork of 6 tokens of a sequence with 6 to one with 2 blocks": func(x *kvcache.Table) { x.Fork(x, 6) },
		"hold of free block 3":                                       func(x *kvcache.Table) { x.Manager().Hold([]int32{3}) },
		"block 0 is not held":                                        func(x *kvcache.Table) { x.Manager().Unhold([]int32{0}) },
	} {
		m := newManager(t, 4, 4)
		x := m.NewTable()
		x.Identify(chain("", []int32{1, 2, 3, 4}, 4))
		if !x.Reserve(6) {
			t.Fatal("no room")
		}
		x.SetFilled(6)
		func() {
			defer func() {
				if r := fmt.Sprint(recover()); !strings.Contains(r, want) {
					t.Errorf("panic %q, want %q", r, want)
				}
			}()
			f(x)
		}()
	}
}

// TestKeys: a key depends on every token up to the block's end, on their order, and on
// the salt, and no salt makes the key of a block.
func TestKeys(t *testing.T) {
	seen := map[kvcache.Key]string{{}: "none"}
	add := func(what string, k kvcache.Key) {
		if was, ok := seen[k]; ok {
			t.Errorf("%s has the key of %s", what, was)
		}
		seen[k] = what
	}
	for _, salt := range []string{"", "a", "b"} {
		add("root "+salt, kvcache.RootKey([]byte(salt)))
		for _, tokens := range [][]int32{{1, 2, 3, 4}, {1, 2, 4, 3}, {2, 1, 3, 4}, {1 << 8, 2, 3, 5}, {1, 2 << 16, 3, 4}, {-1, 2, 3, 4}} {
			keys := chain(salt, tokens, 2)
			if !slices.Equal(keys, chain(salt, tokens, 2)) {
				t.Errorf("the keys of %v differ from themselves", tokens)
			}
			add(fmt.Sprint(salt, tokens), keys[1])
		}
	}
	parent := kvcache.RootKey(nil)
	add("a salt like a block", kvcache.RootKey(append(parent[:], 1, 0, 0, 0, 2, 0, 0, 0)))
	add("that block", parent.Next([]int32{1, 2}))
}

func TestManagerOptions(t *testing.T) {
	for want, o := range map[string]kvcache.ManagerOptions{
		"Blocks is 0":       {},
		"Blocks is -1":      {Blocks: -1},
		"BlockTokens is -1": {Blocks: 1, BlockTokens: -1},
	} {
		if _, err := kvcache.NewManager(o); err == nil || !strings.Contains(err.Error(), want) {
			t.Errorf("%v, want an error with %q", err, want)
		}
	}
	if m := newManager(t, 3, 0); m.Blocks() != 3 || m.BlockTokens() != 16 || m.Capacity() != 48 || m.Free() != 3 {
		t.Errorf("%d blocks of %d tokens, %d in all, %d free", m.Blocks(), m.BlockTokens(), m.Capacity(), m.Free())
	}
}

// TestReserveAllocatesNothing: a step's reservation is free of garbage.
func TestReserveAllocatesNothing(t *testing.T) {
	m := newManager(t, 64, 16)
	x := m.NewTable()
	x.Identify(chain("", make([]int32, 1024), 16))
	run := func() {
		for n := 1; n <= 1024; n++ {
			if !x.Reserve(n) {
				t.Fatal("no room")
			}
			x.SetFilled(n)
		}
		x.Release(true)
		x.Match(1023)
		x.Release(false)
	}
	run()
	if n := testing.AllocsPerRun(10, run); n != 0 {
		t.Errorf("%v allocations", n)
	}
}

// TestKeysOfRestoredBlocks: what a sequence has in an extent that was withdrawn and restored meanwhile is found again when
// it fills more.
func TestKeysOfRestoredBlocks(t *testing.T) {
	m, err := kvcache.NewManager(kvcache.ManagerOptions{Blocks: 5, BlockTokens: 1, Extents: 1, ExtentBlocks: 4})
	if err != nil {
		t.Fatal(err)
	}
	var keys []kvcache.Key
	for last, i := kvcache.RootKey(nil), int32(0); i < 4; i++ {
		last = last.Next([]int32{i})
		keys = append(keys, last)
	}
	s := m.NewTable()
	s.Identify(keys)
	if !s.Reserve(4) {
		t.Fatal("no block is free")
	}
	for tokens := range 3 {
		s.SetFilled(tokens + 1)
	}
	m.Withdraw(0)
	m.Restore(0)
	s.SetFilled(4)
	other := m.NewTable()
	other.Identify(keys)
	if found := other.Match(4); found != 4 {
		t.Errorf("%d tokens are found, want 4", found)
	}
}

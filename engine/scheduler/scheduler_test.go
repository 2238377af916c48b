package scheduler

import (
	"fmt"
	"strings"
	"testing"

	"github.com/cockroachdb/datadriven"
	"pgregory.net/rapid"
)

// TestScript runs histories: `new rows=… sequences=… blocks=… block-tokens=…`,
// `add id=… tokens=… most=…`, `remove id=…`, `restart id=…` (computes all again) and
// `step [times=…]`, which plans, prints the plan and does as it says.
func TestScript(t *testing.T) {
	datadriven.RunTest(t, "testdata/script", func(t *testing.T, d *datadriven.TestData) string {
		switch d.Cmd {
		case "new":
			var l Limits
			d.ScanArgs(t, "rows", &l.Rows)
			d.ScanArgs(t, "sequences", &l.Sequences)
			d.ScanArgs(t, "blocks", &l.Blocks)
			d.ScanArgs(t, "block-tokens", &l.BlockTokens)
			script = New(l)
		case "add":
			var id, tokens, most int
			d.ScanArgs(t, "id", &id)
			d.ScanArgs(t, "tokens", &tokens)
			d.ScanArgs(t, "most", &most)
			script.Add(ID(id), tokens, most)
		case "remove", "restart":
			var id int
			d.ScanArgs(t, "id", &id)
			if d.Cmd == "restart" {
				script.Restart(ID(id))
				break
			}
			if script.Remove(ID(id)) {
				return "ran\n" + state(script)
			}
			return "waited\n" + state(script)
		case "step":
			times := 1
			d.MaybeScanArgs(t, "times", &times)
			var b strings.Builder
			for range times {
				p := script.Plan()
				carryOut(script, p)
				b.WriteString(format(p))
			}
			return b.String() + state(script)
		default:
			t.Fatalf("unknown command %q", d.Cmd)
		}
		return state(script)
	})
}

var script *Scheduler

func carryOut(s *Scheduler, p Plan) {
	for _, c := range p.Chunks {
		if c.Draw {
			s.Done(c, 1)
		} else {
			s.Done(c, 0)
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
	for _, c := range p.Chunks {
		fmt.Fprintf(&b, "%d: [%d,%d)", c.ID, c.From, c.To)
		if c.Draw {
			b.WriteString(" draw")
		}
		b.WriteString("; ")
	}
	if b.Len() == 0 {
		return "nothing\n"
	}
	return strings.TrimSuffix(b.String(), "; ") + "\n"
}

func state(s *Scheduler) string {
	return fmt.Sprintf("running %d, waiting %d, %d blocks free\n", s.Running(), s.Waiting(), s.FreeBlocks())
}

// TestHistories plays random histories and checks after every step what always
// holds: rows, places and blocks are never exceeded, chunks go on where the cache
// ends, arrival decides who is preempted, and everything that is not removed ends.
func TestHistories(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		l := Limits{
			Rows:        rapid.IntRange(1, 24).Draw(t, "rows"),
			Sequences:   rapid.IntRange(1, 6).Draw(t, "sequences"),
			Blocks:      rapid.IntRange(1, 12).Draw(t, "blocks"),
			BlockTokens: rapid.IntRange(1, 5).Draw(t, "block tokens"),
		}
		s := New(l)
		type model struct{ tokens, computed, most int }
		live := map[ID]*model{}
		next := ID(0)
		arrive := rapid.IntRange(1, 12).Draw(t, "arrivals")
		for step := 0; len(live) > 0 || arrive > 0; step++ {
			if step > 5000 {
				t.Fatalf("%d sequences never end", len(live))
			}
			if arrive > 0 && rapid.Bool().Draw(t, "arrives") {
				arrive--
				most := rapid.IntRange(1, l.Blocks*l.BlockTokens).Draw(t, "most")
				m := &model{tokens: rapid.IntRange(1, most).Draw(t, "tokens"), most: most}
				live[next] = m
				s.Add(next, m.tokens, m.most)
				next++
			}
			if len(live) > 0 && rapid.IntRange(0, 9).Draw(t, "removes") == 0 {
				for id := range next { // the lowest that lives
					if live[id] != nil {
						s.Remove(id)
						delete(live, id)
						break
					}
				}
			}
			p := s.Plan()
			for _, id := range p.Preempted {
				live[id].computed = 0
				for other, m := range live {
					if other > id && m.computed > 0 {
						t.Fatalf("%d was preempted before %d", id, other)
					}
				}
			}
			rows := 0
			for _, c := range p.Chunks {
				m := live[c.ID]
				if c.From != m.computed || c.To <= c.From || c.To > m.tokens || c.Draw != (c.To == m.tokens) {
					t.Fatalf("chunk %+v of %+v", c, m)
				}
				rows += c.To - c.From
				m.computed = c.To
				switch {
				case c.Draw && m.tokens < m.most:
					m.tokens++
					s.Done(c, 1)
				case c.Draw:
					s.Done(c, 0)
					s.Remove(c.ID)
					delete(live, c.ID)
				default:
					s.Done(c, 0)
				}
			}
			if rows > l.Rows || s.Running() > l.Sequences || s.FreeBlocks() < 0 || s.Running()+s.Waiting() != len(live) {
				t.Fatalf("%d rows, %d running, %d waiting of %d, %d blocks free under %+v", rows, s.Running(), s.Waiting(), len(live), s.FreeBlocks(), l)
			}
			if len(p.Chunks) == 0 && len(live) > 0 {
				t.Fatalf("nothing to do with %d sequences", len(live))
			}
			if len(live) == 0 && s.FreeBlocks() != l.Blocks {
				t.Fatalf("%d of %d blocks free with nothing left", s.FreeBlocks(), l.Blocks)
			}
		}
	})
}

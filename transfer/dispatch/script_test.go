package dispatch

import (
	"errors"
	"fmt"
	"slices"
	"strconv"
	"strings"
	"testing"
	"time"

	"github.com/cockroachdb/datadriven"

	"github.com/moeserve/moeserve/device"
)

// fence is one that only has a name.
type fence struct {
	device.Fence
	name string
}

// script is a core whose requests, links and points have names.
type script struct {
	core     Core
	names    []string // of links
	requests map[string]*Request
	fences   map[string]*fence
	addr     device.Addr
	// blind points cannot be watched.
	blind map[string]bool
	out   strings.Builder
}

// TestScripts runs scripts of:
//
//	link name=H from=0 to=1 [chunk=8] [window=0] [depth=2] [relay-from=0]     spaces are numbers, 0 is the host
//	relay H [buffers=2] [bytes=8]                    the link becomes a relay
//	hop name=X relay=H from=1 to=2                   and its buffers are connected with another space
//	remove-relay H
//	at us=5                                          the time of what follows
//	prefer to=2                                      Core.Preferred
//	no-direct-first                                  Core.NoDirectFirst
//	submit name=A bytes=20 [pieces=(4,4,4|4)] [class=1] [after=(p,q)] [done=r] [from=0] [to=1] [turns] [direct]
//	    pieces have bytes of their own; a bar stands where the next is adjacent to it
//	reached p | failed p | blind p                   a point
//	landed H 0 | failed H 0 | refused H 0 | lost H 0 the chunk in slot 0 of H
//	recovered H [lost]
//	promote name=A class=2 | cancel name=A | skip name=A | cancel-all
//
// and prints the actions that follow.
func TestScripts(t *testing.T) {
	datadriven.Walk(t, "testdata/scripts", func(t *testing.T, path string) {
		s := &script{requests: map[string]*Request{}, fences: map[string]*fence{}, blind: map[string]bool{}}
		datadriven.RunTest(t, path, func(t *testing.T, d *datadriven.TestData) string {
			s.out.Reset()
			s.run(t, d)
			s.actions()
			if s.out.Len() == 0 {
				return "nothing\n"
			}
			return s.out.String()
		})
	})
}

func (s *script) run(t *testing.T, d *datadriven.TestData) {
	var name, done string
	var after []string
	pieces := d.Input
	from, to, bytes, chunk, window, depth, class, relayFrom, buffers, us := 0, 1, 0, 8, 0, 2, 0, 0, 2, 0
	d.MaybeScanArgs(t, "name", &name)
	d.MaybeScanArgs(t, "done", &done)
	d.MaybeScanArgs(t, "from", &from)
	d.MaybeScanArgs(t, "to", &to)
	d.MaybeScanArgs(t, "bytes", &bytes)
	d.MaybeScanArgs(t, "chunk", &chunk)
	d.MaybeScanArgs(t, "window", &window)
	d.MaybeScanArgs(t, "depth", &depth)
	d.MaybeScanArgs(t, "class", &class)
	d.MaybeScanArgs(t, "relay-from", &relayFrom)
	d.MaybeScanArgs(t, "buffers", &buffers)
	d.MaybeScanArgs(t, "us", &us)
	for _, a := range d.CmdArgs {
		if a.Key == "after" {
			after = a.Vals
		}
	}
	word := func(i int) string { return d.CmdArgs[i].Key }
	at := func() (link, slot int) {
		for s.names[link] != word(0) {
			link++
		}
		if len(d.CmdArgs) > 1 && len(d.CmdArgs[1].Vals) == 0 {
			slot, _ = strconv.Atoi(word(1))
		}
		return link, slot
	}
	boom := errors.New("boom")
	lost := fmt.Errorf("lost: %w", device.ErrLost)
	r := s.requests[name]
	switch d.Cmd {
	case "link":
		s.core.AddLink(Link{
			From: device.Space(from), To: device.Space(to), ChunkBytes: int64(chunk), WindowBytes: int64(window), Depth: depth, RelayFrom: int64(relayFrom),
		})
		s.names = append(s.names, name)
	case "relay":
		link, _ := at()
		if bytes == 0 {
			bytes = 8
		}
		if err := s.core.AddRelay(Relay{Link: link, Buffers: buffers, BufferBytes: int64(bytes)}); err != nil {
			fmt.Fprintf(&s.out, "refused: %v\n", err)
		}
	case "hop":
		var relay string
		d.ScanArgs(t, "relay", &relay)
		if _, err := s.core.AddHop(slices.Index(s.names, relay), Link{From: device.Space(from), To: device.Space(to)}); err != nil {
			fmt.Fprintf(&s.out, "refused: %v\n", err)
		} else {
			s.names = append(s.names, name)
		}
	case "remove-relay":
		link, _ := at()
		s.core.RemoveRelay(link)
	case "prefer":
		s.core.Preferred = device.Space(to)
	case "no-direct-first":
		s.core.NoDirectFirst = true
	case "at":
		s.core.At(time.Duration(us) * time.Microsecond)
	case "submit":
		r = &Request{From: device.Space(from), To: device.Space(to), Class: uint8(class), TakesTurns: d.HasArg("turns"), Direct: d.HasArg("direct"), Owner: name}
		if pieces == "" {
			pieces = strconv.Itoa(bytes)
		}
		if done != "" {
			r.Done = s.point(done)
		}
		s.pieces(t, r, pieces)
		s.requests[name] = r
		var points []device.Point
		for _, p := range after {
			points = append(points, s.point(p))
		}
		if err := s.core.Submit(r, points); err != nil {
			fmt.Fprintf(&s.out, "refused: %v\n", err)
		}
	case "blind":
		s.blind[word(0)] = true
	case "reached":
		s.core.Reached(s.point(word(0)))
	case "failed", "refused", "landed", "lost":
		if f, ok := s.fences[word(0)]; ok {
			s.core.PointFailed(device.Point{Fence: f, Value: 1}, boom)
			return
		}
		link, slot := at()
		if l := s.core.links[link]; slot >= len(l.slots) || l.slots[slot].state != inFlight {
			d.Fatalf(t, "slot %d of %s is not in flight", slot, s.names[link])
		}
		switch d.Cmd {
		case "landed":
			s.core.Landed(link, slot)
		case "failed":
			s.core.Failed(link, slot, boom)
		case "lost":
			s.core.Failed(link, slot, lost)
		default:
			s.core.Refused(link, slot, boom)
		}
	case "recovered":
		link, _ := at()
		var err error
		if len(d.CmdArgs) > 1 {
			err = lost
		}
		s.core.Recovered(link, err)
	case "promote":
		s.core.RaiseClass(r, uint8(class))
	case "cancel":
		fmt.Fprintln(&s.out, s.core.Cancel(r, errors.New("canceled")))
	case "skip":
		fmt.Fprintln(&s.out, s.core.Skip(r), r.Skipped())
	case "cancel-all":
		s.core.CancelAll(errors.New("closed"))
	default:
		d.Fatalf(t, "unknown command %s", d.Cmd)
	}
}

// pieces adds pieces of so many bytes, in text: "4 4|4" are three, the last of which
// is adjacent to the one before it.
func (s *script) pieces(t *testing.T, r *Request, text string) {
	for group := range strings.FieldsSeq(text) {
		s.addr += 1 << 20
		for part := range strings.SplitSeq(group, "|") {
			count := 1
			if n, rest, ok := strings.Cut(part, "x"); ok {
				count, _ = strconv.Atoi(n)
				part = rest
			}
			n, err := strconv.ParseInt(part, 10, 64)
			if err != nil {
				t.Fatal(err)
			}
			for range count {
				if count > 1 {
					s.addr += 1 << 20
				}
				r.Add(Piece{Dst: device.Range{Addr: 1<<50 + s.addr, Bytes: n}, Src: device.Range{Addr: s.addr, Bytes: n}})
				s.addr += device.Addr(n)
			}
		}
	}
}

func (s *script) point(name string) device.Point {
	if s.fences[name] == nil {
		s.fences[name] = &fence{name: name}
	}
	return device.Point{Fence: s.fences[name], Value: 1}
}

func (s *script) actions() {
	for a, ok := s.core.Next(); ok; a, ok = s.core.Next() {
		switch a.Kind {
		case Await:
			name := a.Point.Fence.(*fence).name
			if s.blind[name] {
				fmt.Fprintf(&s.out, "withdraw %s\n", a.Request.Owner)
				s.core.Withdraw(a.Request, a.Point)
				continue
			}
			fmt.Fprintf(&s.out, "await %s\n", name)
		case Launch:
			fmt.Fprintf(&s.out, "launch %s %d: %s", s.names[a.Link], a.Slot, text(a.Chunk))
			if v := a.Via; v.Hop != Direct {
				fmt.Fprintf(&s.out, " %s buffer %d of %s", map[Hop]string{ToBuffer: "to", FromBuffer: "from"}[v.Hop], v.Buffer, s.names[v.Relay])
			}
			fmt.Fprintln(&s.out)
		case Recover:
			fmt.Fprintf(&s.out, "recover %s\n", s.names[a.Link])
		case Retry:
			fmt.Fprintf(&s.out, "retry %s: %v\n", text(a.Chunk), a.Err)
		case Retire:
			fmt.Fprintf(&s.out, "retire %s: %v\n", s.names[a.Link], a.Err)
		case Drained:
			fmt.Fprintf(&s.out, "drained %s\n", s.names[a.Link])
		case Finish:
			fmt.Fprintf(&s.out, "finish %s", a.Request.Owner)
			if a.Err != nil {
				fmt.Fprintf(&s.out, ": %v", a.Err)
			}
			fmt.Fprintln(&s.out)
		}
	}
}

// text is a chunk as name[offset,end), with its copies where there is more than one.
func text(c Chunk) string {
	from := c.Offset
	for _, p := range c.Request.Pieces[:c.Piece] {
		from += p.Src.Bytes
	}
	copies := 0
	if err := c.Each(func(_, _ device.Range) error { copies++; return nil }); err != nil {
		panic(err)
	}
	t := fmt.Sprintf("%s[%d,%d)", c.Request.Owner, from, from+c.Bytes)
	if copies > 1 {
		t += fmt.Sprintf(" in %d copies", copies)
	}
	return t
}

// TestQueuedOfSkipped: a request counts as long as something of it is in flight, also if the rest was skipped.
func TestQueuedOfSkipped(t *testing.T) {
	var c Core
	l := c.AddLink(Link{From: device.Host, To: device.HBM(0), ChunkBytes: 8, Depth: 1})
	r := &Request{From: device.Host, To: device.HBM(0)}
	r.Add(Piece{Dst: device.Range{Addr: 4096, Bytes: 64}, Src: device.Range{Addr: 8192, Bytes: 64}})
	if err := c.Submit(r, nil); err != nil {
		t.Fatal(err)
	}
	for _, ok := c.Next(); ok; _, ok = c.Next() {
	}
	if n := r.InFlight(); n != 8 {
		t.Errorf("%d bytes are in flight, want 8", n)
	}
	if left := c.Skip(r); left != 56 || r.Ended() {
		t.Errorf("%d bytes were skipped, and it has ended: %v", left, r.Ended())
	}
	if n, bytes := c.Queued(l); n != 1 || bytes != 8 {
		t.Errorf("%d requests with %d bytes are on the link, want 1 with 8", n, bytes)
	}
}

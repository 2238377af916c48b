package harvest

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

// core is a controller driven by a script: there is no machine, and what would be done
// is printed.
type core struct {
	t       *testing.T
	c       *controller
	now     time.Duration
	clock   timeline
	handles map[string]*Handle
	names   map[*Handle]string
	asked   map[*peer]int // moves when the peers were asked
}

// TestController runs the scripts of testdata/controller. Each command prints the actions
// that it led to.
func TestController(t *testing.T) {
	datadriven.Walk(t, "testdata/controller", func(t *testing.T, path string) {
		s := &core{t: t}
		datadriven.RunTest(t, path, func(t *testing.T, d *datadriven.TestData) string {
			var out strings.Builder
			if d.HasArg("after") {
				s.now += s.duration(d, "after")
			}
			if text, err := s.do(d); err != nil {
				fmt.Fprintf(&out, "error: %v\n", err)
			} else if text != "" {
				fmt.Fprintln(&out, text)
			}
			for _, a := range s.c.takeActions() {
				fmt.Fprintln(&out, s.text(a))
			}
			return out.String()
		})
	})
}

// text is an action.
func (s *core) text(a action) string {
	switch a := a.(type) {
	case refuse:
		a.h.readers.refuse()
		return "refuse " + s.names[a.h]
	case invalidate:
		a.h.readers.invalidate()
		return "invalidate " + s.names[a.h]
	case notify:
		return fmt.Sprintf("notify %s of slab %d", strings.Join(a.clients, ","), a.slab)
	case runCallback:
		return fmt.Sprintf("call back %s (%s)", s.names[a.h], a.v.Reason)
	case scrub:
		return fmt.Sprintf("scrub slab %d: %d bytes", a.slab.id, a.bytes)
	case freeMemory:
		return fmt.Sprintf("give back slab %d", a.slab.id)
	case reportMiss:
		return fmt.Sprintf("report %s on slab %d (%s)", s.names[a.v.Handle], a.v.Slab, a.v.Reason)
	}
	return fmt.Sprint("tell: ", a)
}

func (s *core) duration(d *datadriven.TestData, key string) time.Duration {
	var text string
	d.ScanArgs(s.t, key, &text)
	v, err := time.ParseDuration(text)
	if err != nil {
		d.Fatalf(s.t, "%v", err)
	}
	return v
}

func (s *core) number(d *datadriven.TestData, key string, otherwise int64) int64 {
	d.MaybeScanArgs(s.t, key, &otherwise)
	return otherwise
}

func (s *core) peer(text string) *peer {
	n, err := strconv.Atoi(strings.TrimPrefix(text, "gpu"))
	if err != nil {
		s.t.Fatal(err)
	}
	p, err := s.c.peers.find("script", device.HBM(n))
	if err != nil {
		s.t.Fatal(err)
	}
	return p
}

func (s *core) slab(text string) *slab {
	for _, p := range s.c.peers {
		for _, l := range p.slabs {
			if strconv.FormatUint(l.id, 10) == text {
				return l
			}
		}
	}
	s.t.Fatalf("there is no slab %s", text)
	return nil
}

// result is one line with a result: drained NAME, called NAME TOOK, scrubbed
// SLAB, released SLAB; the rest of the line is its error.
func (s *core) result(line string) result {
	f := strings.Fields(line)
	var err error
	if len(f) > 2 {
		err = errors.New(strings.Join(f[2:], " "))
	}
	switch f[0] {
	case "drained":
		return drained{s.handles[f[1]], err}
	case "called":
		took, err := time.ParseDuration(f[2])
		if err != nil {
			s.t.Fatal(err)
		}
		return called{h: s.handles[f[1]], took: took}
	case "scrubbed":
		return scrubbed{s.slab(f[1]), err}
	case "released":
		return memoryFreed{s.slab(f[1]), err}
	}
	s.t.Fatalf("%q is not a result", line)
	return nil
}

func lines(d *datadriven.TestData) []string {
	return slices.DeleteFunc(strings.Split(d.Input, "\n"), func(l string) bool { return l == "" })
}

func (s *core) do(d *datadriven.TestData) (string, error) {
	word := func(i int) string { return d.CmdArgs[i].Key }
	switch d.Cmd {
	case "open": // peers=2 slab=1024 headroom=512 kv=512: peers of 4096 bytes, slabs of client kv
		s.now, s.handles, s.names, s.asked = 0, map[string]*Handle{}, map[*Handle]string{}, map[*peer]int{}
		o := Options{SlabBytes: s.number(d, "slab", 1024), Cooldown: 50 * time.Millisecond, Clients: map[string]ClientOptions{"kv": {SlabBytes: s.number(d, "kv", 0)}}}
		s.c = &controller{rules: o.EnsureDefaults().rules(), clients: map[string]*client{}, displaced: map[displacement]time.Duration{}}
		for i := range int(s.number(d, "peers", 1)) {
			p := &peer{space: device.HBM(i + 1), headroom: s.number(d, "headroom", 512), paths: map[device.Space]device.Path{device.HBM(0): {}}}
			p.update(Reading{Capacity: 4096, Free: 4096}, 0, time.Minute)
			s.c.peers = append(s.c.peers, p)
		}
	case "alloc": // NAME BYTES client= behind= cost= refuse: the device refuses a slab, once
		n, err := strconv.ParseInt(word(1), 10, 64)
		if err != nil {
			return "", err
		}
		text, hints := "", Hints{Client: "c", Label: word(0)}
		d.MaybeScanArgs(s.t, "client", &hints.Client)
		if d.HasArg("cost") {
			hints.Cost = s.duration(d, "cost")
		}
		if d.HasArg("behind") {
			var name string
			d.ScanArgs(s.t, "behind", &name)
			hints.After = s.handles[name]
		}
		req, err := s.c.request(n, hints, s.now)
		for refuse := d.HasArg("refuse"); err == nil; refuse = false {
			var to placement
			if to, err = s.c.choose(req); err != nil {
				break
			}
			if to.slab == nil && refuse {
				s.c.slabRefused(to, errors.New("out of memory"))
				continue
			}
			if to.slab == nil {
				to.slab = s.c.slabAllocated(to, device.Region{Space: to.peer.space, Range: device.Range{Addr: 1 << 20, Bytes: to.bytes}})
			}
			h := s.c.grant(to.slab, to.off, n, req, &s.clock)
			s.handles[word(0)], s.names[h] = h, word(0)
			text = fmt.Sprintf("%s: slab %d at %d", word(0), to.slab.id, to.off)
			break
		}
		return text, err
	case "cost": // NAME to=
		s.handles[word(0)].SetCost(s.duration(d, "to"))
	case "use": // CLIENT rate= saved= wanted=: both held and wanted objects have that rate
		var rate float64
		if _, err := fmt.Sscan(d.CmdArgs[1].Vals[0], &rate); err != nil {
			return "", err
		}
		s.c.setUse(word(0), Use{PerSecond: rate, WantedPerSecond: rate, Saved: s.duration(d, "saved"), Wanted: s.number(d, "wanted", 0)}, s.now)
	case "used": // NAME TIMES
		n, err := strconv.Atoi(word(1))
		if err != nil {
			return "", err
		}
		for range n {
			s.handles[word(0)].CountUse()
		}
	case "want": // CLIENT BYTES objects= cost=
		n, err := strconv.ParseInt(word(1), 10, 64)
		if err != nil {
			return "", err
		}
		return "", s.c.want(s.c.peers[0], Demand{Client: word(0), Bytes: n, Objects: int(s.number(d, "objects", 1)), Cost: s.duration(d, "cost")}, s.now)
	case "room": // CLIENT BYTES
		n, err := strconv.ParseInt(word(1), 10, 64)
		if err != nil {
			return "", err
		}
		owner, _ := s.c.slabsFor(word(0))
		return strconv.Itoa(s.c.peers[0].room(word(0), owner, n, s.now)), nil
	case "callback": // NAME
		return "", s.c.callback(s.handles[word(0)], func(Revocation) {})
	case "free": // NAME held: it has readers
		h := s.handles[word(0)]
		if err := s.c.free(h, s.now); err != nil {
			return "", err
		}
		s.c.finishFree(h, !d.HasArg("held"), nil)
	case "ask": // the monitor begins to read
		for _, p := range s.c.peers {
			s.asked[p] = p.slabChanges
		}
	case "read": // lines of: GPU FREE OTHER, or GPU fails, or GPU sick
		var rs []reading
		for _, line := range lines(d) {
			f := strings.Fields(line)
			r := reading{peer: s.peer(f[0]), Reading: Reading{Capacity: 4096}}
			r.slabChanges = r.peer.slabChanges
			if asked, ok := s.asked[r.peer]; ok {
				r.slabChanges = asked
			}
			switch f[1] {
			case "fails":
				r.err = errors.New("the monitor hangs")
			case "sick":
				r.Health = errors.New("xid 79")
			default:
				if _, err := fmt.Sscan(strings.Join(f[1:], " "), &r.Free, &r.OtherProcesses); err != nil {
					return "", err
				}
			}
			rs = append(rs, r)
		}
		clear(s.asked)
		s.c.observe(s.now, rs)
	case "exclude":
		s.c.setExcluded(s.peer(word(0)), errors.New("copies fail"), s.now)
	case "readmit":
		s.c.setExcluded(s.peer(word(0)), nil, s.now)
	case "reclaim": // GPU BYTES within=: as many more than are free
		n, err := strconv.ParseInt(word(1), 10, 64)
		if err != nil {
			return "", err
		}
		c, err := s.c.reclaim(s.peer(word(0)), s.peer(word(0)).free+s.peer(word(0)).draining+n, s.now, s.duration(d, "within"))
		if err != nil {
			return "", err
		}
		return fmt.Sprintf("planned %d", c.planned), nil
	case "step": // lines of ends
		var rs []result
		for _, line := range lines(d) {
			rs = append(rs, s.result(line))
		}
		s.c.step(s.now, rs)
	case "ended": // lines of ends
		for _, line := range lines(d) {
			s.c.complete(s.now, s.result(line))
		}
	case "review":
		s.c.reportOverdue(s.now)
	case "wants": // what step wants to know
		var names []string
		for _, h := range s.c.undrained() {
			names = append(names, s.names[h])
		}
		return fmt.Sprintf("drained? %v; %d pending", names, s.c.pending()), nil
	case "close":
		s.c.close(s.now)
	case "peers":
		var all []string
		for _, p := range s.c.peers {
			all = append(all, fmt.Sprintf("%s: free %d, coming %d, in service %d, spare %d", p.space, p.free, p.draining, p.serving, p.borrowable()))
		}
		return strings.Join(all, "\n"), nil
	default:
		d.Fatalf(s.t, "there is no command %s", d.Cmd)
	}
	return "", nil
}

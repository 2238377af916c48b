package harvest_test

import (
	"context"
	"errors"
	"fmt"
	"strconv"
	"strings"
	"testing"
	"time"

	"github.com/cockroachdb/datadriven"

	"github.com/moeserve/moeserve/device"
	"github.com/moeserve/moeserve/device/emulated"
	"github.com/moeserve/moeserve/harvest"
)

// stage is one runtime on a checked virtual machine, driven by a script from one
// goroutine, so that everything has one order. Sizes are small; a handle's content is
// its letter.
type stage struct {
	t       *testing.T
	m       *emulated.Machine
	r       *harvest.Runtime
	monitor *readings
	out     strings.Builder
	now     time.Duration
	handles map[string]*harvest.Handle
	names   map[uint64]string
	refs    map[string]*harvest.Ref
	fences  map[string]device.Fence
	reclaim *harvest.Reclamation
	faults  map[string]*emulated.Fault
	copies  device.Stream
	host    device.Memory
}

// readings are what the machine reports, with what a script says of bandwidth.
type readings struct {
	harvest.Monitor
	bandwidth map[device.Space]float64
	fail      error
}

func (m *readings) Read(s device.Space) (harvest.Reading, error) {
	if m.fail != nil {
		return harvest.Reading{}, m.fail
	}
	r, err := m.Monitor.Read(s)
	r.Bandwidth = m.bandwidth[s]
	return r, err
}

// TestRevocation runs the scripts of testdata/revocation. Each command prints the
// events it led to, and its error.
func TestRevocation(t *testing.T) {
	datadriven.Walk(t, "testdata/revocation", func(t *testing.T, path string) {
		s := &stage{t: t}
		datadriven.RunTest(t, path, func(t *testing.T, d *datadriven.TestData) string {
			s.out.Reset()
			if err := s.do(d); err != nil {
				fmt.Fprintf(&s.out, "error: %v\n", err)
			}
			return s.out.String()
		})
		if s.m != nil {
			t.Fatal("the script does not close")
		}
	})
}

func (s *stage) say(format string, args ...any) { fmt.Fprintf(&s.out, format+"\n", args...) }

func (s *stage) events() harvest.EventListener {
	name := func(h *harvest.Handle) string { return s.names[h.ID()] }
	failed := func(err error) string {
		if err == nil {
			return ""
		}
		return "; " + err.Error()
	}
	return harvest.EventListener{
		SlabAllocated: func(i harvest.SlabInfo) { s.say("slab %d allocated: %d bytes of %s", i.Slab, i.Bytes, i.Device) },
		SlabReleased: func(i harvest.SlabInfo) {
			s.say("slab %d released (%s), scrubbed %t", i.Slab, i.Reason, i.Scrubbed)
		},
		RevocationStarted: func(i harvest.RevocationInfo) {
			s.say("revocation of slab %d (%s): %d handles%s", i.Slab, i.Reason, i.Handles, failed(i.Cause))
		},
		Revoked: func(i harvest.RevokeInfo) {
			s.say("%s revoked (%s) after %v%s", name(i.Handle), i.Reason, i.Drain, failed(i.Failed))
		},
		RevocationEnded: func(i harvest.RevocationInfo) {
			s.say("revocation of slab %d ended: took %v of %v, drain %v, deadline missed %t", i.Slab, i.Took, i.Deadline, i.Drain, i.DeadlineMissed)
		},
		Freed: func(i harvest.FreeInfo) { s.say("%s freed after %v%s", name(i.Handle), i.Drain, failed(i.Failed)) },
		DeadlineMissed: func(i harvest.DeadlineMissInfo) {
			s.say("deadline missed (%s): %v", i.Reason, i)
		},
		PeerHealthChanged: func(i harvest.PeerInfo) { s.say("%s: health %v", i.Device, i.Health) },
	}
}

func arg[T any](d *datadriven.TestData, key string, def T) T {
	if d.HasArg(key) {
		for _, a := range d.CmdArgs {
			if a.Key == key && len(a.Vals) > 0 {
				_, err := fmt.Sscan(a.Vals[0], &def)
				if err != nil {
					panic(err)
				}
			}
		}
	}
	return def
}

func duration(d *datadriven.TestData, key string) time.Duration {
	v, err := time.ParseDuration(arg(d, key, "0s"))
	if err != nil {
		panic(err)
	}
	return v
}

// word is the i-th argument without a value.
func word(d *datadriven.TestData, i int) string {
	for _, a := range d.CmdArgs {
		if len(a.Vals) == 0 {
			if i == 0 {
				return a.Key
			}
			i--
		}
	}
	return ""
}

func gpu(d *datadriven.TestData, i int) device.Space {
	n, err := strconv.Atoi(strings.TrimPrefix(word(d, i), "gpu"))
	if err != nil {
		panic(err)
	}
	return device.HBM(n)
}

func size(d *datadriven.TestData, i int) int64 {
	n, err := strconv.ParseInt(word(d, i), 10, 64)
	if err != nil {
		panic(err)
	}
	return n
}

func (s *stage) point(text string) (device.Point, error) {
	name, value, _ := strings.Cut(text, ":")
	v, err := strconv.ParseUint(value, 10, 32)
	if err != nil {
		return device.Point{}, err
	}
	f, ok := s.fences[name]
	if !ok {
		if f, err = s.m.NewFence(name); err != nil {
			return device.Point{}, err
		}
		s.fences[name] = f
	}
	return device.Point{Fence: f, Value: uint32(v)}, nil
}

func (s *stage) do(d *datadriven.TestData) error {
	switch d.Cmd {
	case "open": // gpus=3 hbm=4096 slab=1024 headroom=512 policy=best-fit deadline= cooldown= leave=
		return s.open(d)
	case "alloc": // NAME BYTES client= cost= after= on=GPU silent calls closes
		var on []device.Space
		if d.HasArg("on") {
			on = []device.Space{device.HBM(arg(d, "on", 0))}
		}
		h, err := s.r.Alloc(size(d, 1), harvest.Hints{
			Client: arg(d, "client", "c"), Label: word(d, 0),
			Cost: duration(d, "cost"), After: s.handles[arg(d, "after", "")], Peers: on,
		})
		if err != nil {
			return err
		}
		name := word(d, 0)
		s.handles[name], s.names[h.ID()] = h, name
		seg := s.segment(h)
		s.say("%s: %d bytes on %s, slab %d at %d", name, h.Bytes(), h.Device(), seg.slab, seg.Offset)
		if d.HasArg("silent") {
			return nil
		}
		calls, closes := d.HasArg("calls"), d.HasArg("closes")
		return s.r.RegisterCallback(h, func(r harvest.Revocation) {
			available, references := r.Handle.State()
			s.say("callback of %s (%s), available %t, %d references", name, r.Reason, available, references)
			// All that is not locked meanwhile, and does not wait, may be called.
			ctx, cancel := context.WithTimeout(context.Background(), time.Millisecond)
			defer cancel()
			if calls {
				again, err := s.r.Alloc(100, harvest.Hints{})
				s.say("in the callback: %v, %v", again, err)
				s.say("in the callback: %v", s.r.Free(again))
				s.say("in the callback: %v", s.r.Free(h))
				pending, err := s.r.Tick(s.now)
				s.say("in the callback: %d pending, %v", pending, err)
				other, err := reclaimMore(s.r, h.Device(), 1, 0)
				s.say("in the callback: %d planned, %v", other.Planned(), err)
				s.say("in the callback: %v", s.reclaim.Wait(ctx))
			}
			if closes {
				s.say("in the callback: %v", s.r.Close(ctx))
			}
		})
	case "callback": // NAME
		name := word(d, 0)
		return s.r.RegisterCallback(s.handles[name], func(harvest.Revocation) { s.say("callback of %s", name) })
	case "free":
		return s.r.Free(s.handles[word(d, 0)])
	case "fill": // NAME BYTE [until=fence:value]: a copy into it, under a reference
		return s.fill(d)
	case "acquire": // REF NAME by=
		ref, ok := s.handles[word(d, 1)].Acquire(harvest.NewOwner(arg(d, "by", "reader")))
		s.say("acquired: %t", ok)
		if ok {
			s.refs[word(d, 0)] = &ref
		}
	case "release": // REF at=fence:value
		ref := s.refs[word(d, 0)]
		if !d.HasArg("at") {
			ref.Release()
			return nil
		}
		p, err := s.point(arg(d, "at", ""))
		if err != nil {
			return err
		}
		ref.ReleaseAt(p)
	case "signal", "fail": // FENCE:VALUE
		p, err := s.point(word(d, 0))
		if err != nil {
			return err
		}
		if d.Cmd == "fail" {
			return p.Fence.Fail(p.Value, errors.New("the reader's copy failed"))
		}
		return p.Fence.Signal(p.Value)
	case "take": // GPU BYTES
		return s.m.Occupy(gpu(d, 0), size(d, 1))
	case "lose":
		n, _ := gpu(d, 0).GPU()
		return s.m.Lose(n)
	case "exclude":
		return s.r.Exclude(gpu(d, 0), errors.New("xid 79"))
	case "readmit":
		return s.r.Readmit(gpu(d, 0))
	case "bandwidth": // GPU PERCENT
		s.monitor.bandwidth[gpu(d, 0)] = float64(size(d, 1)) / 100
	case "blind": // readings fail
		s.monitor.fail = errors.New("the monitor hangs")
	case "see":
		s.monitor.fail = nil
	case "cost":
		s.handles[word(d, 0)].SetCost(duration(d, "to"))
	case "reclaim": // GPU BYTES within=: as many more than are free
		c, err := reclaimMore(s.r, gpu(d, 0), size(d, 1), duration(d, "within"))
		if err != nil {
			return err
		}
		s.reclaim = c
		s.say("planned %d", c.Planned())
	case "reclaimed":
		s.say("freed %d of %d, done %t", s.reclaim.Freed(), s.reclaim.Planned(), s.reclaim.Done())
	case "wait": // for the reclamation
		ctx, cancel := context.WithTimeout(context.Background(), time.Minute)
		defer cancel()
		return s.reclaim.Wait(ctx)
	case "inject": // stall|fail|refuse NAME [times=] [gpu=]
		kind := map[string]emulated.FaultKind{"stall": emulated.StallCopy, "fail": emulated.FailCopy, "refuse": emulated.RefuseAlloc}[word(d, 0)]
		stream := arg(d, "stream", "")
		s.faults[word(d, 1)] = s.m.Inject(&emulated.Fault{
			Kind: kind, Times: arg(d, "times", 1),
			Match: func(p emulated.Point) bool { return stream == "" || strings.HasPrefix(p.Stream, stream) },
		})
	case "lift":
		s.faults[word(d, 0)].Release()
	case "run": // whatever can
		drive(s.t, s.m)
	case "tick": // after=10ms
		s.now += duration(d, "after")
		pending, err := s.r.Tick(s.now)
		if err != nil {
			return err
		}
		s.say("pending %d", pending)
	case "peers":
		for _, p := range s.r.State().Peers {
			health := "ok"
			if p.Health != nil {
				health = p.Health.Error()
			}
			s.say("%s: free %d, other %d, used %d, free in slabs %d, draining %d, largest free extent %d, fragmentation %.2f, %s",
				p.Space, p.Free, p.Reading.OtherProcesses, p.Used, p.FreeInSlabs, p.Draining, p.LargestFreeExtent, p.Fragmentation(), health)
		}
	case "counts":
		st := s.r.State()
		type held struct{ bytes, handles int }
		clients := map[string]held{}
		for name, c := range st.Clients {
			clients[name] = held{int(c.Bytes), c.Handles}
		}
		s.say("%v %v", st.Revocations, clients)
	case "close": // within=
		within := time.Minute
		if d.HasArg("within") {
			within = duration(d, "within")
		}
		ctx, cancel := context.WithTimeout(context.Background(), within)
		defer cancel()
		if err := s.r.Close(ctx); err != nil {
			return err
		}
		if _, err := s.r.Tick(s.now); !errors.Is(err, harvest.ErrClosed) {
			s.say("a tick after Close: %v", err)
		}
		m := s.m
		s.m = nil
		return errors.Join(s.r.Close(ctx), s.copies.Close(), s.host.Free(), m.Close())
	default:
		s.t.Fatalf("%s: unknown command %s", d.Pos, d.Cmd)
	}
	return nil
}

func (s *stage) open(d *datadriven.TestData) error {
	n := arg(d, "gpus", 3)
	gpus := make([]emulated.GPU, n)
	peers := []device.Space{}
	for i := range gpus {
		gpus[i].MemoryBytes = arg(d, "hbm", int64(4096))
		if i > 0 {
			peers = append(peers, device.HBM(i))
		}
	}
	var err error
	if s.m, err = emulated.New(emulated.Options{GPUs: gpus, Virtual: true, Check: true}); err != nil {
		return err
	}
	s.now = 0
	s.handles, s.names = map[string]*harvest.Handle{}, map[uint64]string{}
	s.refs, s.fences, s.faults = map[string]*harvest.Ref{}, map[string]device.Fence{}, map[string]*emulated.Fault{}
	if s.copies, err = s.m.NewStream(device.HBM(0), device.StreamOptions{Name: "copies"}); err != nil {
		return err
	}
	if s.host, err = s.m.Alloc(device.Host, 4096, "content"); err != nil {
		return err
	}
	mm, err := harvest.NewMachineMonitor(s.m, peers)
	if err != nil {
		return err
	}
	s.t.Cleanup(func() { _ = mm.Close() })
	s.monitor = &readings{Monitor: mm, bandwidth: map[device.Space]float64{}}
	policy, err := harvest.NewPolicy(arg(d, "policy", "best-fit"), harvest.PolicyOptions{})
	if err != nil {
		return err
	}
	if d.HasArg("leave") {
		policy = harvest.Interference{EvacuateAt: arg(d, "leave", 1.0)}
	}
	s.r, err = harvest.New(harvest.Options{
		Machine: s.m, Peers: peers, Policy: policy, Monitor: s.monitor,
		SlabBytes: arg(d, "slab", int64(1024)), HeadroomBytes: arg(d, "headroom", int64(512)),
		Deadline: duration(d, "deadline"), Cooldown: duration(d, "cooldown"), ScrubBytes: 256,
		HalfLife: duration(d, "halflife"), Events: s.events(),
	})
	return err
}

type placement struct {
	harvest.SegmentUsage
	slab uint64
}

func (s *stage) segment(h *harvest.Handle) placement {
	for _, p := range s.r.State().Peers {
		for _, l := range p.Slabs {
			for _, seg := range l.Segments {
				if seg.Handle == h.ID() {
					return placement{seg, l.ID}
				}
			}
		}
	}
	return placement{}
}

func (s *stage) fill(d *datadriven.TestData) error {
	h := s.handles[word(d, 0)]
	ref, ok := h.Acquire(harvest.NewOwner("fill of " + word(d, 0)))
	if !ok {
		return errors.New("not acquired")
	}
	p, err := s.point(arg(d, "until", "fill "+word(d, 0)+":1"))
	if err != nil {
		return err
	}
	content := s.host.Write(0, h.Bytes())
	for i := range content {
		content[i] = word(d, 0)[0]
	}
	err = errors.Join(s.copies.Copy(h.Region().Range, s.host.Range(0, h.Bytes())), s.copies.SignalFence(p.Fence, p.Value))
	ref.ReleaseAt(p)
	return err
}

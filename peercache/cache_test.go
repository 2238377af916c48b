package peercache

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"log/slog"
	"maps"
	"math/rand/v2"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"
	"unsafe"

	"go.uber.org/goleak"
	"pgregory.net/rapid"

	"github.com/moeserve/moeserve/device"
	"github.com/moeserve/moeserve/device/emulated"
	"github.com/moeserve/moeserve/harvest"
	"github.com/moeserve/moeserve/transfer"
)

func TestMain(m *testing.M) { goleak.VerifyTestMain(m) }

const objectBytes = 512

// rig is a cache over two peers of an emulated machine, with objects in host memory and a
// place for each in the reader's.
type rig struct {
	*testing.T
	m         *emulated.Machine
	engine    *transfer.Engine
	harvest   *harvest.Runtime
	cache     *Cache[string]
	keys      []string
	host, dst device.Memory
	landed    []device.Point
	events    strings.Builder
	released  []uint64
	log       bytes.Buffer
}

func newRig(t *testing.T, mo emulated.Options, ho harvest.Options) *rig {
	t.Helper()
	r := &rig{T: t}
	must := func(err error) {
		t.Helper()
		if err != nil {
			t.Fatal(err)
		}
	}
	closes := func(what string, f func() error) {
		t.Cleanup(func() {
			if err := f(); err != nil {
				t.Errorf("close %s: %v", what, err)
			}
		})
	}
	var err error
	mo.Check = true
	r.m, err = emulated.New(mo)
	must(err)
	closes("machine", r.m.Close)
	r.engine, err = transfer.New(transfer.Options{Machine: r.m, ChunkBytes: 200})
	must(err)
	for range 12 {
		r.keys = append(r.keys, fmt.Sprintf("object %d", len(r.keys)))
	}
	r.host, err = r.m.Alloc(device.Host, int64(len(r.keys))*objectBytes, "objects")
	must(err)
	r.dst, err = r.m.Alloc(device.HBM(0), r.host.Bytes(), "slots")
	must(err)
	for i := range r.keys {
		copy(r.host.Write(int64(i)*objectBytes, objectBytes), r.content(i))
		f, err := r.m.NewFence("landed")
		must(err)
		r.landed = append(r.landed, device.Point{Fence: f})
	}
	closes("memory", func() error {
		errs := []error{r.host.Free(), r.dst.Free()}
		for _, p := range r.landed {
			errs = append(errs, p.Fence.Close())
		}
		return errors.Join(errs...)
	})
	closes("engine", r.engine.Close)
	ho.Machine, ho.Peers, ho.SlabBytes, ho.Cooldown = r.m, []device.Space{device.HBM(1), device.HBM(2)}, 4*objectBytes, -1
	if ho.HeadroomBytes == 0 {
		ho.HeadroomBytes = -1
	}
	r.harvest, err = harvest.New(ho)
	must(err)
	r.cache, err = New(Options[string]{
		Machine: r.m, Harvest: r.harvest, Transfer: r.engine, Client: "test", Reader: device.HBM(0),
		Log:       slog.New(slog.NewTextHandler(&r.log, nil)),
		Releasing: func(slab uint64) { r.released = append(r.released, slab) },
		Events: EventListener[string]{
			Landed:  func(i CopyInfo[string]) { fmt.Fprintf(&r.events, "%s on %v\n", i.Key, i.Device) },
			Removed: func(i CopyInfo[string]) { fmt.Fprintf(&r.events, "%s removed: %v\n", i.Key, i.Reason) },
			PeerFailed: func(i PeerInfo) {
				fmt.Fprintf(&r.events, "%v failed, excluded: %t\n", i.Device, i.Excluded)
			},
		},
	})
	must(err)
	closes("cache", r.cache.Close)
	closes("harvest", func() error { return r.harvest.Close(context.Background()) })
	return r
}

func (r *rig) ok(err error) {
	r.Helper()
	if err != nil {
		r.Fatal(err)
	}
}

func (r *rig) content(i int) []byte { return bytes.Repeat([]byte{byte(i + 1)}, objectBytes) }

func (r *rig) put(i int) error {
	return r.cache.Put(r.keys[i], r.host.Region(int64(i)*objectBytes, objectBytes), PutOptions[string]{})
}

// fill puts objects and waits until they are there.
func (r *rig) fill(objects ...int) {
	r.Helper()
	for _, i := range objects {
		r.ok(r.put(i))
	}
	r.ok(r.cache.Wait(r.Context()))
}

// has says whether the object is found, and gives the reference back.
func (r *rig) has(i int) bool {
	_, ref, ok := r.cache.Acquire(r.keys[i])
	if ok {
		ref.Release()
	}
	return ok
}

// read begins to read an object's copy, or returns nil where there is none.
func (r *rig) read(i int) (*Copy[string], *transfer.Ticket) { return r.readUntil(i, true) }

// readUntil gives the reference back at the read's end, or too early.
func (r *rig) readUntil(i int, end bool) (*Copy[string], *transfer.Ticket) {
	r.Helper()
	x, ref, ok := r.cache.Acquire(r.keys[i])
	if !ok {
		return nil, nil
	}
	r.landed[i].Value++
	ticket, err := r.engine.Submit(transfer.Request{
		Src: x.Region(), Dst: r.dst.Region(int64(i)*objectBytes, objectBytes), Priority: transfer.Demand, Done: r.landed[i],
	})
	r.ok(err)
	if end {
		ref.ReleaseAt(ticket.End())
	} else {
		ref.Release()
	}
	return x, ticket
}

// right says whether the object's place in the reader's memory has its bytes.
func (r *rig) right(i int) bool {
	a := r.dst.Range(int64(i)*objectBytes, objectBytes).Addr
	return bytes.Equal(unsafe.Slice(*(**byte)(unsafe.Pointer(&a)), objectBytes), r.content(i))
}

// takeEvents returns the events since the last call.
func (r *rig) takeEvents() string {
	defer r.events.Reset()
	return r.events.String()
}

func (r *rig) wantEvents(want string) {
	r.Helper()
	if got := r.takeEvents(); got != want {
		r.Errorf("events:\n%swant:\n%s", got, want)
	}
}

func (r *rig) reclaim() []*harvest.Reclamation {
	r.Helper()
	var all []*harvest.Reclamation
	for _, p := range []device.Space{device.HBM(1), device.HBM(2)} {
		c, err := reclaimMore(r.harvest, p, 1<<20, time.Minute)
		r.ok(err)
		all = append(all, c)
	}
	return all
}

// TestLife: a copy is found from the Poll that finds it landed until it is dropped.
func TestLife(t *testing.T) {
	for schedule := range emulated.Schedule(3) {
		r := newRig(t, emulated.Options{Virtual: true, Schedule: schedule, Seed: 1}, harvest.Options{})
		c := r.cache
		stall := r.m.Inject(&emulated.Fault{Kind: emulated.StallCopy})
		r.ok(r.put(3))
		if err := r.put(3); !errors.Is(err, ErrBusy) {
			t.Errorf("put twice: %v", err)
		}
		if n := c.Poll(); n != 1 || r.has(3) || c.Find("object 3") != nil {
			t.Errorf("%d copies on their way, found: %t", n, r.has(3))
		}
		if got := c.Moving(); !slices.Equal(got, []string{"object 3"}) {
			t.Errorf("moving: %v", got)
		}
		r.wantEvents("")
		stall.Release()
		r.ok(c.Wait(t.Context()))
		r.wantEvents("object 3 on gpu1\n")
		if err := r.put(3); !errors.Is(err, ErrBusy) {
			t.Errorf("put a third time: %v", err)
		}
		x, ticket := r.read(3)
		r.ok(ticket.Wait(t.Context()))
		if !r.right(3) || x.Key() != "object 3" || x.Device() != device.HBM(1) || c.Find("object 3") != x {
			t.Errorf("wrong bytes or copy: %+v", x)
		}
		r.ok(c.Drop("object 3"))
		r.ok(c.Drop("object 3"))
		r.ok(c.Drop("object 9"))
		r.wantEvents("object 3 removed: dropped\n")
		if r.has(3) {
			t.Error("a copy is found that was dropped")
		}
		r.fill(3, 4)
		if got, want := c.Stats(), (Stats{Landed: 3, Dropped: 1, Bytes: 3 * objectBytes}); got != want {
			t.Errorf("%+v, want %+v", got, want)
		}
		if r.log.Len() > 0 {
			t.Error(r.log.String())
		}
	}
}

// TestNeighbors: an object gets the place right behind one that it is read with.
func TestNeighbors(t *testing.T) {
	r := newRig(t, emulated.Options{Virtual: true}, harvest.Options{})
	r.fill(0, 1, 2)
	r.ok(r.cache.Drop("object 1"))
	_, err := r.harvest.Tick(r.m.Now())
	r.ok(err)
	r.ok(r.cache.Put("object 5", r.host.Region(5*objectBytes, objectBytes), PutOptions[string]{
		Peers: []device.Space{device.HBM(1)}, Cost: time.Second, After: slices.Values([]string{"object 4", "object 2"}),
	}))
	r.ok(r.cache.Wait(t.Context()))
	a, b := r.cache.Find("object 2"), r.cache.Find("object 5")
	if a.Region().End() != b.Region().Addr || a.Slab() != b.Slab() {
		t.Errorf("%+v does not lie behind %+v", b.Region(), a.Region())
	}
	if b.handle.Cost() != time.Second {
		t.Errorf("cost %v", b.handle.Cost())
	}
	r.cache.SetCost("object 5", time.Minute)
	r.cache.SetCost("object 7", time.Minute) // there is none
	if b.handle.Cost() != time.Minute {
		t.Errorf("cost %v", b.handle.Cost())
	}
}

// TestNoRoom: what harvest refuses leaves nothing behind.
func TestNoRoom(t *testing.T) {
	r := newRig(t, emulated.Options{Virtual: true, GPUs: []emulated.GPU{{}, {MemoryBytes: 1 << 20}, {MemoryBytes: 1 << 20}}},
		harvest.Options{HeadroomBytes: 1<<20 - 4*objectBytes})
	r.fill(0, 1, 2, 3, 4, 5, 6, 7)
	if err := r.put(8); !errors.Is(err, harvest.ErrNoCapacity) {
		t.Errorf("got %v", err)
	}
	if r.cache.Poll() != 0 || r.has(8) {
		t.Error("an object without a place is on its way")
	}
	r.ok(r.cache.Drop("object 2"))
	_, err := r.harvest.Tick(r.m.Now())
	r.ok(err)
	r.fill(8)
}

// TestRevokedOnTheWay: a revocation while the copy that fills the memory is under way
// waits for it; the object is never found, and can be put again.
func TestRevokedOnTheWay(t *testing.T) {
	for schedule := range emulated.Schedule(3) {
		r := newRig(t, emulated.Options{Virtual: true, Schedule: schedule, Seed: 2}, harvest.Options{})
		stall := r.m.Inject(&emulated.Fault{Kind: emulated.StallCopy, Times: -1})
		r.ok(r.put(1))
		taken := r.reclaim()
		for range 10 { // each look lets the machine go on
			r.landed[0].Fence.Value()
			_, err := r.harvest.Tick(r.m.Now())
			r.ok(err)
		}
		if taken[0].Done() || r.cache.Stats().Revoked != 0 {
			t.Error("memory is taken while it is written")
		}
		stall.Release()
		r.ok(errors.Join(taken[0].Wait(t.Context()), taken[1].Wait(t.Context())))
		r.ok(r.cache.Wait(t.Context()))
		if r.has(1) {
			t.Error("a copy is found whose memory was taken")
		}
		if got, want := r.cache.Stats().Revoked+r.cache.Stats().Dropped, int64(1); got != want {
			t.Errorf("%+v", r.cache.Stats())
		}
		r.fill(1)
		_, ticket := r.read(1)
		r.ok(ticket.Wait(t.Context()))
		if !r.right(1) {
			t.Error("wrong bytes")
		}
	}
}

// TestReleasing: when the memory of a slab is needed, a transfer into it that has not ended is
// aborted, so that the slab does not wait for the transfers before it; and the client is told.
func TestReleasing(t *testing.T) {
	for schedule := range emulated.Schedule(3) {
		r := newRig(t, emulated.Options{Virtual: true, Schedule: schedule, Seed: 2}, harvest.Options{})
		r.fill(0)
		slab := r.cache.Find(r.keys[0]).Slab()
		stall := r.m.Inject(&emulated.Fault{Kind: emulated.StallCopy, Match: func(p emulated.Point) bool { return p.To == device.HBM(0) }})
		r.landed[3].Value++
		before, err := r.engine.Submit(transfer.Request{Src: r.host.Region(0, 8*objectBytes), Dst: r.dst.Region(0, 8*objectBytes), Done: r.landed[3]})
		r.ok(err)
		waits := before.End()
		for i := 1; i < 4; i++ { // beside the first, in its slab
			r.ok(r.cache.Put(r.keys[i], r.host.Region(int64(i)*objectBytes, objectBytes), PutOptions[string]{Behind: []device.Point{waits}}))
		}
		if len(r.released) > 0 {
			t.Fatalf("slabs %v are released", r.released)
		}
		for _, c := range r.reclaim() {
			r.ok(c.Wait(t.Context()))
		}
		if before.Ended() {
			t.Error("the copy before has ended")
		}
		stall.Release()
		r.ok(before.Wait(t.Context()))
		r.ok(r.cache.Wait(t.Context()))
		if !slices.Equal(r.released, []uint64{slab}) {
			t.Errorf("slabs %v were released, want %d", r.released, slab)
		}
		if strings.Contains(r.events.String(), "failed, excluded") {
			t.Errorf("an aborted transfer counts as a failure of the peer:\n%s", r.events.String())
		}
		r.fill(2)
		if _, ticket := r.read(2); ticket.Wait(t.Context()) != nil || !r.right(2) {
			t.Error("wrong bytes")
		}
	}
}

// TestReleasingOneOfTwo: a transfer that also fills copies in a slab that stays goes on.
func TestReleasingOneOfTwo(t *testing.T) {
	r := newRig(t, emulated.Options{}, harvest.Options{})
	stall := r.m.Inject(&emulated.Fault{Kind: emulated.StallCopy, Match: func(p emulated.Point) bool { return p.To == device.HBM(1) }})
	var objects []Object[string]
	for i := range 8 {
		objects = append(objects, Object[string]{Key: r.keys[i], Src: r.host.Region(int64(i)*objectBytes, objectBytes)})
	}
	started, err := r.cache.PutAll(objects, PutOptions[string]{Peers: []device.Space{device.HBM(1)}})
	r.ok(err)
	if len(started) != 1 || len(started[0].Keys) != 8 {
		t.Fatalf("%d transfers", len(started))
	}
	taken, err := reclaimMore(r.harvest, device.HBM(1), objectBytes, time.Minute)
	r.ok(err)
	_, err = r.harvest.Tick(r.m.Now())
	r.ok(err)
	if len(r.released) != 1 || started[0].Ticket.Ended() {
		t.Errorf("slabs %v are released; the transfer has ended: %t", r.released, started[0].Ticket.Ended())
	}
	stall.Release()
	r.ok(taken.Wait(t.Context()))
	r.ok(r.cache.Wait(t.Context()))
	n := 0
	for i := range 8 {
		if r.has(i) {
			n++
		}
	}
	if n != 4 {
		t.Errorf("%d copies are there, want the 4 of the slab that stays", n)
	}
}

// move moves an object's copy to another peer.
func (r *rig) move(i, gpu int) error {
	return r.cache.Put(r.keys[i], r.host.Region(int64(i)*objectBytes, objectBytes), PutOptions[string]{Peers: []device.Space{device.HBM(gpu)}, Move: true})
}

// TestMove: an object that moves is found where it was until the new copy has landed, and
// stays there if that fails or is revoked.
func TestMove(t *testing.T) {
	for _, end := range []string{"lands", "fails", "revoked", "revoked before", "dropped"} {
		t.Run(end, func(t *testing.T) {
			r := newRig(t, emulated.Options{Virtual: true}, harvest.Options{})
			r.fill(1)
			old := r.cache.Find(r.keys[1])
			from, _ := old.Device().GPU()
			to := 3 - from
			stall := r.m.Inject(&emulated.Fault{Kind: emulated.StallCopy, Times: -1})
			if end == "fails" {
				r.m.Inject(&emulated.Fault{Kind: emulated.FailCopy, Times: 2})
			}
			r.ok(r.move(1, to))
			if err := r.move(1, from); !errors.Is(err, ErrBusy) {
				t.Errorf("moved twice: %v", err)
			}
			if n := r.cache.Poll(); n != 1 || r.cache.Find(r.keys[1]) != old || !r.has(1) {
				t.Errorf("%d on their way, found: %t", n, r.has(1))
			}
			r.takeEvents()
			var taken *harvest.Reclamation
			var err error
			switch end {
			case "revoked":
				taken, err = r.harvest.Reclaim(device.HBM(to), 1<<40, time.Minute)
			case "revoked before":
				taken, err = r.harvest.Reclaim(device.HBM(from), 1<<40, time.Minute)
			case "dropped":
				err = r.cache.Drop(r.keys[1])
			}
			r.ok(err)
			stall.Release()
			if taken != nil {
				r.ok(taken.Wait(t.Context()))
			}
			r.ok(r.cache.Wait(t.Context()))
			now := r.cache.Find(r.keys[1])
			switch end {
			case "lands", "revoked before":
				if now == nil || now.Device() != device.HBM(to) {
					t.Errorf("the object is at %+v", now)
				}
			case "dropped":
				if now != nil {
					t.Errorf("the object is at %+v", now)
				}
			default:
				if now != old {
					t.Errorf("the object is at %+v", now)
				}
			}
			if end != "dropped" {
				_, ticket := r.read(1)
				r.ok(ticket.Wait(t.Context()))
				if !r.right(1) {
					t.Error("wrong bytes")
				}
			}
			for _, m := range r.cache.moves {
				_ = m.ticket.Wait(t.Context()) // it may have been canceled
			}
			r.cache.Poll()
			_, err = r.harvest.Tick(r.m.Now())
			r.ok(err)
			handles := 0
			for _, c := range r.harvest.State().Clients {
				handles += c.Handles
			}
			want := 1
			if end == "dropped" {
				want = 0
			}
			if handles != want {
				t.Errorf("%d handles, want %d", handles, want)
			}
		})
	}
}

// TestRevoked: a landed copy that is revoked is not found any more, before its readers
// have ended; and its memory stays until they have.
func TestRevoked(t *testing.T) {
	r := newRig(t, emulated.Options{Virtual: true}, harvest.Options{})
	r.fill(1, 2)
	stall := r.m.Inject(&emulated.Fault{Kind: emulated.StallCopy})
	_, ticket := r.read(1)
	taken := r.reclaim()
	for range 10 {
		r.landed[0].Fence.Value()
		_, err := r.harvest.Tick(r.m.Now())
		r.ok(err)
	}
	if taken[0].Done() || r.has(1) || r.has(2) {
		t.Errorf("memory freed: %t, found: %t and %t", taken[0].Done(), r.has(1), r.has(2))
	}
	stall.Release()
	r.ok(errors.Join(taken[0].Wait(t.Context()), ticket.Wait(t.Context())))
	if !r.right(1) {
		t.Error("wrong bytes")
	}
	if got := strings.Count(r.takeEvents(), "removed: revoked"); got != 2 || r.cache.Stats().Revoked != 2 {
		t.Errorf("%d revoked, %+v", got, r.cache.Stats())
	}
}

// TestDroppedOnTheWay: a copy that is dropped while moving is not made where it has not
// begun; its memory and its fence are used again once the transfer is over.
func TestDroppedOnTheWay(t *testing.T) {
	for schedule := range emulated.Schedule(3) {
		r := newRig(t, emulated.Options{Virtual: true, Schedule: schedule, Seed: 4}, harvest.Options{})
		for range 10 {
			stall := r.m.Inject(&emulated.Fault{Kind: emulated.StallCopy, Times: -1})
			for i := range 3 {
				r.ok(r.cache.Put(r.keys[i], r.host.Region(0, objectBytes), PutOptions[string]{Peers: []device.Space{device.HBM(1)}}))
			}
			for i := range 3 {
				r.ok(r.cache.Drop(r.keys[i]))
			}
			if n := r.cache.Poll(); n != 0 || r.has(0) {
				t.Errorf("%d on their way, found: %t", n, r.has(0))
			}
			stall.Release()
			for len(r.cache.moves) > 0 {
				_ = r.cache.moves[0].ticket.Wait(t.Context()) // it may have been canceled
				r.cache.Poll()
			}
		}
		if n := len(r.cache.fences.all); n != 3 || len(r.cache.fences.idle) != 3 {
			t.Errorf("%d fences for three copies at a time, %d of them idle", n, len(r.cache.fences.idle))
		}
		var copied int64
		for _, p := range r.engine.Stats() {
			copied += p.Bytes
		}
		if copied > 10*objectBytes {
			t.Errorf("%d bytes were copied; only the first of three copies had begun", copied)
		}
		if got := strings.Count(r.takeEvents(), "dropped"); got != 30 {
			t.Errorf("%d were dropped", got)
		}
	}
}

// TestCloseBeforeHarvest: what is on its way when the cache is closed goes back to harvest
// behind its copy, whose fence is closed by then.
func TestCloseBeforeHarvest(t *testing.T) {
	var freed []harvest.FreeInfo
	r := newRig(t, emulated.Options{Virtual: true}, harvest.Options{
		Events: harvest.EventListener{Freed: func(i harvest.FreeInfo) { freed = append(freed, i) }},
	})
	r.ok(r.put(0))
	r.ok(r.cache.Close())
	if err := r.put(1); !errors.Is(err, harvest.ErrClosed) {
		t.Errorf("a copy to a closed cache: %v", err)
	}
	r.ok(r.harvest.Close(t.Context()))
	if len(freed) != 1 || freed[0].Failed != nil {
		t.Errorf("freed as %+v, want one copy that has not failed", freed)
	}
}

// TestPutAll: objects that are put together go in one transfer for each peer, one behind the
// other; what is dropped or revoked meanwhile does not stop the others.
func TestPutAll(t *testing.T) {
	for schedule := range emulated.Schedule(3) {
		r := newRig(t, emulated.Options{Virtual: true, Schedule: schedule, Seed: 6}, harvest.Options{})
		r.fill(2)
		stall := r.m.Inject(&emulated.Fault{Kind: emulated.StallCopy, Times: -1})
		var all []Object[string]
		for i := range 5 {
			all = append(all, Object[string]{Key: r.keys[i], Src: r.host.Region(int64(i)*objectBytes, objectBytes)})
		}
		started, err := r.cache.PutAll(all, PutOptions[string]{Peers: []device.Space{device.HBM(1)}})
		if !errors.Is(err, ErrBusy) || len(started) != 1 || !slices.Equal(started[0].Keys, []string{r.keys[0], r.keys[1], r.keys[3], r.keys[4]}) {
			t.Fatalf("started %+v: %v", started, err)
		}
		if again, err := r.cache.PutAll(all, PutOptions[string]{}); len(again) > 0 || !errors.Is(err, ErrBusy) {
			t.Errorf("started %+v again: %v", again, err)
		}
		if n := r.cache.Poll(); n != 4 || len(r.cache.moves) != 1 {
			t.Errorf("%d copies in %d transfers", n, len(r.cache.moves))
		}
		r.ok(r.cache.Drop(r.keys[1]))
		stall.Release()
		r.ok(started[0].Ticket.Wait(t.Context()))
		r.ok(r.cache.Wait(t.Context()))
		if a, b := r.cache.Find(r.keys[3]), r.cache.Find(r.keys[4]); a.Slab() == b.Slab() && a.Region().End() != b.Region().Addr {
			t.Errorf("%v does not lie behind %v", b.Region(), a.Region())
		}
		for i := range 5 {
			if r.has(i) == (i == 1) {
				t.Errorf("object %d is found: %t", i, r.has(i))
			}
			if _, ticket := r.read(i); ticket != nil {
				r.ok(ticket.Wait(t.Context()))
				if !r.right(i) {
					t.Errorf("object %d: wrong bytes", i)
				}
			}
		}
	}
}

// TestParts: an object that is scattered is contiguous in the peer's memory.
func TestParts(t *testing.T) {
	r := newRig(t, emulated.Options{Virtual: true}, harvest.Options{})
	const half = objectBytes / 2
	_, err := r.cache.PutAll([]Object[string]{{Key: r.keys[5], Parts: []device.Region{
		r.host.Region(7*objectBytes, half), r.host.Region(5*objectBytes, half),
	}}}, PutOptions[string]{})
	r.ok(err)
	r.ok(r.cache.Wait(t.Context()))
	_, ticket := r.read(5)
	r.ok(ticket.Wait(t.Context()))
	a := r.dst.Range(5*objectBytes, objectBytes).Addr
	got := unsafe.Slice(*(**byte)(unsafe.Pointer(&a)), objectBytes)
	if want := slices.Concat(r.content(7)[:half], r.content(5)[:half]); !bytes.Equal(got, want) {
		t.Errorf("%v, want %v", got[half-1:half+1], want[half-1:half+1])
	}
	if got := r.cache.Keys(); !slices.Equal(got, r.keys[5:6]) {
		t.Errorf("keys %v", got)
	}
}

// TestPutAllFails: a transfer that fails removes all its copies, and counts as one failure
// of the peer.
func TestPutAllFails(t *testing.T) {
	r := newRig(t, emulated.Options{Virtual: true}, harvest.Options{})
	r.m.Inject(&emulated.Fault{Kind: emulated.FailCopy, Times: -1})
	_, err := r.cache.PutAll([]Object[string]{{Key: r.keys[0], Src: r.host.Region(0, objectBytes)}, {Key: r.keys[1], Src: r.host.Region(objectBytes, objectBytes)}}, PutOptions[string]{})
	r.ok(err)
	r.ok(r.cache.Wait(t.Context()))
	r.wantEvents("gpu1 failed, excluded: false\nobject 0 removed: copy failed\nobject 1 removed: copy failed\n")
	if len(r.cache.moves) > 0 || len(r.cache.moving) > 0 {
		t.Errorf("moving: %v", r.cache.Moving())
	}
}

// TestPutBehind: nothing is read before the points that a Put waits for, and if one fails,
// so does the copy, which is not the peer's failure.
func TestPutBehind(t *testing.T) {
	r := newRig(t, emulated.Options{Virtual: true}, harvest.Options{})
	f, err := r.m.NewFence("filled")
	r.ok(err)
	defer func() { r.ok(f.Close()) }()
	at := device.Point{Fence: f, Value: f.Value() + 1}
	put := func(i int) {
		r.ok(r.cache.Put(r.keys[i], r.host.Region(int64(i)*objectBytes, objectBytes), PutOptions[string]{Behind: []device.Point{at}}))
	}
	put(0)
	for range 10 {
		r.ok(r.m.Yield(t.Context(), 0))
	}
	if r.cache.Poll() != 1 {
		t.Error("a copy did not wait")
	}
	r.ok(f.Signal(at.Value))
	r.ok(r.cache.Wait(t.Context()))
	r.takeEvents()
	at.Value++
	put(1)
	r.ok(f.Fail(at.Value, device.ErrCopyFailed))
	r.ok(r.cache.Wait(t.Context()))
	r.wantEvents("object 1 removed: copy failed\n")
	if !r.has(0) || r.has(1) {
		t.Errorf("found: %t and %t", r.has(0), r.has(1))
	}
}

// TestDroppedWhileRevoked: it is removed once, by the drop or by the revocation.
func TestDroppedWhileRevoked(t *testing.T) {
	r := newRig(t, emulated.Options{Virtual: true}, harvest.Options{})
	r.fill(1)
	_, ref, ok := r.cache.Acquire("object 1")
	if !ok {
		t.Fatal("no reference")
	}
	taken := r.reclaim()
	_, err := r.harvest.Tick(r.m.Now())
	r.ok(err)
	r.takeEvents()
	r.ok(r.cache.Drop("object 1"))
	r.wantEvents("object 1 removed: dropped\n")
	ref.Release()
	r.ok(taken[0].Wait(t.Context()))
	r.wantEvents("")
	if got := r.cache.Stats(); got.Dropped != 1 || got.Revoked != 0 {
		t.Errorf("%+v", got)
	}
}

// TestFills: a peer to which copies fail is excluded after three in a row, and one
// success ends a row.
func TestFills(t *testing.T) {
	for schedule := range emulated.Schedule(3) {
		r := newRig(t, emulated.Options{Virtual: true, Schedule: schedule, Seed: 3}, harvest.Options{})
		put := func(i int, fails bool) {
			t.Helper()
			// The engine tries a chunk twice.
			fault := &emulated.Fault{Kind: emulated.FailCopy, Times: -1, Match: func(p emulated.Point) bool { return p.To == device.HBM(1) }}
			if fails {
				r.m.Inject(fault)
			}
			r.ok(r.cache.Put(r.keys[i], r.host.Region(0, objectBytes), PutOptions[string]{Peers: []device.Space{device.HBM(1)}}))
			r.ok(r.cache.Wait(t.Context()))
			if fails {
				fault.Release()
			}
			if r.has(i) == fails {
				t.Errorf("found: %t", !fails)
			}
		}
		put(0, true)
		put(0, true)
		r.wantEvents(strings.Repeat("gpu1 failed, excluded: false\nobject 0 removed: copy failed\n", 2))
		put(0, false)
		put(1, true)
		put(1, true)
		r.takeEvents()
		put(1, true)
		r.wantEvents("gpu1 failed, excluded: true\nobject 1 removed: copy failed\n")
		if err := r.cache.Put("object 1", r.host.Region(0, objectBytes), PutOptions[string]{Peers: []device.Space{device.HBM(1)}}); !errors.Is(err, harvest.ErrNoCapacity) {
			t.Errorf("put to an excluded peer: %v", err)
		}
		r.fill(2) // the other peer is not
		r.ok(r.harvest.Readmit(device.HBM(1)))
		put(1, true) // the row begins anew
		put(1, false)
	}
}

// TestReads: copies that could not be read are removed, and count as failures of their
// peer; where the read never began nothing is known of them.
func TestReads(t *testing.T) {
	r := newRig(t, emulated.Options{Virtual: true}, harvest.Options{})
	r.fill(0, 1, 2, 3)
	r.takeEvents()
	find := func(objects ...int) (all []*Copy[string]) {
		for _, i := range objects {
			all = append(all, r.cache.Find(r.keys[i]))
		}
		return all
	}
	for _, err := range []error{transfer.ErrCanceled, fmt.Errorf("%w: %w", transfer.ErrAfter, device.ErrCopyFailed)} {
		if r.cache.ReadFailed(find(0, 1), err) {
			t.Errorf("%v is the peer's fault", err)
		}
	}
	r.wantEvents("")
	both := find(0, 1)
	if !r.cache.ReadFailed(both, device.ErrCopyFailed) {
		t.Error("a failed copy is not the peer's fault")
	}
	r.wantEvents("gpu1 failed, excluded: false\nobject 0 removed: copy failed\nobject 1 removed: copy failed\n")
	r.cache.ReadFailed(both, device.ErrCopyFailed)
	r.wantEvents("gpu1 failed, excluded: false\n")
	r.cache.ReadSucceeded(device.HBM(2))
	r.cache.ReadSucceeded(device.HBM(1))
	r.cache.ReadFailed(find(2), device.ErrCopyFailed)
	r.cache.ReadFailed(both, device.ErrCopyFailed)
	r.wantEvents("gpu1 failed, excluded: false\nobject 2 removed: copy failed\ngpu1 failed, excluded: false\n")
	// A peer that is lost is excluded at once, and what was there is revoked.
	r.cache.ReadSucceeded(device.HBM(1))
	r.ok(r.m.Lose(1))
	r.cache.ReadFailed(both, device.ErrLost)
	r.wantEvents("gpu1 failed, excluded: true\n")
	_, err := r.harvest.Tick(r.m.Now())
	r.ok(err)
	r.wantEvents("object 3 removed: revoked\n")
	if r.has(3) {
		t.Error("a copy on a lost peer is found")
	}
}

// TestSafeguards: a run with all safeguards is clean; without one of them the machine's
// checker, or the bytes, tell.
func TestSafeguards(t *testing.T) {
	for _, without := range []string{"", "reader's reference", "landed before found"} {
		found := false
		for seed := uint64(0); seed < 8 && !found; seed++ {
			found = unguarded(t, seed, without)
		}
		if found != (without != "") {
			t.Errorf("without %q: found out: %t", without, found)
		}
	}
}

// unguarded puts, reads and revokes, and says whether anything was wrong.
func unguarded(t *testing.T, seed uint64, without string) (found bool) {
	r := newRig(t, emulated.Options{
		Virtual: true, Schedule: emulated.Schedule(seed % 3), Seed: seed,
		HostLink: emulated.Link{BytesPerSecond: 1e6}, PeerLink: emulated.Link{BytesPerSecond: 1e6},
		Report: func(emulated.Finding) { found = true },
	}, harvest.Options{})
	c, rng := r.cache, rand.New(rand.NewPCG(seed, 5))
	for range 4 {
		for i := range r.keys {
			if rng.IntN(2) == 0 {
				_ = r.put(i) // it may be there
			}
		}
		var early []*Copy[string]
		if without == "landed before found" {
			early = slices.Collect(maps.Values(c.moving))
		} else {
			r.ok(c.Wait(t.Context()))
		}
		for _, x := range early {
			c.landed.put(x.key, x)
		}
		tickets := map[int]*transfer.Ticket{}
		for i := range r.keys {
			if _, ticket := r.readUntil(i, without != "reader's reference"); ticket != nil {
				tickets[i] = ticket
			}
		}
		for _, x := range early {
			c.landed.remove(x.key, x)
		}
		r.reclaim()
		for range 3 {
			_, err := r.harvest.Tick(r.m.Now())
			r.ok(err)
		}
		for i, ticket := range tickets {
			found = found || ticket.Wait(t.Context()) != nil || !r.right(i)
		}
		r.ok(c.Wait(t.Context()))
	}
	return found
}

// TestAnything: whatever is put, dropped, revoked, settled and fails, in any order, what is
// read is right or fails, and the cache and a model of it agree.
func TestAnything(t *testing.T) {
	rapid.Check(t, func(rt *rapid.T) {
		o := emulated.Options{Virtual: true, Schedule: emulated.Schedule(rapid.IntRange(0, 2).Draw(rt, "schedule")), Seed: rapid.Uint64Range(0, 1<<20).Draw(rt, "seed")}
		actions := rapid.SliceOfN(rapid.IntRange(0, 10), 5, 40).Draw(rt, "actions")
		objects := rapid.SliceOfN(rapid.IntRange(0, 11), len(actions), len(actions)).Draw(rt, "objects")
		if !t.Run("", func(t *testing.T) {
			r := newRig(t, o, harvest.Options{})
			type reading struct {
				of     int
				copy   *Copy[string]
				ticket *transfer.Ticket
			}
			var readings []reading
			tickets := map[int]*transfer.Ticket{}
			for k, action := range actions {
				switch i := objects[k]; action {
				case 0, 1, 2:
					moving := slices.Contains(r.cache.Moving(), r.keys[i])
					there := r.cache.Find(r.keys[i]) != nil
					err := r.put(i)
					if errors.Is(err, ErrBusy) != (moving || there) {
						t.Fatalf("put of an object that is there: %t, on its way: %t: %v", there, moving, err)
					}
					if err != nil && !errors.Is(err, ErrBusy) && !errors.Is(err, harvest.ErrNoCapacity) {
						t.Fatal(err)
					}
				case 3:
					r.ok(r.cache.Drop(r.keys[i]))
					if r.has(i) || slices.Contains(r.cache.Moving(), r.keys[i]) {
						t.Error("a copy is there that was dropped")
					}
				case 4:
					_, err := reclaimMore(r.harvest, device.HBM(1+i%2), int64(1+i*300), time.Second)
					r.ok(err)
				case 5:
					r.m.Inject(&emulated.Fault{Kind: emulated.FailCopy, Times: 1 + i%3, Skip: i % 4})
				case 6:
					if n := r.cache.Poll(); n != len(r.cache.Moving()) {
						t.Errorf("%d on their way, %v", n, r.cache.Moving())
					}
					_, err := r.harvest.Tick(r.m.Now())
					r.ok(err)
				case 8:
					moving := slices.Contains(r.cache.Moving(), r.keys[i])
					err := r.move(i, 1+k%2)
					if errors.Is(err, ErrBusy) != moving {
						t.Fatalf("moved, on its way: %t: %v", moving, err)
					}
					if err != nil && !errors.Is(err, ErrBusy) && !errors.Is(err, harvest.ErrNoCapacity) {
						t.Fatal(err)
					}
				case 7:
					for p := range 2 {
						r.ok(r.harvest.Readmit(device.HBM(1 + p)))
					}
				default:
					if tickets[i] != nil { // the place is still written
						_ = tickets[i].Wait(t.Context())
					}
					if x, ticket := r.read(i); ticket != nil {
						tickets[i] = ticket
						readings = append(readings, reading{i, x, ticket})
					}
				}
			}
			for _, got := range readings {
				if err := got.ticket.Wait(t.Context()); err != nil {
					r.cache.ReadFailed([]*Copy[string]{got.copy}, err)
				} else if tickets[got.of] == got.ticket && !r.right(got.of) {
					t.Errorf("object %d: wrong bytes", got.of)
				}
			}
			r.ok(r.cache.Wait(t.Context()))
			if r.log.Len() > 0 {
				t.Error(r.log.String())
			}
		}) {
			rt.FailNow()
		}
	})
}

// TestBesideReaders: readers go on while others put, drop and take memory back.
func TestBesideReaders(t *testing.T) {
	r := newRig(t, emulated.Options{Seed: 1}, harvest.Options{})
	r.cache.o.Events = EventListener[string]{}.EnsureDefaults()
	done := make(chan struct{})
	var others sync.WaitGroup
	for number := range uint64(2) {
		rng := rand.New(rand.NewPCG(7, number))
		others.Go(func() {
			for {
				select {
				case <-done:
					return
				default:
				}
				switch i := rng.IntN(len(r.keys)); rng.IntN(6) {
				case 0:
					if err := r.cache.Drop(r.keys[i]); err != nil {
						t.Error(err)
					}
				case 1:
					if _, err := reclaimMore(r.harvest, device.HBM(1+i%2), int64(1+i*100), time.Second); err != nil {
						t.Error(err)
					}
				case 2:
					if _, err := r.harvest.Tick(r.m.Now()); err != nil {
						t.Error(err)
					}
				default:
					_ = r.put(i) // it may be there
				}
				r.cache.Poll()
			}
		})
	}
	read := 0
	for i := 0; read < 20; i = (i + 1) % len(r.keys) {
		if _, ticket := r.read(i); ticket != nil {
			r.ok(ticket.Wait(t.Context()))
			if !r.right(i) {
				t.Errorf("object %d: wrong bytes", i)
			}
			read++
		}
	}
	close(done)
	others.Wait()
}

// TestAcquireAllocatesNothing, and takes no lock: mu is held meanwhile.
func TestAcquireAllocatesNothing(t *testing.T) {
	r := newRig(t, emulated.Options{Virtual: true}, harvest.Options{})
	r.fill(0)
	r.cache.mu.Lock()
	defer r.cache.mu.Unlock()
	if n := testing.AllocsPerRun(100, func() {
		if !r.has(0) || r.has(1) {
			t.Error("found what is not there, or the other way around")
		}
		r.cache.ReadSucceeded(device.HBM(1))
	}); n != 0 {
		t.Errorf("%v allocations", n)
	}
}

// TestIndex compares the index with a map, over growth and long chains.
func TestIndex(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		x, want := newIndex[int, int](), map[int]*int{}
		for range rapid.IntRange(0, 400).Draw(t, "actions") {
			key := rapid.IntRange(0, 300).Draw(t, "key")
			if v := want[key]; v == nil {
				want[key] = new(int)
				x.put(key, want[key])
			} else if rapid.Bool().Draw(t, "another") {
				x.remove(key, new(int)) // not the key's
			} else {
				x.remove(key, v)
				delete(want, key)
			}
		}
		found := 0
		x.each(func(key int, v *int) {
			if found++; want[key] != v {
				t.Fatalf("key %d has a wrong value", key)
			}
		})
		if found != len(want) || x.len != len(want) {
			t.Fatalf("%d values, counted as %d; want %d", found, x.len, len(want))
		}
		for key := range 301 {
			if x.get(key) != want[key] {
				t.Fatalf("key %d has a wrong value", key)
			}
		}
	})
}

func TestValidate(t *testing.T) {
	for want, o := range map[string]Options[int]{
		"Machine is not set":     {},
		"Harvest is not set":     {Machine: &emulated.Machine{}},
		"Transfer is not set":    {Machine: &emulated.Machine{}, Harvest: &harvest.Runtime{}},
		"invalid MaxFailures -1": {Machine: &emulated.Machine{}, Harvest: &harvest.Runtime{}, Transfer: &transfer.Engine{}, MaxFailures: -1},
	} {
		if _, err := New(o); err == nil || !strings.Contains(err.Error(), want) {
			t.Errorf("got %v, want %q", err, want)
		}
	}
}

// TestNil: the nil Cache works, without peers.
func TestNil(t *testing.T) {
	var c *Cache[int]
	if err := c.Put(1, device.Region{}, PutOptions[int]{}); !errors.Is(err, harvest.ErrNoCapacity) {
		t.Errorf("got %v", err)
	}
	_, _, found := c.Acquire(1)
	c.SetCost(1, time.Second)
	c.ReadSucceeded(device.HBM(1))
	if found || c.Find(1) != nil || c.Poll() != 0 || c.Moving() != nil || c.Stats() != (Stats{}) {
		t.Error("the nil cache has something")
	}
	if err := errors.Join(c.Drop(1), c.Wait(t.Context()), c.Close()); err != nil {
		t.Error(err)
	}
}

// reclaimMore asks for so many bytes of a peer more than are free or will be.
func reclaimMore(h *harvest.Runtime, s device.Space, bytes int64, within time.Duration) (*harvest.Reclamation, error) {
	for _, p := range h.State().Peers {
		if p.Space == s {
			bytes += max(p.Free+p.Draining, 0)
		}
	}
	return h.Reclaim(s, bytes, within)
}

package experts

import (
	"context"
	"encoding/binary"
	"errors"
	"fmt"
	"log/slog"

	"github.com/moeserve/moeserve/device"
	"github.com/moeserve/moeserve/kernels"
)

// inPlace is for steps whose kernels read experts where they lie: resident, in the expert cache,
// in a peer's memory or in host memory. It has tables of its own, which are the same for all
// layers and steps while nothing moves, so that a captured graph of such a step stays valid.
//
// A step takes one reference on all peer copies (peercache.Cache.BeginStep) and looks whether
// anything has moved since the tables were written. If so, they are written anew and uploaded
// by one copy, in the order of the compute stream. A copy that is revoked while the step reads
// it stays until the step has ended; the next step reads the host's.
//
// The owner's lock guards it.
type inPlace struct {
	// unavailable is why kernels cannot read host memory; nil: they can.
	unavailable error
	reader      device.Space
	machine     device.Machine
	log         *slog.Logger
	// memory has for each layer [experts] U64 addresses, then [experts] I32, all numbers of
	// experts in order; image is the same in pinned memory. Nothing reads it when a step begins.
	memory, image device.Memory
	pinned        *kernels.Pinned // the image
	// hostOffset leads from an address in host memory to that at which kernels read it.
	hostOffset device.Addr
	// peers says of each peer found so far whether kernels can read its memory.
	peers map[device.Space]bool

	// valid: the device has the tables, of these versions of the peer copies and of the expert
	// cache, with peers or without.
	valid        bool
	peerVersion  uint64
	cacheVersion uint64
	usesPeers    bool
	// from is the tier that each expert is read from, [position * experts + expert].
	from []Tier
	// uses are the layers.
	uses []Use
	// running: a step in place has not ended. uncounted is of how many passes of it the uses are not counted yet.
	running   bool
	uncounted int
}

// ErrNotInPlace: kernels cannot read experts in host memory in place.
var ErrNotInPlace = errors.New("kernels cannot read host memory in place")

func (p *Plan) inPlaceBytes() int64 {
	n := int64(len(p.Layers))*int64(p.Experts)*slotBytes + int64(p.Experts)*idBytes
	return (n + slotBytes - 1) / slotBytes * slotBytes
}

// open prepares the tables, once their memory and that of the host's experts is allocated.
func (x *inPlace) open(o Options, p *Plan, host device.Memory) {
	x.machine, x.reader, x.log, x.peers = o.Machine, o.Space, o.Log, map[device.Space]bool{}
	x.pinned = kernels.NewPinned(o.Machine, x.image, o.Space, o.Backend)
	if host == nil {
		x.unavailable = fmt.Errorf("%w: no expert is there", ErrNotInPlace)
		return
	}
	if x.unavailable = x.mapHost(host); x.unavailable != nil {
		return
	}
	x.from = make([]Tier, len(p.Layers)*p.Experts)
	all := make([]int, p.Experts)
	for e := range all {
		all[e] = e
	}
	row := int64(p.Experts) * slotBytes
	ids := kernels.New(x.memory.Range(int64(len(p.Layers))*row, int64(p.Experts)*idBytes).Addr, kernels.I32, p.Experts)
	for i := range p.Layers {
		slots := kernels.New(x.memory.Range(int64(i)*row, row).Addr, kernels.U64, p.Experts)
		x.uses = append(x.uses, Use{Slots: slots, Waves: []Wave{{Experts: ids, IDs: all}}, All: ids, open: opening{capturing: true}})
	}
}

// mapHost finds where kernels read the memory of the host's experts.
func (x *inPlace) mapHost(host device.Memory) error {
	r := host.Range(0, host.Bytes())
	at, err := x.machine.KernelAddr(x.reader, r)
	if err != nil {
		return fmt.Errorf("%w: %w", ErrNotInPlace, err)
	}
	x.hostOffset = at - r.Addr
	return nil
}

func (x *inPlace) close() error { return errors.Join(free(x.memory), free(x.image)) }

// peer reports whether kernels can read the memory of the peer that r is in.
func (x *inPlace) peer(r device.Region) bool {
	readable, known := x.peers[r.Space]
	if !known {
		at, err := x.machine.KernelAddr(x.reader, r.Range)
		readable = err == nil && at == r.Addr
		if !readable {
			x.log.Warn("kernels cannot read this peer's memory in place; where experts are read in place, those on it are read from host memory", "peer", r.Space.String(), "err", err)
		}
		x.peers[r.Space] = readable
	}
	return readable
}

// InPlace returns nil if steps can read experts in place (Step.ReadInPlace), otherwise why not.
func (s *Store) InPlace() error {
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.inPlace.memory == nil {
		return fmt.Errorf("experts: %w: the store has no tables for it", ErrNotInPlace)
	}
	return s.inPlace.unavailable
}

// PeerShare is the share of the offloaded experts that have a peer copy. It takes no lock.
func (s *Store) PeerShare() float64 {
	return float64(s.peers.Len()) / float64(max(1, s.plan.OffloadedExperts))
}

// ReadInPlace makes a step that has opened no layer read every expert where it lies: the result
// is the same step, whose Layer returns all experts of a layer as one wave, without a copy and
// without a wait, and whose Prefetch and Release do nothing. What it returns is the same in
// every step, so that graphs can be captured (ForCapture).
func (st Step) ReadInPlace() (Step, error) {
	s := st.s
	s.mu.Lock()
	defer s.mu.Unlock()
	err := st.checkRunning()
	if err == nil {
		err = s.usable()
	}
	if err == nil {
		err = s.beginInPlace()
	}
	if err != nil {
		return Step{}, fmt.Errorf("experts: read experts in place: %w", err)
	}
	return Step{s: s, number: st.number, inPlace: true}, nil
}

// ContinueInPlace reports whether what a step in place reads may be read once more within it, by the same tables, since
// nothing has moved or waits for the step's end. The host counts that pass, too (AddRoutedTokens).
func (st Step) ContinueInPlace() bool {
	s := st.s
	s.mu.Lock()
	defer s.mu.Unlock()
	x := s.inPlace
	if !st.inPlace || st.checkRunning() != nil || !x.valid || x.cacheVersion != s.fetch.changes || s.fetch.failure() != nil ||
		s.fetch.peerBackoff > 0 || len(s.places.swaps)+len(s.places.lent) > 0 || !s.fetch.peers.ContinueStep(x.peerVersion) {
		return false
	}
	x.uncounted++
	return true
}

func (s *steps) beginInPlace() error {
	x := s.inPlace
	switch {
	case x.memory == nil:
		return ErrNotInPlace
	case x.unavailable != nil:
		return x.unavailable
	case x.running || s.open >= 0:
		return errors.New("the step has opened a layer, or reads in place already")
	}
	version := s.fetch.peers.BeginStep()
	x.running, x.uncounted = true, 1
	usesPeers := s.fetch.peerBackoff == 0
	if x.valid && x.peerVersion == version && x.cacheVersion == s.fetch.changes && x.usesPeers == usesPeers {
		return nil
	}
	x.valid = false
	if err := x.mapHost(s.places.host); err != nil { // it may have been suspended and resumed
		return err
	}
	moving := s.writeInPlace(usesPeers)
	if err := x.pinned.ToDevice(s.compute, x.memory.Range(0, x.memory.Bytes()), 0); err != nil {
		return fmt.Errorf("upload the tables: %w", err)
	}
	x.valid, x.peerVersion, x.cacheVersion, x.usesPeers = !moving, version, s.fetch.changes, usesPeers
	return nil
}

// writeInPlace writes the address of every expert to the image. moving: the copy of one into the
// expert cache has not ended, so that there will be a nearer one.
func (s *steps) writeInPlace(usesPeers bool) (moving bool) {
	x := s.inPlace
	image := x.image.Write(0, x.image.Bytes())
	n := 0
	for position := range s.layers {
		for e := range s.plan.Experts {
			id := ID{position, e}
			at, tier, coming := s.readableAt(id, usesPeers)
			binary.NativeEndian.PutUint64(image[n*slotBytes:], uint64(at))
			x.from[n] = tier
			moving = moving || coming
			n++
		}
	}
	for e := range s.plan.Experts {
		binary.NativeEndian.PutUint32(image[n*slotBytes+e*idBytes:], uint32(e))
	}
	return moving
}

// readableAt is where kernels read an expert during this step.
func (s *steps) readableAt(id ID, usesPeers bool) (at device.Addr, from Tier, moving bool) {
	if s.places.resident(id) {
		return s.places.residentRegion(id).Addr, Resident, false
	}
	slot, moving := s.fetch.arrived(id)
	if slot >= 0 {
		return s.fetch.region(slot).Addr, Cached, false
	}
	if usesPeers {
		if c := s.fetch.peers.Readable(id); c != nil && s.inPlace.peer(c.Region()) {
			return c.Region().Addr, Peer, moving
		}
	}
	return s.places.hostRegion(id).Addr + s.inPlace.hostOffset, Host, moving
}

// arrived is the slot of a cached expert all of whose bytes have landed, or -1. moving: its copy
// has not ended.
func (f *fetcher) arrived(id ID) (slot int, moving bool) {
	if !f.has(id) {
		return -1, false
	}
	for _, c := range f.slotFetch(id).copies {
		if !c.ticket.Ended() {
			return -1, true
		}
		// It has ended, so this does not wait: it orders the step's reads after the copy.
		if c.ticket.Wait(context.Background()) != nil {
			return -1, false
		}
	}
	return f.slot(id), false
}

// endInPlace ends the step's reads of peer copies: nothing of it runs any more.
func (s *steps) endInPlace() {
	if s.inPlace.running {
		s.inPlace.running = false
		s.fetch.peers.EndStep()
	}
}

// inPlaceUse is the Use of a layer of a step in place, or of its capture.
func (s *steps) inPlaceUse(layer int) (Use, error) {
	s.mu.Lock()
	defer s.mu.Unlock()
	position, ok := s.position[layer]
	if !ok {
		return Use{}, fmt.Errorf("experts: open layer %d: the layer has no experts", layer)
	}
	return s.inPlace.uses[position], nil
}

// countInPlace counts the uses of the latest step in place, once its routed tokens are known:
// each expert that got tokens is used once, from where it was read. In the expert cache that is a miss if
// a prefetch has put it there that nothing has used.
func (s *steps) countInPlace(position int, tokens []int64) {
	size := s.plan.Layout.Size
	for e, n := range tokens {
		if n == s.counts.routedTokens[position][e] {
			continue
		}
		from := s.inPlace.from[position*s.plan.Experts+e]
		if from == Cached {
			s.countCached(position, e)
			continue
		}
		s.counts.use(position, e, from)
		if from == Peer || from == Host {
			s.counts.ReadInPlace[from] += size
		}
	}
}

package offload

import (
	"slices"
	"testing"

	"github.com/moeserve/moeserve/device"
	"github.com/moeserve/moeserve/harvest"
	"github.com/moeserve/moeserve/kvcache"
	"github.com/moeserve/moeserve/kvcache/tier"
	"github.com/moeserve/moeserve/transfer"
)

// WithoutReferences has loads from peers release their references at once, and stores hold
// none: negative controls.
func (t *Tiers) WithoutReferences(loads, stores bool) {
	from, to := route{PeerGPU, GPU}, route{GPU, PeerGPU}
	if h, ok := t.worker.handlers[from].(peerLoad); ok && loads {
		t.worker.handlers[from] = unguardedLoad{h}
	}
	if h, ok := t.worker.handlers[to].(peerStore); ok && stores {
		t.worker.handlers[to] = unguardedStore{h}
	}
}

// unguardedStore copies blocks to memory of peers on which it has no reference, and has stored
// nothing in the end.
type unguardedStore struct{ peerStore }

func (h unguardedStore) Start(job *Job) (Transfer, []int, error) {
	t := &unguardedTransfer{unguardedStore: h, blocks: len(job.Blocks)}
	var pieces []transfer.Piece
	for i := range job.Blocks {
		b := &job.Blocks[i]
		x, err := h.env.Harvest.Alloc(b.bytes(), harvest.Hints{Client: HarvestClient, Peers: []device.Space{device.HBM(1)}})
		if err != nil {
			return nil, nil, err
		}
		t.handles = append(t.handles, x)
		for _, p := range b.Pieces {
			pieces = append(pieces, transfer.Piece{Dst: x.Region().Slice(p.Offset, p.GPU.Bytes), Src: p.GPU, Separate: p.Offset == 0})
		}
	}
	var err error
	if t.done, err = h.points.take(); err != nil {
		return nil, nil, err
	}
	t.Ticket, err = h.env.Transfer.Submit(transfer.Request{Pieces: pieces, Done: t.done})
	return t, nil, err
}

type unguardedTransfer struct {
	unguardedStore
	*transfer.Ticket
	handles []*harvest.Handle
	done    device.Point
	blocks  int
}

func (t *unguardedTransfer) Ends() []device.Point { return []device.Point{t.End()} }

func (t *unguardedTransfer) Result() ([]bool, error) {
	t.points.put(t.done)
	for _, h := range t.handles {
		_ = t.env.Harvest.Free(h) // it may be revoked
	}
	return make([]bool, t.blocks), t.Err()
}

// unguardedLoad reads peer copies under no reference.
type unguardedLoad struct{ peerLoad }

func (h unguardedLoad) Start(job *Job) (Transfer, []int, error) {
	reads, refused := h.acquire(job)
	for _, r := range reads {
		for i := range r.refs {
			r.refs[i].Release()
		}
		r.refs = nil
	}
	return h.start(job, reads, refused)
}

// ForgetTransfers has the tier in host memory forget what is under way, so that a Reset
// does not wait for it: a negative control.
func (t *Tiers) ForgetTransfers() {
	for _, l := range t.levels {
		if c, ok := l.Memory.(*cpuMemory); ok {
			c.underWay = nil
		}
	}
}

// WithFileStreams has the tier in files use other streams, and buffers of so many blocks.
func (t *Tiers) WithFileStreams(perBuffer int, change func(device.Watcher) device.Watcher) {
	for _, l := range t.levels {
		if f, ok := l.Memory.(*fileMemory); ok {
			f.perBuffer = perBuffer
			for i, s := range f.streams {
				f.streams[i] = change(s.(device.Watcher))
			}
			f.free = slices.Clone(f.streams)
			f.copied = change(f.copied)
		}
	}
}

// IdleBuffers is the number of the file tier's staging buffers and streams that nothing uses, and how
// many there are.
func (t *Tiers) IdleBuffers() (idle, all int) {
	for _, l := range t.levels {
		if f, ok := l.Memory.(*fileMemory); ok {
			f.mu.Lock()
			defer f.mu.Unlock()
			return len(f.idle) + len(f.free), stagingBuffers + len(f.streams)
		}
	}
	return 0, 0
}

// FileNames is the number of keys for which the tier in files has a name.
func (t *Tiers) FileNames() (names int) {
	for _, l := range t.levels {
		if f, ok := l.Memory.(*fileMemory); ok {
			f.mu.Lock()
			names += len(f.files)
			f.mu.Unlock()
		}
	}
	return names
}

// Has reports whether a tier's block of a key can be loaded from a medium.
func (t *Tiers) Has(medium string, k kvcache.Key) bool {
	t.mu.Lock()
	defer t.mu.Unlock()
	for _, l := range t.levels {
		if l.Name == medium {
			return l.account.Lookup(k) == tier.Hit
		}
	}
	return false
}

// MemberCount is the number of the GPU's blocks that are remembered for events of a medium.
func (t *Tiers) MemberCount(medium string) int {
	t.mu.Lock()
	defer t.mu.Unlock()
	for _, l := range t.levels {
		if l.Name == medium && l.members != nil {
			return len(l.members.by)
		}
	}
	return 0
}

// Members are those of a tier of an account of its own.
type Members struct{ m *members }

func NewMembers(factor int) Members { return Members{newMembers(factor)} }

// Take applies events of the account, of whose blocks these are the members, and returns the members' events.
func (m Members) Take(e []kvcache.Event, of map[kvcache.Key][]kvcache.Key) []kvcache.Event {
	m.m.apply(e, of)
	return m.m.take()
}

// Len is how many are remembered.
func (m Members) Len() int { return len(m.m.by) }

// Unregister removes the spec and the policies of a name, so that a test can run again.
func Unregister(name string) {
	specs.remove(name)
	storePolicies.remove(name)
	loadPolicies.remove(name)
}

func (r *registry[T]) remove(name string) {
	r.mu.Lock()
	defer r.mu.Unlock()
	delete(r.by, name)
}

// LockWith has folders of the file tier locked by another function, and sets whether their file
// system is of one host, until the end of the test.
func LockWith(t testing.TB, lock func(fd, how int) error, oneHost bool) {
	before, of := flock, ofOneHost
	t.Cleanup(func() { flock, ofOneHost = before, of })
	flock, ofOneHost = lock, func(int) bool { return oneHost }
}

package offload

import (
	"encoding/hex"
	"errors"
	"fmt"
	"slices"
	"sync"

	"github.com/moeserve/moeserve/device"
	"github.com/moeserve/moeserve/harvest"
	"github.com/moeserve/moeserve/kvcache"
	"github.com/moeserve/moeserve/peercache"
	"github.com/moeserve/moeserve/transfer"
)

// HarvestClient is the tier's client name in harvest: give it slabs of its own size there
// (harvest.Options.Clients), of several blocks.
const HarvestClient = "kv"

// peerMemory is the tier in peers' memory. The account bounds the number of its blocks;
// where they lie, and whether there is memory for them, is harvest's.
type peerMemory struct {
	env    Env
	cache  *peercache.Cache[kvcache.Key]
	peers  []device.Space // that may be used
	points points

	// mu is a leaf: harvest's callbacks take it.
	mu   sync.Mutex
	lost []kvcache.Key
}

// openPeers opens the tier on the peers that the configuration names.
func openPeers(e Env, c Config) (*Medium, error) {
	if e.Harvest == nil {
		return nil, errors.New("num_gpu_blocks is set, and no peer lends memory; name peers by --peers, or remove it")
	}
	p := &peerMemory{env: e, points: points{machine: e.Machine, name: "kv peer tier"}}
	var all []device.Space
	for _, peer := range e.Harvest.Summary().Peers {
		all = append(all, peer.Space)
	}
	for _, i := range c.DestGPUs {
		if !slices.Contains(all, device.HBM(i)) {
			return nil, fmt.Errorf("dest_gpu_id is %d, and the peers that lend memory are %v; name it by --peers, or choose one of these", i, all)
		}
		p.peers = append(p.peers, device.HBM(i))
	}
	if len(p.peers) == 0 {
		p.peers = all
	}
	var memory int64
	for _, s := range p.peers {
		u, err := e.Machine.Usage(s)
		if err != nil {
			return nil, fmt.Errorf("memory of %v: %w", s, err)
		}
		memory += u.Capacity
	}
	// The account needs memory for each block, whether there is any for it or not.
	blocks := int(min(int64(c.GPUBlocks), max(1, memory/e.BlockBytes)))
	var err error
	p.cache, err = peercache.New(peercache.Options[kvcache.Key]{
		Machine: e.Machine, Harvest: e.Harvest, Transfer: e.Transfer, Client: HarvestClient, Reader: e.Space,
		Name: func(k kvcache.Key) string { return "kv block " + hex.EncodeToString(k[:4]) }, Noun: "kv block",
		Priority: transfer.KVStore, Log: e.Log,
		Events: peercache.EventListener[kvcache.Key]{
			Removed: p.removed,
			PeerFailed: func(i peercache.PeerInfo) {
				e.Log.Warn("kv copy of a peer failed", "peer", i.Device.String(), "excluded", i.Excluded, "err", i.Err)
			},
		},
	})
	if err != nil {
		return nil, err
	}
	return &Medium{
		Name: PeerGPU, Blocks: blocks, Memory: p, Budget: p, Store: peerStore{p}, Load: peerLoad{p},
		BytesPerSecond: func() (best float64) {
			for _, s := range p.peers {
				best = max(best, e.Transfer.Rate(device.Pair{From: s, To: e.Space}))
			}
			return best
		},
	}, nil
}

// removed is peercache's event, on any goroutine.
func (p *peerMemory) removed(i peercache.CopyInfo[kvcache.Key]) {
	if i.Reason != peercache.Revoked && i.Reason != peercache.Failed {
		return
	}
	p.mu.Lock()
	p.lost = append(p.lost, i.Key)
	p.mu.Unlock()
	p.env.ContentLost()
}

// Drop implements Memory.
func (p *peerMemory) Drop(keys []kvcache.Key) {
	for _, k := range keys {
		if err := p.cache.Drop(k); err != nil {
			p.env.Log.Error("peer memory of a kv block not released", "err", err)
		}
	}
}

// Lost implements Memory.
func (p *peerMemory) Lost() []kvcache.Key {
	p.mu.Lock()
	defer p.mu.Unlock()
	lost := p.lost
	p.lost = nil
	return lost
}

// Locate implements Memory.
func (p *peerMemory) Locate(k kvcache.Key) device.Space {
	if x := p.cache.Find(k); x != nil {
		return x.Device()
	}
	return device.Host
}

// maxWanted is how much memory the tier asks other clients of harvest for at a time, in bytes.
const maxWanted = 1 << 30

// Report implements Budget. Where there is no room, harvest weighs the blocks against what
// others hold.
func (p *peerMemory) Report(u harvest.Use) (room int, err error) {
	if err := p.cache.SetUse(u); err != nil {
		return 0, err
	}
	rooms, health := p.env.Harvest.Room(HarvestClient, p.env.BlockBytes), p.env.Harvest.Health()
	for _, s := range p.peers {
		if health[s] == nil {
			room += rooms[s]
		}
	}
	n := min(u.Wanted, max(maxWanted, p.env.BlockBytes)) / p.env.BlockBytes
	if n == 0 || room > 0 {
		return room, nil
	}
	d := harvest.Demand{
		Client: HarvestClient, Bytes: p.env.BlockBytes, Objects: int(n),
		Cost: harvest.Cost(u.WantedPerSecond*float64(n), u.Saved),
	}
	for _, s := range p.peers {
		if err := p.env.Harvest.Want(s, d); err != nil {
			return room, err
		}
	}
	return room, nil
}

// Reset implements Memory: memory that a transfer uses is freed when it has ended.
func (p *peerMemory) Reset() {
	p.Drop(p.cache.Keys())
	p.Lost()
}

// Close implements Memory.
func (p *peerMemory) Close() error { return errors.Join(p.cache.Close(), p.points.close()) }

// peerStore copies blocks to peers.
type peerStore struct{ *peerMemory }

// Start implements Handler: one request for each peer that has room.
func (h peerStore) Start(job *Job) (Transfer, []int, error) {
	objects := make([]peercache.Object[kvcache.Key], len(job.Blocks))
	var parts []device.Region // of all
	for i := range job.Blocks {
		from := len(parts)
		for _, p := range job.Blocks[i].Pieces {
			parts = append(parts, p.GPU)
		}
		objects[i] = peercache.Object[kvcache.Key]{Key: job.Blocks[i].Key, Parts: parts[from:len(parts):len(parts)]}
	}
	started, err := h.cache.PutAll(objects, peercache.PutOptions[kvcache.Key]{Peers: h.peers, Behind: job.After})
	t := &storeTransfer{peerMemory: h.peerMemory, job: job}
	for _, s := range started {
		t.tickets = append(t.tickets, s.Ticket)
	}
	var refused []int
	for i := range job.Blocks {
		// Each transfer has its keys in the order of the job.
		n := slices.IndexFunc(started, func(s peercache.Transfer[kvcache.Key]) bool { return len(s.Keys) > 0 && s.Keys[0] == job.Blocks[i].Key })
		if n < 0 {
			refused = append(refused, i)
			continue
		}
		started[n].Keys = started[n].Keys[1:]
	}
	if len(started) == 0 {
		return nil, refused, err
	}
	t.RaisePriority(job.Priority)
	return t, refused, err
}

// tickets are requests to or from several peers.
type tickets []*transfer.Ticket

// Ends implements Transfer.
func (t tickets) Ends() []device.Point {
	ends := make([]device.Point, len(t))
	for i, ticket := range t {
		ends[i] = ticket.End()
	}
	return ends
}

// RaisePriority implements Transfer.
func (t tickets) RaisePriority(p transfer.Priority) {
	for _, ticket := range t {
		ticket.RaisePriority(p)
	}
}

// storeTransfer is a store under way.
type storeTransfer struct {
	*peerMemory
	tickets
	job *Job
}

// Result implements Transfer: what the cache has is there. What was revoked meanwhile has
// not arrived.
func (t *storeTransfer) Result() (arrived []bool, err error) {
	t.cache.Poll()
	arrived = make([]bool, len(t.job.Blocks))
	for i := range t.job.Blocks {
		arrived[i] = t.cache.Find(t.job.Blocks[i].Key) != nil
	}
	for _, ticket := range t.tickets {
		if e := ticket.Err(); !errors.Is(e, transfer.ErrCanceled) { // its memory is needed
			err = errors.Join(err, e)
		}
	}
	return arrived, err
}

// peerLoad copies blocks from peers.
type peerLoad struct{ *peerMemory }

// read is one request of a load, from one peer.
type read struct {
	from   device.Space
	blocks []int // of the job
	copies []*peercache.Copy[kvcache.Key]
	refs   []harvest.Ref
	pieces []transfer.Piece
	ticket *transfer.Ticket
	done   device.Point
}

// Start implements Handler: one request for each peer. Every block is read under a
// reference, which is released when the request has ended.
func (h peerLoad) Start(job *Job) (Transfer, []int, error) {
	reads, refused := h.acquire(job)
	return h.start(job, reads, refused)
}

// acquire finds what is there, by peer.
func (h peerLoad) acquire(job *Job) (reads []*read, refused []int) {
	for i := range job.Blocks {
		b := &job.Blocks[i]
		x, ref, ok := h.cache.Acquire(b.Key)
		if !ok {
			refused = append(refused, i)
			continue
		}
		n := slices.IndexFunc(reads, func(r *read) bool { return r.from == x.Device() })
		if n < 0 {
			n = len(reads)
			reads = append(reads, &read{from: x.Device()})
		}
		r := reads[n]
		for j, p := range b.Pieces {
			// Blocks in different slabs are in different allocations.
			last := len(r.copies) - 1
			separate := j == 0 && last >= 0 && r.copies[last].Slab() != x.Slab()
			r.pieces = append(r.pieces, transfer.Piece{Dst: p.GPU, Src: x.Region().Slice(p.Offset, p.GPU.Bytes), Separate: separate})
		}
		r.blocks, r.copies, r.refs = append(r.blocks, i), append(r.copies, x), append(r.refs, ref)
	}
	return reads, refused
}

// start submits the reads.
func (h peerLoad) start(job *Job, reads []*read, refused []int) (Transfer, []int, error) {
	t := &loadTransfer{peerMemory: h.peerMemory, job: job}
	var errs []error
	for _, r := range reads {
		if err := h.submit(r, job); err != nil {
			errs = append(errs, err)
			refused = append(refused, r.blocks...)
			continue
		}
		t.reads, t.tickets = append(t.reads, r), append(t.tickets, r.ticket)
	}
	slices.Sort(refused)
	if len(t.reads) == 0 {
		return nil, refused, errors.Join(errs...)
	}
	return t, refused, errors.Join(errs...)
}

// submit starts one request, or releases its references.
func (p *peerMemory) submit(r *read, job *Job) error {
	done, err := p.points.take()
	if err == nil {
		r.ticket, err = p.env.Transfer.Submit(transfer.Request{Pieces: r.pieces, Priority: job.Priority, After: job.After, Done: done, DoneInOrder: true, Label: job.Label})
		if err != nil {
			p.points.cancel(done)
		}
	}
	for i := range r.refs {
		if err != nil {
			r.refs[i].Release()
		} else {
			r.refs[i].ReleaseAt(r.ticket.End())
		}
	}
	if err != nil && !errors.Is(err, device.ErrClosed) {
		p.cache.ReadFailed(r.copies, err)
	}
	r.done = done
	return err
}

// loadTransfer is a load under way.
type loadTransfer struct {
	*peerMemory
	tickets
	job   *Job
	reads []*read
}

// Result implements Transfer. Copies that could not be read are removed, and count as a
// failure of their peer.
func (t *loadTransfer) Result() (arrived []bool, err error) {
	arrived = make([]bool, len(t.job.Blocks))
	for _, r := range t.reads {
		t.points.put(r.done)
		failed := r.ticket.Err()
		part := Job{}
		for _, i := range r.blocks {
			part.Blocks = append(part.Blocks, t.job.Blocks[i])
		}
		var bad []*peercache.Copy[kvcache.Key]
		for i, ok := range part.landed(r.ticket.Landed()) {
			if arrived[r.blocks[i]] = ok; !ok {
				bad = append(bad, r.copies[i])
			}
		}
		if failed == nil {
			t.cache.ReadSucceeded(r.from)
		} else if len(bad) > 0 {
			t.cache.ReadFailed(bad, failed)
		}
		err = errors.Join(err, failed)
		r.ticket.Release()
	}
	return arrived, err
}

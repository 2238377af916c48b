package offload

import (
	"errors"
	"fmt"
	"slices"
	"time"

	"github.com/moeserve/moeserve/kvcache"
	"github.com/moeserve/moeserve/kvcache/tier"
	"github.com/moeserve/moeserve/transfer"
)

// Loaded is a load that has ended.
type Loaded struct {
	Seq int64
	// Blocks that have arrived, from the first on: fewer than were to be loaded after a
	// failure.
	Blocks int
	// Err is why the others have not.
	Err error
}

// load is a load under way: one job for each tier that it reads.
type load struct {
	seq   int64
	keys  []kvcache.Key // of the GPU's blocks
	dst   []int32
	began time.Duration
	// arrived blocks, of dst; left is the number of jobs that have not ended.
	arrived []bool
	left    int
	err     error
	// class is the priority of the jobs.
	class transfer.Priority
}

// loadPart is what a load reads of one tier.
type loadPart struct {
	load    *load
	level   *level
	account tier.Load
	// blocks of the load, by block of the job.
	blocks [][]int
}

// Load starts to load the sequence's blocks keys[from:from+len(dst)] into these blocks of the
// pool, holds them, and returns at once; Poll reports the end. It is called after a Lookup
// that has found the blocks: any that the tiers have lost meanwhile end the load there.
func (t *Tiers) Load(seq int64, keys []kvcache.Key, from int, dst []int32) error {
	t.mu.Lock()
	defer t.mu.Unlock()
	switch {
	case t.closed:
		return errors.New("offload: closed")
	case len(dst) == 0 || from < 0 || from+len(dst) > len(keys):
		return fmt.Errorf("offload: load of %d blocks from block %d of a sequence of %d", len(dst), from, len(keys))
	}
	t.drop()
	l := &load{
		seq: seq, keys: slices.Clone(keys[from : from+len(dst)]), dst: slices.Clone(dst), began: t.o.Machine.Now(),
		arrived: make([]bool, len(dst)), class: transfer.KVLoad,
	}
	t.o.Blocks.Hold(l.dst)
	for _, k := range l.keys {
		t.loading[k]++
	}
	t.loads = append(t.loads, l)
	t.startLoad(l, keys, from)
	t.touch(keys[:from+len(dst)], 0)
	if l.left == 0 {
		t.jobs[t.worker.nothing()] = emptyLoad{}
	}
	return nil
}

// emptyLoad is the end of a load of which nothing was started.
type emptyLoad struct{}

func (emptyLoad) finish(*Tiers, *running) {}

// wanted is a block of a tier that a load reads, and which blocks of the load are parts of it.
type wanted struct {
	key    kvcache.Key
	blocks []int
}

// startLoad starts a job for each tier that has blocks of the load. mu is held.
func (t *Tiers) startLoad(l *load, keys []kvcache.Key, from int) {
	var missing []wanted
	for i := range l.dst {
		k, ok := t.tierBlock(keys, from+i)
		if found, _ := t.find(k); !ok || found == nil {
			break // what comes behind would be of no use
		}
		if n := len(missing); n == 0 || missing[n-1].key != k {
			missing = append(missing, wanted{key: k})
		}
		w := &missing[len(missing)-1]
		w.blocks = append(w.blocks, i)
	}
	for _, level := range t.levels {
		var here, rest []wanted
		for _, w := range missing {
			if level.account.Lookup(w.key) == tier.Hit {
				here = append(here, w)
			} else {
				rest = append(rest, w)
			}
		}
		missing = rest
		refused, err := t.startPart(l, level, here, from)
		for _, i := range refused {
			// The medium cannot read it: perhaps the next tier can.
			if err == nil {
				level.lose(here[i].key)
			}
			missing = append(missing, here[i])
		}
	}
}

// startPart starts to load blocks from one tier, which has them all, and returns those that
// it refuses: without an error since the medium does not have them any more. mu is held.
func (t *Tiers) startPart(l *load, level *level, of []wanted, from int) (refused []int, err error) {
	if len(of) == 0 {
		return nil, nil
	}
	keys := make([]kvcache.Key, len(of))
	for i, w := range of {
		keys[i] = w.key
	}
	account, err := level.account.PrepareLoad(keys)
	if err != nil {
		panic(err) // all are ready
	}
	blockBytes := t.o.Pool.Shape().BlockBytes()
	p := &loadPart{load: l, level: level, account: account}
	job := &Job{Priority: l.class, Label: label{"load", len(of), level.Name, l.seq}}
	for i, w := range of {
		b := Block{Key: w.key, ID: account.IDs[i]}
		for _, n := range w.blocks {
			b.Pieces = append(b.Pieces, Piece{GPU: t.o.Pool.Region(l.dst[n]), Offset: int64((from+n)%t.factor) * blockBytes})
		}
		job.Blocks = append(job.Blocks, b)
		p.blocks = append(p.blocks, w.blocks)
	}
	run, refused, err := t.start(route{level.Name, GPU}, job, p)
	l.err = errors.Join(l.err, err)
	t.completeLoad(level, account, refused, false)
	if run != nil {
		l.left++
		level.counts.loading(run.bytes(), t.o.Machine.Now())
	}
	return refused, err
}

// completeLoad completes these blocks of a load in a tier's account, the last one first: so
// that the end of a prefix is evicted before its beginning. mu is held.
func (t *Tiers) completeLoad(level *level, account tier.Load, blocks []int, ok bool) {
	if len(blocks) == 0 {
		return
	}
	ids := account.IDs
	account.IDs = nil
	for _, i := range slices.Backward(blocks) {
		account.IDs = append(account.IDs, ids[i])
	}
	if err := level.account.CompleteLoad(account, ok); err != nil {
		panic(err) // each is completed once
	}
}

// finish implements owner.
func (p *loadPart) finish(t *Tiers, run *running) {
	arrived, err := run.transfer.Result()
	level, l := p.level, p.load
	good, bad := run.blocks(arrived)
	for _, i := range good {
		for _, n := range p.blocks[i] {
			l.arrived[n] = true
		}
	}
	level.counts.loaded(run, good)
	level.counts.failedLoads += int64(len(bad))
	if !notStarted(err) {
		level.loseRead(p.account, bad)
	}
	t.completeLoad(level, p.account, good, true)
	t.completeLoad(level, p.account, bad, false)
	l.err = errors.Join(l.err, err)
	l.left--
}

// loseRead removes blocks of a load that could not be read from the tier, if they are still there:
// those that were reset, or lost, meanwhile are not, and their keys may have been stored again.
func (l *level) loseRead(account tier.Load, blocks []int) {
	ids := account.IDs
	account.IDs = nil
	for _, i := range blocks {
		account.IDs = append(account.IDs, ids[i])
	}
	if lost := l.account.LoseRead(account); len(lost) > 0 {
		l.counts.lost += int64(len(lost))
		l.Memory.Drop(lost)
	}
}

// errRefused marks errors of streams and links that refuse work, which say nothing of blocks.
var errRefused = errors.New("not copied")

// notStarted reports whether an error says nothing of what was to be read.
func notStarted(err error) bool {
	return errors.Is(err, errRefused) || errors.Is(err, transfer.ErrCanceled) || errors.Is(err, transfer.ErrAfter)
}

// loaded ends a load. mu is held.
func (t *Tiers) loaded(l *load) Loaded {
	t.o.Blocks.Unhold(l.dst)
	for _, k := range l.keys {
		if t.loading[k]--; t.loading[k] == 0 {
			delete(t.loading, k)
		}
	}
	n := slices.Index(l.arrived, false)
	if n < 0 {
		n = len(l.arrived)
	} else if l.err == nil {
		l.err = errLost
	}
	if l.err != nil {
		t.log.Warn("kv load incomplete", "sequence", l.seq, "blocks", len(l.dst), "arrived", n, "err", l.err)
	}
	return Loaded{Seq: l.seq, Blocks: n, Err: l.err}
}

var errLost = errors.New("a tier has lost the block")

// raise raises the priority of a load that has waited for long. mu is held.
func (t *Tiers) raise(l *load) {
	waited, class := t.o.Machine.Now()-l.began, l.class
	switch {
	case waited > 4*t.o.Patience:
		class = transfer.Demand
	case waited > t.o.Patience:
		class = transfer.Prefetch
	}
	if class == l.class {
		return
	}
	l.class = class
	for run, o := range t.jobs {
		if p, ok := o.(*loadPart); ok && p.load == l {
			run.transfer.RaisePriority(class)
			p.level.counts.raised++
		}
	}
}

// touch reports a use of a sequence's blocks, from block from on, to all tiers. mu is held.
func (t *Tiers) touch(keys []kvcache.Key, from int) {
	var blocks []kvcache.Key
	for i := (from/t.factor+1)*t.factor - 1 - from; i < len(keys); i += t.factor {
		blocks = append(blocks, keys[i])
	}
	for _, l := range t.levels {
		l.account.Touch(blocks)
	}
}

// label names a transfer.
type label struct {
	does   string
	blocks int
	medium string
	seq    int64
}

func (l label) String() string {
	if l.does == "store" {
		return fmt.Sprintf("store %d kv blocks in %s", l.blocks, l.medium)
	}
	return fmt.Sprintf("load %d kv blocks of sequence %d from %s", l.blocks, l.seq, l.medium)
}

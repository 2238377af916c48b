package experts

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"slices"
	"sync"
	"time"

	"github.com/moeserve/moeserve/device"
	"github.com/moeserve/moeserve/kernels"
	"github.com/moeserve/moeserve/lease"
	"github.com/moeserve/moeserve/transfer"
)

// steps implements Step and Use on the parts of the store. mu is the store's, and guards
// it.
type steps struct {
	mu       *sync.Mutex
	plan     *Plan
	position map[int]int // of a model's layer, in plan.Layers
	places   *places
	fetch    *fetcher
	tables   *tables
	inPlace  *inPlace
	layers   []layer
	counts   *counts
	log      *slog.Logger
	swapped  func(SwapInfo)
	lent     func(LentInfo)
	closed   bool
	cpu      cpuWork
	now      func() time.Duration // of the machine

	// number of the latest step.
	number  uint64
	running bool
	compute device.Stream
	// open is the position of the open layer, or -1; unrouted: its router's selection is not
	// known yet; opened counts openings, and routed is the latest whose routed experts are marked.
	open           int
	unrouted       bool
	opened, routed uint64
}

// layer is one layer with experts in a step.
type layer struct {
	// list has the experts in the order of the row of ids: first the resident ones
	// (residents many), then those of the waves.
	list      []int
	residents int
	// waves of the use.
	waves []Wave
	// refs on the slots of offloaded experts, held from the prefetch or opening to
	// Release.
	refs []lease.Ref
	// predicted and routed experts of this use.
	predicted, routed []bool
}

func newSteps(mu *sync.Mutex, p *Plan, pl *places, f *fetcher, t *tables, x *inPlace, c *counts, o Options) *steps {
	s := &steps{
		mu: mu, plan: p, position: map[int]int{}, places: pl, fetch: f, tables: t, inPlace: x, counts: c,
		log: o.Log, swapped: o.Events.Swapped, lent: o.Events.Lent, open: -1, layers: make([]layer, len(p.Layers)),
	}
	s.now = o.Machine.Now
	s.cpu.share, s.cpu.rows = o.CPU, make([]int, p.Experts)
	for i, number := range p.Layers {
		s.position[number] = i
		l := &s.layers[i]
		l.refs = make([]lease.Ref, p.Experts)
		l.predicted, l.routed = make([]bool, p.Experts), make([]bool, p.Experts)
		s.listAll(i)
	}
	return s
}

// listAll lists all experts of the layer: resident ones first.
func (s *steps) listAll(position int) {
	l := &s.layers[position]
	l.list = l.list[:0]
	for e := range s.plan.Experts {
		if s.places.resident(ID{position, e}) {
			l.list = append(l.list, e)
		}
	}
	l.residents = len(l.list)
	for e := range s.plan.Experts {
		if !s.places.resident(ID{position, e}) {
			l.list = append(l.list, e)
		}
	}
}

// offloaded are the offloaded experts in the list, ascending: all of them after listAll,
// some after selected.
func (l *layer) offloaded() []int { return l.list[l.residents:] }

// address of an expert's extent, also while it is being fetched; 0 for an offloaded
// expert that was never fetched.
func (s *steps) address(id ID) device.Addr {
	if s.places.resident(id) {
		return s.places.residentRegion(id).Addr
	}
	if at := s.fetch.slot(id); at >= 0 {
		return s.fetch.memory.Range(int64(at)*s.plan.Layout.Size, s.plan.Layout.Size).Addr
	}
	return 0
}

func (s *steps) begin(ctx context.Context, compute device.Stream) error {
	if s.running {
		return errors.New("the previous step was neither ended nor dropped")
	}
	if s.fetch.failure() != nil {
		if err := s.reset(ctx); err != nil {
			return err
		}
	}
	s.tables.forgetReads()
	s.fetch.cache.ForgetReaders()
	s.fetch.peerBackoff = max(s.fetch.peerBackoff-1, 0)
	s.places.completeSwaps(s.onSwapped)
	s.places.settleAll(s.onLent)
	s.number++
	s.running, s.compute, s.open = true, compute, -1
	return nil
}

// onSwapped updates the layer after an expert has become resident in place of another.
func (s *steps) onSwapped(in, out ID, err error) {
	if err != nil {
		s.log.Warn("expert swap failed", "in", s.plan.name(in), "out", s.plan.name(out), "err", err)
		return
	}
	s.changed(in)
	s.counts.Swapped++
	s.counts.MigratedBytes += s.plan.Layout.Size
	s.swapped(SwapInfo{Layer: s.plan.Layers[in.Layer], In: in.Expert, Out: out.Expert})
}

func (s *steps) prefetchPredicted(position int, predicted []int32) error {
	l := &s.layers[position]
	for _, e := range predicted {
		if err := s.checkID(e); err != nil {
			return err
		}
		if !s.places.resident(ID{position, int(e)}) && !l.predicted[e] {
			l.predicted[e] = true
			s.counts.PrefetchPredicted++
		}
	}
	wanted := l.predicted
	if s.cpu.share != nil {
		s.countRows(predicted)
		copy(l.routed, l.predicted)
		wanted = l.routed
		s.chooseCPU(position, wanted, true)
	}
	_, err := s.fetch.acquire(position, l.refs, s.selected(position, wanted), 0, transfer.Prefetch)
	return err
}

func (s *steps) checkID(e int32) error {
	if e < 0 || int(e) >= s.plan.Experts {
		return fmt.Errorf("invalid expert %d: the layer has %d", e, s.plan.Experts)
	}
	return nil
}

// selected lists the marked offloaded experts behind the resident ones, ascending, and
// returns them.
func (s *steps) selected(position int, marked []bool) []int {
	l := &s.layers[position]
	l.list = l.list[:l.residents]
	for e := range marked {
		if marked[e] && !s.places.resident(ID{position, e}) {
			l.list = append(l.list, e)
		}
	}
	return l.offloaded()
}

// markOpen records that the layer is open.
func (s *steps) markOpen(position int, unrouted bool) opening {
	s.opened++
	s.open, s.unrouted = position, unrouted
	return opening{s: s, number: s.opened}
}

func (s *steps) openWhole(ctx context.Context, position int) error {
	l := &s.layers[position]
	s.listAll(position)
	if err := s.fetchAll(position, l.offloaded(), s.plan.Waves); err != nil {
		return err
	}
	if err := s.updateRow(ctx, position); err != nil {
		return err
	}
	l.waves = l.waves[:0]
	s.residentWave(position)
	s.waves(position, s.plan.Waves)
	for _, e := range l.list[:l.residents] {
		s.counts.use(position, e, Resident)
	}
	s.countUse(position, l.offloaded())
	return nil
}

// route marks the open layer's routed experts, but for those that the CPU computes, which it leaves in
// cpuWork.chose. It is called once for an opening, by ChooseOnCPU or by FetchChosen.
func (s *steps) route(position int, chosen []int32) error {
	l := &s.layers[position]
	if err := s.usable(); err != nil {
		return err
	}
	clear(l.routed)
	for _, e := range chosen {
		if err := s.checkID(e); err != nil {
			return err
		}
		if l.routed[e] {
			continue
		}
		l.routed[e] = true
		if s.places.resident(ID{position, int(e)}) {
			continue
		}
		s.counts.RouterSyncs++
		if l.predicted[e] {
			s.counts.PrefetchUsed++
		}
	}
	s.skipOthers(position) // predicted or prefetched, but not routed to
	s.computeOnCPU(position, chosen)
	s.skipOthers(position)
	s.routed = s.opened
	return nil
}

func (s *steps) fetchChosen(ctx context.Context, position int, chosen []int32) (Use, error) {
	l := &s.layers[position]
	if s.routed != s.opened {
		if err := s.route(position, chosen); err != nil {
			return Use{}, err
		}
	}
	if err := s.usable(); err != nil {
		return Use{}, err
	}
	missing := s.selected(position, l.routed)
	waves := s.plan.onDemandWaves(len(missing))
	if err := s.fetchAll(position, missing, waves); err != nil {
		return Use{}, err
	}
	waits := s.awaitLink(position, missing)
	if err := s.updateRow(ctx, position); err != nil {
		return Use{}, err
	}
	first := len(l.waves)
	s.waves(position, waves)
	for e, routed := range l.routed {
		if routed && s.places.resident(ID{position, e}) {
			s.counts.use(position, e, Resident)
		}
	}
	s.countUse(position, missing)
	return Use{Slots: s.tables.rows[position].slots, Waves: l.waves[first:], OnCPU: s.cpu.chose, AwaitsHost: waits}, nil
}

// skipOthers releases the slots of experts that are not marked as routed, into which nothing more is
// copied (fetcher.skip).
func (s *steps) skipOthers(position int) {
	l := &s.layers[position]
	for e := range l.refs {
		if l.refs[e].Held() && !l.routed[e] {
			l.refs[e].Release()
			a := s.fetch.slotFetch(ID{position, e})
			a.passed = a.unused
			s.fetch.skip(ID{position, e})
		}
	}
}

// residentWave adds the wave of the resident experts.
func (s *steps) residentWave(position int) {
	if l := &s.layers[position]; l.residents > 0 {
		l.waves = appendWave(l.waves, s.tables.rows[position].ids.Slice(0, l.residents), l.list[:l.residents])
	}
}

// waves adds the waves of the fetched experts, at most limit.
func (s *steps) waves(position, limit int) {
	l := &s.layers[position]
	missing := l.offloaded()
	n := min(limit, len(missing))
	from := 0
	for i := range n {
		to := from + share(i, n, len(missing))
		l.waves = appendWave(l.waves, s.tables.rows[position].ids.Slice(l.residents+from, l.residents+to), missing[from:to])
		w := &l.waves[len(l.waves)-1]
		for _, e := range missing[from:to] {
			a := s.fetch.slotFetch(ID{position, e})
			a.awaited = true
			for _, c := range a.copies {
				if !slices.Contains(w.WaitFor, c.done) {
					w.WaitFor = append(w.WaitFor, c.done)
				}
			}
		}
		from = to
	}
}

// appendWave appends a wave, reusing the capacity of an earlier one.
func appendWave(waves []Wave, list kernels.Tensor, ids []int) []Wave {
	n := len(waves)
	if n < cap(waves) {
		waves = waves[:n+1]
		waves[n] = Wave{Experts: list, IDs: ids, WaitFor: waves[n].WaitFor[:0]}
		return waves
	}
	return append(waves, Wave{Experts: list, IDs: ids})
}

// countUse counts a use of these offloaded experts, by tier. The first use after a fetch
// is the miss that the fetch was for.
func (s *steps) countUse(position int, missing []int) {
	for _, e := range missing {
		s.countCached(position, e)
	}
}

// countCached counts a use of an expert in the expert cache: the first one after its fetch is a miss.
func (s *steps) countCached(position, e int) {
	a := s.fetch.slotFetch(ID{position, e})
	if !a.uncounted {
		s.counts.use(position, e, Cached)
		return
	}
	a.uncounted = false
	s.fetch.used(ID{position, e})
	s.counts.use(position, e, a.from)
	if a.prefetched {
		s.counts.Prefetched++
	}
}

// usable fails if no layer can be prefetched or opened.
func (s *steps) usable() error {
	if s.closed {
		return device.ErrClosed
	}
	if err := s.fetch.failure(); err != nil {
		return fmt.Errorf("a fetch failed and the step was not dropped: %w", err)
	}
	return nil
}

// fetchAll fetches experts that are needed now, at demand priority.
func (s *steps) fetchAll(position int, missing []int, waves int) error {
	if len(missing) == 0 {
		return nil
	}
	whole, err := s.fetch.acquire(position, s.layers[position].refs, missing, waves, transfer.Demand)
	if err != nil {
		return err
	}
	if !whole {
		return fmt.Errorf("all %d slots of the expert cache are held by layers that were prefetched or opened and not released", s.plan.CacheSlots)
	}
	s.fetch.raisePriority(position, missing)
	return nil
}

// updateRow updates the layer's row of the tables, if it has changed.
func (s *steps) updateRow(ctx context.Context, position int) error {
	row := &s.tables.rows[position]
	row.uploaded = -1
	if s.layers[position].residents == s.plan.Experts && row.upToDate() {
		return nil
	}
	return s.tables.update(ctx, s.compute, position, s.layers[position].list)
}

// release lets the slots of the layer be overwritten behind what is enqueued on the
// compute stream.
func (s *steps) release(position int) error {
	l := &s.layers[position]
	clear(l.predicted)
	if len(l.offloaded()) == 0 && s.tables.rows[position].uploaded < 0 {
		return nil
	}
	passed, err := s.tables.signalDone(s.compute, position)
	if err != nil {
		return err
	}
	for e := range l.refs {
		if l.refs[e].Held() {
			l.refs[e].ReleaseAt(passed)
		}
	}
	s.fetch.removeCompleted()
	return nil
}

// capturedUse is the Use of a layer whose experts are all resident, for ForCapture.
func (s *steps) capturedUse(layer int) (Use, error) {
	s.mu.Lock()
	defer s.mu.Unlock()
	position, ok := s.position[layer]
	err := errors.New("the layer has no experts")
	if ok {
		err = s.checkResident(position)
	}
	if err != nil {
		return Use{}, fmt.Errorf("experts: resident experts of layer %d: %w", layer, err)
	}
	row := &s.tables.rows[position]
	return Use{Slots: row.slots, Waves: []Wave{{Experts: row.ids, IDs: s.layers[s.position[layer]].list}}, All: row.ids, open: opening{capturing: true}}, nil
}

// checkResident fails if not all of the layer's experts are resident.
func (s *steps) checkResident(position int) error {
	if n := s.plan.Experts - s.layers[position].residents; n > 0 {
		return fmt.Errorf("%d of its experts are not resident", n)
	}
	return nil
}

// reset cancels copies into the expert cache or waits for them, and drops experts that
// did not arrive completely.
func (s *steps) reset(ctx context.Context) error {
	if err := s.fetch.cancel(ctx); err != nil {
		return err
	}
	for i := range s.layers {
		l := &s.layers[i]
		for e := range l.refs {
			if l.refs[e].Held() {
				l.refs[e].Release()
			}
		}
		clear(l.predicted)
		s.listAll(i)
	}
	s.tables.reset()
	if s.inPlace.running && s.inPlace.usesPeers {
		s.fetch.peerBackoff = max(s.fetch.peerBackoff, 1) // the peers' memory may have been the cause
	}
	s.endInPlace()
	s.inPlace.valid, s.inPlace.uncounted = false, 0
	s.open = -1
	cause := s.fetch.err
	if lost := s.fetch.reset(); cause != nil {
		s.log.Warn("expert cache reset after a failed step", "err", cause, "slots_lost", lost)
	}
	return nil
}

package experts

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"slices"
	"time"

	"github.com/moeserve/moeserve/device"
	"github.com/moeserve/moeserve/kernels"
	"github.com/moeserve/moeserve/transfer"
)

// Step is one pass of the compute stream over the model's layers, from BeginStep to End
// or Drop. Its methods are for one goroutine. It holds nothing itself, so copies of it
// are the same step; a method of a step that is over is an error.
type Step struct {
	s      *Store
	number uint64
	frozen bool
}

// Use is a layer that is open, with all experts that its rows need. It ends with Close.
type Use struct {
	// Slots is the layer's slot table, [experts] U64, valid on the compute stream until
	// Close.
	Slots kernels.Tensor
	// Waves hold the experts to be launched, each once: of Layer all of them, resident
	// ones first; of FetchChosen the chosen ones that are not resident. They are valid
	// until Close.
	Waves []Wave
	// All lists the experts of all waves of Layer, [n] I32 in device memory.
	All kernels.Tensor

	open opening
}

// Unrouted is a layer that is open while its router's choice is not known yet. Only what
// FetchChosen makes of it can be closed.
type Unrouted struct {
	Slots kernels.Tensor
	// Waves hold the resident experts, if there are any.
	Waves []Wave

	open opening
}

// opening names one opening of a layer. It is frozen where Step.Frozen gave it.
type opening struct {
	s      *Store
	number uint64
	frozen bool
}

// stepState is the step under way.
type stepState struct {
	// number of the latest step.
	number  uint64
	running bool
	compute device.Stream
	// open is the position of the layer that is open, or -1, unrouted says that its
	// router's choice is awaited, and opened counts openings.
	open     int
	unrouted bool
	opened   uint64
}

// Wave is a list of experts to be launched together.
type Wave struct {
	// Experts is the list, [n] I32 in device memory.
	Experts kernels.Tensor
	// Await must be reached before the launch; empty for resident experts.
	Await []device.Point
}

// Wait holds s back until the wave's experts have arrived.
func (w Wave) Wait(s device.Stream) error {
	for _, p := range w.Await {
		if err := s.Await(p.Fence, p.Value); err != nil {
			return fmt.Errorf("experts: wait for a wave: %w", err)
		}
	}
	return nil
}

// BeginStep begins a step on the compute stream, when nothing of an earlier one runs any
// more: it carries out the swaps whose experts have landed, corrects the links' rates, and
// trusts peers again once a step has passed without them. Where a copy that was submitted
// ahead has failed since the step before, it clears up as Drop does; ctx bounds that.
func (s *Store) BeginStep(ctx context.Context, compute device.Stream) (Step, error) {
	s.mu.Lock()
	defer s.mu.Unlock()
	if err := s.beginStep(ctx, compute); err != nil {
		return Step{}, fmt.Errorf("experts: begin a step: %w", err)
	}
	return Step{s: s, number: s.step.number}, nil
}

func (s *Store) beginStep(ctx context.Context, compute device.Stream) error {
	switch {
	case s.closed:
		return device.ErrClosed
	case s.loader != nil:
		return errors.New("the store is not sealed")
	case s.step.running:
		return errors.New("the step before has neither ended nor been dropped")
	}
	if s.failure() != nil {
		if err := s.reset(ctx); err != nil {
			return err
		}
	}
	s.mistrust = max(s.mistrust-1, 0)
	s.carryOutSwaps()
	s.linkTime = s.links.Update()
	s.step = stepState{number: s.step.number + 1, opened: s.step.opened, running: true, compute: compute, open: -1}
	return nil
}

// LinkTime is for how long the link into the compute GPU that was longest at work was so
// between the latest two calls of BeginStep, by the machine's clock.
func (s *Store) LinkTime() time.Duration {
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.linkTime
}

// in locks the step's store for a method of the step and returns the layer's position,
// or -1 where it has no experts. The caller unlocks, also where there is an error.
func (st Step) in(layer int) (position int, err error) {
	st.s.mu.Lock()
	position, ok := st.s.position[layer]
	if !ok {
		position = -1
	}
	if err = st.over(); err == nil {
		err = st.s.usable()
	}
	return position, err
}

// over says why the step is not under way.
func (st Step) over() error {
	if !st.s.step.running || st.s.step.number != st.number {
		return errors.New("the step is over")
	}
	return nil
}

// Prefetch submits the copies of what the layer misses into ring slots that no
// layer prefetched or open holds. What finds no slot is left to Layer. It never
// waits, and does nothing for a layer that has everything, is open, or has no experts.
func (st Step) Prefetch(layer int) error { return st.PrefetchPart(layer, 0, 1) }

// PrefetchPart is Prefetch of one of so many parts of what the layer misses, counted
// from 0: neighbors, as many in each as in the others, or one less.
func (st Step) PrefetchPart(layer, part, parts int) error {
	if st.frozen {
		return nil
	}
	position, err := st.in(layer)
	s := st.s
	defer s.mu.Unlock()
	if err == nil && position >= 0 && position != s.step.open {
		l := &s.layers[position]
		l.listAll()
		missing := l.missing()
		_, err = s.bring(position, missing[part*len(missing)/parts:(part+1)*len(missing)/parts], s.plan.Waves, transfer.Prefetch)
	}
	if err != nil {
		return fmt.Errorf("experts: prefetch layer %d: %w", layer, err)
	}
	return nil
}

// PrefetchPredicted is Prefetch of some experts of the layer: of those that its router
// will probably choose. They may be named in any order and repeatedly, and resident ones
// too.
func (st Step) PrefetchPredicted(layer int, predicted []int32) error {
	if st.frozen {
		return nil
	}
	position, err := st.in(layer)
	s := st.s
	defer s.mu.Unlock()
	if err == nil && position >= 0 && position != s.step.open {
		err = s.prefetchPredicted(position, predicted)
	}
	if err != nil {
		return fmt.Errorf("experts: prefetch predicted experts of layer %d: %w", layer, err)
	}
	return nil
}

func (s *Store) prefetchPredicted(position int, predicted []int32) error {
	l := &s.layers[position]
	for _, e := range predicted {
		if err := s.checkID(e); err != nil {
			return err
		}
		if l.localAt[e] < 0 && !l.guessed[e] {
			l.guessed[e] = true
			s.stats.Guessed++
		}
	}
	_, err := s.bring(position, s.selected(l, l.guessed), s.plan.ChosenWaves, transfer.Prefetch)
	return err
}

func (s *Store) checkID(e int32) error {
	if e < 0 || int(e) >= s.plan.Experts {
		return fmt.Errorf("there is no expert %d: the layer has %d", e, s.plan.Experts)
	}
	return nil
}

// selected puts the offloaded experts that are marked behind the local ones in the
// layer's list, ascending, and returns them.
func (s *Store) selected(l *layer, marked []bool) []int {
	l.list = l.list[:l.residents]
	for e, at := range l.localAt {
		if at < 0 && marked[e] {
			l.list = append(l.list, e)
		}
	}
	return l.missing()
}

// Layer opens a layer for one use with all its experts: it fetches what no Prefetch has,
// makes the fetches under way urgent, and puts the update of the tables on the stream.
// ctx bounds a wait that only a host two uses of the layer ahead of the device can meet.
// One layer is open at a time.
func (st Step) Layer(ctx context.Context, layer int) (Use, error) {
	if st.frozen {
		return st.s.frozen(layer)
	}
	position, err := st.opens(layer)
	s := st.s
	defer s.mu.Unlock()
	if err == nil {
		err = s.openWhole(ctx, position)
	}
	if err != nil {
		return Use{}, fmt.Errorf("experts: open layer %d: %w", layer, err)
	}
	use := s.layers[position].use
	use.open = s.opened(position, false)
	return use, nil
}

// opens is in for a layer that is to be opened.
func (st Step) opens(layer int) (position int, err error) {
	position, err = st.in(layer)
	switch open := st.s.step.open; {
	case err != nil:
	case position < 0:
		err = errors.New("it has no experts")
	case open >= 0:
		err = fmt.Errorf("layer %d is open; Close comes first", st.s.plan.Layers[open])
	}
	return position, err
}

// opened notes that the layer is open.
func (s *Store) opened(position int, unrouted bool) opening {
	s.step.opened++
	s.step.open, s.step.unrouted = position, unrouted
	return opening{s: s, number: s.step.opened}
}

// in locks the store and returns the layer that is open by this opening. The caller
// unlocks, also where there is an error.
func (o opening) in() (*layer, error) {
	o.s.mu.Lock()
	if step := &o.s.step; !step.running || step.open < 0 || step.opened != o.number {
		return nil, errors.New("the layer is not open any more")
	}
	return &o.s.layers[o.s.step.open], nil
}

func (s *Store) openWhole(ctx context.Context, position int) error {
	l := &s.layers[position]
	l.listAll()
	if err := s.bringAll(position, l.missing(), s.plan.Waves); err != nil {
		return err
	}
	if err := s.updateRow(ctx, position); err != nil {
		return err
	}
	l.use.Waves = l.use.Waves[:0]
	s.localWave(l)
	s.waves(l, s.plan.Waves)
	l.use.All = l.ids.Slice(0, len(l.list))
	for e := range s.plan.Experts {
		s.counts.uses[position][e]++
	}
	s.stats.Hits[Local] += int64(l.residents)
	s.countUse(l, l.missing())
	return nil
}

// LayerUnrouted opens a layer for one use of which it is not known yet which experts it
// needs.
func (st Step) LayerUnrouted(ctx context.Context, layer int) (Unrouted, error) {
	position, err := st.opens(layer)
	s := st.s
	defer s.mu.Unlock()
	if err == nil {
		if l := &s.layers[position]; l.image == nil || l.moved { // else FetchChosen will do
			err = s.updateRow(ctx, position)
		} else {
			l.sent = -1
		}
	}
	if err != nil {
		return Unrouted{}, fmt.Errorf("experts: open layer %d: %w", layer, err)
	}
	l := &s.layers[position]
	l.use.Waves = l.use.Waves[:0]
	s.localWave(l)
	return Unrouted{Slots: l.use.Slots, Waves: l.use.Waves, open: s.opened(position, true)}, nil
}

// FetchChosen brings the offloaded experts of those that the layer's rows have chosen, and
// returns their waves. Copies of others that have not begun are forgone. chosen may name
// experts in any order and repeatedly. The update of the tables is on the stream
// behind it.
func (u Unrouted) FetchChosen(ctx context.Context, chosen []int32) (Use, error) {
	if u.open.s == nil {
		return Use{}, errNotOpened
	}
	_, err := u.open.in()
	s := u.open.s
	defer s.mu.Unlock()
	if err == nil && !s.step.unrouted {
		err = errors.New("they have been fetched")
	}
	if err != nil {
		return Use{}, fmt.Errorf("experts: fetch chosen experts: %w", err)
	}
	use, err := s.fetchChosen(ctx, s.step.open, chosen)
	if err != nil {
		return Use{}, fmt.Errorf("experts: fetch chosen experts of layer %d: %w", s.plan.Layers[s.step.open], err)
	}
	s.step.unrouted = false
	use.open = u.open
	return use, nil
}

var errNotOpened = errors.New("experts: no layer was opened")

func (s *Store) fetchChosen(ctx context.Context, position int, chosen []int32) (Use, error) {
	l := &s.layers[position]
	if err := s.usable(); err != nil {
		return Use{}, err
	}
	clear(l.chosen)
	for _, e := range chosen {
		if err := s.checkID(e); err != nil {
			return Use{}, err
		}
		if l.chosen[e] {
			continue
		}
		l.chosen[e] = true
		s.counts.uses[position][e]++
		if l.localAt[e] >= 0 {
			s.stats.Hits[Local]++
			continue
		}
		s.stats.Asked++
		if l.guessed[e] {
			s.stats.GuessedRight++
		}
	}
	missing := s.selected(l, l.chosen)
	for e := range l.refs {
		if l.refs[e].Held() && !l.chosen[e] { // predicted, or prefetched, in vain
			l.refs[e].Release()
			s.forgo(l.slot[e])
		}
	}
	if err := s.bringAll(position, missing, s.plan.ChosenWaves); err != nil {
		return Use{}, err
	}
	if err := s.updateRow(ctx, position); err != nil {
		return Use{}, err
	}
	first := len(l.use.Waves)
	s.waves(l, s.plan.ChosenWaves)
	s.countUse(l, missing)
	return Use{Slots: l.use.Slots, Waves: l.use.Waves[first:]}, nil
}

// localWave adds the wave of the local experts.
func (s *Store) localWave(l *layer) {
	if l.residents > 0 {
		l.use.Waves = appendWave(l.use.Waves, l.ids.Slice(0, l.residents))
	}
}

// waves adds those of the experts that were fetched, most of them at most.
func (s *Store) waves(l *layer, most int) {
	missing := l.missing()
	n := min(most, len(missing))
	from := 0
	for i := range n {
		to := from + share(i, n, len(missing))
		l.use.Waves = appendWave(l.use.Waves, l.ids.Slice(l.residents+from, l.residents+to))
		w := &l.use.Waves[len(l.use.Waves)-1]
		for _, e := range missing[from:to] {
			sl := &s.slots[l.slot[e]]
			sl.awaited = true
			for _, f := range sl.copies {
				if !slices.Contains(w.Await, f.done) && !s.without.noArrival {
					w.Await = append(w.Await, f.done)
				}
			}
		}
		from = to
	}
}

// appendWave uses the room that an earlier use has left.
func appendWave(waves []Wave, list kernels.Tensor) []Wave {
	n := len(waves)
	if n < cap(waves) {
		waves = waves[:n+1]
		waves[n] = Wave{Experts: list, Await: waves[n].Await[:0]}
		return waves
	}
	return append(waves, Wave{Experts: list})
}

// countUse counts where the experts of a use were found.
func (s *Store) countUse(l *layer, missing []int) {
	for _, e := range missing {
		sl := &s.slots[l.slot[e]]
		if !sl.fresh {
			s.stats.Hits[Ring]++
			continue
		}
		sl.fresh = false
		s.stats.Hits[sl.from]++
		s.stats.Misses++
		if sl.ahead {
			s.stats.Prefetched++
		}
	}
}

// usable says why no layer can be prefetched or opened.
func (s *Store) usable() error {
	if s.closed {
		return device.ErrClosed
	}
	if err := s.failure(); err != nil {
		return fmt.Errorf("a fetch has failed and the step was not dropped: %w", err)
	}
	return nil
}

// bringAll is bring for experts that are needed now.
func (s *Store) bringAll(position int, missing []int, waves int) error {
	if len(missing) == 0 {
		return nil
	}
	whole, err := s.bring(position, missing, waves, transfer.Needed)
	if err != nil {
		return err
	}
	if !whole {
		return fmt.Errorf("the ring of %d slots is held by other layers that were prefetched or opened and were not closed", len(s.slots))
	}
	l := &s.layers[position]
	var last *fetch
	for _, e := range missing {
		for _, f := range s.slots[l.slot[e]].copies {
			if f != last {
				f.ticket.Promote(transfer.Needed)
				last = f
			}
		}
	}
	return nil
}

// updateRow puts the layer's addresses and list into its row of the tables, if they
// are not there.
func (s *Store) updateRow(ctx context.Context, position int) error {
	l := &s.layers[position]
	l.sent = -1
	if len(l.localAt) == l.residents && l.image != nil && !l.moved {
		return nil
	}
	s.fillRow(l)
	if bytes.Equal(l.row, l.image) {
		l.moved = false
		return nil
	}
	turn := l.turn
	if v := l.rows[turn]; v != 0 {
		if err := s.passed.Await(ctx, v); err != nil {
			return fmt.Errorf("wait for an earlier update of the tables: %w", err)
		}
		l.rows[turn] = 0
	}
	size := s.plan.rowBytes()
	at := int64(position) * size
	from := int64(turn)*s.plan.TableBytes + at
	copy(s.upload.Write(from, size), l.row)
	if err := s.step.compute.Copy(s.table.Range(at, size), s.upload.Range(from, size)); err != nil {
		return fmt.Errorf("update the tables: %w", err)
	}
	l.image, l.moved = append(l.image[:0], l.row...), false
	l.sent, l.turn = turn, (turn+1)%uploadRows
	return nil
}

// Close says that everything that reads the layer has been enqueued on the compute
// stream, and puts there the fence that lets its slots be overwritten.
func (u Use) Close() error {
	if u.open.frozen {
		return nil
	}
	if u.open.s == nil {
		return errNotOpened
	}
	l, err := u.open.in()
	s := u.open.s
	defer s.mu.Unlock()
	if err != nil {
		return fmt.Errorf("experts: close a layer: %w", err)
	}
	number := s.plan.Layers[s.step.open]
	s.step.open = -1
	if err := s.release(l); err != nil {
		return fmt.Errorf("experts: close layer %d: %w", number, err)
	}
	return nil
}

// release lets the slots of the layer be overwritten behind what is on the stream.
func (s *Store) release(l *layer) error {
	clear(l.guessed)
	if len(l.missing()) == 0 && l.sent < 0 {
		return nil
	}
	if err := s.step.compute.Raise(s.passed, s.passedValue+1); err != nil {
		return err
	}
	s.passedValue++
	if l.sent >= 0 {
		l.rows[l.sent] = s.passedValue
	}
	for e := range l.refs {
		if l.refs[e].Held() {
			l.refs[e].ReleaseAt(device.Point{Fence: s.passed, Value: s.passedValue})
		}
	}
	s.forgetEnded()
	return nil
}

// Layers is Layer and Close of every layer in one, of a store that misses nothing: what
// reads the layers, as Frozen's Layer gives them, is enqueued behind it. The tables are
// updated where that is due.
func (st Step) Layers(ctx context.Context) error {
	for _, number := range st.s.plan.Layers {
		if err := st.layerAtOnce(ctx, number); err != nil {
			return fmt.Errorf("experts: use layer %d: %w", number, err)
		}
	}
	return nil
}

func (st Step) layerAtOnce(ctx context.Context, layer int) error {
	position, err := st.opens(layer)
	s := st.s
	defer s.mu.Unlock()
	if err != nil {
		return err
	}
	l := &s.layers[position]
	if err := l.whole(); err != nil {
		return err
	}
	if err := s.openWhole(ctx, position); err != nil {
		return err
	}
	return s.release(l)
}

// Frozen is the step as a graph's capture sees it: its Layer gives what any step's Layer
// gives, until the store is closed, and does nothing; nor do Prefetch and Close. A layer
// that misses an expert cannot be opened.
func (st Step) Frozen() Step { return Step{s: st.s, frozen: true} }

// frozen is the Use of a layer of which nothing is missing.
func (s *Store) frozen(layer int) (Use, error) {
	s.mu.Lock()
	defer s.mu.Unlock()
	position, ok := s.position[layer]
	err := errors.New("it has no experts")
	if ok {
		err = s.layers[position].whole()
	}
	if err != nil {
		return Use{}, fmt.Errorf("experts: resident experts of layer %d: %w", layer, err)
	}
	l := &s.layers[position]
	use := l.use
	use.Waves, use.All, use.open = []Wave{{Experts: l.ids}}, l.ids, opening{frozen: true}
	return use, nil
}

// whole says why not all of the layer's experts are local.
func (l *layer) whole() error {
	if n := len(l.localAt) - l.residents; n > 0 {
		return fmt.Errorf("%d of its experts are not local", n)
	}
	return nil
}

// End ends a step, whose end on the compute stream has been awaited. Nothing that the step
// computed may be believed before: an error is the first failure of a fetch, and the step
// must be dropped.
func (st Step) End() error {
	s := st.s
	s.mu.Lock()
	defer s.mu.Unlock()
	err := st.over()
	if err == nil {
		err = s.failure()
	}
	if err == nil && s.step.open >= 0 {
		err = fmt.Errorf("layer %d is still open", s.plan.Layers[s.step.open])
	}
	if err != nil {
		return fmt.Errorf("experts: end a step: %w", err)
	}
	s.step.running = false
	return nil
}

// Drop ends a step that failed, so that it can be run again: it closes the layer that is
// open, waits for the copies under way or cancels them, and forgets the
// experts that did not arrive whole. Copies in peers' memory that could not be read
// are given back, and a peer that was lost is left out; the next step takes everything
// from the host, so that however many copies on peers are bad, one more try is enough. The
// compute stream has been recovered; nothing of the step runs. An error means that ctx was
// done, and that Drop may be called again. A step that is over is left alone, and so is
// the zero Step.
func (st Step) Drop(ctx context.Context) error {
	if st.s == nil {
		return nil
	}
	s := st.s
	s.mu.Lock()
	defer s.mu.Unlock()
	if st.over() != nil {
		return nil
	}
	if err := s.reset(ctx); err != nil {
		return fmt.Errorf("experts: drop a step: %w", err)
	}
	s.step.running = false
	return nil
}

func (s *Store) failure() error {
	for _, f := range s.fetches {
		if s.err != nil {
			break
		}
		s.err = f.ticket.Err()
	}
	return s.err
}

// reset waits for all copies into the ring, and forgets what did not arrive whole.
func (s *Store) reset(ctx context.Context) error {
	s.cancel()
	for _, f := range s.fetches {
		if f.ticket == nil {
			continue
		}
		if err := f.ticket.Wait(ctx); !f.ticket.Ended() {
			return err
		}
	}
	for i := range s.layers {
		l := &s.layers[i]
		for e := range l.refs {
			if l.refs[e].Held() {
				l.refs[e].Release()
			}
		}
		l.image, l.sent, l.rows = nil, -1, [uploadRows]uint32{}
		clear(l.guessed)
		l.listAll()
	}
	s.step.open = -1
	lost := s.dropFailed()
	if s.mistrust > 0 {
		s.mistrust = 2 // BeginStep of the step's next try, and that of the step after it
	}
	for i := range s.slots {
		sl := &s.slots[i]
		exclusive, ok := sl.cell.BeginExclusive()
		if !ok {
			panic(fmt.Sprintf("experts: ring slot %d is held exclusively by somebody else", i))
		}
		exclusive.Settle()
		s.forgetCopies(sl)
		if sl.holds == nothing {
			exclusive.Invalidate()
		} else {
			exclusive.End()
		}
	}
	if s.err != nil {
		s.o.Log.Warn("experts were reset", "err", s.err, "slots_lost", lost)
	}
	for _, f := range s.fetches {
		s.letGo(f)
	}
	clear(s.fetches)
	s.fetches, s.err = s.fetches[:0], nil
	return nil
}

// dropFailed forgets what failed copies should have brought, and returns how many
// slots that were.
func (s *Store) dropFailed() (lost int) {
	for _, f := range s.fetches {
		if f.ticket != nil && f.ticket.Err() == nil {
			continue
		}
		s.stats.Failed++
		for _, at := range f.slots {
			if s.slots[at].holds != nothing {
				s.slots[at].holds = nothing
				lost++
			}
		}
		if f.from != device.Host && f.ticket != nil && s.peers.ReadFailed(f.copies, f.ticket.Err()) {
			s.mistrust = max(s.mistrust, 1)
		}
	}
	return lost
}

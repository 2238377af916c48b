package experts

import (
	"context"
	"errors"
	"fmt"

	"github.com/moeserve/moeserve/device"
	"github.com/moeserve/moeserve/kernels"
	"github.com/moeserve/moeserve/transfer"
)

// Step is one pass of the compute stream over the model's layers, from BeginStep to End
// or Drop. Its methods are for one goroutine. It holds nothing itself, so copies of it
// are the same step; a method of a step that is over is an error.
type Step struct {
	s      *steps
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
	s      *steps
	number uint64
	frozen bool
}

// Wave is a list of experts to be launched together.
type Wave struct {
	// Experts is the list, [n] I32 in device memory.
	Experts kernels.Tensor
	// IDs are the same, on the host.
	IDs []int
	// Await must be reached before the launch; empty for resident experts.
	Await []device.Point
}

// BeginStep begins a step on the compute stream, when nothing of an earlier one runs any
// more: it carries out the swaps whose experts have landed, corrects the links' rates, and
// trusts peers again once a step has passed without them. Where a copy that was submitted
// ahead has failed since the step before, it clears up as Drop does; ctx bounds that.
func (s *Store) BeginStep(ctx context.Context, compute device.Stream) (Step, error) {
	s.mu.Lock()
	defer s.mu.Unlock()
	err := s.unsealed()
	if err == nil {
		err = s.steps.begin(ctx, compute)
	}
	if err != nil {
		return Step{}, fmt.Errorf("experts: begin a step: %w", err)
	}
	s.linkTime = s.fetch.links.Update()
	return Step{s: s.steps, number: s.steps.number}, nil
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
	if !st.s.running || st.s.number != st.number {
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
	if err == nil && position >= 0 && position != s.open {
		l := &s.layers[position]
		s.listAll(position)
		missing := l.missing()
		_, err = s.fetch.acquire(position, l.refs, missing[part*len(missing)/parts:(part+1)*len(missing)/parts], s.plan.Waves, transfer.Prefetch)
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
	if err == nil && position >= 0 && position != s.open {
		err = s.prefetchPredicted(position, predicted)
	}
	if err != nil {
		return fmt.Errorf("experts: prefetch predicted experts of layer %d: %w", layer, err)
	}
	return nil
}

// Layer opens a layer for one use with all its experts: it fetches what no Prefetch has,
// makes the fetches under way urgent, and puts the update of the tables on the stream.
// ctx bounds a wait that only a host two uses of the layer ahead of the device can meet.
// One layer is open at a time.
func (st Step) Layer(ctx context.Context, layer int) (Use, error) {
	if st.frozen {
		return st.s.frozen(layer)
	}
	position, err := st.openable(layer)
	s := st.s
	defer s.mu.Unlock()
	if err == nil {
		err = s.openWhole(ctx, position)
	}
	if err != nil {
		return Use{}, fmt.Errorf("experts: open layer %d: %w", layer, err)
	}
	l, row := &s.layers[position], &s.tables.rows[position]
	return Use{Slots: row.slots, Waves: l.waves, All: row.ids.Slice(0, len(l.list)), open: s.opens(position, false)}, nil
}

// openable is in for a layer that is to be opened.
func (st Step) openable(layer int) (position int, err error) {
	position, err = st.in(layer)
	switch open := st.s.open; {
	case err != nil:
	case position < 0:
		err = errors.New("it has no experts")
	case open >= 0:
		err = fmt.Errorf("layer %d is open; Close comes first", st.s.plan.Layers[open])
	}
	return position, err
}

// in locks the store and returns the position of the layer that is open by this opening.
// The caller unlocks, also where there is an error.
func (o opening) in() (position int, err error) {
	o.s.mu.Lock()
	if s := o.s; !s.running || s.open < 0 || s.opened != o.number {
		return -1, errors.New("the layer is not open any more")
	}
	return o.s.open, nil
}

// LayerUnrouted opens a layer for one use of which it is not known yet which experts it
// needs.
func (st Step) LayerUnrouted(ctx context.Context, layer int) (Unrouted, error) {
	position, err := st.openable(layer)
	s := st.s
	defer s.mu.Unlock()
	if err == nil {
		if row := &s.tables.rows[position]; row.current() { // FetchChosen will do
			row.uploaded = -1
		} else {
			err = s.updateRow(ctx, position)
		}
	}
	if err != nil {
		return Unrouted{}, fmt.Errorf("experts: open layer %d: %w", layer, err)
	}
	l := &s.layers[position]
	l.waves = l.waves[:0]
	s.residentWave(position)
	return Unrouted{Slots: s.tables.rows[position].slots, Waves: l.waves, open: s.opens(position, true)}, nil
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
	if err == nil && !s.unrouted {
		err = errors.New("they have been fetched")
	}
	if err != nil {
		return Use{}, fmt.Errorf("experts: fetch chosen experts: %w", err)
	}
	use, err := s.fetchChosen(ctx, s.open, chosen)
	if err != nil {
		return Use{}, fmt.Errorf("experts: fetch chosen experts of layer %d: %w", s.plan.Layers[s.open], err)
	}
	s.unrouted = false
	use.open = u.open
	return use, nil
}

var errNotOpened = errors.New("experts: no layer was opened")

// Release says that everything that reads the layer has been enqueued on the compute
// stream, and puts there the fence that lets its slots be overwritten.
func (u Use) Release() error {
	if u.open.frozen {
		return nil
	}
	if u.open.s == nil {
		return errNotOpened
	}
	position, err := u.open.in()
	s := u.open.s
	defer s.mu.Unlock()
	if err != nil {
		return fmt.Errorf("experts: close a layer: %w", err)
	}
	s.open = -1
	if err := s.release(position); err != nil {
		return fmt.Errorf("experts: close layer %d: %w", s.plan.Layers[position], err)
	}
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
	position, err := st.openable(layer)
	s := st.s
	defer s.mu.Unlock()
	if err != nil {
		return err
	}
	if err := s.whole(position); err != nil {
		return err
	}
	if err := s.openWhole(ctx, position); err != nil {
		return err
	}
	return s.release(position)
}

// Frozen is the step as a graph's capture sees it: its Layer gives what any step's Layer
// gives, until the store is closed, and does nothing; nor do Prefetch and Close. A layer
// that misses an expert cannot be opened.
func (st Step) Frozen() Step { return Step{s: st.s, frozen: true} }

// End ends a step, whose end on the compute stream has been awaited. Nothing that the step
// computed may be believed before: an error is the first failure of a fetch, and the step
// must be dropped.
func (st Step) End() error {
	s := st.s
	s.mu.Lock()
	defer s.mu.Unlock()
	err := st.over()
	if err == nil {
		err = s.fetch.failure()
	}
	if err == nil && s.open >= 0 {
		err = fmt.Errorf("layer %d is still open", s.plan.Layers[s.open])
	}
	if err != nil {
		return fmt.Errorf("experts: end a step: %w", err)
	}
	s.running = false
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
	s.running = false
	return nil
}

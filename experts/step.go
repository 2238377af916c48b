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
// or Drop, or several, each behind the one before: UseAllLayers or ContinueInPlace precedes each
// further one. One goroutine at a time uses it. Copies of a Step are the same step. After its
// end its methods fail.
type Step struct {
	s         *steps
	number    uint64
	capturing bool
	inPlace   bool
}

// Use is an open layer with all experts that its tokens need. It ends with Release.
type Use struct {
	// Slots is the layer's slot table, [experts] U64, valid on the compute stream until
	// Release.
	Slots kernels.Tensor
	// Waves contain each expert to be launched once: from Layer all experts, resident
	// ones first; from FetchChosen the routed ones that are not resident. They are valid
	// until Release.
	Waves []Wave
	// OnCPU are the other routed experts, which the CPU computes: see Options.CPU. Of one the CPU may
	// compute a part (CPUShare.Divide). They are valid until Release.
	OnCPU []HostExpert
	// AwaitsHost: by FetchChosen of a layer that is divided by time: Waves wait for copies from host memory
	// that have not ended, and for no others (see CPUShare.Fetched).
	AwaitsHost bool
	// All lists the experts of all waves of Layer, [n] I32 in device memory.
	All kernels.Tensor

	open opening
}

// Unrouted is an open layer whose router's selection is not known yet. FetchChosen makes it
// a Use, which can be released.
type Unrouted struct {
	Slots kernels.Tensor
	// Waves contain the resident experts, if there are any.
	Waves []Wave

	open opening
}

// opening identifies one opening of a layer. capturing: it comes from Step.ForCapture.
type opening struct {
	s         *steps
	number    uint64
	capturing bool
}

// Wave is a list of experts that are fetched and launched together.
type Wave struct {
	// Experts is the list, [n] I32 in device memory.
	Experts kernels.Tensor
	// IDs is the same list on the host.
	IDs []int
	// WaitFor are fence values that the launch must wait for; none for resident experts.
	WaitFor []device.Point
}

// BeginStep begins a step on the compute stream. Nothing of an earlier step still runs.
// It completes swaps, updates the measured link rates, and counts down the steps without
// peers after a failure. If a prefetch has failed since the last step, it recovers as
// Drop does, at most until ctx is done.
func (s *Store) BeginStep(ctx context.Context, compute device.Stream) (Step, error) {
	s.mu.Lock()
	defer s.mu.Unlock()
	err := s.checkSealed()
	if err == nil {
		err = s.steps.begin(ctx, compute)
	}
	if err != nil {
		return Step{}, fmt.Errorf("experts: begin a step: %w", err)
	}
	s.linkTime = s.fetch.links.Update()
	return Step{s: s.steps, number: s.steps.number}, nil
}

// lock locks the store for a method of the step and returns the layer's position, or -1
// if it has no experts. The caller unlocks, also after an error.
func (st Step) lock(layer int) (position int, err error) {
	st.s.mu.Lock()
	position, ok := st.s.position[layer]
	if !ok {
		position = -1
	}
	if err = st.checkRunning(); err == nil {
		err = st.s.usable()
	}
	return position, err
}

// checkRunning fails if the step has ended.
func (st Step) checkRunning() error {
	if !st.s.running || st.s.number != st.number {
		return errors.New("the step has ended")
	}
	return nil
}

// Prefetch submits the copies of the layer's experts that are neither resident nor
// cached, into free slots of the expert cache. Layer fetches those that find no slot.
// Prefetch never waits, and does nothing for a layer that needs no copies, is open, or
// has no experts.
func (st Step) Prefetch(layer int) error { return st.PrefetchPart(layer, 0, 1) }

// PrefetchPart is Prefetch of one of so many equal parts of the layer's offloaded
// experts, counted from 0: parts are consecutive experts, and their sizes differ by at
// most one.
func (st Step) PrefetchPart(layer, part, parts int) error {
	if st.capturing || st.inPlace {
		return nil
	}
	position, err := st.lock(layer)
	s := st.s
	defer s.mu.Unlock()
	if err == nil && position >= 0 && position != s.open {
		l := &s.layers[position]
		s.listAll(position)
		missing := l.offloaded()
		_, err = s.fetch.acquire(position, l.refs, missing[part*len(missing)/parts:(part+1)*len(missing)/parts], s.plan.Waves, transfer.Prefetch)
	}
	if err != nil {
		return fmt.Errorf("experts: prefetch layer %d: %w", layer, err)
	}
	return nil
}

// PrefetchPredicted is Prefetch of the experts that the layer's router is predicted to
// choose. predicted is in any order and may contain duplicates and resident experts.
func (st Step) PrefetchPredicted(layer int, predicted []int32) error {
	if st.capturing || st.inPlace {
		return nil
	}
	position, err := st.lock(layer)
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

// Layer opens a layer for one use of all its experts: it fetches those that no Prefetch
// has, gives fetches in progress demand priority, and enqueues the update of the tables.
// It waits, at most until ctx is done, only if the host is two uses of the layer ahead of
// the device. One layer is open at a time.
func (st Step) Layer(ctx context.Context, layer int) (Use, error) {
	switch {
	case st.inPlace:
		return st.s.inPlaceUse(layer)
	case st.capturing:
		return st.s.capturedUse(layer)
	}
	position, err := st.lockOpenable(layer)
	s := st.s
	defer s.mu.Unlock()
	if err == nil {
		err = s.openWhole(ctx, position)
	}
	if err != nil {
		return Use{}, fmt.Errorf("experts: open layer %d: %w", layer, err)
	}
	l, row := &s.layers[position], &s.tables.rows[position]
	return Use{Slots: row.slots, Waves: l.waves, All: row.ids.Slice(0, len(l.list)), open: s.markOpen(position, false)}, nil
}

// lockOpenable is lock for a layer that is to be opened.
func (st Step) lockOpenable(layer int) (position int, err error) {
	position, err = st.lock(layer)
	switch open := st.s.open; {
	case err != nil:
	case position < 0:
		err = errors.New("the layer has no experts")
	case open >= 0:
		err = fmt.Errorf("layer %d is open and must be released first", st.s.plan.Layers[open])
	}
	return position, err
}

// lock locks the store and returns the position of the layer. The caller unlocks, also
// after an error.
func (o opening) lock() (position int, err error) {
	o.s.mu.Lock()
	if s := o.s; !s.running || s.open < 0 || s.opened != o.number {
		return -1, errors.New("the layer was released, or its step has ended")
	}
	return o.s.open, nil
}

// LayerUnrouted opens a layer for one use before its router's selection is known.
func (st Step) LayerUnrouted(ctx context.Context, layer int) (Unrouted, error) {
	position, err := st.lockOpenable(layer)
	s := st.s
	defer s.mu.Unlock()
	if err == nil {
		if row := &s.tables.rows[position]; row.upToDate() { // FetchChosen updates the row
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
	return Unrouted{Slots: s.tables.rows[position].slots, Waves: l.waves, open: s.markOpen(position, true)}, nil
}

// ChooseOnCPU returns those of the experts that the layer's tokens are routed to that the CPU computes,
// so that it can begin before FetchChosen, which has to follow with the same experts, submits fetches.
// Nothing more is copied of other experts. chosen is in any order and has an expert once for each of its rows. The result is valid until Release.
func (u Unrouted) ChooseOnCPU(chosen []int32) ([]HostExpert, error) {
	s, err := u.lock()
	if s != nil {
		defer s.mu.Unlock()
	}
	if err == nil && s.routed == s.opened {
		err = errors.New("ChooseOnCPU was already called for this layer")
	}
	if err == nil {
		err = s.route(s.open, chosen)
	}
	if err != nil {
		return nil, fmt.Errorf("experts: choose experts for the CPU: %w", err)
	}
	return s.cpu.chose, nil
}

// FetchChosen fetches the offloaded experts among those that the layer's tokens are
// routed to, except for those that the CPU computes, and returns their waves. Nothing more is copied of
// other experts, as far as they were predicted. It enqueues the update of the tables. chosen is as for
// ChooseOnCPU.
func (u Unrouted) FetchChosen(ctx context.Context, chosen []int32) (Use, error) {
	s, err := u.lock()
	if s != nil {
		defer s.mu.Unlock()
	}
	if err != nil {
		return Use{}, fmt.Errorf("experts: fetch routed experts: %w", err)
	}
	use, err := s.fetchChosen(ctx, s.open, chosen)
	if err != nil {
		return Use{}, fmt.Errorf("experts: fetch routed experts of layer %d: %w", s.plan.Layers[s.open], err)
	}
	s.unrouted = false
	use.open = u.open
	return use, nil
}

// lock locks the store of an open layer whose selection is not known yet. The store is locked, unless
// nil.
func (u Unrouted) lock() (*steps, error) {
	if u.open.s == nil {
		return nil, errNotOpened
	}
	_, err := u.open.lock()
	if err == nil && !u.open.s.unrouted {
		err = errors.New("FetchChosen was already called for this layer")
	}
	return u.open.s, err
}

var errNotOpened = errors.New("experts: no layer was opened")

// Release ends the use. Everything that reads the layer has been enqueued on the compute
// stream; Release enqueues a fence signal behind it, after which the slots may be
// overwritten.
func (u Use) Release() error {
	if u.open.capturing {
		return nil
	}
	if u.open.s == nil {
		return errNotOpened
	}
	position, err := u.open.lock()
	s := u.open.s
	defer s.mu.Unlock()
	if err != nil {
		return fmt.Errorf("experts: release a layer: %w", err)
	}
	s.open = -1
	if err := s.release(position); err != nil {
		return fmt.Errorf("experts: release layer %d: %w", s.plan.Layers[position], err)
	}
	return nil
}

// UseAllLayers is Layer and Release of every layer, for a store whose experts are all
// resident. What reads the layers, as Layer of ForCapture returns them, is enqueued
// behind it. It updates the tables if swaps have changed them.
func (st Step) UseAllLayers(ctx context.Context) error {
	for _, number := range st.s.plan.Layers {
		if err := st.useLayer(ctx, number); err != nil {
			return fmt.Errorf("experts: use layer %d: %w", number, err)
		}
	}
	return nil
}

func (st Step) useLayer(ctx context.Context, layer int) error {
	position, err := st.lockOpenable(layer)
	s := st.s
	defer s.mu.Unlock()
	if err != nil {
		return err
	}
	if err := s.checkResident(position); err != nil {
		return err
	}
	if err := s.openWhole(ctx, position); err != nil {
		return err
	}
	return s.release(position)
}

// ForCapture is the step for the capture of a CUDA graph: its Layer returns what any
// step's Layer returns, valid until the store is closed, without enqueuing anything;
// Prefetch and Release do nothing. A layer with offloaded experts cannot be opened, except in
// the capture of a step that reads in place.
func (st Step) ForCapture() Step {
	return Step{s: st.s, number: st.number, capturing: true, inPlace: st.inPlace}
}

// End ends a step after the host has synchronized with its end on the compute stream. An
// error is the first failure of a fetch: the step's results are invalid and the step must
// be dropped.
func (st Step) End() error {
	s := st.s
	s.mu.Lock()
	defer s.mu.Unlock()
	err := st.checkRunning()
	if err == nil {
		err = s.fetch.failure()
	}
	if err == nil && s.open >= 0 {
		err = fmt.Errorf("layer %d is still open", s.plan.Layers[s.open])
	}
	if err != nil {
		return fmt.Errorf("experts: end a step: %w", err)
	}
	s.endInPlace()
	s.running = false
	return nil
}

// Drop ends a failed step, so that it can be retried: it releases the open layer, cancels
// copies or waits for them, and drops experts that did not arrive completely. Peer copies
// that could not be read are freed, and a lost peer is excluded. The next step reads
// everything from the host, so that one retry is enough, however many peer copies are
// bad. The compute stream has been recovered, and nothing of the step runs. An error
// means that ctx was done; Drop may be called again. For a step that has ended, and for
// the zero Step, Drop does nothing.
func (st Step) Drop(ctx context.Context) error {
	if st.s == nil {
		return nil
	}
	s := st.s
	s.mu.Lock()
	defer s.mu.Unlock()
	if st.checkRunning() != nil {
		return nil
	}
	if err := s.reset(ctx); err != nil {
		return fmt.Errorf("experts: drop a step: %w", err)
	}
	s.running = false
	return nil
}

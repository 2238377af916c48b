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

// Use is what a layer's products need.
type Use struct {
	// Slots is the layer's slot table, [experts] U64, valid on the compute stream
	// from Open to Done.
	Slots kernels.Tensor
	// Waves hold every expert that is opened once: local ones first. They are valid
	// until Done.
	Waves []Wave
	// All lists the experts of all waves of Open, [n] I32 in device memory.
	All kernels.Tensor
}

// Wave is a list of experts to be launched together.
type Wave struct {
	// Experts is the list, [n] I32 in device memory.
	Experts kernels.Tensor
	// Await must be reached before the launch; empty for local experts.
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

// Begin comes before each step, when nothing of an earlier one runs any more: it
// carries out the swaps whose experts have landed, corrects the links' rates, and
// trusts peers again once a step has passed without them.
func (s *Store) Begin() error {
	s.mu.Lock()
	defer s.mu.Unlock()
	if err := s.usable(); err != nil {
		return fmt.Errorf("experts: begin a step: %w", err)
	}
	s.mistrust = max(s.mistrust-1, 0)
	s.carryOutSwaps()
	s.rates.update(s.o.Transfer, s.o.Space)
	return nil
}

// LinkTime is for how long the link into the compute GPU that was longest at work was so
// between the latest two calls of Begin, by the machine's clock.
func (s *Store) LinkTime() time.Duration {
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.rates.atWork
}

// Prefetch submits the copies of what the layer misses into ring slots that no
// layer prefetched or open holds. What finds no slot is left to Open. It never
// waits, and does nothing for a layer that has everything, is open, or has no experts.
func (s *Store) Prefetch(layer int) error { return s.PrefetchPart(layer, 0, 1) }

// PrefetchPart is Prefetch of one of so many parts of what the layer misses, counted
// from 0: neighbors, as many in each as in the others, or one less.
func (s *Store) PrefetchPart(layer, part, parts int) error {
	s.mu.Lock()
	defer s.mu.Unlock()
	position, ok := s.position[layer]
	if !ok {
		return nil
	}
	err := s.usable()
	if l := &s.layers[position]; err == nil && l.state == shut {
		l.listAll()
		missing := l.missing()
		_, err = s.bring(position, missing[part*len(missing)/parts:(part+1)*len(missing)/parts], s.plan.Waves, transfer.Prefetch)
	}
	if err != nil {
		return fmt.Errorf("experts: prefetch layer %d: %w", layer, err)
	}
	return nil
}

// Guess is Prefetch of some experts of the layer: of those that its router will
// probably choose. They may be named in any order and repeatedly, and local ones too.
func (s *Store) Guess(layer int, guessed []int32) error {
	s.mu.Lock()
	defer s.mu.Unlock()
	position, ok := s.position[layer]
	if !ok {
		return nil
	}
	err := s.usable()
	if err == nil && s.layers[position].state == shut {
		err = s.guess(position, guessed)
	}
	if err != nil {
		return fmt.Errorf("experts: guess layer %d: %w", layer, err)
	}
	return nil
}

func (s *Store) guess(position int, guessed []int32) error {
	l := &s.layers[position]
	for _, e := range guessed {
		if err := s.known(e); err != nil {
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

func (s *Store) known(e int32) error {
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

// Open readies a layer for one use on the compute stream, with all its experts: it
// fetches what no Prefetch has, makes the fetches under way urgent, and puts the
// update of the tables on the stream. ctx bounds a wait that only a host two uses of
// the layer ahead of the device can meet.
func (s *Store) Open(ctx context.Context, layer int, compute device.Stream) (Use, error) {
	s.mu.Lock()
	defer s.mu.Unlock()
	l, err := s.opening(layer)
	if err == nil {
		err = s.openWhole(ctx, s.position[layer], compute)
	}
	if err != nil {
		return Use{}, fmt.Errorf("experts: open layer %d: %w", layer, err)
	}
	return l.use, nil
}

// opening checks that a layer can be opened.
func (s *Store) opening(layer int) (*layer, error) {
	position, ok := s.position[layer]
	if !ok {
		return nil, errors.New("it has no experts")
	}
	if err := s.usable(); err != nil {
		return nil, err
	}
	l := &s.layers[position]
	if l.state != shut {
		return nil, errors.New("it is open already; Done comes first")
	}
	return l, nil
}

func (s *Store) openWhole(ctx context.Context, position int, compute device.Stream) error {
	l := &s.layers[position]
	l.listAll()
	if err := s.bringAll(position, l.missing(), s.plan.Waves); err != nil {
		return err
	}
	if err := s.updateRow(ctx, position, compute); err != nil {
		return err
	}
	l.use.Waves = l.use.Waves[:0]
	s.localWave(l)
	s.waves(l, s.plan.Waves)
	l.use.All = l.ids.Slice(0, len(l.list))
	l.state = openWhole
	for e := range s.plan.Experts {
		s.counts.uses[position][e]++
	}
	s.countUse(l, l.missing())
	return nil
}

// OpenLocal readies a layer for one use of which it is not known yet which experts it
// needs: Waves hold the local ones only, if there are any. Choose comes before Done.
func (s *Store) OpenLocal(ctx context.Context, layer int, compute device.Stream) (Use, error) {
	s.mu.Lock()
	defer s.mu.Unlock()
	l, err := s.opening(layer)
	if err == nil {
		l.sent = -1
		if l.image == nil || l.moved { // else Choose will do
			err = s.updateRow(ctx, s.position[layer], compute)
		}
	}
	if err != nil {
		return Use{}, fmt.Errorf("experts: open layer %d: %w", layer, err)
	}
	l.use.Waves = l.use.Waves[:0]
	s.localWave(l)
	l.state = openLocal
	return l.use, nil
}

// Choose brings the offloaded experts of those that the rows of a layer opened by
// OpenLocal have chosen, and returns their waves, valid until Done. Copies of others
// that have not begun are forgone. chosen may name
// experts in any order and repeatedly. The update of the tables is on the stream
// behind it.
func (s *Store) Choose(ctx context.Context, layer int, chosen []int32, compute device.Stream) ([]Wave, error) {
	s.mu.Lock()
	defer s.mu.Unlock()
	position, ok := s.position[layer]
	if !ok || s.layers[position].state != openLocal {
		return nil, fmt.Errorf("experts: choose of layer %d: OpenLocal comes first", layer)
	}
	waves, err := s.choose(ctx, position, chosen, compute)
	if err != nil {
		return nil, fmt.Errorf("experts: choose of layer %d: %w", layer, err)
	}
	return waves, nil
}

func (s *Store) choose(ctx context.Context, position int, chosen []int32, compute device.Stream) ([]Wave, error) {
	l := &s.layers[position]
	if err := s.usable(); err != nil {
		return nil, err
	}
	clear(l.chosen)
	for _, e := range chosen {
		if err := s.known(e); err != nil {
			return nil, err
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
		if l.refs[e].Held() && !l.chosen[e] { // guessed, or prefetched, in vain
			l.refs[e].Release()
			s.forgo(l.slot[e])
		}
	}
	if err := s.bringAll(position, missing, s.plan.ChosenWaves); err != nil {
		return nil, err
	}
	if err := s.updateRow(ctx, position, compute); err != nil {
		return nil, err
	}
	first := len(l.use.Waves)
	s.waves(l, s.plan.ChosenWaves)
	l.state = openChosen
	s.countUse(l, missing)
	return l.use.Waves[first:], nil
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
	if l.state == openWhole {
		s.stats.Hits[Local] += int64(l.residents)
	}
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
	switch {
	case s.closed:
		return device.ErrClosed
	case !s.sealed:
		return errors.New("the store is not sealed")
	}
	if err := s.failure(); err != nil {
		return fmt.Errorf("a fetch has failed and the store was not reset: %w", err)
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
		return fmt.Errorf("the ring of %d slots is held by other layers that were prefetched or opened and have not seen Done", len(s.slots))
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
func (s *Store) updateRow(ctx context.Context, position int, compute device.Stream) error {
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
	if err := compute.Copy(s.table.Range(at, size), s.upload.Range(from, size)); err != nil {
		return fmt.Errorf("update the tables: %w", err)
	}
	l.image, l.moved = append(l.image[:0], l.row...), false
	l.sent, l.turn = turn, (turn+1)%uploadRows
	return nil
}

// Done says that everything that reads the layer has been enqueued on the compute
// stream, and puts there the fence that lets its slots be overwritten.
func (s *Store) Done(layer int, compute device.Stream) error {
	s.mu.Lock()
	defer s.mu.Unlock()
	position, ok := s.position[layer]
	if !ok || s.layers[position].state == shut {
		return fmt.Errorf("experts: done with layer %d: it is not open", layer)
	}
	l := &s.layers[position]
	if l.state == openLocal {
		return fmt.Errorf("experts: done with layer %d: Choose comes first", layer)
	}
	if err := s.done(l, compute); err != nil {
		return fmt.Errorf("experts: done with layer %d: %w", layer, err)
	}
	return nil
}

func (s *Store) done(l *layer, compute device.Stream) error {
	l.endUse()
	if len(l.missing()) == 0 && l.sent < 0 {
		return nil
	}
	if err := compute.Raise(s.passed, s.passedValue+1); err != nil {
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

func (l *layer) endUse() {
	l.state = shut
	clear(l.guessed)
}

// UseAll is Open and Done of every layer in one, of a store that misses nothing: what
// reads the layers is enqueued behind it. The tables are updated where that is due.
func (s *Store) UseAll(ctx context.Context, compute device.Stream) error {
	s.mu.Lock()
	defer s.mu.Unlock()
	for position, number := range s.plan.Layers {
		l, err := s.opening(number)
		if err == nil {
			err = l.whole()
		}
		if err == nil {
			err = s.openWhole(ctx, position, compute)
		}
		if err == nil {
			err = s.done(l, compute)
		}
		if err != nil {
			return fmt.Errorf("experts: use layer %d: %w", number, err)
		}
	}
	return nil
}

// Local is the Use of a layer of which nothing is missing: the same at every Open, and
// valid until Close.
func (s *Store) Local(layer int) (Use, error) {
	s.mu.Lock()
	defer s.mu.Unlock()
	position, ok := s.position[layer]
	err := errors.New("it has no experts")
	if ok {
		err = s.layers[position].whole()
	}
	if err != nil {
		return Use{}, fmt.Errorf("experts: local experts of layer %d: %w", layer, err)
	}
	l := &s.layers[position]
	use := l.use
	use.Waves, use.All = []Wave{{Experts: l.ids}}, l.ids
	return use, nil
}

// whole says why not all of the layer's experts are local.
func (l *layer) whole() error {
	if n := len(l.localAt) - l.residents; n > 0 {
		return fmt.Errorf("%d of its experts are not local", n)
	}
	return nil
}

// Err is the first failure of a fetch since the last Reset, or nil. After the end
// of a step nothing of the step can still fail.
func (s *Store) Err() error {
	s.mu.Lock()
	defer s.mu.Unlock()
	if err := s.failure(); err != nil {
		return fmt.Errorf("experts: %w", err)
	}
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

// Reset makes the store usable again after a step was dropped: it ends the use of
// all layers, waits for the copies under way or cancels them, and forgets the
// experts that did not arrive whole. Copies in peers' memory that could not be read
// are given back, and a peer that was lost is left out; the next try, from its Begin
// on, takes everything from the host, so that however many copies on peers are bad, one
// more try is enough. The compute stream has been recovered; nothing of the step runs. An error means
// that ctx was done, and that Reset may be called again.
func (s *Store) Reset(ctx context.Context) error {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.cancel()
	for _, f := range s.fetches {
		if f.ticket == nil {
			continue
		}
		if err := f.ticket.Wait(ctx); !f.ticket.Ended() {
			return fmt.Errorf("experts: reset: %w", err)
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
		l.endUse()
		l.listAll()
	}
	lost := s.dropFailed()
	if s.mistrust > 0 {
		s.mistrust = 2 // the Begin of the step's next try, and that of the step after it
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
		s.log.Warn("experts were reset", "error", s.err, "slots_lost", lost)
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
		if f.from != device.Host && f.ticket != nil {
			s.unreadable(f)
		}
	}
	return lost
}

// unreadable gives back the peer copies that a failed fetch has read.
func (s *Store) unreadable(f *fetch) {
	s.peers.mu.Lock()
	defer s.peers.mu.Unlock()
	err := f.ticket.Err()
	if errors.Is(err, transfer.ErrCanceled) || errors.Is(err, transfer.ErrAfter) {
		return
	}
	s.mistrust = max(s.mistrust, 1)
	s.failed(f.from, err)
	for _, l := range f.lent {
		if s.peers.of(l.id) != l {
			continue // it was revoked meanwhile, or belongs to two fetches
		}
		if err := s.giveBack(l, "copy failed"); err != nil {
			s.log.Error("experts: memory of a peer is not given back", "err", err)
		}
	}
}

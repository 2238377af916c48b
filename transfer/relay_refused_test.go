package transfer_test

import (
	"bytes"
	"errors"
	"fmt"
	"math/rand/v2"
	"strings"
	"sync"
	"testing"

	"github.com/moeserve/moeserve/device"
	"github.com/moeserve/moeserve/device/emulated"
	"github.com/moeserve/moeserve/transfer"
)

// refusing is a machine some of whose streams refuse what is enqueued.
type refusing struct {
	device.Machine
	mu sync.Mutex
	// refuses reports whether a stream refuses an operation, "copy" or "record", or cannot be made, "new".
	refuses  func(stream, op string) bool
	refusals int
}

var errRefused = errors.New("refused by the test")

func (m *refusing) NewStream(space device.Space, o device.StreamOptions) (device.Stream, error) {
	if err := m.refuse(o.Name, "new"); err != nil {
		return nil, err
	}
	s, err := m.Machine.NewStream(space, o)
	if b, ok := s.(device.BatchCopier); ok && space != device.Host {
		return &refusingStream{b, m}, err
	}
	return s, err
}

func (m *refusing) refuse(stream, op string) error {
	m.mu.Lock()
	defer m.mu.Unlock()
	if m.refuses == nil || !m.refuses(stream, op) {
		return nil
	}
	m.refusals++
	return fmt.Errorf("%s on %s: %w", op, stream, errRefused)
}

// set has the machine refuse what f says.
func (m *refusing) set(f func(stream, op string) bool) {
	m.mu.Lock()
	defer m.mu.Unlock()
	m.refuses = f
}

type refusingStream struct {
	device.BatchCopier
	m *refusing
}

func (s *refusingStream) Copy(dst, src device.Range) error {
	if err := s.m.refuse(s.Name(), "copy"); err != nil {
		return err
	}
	return s.BatchCopier.Copy(dst, src)
}

func (s *refusingStream) CopyBatch(dst, src []device.Range) error {
	if err := s.m.refuse(s.Name(), "copy"); err != nil {
		return err
	}
	return s.BatchCopier.CopyBatch(dst, src)
}

func (s *refusingStream) Record(e device.Event) error {
	if err := s.m.refuse(s.Name(), "record"); err != nil {
		return err
	}
	return s.BatchCopier.Record(e)
}

// newRefusingRig is newRig with an engine on a refusing machine.
func newRefusingRig(t *testing.T, mo emulated.Options, o transfer.Options) (*rig, *refusing) {
	t.Helper()
	r := newRig(t, mo, o)
	m := &refusing{Machine: r.m}
	o.Machine = m
	e, err := transfer.New(o)
	if err != nil {
		t.Fatal(err)
	}
	r.engine = e
	t.Cleanup(func() {
		if err := e.Close(); err != nil && !errors.Is(err, device.ErrClosed) {
			t.Error(err)
		}
	})
	return r, m
}

// TestRelayRefused: what a relay's link or hop refuses, before it has enqueued anything of the chunk,
// between two of its pieces, or behind them, the GPU's own link copies; the second refusal retires the
// relay. What the own link refuses fails the copy. Nothing stays in the relay's buffers.
func TestRelayRefused(t *testing.T) {
	machines(t, func(t *testing.T, o emulated.Options) {
		for _, stream := range []string{
			"copy host to gpu1", "relay gpu1 to gpu0", "relay gpu0 to gpu1", "copy gpu1 to host", // relayed
			"copy host to gpu0", "copy gpu0 to host",
		} {
			for _, refused := range []string{"copy", "record"} {
				for _, skip := range []int{0, 1} {
					for _, times := range []int{1, 1000} {
						o.NoBatches = skip == 1 // the second piece of a chunk
						r, m := newRefusingRig(t, o, small())
						r.relay(device.HBM(1), 3, 64)
						const pieces, n = 40, 64
						src, dst := r.filled(pieces*n, 1), r.alloc(device.HBM(0), pieces*n)
						if strings.HasSuffix(stream, "host") || strings.Contains(stream, "gpu0 to") {
							r.wait(r.submit(r.shuffled(dst, src, pieces, n, 1)))
							src, dst = dst, r.alloc(device.Host, pieces*n)
						}
						passed, left := 0, times
						m.set(func(s, op string) bool {
							if s != stream || op != refused {
								return false
							}
							if passed++; passed <= skip || left == 0 {
								return false
							}
							left--
							return true
						})
						ticket := r.submit(r.shuffled(dst, src, pieces, n, 1))
						err := ticket.Wait(t.Context())
						own := stream == "copy host to gpu0" || stream == "copy gpu0 to host"
						name := fmt.Sprintf("%s of %q refused %d times after %d", refused, stream, times, skip)
						if m.refusals == 0 {
							t.Fatalf("%s: nothing was refused", name)
						}
						switch {
						case own && !errors.Is(err, errRefused):
							t.Errorf("%s: %v", name, err)
						case !own && err != nil:
							t.Errorf("%s: %v", name, err)
						case !own:
							r.equal(dst, src)
						}
						if !own {
							pair := device.Pair{From: device.Host, To: device.HBM(1)}
							if strings.Contains(stream, "gpu0 to") || strings.HasSuffix(stream, "host") {
								pair = device.Pair{From: device.HBM(1), To: device.Host}
							}
							// Several that are refused before the link is recovered count as one failure.
							if s := r.engine.Path(pair); s.Retries < 1 || s.Retired && times == 1 || !s.Retired && s.Retries > 3 {
								t.Errorf("%s: %+v", name, s)
							}
						}
						m.set(nil)
						end, err := r.engine.RemoveRelay(device.HBM(1))
						if err == nil {
							err = end.Wait(t.Context())
						}
						if err != nil {
							t.Errorf("%s: removing the relay: %v", name, err)
						}
						r.wait(r.submit(r.shuffled(dst, src, pieces, n, 1)))
						r.equal(dst, src)
					}
				}
			}
		}
	})
}

// TestRelayRefusals: random copies while streams refuse chunks now and then, others fail, and relays
// come and go, and the engine is closed at the end of them, or in the middle.
func TestRelayRefusals(t *testing.T) {
	const n = 12
	var relayed, refusals int64
	for seed := range uint64(80) {
		rng := rand.New(rand.NewPCG(seed, 5))
		o := emulated.Options{Virtual: true, Schedule: emulated.Schedule(seed % 3), Seed: seed}
		if seed%2 == 0 {
			o.HostLink, o.PeerLink = emulated.Link{BytesPerSecond: 1e6}, emulated.Link{BytesPerSecond: 5e6}
		}
		o.NoBatches = seed%5 == 0
		if seed%8 == 7 {
			o = emulated.Options{Seed: seed}
		}
		options := small()
		options.Timed = seed%7 == 0
		own, closes := seed%4 == 3, seed%5 == 1
		r, m := newRefusingRig(t, o, options)
		var src, dst []device.Memory
		for i := range n {
			size := 16 * (1 + rng.Int64N(200))
			s, d := r.filled(size, byte(i)), r.alloc(device.HBM(0), size)
			other := r.filled(size, 0xff)
			if i%2 == 0 {
				r.wait(r.submit(r.down(d, other, transfer.Demand)))
			} else {
				r.wait(r.submit(r.down(d, s, transfer.Demand)))
				s, d = d, other
			}
			src, dst = append(src, s), append(dst, d)
		}
		relays := map[int]transfer.Relay{}
		for gpu := 1; gpu < 3; gpu++ {
			relays[gpu] = r.relay(device.HBM(gpu), 1+rng.IntN(3), 80)
		}
		faulty := func(stream string) bool {
			return strings.HasPrefix(stream, "relay") || strings.HasPrefix(stream, "copy ") && (own || !strings.Contains(stream, "gpu0"))
		}
		chance := rand.New(rand.NewPCG(seed, 6))
		m.set(func(stream, op string) bool { return op != "new" && faulty(stream) && chance.IntN(30) == 0 })
		r.m.Inject(&emulated.Fault{Kind: emulated.FailCopy, Times: -1, Chance: 0.02, Match: func(p emulated.Point) bool { return faulty(p.Stream) }})
		var tickets []*transfer.Ticket
		for i := range n {
			tickets = append(tickets, r.submit(r.shuffled(dst[i], src[i], int(dst[i].Bytes())/16, 16, 1)))
			for range rng.IntN(20) {
				_ = r.m.Yield(t.Context(), 0)
			}
			if rng.IntN(3) == 0 {
				gpu := 1 + rng.IntN(2)
				end, err := r.engine.RemoveRelay(device.HBM(gpu))
				if err == nil {
					err = end.Wait(t.Context())
				}
				if err == nil {
					err = r.engine.AddRelay(relays[gpu])
				}
				if err != nil {
					t.Fatal(err)
				}
			}
		}
		if closes {
			for _, s := range r.engine.Stats() {
				relayed += s.RelayedBytes
			}
			if err := r.engine.Close(); err != nil {
				t.Error(err)
			}
		}
		for i, ticket := range tickets {
			err := ticket.Wait(t.Context())
			switch {
			case err == nil:
				r.equal(dst[i], src[i])
			case closes && errors.Is(err, device.ErrClosed):
			case !own || !errors.Is(err, device.ErrCopyFailed) && !errors.Is(err, errRefused):
				t.Errorf("seed %d, copy %d: %v", seed, i, err)
			}
			if landed := ticket.Landed(); err != nil && !bytes.Equal(r.content(dst[i])[:landed], r.content(src[i])[:landed]) {
				t.Errorf("seed %d, copy %d: %d bytes are said to have landed that have not", seed, i, landed)
			}
		}
		refusals += int64(m.refusals)
		if closes {
			continue
		}
		for gpu := 1; gpu < 3; gpu++ {
			end, err := r.engine.RemoveRelay(device.HBM(gpu))
			if err == nil {
				err = end.Wait(t.Context())
			}
			if err != nil {
				t.Errorf("seed %d: %v", seed, err)
			}
		}
		for _, s := range r.engine.Stats() {
			relayed += s.RelayedBytes
		}
	}
	if relayed < 100_000 || refusals < 100 {
		t.Errorf("%d bytes were relayed, and %d operations refused: the test shows nothing", relayed, refusals)
	}
}

// TestRelayNotAdded: when a relay cannot be added, nothing is copied through its buffers, which may be freed
// at once, and it can be added later.
func TestRelayNotAdded(t *testing.T) {
	for _, refused := range []string{"copy host to gpu1", "copy gpu1 to host", "relay gpu1 to gpu0", "relay gpu1 to gpu2", "relay gpu0 to gpu1"} {
		link := emulated.Link{BytesPerSecond: 1e6}
		r, m := newRefusingRig(t, emulated.Options{Virtual: true, HostLink: link, PeerLink: link}, small())
		var tickets []*transfer.Ticket
		var src, dst []device.Memory
		for gpu := range 3 { // gpu1, which relays, has links of its own only in some cases
			if gpu == 1 && strings.HasPrefix(refused, "copy") {
				continue
			}
			in, out := r.filled(5000, byte(gpu)), r.alloc(device.HBM(gpu), 5000)
			r.wait(r.submit(r.down(out, in, transfer.Demand)))
			src, dst = append(src, in, out), append(dst, r.alloc(device.HBM(gpu), 5000), r.alloc(device.Host, 5000))
		}
		for i := range src {
			tickets = append(tickets, r.submit(r.down(dst[i], src[i], transfer.Demand)))
		}
		memory, err := r.m.Alloc(device.HBM(1), 4*64, "buffers")
		if err != nil {
			t.Fatal(err)
		}
		relay := transfer.Relay{GPU: device.HBM(1), In: []device.Region{memory.Region(0, 64), memory.Region(64, 64)}, Out: []device.Region{memory.Region(128, 64), memory.Region(192, 64)}}
		m.set(func(stream, op string) bool { return stream == refused && op == "new" })
		if err := r.engine.AddRelay(relay); !errors.Is(err, errRefused) {
			t.Fatalf("%s: %v", refused, err)
		}
		if _, err := r.engine.RemoveRelay(device.HBM(1)); err == nil {
			t.Errorf("%s: a relay is removed that was not added", refused)
		}
		if err := memory.Free(); err != nil {
			t.Error(err)
		}
		m.set(nil)
		for i, ticket := range tickets {
			r.wait(ticket)
			r.equal(dst[i], src[i])
		}
		if in, out := r.path(device.Host, device.HBM(1)), r.path(device.HBM(1), device.Host); in.RelayedCopies+out.RelayedCopies+in.Retries+out.Retries > 0 {
			t.Errorf("%s: relayed in %+v, out %+v", refused, in, out)
		}
		r.relay(device.HBM(1), 2, 64)
		r.wait(r.submit(r.down(dst[0], src[0], transfer.Demand)))
		r.equal(dst[0], src[0])
		if in := r.path(device.Host, device.HBM(1)); in.RelayedCopies == 0 {
			t.Errorf("%s: nothing is relayed after it was added", refused)
		}
	}
}

// TestNewLinkBesideLostRelay: the first copy on a link does not fail because a relay was lost, which would
// have carried some of it.
func TestNewLinkBesideLostRelay(t *testing.T) {
	for _, removed := range []bool{false, true} {
		r := newRig(t, emulated.Options{Virtual: true}, small())
		r.relay(device.HBM(1), 2, 64)
		src, dst, back := r.filled(3000, 1), r.alloc(device.HBM(0), 3000), r.alloc(device.Host, 3000)
		if removed {
			if _, err := r.engine.RemoveRelay(device.HBM(1)); err != nil {
				t.Fatal(err)
			}
		}
		if err := r.m.Lose(1); err != nil {
			t.Fatal(err)
		}
		r.wait(r.submit(r.down(dst, src, transfer.Demand)))
		r.wait(r.submit(r.down(back, dst, transfer.Demand)))
		r.equal(back, src)
	}
}

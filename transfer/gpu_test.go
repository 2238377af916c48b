//go:build cuda

package transfer_test

import (
	"bytes"
	"encoding/binary"
	"flag"
	"fmt"
	"math/rand/v2"
	"syscall"
	"testing"
	"time"

	"github.com/moeserve/moeserve/device"
	"github.com/moeserve/moeserve/device/cuda"
	"github.com/moeserve/moeserve/transfer"
)

var (
	driver = flag.String("driver", "", "the CUDA driver's library, for a stand-in")
	mib    = flag.Int64("mib", 512, "size of the largest copies, in MiB")
)

// relayBuffer is the size of a relay's buffer, in bytes.
const relayBuffer = 8 << 20

// gpuRig is a machine of GPUs with an engine for which all relay, and its buffers.
type gpuRig struct {
	*testing.T
	m      device.Machine
	engine *transfer.Engine
	gpus   int
	relays []transfer.Relay
	// plain copies without the engine.
	plain device.Stream
}

func newGPURig(t *testing.T) *gpuRig {
	t.Helper()
	r := &gpuRig{T: t}
	var err error
	for _, r.gpus = range []int{8, 4, 2} {
		o := cuda.Options{Driver: *driver}
		for i := range r.gpus {
			o.GPUs = append(o.GPUs, i)
		}
		if r.m, err = cuda.Open(o); err == nil {
			break
		}
	}
	if err != nil {
		t.Skipf("needs two GPUs: %v", err)
	}
	t.Cleanup(func() { r.ok(r.m.Close()) })
	r.engine, err = transfer.New(transfer.Options{Machine: r.m})
	r.ok(err)
	t.Cleanup(func() { r.ok(r.engine.Close()) })
	for g := range r.gpus {
		memory := r.alloc(device.HBM(g), 6*relayBuffer)
		relay := transfer.Relay{GPU: device.HBM(g)}
		for i := range int64(3) {
			relay.In = append(relay.In, memory.Region(i*relayBuffer, relayBuffer))
			relay.Out = append(relay.Out, memory.Region((3+i)*relayBuffer, relayBuffer))
		}
		r.relays = append(r.relays, relay)
		r.ok(r.engine.AddRelay(relay))
	}
	r.plain, err = r.m.NewStream(device.HBM(0), device.StreamOptions{Name: "plain"})
	r.ok(err)
	t.Cleanup(func() { r.ok(r.plain.Close()) })
	return r
}

func (r *gpuRig) ok(err error) {
	r.Helper()
	if err != nil {
		r.Fatal(err)
	}
}

func (r *gpuRig) alloc(s device.Space, n int64) device.Memory {
	r.Helper()
	m, err := r.m.Alloc(s, n, "test")
	r.ok(err)
	r.Cleanup(func() { r.ok(m.Free()) })
	return m
}

// filled is host memory with random bytes.
func (r *gpuRig) filled(n int64, seed uint64) device.Memory {
	m := r.alloc(device.Host, n)
	rng := rand.NewPCG(seed, 1)
	b := m.Write(0, n)
	for ; len(b) >= 8; b = b[8:] {
		binary.NativeEndian.PutUint64(b, rng.Uint64())
	}
	for i := range b {
		b[i] = byte(rng.Uint64())
	}
	return m
}

// request copies all of src.
func (r *gpuRig) request(dst, src device.Memory) transfer.Request {
	f, err := r.m.NewFence("a copy")
	r.ok(err)
	done := device.Point{Fence: f, Value: f.Value() + 1}
	return transfer.Request{Src: src.Region(0, src.Bytes()), Dst: dst.Region(0, src.Bytes()), Priority: transfer.Demand, Done: done}
}

func (r *gpuRig) submit(q transfer.Request) *transfer.Ticket {
	r.Helper()
	t, err := r.engine.Submit(q)
	r.ok(err)
	return t
}

// copyPlain copies without the engine.
func (r *gpuRig) copyPlain(dst, src device.Memory, n int64) {
	r.Helper()
	r.ok(r.plain.Copy(dst.Range(0, n), src.Range(0, n)))
	r.ok(r.plain.Synchronize(r.Context()))
}

// clear overwrites memory of a GPU with zeros.
func (r *gpuRig) clear(m device.Memory, zeros device.Memory) { r.copyPlain(m, zeros, m.Bytes()) }

func (r *gpuRig) same(what string, got, want device.Memory, n int64) {
	r.Helper()
	if g, w := got.Read(0, n), want.Read(0, n); !bytes.Equal(g, w) {
		at := int64(0)
		for g[at] == w[at] {
			at++
		}
		r.Errorf("%s: %d bytes differ from byte %d on: %d, want %d", what, n, at, g[at], w[at])
	}
}

func (r *gpuRig) relayed() (n int64) {
	for _, s := range r.engine.Stats() {
		n += s.RelayedBytes
	}
	return n
}

// TestGPUMultipath: every byte of copies between the host and each GPU arrives, in one piece or in
// thousands, with all other GPUs as relays.
func TestGPUMultipath(t *testing.T) {
	r := newGPURig(t)
	most := *mib << 20
	src, back, zeros := r.filled(most, 1), r.alloc(device.Host, most), r.alloc(device.Host, most)
	clear(zeros.Write(0, most))
	for g := range r.gpus {
		dst := r.alloc(device.HBM(g), most)
		for _, n := range []int64{1, 1 << 20, 12 << 20, 64<<20 + 13, most} {
			if n > most {
				continue
			}
			before := r.relayed()
			r.clear(dst, zeros)
			q := r.request(dst, src)
			q.Src, q.Dst = src.Region(0, n), dst.Region(0, n)
			r.ok(r.submit(q).Wait(r.Context()))
			r.copyPlain(back, dst, n)
			r.same(fmt.Sprintf("gpu%d, from the host", g), back, src, n)
			clear(back.Write(0, n))
			q = r.request(back, dst)
			q.Src, q.Dst = dst.Region(0, n), back.Region(0, n)
			r.ok(r.submit(q).Wait(r.Context()))
			r.same(fmt.Sprintf("gpu%d, to the host", g), back, src, n)
			if got := r.relayed() - before; (got > 0) != (n >= 12<<20) {
				t.Errorf("gpu%d: of %d bytes relays carried %d", g, n, got)
			}
		}
		for _, piece := range []int64{4 << 10, 64<<10 + 16, 3<<20 + 1} {
			n := min(most, 4000*piece) / piece
			r.clear(dst, zeros)
			scatter, gather := r.request(dst, src), r.request(back, dst)
			scatter.Src, scatter.Dst, gather.Src, gather.Dst = device.Region{}, device.Region{}, device.Region{}, device.Region{}
			for i := range n {
				at := i * 7919 % n // a permutation where n is no multiple of this prime
				scatter.Pieces = append(scatter.Pieces, transfer.Piece{Src: src.Region(i*piece, piece), Dst: dst.Region(at*piece, piece)})
				gather.Pieces = append(gather.Pieces, transfer.Piece{Src: dst.Region(at*piece, piece), Dst: back.Region(i*piece, piece)})
			}
			gather.After = []device.Point{scatter.Done}
			clear(back.Write(0, n*piece))
			first, second := r.submit(scatter), r.submit(gather)
			r.ok(first.Wait(r.Context()))
			r.ok(second.Wait(r.Context()))
			r.same(fmt.Sprintf("gpu%d, pieces of %d bytes", g, piece), back, src, n*piece)
		}
	}
	for _, s := range r.engine.Stats() {
		if s.Retired || s.Retries > 0 {
			t.Errorf("%+v", s)
		}
	}
}

// TestGPURelayRemoved: relays are removed and overwritten in the middle of copies in both directions.
func TestGPURelayRemoved(t *testing.T) {
	r := newGPURig(t)
	n := *mib << 20 / 2
	src, back := r.filled(n, 2), r.alloc(device.Host, n)
	in, out := r.alloc(device.HBM(0), n), r.alloc(device.HBM(0), n)
	r.copyPlain(out, src, n)
	check, garbage := r.alloc(device.Host, n), r.filled(relayBuffer, 3)
	rng := rand.New(rand.NewPCG(4, 4))
	for round := range 16 {
		clear(back.Write(0, n))
		r.copyPlain(in, garbage, garbage.Bytes())
		down, up := r.submit(r.request(in, src)), r.submit(r.request(back, out))
		for range 3 {
			time.Sleep(time.Duration(rng.IntN(2000)) * time.Microsecond)
			gpu := 1 + rng.IntN(r.gpus-1)
			end, err := r.engine.RemoveRelay(device.HBM(gpu))
			r.ok(err)
			r.ok(end.Wait(r.Context()))
			for _, b := range append(append([]device.Region{}, r.relays[gpu].In...), r.relays[gpu].Out...) {
				r.ok(r.plain.Copy(b.Range, garbage.Range(0, b.Bytes)))
			}
			r.ok(r.plain.Synchronize(r.Context()))
			r.ok(r.engine.AddRelay(r.relays[gpu]))
		}
		r.ok(down.Wait(r.Context()))
		r.ok(up.Wait(r.Context()))
		r.copyPlain(check, in, n)
		r.same(fmt.Sprintf("round %d, from the host", round), check, src, n)
		r.same(fmt.Sprintf("round %d, to the host", round), back, src, n)
	}
	if r.relayed() == 0 {
		t.Error("nothing was relayed")
	}
}

// TestGPUTogether: all GPUs copy in both directions at once, large and small, and each relays for
// all others.
func TestGPUTogether(t *testing.T) {
	r := newGPURig(t)
	n := *mib << 20 / 8
	src := r.filled(n, 5)
	type copied struct {
		in, back device.Memory
		tickets  []*transfer.Ticket
	}
	var all []copied
	for g := range r.gpus {
		all = append(all, copied{in: r.alloc(device.HBM(g), n), back: r.alloc(device.Host, n)})
	}
	rng := rand.New(rand.NewPCG(6, 6))
	for range 8 {
		for g := range all {
			c := &all[g]
			clear(c.back.Write(0, n))
			down := r.request(c.in, src)
			down.Priority = transfer.Priority(rng.IntN(5))
			up := r.request(c.back, c.in)
			up.After, up.Priority = []device.Point{down.Done}, transfer.Priority(rng.IntN(5))
			c.tickets = []*transfer.Ticket{r.submit(down), r.submit(up)}
		}
		for g, c := range all {
			for _, ticket := range c.tickets {
				r.ok(ticket.Wait(r.Context()))
			}
			r.same(fmt.Sprintf("gpu%d", g), c.back, src, n)
		}
	}
}

// cpuTime is the processor time that the process has used.
func cpuTime() time.Duration {
	var u syscall.Rusage
	_ = syscall.Getrusage(syscall.RUSAGE_SELF, &u) // which does not fail
	return time.Duration(u.Utime.Nano() + u.Stime.Nano())
}

// TestGPUMultipathRate prints rates and processor time by the number of relays. With one relay
// a copy is at least 1.6 times as fast as with none, and the host needs at most one core.
func TestGPUMultipathRate(t *testing.T) {
	if *driver != "" {
		t.Skip("a stand-in has no rates")
	}
	r := newGPURig(t)
	n := *mib << 20
	src, dst := r.filled(n, 7), r.alloc(device.HBM(0), n)
	for g := 1; g < r.gpus; g++ {
		end, err := r.engine.RemoveRelay(device.HBM(g))
		r.ok(err)
		r.ok(end.Wait(r.Context()))
	}
	for _, out := range []bool{false, true} {
		from, to, way := src, dst, "from the host"
		if out {
			from, to, way = dst, src, "to the host"
		}
		var alone float64
		for relays := range r.gpus {
			if relays > 0 {
				r.ok(r.engine.AddRelay(r.relays[relays]))
			}
			r.ok(r.submit(r.request(to, from)).Wait(r.Context()))
			const rounds = 20
			began, used := time.Now(), cpuTime()
			for range rounds {
				r.ok(r.submit(r.request(to, from)).Wait(r.Context()))
			}
			took, work := time.Since(began), cpuTime()-used
			rate := float64(rounds*n) / took.Seconds()
			t.Logf("%s, %d relays: %.1f GB/s, %.2f cores", way, relays, rate/1e9, work.Seconds()/took.Seconds())
			if relays == 0 {
				alone = rate
			}
			if relays == 1 && rate < 1.6*alone {
				t.Errorf("%s: %.1f GB/s with a relay, %.1f without", way, rate/1e9, alone/1e9)
			}
			// The caller waits on another core than the engine's.
			if work > took*21/10 {
				t.Errorf("%s, %d relays: %v of processor time in %v", way, relays, work, took)
			}
		}
		for g := 1; g < r.gpus; g++ {
			end, err := r.engine.RemoveRelay(device.HBM(g))
			r.ok(err)
			r.ok(end.Wait(r.Context()))
		}
	}
}

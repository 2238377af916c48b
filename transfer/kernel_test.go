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
	"github.com/moeserve/moeserve/kernels"
	"github.com/moeserve/moeserve/kernels/cpu"
	"github.com/moeserve/moeserve/transfer"
)

// copier launches the operation kernels.CopyBlocks of emulated devices.
type copier struct {
	backend *cpu.Backend
	mu      sync.Mutex
	blocks  []transfer.Blocks
	// fail is the number of launches until one that fails on the device, refuse until one that
	// is refused.
	fail, refuse int
}

var errKernel = errors.New("the kernel fails")

func (c *copier) CopyBlocks(s device.Stream, b *transfer.Blocks) error {
	c.mu.Lock()
	defer c.mu.Unlock()
	c.blocks = append(c.blocks, *b)
	if c.refuse--; c.refuse == 0 {
		return errKernel
	}
	if c.fail--; c.fail == 0 {
		return s.(device.Executor).Execute(device.Work{Name: "fail", Run: func(device.Access) error { return errKernel }})
	}
	return c.backend.Enqueue(s, &kernels.CopyBlocks{
		Src: kernels.New(b.Src, kernels.U64, b.N), Dst: kernels.New(b.Dst, kernels.U64, b.N), BlockBytes: b.Bytes, ThreadBlocks: b.ThreadBlocks,
	})
}

// launches is the number of kernels so far.
func (c *copier) launches() int {
	c.mu.Lock()
	defer c.mu.Unlock()
	return len(c.blocks)
}

// kernel is one on GPU 0 for pieces below so many bytes, from and to the host and GPU 1.
func (c *copier) kernel(t *testing.T, below int64) *transfer.Kernel {
	c.backend = cpu.New(cpu.Options{Threads: 1})
	t.Cleanup(func() {
		if err := c.backend.Close(); err != nil {
			t.Error(err)
		}
	})
	k := &transfer.Kernel{Copier: c, Space: device.HBM(0), Paths: map[device.Pair]transfer.KernelPath{}}
	for _, other := range []device.Space{device.Host, device.HBM(1)} {
		k.Paths[device.Pair{From: other, To: k.Space}] = transfer.KernelPath{Below: below, ThreadBlocks: 3}
		k.Paths[device.Pair{From: k.Space, To: other}] = transfer.KernelPath{Below: below, ThreadBlocks: 3}
	}
	return k
}

// TestKernelIsForKV: the kernel copies many small pieces of KV blocks and migrations, and
// nothing else.
func TestKernelIsForKV(t *testing.T) {
	c := &copier{}
	r := newRig(t, emulated.Options{Virtual: true}, transfer.Options{Kernel: c.kernel(t, 1024)})
	const total = 64 << 10
	src, dst := r.filled(total, 1), r.alloc(device.HBM(0), total)
	r.wait(r.submit(r.down(dst, r.filled(total, 2), transfer.Demand)))
	for _, x := range []struct {
		name   string
		p      transfer.Priority
		pieces int
		n      int64
		odd    int64
		want   int
	}{
		{"loads", transfer.KVLoad, 60, 512, 0, 1},
		{"stores", transfer.KVStore, 60, 512, 0, 1},
		{"migrations", transfer.Rebalance, 60, 512, 0, 1},
		{"prefetches", transfer.Prefetch, 60, 512, 0, 0},
		{"demanded", transfer.Demand, 60, 512, 0, 0},
		{"large pieces", transfer.KVLoad, 60, 1024, 0, 0},
		{"one piece", transfer.KVLoad, 1, 512, 0, 0},
		{"not in words", transfer.KVLoad, 60, 512, 8, 0},
		{"more than a launch has", transfer.KVLoad, 1000, 32, 0, 2},
	} {
		before := c.launches()
		var q transfer.Request
		q.Priority, q.Done = x.p, r.point()
		for i := range int64(x.pieces) {
			j := int64(x.pieces) - 1 - i
			q.Pieces = append(q.Pieces, transfer.Piece{Src: src.Region(i*x.n+x.odd, x.n), Dst: dst.Region(j*x.n+x.odd, x.n)})
		}
		r.wait(r.submit(q))
		if got := c.launches() - before; got != x.want {
			t.Errorf("%s: %d launches, want %d", x.name, got, x.want)
		}
		got, want := r.content(dst), src.Read(0, total)
		for i, p := range q.Pieces {
			if to := int(p.Dst.Addr - dst.Range(0, 1).Addr); !bytes.Equal(got[to:][:x.n], want[i*int(x.n)+int(x.odd):][:x.n]) {
				t.Fatalf("%s: piece %d has not arrived", x.name, i)
			}
		}
	}
	for _, b := range c.blocks {
		if b.ThreadBlocks != 3 || b.N > 512 {
			t.Errorf("a launch of %+v", b)
		}
	}
}

// TestKernelUnits: pieces of several sizes are copied in blocks of their common divisor.
func TestKernelUnits(t *testing.T) {
	c := &copier{}
	r := newRig(t, emulated.Options{Virtual: true}, transfer.Options{Kernel: c.kernel(t, 1024)})
	src, dst := r.filled(8192, 1), r.alloc(device.HBM(0), 8192)
	r.wait(r.submit(r.down(dst, r.filled(8192, 2), transfer.Demand)))
	q := transfer.Request{Priority: transfer.KVLoad, Done: r.point()}
	for i, n := range []int64{96, 144, 48, 96, 240} {
		q.Pieces = append(q.Pieces, transfer.Piece{Src: src.Region(int64(i)*256, n), Dst: dst.Region(int64(i)*512, n)})
	}
	r.wait(r.submit(q))
	if len(c.blocks) != 1 || c.blocks[0].Bytes != 48 || c.blocks[0].N != (96+144+48+96+240)/48 {
		t.Errorf("launches of %+v", c.blocks)
	}
	for i, p := range q.Pieces {
		if got := r.content(dst)[512*i:][:p.Dst.Bytes]; !bytes.Equal(got, src.Read(int64(i)*256, p.Src.Bytes)) {
			t.Errorf("piece %d has not arrived", i)
		}
	}
}

// TestKernelFails: a kernel that fails on the device is launched again, once; one that is
// refused fails its request; others are not affected, whichever stream they are on.
func TestKernelFails(t *testing.T) {
	machines(t, func(t *testing.T, o emulated.Options) {
		for nth := 1; nth <= 4; nth++ {
			for _, refused := range []bool{false, true} {
				c := &copier{}
				r := newRig(t, o, transfer.Options{Kernel: c.kernel(t, 100), ChunkBytes: 2000})
				if refused {
					c.refuse = nth
				} else {
					c.fail = nth
				}
				var tickets []*transfer.Ticket
				var src, dst []device.Memory
				for i := range 8 { // by turns on the kernel's stream and the other one
					size := int64(96)
					if i%2 == 1 {
						size = 112
					}
					src, dst = append(src, r.filled(20*size, byte(i))), append(dst, r.alloc(device.HBM(0), 20*size))
					q := r.scattered(dst[i], src[i], 20, size, 1)
					q.Priority = transfer.KVLoad
					tickets = append(tickets, r.submit(q))
				}
				failed := 0
				for i, ticket := range tickets {
					err := ticket.Wait(t.Context())
					if err != nil {
						if failed++; !errors.Is(err, errKernel) {
							t.Errorf("launch %d fails: %v", nth, err)
						}
						continue
					}
					got, want, n := r.content(dst[i]), src[i].Read(0, src[i].Bytes()), int(src[i].Bytes())/20
					for j := range 20 {
						if !bytes.Equal(got[(19-j)*n:][:n], want[j*n:][:n]) {
							t.Fatalf("launch %d fails (refused: %t): piece %d of copy %d has not arrived", nth, refused, j, i)
						}
					}
				}
				s := r.engine.Stats()[0]
				if want := map[bool]int{true: 1, false: 0}[refused]; failed != want || s.Retries != int64(1-want) {
					t.Errorf("launch %d fails (refused: %t): %d copies have failed, %+v", nth, refused, failed, s)
				}
			}
		}
	})
}

// TestMethodsChangeNothing: whether pieces are copied one by one, in batches or by kernels, and
// whatever fails once, the same requests leave the same memory. Requests that touch the same
// pieces are ordered by After; the rest are free.
func TestMethodsChangeNothing(t *testing.T) {
	const pieces, size, requests = 24, 96, 25
	for seed := range uint64(5) {
		var want [][]byte
		for variant := range uint64(12) {
			rng := rand.New(rand.NewPCG(seed, 0))        // the requests: the same in every variant
			free := rand.New(rand.NewPCG(seed, variant)) // what may differ
			mo := emulated.Options{Virtual: true, Schedule: emulated.Schedule(variant % 3), Seed: variant, NoBatches: variant%4 == 1}
			if variant%6 == 5 {
				mo = emulated.Options{}
			}
			c := &copier{}
			o := transfer.Options{ChunkBytes: 200 + free.Int64N(3000), Depth: 1 + free.IntN(4), Timed: variant%5 == 4}
			if variant%4 >= 2 {
				o.Kernel = c.kernel(t, 1+free.Int64N(3*size))
			}
			r := newRig(t, mo, o)
			if variant%2 == 1 {
				r.m.Inject(&emulated.Fault{Kind: emulated.FailCopy, Skip: free.IntN(200), Match: func(p emulated.Point) bool { return strings.HasPrefix(p.Stream, "copy") }})
			} else {
				c.fail = 1 + free.IntN(20)
			}
			spaces := []device.Space{device.Host, device.HBM(0), device.HBM(1)}
			var memory []device.Memory
			// last has the points that a memory's next user waits for.
			last := make([]device.Point, len(spaces))
			start := r.filled(pieces*size, byte(seed))
			for i, s := range spaces {
				memory = append(memory, r.alloc(s, pieces*size))
				q := r.down(memory[i], start, transfer.Rebalance)
				r.submit(q)
				last[i] = q.Done
			}
			var tickets []*transfer.Ticket
			for range requests {
				from := rng.IntN(3)
				to := (from + 1 + rng.IntN(2)) % 3
				q := transfer.Request{Priority: transfer.Priority(free.IntN(5)), After: []device.Point{last[from], last[to]}, Done: r.point()}
				reads, writes := rng.Perm(pieces), rng.Perm(pieces)
				for i := range 1 + rng.IntN(pieces) {
					n, off := int64(16*(1+rng.IntN(size/16))), int64(0)
					if rng.IntN(3) > 0 {
						n = size
					}
					q.Pieces = append(q.Pieces, transfer.Piece{
						Src: memory[from].Region(int64(reads[i])*size+off, n), Dst: memory[to].Region(int64(writes[i])*size, n),
					})
				}
				tickets = append(tickets, r.submit(q))
				last[from], last[to] = q.Done, q.Done
				if free.IntN(4) == 0 {
					tickets[free.IntN(len(tickets))].RaisePriority(transfer.Priority(free.IntN(5)))
				}
			}
			for _, ticket := range tickets {
				r.wait(ticket)
			}
			for i, m := range memory {
				got := bytes.Clone(r.content(m))
				if variant == 0 {
					want = append(want, got)
				} else if !bytes.Equal(got, want[i]) {
					t.Errorf("seed %d variant %d: %s differs from variant 0", seed, variant, spaces[i])
				}
			}
		}
	}
}

// TestKernelTables: an engine with a kernel allocates what it says, and others nothing.
func TestKernelTables(t *testing.T) {
	for _, depth := range []int{0, 1, 50} {
		c := &copier{}
		k := c.kernel(t, 100)
		r := newRig(t, emulated.Options{Virtual: true}, transfer.Options{Kernel: k, Depth: depth})
		for _, s := range []device.Space{device.Host, k.Space} {
			if u, err := r.m.Usage(s); err != nil || u.Allocated != k.TableBytes(depth) || u.Allocated == 0 {
				t.Errorf("%s: %d bytes allocated, %v, want %d", s, u.Allocated, err, k.TableBytes(depth))
			}
		}
		// All lanes have tables of their own.
		host, gpu, peer := r.filled(3200, 1), r.alloc(k.Space, 3200), r.alloc(device.HBM(1), 3200)
		back := r.alloc(device.Host, 3200)
		last := device.Point{}
		for _, hop := range [][2]device.Memory{{gpu, host}, {peer, gpu}, {gpu, peer}, {back, gpu}} {
			q := r.scattered(hop[0], hop[1], 100, 32, 1)
			if q.Priority = transfer.KVLoad; last.Fence != nil {
				q.After = []device.Point{last}
			}
			last = q.Done
			r.submit(q)
		}
		if err := last.Wait(t.Context()); err != nil {
			t.Fatal(err)
		}
		if !bytes.Equal(back.Read(0, 3200), host.Read(0, 3200)) || c.launches() != 4 {
			t.Errorf("%d launches; what comes back differs", c.launches())
		}
	}
	if u, err := newRig(t, emulated.Options{Virtual: true}, transfer.Options{}).m.Usage(device.Host); err != nil || u.Allocated != 0 {
		t.Errorf("without a kernel: %d bytes, %v", u.Allocated, err)
	}
}

// TestBadKernels: what a kernel cannot do is an error of New.
func TestBadKernels(t *testing.T) {
	m, err := emulated.New(emulated.Options{Virtual: true})
	if err != nil {
		t.Fatal(err)
	}
	path := func(from, to device.Space, p transfer.KernelPath) map[device.Pair]transfer.KernelPath {
		return map[device.Pair]transfer.KernelPath{{From: from, To: to}: p}
	}
	for want, k := range map[string]*transfer.Kernel{
		"Copier is not set":       {Space: device.HBM(0)},
		"from gpu1 to host":       {Copier: &copier{}, Space: device.HBM(0), Paths: path(device.HBM(1), device.Host, transfer.KernelPath{})},
		"from gpu0 to gpu0":       {Copier: &copier{}, Space: device.HBM(0), Paths: path(device.HBM(0), device.HBM(0), transfer.KernelPath{})},
		"a kernel below -1 bytes": {Copier: &copier{}, Space: device.HBM(0), Paths: path(device.Host, device.HBM(0), transfer.KernelPath{Below: -1})},
	} {
		if _, err := transfer.New(transfer.Options{Machine: m, Kernel: k}); err == nil || !strings.Contains(err.Error(), want) {
			t.Error(fmt.Errorf("want %q: %w", want, err))
		}
	}
	if err := m.Close(); err != nil {
		t.Error(err)
	}
}

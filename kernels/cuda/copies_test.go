//go:build cuda

package cuda

import (
	"encoding/binary"
	"errors"
	"fmt"
	"os"
	"slices"
	"sync"
	"testing"
	"time"

	"github.com/moeserve/moeserve/device"
	"github.com/moeserve/moeserve/kernels"
)

// copyResult is a way to copy scattered blocks, with rates in bytes/s: the median of samples,
// the lowest and the highest. Both directions at once count the bytes of both.
type copyResult struct {
	Path       string  `json:"path"`
	BlockBytes int64   `json:"block_bytes"`
	Blocks     int     `json:"blocks"`
	Method     string  `json:"method"`
	Samples    int     `json:"samples"`
	Rate       float64 `json:"bytes_per_s"`
	Lowest     float64 `json:"lowest_bytes_per_s"`
	Highest    float64 `json:"highest_bytes_per_s"`
	// Enqueue is the host's median time to enqueue all copies.
	Enqueue float64 `json:"enqueue_s"`
	Error   string  `json:"error,omitempty"`
}

// copyMethods are the ways to copy: with threadBlocks by CopyBlocks.
var copyMethods = []struct {
	name         string
	threadBlocks int
}{{"queued copies", 0}, {batchedCopies, 0}, {"kernel, 1", 1}, {"kernel, 4", 4}, {"kernel, 16", 16}, {"kernel, 64", 64}}

const batchedCopies = "batched copies"

// lane copies blocks from one pool to another: copy engines on dma, kernels on multiprocessors.
type lane struct {
	src, dst    device.Range
	dma, kernel device.Stream
	from, to    []device.Range
	// Tables of addresses: in pinned memory, and in that of the device.
	upload, uploaded device.Memory
	op               kernels.CopyBlocks
}

// copyPath is what is copied at once.
type copyPath struct {
	name  string
	lanes []*lane
}

// maxCopied is the number of blocks of one sample.
const maxCopied = 1000

// copyCase is a path, a size of blocks and a method, with its samples.
type copyCase struct {
	path    *copyPath
	bytes   int64
	method  int
	rates   [][]float64 // by round
	enqueue []float64
	err     error
}

// patternWord is the content of a source pool at an offset, a multiple of 8.
func patternWord(off int64) uint64 { return uint64(off/8+1) * 0x9E3779B97F4A7C15 }

// fillPattern fills b, which starts at offset off of a pool.
func fillPattern(b []byte, off int64) {
	const part = 16 << 20
	var group sync.WaitGroup
	for len(b) > 0 {
		n := min(part, len(b))
		piece, at := b[:n], off
		group.Go(func() {
			for i := 0; i+8 <= len(piece); i += 8 {
				binary.LittleEndian.PutUint64(piece[i:], patternWord(at+int64(i)))
			}
		})
		b, off = b[n:], off+int64(n)
	}
	group.Wait()
}

// copier measures copies between pools: of each memory one that is read and one that is
// written.
type copier struct {
	*measurer
	pool  int64
	check device.Memory // pinned, for what is compared
	memos []device.Memory
}

func (x *copier) allocate(s device.Space, n int64) device.Memory {
	mem, err := x.m.Alloc(s, n, "copies")
	if err != nil {
		x.Fatal(err)
	}
	x.memos = append(x.memos, mem)
	return mem
}

func (x *copier) release() {
	for _, m := range x.memos {
		if err := m.Free(); err != nil {
			x.Error(err)
		}
	}
}

// copies measures all paths: between host memory and the GPU, and between a peer and the GPU
// if there is one. kernel are two streams of the backend.
func (x *copier) copies(sizes []int64, rounds, smallSamples int, kernel [2]device.Stream) []copyResult {
	x.check = x.allocate(device.Host, 256)
	whole := func(m device.Memory) device.Range { return m.Range(0, x.pool) }
	spaces := []device.Space{device.HBM(0), device.Host}
	if _, err := x.m.Topology().Path(device.HBM(0), device.HBM(1)); err == nil {
		spaces = append(spaces, device.HBM(1))
	}
	read, written := map[device.Space]device.Range{}, map[device.Space]device.Range{}
	first := x.allocate(device.Host, x.pool)
	fillPattern(first.Write(0, x.pool), 0)
	for _, s := range spaces {
		from := first
		if s != device.Host {
			from = x.allocate(s, x.pool)
			if err := errors.Join(x.s.Copy(whole(from), whole(first)), x.s.Synchronize(x.Context())); err != nil {
				x.Fatal(err)
			}
		}
		read[s], written[s] = whole(from), whole(x.allocate(s, x.pool))
	}
	newLane := func(i int, from, to device.Space) *lane {
		// As package transfer: on a stream of the source, unless that is the host.
		on := from
		if on == device.Host {
			on = to
		}
		dma, err := x.m.NewStream(on, device.StreamOptions{Name: fmt.Sprintf("%v to %v", from, to)})
		if err != nil {
			x.Fatal(err)
		}
		x.Cleanup(func() {
			if err := dma.Close(); err != nil {
				x.Error(err)
			}
		})
		const tables = 2 * 8 * maxCopied
		return &lane{
			src: read[from], dst: written[to], dma: dma, kernel: kernel[i],
			upload: x.allocate(device.Host, tables), uploaded: x.allocate(device.HBM(0), tables),
		}
	}
	var paths []*copyPath
	for _, far := range spaces[1:] {
		in, out := newLane(0, far, device.HBM(0)), newLane(1, device.HBM(0), far)
		name := "host"
		if far != device.Host {
			name = "peer"
		}
		paths = append(paths, &copyPath{name + " to GPU", []*lane{in}}, &copyPath{"GPU to " + name, []*lane{out}}, &copyPath{name + " both ways", []*lane{in, out}})
	}
	var cases []*copyCase
	for _, size := range sizes {
		for _, p := range paths {
			for i := range copyMethods {
				cases = append(cases, &copyCase{path: p, bytes: size, method: i})
			}
		}
	}
	for round := 0; round < rounds && !x.over(); round++ {
		for _, c := range cases {
			if c.err != nil || x.over() {
				continue
			}
			samples := 1
			if round > 0 && c.bytes <= 64<<10 {
				samples = smallSamples
			}
			var rates []float64
			for range samples {
				rate, enqueued, err := x.sample(c, round == 0)
				if err != nil {
					c.err = err
					break
				}
				rates, c.enqueue = append(rates, rate), append(c.enqueue, enqueued)
			}
			c.rates = append(c.rates, rates)
		}
	}
	var results []copyResult
	for _, c := range cases {
		r := copyResult{Path: c.path.name, BlockBytes: c.bytes, Blocks: x.blocks(c.bytes), Method: copyMethods[c.method].name}
		switch {
		case c.err != nil:
			r.Error = c.err.Error()
		case len(c.rates) == 0:
			r.Error = "not measured: time was over"
		default:
			if len(c.rates) > 1 { // the first round finds everything cold
				c.rates = c.rates[1:]
			}
			all := slices.Concat(c.rates...)
			r.Samples, r.Rate, r.Lowest, r.Highest, r.Enqueue = len(all), median(all), slices.Min(all), slices.Max(all), median(c.enqueue)
		}
		results = append(results, r)
	}
	return results
}

// blocks is the number of blocks of a sample.
func (x *copier) blocks(bytes int64) int { return int(min(maxCopied, x.pool/bytes)) }

// scatter returns n blocks of a pool in no order, spread over all of it.
func (x *copier) scatter(pool device.Range, bytes int64, n int) []device.Range {
	places := pool.Bytes / bytes
	each := places / int64(n)
	blocks := make([]device.Range, n)
	for i := range blocks {
		blocks[i] = pool.Slice((int64(i)*each+x.random.Int64N(each))*bytes, bytes)
	}
	x.random.Shuffle(n, func(i, j int) { blocks[i], blocks[j] = blocks[j], blocks[i] })
	return blocks
}

// sample copies blocks once, on all lanes of the path at once, and returns the rate in bytes/s
// and the host's seconds to enqueue it. With verify it compares some of what has arrived.
func (x *copier) sample(c *copyCase, verify bool) (rate, enqueued float64, err error) {
	method, n := copyMethods[c.method], x.blocks(c.bytes)
	var streams []device.Stream
	for _, l := range c.path.lanes {
		l.from, l.to = x.scatter(l.src, c.bytes, n), x.scatter(l.dst, c.bytes, n)
		if method.threadBlocks == 0 {
			streams = append(streams, l.dma)
			continue
		}
		streams = append(streams, l.kernel)
		x.tables(l, n)
		l.op.BlockBytes, l.op.ThreadBlocks = c.bytes, method.threadBlocks
	}
	took, host, err := x.span(streams, func() error {
		switch {
		case method.threadBlocks > 0:
			for _, l := range c.path.lanes {
				bytes := int64(16 * n)
				if err := errors.Join(l.kernel.Copy(l.uploaded.Range(0, bytes), l.upload.Range(0, bytes)), x.b.Enqueue(l.kernel, &l.op)); err != nil {
					return err
				}
			}
		case method.name == batchedCopies:
			for _, l := range c.path.lanes {
				s, ok := l.dma.(interface {
					CopyBatch(dst, src []device.Range) error
				})
				if !ok {
					return errors.New("the device has no batches of copies")
				}
				if err := s.CopyBatch(l.to, l.from); err != nil {
					return err
				}
			}
		default:
			for i := range n {
				for _, l := range c.path.lanes {
					if err := l.dma.Copy(l.to[i], l.from[i]); err != nil {
						return err
					}
				}
			}
		}
		return nil
	})
	if err != nil {
		return 0, 0, err
	}
	if verify {
		for _, l := range c.path.lanes {
			x.verify(l, method.name)
		}
	}
	return float64(n) * float64(c.bytes) * float64(len(c.path.lanes)) / max(took.Seconds(), 1e-9), host.Seconds(), nil
}

// tables writes the addresses of a lane's blocks.
func (x *copier) tables(l *lane, n int) {
	to := l.upload.Write(0, int64(16*n))
	for i := range n {
		binary.LittleEndian.PutUint64(to[8*i:], uint64(l.from[i].Addr))
		binary.LittleEndian.PutUint64(to[8*(n+i):], uint64(l.to[i].Addr))
	}
	at := l.uploaded.Range(0, int64(16*n)).Addr
	l.op.Src, l.op.Dst = kernels.New(at, kernels.U64, n), kernels.New(at+device.Addr(8*n), kernels.U64, n)
}

// verify compares the ends of some blocks with their sources.
func (x *copier) verify(l *lane, method string) {
	x.Helper()
	for range 8 {
		i := x.random.IntN(len(l.to))
		for _, at := range []int64{0, l.to[i].Bytes - 8} {
			if err := errors.Join(x.s.Copy(x.check.Range(0, 8), l.to[i].Slice(at, 8)), x.s.Synchronize(x.Context())); err != nil {
				x.Fatal(err)
			}
			got, want := binary.LittleEndian.Uint64(x.check.Read(0, 8)), patternWord(int64(l.from[i].Addr-l.src.Addr)+at)
			if got != want {
				x.Fatalf("%s: byte %d of block %d, of %d bytes, from %v to %v: %#x, want %#x", method, at, i, l.to[i].Bytes, l.from[i], l.to[i], got, want)
			}
		}
	}
}

func copyTable(results []copyResult) [][]string {
	head := []string{"path", "blocks"}
	for _, m := range copyMethods {
		head = append(head, m.name)
	}
	rows := [][]string{append(head, "enqueue a copy, us")}
	for len(results) > 0 {
		r := &results[0]
		size := fmt.Sprintf("%d KiB", r.BlockBytes>>10)
		if r.BlockBytes >= 1<<20 {
			size = fmt.Sprintf("%d MiB", r.BlockBytes>>20)
		}
		row := []string{r.Path, fmt.Sprintf("%d x %s", r.Blocks, size)}
		for _, r := range results[:len(copyMethods)] {
			cell := fmt.Sprintf("%.1f", r.Rate/1e9)
			if r.Error != "" {
				cell = "failed"
			}
			row = append(row, cell)
		}
		rows = append(rows, append(row, fmt.Sprintf("%.2f", r.Enqueue*1e6/float64(r.Blocks))))
		results = results[len(copyMethods):]
	}
	return rows
}

// TestMeasureCopies compares ways to copy scattered blocks, as loads and stores of a KV tier
// do: queued copies, batched copies, and the kernel with some numbers of thread blocks, whose
// tables of addresses are copied to the device first.
func TestMeasureCopies(t *testing.T) {
	needMeasure(t, "copy.cu")
	begin := time.Now()
	m, b, s := openGPUs(t, []int{0, 1}, Options{BatchInvariant: true, Streams: 2})
	second, err := m.NewStream(device.HBM(0), device.StreamOptions{Name: "copies 2"})
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		if err := second.Close(); err != nil {
			t.Error(err)
		}
	})
	x := &copier{measurer: newMeasurer(t, m, b, s, *measureFor), pool: 4 << 30}
	defer x.release()
	results := x.copies([]int64{4 << 10, 16 << 10, 64 << 10, 256 << 10, 1 << 20, 2 << 20, 4 << 20, 16 << 20}, 9, 3, [2]device.Stream{s, second})
	t.Logf("measured in %v", time.Since(begin).Round(time.Millisecond))
	fmt.Println("GB/s:")
	printTable(os.Stdout, copyTable(results))
	for _, r := range results {
		if r.Error != "" {
			t.Logf("%s, blocks of %d bytes, %s: %s", r.Path, r.BlockBytes, r.Method, r.Error)
		}
	}
	writeMeasured(t, results)
}

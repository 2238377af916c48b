package eval

import (
	"context"
	"encoding/csv"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"slices"
	"strconv"
	"strings"
	"text/tabwriter"
	"time"

	"github.com/moeserve/moeserve/device"
	"github.com/moeserve/moeserve/planner"
	"github.com/moeserve/moeserve/transfer"
	"github.com/moeserve/moeserve/untrusted"
)

// The paths that Transfer measures.
const (
	HostPath = "host to gpu"
	PeerPath = "peer to gpu"
	BothPath = "host and peer to gpu"
	D2HPath  = "gpu to host"
)

// TransferOptions describe a measurement of copies.
type TransferOptions struct {
	Machine device.Machine
	// Compute is the memory that copies go to, Peer one that they come from;
	// device.Host: there is none.
	Compute, Peer device.Space
	// Sizes of one copy, in bytes. Default: DefaultSizes.
	Sizes []int64
	// Repetitions of a single copy, whose median counts. Default: 10.
	Repetitions int
	// QueuedBytes of copies are queued at once, but 4 to 256 copies; more on the faster path
	// of two. Default: 1 GiB.
	QueuedBytes int64
	// Progress, if set, is called after each point, with the bytes that have been copied and
	// all that there are to copy.
	Progress func(done, total int64)
}

// How many copies are queued, however large they are.
const (
	minQueued = 4
	maxQueued = 256
)

// expertSizes are the bytes of one expert of models that have presets, in 16 bit, with
// the models' names for figures.
var expertSizes = []struct {
	preset, model string
	bytes         int64
}{
	{"qwen3-30b-a3b", "Qwen3-30B-A3B", 9 << 20},
	{"phi-tiny-moe", "Phi-tiny-MoE", 21 << 19},
	{"qwen1.5-moe-a2.7b", "Qwen1.5-MoE", 33 << 19},
	{"qwen2-57b-a14b", "Qwen2-57B-A14B", 105 << 19},
	{"phi-3.5-moe", "Phi-3.5-MoE", 150 << 20},
	{"mixtral-8x7b", "Mixtral-8x7B", 336 << 20},
}

// ReadTransferResult reads what a measurement of copies wrote as JSON. Errors wrap ErrInput.
func ReadTransferResult(data []byte, name string) (*TransferResult, error) {
	r := &TransferResult{}
	if err := json.Unmarshal(data, r); err != nil {
		return nil, Inputf("%s has no result of bench transfer --json: %w", name, untrusted.JSONError(data, err))
	}
	if len(r.Points) == 0 {
		return nil, Inputf("%s has no copies: give a result of bench transfer --json", name)
	}
	return r, nil
}

// ExpertSizes are the models that have presets, by the names that figures give them, with the bytes
// of one expert in 16 bit; the smallest first.
func ExpertSizes() (models []string, bytes []int64) {
	for _, e := range expertSizes {
		models, bytes = append(models, e.model), append(bytes, e.bytes)
	}
	return models, bytes
}

// Ratio is how many times as long a single copy of so many bytes takes from the host as from the
// peer; false where one of them was not measured, or where emulated devices have no rates.
func (r *TransferResult) Ratio(bytes int64) (float64, bool) {
	latency := func(path string) float64 {
		for _, q := range r.of(path) {
			if q.Bytes == bytes {
				return q.LatencySeconds
			}
		}
		return 0
	}
	host, peer := latency(HostPath), latency(PeerPath)
	return host / peer, host > 0 && peer > 0 && !r.Unpaced()
}

// DefaultSizes are 64 KiB to 64 MiB, and the sizes of one expert of the models that have
// presets (16 bit).
func DefaultSizes() []int64 {
	const mib = 1 << 20
	sizes := []int64{mib / 16, mib / 4, mib, 4 * mib, 64 * mib}
	for _, e := range expertSizes {
		sizes = append(sizes, e.bytes)
	}
	slices.Sort(sizes)
	return sizes
}

// EnsureDefaults fills in what is zero.
func (o TransferOptions) EnsureDefaults() TransferOptions {
	if len(o.Sizes) == 0 {
		o.Sizes = DefaultSizes()
	}
	if o.Repetitions == 0 {
		o.Repetitions = 10
	}
	if o.QueuedBytes == 0 {
		o.QueuedBytes = 1 << 30
	}
	return o
}

// Needs is the memory that a measurement allocates, in bytes: each path has its own, of the
// maximum size, except that paths from and to the host share what is on the GPU.
func (o TransferOptions) Needs() map[device.Space]int64 {
	o = o.EnsureDefaults()
	size := slices.Max(o.Sizes)
	needs := map[device.Space]int64{device.Host: 2 * size, o.Compute: size}
	if o.Peer != device.Host {
		needs[o.Compute] += size
		needs[o.Peer] = size
	}
	return needs
}

// TransferPoint is one size on one path.
type TransferPoint struct {
	Path  string `json:"path"`
	Bytes int64  `json:"bytes"`
	// LatencySeconds is the median time of a single copy; of both paths, of a copy on
	// each until the later has ended.
	LatencySeconds float64 `json:"latency_s"`
	// BytesPerSecond is the rate of copies that are queued back to back; of both paths,
	// their sum while both are busy.
	BytesPerSecond float64 `json:"bytes_per_s"`
	// EngineBytesPerSecond is the rate of as many copies by package transfer, in its
	// chunks.
	EngineBytesPerSecond float64 `json:"engine_bytes_per_s"`
}

// TransferResult is a measurement of copies.
type TransferResult struct {
	Run Run `json:"run"`
	Machine
	Points []TransferPoint `json:"points"`
}

// rig is the paths of a measurement.
type rig struct {
	o      TransferOptions
	engine *transfer.Engine
	paths  map[string]*path
	close  []func() error
}

// path is one pair of memories with a stream.
type path struct {
	*Lane
	dst, src device.Memory
	// rate of queued copies alone, in bytes/s, by size.
	rate map[int64]float64
}

// Transfer measures latency and rate of copies by size: from the host, from a peer,
// from both at once, and back to the host. Where ctx ends, the points that have been
// measured are returned beside the error.
func Transfer(ctx context.Context, o TransferOptions) (_ []TransferPoint, err error) {
	o = o.EnsureDefaults()
	for _, s := range o.Sizes {
		if s < 1 {
			return nil, Inputf("eval: a copy of %d bytes: must be at least 1", s)
		}
	}
	r := &rig{o: o, paths: map[string]*path{}}
	defer func() {
		for _, f := range slices.Backward(r.close) {
			err = errors.Join(err, f())
		}
	}()
	if err := r.open(ctx); err != nil {
		return nil, fmt.Errorf("eval: measure copies: %w", err)
	}
	var points []TransferPoint
	var done, total int64
	for _, name := range []string{HostPath, PeerPath, BothPath, D2HPath} {
		for _, bytes := range o.Sizes {
			total += int64(len(r.busy(name))) * o.copied(bytes)
		}
	}
	for _, name := range []string{HostPath, PeerPath, BothPath, D2HPath} {
		paths := r.busy(name)
		if paths == nil {
			continue
		}
		for _, bytes := range o.Sizes {
			p, err := r.point(ctx, paths, bytes)
			if err != nil {
				if ctx.Err() == nil {
					points = nil
				}
				return points, fmt.Errorf("eval: %s, %d bytes: %w", name, bytes, err)
			}
			p.Path = name
			points = append(points, p)
			done += int64(len(paths)) * o.copied(bytes)
			if o.Progress != nil {
				o.Progress(done, total)
			}
		}
	}
	return points, nil
}

// busy are the paths that copy at once on the path of a name; nil where it does not exist.
func (r *rig) busy(name string) []*path {
	switch {
	case name != BothPath && r.paths[name] != nil:
		return []*path{r.paths[name]}
	case name == BothPath && r.paths[PeerPath] != nil:
		return []*path{r.paths[HostPath], r.paths[PeerPath]}
	}
	return nil
}

// queued is how many copies of a size are queued on a path.
func (o *TransferOptions) queued(bytes int64) int64 {
	return min(max(o.QueuedBytes/bytes, minQueued), maxQueued)
}

// copied is what a point copies on a path, about: single copies, and those that are queued,
// by the device and by package transfer.
func (o *TransferOptions) copied(bytes int64) int64 {
	return bytes * (int64(o.Repetitions) + 1 + 2*o.queued(bytes))
}

// open allocates memory of the maximum size, writes what will be read, and makes a stream
// for each path.
func (r *rig) open(ctx context.Context) error {
	o := &r.o
	size := slices.Max(o.Sizes)
	var err error
	memory := func(space device.Space, label string) (device.Memory, error) {
		mem, err := o.Machine.Alloc(space, size, "copies measured, "+label)
		if err == nil {
			r.close = append(r.close, mem.Free)
		}
		return mem, err
	}
	var host device.Memory
	if host, err = memory(device.Host, "source"); err != nil {
		return err
	}
	clear(host.Write(0, size))
	local, err := memory(o.Compute, "destination")
	if err != nil {
		return err
	}
	if err := r.add(HostPath, local, host); err != nil {
		return err
	}
	back, err := memory(device.Host, "destination")
	if err != nil {
		return err
	}
	if err := r.add(D2HPath, back, local); err != nil {
		return err
	}
	if o.Peer == device.Host {
		return r.start()
	}
	peer, err := memory(o.Peer, "source")
	if err != nil {
		return err
	}
	beside, err := memory(o.Compute, "destination beside")
	if err != nil {
		return err
	}
	if err := r.add(PeerPath, beside, peer); err != nil {
		return err
	}
	stream := r.paths[PeerPath].Stream
	if err := stream.Copy(peer.Range(0, size), host.Range(0, size)); err != nil {
		return err
	}
	if err := stream.Synchronize(ctx); err != nil {
		return err
	}
	return r.start()
}

// start starts the engine, to be closed before the memory that it copies is freed.
func (r *rig) start() (err error) {
	if r.engine, err = transfer.New(transfer.Options{Machine: r.o.Machine}); err == nil {
		r.close = append(r.close, r.engine.Close)
	}
	return err
}

func (r *rig) add(name string, dst, src device.Memory) (err error) {
	p := &path{dst: dst, src: src, rate: map[int64]float64{}}
	if p.Lane, err = OpenLane(r.o.Machine, r.o.Compute, name); err != nil {
		return err
	}
	r.close = append(r.close, p.Close)
	r.paths[name] = p
	return nil
}

// point measures one size on paths that go at once.
func (r *rig) point(ctx context.Context, paths []*path, bytes int64) (TransferPoint, error) {
	p := TransferPoint{Bytes: bytes}
	one := slices.Repeat([]int{1}, len(paths))
	single := make([]time.Duration, r.o.Repetitions)
	for i := range r.o.Repetitions + 1 {
		took, err := copies(ctx, paths, bytes, one)
		if err != nil {
			return p, err
		}
		if i > 0 { // the first is slower
			single[i-1] = took
		}
	}
	p.LatencySeconds = Median(single).Seconds()
	// The faster path has more of them, so that both are busy to the end.
	counts, slowest := slices.Clone(one), paths[0].rate[bytes]
	for _, x := range paths {
		slowest = min(slowest, x.rate[bytes])
	}
	all := 0
	for i, x := range paths {
		counts[i] = int(r.o.queued(bytes))
		if len(paths) > 1 {
			counts[i] = int(float64(counts[i])*x.rate[bytes]/slowest + 0.5)
		}
		all += counts[i]
	}
	took, err := copies(ctx, paths, bytes, counts)
	if err != nil {
		return p, err
	}
	p.BytesPerSecond = float64(all) * float64(bytes) / took.Seconds()
	if len(paths) == 1 {
		paths[0].rate[bytes] = p.BytesPerSecond
	}
	if took, err = r.engined(ctx, paths, bytes, counts); err != nil {
		return p, err
	}
	p.EngineBytesPerSecond = float64(all) * float64(bytes) / took.Seconds()
	return p, nil
}

// copies runs counts[i] copies on path i, all paths at once, and returns the time from the
// first one's start to the last one's end.
func copies(ctx context.Context, paths []*path, bytes int64, counts []int) (time.Duration, error) {
	lanes := make([]*Lane, len(paths))
	for i, p := range paths {
		lanes[i] = p.Lane
	}
	err := Enqueue(lanes, slices.Max(counts), func(i, n int) error {
		if n >= counts[i] {
			return nil
		}
		return paths[i].Stream.Copy(paths[i].dst.Range(0, bytes), paths[i].src.Range(0, bytes))
	})
	if err != nil {
		return 0, err
	}
	return Span(ctx, lanes)
}

// engined does what copies does, through the transfer engine.
func (r *rig) engined(ctx context.Context, paths []*path, bytes int64, counts []int) (_ time.Duration, err error) {
	fences, first := make([]device.Fence, len(paths)), make([]uint32, len(paths))
	for i := range paths {
		if fences[i], err = r.o.Machine.NewFence("copies measured"); err != nil {
			return 0, err
		}
		first[i] = fences[i].Value() + 1
		defer func() { err = errors.Join(err, fences[i].Close()) }()
	}
	var tickets []*transfer.Ticket
	began := r.o.Machine.Now()
	for i, p := range paths {
		for n := range counts[i] {
			t, err := r.engine.Submit(transfer.Request{
				Src: p.src.Region(0, bytes), Dst: p.dst.Region(0, bytes),
				Priority: transfer.Prefetch, Done: device.Point{Fence: fences[i], Value: first[i] + uint32(n)}, Label: transfer.Text("copy measured"),
			})
			if err != nil {
				return 0, err
			}
			tickets = append(tickets, t)
		}
	}
	for _, t := range tickets {
		if err := t.Wait(ctx); err != nil {
			return 0, err
		}
	}
	return max(r.o.Machine.Now()-began, 1), nil
}

// of lists the points of one path, in the order of their sizes.
func (r *TransferResult) of(path string) []TransferPoint {
	var points []TransferPoint
	for _, p := range r.Points {
		if p.Path == path {
			points = append(points, p)
		}
	}
	slices.SortFunc(points, func(a, b TransferPoint) int { return int(a.Bytes - b.Bytes) })
	return points
}

// paths lists those that were measured.
func (r *TransferResult) paths() []string {
	var names []string
	for _, p := range r.Points {
		if !slices.Contains(names, p.Path) {
			names = append(names, p.Path)
		}
	}
	return names
}

// WriteTransferTable writes a line for each size for a person.
func WriteTransferTable(out io.Writer, r *TransferResult) error {
	if _, err := io.WriteString(out, Header(&r.Run, &r.Machine)); err != nil {
		return err
	}
	w := tabwriter.NewWriter(out, 0, 0, 2, ' ', tabwriter.AlignRight)
	fmt.Fprint(w, "size\t")
	names := r.paths()
	for _, n := range names {
		fmt.Fprintf(w, "%s µs\tGB/s\tengine\t", n)
	}
	fmt.Fprintln(w)
	for i, p := range r.of(HostPath) {
		fmt.Fprintf(w, "%s\t", Size(p.Bytes))
		for _, n := range names {
			points := r.of(n)
			if i >= len(points) { // the measurement was interrupted
				fmt.Fprint(w, "\t\t\t")
				continue
			}
			q := points[i]
			fmt.Fprintf(w, "%s\t%.4g\t%.4g\t", number(1e6*q.LatencySeconds), q.BytesPerSecond/1e9, q.EngineBytesPerSecond/1e9)
		}
		fmt.Fprintln(w)
	}
	if err := w.Flush(); err != nil {
		return err
	}
	_, err := io.WriteString(out, "\nµs: median of single copies; GB/s (10^9 bytes/s): copies queued back to back; engine: GB/s of as many copies by the transfer engine, in chunks;\nhost and peer to gpu: µs of a copy of this size from each, at once; GB/s: their sum\n")
	return err
}

// Size writes bytes in MiB, in KiB below one, and in GiB from ten on.
func Size(bytes int64) string {
	if bytes >= 10<<30 {
		return strconv.FormatFloat(float64(bytes)/(1<<30), 'g', 4, 64) + " GiB"
	}
	if bytes >= 1<<20 {
		return strconv.FormatFloat(float64(bytes)/(1<<20), 'g', 4, 64) + " MiB"
	}
	return strconv.FormatFloat(float64(bytes)/(1<<10), 'g', 4, 64) + " KiB"
}

// WriteTransferCSV writes a line per point.
func WriteTransferCSV(out io.Writer, r *TransferResult) error {
	w := csv.NewWriter(out)
	w.Write(append(slices.Clone(ProvenanceColumns), "path", "bytes", "latency_s", "bytes_per_s", "engine_bytes_per_s")) //nolint:errcheck // Flush keeps the error
	f := func(v float64) string { return strconv.FormatFloat(v, 'g', 8, 64) }
	for _, p := range r.Points {
		w.Write(append(Provenance(&r.Run, &r.Machine), p.Path, strconv.FormatInt(p.Bytes, 10), f(p.LatencySeconds), f(p.BytesPerSecond), f(p.EngineBytesPerSecond))) //nolint:errcheck // as above
	}
	w.Flush()
	return w.Error()
}

// Calibration is what hardware is made of besides measured copies.
type Calibration struct {
	// Base has the figures that copies do not show.
	Base planner.Hardware
	// Date of the measurement, and Version of what measured: parts of the name, if there
	// are any.
	Date, Version string
	// Reads of kernels, where they were measured.
	Reads Reads
}

// Start is the base with the machine's name, before anything measured is put into it. Its
// sources say that it was not measured, except of what was: where a calibration of the same
// device is the base.
func (c *Calibration) Start(m *Machine) planner.Hardware {
	h := c.Base
	h.Name = labeled(m.Device, m.Emulated)
	same := strings.HasPrefix(c.Base.Name, h.Name)
	if c.Date != "" {
		h.Name += ", " + c.Date
	}
	if c.Version != "" {
		h.Name += ", moeserve " + c.Version
	}
	from := "from " + c.Base.Name + " (not measured here)"
	if m.Emulated && c.Base.Name == m.Device {
		from = "as the devices are emulated (not measured)"
	}
	h.Sources = map[string]string{}
	for _, key := range planner.HardwareFields() {
		h.Sources[key] = from
		if was := c.Base.Sources[key]; same && (strings.HasPrefix(was, MeasuredBy) || strings.HasPrefix(was, EmulatedBy)) {
			h.Sources[key] = was
		}
	}
	return h
}

// The first words of the sources of what a benchmark has measured, on GPUs and on emulated
// devices; its name follows.
const (
	MeasuredBy = "measured by bench "
	EmulatedBy = "emulated by bench "
)

// Calibrate puts measured rates and latencies of copies in the place of the base's: those by
// which the smallest single copy and the largest of the queued ones take as long as
// they did. Only these have sources that say "measured", and only of real devices.
func Calibrate(r *TransferResult, c Calibration) (planner.Hardware, error) {
	h := c.Start(&r.Machine)
	// Paths over other GPUs are measured by package multipath, with what is measured here.
	h.Multipath, h.Sources["multipath"] = nil, "none: bench transfer measured one link"
	rate := func(path string) (rate, start float64) {
		points := r.of(path)
		if len(points) == 0 {
			return 0, 0
		}
		small, large := points[0], points[len(points)-1]
		rate = large.BytesPerSecond
		// The larger copy has a start, too, which does not count as bytes.
		if more := float64(large.Bytes)/rate - small.LatencySeconds; large.Bytes > small.Bytes && more > 0 {
			rate = float64(large.Bytes-small.Bytes) / more
		}
		return rate, max(small.LatencySeconds-float64(small.Bytes)/rate, 0)
	}
	by := MeasuredBy + "transfer: "
	if r.Emulated {
		by = EmulatedBy + "transfer: "
	}
	measured := by + "queued copies of the largest size, less their latency"
	started := by + "a single copy of the smallest size, less its bytes"
	host, start := rate(HostPath)
	if host == 0 {
		return h, Inputf("eval: no copies from the host were measured, which a calibration needs")
	}
	h.HostToGPU, h.HostCopyLatency = []float64{host}, start
	h.Sources["host_to_gpu_bytes_per_s"], h.Sources["host_copy_latency_s"] = measured+", one path", started
	h.GPUToHost, _ = rate(D2HPath)
	h.Sources["gpu_to_host_bytes_per_s"] = measured
	if peer, start := rate(PeerPath); peer > 0 {
		h.PeerToGPU, h.PeerCopyLatency = peer, start
		h.Sources["peer_to_gpu_bytes_per_s"], h.Sources["peer_copy_latency_s"] = measured, started
	} else {
		h.PeerMemory, h.PeerToGPU, h.PeerCopyLatency, h.PeerLoadKernelBelow, h.PeerStoreKernelBelow = 0, 0, 0, 0, 0
		h.PeerLoadKernelBlocks, h.PeerStoreKernelBlocks, h.PeerReadRate = 0, 0, 0
		for _, key := range []string{
			"peer_memory_bytes", "peer_to_gpu_bytes_per_s", "peer_copy_latency_s", "peer_load_kernel_below_bytes", "peer_store_kernel_below_bytes",
			"peer_load_kernel_thread_blocks", "peer_store_kernel_thread_blocks", "peer_kernel_read_bytes_per_s",
		} {
			h.Sources[key] = "none: bench transfer had no peer"
		}
	}
	for _, read := range []struct {
		key  string
		rate float64
		to   *float64
	}{{"host_kernel_read_bytes_per_s", c.Reads.Host, &h.HostReadRate}, {"peer_kernel_read_bytes_per_s", c.Reads.Peer, &h.PeerReadRate}} {
		if read.rate > 0 {
			*read.to, h.Sources[read.key] = read.rate, by+"a kernel on all multiprocessors that reads an extent of the largest size"
		}
	}
	if err := h.Validate(); err != nil {
		return h, fmt.Errorf("eval: %w", err)
	}
	return h, nil
}

package multipath

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"time"

	"github.com/moeserve/moeserve/device"
	"github.com/moeserve/moeserve/eval"
)

// Direction of a copy, seen from the GPU.
type Direction string

// The directions.
const (
	// ToGPU is from the host's memory, FromGPU into it.
	ToGPU   Direction = "h2d"
	FromGPU Direction = "d2h"
)

// directions are those that are measured, in their order.
var directions = []Direction{ToGPU, FromGPU}

// words say it to a person.
func (d Direction) words() string {
	if d == FromGPU {
		return "GPU to host"
	}
	return "host to GPU"
}

// Part is one table or figure.
type Part string

// The parts that need no engine.
const (
	// LinksPart is the rate of every link, alone and with all others.
	LinksPart Part = "links"
	// StaticPart is a static round-robin split of a copy over 1, 2, … paths.
	StaticPart Part = "static"
	// RelayPart is a copy over one relay, by chunk size and number of buffers.
	RelayPart Part = "relay"
	// RootsPart is which links share a root.
	RootsPart Part = "roots"
)

// The parts that measure the engine.
const (
	// SizesPart is copies of 1 KiB to Largest.
	SizesPart Part = "sizes"
	// GPUsPart is one copy by the number of GPUs whose links it uses.
	GPUsPart Part = "gpus"
	// TrafficPart is one copy beside plain copies of others on some of the links.
	TrafficPart Part = "traffic"
	// EnginesPart is two engines at once.
	EnginesPart Part = "engines"
	// CPUPart is the processor time of the engine.
	CPUPart Part = "cpu"
	// ChunksPart is one copy by chunk size and chunks in flight.
	ChunksPart Part = "chunks"
	// ThresholdPart is from which size on relays pay.
	ThresholdPart Part = "threshold"
	// DirectPart is copies between GPUs beside copies of all GPUs from the host.
	DirectPart Part = "direct"
)

// Parts are all parts, in the order in which they are measured.
var Parts = []Part{
	LinksPart, RootsPart, StaticPart, RelayPart, SizesPart, GPUsPart, TrafficPart, EnginesPart, CPUPart, ChunksPart, ThresholdPart, DirectPart,
}

// About says what a part is, for a list of parts.
func (p Part) About() string {
	return map[Part]string{
		LinksPart:  "rate of every link, alone and all at once (the paper's Table 1)",
		RootsPart:  "which links share a root, so that their rates do not add up",
		StaticPart: "static round-robin split over 1, 2, … paths, without the engine",
		RelayPart:  "copies over one relay by chunk size and number of buffers",

		SizesPart:     "1 KiB to --largest-size, beside plain copies (Figure 8)",
		GPUsPart:      "one copy by the number of GPUs that take part (Figure 9)",
		TrafficPart:   "beside others' copies, and static splits (Figures 10a and 11)",
		EnginesPart:   "two engines at once (Figure 10b)",
		CPUPart:       "processor time of the engine (Figure 12)",
		ChunksPart:    "by chunk size and chunks in flight (Figure 13)",
		ThresholdPart: "from which size on relays pay (Figure 14)",
		DirectPart:    "GPU to GPU beside all copies, direct first on and off (Table 2)",
	}[p]
}

// Options describe a measurement.
type Options struct {
	Machine device.Machine
	// GPU is the memory that copies go to and come from, Relays those of other GPUs whose links
	// they may use, in this order.
	GPU    device.Space
	Relays []device.Space
	// Parts to measure. Default: all.
	Parts []Part
	// Bytes of a copy, of parts that have one size. Default: 1 GiB.
	Bytes int64
	// Largest size of SizesPart, in bytes. Default: 8 GiB.
	Largest int64
	// ChunkBytes of a static split. Default: 4 MiB.
	ChunkBytes int64
	// Chunks are the sizes of chunks that are compared, in bytes. Default: DefaultChunks.
	Chunks []int64
	// Depths are the numbers of buffers of a relay, and of chunks in flight on a link, that are
	// compared. Default: 1 to 4.
	Depths []int
	// LinkBytes is the size of one copy of a single link. Default: 64 MiB.
	LinkBytes int64
	// Others starts a competitor of TrafficPart on a GPU. Default: none, and the traffic is streams of this
	// process, which share a link on emulated devices as processes do.
	Others func(ctx context.Context, gpu device.Space) (Competitor, error)
	// CPUTime is the processor time of this process. CPUPart needs it.
	CPUTime func() time.Duration
	// CPUSpan is how long CPUPart copies, at least, for each number. Default: 500 ms.
	CPUSpan time.Duration
	// Rounds, whose median counts. Default: 5.
	Rounds int
	// Progress, if set, is called after each cell of a part with how many cells are done.
	Progress func(part Part, done, total int)
}

// DefaultChunks are 1 to 16 MiB, with the two sizes that the MMA paper found best (its Figure
// 13): 2.81 MB to the GPU, 5.37 MB from it.
func DefaultChunks() []int64 {
	return []int64{1 << 20, 2 << 20, 2_810_000 / align * align, 4 << 20, 5_370_000 / align * align, 8 << 20, 16 << 20}
}

// align is what chunks are a multiple of, in bytes.
const align = 4096

// EnsureDefaults fills in what is zero.
func (o Options) EnsureDefaults() Options {
	if len(o.Parts) == 0 {
		o.Parts = Parts
	}
	if o.Bytes == 0 {
		o.Bytes = 1 << 30
	}
	if o.Largest == 0 {
		o.Largest = 8 << 30
	}
	if o.CPUSpan == 0 {
		o.CPUSpan = 500 * time.Millisecond
	}
	if o.ChunkBytes == 0 {
		o.ChunkBytes = 4 << 20
	}
	if len(o.Chunks) == 0 {
		o.Chunks = DefaultChunks()
	}
	if len(o.Depths) == 0 {
		o.Depths = []int{1, 2, 3, 4}
	}
	if o.LinkBytes == 0 {
		o.LinkBytes = 64 << 20
	}
	if o.Rounds == 0 {
		o.Rounds = 5
	}
	return o
}

// Small returns o with copies and chunks of the sizes that emulated devices have room for.
func (o Options) Small() Options {
	o.Bytes, o.Largest, o.LinkBytes = 64<<20, 64<<20, 8<<20
	o.Chunks, o.Depths = []int64{1 << 20, 2 << 20, 4 << 20}, []int{1, 2}
	return o
}

// Validate reports the first invalid option.
func (o Options) Validate() error {
	gpu := func(s device.Space) bool { _, ok := s.GPU(); return ok }
	switch {
	case o.Machine == nil:
		return errors.New("multipath: Options.Machine is not set")
	case !gpu(o.GPU):
		return fmt.Errorf("multipath: %s is not a GPU's memory", o.GPU)
	case o.has(CPUPart) && o.CPUTime == nil:
		return errors.New("multipath: Options.CPUTime is not set, which part cpu needs")
	case o.Largest < smallest:
		return fmt.Errorf("multipath: sizes up to %d bytes: must be at least %d", o.Largest, smallest)
	case o.Bytes < 2*align || o.ChunkBytes < 1 || o.LinkBytes < 1 || o.Rounds < 1:
		return fmt.Errorf("multipath: copies of %d bytes in chunks of %d, %d bytes over a link, %d rounds: must be at least %d, 1, 1 and 1", o.Bytes, o.ChunkBytes, o.LinkBytes, o.Rounds, 2*align)
	case slices.Min(o.Chunks) < 1 || slices.Min(o.Depths) < 1:
		return fmt.Errorf("multipath: chunks of %v bytes, %v buffers: must be at least 1", o.Chunks, o.Depths)
	}
	for i, s := range o.Relays {
		if !gpu(s) || s == o.GPU || slices.Contains(o.Relays[:i], s) {
			return fmt.Errorf("multipath: relays %v of %s: must be other GPUs, each once", o.Relays, o.GPU)
		}
	}
	for _, p := range o.Parts {
		switch {
		case !slices.Contains(Parts, p):
			return fmt.Errorf("multipath: part %q: must be one of %v", p, Parts)
		case len(o.Relays) == 0 && p != LinksPart:
			return eval.Inputf("multipath: part %s needs a second GPU", p)
		}
	}
	return nil
}

// gpus are the GPU that copies go to, and then the relays.
func (o *Options) gpus() []device.Space { return append([]device.Space{o.GPU}, o.Relays...) }

// relayBytes are the buffers of a relay of one engine in one direction.
func (o *Options) relayBytes() int64 {
	return int64(relayBuffers(slices.Max(o.Depths))) * device.Align(max(slices.Max(o.Chunks), o.ChunkBytes))
}

// engines is how many engines copy at once, at most.
const engines = 2

// bufferBytes is what each GPU needs beside the copy itself: for its own copies in and out, and
// as a relay.
func (o *Options) bufferBytes() int64 {
	return 2*device.Align(o.LinkBytes) + engines*int64(len(directions))*o.relayBytes() + o.targetBytes()
}

// maxTarget is the most that several GPUs get copies of at once, each.
const maxTarget = 256 << 20

// targetBytes is the size of a copy of several that go on at once: two of them have room in the
// memory of the GPU.
func (o *Options) targetBytes() int64 { return min(o.Bytes/2/align*align, maxTarget) }

// copyBytes is the size of the largest copy between the host and the GPU, which has room for a
// copy of every link.
func (o *Options) copyBytes() int64 {
	largest := o.Bytes
	if o.has(SizesPart) {
		largest = max(largest, o.Largest)
	}
	return device.Align(max(largest, int64(len(o.gpus()))*device.Align(o.LinkBytes)))
}

func (o *Options) has(p Part) bool { return slices.Contains(o.Parts, p) }

// share is the part of these bytes that each GPU has to itself.
func (o *Options) share() int64 {
	return o.copyBytes() / int64(len(o.gpus())) / device.Alignment * device.Alignment
}

// Needs is the memory that a measurement allocates, in bytes.
func (o Options) Needs() map[device.Space]int64 {
	o = o.EnsureDefaults()
	needs := map[device.Space]int64{device.Host: 2*o.copyBytes() + shift}
	for _, s := range o.gpus() {
		needs[s] = o.bufferBytes()
	}
	needs[o.GPU] += o.copyBytes()
	return needs
}

package pipeline

import (
	"errors"
	"fmt"
	"log/slog"
	"slices"
	"sync/atomic"
	"time"

	"github.com/moeserve/moeserve/device"
	"github.com/moeserve/moeserve/forward"
)

// graphs captures decode steps as CUDA graphs, so that the host enqueues such a step at the
// cost of one operation, and the device runs it without gaps.
//
// A graph contains the arguments of its operations. It serves every step whose micro-batches
// look the same to the device: the same number of tokens, sequences whose maximum context
// rounds up to the same (see roundContext), and the same kinds of sampling. Tokens,
// positions, block tables and seeds may differ: they are step metadata, which is uploaded
// before. Addresses of experts are in the store's tables; while all experts are resident,
// or read in place, there is nothing to fetch or to wait for.
//
// A step is captured when it occurs the second time in a row. By then it has been enqueued
// operation by operation, so the device computes during the capture, and a failed capture
// loses nothing. The next such step is launched as the graph.
type graphs struct {
	// stream is nil where no step can be a graph.
	stream    device.Capturer
	maxGraphs int
	log       *slog.Logger
	clock     device.Clock

	// disabled stops captures after one failed; graphs that exist are still launched.
	disabled bool

	// kept are the graphs, least recently launched first, at most maxGraphs.
	kept []stepGraph
	// current are this step's micro-batches, previous those of the step before; empty where
	// that step could not be a graph. masked and previousMasked: without their heads.
	current, previous      []forward.Batch
	masked, previousMasked bool

	captured, launched, failed, numKept, captureTime atomic.Int64
}

// stepGraph is the graph of a step with these micro-batches.
type stepGraph struct {
	batches []forward.Batch
	masked  bool // the heads are not in it
	graph   device.Graph
}

// GraphStats counts graph captures and launches.
type GraphStats struct {
	// Captured counts captures, Launched launches; Kept is the number of graphs at present.
	Captured, Launched, Kept int64
	// CaptureTime is the host's total time in captures, on the machine's clock.
	CaptureTime time.Duration
	// Failed is 1 once a capture has failed; no further capture is tried.
	Failed int64
	// Ahead counts those of Launched that were enqueued before the tokens of the step in front were known
	// (Step.Ahead) and whose results were used, Discarded those whose results were not.
	Ahead, Discarded int64
}

// Graphs returns the counts since New. It may be called from any goroutine.
func (p *Pipeline) Graphs() GraphStats {
	g := &p.graphs
	return GraphStats{
		Captured: g.captured.Load(), Launched: g.launched.Load(), Kept: g.numKept.Load(), Failed: g.failed.Load(),
		CaptureTime: time.Duration(g.captureTime.Load()), Ahead: p.ahead.used.Load(), Discarded: p.ahead.discarded.Load(),
	}
}

// enable turns graphs on, if the stream can capture, and keeps at most maxGraphs of them.
func (g *graphs) enable(stream device.Stream, maxGraphs int) {
	g.maxGraphs = maxGraphs
	g.stream, _ = stream.(device.Capturer)
}

// roundContext rounds the maximum context of a micro-batch up, in tokens, so that steps stay
// the same to the device for a while as their sequences grow. Rounding costs no device time:
// attention splits long sequences every 256 positions, and ends at each sequence's own
// length.
func roundContext(tokens int) int {
	step := 256
	if tokens <= step {
		step = 64
	}
	return (tokens + step - 1) / step * step
}

// find returns the graph of a step whose micro-batches were uploaded, or nil. capture is true
// if the previous step was the same, so that this one is worth capturing.
func (g *graphs) find(b *batcher, p *plan) (_ device.Graph, capture bool) {
	g.current, g.previous = g.previous[:0], g.current
	g.masked, g.previousMasked = b.masked, g.masked
	if g.stream == nil || !b.decode || !p.graph {
		return nil, false
	}
	for i := range b.used() {
		g.current = append(g.current, b.all[i].batch)
	}
	if graph := g.use(g.current, g.masked); graph != nil {
		return graph, false
	}
	return nil, !g.disabled && g.masked == g.previousMasked && slices.Equal(g.current, g.previous)
}

// keptFor is find for a step ahead of one micro-batch, which is not captured.
func (g *graphs) keptFor(b *batcher, p *plan) device.Graph {
	if !p.graph {
		return nil
	}
	one := [1]forward.Batch{b.all[0].batch}
	return g.use(one[:], false)
}

// use returns the graph of a step, nil: there is none. It is the latest used then.
func (g *graphs) use(batches []forward.Batch, masked bool) device.Graph {
	for i := range g.kept {
		if h := g.kept[i]; h.masked == masked && slices.Equal(h.batches, batches) {
			copy(g.kept[i:], g.kept[i+1:])
			g.kept[len(g.kept)-1] = h
			return h.graph
		}
	}
	return nil
}

// launch enqueues a graph.
func (g *graphs) launch(graph device.Graph) error {
	if err := g.stream.LaunchGraph(graph); err != nil {
		return fmt.Errorf("pipeline: launch a graph of %d operations: %w", graph.Nodes(), err)
	}
	g.launched.Add(1)
	return nil
}

// capture captures the step that find was called for. The callback enqueues the step behind
// its uploads, as has been done before. A failure disables further captures, which only costs
// speed.
func (g *graphs) capture(enqueue func() error) {
	start := g.clock.Now()
	graph, err := g.stream.Capture(enqueue)
	if err == nil {
		g.kept = append(g.kept, stepGraph{slices.Clone(g.current), g.masked, graph})
		g.captured.Add(1)
		if len(g.kept) > g.maxGraphs {
			// No launch of it is pending: this step was not launched as a graph.
			err = g.kept[0].graph.Close()
			g.kept = slices.Delete(g.kept, 0, 1)
		}
		g.numKept.Store(int64(len(g.kept)))
	}
	g.captureTime.Add(int64(g.clock.Now() - start))
	if err != nil {
		g.disabled = true
		g.failed.Add(1)
		g.log.Warn("CUDA graph capture failed; decode steps run without graphs from now on, slower", "err", err)
	}
}

// close releases all graphs. Later steps are captured anew.
func (g *graphs) close() error {
	var errs []error
	for _, h := range g.kept {
		errs = append(errs, h.graph.Close())
	}
	g.kept, g.current, g.previous = nil, g.current[:0], g.previous[:0]
	g.numKept.Store(0)
	return errors.Join(errs...)
}

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

// graphs keeps decode steps as graphs, so that the host enqueues such a step at the cost
// of one operation, and the device runs it without gaps.
//
// A graph has everything baked in that its operations were given, so it serves the steps
// whose micro-batches are the same on the device: as many rows, of sequences whose
// contexts are rounded up to the same (see roundContext), that draw in the same way.
// What differs between them, tokens, positions, block tables, seeds, is in their row
// data, which is uploaded before. Where experts lie is in the store's tables; as long as
// nothing is missing there is nothing else to fetch or to await.
//
// A step is captured when it comes for the second time in a row. It has been enqueued
// operation by operation by then, so the device computes while the host does that, and
// where it fails nothing is lost. The next one like it is launched as the graph.
type graphs struct {
	// stream is nil where no step can be a graph.
	stream device.Capturer
	most   int
	log    *slog.Logger
	clock  device.Clock

	// disabled says that no more steps are captured; those held still serve.
	disabled bool

	// held are in the order in which they were launched last.
	held []stepGraph
	// now are this step's micro-batches, before those of the step before; empty where
	// that could be no graph.
	now, before []forward.Batch

	captured, launched, failed, count, took atomic.Int64
}

// stepGraph is what serves steps of these micro-batches.
type stepGraph struct {
	batches []forward.Batch
	graph   device.Graph
}

// GraphStats counts what became of decode steps.
type GraphStats struct {
	// Captured steps became graphs, of which Held are kept; Launched steps
	// ran as one.
	Captured, Launched, Held int64
	// CaptureTime is for how long the host was at capturing them, on the machine's clock.
	CaptureTime time.Duration
	// Failed is 1 once a step could not be captured; none is tried after that.
	Failed int64
}

// Graphs counts since New. It may be called from any goroutine.
func (p *Pipeline) Graphs() GraphStats {
	g := &p.graphs
	return GraphStats{
		Captured: g.captured.Load(), Launched: g.launched.Load(), Held: g.count.Load(), Failed: g.failed.Load(),
		CaptureTime: time.Duration(g.took.Load()),
	}
}

// open has steps on the stream be graphs, of which most are kept, where it can.
func (g *graphs) open(stream device.Stream, most int) {
	g.most = most
	g.stream, _ = stream.(device.Capturer)
}

// roundContext rounds the longest context of a micro-batch up, so that steps stay alike
// for a while as their sequences grow. Rounding takes no time on the device: attention
// shares long sequences out by 256 positions, and ends at each sequence's own length.
func roundContext(tokens int) int {
	step := 256
	if tokens <= step {
		step = 64
	}
	return (tokens + step - 1) / step * step
}

// find returns the graph of a step whose micro-batches were uploaded, or nil; again says
// that the step before was the same, so that it is worth while to capture this one.
func (g *graphs) find(b *batcher) (_ device.Graph, again bool) {
	g.now, g.before = g.before[:0], g.now
	if g.stream == nil || !b.decode {
		return nil, false
	}
	for i := range b.step() {
		g.now = append(g.now, b.all[i].batch)
	}
	for i := range g.held {
		if h := g.held[i]; slices.Equal(h.batches, g.now) {
			copy(g.held[i:], g.held[i+1:])
			g.held[len(g.held)-1] = h
			return h.graph, false
		}
	}
	return nil, !g.disabled && slices.Equal(g.now, g.before)
}

// launch enqueues all of a graph.
func (g *graphs) launch(graph device.Graph) error {
	if err := g.stream.LaunchGraph(graph); err != nil {
		return fmt.Errorf("pipeline: launch a step of %d operations: %w", graph.Nodes(), err)
	}
	g.launched.Add(1)
	return nil
}

// capture makes a graph of the step that find was asked for: enqueue enqueues it, behind
// its uploads, as has been done before. Where that fails no more steps are captured, which
// only costs speed.
func (g *graphs) capture(enqueue func() error) {
	began := g.clock.Now()
	graph, err := g.stream.Capture(enqueue)
	if err == nil {
		g.held = append(g.held, stepGraph{slices.Clone(g.now), graph})
		g.captured.Add(1)
		if len(g.held) > g.most {
			// Nothing of it is under way: this step was not launched as a graph.
			err = g.held[0].graph.Close()
			g.held = slices.Delete(g.held, 0, 1)
		}
		g.count.Store(int64(len(g.held)))
	}
	g.took.Add(int64(g.clock.Now() - began))
	if err != nil {
		g.disabled = true
		g.failed.Add(1)
		g.log.Warn("CUDA graph capture failed; decode steps run without graphs from now on, slower", "err", err)
	}
}

// close gives all graphs up.
func (g *graphs) close() error {
	var errs []error
	for _, h := range g.held {
		errs = append(errs, h.graph.Close())
	}
	return errors.Join(errs...)
}

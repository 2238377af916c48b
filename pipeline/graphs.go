package pipeline

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"slices"
	"sync/atomic"
	"time"

	"github.com/moeserve/moeserve/device"
	"github.com/moeserve/moeserve/forward"
)

// defaultGraphs is Options.Graphs where that is not set.
const defaultGraphs = 16

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
// A step is taken down when it comes for the second time in a row. It has been enqueued
// operation by operation by then, so the device computes while the host does that, and
// where it fails nothing is lost. The next one like it is launched as the graph.
type graphs struct {
	// stream is nil where no step can be a graph.
	stream device.Capturer
	most   int
	log    *slog.Logger

	// gaveUp says that no more steps are taken down; those held still serve.
	gaveUp bool

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
	// Captured steps were taken down as graphs, of which Held are kept; Launched steps
	// ran as one.
	Captured, Launched, Held int64
	// CaptureTime is for how long the host was at taking them down, on the machine's clock.
	CaptureTime time.Duration
	// Failed is 1 once a step could not be taken down; none is tried after that.
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

// openGraphs says whether steps can be graphs: a graph neither waits nor fetches.
func (p *Pipeline) openGraphs() {
	o, g := &p.o, &p.graphs
	if o.Graphs < 0 || o.HostAttention != nil || slices.Contains(p.shape.Missing, true) {
		return
	}
	g.most, g.log = o.Graphs, o.Log
	if g.most == 0 {
		g.most = defaultGraphs
	}
	g.stream, _ = p.compute.(device.Capturer)
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

// round makes a step that could be a graph look as others do.
func (p *Pipeline) round() {
	if p.graphs.stream == nil || !p.decode {
		return
	}
	for i := range p.batches[:p.cutInto] {
		b := &p.batches[i]
		b.host.Widen(roundContext(b.host.MaxContext()))
	}
}

// find returns the graph of a step whose micro-batches were uploaded, or nil; again says
// that the step before was the same, so that it is worth while to take this one down.
func (g *graphs) find(batches []microBatch, decode bool) (_ device.Graph, again bool) {
	g.now, g.before = g.before[:0], g.now
	if g.stream == nil || !decode {
		return nil, false
	}
	for i := range batches {
		g.now = append(g.now, batches[i].batch)
	}
	for i := range g.held {
		if h := g.held[i]; slices.Equal(h.batches, g.now) {
			copy(g.held[i:], g.held[i+1:])
			g.held[len(g.held)-1] = h
			return h.graph, false
		}
	}
	return nil, !g.gaveUp && slices.Equal(g.now, g.before)
}

// launch enqueues the whole step behind its uploads.
func (p *Pipeline) launch(ctx context.Context, graph device.Graph) error {
	if p.o.Experts != nil {
		if err := p.step.Layers(ctx); err != nil {
			return err
		}
	}
	if err := p.graphs.stream.LaunchGraph(graph); err != nil {
		return fmt.Errorf("pipeline: launch a step of %d operations: %w", graph.Nodes(), err)
	}
	p.graphs.launched.Add(1)
	return nil
}

// capture takes down the actions of a step that has just been enqueued, behind its
// uploads. Where that fails no more are, which only costs speed.
func (p *Pipeline) capture(ctx context.Context, plan []Action) {
	g, began := &p.graphs, p.o.Machine.Now()
	graph, err := g.stream.Capture(func() error { return p.takeDown(ctx, plan) })
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
	g.took.Add(int64(p.o.Machine.Now() - began))
	if err != nil {
		g.gaveUp = true
		g.failed.Add(1)
		g.log.Warn("a decode step could not be taken down as a graph; no more steps will be, and run slower", "err", err)
	}
}

// takeDown enqueues the actions of a step of a model that misses nothing, in a capture.
func (p *Pipeline) takeDown(ctx context.Context, plan []Action) error {
	f := frame{step: p.step.Frozen()} // Step.Layers does the store's part for each launch
	for _, a := range plan {
		if err := p.do(ctx, a, &f); err != nil {
			return fmt.Errorf("pipeline: %s: %w", a, err)
		}
	}
	return nil
}

// close gives all graphs up.
func (g *graphs) close() error {
	var errs []error
	for _, h := range g.held {
		errs = append(errs, h.graph.Close())
	}
	return errors.Join(errs...)
}

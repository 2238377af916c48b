package devices

import (
	"compress/gzip"
	"errors"
	"fmt"
	"os"
	"strings"

	"github.com/moeserve/moeserve/device"
	"github.com/moeserve/moeserve/device/emulated"
	"github.com/moeserve/moeserve/device/trace"
	"github.com/moeserve/moeserve/kernels"
)

// openTrace creates the trace file, unless path is empty, compressed if its name ends in
// .gz. It is closed after the machine.
func (d *Devices) openTrace(path string) error {
	if path == "" {
		return nil
	}
	f, err := os.Create(path)
	if err != nil {
		return fmt.Errorf("trace: %w", err)
	}
	if !strings.HasSuffix(path, ".gz") {
		d.trace = trace.NewWriter(f)
		d.closers = append(d.closers, func() error { return errors.Join(d.trace.Close(), f.Close()) })
		return nil
	}
	z, err := gzip.NewWriterLevel(f, gzip.BestSpeed)
	if err != nil {
		return errors.Join(fmt.Errorf("trace: %w", err), f.Close())
	}
	d.trace = trace.NewWriter(z)
	d.closers = append(d.closers, func() error { return errors.Join(d.trace.Close(), z.Close(), f.Close()) })
	return nil
}

// traceEmulated makes an emulated machine report what its streams do.
func (d *Devices) traceEmulated(o *emulated.Options) {
	if d.trace == nil {
		return
	}
	o.Trace = func(t emulated.Trace) {
		op, ok := emulatedOps[t.Op]
		if !ok {
			return
		}
		if t.Host {
			op = trace.Callback
		}
		note, _ := t.Note.(*trace.Note)
		d.trace.Add(trace.Span{
			Space: t.Space, Stream: t.Stream, Op: op, Name: t.Name, Bytes: t.Bytes, Note: note, Start: t.Start, End: t.End, Err: t.Err,
		})
	}
}

// emulatedOps are the operations of an emulated machine that a trace shows, as of any other
// machine: recording and signaling take no time.
var emulatedOps = map[string]trace.Op{"copy": trace.Copied, "launch": trace.Launch, "wait": trace.Wait}

// traced wraps a machine so that its streams are traced, if tracing is on. A machine set up by
// traceEmulated reports by itself.
func (d *Devices) traced(m device.Machine, tells bool) device.Machine {
	if d.trace == nil || tells {
		return m
	}
	return trace.Wrap(m, d.trace)
}

// Trace returns the trace writer; nil without a trace.
func (d *Devices) Trace() *trace.Writer { return d.trace }

// Enqueuing returns the backend for operations on the machine's streams.
func (d *Devices) Enqueuing() kernels.Backend {
	if d.trace == nil {
		return d.Backend
	}
	return tracing{d.Backend}
}

// tracing is a backend that accepts traced streams.
type tracing struct{ kernels.Backend }

// Enqueue implements kernels.Backend.
func (b tracing) Enqueue(s device.Stream, op kernels.Op) error {
	enqueue := func() error {
		t, ok := s.(*trace.Stream)
		if !ok {
			return b.Backend.Enqueue(s, op)
		}
		return t.Span(trace.Launch, op.Name(), 0, func() error { return b.Backend.Enqueue(t.Unwrap(), op) })
	}
	if shape := shapeOf(op); shape != (trace.Shape{}) {
		return trace.WithShape(s, shape, enqueue)
	}
	return enqueue()
}

// shapeOf is that of a GEMM; the zero Shape for other operations.
func shapeOf(op kernels.Op) (s trace.Shape) {
	switch o := op.(type) {
	case *kernels.MatMul:
		s = trace.Shape{M: o.X.Shape[0], N: o.W.Shape[0], K: o.X.Shape[1]}
	case *kernels.ExpertUp:
		s = trace.Shape{N: 2 * o.Layout.Intermediate, K: o.Layout.Hidden, Experts: o.Experts.Shape[0]}
	case *kernels.ExpertDown:
		s = trace.Shape{N: o.Layout.Hidden, K: o.Layout.Intermediate, Experts: o.Experts.Shape[0]}
	default:
		return s
	}
	var d kernels.Decl
	op.Declare(&d)
	if s.Flops = d.Flops; s.M == 0 {
		s.M = int(d.Flops / (2 * int64(s.N) * int64(s.K)))
	}
	return s
}

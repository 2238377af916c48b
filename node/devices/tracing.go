package devices

import (
	"errors"
	"fmt"
	"os"

	"github.com/moeserve/moeserve/device"
	"github.com/moeserve/moeserve/device/emulated"
	"github.com/moeserve/moeserve/device/trace"
	"github.com/moeserve/moeserve/kernels"
)

// openTrace begins a file for what streams do; no path: none. It is closed behind the
// machine.
func (d *Devices) openTrace(path string) error {
	if path == "" {
		return nil
	}
	f, err := os.Create(path)
	if err != nil {
		return fmt.Errorf("trace: %w", err)
	}
	d.trace = trace.NewWriter(f)
	d.closers = append(d.closers, func() error { return errors.Join(d.trace.Close(), f.Close()) })
	return nil
}

// traceEmulated has an emulated machine tell what its streams do.
func (d *Devices) traceEmulated(o *emulated.Options) {
	if d.trace == nil {
		return
	}
	o.Trace = func(t emulated.Trace) {
		d.trace.Add(trace.Span{
			Space: t.Space, Stream: t.Stream, Op: t.Op, Name: t.Name, Bytes: t.Bytes, Start: t.Start, End: t.End, Err: t.Err,
		})
	}
}

// traced is a machine whose streams are traced, where anything is: those of others than
// traceEmulated's do not tell by themselves.
func (d *Devices) traced(m device.Machine, tells bool) device.Machine {
	if d.trace == nil || tells {
		return m
	}
	return trace.Wrap(m, d.trace)
}

// Enqueuing is the backend for what runs on the machine's streams.
func (d *Devices) Enqueuing() kernels.Backend {
	if d.trace == nil {
		return d.Backend
	}
	return tracing{d.Backend}
}

// tracing is a backend that knows traced streams.
type tracing struct{ kernels.Backend }

// Enqueue implements kernels.Backend.
func (b tracing) Enqueue(s device.Stream, op kernels.Op) error {
	t, ok := s.(*trace.Stream)
	if !ok {
		return b.Backend.Enqueue(s, op)
	}
	return t.Span("launch", op.Name(), 0, func() error { return b.Backend.Enqueue(t.Unwrap(), op) })
}

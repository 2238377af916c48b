package node

import (
	"errors"
	"fmt"
	"os"

	"github.com/moeserve/moeserve/device"
	"github.com/moeserve/moeserve/device/emulated"
	"github.com/moeserve/moeserve/device/trace"
	"github.com/moeserve/moeserve/kernels"
)

// openTraceFile begins the file that the setting trace names. It is closed behind the
// machine.
func (n *Node) openTraceFile() error {
	path := n.settings.Output.Trace
	if path == "" {
		return nil
	}
	f, err := os.Create(path)
	if err != nil {
		return fmt.Errorf("trace: %w", err)
	}
	n.trace = trace.NewWriter(f)
	n.closers = append(n.closers, func() error { return errors.Join(n.trace.Close(), f.Close()) })
	return nil
}

// traceEmulated has an emulated machine tell what its streams do.
func (n *Node) traceEmulated(o *emulated.Options) {
	if n.trace == nil {
		return
	}
	o.Trace = func(t emulated.Trace) {
		n.trace.Add(trace.Span{
			Space: t.Space, Stream: t.Stream, Op: t.Op, Name: t.Name, Bytes: t.Bytes, Start: t.Start, End: t.End, Err: t.Err,
		})
	}
	n.traced = true
}

// traceMachine traces what a machine's streams do, unless it tells by itself.
func (n *Node) traceMachine(m device.Machine) device.Machine {
	if n.trace == nil || n.traced {
		return m
	}
	return trace.Wrap(m, n.trace)
}

// enqueuing is the backend for what runs on the node's streams.
func (n *Node) enqueuing() kernels.Backend {
	if n.trace == nil {
		return n.backend
	}
	return tracing{n.backend}
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

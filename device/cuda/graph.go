//go:build cuda

package cuda

/*
#include "glue.h"
*/
import "C"

import (
	"errors"
	"fmt"

	"github.com/moeserve/moeserve/device"
)

// Graph is a device.Graph: a sequence of launches and copies.
type Graph struct {
	g     *gpu
	exec  C.CUgraphExec
	nodes int
}

var _ device.Capturer = (*Stream)(nil)

// Capture implements device.Capturer: it captures launches, copies other than those within
// host memory, and Do.
func (s *Stream) Capture(f func() error) (device.Graph, error) {
	if err := s.usable("capture"); err != nil {
		return nil, err
	}
	if err := s.captures("capture"); err != nil {
		return nil, err
	}
	if s.epoch.failed.Load() {
		return nil, badArgument("capture", s.g.space, "%s is in error: Recover it first", s)
	}
	// A capture is local to its thread.
	if err := s.g.enter(); err != nil {
		s.g.leave()
		return nil, s.g.fail("capture", code(err), s.String())
	}
	defer s.g.leave()
	if c := C.ms_capture_begin(s.g.context(), streamHandle(s.s)); c != success {
		return nil, s.g.fail("capture", int(c), s.String())
	}
	// A call that the driver refuses during the capture fails the capture, not the
	// stream, since nothing ran.
	// ---
	outside := s.epoch
	s.epoch, s.capturing, s.overlapping = &epoch{}, true, 0
	err := f()
	if failed := s.epoch.at(s.ops); err == nil {
		err = failed
	}
	s.epoch, s.capturing, s.overlapping = outside, false, 0
	var exec C.CUgraphExec
	var nodes C.size_t
	to := &exec
	if err != nil {
		to = nil
	}
	c := C.ms_capture_end(s.g.context(), streamHandle(s.s), to, &nodes)
	if err != nil {
		return nil, err
	}
	if c != success {
		return nil, s.g.fail("capture", int(c), s.String())
	}
	g := &Graph{g: s.g, exec: exec, nodes: int(nodes)}
	if c := C.ms_graph_upload(s.g.context(), g.exec, streamHandle(s.s)); c != success {
		return nil, errors.Join(s.g.fail("capture", int(c), s.String()), g.Close())
	}
	return g, nil
}

// Nodes implements device.Graph.
func (g *Graph) Nodes() int { return g.nodes }

// LaunchGraph implements device.Capturer.
func (s *Stream) LaunchGraph(graph device.Graph) error {
	if err := s.usable("launch"); err != nil {
		return err
	}
	if err := s.captures("launch a graph"); err != nil {
		return err
	}
	g, ok := graph.(*Graph)
	if !ok || g.g != s.g || g.exec == nil {
		return badArgument("launch", s.g.space, "the graph is closed, or was captured on another GPU than that of %s", s)
	}
	op, dropped := s.next()
	if dropped {
		return nil
	}
	if s.begins(graphOperation) {
		defer s.m.endEnqueuing()
	}
	if c := C.ms_graph_launch(s.g.context(), g.exec, streamHandle(s.s)); c != success {
		return s.refused(op, "launch", int(c), fmt.Sprintf("graph of %d operations", g.nodes))
	}
	return nil
}

// Close implements device.Graph.
func (g *Graph) Close() error {
	if g.exec == nil {
		return closedError("close", g.g.space, "graph")
	}
	c := C.ms_graph_destroy(g.g.context(), g.exec)
	g.exec = nil
	if c != success && g.g.lost.Load() == nil {
		return g.g.fail("close", int(c), "graph")
	}
	return nil
}

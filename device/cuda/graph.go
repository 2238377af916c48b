//go:build cuda

package cuda

/*
#include "glue.h"
*/
import "C"

import (
	"errors"
	"fmt"
)

// Graph is a sequence of launches and copies that was captured once, to be enqueued
// again at the cost of one. Addresses and arguments are those of the capture.
type Graph struct {
	g     *gpu
	exec  C.CUgraphExec
	nodes int
}

// Capture records what f enqueues on the stream into a graph instead of running it:
// launches, copies on the GPU, Do. It must not wait, record or raise. An error of f
// comes back, and there is no graph.
func (s *Stream) Capture(f func() error) (*Graph, error) {
	if err := s.usable("capture"); err != nil {
		return nil, err
	}
	if err := s.captures("capture"); err != nil {
		return nil, err
	}
	if s.epoch.failed.Load() {
		return nil, badArgument("capture", s.g.space, "%s is in error: Recover it first", s)
	}
	// A capture belongs to its thread.
	if err := s.g.enter(); err != nil {
		s.g.leave()
		return nil, s.g.fail("capture", code(err), s.String())
	}
	defer s.g.leave()
	if c := C.ms_capture_begin(s.g.context(), streamHandle(s.s)); c != success {
		return nil, s.g.fail("capture", int(c), s.String())
	}
	// What the driver refuses meanwhile is an error of the capture, not of the stream:
	// nothing ran.
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

// Nodes counts the graph's operations.
func (g *Graph) Nodes() int { return g.nodes }

// LaunchGraph enqueues what the graph holds, on any stream of the GPU that it was
// captured on.
func (s *Stream) LaunchGraph(g *Graph) error {
	if err := s.usable("launch"); err != nil {
		return err
	}
	if g.g != s.g || g.exec == nil {
		return badArgument("launch", s.g.space, "the graph is closed, or was captured on another GPU than that of %s", s)
	}
	op, dropped := s.next()
	if dropped {
		return nil
	}
	if c := C.ms_graph_launch(s.g.context(), g.exec, streamHandle(s.s)); c != success {
		return s.refused(op, "launch", int(c), fmt.Sprintf("graph of %d operations", g.nodes))
	}
	return nil
}

// Close releases the graph; no launch of it may be enqueued any more.
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

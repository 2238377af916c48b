package node_test

import (
	"testing"

	"github.com/moeserve/moeserve/configs"
	"github.com/moeserve/moeserve/engine"
	"github.com/moeserve/moeserve/experts"
	"github.com/moeserve/moeserve/node"
	"github.com/moeserve/moeserve/node/observe"
)

// TestStepEvents: what is observed of each step adds up: every token is routed to as many experts of each layer as the
// model has it, and what the steps copied is what the links have copied since the first.
func TestStepEvents(t *testing.T) {
	s := configs.Defaults()
	s.Offload.Fraction, s.Offload.Tier, s.Plan.Hardware = 0.5, configs.HostTier, "h100-80"
	var n *node.Node
	var steps []observe.Step
	var first observe.Now
	var before int64
	n, err := node.Open(t.Context(), node.Options{Settings: s, Listener: engine.Listener{StepFinished: func(i engine.StepInfo) {
		steps = append(steps, n.Observe().Step(i))
		if len(steps) == 1 {
			first, before = n.Observe().Now(), n.Observe().Experts().Fetched[experts.Host]
		}
	}}})
	if err != nil {
		t.Fatal(err)
	}
	defer func() {
		if err := n.Close(); err != nil {
			t.Error(err)
		}
	}()
	if _, err := n.Engine().Generate(t.Context(), []engine.Request{request([]int32{5, 6, 7}, 6), request([]int32{8, 9}, 4)}, nil); err != nil {
		t.Fatal(err)
	}
	c := n.Info().Config
	var copied, fetches int64
	for i, step := range steps {
		if step.Step != int64(i+1) || step.Tokens == 0 || step.Seconds <= 0 || step.Predicted <= 0 {
			t.Errorf("%+v", step)
		}
		for _, l := range step.Links {
			copied += l.Bytes
			for _, bytes := range l.ByPurpose {
				l.Bytes -= bytes
			}
			if l.Bytes != 0 || l.ByPurpose["demand"]+l.ByPurpose["prefetch"] == 0 {
				t.Errorf("step %d: %d bytes of a link are for nothing: %v", i, l.Bytes, l.ByPurpose)
			}
		}
		if b := step.Bound; i > 0 && (b == nil || b.Share <= 0 || b.Share > 1) {
			t.Errorf("step %d is bound by %+v", i, b)
		}
		listed := int64(0)
		for _, f := range step.Fetched {
			listed += f[2]
		}
		if fetches += step.Fetches; listed != step.Fetches {
			t.Errorf("step %d: %d fetches, and experts with %d", i, step.Fetches, listed)
		}
		layers := map[int64]int64{}
		for _, r := range step.Routed {
			layers[r[0]] += r[2]
		}
		if i == 0 {
			if len(layers) > 0 || len(step.Links) > 0 || len(step.Fetched) > 0 || step.Bound != nil {
				t.Errorf("the first step that is observed has what came before: %+v", step)
			}
			continue
		}
		for layer, tokens := range layers {
			if tokens != int64(step.Tokens*c.TopK) {
				t.Errorf("step %d: %d tokens of layer %d are routed %d times", i, step.Tokens, layer, tokens)
			}
		}
		if len(layers) != c.Layers {
			t.Errorf("step %d: experts of %d layers", i, len(layers))
		}
	}
	now := n.Observe().Now()
	for _, l := range now.Links {
		copied -= l.Bytes
	}
	for _, l := range first.Links {
		copied += l.Bytes
	}
	if bytes := n.Observe().Experts().Fetched[experts.Host] - before; bytes == 0 || fetches*n.Info().Sizes.Expert != bytes {
		t.Errorf("%d fetches, and %d bytes were fetched", fetches, bytes)
	}
	// What memory is for is all that is allocated.
	for _, m := range now.Memories {
		var parts int64
		for _, p := range m.Parts {
			parts += p.Bytes
		}
		if parts != m.Allocated || m.Space == "gpu0" && parts == 0 {
			t.Errorf("%s: %d bytes are allocated, for %+v", m.Space, m.Allocated, m.Parts)
		}
	}
	if len(steps) < 6 || copied != 0 || now.Hits+now.Misses == 0 {
		t.Errorf("%d steps; %d bytes more than the links have copied", len(steps), copied)
	}
}

package forward

import (
	"bytes"
	"slices"
	"strings"
	"testing"

	"github.com/moeserve/moeserve/device"
	"github.com/moeserve/moeserve/kernels"
	"github.com/moeserve/moeserve/models"
)

// predictOn has each architecture, and one with dense layers between.
var predictOn = []string{"mixtral", "phimoe", "olmoe", "qwen2_moe", "qwen2_moe_sparse_step", "qwen3_moe"}

// nextOf is the next layer with experts behind layer, -1 for none.
func nextOf(c *models.Config, layer int) int {
	for l := layer + 1; l < c.Layers; l++ {
		if !c.Dense[l] {
			return l
		}
	}
	return -1
}

// A prediction is the output of a later layer's norm and router on the current residual, and
// leaves tokens, logits, routing and counts as they are without it.
func TestPredictedRouting(t *testing.T) {
	for _, name := range predictOn {
		t.Run(name, func(t *testing.T) {
			c, src, _ := fixture(t, name)
			seqs := sequences(c.Vocab)
			draw := SamplingParams{Temperature: 1.5, LogProbs: true}
			groups := [][][]part{{{{0, 0, 37}, {1, 0, 5}}, {{2, 0, 64}}}, {{{3, 0, 1}}}}
			const last = 1 // rows of the last group

			plain := newRig(t, c, src)
			logits, tokens := runGroups(plain, seqs, draw, groups)

			r := newRig(t, c, src)
			predictions, right := 0, 0
			var predicted []byte // for the layer that is next
			r.routed = func(layer, rows int) {
				ids, weights := r.model.Routing(rows)
				chosen, before := r.download(ids), r.download(weights)
				x := r.download(r.model.ws.x.Slice(0, rows))
				for i := 0; predicted != nil && i < len(chosen); i += 4 * c.TopK {
					for k := 0; k < 4*c.TopK; k += 4 {
						predictions++
						for j := 0; j < 4*c.TopK; j += 4 {
							if bytes.Equal(chosen[i+k:][:4], predicted[i+j:][:4]) {
								right++
							}
						}
					}
				}
				predicted = nil
				next := nextOf(c, layer)
				if next < 0 {
					return
				}
				check(t, r.model.PredictNext(r.stream, next, rows))
				predicted = r.download(r.model.PredictedRouting(rows))
				if want := direct(r, next, rows); !bytes.Equal(predicted, want) {
					t.Errorf("layer %d for layer %d, %d rows: predicted %v, directly %v", layer, next, rows, predicted, want)
				}
				if !bytes.Equal(r.download(ids), chosen) || !bytes.Equal(r.download(weights), before) || !bytes.Equal(r.download(r.model.ws.x.Slice(0, rows)), x) {
					t.Errorf("layer %d: a prediction changed the routing or the output of attention", layer)
				}
			}
			logitsToo, tokensToo := runGroups(r, seqs, draw, groups)
			for i := range seqs {
				if !slices.Equal(logits[i], logitsToo[i]) || !slices.Equal(tokens[i], tokensToo[i]) {
					t.Errorf("sequence %d differs with predictions", i)
				}
			}
			if !bytes.Equal(plain.download(plain.model.Counts()), r.download(r.model.Counts())) {
				t.Error("predictions were counted as activations")
			}
			ids, weights := plain.model.Routing(last)
			idsToo, weightsToo := r.model.Routing(last)
			if !bytes.Equal(plain.download(ids), r.download(idsToo)) || !bytes.Equal(plain.download(weights), r.download(weightsToo)) {
				t.Error("the routing differs with predictions")
			}
			if predictions == 0 || 2*right < predictions {
				t.Errorf("%d of %d predictions were right", right, predictions)
			}
			t.Logf("%d of %d predictions were right", right, predictions)
		})
	}
}

// direct is the choice of a layer's router on the residual, in memory of its own.
func direct(r *rig, layer, rows int) []byte {
	r.t.Helper()
	c, w := r.model.Config, &r.model.Weights.Layers[layer]
	out := func(t kernels.DType, shape ...int) kernels.Tensor {
		x := kernels.New(0, t, shape...)
		x.Addr = r.alloc(device.HBM(0), x.Bytes()).Range(0, 1).Addr
		return x
	}
	h, logits := out(kernels.F32, rows, c.Hidden), out(kernels.F32, rows, c.Experts)
	ids, weights := out(kernels.I32, rows, c.TopK), out(kernels.F32, rows, c.TopK)
	for _, op := range []kernels.Op{
		&kernels.Norm{Kind: c.Norm, X: r.model.ws.residual.Slice(0, rows), Weight: w.PostNorm, Bias: w.PostNormBias, Eps: c.NormEps, Out: h},
		&kernels.MatMul{X: h, W: w.Router.Slice(0, c.Experts), Bias: w.RouterBias, Out: logits},
		&kernels.Route{Logits: logits, Method: c.Route, Jitter: c.Jitter, IDs: ids, Weights: weights},
	} {
		check(r.t, r.backend.Enqueue(r.stream, op))
	}
	return r.download(ids)
}

func TestPredictedRoutingOfDenseLayer(t *testing.T) {
	c, src, _ := fixture(t, "qwen2_moe_sparse_step")
	r := newRig(t, c, src)
	dense := slices.Index(c.Dense, true)
	if err := r.model.PredictNext(r.stream, dense, 1); err == nil || !strings.Contains(err.Error(), "which has no router") {
		t.Errorf("a prediction for dense layer %d: %v", dense, err)
	}
}

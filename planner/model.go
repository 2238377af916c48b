package planner

import (
	"fmt"
	"math"
	"strconv"
)

// Model is the shape of a mixture-of-experts model, as far as cost depends on it.
type Model struct {
	// Name in messages.
	Name string `json:"name"`
	// Layers is the total; DenseLayers of them have one MLP of DenseWidth instead of
	// experts.
	Layers      int `json:"layers"`
	DenseLayers int `json:"dense_layers"`
	// Hidden is the width of the hidden state.
	Hidden int `json:"hidden_size"`
	// Heads of queries, KVHeads of keys and values, each of HeadDim elements. Heads *
	// HeadDim need not be Hidden.
	Heads   int `json:"heads"`
	KVHeads int `json:"kv_heads"`
	HeadDim int `json:"head_dim"`
	// Experts of a layer, TopK of which a token goes through; ExpertWidth is their
	// intermediate size.
	Experts     int `json:"experts"`
	TopK        int `json:"top_k"`
	ExpertWidth int `json:"expert_width"`
	// SharedWidth is the intermediate size of the shared expert; 0: there is none.
	SharedWidth int `json:"shared_width"`
	// DenseWidth is the intermediate size of the MLP of dense layers.
	DenseWidth int `json:"dense_width"`
	Vocab      int `json:"vocab_size"`
	// TiedEmbeddings: the output layer is the embedding table.
	TiedEmbeddings bool `json:"tied_embeddings"`
	// Window is the sliding window of attention in tokens, the query's own included; 0:
	// none.
	Window int `json:"window"`
	// WeightBytes, ActivationBytes and KVBytes are the sizes of one element. Default:
	// 2 each.
	WeightBytes     int `json:"weight_bytes"`
	ActivationBytes int `json:"activation_bytes"`
	KVBytes         int `json:"kv_bytes"`
}

// EnsureDefaults fills in the fields that are 0.
func (m Model) EnsureDefaults() Model {
	for _, p := range []*int{&m.WeightBytes, &m.ActivationBytes, &m.KVBytes} {
		if *p == 0 {
			*p = 2
		}
	}
	return m
}

// Validate reports the first field that is out of range.
func (m Model) Validate() error {
	for _, f := range []struct {
		name       string
		value, min int
	}{
		{"Layers", m.Layers, 1},
		{"DenseLayers", m.DenseLayers, 0},
		{"Hidden", m.Hidden, 1},
		{"Heads", m.Heads, 1},
		{"KVHeads", m.KVHeads, 1},
		{"HeadDim", m.HeadDim, 1},
		{"Experts", m.Experts, 1},
		{"TopK", m.TopK, 1},
		{"ExpertWidth", m.ExpertWidth, 1},
		{"SharedWidth", m.SharedWidth, 0},
		{"DenseWidth", m.DenseWidth, 0},
		{"Vocab", m.Vocab, 1},
		{"Window", m.Window, 0},
		{"WeightBytes", m.WeightBytes, 0},
		{"ActivationBytes", m.ActivationBytes, 0},
		{"KVBytes", m.KVBytes, 0},
	} {
		if f.value < f.min {
			return fmt.Errorf("planner: model %s: %s is %d, it must be at least %d", m.Name, f.name, f.value, f.min)
		}
	}
	switch {
	case m.TopK > m.Experts:
		return fmt.Errorf("planner: model %s: TopK is %d, there are %d experts", m.Name, m.TopK, m.Experts)
	case m.DenseLayers >= m.Layers:
		return fmt.Errorf("planner: model %s: %d of %d layers are dense, none has experts", m.Name, m.DenseLayers, m.Layers)
	case m.DenseLayers > 0 && m.DenseWidth == 0:
		return fmt.Errorf("planner: model %s: %d dense layers without a DenseWidth", m.Name, m.DenseLayers)
	}
	return nil
}

// MoELayers is the number of layers with experts.
func (m Model) MoELayers() int { return m.Layers - m.DenseLayers }

// ExpertCount is the number of routed experts of all layers.
func (m Model) ExpertCount() int { return m.MoELayers() * m.Experts }

// Offloaded is the number of experts that an offload fraction stands for:
// round(fraction * ExpertCount).
func (m Model) Offloaded(fraction float64) int {
	return int(math.Round(fraction * float64(m.ExpertCount())))
}

// OffloadFraction is the shortest decimal fraction that stands for a number of offloaded
// experts: Offloaded of it is that number again.
func (m Model) OffloadFraction(offloaded int) float64 {
	exact := float64(offloaded) / float64(m.ExpertCount())
	for digits := range 8 {
		f, err := strconv.ParseFloat(strconv.FormatFloat(exact, 'f', digits, 64), 64)
		if err == nil && m.Offloaded(f) == offloaded {
			return f
		}
	}
	return exact
}

// Distinct is the expected number of a layer's experts that a number of tokens are routed
// to when each expert is equally likely: E (1 - (1 - k/E)^tokens).
func (m Model) Distinct(tokens float64) float64 {
	e := float64(m.Experts)
	return e * (1 - math.Pow(1-float64(m.TopK)/e, tokens))
}

// ExpertBytes is the size of one expert's three matrices.
func (m Model) ExpertBytes() int64 {
	m = m.EnsureDefaults()
	return 3 * int64(m.Hidden) * int64(m.ExpertWidth) * int64(m.WeightBytes)
}

// KVBytesPerToken is the size of a token's KV cache, all layers together.
func (m Model) KVBytesPerToken() int64 {
	m = m.EnsureDefaults()
	return 2 * int64(m.Layers) * int64(m.KVHeads) * int64(m.HeadDim) * int64(m.KVBytes)
}

// OtherBytes estimates the size of the non-expert (dense) weights, without biases.
func (m Model) OtherBytes() int64 {
	m = m.EnsureDefaults()
	h, q, v := int64(m.Hidden), int64(m.Heads*m.HeadDim), int64(2*m.KVHeads*m.HeadDim)
	n := int64(m.Layers) * (2*h*q + h*v + 2*h)
	n += int64(m.MoELayers()) * h * int64(m.Experts)
	n += int64(m.DenseLayers) * 3 * h * int64(m.DenseWidth)
	if m.SharedWidth > 0 {
		n += int64(m.MoELayers()) * (3*h*int64(m.SharedWidth) + h)
	}
	n += h + h*int64(m.Vocab)
	if !m.TiedEmbeddings {
		n += h * int64(m.Vocab)
	}
	return n * int64(m.WeightBytes)
}

// seen is the number of tokens that a query reads that has context tokens before it.
func (m Model) seen(context float64) float64 {
	if m.Window > 0 {
		return min(context, float64(m.Window))
	}
	return context
}

// pairs is the number of pairs of a query and a key of a prompt. A query sees its own token and
// those before it: half of the prompt on average, and no more than the window.
func (m *Model) pairs(prompt float64) float64 {
	if w := float64(m.Window); w > 0 && prompt > w {
		return w*(w+1)/2 + (prompt-w)*w
	}
	return prompt * (prompt + 1) / 2
}

// Workload is the requests to plan for: sequences that are alike.
type Workload struct {
	// PromptTokens and NewTokens of a sequence: means, where sequences differ.
	PromptTokens, NewTokens int
	// Requests in total; 0: continuous. A batch is never larger.
	Requests int
}

// Validate reports the first field that is out of range.
func (w Workload) Validate() error {
	switch {
	case w.PromptTokens < 1:
		return fmt.Errorf("planner: prompts of %d tokens: a prompt has at least one", w.PromptTokens)
	case w.NewTokens < 1:
		return fmt.Errorf("planner: %d new tokens: a request generates at least one", w.NewTokens)
	case w.Requests < 0:
		return fmt.Errorf("planner: %d requests: use 0 for a continuous workload", w.Requests)
	}
	return nil
}

// Context is the mean context of a decode step in tokens: the prompt, and half of what is
// generated.
func (w Workload) Context() float64 { return float64(w.PromptTokens) + float64(w.NewTokens)/2 }

package planner

import (
	"bytes"
	"encoding/json"
	"errors"
	"fmt"

	"github.com/moeserve/moeserve/configs"
)

// Policy is how a batch is run.
type Policy struct {
	// Batch is the number of sequences decoded at once.
	Batch int `json:"batch"`
	// MicroBatch is the number of rows that go through attention at once. Default:
	// Batch.
	MicroBatch int              `json:"micro_batch_tokens"`
	Grouping   configs.Grouping `json:"expert_grouping"`
	Attention  configs.Place    `json:"attention"`
	// PrefillTokens is the most prompt tokens of a step. Default: those of all
	// sequences.
	PrefillTokens int `json:"prefill_tokens"`
	// ResidentExperts live in the GPU's memory, of all layers together, spread evenly:
	// layers differ by one at most. The rest is offloaded and lies in host memory;
	// PeerExperts of those are also in peers' memory, and fetched from there.
	ResidentExperts int `json:"resident_experts"`
	PeerExperts     int `json:"peer_experts"`
	// KVOnHost is the share of keys and values that lies in host memory, 0 to 1. It
	// is 1 with attention on the CPU; on the GPU that share streams in every step.
	KVOnHost float64 `json:"kv_on_host"`
	// HostPaths is over how many paths copies from the host go. Default: 1.
	HostPaths int `json:"host_paths"`
	// OnDemand fetches only the experts that the router chose, and only then;
	// otherwise all offloaded experts stream in, a layer ahead.
	OnDemand bool `json:"on_demand"`
}

// ParsePolicy reads a policy for a model from JSON with the keys of Policy, of which
// batch and resident_experts must be there; or from an object that has one under "policy"
// beside other things. Another key is an error, and so are micro-batches larger than the
// batch, more experts than the model has, and, where the object tells what model the policy is
// for (model, experts, expert_bytes), one with other experts.
func ParsePolicy(data []byte, m Model) (Policy, error) {
	type plan struct { // a name for what json says of it
		Policy      json.RawMessage `json:"policy"`
		Model       string          `json:"model"`
		Experts     int             `json:"experts"`
		ExpertBytes int64           `json:"expert_bytes"`
	}
	var around plan
	if err := json.Unmarshal(data, &around); err != nil {
		return Policy{}, fmt.Errorf("planner: read policy: not a JSON object with a policy: %w", err)
	}
	if around.Policy != nil {
		data = around.Policy
	}
	var x struct {
		Policy
		Batch        *int `json:"batch"`
		LocalExperts *int `json:"resident_experts"`
	}
	d := json.NewDecoder(bytes.NewReader(data))
	d.DisallowUnknownFields()
	if err := d.Decode(&x); err != nil {
		return Policy{}, fmt.Errorf("planner: read policy: %w", err)
	}
	if x.Batch == nil || x.LocalExperts == nil {
		return Policy{}, errors.New("planner: read policy: batch and resident_experts must be there")
	}
	x.Policy.Batch, x.Policy.ResidentExperts = *x.Batch, *x.LocalExperts
	all := m.ExpertCount()
	switch p := &x.Policy; {
	case p.Attention > configs.OnCPU:
		return Policy{}, fmt.Errorf("planner: read policy: attention is %v; it must be gpu or cpu", p.Attention)
	case around.Experts > 0 && (around.Experts != all || around.ExpertBytes != m.ExpertBytes()):
		return Policy{}, fmt.Errorf("planner: read policy: it is for %s with %d experts of %d bytes; model %s has %d of %d", around.Model, around.Experts, around.ExpertBytes, m.Name, all, m.ExpertBytes())
	case p.ResidentExperts > all || p.ResidentExperts+p.PeerExperts > all:
		return Policy{}, fmt.Errorf("planner: read policy: %d local experts and %d with peers; model %s has %d in all: the policy is another model's", p.ResidentExperts, p.PeerExperts, m.Name, all)
	case p.MicroBatch > p.Batch:
		return Policy{}, fmt.Errorf("planner: read policy: micro_batch_tokens is %d and batch %d: make micro-batches at most the batch", p.MicroBatch, p.Batch)
	}
	return x.Policy, nil
}

// MicroBatches is the number of micro-batches of a step.
func (p Policy) MicroBatches() int {
	if p.MicroBatch == 0 {
		return 1
	}
	return (p.Batch + p.MicroBatch - 1) / p.MicroBatch
}

// MicroBatchTokens is the most rows of a step.
func (p Policy) MicroBatchTokens() int { return max(p.Batch, p.PrefillTokens) }

// HostExperts is the number of experts that are fetched from the host.
func (p Policy) HostExperts(m Model) int { return m.ExpertCount() - p.ResidentExperts - p.PeerExperts }

// normal fills in defaults and refuses what cannot be run.
func (p *Problem) normal(x Policy) (Policy, error) {
	total := p.Model.ExpertCount()
	if x.MicroBatch == 0 {
		x.MicroBatch = x.Batch
	}
	if x.HostPaths == 0 {
		x.HostPaths = 1
	}
	if all := x.Batch * p.Workload.PromptTokens; x.PrefillTokens == 0 || x.PrefillTokens > all {
		x.PrefillTokens = all
	}
	if x.Attention == configs.OnCPU {
		x.KVOnHost = 1
	}
	switch {
	case x.Batch < 1:
		return x, fmt.Errorf("planner: a batch of %d sequences; it must have at least one", x.Batch)
	case p.Workload.Requests > 0 && x.Batch > p.Workload.Requests:
		return x, fmt.Errorf("planner: a batch of %d sequences for %d requests; make it at most that", x.Batch, p.Workload.Requests)
	case x.MicroBatch < 0 || x.MicroBatch > x.Batch:
		return x, fmt.Errorf("planner: micro-batches of %d rows in a batch of %d; make them at most the batch", x.MicroBatch, x.Batch)
	case x.PrefillTokens < 1:
		return x, fmt.Errorf("planner: %d prompt tokens a step; there must be at least one", x.PrefillTokens)
	case x.ResidentExperts < 0 || x.ResidentExperts > total:
		return x, fmt.Errorf("planner: read policy: %d local experts; model %s has %d", x.ResidentExperts, p.Model.Name, total)
	case x.PeerExperts < 0 || x.PeerExperts > total-x.ResidentExperts:
		return x, fmt.Errorf("planner: %d experts in peers' memory, and %d are offloaded", x.PeerExperts, total-x.ResidentExperts)
	case x.PeerExperts > 0 && p.Hardware.PeerMemory == 0:
		return x, fmt.Errorf("planner: %d experts in peers' memory, and hardware %s has no peers", x.PeerExperts, p.Hardware.Name)
	case !(x.KVOnHost >= 0 && x.KVOnHost <= 1):
		return x, fmt.Errorf("planner: a share %v of keys and values on the host; it must be from 0 to 1", x.KVOnHost)
	case x.HostPaths < 1 || x.HostPaths > len(p.Hardware.HostToGPU):
		return x, fmt.Errorf("planner: %d paths from the host; hardware %s has %d", x.HostPaths, p.Hardware.Name, len(p.Hardware.HostToGPU))
	case x.Attention > configs.OnCPU || x.Grouping > configs.PerMicroBatch:
		return x, fmt.Errorf("planner: invalid attention %d or expert grouping %d", x.Attention, x.Grouping)
	}
	return x, nil
}

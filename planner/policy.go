package planner

import (
	"bytes"
	"encoding/json"
	"errors"
	"fmt"

	"github.com/moeserve/moeserve/configs"
	"github.com/moeserve/moeserve/untrusted"
)

// Policy is how a batch runs.
type Policy struct {
	// Batch is the maximum number of concurrent sequences.
	Batch int `json:"batch"`
	// MicroBatch is the number of tokens whose attention runs together. Default: Batch.
	MicroBatch int              `json:"micro_batch_tokens"`
	Grouping   configs.Grouping `json:"expert_grouping"`
	Attention  configs.Place    `json:"attention"`
	// PrefillTokens is the maximum of prompt tokens of a step. Default: those of all
	// sequences.
	PrefillTokens int `json:"prefill_tokens"`
	// ResidentExperts are pinned in the GPU's memory, all layers together, spread evenly:
	// layers differ by one at most. The others are offloaded to host memory; PeerExperts
	// of those have a copy in peer memory, and are fetched from there.
	ResidentExperts int `json:"resident_experts"`
	PeerExperts     int `json:"peer_experts"`
	// KVOnHost is the share of the KV cache that lies in host memory, 0 to 1. It is 1 with
	// attention on the CPU; with attention on the GPU that share is copied in every step.
	KVOnHost float64 `json:"kv_on_host"`
	// HostPaths is the number of paths over which copies from the host go. Default: 1.
	HostPaths int `json:"host_paths"`
	// OnDemand fetches only routed experts, once the router has selected them; otherwise
	// all offloaded experts are fetched, a layer ahead.
	OnDemand bool `json:"on_demand"`
}

// ParsePolicy reads a policy for a model from JSON with the keys of Policy, of which
// batch and resident_experts are required; or from an object that has one under "policy"
// beside other fields. An unknown key is an error, and so are micro-batches larger than
// the batch, more experts than the model has, and, where the object names the policy's
// model (model, experts, expert_bytes), a model with other experts.
func ParsePolicy(data []byte, m Model) (Policy, error) {
	type plan struct { // named for json's errors
		Policy      json.RawMessage `json:"policy"`
		Model       string          `json:"model"`
		Experts     int             `json:"experts"`
		ExpertBytes int64           `json:"expert_bytes"`
	}
	var around plan
	if err := json.Unmarshal(data, &around); err != nil {
		return Policy{}, fmt.Errorf("planner: read policy: %w", untrusted.JSONError(data, err))
	}
	if around.Policy != nil {
		data = around.Policy
	}
	var x struct {
		Policy
		Batch           *int `json:"batch"`
		ResidentExperts *int `json:"resident_experts"`
	}
	d := json.NewDecoder(bytes.NewReader(data))
	d.DisallowUnknownFields()
	if err := d.Decode(&x); err != nil {
		return Policy{}, fmt.Errorf("planner: read policy: %w", untrusted.JSONError(data, err))
	}
	if x.Batch == nil || x.ResidentExperts == nil {
		return Policy{}, errors.New("planner: read policy: batch and resident_experts are required")
	}
	x.Policy.Batch, x.Policy.ResidentExperts = *x.Batch, *x.ResidentExperts
	all := m.ExpertCount()
	switch p := &x.Policy; {
	case p.Attention > configs.OnCPU:
		return Policy{}, fmt.Errorf("planner: read policy: attention is %v; it must be gpu or cpu", p.Attention)
	case around.Experts > 0 && (around.Experts != all || around.ExpertBytes != m.ExpertBytes()):
		return Policy{}, fmt.Errorf("planner: read policy: the policy is for %s with %d experts of %d bytes, and model %s has %d of %d", around.Model, around.Experts, around.ExpertBytes, m.Name, all, m.ExpertBytes())
	case p.ResidentExperts > all || p.ResidentExperts+p.PeerExperts > all:
		return Policy{}, fmt.Errorf("planner: read policy: resident_experts is %d and peer_experts %d, and model %s has %d experts: the policy is for another model", p.ResidentExperts, p.PeerExperts, m.Name, all)
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

// MicroBatchTokens is the maximum number of tokens of a step.
func (p Policy) MicroBatchTokens() int { return max(p.Batch, p.PrefillTokens) }

// HostExperts is the number of experts that are fetched from the host.
func (p Policy) HostExperts(m Model) int { return m.ExpertCount() - p.ResidentExperts - p.PeerExperts }

// normal fills in defaults and refuses values that are out of range.
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
		return x, fmt.Errorf("planner: a batch of %d sequences: a batch has at least one", x.Batch)
	case p.Workload.Requests > 0 && x.Batch > p.Workload.Requests:
		return x, fmt.Errorf("planner: a batch of %d sequences for %d requests: lower the batch", x.Batch, p.Workload.Requests)
	case x.MicroBatch < 0 || x.MicroBatch > x.Batch:
		return x, fmt.Errorf("planner: micro-batches of %d tokens in a batch of %d: make them at most the batch", x.MicroBatch, x.Batch)
	case x.PrefillTokens < 1:
		return x, fmt.Errorf("planner: %d prompt tokens a step: a step has at least one", x.PrefillTokens)
	case x.ResidentExperts < 0 || x.ResidentExperts > total:
		return x, fmt.Errorf("planner: resident_experts is %d, and model %s has %d experts", x.ResidentExperts, p.Model.Name, total)
	case x.PeerExperts < 0 || x.PeerExperts > total-x.ResidentExperts:
		return x, fmt.Errorf("planner: %d experts in peer memory, and %d are offloaded", x.PeerExperts, total-x.ResidentExperts)
	case x.PeerExperts > 0 && p.Hardware.PeerMemory == 0:
		return x, fmt.Errorf("planner: %d experts in peer memory, and hardware %s has no peers: name them with --peers, or plan without", x.PeerExperts, p.Hardware.Name)
	case !(x.KVOnHost >= 0 && x.KVOnHost <= 1):
		return x, fmt.Errorf("planner: a share %v of the KV cache on the host: must be from 0 to 1", x.KVOnHost)
	case x.HostPaths < 1 || x.HostPaths > len(p.Hardware.HostToGPU):
		return x, fmt.Errorf("planner: %d paths from the host, and hardware %s has %d", x.HostPaths, p.Hardware.Name, len(p.Hardware.HostToGPU))
	case x.Attention > configs.OnCPU:
		return x, fmt.Errorf("planner: invalid attention %d", x.Attention)
	case x.Grouping > configs.PerMicroBatch:
		return x, fmt.Errorf("planner: invalid expert grouping %d", x.Grouping)
	}
	return x, nil
}

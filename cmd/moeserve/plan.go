package main

import (
	"errors"
	"fmt"
	"io"
	"math"
	"os"
	"strings"

	"github.com/spf13/cobra"

	"github.com/moeserve/moeserve/configs"
	"github.com/moeserve/moeserve/node"
	"github.com/moeserve/moeserve/node/planning"
	"github.com/moeserve/moeserve/node/sizing"
	"github.com/moeserve/moeserve/planner"
)

// planOptions are the flags of plan alone.
type planOptions struct {
	workload   planner.Workload
	peerMemory string
	everything bool
}

func newPlan(s *streams) *cobra.Command {
	o := planOptions{workload: planning.DefaultWorkload}
	cmd := &cobra.Command{
		Use:   "plan",
		Short: "Choose how to run a model on a machine, and predict what that gives",
		Long: `Choose how to run a model on a machine, and predict what that gives: how many
sequences at once, in which micro-batches, how many experts offloaded and where to;
how long steps take and what bounds them; what that takes of which memory.

--hardware names a machine, which need not be this one; without it, this machine is
planned for. What is set (--max-num-seqs, --max-num-batched-tokens,
--micro-batch-size, --offload-fraction, --offload-tier) is kept. --policy FILE
judges the policy of a file. No weights are read and no memory is taken; a preset
needs no --load-format here.

The result of --json can be given to run and serve as --policy.`,
		Example: `  moeserve plan --model mixtral-8x7b --hardware l4
  moeserve plan --model mixtral-8x7b --hardware h200 --max-num-seqs 3240 --offload-fraction 0.5 --offload-tier peer
  moeserve plan --model qwen1.5-moe-a2.7b --hardware h100-80 --peers 1,2 --peer-memory 20GiB --json policy.json`,
		Args: noArguments,
		RunE: func(cmd *cobra.Command, _ []string) error {
			set, err := readSettings(cmd.Flags(), os.Environ())
			if err != nil {
				return err
			}
			return plan(s, set, &o)
		},
	}
	addSettings(cmd.Flags(), configs.For("plan"))
	f := cmd.Flags()
	f.IntVar(&o.workload.PromptTokens, "prompt-tokens", o.workload.PromptTokens, "mean length of prompts, in `tokens`")
	f.IntVar(&o.workload.NewTokens, "new-tokens", o.workload.NewTokens, "`tokens` to generate for each")
	f.IntVar(&o.workload.Requests, "requests", 0, "`number` of requests in all; 0: without end")
	f.StringVar(&o.peerMemory, "peer-memory", "", "`BYTES` that each peer has to lend, as 40GiB, where --hardware names a machine; --peers says how many there are")
	f.BoolVar(&o.everything, "unrestricted", false, "also consider what the planner knows and this engine does not do yet")
	return cmd
}

func plan(s *streams, set *settings, o *planOptions) (err error) {
	po := node.PlanOptions{
		Options:      node.Options{Settings: set.Settings, Explicit: set.given, Workload: o.workload, Log: set.logger(s.err)},
		Unrestricted: o.everything,
	}
	if o.peerMemory != "" {
		if po.PeerMemory, err = configs.ParseBytes(o.peerMemory); err != nil {
			return usagef("--peer-memory is %q: must be a size like 40GiB", o.peerMemory)
		}
	}
	if err := o.workload.Validate(); err != nil {
		return &usageError{err}
	}
	res, err := openResult(set.Output.JSON, s.out)
	if err != nil {
		return err
	}
	defer func() { err = errors.Join(err, res.close()) }()
	p, err := node.Plan(po)
	if err != nil {
		return err
	}
	if !res.onStdout() {
		if err := printPlan(s.out, p); err != nil {
			return err
		}
	}
	return res.write(newPlanResult(p))
}

// given says whether somebody has given a setting.
func (s *settings) given(key string) bool { return s.sources[key].Kind != "default" }

// planResult is what plan --json writes. Times are in seconds.
type planResult struct {
	Model string `json:"model"`
	// Experts of all layers, and the bytes of one.
	Experts     int              `json:"experts"`
	ExpertBytes int64            `json:"expert_bytes"`
	Hardware    planner.Hardware `json:"hardware"`
	Workload    workloadResult   `json:"workload"`
	Policy      planner.Policy   `json:"policy"`
	// Settings that the policy comes to, by key.
	Settings map[string]any `json:"settings"`
	KVBlocks int            `json:"kv_blocks"`
	// NotDone is what this engine does not do of the policy.
	NotDone        []string       `json:"unsupported"`
	TokS           float64        `json:"throughput_tok_s"`
	DecodeTokS     float64        `json:"decode_tok_s"`
	PrefillSeconds float64        `json:"prefill_s"`
	DecodeSeconds  float64        `json:"decode_s"`
	PrefillSteps   int            `json:"prefill_steps"`
	Prefill        stepResult     `json:"prefill_step"`
	Decode         stepResult     `json:"decode_step"`
	Memory         []demandResult `json:"memory"`
	// Knees are offload fractions up to which copies stay hidden, by tier.
	Knees map[configs.Tier]float64 `json:"saturation_fraction"`
}

type workloadResult struct {
	PromptTokens int `json:"prompt_tokens"`
	NewTokens    int `json:"new_tokens"`
	Requests     int `json:"requests"`
}

type stepResult struct {
	Seconds  float64       `json:"s"`
	Bound    string        `json:"bound"`
	GPU      float64       `json:"gpu_s"`
	CPU      float64       `json:"cpu_s"`
	HostLink float64       `json:"host_link_s"`
	PeerLink float64       `json:"peer_link_s"`
	BackLink float64       `json:"d2h_link_s"`
	HandOver float64       `json:"overhead_s"`
	Fetch    float64       `json:"on_demand_fetch_s"`
	Phases   []phaseResult `json:"phases"`
}

type phaseResult struct {
	Name    string  `json:"name"`
	Bytes   float64 `json:"bytes"`
	Flops   float64 `json:"flops"`
	Seconds float64 `json:"s"`
	Bound   string  `json:"bound"`
}

func newStepResult(s *planner.Step) stepResult {
	r := stepResult{
		Seconds: s.Seconds, Bound: string(s.Bound), GPU: s.GPU, CPU: s.CPU,
		HostLink: s.HostLink, PeerLink: s.PeerLink, BackLink: s.D2HLink, HandOver: s.Overhead, Fetch: s.OnDemandFetch,
	}
	for _, p := range s.Phases {
		r.Phases = append(r.Phases, phaseResult{p.Name, p.Bytes, p.Flops, p.Seconds, string(p.Bound)})
	}
	return r
}

// spaces of a prediction; peers' only where there are any.
func spaces(p *planning.Planned) []planner.Space {
	m := &p.Prediction.Memory
	list := []planner.Space{m.GPU, m.Host}
	if p.Hardware.PeerMemory > 0 {
		list = append(list, m.Peer)
	}
	return list
}

func newPlanResult(p *planning.Planned) *planResult {
	x := &p.Prediction
	r := &planResult{
		Model: p.Model.Name, Experts: p.Model.ExpertCount(), ExpertBytes: p.Model.ExpertBytes(), Hardware: p.Hardware, Workload: workloadResult(p.Workload),
		Policy: x.Policy, Settings: p.Settings, KVBlocks: p.KVBlocks, NotDone: append([]string{}, p.Missing...),
		TokS: x.TokS, DecodeTokS: x.DecodeTokS, PrefillSeconds: x.PrefillSeconds, DecodeSeconds: x.DecodeSeconds,
		PrefillSteps: x.PrefillSteps, Prefill: newStepResult(&x.Prefill), Decode: newStepResult(&x.Decode),
		Knees: p.SaturationPoints,
	}
	for _, s := range spaces(p) {
		m := demandResult{Space: s.Name, Capacity: s.Capacity, Usable: s.Usable, Need: s.Need()}
		for _, part := range s.Parts {
			m.Parts = append(m.Parts, partResult(part))
		}
		r.Memory = append(r.Memory, m)
	}
	return r
}

func printPlan(out io.Writer, p *planning.Planned) error {
	m, r := &p.Model, &p.Prediction
	x := &r.Policy
	t := newTable()
	t.line("model\t%s: %d experts of %s, %d in each of %d layers, %d per token", m.Name, m.ExpertCount(), sizing.Bytes(p.ExpertBytes), m.Experts, m.MoELayers(), m.TopK)
	printHardware(t, &p.Hardware)
	requests := "without end"
	if p.Workload.Requests > 0 {
		requests = fmt.Sprintf("%d requests", p.Workload.Requests)
	}
	t.line("workload\tprompts of %d tokens, %d new ones, %s", p.Workload.PromptTokens, p.Workload.NewTokens, requests)

	label := "\npolicy"
	for _, k := range configs.Schema {
		if v, ok := p.Settings[k.Name]; ok {
			t.line("%s\t%s %v", label, k.Name, v)
			label = ""
		}
	}
	t.line("%s\t%d sequences at once, attention on the %s over %d rows at a time, experts once per %s", label, x.Batch, x.Attention, x.MicroBatch, x.Grouping)
	peers, onHost := "", ""
	if x.PeerExperts > 0 {
		peers = fmt.Sprintf(", %d of these also with peers", x.PeerExperts)
	}
	if x.KVOnHost > 0 {
		onHost = fmt.Sprintf(", %.0f %% of them on the host", 100*x.KVOnHost)
	}
	t.line("\t%d experts local, %d in host memory%s", x.ResidentExperts, m.ExpertCount()-x.ResidentExperts, peers)
	t.line("\t%d blocks of keys and values%s", p.KVBlocks, onHost)
	if len(p.Missing) > 0 {
		t.line("\tnot done by this engine: %s", strings.Join(p.Missing, ", "))
	}
	t.line("throughput\t%s, %s while decoding", tokS(r.TokS), tokS(r.DecodeTokS))
	t.line("hidden\t%s", hiddenUpTo(p))

	printStep(t, "decode step", &r.Decode)
	printStep(t, fmt.Sprintf("prefill step (of %d)", r.PrefillSteps), &r.Prefill)
	for _, s := range spaces(p) {
		t.line("\nmemory of %s\t%s needed, %s may be used of %s", s.Name, sizing.Bytes(s.Need()), sizing.Bytes(s.Usable), sizing.Bytes(s.Capacity))
		for _, part := range s.Parts {
			if part.Bytes > 0 {
				t.line("  %s\t%s", part.Name, sizing.Bytes(part.Bytes))
			}
		}
	}
	return t.print(out)
}

func printHardware(t *table, h *planner.Hardware) {
	t.line("hardware\t%s: %s at %s, %s", h.Name, sizing.Bytes(h.GPUMemory), byteRate(h.GPUMemoryRate), flopRate(h.GPUFlops))
	t.line("\thost: %s at %s, %s; link %s", sizing.Bytes(h.HostMemory), byteRate(h.HostMemoryRate), flopRate(h.CPUFlops), byteRate(h.HostToGPU[0]))
	if h.PeerMemory > 0 {
		t.line("\tpeers: lend %s; link %s", sizing.Bytes(h.PeerMemory), byteRate(h.PeerToGPU))
	}
	if h.Sources["gpu_flop_per_s"] == planning.Assumed || h.Sources["host_to_gpu_bytes_per_s"] == planning.Assumed {
		t.line("\trates that are not known are assumed; --hardware, or --emulate with rates, tells them")
	}
}

// hiddenUpTo tells up to which offload fraction copies stay so: of peers and host together
// where that differs from peers, whose copies the host's link helps with.
func hiddenUpTo(p *planning.Planned) string {
	var list []string
	for _, tier := range []struct {
		configs.Tier
		from string
	}{{configs.HostTier, "the host"}, {configs.PeerTier, "peers"}, {configs.AnyTier, "both"}} {
		if knee, ok := p.SaturationPoints[tier.Tier]; ok && (tier.Tier != configs.AnyTier || knee != p.SaturationPoints[configs.PeerTier]) {
			list = append(list, fmt.Sprintf("%.3f from %s", math.Min(1, knee), tier.from))
		}
	}
	return "copies, up to an offload-fraction of " + strings.Join(list, ", ")
}

func printStep(t *table, name string, s *planner.Step) {
	t.line("\n%s\t%s, bound by %s", name, took(s.Seconds), s.Bound)
	for _, part := range []struct {
		name    string
		seconds float64
	}{
		{"gpu", s.GPU},
		{"cpu", s.CPU},
		{"host link", s.HostLink},
		{"peer link", s.PeerLink},
		{"link back", s.D2HLink},
		{"hand-over", s.Overhead},
		{"fetch of chosen experts", s.OnDemandFetch},
	} {
		if part.seconds == 0 {
			continue
		}
		t.line("  %s\t%s", part.name, took(part.seconds))
		if part.name == "gpu" {
			for _, p := range s.Phases {
				t.line("    %s\t%s (%s)", p.Name, took(p.Seconds), p.Bound)
			}
		}
	}
}

// took prints a time with three digits.
func took(s float64) string {
	switch {
	case s < 1e-3:
		return fmt.Sprintf("%.3g us", s*1e6)
	case s < 1:
		return fmt.Sprintf("%.3g ms", s*1e3)
	}
	return fmt.Sprintf("%.2f s", s)
}

func tokS(r float64) string {
	if r < 100 {
		return fmt.Sprintf("%.3g tokens/s", r)
	}
	return grouped(int64(math.Round(r))) + " tokens/s"
}

func byteRate(r float64) string { return fmt.Sprintf("%.4g GB/s", r/1e9) }

func flopRate(r float64) string { return fmt.Sprintf("%.4g Tflop/s", r/1e12) }

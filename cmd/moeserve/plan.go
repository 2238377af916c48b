package main

import (
	"errors"
	"fmt"
	"io"
	"math"
	"slices"
	"strconv"
	"strings"
	"time"

	"github.com/spf13/cobra"

	"github.com/moeserve/moeserve/configs"
	"github.com/moeserve/moeserve/node"
	"github.com/moeserve/moeserve/node/planning"
	"github.com/moeserve/moeserve/node/sizing"
	"github.com/moeserve/moeserve/planner"
	"github.com/moeserve/moeserve/untrusted"
)

// planOptions are the flags of plan alone.
type planOptions struct {
	workload   planner.Workload
	peerMemory string
	// maxTTFT and maxTPOT are seconds or durations; empty: no bound.
	maxTTFT, maxTPOT string
	everything       bool
}

// What TTFT and TPOT of a plan are.
const (
	ttftMeaning = "from the arrival of a whole batch to the first token of its last sequence: all its prefill steps"
	tpotMeaning = "a decode step of the whole batch, at its mean context"
)

func newPlan(s *streams) *cobra.Command {
	o := planOptions{workload: planning.DefaultWorkload}
	cmd := &cobra.Command{
		Use:   "plan [MODEL]",
		Short: "Find the fastest settings for a machine, and predict their speed",
		Long: `Find the fastest settings for a model on a machine, and predict their speed: batch,
micro-batches, offload fraction and tier; how long steps take and what bounds them;
the memory footprint. The fastest are those with the highest end-to-end throughput,
which takes a batch of many sequences; --max-num-seqs 1 plans for a single user, and
--max-ttft and --max-tpot for a bounded latency.

--hardware names a machine, which need not be this one; the default is this machine.
What is set (--max-num-seqs, --max-num-batched-tokens, --micro-batch-size,
--offload-fraction, --offload-tier) is kept. --policy FILE predicts the policy of a
file. No weights are read and no memory is allocated. A preset needs no
--load-format.

TTFT is the time from the arrival of a whole batch to the first token of its
last sequence; TPOT is a decode step of the whole batch. --max-ttft and --max-tpot
bound them: the plan is then the fastest policy within the bounds, and its serve
command has --max-itl, by which steps that decode take as many prompt tokens as fit
into the second one. Peers are those that run would use: of GPUs only those that
--peers names.

run and serve take the result of --json as --policy.`,
		Example: `  moeserve plan mixtral-8x7b --hardware l4
  moeserve plan mixtral-8x7b --hardware h200 --max-num-seqs 3240 \
      --offload-fraction 50% --offload-tier peer --peers 1
  moeserve plan qwen1.5-moe-a2.7b --hardware h100-80 --peers 1,2 \
      --peer-memory 20GiB --json policy.json`,
		Args:              oneModel,
		ValidArgsFunction: completeModelArgument,
		RunE: func(cmd *cobra.Command, args []string) error {
			set, err := modelSettings(cmd, args)
			if err != nil {
				return err
			}
			return plan(s, set, &o)
		},
	}
	addSettings(cmd.Flags(), configs.For("plan"))
	f := cmd.Flags()
	f.IntVar(&o.workload.Requests, "num-prompts", 0, "total `REQUESTS`; 0: continuous requests")
	f.StringVar(&o.peerMemory, "peer-memory", "", "spare memory of each peer, a `SIZE` as 40GiB, with --hardware; --peers says how many peers")
	f.StringVar(&o.maxTTFT, "max-ttft", "", "maximum `TIME` to first token, as 2 (seconds) or 500ms")
	f.StringVar(&o.maxTPOT, "max-tpot", "", "maximum `TIME` per output token, as 0.1 (seconds) or 50ms")
	f.BoolVar(&o.everything, "unrestricted", false, "also consider policies that this engine does not support yet")
	return cmd
}

func plan(s *streams, set *settings, o *planOptions) (err error) {
	if set.Bench.InputLen > 0 {
		o.workload.PromptTokens = set.Bench.InputLen
	}
	o.workload.NewTokens = set.Bench.OutputLen
	po := node.PlanOptions{
		Options:      node.Options{Settings: set.Settings, Explicit: set.given, Workload: o.workload, Log: set.logger(s.err)},
		Unrestricted: o.everything,
	}
	for _, b := range []struct {
		flag, text string
		to         *float64
	}{{"max-ttft", o.maxTTFT, &po.MaxTTFT}, {"max-tpot", o.maxTPOT, &po.MaxTPOT}} {
		if *b.to, err = parseLatency(b.flag, b.text); err != nil {
			return err
		}
	}
	if o.peerMemory != "" {
		if po.PeerMemory, err = configs.ParseBytes(o.peerMemory); err != nil {
			return usagef("--peer-memory: %w", err)
		}
	}
	if err := o.workload.Validate(); err != nil {
		return &usageError{err}
	}
	res, err := s.openResult(set.Output.JSON)
	if err != nil {
		return err
	}
	defer func() { err = errors.Join(err, res.close()) }()
	p, err := node.Plan(po)
	if misfit := (*planner.MisfitError)(nil); errors.As(err, &misfit) && set.Plan.Hardware == "" && set.Device.Emulate == "" {
		return fmt.Errorf("%w; this plan is for this machine: --hardware NAME plans for another", err)
	}
	if err != nil {
		return err
	}
	if !res.onStdout() {
		if err := printPlan(s.out, p, serveCommand(set, p, o.maxTPOT)); err != nil {
			return err
		}
	}
	return res.write(newPlanResult(p, serveCommand(set, p, o.maxTPOT)))
}

// parseLatency reads the value of a flag, seconds or a duration, in seconds; 0 without one.
func parseLatency(flag, text string) (float64, error) {
	if text == "" {
		return 0, nil
	}
	s, err := strconv.ParseFloat(text, 64)
	if err != nil {
		var d time.Duration
		d, err = time.ParseDuration(text)
		s = d.Seconds()
	}
	if err != nil || !(s > 0) || math.IsInf(s, 0) {
		return 0, usagef("--%s is %q: must be seconds, as 0.5, or a duration, as 500ms", flag, text)
	}
	return s, nil
}

// serveCommand is the command line that serves with a plan: the explicit settings that serve
// has, too, and the policy's. maxTPOT, if not empty, bounds steps with prompts, too, unless it is so long that --max-itl
// does not take it.
func serveCommand(set *settings, p *planning.Planned, maxTPOT string) []string {
	args := []string{"moeserve", "serve"}
	values := set.Values()
	_, tooLong := configs.Batch{MaxITL: maxTPOT}.ParseMaxITL()
	for _, k := range configs.For("serve") {
		value, decided := p.Settings[k.Name]
		if k.Name == "max-itl" && maxTPOT != "" && tooLong == nil {
			value, decided = maxTPOT, true
		}
		if !decided {
			_, shared := slices.BinarySearchFunc(planKeys(), k.Name, strings.Compare)
			if !shared || !set.given(k.Name) {
				continue
			}
			value = values[k.Name]
		}
		if k.Kind == configs.Bool {
			args = append(args, fmt.Sprintf("--%s=%v", k.Name, value))
			continue
		}
		args = append(args, "--"+k.Name+" "+shellQuote(fmt.Sprint(value)))
	}
	return args
}

// planKeys are the settings of plan that describe what to run, sorted.
func planKeys() []string {
	var keys []string
	for _, k := range configs.For("plan") {
		switch k.Name {
		case "policy", "hardware", "trace", "log-level", "log-format", "json":
		default:
			keys = append(keys, k.Name)
		}
	}
	slices.Sort(keys)
	return keys
}

// shellQuote writes a word for a shell.
func shellQuote(word string) string {
	plain := func(r rune) bool {
		return r >= 'a' && r <= 'z' || r >= 'A' && r <= 'Z' || r >= '0' && r <= '9' || strings.ContainsRune("-_./,:=@%+", r)
	}
	if word != "" && !strings.ContainsFunc(word, func(r rune) bool { return !plain(r) }) {
		return word
	}
	if strings.ContainsFunc(word, func(r rune) bool { return !strconv.IsPrint(r) }) {
		quoted := strconv.QuoteToASCII(word) // escapes that bash knows
		return "$'" + strings.ReplaceAll(strings.ReplaceAll(quoted[1:len(quoted)-1], `\"`, `"`), "'", `\'`) + "'"
	}
	return "'" + strings.ReplaceAll(word, "'", `'\''`) + "'"
}

// wrapped writes the words of a command in lines of at most 80 columns, which a shell joins.
func wrapped(words []string) string {
	var b strings.Builder
	column := 0
	for i, w := range words {
		switch {
		case i == 0:
			b.WriteString("  ")
			column = 2
		case column+1+len(w) > 78:
			b.WriteString(" \\\n      ")
			column = 6
		default:
			b.WriteString(" ")
			column++
		}
		b.WriteString(w)
		column += len(w)
	}
	return b.String()
}

// given reports whether a setting has been given explicitly.
func (s *settings) given(key string) bool {
	from, ok := s.sources[key]
	return ok && from.Kind != "default"
}

// planResult is the result of plan --json. Times are in seconds.
type planResult struct {
	Model string `json:"model"`
	// Experts of all layers, and the bytes of one.
	Experts     int              `json:"experts"`
	ExpertBytes int64            `json:"expert_bytes"`
	Hardware    planner.Hardware `json:"hardware"`
	Workload    workloadResult   `json:"workload"`
	Policy      planner.Policy   `json:"policy"`
	// Settings of the policy, by key, and the command that serves with them.
	Settings map[string]any `json:"settings"`
	Command  string         `json:"serve_command"`
	// KVBlocks of the batch; KVTokens is the whole KV cache.
	KVBlocks    int `json:"kv_blocks"`
	KVTokens    int `json:"kv_cache_tokens"`
	MaxModelLen int `json:"max_model_len"`
	// Unsupported are features of the policy that this engine does not support.
	Unsupported []string `json:"unsupported"`
	// Definitions of ttft_s and tpot_s, by key.
	Definitions    map[string]string `json:"definitions"`
	TTFT           float64           `json:"ttft_s"`
	TPOT           float64           `json:"tpot_s"`
	TokS           float64           `json:"throughput_tok_s"`
	PrefillTokS    float64           `json:"prefill_tok_s"`
	DecodeTokS     float64           `json:"decode_tok_s"`
	PrefillSeconds float64           `json:"prefill_s"`
	DecodeSeconds  float64           `json:"decode_s"`
	PrefillSteps   int               `json:"prefill_steps"`
	Prefill        stepResult        `json:"prefill_step"`
	Decode         stepResult        `json:"decode_step"`
	Memory         []demandResult    `json:"memory"`
	// SaturationPoints are the maximum offload fractions at which copies are fully
	// overlapped, by tier.
	SaturationPoints map[configs.Tier]float64 `json:"saturation_fraction"`
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
	D2HLink  float64       `json:"d2h_link_s"`
	Overhead float64       `json:"overhead_s"`
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
		HostLink: s.HostLink, PeerLink: s.PeerLink, D2HLink: s.D2HLink, Overhead: s.Overhead, Fetch: s.OnDemandFetch,
	}
	for _, p := range s.Phases {
		r.Phases = append(r.Phases, phaseResult{p.Name, p.Bytes, p.Flops, p.Seconds, string(p.Bound)})
	}
	return r
}

// spaces of a prediction; that of peers only where there are any.
func spaces(p *planning.Planned) []planner.Space {
	m := &p.Prediction.Memory
	list := []planner.Space{m.GPU, m.Host}
	if p.Hardware.PeerMemory > 0 {
		list = append(list, m.Peer)
	}
	return list
}

func newPlanResult(p *planning.Planned, command []string) *planResult {
	x := &p.Prediction
	r := &planResult{
		Model: p.Model.Name, Experts: p.Model.ExpertCount(), ExpertBytes: p.Model.ExpertBytes(), Hardware: p.Hardware, Workload: workloadResult(p.Workload),
		Policy: x.Policy, Settings: p.Settings, Command: strings.Join(command, " "), KVBlocks: p.KVBlocks, KVTokens: p.KVTokens, MaxModelLen: p.MaxModelLen,
		Unsupported: append([]string{}, p.Missing...), Definitions: map[string]string{"ttft_s": ttftMeaning, "tpot_s": tpotMeaning},
		TTFT: x.TTFT(), TPOT: x.TPOT(), TokS: x.TokS, PrefillTokS: x.PrefillTokS, DecodeTokS: x.DecodeTokS, PrefillSeconds: x.PrefillSeconds, DecodeSeconds: x.DecodeSeconds,
		PrefillSteps: x.PrefillSteps, Prefill: newStepResult(&x.Prefill), Decode: newStepResult(&x.Decode),
		SaturationPoints: p.SaturationPoints,
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

func printPlan(out io.Writer, p *planning.Planned, command []string) error {
	m, r := &p.Model, &p.Prediction
	x := &r.Policy
	t := newTable()
	t.line("model\t%s: %d experts of %s, %d in each of %d layers, %d per token", untrusted.Name(m.Name), m.ExpertCount(), sizing.Bytes(p.ExpertBytes), m.Experts, m.MoELayers(), m.TopK)
	printHardware(t, &p.Hardware)
	requests := "continuous requests"
	if p.Workload.Requests > 0 {
		requests = plural(int64(p.Workload.Requests), "request")
	}
	t.line("workload\tprompts of %d tokens (--input-len), %d generated (--output-len), %s (--num-prompts)", p.Workload.PromptTokens, p.Workload.NewTokens, requests)

	label := "\npolicy"
	for _, k := range configs.Schema {
		if v, ok := p.Settings[k.Name]; ok {
			note := ""
			if k.Name == "micro-batch-size" && fmt.Sprint(v) == "0" {
				note = ", all tokens of a step"
			}
			t.line("%s\t--%s %v%s", label, k.Name, v, note)
			label = ""
		}
	}
	t.line("%s\t%d max concurrent sequences (batch size), %s per micro-batch", label, x.Batch, plural(int64(x.MicroBatch), "token"))
	grouping := "for many micro-batches"
	switch {
	case x.Grouping == configs.PerMicroBatch:
		grouping = "for each micro-batch"
	case x.MicroBatch >= x.Batch:
		grouping = "per step"
	}
	t.line("\tattention on the %s, each layer's experts once %s", strings.ToUpper(x.Attention.String()), grouping)
	peers, onHost := "", ""
	if x.PeerExperts > 0 {
		peers = fmt.Sprintf(", %d of these with copies in peer memory", x.PeerExperts)
	}
	if x.KVOnHost > 0 {
		onHost = fmt.Sprintf(", %.0f %% of it in host memory", 100*x.KVOnHost)
	}
	if x.HostPaths > 1 {
		peers += fmt.Sprintf(", copied from there over %d links", x.HostPaths)
	}
	t.line("\t%d resident experts, %d in host memory%s", x.ResidentExperts, m.ExpertCount()-x.ResidentExperts, peers)
	t.line("\tKV cache of %s tokens%s, %s of them for this batch", grouped(int64(p.KVTokens)), onHost, grouped(int64(p.KVBlocks)*int64(p.KVBlockTokens)))
	if p.MaxModelLen < p.Context {
		t.line("\tsequences of up to %s tokens, less than the context of %s: more costs throughput (--max-model-len)", grouped(int64(p.MaxModelLen)), grouped(int64(p.Context)))
	} else {
		t.line("\tsequences of up to %s tokens", grouped(int64(p.MaxModelLen)))
	}
	if len(p.Missing) > 0 {
		t.line("\tunsupported by this engine: %s", strings.Join(p.Missing, ", "))
	}
	t.line("\nTTFT\t%s, %s", took(r.TTFT()), ttftMeaning)
	t.line("TPOT\t%s, %s", took(r.TPOT()), tpotMeaning)
	t.line("throughput\tprefill %s, decode %s, end-to-end %s", tokS(r.PrefillTokS), tokS(r.DecodeTokS), tokS(r.TokS))
	t.line("saturation point\t%s", saturation(p))

	printStep(t, "decode step", &r.Decode)
	prefill := "prefill step"
	if r.PrefillSteps > 1 {
		prefill = fmt.Sprintf("each of %d prefill steps", r.PrefillSteps)
	}
	printStep(t, prefill, &r.Prefill)
	for _, s := range spaces(p) {
		t.line("\nmemory of %s\tneed %s, usable %s of %s", s.Name, sizing.Bytes(s.Need()), sizing.Bytes(s.Usable), sizing.Bytes(s.Capacity))
		for _, part := range s.Parts {
			if part.Bytes > 0 {
				t.line("  %s\t%s", part.Name, sizing.Bytes(part.Bytes))
			}
		}
	}
	for i, note := range p.Notes {
		if i == 0 {
			t.line("")
		}
		t.line("note: %s", note)
	}
	if err := t.print(out); err != nil {
		return err
	}
	head := "\nServe with:"
	if _, ok := configs.Preset(m.Name); ok {
		head = "\nServe with (a preset has no weights: name a checkpoint's directory in its place):"
	}
	_, err := fmt.Fprintf(out, "%s\n%s\n", head, wrapped(command))
	return err
}

func printHardware(t *table, h *planner.Hardware) {
	t.line("hardware\t%s: %s at %s, %s", untrusted.Name(h.Name), sizing.Bytes(h.GPUMemory), byteRate(h.GPUMemoryRate), flopRate(h.GPUFlops))
	t.line("\thost: %s at %s, %s; link %s", sizing.Bytes(h.HostMemory), byteRate(h.HostMemoryRate), flopRate(h.CPUFlops), hostRates(h))
	if h.PeerMemory > 0 {
		t.line("\tpeers: %s may be borrowed; link %s", sizing.Bytes(h.PeerMemory), byteRate(h.PeerToGPU))
	}
	if h.Sources["gpu_flop_per_s"] == planning.Assumed || h.Sources["host_to_gpu_bytes_per_s"] == planning.Assumed {
		t.line("\tunknown rates are assumed; --hardware, or --emulate with rates, sets them")
	}
}

// hostRates prints the rates from the host over one link, and over more.
func hostRates(h *planner.Hardware) string {
	text := byteRate(h.HostToGPU[0])
	if n := len(h.HostToGPU); n > 1 {
		text += fmt.Sprintf(", %s over %d links (--host-paths)", byteRate(h.HostToGPU[n-1]), n)
	}
	return text
}

// saturation prints the saturation points: of peers and host together where that differs
// from peers, whose copies the host's link shares.
func saturation(p *planning.Planned) string {
	var list []string
	for _, tier := range []struct {
		configs.Tier
		from string
	}{{configs.HostTier, "host"}, {configs.PeerTier, "peers"}, {configs.AnyTier, "both"}} {
		if point, ok := p.SaturationPoints[tier.Tier]; ok && (tier.Tier != configs.AnyTier || point != p.SaturationPoints[configs.PeerTier]) {
			list = append(list, fmt.Sprintf("%.1f %% from %s", 100*math.Min(1, point), tier.from))
		}
	}
	return "max offload fraction with transfers fully overlapped: " + strings.Join(list, ", ")
}

func printStep(t *table, name string, s *planner.Step) {
	t.line("\n%s\t%s, bound by %s", name, took(s.Seconds), s.Bound.Text())
	for _, part := range []struct {
		name    string
		seconds float64
	}{
		{"GPU", s.GPU},
		{"CPU", s.CPU},
		{"host link (H2D)", s.HostLink},
		{"peer link", s.PeerLink},
		{"D2H link", s.D2HLink},
		{"synchronization and launch overhead", s.Overhead},
		{"on-demand expert fetch", s.OnDemandFetch},
	} {
		if part.seconds == 0 {
			continue
		}
		t.line("  %s\t%s", part.name, took(part.seconds))
		if part.name == "GPU" {
			for _, p := range s.Phases {
				t.line("    %s\t%s (%s)", p.Name, took(p.Seconds), p.Bound.Text())
			}
		}
	}
}

// took prints a time with three digits; what rounds to 1,000 has the next unit.
func took(s float64) string {
	switch {
	case s < 0.9995e-3:
		return fmt.Sprintf("%.3g µs", s*1e6)
	case s < 0.9995:
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

func flopRate(r float64) string { return fmt.Sprintf("%.4g TFLOP/s", r/1e12) }

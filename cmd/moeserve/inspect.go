package main

import (
	"errors"
	"fmt"
	"io"
	"math"
	"slices"
	"strconv"
	"strings"

	"github.com/spf13/cobra"

	"github.com/moeserve/moeserve/configs"
	"github.com/moeserve/moeserve/node"
	"github.com/moeserve/moeserve/node/sizing"
	"github.com/moeserve/moeserve/untrusted"
)

func newInspect(s *streams) *cobra.Command {
	cmd := &cobra.Command{
		Use:   "inspect [MODEL]",
		Short: "Show model sizes and expert placement",
		Long: `Show a model's sizes, where its experts would live with the given settings, and
whether that fits; the exit code is 1 where it does not. No weights are read and no
memory is allocated. A preset needs no --load-format.

--hardware NAME and --emulate hbm=SIZE,host=SIZE ask about another machine.`,
		Example: `  moeserve inspect mixtral-8x7b --offload-fraction 50% --hardware l4
  moeserve inspect qwen3-30b-a3b --emulate hbm=24GiB,host=128GiB
  moeserve inspect --json -`,
		Args:              oneModel,
		ValidArgsFunction: completeModelArgument,
		RunE: func(cmd *cobra.Command, args []string) error {
			set, err := modelSettings(cmd, args)
			if err != nil {
				return err
			}
			return inspect(s, set)
		},
	}
	addSettings(cmd.Flags(), configs.For("inspect"))
	return cmd
}

func inspect(s *streams, set *settings) (err error) {
	res, err := s.openResult(set.Output.JSON)
	if err != nil {
		return err
	}
	defer func() { err = errors.Join(err, res.close()) }()
	in, err := node.Inspect(node.Options{Settings: set.Settings, Explicit: set.given, Log: set.logger(s.err)})
	if err != nil {
		return err
	}
	set.Settings = in.Settings
	if !res.onStdout() {
		if err := printInspection(s.out, set, in); err != nil {
			return err
		}
	}
	if err := res.write(newInspectResult(set, in)); err != nil || in.Problem == nil {
		return err
	}
	if res.onStdout() {
		return &misfitError{fmt.Errorf("%s does not fit: %w", in.Model, in.Problem)}
	}
	return &misfitError{fmt.Errorf("%s does not fit", in.Model)} // the reason is in what was printed
}

// misfitError says that a model does not fit where it was asked whether it does: neither the
// settings nor the model are wrong.
type misfitError struct{ err error }

func (e *misfitError) Error() string { return e.err.Error() }

// inspectResult is what inspect --json writes.
type inspectResult struct {
	Model           string         `json:"model"`
	Type            string         `json:"model_type"`
	Parameters      int64          `json:"parameters"`
	Layers          int            `json:"layers"`
	MoELayers       int            `json:"moe_layers"`
	Hidden          int            `json:"hidden_size"`
	Context         int            `json:"max_positions"`
	Vocab           int            `json:"vocab_size"`
	Experts         int            `json:"experts"`
	ExpertsPerLayer int            `json:"experts_per_layer"`
	TopK            int            `json:"experts_per_token"`
	Routing         string         `json:"routing"`
	DType           string         `json:"dtype"`
	ExpertBytes     int64          `json:"expert_bytes"`
	AllExpertBytes  int64          `json:"all_experts_bytes"`
	DenseBytes      int64          `json:"dense_bytes"`
	KVTokenBytes    int64          `json:"kv_bytes_per_token"`
	OffloadFraction float64        `json:"offload_fraction"`
	Local           int            `json:"resident_experts"`
	Offloaded       int            `json:"offloaded_experts"`
	Placement       []layerTiers   `json:"placement"`
	Memory          []demandResult `json:"memory"`
	Peers           []peerResult   `json:"peers"`
	HostPaths       hostPaths      `json:"host_paths"`
	KVBlocks        int            `json:"kv_blocks"`
	KVBlockBytes    int64          `json:"kv_block_bytes"`
	KVTiers         []kvTierResult `json:"kv_tiers"`
	MaxModelLen     int            `json:"max_model_len"`
	Fits            bool           `json:"fits"`
	Problem         string         `json:"problem,omitempty"`
	// RunsHere says whether this machine can emulate these devices.
	RunsHere bool `json:"runs_here"`
}

type demandResult struct {
	Space    string       `json:"space"`
	Capacity int64        `json:"capacity_bytes"`
	Usable   int64        `json:"usable_bytes"`
	Need     int64        `json:"need_bytes"`
	Parts    []partResult `json:"parts"`
}

// peerResult is what a peer can lend, and how many experts that holds.
type peerResult struct {
	Space    string `json:"space"`
	Capacity int64  `json:"capacity_bytes"`
	Other    int64  `json:"other_processes_bytes"`
	Headroom int64  `json:"headroom_bytes"`
	Spare    int64  `json:"borrowable_bytes"`
	Experts  int    `json:"experts"`
}

// hostPaths are the links that copies from and to the host go over.
type hostPaths struct {
	Paths int `json:"paths"`
	// Relays are the GPUs of those beside the computing GPU's own, each of which keeps BufferBytes.
	Relays      []int `json:"relays"`
	BufferBytes int64 `json:"buffer_bytes"`
}

// kvTierResult is a tier of KV blocks, and what of the host's memory it takes.
type kvTierResult struct {
	Medium    string `json:"medium"`
	Blocks    int    `json:"blocks"`
	Tokens    int    `json:"tokens"`
	Bytes     int64  `json:"bytes"`
	HostBytes int64  `json:"host_bytes"`
}

type partResult struct {
	Name  string `json:"name"`
	Bytes int64  `json:"bytes"`
}

func newInspectResult(set *settings, in *node.Inspection) *inspectResult {
	c, z := in.Config, in.Sizes
	r := &inspectResult{
		Model: in.Model, Type: c.Type, Parameters: z.Parameters, Layers: c.Layers, MoELayers: c.MoELayers(),
		Hidden: c.Hidden, Context: c.MaxPositions, Vocab: c.Vocab,
		Experts: z.ExpertCount, ExpertsPerLayer: c.Experts, TopK: c.TopK, Routing: in.Routing, DType: in.DType,
		ExpertBytes: z.ExpertBytes, AllExpertBytes: z.Experts, DenseBytes: z.Other, KVTokenBytes: z.KVPerToken,
		OffloadFraction: set.Offload.Fraction, Local: in.Resident, Offloaded: in.Offloaded,
		Placement: []layerTiers{}, Peers: []peerResult{}, KVTiers: []kvTierResult{},
		HostPaths: hostPaths{1 + len(in.Relays), append([]int{}, in.Relays...), in.RelayBytes},
		KVBlocks:  in.KV.Blocks, KVBlockBytes: in.KVBlockBytes, MaxModelLen: in.KV.MaxModelLen, Fits: in.Problem == nil,
		RunsHere: in.Problem == nil && in.RunsHere == nil,
	}
	for _, l := range in.Placement {
		r.Placement = append(r.Placement, layerTiers(l))
	}
	for _, d := range in.Demands {
		m := demandResult{Space: d.Space, Capacity: d.Capacity, Usable: d.Usable(), Need: d.Need()}
		for _, p := range d.Parts {
			m.Parts = append(m.Parts, partResult(p))
		}
		r.Memory = append(r.Memory, m)
	}
	for _, p := range in.Peers {
		r.Peers = append(r.Peers, peerResult(p))
	}
	for _, k := range in.KVTiers {
		r.KVTiers = append(r.KVTiers, kvTierResult{k.Medium, k.Blocks, k.Blocks * k.BlockTokens, int64(k.Blocks) * k.BlockBytes, k.HostBytes})
	}
	if in.Problem != nil {
		r.Problem = in.Problem.Error()
	}
	return r
}

func printInspection(out io.Writer, set *settings, in *node.Inspection) error {
	c, z := in.Config, in.Sizes
	t := newTable()
	t.line("model\t%s (%s)", untrusted.Name(in.Model), c.Type)
	t.line("parameters\t%s", grouped(z.Parameters))
	layersWith := "all"
	if c.MoELayers() < c.Layers {
		layersWith = strconv.Itoa(c.MoELayers())
	}
	t.line("layers\t%d, %s of them with experts; hidden size %d", c.Layers, layersWith, c.Hidden)
	t.line("experts\t%d in each of these, %d per token (%s)", c.Experts, c.TopK, in.Routing)
	t.line("\t%s each, %s all %d (%s)", sizing.Bytes(z.ExpertBytes), sizing.Bytes(z.Experts), z.ExpertCount, in.DType)
	t.line("non-expert weights\t%s", sizing.Bytes(z.Other))
	t.line("KV\t%s per token (%s), context of %d tokens", sizing.Bytes(z.KVPerToken), in.DType, c.MaxPositions)
	t.line("")
	how := fmt.Sprintf("offload fraction %v", set.Offload.Fraction)
	if set.Offload.ResidentExperts != "" {
		how = "resident experts"
	}
	where, legend := "in host memory", "R resident, H host"
	if set.Offload.Tier == configs.PeerTier {
		where, legend = "with peer copies", "R resident, P peer copy (also in host memory)"
	}
	t.line("%s\t%d experts resident, %d offloaded %s", how, in.Resident, in.Offloaded, where)
	layers := make([]layerTiers, len(in.Placement))
	for i, l := range in.Placement {
		layers[i] = layerTiers(l)
	}
	printMap(t, layers, legend)
	for _, d := range in.Demands {
		t.line("\nmemory of %s\tneed %s, usable %s (%.0f %% of %s)", d.Space, sizing.Bytes(d.Need()), sizing.Bytes(d.Usable()), 100*d.Share, sizing.Bytes(d.Capacity))
		for _, p := range d.Parts {
			if p.Bytes > 0 {
				t.line("  %s\t%s", p.Name, sizing.Bytes(p.Bytes))
			}
		}
	}
	for i, p := range in.Peers {
		label := ""
		if i == 0 {
			label = "\npeers"
		}
		t.line("%s\t%s can lend %s, %d experts (of %s: %s used by other processes, %s headroom)",
			label, p.Space, sizing.Bytes(p.Spare), p.Experts, sizing.Bytes(p.Capacity), sizing.Bytes(p.Other), sizing.Bytes(p.Headroom))
	}
	if n := len(in.Relays); n > 0 {
		t.line("host paths\t%d: the GPU's own link, and those of relays %s, which keep %s of each", n+1, strings.Trim(fmt.Sprint(in.Relays), "[]"), sizing.Bytes(in.RelayBytes))
	}
	t.line("")
	if in.Problem != nil {
		t.line("does not fit\t%s", brief(in.Problem))
		return t.print(out)
	}
	t.line("KV cache\t%d blocks of %s, for sequences of up to %d tokens", in.KV.Blocks, sizing.Bytes(in.KVBlockBytes), in.KV.MaxModelLen)
	if in.Advice != "" {
		t.line("\tless than the model's context of %d tokens; %s", c.MaxPositions, in.Advice)
	}
	for i, k := range in.KVTiers {
		label := ""
		if i == 0 {
			label = "KV tiers"
		}
		line := fmt.Sprintf("%s\t%s", label, kvTierCapacity(k.Medium, k.Blocks, k.BlockTokens, k.BlockBytes))
		if k.HostBytes > 0 {
			line += "; host memory " + sizing.Bytes(k.HostBytes)
		}
		t.line("%s", line)
	}
	if in.RunsHere != nil && set.Device.Emulate == "" { // else it was asked about another machine
		t.line("this machine\tdoes not hold the emulated memories: %v", in.RunsHere)
	}
	return t.print(out)
}

// kvTierCapacity is a tier of KV blocks in words.
func kvTierCapacity(medium string, blocks, blockTokens int, blockBytes int64) string {
	return fmt.Sprintf("%s: %s of %s for %d tokens, %s", medium, plural(int64(blocks), "block"), sizing.Bytes(blockBytes), blocks*blockTokens, sizing.Bytes(int64(blocks)*blockBytes))
}

// brief is an error without the parts of a memory space, which are printed above it.
func brief(err error) string {
	var misfit *sizing.MisfitError
	if errors.As(err, &misfit) {
		return misfit.Brief()
	}
	return err.Error()
}

// maxLetters is how many experts of a layer a map draws one by one.
const maxLetters = 32

// printMap shows where each layer's experts are: a letter per expert, layers that are alike
// in one line; of layers with more than maxLetters, how many are in which tier.
func printMap(t *table, layers []layerTiers, legend string) {
	if len(layers) == 0 {
		return
	}
	if slices.ContainsFunc(layers, func(l layerTiers) bool { return len(l.Tiers) > maxLetters }) {
		t.line("experts per layer\t%s", tierRanges(layers))
		return
	}
	label := "layers"
	for _, line := range layerLines(layers, letters) {
		t.line("%s\t%s", label, line)
		label = ""
	}
	t.line("\t%s", legend)
}

// tierRanges says how many experts of a layer are in each tier: "89-90 resident, 38-39 host".
func tierRanges(layers []layerTiers) string {
	var tiers []string
	for _, l := range layers {
		for _, tier := range l.Tiers {
			if !slices.Contains(tiers, tier) {
				tiers = append(tiers, tier)
			}
		}
	}
	var list []string
	for _, tier := range tiers {
		low, high := math.MaxInt, 0
		for _, l := range layers {
			n := 0
			for _, x := range l.Tiers {
				if x == tier {
					n++
				}
			}
			low, high = min(low, n), max(high, n)
		}
		of := strconv.Itoa(low)
		if high > low {
			of += "-" + strconv.Itoa(high)
		}
		list = append(list, of+" "+tier)
	}
	return strings.Join(list, ", ")
}

// grouped writes a number with a comma between thousands.
func grouped(n int64) string {
	if n < 1000 {
		return strconv.FormatInt(n, 10)
	}
	return fmt.Sprintf("%s,%03d", grouped(n/1000), n%1000)
}

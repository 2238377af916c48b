package main

import (
	"fmt"
	"io"
	"maps"
	"slices"
	"strconv"
	"strings"
	"text/tabwriter"
	"time"

	"github.com/moeserve/moeserve/experts"
	"github.com/moeserve/moeserve/node/observe"
	"github.com/moeserve/moeserve/node/sizing"
)

// runResult is what run --json writes, and what is printed of a run.
type runResult struct {
	Text           string    `json:"text"`
	TokenIDs       []int32   `json:"token_ids"`
	PromptTokenIDs []int32   `json:"prompt_token_ids"`
	FinishReason   string    `json:"finish_reason"`
	Usage          usage     `json:"usage"`
	Report         runReport `json:"report"`
}

type usage struct {
	PromptTokens     int `json:"prompt_tokens"`
	CompletionTokens int `json:"completion_tokens"`
	TotalTokens      int `json:"total_tokens"`
}

// runReport is what a run took, hit, copied and held.
type runReport struct {
	Model   string `json:"model"`
	Device  string `json:"device"`
	Backend string `json:"backend"`
	// Emulated: the CPU plays the devices, so that times and rates are not those of a GPU.
	Emulated bool `json:"emulated"`
	// OffloadFraction is the share of the experts that are not resident, from 0 to 1.
	OffloadFraction float64 `json:"offload_fraction"`
	LoadSeconds     float64 `json:"load_s"`
	TTFTSeconds     float64 `json:"ttft_s"`
	// TPOTSeconds is the mean over all tokens but the first; 0 where there is no other.
	TPOTSeconds    float64 `json:"tpot_s"`
	PrefillSeconds float64 `json:"prefill_s"`
	DecodeSeconds  float64 `json:"decode_s"`
	PrefillRate    float64 `json:"prefill_tok_s"`
	DecodeRate     float64 `json:"decode_tok_s"`
	Steps          int64   `json:"steps"`
	Retried        int64   `json:"steps_retried"`
	// StallSeconds of the compute stream by cause.
	StallSeconds  map[string]float64 `json:"stall_s"`
	GraphCaptures int64              `json:"graph_captures"`
	GraphLaunches int64              `json:"graph_launches"`
	// StepsByAccess are how steps got at offloaded experts.
	StepsByAccess map[string]int64 `json:"steps_by_access"`
	Experts       observe.Experts  `json:"experts"`
	// Peers are what is borrowed of each at the end.
	Peers []observe.Borrowed `json:"peers"`
	// Revocations of slabs of peer memory, by reason.
	Revocations map[string]int64 `json:"revocations"`
	Links       []linkReport     `json:"links"`
	Memory      observe.Memories `json:"memory"`
	// KVTiers keep KV blocks that the GPU has no room for, fastest first.
	KVTiers []observe.KVTier `json:"kv_tiers"`
	Layers  []observe.Layer  `json:"layers"`
}

// linkReport is what was copied from one memory to another: while loading, and for the
// completion, when only what experts miss is copied.
type linkReport struct {
	Source      string `json:"src"`
	Destination string `json:"dst"`
	LoadCopies  int64  `json:"load_copies"`
	LoadBytes   int64  `json:"load_bytes"`
	Copies      int64  `json:"completion_copies"`
	Bytes       int64  `json:"completion_bytes"`
	// BusySeconds is how long a copy for the completion was under way.
	BusySeconds float64 `json:"busy_s"`
	// Utilization is completion_bytes over what the link could have copied in the time of the
	// completion, from 0 to 1; omitted where the rate of the link is not known.
	Utilization *float64 `json:"utilization,omitempty"`
	// Retries and Failed of both.
	Retries int64 `json:"retries"`
	Failed  int64 `json:"failed"`
	// RelayedBytes were carried for copies of other GPUs, for the completion; Retired: the link failed
	// and carries no more of them.
	RelayedBytes int64 `json:"relayed_bytes"`
	Retired      bool  `json:"relay_retired"`
}

// newRunResult puts together a completion and the reports before and after it.
func newRunResult(a *answer, loaded, r *observe.Report) *runResult {
	report := runReport{
		Model: r.Model, Device: r.Device, Backend: r.Backend, Emulated: r.Emulated, OffloadFraction: r.Experts.OffloadFraction(),
		LoadSeconds: r.LoadTime.Seconds(), TTFTSeconds: a.prefill.Seconds(),
		PrefillSeconds: a.prefill.Seconds(), DecodeSeconds: a.decode.Seconds(),
		PrefillRate: rate(len(a.prompt), a.prefill), DecodeRate: rate(len(a.ids)-1, a.decode),
		Steps: r.Steps, Retried: r.Retried,
		StallSeconds: r.Pipeline.Stalls.ByName(), GraphCaptures: int64(r.Pipeline.Graphs.Captured), GraphLaunches: int64(r.Pipeline.Graphs.Launched),
		StepsByAccess: map[string]int64{"copy": r.Pipeline.Steps.Copied, "direct": r.Pipeline.Steps.Direct, "cpu": r.Pipeline.Steps.OnCPU}, Experts: r.Experts, Peers: r.Harvest.Borrowed(), Revocations: r.Harvest.Revocations,
		Links: []linkReport{}, Memory: r.Memory, KVTiers: append([]observe.KVTier{}, r.KVTiers.Tiers...), Layers: append([]observe.Layer{}, r.Layers...),
	}
	if n := len(a.ids) - 1; n > 0 {
		report.TPOTSeconds = a.decode.Seconds() / float64(n)
	}
	for _, now := range r.Links {
		i := slices.IndexFunc(loaded.Links, func(l observe.Link) bool { return l.From == now.From && l.To == now.To })
		var before observe.Link
		if i >= 0 {
			before = loaded.Links[i]
		}
		report.Links = append(report.Links, newLinkReport(before, now, r.Clock-loaded.Clock))
	}
	return &runResult{
		Text: a.text, TokenIDs: a.ids, PromptTokenIDs: a.prompt, FinishReason: string(a.finish),
		Usage: usage{len(a.prompt), len(a.ids), len(a.prompt) + len(a.ids)}, Report: report,
	}
}

// newLinkReport is what a link did up to a moment, and from there on in so much time.
func newLinkReport(before, now observe.Link, took time.Duration) linkReport {
	l := linkReport{
		Source: now.From.String(), Destination: now.To.String(),
		LoadCopies: before.Copies, LoadBytes: before.Bytes, Copies: now.Copies - before.Copies, Bytes: now.Bytes - before.Bytes,
		BusySeconds: (now.Busy - before.Busy).Seconds(), Retries: now.Retries, Failed: now.Failed,
		RelayedBytes: now.RelayedBytes - before.RelayedBytes, Retired: now.Retired,
	}
	if could := now.BytesPerSecond * took.Seconds(); could > 0 {
		u := float64(l.Bytes) / could
		l.Utilization = &u
	}
	return l
}

// rate is tokens per second; 0 where there was nothing to time.
func rate(tokens int, d time.Duration) float64 {
	if tokens <= 0 || d <= 0 {
		return 0
	}
	return float64(tokens) / d.Seconds()
}

// table aligns lines of columns, which are separated by tabs.
type table struct {
	b strings.Builder
	w *tabwriter.Writer
}

func newTable() *table {
	t := &table{}
	t.w = tabwriter.NewWriter(&t.b, 0, 0, 2, ' ', 0)
	return t
}

// line adds a line; writing to memory cannot fail.
func (t *table) line(format string, args ...any) { fmt.Fprintf(t.w, format+"\n", args...) }

// print writes the table, without blanks at line ends.
func (t *table) print(out io.Writer) error {
	if err := t.w.Flush(); err != nil {
		return err
	}
	var b strings.Builder
	for line := range strings.Lines(t.b.String()) {
		b.WriteString(strings.TrimRight(line, " \n") + "\n")
	}
	_, err := io.WriteString(out, b.String())
	return err
}

// printReport prints what a user asks of a run first, and with verbose the rest. Without
// text, the completion is its ids.
func printReport(out io.Writer, res *runResult, verbose, hasText bool) error {
	r := &res.Report
	t := newTable()
	t.line("")
	for _, line := range res.summary(hasText) {
		t.line("%s", line)
	}
	if verbose {
		t.line("")
		for _, line := range r.details() {
			t.line("%s", line)
		}
		printLayers(t, r.layers(), r.legend())
	}
	return t.print(out)
}

// summary answers what a user asks first, in at most ten lines, and one more with KV tiers, each
// a label and a text behind a tab.
func (r *runResult) summary(hasText bool) []string {
	p := &r.Report
	lines := []string{"model\t" + p.Model + ", " + p.placement(), "device\t" + deviceInWords(p.Device, p.Backend, p.Emulated)}
	tokens := fmt.Sprintf("tokens\t%d prompt, %d completion (%s)", r.Usage.PromptTokens, r.Usage.CompletionTokens, r.FinishReason)
	if p.Retried > 0 {
		tokens += fmt.Sprintf(", %s of %d retried", plural(p.Retried, "step"), p.Steps)
	}
	lines = append(lines, tokens)
	if !hasText {
		lines = append(lines, "ids\t"+strings.Trim(fmt.Sprint(r.TokenIDs), "[]"))
	}
	if p.TTFTSeconds > 0 {
		lines = append(lines, fmt.Sprintf("TTFT\t%s (prefill %s)", seconds(p.TTFTSeconds), tokensPerSecond(p.PrefillRate)))
	} else {
		lines = append(lines, "TTFT\tnone: no time passes on a virtual clock without rates in --emulate")
	}
	if p.TPOTSeconds > 0 {
		lines = append(lines, fmt.Sprintf("TPOT\t%s (decode %s)", seconds(p.TPOTSeconds), tokensPerSecond(p.DecodeRate)))
	}
	if e := &p.Experts; e.Hits+e.Misses > 0 {
		missed := fmt.Sprintf("%d prefetched", e.Prefetched)
		if e.OnCPU > 0 {
			missed += fmt.Sprintf(", %d computed on the CPU", e.OnCPU)
		}
		line := fmt.Sprintf("experts\thit rate %s: %s, %s (%s)", percent(e.HitRate), plural(e.Hits, "hit"), plural(e.Misses, "miss"), missed)
		if n := p.StepsByAccess["direct"]; n > 0 {
			line += fmt.Sprintf(", read in place in %s", plural(n, "step"))
		}
		if n := p.StepsByAccess["cpu"]; n > 0 {
			line += fmt.Sprintf(", left to the CPU alone in %s", plural(n, "step"))
		}
		lines = append(lines, line)
	}
	lines = append(lines, p.fetches()...)
	if len(p.KVTiers) > 0 {
		lines = append(lines, "KV tier\t"+p.tiersUsed())
	}
	return append(lines, "memory\tpeak "+p.peaks())
}

// tiersUsed is what the KV tiers did, in blocks of theirs.
func (p *runReport) tiersUsed() string {
	var all []string
	for i := range p.KVTiers {
		k := &p.KVTiers[i]
		text := fmt.Sprintf("%s: %s stored, %d loaded", k.Medium, plural(k.Offloaded, "block"), k.Reloaded)
		if k.Offloaded+k.Reloaded == 0 {
			text = k.Medium + ": not used"
		}
		all = append(all, text)
	}
	return strings.Join(all, "; ")
}

// placement is how many experts are offloaded.
func (p *runReport) placement() string {
	all := p.Experts.All()
	offloaded := all - p.Experts.ResidentExperts
	if offloaded == 0 {
		return fmt.Sprintf("all %s resident", plural(int64(all), "expert"))
	}
	text := fmt.Sprintf("%d of %s offloaded (%s)", offloaded, plural(int64(all), "expert"), percent(p.OffloadFraction))
	if n := p.Experts.PeerCopies; n > 0 {
		text += fmt.Sprintf(", %d in peer memory", n)
	}
	return text
}

// fetches are the copies to the GPU that computes: those from the host in one line, those
// from all peers in another.
func (p *runReport) fetches() []string {
	type inbound struct {
		link  linkReport
		could float64 // bytes that the links could have copied, where all their rates are known
		peers int
	}
	var from [2]inbound // the host, peers
	for i := range p.Links {
		l := &p.Links[i]
		if l.Bytes == 0 || l.Destination == "host" || l.Source == "host" && p.lends(l.Destination) {
			continue // a promotion, or KV
		}
		k := 0
		if l.Source != "host" {
			k = 1
		}
		in := &from[k]
		in.peers++
		if u := l.Utilization; u == nil || *u == 0 || in.peers > 1 && in.could == 0 {
			in.could = 0
		} else {
			in.could += float64(l.Bytes) / *u
		}
		name := l.Source
		if in.peers > 1 {
			name = plural(int64(in.peers), "peer")
		}
		in.link.Source, in.link.Destination = name, l.Destination
		in.link.Bytes += l.Bytes
		in.link.BusySeconds += l.BusySeconds
	}
	var lines []string
	for i := range from {
		in := &from[i]
		if in.could > 0 {
			u := float64(in.link.Bytes) / in.could
			in.link.Utilization = &u
		}
		if in.peers > 0 {
			lines = append(lines, "copies\t"+in.link.text())
		}
	}
	return lines
}

// text says what was copied for the completion, how fast, and what share of the link that took.
func (l *linkReport) text() string {
	text := fmt.Sprintf("%s to %s: %s", l.Source, l.Destination, sizing.Bytes(l.Bytes))
	if l.BusySeconds > 0 && l.Bytes > 0 {
		text += fmt.Sprintf(" at %s", bytesPerSecond(float64(l.Bytes)/l.BusySeconds))
	}
	if l.Utilization != nil {
		text += fmt.Sprintf(", link utilization %s", percent(*l.Utilization))
	}
	return text
}

// peaks are the maxima of memory that was allocated on each device, on all peers together.
func (p *runReport) peaks() string {
	var all []string
	var peers observe.Memory
	n := 0
	for _, m := range p.Memory {
		switch {
		case m.Peak == 0:
		case len(p.Peers) > 1 && p.lends(m.Space):
			n++
			peers.Peak += m.Peak
			peers.Capacity += m.Capacity
		default:
			all = append(all, peak(m.Space, &m))
		}
	}
	if n > 0 {
		all = append(all, peak(plural(int64(n), "peer"), &peers))
	}
	return strings.Join(all, ", ")
}

func peak(name string, m *observe.Memory) string {
	return fmt.Sprintf("%s %s of %s", name, sizing.Bytes(m.Peak), sizing.Bytes(m.Capacity))
}

// lends says whether a device is a peer.
func (p *runReport) lends(device string) bool {
	return slices.ContainsFunc(p.Peers, func(b observe.Borrowed) bool { return b.Device == device })
}

// details are what the summary leaves out, as lines of a label and a text behind a tab.
func (p *runReport) details() []string {
	e := &p.Experts
	lines := []string{
		"loading\t" + seconds(p.LoadSeconds),
		fmt.Sprintf("steps\t%d, %d retried; %d failed fetches", p.Steps, p.Retried, e.Failed),
		fmt.Sprintf("uses\t%d of resident experts, %d of cached ones, %d fetched from peers, %d fetched from the host",
			e.Uses[experts.Resident], e.Uses[experts.Cached], e.Uses[experts.Peer], e.Uses[experts.Host]),
	}
	if e.PrefetchPredicted > 0 {
		lines = append(lines, fmt.Sprintf("prefetch\t%d predicted by the router of the next layer, %d of them used (accuracy %s)",
			e.PrefetchPredicted, e.PrefetchUsed, percent(float64(e.PrefetchUsed)/float64(e.PrefetchPredicted))))
	}
	if e.Promoted+e.Demoted+e.Revoked+e.Swapped > 0 {
		lines = append(lines, fmt.Sprintf("moves\t%d promoted to peers, %d demoted, %d revoked, %d swapped with resident experts; %s copied",
			e.Promoted, e.Demoted, e.Revoked, e.Swapped, sizing.Bytes(e.MigratedBytes)))
	}
	for _, b := range p.Peers {
		line := fmt.Sprintf("peer\t%s: %s borrowed", b.Device, sizing.Bytes(b.Bytes))
		if i := slices.IndexFunc(p.Memory, func(m observe.Memory) bool { return m.Space == b.Device }); i >= 0 {
			line += fmt.Sprintf(", peak %s of %s", sizing.Bytes(p.Memory[i].Peak), sizing.Bytes(p.Memory[i].Capacity))
		}
		lines = append(lines, line)
	}
	for i := range p.KVTiers {
		k := &p.KVTiers[i]
		lines = append(lines, fmt.Sprintf("KV tier\t%s; %d stored, %d loaded", kvTierCapacity(k.Medium, k.CapacityBlocks, k.BlockTokens, k.BlockBytes), k.Offloaded, k.Reloaded))
	}
	if n := counted(p.Revocations); n != "" {
		lines = append(lines, "revocations\t"+n)
	}
	var causes []string
	for _, cause := range slices.Sorted(maps.Keys(p.StallSeconds)) {
		if s := p.StallSeconds[cause]; s > 0 {
			causes = append(causes, cause+" "+seconds(s))
		}
	}
	if len(causes) > 0 {
		lines = append(lines, "stalls\t"+strings.Join(causes, ", "))
	}
	if p.GraphCaptures+p.GraphLaunches > 0 {
		lines = append(lines, fmt.Sprintf("CUDA graphs\t%d captured, %d launched", p.GraphCaptures, p.GraphLaunches))
	}
	for i := range p.Links {
		l := &p.Links[i]
		line := fmt.Sprintf("link\t%s in %s", l.text(), plural(l.Copies, "copy"))
		if l.LoadBytes > 0 {
			line += fmt.Sprintf("; %s more while loading", sizing.Bytes(l.LoadBytes))
		}
		if l.Retries+l.Failed > 0 {
			line += fmt.Sprintf("; %d chunks retried, %d copies failed", l.Retries, l.Failed)
		}
		if l.RelayedBytes > 0 {
			line += fmt.Sprintf("; %s relayed for other GPUs", sizing.Bytes(l.RelayedBytes))
		}
		if l.Retired {
			line += "; failed as a relay"
		}
		lines = append(lines, line)
	}
	return lines
}

// counted lists what was counted at all, by name.
func counted(by map[string]int64) string {
	var all []string
	for _, name := range slices.Sorted(maps.Keys(by)) {
		if n := by[name]; n > 0 {
			all = append(all, fmt.Sprintf("%d for %s", n, name))
		}
	}
	return strings.Join(all, ", ")
}

// deviceInWords names what computes; that it is emulated in plain words.
func deviceInWords(name, backend string, emulated bool) string {
	if emulated {
		return "emulated GPU: the CPU computes, so times and rates are not a GPU's"
	}
	return fmt.Sprintf("%s (%s)", name, backend)
}

// plural is a number and what it counts.
func plural(n int64, one string) string {
	switch {
	case n == 1:
	case strings.HasSuffix(one, "s"):
		one += "es"
	case strings.HasSuffix(one, "y"):
		one = strings.TrimSuffix(one, "y") + "ies"
	default:
		one += "s"
	}
	return fmt.Sprintf("%d %s", n, one)
}

// percent prints a share of 1.
func percent(share float64) string {
	switch p := 100 * share; {
	case p > 0 && p < 1 || p > 99 && p < 100:
		return strings.TrimSuffix(fmt.Sprintf("%.1f", p), ".0") + " %"
	default:
		return fmt.Sprintf("%.0f %%", p)
	}
}

// layers is in which tier each expert is, for printLayers.
func (p *runReport) layers() []layerTiers {
	layers := make([]layerTiers, len(p.Layers))
	for i, l := range p.Layers {
		layers[i] = layerTiers{Layer: l.Layer}
		for _, tier := range l.Tiers {
			layers[i].Tiers = append(layers[i].Tiers, tier.String())
		}
	}
	return layers
}

func (p *runReport) legend() string {
	if len(p.Peers) > 0 {
		return "R resident, C cached, P peer copy, H host"
	}
	return "R resident, C cached, H host"
}

// layerTiers is in which tier each expert of a layer is.
type layerTiers struct {
	Layer int      `json:"layer"`
	Tiers []string `json:"tiers"`
}

// mostLines is how many lines of a map of layers anybody reads.
const mostLines = 16

// printLayers draws a letter per expert, layers that are alike in one line; or
// where that is too much, prints how many are in which tier.
func printLayers(t *table, layers []layerTiers, legend string) {
	lines := layerLines(layers, letters)
	if len(lines) > mostLines {
		lines = layerLines(layers, tally)
	}
	label := "layers"
	for _, line := range lines {
		t.line("%s\t%s", label, line)
		label = ""
	}
	if len(lines) > 0 {
		t.line("\t%s", legend)
	}
}

// layerLines shows layers, those that follow each other and look the same in one
// line.
func layerLines(layers []layerTiers, show func(tiers []string) string) []string {
	var lines []string
	for i := 0; i < len(layers); {
		j, shown := i, show(layers[i].Tiers)
		for j+1 < len(layers) && show(layers[j+1].Tiers) == shown {
			j++
		}
		name := strconv.Itoa(layers[i].Layer)
		if j > i {
			name += "-" + strconv.Itoa(layers[j].Layer)
		}
		lines = append(lines, fmt.Sprintf("%-5s  %s", name, shown))
		i = j + 1
	}
	return lines
}

// tally counts tiers, in the order in which they first come: "L 90  H 38".
func tally(tiers []string) string {
	count := map[string]int{}
	var order []string
	for _, t := range tiers {
		if count[t]++; count[t] == 1 {
			order = append(order, t)
		}
	}
	var b []string
	for _, t := range order {
		b = append(b, fmt.Sprintf("%s %d", letters([]string{t}), count[t]))
	}
	return strings.Join(b, "  ")
}

// letters draws one letter per tier.
func letters(tiers []string) string {
	var b strings.Builder
	for _, t := range tiers {
		b.WriteString(strings.ToUpper(t[:1]))
	}
	return b.String()
}

// seconds prints a time with three digits.
func seconds(s float64) string {
	switch {
	case s < 1e-3:
		return threeDigits(s*1e6) + " µs"
	case s < 1:
		return threeDigits(s*1e3) + " ms"
	}
	return threeDigits(s) + " s"
}

// bytesPerSecond prints a rate of copies with three digits.
func bytesPerSecond(r float64) string {
	switch {
	case r < 1e6:
		return threeDigits(r/1e3) + " kB/s"
	case r < 1e9:
		return threeDigits(r/1e6) + " MB/s"
	}
	return threeDigits(r/1e9) + " GB/s"
}

// tokensPerSecond prints a rate with at least three digits.
func tokensPerSecond(r float64) string { return threeDigits(r) + " tokens/s" }

// threeDigits prints a number with at least three digits.
func threeDigits(x float64) string {
	switch {
	case x < 10:
		return fmt.Sprintf("%.2f", x)
	case x < 100:
		return fmt.Sprintf("%.1f", x)
	}
	return fmt.Sprintf("%.0f", x)
}

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

	"github.com/moeserve/moeserve/node"
)

// runResult is what run --json writes.
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

type runReport struct {
	Model           string        `json:"model"`
	Device          string        `json:"device"`
	Backend         string        `json:"backend"`
	OffloadFraction float64       `json:"offload_fraction"`
	LoadSeconds     float64       `json:"load_s"`
	PrefillSeconds  float64       `json:"prefill_s"`
	DecodeSeconds   float64       `json:"decode_s"`
	PrefillRate     float64       `json:"prefill_tok_s"`
	DecodeRate      float64       `json:"decode_tok_s"`
	Steps           int64         `json:"steps"`
	Retried         int64         `json:"steps_retried"`
	Experts         expertsReport `json:"experts"`
	Peers           []peerReport  `json:"peers"`
	// Revocations of borrowed memory, by reason.
	Revocations map[string]int64 `json:"revocations"`
	Paths       []pathReport     `json:"paths"`
	Memory      []memoryReport   `json:"memory"`
	Layers      []layerReport    `json:"layers"`
}

type expertsReport struct {
	// Where counts experts by tier at the end, Homes by where they live between steps.
	Where map[string]int `json:"where"`
	Homes map[string]int `json:"homes"`
	// Hits by tier; Misses had to be fetched, Prefetched of them ahead of need.
	Hits       map[string]int64 `json:"hits"`
	Misses     int64            `json:"misses"`
	Prefetched int64            `json:"prefetched"`
	Failed     int64            `json:"failed_fetches"`
	// Fetched is bytes by the tier they came from.
	Fetched map[string]int64 `json:"fetched_bytes"`
	// Guessed were fetched because the next layer's router would have chosen them, and
	// GuessedRight of them it then did.
	Guessed      int64 `json:"guessed"`
	GuessedRight int64 `json:"guessed_right"`
	// Promoted copies came to peers, Demoted were given back and Revoked taken back;
	// Swapped experts became local. MovedBytes is what that copied.
	Promoted   int64 `json:"promoted"`
	Demoted    int64 `json:"demoted"`
	Revoked    int64 `json:"revoked"`
	Swapped    int64 `json:"swapped"`
	MovedBytes int64 `json:"moved_bytes"`
}

// peerReport is what is borrowed from a peer at the end.
type peerReport struct {
	Device   string `json:"device"`
	Borrowed int64  `json:"borrowed_bytes"`
}

// pathReport is what moved between two memories: while loading, and while
// answering, when only missed experts move. The last three are of both.
type pathReport struct {
	From         string  `json:"from"`
	To           string  `json:"to"`
	LoadCopies   int64   `json:"load_copies"`
	LoadBytes    int64   `json:"load_bytes"`
	AnswerCopies int64   `json:"answer_copies"`
	AnswerBytes  int64   `json:"answer_bytes"`
	Retries      int64   `json:"retries"`
	Failed       int64   `json:"failed"`
	BusySeconds  float64 `json:"busy_s"`
}

type memoryReport struct {
	Space     string `json:"space"`
	Capacity  int64  `json:"capacity_bytes"`
	Allocated int64  `json:"allocated_bytes"`
	Peak      int64  `json:"peak_bytes"`
}

type layerReport struct {
	Layer       int      `json:"layer"`
	Tiers       []string `json:"tiers"`
	Activations []int64  `json:"activations"`
	Fetches     []int64  `json:"fetches"`
}

// newRunResult puts together an answer and the reports before and after it.
func newRunResult(set *settings, a *answer, loaded, r *node.Report) *runResult {
	res := &runResult{
		Text: a.text, TokenIDs: a.ids, PromptTokenIDs: a.prompt, FinishReason: string(a.finish),
		Usage: usage{len(a.prompt), len(a.ids), len(a.prompt) + len(a.ids)},
		Report: runReport{
			Model: r.Model, Device: r.Device, Backend: r.Backend, OffloadFraction: set.Offload.Fraction,
			LoadSeconds: r.LoadTime.Seconds(), PrefillSeconds: a.prefill.Seconds(), DecodeSeconds: a.decode.Seconds(),
			PrefillRate: rate(len(a.prompt), a.prefill), DecodeRate: rate(len(a.ids)-1, a.decode),
			Steps: r.Steps, Retried: r.Retried,
			Experts: expertsReport{
				Where: r.Where(), Hits: r.Hits(), Misses: r.Experts.Misses, Prefetched: r.Experts.Prefetched,
				Homes: r.Homes, Failed: r.Experts.Failed, Fetched: r.Fetched(),
				Guessed: r.Experts.Guessed, GuessedRight: r.Experts.GuessedRight,
				Promoted: r.Experts.Promoted, Demoted: r.Experts.Demoted, Revoked: r.Experts.Revoked,
				Swapped: r.Experts.Swapped, MovedBytes: r.Experts.MovedBytes,
			},
			Peers: []peerReport{}, Revocations: r.Revocations,
			Paths: []pathReport{}, Layers: []layerReport{},
		},
	}
	for _, p := range r.Peers {
		res.Report.Peers = append(res.Report.Peers, peerReport(p))
	}
	for _, p := range r.Paths {
		path := pathReport{
			From: p.From.String(), To: p.To.String(), AnswerCopies: p.Copies, AnswerBytes: p.Bytes,
			Retries: p.Retries, Failed: p.Failed, BusySeconds: p.Busy.Seconds(),
		}
		for _, before := range loaded.Paths {
			if before.From == p.From && before.To == p.To {
				path.LoadCopies, path.LoadBytes = before.Copies, before.Bytes
				path.AnswerCopies -= before.Copies
				path.AnswerBytes -= before.Bytes
			}
		}
		res.Report.Paths = append(res.Report.Paths, path)
	}
	for _, m := range r.Memory {
		res.Report.Memory = append(res.Report.Memory, memoryReport(m))
	}
	for _, l := range r.Layers {
		tiers := make([]string, len(l.Tiers))
		for i, t := range l.Tiers {
			tiers[i] = t.String()
		}
		res.Report.Layers = append(res.Report.Layers, layerReport{l.Layer, tiers, l.Activations, l.Fetches})
	}
	return res
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

// printReport tells a person where experts were and what moved. Without text, the
// answer is its ids.
func printReport(out io.Writer, set *settings, res *runResult, hasText bool) error {
	r := &res.Report
	t := newTable()
	t.line("\nmodel\t%s on %s (%s)", r.Model, r.Device, r.Backend)
	t.line("tokens\t%d of prompt, %d of answer (%s), in %d steps", res.Usage.PromptTokens, res.Usage.CompletionTokens, res.FinishReason, r.Steps)
	if !hasText {
		t.line("ids\t%s", strings.Trim(fmt.Sprint(res.TokenIDs), "[]"))
	}
	t.line("time\tloading %s, prompt %s%s, answer %s%s", seconds(r.LoadSeconds),
		seconds(r.PrefillSeconds), tokensPerSecond(r.PrefillRate), seconds(r.DecodeSeconds), tokensPerSecond(r.DecodeRate))
	if r.Retried > 0 {
		t.line("failures\t%d steps run again, %d fetches failed", r.Retried, r.Experts.Failed)
	}
	if len(r.Layers) > 0 {
		printExperts(t, r, set)
	}
	for _, p := range r.Paths {
		t.line("moved\t%s from %s to %s in %d copies, after %s while loading", node.Bytes(p.AnswerBytes), p.From, p.To, p.AnswerCopies, node.Bytes(p.LoadBytes))
	}
	for _, m := range r.Memory {
		if m.Peak > 0 {
			t.line("memory\t%s: %s at most, of %s", m.Space, node.Bytes(m.Peak), node.Bytes(m.Capacity))
		}
	}
	layers := make([]layerTiers, len(r.Layers))
	for i, l := range r.Layers {
		layers[i] = layerTiers{l.Layer, l.Tiers}
	}
	legend := "L local, R in the ring after a fetch, H on the host only"
	if len(r.Peers) > 0 {
		legend = "L local, R in the ring after a fetch, P with a peer, H on the host only"
	}
	printLayers(t, layers, legend)
	return t.print(out)
}

// printExperts tells where experts live and from where they came.
func printExperts(t *table, r *runReport, set *settings) {
	e := &r.Experts
	local, peer, host := e.Homes["local"], e.Homes["peer"], e.Homes["host"]
	how, forGood := fmt.Sprintf("fraction %v", r.OffloadFraction), " for good"
	if set.Offload.LocalExperts != "" {
		how = "local-experts"
	}
	if set.Offload.AdaptLocal {
		forGood = ""
	}
	where := ""
	if len(r.Peers) > 0 {
		where = fmt.Sprintf(", %d of them with peers", peer)
	}
	t.line("experts\t%d: %d local%s, %d offloaded (%s)%s", local+peer+host, local, forGood, peer+host, how, where)
	from := ""
	if e.Hits["peer"] > 0 {
		from = fmt.Sprintf("%d from peers, %d from the host, ", e.Hits["peer"], e.Hits["host"])
	}
	t.line("wanted\t%d times there (%d local, %d still in the ring), %d times fetched (%s%d ahead of need)",
		e.Hits["local"]+e.Hits["ring"], e.Hits["local"], e.Hits["ring"], e.Misses, from, e.Prefetched)
	if e.Guessed > 0 {
		t.line("guessed\t%d by the next layer's router, %d of them right", e.Guessed, e.GuessedRight)
	}
	if e.Swapped > 0 {
		t.line("swapped\t%d experts became local in place of others", e.Swapped)
	}
	if e.Promoted == 0 {
		return
	}
	var lent []string
	for _, p := range r.Peers {
		lent = append(lent, fmt.Sprintf("%s of %s", node.Bytes(p.Borrowed), p.Device))
	}
	t.line("peers\t%s borrowed; %d copies came, %d were given back, %d revoked", strings.Join(lent, ", "), e.Promoted, e.Demoted, e.Revoked)
	var why []string
	for _, reason := range slices.Sorted(maps.Keys(r.Revocations)) {
		if n := r.Revocations[reason]; n > 0 {
			why = append(why, fmt.Sprintf("%d for %s", n, reason))
		}
	}
	if len(why) > 0 {
		t.line("revoked\tpieces of borrowed memory: %s", strings.Join(why, ", "))
	}
}

// layerTiers says of one layer in which tier each of its experts is.
type layerTiers struct {
	Layer int      `json:"layer"`
	Tiers []string `json:"tiers"`
}

// mostLines is how many lines of a map of layers anybody reads.
const mostLines = 16

// printLayers draws a letter per expert, layers that are alike in one line; or
// where that is too much, tells how many are in which tier.
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

func seconds(s float64) string {
	switch {
	case s < 1e-3:
		return fmt.Sprintf("%.0f us", s*1e6)
	case s < 1:
		return fmt.Sprintf("%.0f ms", s*1e3)
	}
	return fmt.Sprintf("%.1f s", s)
}

// tokensPerSecond words a rate; nothing for 0, where there was nothing to time.
func tokensPerSecond(r float64) string {
	if r == 0 {
		return ""
	}
	return fmt.Sprintf(" (%.0f tokens/s)", r)
}

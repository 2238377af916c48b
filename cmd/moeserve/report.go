package main

import (
	"fmt"
	"io"
	"strconv"
	"strings"
	"text/tabwriter"
	"time"

	"github.com/moeserve/moeserve/node/observe"
	"github.com/moeserve/moeserve/node/sizing"
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
	Model           string          `json:"model"`
	Device          string          `json:"device"`
	Backend         string          `json:"backend"`
	OffloadFraction float64         `json:"offload_fraction"`
	LoadSeconds     float64         `json:"load_s"`
	PrefillSeconds  float64         `json:"prefill_s"`
	DecodeSeconds   float64         `json:"decode_s"`
	PrefillRate     float64         `json:"prefill_tok_s"`
	DecodeRate      float64         `json:"decode_tok_s"`
	Steps           int64           `json:"steps"`
	Retried         int64           `json:"steps_retried"`
	Experts         observe.Experts `json:"experts"`
	// Peers are what is borrowed of each at the end.
	Peers []observe.Borrowed `json:"peers"`
	// Revocations of borrowed memory, by reason.
	Revocations map[string]int64 `json:"revocations"`
	Paths       []pathReport     `json:"paths"`
	Memory      []observe.Memory `json:"memory"`
	Layers      []observe.Layer  `json:"layers"`
}

// pathReport is what moved between two memories: while loading, and while
// answering, when only missed experts move. The last three are of both.
type pathReport struct {
	From         string  `json:"src"`
	To           string  `json:"dst"`
	LoadCopies   int64   `json:"load_copies"`
	LoadBytes    int64   `json:"load_bytes"`
	AnswerCopies int64   `json:"completion_copies"`
	AnswerBytes  int64   `json:"completion_bytes"`
	Retries      int64   `json:"retries"`
	Failed       int64   `json:"failed"`
	BusySeconds  float64 `json:"busy_s"`
}

// newRunResult puts together an answer and the reports before and after it.
func newRunResult(set *settings, a *answer, loaded, r *observe.Report) *runResult {
	res := &runResult{
		Text: a.text, TokenIDs: a.ids, PromptTokenIDs: a.prompt, FinishReason: string(a.finish),
		Usage: usage{len(a.prompt), len(a.ids), len(a.prompt) + len(a.ids)},
		Report: runReport{
			Model: r.Model, Device: r.Device, Backend: r.Backend, OffloadFraction: set.Offload.Fraction,
			LoadSeconds: r.LoadTime.Seconds(), PrefillSeconds: a.prefill.Seconds(), DecodeSeconds: a.decode.Seconds(),
			PrefillRate: rate(len(a.prompt), a.prefill), DecodeRate: rate(len(a.ids)-1, a.decode),
			Steps: r.Steps, Retried: r.Retried,
			Experts: r.Experts, Peers: r.Harvest.Borrowed(), Revocations: r.Harvest.Revocations,
			Paths: []pathReport{}, Memory: r.Memory, Layers: append([]observe.Layer{}, r.Layers...),
		},
	}
	for _, p := range r.Links {
		path := pathReport{
			From: p.From.String(), To: p.To.String(), AnswerCopies: p.Copies, AnswerBytes: p.Bytes,
			Retries: p.Retries, Failed: p.Failed, BusySeconds: p.Busy.Seconds(),
		}
		for _, before := range loaded.Links {
			if before.From == p.From && before.To == p.To {
				path.LoadCopies, path.LoadBytes = before.Copies, before.Bytes
				path.AnswerCopies -= before.Copies
				path.AnswerBytes -= before.Bytes
			}
		}
		res.Report.Paths = append(res.Report.Paths, path)
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
func printReport(out io.Writer, set *settings, res *runResult, harvest *observe.Harvest, hasText bool) error {
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
		how := fmt.Sprintf("fraction %v", r.OffloadFraction)
		if set.Offload.ResidentExperts != "" {
			how = "resident-experts"
		}
		for _, line := range r.Experts.Lines(how, set.Offload.DynamicResidency, harvest) {
			t.line("%s", line)
		}
	}
	for _, p := range r.Paths {
		t.line("moved\t%s from %s to %s in %d copies, after %s while loading", sizing.Bytes(p.AnswerBytes), p.From, p.To, p.AnswerCopies, sizing.Bytes(p.LoadBytes))
	}
	for _, m := range r.Memory {
		if m.Peak > 0 {
			t.line("memory\t%s: %s at most, of %s", m.Space, sizing.Bytes(m.Peak), sizing.Bytes(m.Capacity))
		}
	}
	layers := make([]layerTiers, len(r.Layers))
	for i, l := range r.Layers {
		layers[i] = layerTiers{Layer: l.Layer}
		for _, tier := range l.Tiers {
			layers[i].Tiers = append(layers[i].Tiers, tier.String())
		}
	}
	legend := "R resident, C cached, H host"
	if len(r.Peers) > 0 {
		legend = "R resident, C cached, P peer copy, H host"
	}
	printLayers(t, layers, legend)
	return t.print(out)
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

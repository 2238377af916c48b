package main

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"math"
	"os"
	"path/filepath"
	"regexp"
	"slices"
	"strings"
	"syscall"
	"testing"
	"time"

	"go.uber.org/goleak"

	"github.com/moeserve/moeserve/configs"
	"github.com/moeserve/moeserve/eval"
	"github.com/moeserve/moeserve/eval/kv"
	"github.com/moeserve/moeserve/eval/prefix"
	"github.com/moeserve/moeserve/tools/racedetector"
)

const benchmarks = "../../docs/guide/benchmarks.md"

// pictured is the --emulate of the README's picture.
func pictured(t *testing.T) string {
	t.Helper()
	text, err := os.ReadFile(benchmarks)
	if err != nil {
		t.Fatal(err)
	}
	m := regexp.MustCompile(`moeserve bench sweep --emulate (\S+)`).FindSubmatch(text)
	if m == nil {
		t.Fatalf("%s has no command that draws the picture", benchmarks)
	}
	return string(m[1])
}

// Each tier is flat up to the predicted saturation point, and falls from there, on the
// machine of the README's picture. Its times do not depend on data, so none is kept.
func TestSweepBendsWherePredicted(t *testing.T) {
	defer goleak.VerifyNone(t, goleak.IgnoreCurrent())
	args := []string{
		"bench", "sweep", "--emulate", pictured(t) + ",nodata", "--input-len", "77", "--warmup-tokens", "2", "--trials", "1",
		"--fractions", "0,0.0625,0.25,0.5,0.625,1", "--json", "-",
	}
	stdout, stderr, code := invoke(t, strings.NewReader(""), args...)
	if code != exitDone {
		t.Fatalf("exit code %d: %s", code, stderr)
	}
	var results []eval.Result
	if err := json.Unmarshal([]byte(stdout), &results); err != nil {
		t.Fatal(err)
	}
	at, saturation := map[eval.Cell]float64{}, map[configs.Tier]float64{}
	for _, r := range results {
		at[r.Cell()] = r.DecodeTokS
		if r.Prediction == nil || r.Roofline == nil {
			t.Fatalf("%v: neither roofline nor prediction", r.Cell())
		}
		if r.Prediction.SaturationPoint > 0 {
			saturation[r.Tier] = r.Prediction.SaturationPoint
		}
	}
	flat := at[eval.Cell{Tier: configs.NoTier}]
	for _, tier := range []configs.Tier{configs.HostTier, configs.PeerTier} {
		all := at[eval.Cell{Tier: tier, Fraction: 1}]
		// Where a line that falls as 1/fraction leaves the flat one.
		bend := all / flat
		if math.Abs(bend/saturation[tier]-1) > 0.06 {
			t.Errorf("%s: bends at %.4f, the predicted saturation point is %.4f", tier, bend, saturation[tier])
		}
		for cell, got := range at {
			if cell.Tier != tier || math.Abs(cell.Fraction/saturation[tier]-1) < 0.1 {
				continue // near the saturation point, copies and compute slow each other down
			}
			if want := min(flat, all/cell.Fraction); math.Abs(got/want-1) > 0.02 {
				t.Errorf("%s, %v: %.0f tokens/s, want %.0f: flat up to %.3f, falling from there", tier, cell.Fraction, got, want, bend)
			}
		}
	}
	picture, err := os.ReadFile("../../docs/sweep.svg")
	if err != nil {
		t.Fatal(err)
	}
	for tier, fraction := range saturation {
		if want := fmt.Sprintf("%s: saturation point %.1f %%", tier, 100*fraction); !strings.Contains(string(picture), want) {
			t.Errorf("the picture does not say %q: draw it again (%s has the command)", want, benchmarks)
		}
	}
	if !strings.Contains(string(picture), "emulated devices and links") {
		t.Error("the picture does not say that it is of emulated devices")
	}
	if len(saturation) != 2 || saturation[configs.HostTier] > 0.15 || saturation[configs.PeerTier] < 0.4 {
		t.Errorf("saturation points %v: not where links of 55 and 395 put them", saturation)
	}
}

// interrupter is a terminal that interrupts when it shows a text.
type interrupter struct {
	bytes.Buffer
	text string
	stop func()
}

func (i *interrupter) columns() int { return 200 }

func (i *interrupter) show(line string) {
	if strings.Contains(line, i.text) {
		i.stop()
	}
}

// An interrupted benchmark writes what it has measured.
func TestInterruptedBench(t *testing.T) {
	dir := t.TempDir()
	journal := filepath.Join(dir, "sweep.jsonl")
	common := []string{"--num-prompts", "2", "--input-len", "3", "--output-len", "3", "--trials", "2", "--warmup-tokens", "0"}
	for _, c := range []struct {
		name   string
		args   []string
		after  string
		stderr string
		trials []int // of each result
	}{
		// Two cells of two trials with a prefill and two steps each: 12 steps, and behind each
		// cell the last one again.
		{"sweep", append([]string{"bench", "sweep", "--fractions", "0,1", "--tiers", "host", "--resume", journal}, common...), " 10 of 12 steps", "1 of 2 cells are finished, 1 with fewer trials; the same command measures the rest: --resume " + journal, []int{2, 1}},
		{"rest", append([]string{"bench", "sweep", "--fractions", "0,1", "--tiers", "host", "--resume", journal}, common...), " 4 of 6 steps", "1 of 2 cells are finished, 1 with fewer trials; ", []int{2, 1}},
		{"shared", append([]string{"bench", "sweep", "--fractions", "0,1", "--tiers", "host"}, common...), " 7 of 12 steps", "0 of 2 cells are finished, 2 with fewer trials; with --resume FILE a sweep keeps", []int{1, 1}},
		{"throughput", append([]string{"bench", "throughput"}, common...), " 4 of 6 steps", "moeserve: 1 of 2 trials are done\n", []int{1}},
		{"nothing", append([]string{"bench", "throughput"}, common...), " 1 of 6 steps", "", nil},
	} {
		ctx, cancel := context.WithCancel(t.Context())
		path, now := filepath.Join(dir, c.name), fixedNow()
		var out bytes.Buffer
		errs := &interrupter{text: c.after, stop: cancel}
		clock := func() time.Time { // each step is shown
			now = now.Add(time.Second)
			return now
		}
		code := execute(ctx, &streams{in: strings.NewReader(""), out: &out, err: errs, now: clock}, append(c.args, "--json", path+".json", "--csv", path+".csv"))
		cancel()
		if code != exitInterrupted || !strings.HasSuffix(errs.String(), "moeserve: interrupted\n") || !strings.Contains(errs.String(), c.stderr) {
			t.Errorf("%s: exit code %d, %q, want %q", c.name, code, errs, c.stderr)
		}
		data, err := os.ReadFile(path + ".json")
		if c.trials == nil {
			if err == nil || out.Len() > 0 {
				t.Errorf("%s: written: %s, %s", c.name, data, &out)
			}
			continue
		}
		if err != nil {
			t.Fatal(err)
		}
		results, err := eval.ReadResults(data, "file")
		if err != nil || len(results) != len(c.trials) {
			t.Fatalf("%s: %v, %s", c.name, err, data)
		}
		for i, r := range results {
			if len(r.Trials) != c.trials[i] {
				t.Errorf("%s: result %d has %d trials, want %d", c.name, i, len(r.Trials), c.trials[i])
			}
		}
		if text, err := os.ReadFile(path + ".csv"); err != nil || strings.Count(string(text), "\n") != 1+len(c.trials) || !strings.Contains(out.String(), "decode tok/s") {
			t.Errorf("%s: %v, %s, %s", c.name, err, text, &out)
		}
	}
}

// What was measured is written to files also where nobody reads standard output, or one of the
// files cannot be written.
func TestBenchOutputLost(t *testing.T) {
	p := startServe(t, "--emulate", "hbm=256MiB")
	common := []string{"--num-prompts", "2", "--input-len", "3", "--output-len", "3"}
	trials := append([]string{"--trials", "1", "--warmup-tokens", "0"}, common...)
	broken := writerFunc(func([]byte) (int, error) { return 0, syscall.EPIPE })
	for name, args := range map[string][]string{
		"throughput": append([]string{"bench", "throughput"}, trials...),
		"sweep":      append([]string{"bench", "sweep", "--fractions", "0"}, trials...),
		"serve":      append([]string{"bench", "serve", "--base-url", p.url}, common...),
		"transfer":   {"bench", "transfer", "--largest-mib", "1", "--repetitions", "1"},
		"prefix":     {"bench", "prefix", "--places", "hbm", "--lengths", "16", "--repetitions", "1"},
		"kv":         {"bench", "kv", "--models", "qwen2-57b-a14b", "--entries", "16", "--repetitions", "1"},
	} {
		path := filepath.Join(t.TempDir(), name)
		full := fullDisk(t)
		for _, c := range []struct {
			csv  string
			want []string
		}{{path + ".csv", []string{".csv", ".json"}}, {full, []string{".json"}}} {
			var errs bytes.Buffer
			code := execute(t.Context(), &streams{in: strings.NewReader(""), out: broken, err: &errs}, append(slices.Clone(args), "--json", path+".json", "--csv", c.csv))
			if code != exitFailed || !strings.Contains(errs.String(), "broken pipe") {
				t.Errorf("%s: exit code %d, %s", name, code, &errs)
			}
			for _, ending := range c.want {
				if info, err := os.Stat(path + ending); err != nil || info.Size() == 0 {
					t.Errorf("%s, --csv %s: %v, %s", name, c.csv, err, &errs)
				}
				os.Remove(path + ending) //nolint:errcheck // the next case writes it again
			}
		}
	}
}

// bench kv: loads take the longer the more entries they have, one run from the peer is faster
// than from the host as its link is, and scattered blocks are no faster than one run.
func TestBenchKV(t *testing.T) {
	const host, peer = 55.3, 395
	stdout, stderr, code := invoke(t, strings.NewReader(""), "bench", "kv", "--models", "kimi-k2,mixtral-8x7b", "--entries", "100,1000,8000", "--repetitions", "2",
		"--emulate", "virtual,nodata,pcie=55.3GB/s,nvlink=395GB/s,latency=8us", "--json", "-")
	var r kv.Result
	if err := json.Unmarshal([]byte(stdout), &r); err != nil || code != exitDone {
		t.Fatalf("exit code %d, %v: %s", code, err, stderr)
	}
	if len(r.Entries) != 2 || len(r.Reloads) != 2*3*2 || r.Sizes != nil {
		t.Fatalf("%d sizes of entries, %d points", len(r.Entries), len(r.Reloads))
	}
	for i, p := range r.Reloads {
		if p.Layout == kv.Contiguous {
			scattered := r.Reloads[i-1]
			if scattered.Layout != kv.Scattered || scattered.Bytes != p.Bytes || scattered.Host.Seconds < 0.99*p.Host.Seconds || scattered.Peer.Seconds < 0.99*p.Peer.Seconds {
				t.Errorf("scattered %+v, one run %+v", scattered, p)
			}
			if p.Bytes > 50<<20 && math.Abs(p.Speedup/(peer/host)-1) > 0.05 {
				t.Errorf("%d bytes: %.2f times as fast from the peer, the links are %.2f", p.Bytes, p.Speedup, peer/host)
			}
		}
		if i >= 2 && r.Reloads[i-2].EntryBytes == p.EntryBytes && (r.Reloads[i-2].Host.Seconds >= p.Host.Seconds || r.Reloads[i-2].Peer.Seconds >= p.Peer.Seconds) {
			t.Errorf("no longer with more entries: %+v, %+v", r.Reloads[i-2], p)
		}
	}
	for _, c := range []struct{ args, want string }{
		{"--models kimi-k3", "--models kimi-k3: no such model; did you mean kimi-k2?"},
		{"--entries 0", `--entries has "0": must be a whole number from 1 to`},
		{"--entries=", "--entries has no number"},
		{"--entries 1,many", `--entries has "many": must be a whole number from 1 to`},
		{"--block-size 0", "--block-size is 0"},
		{"--repetitions 0", "--repetitions is 0"},
		{"--copy-method mail", "--copy-method mail: must be dma, batch, kernel, both or all"},
		{"--copy-sizes 5B", "--copy-sizes 5B: must be a multiple of 16 bytes"},
		{"--copy-sizes large", "--copy-sizes: \"large\" is not a size"},
		{"--copy-largest-mib 1", "--copy-largest-mib is 1, which has no room for a block of 16 MiB"},
		{"--copy-blocks 0", "--copy-blocks is out of range"},
		{"--calibrate x.json", "--calibrate needs --copy-method both or all"},
		{"--calibrate x.json --copy-method both", "--calibrate needs GPUs"},
		{"--plot x.gif", "--plot x.gif: must be a file that ends in"},
		{"--entries 16000000", "loads of 16000000 entries are too large; give fewer --entries"},
	} {
		args := append([]string{"bench", "kv", "--emulate", "virtual,nodata,hbm=16GiB"}, strings.Fields(c.args)...)
		if stdout, stderr, code := invoke(t, strings.NewReader(""), args...); code != exitUsage || stdout != "" || !strings.Contains(stderr, c.want) {
			t.Errorf("%s: exit code %d, %q, want %q", c.args, code, stderr, c.want)
		}
	}
}

// bench kv --file-directory: scattered blocks are loaded from files too, no faster than from host memory,
// which they pass through; no file is left, also where it fails.
func TestBenchKVFiles(t *testing.T) {
	directory := t.TempDir()
	plot := filepath.Join(t.TempDir(), "reload.svg")
	args := []string{"bench", "kv", "--models", "qwen2-57b-a14b", "--entries", "16,100", "--repetitions", "1", "--emulate", "virtual,nodata,pcie=55.3GB/s,nvlink=395GB/s,latency=8us"}
	stdout, stderr, code := invoke(t, strings.NewReader(""), append(slices.Clone(args), "--file-directory", directory, "--plot", plot, "--json", "-")...)
	var r kv.Result
	if err := json.Unmarshal([]byte(stdout), &r); err != nil || code != exitDone {
		t.Fatalf("exit code %d, %v: %s", code, err, stderr)
	}
	if r.FileDirectory != directory || len(r.Reloads) != 4 {
		t.Fatalf("files in %q, %d points", r.FileDirectory, len(r.Reloads))
	}
	for _, p := range r.Reloads {
		if (p.File != nil) != (p.Layout == kv.Scattered) || p.File != nil && (p.File.Seconds < 0.99*p.Host.Seconds || p.File.PageCache == "") {
			t.Errorf("%s: from files %+v, from the host %+v", p.Layout, p.File, *p.Host)
		}
	}
	if svg, err := os.ReadFile(plot); err != nil || !strings.Contains(string(svg), "files in the page cache") {
		t.Errorf("%v: %s", err, svg)
	}
	for _, c := range []struct{ args, want string }{
		{"--file-directory " + directory + "/none", "--file-directory: kv: load 16 entries of 57344 bytes, scattered: files in directory \"" + directory + "/none\": offload: cannot create a folder"},
		{"--copy-method dma --file-directory " + directory, "--file-directory is of loads, and --copy-method measures copies"},
	} {
		if stdout, stderr, code := invoke(t, strings.NewReader(""), append(slices.Clone(args), strings.Fields(c.args)...)...); code != exitUsage || stdout != "" || !strings.Contains(stderr, c.want) {
			t.Errorf("%s: exit code %d, %q, want %q", c.args, code, stderr, c.want)
		}
	}
	if left, err := os.ReadDir(directory); err != nil || len(left) > 0 {
		t.Errorf("left: %v, %v", left, err)
	}
}

// bench prefix: a prefix is found where it is kept, the sooner the faster the link to it, and none is
// as slow as one that is computed; batches are the faster the more of their requests find theirs.
func TestBenchPrefix(t *testing.T) {
	measure := func(args ...string) (r prefix.Result) {
		t.Helper()
		args = append([]string{
			"bench", "prefix", "--emulate", "virtual,hbm=256MiB,host=2GiB,flops=1G,bw=100MB/s,pcie=55.3MB/s,nvlink=395MB/s", "--file-directory", t.TempDir(), "--json", "-",
		}, args...)
		stdout, stderr, code := invoke(t, strings.NewReader(""), args...)
		if err := json.Unmarshal([]byte(stdout), &r); err != nil || code != exitDone || stderr != "" {
			t.Fatalf("exit code %d, %v: %s", code, err, stderr)
		}
		return r
	}
	r := measure("--lengths", "64,160", "--repetitions", "2")
	if len(r.TTFT) != 2*len(prefix.Places) || len(r.Hits) != 0 {
		t.Fatalf("%+v", r)
	}
	seconds, loads := map[prefix.Place]float64{}, map[prefix.Place]float64{}
	for i, x := range r.TTFT {
		switch {
		case x.Place == prefix.Nowhere && (x.CachedTokens != 0 || x.Seconds != x.MissSeconds || x.Speedup != 1):
			t.Errorf("%+v", x)
		case x.Place != prefix.Nowhere && (x.CachedTokens != x.PrefixTokens || x.Speedup < 2):
			t.Errorf("%+v", x)
		case x.Place == prefix.HBM && x.Seconds > 1.3*x.DecodeStepSeconds:
			t.Errorf("%+v", x)
		case i%2 == 1 && (x.MissSeconds <= r.TTFT[i-1].MissSeconds || x.Speedup < r.TTFT[i-1].Speedup):
			t.Errorf("%+v, of a shorter prefix %+v", x, r.TTFT[i-1])
		}
		seconds[x.Place], loads[x.Place] = x.Seconds, x.LoadSeconds // of the longer one
		if loaded := x.Place != prefix.HBM && x.Place != prefix.Nowhere; loaded != (x.LoadSeconds > 0) || x.LoadShare < 0 || x.LoadShare >= 1 || math.Abs(x.LoadShare*x.Seconds-x.LoadSeconds) > 1e-9 {
			t.Errorf("%+v, loaded %v", x, loaded)
		}
	}
	// All of a load and nothing else is what a tier adds to the time of the GPU's memory.
	for _, p := range []prefix.Place{prefix.Peer, prefix.Host, prefix.File} {
		if added := seconds[p] - seconds[prefix.HBM]; !(math.Abs(loads[p]/added-1) < 0.05) {
			t.Errorf("%s: the load takes %g s, and the first token %g s more than in the GPU's memory", p, loads[p], added)
		}
	}
	// A tenth of the rate: ten times the load, and a larger share of the time.
	for _, x := range measure("--lengths", "160", "--places", "peer,host", "--repetitions", "1", "--emulate", "virtual,hbm=256MiB,host=2GiB,flops=1G,bw=100MB/s,pcie=5.53MB/s,nvlink=39.5MB/s").TTFT {
		if slower := x.LoadSeconds / loads[x.Place]; !(slower > 9 && slower < 11) || !(x.LoadShare > 2*loads[x.Place]/seconds[x.Place]) {
			t.Errorf("%+v: at ten times the rate the load takes %g s of %g", x, loads[x.Place], seconds[x.Place])
		}
	}
	// The virtual clock does not count files' reads.
	if !(seconds[prefix.HBM] < seconds[prefix.Peer] && seconds[prefix.Peer] < seconds[prefix.Host] && seconds[prefix.Host] <= seconds[prefix.File] && seconds[prefix.File] < seconds[prefix.Nowhere]) {
		t.Errorf("%v", seconds)
	}
	// Over a slow link it is faster to compute a prefix than to load it, over a fast one it is not.
	r = measure("--lengths", "64,128", "--places", "peer,host", "--emulate", "virtual,hbm=256MiB,host=2GiB,flops=78G,bw=3.9GB/s,pcie=2MB/s,nvlink=395MB/s")
	for _, x := range r.TTFT {
		loaded, computed := x.PrefixTokens, 0
		if x.Place == prefix.Host {
			loaded, computed = computed, loaded
		}
		if x.CachedTokens != loaded || x.RecomputedTokens != computed || x.Seconds > x.MissSeconds || (x.LoadShare > 0) != (loaded > 0) {
			t.Errorf("%+v", x)
		}
	}
	if len(r.TTFT) != 4 {
		t.Errorf("%+v", r)
	}
	// Half of the experts on a peer are hidden behind a prompt, as in host memory over so slow a link they are
	// not, and the less the more steps there are. A length that is named twice is measured twice.
	whole := func(args ...string) float64 {
		t.Helper()
		r := measure(append([]string{"--lengths", "160,160", "--places", "nowhere", "--emulate", "virtual,hbm=256MiB,host=2GiB,flops=1G,bw=100MB/s,pcie=0.2MB/s,nvlink=395MB/s"}, args...)...)
		if len(r.TTFT) != 2 || r.TTFT[0].PrefixTokens != 160 || !(r.TTFT[1].Seconds > 0) || r.TTFT[1].CachedTokens != 0 {
			t.Fatalf("%q: %+v", args, r.TTFT)
		}
		return r.TTFT[1].Seconds
	}
	resident, peer, host := whole(), whole("--offload-fraction", "0.5", "--offload-tier", "peer"), whole("--offload-fraction", "0.5", "--offload-tier", "host")
	if steps := whole("--offload-fraction", "0.5", "--offload-tier", "host", "--max-num-batched-tokens", "64"); !(peer < 1.02*resident && host > 2*resident && steps > 2*host) {
		t.Errorf("resident %g s, peer %g, host %g, in steps of 64 tokens %g", resident, peer, host, steps)
	}
	// On a virtual clock without rates nothing takes time, and nothing is faster; stores end nevertheless.
	still := func(args ...string) prefix.Result {
		t.Helper()
		return measure(append(args, "--places", "host,nowhere", "--repetitions", "1", "--emulate", "virtual,hbm=256MiB,host=2GiB")...)
	}
	if r = still("--lengths", "16"); len(r.TTFT) != 2 || r.TTFT[0].Seconds != 0 || r.TTFT[0].CachedTokens != 16 || r.TTFT[0].LoadShare != 0 || r.TTFT[1].Speedup != 0 {
		t.Errorf("%+v", r.TTFT)
	}
	if r = still("--hits", "0,1", "--input-len", "32", "--num-prompts", "4", "--num-prefixes", "2"); len(r.Hits) != 4 || r.Hits[1].CachedTokens != 4*16 || r.Hits[1].RequestThroughput != 0 {
		t.Errorf("%+v", r.Hits)
	}
	if r = still("--misses", "--lengths", "16"); len(r.Misses) != 1 || r.Misses[0].Cost != 0 {
		t.Errorf("%+v", r.Misses)
	}
	if r = still("--decodes", "2", "--input-len", "16"); len(r.Decodes) != 4 || r.Decodes[3].Cost != 0 {
		t.Errorf("%+v", r.Decodes)
	}
	if racedetector.Enabled {
		return // the rest runs alike
	}
	r = measure("--hits", "0,0.5,1", "--input-len", "64", "--num-prompts", "12", "--num-prefixes", "3", "--places", "hbm,host,nowhere")
	if len(r.Hits) != 9 || len(r.TTFT) != 0 {
		t.Fatalf("%+v", r)
	}
	for i, x := range r.Hits {
		found := 0
		if x.Place != prefix.Nowhere {
			found = int(12*x.HitFraction) * 48 // whole blocks, without that of the last token
		}
		if x.CachedTokens != found || x.PromptTokens != 12*64 || i%3 > 0 && found > 0 && x.RequestThroughput <= r.Hits[i-1].RequestThroughput {
			t.Errorf("%+v, want %d tokens found", x, found)
		}
	}
	r = measure("--misses", "--lengths", "64,160", "--repetitions", "3", "--places", "hbm,peer,host,nowhere")
	if len(r.Misses) != 4 || len(r.TTFT)+len(r.Hits)+len(r.Decodes) != 0 {
		t.Fatalf("%+v", r)
	}
	for _, x := range r.Misses { // stores run beside the steps
		if x.PlainSeconds <= 0 || math.Abs(x.Cost) > 0.01 || math.Abs(x.Seconds/x.PlainSeconds-1-x.Cost) > 1e-9 {
			t.Errorf("%+v", x)
		}
	}
	r = measure("--decodes", "70", "--input-len", "32", "--repetitions", "2", "--places", "peer,host")
	if len(r.Decodes) != 8 || len(r.TTFT)+len(r.Hits)+len(r.Misses) != 0 {
		t.Fatalf("%+v", r)
	}
	for _, x := range r.Decodes {
		if quiet := x.Traffic == prefix.Quiet; x.StepSeconds <= 0 || x.Cost < 0 || x.Cost > 0.02 || quiet != (x.BytesPerSecond == 0) || quiet && x.Cost != 0 {
			t.Errorf("%+v", x)
		}
	}
	// Without any flag the lengths are those that the small context has room for.
	if r = measure("--places", "hbm", "--repetitions", "1"); len(r.TTFT) != 3 || r.TTFT[2].PrefixTokens != 240 {
		t.Errorf("%+v", r.TTFT)
	}
	// A place that the machine does not have is skipped; without any there is no result.
	for places, want := range map[string]int{"hbm,peer": exitDone, "peer": exitUsage} {
		stdout, stderr, code := invoke(t, strings.NewReader(""), "bench", "prefix", "--emulate", "virtual,gpus=1,hbm=256MiB", "--lengths", "16", "--places", places)
		if code != want || !strings.Contains(stderr, "skipped: peer: ") || (code == exitDone) != strings.Contains(stdout, "TTFT ms") {
			t.Errorf("%s: exit code %d, %q, %q", places, code, stdout, stderr)
		}
	}
	for _, c := range []struct{ args, want string }{
		{"--lengths 16 --kv-offloading-size 1", "--kv-offloading-size is what --places sets"},
		{"--places disk", `--places: "disk" is no place: must be`},
		{"--lengths 300", `--lengths has "300": must be a whole number from 1 to`},
		{"--max-model-len 9", "no prefix fits in the context of 9 tokens beside 9 others"},
		{"--misses --decodes 3", "--hits, --misses and --decodes are measured one at a time"},
		{"--misses --plot x.svg", "--plot draws times to first token and --hits"},
		{"--misses --places hbm --lengths 16", "name a tier in --places: peer, host or file"},
		{"--decodes -1 --input-len 16", "--decodes -1 --input-len 16: must be at least 1"},
		{"--decodes 4", "for a context of 256 tokens at most 235 tokens"},
		{"--lengths 16 --repetitions 0", "--repetitions is 0"},
		{"--hits 2", `--hits has "2": must be a fraction from 0 to 1`},
		{"--hits 1", "--input-len and --output-len are 513 together, and the context has 256 tokens"},
		{"--hits 1 --num-prompts 0", "--num-prompts is 0"},
		{"--lengths 16 --plot x.gif", "--plot x.gif: must be a file that ends in"},
	} {
		args := append([]string{"bench", "prefix"}, strings.Fields(c.args)...)
		if stdout, stderr, code := invoke(t, strings.NewReader(""), args...); code != exitUsage || stdout != "" || !strings.Contains(stderr, c.want) {
			t.Errorf("%s: exit code %d, %q, want %q", c.args, code, stderr, c.want)
		}
	}
}

// fullDisk is a link to a device that is always full: what replaces it replaces the link.
func fullDisk(t *testing.T) string {
	t.Helper()
	link := filepath.Join(t.TempDir(), "full")
	if err := os.Symlink("/dev/full", link); err != nil {
		t.Fatal(err)
	}
	return link
}

// Until a result is written there is no file of it, which a command that is killed, as by the end of
// a pipe's reader, would leave behind.
func TestResultLeavesNothing(t *testing.T) {
	dir := t.TempDir()
	path := filepath.Join(dir, "out.json")
	files := func() string {
		t.Helper()
		entries, err := os.ReadDir(dir)
		if err != nil {
			t.Fatal(err)
		}
		return fmt.Sprint(entries)
	}
	r, err := (&streams{out: io.Discard}).openResult(path)
	if err != nil {
		t.Fatal(err)
	}
	if got := files(); got != "[]" {
		t.Errorf("before it is written: %s", got)
	}
	if err := r.write(math.NaN()); err == nil || !strings.HasPrefix(err.Error(), "--json") || files() != "[]" {
		t.Errorf("%v, %s", err, files())
	}
	if err := errors.Join(r.write(1), r.close()); err != nil || files() != "[- out.json]" {
		t.Errorf("%v, %s", err, files())
	}
	if text, err := os.ReadFile(path); err != nil || string(text) != "1\n" {
		t.Errorf("%q, %v", text, err)
	}
}

// A file that is a device, a pipe or a link to one is written to, and stays what it is.
func TestWriteFile(t *testing.T) {
	link := filepath.Join(t.TempDir(), "link.csv")
	if err := os.Symlink(os.DevNull, link); err != nil {
		t.Fatal(err)
	}
	if err := writeFile(link, func(w io.Writer) error {
		_, err := io.WriteString(w, "x")
		return err
	}); err != nil {
		t.Error(err)
	}
	if info, err := os.Lstat(link); err != nil || info.Mode().Type() != fs.ModeSymlink {
		t.Errorf("%v, %v", info.Mode(), err)
	}
	if err := writeFile(fullDisk(t), func(w io.Writer) error {
		_, err := io.WriteString(w, "x")
		return err
	}); !errors.Is(err, syscall.ENOSPC) {
		t.Error(err)
	}
}

// Results have the command line, as a shell reads it, without secrets.
func TestCommandLine(t *testing.T) {
	got := commandLine([]string{"bench", "serve", "--base-url", "https://me:p@ss@host:8000/x@y", "--base-url=http://token@host", "a b", "", "x\x1b'\n"})
	if want := `moeserve bench serve --base-url https://xxxxx@host:8000/x@y --base-url=http://xxxxx@host 'a b' '' $'x\x1b\'\n'`; got != want {
		t.Errorf("%s\nwant %s", got, want)
	}
}

// What a benchmark writes beside its result is JSON where the log is.
func TestBenchLogsJSON(t *testing.T) {
	_, stderr, code := invoke(t, strings.NewReader(""), "bench", "sweep", "--log-format", "json", "--num-prompts", "2", "--input-len", "3", "--output-len", "3", "--trials", "1",
		"--warmup-tokens", "0", "--fractions", "0,1", "--tiers", "peer", "--emulate", "gpus=1")
	var record struct{ Msg string }
	if err := json.Unmarshal([]byte(stderr), &record); err != nil || code != exitDone || !strings.HasPrefix(record.Msg, "skipped: 100 % offloaded, peer: ") {
		t.Errorf("exit code %d, %v: %s", code, err, stderr)
	}
}

// bench serve measures our own server: text from files, random ids, shared prefixes, a trace, and chats.
func TestBenchServe(t *testing.T) {
	p := startServe(t, "--emulate", "hbm=256MiB")
	dir := t.TempDir()
	path := filepath.Join(dir, "load.csv")
	file := func(name, text string) string {
		at := filepath.Join(dir, name)
		if err := os.WriteFile(at, []byte(text), 0o666); err != nil {
			t.Fatal(err)
		}
		return at
	}
	questions := file("questions.jsonl", `{"turns": ["sort: c a b ="]}`+"\n"+`{"turns": ["1+2="]}`)
	custom := file("custom.jsonl", `{"prompt": "sort: c a b =", "output_tokens": 4}`+"\n"+`{"prompt": "1+2="}`)
	trace := file("trace.jsonl", strings.Repeat(`{"timestamp": 5, "input_length": 7, "output_length": 4, "hash_ids": [1]}`+"\n", 6))
	// Tokens of prompts; -1: as many as the tokenizer makes of text.
	for name, c := range map[string]struct {
		input int
		args  []string
	}{
		"random": {30, []string{"--num-prompts", "6", "--input-len", "5", "--csv", path}},
		"rate":   {30, []string{"--num-prompts", "6", "--input-len", "5", "--request-rate", "200", "--burstiness", "0.5", "--max-concurrency", "3", "--goodput", "ttft:9e5", "--save-detailed"}},
		"ramp":   {66, []string{"--num-prompts", "6", "--input-len", "5", "--random-prefix-len", "6", "--ramp-up-strategy", "linear", "--ramp-up-start-rps", "100", "--ramp-up-end-rps", "300", "--num-warmups", "3"}},
		"prefix": {60, []string{"--num-prompts", "6", "--dataset-name", "prefix_repetition", "--prefix-repetition-prefix-len", "8", "--prefix-repetition-suffix-len", "2"}},
		"trace":  {42, []string{"--dataset-name", "timed_trace", "--dataset-path", trace}},
		"custom": {-1, []string{"--num-prompts", "6", "--dataset-name", "custom", "--dataset-path", custom}},
		"file":   {-1, []string{"--num-prompts", "6", "--dataset-path", questions}},
		"chat":   {-1, []string{"--num-prompts", "6", "--dataset-path", questions, "--endpoint", "/v1/chat/completions"}},
	} {
		stdout, stderr, code := invoke(t, strings.NewReader(""), append([]string{"bench", "serve", "--base-url", p.url, "--ignore-eos", "--output-len", "4", "--json", "-"}, c.args...)...)
		var r struct {
			Completed, Failed int
			TotalInputTokens  int     `json:"total_input_tokens"`
			TotalOutputTokens int     `json:"total_output_tokens"`
			TTFT              float64 `json:"mean_ttft_ms"`
			TPOT              float64 `json:"median_tpot_ms"`
			E2EL              float64 `json:"p99_e2el_ms"`
			Model             string  `json:"model_id"`
			Version           string  `json:"server_version"`
		}
		if err := json.Unmarshal([]byte(stdout), &r); err != nil || code != exitDone {
			t.Fatalf("%s: exit code %d, %v: %s%s", name, code, err, stdout, stderr)
		}
		if r.Completed != 6 || r.Failed != 0 || r.TotalOutputTokens != 24 || c.input >= 0 && r.TotalInputTokens != c.input || r.TTFT <= 0 || r.E2EL < r.TTFT || r.TPOT <= 0 || r.Model != "built-in" || r.Version == "" {
			t.Errorf("%s: %+v", name, r)
		}
		if name == "rate" {
			golden(t, "benchserve.json.txt", shape(t, stdout))
		}
	}
	// Random prompts and traces have as many tokens generated as they say, prompts of files until the model ends.
	for want, args := range map[int][]string{
		128: {"--num-prompts", "8", "--input-len", "5"},
		12:  {"--dataset-name", "timed_trace", "--dataset-path", trace, "--num-prompts", "3"},
		-1:  {"--num-prompts", "8", "--input-len", "5", "--ignore-eos=false"},
		-2:  {"--num-prompts", "8", "--dataset-path", questions},
	} {
		stdout, stderr, code := invoke(t, strings.NewReader(""), append([]string{"bench", "serve", "--base-url", p.url, "--output-len", "16", "--json", "-"}, args...)...)
		var r struct {
			Tokens int `json:"total_output_tokens"`
		}
		if err := json.Unmarshal([]byte(stdout), &r); err != nil || code != exitDone || want > 0 && r.Tokens != want || want < 0 && r.Tokens >= 128 {
			t.Errorf("%v: %d tokens, exit code %d, %v: %s", args, r.Tokens, code, err, stderr)
		}
	}
	for want, args := range map[string][]string{
		"--dataset-name is \"sharegpt\"":         {"--dataset-name", "sharegpt"},
		"--dataset-name random reads no file":    {"--dataset-name", "random", "--dataset-path", questions},
		"--dataset-name custom needs a file":     {"--dataset-name", "custom"},
		"--endpoint /v1/chat/completions needs":  {"--endpoint", "/v1/chat/completions"},
		"--burstiness is \"0\"":                  {"--burstiness", "0"},
		"--ramp-up-strategy is \"steep\"":        {"--ramp-up-strategy", "steep"},
		"--ramp-up-strategy has rates":           {"--ramp-up-strategy", "linear", "--request-rate", "3"},
		"--ramp-up-strategy needs":               {"--ramp-up-strategy", "linear"},
		"--ramp-up-start-rps and":                {"--ramp-up-start-rps", "3"},
		"--dataset-name timed_trace has":         {"--dataset-name", "timed_trace", "--dataset-path", trace, "--request-rate", "3"},
		"--goodput: \"itl:3\"":                   {"--goodput", "itl:3"},
		"--num-warmups is 0":                     {"--num-warmups", "0"},
		"--random-prefix-len is 0 and --random-": {"--random-range-ratio", "1"},
		"--prefix-repetition-prefix-len is 0":    {"--prefix-repetition-prefix-len", "0"},
		"--dataset-path: ":                       {"--dataset-path", filepath.Join(dir, "absent")},
	} {
		if _, stderr, code := invoke(t, strings.NewReader(""), append([]string{"bench", "serve", "--base-url", p.url}, args...)...); code != exitUsage || !strings.HasPrefix(stderr, "moeserve: "+want) {
			t.Errorf("%v: exit code %d, %q, want %s", args, code, stderr, want)
		}
	}
	if text, err := os.ReadFile(path); err != nil || strings.Count(string(text), "\n") != 2 || !strings.HasPrefix(string(text), "version,commit,modified,date,command,endpoint_type,") {
		t.Errorf("%v: %s", err, text)
	}
	// A request that the server refuses ends the measurement before it begins.
	stdout, stderr, code := invoke(t, strings.NewReader(""), "bench", "serve", "--base-url", p.url, "--input-len", "300")
	if code != exitFailed || stdout != "" || !strings.HasPrefix(stderr, "moeserve: /v1/completions: 400 Bad Request: ") {
		t.Errorf("exit code %d, %q, %q", code, stdout, stderr)
	}
	if _, stderr, code = invoke(t, strings.NewReader(""), "bench", "serve", "--base-url", p.url, "--model", "gpt-5"); code != exitFailed || !strings.Contains(stderr, "gpt-5") {
		t.Errorf("exit code %d, %q", code, stderr)
	}
}

package main

import (
	"strings"
	"testing"
	"time"

	"github.com/moeserve/moeserve/device"
	"github.com/moeserve/moeserve/experts"
	"github.com/moeserve/moeserve/node/observe"
	"github.com/moeserve/moeserve/transfer"
)

func TestNumbersInWords(t *testing.T) {
	for _, c := range []struct{ got, want string }{
		{seconds(0), "0.00 µs"},
		{seconds(12.34e-6), "12.3 µs"},
		{seconds(.00123), "1.23 ms"},
		{seconds(.9996), "1000 ms"},
		{seconds(123.4), "123 s"},
		{bytesPerSecond(999), "1.00 kB/s"},
		{bytesPerSecond(55.3e6), "55.3 MB/s"},
		{bytesPerSecond(395.4e9), "395 GB/s"},
		{tokensPerSecond(.5), "0.50 tokens/s"},
		{tokensPerSecond(12345.6), "12346 tokens/s"},
		{plural(0, "hit"), "0 hits"},
		{plural(1, "miss"), "1 miss"},
		{plural(2, "miss"), "2 misses"},
		{plural(3, "copy"), "3 copies"},
		{percent(0), "0 %"},
		{percent(.004), "0.4 %"},
		{percent(.558), "56 %"},
		{percent(.996), "99.6 %"},
		{percent(.9903), "99 %"},
		{percent(1), "100 %"},
		{counted(map[string]int64{"pressure": 3, "policy": 0, "external": 1}), "1 for external, 3 for pressure"},
		{deviceInWords("NVIDIA H200", "cuda", false), "NVIDIA H200 (cuda)"},
		{deviceInWords("emulated", "cpu", true), "emulated GPU: the CPU computes, so times and rates are not a GPU's"},
	} {
		if c.got != c.want {
			t.Errorf("%q, want %q", c.got, c.want)
		}
	}
}

// TestReport: what a user asks for first is in at most ten lines, and one more with KV tiers; those of peers are one.
func TestReport(t *testing.T) {
	link := func(from, to device.Space, bytes int64, busy time.Duration, rate float64) observe.Link {
		return observe.Link{PathStats: transfer.PathStats{From: from, To: to, Copies: bytes >> 20, Bytes: bytes, Busy: busy}, BytesPerSecond: rate}
	}
	gpu, host := device.HBM(0), device.Host
	loaded := observe.Report{Clock: time.Second, Links: observe.Links{link(host, gpu, 1<<20, time.Millisecond, 1e9)}}
	done := observe.Report{
		Model: "mixtral-8x7b", Device: "NVIDIA H200", Backend: "cuda", Clock: 3 * time.Second, LoadTime: 9 * time.Second, Steps: 7, Retried: 1,
		Experts: observe.Experts{
			Tiers: map[experts.Tier]int{experts.Resident: 2, experts.Cached: 1, experts.Peer: 3, experts.Host: 2}, ResidentExperts: 2, PeerCopies: 4,
			Stats: experts.Stats{
				Uses: experts.ByTier{40, 27, 30, 23}, Hits: 67, Misses: 53, HitRate: 67. / 120, Prefetched: 41, PrefetchPredicted: 25, PrefetchUsed: 19,
				Failed: 2, Promoted: 4, Revoked: 1, MigratedBytes: 4 << 20,
			},
		},
		Links: observe.Links{
			link(host, gpu, 11<<20, 3*time.Millisecond, 1e9), link(host, device.HBM(1), 4<<20, time.Millisecond, 1e9),
			link(device.HBM(1), gpu, 20<<20, 2*time.Millisecond, 1e10), link(device.HBM(2), gpu, 40<<20, 4*time.Millisecond, 1e10),
			link(gpu, host, 1<<20, time.Millisecond, 0),
		},
		KVTiers: observe.KVTiers{Tiers: []observe.KVTier{
			{Medium: "CPU", CapacityBlocks: 100, BlockTokens: 32, BlockBytes: 4 << 20, Offloaded: 7, Reloaded: 5}, {Medium: "FILE", CapacityBlocks: 1, BlockTokens: 32, BlockBytes: 4 << 20},
		}},
		Memory: observe.Memories{
			{Space: "host", Capacity: 64 << 30, Peak: 1 << 30},
			{Space: "gpu0", Capacity: 80 << 30, Peak: 2 << 30},
			{Space: "gpu1", Capacity: 80 << 30, Peak: 3 << 30},
			{Space: "gpu2", Capacity: 80 << 30, Peak: 4 << 30},
		},
	}
	a := &answer{prompt: make([]int32, 13), ids: []int32{5, 6, 7}, finish: "stop", prefill: 130 * time.Millisecond, decode: 50 * time.Millisecond}
	res := newRunResult(a, &loaded, &done)
	res.Report.Peers = []observe.Borrowed{{Device: "gpu1", Bytes: 1 << 30}, {Device: "gpu2"}}
	res.Report.Revocations = map[string]int64{"pressure": 2}
	res.Report.StallSeconds = map[string]float64{"expert-copy": .5, "router-sync": 0}
	want := `
model    mixtral-8x7b, 6 of 8 experts offloaded (75 %), 4 in peer memory
device   NVIDIA H200 (cuda)
tokens   13 prompt, 3 completion (stop), 1 step of 7 retried
ids      5 6 7
TTFT     130 ms (prefill 100 tokens/s)
TPOT     25.0 ms (decode 40.0 tokens/s)
experts  hit rate 56 %: 67 hits, 53 misses (41 prefetched)
copies   host to gpu0: 10.00 MiB at 5.24 GB/s, link utilization 0.5 %
copies   2 peers to gpu0: 60.00 MiB at 10.5 GB/s, link utilization 0.2 %
KV tier  CPU: 7 blocks stored, 5 loaded; FILE: not used
memory   peak host 1.00 GiB of 64.00 GiB, gpu0 2.00 GiB of 80.00 GiB, 2 peers 7.00 GiB of 160.00 GiB
`
	var b strings.Builder
	if err := printReport(&b, res, false, false); err != nil || b.String() != want {
		t.Errorf("%v: %s", err, b.String())
	}
	if n := len(res.summary(false)); n > 11 {
		t.Errorf("%d lines", n)
	}
	b.Reset()
	if err := printReport(&b, res, true, false); err != nil {
		t.Fatal(err)
	}
	want = `
loading      9.00 s
steps        7, 1 retried; 2 failed fetches
uses         40 of resident experts, 27 of cached ones, 30 fetched from peers, 23 fetched from the host
prefetch     25 predicted by the router of the next layer, 19 of them used (accuracy 76 %)
moves        4 promoted to peers, 0 demoted, 1 revoked, 0 swapped with resident experts; 4.00 MiB copied
peer         gpu1: 1.00 GiB borrowed, peak 3.00 GiB of 80.00 GiB
peer         gpu2: 0 B borrowed, peak 4.00 GiB of 80.00 GiB
KV tier      CPU: 100 blocks of 4.00 MiB for 3200 tokens, 400.00 MiB; 7 stored, 5 loaded
KV tier      FILE: 1 block of 4.00 MiB for 32 tokens, 4.00 MiB; 0 stored, 0 loaded
revocations  2 for pressure
stalls       expert-copy 500 ms
link         host to gpu0: 10.00 MiB at 5.24 GB/s, link utilization 0.5 % in 10 copies; 1.00 MiB more while loading
link         host to gpu1: 4.00 MiB at 4.19 GB/s, link utilization 0.2 % in 4 copies
link         gpu1 to gpu0: 20.00 MiB at 10.5 GB/s, link utilization 0.1 % in 20 copies
link         gpu2 to gpu0: 40.00 MiB at 10.5 GB/s, link utilization 0.2 % in 40 copies
link         gpu0 to host: 1.00 MiB at 1.05 GB/s in 1 copy
`
	if got := b.String(); !strings.HasSuffix(got, want) {
		t.Errorf("%s", got)
	}
	quiet := runResult{Usage: usage{PromptTokens: 1, CompletionTokens: 1}, Report: runReport{Model: "m", Experts: observe.Experts{Tiers: map[experts.Tier]int{experts.Resident: 1}, ResidentExperts: 1}}}
	if got, want := strings.Join(quiet.summary(true), "\n"), "model\tm, all 1 expert resident"; !strings.HasPrefix(got, want) || strings.Contains(got, "TPOT") || strings.Contains(got, "copies") {
		t.Errorf("%s", got)
	}
}

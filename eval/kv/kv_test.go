package kv_test

import (
	"bytes"
	"context"
	"encoding/csv"
	"errors"
	"math"
	"slices"
	"strings"
	"sync/atomic"
	"testing"
	"time"

	"github.com/moeserve/moeserve/configs"
	"github.com/moeserve/moeserve/device"
	"github.com/moeserve/moeserve/device/emulated"
	"github.com/moeserve/moeserve/eval"
	"github.com/moeserve/moeserve/eval/kv"
	"github.com/moeserve/moeserve/tools/racedetector"
)

const (
	hostRate, peerRate = 55.3e9, 395e9
	hostLatency        = 7400 * time.Nanosecond
	peerLatency        = 9300 * time.Nanosecond
)

// machine has links of the rates of two H200's, and so many GPUs.
func machine(t *testing.T, o emulated.Options) device.Machine {
	t.Helper()
	o.Virtual = !o.Pace
	o.HostLink = emulated.Link{BytesPerSecond: hostRate, Latency: hostLatency}
	o.PeerLink = emulated.Link{BytesPerSecond: peerRate, Latency: peerLatency}
	m, err := emulated.New(o)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		if err := m.Close(); err != nil {
			t.Error(err) // memory that was not freed
		}
	})
	return m
}

func reload(t *testing.T, gpus int, counts ...int) (kv.ReloadOptions, []kv.ReloadPoint) {
	t.Helper()
	m := machine(t, emulated.Options{NoData: true, GPUs: make([]emulated.GPU, gpus)})
	o := kv.ReloadOptions{Machine: m, Compute: device.HBM(0), Entries: kv.Entries(configs.KVEntries()), Counts: counts, Repetitions: 2}
	if gpus > 1 {
		o.Peer = device.HBM(1)
	}
	points, err := kv.Reload(t.Context(), o)
	if err != nil {
		t.Fatal(err)
	}
	for s, want := range o.Needs() {
		if u, err := m.Usage(s); err != nil || u.Peak != want {
			t.Errorf("%s: peak of %d bytes, %v; %d announced", s, u.Peak, err, want)
		}
	}
	return o, points
}

// raw is the time of copies on a link.
func raw(copies int, bytes, rate float64, latency time.Duration) float64 {
	return float64(copies) * (latency.Seconds() + bytes/rate)
}

// Loads grow with the number of entries, host over peer comes near the ratio of the links, and
// the raw rates are the links'.
func TestReload(t *testing.T) {
	o, points := reload(t, 2)
	if want := len(o.Entries) * len(kv.DefaultCounts()) * 2; len(points) != want {
		t.Fatalf("%d points, want %d", len(points), want)
	}
	before := map[kv.Layout]kv.ReloadPoint{}
	for _, p := range points {
		if want := (p.Entries + 15) / 16; p.Blocks != want || p.Bytes != int64(want)*16*p.EntryBytes {
			t.Errorf("%d entries of %d bytes: %d blocks, %d bytes", p.Entries, p.EntryBytes, p.Blocks, p.Bytes)
		}
		copies, size := p.Blocks, float64(16*p.EntryBytes)
		if p.Layout == kv.Contiguous {
			copies, size = 1, float64(p.Bytes)
		}
		for _, c := range []struct {
			name    string
			load    *kv.Load
			rate    float64
			latency time.Duration
		}{{"host", p.Host, hostRate, hostLatency}, {"peer", p.Peer, peerRate, peerLatency}} {
			want := float64(p.Bytes) / raw(copies, size, c.rate, c.latency)
			if math.Abs(c.load.RawBytesPerSecond/want-1) > 1e-3 {
				t.Errorf("%s, %d entries of %d bytes, %s: %.4g bytes/s raw, want %.4g", c.name, p.Entries, p.EntryBytes, p.Layout, c.load.RawBytesPerSecond, want)
			}
			// A load is faster in batches; the engine's chunks have a latency each.
			best := max(c.load.RawBytesPerSecond, c.load.BatchBytesPerSecond)
			if c.load.RawFraction < 0.9 || c.load.RawFraction > 1.001 || c.load.CopyFraction < c.load.RawFraction*0.999 || c.load.CopyFraction > 1.001 ||
				math.Abs(c.load.RawFraction*best/c.load.QueuedBytesPerSecond-1) > 1e-9 || (p.Layout == kv.Scattered) != (best > c.load.RawBytesPerSecond) {
				t.Errorf("%s, %d entries of %d bytes, %s: %+v", c.name, p.Entries, p.EntryBytes, p.Layout, *c.load)
			}
		}
		if p.Layout == kv.Contiguous && p.Bytes >= 64<<20 && math.Abs(p.Speedup/(peerRate/hostRate)-1) > 0.1 {
			t.Errorf("%d bytes in one run: %.3g times as fast from the peer, the links are %.3g", p.Bytes, p.Speedup, peerRate/hostRate)
		}
		if math.Abs(p.Speedup/(p.Host.Seconds/p.Peer.Seconds)-1) > 1e-9 || math.Abs(p.CopySpeedup/(p.Host.Copy/p.Peer.Copy)-1) > 1e-9 ||
			math.Abs(p.RawSpeedup/(max(p.Peer.RawBytesPerSecond, p.Peer.BatchBytesPerSecond)/max(p.Host.RawBytesPerSecond, p.Host.BatchBytesPerSecond))-1) > 1e-9 {
			t.Errorf("%d entries: %+v", p.Entries, p)
		}
		if q, ok := before[p.Layout]; ok && q.EntryBytes == p.EntryBytes && (q.Entries >= p.Entries || q.Host.Seconds >= p.Host.Seconds || q.Peer.Seconds >= p.Peer.Seconds) {
			t.Errorf("%d entries take no longer than %d: %+v, %+v", p.Entries, q.Entries, p, q)
		}
		before[p.Layout] = p
	}
}

// The parts of a load are what it takes: the device's time, and what the host adds to it.
func TestParts(t *testing.T) {
	const late = 50 * time.Microsecond
	m := machine(t, emulated.Options{NoData: true, GPUs: make([]emulated.GPU, 2), NoticeLatency: late})
	points, err := kv.Reload(t.Context(), kv.ReloadOptions{Machine: m, Compute: device.HBM(0), Peer: device.HBM(1), Entries: kv.Entries(configs.KVEntries()), Counts: []int{100, 1000}, Repetitions: 1})
	if err != nil {
		t.Fatal(err)
	}
	for _, p := range points {
		for _, l := range []*kv.Load{p.Host, p.Peer} {
			// Who copies without the engine is not notified late, and copies in one chunk.
			least := float64(p.Bytes) / max(l.RawBytesPerSecond, l.BatchBytesPerSecond)
			if l.PlainSeconds < least-1e-8 || l.PlainSeconds > l.Copy+1e-8 || math.Abs(l.PlainFraction*l.Seconds/l.PlainSeconds-1) > 1e-9 {
				t.Errorf("%d entries, %s: %.3g s without the engine, %+v", p.Entries, p.Layout, l.PlainSeconds, *l)
			}
			sum := l.Queue + l.Launch + l.Copy + l.Notice + l.Wake
			if math.Abs(sum-l.Seconds) > 1e-8 || math.Abs(l.Notice-late.Seconds()) > 1e-8 || l.CopyFraction <= l.RawFraction {
				t.Errorf("%d entries, %s: parts of %.3g s are %+v", p.Entries, p.Layout, l.Seconds, l.Parts)
			}
		}
		if p.CopySpeedup <= p.Speedup || math.Abs(p.PlainSpeedup/(p.Host.PlainSeconds/p.Peer.PlainSeconds)-1) > 1e-9 {
			t.Errorf("%d entries, %s: %.3g times as fast, its copies %.3g", p.Entries, p.Layout, p.Speedup, p.CopySpeedup)
		}
	}
}

func TestReloadWithoutPeer(t *testing.T) {
	_, points := reload(t, 1, 100, 1000)
	for _, p := range points {
		if p.Host == nil || p.Peer != nil || p.Speedup != 0 || p.RawSpeedup != 0 {
			t.Fatalf("%+v", p)
		}
	}
}

// The checker of conflicting accesses finds no two copies that write a block at once.
func TestReloadIsOrdered(t *testing.T) {
	m := machine(t, emulated.Options{Check: true, GPUs: make([]emulated.GPU, 2)})
	o := kv.ReloadOptions{
		Machine: m, Compute: device.HBM(0), Peer: device.HBM(1), Entries: []kv.Entry{{Models: []string{"tiny"}, Bytes: 64}},
		Counts: []int{1, 40, 100}, BlockTokens: 4, Repetitions: 2, QueuedBytes: 1 << 14,
	}
	var done, total int64
	o.Progress = func(d, all int64) { done, total = d, all }
	points, err := kv.Reload(t.Context(), o)
	if err != nil || len(points) != 6 || done != total || total == 0 {
		t.Errorf("%v, %d points, %d of %d bytes", err, len(points), done, total)
	}
	if p := points[0]; p.Host.QueuedLoads != 16 || p.Blocks != 1 {
		t.Errorf("%+v: %+v", p, *p.Host)
	}
}

// signals counts the fence values that streams of GPUs signal.
type signals struct {
	device.Machine
	n atomic.Int64
}

type signaling struct {
	device.BatchCopier
	signals *signals
}

func (s *signals) NewStream(space device.Space, o device.StreamOptions) (device.Stream, error) {
	stream, err := s.Machine.NewStream(space, o)
	if b, ok := stream.(device.BatchCopier); ok && space != device.Host {
		return signaling{b, s}, err
	}
	return stream, err
}

func (s signaling) SignalFence(f device.Fence, value uint32) error {
	s.signals.n.Add(1)
	return s.BatchCopier.SignalFence(f, value)
}

// The device signals the end of each load, as of a server's, also where several are queued.
func TestReloadSignals(t *testing.T) {
	m := &signals{Machine: machine(t, emulated.Options{CopyErrorsLoseDevice: true, GPUs: make([]emulated.GPU, 2)})}
	points, err := kv.Reload(t.Context(), kv.ReloadOptions{
		Machine: m, Compute: device.HBM(0), Peer: device.HBM(1), Entries: []kv.Entry{{Models: []string{"tiny"}, Bytes: 64}},
		Counts: []int{28}, BlockTokens: 4, Repetitions: 2, QueuedBytes: 1 << 14,
	})
	if err != nil {
		t.Fatal(err)
	}
	loads := 0
	for _, p := range points {
		loads += 3 * 2 * 2 * (1 + p.Host.QueuedLoads) // repetitions, engines, sources
	}
	if points[0].Host.QueuedLoads < 2 || m.n.Load() != int64(loads) {
		t.Errorf("%d signals of %d loads, %d of them queued", m.n.Load(), loads, points[0].Host.QueuedLoads)
	}
}

// An interrupted measurement has the points that are done.
func TestReloadInterrupted(t *testing.T) {
	m := machine(t, emulated.Options{NoData: true, GPUs: make([]emulated.GPU, 1)})
	ctx, cancel := context.WithCancel(t.Context())
	o := kv.ReloadOptions{Machine: m, Compute: device.HBM(0), Entries: kv.Entries(configs.KVEntries())[:1], Repetitions: 1}
	n := 0
	o.Progress = func(int64, int64) {
		if n++; n == 3 {
			cancel()
		}
	}
	points, err := kv.Reload(ctx, o)
	if !errors.Is(err, context.Canceled) || len(points) != 3 {
		t.Errorf("%d points, %v", len(points), err)
	}
}

func TestReloadRefuses(t *testing.T) {
	m := machine(t, emulated.Options{NoData: true, GPUs: make([]emulated.GPU, 1)})
	good := kv.ReloadOptions{Machine: m, Compute: device.HBM(0), Entries: kv.Entries(configs.KVEntries())}
	for name, spoil := range map[string]func(*kv.ReloadOptions){
		"no machine":     func(o *kv.ReloadOptions) { o.Machine = nil },
		"nothing":        func(o *kv.ReloadOptions) { o.Entries = nil },
		"no bytes":       func(o *kv.ReloadOptions) { o.Entries = []kv.Entry{{}} },
		"no entries":     func(o *kv.ReloadOptions) { o.Counts = []int{100, 0} },
		"no tokens":      func(o *kv.ReloadOptions) { o.BlockTokens = -1 },
		"no repetitions": func(o *kv.ReloadOptions) { o.Repetitions = -1 },
	} {
		o := good
		spoil(&o)
		if _, err := kv.Reload(t.Context(), o); err == nil {
			t.Errorf("%s: measured", name)
		}
	}
}

// Models with entries of one size are one entry.
func TestEntries(t *testing.T) {
	entries := kv.Entries(configs.KVEntries())
	if got := entries[0]; !slices.Equal(got.Models, []string{"deepseek-v3", "kimi-k2", "mistral-large-3"}) || got.Bytes != 70272 || len(got.Derivations) != 3 {
		t.Errorf("%+v", got)
	}
	n := 0
	for i, e := range entries {
		n += len(e.Models)
		for _, other := range entries[:i] {
			if other.Bytes == e.Bytes {
				t.Errorf("%v and %v have entries of one size", e.Models, other.Models)
			}
		}
	}
	if n != len(configs.KVEntries()) {
		t.Errorf("%d models", n)
	}
}

func TestOutput(t *testing.T) {
	racedetector.SkipSequential(t)
	machine := eval.Machine{Device: "emulated", Emulated: true, Emulation: &eval.Emulation{Rates: eval.RatesVirtual}}
	for gpus, want := range map[int][]string{1: {"host ms"}, 2: {"host ms", "peer ms", "host/peer", "61 layers x (512 kv_lora_rank + 64 qk_rope_head_dim) x 2 bytes"}} {
		o, points := reload(t, gpus, 100, 1000)
		r := &kv.Result{Machine: machine, Loads: &kv.Loads{BlockTokens: 16, Entries: o.Entries, Reloads: points}}
		var table, list, svg, png bytes.Buffer
		if err := kv.WriteTable(&table, r); err != nil {
			t.Error(err)
		}
		for _, w := range want {
			if !strings.Contains(table.String(), w) {
				t.Errorf("%d GPUs: no %q in\n%s", gpus, w, &table)
			}
		}
		if err := kv.WriteCSV(&list, r); err != nil {
			t.Error(err)
		}
		lines, err := csv.NewReader(&list).ReadAll() // all lines have as many columns
		if err != nil || len(lines) != 1+len(points) {
			t.Errorf("%v, %d lines", err, len(lines))
		}
		for format, out := range map[string]*bytes.Buffer{"svg": &svg, "png": &png} {
			if err := kv.Plot(out, format, r); err != nil || out.Len() == 0 {
				t.Errorf("%s: %v", format, err)
			}
		}
		hasPeer := strings.Contains(svg.String(), "peer memory")
		if !strings.Contains(svg.String(), "deepseek-v3, kimi-k2, mistral-large-3: 68.62 KiB per token") || strings.Count(svg.String(), "host memory") != 1 || hasPeer != (gpus > 1) {
			t.Errorf("%d GPUs: %s", gpus, &svg)
		}
		// What was measured before an interruption is written.
		r.Reloads = points[:3]
		if err := errors.Join(kv.WriteTable(&table, r), kv.Plot(&svg, "svg", r), kv.WriteCSV(&list, r)); err != nil {
			t.Error(err)
		}
	}
}

package tenants

import (
	"bufio"
	"cmp"
	"fmt"
	"io"
	"math"
	"math/rand/v2"
	"slices"
	"strconv"
	"strings"
	"time"

	"github.com/moeserve/moeserve/device"
)

// Trace is how many bytes of each peer's memory other processes hold over time: each sample
// is valid until the peer's next one. Samples are sorted by time, then by peer; the first
// sample of each peer is at 0.
type Trace []Sample

// Sample is the number of bytes that other processes hold on a peer from time At on.
type Sample struct {
	At    time.Duration
	Peer  device.Space
	Bytes int64
}

const (
	traceHeader = "time_s,peer,bytes"
	// maxTraceSeconds is the maximum that fits into a time.Duration.
	maxTraceSeconds = math.MaxInt64 / 1e9
)

// Read reads a recording: text of lines
//
//	time_s,peer,bytes
//	0,1,1500000000
//	0,2,0
//	2.5,1,3000000000
//	2.5,2,0
//
// where time_s is in seconds from the start, peer is the number of a GPU, and bytes is what
// other processes hold there. Times increase; the first is 0. Each time has a line for
// every peer of time 0, so a lost sample is detected. maxGap, if over 0, is the maximum
// time between two samples. peers, if not nil, are the valid peers. An error names the
// line.
func Read(r io.Reader, peers []device.Space, maxGap time.Duration) (Trace, error) {
	var (
		t     Trace
		all   []device.Space // those of time 0
		now   []device.Space // those of the present time
		n     int
		in    = bufio.NewScanner(r)
		wrong = func(format string, args ...any) (Trace, error) {
			return nil, fmt.Errorf("tenants: trace line %d: %w", n, fmt.Errorf(format, args...))
		}
	)
	// missing returns an error if the current time lacks a peer.
	missing := func() error {
		for _, p := range all {
			if !slices.Contains(now, p) {
				return fmt.Errorf("time %s has no line for peer %s, which time 0 has: add the line", seconds(t[len(t)-1].At), number(p))
			}
		}
		return nil
	}
	for in.Scan() {
		n++
		line := strings.TrimSuffix(in.Text(), "\r")
		if n == 1 {
			if line != traceHeader {
				return wrong("the header is %q and must be %q", line, traceHeader)
			}
			continue
		}
		s, err := parseSample(line)
		if err != nil {
			return wrong("%w", err)
		}
		if peers != nil && !slices.Contains(peers, s.Peer) {
			return wrong("there is no peer %s", number(s.Peer))
		}
		switch last := len(t) - 1; {
		case last < 0 && s.At != 0:
			return wrong("the first time is %s and must be 0: what others held before is not known", seconds(s.At))
		case last >= 0 && s.At < t[last].At:
			return wrong("time %s comes after %s: sort the lines by time", seconds(s.At), seconds(t[last].At))
		case last >= 0 && s.At > t[last].At:
			if t[last].At == 0 {
				all = slices.Clone(now)
			}
			if err := missing(); err != nil {
				return wrong("%w", err)
			}
			if gap := s.At - t[last].At; maxGap > 0 && gap > maxGap {
				return wrong("%s s lie between times %s and %s, more than %s: a gap", seconds(gap), seconds(t[last].At), seconds(s.At), seconds(maxGap))
			}
			now = now[:0]
		}
		if s.At > 0 && !slices.Contains(all, s.Peer) {
			return wrong("peer %s has no line at time 0", number(s.Peer))
		}
		if slices.Contains(now, s.Peer) {
			return wrong("peer %s has two lines at time %s", number(s.Peer), seconds(s.At))
		}
		now = append(now, s.Peer)
		t = append(t, s)
	}
	n++
	if err := in.Err(); err != nil {
		return wrong("%w", err)
	}
	if len(t) == 0 {
		return wrong("the trace ends without a sample")
	}
	if err := missing(); err != nil {
		return wrong("%w", err)
	}
	slices.SortStableFunc(t, bySample)
	return t, nil
}

func bySample(a, b Sample) int { return cmp.Or(cmp.Compare(a.At, b.At), cmp.Compare(a.Peer, b.Peer)) }

func parseSample(line string) (Sample, error) {
	f := strings.Split(line, ",")
	if len(f) != 3 {
		return Sample{}, fmt.Errorf("%q has %d fields and must have 3: %s", line, len(f), traceHeader)
	}
	at, err := strconv.ParseFloat(f[0], 64)
	if err != nil || !(at >= 0 && at < maxTraceSeconds) {
		return Sample{}, fmt.Errorf("time_s is %q and must be a number of seconds from 0 on", f[0])
	}
	peer, err := strconv.Atoi(f[1])
	if err != nil || peer < 0 || peer > 1<<20 {
		return Sample{}, fmt.Errorf("peer is %q and must be the number of a GPU, from 0 on", f[1])
	}
	bytes, err := strconv.ParseInt(f[2], 10, 64)
	if err != nil || bytes < 0 {
		return Sample{}, fmt.Errorf("bytes is %q and must be a whole number from 0 on", f[2])
	}
	return Sample{time.Duration(math.Round(at * 1e9)), device.HBM(peer), bytes}, nil
}

// seconds and number format a time and a peer for a trace.
func seconds(d time.Duration) string {
	s := fmt.Sprintf("%d.%09d", d/time.Second, d%time.Second)
	return strings.TrimSuffix(strings.TrimRight(s, "0"), ".")
}

func number(s device.Space) string {
	i, _ := s.GPU()
	return strconv.Itoa(i)
}

// Write writes the trace in the format of Read: at each time of any sample, a line for each
// peer.
func (t Trace) Write(w io.Writer) error {
	out := bufio.NewWriter(w)
	fmt.Fprintln(out, traceHeader)
	level := map[device.Space]int64{}
	var peers []device.Space
	for i, s := range t {
		if _, ok := level[s.Peer]; !ok {
			peers = append(peers, s.Peer)
		}
		level[s.Peer] = s.Bytes
		if i+1 < len(t) && t[i+1].At == s.At {
			continue
		}
		for _, p := range peers {
			fmt.Fprintf(out, "%s,%s,%d\n", seconds(s.At), number(p), level[p])
		}
	}
	return out.Flush()
}

// Options describe a generated trace.
type Options struct {
	// Peers and, for each, its memory in bytes.
	Peers    []device.Space
	Capacity []int64
	// Duration of the trace.
	Duration time.Duration
	// Churn is the mean number of changes per minute of the bytes held on a peer. Default:
	// 1. Under 0: never.
	Churn float64
	// Seed determines all random choices. A peer's trace does not depend on the other
	// peers.
	Seed uint64
}

// quantiles of the share of GPU memory in use, from a trace of 6,500 GPUs on 1,800
// machines (Gopal and Kaffes, "Harvest", section 2.1 and figure 2): 68 % of machines use
// at most 20 %, 87 % at most 50 %.
var quantiles = []struct{ probability, share float64 }{{0, 0}, {0.68, 0.2}, {0.87, 0.5}, {1, 1}}

// shareAt returns the share of memory in use at quantile q (0 to 1), interpolated linearly
// between the published quantiles.
func shareAt(q float64) float64 {
	for i := 1; i < len(quantiles); i++ {
		a, b := quantiles[i-1], quantiles[i]
		if q <= b.probability {
			return a.share + (b.share-a.share)*(q-a.probability)/(b.probability-a.probability)
		}
	}
	return 1
}

// Generate returns a trace in which the share of memory held on each peer is drawn from the
// published distribution, and redrawn independently at the times of a Poisson process.
func Generate(o Options) (Trace, error) {
	if o.Churn == 0 {
		o.Churn = 1
	}
	switch {
	case len(o.Peers) != len(o.Capacity):
		return nil, fmt.Errorf("tenants: generate a trace: %d peers and %d capacities", len(o.Peers), len(o.Capacity))
	case o.Duration < 0 || math.IsNaN(o.Churn) || math.IsInf(o.Churn, 1):
		return nil, fmt.Errorf("tenants: generate a trace of %v with %g changes per minute: both must be finite, and the time not under 0", o.Duration, o.Churn)
	}
	var t Trace
	for i, p := range o.Peers {
		rng := rand.New(rand.NewPCG(o.Seed, uint64(p)))
		for at := 0.0; ; at += rng.ExpFloat64() * 60 / o.Churn {
			if at > o.Duration.Seconds() {
				break
			}
			t = append(t, Sample{time.Duration(at * 1e9), p, int64(shareAt(rng.Float64()) * float64(o.Capacity[i]))})
			if o.Churn < 0 {
				break
			}
		}
	}
	slices.SortStableFunc(t, bySample)
	return t, nil
}

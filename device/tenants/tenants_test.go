package tenants_test

import (
	"bytes"
	"errors"
	"math"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/moeserve/moeserve/device"
	"github.com/moeserve/moeserve/device/emulated"
	"github.com/moeserve/moeserve/device/tenants"
)

var peers12 = []device.Space{device.HBM(1), device.HBM(2)}

func TestRead(t *testing.T) {
	const good = "time_s,peer,bytes\n0,1,1500\n0,2,0\n2.5,2,7\n2.5,1,3000\n"
	got, err := tenants.Read(strings.NewReader(strings.ReplaceAll(good, "\n", "\r\n")), peers12, 3*time.Second)
	want := tenants.Trace{
		{0, device.HBM(1), 1500},
		{0, device.HBM(2), 0},
		{2500 * time.Millisecond, device.HBM(1), 3000},
		{2500 * time.Millisecond, device.HBM(2), 7},
	}
	if err != nil || !slices.Equal(got, want) {
		t.Errorf("%v, %v", got, err)
	}
	for name, c := range map[string]struct{ text, want string }{
		"empty":               {"", "line 1: the trace ends without a sample"},
		"header only":         {"time_s,peer,bytes\n", "line 2: the trace ends without a sample"},
		"no header":           {"0,1,5\n", `line 1: the header is "0,1,5"`},
		"fields":              {"time_s,peer,bytes\n0,1\n", "line 2: \"0,1\" has 2 fields"},
		"empty line":          {"time_s,peer,bytes\n0,1,1\n\n1,1,1\n", `line 3: "" has 1 fields`},
		"no number":           {"time_s,peer,bytes\n0,1,\n", "line 2: bytes is \"\""},
		"negative bytes":      {"time_s,peer,bytes\n0,1,-3\n", "line 2: bytes is \"-3\""},
		"negative time":       {"time_s,peer,bytes\n-1,1,3\n", "line 2: time_s is \"-1\""},
		"no time":             {"time_s,peer,bytes\nNaN,1,3\n", "line 2: time_s is \"NaN\""},
		"negative peer":       {"time_s,peer,bytes\n0,-1,3\n", "line 2: peer is \"-1\""},
		"unknown peer":        {"time_s,peer,bytes\n0,3,3\n", "line 2: there is no peer 3"},
		"late start":          {"time_s,peer,bytes\n1,1,3\n", "line 2: the first time is 1 and must be 0"},
		"unsorted":            {"time_s,peer,bytes\n0,1,3\n2,1,3\n1,1,3\n", "line 4: time 1 comes after 2: sort"},
		"twice":               {"time_s,peer,bytes\n0,1,3\n0,1,3\n", "line 3: peer 1 has two lines at time 0"},
		"gap":                 {"time_s,peer,bytes\n0,1,3\n0,2,3\n1,1,3\n2,1,3\n2,2,3\n", "line 5: time 1 has no line for peer 2, which time 0 has: add the line"},
		"gap at the end":      {"time_s,peer,bytes\n0,1,3\n0,2,3\n1.5,2,3\n", "line 5: time 1.5 has no line for peer 1"},
		"peer out of nowhere": {"time_s,peer,bytes\n0,1,3\n1,2,3\n", "line 3: peer 2 has no line at time 0"},
		"gap in time":         {"time_s,peer,bytes\n0,1,3\n1,1,3\n4.5,1,3\n", "line 4: 3.5 s lie between times 1 and 4.5, more than 3: a gap"},
	} {
		t.Run(name, func(t *testing.T) {
			if _, err := tenants.Read(strings.NewReader(c.text), peers12, 3*time.Second); err == nil || !strings.HasPrefix(err.Error(), "tenants: trace "+c.want) {
				t.Errorf("%v, want %s", err, c.want)
			}
		})
	}
}

func FuzzRead(f *testing.F) {
	f.Add("time_s,peer,bytes\n0,1,1500\n0,2,0\n2.5,2,7\n2.5,1,3000\n")
	f.Add("time_s,peer,bytes\n0,1,1\n1e-9,1,2\n9e9,1,3\n")
	f.Add("time_s,peer,bytes\r\n0,0,9223372036854775807\r\n")
	f.Fuzz(func(t *testing.T, text string) {
		trace, err := tenants.Read(strings.NewReader(text), nil, 0)
		if err != nil {
			return
		}
		var b bytes.Buffer
		if err := trace.Write(&b); err != nil {
			t.Fatal(err)
		}
		again, err := tenants.Read(&b, nil, 0)
		if err != nil || !slices.Equal(again, trace) {
			t.Fatalf("%v is read back as %v, %v", trace, again, err)
		}
	})
}

// TestGenerate: over long times each peer has the published quantiles, and changes
// as often as asked for.
func TestGenerate(t *testing.T) {
	const capacity, hours = 1 << 30, 2000
	o := tenants.Options{
		Peers: peers12, Capacity: []int64{capacity, capacity / 2},
		Duration: hours * time.Hour, Churn: 0.5, Seed: 1,
	}
	trace, err := tenants.Generate(o)
	if err != nil {
		t.Fatal(err)
	}
	for i, p := range peers12 {
		var below20, below50, total float64
		n := 0
		last := tenants.Sample{At: -1}
		add := func(until time.Duration) {
			d, share := (until - last.At).Seconds(), float64(last.Bytes)/float64(o.Capacity[i])
			total += d
			if share <= 0.2 {
				below20 += d
			}
			if share <= 0.5 {
				below50 += d
			}
			if share < 0 || share > 1 {
				t.Fatalf("a share of %g", share)
			}
		}
		for _, s := range trace {
			if s.Peer != p {
				continue
			}
			if last.At >= 0 {
				add(s.At)
			}
			last, n = s, n+1
		}
		add(o.Duration)
		if a, b := below20/total, below50/total; math.Abs(a-0.68) > 0.01 || math.Abs(b-0.87) > 0.01 {
			t.Errorf("%s: %.3f of the time at most 20 %%, %.3f at most 50 %%; want 0.68 and 0.87", p, a, b)
		}
		if perMinute := float64(n) / (hours * 60); math.Abs(perMinute-0.5) > 0.01 {
			t.Errorf("%s: %.3f changes per minute, want 0.5", p, perMinute)
		}
	}
	same, err := tenants.Generate(o)
	if err != nil || !slices.Equal(same, trace) {
		t.Errorf("the same seed makes another trace: %v", err)
	}
	o.Peers, o.Capacity = o.Peers[1:], o.Capacity[1:]
	one, err := tenants.Generate(o)
	if err != nil || !slices.Equal(one, slices.DeleteFunc(same, func(s tenants.Sample) bool { return s.Peer != peers12[1] })) {
		t.Errorf("a peer's trace depends on the others: %v", err)
	}
	o.Seed = 2
	if other, err := tenants.Generate(o); err != nil || slices.Equal(other, one) {
		t.Errorf("another seed makes the same trace: %v", err)
	}
	o.Churn = -1
	if still, err := tenants.Generate(o); err != nil || len(still) != 1 {
		t.Errorf("without churn: %v, %v", still, err)
	}
	o.Capacity = nil
	if _, err := tenants.Generate(o); err == nil {
		t.Error("a peer without a capacity is taken")
	}
}

func TestPlayer(t *testing.T) {
	m, err := emulated.New(emulated.Options{Virtual: true, GPUs: []emulated.GPU{{MemoryBytes: 1000}, {MemoryBytes: 1000}, {MemoryBytes: 1000}}})
	if err != nil {
		t.Fatal(err)
	}
	defer m.Close()
	borrowed, err := m.Alloc(peers12[0], 512, "borrowed")
	if err != nil {
		t.Fatal(err)
	}
	asked := map[device.Space]int64{}
	p := tenants.NewPlayer(tenants.Trace{{0, peers12[0], 10}, {0, peers12[1], 0}, {5, peers12[0], 4}, {7, peers12[0], 700}, {9, peers12[1], 5000}}, m,
		func(s device.Space, n int64) { asked[s] = n })
	for _, c := range []struct {
		now, next time.Duration
		more      bool
		other     int64
		asked     int64
		gives     bool
	}{
		{now: 0, next: 5, more: true, other: 10},
		{now: 4, next: 5, more: true, other: 10},
		{now: 6, next: 7, more: true, other: 4},
		{now: 8, next: 9, more: true, other: 4, asked: 696},
		{now: 8, next: 9, more: true, other: 700, gives: true},
		{now: 9, other: 700},
	} {
		if c.gives {
			if err := borrowed.Free(); err != nil {
				t.Fatal(err)
			}
		}
		clear(asked)
		if err := p.Advance(c.now); err != nil {
			t.Fatal(err)
		}
		u, err := m.Usage(peers12[0])
		if next, more := p.Next(); err != nil || next != c.next || more != c.more || u.OtherProcesses != c.other || asked[peers12[0]] != c.asked || p.Waiting() != (c.asked > 0) {
			t.Errorf("at %d others hold %d, asked for %v, the next change is at %d, %t; want %+v", c.now, u.OtherProcesses, asked, next, more, c)
		}
	}
	if u, err := m.Usage(peers12[1]); err != nil || u.OtherProcesses != 1000 {
		t.Errorf("a trace of a larger GPU occupies %d, %v; want all of this one", u.OtherProcesses, err)
	}
	if err := p.Stop(); err != nil {
		t.Fatal(err)
	}
	for _, s := range peers12 {
		if u, err := m.Usage(s); err != nil || u.OtherProcesses != 0 || p.Waiting() {
			t.Errorf("others hold %d after the end, %v", u.OtherProcesses, err)
		}
	}
	var e *device.Error
	if err := tenants.NewPlayer(tenants.Trace{{0, device.HBM(9), 10}}, m, nil).Advance(0); !errors.As(err, &e) {
		t.Errorf("a peer that is not there: %v", err)
	}
}

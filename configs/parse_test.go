package configs

import (
	"errors"
	"fmt"
	"math"
	"reflect"
	"slices"
	"strings"
	"testing"
	"time"
)

// with is the defaults with one setting changed.
func with(change func(*Settings)) Settings {
	s := Defaults()
	change(&s)
	return s
}

func TestPeerSettings(t *testing.T) {
	read := func(s Settings) string {
		peers, err := s.Device.ParsePeers()
		if err != nil {
			return err.Error()
		}
		room, err := s.Harvest.ParseHeadroom()
		if err != nil {
			return err.Error()
		}
		if _, err := s.Device.ParseHostPaths(); err != nil {
			return err.Error()
		}
		rate, err := s.Harvest.ParseMigrationLimit()
		if err != nil {
			return err.Error()
		}
		trace, err := s.Harvest.ParseTrace()
		if err != nil {
			return err.Error()
		}
		return fmt.Sprintf("%+v %+v %.0f %+v", peers, room, rate, trace)
	}
	const (
		auto  = "{Auto:true GPUs:[]}"
		room  = "{Bytes:0 Share:0.05}"
		trace = "{File: Generated:false Seed:0 Churn:0}"
		rest  = room + " 0 " + trace
	)
	for _, c := range []struct {
		key, value, want string
	}{
		{"peers", "auto", auto + " " + rest},
		{"peers", "none", "{Auto:false GPUs:[]} " + rest},
		{"peers", "1, 2", "{Auto:false GPUs:[1 2]} " + rest},
		{"peers", "1,", `peers is "1,": must be auto, none, or comma-separated indices of GPUs`},
		{"peers", "", `peers is "": must be auto`},
		{"peers", "-1", `peers is "-1": must be auto`},
		{"peers", "2,1,2", "names GPU 2 twice"},
		{"host-paths", "", `host-paths is "": must be auto, a number of paths from 1, or comma-separated indices of GPUs, a single one as 1,`},
		{"host-paths", "0", "must be auto, a number"},
		{"host-paths", "-1", "must be auto, a number"},
		{"host-paths", ",", "must be auto, a number"},
		{"host-paths", "1,2,", "must be auto, a number"},
		{"host-paths", "one", "must be auto, a number"},
		{"host-paths", "2,3,2", "names GPU 2 twice"},
		{"host-paths", "1,0", "names the GPU that computes, 0, whose own link is always used"},
		{"harvest-headroom", "4GiB", auto + " {Bytes:4294967296 Share:0} 0 " + trace},
		{"harvest-headroom", "4G", auto + " {Bytes:4294967296 Share:0} 0 " + trace},
		{"harvest-headroom", "4gb", auto + " {Bytes:4000000000 Share:0} 0 " + trace},
		{"harvest-headroom", "0", auto + " {Bytes:0 Share:0} 0 " + trace},
		{"harvest-headroom", "12.5%", auto + " {Bytes:0 Share:0.125} 0 " + trace},
		{"harvest-headroom", "101%", `harvest-headroom is "101%": must be a size like 4GiB (G and GiB: 2^30 bytes, GB: 10^9) or a share like 5%`},
		{"harvest-headroom", "-1%", "must be a size like 4GiB"},
		{"harvest-headroom", "4 parsecs", "must be a size like 4GiB"},
		{"harvest-headroom", "5", "must be a size like 4GiB"},
		{"harvest-headroom", "NaN%", "must be a size like 4GiB"},
		{"migration-limit", "0", auto + " " + room + " -1 " + trace},
		{"migration-limit", "2.5GB/s", auto + " " + room + " 2500000000 " + trace},
		{"migration-limit", "2.5GB", `migration-limit is "2.5GB": must be auto, a rate like 2GiB/s, or 0`},
		{"migration-limit", "9999999999TiB/s", "must be auto, a rate"},
		{"migration-limit", "0/s", "must be auto, a rate"},
		{"migration-limit", "", "must be auto, a rate"},
		{"availability-trace", "a.csv", auto + " " + room + " 0 {File:a.csv Generated:false Seed:0 Churn:0}"},
		{"availability-trace", "generated:7", auto + " " + room + " 0 {File: Generated:true Seed:7 Churn:1}"},
		{"availability-trace", "generated:7:0.5", auto + " " + room + " 0 {File: Generated:true Seed:7 Churn:0.5}"},
		{"availability-trace", "generated:", "must be a file, generated:SEED, or generated:SEED:CHANGES_PER_MINUTE"},
		{"availability-trace", "generated:1:0", "with changes above 0 and up to 60000"},
		{"availability-trace", "generated:1:NaN", "with changes above 0"},
	} {
		s := Defaults()
		s.Put(map[string]any{c.key: c.value}) //nolint:errcheck // Validate is asked below
		if got := read(s); !strings.Contains(got, c.want) {
			t.Errorf("%s %q: %s, want %s", c.key, c.value, got, c.want)
		}
		if err := s.Validate(); (err != nil) != !strings.HasPrefix(c.want, "{") {
			t.Errorf("%s %q: Validate says %v", c.key, c.value, err)
		}
	}
}

func TestHarvestTimes(t *testing.T) {
	if got, err := Defaults().Harvest.ParseTimes(); err != nil || got != (HarvestTimes{100 * time.Millisecond, 10 * time.Millisecond, time.Second}) {
		t.Errorf("by default %+v, %v", got, err)
	}
	for _, c := range []struct{ key, value, want string }{
		{"harvest-deadline", "2s", ""},
		{"harvest-deadline", "0", `--harvest-deadline is "0": must be a time like 250ms, from 1ms to 1h0m0s`},
		{"harvest-deadline", "100", "must be a time like 250ms"},
		{"harvest-poll-interval", "500us", ""},
		{"harvest-poll-interval", "1us", "from 100µs to 1m0s"},
		{"harvest-cooldown", "0", ""},
		{"harvest-cooldown", "-1s", "from 0s to 1h0m0s"},
		{"admin-address", "127.0.0.1:0", ""},
		{"admin-address", "same", ""},
		{"admin-address", ":8001", ""},
		{"otlp-traces-endpoint", "http://127.0.0.1:4318/v1/traces", ""},
		{"otlp-traces-endpoint", "https://collector", ""},
		{"otlp-traces-endpoint", "grpc://127.0.0.1:4317", "must be a URL of http or https"},
		{"otlp-traces-endpoint", "127.0.0.1:4318", "sent by OTLP over HTTP, not gRPC"},
		{"admin-address", "8001", `--admin-address is "8001": must be none, same, or a host and a port`},
		{"admin-address", "localhost:http", "must be none, same, or a host and a port like 127.0.0.1:8001"},
		{"harvest-slab-size", "512MiB", ""},
		{"harvest-slab-size", "0", `--harvest-slab-size is "0": must be auto or a size`},
		{"harvest-slab-size", "some", "must be auto or a size like 512MiB"},
		{"harvest-slab-size", "5", "must be auto or a size like 512MiB"},
	} {
		s := Defaults()
		err := s.Put(map[string]any{c.key: c.value})
		if c.want == "" && err != nil || c.want != "" && (err == nil || !strings.Contains(err.Error(), c.want)) {
			t.Errorf("%s %q: %v, want %q", c.key, c.value, err, c.want)
		}
	}
}

func TestHarvestClients(t *testing.T) {
	for text, want := range map[string]string{
		"": "map[]",
		"experts=weight:3,rate:2GiB/s; kv=quota:20GiB": "map[experts:{Weight:3 Quota:0 Rate:2.147483648e+09} kv:{Weight:0 Quota:21474836480 Rate:0}]",
		"experts":                 `"experts" names no client`,
		"=weight:1":               `"=weight:1" names no client`,
		"kv=weight:1;kv=weight:2": "or one that is named before",
		"kv=weight:0":             `"weight:0" is not a weight up to 1000`,
		"kv=weight:1e9":           "is not a weight up to 1000",
		"kv=quota:0":              "a quota or a rate",
		"kv=rate:2GiB":            "a quota or a rate",
		"kv=rate:0/s":             "a quota or a rate",
		"kv=share:1":              "a quota or a rate",
		"kv=weight:1,":            "a quota or a rate",
		"expert=weight:3":         `there is no client "expert": clients are experts, kv, relay`,
	} {
		s := Defaults()
		s.Harvest.Policy, s.Harvest.Clients = "fairness", text
		got, err := s.Harvest.ParseClients()
		if said := fmt.Sprintf("%+v %v", got, err); !strings.Contains(said, want) || (err == nil) != strings.HasPrefix(want, "map") {
			t.Errorf("%q: %s, want %s", text, said, want)
		}
	}
	for _, c := range []struct {
		policy, clients string
		evacuate        float64
		want            string
	}{
		{"best-fit", "experts=weight:3", 0, "needs --harvest-policy fairness"},
		{"fairness", "experts=weight:3", 0.5, "needs --harvest-policy interference or stability"},
		{"best-fit", "", 0.5, "needs --harvest-policy interference or stability"},
		{"interference", "", 1.5, "must be at most 1"},
		{"interference", "", 0.5, ""},
		{"stability", "", 1.5, ""},
	} {
		s := Defaults()
		s.Harvest.Policy, s.Harvest.Clients, s.Harvest.EvacuateAt = c.policy, c.clients, c.evacuate
		if err := s.Validate(); c.want == "" && err != nil || c.want != "" && (err == nil || !strings.Contains(err.Error(), c.want)) {
			t.Errorf("%+v: %v", c, err)
		}
	}
}

func TestHostPaths(t *testing.T) {
	for text, want := range map[string]HostPathChoice{
		"auto": {Auto: true}, "1": {Paths: 1}, "4": {Paths: 4}, "2,": {Paths: 2, Relays: []int{2}}, "3, 1": {Paths: 3, Relays: []int{3, 1}},
	} {
		s := Defaults()
		if err := s.Put(map[string]any{"host-paths": text}); err != nil {
			t.Error(err)
		}
		if got, err := s.Device.ParseHostPaths(); err != nil || !reflect.DeepEqual(got, want) {
			t.Errorf("%s: %+v, %v, want %+v", text, got, err, want)
		}
	}
}

func TestPeerSettingsTogether(t *testing.T) {
	for _, c := range []struct {
		settings Settings
		key      string
	}{
		{with(func(s *Settings) { s.Device.Peers, s.Device.GPU = "0,1", 1 }), "peers"},
		{with(func(s *Settings) { s.Device.Peers, s.Offload.Tier = "none", PeerTier }), "offload-tier"},
		{with(func(s *Settings) { s.Device.Peers, s.Offload.Tier = "none", AnyTier }), ""},
		{with(func(s *Settings) { s.Device.Peers, s.Offload.Tier = "1", PeerTier }), ""},
		{with(func(s *Settings) { s.Offload.Tier, s.Device.Kind = PeerTier, CUDA }), "offload-tier"},
		{with(func(s *Settings) { s.Offload.Tier, s.Device.Kind, s.Device.Peers = PeerTier, CUDA, "1" }), ""},
		{with(func(s *Settings) { s.Harvest.AvailabilityTrace, s.Device.Kind = "generated:1", CUDA }), "availability-trace"},
		{with(func(s *Settings) { s.Offload.ResidentExperts, s.Offload.Fraction = "0:1", 0.5 }), "resident-experts"},
		{with(func(s *Settings) { s.Offload.ResidentExperts = "0:1;0:2" }), "resident-experts"},
		{with(func(s *Settings) { s.Offload.ResidentExperts = "0:1,5;3:2-7" }), ""},
		{with(func(s *Settings) { s.Offload.ResidentExperts = "@no/such/file" }), ""}, // who opens it says so
	} {
		err := c.settings.Validate()
		var bad *SettingError
		if c.key == "" && err != nil || c.key != "" && (!errors.As(err, &bad) || bad.Key != c.key) {
			t.Errorf("%+v: %v, want one about %q", c.settings, err, c.key)
		}
	}
}

func TestParseExperts(t *testing.T) {
	for _, c := range []struct{ text, want string }{
		{"0:1,5;3:2-7", "[{0 [1 5]} {3 [2 3 4 5 6 7]}]"},
		{" 3 : 7 , 2-3 \n# a line\n0: 1 # and more\n\n", "[{0 [1]} {3 [2 3 7]}]"},
		{"", "[]"},
		{"0", `"0": must be a layer's number, a colon`},
		{"x:1", `"x:1": must be a layer's number`},
		{"0:", `"0:": "" is neither an expert's number`},
		{"0:1-", `"1-" is neither`},
		{"0:7-2", `"7-2" is neither`},
		{"0:99999999999", "is neither"},
		{"0:1-4294967295", "is neither"},
		{"0:1;2:0;0:2", "layer 0 is listed twice"},
		{"0:1-3,2", "expert 2 is listed twice"},
	} {
		list, err := ParseExperts(c.text)
		got := fmt.Sprint(list)
		if err != nil {
			got = err.Error()
		}
		if !strings.Contains(got, c.want) {
			t.Errorf("%q: %s, want %s", c.text, got, c.want)
		}
	}
}

// TestParseExpertsBounded: a list of any length is read in time that grows with it, and names no
// more experts than a model can have.
func TestParseExpertsBounded(t *testing.T) {
	spans := strings.Repeat("0-65535,", 1<<16)
	if _, err := ParseExperts("0:" + spans + "0"); err == nil || !strings.Contains(err.Error(), "is listed twice") {
		t.Errorf("experts listed again and again: %v", err)
	}
	var b strings.Builder
	for layer := range 3 {
		fmt.Fprintf(&b, "%d:0-65535\n", layer)
	}
	if _, err := ParseExperts(b.String()); err == nil || err.Error() != "more than 131072 experts are listed, the maximum of a model" {
		t.Errorf("too many experts: %v", err)
	}
	if _, err := ParseExperts(strings.Repeat("x", 1<<20)); err == nil || len(err.Error()) > 500 {
		t.Errorf("a long entry: %.500v", err)
	}
}

// FuzzSettings reads each kind of setting that has a syntax of its own: what is accepted is in
// its limits.
func FuzzSettings(f *testing.F) {
	for _, s := range []string{
		"0:1,5;3:2-7", "0:0-65535\n1:0-65535", "# a\n2:3", "4GiB", "1.5GB", "0", "2GiB/s", "auto", "generated:7", "generated:7:0.5",
		"zipf:1.1", "uniform", "0,1", "none", "all", "1e308T", "NaN", "-1",
	} {
		f.Add(s)
	}
	f.Fuzz(func(t *testing.T, s string) {
		if list, err := ParseExperts(s); err == nil {
			n := 0
			for i, l := range list {
				n += len(l.Experts)
				if i > 0 && list[i-1].Layer >= l.Layer || !slices.IsSorted(l.Experts) || l.Layer < 0 || l.Layer >= maxExpert {
					t.Fatalf("%q: %v", s, list)
				}
			}
			if n > maxListed {
				t.Fatalf("%d experts", n)
			}
		}
		if n, err := ParseBytes(s); err == nil && n < 0 {
			t.Fatalf("%q is %d bytes", s, n)
		}
		if r, err := (Harvest{MigrationLimit: s}).ParseMigrationLimit(); err == nil && (math.IsNaN(r) || math.IsInf(r, 0)) {
			t.Fatalf("%q is %v bytes/s", s, r)
		}
		if c, err := (Harvest{AvailabilityTrace: s}).ParseTrace(); err == nil && c.Generated && !(c.Churn > 0 && c.Churn <= maxChurn) {
			t.Fatalf("%q: %+v", s, c)
		}
		if x, err := (Model{DummyRouting: s}).ParseRouting(); err == nil && !(x >= 0 && x <= maxSkew) {
			t.Fatalf("%q: %v", s, x)
		}
		if _, err := (Device{Peers: s}).ParsePeers(); err != nil && err.Error() == "" {
			t.Fatal("an error without a text")
		}
	})
}

func TestCPUExpertSettings(t *testing.T) {
	for value, want := range map[string]string{
		"off":  "{Auto:false Fraction:0}",
		"auto": "{Auto:true Fraction:0}",
		"0":    "{Auto:false Fraction:0}",
		"0.5":  "{Auto:false Fraction:0.5}",
		"25%":  "{Auto:false Fraction:0.25}",
		"1":    "{Auto:false Fraction:1}",
		"1.5":  `configs: --cpu-experts is "1.5": must be auto, off, or a fraction from 0 to 1 (0.5 or 50%)`,
		"-1":   `configs: --cpu-experts is "-1": must be auto, off, or a fraction from 0 to 1 (0.5 or 50%)`,
		"NaN":  `configs: --cpu-experts is "NaN": must be auto, off, or a fraction from 0 to 1 (0.5 or 50%)`,
		"on":   `configs: --cpu-experts is "on": must be auto, off, or a fraction from 0 to 1 (0.5 or 50%)`,
	} {
		s := with(func(s *Settings) { s.Batch.CPUExperts = value })
		c, err := s.Batch.ParseCPUExperts()
		got := fmt.Sprintf("%+v", c)
		if err != nil {
			got = err.Error()
		}
		if timed := value != "off" && value != "0" && value != "1"; err == nil && (c.Timed() != timed || c.On() != (value != "off" && value != "0")) {
			t.Errorf("%q: timed %v, on %v", value, c.Timed(), c.On())
		}
		if valid := s.Validate(); got != want || (valid == nil) != (err == nil) {
			t.Errorf("%q: %s, want %s; valid: %v", value, got, want, valid)
		}
	}
	if c, err := (Batch{CPUExperts: "auto", Attention: OnCPU}).ParseCPUExperts(); c.On() || err != nil {
		t.Errorf("auto with attention on the CPU: %+v, %v", c, err)
	}
}

func TestParseMaxITL(t *testing.T) {
	for text, want := range map[string]MaxITL{
		"auto": {}, "": {}, "off": {Off: true}, "30ms": {Bound: 30 * time.Millisecond}, "0.05": {Bound: 50 * time.Millisecond}, "1s": {Bound: time.Second},
	} {
		if got, err := (Batch{MaxITL: text}).ParseMaxITL(); got != want || err != nil {
			t.Errorf("%q: %+v, %v", text, got, err)
		}
	}
	for _, text := range []string{"0", "-5ms", "soon", "30 ms", "NaN", "Inf", "-Inf", "1e300"} {
		s := with(func(s *Settings) { s.Batch.MaxITL = text })
		var bad *SettingError
		if err := s.Validate(); !errors.As(err, &bad) || bad.Key != "max-itl" {
			t.Errorf("%q: %v", text, err)
		}
	}
}

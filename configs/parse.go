package configs

import (
	"encoding/json"
	"errors"
	"fmt"
	"math"
	"net"
	"net/url"
	"slices"
	"strconv"
	"strings"
	"time"

	"github.com/moeserve/moeserve/untrusted"
)

// PeerChoice is what the setting peers asks for.
type PeerChoice struct {
	// Auto leaves it to the kind of devices.
	Auto bool
	// GPUs named, by the driver's numbers; none where it is not auto and names none.
	GPUs []int
}

// ParsePeers reads the setting peers. Errors are *SettingError.
func (d Device) ParsePeers() (PeerChoice, error) {
	switch d.Peers {
	case "auto":
		return PeerChoice{Auto: true}, nil
	case "none":
		return PeerChoice{}, nil
	}
	var c PeerChoice
	for f := range strings.SplitSeq(d.Peers, ",") {
		n, err := strconv.ParseUint(strings.TrimSpace(f), 10, 16)
		if err != nil {
			return c, &SettingError{Key: "peers", Value: d.Peers, Want: "must be auto, none, or comma-separated indices of GPUs"}
		}
		if slices.Contains(c.GPUs, int(n)) {
			return c, &SettingError{Key: "peers", Value: d.Peers, Want: fmt.Sprintf("names GPU %d twice", n)}
		}
		c.GPUs = append(c.GPUs, int(n))
	}
	return c, nil
}

// CheckPeers refuses peers that emulated devices do not have, by the number of their GPUs. Errors are *SettingError.
func (d Device) CheckPeers(gpus int) error {
	c, err := d.ParsePeers()
	if err != nil || len(c.GPUs) == 0 || slices.Max(c.GPUs) < gpus {
		return err
	}
	have := fmt.Sprintf("GPUs 0 to %d", gpus-1)
	if gpus == 1 {
		have = "one GPU, 0"
	}
	return &SettingError{Key: "peers", Value: d.Peers, Want: fmt.Sprintf("names GPU %d, and the emulated machine has %s", slices.Max(c.GPUs), have)}
}

// HostPathChoice is what the setting host-paths asks for.
type HostPathChoice struct {
	// Auto leaves it to the calibration.
	Auto bool
	// Paths is their number, the computing GPU's own link among them. Relays are the GPUs named, by the
	// driver's numbers; none where only the number is given.
	Paths  int
	Relays []int
}

// ParseHostPaths reads the setting host-paths. Errors are *SettingError.
func (d Device) ParseHostPaths() (HostPathChoice, error) {
	bad := func(format string, args ...any) (HostPathChoice, error) {
		return HostPathChoice{}, &SettingError{Key: "host-paths", Value: d.HostPaths, Want: fmt.Sprintf(format, args...)}
	}
	if d.HostPaths == "auto" {
		return HostPathChoice{Auto: true}, nil
	}
	const want = "must be auto, a number of paths from 1, or comma-separated indices of GPUs, a single one as 1,"
	list, single := strings.CutSuffix(d.HostPaths, ",")
	if !strings.Contains(d.HostPaths, ",") {
		n, err := strconv.ParseUint(d.HostPaths, 10, 10)
		if err != nil || n == 0 {
			return bad(want)
		}
		return HostPathChoice{Paths: int(n)}, nil
	}
	c := HostPathChoice{}
	for f := range strings.SplitSeq(list, ",") {
		n, err := strconv.ParseUint(strings.TrimSpace(f), 10, 16)
		switch {
		case err != nil || single && strings.Contains(list, ","):
			return bad(want)
		case slices.Contains(c.Relays, int(n)):
			return bad("names GPU %d twice", n)
		case int(n) == d.GPU:
			return bad("names the GPU that computes, %d, whose own link is always used; name others", n)
		}
		c.Relays = append(c.Relays, int(n))
	}
	c.Paths = 1 + len(c.Relays)
	return c, nil
}

// Headroom of a peer: Bytes, or a Share (0 to 1) of its memory where Bytes is 0.
type Headroom struct {
	Bytes int64
	Share float64
}

// ParseHeadroom reads the setting harvest-headroom. Errors are *SettingError.
func (h Harvest) ParseHeadroom() (Headroom, error) {
	if text, ok := strings.CutSuffix(h.Headroom, "%"); ok {
		if v, err := strconv.ParseFloat(text, 64); err == nil && v >= 0 && v <= 100 {
			return Headroom{Share: v / 100}, nil
		}
	} else if n, err := ParseBytes(h.Headroom); err == nil {
		return Headroom{Bytes: n}, nil
	}
	return Headroom{}, &SettingError{Key: "harvest-headroom", Value: h.Headroom, Want: "must be a size like 4GiB (G and GiB: 2^30 bytes, GB: 10^9) or a share like 5%"}
}

// SameAddress is the admin address of a server that has it on the address of the API.
const SameAddress = "same"

// ParseAdminAddress reads the setting admin-address: empty for none, and same for that of the
// API. Errors are *SettingError.
func (s Serve) ParseAdminAddress() (address string, same bool, err error) {
	switch s.AdminAddress {
	case "none":
		return "", false, nil
	case SameAddress:
		return "", true, nil
	}
	_, port, err := net.SplitHostPort(s.AdminAddress)
	if err == nil {
		_, err = strconv.ParseUint(port, 10, 16)
	}
	if err != nil {
		return "", false, &SettingError{Key: "admin-address", Value: s.AdminAddress, Want: "must be none, same, or a host and a port like 127.0.0.1:8001"}
	}
	return s.AdminAddress, false, nil
}

// validateOTLP checks the setting otlp-traces-endpoint.
func (s *Serve) validateOTLP() error {
	u, err := url.Parse(s.OTLPTracesEndpoint)
	if s.OTLPTracesEndpoint != "" && (err != nil || u.Host == "" || u.Scheme != "http" && u.Scheme != "https") {
		return &SettingError{Key: "otlp-traces-endpoint", Value: s.OTLPTracesEndpoint, Want: "must be a URL of http or https, as http://127.0.0.1:4318/v1/traces: spans are sent by OTLP over HTTP, not gRPC"}
	}
	return nil
}

// ClientLimits are the limits of one who borrows: its Weight among all, or its Quota in
// bytes; its Rate in bytes/s. 0: not set.
type ClientLimits struct {
	Weight float64
	Quota  int64
	Rate   float64
}

// ParseClients reads the setting harvest-clients: limits by the clients' names. Errors are
// *SettingError.
func (h Harvest) ParseClients() (map[string]ClientLimits, error) {
	if h.Clients == "" {
		return nil, nil
	}
	wrong := func(format string, args ...any) error {
		return &SettingError{Key: "harvest-clients", Value: h.Clients, Want: fmt.Sprintf(format, args...) + "; must be like experts=weight:3,rate:2GiB/s;kv=quota:20GiB"}
	}
	if h.Policy != "fairness" {
		return nil, wrong("needs --harvest-policy fairness")
	}
	known := []string{"experts", "kv", "relay"} // of what peers' memory is borrowed for
	clients := map[string]ClientLimits{}
	for entry := range strings.SplitSeq(h.Clients, ";") {
		name, limits, ok := strings.Cut(entry, "=")
		name = strings.TrimSpace(name)
		if _, twice := clients[name]; !ok || name == "" || twice {
			return nil, wrong("%q names no client, or one that is named before", entry)
		}
		if !slices.Contains(known, name) {
			return nil, wrong("there is no client %q: clients are %s", name, strings.Join(known, ", "))
		}
		var c ClientLimits
		for limit := range strings.SplitSeq(limits, ",") {
			kind, value, _ := strings.Cut(strings.TrimSpace(limit), ":")
			var err error
			switch kind {
			case "weight":
				if c.Weight, err = strconv.ParseFloat(value, 64); err == nil && !(c.Weight > 0 && c.Weight <= 1000) {
					err = strconv.ErrRange
				}
			case "quota":
				if c.Quota, err = ParseBytes(value); err == nil && c.Quota == 0 {
					err = strconv.ErrRange
				}
			case "rate":
				bare, rate := strings.CutSuffix(value, "/s")
				var n int64
				if n, err = ParseBytes(bare); err == nil && (n == 0 || !rate) {
					err = strconv.ErrRange
				}
				c.Rate = float64(n)
			default:
				err = strconv.ErrSyntax
			}
			if err != nil {
				return nil, wrong("%q is not a weight up to 1000, a quota or a rate", limit)
			}
		}
		clients[name] = c
	}
	return clients, nil
}

// ParseSlabSize reads the setting harvest-slab-size in bytes: 0 is auto. Errors are
// *SettingError.
func (h Harvest) ParseSlabSize() (int64, error) {
	if h.SlabSize == "auto" {
		return 0, nil
	}
	n, err := ParseBytes(h.SlabSize)
	if err != nil || n == 0 {
		return 0, &SettingError{Key: "harvest-slab-size", Value: h.SlabSize, Want: "must be auto or a size like 512MiB (M and MiB: 2^20 bytes, MB: 10^6)"}
	}
	return n, nil
}

// HarvestTimes are the times of revocations.
type HarvestTimes struct {
	Deadline, PollInterval, Cooldown time.Duration
}

// ParseTimes reads the settings harvest-deadline, harvest-poll-interval and
// harvest-cooldown. Errors are *SettingError.
func (h Harvest) ParseTimes() (t HarvestTimes, err error) {
	for _, s := range []struct {
		key, value string
		min, max   time.Duration
		to         *time.Duration
	}{
		{"harvest-deadline", h.Deadline, time.Millisecond, time.Hour, &t.Deadline},
		{"harvest-poll-interval", h.PollInterval, 100 * time.Microsecond, time.Minute, &t.PollInterval},
		{"harvest-cooldown", h.Cooldown, 0, time.Hour, &t.Cooldown},
	} {
		d, err := time.ParseDuration(s.value)
		if err != nil || d < s.min || d > s.max {
			return t, &SettingError{Key: s.key, Value: s.value, Want: fmt.Sprintf("must be a time like 250ms, from %v to %v", s.min, s.max)}
		}
		*s.to = d
	}
	return t, nil
}

// ParseMigrationLimit reads the setting migration-limit in bytes/s: 0 leaves it to who
// migrates, under 0 is no limit. Errors are *SettingError.
func (h Harvest) ParseMigrationLimit() (float64, error) {
	switch h.MigrationLimit {
	case "auto":
		return 0, nil
	case "0":
		return -1, nil
	}
	text, ok := strings.CutSuffix(h.MigrationLimit, "/s")
	n, err := ParseBytes(text)
	if err != nil || !ok || n == 0 {
		return 0, &SettingError{Key: "migration-limit", Value: h.MigrationLimit, Want: "must be auto, a rate like 2GiB/s, or 0 for no limit"}
	}
	return float64(n), nil
}

// TraceChoice is what the setting availability-trace asks for: nothing, the File, or
// a made up trace.
type TraceChoice struct {
	File      string
	Generated bool
	// Seed, and Churn, how often per minute what others hold changes, of a made up one.
	Seed  uint64
	Churn float64
}

// maxChurn bounds the changes per minute of a made up trace: one in a millisecond.
const maxChurn = 60e3

// ParseTrace reads the setting availability-trace. Errors are *SettingError.
func (h Harvest) ParseTrace() (TraceChoice, error) {
	text, ok := strings.CutPrefix(h.AvailabilityTrace, "generated:")
	if !ok {
		return TraceChoice{File: h.AvailabilityTrace}, nil
	}
	seed, churn, given := strings.Cut(text, ":")
	c := TraceChoice{Generated: true, Churn: 1}
	var err error
	if c.Seed, err = strconv.ParseUint(seed, 10, 64); err == nil && given {
		c.Churn, err = strconv.ParseFloat(churn, 64)
	}
	if err != nil || !(c.Churn > 0 && c.Churn <= maxChurn) {
		return c, &SettingError{
			Key: "availability-trace", Value: h.AvailabilityTrace,
			Want: fmt.Sprintf("must be a file, generated:SEED, or generated:SEED:CHANGES_PER_MINUTE with changes above 0 and up to %v", number(maxChurn)),
		}
	}
	return c, nil
}

// LayerExperts are some of a layer's experts, ascending.
type LayerExperts struct {
	// Layer by the model's number.
	Layer   int
	Experts []int
}

// ResidentExpertsFile is the file that the setting resident-experts names, and false where
// it is a list.
func (o Offload) ResidentExpertsFile() (string, bool) {
	return strings.CutPrefix(o.ResidentExperts, "@")
}

// Limits of a list: more than any model has.
const (
	maxExpert = 1 << 16 // of each number
	maxListed = 1 << 17 // experts
)

// ParseExperts reads a list like "0:1,5;3:2-7": layers with semicolons or line ends
// between them, and of each the experts. Empty lines and what follows a # are left
// out. Layers come in the order of their numbers.
func ParseExperts(text string) ([]LayerExperts, error) {
	var list []LayerExperts
	listed := 0
	for line := range strings.Lines(text) {
		line, _, _ = strings.Cut(line, "#")
		for entry := range strings.SplitSeq(line, ";") {
			if entry = strings.TrimSpace(entry); entry == "" {
				continue
			}
			l, err := parseLayer(entry)
			if err != nil {
				return nil, fmt.Errorf("%s: %w", untrusted.Quote(entry), err)
			}
			if listed += len(l.Experts); listed > maxListed {
				return nil, fmt.Errorf("more than %d experts are listed, the maximum of a model", maxListed)
			}
			list = append(list, l)
		}
	}
	slices.SortFunc(list, func(a, b LayerExperts) int { return a.Layer - b.Layer })
	for i := 1; i < len(list); i++ {
		if list[i].Layer == list[i-1].Layer {
			return nil, fmt.Errorf("layer %d is listed twice", list[i].Layer)
		}
	}
	return list, nil
}

func parseLayer(entry string) (LayerExperts, error) {
	layer, experts, ok := strings.Cut(entry, ":")
	n, err := parseNumber(layer)
	if !ok || err != nil {
		return LayerExperts{}, errors.New("must be a layer's number, a colon, and numbers of experts: 3:1,5 or 3:2-7")
	}
	l := LayerExperts{Layer: n}
	for f := range strings.SplitSeq(experts, ",") {
		from, to, span := strings.Cut(f, "-")
		first, err := parseNumber(from)
		last := first
		if err == nil && span {
			last, err = parseNumber(to)
		}
		if err != nil || last < first {
			return LayerExperts{}, fmt.Errorf("%s is neither an expert's number nor a span like 2-7", untrusted.Quote(strings.TrimSpace(f)))
		}
		for e := first; e <= last; e++ {
			l.Experts = append(l.Experts, e)
		}
		if len(l.Experts) > maxExpert {
			break // some are listed twice
		}
	}
	slices.Sort(l.Experts)
	for i := range len(l.Experts) - 1 {
		if l.Experts[i] == l.Experts[i+1] {
			return LayerExperts{}, fmt.Errorf("expert %d is listed twice", l.Experts[i])
		}
	}
	return l, nil
}

func parseNumber(text string) (int, error) {
	n, err := strconv.ParseUint(strings.TrimSpace(text), 10, 31)
	if err == nil && n >= maxExpert {
		err = strconv.ErrRange
	}
	return int(n), err
}

// byteUnits are as GNU's tools have them: powers of 1000 with a B alone, powers of 1024
// with a bare letter or iB. Letters may be lower case.
var byteUnits = map[string]float64{
	"": 1, "b": 1, "kb": 1e3, "mb": 1e6, "gb": 1e9, "tb": 1e12,
	"k": 1 << 10, "m": 1 << 20, "g": 1 << 30, "t": 1 << 40,
	"kib": 1 << 10, "mib": 1 << 20, "gib": 1 << 30, "tib": 1 << 40,
}

// ParseBytes reads a size from 0: "4GiB", which is "4G", "1.5GB", "512B", "0". Any other number needs a unit: who
// writes a 5 rarely means bytes.
func ParseBytes(text string) (int64, error) {
	i := strings.IndexFunc(text, func(r rune) bool { return (r < '0' || r > '9') && r != '.' })
	if i < 0 {
		i = len(text)
	}
	n, err := strconv.ParseFloat(text[:i], 64)
	unit, ok := byteUnits[strings.ToLower(text[i:])]
	switch {
	case err != nil || !ok || n*unit > math.MaxInt64/2:
		return 0, fmt.Errorf("%q is not a size like 4GiB (G and GiB: 2^30 bytes, GB: 10^9)", text)
	case i == len(text) && n > 0:
		return 0, fmt.Errorf("%q has no unit; a size is like 4GiB (G and GiB: 2^30 bytes, GB: 10^9), or %sB", text, text)
	}
	return int64(n * unit), nil
}

// maxSkew bounds the exponent of dummy-routing; above it one expert gets nearly
// everything.
const maxSkew = 8

// ParseRouting reads the setting dummy-routing: the exponent of the skew, 0 for uniform.
// Errors are *SettingError.
func (m Model) ParseRouting() (float64, error) {
	if m.DummyRouting == "uniform" {
		return 0, nil
	}
	text, ok := strings.CutPrefix(m.DummyRouting, "zipf:")
	skew, err := strconv.ParseFloat(text, 64)
	if !ok || err != nil || !(skew > 0 && skew <= maxSkew) {
		return 0, &SettingError{
			Key: "dummy-routing", Value: m.DummyRouting,
			Want: fmt.Sprintf("must be uniform or zipf:S with S above 0 and up to %d", maxSkew),
		}
	}
	return skew, nil
}

// MaxITL is what the setting max-itl asks for.
type MaxITL struct {
	// Off: prompts are not limited in steps that decode.
	Off bool
	// Bound of a step that decodes; 0: it is chosen.
	Bound time.Duration
}

// ParseMaxITL reads the setting max-itl. Errors are *SettingError.
func (b Batch) ParseMaxITL() (MaxITL, error) {
	switch b.MaxITL {
	case "auto", "": // of settings that a policy stands for
		return MaxITL{}, nil
	case "off":
		return MaxITL{Off: true}, nil
	}
	d, err := time.ParseDuration(b.MaxITL)
	if s, number := strconv.ParseFloat(b.MaxITL, 64); number == nil && s < 1e6 { // seconds, as those of plan --max-tpot
		d, err = time.Duration(s*float64(time.Second)), nil
	}
	if err != nil || d <= 0 {
		return MaxITL{}, &SettingError{Key: "max-itl", Value: b.MaxITL, Want: "must be auto, off, or a time above 0 as 30ms or 0.03 (seconds)"}
	}
	return MaxITL{Bound: d}, nil
}

// CPUExpertChoice is what the setting cpu-experts asks for.
type CPUExpertChoice struct {
	// Auto: as many experts as let CPU and link end together.
	Auto bool
	// Fraction of the selected experts of a layer in host memory, without Auto; 0: none.
	Fraction float64
}

// On reports whether the CPU computes any experts.
func (c CPUExpertChoice) On() bool { return c.Auto || c.Fraction > 0 }

// Timed reports whether it depends on time, or on what else is in a step, which experts the CPU
// computes: then tokens may differ from run to run, as far as a GPU rounds otherwise than the CPU.
func (c CPUExpertChoice) Timed() bool { return c.Auto || c.Fraction > 0 && c.Fraction < 1 }

// ParseCPUExperts reads the setting cpu-experts. Where the CPU computes attention, auto is off.
// Errors are *SettingError.
func (b Batch) ParseCPUExperts() (CPUExpertChoice, error) {
	switch b.CPUExperts {
	case "off", "": // of settings that a policy stands for
		return CPUExpertChoice{}, nil
	case "auto":
		return CPUExpertChoice{Auto: b.Attention != OnCPU}, nil
	}
	text, percent := strings.CutSuffix(b.CPUExperts, "%")
	f, err := strconv.ParseFloat(text, 64)
	if percent {
		f /= 100
	}
	if err != nil || !(f >= 0 && f <= 1) {
		return CPUExpertChoice{}, &SettingError{Key: "cpu-experts", Value: b.CPUExperts, Want: "must be auto, off, or a fraction from 0 to 1 (0.5 or 50%)"}
	}
	return CPUExpertChoice{Fraction: f}, nil
}

// validatePeers checks the settings about peers, and about where experts live.
func (s Settings) validatePeers() error {
	peers, err := s.Device.ParsePeers()
	if err == nil {
		_, err = s.Device.ParseHostPaths()
	}
	if err == nil {
		_, err = s.Harvest.ParseHeadroom()
	}
	if err == nil {
		_, err = s.Harvest.ParseClients()
	}
	if p := s.Harvest.Policy; err == nil && s.Harvest.EvacuateAt > 0 && p != "interference" && p != "stability" {
		err = &SettingError{Key: "harvest-evacuate-at", Value: s.Harvest.EvacuateAt, Want: "needs --harvest-policy interference or stability"}
	}
	if p := s.Harvest.Policy; err == nil && s.Harvest.EvacuateAt > 1 && p == "interference" {
		err = &SettingError{Key: "harvest-evacuate-at", Value: s.Harvest.EvacuateAt, Want: "must be at most 1 with --harvest-policy interference: a fraction of a memory's bandwidth"}
	}
	if err == nil {
		_, err = s.Harvest.ParseSlabSize()
	}
	if err == nil {
		_, err = s.Harvest.ParseTimes()
	}
	if err == nil {
		_, err = s.Harvest.ParseMigrationLimit()
	}
	if err != nil {
		return err
	}
	if _, _, err := s.Serve.ParseAdminAddress(); err != nil {
		return err
	}
	trace, err := s.Harvest.ParseTrace()
	if err != nil {
		return err
	}
	if (trace.Generated || trace.File != "") && s.Device.Kind == CUDA {
		return &SettingError{Key: "availability-trace", Value: s.Harvest.AvailabilityTrace, Want: "needs emulated devices; leave out --device cuda or this"}
	}
	if (trace.Generated || trace.File != "") && !peers.Auto && len(peers.GPUs) == 0 {
		return &SettingError{Key: "availability-trace", Value: s.Harvest.AvailabilityTrace, Want: "needs peers, and --peers is none; name peers, or leave this out"}
	}
	if slices.Contains(peers.GPUs, s.Device.GPU) {
		return &SettingError{Key: "peers", Value: s.Device.Peers, Want: fmt.Sprintf("names the GPU that computes, %d; name others", s.Device.GPU)}
	}
	if s.Offload.Tier == PeerTier && !peers.Auto && len(peers.GPUs) == 0 {
		return &SettingError{Key: "offload-tier", Value: s.Offload.Tier, Want: "needs --peers, which is none"}
	}
	if s.Offload.Tier == PeerTier && peers.Auto && s.Device.Kind == CUDA {
		return &SettingError{Key: "offload-tier", Value: s.Offload.Tier, Want: "needs --peers: the indices of the GPUs whose memory may be borrowed"}
	}
	if s.Offload.ResidentExperts == "" {
		return nil
	}
	if s.Offload.Fraction > 0 {
		return &SettingError{Key: "resident-experts", Value: s.Offload.ResidentExperts, Want: "and --offload-fraction both say what is offloaded; leave one of them out"}
	}
	if _, file := s.Offload.ResidentExpertsFile(); !file {
		if _, err := ParseExperts(s.Offload.ResidentExperts); err != nil {
			return &SettingError{Key: "resident-experts", Value: s.Offload.ResidentExperts, Want: err.Error()}
		}
	}
	return nil
}

// ModelNames reads the setting served-model-name; none without one. Errors are *SettingError.
func (s Serve) ModelNames() ([]string, error) {
	names := splitList(s.ServedModelName)
	for i, name := range names {
		if name == "" || slices.Contains(names[:i], name) {
			return nil, &SettingError{Key: "served-model-name", Value: s.ServedModelName, Want: "must be a name, or different names separated by commas"}
		}
	}
	return names, nil
}

// CORS is what the settings about scripts of web pages ask for.
type CORS struct{ Origins, Methods, Headers []string }

// ParseCORS reads the settings allowed-origins, allowed-methods and allowed-headers. Errors are
// *SettingError.
func (s Serve) ParseCORS() (CORS, error) {
	var c CORS
	for _, l := range []struct {
		key, value string
		to         *[]string
	}{
		{"allowed-origins", s.AllowedOrigins, &c.Origins},
		{"allowed-methods", s.AllowedMethods, &c.Methods},
		{"allowed-headers", s.AllowedHeaders, &c.Headers},
	} {
		if *l.to = splitList(l.value); slices.Contains(*l.to, "") {
			return c, &SettingError{Key: l.key, Value: l.value, Want: `must be a list separated by commas, or a JSON list as ["a", "b"]`}
		}
	}
	for _, origin := range c.Origins {
		if scheme, host, _ := strings.Cut(origin, "://"); origin != "*" && origin != "null" && (scheme == "" || host == "") {
			return c, &SettingError{Key: "allowed-origins", Value: s.AllowedOrigins, Want: fmt.Sprintf("names %q without a scheme, which no browser sends; write it as https://example.com", origin)}
		}
	}
	if s.AllowCredentials && (len(c.Origins) == 0 || slices.Contains(c.Origins, "*")) {
		return c, &SettingError{Key: "allow-credentials", Value: true, Want: "needs --allowed-origins by name: all pages of a browser could use its cookies"}
	}
	return c, nil
}

// splitList reads a list separated by commas, or, as vLLM has it, one in JSON. What is no list has
// an empty entry.
func splitList(text string) []string {
	if text == "" {
		return nil
	}
	var list []string
	if strings.HasPrefix(text, "[") {
		if json.Unmarshal([]byte(text), &list) != nil {
			return []string{""}
		}
		return list
	}
	list = strings.Split(text, ",")
	for i, entry := range list {
		list[i] = strings.TrimSpace(entry)
	}
	return list
}

func (s Serve) validate() error {
	_, err := s.ModelNames()
	if err == nil {
		_, err = s.ParseCORS()
	}
	return err
}

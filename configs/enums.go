package configs

import (
	"fmt"
	"log/slog"
	"slices"
	"strings"
)

// The settings with a few values are types of their own, here once for all packages that
// deal with them. Their names are those of flags, files and results. The zero value is
// the first name.

// LoadFormat says where weights are from.
type LoadFormat uint8

// The load formats: the checkpoint, or a generator.
const (
	LoadAuto LoadFormat = iota
	LoadDummy
)

var loadFormatNames = []string{"auto", "dummy"}

func (f LoadFormat) String() string { return name(loadFormatNames, f) }

// MarshalText writes the name.
func (f LoadFormat) MarshalText() ([]byte, error) { return []byte(f.String()), nil }

// UnmarshalText reads the name.
func (f *LoadFormat) UnmarshalText(text []byte) error { return named(loadFormatNames, f, text) }

// DeviceKind says on which kind of devices to compute.
type DeviceKind uint8

// The kinds of devices: GPUs where there are any or else emulated ones, emulated ones, GPUs.
const (
	AutoDevice DeviceKind = iota
	CPU
	CUDA
)

var deviceKindNames = []string{"auto", "cpu", "cuda"}

func (k DeviceKind) String() string { return name(deviceKindNames, k) }

// MarshalText writes the name.
func (k DeviceKind) MarshalText() ([]byte, error) { return []byte(k.String()), nil }

// UnmarshalText reads the name.
func (k *DeviceKind) UnmarshalText(text []byte) error { return named(deviceKindNames, k, text) }

// Tier is where offloaded experts are fetched from.
type Tier uint8

// The tiers. AnyTier leaves it open, or takes both; NoTier is for results of which
// nothing was offloaded, and no setting.
const (
	AnyTier Tier = iota
	HostTier
	PeerTier
	NoTier
)

var tierNames = []string{"auto", "host", "peer", "none"}

func (t Tier) String() string { return name(tierNames, t) }

// MarshalText writes the name.
func (t Tier) MarshalText() ([]byte, error) { return []byte(t.String()), nil }

// UnmarshalText reads the name.
func (t *Tier) UnmarshalText(text []byte) error { return named(tierNames, t, text) }

// Place is where attention runs.
type Place uint8

// The places. On the GPU, keys and values lie in its memory, or stream in from the
// host; on the CPU they lie in host memory. AnyPlace leaves it open; what runs is one of
// the others.
const (
	OnGPU Place = iota
	OnCPU
	AnyPlace
)

var placeNames = []string{"gpu", "cpu", "auto"}

func (p Place) String() string { return name(placeNames, p) }

// MarshalText writes the name.
func (p Place) MarshalText() ([]byte, error) { return []byte(p.String()), nil }

// UnmarshalText reads the name.
func (p *Place) UnmarshalText(text []byte) error { return named(placeNames, p, text) }

// Grouping says over which rows of a step a layer's experts run at once.
type Grouping uint8

// The groupings.
const (
	// PerLayer runs them once over all rows; with attention on the CPU twice, over
	// two halves that take turns.
	PerLayer Grouping = iota
	// PerMicroBatch runs them once per micro-batch: the literal CGOPipe order.
	PerMicroBatch
)

var groupingNames = []string{"layer", "micro-batch"}

func (g Grouping) String() string { return name(groupingNames, g) }

// MarshalText writes the name.
func (g Grouping) MarshalText() ([]byte, error) { return []byte(g.String()), nil }

// UnmarshalText reads the name.
func (g *Grouping) UnmarshalText(text []byte) error { return named(groupingNames, g, text) }

// ExpertAccess says how steps of few tokens get at offloaded experts.
type ExpertAccess uint8

// The ways: copies to the GPU's expert cache, or reads by kernels where the experts lie.
// AutoAccess takes the faster one.
const (
	AutoAccess ExpertAccess = iota
	CopyAccess
	DirectAccess
)

var expertAccessNames = []string{"auto", "copy", "direct"}

func (a ExpertAccess) String() string { return name(expertAccessNames, a) }

// MarshalText writes the name.
func (a ExpertAccess) MarshalText() ([]byte, error) { return []byte(a.String()), nil }

// UnmarshalText reads the name.
func (a *ExpertAccess) UnmarshalText(text []byte) error { return named(expertAccessNames, a, text) }

// SchedulingPolicy says which requests come first.
type SchedulingPolicy uint8

// The policies: by arrival, by priority, and by virtual runtime.
const (
	FCFSScheduling SchedulingPolicy = iota
	PriorityScheduling
	FairScheduling
)

var schedulingPolicyNames = []string{"fcfs", "priority", "fair"}

func (p SchedulingPolicy) String() string { return name(schedulingPolicyNames, p) }

// MarshalText writes the name.
func (p SchedulingPolicy) MarshalText() ([]byte, error) { return []byte(p.String()), nil }

// UnmarshalText reads the name.
func (p *SchedulingPolicy) UnmarshalText(text []byte) error {
	return named(schedulingPolicyNames, p, text)
}

// LogLevel is the minimum level of log messages.
type LogLevel uint8

// The levels.
const (
	// LogAuto is LogInfo in serve and LogWarn in other commands.
	LogAuto LogLevel = iota
	LogDebug
	LogInfo
	LogWarn
	LogError
)

var logLevelNames = []string{"auto", "debug", "info", "warn", "error"}

func (l LogLevel) String() string { return name(logLevelNames, l) }

// UnmarshalText reads the name.
func (l *LogLevel) UnmarshalText(text []byte) error { return named(logLevelNames, l, text) }

// Level is slog's; that of LogAuto is of commands other than serve.
func (l LogLevel) Level() slog.Level {
	return [...]slog.Level{slog.LevelWarn, slog.LevelDebug, slog.LevelInfo, slog.LevelWarn, slog.LevelError}[l]
}

// LogFormat is the form of messages.
type LogFormat uint8

// The formats.
const (
	LogText LogFormat = iota
	LogJSON
)

var logFormatNames = []string{"text", "json"}

func (f LogFormat) String() string { return name(logFormatNames, f) }

// UnmarshalText reads the name.
func (f *LogFormat) UnmarshalText(text []byte) error { return named(logFormatNames, f, text) }

// PolicySource is what chooses a policy: NoPolicy, PlannedPolicy, or else the file of that
// name.
type PolicySource string

// The sources that are no files.
const (
	NoPolicy      PolicySource = "none"
	PlannedPolicy PolicySource = "auto"
)

func (p PolicySource) String() string { return string(p) }

// UnmarshalText takes any text.
func (p *PolicySource) UnmarshalText(text []byte) error {
	*p = PolicySource(text)
	return nil
}

// name of a value. One that there is not has a number.
func name[E ~uint8](names []string, v E) string {
	if int(v) < len(names) {
		return names[v]
	}
	return fmt.Sprintf("%T(%d)", v, uint8(v))
}

// named sets v to the value of a name.
func named[E ~uint8](names []string, v *E, text []byte) error {
	i := slices.Index(names, string(text))
	if i < 0 {
		return fmt.Errorf("%q is none of %s", text, strings.Join(names, ", "))
	}
	*v = E(i)
	return nil
}

// Values of Serve.ToolCallParser and Serve.ReasoningParser besides the names of formats, which package
// models/chat/output has: the format is found by the chat template, or there is none.
const (
	AutoParser = "auto"
	NoParser   = "none"
)

var (
	toolCallParsers  = []string{AutoParser, NoParser, "hermes", "json", "llama3_json", "mistral", "olmo3", "phi4_mini_json", "qwen3_coder", "qwen3_xml"}
	reasoningParsers = []string{AutoParser, NoParser, "deepseek_r1", "qwen3"}
)

package configs

import (
	"fmt"
	"math"
	"reflect"
	"slices"
	"strconv"
	"strings"
)

// Kind is the type of a setting's value.
type Kind uint8

// The kinds, with the Go type of Key.Default and of a value. A setting with a few named
// values, which Key.Allowed lists, is a String here and a type of its own in Settings.
const (
	String Kind = iota // string
	Bool               // bool
	Int                // int
	Uint               // uint64
	Float              // float64
)

func (k Kind) String() string {
	return [...]string{"string", "bool", "int", "uint", "float"}[k]
}

// Key describes one setting.
type Key struct {
	// Name in kebab-case: the flag, the key of a file, and, in upper case with
	// underscores behind MOESERVE_, the variable.
	Name string
	Kind Kind
	// Default has the Go type of Kind.
	Default any
	// Unit of the value: "tokens", "bytes"; empty where it has none.
	Unit string
	// Help is one sentence without a full stop.
	Help string
	// Placeholder stands for the value in help: "DIR|PRESET".
	Placeholder string
	// Allowed lists the values of a String; nil: any.
	Allowed []string
	// Min and Max bound numbers, both included.
	Min, Max float64
	// Secret values are shown to nobody.
	Secret bool
	// Commands that take it.
	Commands []string
}

// Variable is the environment variable of the setting.
func (k Key) Variable() string {
	return "MOESERVE_" + strings.ToUpper(strings.ReplaceAll(k.Name, "-", "_"))
}

// Commands that take a setting: those that open devices, those that deal with a model,
// and of these those that say what is offloaded, that take requests as they come, that
// have a result, draw tokens, generate once, serve, or measure a batch.
var (
	onDevice  = []string{"run", "serve", "inspect", "plan", "bench throughput", "bench sweep", "bench transfer", "config"}
	onModel   = []string{"run", "serve", "inspect", "plan", "bench throughput", "bench sweep", "config"}
	onOffload = []string{"run", "serve", "inspect", "plan", "bench throughput", "config"}
	onRequest = []string{"run", "serve", "inspect", "plan", "config"}
	onResult  = []string{"run", "inspect", "plan", "bench throughput", "bench sweep", "bench transfer", "config"}
	onDraw    = []string{"run", "bench throughput", "bench sweep", "config"}
	onRun     = []string{"run", "config"}
	onServe   = []string{"serve", "config"}
	onBench   = []string{"bench throughput", "bench sweep", "config"}
)

// unbounded is the Max of a number that nothing but its type limits.
const unbounded = math.MaxInt32

// Schema lists all settings in the order in which help shows them.
var Schema = []Key{
	{
		Name: "model", Kind: String, Default: "", Placeholder: "DIR|PRESET", Commands: onModel,
		Help: "checkpoint directory or preset; without it, the small model that is built in",
	},
	{
		Name: "chat", Kind: Bool, Default: false, Commands: onRun,
		Help: "put the prompt through the model's chat template",
	},
	{
		Name: "load-format", Kind: String, Default: "auto", Allowed: loadFormatNames, Commands: onModel,
		Help: "auto reads the checkpoint, dummy fills the model's shapes with seeded random weights",
	},
	{
		Name: "dummy-routing", Kind: String, Default: "uniform", Placeholder: "uniform|zipf:S", Commands: onModel,
		Help: "how evenly a router of dummy weights chooses experts: zipf:1.2 prefers some",
	},
	{
		Name: "num-hidden-layers", Kind: Int, Default: 0, Unit: "layers", Max: 1024, Commands: onModel,
		Help: "use only the first layers of the model; 0: all",
	},
	{
		Name: "device", Kind: String, Default: "auto", Allowed: deviceKindNames, Commands: onDevice,
		Help: "where to compute: auto takes a GPU where the binary has CUDA and there is one",
	},
	{
		Name: "gpu", Kind: Int, Default: 0, Max: 1023, Commands: onDevice,
		Help: "which GPU computes, by the driver's number",
	},
	{
		Name: "peers", Kind: String, Default: "auto", Placeholder: "auto|none|LIST", Commands: onDevice,
		Help: "other GPUs whose spare memory is borrowed, as numbers with commas between them; auto: all emulated ones, and no real one",
	},
	{
		Name: "host-memory-gib", Kind: Float, Default: 0.0, Unit: "GiB", Max: 1 << 20, Commands: onDevice,
		Help: "the host's memory in all, for virtual machines that are given it only as they use it; 0: what the system says",
	},
	{
		Name: "emulate", Kind: String, Default: "", Placeholder: "SPEC", Commands: onDevice,
		Help: "emulated devices and links; without it, one compute device and two peers",
	},
	{
		Name: "offload-fraction", Kind: Float, Default: 0.0, Max: 1, Commands: onOffload,
		Help: "share of the experts that do not live on the compute device",
	},
	{
		Name: "offload-tier", Kind: String, Default: "auto", Allowed: []string{"auto", "peer", "host"}, Commands: onOffload,
		Help: "where offloaded experts are fetched from: auto copies those that are used most to peers, peer begins when all are there, host uses no peers",
	},
	{
		Name: "resident-experts", Kind: String, Default: "", Placeholder: "LIST|@FILE", Commands: onOffload,
		Help: "experts that live on the compute device, in place of offload-fraction: 0:1,5;3:2-7 is 1 and 5 of layer 0, and 2 to 7 of layer 3",
	},
	{
		Name: "dynamic-residency", Kind: Bool, Default: false, Commands: onOffload,
		Help: "let the experts that live on the compute device change with use; all experts then have a copy in host memory",
	},
	{
		Name: "harvest-policy", Kind: String, Default: "best-fit", Allowed: []string{"best-fit", "locality", "fairness", "interference", "stability"}, Commands: onModel,
		Help: "which peer memory is borrowed from",
	},
	{
		Name: "harvest-headroom", Kind: String, Default: "5%", Placeholder: "BYTES|SHARE", Commands: onModel,
		Help: "memory of each peer that stays free for others, as 4GiB or as a share of the largest peer's",
	},
	{
		Name: "migration-limit", Kind: String, Default: "auto", Placeholder: "auto|BYTES/s", Commands: onModel,
		Help: "how fast experts are moved beside what steps fetch, as 2GiB/s; auto: a fifth of the host link's rate, 0: no limit",
	},
	{
		Name: "availability-trace", Kind: String, Default: "", Placeholder: "FILE|generated:SEED", Commands: onModel,
		Help: "memory of emulated peers that others take and give back: lines of time_s,peer,bytes, or made up; generated:1:6 changes 6 times a minute",
	},
	{
		Name: "gpu-memory-utilization", Kind: Float, Default: 0.9, Min: 0.01, Max: 1, Commands: onModel,
		Help: "share of the compute device's memory that may be used",
	},
	{
		Name: "num-gpu-blocks-override", Kind: Int, Default: 0, Unit: "blocks", Max: unbounded, Commands: onRequest,
		Help: "blocks in the pool for keys and values, 16 tokens each; 0: what memory allows",
	},
	{
		Name: "max-model-len", Kind: Int, Default: 0, Unit: "tokens", Max: unbounded, Commands: onRequest,
		Help: "longest sequence, prompt and answer together; 0: what the model and the KV pool allow",
	},
	{
		Name: "max-num-seqs", Kind: Int, Default: 64, Unit: "sequences", Min: 1, Max: 1 << 16, Commands: onRequest,
		Help: "most sequences that run at once",
	},
	{
		Name: "max-num-batched-tokens", Kind: Int, Default: 2048, Unit: "tokens", Min: 1, Max: 1 << 24, Commands: onModel,
		Help: "most tokens of a step",
	},
	{
		Name: "micro-batch-size", Kind: Int, Default: 0, Unit: "tokens", Max: 1 << 24, Commands: onModel,
		Help: "most tokens whose attention runs together; 0: all of a step",
	},
	{
		Name: "num-micro-batches", Kind: Int, Default: 0, Unit: "micro-batches", Max: 1 << 16, Commands: onModel,
		Help: "least number of micro-batches that a step is cut into; 0: as few as micro-batch-size allows",
	},
	{
		Name: "expert-grouping", Kind: String, Default: "layer", Allowed: groupingNames, Commands: onModel,
		Help: "layer runs a layer's experts once for many micro-batches, micro-batch once for each, as CGOPipe does",
	},
	{
		Name: "attention", Kind: String, Default: "auto", Allowed: []string{"auto", "gpu", "cpu"}, Commands: onModel,
		Help: "who attends: gpu, beside keys and values in its memory, or cpu, beside those in the host's; auto: gpu",
	},
	{
		Name: "batch-invariant", Kind: Bool, Default: false, Commands: onModel,
		Help: "keep a row's result independent of other rows on a GPU too, where that costs speed; on the CPU it always is",
	},
	{
		Name: "enforce-eager", Kind: Bool, Default: false, Commands: onModel,
		Help: "enqueue every kernel by itself, also where all experts are in a GPU's memory and a decode step would be one CUDA graph",
	},
	{
		Name: "overlap-kernels", Kind: Bool, Default: true, Commands: onModel,
		Help: "let a GPU's kernels start while those in front of them end (compute capability 9.0 and later)",
	},
	{
		Name: "policy", Kind: String, Default: "none", Placeholder: "none|auto|FILE", Commands: []string{"run", "serve", "inspect", "plan", "bench throughput", "config"},
		Help: "what chooses max-num-seqs, max-num-batched-tokens, micro-batch-size, expert-grouping, attention and offload-fraction where they are not given: the defaults, the planner, or a file that plan --json wrote",
	},
	{
		Name: "hardware", Kind: String, Default: "", Placeholder: "NAME|FILE", Commands: onDevice,
		Help: "machine whose rates floors and predictions count with: " + strings.Join(HardwareNames(), ", ") + ", or a file that bench transfer --calibrate wrote; without it, what is known of this one",
	},
	{
		Name: "max-tokens", Kind: Int, Default: 128, Unit: "tokens", Min: 1, Max: unbounded, Commands: onRun,
		Help: "most tokens to generate",
	},
	{
		Name: "temperature", Kind: Float, Default: 0.0, Max: 100, Commands: onDraw,
		Help: "how freely tokens are drawn; 0: always the likeliest",
	},
	{
		Name: "seed", Kind: Uint, Default: uint64(0), Max: math.MaxUint64, Commands: onModel,
		Help: "of dummy weights, of run's sampling, and of generated prompts",
	},
	{
		Name: "ignore-eos", Kind: Bool, Default: false, Commands: onRun,
		Help: "go on after a token that ends the answer",
	},
	{
		Name: "host", Kind: String, Default: "127.0.0.1", Placeholder: "ADDRESS", Commands: onServe,
		Help: "address to serve on; 0.0.0.0: all of this machine's",
	},
	{
		Name: "port", Kind: Int, Default: 8000, Max: math.MaxUint16, Commands: onServe,
		Help: "TCP port to serve on; 0: one that is free, which the log tells",
	},
	{
		Name: "served-model-name", Kind: String, Default: "", Placeholder: "NAME", Commands: onServe,
		Help: "what clients call the model; without it, the preset, or the last part of the directory's path",
	},
	{
		Name: "api-key", Kind: String, Default: "", Placeholder: "KEY", Secret: true, Commands: onServe,
		Help: "key that clients must send as a bearer token; as a flag other users of the machine can see it",
	},
	{
		Name: "max-queued-requests", Kind: Int, Default: 256, Unit: "samples", Min: 1, Max: 1 << 20, Commands: onServe,
		Help: "most samples that wait to run; more are told to come again",
	},
	{
		Name: "max-request-bytes", Kind: Int, Default: 16 << 20, Unit: "bytes", Min: 1, Max: 1 << 30, Commands: onServe,
		Help: "largest body of a request",
	},
	{
		Name: "request-timeout", Kind: Int, Default: 0, Unit: "seconds", Max: 1 << 20, Commands: onServe,
		Help: "longest that a request may take; 0: any time",
	},
	{
		Name: "drain-timeout", Kind: Int, Default: 30, Unit: "seconds", Max: 1 << 20, Commands: onServe,
		Help: "how long running requests may go on when the server is told to end",
	},
	{
		Name: "num-prompts", Kind: Int, Default: 64, Unit: "requests", Min: 1, Max: 1 << 16, Commands: onBench,
		Help: "requests that run as one batch",
	},
	{
		Name: "input-len", Kind: Int, Default: 0, Unit: "tokens", Max: unbounded, Commands: onBench,
		Help: "length of every generated prompt; 0: the lengths of MT-Bench",
	},
	{
		Name: "output-len", Kind: Int, Default: 32, Unit: "tokens", Min: 2, Max: unbounded, Commands: onBench,
		Help: "tokens to generate for each request, whatever the model says of their end",
	},
	{
		Name: "dataset-path", Kind: String, Default: "", Placeholder: "FILE", Commands: onBench,
		Help: "MT-Bench or MT-Bench-101 file, whose first turns are the prompts; without it, random ids with MT-Bench's lengths",
	},
	{
		Name: "warmup-tokens", Kind: Int, Default: 50, Unit: "tokens", Max: unbounded, Commands: onBench,
		Help: "tokens of each request that are generated first and not counted",
	},
	{
		Name: "trials", Kind: Int, Default: 5, Min: 1, Max: 1000, Commands: onBench,
		Help: "how often the batch is run and counted",
	},
	{
		Name: "prefill-trials", Kind: Int, Default: 0, Max: 1000, Commands: onBench,
		Help: "how many of the trials compute the prompts; the others go on from these; 0: all",
	},
	{
		Name: "json", Kind: String, Default: "", Placeholder: "FILE", Commands: onResult,
		Help: "write the result as JSON to a file; - is standard output",
	},
	{
		Name: "trace", Kind: String, Default: "", Placeholder: "FILE", Commands: []string{"run", "serve", "bench throughput", "config"},
		Help: "write a timeline of steps, kernels and copies for ui.perfetto.dev; FILE.gz is compressed",
	},
	{
		Name: "log-level", Kind: String, Default: "auto", Allowed: logLevelNames, Commands: onDevice,
		Help: "minimum level of log messages, on standard error; auto: info in serve, with a line per request and a status line every 10 s, warn elsewhere",
	},
	{
		Name: "log-format", Kind: String, Default: "text", Allowed: logFormatNames, Commands: onDevice,
		Help: "form of log messages",
	},
}

// Find returns the entry of Schema of that name.
func Find(name string) (Key, bool) {
	i := slices.IndexFunc(Schema, func(k Key) bool { return k.Name == name })
	if i < 0 {
		return Key{}, false
	}
	return Schema[i], true
}

// For lists the entries of Schema that a command takes.
func For(command string) []Key {
	return slices.DeleteFunc(slices.Clone(Schema), func(k Key) bool { return !slices.Contains(k.Commands, command) })
}

// check returns what the key allows if v is something else.
func (k Key) check(v reflect.Value) string {
	var n float64
	switch k.Kind {
	case String:
		return k.checkText(text(v))
	case Bool:
		return ""
	case Int:
		n = float64(v.Int())
	case Uint:
		n = float64(v.Uint())
	case Float:
		n = v.Float()
	}
	// Not a number is in no range.
	if n >= k.Min && n <= k.Max {
		return ""
	}
	want := fmt.Sprintf("must be from %v to %v", number(k.Min), number(k.Max))
	if k.Unit != "" {
		want += " " + k.Unit
	}
	return want
}

func number(f float64) string { return strconv.FormatFloat(f, 'f', -1, 64) }

// oneOf lists values as a sentence does: "a, b or c".
func oneOf(values []string) string {
	last := len(values) - 1
	return strings.Join(values[:last], ", ") + " or " + values[last]
}

// CheckText says whether a String may have a value, before it is read into Settings.
// Errors are *SettingError.
func (k Key) CheckText(value string) error {
	if want := k.checkText(value); want != "" {
		return &SettingError{Key: k.Name, Value: value, Want: want}
	}
	return nil
}

func (k Key) checkText(value string) string {
	if k.Allowed != nil && !slices.Contains(k.Allowed, value) {
		return "must be " + oneOf(k.Allowed)
	}
	return ""
}

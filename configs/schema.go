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
	// Short is the flag's letter; empty: it has none.
	Short string
	// Rare settings are in a command's complete help only.
	Rare bool
	// Path: the value is a file or a directory, or one where it is none of a few words. "~"
	// at its beginning, or behind "@", stands for the home directory.
	Path bool
	// Placeholder stands for the value in help: "DIR|PRESET".
	Placeholder string
	// Allowed lists the values of a String; nil: any.
	Allowed []string
	// Min and Max bound numbers, both included. Numbers lists the values of an Int, in place
	// of bounds; nil: any within them.
	Min, Max float64
	Numbers  []int
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
// and of these those that say what is offloaded, that take requests as they come, that decide how
// many of them run, that have a result, sample tokens, generate for a person, hold conversations, serve, or measure a batch.
var (
	onDevice   = []string{"run", "chat", "serve", "inspect", "plan", "bench throughput", "bench sweep", "bench figure", "bench transfer", "bench multipath", "bench kv", "bench kernels", "bench prefix", "bench fairness", "bench sleep", "bench harvest", "config"}
	onHardware = append(slices.Clone(onDevice), "bench predict")
	onSleep    = []string{"serve", "bench sleep", "config"}
	onModel    = []string{"run", "chat", "serve", "inspect", "plan", "bench throughput", "bench sweep", "bench figure", "bench prefix", "bench fairness", "bench sleep", "bench harvest", "config"}
	onOffload  = []string{"run", "chat", "serve", "inspect", "plan", "bench throughput", "bench prefix", "bench fairness", "bench sleep", "bench harvest", "config"}
	onRequest  = []string{"run", "chat", "serve", "inspect", "plan", "bench prefix", "config"}
	onSeqs     = []string{"run", "chat", "serve", "inspect", "plan", "bench prefix", "bench fairness", "bench sleep", "config"}
	onResult   = []string{"run", "inspect", "plan", "bench throughput", "bench sweep", "bench figure", "bench transfer", "bench multipath", "bench kv", "bench kernels", "bench predict", "bench prefix", "bench fairness", "bench sleep", "bench harvest", "config"}
	onSample   = []string{"run", "chat", "bench throughput", "bench sweep", "bench figure", "bench harvest", "config"}
	onGenerate = []string{"run", "chat", "config"}
	onChat     = []string{"run", "chat", "serve", "config"}
	onServe    = []string{"serve", "config"}
	onBench    = []string{"bench throughput", "bench sweep", "bench figure", "config"}
	onBatch    = append([]string{"bench harvest"}, onBench...)
	onWorkload = []string{"plan", "bench throughput", "bench sweep", "bench figure", "bench harvest", "config"}
	onBorrow   = []string{"run", "chat", "serve", "bench throughput", "bench sweep", "bench figure", "bench prefix", "bench harvest", "config"}
	onTrace    = []string{"run", "serve", "bench throughput", "config"}
)

// unbounded is the Max of a number that nothing but its type limits.
const unbounded = math.MaxInt32

// Schema lists all settings in the order in which help shows them, those of a group together.
var Schema = []Key{
	{
		Name: "model", Short: "m", Kind: String, Default: "", Placeholder: "DIR|PRESET", Path: true, Commands: onModel,
		Help: "checkpoint directory, preset, or built-in: a small model inside this binary, which is also the default",
	},
	{
		Name: "load-format", Kind: String, Default: "auto", Allowed: loadFormatNames, Commands: onModel,
		Help: "auto loads the checkpoint's weights, dummy makes random ones from --seed",
	},
	{
		Name: "dummy-routing", Kind: String, Default: "uniform", Placeholder: "uniform|zipf:S", Rare: true, Commands: onModel,
		Help: "distribution of the experts that dummy weights select; zipf:1.2 is skewed, a larger number more so",
	},
	{
		Name: "num-hidden-layers", Kind: Int, Default: 0, Unit: "layers", Max: 1024, Rare: true, Commands: onModel,
		Help: "use only the first layers of the model (dummy weights only); 0: all",
	},
	{
		Name: "device", Kind: String, Default: "auto", Allowed: deviceKindNames, Commands: onDevice,
		Help: "where to compute: cuda, or cpu, which emulates GPUs; auto: cuda where this binary has it and there is a GPU, else cpu",
	},
	{
		Name: "gpu", Kind: Int, Default: 0, Max: 1023, Commands: onDevice,
		Help: "index of the GPU that computes",
	},
	{
		Name: "peers", Kind: String, Default: "auto", Placeholder: "auto|none|LIST", Commands: onDevice,
		Help: "comma-separated indices of other GPUs whose spare memory may be borrowed; auto: all emulated GPUs, and no real one",
	},
	{
		Name: "host-paths", Kind: String, Default: "auto", Placeholder: "auto|N|LIST", Commands: onModel,
		Help: "PCIe links for copies from and to host memory: N: the GPU's own and those of N - 1 relays; comma-separated indices (a single one as 1,): these GPUs are relays; auto: relays of a calibrated --hardware file that pay",
	},
	{
		Name: "host-paths-mode", Kind: String, Default: TakeHostPaths, Allowed: []string{TakeHostPaths, WaitHostPaths}, Rare: true, Commands: onModel,
		Help: "copies over a relay's link that other programs use, too: take: they go on at the share that they get of it; wait: they take other links for a while, which leaves these programs more; without relays it has no effect",
	},
	{
		Name: "host-memory-gib", Kind: Float, Default: 0.0, Unit: "GiB", Max: 1 << 20, Rare: true, Commands: onDevice,
		Help: "total host memory, for VMs with memory ballooning; 0: what the system reports",
	},
	{
		Name: "emulate", Kind: String, Default: "", Placeholder: "SPEC", Commands: onDevice,
		Help: "emulated GPUs, memories and links, as hbm=8GiB,host=16GiB; without it, three GPUs that share this machine's memory",
	},
	{
		Name: "gpu-memory-utilization", Kind: Float, Default: 0.9, Min: 0.01, Max: 1, Commands: onModel,
		Help: "fraction of the GPU's memory that may be used (0.9 or 90%)",
	},
	{
		Name: "sleep-memory", Kind: String, Default: KeptSleepMemory, Allowed: []string{KeptSleepMemory, ReservedSleepMemory, ReleasedSleepMemory}, Rare: true, Commands: onSleep,
		Help: "pinned host memory for the weights of a sleeping model: allocated by the first sleep and kept, allocated at the start, or released by each wake",
	},
	{
		Name: "offload-fraction", Kind: Float, Default: 0.0, Max: 1, Commands: onOffload,
		Help: "fraction of the experts that are not resident in GPU memory (0.5 or 50%)",
	},
	{
		Name: "offload-tier", Kind: String, Default: "auto", Allowed: []string{"auto", "peer", "host"}, Commands: onOffload,
		Help: "where offloaded experts are fetched from: host; peer: all of them get peer copies at start; auto: the most used ones get peer copies",
	},
	{
		Name: "resident-experts", Kind: String, Default: "", Placeholder: "LIST|@FILE", Path: true, Rare: true, Commands: onOffload,
		Help: "resident experts by name, instead of --offload-fraction: 0:1,5;3:2-7 is 1 and 5 of layer 0, and 2 to 7 of layer 3",
	},
	{
		Name: "dynamic-residency", Kind: Bool, Default: false, Rare: true, Commands: onOffload,
		Help: "swap resident experts with offloaded ones by use; takes host memory for all experts",
	},
	{
		Name: "harvest-policy", Kind: String, Default: "best-fit", Allowed: []string{"best-fit", "locality", "fairness", "interference", "stability"}, Rare: true, Commands: onModel,
		Help: "how a peer is selected when memory is borrowed",
	},
	{
		Name: "harvest-clients", Kind: String, Default: "", Placeholder: "LIST", Rare: true, Commands: onModel,
		Help: "limits of those who borrow, for --harvest-policy fairness, as experts=weight:3,rate:2GiB/s;kv=quota:20GiB; others weigh 1",
	},
	{
		Name: "harvest-evacuate-at", Kind: Float, Default: 0.0, Max: 1000, Rare: true, Commands: onModel,
		Help: "release everything on a peer whose memory others keep so busy (--harvest-policy interference: a fraction of its bandwidth), or change so fast (stability: its memory per minute); 0: never",
	},
	{
		Name: "harvest-weight", Kind: Float, Default: 1.0, Min: 0.001, Max: 1000, Rare: true, Commands: onModel,
		Help: "weight of this process's share of a peer from which other moeserve processes borrow, too",
	},
	{
		Name: "harvest-headroom", Kind: String, Default: "5%", Placeholder: "SIZE|SHARE", Rare: true, Commands: onModel,
		Help: "memory of each peer that stays free for other processes: a size, or a share of its memory",
	},
	{
		Name: "harvest-slab-size", Kind: String, Default: "auto", Placeholder: "auto|SIZE", Rare: true, Commands: onModel,
		Help: "unit in which peers' memory is borrowed and released; auto: four experts",
	},
	{
		Name: "harvest-deadline", Kind: String, Default: "100ms", Placeholder: "TIME", Rare: true, Commands: onModel,
		Help: "time in which borrowed memory that others need is to be released; what takes longer is reported",
	},
	{
		Name: "harvest-poll-interval", Kind: String, Default: "10ms", Placeholder: "TIME", Rare: true, Commands: onModel,
		Help: "time between two readings of the free memory of each peer",
	},
	{
		Name: "harvest-cooldown", Kind: String, Default: "1s", Placeholder: "TIME", Rare: true, Commands: onModel,
		Help: "time after a release to others in which no memory of that peer is borrowed; 0: none",
	},
	{
		Name: "runtime-dir", Kind: String, Default: "auto", Placeholder: "auto|none|DIR", Path: true, Rare: true, Commands: onBorrow,
		Help: "directory of the socket on which other processes ask for borrowed memory (moeserve reclaim); auto: of this user alone",
	},
	{
		Name: "migration-limit", Kind: String, Default: "auto", Placeholder: "auto|SIZE/s", Rare: true, Commands: onModel,
		Help: "maximum rate of copies that change where experts live, as 2GiB/s; auto: a fifth of the host link's, 0: no limit",
	},
	{
		Name: "availability-trace", Kind: String, Default: "", Placeholder: "FILE|generated:SEED", Path: true, Rare: true, Commands: onModel,
		Help: "replay other processes' use of emulated peers' memory: lines of time_s,peer,bytes, or generated:1:6, which changes 6 times a minute",
	},
	{
		Name: "max-model-len", Kind: Int, Default: 0, Unit: "tokens", Max: unbounded, Commands: onRequest,
		Help: "maximum length of a sequence, prompt and completion together; 0: what the model and the KV cache allow",
	},
	{
		Name: "num-gpu-blocks-override", Kind: Int, Default: 0, Unit: "blocks", Max: unbounded, Rare: true, Commands: onSeqs,
		Help: "KV cache blocks, of --block-size tokens each; 0: what memory allows",
	},
	{
		Name: "block-size", Kind: Int, Default: 16, Unit: "tokens", Numbers: []int{8, 16, 32, 64, 128}, Rare: true, Commands: onModel,
		Help: "tokens of a KV cache block",
	},
	{
		Name: "enable-prefix-caching", Kind: Bool, Default: true, Rare: true, Commands: onChat,
		Help: "reuse the KV cache of prompts that begin alike; --no-enable-prefix-caching turns it off",
	},
	{
		Name: "kv-offloading-backend", Kind: String, Default: "native", Allowed: []string{"native"}, Rare: true, Commands: onRequest,
		Help: "what keeps KV blocks of --kv-offloading-size, which it needs; native: moeserve itself",
	},
	{
		Name: "kv-offloading-size", Kind: Float, Default: 0.0, Unit: "GiB", Max: 1 << 20, Commands: onRequest,
		Help: "pinned host memory for KV blocks that the GPU has no room for; 0: none",
	},
	{
		Name: "kv-transfer-config", Kind: String, Default: "", Placeholder: "JSON", Rare: true, Commands: onRequest,
		Help: "KV tiers as vLLM's option has them: an OffloadingConnector with kv_connector_extra_config (num_cpu_blocks or cpu_bytes_to_use, num_gpu_blocks, dest_gpu_id, eviction_policy, ...)",
	},
	{
		Name: "kv-events-config", Kind: String, Default: "", Placeholder: "JSON", Rare: true, Commands: onServe,
		Help: "KV events for routers as vLLM's option has them: enable_kv_cache_events, publisher, endpoint, replay_endpoint, buffer_steps, hwm, max_queue_size, topic",
	},
	{
		Name: "kv-experts-share", Kind: String, Default: StaticShare, Allowed: []string{StaticShare, AutoShare}, Rare: true, Commands: onRequest,
		Help: "whether memory of the KV cache that is worth more to experts is lent to them (auto), or the shares are fixed (static)",
	},
	{
		Name: "max-num-seqs", Kind: Int, Default: 64, Unit: "sequences", Min: 1, Max: 1 << 16, Commands: onSeqs,
		Help: "maximum sequences that run in a batch",
	},
	{
		Name: "max-num-batched-tokens", Kind: Int, Default: 2048, Unit: "tokens", Min: 1, Max: 1 << 24, Commands: onModel,
		Help: "maximum tokens of a step",
	},
	{
		Name: "max-itl", Kind: String, Default: "auto", Placeholder: "auto|off|TIME", Commands: []string{"serve", "bench fairness", "config"},
		Help: "maximum time between two tokens of a sequence (inter-token latency) while others' prompts are computed, as 30ms: steps that decode have fewer prompt tokens; auto: at most about twice the time without prompts, off: --max-num-batched-tokens alone limits steps",
	},
	{
		Name: "scheduling-policy", Kind: String, Default: "fcfs", Allowed: schedulingPolicyNames, Commands: onServe,
		Help: "which requests come first: fcfs: in order of arrival, priority: lower priority values, fair: those that have got the fewest tokens, which others are preempted for",
	},
	{
		Name: "fair-granularity", Kind: Int, Default: 64, Unit: "tokens", Min: 1, Max: unbounded, Rare: true, Commands: onServe,
		Help: "tokens that a sequence gets before it is preempted for another with --scheduling-policy fair; fewer are fairer, and move more KV blocks",
	},
	{
		Name: "micro-batch-size", Kind: Int, Default: 0, Unit: "tokens", Max: 1 << 24, Rare: true, Commands: onModel,
		Help: "maximum tokens of a micro-batch, for which attention is computed together; 0: all of a step",
	},
	{
		Name: "num-micro-batches", Kind: Int, Default: 0, Unit: "micro-batches", Max: 1 << 16, Rare: true, Commands: onModel,
		Help: "minimum micro-batches of a step; 0: as few as --micro-batch-size allows",
	},
	{
		Name: "expert-grouping", Kind: String, Default: "layer", Allowed: groupingNames, Rare: true, Commands: onModel,
		Help: "run a layer's experts once for many micro-batches, or once for each micro-batch as CGOPipe does",
	},
	{
		Name: "expert-access", Kind: String, Default: "auto", Allowed: expertAccessNames, Rare: true, Commands: onModel,
		Help: "how steps of few tokens get at offloaded experts: copy: the selected ones are copied to the GPU, direct: kernels read them in host or peer memory, whose release may then miss --harvest-deadline, auto: the faster one that keeps it, where the rates of this GPU are known",
	},
	{
		Name: "attention", Kind: String, Default: "auto", Allowed: []string{"auto", "gpu", "cpu"}, Rare: true, Commands: onModel,
		Help: "where attention is computed and the KV cache lives: gpu or cpu; auto: gpu",
	},
	{
		Name: "cpu-experts", Kind: String, Default: "off", Placeholder: "auto|off|FRACTION", Rare: true, Commands: onOffload,
		Help: "compute experts of steps of few tokens on the CPU, where they lie in host memory; auto: as many as let CPU and link end together; FRACTION: of those selected that are in host memory (0.5 or 50%)",
	},
	{
		Name: "batch-invariant", Kind: Bool, Default: false, Rare: true, Commands: onModel,
		Help: "keep results independent of other requests of the batch on a GPU too, where that is slower; on the CPU they always are",
	},
	{
		Name: "enforce-eager", Kind: Bool, Default: false, Rare: true, Commands: onModel,
		Help: "disable CUDA graphs",
	},
	{
		Name: "overlap-kernels", Kind: Bool, Default: true, Rare: true, Commands: onModel,
		Help: "start kernels while the ones before them end (compute capability 9.0 and later)",
	},
	{
		Name: "policy", Kind: String, Default: "none", Placeholder: "none|auto|FILE", Path: true, Commands: []string{"run", "chat", "serve", "inspect", "plan", "bench throughput", "config"},
		Help: "auto: the planner sets offload fraction, batch, micro-batches and attention where they are not given; FILE: as plan --json wrote it",
	},
	{
		Name: "hardware", Kind: String, Default: "", Placeholder: "NAME|FILE", Path: true, Commands: onHardware,
		Help: "hardware profile used for roofline and predictions: " + strings.Join(HardwareNames(), ", ") + ", or a file of bench transfer or bench kernels --calibrate; one of bench kv --calibrate also says which KV blocks a kernel copies; default: what is known of this machine",
	},
	{
		Name: "raw", Kind: Bool, Default: false, Commands: []string{"run", "config"},
		Help: "send the prompt as it is, without the model's chat template",
	},
	{
		Name: "max-tokens", Short: "n", Kind: Int, Default: 128, Unit: "tokens", Min: 1, Max: unbounded, Commands: onGenerate,
		Help: "maximum tokens to generate",
	},
	{
		Name: "temperature", Kind: Float, Default: 0.0, Max: 100, Commands: onSample,
		Help: "sampling temperature; 0: greedy, whatever the model's generation_config.json says",
	},
	{
		Name: "seed", Kind: Uint, Default: uint64(0), Max: math.MaxUint64, Commands: onModel,
		Help: "seed for sampling, dummy weights and generated prompts",
	},
	{
		Name: "ignore-eos", Kind: Bool, Default: false, Rare: true, Commands: onGenerate,
		Help: "keep generating after the end-of-sequence token",
	},
	{
		Name: "special-tokens-in-chat", Kind: Bool, Default: false, Rare: true, Commands: onChat,
		Help: "read special tokens in messages as such, so that a message can begin turns; by default they are plain text",
	},
	{
		Name: "host", Kind: String, Default: "127.0.0.1", Placeholder: "ADDRESS", Commands: onServe,
		Help: "address to listen on; 0.0.0.0: all addresses",
	},
	{
		Name: "port", Kind: Int, Default: 8000, Max: math.MaxUint16, Commands: onServe,
		Help: "TCP port to listen on; 0: a free one, which the log reports",
	},
	{
		Name: "served-model-name", Kind: String, Default: "", Placeholder: "NAME[,NAME]", Commands: onServe,
		Help: "names of the model in the API, separated by commas, the first for metrics; default: the preset, or the last part of the directory's path",
	},
	{
		Name: "generation-config", Kind: String, Default: "auto", Placeholder: "auto|vllm|DIR", Path: true, Commands: onServe,
		Help: "where default sampling parameters come from: auto: the model's generation_config.json, vllm: none (temperature 1), DIR: the generation_config.json there",
	},
	{
		Name: "override-generation-config", Kind: String, Default: "{}", Placeholder: "JSON", Rare: true, Commands: onServe,
		Help: `default sampling parameters in place of those, as {"temperature": 0.6, "top_k": 20}`,
	},
	{
		Name: "tool-call-parser", Kind: String, Default: AutoParser, Allowed: toolCallParsers, Placeholder: "auto|none|NAME", Commands: onServe,
		Help: "how the model writes tool calls, by vLLM's name; auto: as its chat template does, none: calls stay text",
	},
	{
		Name: "enable-auto-tool-choice", Kind: Bool, Default: true, Rare: true, Commands: onServe,
		Help: "find tool calls also where a request leaves the choice to the model (tool_choice auto)",
	},
	{
		Name: "reasoning-parser", Kind: String, Default: AutoParser, Allowed: reasoningParsers, Placeholder: "auto|none|NAME", Commands: onServe,
		Help: "how the model marks its reasoning, which responses have apart from the content; auto: as its chat template does, none: it is content",
	},
	{
		Name: "api-key", Kind: String, Default: "", Placeholder: "KEY", Secret: true, Commands: onServe,
		Help: "key that clients must send as bearer token; visible in the process list, prefer MOESERVE_API_KEY",
	},
	{
		Name: "allowed-origins", Kind: String, Default: "", Placeholder: "LIST", Commands: onServe,
		Help: `web pages whose scripts may use the server from a browser (CORS): addresses separated by commas, as https://example.com, or *; also as vLLM's JSON list`,
	},
	{
		Name: "allowed-methods", Kind: String, Default: "*", Placeholder: "LIST", Rare: true, Commands: onServe,
		Help: "methods that these scripts may use",
	},
	{
		Name: "allowed-headers", Kind: String, Default: "*", Placeholder: "LIST", Rare: true, Commands: onServe,
		Help: "headers that these scripts may send",
	},
	{
		Name: "allow-credentials", Kind: Bool, Default: false, Rare: true, Commands: onServe,
		Help: "let browsers send cookies with the requests of these scripts; needs --allowed-origins by name",
	},
	{
		Name: "admin-address", Kind: String, Default: "none", Placeholder: "none|same|HOST:PORT", Rare: true, Commands: onServe,
		Help: "address that also serves what acts on the server, such as /sleep and /admin/settings, beside health, metrics and debug; same: that of the API",
	},
	{
		Name: "otlp-traces-endpoint", Kind: String, Default: "", Placeholder: "URL", Rare: true, Commands: onServe,
		Help: "collector of OpenTelemetry that gets a span of each request, by OTLP over HTTP, as http://127.0.0.1:4318/v1/traces; none by default",
	},
	{
		Name: "max-queued-requests", Kind: Int, Default: 256, Unit: "sequences", Min: 1, Max: 1 << 20, Commands: onServe,
		Help: "maximum queued sequences (a request with n=4 has 4); further requests are rejected with status 429",
	},
	{
		Name: "max-request-bytes", Kind: Int, Default: 16 << 20, Unit: "bytes", Min: 1, Max: 1 << 30, Rare: true, Commands: onServe,
		Help: "maximum size of a request's body",
	},
	{
		Name: "request-timeout", Kind: Int, Default: 0, Unit: "seconds", Max: 1 << 20, Commands: onServe,
		Help: "maximum duration of a request; 0: unlimited",
	},
	{
		Name: "drain-timeout", Kind: Int, Default: 30, Unit: "seconds", Max: 1 << 20, Rare: true, Commands: onServe,
		Help: "maximum time that running requests get to finish at shutdown",
	},
	{
		Name: "turn-time", Kind: Float, Default: 10.0, Unit: "seconds", Min: 0.001, Max: 1 << 20, Rare: true, Commands: onServe,
		Help: "of several models: how long one with requests stays awake at least while requests wait for another, and then at most for those that run",
	},
	{
		Name: "max-connections", Kind: Int, Default: 0, Unit: "connections", Max: 1 << 20, Rare: true, Commands: onServe,
		Help: "maximum open connections, of which idle ones make way for new ones; 0: twice the sequences that may run and wait, from 1024 to 16384, as far as open files allow",
	},
	{
		Name: "ssl-certfile", Kind: String, Default: "", Placeholder: "FILE", Path: true, Commands: onServe,
		Help: "serve HTTPS with this certificate and its chain, in PEM",
	},
	{
		Name: "ssl-keyfile", Kind: String, Default: "", Placeholder: "FILE", Path: true, Commands: onServe,
		Help: "private key of --ssl-certfile, in PEM; default: that file has it",
	},
	{
		Name: "num-prompts", Kind: Int, Default: 64, Unit: "requests", Min: 1, Max: 1 << 16, Commands: onBatch,
		Help: "requests of the batch",
	},
	{
		Name: "input-len", Kind: Int, Default: 0, Unit: "tokens", Max: unbounded, Commands: onWorkload,
		Help: "prompt length; 0: as MT-Bench's, 77 on average",
	},
	{
		Name: "output-len", Kind: Int, Default: 32, Unit: "tokens", Min: 2, Max: unbounded, Commands: onWorkload,
		Help: "tokens to generate per request; ends of sequence are ignored",
	},
	{
		Name: "dataset-path", Kind: String, Default: "", Placeholder: "FILE", Path: true, Commands: onBatch,
		Help: "MT-Bench or MT-Bench-101 file, whose first turns are the prompts; default: random tokens of MT-Bench's lengths",
	},
	{
		Name: "warmup-tokens", Kind: Int, Default: 50, Unit: "tokens", Max: unbounded, Rare: true, Commands: onBench,
		Help: "tokens of each request that are generated first and not counted",
	},
	{
		Name: "trials", Kind: Int, Default: 5, Min: 1, Max: 1000, Commands: onBench,
		Help: "measured runs of the batch",
	},
	{
		Name: "prefill-trials", Kind: Int, Default: 0, Max: 1000, Rare: true, Commands: onBench,
		Help: "trials that include prefill, the others reuse its KV cache; 0: all",
	},
	{
		Name: "json", Kind: String, Default: "", Placeholder: "FILE", Path: true, Commands: onResult,
		Help: "write the result as JSON to a file; -: to standard output",
	},
	{
		Name: "trace", Kind: String, Default: "", Placeholder: "FILE", Path: true, Commands: onTrace,
		Help: "write a timeline of steps, kernels and copies for ui.perfetto.dev; FILE.gz is compressed",
	},
	{
		Name: "log-level", Kind: String, Default: "auto", Allowed: logLevelNames, Commands: onDevice,
		Help: "minimum level of log messages, on standard error; auto: info in serve, warn elsewhere",
	},
	{
		Name: "log-format", Kind: String, Default: "text", Allowed: logFormatNames, Rare: true, Commands: onDevice,
		Help: "format of log messages",
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

// Group is the title of the group of Settings that the key is in.
func (k Key) Group() string {
	for group := range reflect.TypeFor[Settings]().Fields() {
		for f := range group.Type.Fields() {
			if f.Tag.Get("mapstructure") == k.Name {
				return group.Tag.Get("title")
			}
		}
	}
	return ""
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
	if k.Numbers != nil {
		if slices.Contains(k.Numbers, int(n)) {
			return ""
		}
		return strings.TrimSpace("must be " + alternatives(k.values()) + " " + k.Unit)
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

// values lists Numbers as text.
func (k Key) values() []string {
	list := make([]string, len(k.Numbers))
	for i, n := range k.Numbers {
		list[i] = strconv.Itoa(n)
	}
	return list
}

// Values lists the values of a setting that has a few: those of Allowed or Numbers; nil: any
// other.
func (k Key) Values() []string {
	if k.Numbers != nil {
		return k.values()
	}
	return k.Allowed
}

func number(f float64) string { return strconv.FormatFloat(f, 'f', -1, 64) }

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
		want := "must be " + alternatives(k.Allowed)
		if value == "gpu" && slices.Contains(k.Allowed, "cuda") {
			want += "; did you mean cuda?"
		} else if near, ok := Nearest(value, k.Allowed); ok {
			want += "; did you mean " + near + "?"
		}
		return want
	}
	return ""
}

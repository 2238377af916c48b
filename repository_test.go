package moeserve_test

import (
	"go/ast"
	"go/parser"
	"go/token"
	"io/fs"
	"maps"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
	"testing"
)

const module = "github.com/moeserve/moeserve"

// imports are the edges between packages of ours: what each imports, and what for. They are
// exact: one that is not here fails the test, and so does one that no file uses. Tests may
// import what they like. What lies in a folder named internal, and a generator in one named
// gen, belongs to the package above. A new package gets a row here, and a place in the table of
// docs/ARCHITECTURE.md.
var imports = map[string]map[string]string{
	"cmd/moeserve": {
		"configs":            "the settings that flags, files and variables fill in",
		"device":             "which memories copies are measured between",
		"device/tenants":     "recordings of memory in use",
		"engine":             "requests of generate and bench, and their updates",
		"eval":               "runs measurements and prints them",
		"eval/compute":       "measures kernels for predictions",
		"eval/fairness":      "measures scheduling policies",
		"eval/kv":            "measures copies of KV blocks",
		"eval/multipath":     "measures copies over several links",
		"eval/paper":         "draws the figures of the Harvest paper",
		"eval/prefix":        "measures what a prompt's KV cache is worth",
		"eval/serving":       "measures a server under load",
		"eval/sleep":         "measures sleep and wake",
		"eval/tenancy":       "measures an engine and another user of a peer",
		"experts":            "tiers and counters in reports",
		"harvest/reclaim":    "asks for borrowed memory, and serves those who ask",
		"models/chat":        "messages of a conversation",
		"models/chat/output": "formats of tool calls and reasoning",
		"node":               "opens what it serves with",
		"node/bench":         "a node as eval measures it",
		"node/checkpoint":    "what is in a model's folder",
		"node/devices":       "which devices there are",
		"node/fault":         "whose fault an error is",
		"node/observe":       "metrics, reports and events of a node",
		"node/planning":      "plan's hardware and workloads",
		"node/sizing":        "sizes as people write them",
		"node/sleeping":      "levels of sleep",
		"node/turns":         "models that take turns",
		"planner":            "policies and what is expected of them",
		"server":             "serves a node",
		"server/spans":       "exports spans of requests",
		"untrusted":          "files that flags name; printable messages",
	},
	"configs": {"untrusted": "names in errors"},
	"device":  {},
	"device/cuda": {
		"device":           "the interfaces it implements",
		"device/cuda/nvml": "what NVML says of health and memory",
	},
	"device/cuda/dylib": {},
	"device/cuda/nvml":  {},
	"device/cuda/nvrtc": {"device/cuda/dylib": "loads NVRTC at run time"},
	"device/devicetest": {"device": "the interfaces it tests"},
	"device/emulated":   {"device": "the interfaces it implements"},
	"device/tenants":    {"device": "whose memory the tenants take, and when"},
	"device/trace":      {"device": "the machine it wraps"},
	"engine": {
		"engine/scheduler": "who is in the next step",
		"kvcache":          "the account of the blocks that sequences have",
		"kvcache/offload":  "what tiers report of loads, and why blocks are stored",
		"models/grammar":   "which tokens may come next",
		"models/tokenizer": "tokens into text, for stop strings",
		"pipeline":         "steps, and what comes of them",
	},
	"engine/scheduler": {},
	"engine/steptime":  {"engine/scheduler": "what a step computes, and the interface that it implements"},
	"eval": {
		"configs":     "the settings that a sweep varies",
		"device":      "copies between its memories",
		"eval/figure": "draws its plots",
		"planner":     "what is expected, beside what was measured",
		"transfer":    "copies through its engine",
		"untrusted":   "limits of files",
	},
	"eval/compute": {
		"eval":    "what a result is of, and nodes that are measured",
		"planner": "what is fitted to the measurements",
	},
	"eval/figure": {},
	"eval/kv": {
		"configs":         "sizes of models' KV entries",
		"device":          "copies between its memories",
		"eval":            "what a result is of",
		"eval/figure":     "draws its plots",
		"kernels":         "the operation that copies blocks",
		"kvcache":         "the pool and the keys of blocks in files",
		"kvcache/offload": "loads from files by the tier in files",
		"planner":         "hardware that a calibration is written as",
		"transfer":        "loads through its engine",
	},
	"eval/multipath": {
		"configs":     "what a calibration is written as",
		"device":      "copies between its memories",
		"eval":        "what a result is of",
		"eval/figure": "draws its plots",
		"planner":     "hardware that a calibration is written as",
		"transfer":    "copies by its engine",
	},
	"eval/prefix": {
		"eval":        "what a result is of, and random prompts",
		"eval/figure": "draws its plots",
		"untrusted":   "names in tables",
	},
	"eval/paper": {
		"configs":        "tiers of results",
		"device":         "machines of a trace",
		"device/tenants": "traces of memory in use",
		"eval":           "the results that it draws",
		"eval/figure":    "draws them",
		"untrusted":      "printable names",
	},
	"eval/tenancy": {
		"configs":     "sizes as people write them",
		"eval":        "what a result is of, and the interface of a node",
		"eval/figure": "draws its plot",
		"untrusted":   "printable names",
	},
	"eval/sleep": {
		"eval":      "what all results have",
		"untrusted": "printable names of models",
	},
	"eval/fairness": {
		"configs":   "names of policies",
		"eval":      "what a result is of, and random prompts",
		"untrusted": "printable names",
	},
	"eval/serving": {"eval": "what a result is of, and random prompts", "untrusted": "errors of JSON"},
	"experts": {
		"device":        "memory, streams and fences",
		"device/trace":  "what a fetch is of, in traces",
		"experts/cache": "state of the expert cache's slots",
		"experts/load":  "weights into the host's memory",
		"harvest":       "peers' memory and its loss",
		"kernels":       "layout of an expert, tables of a layer",
		"peercache":     "copies on peers",
		"lease":         "references to slots",
		"transfer":      "fetches",
	},
	"experts/load": {
		"device":   "staging memory",
		"kernels":  "packs weights",
		"transfer": "copies packed weights",
	},
	"experts/cache": {
		"device": "points that a slot waits for",
		"lease":  "who reads a slot",
	},
	"forward": {
		"device":  "memory and streams",
		"kernels": "the operations it enqueues",
		"models":  "the architecture it runs",
	},
	"harvest": {
		"device": "memory of peers",
		"lease":  "references to what lies there",
	},
	"harvest/reclaim": {"untrusted": "what other processes say, in one line"},
	"kernels":         {"device": "addresses and streams"},
	"kernels/cpu": {
		"device":         "streams that run Go work",
		"kernels":        "the operations it carries out",
		"kernels/philox": "random numbers that all backends have",
	},
	"kernels/cuda": {
		"device":            "memory and streams",
		"device/cuda":       "the context to launch in",
		"device/cuda/dylib": "loads cuBLASLt at run time",
		"device/cuda/nvrtc": "compiles kernels",
		"kernels":           "the operations it carries out",
	},
	"kernels/kernelstest": {
		"device":         "memory of the tensors",
		"kernels":        "the operations it tests",
		"kernels/philox": "what random numbers must be",
	},
	"kernels/philox": {"kernels": "types of elements"},
	"kvcache": {
		"device":  "memory of the pool",
		"kernels": "layout of a block",
	},
	"kvcache/tier":        {"kvcache": "keys and events of blocks"},
	"kvcache/events":      {"kvcache": "events of blocks", "kvcache/events/zmtp": "ZeroMQ's wire protocol"},
	"kvcache/events/zmtp": {},
	"kvcache/offload": {
		"device":       "memory, streams and points",
		"harvest":      "peers, and the loss of their memory",
		"kvcache":      "blocks of the GPU, and keys",
		"kvcache/tier": "the account of each tier's blocks",
		"peercache":    "blocks in peers' memory",
		"transfer":     "copies between the tiers",
	},
	"metrics": {},
	"models": {
		"device":             "memory that weights are loaded into",
		"kernels":            "tensors, and packing them",
		"kernels/philox":     "dummy weights",
		"models/safetensors": "checkpoints",
		"untrusted":          "config.json",
	},
	"models/chat": {
		"models/chat/jinja": "renders templates",
		"untrusted":         "opens their files, and makes their messages printable",
	},
	"models/chat/jinja": {},
	"models/chat/output": {
		"models/grammar":        "which calls there may be",
		"models/grammar/schema": "the arguments of calls",
	},
	"models/grammar":           {},
	"models/grammar/schema":    {"models/grammar": "what schemas become"},
	"models/modelstest":        {},
	"models/safetensors":       {"untrusted": "opens shards; names in errors"},
	"models/safetensors/write": {"models/safetensors": "types of elements"},
	"models/tiny":              {},
	"models/tokenizer":         {"untrusted": "names in errors"},
	"node": {
		"configs":            "its settings",
		"device":             "the machine it runs on",
		"device/trace":       "the batch and the KV cache, in traces",
		"device/tenants":     "plays a trace of other tenants",
		"engine":             "opens, runs and closes it",
		"engine/scheduler":   "its policy, from settings",
		"experts":            "opens and closes the store",
		"forward":            "opens the model's executor",
		"harvest":            "opens and closes it over the peers",
		"harvest/reclaim":    "listens to other processes that need memory",
		"kernels":            "the backend of the devices",
		"kvcache":            "opens the pool and its account",
		"models":             "the model's architecture",
		"node/checkpoint":    "reads and loads the model",
		"node/devices":       "opens machine and backend",
		"node/fault":         "says what an error is about",
		"node/observe":       "reads the state of all parts",
		"node/planning":      "finds a policy",
		"node/sizing":        "makes the memory budget",
		"node/turns":         "a node that takes turns with others",
		"node/sleeping":      "suspends and resumes the memory of a model that sleeps",
		"pipeline":           "opens and closes it",
		"planner":            "problems and policies",
		"rebalancer":         "opens, starts and closes it",
		"rebalancer/lending": "opens and closes it, and gives it to the engine",
		"transfer":           "opens and closes it",
		"untrusted":          "files that settings name",
		"kvcache/events":     "the publisher of KV events",
		"kvcache/offload":    "the tiers of KV blocks",
		"engine/steptime":    "limits prompts in steps that decode, from settings and hardware",
	},
	"node/bench": {
		"configs":         "settings of a run",
		"engine":          "requests that come while others run",
		"eval":            "the interfaces it implements",
		"eval/fairness":   "the interface of an engine that it implements",
		"eval/prefix":     "the interface it implements",
		"eval/sleep":      "the interface it implements",
		"eval/tenancy":    "the interface it implements",
		"experts":         "names of tiers",
		"kvcache":         "tables of the sequences of a step",
		"kvcache/offload": "copies of KV blocks beside a step",
		"node":            "the node it opens",
		"node/devices":    "the driver's version",
		"node/fault":      "errors that are results",
		"node/observe":    "releases of borrowed memory",
		"node/planning":   "rates of the machine",
		"node/sleeping":   "levels of sleep, and how long they took",
		"pipeline":        "steps without an engine",
		"planner":         "what is expected of a run",
	},
	"node/checkpoint": {
		"configs":            "presets, and how to load",
		"device":             "memory that weights are loaded into",
		"experts":            "the store that experts go to",
		"forward":            "the model that all else goes to",
		"kernels":            "types of elements",
		"models":             "architectures and layouts",
		"models/chat":        "the template",
		"models/safetensors": "the files",
		"models/tiny":        "the built-in model",
		"models/tokenizer":   "the tokenizer",
		"node/fault":         "says what an error is about",
		"untrusted":          "the files of a model's folder",
	},
	"node/devices": {
		"configs":          "which devices are asked for",
		"device":           "the machine it gives",
		"device/cuda":      "GPUs",
		"device/cuda/nvml": "readings of GPUs",
		"device/emulated":  "devices without hardware",
		"device/tenants":   "other tenants of emulated devices",
		"device/trace":     "writes what streams do",
		"harvest":          "monitors of peers",
		"kernels":          "the backend it gives",
		"kernels/cpu":      "the backend of emulated devices and the host",
		"kernels/cuda":     "the backend of GPUs",
		"node/fault":       "says what an error is about",
		"node/sizing":      "sizes as people read them",
	},
	"node/fault": {"device": "errors of devices"},
	"node/observe": {
		"device":             "names of memories",
		"engine":             "its state",
		"engine/scheduler":   "what a step computed, for predictions",
		"experts":            "its statistics and events",
		"harvest":            "its state and events",
		"metrics":            "what a collector has",
		"node/sleeping":      "levels of sleep",
		"pipeline":           "its statistics",
		"rebalancer":         "its statistics",
		"rebalancer/lending": "its statistics",
		"transfer":           "its statistics",
		"kvcache/events":     "counters of the publisher of KV events",
		"kvcache/offload":    "counters of the tiers of KV blocks",
	},
	"node/planning": {
		"configs":         "settings that a policy fills in",
		"device":          "rates of links and memories",
		"experts":         "placements",
		"kernels":         "types of elements, and the operation that copies blocks",
		"models":          "sizes of a model's parts",
		"node/checkpoint": "the model that is planned for",
		"node/fault":      "says what an error is about",
		"node/sizing":     "what an engine takes of which memory",
		"pipeline":        "which steps fetch on demand or read in place",
		"planner":         "the search",
		"transfer":        "when a copy is split between links, and where a kernel makes it",
		"untrusted":       "files of policies and hardware",
	},
	"node/sizing": {
		"configs":         "settings",
		"device":          "names of memories",
		"experts":         "what the store takes",
		"forward":         "what the workspace takes",
		"harvest":         "what peers keep free",
		"kernels":         "sizes of elements",
		"kvcache":         "what a block takes",
		"models":          "what weights take",
		"node/checkpoint": "what loading takes",
		"pipeline":        "what steps take",
		"planner":         "the sizes that it plans with",
	},
	"node/turns": {},
	"node/sleeping": {
		"device":   "memory that is suspended",
		"transfer": "copies of weights to host memory and back",
	},
	"peercache": {
		"device":   "peers and points",
		"harvest":  "memory there",
		"transfer": "copies into it",
	},
	"pipeline": {
		"configs":      "how a step's work is grouped",
		"device":       "streams and points",
		"device/trace": "what operations are about, in traces",
		"experts":      "experts of a layer, when they are there",
		"forward":      "the stages of a layer",
		"kernels":      "the backend of an executor",
		"kvcache":      "blocks of the sequences",
		"models":       "the architecture it runs",
	},
	"planner": {"configs": "presets of hardware, and what policies say", "untrusted": "errors of JSON"},
	"rebalancer": {
		"device":  "peers, and the clock",
		"experts": "what is moved, and how often it is used",
		"harvest": "room on peers",
	},
	"rebalancer/lending": {
		"device":     "memory of extents",
		"experts":    "places in lent memory",
		"harvest":    "estimates of use, and the time that worth is counted over",
		"kvcache":    "extents of KV blocks, and how they are used",
		"rebalancer": "what memory is worth to experts",
	},
	"lease": {"device": "points at which a reference ends"},
	"server": {
		"engine":                "requests and their updates",
		"metrics":               "counts requests, and writes what was counted",
		"models/chat":           "messages into a prompt",
		"models/chat/output":    "completions into reasoning, content and tool calls",
		"models/grammar":        "what completions are constrained to",
		"models/grammar/schema": "JSON schemas of completions and tools",
		"models/tokenizer":      "text into tokens",
		"server/page":           "the page of the admin address",
		"untrusted":             "printable messages",
	},
	"server/page": {},
	"server/spans": {
		"server":    "the requests that it exports",
		"untrusted": "files of certificates; printable messages",
	},
	"server/spans/spanstest": {},
	"tools/bigcheckpoint": {
		"configs":                  "presets",
		"kernels":                  "types of elements",
		"models":                   "dummy weights",
		"models/safetensors":       "types of elements in files",
		"models/safetensors/write": "writes the files",
	},
	"tools/fixtures":     {"models/safetensors": "reads what the reference has computed"},
	"tools/racedetector": {},
	"transfer": {
		"device":            "streams and links",
		"device/trace":      "what copies are of, in traces",
		"transfer/dispatch": "which chunk goes over which link",
	},
	"transfer/dispatch": {"device": "spaces and points"},
	"transfer/dispatch/simulation": {
		"device":            "spaces of the simulated machine",
		"transfer":          "the engine's default options",
		"transfer/dispatch": "the core that copies on it",
	},
	"untrusted": {},
}

// onlyIn confines packages of others: the path's prefix, who may import it, why.
var onlyIn = []struct {
	path string
	pkgs []string
	why  string
}{
	{"github.com/spf13/", []string{"cmd/moeserve"}, "configuration is decoded once, in cmd/, into plain structs"},
	{"golang.org/x/image", []string{"eval/figure"}, "pictures are figure's"},
	{"codeberg.org/go-fonts", []string{"eval/figure"}, "pictures are figure's"},
	{"github.com/moeserve/moeserve/metrics", []string{"server", "node/observe"}, "the parts' metrics are collected in observe, those of requests in server"},
	{"go.opentelemetry.io/", []string{"server/spans"}, "one interface of the server stands before it"},
	{"net/http", []string{"server", "eval/serving", "harvest/reclaim", "cmd/moeserve"}, "HTTP is the server's, of the client that measures servers, and of processes that ask each other for memory"},
	{"gorgonia.org/cu", []string{"device/cuda"}, "the driver is device/cuda's"},
	{"github.com/NVIDIA/go-nvml", []string{"device/cuda"}, "readings are device/cuda's"},
	{"github.com/sugarme/tokenizer", []string{"models/tokenizer"}, "one small interface stands before it"},
	{"C", []string{"device/cuda", "kernels/cuda"}, "without the cuda tag the product needs nothing but Go"},
	{"github.com/moeserve/moeserve/device/emulated", []string{"node", "device/emulated"}, "node alone picks between emulated and cuda"},
	{"github.com/moeserve/moeserve/kernels/cpu", []string{"node/devices", "kernels/cpu"}, "node alone picks the backend"},
}

// linked are the modules of others that are compiled into the command, and what for. All of them are
// compiled before the first answer of go run on a new machine, and so are the packages of the
// standard library that they bring. They are exact, as imports is. What only tests use is not here.
var linked = map[string]string{
	"codeberg.org/go-fonts/liberation":    "the font of PNG pictures (eval/figure)",
	"github.com/cespare/xxhash/v2":        "of OpenTelemetry's SDK",
	"github.com/cpuguy83/go-md2man/v2":    "of cobra: manual pages",
	"github.com/fsnotify/fsnotify":        "of viper",
	"github.com/go-logr/logr":             "of OpenTelemetry's SDK; its log",
	"github.com/go-logr/stdr":             "of OpenTelemetry's SDK",
	"github.com/go-viper/mapstructure/v2": "of viper; values that read themselves from text",
	"github.com/google/uuid":              "of OpenTelemetry's SDK",
	"github.com/klauspost/cpuid/v2":       "of xxh3",
	"github.com/mitchellh/colorstring":    "of progressbar/v2",
	"github.com/pelletier/go-toml/v2":     "of viper",
	"github.com/rivo/uniseg":              "of sugarme/tokenizer and progressbar/v2",
	"github.com/russross/blackfriday/v2":  "of go-md2man",
	"github.com/sagikazarmark/locafero":   "of viper",
	"github.com/schollz/progressbar/v2":   "of sugarme/tokenizer",
	"github.com/sourcegraph/conc":         "of viper",
	"github.com/spf13/afero":              "of viper",
	"github.com/spf13/cast":               "of viper",
	"github.com/spf13/cobra":              "commands, their help and completion",
	"github.com/spf13/pflag":              "flags, of cobra",
	"github.com/spf13/viper":              "settings from flags, variables and a file",
	"github.com/subosito/gotenv":          "of viper",
	"github.com/sugarme/regexpset":        "of sugarme/tokenizer",
	"github.com/sugarme/tokenizer":        "the types of a tokenizer.json, the characters of byte-level tokens",
	"github.com/vmihailenco/msgpack/v5":   "KV events as MessagePack",
	"github.com/vmihailenco/tagparser/v2": "of msgpack",
	"github.com/x448/float16":             "FP16 and its rounding",
	"github.com/zeebo/xxh3":               "the checksum of KV blocks in files",
	"go.opentelemetry.io/auto/sdk":        "of OpenTelemetry's SDK",
	"go.opentelemetry.io/otel":            "spans of requests (server/spans), with traceparent of clients",
	"go.opentelemetry.io/otel/log":        "of OpenTelemetry's SDK",
	"go.opentelemetry.io/otel/metric":     "of OpenTelemetry's SDK",
	"go.opentelemetry.io/otel/sdk":        "batches, samples and describes spans",
	"go.opentelemetry.io/otel/trace":      "the interface of spans",
	"go.yaml.in/yaml/v3":                  "of viper; the configuration file, with line numbers for errors",
	"golang.org/x/image":                  "draws PNG pictures (eval/figure)",
	"golang.org/x/sync":                   "goroutines that load, and the first error of them",
	"golang.org/x/sys":                    "mapped files, CPU affinity, memory sizes",
	"golang.org/x/term":                   "whether a person watches, and the width of the terminal",
	"golang.org/x/text":                   "Unicode normalization of the tokenizer, case mappings of templates; of viper",
}

// linkedPackages is how many packages these modules have in the command.
const linkedPackages = 113

// opens are the functions that open a file for reading, or a folder whose files they open. Package
// untrusted stands before them: see TestFilesAreOpenedBounded.
var opens = []string{"os.Open", "os.OpenFile", "os.ReadFile", "os.DirFS", "os.OpenRoot", "tls.LoadX509KeyPair", "http.ServeFile", "http.Dir", "syscall.Open", "unix.Open"}

// opensItself are the files that may open files without package untrusted, and why.
var opensItself = map[string]string{
	"cmd/moeserve/collectenv.go":   "reads /proc, by names of its own",
	"cmd/moeserve/output.go":       "writes results, also to pipes and devices, which users ask for",
	"device/cuda/memory.go":        "reads /proc and /sys, by names of its own",
	"device/cuda/nvrtc/cache.go":   "reads what it has written, and checks its sum",
	"device/cuda/topology.go":      "reads /proc and /sys, by names of its own",
	"kvcache/offload/folder.go":    "reads what it has written, in a folder of its own, and checks its sum",
	"kvcache/offload/lock.go":      "reads /proc, by a name of its own, and locks that it finds in folders of its own",
	"eval/kv/pagecache.go":         "opens what it has had written, in a folder with keys of its own, and reads nothing",
	"eval/kv/rawfiles.go":          "reads what it has had written, in a folder with keys of its own, for the time that it takes",
	"eval/journal.go":              "reads and writes one file, once it has seen that it is a regular one",
	"metrics/process.go":           "reads /proc, by names of its own",
	"node/devices/memory_linux.go": "reads /proc, by a name of its own",
	"untrusted/file.go":            "opens for everybody",
}

// row is the package in whose row pkg counts.
func row(pkg string) string {
	pkg, _, _ = strings.Cut(pkg, "/internal/")
	return strings.TrimSuffix(pkg, "/gen")
}

func within(pkg, dir string) bool { return pkg == dir || strings.HasPrefix(pkg, dir+"/") }

// source is a file of the product.
type source struct {
	path string
	pkg  string // its folder
	file *ast.File
}

// sources are the product's files with their comments and imports, whatever their build tags.
func sources(t *testing.T) []source {
	t.Helper()
	var all []source
	err := filepath.WalkDir(".", func(path string, d fs.DirEntry, err error) error {
		if err != nil {
			return err
		}
		if d.IsDir() && path != "." && (strings.HasPrefix(d.Name(), ".") || d.Name() == "testdata" || d.Name() == "build") {
			return fs.SkipDir
		}
		if _, err := os.Stat(filepath.Join(path, "go.mod")); d.IsDir() && path != "." && err == nil {
			return fs.SkipDir // a module of its own
		}
		if d.IsDir() || !strings.HasSuffix(path, ".go") || strings.HasSuffix(path, "_test.go") {
			return nil
		}
		f, err := parser.ParseFile(token.NewFileSet(), path, nil, parser.ImportsOnly|parser.ParseComments)
		if err != nil {
			return err
		}
		all = append(all, source{path, filepath.ToSlash(filepath.Dir(path)), f})
		return nil
	})
	if err != nil {
		t.Fatal(err)
	}
	if len(all) < 20 {
		t.Fatalf("read %d files: the walk has lost the tree", len(all))
	}
	return all
}

func TestImports(t *testing.T) {
	type edge struct{ from, to string }
	used, there := map[edge]bool{}, map[string]bool{}
	for _, s := range sources(t) {
		from := row(s.pkg)
		there[from] = true
		targets, ok := imports[from]
		if !ok {
			t.Errorf("%s: package %s has no row in the table of imports", s.path, from)
			continue
		}
		for _, imp := range s.file.Imports {
			name := strings.Trim(imp.Path.Value, `"`)
			for _, o := range onlyIn {
				if strings.HasPrefix(name, o.path) && (o.path != "C" || name == "C") &&
					!slices.ContainsFunc(o.pkgs, func(p string) bool { return within(s.pkg, p) }) &&
					!strings.HasSuffix(s.pkg, "test") {
					t.Errorf("%s imports %s: only %v may: %s", s.path, name, o.pkgs, o.why)
				}
			}
			to, ours := strings.CutPrefix(name, module+"/")
			if to = row(to); !ours || to == from {
				continue
			}
			if used[edge{from, to}] = true; targets[to] == "" {
				t.Errorf("%s imports %s: the table has no such edge with a reason; %s imports %v", s.path, to, from, slices.Sorted(maps.Keys(targets)))
			}
		}
	}
	for from, targets := range imports {
		if !there[from] {
			t.Errorf("the table of imports has a row for %s, and there is no such package", from)
		}
		for to := range targets {
			if !used[edge{from, to}] {
				t.Errorf("the table says that %s imports %s, and it does not", from, to)
			}
		}
	}
}

// TestLinked holds the command to the modules in the table: a new one is thought about before
// everybody compiles it.
func TestLinked(t *testing.T) {
	list := exec.CommandContext(t.Context(), "go", "list", "-deps", "-f", "{{if not .Standard}}{{.Module.Path}}{{end}}", "./cmd/moeserve")
	list.Env = append(os.Environ(), "GOOS=linux", "GOARCH=amd64", "CGO_ENABLED=0") // as the table
	list.Stderr = os.Stderr
	out, err := list.Output()
	if err != nil {
		t.Fatal(err)
	}
	if _, err := os.Stat("go.mod"); err != nil { // what go test goes by when it caches this result
		t.Fatal(err)
	}
	packages := map[string]int{}
	n := 0
	for _, m := range strings.Fields(string(out)) {
		if m == module {
			continue
		}
		packages[m]++
		n++
		if linked[m] == "" {
			t.Errorf("the command links %s: the table of linked modules has no reason for it", m)
		}
	}
	for m := range linked {
		if packages[m] == 0 {
			t.Errorf("the table says that the command links %s, and it does not", m)
		}
	}
	if n != linkedPackages {
		t.Errorf("the command links %d packages of others, and linkedPackages is %d: %v", n, linkedPackages, packages)
	}
}

// TestFilesAreOpenedBounded: files that users name are opened by package untrusted alone, which
// waits for no pipe, opens no device and reads no more than a limit. Tools for developers and
// generators may open theirs as they like.
func TestFilesAreOpenedBounded(t *testing.T) {
	used := map[string]bool{}
	for _, s := range sources(t) {
		if strings.HasPrefix(s.path, "tools/") || strings.HasSuffix(s.pkg, "/gen") || strings.HasSuffix(s.pkg, "test") {
			continue
		}
		set := token.NewFileSet()
		file, err := parser.ParseFile(set, s.path, nil, 0)
		if err != nil {
			t.Fatal(err)
		}
		ast.Inspect(file, func(n ast.Node) bool {
			sel, ok := n.(*ast.SelectorExpr)
			if !ok {
				return true
			}
			pkg, ok := sel.X.(*ast.Ident)
			if !ok || !slices.Contains(opens, pkg.Name+"."+sel.Sel.Name) {
				return true
			}
			if used[s.path] = true; opensItself[s.path] == "" {
				t.Errorf("%s: %s.%s: open the file by package untrusted, or give a reason in opensItself", set.Position(n.Pos()), pkg.Name, sel.Sel.Name)
			}
			return true
		})
	}
	for path := range opensItself {
		if !used[path] {
			t.Errorf("opensItself has a reason for %s, which opens no file", path)
		}
	}
}

// TestArchitecture: the table in docs/ARCHITECTURE.md leads to every package of the product.
func TestArchitecture(t *testing.T) {
	text, err := os.ReadFile("docs/ARCHITECTURE.md")
	if err != nil {
		t.Fatal(err)
	}
	_, table, _ := strings.Cut(string(text), "| package | what it is |")
	table, _, _ = strings.Cut(table, "\n\n")
	for pkg := range imports {
		if !strings.HasPrefix(pkg, "tools/") && !strings.Contains(table, "](../"+pkg+")") {
			t.Errorf("the table of packages in docs/ARCHITECTURE.md has no %s", pkg)
		}
	}
}

// TestEveryPackageSaysWhatItIs, in its doc.go, a command in its main.go; where there is one file
// only, in that.
func TestEveryPackageSaysWhatItIs(t *testing.T) {
	files := map[string][]source{}
	for _, s := range sources(t) {
		if _, ok := imports[s.pkg]; ok {
			files[s.pkg] = append(files[s.pkg], s)
		}
	}
	for pkg, all := range files {
		name, begins := "doc.go", "Package "+filepath.Base(pkg)
		if all[0].file.Name.Name == "main" {
			name, begins = "main.go", "Command "+filepath.Base(pkg)
		}
		if i := slices.IndexFunc(all, func(s source) bool { return filepath.Base(s.path) == name }); i >= 0 {
			all[0] = all[i]
		} else if len(all) > 1 {
			t.Errorf("package %s has no %s", pkg, name)
		}
		if s := all[0]; !strings.HasPrefix(s.file.Doc.Text(), begins) {
			t.Errorf("the comment on the package in %s does not begin with %q", s.path, begins)
		}
	}
}

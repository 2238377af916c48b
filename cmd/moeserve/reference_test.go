package main

import (
	"encoding/json"
	"fmt"
	"go/ast"
	"go/parser"
	"go/token"
	"io"
	"maps"
	"os"
	"path/filepath"
	"reflect"
	"regexp"
	"slices"
	"strconv"
	"strings"
	"testing"

	"github.com/spf13/cobra"
	"github.com/spf13/pflag"

	"github.com/moeserve/moeserve/configs"
	"github.com/moeserve/moeserve/node/devices"
	"github.com/moeserve/moeserve/planner"
	"github.com/moeserve/moeserve/tools/fixtures"
	"github.com/moeserve/moeserve/tools/racedetector"
)

// The pages of docs/reference are generated: from the schema of settings, the commands, the
// metrics that a server exports, the types of results, the exit codes, and what mistakes get
// for an answer. -update writes them.

const generated = "<!-- Generated: go test ./cmd/moeserve -run Reference -update -->\n"

// reference compares a page of docs/reference with what it should be; -update writes it.
func reference(t *testing.T, name, title, readers, text string) {
	t.Helper()
	text = "# " + title + "\n\n*For " + readers + ".*\n\n" + generated + "\n" + strings.TrimSpace(text) + "\n"
	path := filepath.Join("..", "..", "docs", "reference", name)
	if *update {
		if err := os.WriteFile(path, []byte(text), 0o666); err != nil {
			t.Fatal(err)
		}
		return
	}
	had, err := os.ReadFile(path)
	if err != nil {
		t.Fatal(err)
	}
	if string(had) == text {
		return
	}
	old, want := strings.Split(string(had), "\n"), strings.Split(text, "\n")
	for i := range max(len(old), len(want)) {
		if i >= len(old) || i >= len(want) || old[i] != want[i] {
			t.Fatalf("%s is not what the code says, from line %d on:\n%s\nwant\n%s\n(go test ./cmd/moeserve -run Reference -update writes it)",
				path, i+1, strings.Join(old[min(i, len(old)):min(i+3, len(old))], "\n"), strings.Join(want[min(i, len(want)):min(i+3, len(want))], "\n"))
		}
	}
}

// cell is text in a table.
func cell(text string) string {
	return strings.ReplaceAll(strings.Join(strings.Fields(text), " "), "|", `\|`)
}

// settingGroups are the groups of configs.Settings, with their headings.
var settingGroups = map[string]string{
	"Model": "Model", "Device": "Devices and memory", "Offload": "Offloading", "Harvest": "Peer memory", "KV": "KV cache", "Batch": "Batching",
	"Kernels": "Kernels", "Plan": "Planning", "Generate": "Generation", "Serve": "Server", "Bench": "Benchmarks", "Output": "Output",
}

func TestReferenceSettings(t *testing.T) {
	var b strings.Builder
	b.WriteString(`Each setting is a flag, a variable and a key of a YAML file: ` + "`--max-num-seqs`, `MOESERVE_MAX_NUM_SEQS`, `max-num-seqs`" + `.
A flag goes before a variable, a variable before the file, the file before a [policy](../guide/planning.md), and that before the default.
The file is ` + "`--config FILE`, else `moeserve.yaml`" + ` in the current directory. A key or variable that moeserve does not know is an error.
` + "`moeserve config`" + ` prints the effective configuration and its sources.
`)
	byName := map[string]configs.Key{}
	for _, k := range configs.Schema {
		byName[k.Name] = k
	}
	groups := reflect.TypeFor[configs.Settings]()
	for i := range groups.NumField() {
		g := groups.Field(i)
		if settingGroups[g.Name] == "" {
			t.Errorf("settingGroups has no heading for %s", g.Name)
		}
		fmt.Fprintf(&b, "\n## %s\n\n| setting | default | commands | what it does |\n|---|---|---|---|\n", settingGroups[g.Name])
		for j := range g.Type.NumField() {
			k, ok := byName[g.Type.Field(j).Tag.Get("mapstructure")]
			if !ok {
				t.Fatalf("the schema has no setting for %s.%s", g.Name, g.Type.Field(j).Name)
			}
			b.WriteString(settingRow(k))
		}
	}
	b.WriteString("\n## Flags of single commands\n\n| command | what it does | flags of its own |\n|---|---|---|\n")
	for _, c := range commandsBelow(newRoot(&streams{})) {
		var own []string
		c.NonInheritedFlags().VisitAll(func(f *pflag.Flag) {
			if _, setting := byName[f.Name]; !setting && f.Name != "help" && f.Name != configFlag && !f.Hidden {
				own = append(own, fmt.Sprintf("`--%s`: %s", f.Name, cell(f.Usage)))
			}
		})
		// Commands with many flags have several rows.
		const most = 9
		name, short := c.CommandPath(), cell(c.Short)
		for flags := range slices.Chunk(own, most) {
			fmt.Fprintf(&b, "| `%s` | %s | %s |\n", name, short, strings.Join(flags, "<br>"))
			short = "(more flags)"
		}
	}
	b.WriteString("\n## `--emulate`\n\nThe value is a list of settings of emulated devices, with commas between them:\n\n```text\n" + strings.Trim(devices.EmulateHelp, "\n") + "\n```\n")
	reference(t, "settings.md", "Settings", "everybody who runs moeserve: every flag, variable and key of a configuration file", b.String())
}

func settingRow(k configs.Key) string {
	def := ""
	if k.Default != "" {
		def = fmt.Sprintf("`%v`", k.Default)
		if k.Unit != "" {
			def += " " + k.Unit
		}
	}
	help := k.Help
	if values := k.Values(); values != nil {
		help += "; one of `" + strings.Join(values, "`, `") + "`"
	}
	var on []string
	for _, c := range k.Commands {
		if c != "config" {
			on = append(on, c)
		}
	}
	flag := "`--" + k.Name + "`"
	if k.Short != "" {
		flag = "`-" + k.Short + "`, " + flag
	}
	return fmt.Sprintf("| %s | %s | %s | %s |\n", flag, def, strings.Join(on, ", "), cell(help))
}

// commandsBelow lists the commands that run something.
func commandsBelow(c *cobra.Command) []*cobra.Command {
	var all []*cobra.Command
	for _, c := range c.Commands() {
		if c.Hidden {
			continue
		}
		if below := commandsBelow(c); len(below) > 0 {
			all = append(all, below...)
		} else {
			all = append(all, c)
		}
	}
	return all
}

func TestReferencePresets(t *testing.T) {
	racedetector.SkipSequential(t)
	var b strings.Builder
	b.WriteString("A preset is a published model's configuration, for `--model`. It has no weights and no tokenizer. `inspect` and `plan` need no more;\n" +
		"`--load-format dummy` fills its shapes with seeded random weights, and `--num-hidden-layers` cuts it to what fits.\n\n" + presetsTable(t))
	b.WriteString("\n## Hardware\n\n`--hardware` takes one of these profiles, or a [hardware file](json.md#hardware-file).\nThe source of each figure is below the table.\n\n" +
		"| profile | GPU memory, GB | read rate, GB/s | GEMM, TFLOP/s | host link, GB/s | peer link, GB/s |\n|---|---|---|---|---|---|\n")
	var sources strings.Builder
	for _, name := range configs.HardwareNames() {
		h, err := planner.HardwarePreset(name)
		if err != nil {
			t.Fatal(err)
		}
		giga := func(v float64) string {
			if v == 0 {
				return "–"
			}
			return strconv.FormatFloat(v/1e9, 'g', 4, 64)
		}
		fmt.Fprintf(&b, "| `%s` | %s | %s | %.4g | %s | %s |\n", name, giga(float64(h.GPUMemory)), giga(h.GPUMemoryRate), h.GPUFlops/1e12, giga(h.HostToGPU[0]), giga(h.PeerToGPU))
		fmt.Fprintf(&sources, "\n### `%s`\n\n| figure | source |\n|---|---|\n", name)
		for _, key := range slices.Sorted(maps.Keys(h.Sources)) {
			fmt.Fprintf(&sources, "| `%s` | %s |\n", key, cell(h.Sources[key]))
		}
	}
	reference(t, "presets.md", "Models and hardware that moeserve knows", "everybody who plans or measures: model presets and hardware profiles, each figure with its source", b.String()+sources.String())
}

func TestReferenceMetrics(t *testing.T) {
	p := startServe(t, "--emulate", "hbm=256MiB", "--offload-fraction", "0.5", "--offload-tier", "peer",
		"--kv-experts-share", "auto", "--max-model-len", "128",
		"--kv-transfer-config", `{"kv_connector_extra_config": {"num_gpu_blocks": 64, "num_cpu_blocks": 64, "num_file_blocks": 64, "directory": "`+t.TempDir()+`"}}`,
		"--kv-events-config", `{"enable_kv_cache_events": true, "publisher": "null"}`)
	if _, err := io.ReadAll(p.post(t, "/v1/completions", `{"prompt": "sort: t h e m o e =", "temperature": 0}`).Body); err != nil {
		t.Fatal(err)
	}
	type metric struct {
		help, kind string
		labels     map[string]map[string]bool
	}
	all := map[string]*metric{}
	of := func(name string) *metric {
		if all[name] == nil {
			all[name] = &metric{labels: map[string]map[string]bool{}}
		}
		return all[name]
	}
	about := regexp.MustCompile(`^# (HELP|TYPE) (\S+) (.*)\n$`)
	sample := regexp.MustCompile(`^([a-zA-Z0-9_:]+)\{(.*)\} `)
	label := regexp.MustCompile(`(\w+)="((?:[^"\\]|\\.)*)"`)
	var switches strings.Builder // which only a server with several models has
	both := startServe(t, "--model", "built-in", "--model", fixtures.Dir(t, fixtures.Names(t)[0]), "--emulate", "hbm=256MiB")
	for line := range strings.Lines(both.get(t, "/metrics")) {
		if strings.Contains(line, "moeserve_model_switch") {
			switches.WriteString(line)
		}
	}
	for line := range strings.Lines(p.get(t, "/metrics") + switches.String()) {
		if m := about.FindStringSubmatch(line); m != nil && m[1] == "HELP" {
			of(m[2]).help = m[3]
		} else if m != nil {
			of(m[2]).kind = m[3]
		} else if m := sample.FindStringSubmatch(line); m != nil {
			name := regexp.MustCompile(`_(bucket|sum|count)$`).ReplaceAllString(m[1], "")
			if all[name] == nil {
				name = m[1]
			}
			for _, l := range label.FindAllStringSubmatch(m[2], -1) {
				if l[1] == "le" {
					continue
				}
				if of(name).labels[l[1]] == nil {
					of(name).labels[l[1]] = map[string]bool{}
				}
				of(name).labels[l[1]][l[2]] = true
			}
		}
	}
	rows := func(prefix string) string {
		var b strings.Builder
		b.WriteString("| metric | type | labels | meaning |\n|---|---|---|---|\n")
		for _, name := range slices.Sorted(maps.Keys(all)) {
			m := all[name]
			if !strings.HasPrefix(name, prefix) {
				continue
			}
			var labels []string
			for _, l := range slices.Sorted(maps.Keys(m.labels)) {
				values := slices.Sorted(maps.Keys(m.labels[l]))
				if slices.Equal(values, []string{""}) {
					values[0] = "empty"
				}
				switch l {
				case "model_name", "block_size", "num_gpu_blocks": // differ from server to server
					labels = append(labels, "`"+l+"`")
				default:
					labels = append(labels, "`"+l+"`: "+strings.Join(values, ", "))
				}
			}
			fmt.Fprintf(&b, "| `%s` | %s | %s | %s |\n", name, m.kind, strings.Join(labels, "; "), cell(m.help))
		}
		return b.String()
	}
	reference(t, "metrics.md", "Metrics", "operators: what `/metrics` of a server exports for Prometheus",
		"Labels show the values of a server with two emulated peers.\nUnits are in the names. Metrics of the Go runtime and of the process (`go_*`, `process_*`, `promhttp_*`) are those of Prometheus' client.\n\n"+
			"## Requests, as vLLM names them\n\n"+rows("vllm:")+"\n## Experts, links, memory and steps\n\n"+rows("moeserve_"))
}

func TestReferenceJSON(t *testing.T) {
	r, used := &typeReader{t: t, pkgs: map[string]*parsedPackage{}}, map[string]bool{}
	var b strings.Builder
	b.WriteString("A path shows where a field is: `a.b` is field b of object a, `a[]` an element of array a, `a.*` a value of object a.\n" +
		"Units are in the names where there is one. Words are those of the [glossary](../GLOSSARY.md).\n" +
		"`--csv` of `bench` writes the same names as columns.\n")
	for _, x := range []struct{ page, title, intro, dir, name string }{
		{"run", "run --json", "One object for a completion. Where `--json` is not given the report prints the same numbers.", "cmd/moeserve", "runResult"},
		{"plan", "plan --json", "One object for a plan. `--policy` reads it.", "cmd/moeserve", "planResult"},
		{"inspect", "inspect --json", "One object for a model and a machine.", "cmd/moeserve", "inspectResult"},
		{"throughput", "bench throughput --json, bench sweep --json", "`bench throughput` writes one object, `bench sweep` and `bench figure` 5 and 6 an array with one for each fraction and tier.", "eval", "Result"},
		{"transfer", "bench transfer --json", "One object for a measurement of copies; `bench figure 3` writes the same.", "cmd/moeserve", "transferResult"},
		{"multipath", "bench multipath --json, bench transfer --links --json", "One object for a measurement of copies over several links, with a field for each part.", "eval/multipath", "Result"},
		{"kv", "bench kv --json", "One object for a measurement of loads of KV blocks, or with `--copy-method` of copies by block size.", "eval/kv", "Result"},
		{"kernels", "bench kernels --json", "One object for a measurement of what the engine reaches on a GPU.", "eval/compute", "Result"},
		{"predict", "bench predict --json", "One object for measured steps beside their predictions.", "eval", "Predictions"},
		{"prefix", "bench prefix --json", "One object for a measurement of what a prompt's KV cache is worth.", "eval/prefix", "Result"},
		{"fairness", "bench fairness --json", "One object for a measurement of scheduling policies.", "eval/fairness", "Result"},
		{"sleep", "bench sleep --json", "One object for a measurement of sleep and wake.", "eval/sleep", "Result"},
		{"memories", "bench figure 2 --json", "One object for the distribution of GPU memory in use.", "cmd/moeserve", "memories"},
		{"harvest", "bench harvest --json", "One object for a measurement of an engine and a tenant, another user of the peer that it borrows from.", "eval/tenancy", "Result"},
		{"residency", "/debug/residency", "`GET /debug/residency` of a server: where every expert is now, what is borrowed of each peer, and where KV blocks are. `GET /debug/kv` has the object `kv` alone.", "node/observe", "Residency"},
		{"turns", "/debug/turns", "`GET /debug/turns` of a server with several models: which is awake, and what waits for each.", "node/turns", "State"},
		{"settings", "/admin/settings: state", "`GET /admin/settings` of a server has, beside [the settings that can change](api.md#settings-of-a-running-server), the object `state`: how many experts are offloaded now, and how many are to be.", "cmd/moeserve", "liveState"},
		{"node", "/debug/node", "`GET /debug/node` of a server: `model`, its name; `version` of the server; `since` when the model is loaded; `max_model_len`; and, as the object `now`, what the node is doing.", "node/observe", "Now"},
		{"events", "/debug/events", "`GET /debug/events` of a server streams one object for each allocation, revocation and move (server-sent events). Fields that say nothing of an event are absent.", "node/observe", "Event"},
		{"steps", "/debug/events: engine.step", "The same stream has one object for each step. Stalls, links, fetches and experts are those since the step before; the first one that is streamed has none.", "node/observe", "Step"},
		{"hardware", "Hardware file", "`--hardware FILE` reads it, `bench transfer --calibrate FILE`, `bench kernels --calibrate FILE` and `bench kv --calibrate FILE` write it. `\"base\": \"PROFILE\"` takes what is absent from a [profile](presets.md#hardware).", "planner", "Hardware"},
		{"policy", "Policy file", "`--policy FILE` reads an object with these fields, or one that has it as `policy`, as `plan --json` writes. `batch` and `resident_experts` are required.", "planner", "Policy"},
	} {
		fmt.Fprintf(&b, "\n## %s\n\n%s\n\n%s", x.title, x.intro, fieldTable(t, r, x.page, x.dir, x.name, used))
	}
	for key := range fieldDocs {
		if !used[key] {
			t.Errorf("fieldDocs defines %s, and no result has it", key)
		}
	}
	reference(t, "json.md", "JSON", "those who read results by program: each field of what moeserve writes, with its unit and definition", b.String())
}

// exitCodeDocs say what each exit code means, by the constant's name.
var exitCodeDocs = map[string][2]string{
	"exitDone":        {"done", "for `serve`: ended by a signal, after running requests had finished or `--drain-timeout` had passed"},
	"exitFailed":      {"failed while running; `inspect`: the model does not fit", "read the message; a step or a file failed, or memory is insufficient"},
	"exitUsage":       {"usage: command line, configuration, prompt, or insufficient memory", "the message names the setting and what to change"},
	"exitModel":       {"model", "the checkpoint cannot be read, or its architecture is not supported"},
	"exitDevice":      {"device", "no usable GPU, or a GPU was lost"},
	"exitInterrupted": {"interrupted", "Ctrl-C or SIGTERM before the end (128 + SIGINT)"},
}

func TestReferenceExitCodes(t *testing.T) {
	f, err := parser.ParseFile(token.NewFileSet(), "main.go", nil, 0)
	if err != nil {
		t.Fatal(err)
	}
	var b strings.Builder
	b.WriteString("Errors are one line on standard error: `moeserve: ` and what is wrong. [errors.md](errors.md) has examples. A command that fails leaves no result file behind, with two exceptions: a benchmark that was interrupted or failed leaves what it had measured by then (`--json`, `--csv`, `--resume`), and a trace stays as far as it was written.\n\n" +
		"| exit code | meaning | what to do |\n|---|---|---|\n")
	found := 0
	ast.Inspect(f, func(n ast.Node) bool {
		v, ok := n.(*ast.ValueSpec)
		if !ok || len(v.Values) != 1 || !strings.HasPrefix(v.Names[0].Name, "exit") {
			return true
		}
		found++
		doc, ok := exitCodeDocs[v.Names[0].Name]
		if !ok {
			t.Errorf("exitCodeDocs does not say what %s means", v.Names[0].Name)
		}
		fmt.Fprintf(&b, "| %s | %s | %s |\n", v.Values[0].(*ast.BasicLit).Value, doc[0], doc[1])
		return true
	})
	if found != len(exitCodeDocs) {
		t.Errorf("main.go has %d exit codes, exitCodeDocs %d", found, len(exitCodeDocs))
	}
	reference(t, "exit-codes.md", "Exit codes", "those who call moeserve from scripts and service managers", b.String())
}

// mistakes are command lines that fail, by what they are about.
var mistakes = []struct {
	about string
	lines []string
}{
	{"Command line", []string{
		`moeserve rn`,
		`moeserve run --ofload-fraction 1 x`,
		`moeserve run --offload-fraction 1.5 x`,
		`moeserve run --offload-tier disk x`,
		`moeserve run --seed=-1 x`,
		`moeserve run --emulate gpu=3 x`,
		`moeserve run --hardware h300 x`,
		`moeserve run --gpu 7 x`,
		`moeserve serve --port 65536`,
	}},
	{"Model", []string{
		`moeserve run --model nowhere x`,
		`moeserve run --model phi-tiny-moe --prompt-ids 1`,
		`moeserve run --model phi-tiny-moe --load-format dummy x`,
	}},
	{"Prompt", []string{
		`moeserve run one two`,
		`moeserve run --prompt-ids 1,x`,
		`moeserve run --prompt-ids 1,894`,
		`moeserve run --max-model-len 4 123+456=`,
		`moeserve run --max-model-len 1000 123+456=`,
	}},
	{"Memory", []string{
		`moeserve run --emulate hbm=1MiB,host=1GiB 1+2=`,
		`moeserve run --emulate hbm=1GiB,host=1MiB 1+2=`,
		`moeserve run --emulate hbm=1GiB,host=1GiB --num-gpu-blocks-override 100000000 1+2=`,
		`moeserve run --emulate hbm=16MiB,host=1GiB --harvest-headroom 14MiB --offload-fraction 1 --offload-tier peer 1+2=`,
	}},
}

// httpErrors are errors of the server. Those with a body are provoked, and that of a key that is not
// sent; the others need a full queue, a stop or a failure, and stand as they are here.
var httpErrors = []struct{ path, body, status, code, message string }{
	{"/v1/completions", `{"prompt": "x", "frobnicate": 1}`, "400", "", ""},
	{"/v1/completions", `{"prompt": "x", "temperature": "hot"}`, "400", "", ""},
	{"/v1/completions", `{}`, "400", "", ""},
	{"/v1/completions", `{"prompt": "x", "max_tokens": 100000}`, "400", "", ""},
	{"/v1/completions", `{"prompt": "x", "model": "gpt"}`, "404", "", ""},
	{"/v1/embeddings", `{}`, "404", "", ""},
	{"/v1/completions", `{"prompt": "x", "suffix": "y"}`, "400", "", ""},
	{"", "", "401", "", ""},
	{"", "", "403", "cors", "a browser asks for a page that `--allowed-origins`, `--allowed-methods` or `--allowed-headers` does not allow"},
	{"", "", "413", "request_too_large", "the body is larger than `--max-request-bytes`"},
	{"", "", "415", "unsupported_media_type", "the body is not `application/json`, or is compressed"},
	{"", "", "408", "timeout", "the body did not come in time"},
	{"", "", "429", "too_many_requests", "too many requests, or too large ones, are in progress; `Retry-After` says when to try again"},
	{"", "", "429", "queue_full", "`--max-queued-requests` wait already; `Retry-After` says when to try again"},
	{"", "", "500", "", "a step or a GPU failed, or the model computes no numbers for this request; the log has the cause"},
	{"", "", "503", "", "the model is loading, the server is stopping, or copies to the GPU fail; `Retry-After` says when to try again"},
	{"", "", "504", "timeout", "the request took longer than `--request-timeout`"},
}

func TestReferenceErrors(t *testing.T) {
	racedetector.SkipSequential(t)
	var b strings.Builder
	b.WriteString("Each message names what is wrong and what to do. The commands below are run to make this page, on emulated devices. [exit-codes.md](exit-codes.md) has the codes.\n")
	for _, m := range mistakes {
		fmt.Fprintf(&b, "\n## %s\n", m.about)
		for _, line := range m.lines {
			args := strings.Fields(line)[1:]
			stdout, stderr, code := invoke(t, strings.NewReader(""), args...)
			stderr = stderr[strings.LastIndex(strings.TrimSpace(stderr), "\n")+1:] // what comes before is the log
			if code == exitDone || stdout != "" || !strings.HasPrefix(stderr, "moeserve: ") {
				t.Errorf("%s: exit code %d, %q, %q: want an error", line, code, stdout, stderr)
			}
			fmt.Fprintf(&b, "\n`%s` ends with %d:\n\n```text\n%s```\n", line, code, stderr)
		}
	}
	b.WriteString("\n## HTTP\n\nA server answers with OpenAI's error object: `{\"error\": {\"message\", \"type\", \"param\", \"code\"}}`.\n\n| status | code | request | message |\n|---|---|---|---|\n")
	p, locked := startServe(t), startServe(t, "--api-key", "secret")
	for _, e := range httpErrors {
		request := ""
		if e.status == "401" {
			_, e.code, e.message = requestFails(t, locked, "/v1/completions", `{}`)
		}
		if e.path != "" {
			status, code, message := requestFails(t, p, e.path, e.body)
			if strconv.Itoa(status) != e.status {
				t.Errorf("POST %s %s: status %d, want %s", e.path, e.body, status, e.status)
			}
			e.code, e.message, request = code, message, fmt.Sprintf("`POST %s` `%s`", e.path, e.body)
		}
		fmt.Fprintf(&b, "| %s | %s | %s | %s |\n", e.status, e.code, request, cell(e.message))
	}
	reference(t, "errors.md", "Errors", "everybody whose command or request failed", b.String())
}

// requestFails posts a body and returns what came: a status, and of an error the code and the
// message.
func requestFails(t *testing.T, p *process, path, body string) (status int, code, message string) {
	t.Helper()
	resp := p.post(t, path, body)
	var e struct {
		Error struct {
			Message string `json:"message"`
			Code    string `json:"code"`
		} `json:"error"`
	}
	text, err := io.ReadAll(resp.Body)
	if err != nil {
		t.Fatal(err)
	}
	if resp.StatusCode != 200 {
		if err := json.Unmarshal(text, &e); err != nil {
			t.Fatalf("%s: %v: %s", path, err, text)
		}
	}
	return resp.StatusCode, e.Error.Code, e.Error.Message
}

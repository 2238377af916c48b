package moeserve_test

import (
	"encoding/json"
	"fmt"
	"io"
	"maps"
	"net"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"slices"
	"strings"
	"testing"

	"go.yaml.in/yaml/v3"
	"golang.org/x/mod/modfile"
	modpath "golang.org/x/mod/module"
	"golang.org/x/mod/zip"

	"github.com/moeserve/moeserve/configs"
)

// metric is one of docs/reference/metrics.md: its kind, and its labels with the values that the page
// lists; none where any is possible.
type metric struct {
	kind   string
	labels map[string][]string
}

func knownMetrics(t *testing.T) map[string]metric {
	t.Helper()
	all := map[string]metric{}
	for _, m := range regexp.MustCompile("(?m)^\\| `([a-z_:]+)` \\| (\\w+) \\| (.*?) \\| ").FindAllStringSubmatch(pages(t)["docs/reference/metrics.md"], -1) {
		x := metric{m[2], map[string][]string{"instance": nil, "job": nil}}
		for _, l := range regexp.MustCompile("`(\\w+)`(?:: ([^;]*))?").FindAllStringSubmatch(m[3], -1) {
			x.labels[l[1]] = nil
			if l[2] != "" && l[1] != "block_size" {
				x.labels[l[1]] = strings.Split(l[2], ", ")
			}
		}
		if x.kind == "histogram" {
			for _, part := range []string{"_bucket", "_sum", "_count"} {
				y := metric{"counter", maps.Clone(x.labels)}
				if part == "_bucket" {
					y.labels["le"] = nil
				}
				all[m[1]+part] = y
			}
			continue
		}
		all[m[1]] = x
	}
	if len(all) < 100 {
		t.Fatalf("%d metrics: the page is written in another way", len(all))
	}
	all["up"] = metric{"gauge", map[string][]string{"instance": nil, "job": nil}} // Prometheus' own
	return all
}

// names of PromQL that are no metrics.
var promQL = strings.Fields("sum avg max min by and or without rate increase histogram_quantile on ignoring unless")

// checkQuery holds a PromQL expression to metrics and labels that there are. Its syntax is checked by
// tests/deploy.
func checkQuery(t *testing.T, known map[string]metric, where, query string) {
	t.Helper()
	found := 0
	for _, m := range regexp.MustCompile(`(sum|avg|max|min) by \(([^)]*)\) \((?:rate|increase)?\(?([a-z_:]+)`).FindAllStringSubmatch(query, -1) {
		for label := range strings.SplitSeq(m[2], ", ") {
			if _, ok := known[m[3]].labels[label]; !ok {
				t.Errorf("%s: %s has no label %s", where, m[3], label)
			}
		}
	}
	for _, m := range regexp.MustCompile(`(rate|increase)\(([a-z_:]+)`).FindAllStringSubmatch(query, -1) {
		if known[m[2]].kind != "counter" {
			t.Errorf("%s: a %s of %s, which is a %s", where, m[1], m[2], known[m[2]].kind)
		}
	}
	for _, m := range regexp.MustCompile(`\{([^}]*)\}`).FindAllStringSubmatchIndex(query, -1) {
		name := regexp.MustCompile(`[a-z_:]+$`).FindString(query[:m[0]])
		for _, l := range regexp.MustCompile(`(\w+)(=~|=|!=|!~)"([^"]*)"`).FindAllStringSubmatch(query[m[2]:m[3]], -1) {
			values, ok := known[name].labels[l[1]]
			if !ok {
				t.Errorf("%s: %s has no label %s", where, name, l[1])
			}
			for v := range strings.SplitSeq(l[3], "|") {
				if len(values) > 0 && v[0] != '$' && !slices.Contains(values, v) {
					t.Errorf("%s: %s of %s is one of %v, and not %s", where, l[1], name, values, v)
				}
			}
		}
	}
	bare := regexp.MustCompile(`\{[^}]*\}|\[[^\]]*\]|by \([^)]*\)`).ReplaceAllString(query, "")
	for _, name := range regexp.MustCompile(`[a-z_][a-z_:0-9]*`).FindAllString(bare, -1) {
		if slices.Contains(promQL, name) || regexp.MustCompile(`^e?[0-9]*$`).MatchString(name) {
			continue
		}
		if found++; known[name].kind == "" {
			t.Errorf("%s names %s, and there is no such metric", where, name)
		}
	}
	if found == 0 {
		t.Errorf("%s has no metric: %s", where, query)
	}
}

// TestDashboard: the Grafana dashboard shows metrics that there are; panels say what they show, and do
// not overlap.
func TestDashboard(t *testing.T) {
	text, err := os.ReadFile("deploy/grafana/moeserve.json")
	if err != nil {
		t.Fatal(err)
	}
	var d struct {
		Title  string
		Panels []struct {
			ID                       int
			Type, Title, Description string
			GridPos                  struct{ H, W, X, Y int }
			Targets                  []struct{ Expr, LegendFormat string }
		}
	}
	if err := json.Unmarshal(text, &d); err != nil {
		t.Fatal(err)
	}
	known, taken, titles := knownMetrics(t), map[[2]int]string{}, map[string]bool{}
	shown := string(text)
	for _, p := range d.Panels {
		if titles[p.Title] || p.Title == "" || p.Type != "row" && (p.Description == "" || len(p.Targets) == 0) {
			t.Errorf("panel %d, %q: its title is not its own, or it has no description or query", p.ID, p.Title)
		}
		titles[p.Title] = true
		for x := p.GridPos.X; x < p.GridPos.X+p.GridPos.W; x++ {
			for y := p.GridPos.Y; y < p.GridPos.Y+p.GridPos.H; y++ {
				if at := [2]int{x, y}; x >= 24 || taken[at] != "" {
					t.Fatalf("%q is over %q, or beyond the grid", p.Title, taken[at])
				} else {
					taken[at] = p.Title
				}
			}
		}
		for _, target := range p.Targets {
			checkQuery(t, known, p.Title, target.Expr)
		}
	}
	for _, want := range []string{
		"time_to_first_token", "inter_token_latency", "request_queue_time", "generation_tokens", "kv_cache_usage", "kv_tier_used", "expert_uses_total",
		"stall_seconds", "copy_busy", "harvest_bytes", "harvest_revocations",
	} {
		if !strings.Contains(shown, want) {
			t.Errorf("no panel shows %s", want)
		}
	}
}

// TestAlerts: alerts are of metrics that there are, and say what to do and why their thresholds are
// what they are.
func TestAlerts(t *testing.T) {
	var rules struct {
		Groups []struct {
			Name  string
			Rules []struct {
				Alert, Expr, For    string
				Labels, Annotations map[string]string
			}
		}
	}
	decode(t, "deploy/prometheus/rules.yml", &rules)
	known, names := knownMetrics(t), map[string]bool{}
	for _, r := range rules.Groups[0].Rules {
		if names[r.Alert] || !strings.HasPrefix(r.Alert, "Moeserve") || !slices.Contains([]string{"critical", "warning", "info"}, r.Labels["severity"]) {
			t.Errorf("%q: its name is not its own, or its severity is not critical, warning or info", r.Alert)
		}
		names[r.Alert] = true
		for _, a := range []string{"summary", "description", "threshold"} {
			if r.Annotations[a] == "" {
				t.Errorf("%s has no %s", r.Alert, a)
			}
		}
		checkQuery(t, known, r.Alert, r.Expr)
		for _, flag := range regexp.MustCompile(`--([a-z][a-z-]+)`).FindAllStringSubmatch(r.Annotations["description"], -1) {
			if _, ok := configs.Find(flag[1]); !ok {
				t.Errorf("%s names %s, and there is no such flag", r.Alert, flag[0])
			}
		}
	}
	if len(names) < 10 {
		t.Errorf("%d alerts", len(names))
	}
}

// decode reads a file of YAML, strictly.
func decode(t *testing.T, path string, to any) {
	t.Helper()
	f, err := os.Open(path)
	if err != nil {
		t.Fatal(err)
	}
	defer f.Close() //nolint:errcheck // only read from
	d := yaml.NewDecoder(f)
	d.KnownFields(true)
	if err := d.Decode(to); err != nil {
		t.Fatalf("%s: %v", path, err)
	}
}

// TestDockerfile: the image runs as a user without rights, on bases of fixed versions, and what is
// copied is there.
func TestDockerfile(t *testing.T) {
	text, err := os.ReadFile("deploy/docker/Dockerfile")
	if err != nil {
		t.Fatal(err)
	}
	goMod, err := os.ReadFile("go.mod")
	if err != nil {
		t.Fatal(err)
	}
	stages, last := map[string]bool{}, map[string]string{}
	version := regexp.MustCompile(`(?m)^go (\d+\.\d+)`).FindSubmatch(goMod)[1]
	if !strings.Contains(string(text), "ARG GO="+string(version)+"\n") {
		t.Errorf("it builds with another Go than go.mod's %s", version)
	}
	joined := strings.ReplaceAll(string(text), "\\\n", " ")
	for line := range strings.Lines(joined) {
		word, rest, _ := strings.Cut(strings.TrimSpace(line), " ")
		switch word {
		case "FROM":
			clear(last)
			image, name, _ := strings.Cut(rest, " AS ")
			if !strings.Contains(image, ":") || strings.HasSuffix(image, ":latest") {
				t.Errorf("the base %s has no version", image)
			}
			stages[name] = true
		case "COPY":
			from := regexp.MustCompile(`--from=(\w+)`).FindStringSubmatch(rest)
			if from != nil {
				if !stages[from[1]] {
					t.Errorf("there is no stage %s", from[1])
				}
				continue
			}
			for f := range strings.FieldsSeq(rest[:strings.LastIndex(rest, " ")]) {
				if _, err := os.Stat(f); err != nil {
					t.Error(err)
				}
			}
		}
		last[word] = rest
	}
	if !regexp.MustCompile(`^[1-9]\d*:[1-9]\d*$`).MatchString(last["USER"]) {
		t.Errorf("it runs as %q; want the number of a user without rights", last["USER"])
	}
	for _, word := range []string{"ENTRYPOINT", "CMD"} {
		if json.Unmarshal([]byte(last[word]), new([]string)) != nil {
			t.Errorf("%s %s is not a list: signals would not reach the server", word, last[word])
		}
	}
	ignored, err := os.ReadFile(".dockerignore")
	if err != nil {
		t.Fatal(err)
	}
	for _, embedded := range []string{"testdata", "tools", "preload", "configs", "LICENSE"} {
		if slices.Contains(strings.Split(string(ignored), "\n"), embedded) {
			t.Errorf(".dockerignore leaves %s out, which the build needs", embedded)
		}
	}
}

// TestSystemdUnit: systemd-analyze, where there is one, finds nothing wrong with the unit.
func TestSystemdUnit(t *testing.T) {
	const unit = "deploy/systemd/moeserve.service"
	text, err := os.ReadFile(unit)
	if err != nil {
		t.Fatal(err)
	}
	for _, line := range []string{"DynamicUser=yes", "NoNewPrivileges=yes", "ProtectSystem=strict", "DeviceAllow=char-nvidia* rw", "LimitMEMLOCK=infinity"} {
		if !strings.Contains(string(text), "\n"+line+"\n") {
			t.Errorf("the unit has no %s", line)
		}
	}
	for _, line := range []string{"MemoryDenyWriteExecute=yes", "PrivateDevices=yes"} {
		if strings.Contains(string(text), "\n"+line) {
			t.Errorf("with %s CUDA does not run", line)
		}
	}
	analyze, err := exec.LookPath("systemd-analyze")
	if err != nil {
		t.Skip("no systemd-analyze")
	}
	dir := t.TempDir()
	program := filepath.Join(dir, "moeserve")                                   // which it looks for
	if err := os.WriteFile(program, []byte("#!/bin/sh\n"), 0o755); err != nil { //nolint:gosec // a program
		t.Fatal(err)
	}
	path := filepath.Join(dir, "moeserve.service")
	if err := os.WriteFile(path, []byte(strings.ReplaceAll(string(text), "/usr/bin/moeserve", program)), 0o666); err != nil {
		t.Fatal(err)
	}
	out, err := exec.CommandContext(t.Context(), analyze, "verify", "--man=no", path).CombinedOutput()
	for line := range strings.Lines(string(out)) {
		if strings.Contains(line, "moeserve.service") {
			t.Errorf("systemd-analyze: %s", line)
		}
	}
	t.Logf("systemd-analyze: %v: %s", err, out)
}

// TestChartValues: the settings in the chart's values, and the probes of its template, are those of the
// server. Its templates and schema are checked by tests/deploy.
func TestChartValues(t *testing.T) {
	var values map[string]any
	decode(t, "deploy/helm/moeserve/values.yaml", &values)
	settings, _ := values["settings"].(map[string]any)
	for key := range settings {
		if _, ok := configs.Find(key); !ok {
			t.Errorf("there is no setting %s", key)
		}
	}
	var schema struct {
		Properties map[string]json.RawMessage
	}
	text, err := os.ReadFile("deploy/helm/moeserve/values.schema.json")
	if err != nil {
		t.Fatal(err)
	}
	if err := json.Unmarshal(text, &schema); err != nil {
		t.Fatal(err)
	}
	for key := range values {
		if schema.Properties[key] == nil {
			t.Errorf("the schema has no %s", key)
		}
	}
	var refused struct {
		PropertyNames struct{ Not struct{ Enum []string } }
	}
	if err := json.Unmarshal(schema.Properties["settings"], &refused); err != nil || len(refused.PropertyNames.Not.Enum) == 0 {
		t.Fatalf("%v: the schema lets settings through that the chart sets", err)
	}
	for _, key := range refused.PropertyNames.Not.Enum {
		if _, ok := configs.Find(key); !ok {
			t.Errorf("the schema refuses %s, and there is no such setting", key)
		}
	}
	template, err := os.ReadFile("deploy/helm/moeserve/templates/deployment.yaml")
	if err != nil {
		t.Fatal(err)
	}
	api := pages(t)["docs/reference/api.md"]
	for _, m := range regexp.MustCompile(`path: (/\w[\w/]*), port`).FindAllStringSubmatch(string(template), -1) {
		if !strings.Contains(api, "| `"+m[1]+"` |") {
			t.Errorf("a probe asks for %s, and the API has no such path", m[1])
		}
	}
}

// TestReleaseFiles: what .goreleaser.yaml packs and calls is there, or made by its hooks.
func TestReleaseFiles(t *testing.T) {
	var release map[string]any
	decode(t, ".goreleaser.yaml", &release)
	hooks := fmt.Sprint(release["before"])
	made := func(path string) bool {
		return strings.HasPrefix(path, "build/release/") && strings.Contains(hooks, strings.TrimSuffix(filepath.Dir(path), "/")) ||
			strings.HasPrefix(path, "libmoeserve-") && strings.Contains(hooks, "make preload")
	}
	files, n := []any{}, 0
	for _, key := range []string{"archives", "nfpms"} {
		for _, x := range release[key].([]any) {
			for _, list := range []string{"files", "contents"} {
				more, _ := x.(map[string]any)[list].([]any)
				files = append(files, more...)
			}
		}
	}
	for _, f := range files {
		path, ok := f.(string)
		if !ok {
			path = f.(map[string]any)["src"].(string)
		}
		n++
		if found, err := filepath.Glob(path); !made(path) && (err != nil || len(found) == 0) {
			t.Errorf("%s is packed, and there is no such file", path)
		}
	}
	if n < 10 {
		t.Errorf("%d files are packed", n)
	}
	for _, x := range release["builds"].([]any) {
		b := x.(map[string]any)
		if tool, ok := b["tool"].(string); ok {
			if _, err := os.Stat(tool); err != nil {
				t.Error(err)
			}
		}
		if !strings.Contains(fmt.Sprint(b["ldflags"]), "-X main.version=") {
			t.Errorf("the build %s has no version", b["id"])
		}
	}
}

// TestGoInstall: go install PATH@VERSION takes this module: go.mod replaces nothing, and the files that
// are committed make a module's archive.
func TestGoInstall(t *testing.T) {
	text, err := os.ReadFile("go.mod")
	if err != nil {
		t.Fatal(err)
	}
	m, err := modfile.Parse("go.mod", text, nil)
	if err != nil {
		t.Fatal(err)
	}
	if len(m.Replace) > 0 || len(m.Exclude) > 0 {
		t.Error("go install refuses a module whose go.mod has replace or exclude")
	}
	if err := modpath.Check(m.Module.Mod.Path, "v0.1.0"); err != nil {
		t.Error(err)
	}
	list, err := exec.CommandContext(t.Context(), "git", "ls-files", "-z").Output()
	if err != nil {
		t.Skipf("no git: %v", err)
	}
	var files []zip.File
	for name := range strings.SplitSeq(strings.TrimSuffix(string(list), "\x00"), "\x00") {
		f, err := os.Lstat(name)
		if err != nil {
			continue
		}
		files = append(files, inRepository(name))
		if f.Size() > mostFileBytes {
			t.Errorf("%s is committed and has %d bytes, at most %d wanted: every clone has them", name, f.Size(), mostFileBytes)
		}
	}
	checked, err := zip.CheckFiles(files)
	if err != nil || checked.SizeError != nil || len(checked.Invalid) > 0 || len(checked.Valid) < 500 {
		t.Errorf("%v, %v: %v, %d files", err, checked.SizeError, checked.Invalid, len(checked.Valid))
	}
	for _, o := range checked.Omitted {
		if strings.HasPrefix(o.Path, "tests/") || strings.HasPrefix(o.Path, "kernels/cuda/internal/simt/") {
			continue // modules of their own, and what tests alone import
		}
		t.Errorf("%s is left out of the module: %v", o.Path, o.Err)
	}
}

// mostFileBytes of a committed file. The built-in model, the largest, has 7.6 MB.
const mostFileBytes = 8 << 20

// inRepository is a file of the repository.
type inRepository string

func (f inRepository) Path() string                 { return filepath.ToSlash(string(f)) }
func (f inRepository) Lstat() (os.FileInfo, error)  { return os.Lstat(string(f)) }
func (f inRepository) Open() (io.ReadCloser, error) { return os.Open(string(f)) }

// pickerConfig is the part of an EndpointPickerConfig that has names.
type pickerConfig struct {
	Plugins []struct {
		Type, Name string
		Parameters map[string]any
	}
	DataLayer struct {
		Discovery struct {
			PluginRef string `yaml:"pluginRef"`
		}
		Sources []struct {
			PluginRef  string `yaml:"pluginRef"`
			Extractors []struct {
				PluginRef string `yaml:"pluginRef"`
			}
		}
	} `yaml:"dataLayer"`
	SchedulingProfiles []struct {
		Plugins []struct {
			PluginRef string `yaml:"pluginRef"`
		}
	} `yaml:"schedulingProfiles"`
}

// checkPicker holds an endpoint picker's configuration to itself, and to what nodes have.
func checkPicker(t *testing.T, where, text string) {
	t.Helper()
	var c pickerConfig
	if err := yaml.Unmarshal([]byte(text), &c); err != nil {
		t.Fatalf("%s: %v", where, err)
	}
	used := []string{"token-producer", "precise-prefix-cache-producer", "single-profile-handler"} // by the picker itself
	for _, s := range c.DataLayer.Sources {
		used = append(used, s.PluginRef)
		for _, e := range s.Extractors {
			used = append(used, e.PluginRef)
		}
	}
	if d := c.DataLayer.Discovery.PluginRef; d != "" {
		used = append(used, d)
	}
	for _, p := range c.SchedulingProfiles {
		for _, q := range p.Plugins {
			used = append(used, q.PluginRef)
		}
	}
	have := map[string]map[string]any{}
	for _, p := range c.Plugins {
		have[p.Type] = p.Parameters
		if !slices.Contains(used, p.Type) {
			t.Errorf("%s: nothing uses %s", where, p.Type)
		}
	}
	for _, u := range used {
		if _, ok := have[u]; !ok {
			t.Errorf("%s: there is no plugin %s", where, u)
		}
	}
	var chart struct {
		KVEvents struct {
			Port       int
			ReplayPort int `yaml:"replayPort"`
		} `yaml:"kvEvents"`
	}
	values, err := os.ReadFile("deploy/helm/moeserve/values.yaml")
	if err == nil {
		err = yaml.Unmarshal(values, &chart)
	}
	if err != nil {
		t.Fatal(err)
	}
	blockSize := configs.Defaults().KV.BlockSize
	prefix := fmt.Sprint(have["precise-prefix-cache-producer"])
	for _, want := range []string{
		fmt.Sprintf("blockSize:%d", blockSize), "topicFilter:kv@",
		fmt.Sprintf("socketPort:%d", chart.KVEvents.Port), fmt.Sprintf("replaySocketPort:%d", chart.KVEvents.ReplayPort),
	} {
		if !strings.Contains(prefix, want) {
			t.Errorf("%s: the plugin of KV events has no %s: %s", where, want, prefix)
		}
	}
}

// TestRouter: the files of deploy/router agree with each other, with the chart and with the server.
func TestRouter(t *testing.T) {
	read := func(name string) string {
		text, err := os.ReadFile(filepath.Join("deploy/router", name))
		if err != nil {
			t.Fatal(err)
		}
		return string(text)
	}
	checkPicker(t, "picker.yaml", read("picker.yaml"))
	var endpoints struct {
		Endpoints []struct{ Name, Address, Port string }
	}
	decode(t, "deploy/router/endpoints.yaml", &endpoints)
	names := map[string]bool{}
	for _, e := range endpoints.Endpoints {
		if names[e.Name] || net.ParseIP(e.Address).To4() == nil || e.Port != "8000" {
			t.Errorf("endpoint %+v: its name is another's, or its address is none", e)
		}
		names[e.Name] = true
	}
	if len(names) < 2 || !strings.Contains(read("picker.yaml"), "http://"+endpoints.Endpoints[0].Address+":8000") {
		t.Errorf("%d endpoints; or the picker asks none of them for tokens", len(names))
	}
	var envoy struct {
		Resources struct {
			Listeners []any
			Clusters  []struct{ Name string }
		} `yaml:"static_resources"`
	}
	if err := yaml.Unmarshal([]byte(read("envoy.yaml")), &envoy); err != nil {
		t.Fatal(err)
	}
	listeners := fmt.Sprint(envoy.Resources.Listeners)
	for _, c := range envoy.Resources.Clusters {
		if !strings.Contains(listeners, "cluster:"+c.Name) && !strings.Contains(listeners, "cluster_name:"+c.Name) {
			t.Errorf("envoy.yaml: nothing uses the cluster %s", c.Name)
		}
	}
	if len(envoy.Resources.Clusters) != 2 || !strings.Contains(read("envoy.yaml"), "http_header_name: x-gateway-destination-endpoint") {
		t.Error("envoy.yaml is written in another way")
	}
	objects := map[string]string{}
	for text := range strings.SplitSeq(read("kubernetes.yaml"), "\n---\n") {
		var o struct {
			Kind     string
			Metadata struct{ Name string }
			Data     map[string]string
		}
		if err := yaml.Unmarshal([]byte(text), &o); err != nil {
			t.Fatal(err)
		}
		objects[o.Kind+" "+o.Metadata.Name] = text
		if o.Kind == "ConfigMap" {
			checkPicker(t, "kubernetes.yaml", o.Data["picker.yaml"])
		}
	}
	for object, parts := range map[string][]string{
		"InferencePool moeserve":     {"app.kubernetes.io/name: moeserve, app.kubernetes.io/instance: moe", "number: 8000", "name: moeserve-picker, port: {number: 9002}"},
		"HTTPRoute moeserve":         {"kind: InferencePool, name: moeserve"},
		"Deployment moeserve-picker": {`"9002"`, "containerPort: 9002", "serviceAccountName: moeserve-picker", "configMap: {name: moeserve-picker}"},
		"Service moeserve-picker":    {"app: moeserve-picker", "port: 9002"},
		"ConfigMap moeserve-picker":  nil, "ServiceAccount moeserve-picker": nil, "Role moeserve-picker": nil, "RoleBinding moeserve-picker": nil,
	} {
		text, ok := objects[object]
		if !ok {
			t.Errorf("kubernetes.yaml has no %s", object)
		}
		for _, p := range parts {
			if !strings.Contains(text, p) {
				t.Errorf("%s has no %q", object, p)
			}
		}
	}
	if len(objects) != 8 {
		t.Errorf("kubernetes.yaml has %d objects", len(objects))
	}
}

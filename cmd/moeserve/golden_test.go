package main

import (
	"encoding/json"
	"fmt"
	"io"
	"maps"
	"os"
	"path/filepath"
	"regexp"
	"slices"
	"strings"
	"testing"

	"github.com/moeserve/moeserve/tools/fixtures"
)

// golden compares text with a file of testdata/golden; -update writes that.
func golden(t *testing.T, name, got string) {
	t.Helper()
	path := filepath.Join("testdata", "golden", name)
	if *update {
		if err := os.MkdirAll(filepath.Dir(path), 0o777); err != nil {
			t.Fatal(err)
		}
		if err := os.WriteFile(path, []byte(got), 0o666); err != nil {
			t.Fatal(err)
		}
	}
	want, err := os.ReadFile(path)
	if err != nil {
		t.Fatal(err)
	}
	if got != string(want) {
		t.Errorf("%s differs (-update writes it anew):\n%s", path, got)
	}
}

// shape lists the fields of a JSON value and their types, each once: array
// elements are alike.
func shape(t *testing.T, data string) string {
	t.Helper()
	var v any
	if err := json.Unmarshal([]byte(data), &v); err != nil {
		t.Fatalf("%v: %s", err, data)
	}
	found := map[string]bool{}
	var walk func(at string, v any)
	walk = func(at string, v any) {
		switch v := v.(type) {
		case map[string]any:
			found[at+" object"] = true
			for k, e := range v {
				walk(at+"."+k, e)
			}
		case []any:
			found[at+" array"] = true
			for _, e := range v {
				walk(at+"[]", e)
			}
		case nil:
			found[at+" null"] = true
		default:
			found[at+fmt.Sprintf(" %T", v)] = true
		}
	}
	walk("", v)
	return strings.Join(slices.Sorted(maps.Keys(found)), "\n") + "\n"
}

var digits = regexp.MustCompile(`\d+(\.\d+)?`)

// What others read of a run: the JSON's fields and the report's sentences.
func TestRunIsReported(t *testing.T) {
	args := []string{"run", "-v", "--emulate", "virtual,hbm=256MiB,pcie=1GB/s,nvlink=5GB/s", "--offload-fraction", "0.5", "--offload-tier", "peer", "--json", "-", "sort: c a b ="}
	stdout, stderr, code := invoke(t, strings.NewReader(""), args...)
	if code != 0 {
		t.Fatalf("exit code %d: %s", code, stderr)
	}
	golden(t, "run.json.txt", shape(t, stdout))
	// Letters of layers, and units, are numbers, too.
	report := regexp.MustCompile(`(?m)^(layers)?\s+N(-N)?  .*\n`).ReplaceAllString(digits.ReplaceAllString(stderr, "N"), "")
	report = regexp.MustCompile(`N ([KMG]i)?B`).ReplaceAllString(report, "N B")
	report = regexp.MustCompile(`N (µs|ms|s)\b`).ReplaceAllString(report, "N s")
	golden(t, "run.txt", regexp.MustCompile(` +`).ReplaceAllString(report, " "))
}

// What others read of a benchmark, a plan and an inspection.
func TestResultsAreReported(t *testing.T) {
	for name, args := range map[string][]string{
		"throughput": {"bench", "throughput", "--emulate", "virtual,nodata,hbm=256MiB,pcie=1GB/s", "--offload-fraction", "0.5", "--num-prompts", "2", "--input-len", "3", "--output-len", "3", "--trials", "2", "--warmup-tokens", "0"},
		"transfer":   {"bench", "transfer", "--emulate", "virtual,nodata,pcie=1GB/s,nvlink=5GB/s,latency=8us", "--largest-mib", "1", "--repetitions", "1"},
		"benchkv":    {"bench", "kv", "--emulate", "virtual,nodata,pcie=1GB/s,nvlink=5GB/s,latency=8us", "--entries", "100", "--repetitions", "1"},
		"kvcopies":   {"bench", "kv", "--copy-method", "both", "--emulate", "virtual,nodata,pcie=1GB/s,nvlink=5GB/s,latency=8us", "--copy-sizes", "4KiB", "--copy-blocks", "3", "--repetitions", "1"},
		"prefix":     {"bench", "prefix", "--emulate", "virtual,nodata,hbm=256MiB,pcie=1GB/s", "--lengths", "16", "--places", "hbm,host,nowhere", "--repetitions", "1"},
		"sleep":      {"bench", "sleep", "built-in", "--emulate", "virtual,hbm=256MiB,pcie=1GB/s", "--repetitions", "1", "--model", fixtures.Dir(t, fixtures.Names(t)[0])},
		"plan":       {"plan", "--model", "mixtral-8x7b", "--hardware", "h200", "--offload-fraction", "0.5", "--peers", "1"},
		"inspect":    {"inspect", "--offload-fraction", "0.5", "--emulate", "hbm=256MiB"},
	} {
		stdout, stderr, code := invoke(t, strings.NewReader(""), append(args, "--json", "-")...)
		if code != 0 {
			t.Fatalf("%s: exit code %d: %s", name, code, stderr)
		}
		golden(t, name+".json.txt", shape(t, stdout))
	}
	stdout, stderr, code := invoke(t, strings.NewReader(""), "config")
	if code != 0 {
		t.Fatalf("config: exit code %d: %s", code, stderr)
	}
	golden(t, "config.txt", stdout)
}

// What others read of a server: the metrics' names, help and labels, and the fields of
// /debug/residency.
func TestServerIsReported(t *testing.T) {
	p := startServe(t, "--emulate", "hbm=256MiB", "--offload-fraction", "0.5", "--offload-tier", "peer",
		"--kv-experts-share", "auto", "--max-model-len", "128",
		"--kv-transfer-config", `{"kv_connector_extra_config": {"num_gpu_blocks": 64, "num_cpu_blocks": 64, "num_file_blocks": 64, "directory": "`+t.TempDir()+`"}}`)
	for range 3 {
		if answer, err := io.ReadAll(p.post(t, "/v1/completions", `{"prompt": "sort: t h e m o e =", "temperature": 0}`).Body); err != nil || !strings.Contains(string(answer), "e e h m o t") {
			t.Fatalf("%v: %s", err, answer)
		}
	}
	golden(t, "residency.json.txt", shape(t, p.get(t, "/debug/residency")))
	golden(t, "kv.json.txt", shape(t, p.get(t, "/debug/kv")))
	var metrics strings.Builder
	for line := range strings.Lines(p.get(t, "/metrics")) {
		// Those of the runtime are other people's.
		if regexp.MustCompile(`^(# (HELP|TYPE) )?(go|process|promhttp)_`).MatchString(line) {
			continue
		}
		if !strings.HasPrefix(line, "#") {
			line = regexp.MustCompile(` \S+\n$`).ReplaceAllString(line, "\n")
			line = regexp.MustCompile(`num_gpu_blocks="\d+"`).ReplaceAllString(line, `num_gpu_blocks="N"`)
		}
		metrics.WriteString(line)
	}
	golden(t, "metrics.txt", metrics.String())
}

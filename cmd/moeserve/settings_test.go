package main

import (
	"os"
	"path/filepath"
	"regexp"
	"strings"
	"testing"

	"github.com/spf13/pflag"

	"github.com/moeserve/moeserve/configs"
	"github.com/moeserve/moeserve/tools/racedetector"
)

// read puts settings together from arguments, variables (of the process, as viper
// reads them) and the text of a file.
func read(t *testing.T, args []string, variables map[string]string, file string) (*settings, error) {
	t.Helper()
	dir := t.TempDir()
	t.Chdir(dir)
	if file != "" {
		if err := os.WriteFile(filepath.Join(dir, defaultFile), []byte(file), 0o666); err != nil {
			t.Fatal(err)
		}
	}
	environ := []string{"PATH=/bin"}
	for name, value := range variables {
		t.Setenv(name, value)
		environ = append(environ, name+"="+value)
	}
	flags := pflag.NewFlagSet("test", pflag.ContinueOnError)
	addSettings(flags, configs.Schema)
	if err := flags.Parse(args); err != nil {
		t.Fatal(err)
	}
	return readSettings(flags, environ)
}

// other is a value of each key that is valid and not its default, in three ways.
func others(k configs.Key) [3]string {
	switch {
	case k.Kind == configs.Bool:
		return [3]string{"true", "true", "true"}
	case k.Name == "dummy-routing":
		return [3]string{"zipf:1", "zipf:2", "zipf:3"}
	case k.Name == "allowed-origins":
		return [3]string{`["https://a"]`, "https://b,*", "http://d"}
	case strings.HasPrefix(k.Name, "allowed-"):
		return [3]string{`["a"]`, "b,c", "d"}
	case k.Name == "cpu-experts":
		return [3]string{"auto", "50%", "1"}
	case k.Name == "host-paths":
		return [3]string{"1", "2", "1,2"}
	case k.Name == "peers":
		return [3]string{"1", "2,3", "none"}
	case k.Name == "resident-experts":
		return [3]string{"0:1", "@a", "1:2-3"}
	case k.Name == "harvest-headroom":
		return [3]string{"0", "1GiB", "7%"}
	case k.Name == "admin-address":
		return [3]string{"same", "127.0.0.1:1", "127.0.0.1:2"}
	case k.Name == "otlp-traces-endpoint":
		return [3]string{"http://a:4318", "https://b/v1/traces", "http://[::1]:4318/"}
	case k.Name == "harvest-clients":
		return [3]string{"experts=weight:2", "experts=quota:1GiB", "kv=rate:1GiB/s"}
	case k.Name == "harvest-slab-size":
		return [3]string{"1GiB", "7MB", "512MiB"}
	case strings.HasPrefix(k.Name, "harvest-") && k.Placeholder == "TIME":
		return [3]string{"20ms", "30ms", "40ms"}
	case k.Name == "max-itl":
		return [3]string{"off", "30ms", "0.05"}
	case k.Name == "migration-limit":
		return [3]string{"0", "1GiB/s", "7GB/s"}
	case k.Numbers != nil:
		return [3]string(k.Values()[len(k.Numbers)-3:])
	case k.Allowed != nil:
		last := k.Allowed[len(k.Allowed)-1]
		return [3]string{last, last, last}
	case k.Kind == configs.String:
		return [3]string{"a", "b", "c"}
	case k.Kind == configs.Float:
		return [3]string{"0.25", "0.5", "0.75"}
	}
	return [3]string{"21", "22", "23"}
}

// For every setting: a flag goes before a variable, that before a file, and that
// before the default; and what is said of the source is where the value is from.
func TestPrecedence(t *testing.T) {
	// What a valid configuration needs beside the setting in question.
	beside := "load-format: dummy\nmodel: phi-tiny-moe\nallowed-origins: https://example.com\nssl-certfile: cert.pem\n"
	for _, k := range configs.Schema {
		t.Run(k.Name, func(t *testing.T) {
			v := others(k)
			beside := beside
			switch k.Name {
			case "harvest-clients":
				beside += "harvest-policy: fairness\n"
			case "harvest-evacuate-at":
				beside += "harvest-policy: stability\n"
			}
			rest := ""
			for line := range strings.Lines(beside) {
				if !strings.HasPrefix(line, k.Name+":") {
					rest += line
				}
			}
			flag := []string{"--" + k.Name + "=" + v[0]}
			variable := map[string]string{k.Variable(): v[1]}
			file := rest + k.Name + ": " + v[2] + "\n"
			for _, c := range []struct {
				name      string
				args      []string
				variables map[string]string
				file      string
				want      string
				from      source
			}{
				{"flag", flag, variable, file, v[0], source{"flag", "--" + k.Name}},
				{"variable", nil, variable, file, v[1], source{"variable", k.Variable()}},
				{"file", nil, nil, file, v[2], source{"file", defaultFile}},
				{"empty variable", nil, map[string]string{k.Variable(): ""}, file, v[2], source{"file", defaultFile}},
			} {
				t.Run(c.name, func(t *testing.T) {
					s, err := read(t, c.args, c.variables, c.file)
					if err != nil {
						t.Fatal(err)
					}
					want, err := parse(k, c.want)
					if err != nil {
						t.Fatal(err)
					}
					if got := s.Values()[k.Name]; got != want || s.sources[k.Name] != c.from {
						t.Errorf("%v from %v, want %v from %v", got, s.sources[k.Name], want, c.from)
					}
				})
			}
		})
	}
	t.Run("default", func(t *testing.T) {
		s, err := read(t, nil, nil, "")
		if err != nil {
			t.Fatal(err)
		}
		if s.Settings != configs.Defaults() || s.file != "" {
			t.Errorf("%+v", s)
		}
		for key, from := range s.sources {
			if from != (source{Kind: "default"}) {
				t.Errorf("%s from %v", key, from)
			}
		}
	})
}

func TestSettingsErrors(t *testing.T) {
	for _, c := range []struct {
		name      string
		args      []string
		variables map[string]string
		file      string
		want      string
	}{
		{"variable unknown", nil, map[string]string{"MOESERVE_OFFLOAD": "1"}, "", `there is no variable MOESERVE_OFFLOAD; `},
		{"variable misspelled", nil, map[string]string{"MOESERVE_OFLOAD_FRACTION": "1"}, "", `did you mean MOESERVE_OFFLOAD_FRACTION\?$`},
		{"variable of wrong kind", nil, map[string]string{"MOESERVE_SEED": "-1"}, "", `^MOESERVE_SEED is "-1": must be a whole number from 0$`},
		{"variable out of range", nil, map[string]string{"MOESERVE_MAX_NUM_SEQS": "99999999999999999999"}, "", `^MOESERVE_MAX_NUM_SEQS is "9+": out of range$`},
		{"variable not allowed", nil, map[string]string{"MOESERVE_DEVICE": "tpu"}, "", `device is "tpu": must be auto, cpu or cuda; did you mean cpu\? \(from MOESERVE_DEVICE\)$`},
		{"key unknown", nil, nil, "seed: 1\nofload-fraction: 1\n", `^moeserve.yaml: line 2: there is no key "ofload-fraction"; did you mean offload-fraction\?$`},
		{"key in capitals", nil, nil, "Seed: 1\n", `line 1: there is no key "Seed"; did you mean seed\?$`},
		{"key unknown and empty", nil, nil, "tuning: {}\n", `line 1: there is no key "tuning"`},
		{"key twice", nil, nil, "seed: 1\nseed: 2\n", `line 2: seed is set twice$`},
		{"key without value", nil, nil, "model:\n", `line 1: model must be one value$`},
		{"key with a list", nil, nil, "model: [a, b]\n", `line 1: model must be one value$`},
		{"number for a bool", nil, nil, "raw: 2\n", `line 1: raw is "2": must be true or false$`},
		{"bool for a number", nil, nil, "max-num-seqs: true\n", `line 1: max-num-seqs is "true": must be a whole number$`},
		{"fraction for a whole number", nil, nil, "max-num-seqs: 2.5\n", `must be a whole number$`},
		{"not allowed", nil, nil, "offload-fraction: 2\n", `offload-fraction is 2: must be from 0 to 1 \(from moeserve.yaml\)$`},
		{"not a number", nil, nil, "offload-fraction: .nan\n", `line 1: offload-fraction is ".nan": must be a number$`},
		{"not a mapping", nil, nil, "- seed\n", `line 1: must be lines of the form key: value$`},
		{"two documents", nil, nil, "seed: 1\n---\nseed: 2\n", `must be a single YAML document$`},
		{"not YAML", nil, nil, "seed: [\n", `^moeserve.yaml: yaml: `},
		{"flag and the rest", []string{"--micro-batch-size", "64"}, nil, "max-num-batched-tokens: 32\n", `micro-batch-size is 64: must be at most --max-num-batched-tokens, 32$`},
		{"mode of host paths", []string{"--host-paths", "2", "--host-paths-mode", "yield"}, nil, "", `--host-paths-mode is "yield": must be take or wait$`},
		{"cuda by another name", []string{"--device", "gpu"}, nil, "", `--device is "gpu": must be auto, cpu or cuda; did you mean cuda\?$`},
		{"no such file", []string{"--config", "gone.yaml"}, nil, "", `gone.yaml: no such file`},
		{"no such file by variable", nil, map[string]string{configVariable: "gone.yaml"}, "", `gone.yaml: no such file`},
		{"a directory", []string{"--config", "."}, nil, "", `read the configuration: .*is a directory`},
		{"large", nil, nil, "# " + strings.Repeat("x", maxFileBytes), `moeserve.yaml is larger than 1024 KiB`},
	} {
		t.Run(c.name, func(t *testing.T) {
			s, err := read(t, c.args, c.variables, c.file)
			if err == nil || !regexp.MustCompile(c.want).MatchString(err.Error()) {
				t.Fatalf("got %v, %v, want %s", s, err, c.want)
			}
			if code := exitCode(err); code != exitUsage {
				t.Errorf("exit code %d", code)
			}
		})
	}
}

// Fractions are percentages, too, paths may begin with the home directory, and the built-in
// model has a name, wherever they are written.
func TestFormsOfValues(t *testing.T) {
	t.Setenv("HOME", "/home/me")
	for name, from := range map[string]struct {
		args      []string
		variables map[string]string
		file      string
	}{
		"flags": {[]string{"--offload-fraction", "37.5%", "--gpu-memory-utilization", "80%", "--model", "~/m", "--policy", "~/p.json"}, nil, ""},
		"variables": {nil, map[string]string{
			"MOESERVE_OFFLOAD_FRACTION": "37.5%", "MOESERVE_GPU_MEMORY_UTILIZATION": "80%", "MOESERVE_MODEL": "~/m", "MOESERVE_POLICY": "~/p.json",
		}, ""},
		"file": {nil, nil, "offload-fraction: 37.5%\ngpu-memory-utilization: 80%\nmodel: ~/m\npolicy: ~/p.json\n"},
	} {
		s, err := read(t, from.args, from.variables, from.file)
		if err != nil {
			t.Fatalf("%s: %v", name, err)
		}
		if s.Offload.Fraction != 0.375 || s.Device.GPUMemoryUtilization != 0.8 || s.Model.Name != "/home/me/m" || s.Plan.Policy != "/home/me/p.json" {
			t.Errorf("%s: %+v", name, s)
		}
		for key := range from.variables {
			t.Setenv(key, "")
		}
	}
	if s, err := read(t, []string{"--model", "built-in"}, nil, ""); err != nil || s.Model.Name != "" {
		t.Errorf("%+v, %v", s, err)
	}
	for _, c := range []struct {
		args []string
		want bool
	}{
		{nil, true},
		{[]string{"--enable-prefix-caching=false"}, false},
		{[]string{"--no-enable-prefix-caching"}, false},
		{[]string{"--no-enable-prefix-caching=false"}, true},
		{[]string{"--no-enable-prefix-caching", "--enable-prefix-caching"}, true},
	} {
		s, err := read(t, c.args, map[string]string{"MOESERVE_ENABLE_PREFIX_CACHING": ""}, "")
		if err != nil || s.KV.EnablePrefixCaching != c.want || (s.sources["enable-prefix-caching"].Kind == "flag") != (c.args != nil) {
			t.Errorf("%v: %v from %v, %v", c.args, s.KV.EnablePrefixCaching, s.sources["enable-prefix-caching"], err)
		}
	}
	if _, err := read(t, nil, nil, "max-tokens: 50%\n"); err == nil {
		t.Error("half a number of tokens")
	}
}

func TestFilesWithoutSettings(t *testing.T) {
	for _, file := range []string{"# nothing yet\n", "---\n", "{}\n", "null\n"} {
		s, err := read(t, nil, nil, file)
		if err != nil || s.Settings != configs.Defaults() || s.file != defaultFile {
			t.Errorf("%q: %+v, %v", file, s, err)
		}
	}
}

func TestNamedFile(t *testing.T) {
	dir := t.TempDir()
	named := filepath.Join(dir, "named.yaml")
	if err := os.WriteFile(named, []byte("seed: 0x10\nmodel: '12'\n"), 0o666); err != nil {
		t.Fatal(err)
	}
	for name, c := range map[string]struct {
		args      []string
		variables map[string]string
	}{
		"flag":     {[]string{"--config", named}, map[string]string{configVariable: "gone.yaml"}},
		"variable": {nil, map[string]string{configVariable: named}},
	} {
		// The one in the current directory is not read.
		s, err := read(t, c.args, c.variables, "seed: 3\nraw: true\n")
		if err != nil {
			t.Fatalf("%s: %v", name, err)
		}
		if s.Generate.Seed != 16 || s.Model.Name != "12" || s.Generate.Raw || s.file != named {
			t.Errorf("%s: %+v", name, s)
		}
	}
}

// Variables that tests are steered with must not be taken for settings.
func TestTestVariablesAreKnown(t *testing.T) {
	racedetector.SkipSequential(t)
	used := regexp.MustCompile(`(?:Getenv|LookupEnv)\("(MOESERVE_\w+)"\)`)
	found := 0
	err := filepath.WalkDir(filepath.Join("..", ".."), func(path string, d os.DirEntry, err error) error {
		if err != nil || d.IsDir() || !strings.HasSuffix(path, "_test.go") {
			return err
		}
		text, err := os.ReadFile(path)
		if err != nil {
			return err
		}
		for _, m := range used.FindAllSubmatch(text, -1) {
			found++
			if _, err := readVariables([]string{string(m[1]) + "=1"}); err != nil {
				t.Errorf("%s: %v (otherVariables lists those of tests)", path, err)
			}
		}
		return nil
	})
	if err != nil {
		t.Fatal(err)
	}
	if found == 0 {
		t.Error("no test reads a variable of ours: the pattern has lost them")
	}
}

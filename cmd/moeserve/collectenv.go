package main

import (
	"bufio"
	"errors"
	"os"
	"reflect"
	"runtime"
	"slices"
	"strconv"
	"strings"

	"github.com/spf13/cobra"
	"golang.org/x/sys/cpu"

	"github.com/moeserve/moeserve/configs"
	"github.com/moeserve/moeserve/node/devices"
	"github.com/moeserve/moeserve/node/sizing"
)

func newCollectEnv(s *streams) *cobra.Command {
	cmd := &cobra.Command{
		Use:     "collect-env",
		Short:   "Print what a bug report needs about this machine",
		Example: "  moeserve collect-env --json env.json",
		Args:    noArguments,
		RunE: func(cmd *cobra.Command, _ []string) error {
			set, err := readSettings(cmd.Flags(), os.Environ())
			if err != nil {
				return err
			}
			return collectEnv(s, set)
		},
	}
	keys := slices.DeleteFunc(slices.Clone(configs.Schema), func(k configs.Key) bool { return k.Name != "json" })
	addSettings(cmd.Flags(), keys)
	return cmd
}

// environment is what collect-env --json writes.
type environment struct {
	Build build `json:"build"`
	// System is the operating system's name and release, as far as it reports them.
	System      string   `json:"system"`
	CPU         string   `json:"cpu"`
	CPUFeatures []string `json:"cpu_features"`
	// CPUs that the machine shows; Threads is how many Go uses at once.
	CPUs    int `json:"cpus"`
	Threads int `json:"threads"`
	// Memory in bytes; 0 where the system does not say.
	MemoryBytes    int64 `json:"memory_bytes"`
	AvailableBytes int64 `json:"memory_available_bytes"`
	// GPUs in words, or why there are none.
	GPUs    []string `json:"gpus"`
	GPUNote string   `json:"gpu_note"`
	// Variables of ours and of Go's runtime that are set.
	Variables []string `json:"variables"`
}

func newEnvironment(environ []string) environment {
	e := environment{
		Build: buildInfo(), System: runtime.GOOS, CPU: runtime.GOARCH, CPUFeatures: cpuFeatures(),
		CPUs: runtime.NumCPU(), Threads: runtime.GOMAXPROCS(0),
		GPUs: []string{}, Variables: []string{},
	}
	gpus, note := devices.GPUs()
	e.GPUs, e.GPUNote = append(e.GPUs, gpus...), note
	if release := procField("/proc/version", ""); release != "" {
		e.System = release
	}
	if model := procField("/proc/cpuinfo", "model name"); model != "" {
		e.CPU = model
	}
	if kib, err := strconv.ParseInt(strings.TrimSuffix(procField("/proc/meminfo", "MemTotal"), " kB"), 10, 64); err == nil {
		e.MemoryBytes = kib << 10
	}
	e.AvailableBytes, _ = devices.AvailableMemory()
	for _, v := range slices.Sorted(slices.Values(environ)) {
		name, _, _ := strings.Cut(v, "=")
		if strings.HasPrefix(name, variablePrefix) || name == "GOMAXPROCS" || name == "GOMEMLIMIT" || name == "GOGC" || name == "GODEBUG" {
			if slices.ContainsFunc(configs.Schema, func(k configs.Key) bool { return k.Secret && k.Variable() == name }) {
				v = name + "=" + hidden
			}
			e.Variables = append(e.Variables, v)
		}
	}
	return e
}

// procField returns the value of the first line "name : value" of a file of Linux's
// /proc, or without a name its first line; empty where there is none.
func procField(path, name string) string {
	f, err := os.Open(path)
	if err != nil {
		return ""
	}
	defer f.Close() //nolint:errcheck // only read from
	for lines := bufio.NewScanner(f); lines.Scan(); {
		if name == "" {
			return strings.TrimSpace(lines.Text())
		}
		key, value, _ := strings.Cut(lines.Text(), ":")
		if strings.TrimSpace(key) == name {
			return strings.TrimSpace(value)
		}
	}
	return ""
}

// cpuFeatures lists what package cpu finds on this processor. Its variables are
// structs of booleans named as the features are.
func cpuFeatures() []string {
	features := []string{}
	for _, v := range []any{cpu.X86, cpu.ARM64} {
		s := reflect.ValueOf(v)
		for i := range s.NumField() {
			name, ok := strings.CutPrefix(s.Type().Field(i).Name, "Has")
			if ok && s.Field(i).Kind() == reflect.Bool && s.Field(i).Bool() {
				features = append(features, strings.ToLower(name))
			}
		}
	}
	return features
}

func collectEnv(s *streams, set *settings) (err error) {
	res, err := s.openResult(set.Output.JSON)
	if err != nil {
		return err
	}
	defer func() { err = errors.Join(err, res.close()) }()
	e := newEnvironment(os.Environ())
	if !res.onStdout() {
		t := newTable()
		t.line("moeserve\t%s", e.Build)
		t.line("system\t%s", e.System)
		t.line("CPU\t%s, %d logical CPUs, Go uses %d", e.CPU, e.CPUs, e.Threads)
		t.line("CPU features\t%s", strings.Join(e.CPUFeatures, " "))
		if e.MemoryBytes > 0 {
			t.line("memory\t%s, %s available", sizing.Bytes(e.MemoryBytes), sizing.Bytes(e.AvailableBytes))
		}
		if len(e.GPUs) == 0 {
			t.line("GPUs\tnone: %s", e.GPUNote)
		}
		for _, g := range e.GPUs {
			t.line("GPU\t%s", g)
		}
		for _, v := range e.Variables {
			t.line("variable\t%s", v)
		}
		if err := t.print(s.out); err != nil {
			return err
		}
	}
	return res.write(e)
}

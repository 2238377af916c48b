package offload

import (
	"errors"
	"fmt"
	"slices"
)

// Spec makes the mediums of a configuration.
type Spec interface {
	// Open makes the mediums, the fastest first. With an error it returns those that the
	// caller must close.
	Open(Env) ([]*Medium, error)
}

// Names of the built-in specs. CPUSpec's is vLLM's; NativeSpec is the name of its
// --kv-offloading-backend, and the same.
const (
	NativeSpec = "native"
	CPUSpec    = "CPUOffloadingSpec"
	PeerSpec   = "PeerOffloadingSpec"
	FileSpec   = "FileOffloadingSpec"
	// TieredSpec makes every tier that has a size.
	TieredSpec = "TieredOffloadingSpec"
)

var specs = registry[func(Config) (Spec, error)]{key: "spec_name", by: map[string]func(Config) (Spec, error){
	NativeSpec: builtin(CPU),
	CPUSpec:    builtin(CPU),
	PeerSpec:   builtin(PeerGPU),
	FileSpec:   builtin(File),
	TieredSpec: builtin(PeerGPU, CPU, File),
}}

// Register adds a spec, which spec_name then selects. It panics if there is one of that name.
func Register(name string, construct func(Config) (Spec, error)) { specs.add(name, construct) }

// newSpec returns the configuration's spec.
func newSpec(c Config) (Spec, error) {
	construct, err := specs.find(c.SpecName)
	if err != nil {
		return nil, err
	}
	return construct(c)
}

// builtinSpec makes those of the mediums that have a size.
type builtinSpec struct{ c Config }

// builtin returns the constructor of a spec of these mediums. Sizes of others are refused.
func builtin(mediums ...string) func(Config) (Spec, error) {
	return func(c Config) (Spec, error) {
		any := false
		for _, s := range []struct {
			medium, key string
			set         bool
		}{
			{PeerGPU, "num_gpu_blocks", c.GPUBlocks > 0},
			{CPU, c.cpuKey(), c.CPUBlocks > 0 || c.CPUBytes > 0},
			{File, "num_file_blocks", c.FileBlocks > 0},
		} {
			here := slices.Contains(mediums, s.medium)
			if s.set && !here {
				return nil, fmt.Errorf("spec_name %s has no tier %s, and %s is set; remove one of them, or use spec_name %s", c.SpecName, s.medium, s.key, TieredSpec)
			}
			if !s.set && here && len(mediums) == 1 {
				return nil, fmt.Errorf("spec_name is %s, and %s is not set; set it to the tier's size", c.SpecName, s.key)
			}
			any = any || s.set
		}
		if !any {
			return nil, errors.New("no tier has a size; set --kv-offloading-size, or num_gpu_blocks, num_cpu_blocks, cpu_bytes_to_use or num_file_blocks in --kv-transfer-config")
		}
		return builtinSpec{c}, nil
	}
}

// Open implements Spec.
func (s builtinSpec) Open(e Env) (all []*Medium, err error) {
	add := func(m *Medium, failed error) bool {
		if m != nil {
			all = append(all, m)
		}
		err = failed
		return err == nil
	}
	c := s.c
	if c.GPUBlocks > 0 && !add(openPeers(e, c)) {
		return all, err
	}
	if n := max(int64(c.CPUBlocks), c.CPUBytes/e.BlockBytes); n > 0 && !add(openCPU(e, int(n), c.cpuKey())) {
		return all, err
	}
	if c.FileBlocks > 0 {
		add(openFiles(e, c))
	}
	return all, err
}

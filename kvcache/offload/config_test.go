package offload

import (
	"reflect"
	"strings"
	"testing"
)

func TestParseTransferConfig(t *testing.T) {
	for text, want := range map[string]Config{
		`{"kv_connector": "OffloadingConnector", "kv_role": "kv_both", "kv_connector_extra_config": {"num_cpu_blocks": 1000}}`: {CPUBlocks: 1000},
		`{"kv_connector_extra_config": {"spec_name": "CPUOffloadingSpec", "num_cpu_blocks": 10, "block_size": 64, "eviction_policy": "arc"}}`: {
			SpecName: CPUSpec, CPUBlocks: 10, BlockTokens: 64, EvictionPolicy: "arc",
		},
		`{"kv_connector_extra_config": {"num_gpu_blocks": 5, "dest_gpu_id": 1, "block_size_factor": 4, "durability": "lossy"}}`: {
			GPUBlocks: 5, DestGPUs: []int{1}, BlockFactor: 4, Durability: map[string]Durability{PeerGPU: Lossy, CPU: Lossy, File: Lossy},
		},
		`{"kv_connector_extra_config": {"num_gpu_blocks": 5, "num_cpu_blocks": 6, "num_file_blocks": 7, "directory": "/d", "dest_gpu_id": [1, 3], "durability": {"PEER_GPU": "lossy", "CPU": "backed"}}}`: {
			GPUBlocks: 5, CPUBlocks: 6, FileBlocks: 7, Directory: "/d", DestGPUs: []int{1, 3}, Durability: map[string]Durability{PeerGPU: Lossy, CPU: Backed},
		},
		`{"kv_connector": "OffloadingConnector", "kv_role": "kv_both"}`:                                     {},
		`{"kv_connector_extra_config": {"spec_name": "CPUOffloadingSpec", "cpu_bytes_to_use": 4294967296}}`: {SpecName: CPUSpec, CPUBytes: 4 << 30},
		`{"kv_connector_extra_config": {"cpu_bytes_to_use": 1e9}}`:                                          {CPUBytes: 1e9},
		`{"kv_connector_extra_config": {"cpu_bytes_to_use": 1073741824.5}}`:                                 {CPUBytes: 1 << 30},
		`{"kv_connector_extra_config": {"num_cpu_blocks": 8, "store_threshold": 3, "max_tracker_size": 100, "load_policy": "always"}}`: {
			CPUBlocks: 8, StoreThreshold: 3, MaxTrackerSize: 100, LoadPolicy: "always",
		},
		`{"kv_connector_extra_config": {"eviction_policy": "arc"}}`: {EvictionPolicy: "arc"}, // the size is in another setting
	} {
		if got, err := ParseTransferConfig([]byte(text)); err != nil || !reflect.DeepEqual(got, want) || got.Enabled() != !reflect.DeepEqual(want, Config{}) {
			t.Errorf("%s: %+v, %v", text, got, err)
		}
	}
}

func TestBadTransferConfig(t *testing.T) {
	extra := func(s string) string { return `{"kv_connector_extra_config": {` + s + `}}` }
	for text, want := range map[string]string{
		``:                                  "--kv-transfer-config: EOF",
		`[]`:                                "--kv-transfer-config: json",
		`{"kv_connector": "NixlConnector"}`: `kv_connector is "NixlConnector"; only "OffloadingConnector"`,
		`{"kv_role": "kv_producer"}`:        `kv_role is "kv_producer"; only "kv_both"`,
		`{"kv_port": 7}`:                    `unknown field "kv_port"`,
		`{} {}`:                             "unexpected text",
		extra(`"num_cpu_block": 1`):         `unknown key "num_cpu_block"`,
		extra(`"num_cpu_blocks": 0`):        "num_cpu_blocks is 0; it must be positive",
		extra(`"num_cpu_blocks": 9000000000000000000`):                               "it must be at most 2147483646",
		extra(`"num_gpu_blocks": 2147483647`):                                        "num_gpu_blocks is 2147483647; it must be at most",
		extra(`"num_cpu_blocks": -3`):                                                "num_cpu_blocks is -3",
		extra(`"num_cpu_blocks": "many"`):                                            "num_cpu_blocks: json",
		extra(`"num_cpu_blocks": 1.5`):                                               "num_cpu_blocks: json",
		extra(`"num_cpu_blocks": 1, "x": 1`):                                         `unknown key "x"`,
		extra(`"num_file_blocks": 1`):                                                "directory is not",
		extra(`"num_cpu_blocks": 1, "directory": "/d"`):                              "num_file_blocks is not",
		extra(`"num_cpu_blocks": 1, "dest_gpu_id": 1`):                               "num_gpu_blocks is not set",
		extra(`"num_gpu_blocks": 1, "dest_gpu_id": -1`):                              "GPU -1",
		extra(`"num_gpu_blocks": 1, "dest_gpu_id": "one"`):                           "number of a GPU",
		extra(`"num_cpu_blocks": 1, "eviction_policy": "fifo"`):                      `eviction_policy is "fifo"`,
		extra(`"num_cpu_blocks": 1, "durability": "gone"`):                           `is "gone"; it must be "backed" or "lossy"`,
		extra(`"num_cpu_blocks": 1, "durability": {"DISK": "lossy"}`):                `unknown medium "DISK"`,
		extra(`"cpu_bytes_to_use": 0`):                                               "cpu_bytes_to_use: it is 0; it must be a positive number of bytes",
		extra(`"cpu_bytes_to_use": -1e9`):                                            "must be a positive number of bytes",
		extra(`"cpu_bytes_to_use": 1e30`):                                            "must be a positive number of bytes",
		extra(`"cpu_bytes_to_use": "4GiB"`):                                          `it is "4GiB"; it must be a positive number`,
		extra(`"cpu_bytes_to_use": 1e9, "num_cpu_blocks": 7`):                        "cpu_bytes_to_use) and num_cpu_blocks both set",
		extra(`"cpu_bytes_to_use": 1e9, "spec_name": "FileOffloadingSpec"`):          "cpu_bytes_to_use) is set; remove one of them",
		extra(`"num_cpu_blocks": 1, "store_policy": "sometimes"`):                    `store_policy is "sometimes"; it must be one of`,
		extra(`"num_cpu_blocks": 1, "load_policy": "sometimes"`):                     `load_policy is "sometimes"; it must be one of`,
		extra(`"num_cpu_blocks": 1, "store_threshold": -1`):                          "store_threshold is -1",
		extra(`"num_cpu_blocks": 1, "max_tracker_size": 0`):                          "max_tracker_size is 0; it must be positive",
		extra(`"num_cpu_blocks": 1, "store_threshold": 2, "store_policy": "filled"`): "store_policy filled has none; use store_policy reused",
		extra(`"num_cpu_blocks": 1, "durability": 3`):                                "durability: it must be",
		extra(`"num_cpu_blocks": 1, "spec_name": "FileOffloadingSpec"`):              "spec_name FileOffloadingSpec has no tier CPU, and num_cpu_blocks is set",
		extra(`"num_gpu_blocks": 1, "spec_name": "CPUOffloadingSpec"`):               "num_gpu_blocks is set",
		extra(`"spec_name": "CPUOffloadingSpec"`):                                    "num_cpu_blocks is not set",
		extra(`"spec_name": "TieredOffloadingSpec"`):                                 "no tier has a size",
		extra(`"num_cpu_blocks": 1, "spec_name": "OtherSpec"`):                       `spec_name is "OtherSpec"; it must be one of CPUOffloadingSpec`,
		extra(`"num_cpu_blocks": 1, "block_size": 0`):                                "block_size is 0",
		extra(`"num_cpu_blocks": 1, "block_size_factor": -1`):                        "block_size_factor is -1",
	} {
		c, err := ParseTransferConfig([]byte(text))
		if err == nil {
			err = c.EnsureDefaults().Validate()
		}
		if err == nil || !strings.Contains(err.Error(), want) {
			t.Errorf("%s: %v, want an error with %q", text, err, want)
		}
	}
	for want, c := range map[string]Config{
		"--kv-offloading-size (or cpu_bytes_to_use) and num_cpu_blocks": {CPUBytes: 1, CPUBlocks: 1},
		"cpu_bytes_to_use) is -1": {CPUBytes: -1},
		"no tier has a size":      {EvictionPolicy: "arc"},
	} {
		if err := c.EnsureDefaults().Validate(); err == nil || !strings.Contains(err.Error(), want) {
			t.Errorf("%+v: %v, want an error with %q", c, err, want)
		}
	}
}

func FuzzParseTransferConfig(f *testing.F) {
	f.Add(`{"kv_connector_extra_config": {"num_gpu_blocks": 5, "dest_gpu_id": [1, 3], "durability": {"PEER_GPU": "lossy"}}}`)
	f.Fuzz(func(t *testing.T, text string) {
		c, err := ParseTransferConfig([]byte(text))
		if err != nil {
			return
		}
		if c.CPUBlocks == 0 && (c.SpecName == "" || c.SpecName == TieredSpec) {
			c.CPUBytes = 1 << 30 // by another setting
		}
		if err := c.EnsureDefaults().Validate(); err != nil && c.CPUBytes > 0 {
			t.Errorf("%q: %v", text, err)
		}
	})
}

func TestTierSizes(t *testing.T) {
	for name, x := range map[string]struct {
		config Config
		want   []TierSize
		err    string
	}{
		"peers":             {Config{GPUBlocks: 7}, []TierSize{{PeerGPU, 7, 16, 1000, 0}}, ""},
		"two blocks in one": {Config{CPUBlocks: 10, BlockFactor: 2}, []TierSize{{CPU, 10, 32, 2000, 20000}}, ""},
		"bytes":             {Config{CPUBytes: 4999}, []TierSize{{CPU, 4, 16, 1000, 4000}}, ""},
		"files":             {Config{CPUBlocks: 1, FileBlocks: 7}, []TierSize{{CPU, 1, 16, 1000, 1000}, {File, 7, 16, 1000, 32 * 7 * 1000}}, ""},
		"large blocks":      {Config{FileBlocks: 7, BlockTokens: 16 * 5000}, []TierSize{{File, 7, 80000, 5000000, 32 * 5000000}}, ""},
		"many files":        {Config{FileBlocks: 1 << 20}, []TierSize{{File, 1 << 20, 16, 1000, 32 * 8388 * 1000}}, ""},
		"shared files":      {Config{FileBlocks: 33, BlockTokens: 16 * 1000}, []TierSize{{File, 33, 16000, 1000000, 32 * 3 * 1000000}}, ""},
		"too small":         {Config{CPUBytes: 999}, nil, "cpu_bytes_to_use) of 999 bytes is less than one block of 1000 bytes"},
		"too many bytes":    {Config{CPUBlocks: maxBlocks, BlockFactor: maxBlocks}, nil, "in tier CPU are more than there can be; lower its size"},
		"no multiple":       {Config{CPUBlocks: 1, BlockTokens: 5}, nil, "block_size is 5 tokens"},
	} {
		got, err := x.config.Tiers(1000, 16)
		if !reflect.DeepEqual(got, x.want) || (err == nil) != (x.err == "") || err != nil && !strings.Contains(err.Error(), x.err) {
			t.Errorf("%s: %+v, %v; want %+v", name, got, err, x.want)
		}
	}
}

// TestGroupsOfFiles: all streams take part in a job, unless its blocks are small, and no group is larger than a buffer.
func TestGroupsOfFiles(t *testing.T) {
	for _, c := range []struct {
		blockBytes    int64
		tier, job     int
		group, buffer int
	}{
		{2 << 20, 1000, 7, 1, 4},
		{2 << 20, 1000, 33, 3, 4},
		{2 << 20, 1000, 500, 4, 4},
		{2 << 20, 20, 20, 2, 2},
		{9 << 20, 1000, 500, 1, 1},
		{1 << 10, 1 << 20, 100, 100, 8 << 10},
		{1 << 10, 1 << 20, 1 << 20, 8 << 10, 8 << 10},
		{1 << 10, 7, 7, 7, 7},
	} {
		f := fileMemory{env: Env{BlockBytes: c.blockBytes}, perBuffer: int(bufferBlocks(c.blockBytes, c.tier))}
		if got := min(c.job, f.groupBlocks(c.job)); got != c.group || f.perBuffer != c.buffer {
			t.Errorf("%+v: groups of %d, buffers of %d blocks", c, got, f.perBuffer)
		}
	}
}

package offload

import (
	"bytes"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"maps"
	"math"
	"reflect"
	"slices"
	"strings"

	"github.com/moeserve/moeserve/kvcache/tier"
)

// Durability of a tier's blocks.
type Durability string

// The durabilities.
const (
	// Backed blocks are stored in the next tier, too.
	Backed Durability = "backed"
	// Lossy blocks are only where they are stored first.
	Lossy Durability = "lossy"
)

// Config says which tiers there are. It mirrors the kv_connector_extra_config of vLLM's
// --kv-transfer-config: the names in parentheses are its keys.
type Config struct {
	// SpecName (spec_name) is the name of a registered Spec. Default: TieredOffloadingSpec,
	// which makes every tier that has a size.
	SpecName string
	// GPUBlocks (num_gpu_blocks) is the size of the tier in peers' memory, CPUBlocks
	// (num_cpu_blocks) of that in pinned host memory, FileBlocks (num_file_blocks) of that in
	// files; all in blocks of the tiers.
	GPUBlocks, CPUBlocks, FileBlocks int
	// CPUBytes (cpu_bytes_to_use, or --kv-offloading-size, there in GiB) is the size in host
	// memory in bytes, in place of CPUBlocks.
	CPUBytes int64
	// DestGPUs (dest_gpu_id) are the peers that hold the tier. Default: all of harvest's.
	DestGPUs []int
	// BlockTokens (block_size) is the number of tokens of a tier's block, BlockFactor
	// (block_size_factor) how many blocks of the GPU it holds: only one need be set. Default: 1
	// block.
	BlockTokens, BlockFactor int
	// EvictionPolicy (eviction_policy) is the name of a policy that package tier knows: lru, arc,
	// or a registered one. Default: lru.
	EvictionPolicy string
	// StorePolicy (store_policy) and LoadPolicy (load_policy) are names of registered policies.
	// Defaults: StoreFilled, or StoreReused with a StoreThreshold above 1; LoadCost.
	StorePolicy, LoadPolicy string
	// StoreThreshold (store_threshold) and MaxTrackerSize (max_tracker_size) are for StoreReused:
	// the number of sequences that must have had a block, and how many blocks at least are
	// remembered.
	// Defaults: 2 and 64,000.
	StoreThreshold, MaxTrackerSize int
	// Directory (directory) of the files. A new folder in it is removed by Close, or, where the
	// process is killed, by the next one that uses the directory.
	Directory string
	// Durability (durability) by medium. Default: Backed.
	Durability map[string]Durability
}

// Enabled reports whether anything is set: if no tier then has a size, Validate says so.
func (c Config) Enabled() bool { return !reflect.DeepEqual(c, Config{}) }

// EnsureDefaults returns c with its defaults set.
func (c Config) EnsureDefaults() Config {
	if c.SpecName == "" {
		c.SpecName = TieredSpec
	}
	if c.EvictionPolicy == "" {
		c.EvictionPolicy = tier.PolicyLRU
	}
	if c.StorePolicy == "" {
		if c.StorePolicy = StoreFilled; c.StoreThreshold > 1 {
			c.StorePolicy = StoreReused
		}
	}
	if c.LoadPolicy == "" {
		c.LoadPolicy = LoadCost
	}
	return c
}

// Validate reports the first setting that is invalid or contradicts another.
func (c Config) Validate() error {
	if err := c.validateValues(); err != nil {
		return err
	}
	_, err := newSpec(c)
	return err
}

// maxBlocks is the largest number of blocks that a tier's account has.
const maxBlocks = math.MaxInt32 - 1

// validateValues is Validate, except for what the spec says of the tiers' sizes.
func (c Config) validateValues() error {
	for _, f := range []struct {
		key   string
		value int
	}{
		{"num_gpu_blocks", c.GPUBlocks},
		{"num_cpu_blocks", c.CPUBlocks},
		{"num_file_blocks", c.FileBlocks},
		{"block_size", c.BlockTokens},
		{"block_size_factor", c.BlockFactor},
		{"store_threshold", c.StoreThreshold},
		{"max_tracker_size", c.MaxTrackerSize},
	} {
		if f.value < 0 {
			return fmt.Errorf("%s is %d; it must be positive", f.key, f.value)
		}
		if f.value > maxBlocks {
			return fmt.Errorf("%s is %d; it must be at most %d", f.key, f.value, maxBlocks)
		}
	}
	switch {
	case c.CPUBytes < 0:
		return fmt.Errorf("%s is %d bytes; it must be positive", cpuBytesNames, c.CPUBytes)
	case c.CPUBytes > 0 && c.CPUBlocks > 0:
		return fmt.Errorf("%s and num_cpu_blocks both set the size in host memory; set one of them", cpuBytesNames)
	case !slices.Contains(tier.Policies(), c.EvictionPolicy):
		return fmt.Errorf("eviction_policy is %q; it must be one of %s", c.EvictionPolicy, strings.Join(tier.Policies(), ", "))
	case c.StoreThreshold > 1 && slices.Contains([]string{StoreFilled, StoreReleased, StorePreempted}, c.StorePolicy):
		return fmt.Errorf("store_threshold is %d, and store_policy %s has none; use store_policy %s, or remove one of them", c.StoreThreshold, c.StorePolicy, StoreReused)
	case len(c.DestGPUs) > 0 && c.GPUBlocks == 0:
		return errors.New("dest_gpu_id names a peer, and num_gpu_blocks is not set; set it to the peer tier's size")
	case c.Directory != "" && c.FileBlocks == 0:
		return errors.New("directory is set, and num_file_blocks is not; set it to the file tier's size")
	case c.Directory == "" && c.FileBlocks > 0:
		return errors.New("num_file_blocks is set, and directory is not; set it to a folder for the files")
	}
	for medium, d := range c.Durability {
		if d != Backed && d != Lossy {
			return fmt.Errorf("durability of %s is %q; it must be %q or %q", medium, d, Backed, Lossy)
		}
	}
	if _, err := specs.find(c.SpecName); err != nil {
		return err
	}
	_, _, err := c.policies()
	return err
}

// policies makes the policies of stores and loads.
func (c Config) policies() (StorePolicy, LoadPolicy, error) {
	newStore, err := storePolicies.find(c.StorePolicy)
	if err != nil {
		return nil, nil, err
	}
	newLoad, err := loadPolicies.find(c.LoadPolicy)
	if err != nil {
		return nil, nil, err
	}
	store, err := newStore(c)
	if err != nil {
		return nil, nil, fmt.Errorf("store_policy %s: %w", c.StorePolicy, err)
	}
	load, err := newLoad(c)
	if err != nil {
		return nil, nil, fmt.Errorf("load_policy %s: %w", c.LoadPolicy, err)
	}
	return store, load, nil
}

// cpuBytesNames are the settings that set Config.CPUBytes, for errors.
const cpuBytesNames = "--kv-offloading-size (or cpu_bytes_to_use)"

// cpuKey is the setting of the size in host memory.
func (c Config) cpuKey() string {
	if c.CPUBytes > 0 {
		return cpuBytesNames
	}
	return "num_cpu_blocks"
}

// factor is the number of the GPU's blocks in a tier's block.
func (c Config) factor(blockTokens int) (int, error) {
	switch {
	case c.BlockTokens == 0:
		return max(1, c.BlockFactor), nil
	case c.BlockTokens%blockTokens != 0:
		return 0, fmt.Errorf("block_size is %d tokens; it must be a multiple of the %d tokens of --block-size", c.BlockTokens, blockTokens)
	case c.BlockFactor > 0 && c.BlockFactor*blockTokens != c.BlockTokens:
		return 0, fmt.Errorf("block_size of %d tokens and block_size_factor of %d contradict each other with blocks of %d tokens; set one of them", c.BlockTokens, c.BlockFactor, blockTokens)
	}
	return c.BlockTokens / blockTokens, nil
}

// TierSize is the capacity of one tier.
type TierSize struct {
	Medium string
	// Blocks of the tier, of BlockTokens and BlockBytes each.
	Blocks, BlockTokens int
	BlockBytes          int64
	// HostBytes is the pinned host memory that it takes: of its blocks, or of staging buffers.
	HostBytes int64
}

// Tiers are those of the built-in mediums, fastest first, where a block of the GPU has so many
// bytes and tokens. A size of less than one block is an error.
func (c Config) Tiers(blockBytes int64, blockTokens int) (all []TierSize, err error) {
	factor, err := c.factor(blockTokens)
	if err != nil {
		return nil, err
	}
	blockBytes, blockTokens = blockBytes*int64(factor), blockTokens*factor
	cpu := int64(c.CPUBlocks)
	if c.CPUBytes > 0 {
		if cpu = c.CPUBytes / blockBytes; cpu == 0 {
			return nil, fmt.Errorf("%s of %d bytes is less than one block of %d bytes; raise it", cpuBytesNames, c.CPUBytes, blockBytes)
		}
	}
	for _, t := range []TierSize{
		{Medium: PeerGPU, Blocks: c.GPUBlocks},
		{Medium: CPU, Blocks: int(cpu), HostBytes: cpu * blockBytes},
		{Medium: File, Blocks: c.FileBlocks, HostBytes: stagingBuffers * bufferBlocks(blockBytes, c.FileBlocks) * blockBytes},
	} {
		if int64(t.Blocks) > math.MaxInt64/blockBytes {
			return nil, fmt.Errorf("%d blocks of %d bytes in tier %s are more than there can be; lower its size", t.Blocks, blockBytes, t.Medium)
		}
		if t.Blocks > 0 {
			t.BlockTokens, t.BlockBytes = blockTokens, blockBytes
			all = append(all, t)
		}
	}
	return all, nil
}

// transferConfig is the JSON of --kv-transfer-config.
type transferConfig struct {
	Connector string                     `json:"kv_connector"`
	Role      string                     `json:"kv_role"`
	Extra     map[string]json.RawMessage `json:"kv_connector_extra_config"`
}

// What kv_connector and kv_role must be, where they are set.
const (
	connector = "OffloadingConnector"
	role      = "kv_both"
)

// extraKeys are the keys of kv_connector_extra_config, and where their values go.
var extraKeys = map[string]func(*Config) any{
	"spec_name":         func(c *Config) any { return &c.SpecName },
	"num_gpu_blocks":    func(c *Config) any { return &c.GPUBlocks },
	"num_cpu_blocks":    func(c *Config) any { return &c.CPUBlocks },
	"cpu_bytes_to_use":  func(c *Config) any { return (*byteCount)(&c.CPUBytes) },
	"num_file_blocks":   func(c *Config) any { return &c.FileBlocks },
	"dest_gpu_id":       func(c *Config) any { return (*gpuList)(&c.DestGPUs) },
	"block_size":        func(c *Config) any { return &c.BlockTokens },
	"block_size_factor": func(c *Config) any { return &c.BlockFactor },
	"eviction_policy":   func(c *Config) any { return &c.EvictionPolicy },
	"store_policy":      func(c *Config) any { return &c.StorePolicy },
	"store_threshold":   func(c *Config) any { return &c.StoreThreshold },
	"max_tracker_size":  func(c *Config) any { return &c.MaxTrackerSize },
	"load_policy":       func(c *Config) any { return &c.LoadPolicy },
	"directory":         func(c *Config) any { return &c.Directory },
	"durability":        func(c *Config) any { return (*durabilities)(&c.Durability) },
}

// positiveKeys are sizes, which must be positive where they are given.
var positiveKeys = []string{"num_gpu_blocks", "num_cpu_blocks", "num_file_blocks", "block_size", "block_size_factor", "max_tracker_size"}

// ParseTransferConfig reads the JSON of --kv-transfer-config. Unknown keys, and values that
// contradict each other, are errors that name them. It does not require a tier with a size,
// which other settings may give: Validate does.
func ParseTransferConfig(text []byte) (Config, error) {
	var t transferConfig
	if err := decode(text, &t); err != nil {
		return Config{}, fmt.Errorf("--kv-transfer-config: %w; the keys are kv_connector, kv_role, kv_connector_extra_config", err)
	}
	if t.Connector != "" && t.Connector != connector {
		return Config{}, fmt.Errorf("--kv-transfer-config: kv_connector is %q; only %q is supported", t.Connector, connector)
	}
	if t.Role != "" && t.Role != role {
		return Config{}, fmt.Errorf("--kv-transfer-config: kv_role is %q; only %q is supported", t.Role, role)
	}
	var c Config
	for _, key := range slices.Sorted(maps.Keys(t.Extra)) {
		to := extraKeys[key]
		if to == nil {
			return Config{}, fmt.Errorf("--kv-transfer-config: unknown key %q in kv_connector_extra_config; the keys are %s", key, strings.Join(slices.Sorted(maps.Keys(extraKeys)), ", "))
		}
		value := to(&c)
		if err := decode(t.Extra[key], value); err != nil {
			return Config{}, fmt.Errorf("--kv-transfer-config: %s: %w", key, err)
		}
		if n, ok := value.(*int); ok && slices.Contains(positiveKeys, key) && *n <= 0 {
			return Config{}, fmt.Errorf("--kv-transfer-config: %s is %d; it must be positive", key, *n)
		}
	}
	if err := c.EnsureDefaults().validateValues(); err != nil {
		return Config{}, fmt.Errorf("--kv-transfer-config: %w", err)
	}
	return c, nil
}

// decode reads one JSON value, with no unknown fields and nothing behind it.
func decode(text []byte, to any) error {
	d := json.NewDecoder(bytes.NewReader(text))
	d.DisallowUnknownFields()
	if err := d.Decode(to); err != nil {
		return err
	}
	if _, err := d.Token(); !errors.Is(err, io.EOF) {
		return errors.New("unexpected text behind the JSON value")
	}
	return nil
}

// byteCount is a number of bytes, also one with a fraction, which is left out, as scripts compute
// it.
type byteCount int64

// UnmarshalJSON implements json.Unmarshaler.
func (b *byteCount) UnmarshalJSON(text []byte) error {
	var n float64
	if err := json.Unmarshal(text, &n); err != nil || n < 1 || n >= 1<<62 {
		return fmt.Errorf("it is %s; it must be a positive number of bytes", text)
	}
	*b = byteCount(n)
	return nil
}

// gpuList is one number of a GPU, or a list of them.
type gpuList []int

// UnmarshalJSON implements json.Unmarshaler.
func (l *gpuList) UnmarshalJSON(text []byte) error {
	var one int
	if err := json.Unmarshal(text, &one); err == nil {
		*l = gpuList{one}
	} else if err := json.Unmarshal(text, (*[]int)(l)); err != nil {
		return errors.New("it must be the number of a GPU, or a list of numbers")
	}
	for _, i := range *l {
		if i < 0 {
			return fmt.Errorf("GPU %d; GPUs are numbered from 0", i)
		}
	}
	return nil
}

// durabilities is one durability for all tiers, or an object of one for each medium.
type durabilities map[string]Durability

// UnmarshalJSON implements json.Unmarshaler.
func (d *durabilities) UnmarshalJSON(text []byte) error {
	var all Durability
	if err := json.Unmarshal(text, &all); err == nil {
		*d = durabilities{PeerGPU: all, CPU: all, File: all}
		return nil
	}
	var each map[string]Durability
	if err := json.Unmarshal(text, &each); err != nil {
		return fmt.Errorf("it must be %q or %q, or an object with one for each of %s, %s, %s", Backed, Lossy, PeerGPU, CPU, File)
	}
	for medium := range each {
		if medium != PeerGPU && medium != CPU && medium != File {
			return fmt.Errorf("unknown medium %q; the mediums are %s, %s, %s", medium, PeerGPU, CPU, File)
		}
	}
	*d = each
	return nil
}

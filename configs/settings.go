package configs

import (
	"encoding"
	"fmt"
	"reflect"
	"strconv"
	"strings"
)

// Settings are what a run is configured with, in groups that go to different parts of
// it, each with its title in help. The tags of their fields are the keys: Schema says what
// each means, and what it may be.
type Settings struct {
	Model    Model    `mapstructure:",squash" title:"Model"`
	Device   Device   `mapstructure:",squash" title:"Devices"`
	Offload  Offload  `mapstructure:",squash" title:"Expert offloading"`
	Harvest  Harvest  `mapstructure:",squash" title:"Peer memory"`
	KV       KV       `mapstructure:",squash" title:"KV cache"`
	Batch    Batch    `mapstructure:",squash" title:"Batching"`
	Kernels  Kernels  `mapstructure:",squash" title:"Kernels"`
	Plan     Plan     `mapstructure:",squash" title:"Planning"`
	Generate Generate `mapstructure:",squash" title:"Generation"`
	Serve    Serve    `mapstructure:",squash" title:"Server"`
	Bench    Bench    `mapstructure:",squash" title:"Workload"`
	Output   Output   `mapstructure:",squash" title:"Output"`
}

// Model says which weights.
type Model struct {
	// Name is a checkpoint's directory, a preset, or empty for the built-in model.
	Name            string     `mapstructure:"model"`
	LoadFormat      LoadFormat `mapstructure:"load-format"`
	DummyRouting    string     `mapstructure:"dummy-routing"`
	NumHiddenLayers int        `mapstructure:"num-hidden-layers"`
}

// Device says what to compute on.
type Device struct {
	Kind      DeviceKind `mapstructure:"device"`
	GPU       int        `mapstructure:"gpu"`
	Peers     string     `mapstructure:"peers"`
	HostPaths string     `mapstructure:"host-paths"`
	// HostPathsMode is TakeHostPaths or WaitHostPaths.
	HostPathsMode        string  `mapstructure:"host-paths-mode"`
	HostMemoryGiB        float64 `mapstructure:"host-memory-gib"`
	Emulate              string  `mapstructure:"emulate"`
	GPUMemoryUtilization float64 `mapstructure:"gpu-memory-utilization"`
	// SleepMemory is KeptSleepMemory, ReservedSleepMemory or ReleasedSleepMemory.
	SleepMemory string `mapstructure:"sleep-memory"`
}

// The values of Device.HostPathsMode: a relay whose link other programs use, too, goes on at the share that it
// gets of it, or leaves copies to other links for a while.
const (
	TakeHostPaths = "take"
	WaitHostPaths = "wait"
)

// The values of Device.SleepMemory: the host's memory for the weights of a sleeping model is
// allocated by the first sleep and kept, allocated at the start, or released by each wake.
const (
	KeptSleepMemory     = "keep"
	ReservedSleepMemory = "start"
	ReleasedSleepMemory = "release"
)

// Offload says which experts do not live on the compute device, and where they do.
type Offload struct {
	Fraction         float64 `mapstructure:"offload-fraction"`
	Tier             Tier    `mapstructure:"offload-tier"`
	ResidentExperts  string  `mapstructure:"resident-experts"`
	DynamicResidency bool    `mapstructure:"dynamic-residency"`
}

// Harvest says how peers' memory is borrowed.
type Harvest struct {
	Policy            string  `mapstructure:"harvest-policy"`
	Clients           string  `mapstructure:"harvest-clients"`
	EvacuateAt        float64 `mapstructure:"harvest-evacuate-at"`
	Weight            float64 `mapstructure:"harvest-weight"`
	Headroom          string  `mapstructure:"harvest-headroom"`
	SlabSize          string  `mapstructure:"harvest-slab-size"`
	Deadline          string  `mapstructure:"harvest-deadline"`
	PollInterval      string  `mapstructure:"harvest-poll-interval"`
	Cooldown          string  `mapstructure:"harvest-cooldown"`
	RuntimeDir        string  `mapstructure:"runtime-dir"`
	MigrationLimit    string  `mapstructure:"migration-limit"`
	AvailabilityTrace string  `mapstructure:"availability-trace"`
}

// KV sizes the cache of keys and values.
type KV struct {
	NumGPUBlocksOverride int  `mapstructure:"num-gpu-blocks-override"`
	MaxModelLen          int  `mapstructure:"max-model-len"`
	EnablePrefixCaching  bool `mapstructure:"enable-prefix-caching"`
	// BlockSize is the number of tokens of a block.
	BlockSize int `mapstructure:"block-size"`
	// Offloading* and TransferConfig say which tiers keep KV blocks that leave the GPU.
	OffloadingBackend string  `mapstructure:"kv-offloading-backend"`
	OffloadingSize    float64 `mapstructure:"kv-offloading-size"`
	TransferConfig    string  `mapstructure:"kv-transfer-config"`
	// EventsConfig says where it is published which blocks are stored and removed.
	EventsConfig string `mapstructure:"kv-events-config"`
	// ExpertsShare is StaticShare or AutoShare.
	ExpertsShare string `mapstructure:"kv-experts-share"`
}

// Values of KV.ExpertsShare: the GPU's memory for KV blocks and for resident experts is fixed, or
// follows what it is worth to either.
const (
	StaticShare = "static"
	AutoShare   = "auto"
)

// Batch says how steps run.
type Batch struct {
	MaxNumSeqs          int              `mapstructure:"max-num-seqs"`
	MaxNumBatchedTokens int              `mapstructure:"max-num-batched-tokens"`
	MaxITL              string           `mapstructure:"max-itl"`
	SchedulingPolicy    SchedulingPolicy `mapstructure:"scheduling-policy"`
	FairGranularity     int              `mapstructure:"fair-granularity"`
	MicroBatchSize      int              `mapstructure:"micro-batch-size"`
	NumMicroBatches     int              `mapstructure:"num-micro-batches"`
	Grouping            Grouping         `mapstructure:"expert-grouping"`
	ExpertAccess        ExpertAccess     `mapstructure:"expert-access"`
	Attention           Place            `mapstructure:"attention"`
	CPUExperts          string           `mapstructure:"cpu-experts"`
}

// Kernels says how a GPU's kernels run.
type Kernels struct {
	BatchInvariant bool `mapstructure:"batch-invariant"`
	EnforceEager   bool `mapstructure:"enforce-eager"`
	Overlap        bool `mapstructure:"overlap-kernels"`
}

// Plan says what chooses a policy, and for which machine.
type Plan struct {
	Policy   PolicySource `mapstructure:"policy"`
	Hardware string       `mapstructure:"hardware"`
}

// Generate says what to generate. Dummy weights and generated prompts have the same Seed.
type Generate struct {
	// Raw prompts do not go through the model's chat template.
	Raw         bool    `mapstructure:"raw"`
	MaxTokens   int     `mapstructure:"max-tokens"`
	Temperature float64 `mapstructure:"temperature"`
	Seed        uint64  `mapstructure:"seed"`
	IgnoreEOS   bool    `mapstructure:"ignore-eos"`
	// SpecialTokensInChat reads special tokens in messages as such.
	SpecialTokensInChat bool `mapstructure:"special-tokens-in-chat"`
}

// Serve is of the server; times are in seconds.
type Serve struct {
	Host                     string `mapstructure:"host"`
	Port                     int    `mapstructure:"port"`
	ServedModelName          string `mapstructure:"served-model-name"`
	GenerationConfig         string `mapstructure:"generation-config"`
	OverrideGenerationConfig string `mapstructure:"override-generation-config"`
	ToolCallParser           string `mapstructure:"tool-call-parser"`
	EnableAutoToolChoice     bool   `mapstructure:"enable-auto-tool-choice"`
	ReasoningParser          string `mapstructure:"reasoning-parser"`
	APIKey                   string `mapstructure:"api-key"`
	AllowedOrigins           string `mapstructure:"allowed-origins"`
	AllowedMethods           string `mapstructure:"allowed-methods"`
	AllowedHeaders           string `mapstructure:"allowed-headers"`
	AllowCredentials         bool   `mapstructure:"allow-credentials"`
	MaxQueuedRequests        int    `mapstructure:"max-queued-requests"`
	MaxRequestBytes          int    `mapstructure:"max-request-bytes"`
	RequestTimeout           int    `mapstructure:"request-timeout"`
	DrainTimeout             int    `mapstructure:"drain-timeout"`
	AdminAddress             string `mapstructure:"admin-address"`
	OTLPTracesEndpoint       string `mapstructure:"otlp-traces-endpoint"`
	// TurnTime is in seconds.
	TurnTime       float64 `mapstructure:"turn-time"`
	MaxConnections int     `mapstructure:"max-connections"`
	SSLCertfile    string  `mapstructure:"ssl-certfile"`
	SSLKeyfile     string  `mapstructure:"ssl-keyfile"`
}

// Bench says what a benchmark runs.
type Bench struct {
	NumPrompts    int    `mapstructure:"num-prompts"`
	InputLen      int    `mapstructure:"input-len"`
	OutputLen     int    `mapstructure:"output-len"`
	DatasetPath   string `mapstructure:"dataset-path"`
	WarmupTokens  int    `mapstructure:"warmup-tokens"`
	Trials        int    `mapstructure:"trials"`
	PrefillTrials int    `mapstructure:"prefill-trials"`
}

// Output says what is written where.
type Output struct {
	JSON      string    `mapstructure:"json"`
	Trace     string    `mapstructure:"trace"`
	LogLevel  LogLevel  `mapstructure:"log-level"`
	LogFormat LogFormat `mapstructure:"log-format"`
}

// Defaults returns the settings that apply where nothing else is said.
func Defaults() Settings {
	var s Settings
	for i, f := range fields(&s) {
		if err := set(f, Schema[i].Default); err != nil {
			panic("configs: default of " + Schema[i].Name + ": " + err.Error())
		}
	}
	return s
}

// Values returns the settings by key, of the keys' kinds.
func (s Settings) Values() map[string]any {
	values := make(map[string]any, len(Schema))
	for i, f := range fields(&s) {
		if Schema[i].Kind == String {
			values[Schema[i].Name] = text(f)
		} else {
			values[Schema[i].Name] = f.Interface()
		}
	}
	return values
}

// Put sets values by key. They must be of the key's kind.
func (s *Settings) Put(values map[string]any) error {
	for i, f := range fields(s) {
		v, ok := values[Schema[i].Name]
		if !ok {
			continue
		}
		if err := set(f, v); err != nil {
			return fmt.Errorf("configs: --%s: %w", Schema[i].Name, err)
		}
	}
	return s.Validate()
}

// text of a String's field.
func text(f reflect.Value) string {
	if v, ok := f.Interface().(fmt.Stringer); ok {
		return v.String()
	}
	return f.String()
}

// set sets a field to a value of its key's kind.
func set(f reflect.Value, v any) error {
	if u, ok := f.Addr().Interface().(encoding.TextUnmarshaler); ok {
		if t, ok := v.(string); ok {
			return u.UnmarshalText([]byte(t))
		}
	}
	if reflect.TypeOf(v) != f.Type() {
		return fmt.Errorf("%v is not a %v", v, f.Type())
	}
	f.Set(reflect.ValueOf(v))
	return nil
}

// validateKey checks the API key, of whose value errors have nothing.
func (s *Serve) validateKey() error {
	bad := func(what string) error {
		return &SettingError{Key: "api-key", Value: secret{}, Want: "must not have " + what + ", which no client can send in a header; a file's line end is not a part of a key"}
	}
	for i, c := range []byte(s.APIKey) {
		if c < ' ' || c == 0x7F {
			return bad(fmt.Sprintf("a control character, 0x%02x at byte %d of %d", c, i+1, len(s.APIKey)))
		}
	}
	if strings.Trim(s.APIKey, " ") != s.APIKey {
		return bad("blanks at its start or end")
	}
	return nil
}

// secret stands for a value that errors do not show.
type secret struct{}

func (secret) String() string { return "(secret)" }

// fields of s in the order of Schema.
func fields(s *Settings) []reflect.Value {
	byKey := map[string]reflect.Value{}
	for _, group := range reflect.ValueOf(s).Elem().Fields() {
		for field, f := range group.Fields() {
			byKey[field.Tag.Get("mapstructure")] = f
		}
	}
	all := make([]reflect.Value, len(Schema))
	for i, k := range Schema {
		all[i] = byKey[k.Name]
	}
	return all
}

// SettingError says which setting has a value that it must not have.
type SettingError struct {
	Key   string
	Value any
	// Want says what is allowed: "must be from 0 to 1".
	Want string
}

func (e *SettingError) Error() string {
	value := fmt.Sprint(e.Value)
	switch v := e.Value.(type) {
	case string:
		value = strconv.Quote(v)
	case fmt.Stringer:
		value = strconv.Quote(v.String())
	}
	return fmt.Sprintf("configs: --%s is %s: %s", e.Key, value, e.Want)
}

// Validate reports the first setting, in the order of Schema, that is not
// allowed, as a *SettingError.
func (s Settings) Validate() error {
	for i, f := range fields(&s) {
		if want := Schema[i].check(f); want != "" {
			return &SettingError{Key: Schema[i].Name, Value: f.Interface(), Want: want}
		}
	}
	skew, err := s.Model.ParseRouting()
	if err != nil {
		return err
	}
	if skew > 0 && s.Model.LoadFormat != LoadDummy {
		return &SettingError{Key: "dummy-routing", Value: s.Model.DummyRouting, Want: "needs --load-format dummy"}
	}
	if s.Model.LoadFormat == LoadDummy && s.Model.Name == "" {
		return &SettingError{
			Key: "load-format", Value: s.Model.LoadFormat,
			Want: "needs --model: a preset (" + strings.Join(PresetNames(), ", ") + ") or a directory with a config.json",
		}
	}
	if err := s.validatePeers(); err != nil {
		return err
	}
	if _, err := s.Batch.ParseMaxITL(); err != nil {
		return err
	}
	if _, err := s.Batch.ParseCPUExperts(); err != nil {
		return err
	}
	if err := s.Serve.validate(); err != nil {
		return err
	}
	if err := s.Serve.validateKey(); err != nil {
		return err
	}
	if err := s.Serve.validateOTLP(); err != nil {
		return err
	}
	if s.Bench.InputLen > 0 && s.Bench.DatasetPath != "" {
		return &SettingError{Key: "input-len", Value: s.Bench.InputLen, Want: "is for generated prompts; leave out --dataset-path or this"}
	}
	// A policy may yet raise the second.
	if s.Plan.Policy == NoPolicy && s.Batch.MicroBatchSize > s.Batch.MaxNumBatchedTokens {
		return &SettingError{
			Key: "micro-batch-size", Value: s.Batch.MicroBatchSize,
			Want: fmt.Sprintf("must be at most --max-num-batched-tokens, %d", s.Batch.MaxNumBatchedTokens),
		}
	}
	if s.Batch.NumMicroBatches > s.Batch.MaxNumBatchedTokens {
		return &SettingError{
			Key: "num-micro-batches", Value: s.Batch.NumMicroBatches,
			Want: fmt.Sprintf("must be at most --max-num-batched-tokens, %d: a micro-batch has at least one token", s.Batch.MaxNumBatchedTokens),
		}
	}
	return nil
}

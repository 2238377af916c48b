package pipeline

import (
	"strings"
	"testing"

	"github.com/moeserve/moeserve/configs"
	"github.com/moeserve/moeserve/device"
	"github.com/moeserve/moeserve/device/emulated"
	"github.com/moeserve/moeserve/forward"
)

// TestOptionsValidate: invalid options are rejected.
func TestOptionsValidate(t *testing.T) {
	r := newRig(t, "mixtral", 0, emulated.Options{Virtual: true}, Options{HostAttention: host})
	check(t, r.p.o.Validate())
	for want, change := range map[string]func(*Options){
		"Options.Machine is nil":     func(o *Options) { o.Machine = nil },
		"Options.KV is nil":          func(o *Options) { o.KV = nil },
		"invalid grouping 2":         func(o *Options) { o.Grouping = configs.PerMicroBatch + 1 },
		"MicroBatches is -1":         func(o *Options) { o.MicroBatches = -1 },
		"1 executors, want 2":        func(o *Options) { o.Executors = o.Executors[:1] },
		"0 executors, want 2":        func(o *Options) { o.Executors = nil },
		"2 executors, want 1":        func(o *Options) { o.Grouping = configs.PerMicroBatch },
		"Executors[1].Model is nil":  func(o *Options) { o.Executors = []Executor{o.Executors[0], {Space: space}} },
		"executors on gpu0 and gpu1": func(o *Options) { o.Executors = []Executor{o.Executors[0], {device.HBM(1), o.Executors[1].Model}} },
		"Options.Experts is nil":     func(o *Options) { o.Experts = nil },
		"the model of Executors[0] has limits": func(o *Options) {
			o.Limits = forward.Limits{MaxTokens: 7, MaxSeqs: 1, MaxLogits: 1, MaxModelLen: 16, BlockTokens: 16}
		},
	} {
		o := r.p.o
		change(&o)
		if _, err := New(o); err == nil || !strings.Contains(err.Error(), want) {
			t.Errorf("error %v, want %q in it", err, want)
		}
	}
}

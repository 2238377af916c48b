package node_test

import (
	"encoding/binary"
	"testing"

	"github.com/moeserve/moeserve/configs"
	"github.com/moeserve/moeserve/engine"
	"github.com/moeserve/moeserve/kernels"
	"github.com/moeserve/moeserve/kvcache"
	"github.com/moeserve/moeserve/kvcache/offload"
)

// TestKeysHaveDataType: the key of a block that a node stores is that of its tokens with the data type of the
// node's KV cache, which is float32 on the CPU, and with the request's salt, and no other's.
func TestKeysHaveDataType(t *testing.T) {
	n := open(t, machine{}, func(s *configs.Settings) {
		s.KV.TransferConfig = `{"kv_connector_extra_config": {"num_file_blocks": 40, "directory": "` + t.TempDir() + `"}}`
	})
	size := n.KV().BlockTokens()
	r := request(make([]int32, size+1), 2)
	for i := range r.Prompt {
		r.Prompt[i] = int32(5 + i)
	}
	salted := r
	salted.CacheSalt = "a"
	salted.Prompt = append([]int32{9}, r.Prompt...)
	if _, err := n.Engine().Generate(t.Context(), []engine.Request{r, salted}, nil); err != nil {
		t.Fatal(err)
	}
	for n.KVTiers().Busy() {
		converse1(t, n)
	}
	// As the engine has it: tokens of a block, data type with its length, resets, longrope, and the salt.
	key := func(dtype, salt string, prompt []int32) kvcache.Key {
		b := binary.LittleEndian.AppendUint32(nil, uint32(size))
		b = append(binary.LittleEndian.AppendUint32(b, uint32(len(dtype))), dtype...)
		b = append(binary.LittleEndian.AppendUint64(b, 0), 0)
		return kvcache.RootKey(append(b, salt...)).Next(prompt[:size])
	}
	for _, c := range []struct {
		dtype  kernels.DType
		salt   string
		prompt []int32
		stored bool
	}{
		{kernels.F32, "", r.Prompt, true},
		{kernels.F32, "a", salted.Prompt, true},
		{kernels.BF16, "", r.Prompt, false},
		{kernels.F32, "a", r.Prompt, false},
		{kernels.F32, "", salted.Prompt, false},
	} {
		if got := n.KVTiers().Locate(key(c.dtype.String(), c.salt, c.prompt)) != (offload.Place{}); got != c.stored {
			t.Errorf("data type %s, salt %q: stored %t, want %t", c.dtype, c.salt, got, c.stored)
		}
	}
}

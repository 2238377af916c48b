//go:build cuda

package node_test

import (
	"bufio"
	"context"
	"errors"
	"fmt"
	"io"
	"os"
	"os/exec"
	"slices"
	"strconv"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/moeserve/moeserve/configs"
	"github.com/moeserve/moeserve/device"
	"github.com/moeserve/moeserve/device/cuda"
	"github.com/moeserve/moeserve/kvcache/offload"
	"github.com/moeserve/moeserve/node"
	"github.com/moeserve/moeserve/node/observe"
	"github.com/moeserve/moeserve/tools/fixtures"
)

// kvCase is one way to keep the KV blocks of conversations.
type kvCase struct {
	name string
	// extra is the kv_connector_extra_config; empty: no tiers.
	extra string
	// mediums from which blocks must be loaded.
	mediums []string
	// tenant takes the peer's memory meanwhile, and returns it.
	tenant bool
}

// TestGPUKVTiers: conversations have the same tokens whether their KV blocks are preempted and
// computed again, or kept on a peer, in host memory, or in files, with first come, first served and
// with fair scheduling, and while another process takes the peer's memory and returns it.
func TestGPUKVTiers(t *testing.T) {
	needPeer(t)
	cases := []kvCase{
		{name: "none"},
		{"host", `"num_cpu_blocks": 60`, []string{offload.CPU}, false},
		{"peer", `"num_gpu_blocks": 60`, []string{offload.PeerGPU}, false},
		{"peer and host", `"num_gpu_blocks": 5, "num_cpu_blocks": 60, "block_size_factor": 2, "eviction_policy": "arc"`, []string{offload.PeerGPU, offload.CPU}, false},
		{"files", fmt.Sprintf(`"num_file_blocks": 60, "directory": %q`, t.TempDir()), []string{offload.File}, false},
		{"peer, tenant", `"num_gpu_blocks": 60`, []string{offload.PeerGPU}, true},
		{"peer and host, tenant", `"num_gpu_blocks": 40, "num_cpu_blocks": 60`, []string{offload.PeerGPU, offload.CPU}, true},
	}
	tenant := startTenant(t)
	for _, model := range append([]string{""}, onGPU...) {
		dir := ""
		if model != "" {
			dir = fixtures.Dir(t, model)
		}
		t.Run("model="+model, func(t *testing.T) {
			roomy := openOnGPU(t, node.Options{Settings: gpuSettings(func(s *configs.Settings) {
				s.Model.Name, s.Kernels.BatchInvariant, s.KV.EnablePrefixCaching = dir, true, false
			})})
			want := converse(t, roomy)
			for _, policy := range []configs.SchedulingPolicy{configs.FCFSScheduling, configs.FairScheduling} {
				for _, c := range cases {
					t.Run(fmt.Sprintf("%s, %s", policy, c.name), func(t *testing.T) { runKVCase(t, c, dir, policy, tenant, want) })
				}
			}
		})
	}
}

// runKVCase runs the conversations in a GPU pool that has room for a third of them.
func runKVCase(t *testing.T, c kvCase, dir string, policy configs.SchedulingPolicy, other *tenant, want string) {
	n := openOnGPU(t, node.Options{CacheLayers: 1, Settings: gpuSettings(func(s *configs.Settings) {
		tightKV(s)
		s.Model.Name, s.Kernels.BatchInvariant, s.Device.Peers, s.Harvest.Headroom = dir, true, *peer, "1GiB"
		s.Batch.SchedulingPolicy, s.Batch.FairGranularity = policy, 4
		// With fair scheduling the GPU's own prefix cache is in front of the tiers.
		s.KV.EnablePrefixCaching = policy == configs.FairScheduling
		if c.extra != "" {
			s.KV.TransferConfig = `{"kv_connector_extra_config": {` + c.extra + `}}`
		}
		if c.tenant { // which takes the memory of experts, too
			s.Offload.Fraction, s.Offload.Tier = 0.5, configs.AnyTier
		}
	})})
	done := make(chan error, 1)
	close := func() {}
	if c.tenant {
		ctx, cancel := context.WithTimeout(t.Context(), 20*time.Second)
		defer cancel()
		var loop sync.WaitGroup
		loop.Go(func() { done <- disturb(ctx, n, other) })
		close = loop.Wait
	} else {
		done <- nil
	}
	defer close()
	rounds, begin := 0, time.Now()
	for ended := false; !ended || rounds < 2; rounds++ {
		if got := converse(t, n); got != want {
			t.Errorf("round %d: tokens %s, want %s", rounds, got, want)
			break
		}
		if ended {
			continue
		}
		select {
		case err := <-done:
			if ended = true; err != nil {
				t.Error(err)
			}
		default:
		}
	}
	s, tiers := n.Engine().State(), n.Observe().KVTiers()
	t.Logf("%d rounds in %v, %d preemptions, %d tokens found in the GPU's blocks, %d in tiers; %+v", rounds, time.Since(begin).Round(time.Millisecond), s.Preemptions, s.PrefixCacheHits, s.ExternalHits, tiers)
	if s.Preemptions == 0 {
		t.Error("nothing was preempted: the pool is too large for this test")
	}
	for _, m := range c.mediums {
		if x := kvTier(tiers, m); x.Offloaded == 0 || x.Reloaded == 0 || x.FailedLoads > 0 || x.FailedStores > 0 && !c.tenant {
			t.Errorf("too little was stored or loaded, or copies have failed: %+v", x)
		}
	}
	if x := kvTier(tiers, offload.PeerGPU); c.tenant && x.Lost == 0 {
		t.Errorf("no block was lost to the tenant: %+v", x)
	}
}

// kvTier is the tier of a medium.
func kvTier(k observe.KVTiers, medium string) observe.KVTier {
	i := slices.IndexFunc(k.Tiers, func(x observe.KVTier) bool { return x.Medium == medium })
	if i < 0 {
		return observe.KVTier{Medium: medium}
	}
	return k.Tiers[i]
}

// disturb lets the tenant take all memory of the peer when KV blocks have been loaded from there, and
// return it when they are gone. Blocks must be stored there and loaded again.
func disturb(ctx context.Context, n *node.Node, other *tenant) error {
	until := func(what string, is func() bool) error {
		for ; !is(); time.Sleep(time.Millisecond) {
			if ctx.Err() != nil {
				return fmt.Errorf("%s: not within the time: %+v, %+v", what, n.Observe().KVTiers(), n.Harvest().State().Peers)
			}
		}
		return nil
	}
	on := func() observe.KVTier { return kvTier(n.Observe().KVTiers(), offload.PeerGPU) }
	if err := until("KV blocks loaded from the peer", func() bool { return on().UsedBlocks > 0 && on().Reloaded > 0 }); err != nil {
		return err
	}
	if err := other.take(n); err != nil {
		return err
	}
	gone := until("no borrowed memory", func() bool { return held(n.Harvest().State()) == 0 && on().UsedBlocks == 0 })
	time.Sleep(20 * time.Millisecond) // some steps without the peer
	if err := errors.Join(gone, other.giveBack()); err != nil {
		return err
	}
	before := on()
	return until("KV blocks on the peer again, and loaded", func() bool { return on().Offloaded > before.Offloaded && on().Reloaded > before.Reloaded })
}

// tenant takes the peer's memory: as another process on a GPU, in this one on emulated devices.
type tenant struct {
	in    io.Writer
	out   *bufio.Scanner
	taken device.Memory
}

const tenantVariable = "MOESERVE_CUDA_TENANT"

// startTenant starts the process, which is TestGPUTenant.
func startTenant(t *testing.T) *tenant {
	t.Helper()
	if *on == "cpu" {
		return &tenant{}
	}
	// The test's context ends before its cleanup does, which lets the process end by itself.
	cmd := exec.CommandContext(context.WithoutCancel(t.Context()), os.Args[0], "-test.run=^TestGPUTenant$", "-test.v", "-peer", *peer)
	cmd.Env, cmd.Stderr = append(os.Environ(), tenantVariable+"=1"), os.Stderr
	in, err := cmd.StdinPipe()
	if err != nil {
		t.Fatal(err)
	}
	out, err := cmd.StdoutPipe()
	if err != nil {
		t.Fatal(err)
	}
	if err := cmd.Start(); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		if err := errors.Join(in.Close(), cmd.Wait()); err != nil {
			t.Errorf("the tenant ended with %v", err)
		}
	})
	o := &tenant{in: in, out: bufio.NewScanner(out)}
	if err := o.ask("begin"); err != nil {
		t.Fatal(err)
	}
	return o
}

// ask has the process do something, and waits until it has.
func (o *tenant) ask(what string) error {
	if _, err := fmt.Fprintln(o.in, what); err != nil {
		return err
	}
	for o.out.Scan() {
		if said, ok := strings.CutPrefix(o.out.Text(), "tenant: "); ok {
			if said != what {
				return fmt.Errorf("the tenant, asked to %s: %s", what, said)
			}
			return nil
		}
	}
	return fmt.Errorf("the tenant has ended, asked to %s: %w", what, errors.Join(o.out.Err(), io.ErrUnexpectedEOF))
}

func (o *tenant) take(n *node.Node) (err error) {
	if o.in != nil {
		return o.ask("take")
	}
	o.taken, err = takeFree(n.Machine(), device.HBM(1))
	return err
}

func (o *tenant) giveBack() error {
	if o.in != nil {
		return o.ask("give back")
	}
	return o.taken.Free()
}

// takeFree allocates what is free but for 64 MiB. What is free changes meanwhile.
func takeFree(m device.Machine, at device.Space) (got device.Memory, err error) {
	for range 20 {
		var u device.Usage
		if u, err = m.Usage(at); err != nil {
			return nil, err
		}
		if got, err = m.Alloc(at, u.Free()-(64<<20), "a tenant's"); err == nil {
			return got, nil
		}
	}
	return nil, err
}

// TestGPUTenant is the process of startTenant: it takes and gives back what is free of the GPU when it
// is asked to, and ends with its standard input.
func TestGPUTenant(t *testing.T) {
	if os.Getenv(tenantVariable) == "" {
		t.Skip("a process of TestGPUKVTiers")
	}
	gpu, err := strconv.Atoi(*peer)
	if err != nil {
		t.Fatal(err)
	}
	m, err := cuda.New(cuda.Options{GPUs: []int{gpu}})
	if err != nil {
		t.Fatal(err)
	}
	var taken device.Memory
	for lines := bufio.NewScanner(os.Stdin); lines.Scan(); {
		switch lines.Text() {
		case "take":
			taken, err = takeFree(m, device.HBM(0))
		case "give back":
			err, taken = taken.Free(), nil
		}
		if err != nil {
			fmt.Println("tenant:", err)
			break
		}
		fmt.Println("tenant:", lines.Text())
	}
	if taken != nil {
		err = errors.Join(err, taken.Free())
	}
	if err := errors.Join(err, m.Close()); err != nil {
		t.Error(err)
	}
}

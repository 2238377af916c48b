package node_test

import (
	"bufio"
	"context"
	"errors"
	"fmt"
	"log/slog"
	"net"
	"os"
	"os/exec"
	"path/filepath"
	"runtime"
	"strconv"
	"strings"
	"testing"
	"time"

	"github.com/moeserve/moeserve/configs"
	"github.com/moeserve/moeserve/device"
	"github.com/moeserve/moeserve/device/emulated"
	"github.com/moeserve/moeserve/harvest"
	"github.com/moeserve/moeserve/harvest/reclaim"
	"github.com/moeserve/moeserve/node"
	"github.com/moeserve/moeserve/node/fault"
)

// stubUUID is what testdata/preload/cuda.c says of its GPU.
const stubUUID = "GPU-01020304-0506-0708-090a-0b0c0d0e0f10"

// crowded opens a node whose peer has room for hardly more than the experts that it holds.
func crowded(t *testing.T, dir string) (*node.Node, *emulated.Machine) {
	t.Helper()
	gpus := []emulated.GPU{{MemoryBytes: 1 << 30}, {MemoryBytes: 4 << 20}}
	m, err := emulated.New(emulated.Options{GPUs: gpus})
	if err != nil {
		t.Fatal(err)
	}
	top := *m.Topology()
	if err := m.Close(); err != nil {
		t.Fatal(err)
	}
	top.GPUs[1].UUID = strings.TrimPrefix(stubUUID, "GPU-") // as CUDA spells it
	s := configs.Defaults()
	s.Offload.Fraction, s.Offload.Tier, s.Device.Peers, s.Batch.MaxNumBatchedTokens = 0.5, configs.PeerTier, "1", 192
	s.Harvest.MigrationLimit, s.Harvest.Cooldown = "0", "200ms"
	n, err := node.Open(t.Context(), node.Options{
		Settings: s, RuntimeDir: dir,
		OpenMachine: func() (_ device.Machine, err error) {
			m, err = emulated.New(emulated.Options{Topology: &top})
			return m, err
		},
	})
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		if err := n.Close(); err != nil {
			t.Error(err)
		}
	})
	return n, m
}

// TestNeighborAsks: a process that needs more of a peer than is free asks on the socket, and
// gets it; what nobody has asked for stays, and completions do not change.
func TestNeighborAsks(t *testing.T) {
	dir := t.TempDir()
	n, m := crowded(t, dir)
	want := generate(t, n)
	const need = 2 << 20
	if err := m.Occupy(device.HBM(1), need); !errors.Is(err, device.ErrOutOfMemory) {
		t.Fatalf("nothing is borrowed: %v", err)
	}
	c := reclaim.Client{Dir: dir}
	for name, wants := range map[string]int{"0": 0, "2": 0, "GPU-ffffffff-0506-0708-090a-0b0c0d0e0f10": 0, "1": 1, stubUUID: 1} {
		r, err := c.Reclaim(t.Context(), reclaim.Request{Device: name, Bytes: 1, Within: time.Minute})
		if err != nil || r.Processes != wants || r.Freed != 0 {
			t.Errorf("1 byte of GPU %s: %+v, %v", name, r, err)
		}
	}
	r, err := c.Reclaim(t.Context(), reclaim.Request{Device: "1", Bytes: need, Within: time.Minute})
	if err != nil || !r.Met(need) || r.Freed == 0 || r.Borrowed == 0 || r.Late != "" || "GPU-"+r.UUID != stubUUID {
		t.Errorf("%+v, %v", r, err)
	}
	if err := m.Occupy(device.HBM(1), need); err != nil {
		t.Error(err)
	}
	if got := generate(t, n); got != want {
		t.Errorf("tokens %s, before %s", got, want)
	}
	// More than there is: what there is, and who asks learns that it is not enough.
	r, err = c.Reclaim(t.Context(), reclaim.Request{Device: "1", Bytes: 1 << 30, Within: time.Minute})
	if err != nil || r.Met(1<<30) || r.Borrowed != 0 || r.Free != 4<<20-need || r.Late != "the total memory of the GPU is 4.00 MiB" {
		t.Errorf("more than there is: %+v, %v", r, err)
	}
}

// TestNoSocket: a directory that was named and cannot hold a socket is an error of the configuration.
func TestNoSocket(t *testing.T) {
	s := configs.Defaults()
	s.Offload.Fraction, s.Batch.MaxNumBatchedTokens = 0.5, 192
	n, err := node.Open(t.Context(), node.Options{Settings: s, RuntimeDir: filepath.Join(t.TempDir(), "missing")})
	if err == nil {
		err = n.Close()
	}
	if !errors.Is(err, fault.ErrConfig) || !strings.Contains(err.Error(), `missing": reclaim: listen to neighbors`) {
		t.Errorf("%v", err)
	}
}

// hungry is another process that borrows from the same peer, has nothing, and wants more.
type hungry struct{ reclaim.Lender }

func (hungry) Borrowed() []reclaim.Borrowed {
	return []reclaim.Borrowed{{Device: "7", UUID: stubUUID, Wants: true}}
}

// TestOtherProcess: a node releases what is above its share when another process of moeserve
// wants more of the peer, and keeps its share.
func TestOtherProcess(t *testing.T) {
	dir := t.TempDir()
	n, m := crowded(t, "")
	all := n.Observe().Experts().PeerCopies
	l, err := reclaim.Listen(dir, reclaim.Handler(hungry{}), slog.New(slog.DiscardHandler))
	if err != nil {
		t.Fatal(err)
	}
	defer func() {
		if err := l.Close(); err != nil {
			t.Error(err)
		}
	}()
	if err := node.ExchangeShares(t.Context(), n, dir, l.Path()); err != nil {
		t.Fatal(err)
	}
	if b, err := n.Harvest().Balance(device.HBM(1)); err != nil || b.Draining != 0 {
		t.Errorf("it releases memory for itself: %+v, %v", b, err)
	}
	if err := node.ExchangeShares(t.Context(), n, dir, ""); err != nil {
		t.Fatal(err)
	}
	ctx, cancel := context.WithTimeout(t.Context(), time.Minute)
	defer cancel()
	for n.Harvest().State().Revocations[harvest.ReasonPolicy] == 0 {
		if err := m.Yield(ctx, time.Millisecond); err != nil {
			t.Fatalf("nothing is released: %+v", n.Harvest().State().Peers)
		}
	}
	generate(t, n)
	if left := n.Observe().Experts().PeerCopies; left < all/3 || left >= all {
		t.Errorf("%d of %d copies are left, want about half", left, all)
	}
}

// TestPreload: a program that knows nothing of moeserve and allocates more of a GPU than is
// free, in one call, gets it with the preloaded library, whichever way it has looked up the
// driver's function. libcuda.so.1 is a stand-in whose memory is the emulated machine's.
func TestPreload(t *testing.T) {
	if runtime.GOOS != "linux" {
		t.Skip("LD_PRELOAD is Linux's")
	}
	gcc, err := exec.LookPath("gcc")
	if err != nil {
		t.Skip("needs gcc")
	}
	built := t.TempDir()
	build := func(args ...string) {
		t.Helper()
		if out, err := exec.CommandContext(t.Context(), gcc, append([]string{"-O2", "-Wall", "-Wextra", "-Werror", "-o"}, args...)...).CombinedOutput(); err != nil {
			t.Fatalf("%v: %s", err, out)
		}
	}
	library, tenant := filepath.Join(built, "reclaim.so"), filepath.Join(built, "tenant")
	build(filepath.Join(built, "libcuda.so.1"), "-shared", "-fPIC", "-Wl,-soname,libcuda.so.1", "testdata/preload/cuda.c")
	build(library, "-shared", "-fPIC", "-fvisibility=hidden", "../preload/reclaim.c", "-ldl")
	build(tenant, "testdata/preload/tenant.c", filepath.Join(built, "libcuda.so.1"), "-ldl")

	dir := t.TempDir()
	n, m := crowded(t, dir)
	want := generate(t, n)
	stub := filepath.Join(built, "stub.sock")
	serveStub(t, m, stub)
	run := func(way string, bytes int64, env ...string) (result string, said string) {
		t.Helper()
		c := exec.CommandContext(t.Context(), tenant, way, strconv.FormatInt(bytes, 10))
		c.Env = append(os.Environ(), "LD_LIBRARY_PATH="+built, "STUB_SOCKET="+stub, "MOESERVE_RECLAIM_VERBOSE=1", "MOESERVE_RECLAIM_DEADLINE_MS=20000")
		c.Env = append(c.Env, env...)
		var errs strings.Builder
		c.Stderr = &errs
		out, err := c.Output()
		if err != nil {
			t.Fatalf("%s: %v: %s", way, err, errs.String())
		}
		return strings.TrimSpace(string(out)), errs.String()
	}
	const need = 2 << 20
	preload, here := "LD_PRELOAD="+library, "MOESERVE_RUNTIME_DIR="+dir
	if got, said := run("runtime", need, here); got != "2" || said != "" {
		t.Errorf("without the library: result %s, %s", got, said)
	}
	for name, env := range map[string][]string{
		"no process": {preload, "MOESERVE_RUNTIME_DIR=" + t.TempDir()},
		"none":       {preload, "MOESERVE_RUNTIME_DIR=none"},
		"disabled":   {preload, here, "MOESERVE_RECLAIM_DEADLINE_MS=0"},
	} {
		if got, said := run("runtime", need, env...); got != "2" {
			t.Errorf("%s: result %s, %s", name, got, said)
		}
	}
	for _, way := range []string{"runtime", "dlsym", "linked", "async", "create"} {
		if u, err := m.Usage(device.HBM(1)); err != nil || u.Free() > need {
			t.Fatalf("%s: %d bytes are free, %v: no need to ask", way, u.Free(), err)
		}
		if got, said := run(way, need, preload, here); got != "0" || !strings.Contains(said, "refused: asked for") {
			t.Errorf("%s: result %s, %s", way, got, said)
		}
		if got := generate(t, n); got != want {
			t.Errorf("%s: tokens %s, before %s", way, got, want)
		}
		if err := m.Occupy(device.HBM(1), -need); err != nil {
			t.Fatal(err)
		}
		refill(t, n)
	}
	if got, said := run("runtime", 1<<40, preload, here); got != "2" || !strings.Contains(said, "released") {
		t.Errorf("more than the GPU has: result %s, %s", got, said)
	}
	if got, said := run("runtime", 1<<10, preload, here); got != "0" || said != "" {
		t.Errorf("what is free: result %s, %s", got, said)
	}
}

// serveStub answers testdata/preload/cuda.c: an allocation is another process's of the peer.
func serveStub(t *testing.T, m *emulated.Machine, path string) {
	t.Helper()
	l, err := new(net.ListenConfig).Listen(t.Context(), "unix", path)
	if err != nil {
		t.Fatal(err)
	}
	done := make(chan struct{})
	go func() {
		defer close(done)
		for {
			c, err := l.Accept()
			if err != nil {
				return
			}
			line, _ := bufio.NewReader(c).ReadString('\n')
			bytes, err := strconv.ParseInt(strings.TrimSpace(line), 10, 64)
			if err == nil {
				err = m.Occupy(device.HBM(1), bytes)
			}
			result := 0
			if err != nil {
				result = 2
			}
			fmt.Fprintln(c, result) //nolint:errcheck // the program sees it
			c.Close()               //nolint:errcheck // the same
		}
	}()
	t.Cleanup(func() {
		l.Close() //nolint:errcheck // the end of Accept
		<-done
	})
}

// refill runs requests until the peer is full again.
func refill(t *testing.T, n *node.Node) {
	t.Helper()
	ctx, cancel := context.WithTimeout(t.Context(), time.Minute)
	defer cancel()
	for n.Observe().Experts().PeerCopies < 24 {
		if ctx.Err() != nil {
			t.Fatalf("the peer is not filled again: %+v", n.Observe().Experts())
		}
		generate(t, n)
	}
}

// TestInertPolicies: a policy that places as best-fit does in the setting says so at start, and
// why; one that has an effect says nothing.
func TestInertPolicies(t *testing.T) {
	for _, c := range []struct {
		policy, clients, emulate, peers string
		want                            string
	}{
		{"best-fit", "", "", "auto", ""},
		{"locality", "", "", "auto", "all peers are equally near"},
		{"locality", "", "nvlink=400GB/s,pairs=2-0:300GB/s", "auto", ""},
		{"interference", "", "", "auto", "no emulated peer is busy; set busy= of --emulate"},
		{"interference", "", "nvlink=400GB/s,busy=2:60%", "auto", ""},
		{"interference", "", "nvlink=400GB/s,busy=2:60%", "2", "there is one peer"},
		{"stability", "", "", "auto", ""},
		{"stability", "", "", "1", "there is one peer"},
		{"fairness", "", "", "auto", "experts are the only client"},
		{"fairness", "experts=rate:1GiB/s", "", "auto", ""},
	} {
		var log strings.Builder
		s := configs.Defaults()
		s.Offload.Fraction, s.Harvest.Policy, s.Harvest.Clients, s.Device.Peers = 0.5, c.policy, c.clients, c.peers
		s.Device.Emulate = strings.Trim("virtual,hbm=64MiB,"+c.emulate, ",")
		n, err := node.Open(t.Context(), node.Options{Settings: s, Log: slog.New(slog.NewTextHandler(&log, nil))})
		if err != nil {
			t.Fatal(err)
		}
		if err := n.Close(); err != nil {
			t.Error(err)
		}
		const said = "the policy of --harvest-policy places as best-fit does"
		if got := log.String(); strings.Contains(got, said) != (c.want != "") || !strings.Contains(got, c.want) {
			t.Errorf("%+v: %s", c, got)
		}
	}
}

// TestPolicyEvicts: a policy that leaves a peer whose others come and go has its copies revoked
// for that reason, and completions do not change.
func TestPolicyEvicts(t *testing.T) {
	want := generate(t, open(t, machine{options: emulated.Options{}}, nil))
	s := configs.Defaults()
	s.Offload.Fraction, s.Batch.MaxNumBatchedTokens = 0.75, 192
	s.Harvest.MigrationLimit, s.Harvest.Policy, s.Harvest.EvacuateAt = "0", "stability", 0.3
	s.Harvest.AvailabilityTrace = writeTrace(t, "0,1,0", "0,2,0", "0.004,1,67108864", "0.004,2,0", "0.006,1,0", "0.006,2,0")
	n, err := node.Open(t.Context(), node.Options{
		Settings: s, HostLogits: true, OpenMachine: func() (device.Machine, error) { return emulated.Open(linked(emulated.Eager)) },
	})
	if err != nil {
		t.Fatal(err)
	}
	defer func() {
		if err := n.Close(); err != nil {
			t.Error(err)
		}
	}()
	if got := generate(t, n); got != want {
		t.Errorf("tokens %s, want %s", got, want)
	}
	st := n.Harvest().State()
	if st.Revocations[harvest.ReasonPolicy] == 0 || st.Peers[0].Used != 0 || st.Peers[1].Used == 0 {
		t.Errorf("revocations %v; %d bytes of the first peer are used, %d of the second", st.Revocations, st.Peers[0].Used, st.Peers[1].Used)
	}
}

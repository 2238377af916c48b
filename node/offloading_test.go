package node_test

import (
	"errors"
	"math"
	"math/rand/v2"
	"strings"
	"testing"
	"time"

	"github.com/moeserve/moeserve/configs"
	"github.com/moeserve/moeserve/device/emulated"
	"github.com/moeserve/moeserve/engine"
	"github.com/moeserve/moeserve/node"
	"github.com/moeserve/moeserve/node/sleeping"
	"github.com/moeserve/moeserve/tools/racedetector"
)

// lends are settings with which the KV cache lends memory to experts.
func lends(s *configs.Settings) {
	s.KV.ExpertsShare, s.KV.MaxModelLen, s.Harvest.MigrationLimit = configs.AutoShare, 128, "0"
}

// setFraction sets a target, -1 for none.
func setFraction(t *testing.T, n *node.Node, target float64) {
	t.Helper()
	fraction := &target
	if target < 0 {
		fraction = nil
	}
	if err := n.SetOffloadFraction(fraction); err != nil {
		t.Fatal(err)
	}
}

// reach runs requests, whose tokens are to be want, until the fraction of offloaded experts is near.
func reach(t *testing.T, n *node.Node, near float64, want string) {
	t.Helper()
	at := func() bool { return math.Abs(n.Offloading().Fraction-near) < 1e-9 }
	for range 300 { // memory moves between steps, and experts come at any time
		if got := generate(t, n); got != want {
			t.Fatalf("tokens %s, want %s", got, want)
		}
		if at() {
			return
		}
	}
	t.Fatalf("the fraction does not come to %g: %+v, %+v", near, n.Offloading(), n.Observe().Lending())
}

// TestOffloadFraction: the fraction of offloaded experts comes to each target that is set between
// requests, or as near to it as memory allows, and stays there; tokens stay the same.
func TestOffloadFraction(t *testing.T) {
	want := generate(t, open(t, machine{options: emulated.Options{}}, nil))
	for name, o := range map[string]emulated.Options{"virtual": linked(emulated.Random), "concurrent": {Check: true, GPUs: linked(0).GPUs}} {
		t.Run(name, func(t *testing.T) {
			if o.Virtual {
				racedetector.SkipSequential(t)
			}
			t.Parallel()
			n := open(t, machine{fraction: 0.5, options: o}, lends)
			if o := n.Offloading(); o.Target != nil || o.TargetExtents != nil || o.Highest != 0.5 || o.Extents == 0 || o.Lowest != float64(24-o.Extents)/48 {
				t.Errorf("at the start %+v", o)
			}
			for _, target := range []float64{0.25, 0.5, 0, 0.38, -1, 0.125}[:racedetector.Fewer(6, 2)] {
				setFraction(t, n, target)
				o := n.Offloading()
				if target < 0 {
					if o.Target != nil || o.TargetExtents != nil {
						t.Errorf("without a target %+v", o)
					}
					continue
				}
				near := max(o.Lowest, math.Round(target*48)/48)
				if *o.Target != target || *o.TargetExtents != int(math.Round(24-near*48)) {
					t.Errorf("target %g: %+v", target, o)
				}
				reach(t, n, near, want)
				for range 3 {
					if got := generate(t, n); got != want {
						t.Errorf("tokens %s, want %s", got, want)
					}
				}
				if o := n.Offloading(); math.Abs(o.Fraction-near) > 1e-9 || o.Lent != *o.TargetExtents {
					t.Errorf("target %g was reached, and left: %+v", target, o)
				}
			}
		})
	}
}

// TestOffloadFractionOfUnused: a target is reached with experts that no request has used, too.
func TestOffloadFractionOfUnused(t *testing.T) {
	n := open(t, machine{fraction: 0.5, options: emulated.Options{Check: true, GPUs: linked(0).GPUs}}, lends)
	setFraction(t, n, 0)
	for begun := time.Now(); n.Offloading().Fraction > n.Offloading().Lowest; {
		if _, err := n.Engine().Generate(t.Context(), []engine.Request{request([]int32{5}, 2)}, nil); err != nil {
			t.Fatal(err)
		}
		if time.Since(begun) > time.Minute {
			t.Fatalf("%+v", n.Offloading())
		}
	}
	unused := 0
	for _, layer := range n.Store().Uses() {
		for _, uses := range layer {
			if uses == 0 {
				unused++
			}
		}
	}
	if unused < 5 {
		t.Errorf("only %d experts were not used: this shows little", unused)
	}
}

// TestOffloadFractionMeanwhile: the target changes while requests run, on devices that run
// concurrently.
func TestOffloadFractionMeanwhile(t *testing.T) {
	want := generate(t, open(t, machine{options: emulated.Options{}}, nil))
	n := open(t, machine{fraction: 0.5, options: emulated.Options{Check: true, GPUs: linked(0).GPUs}}, lends)
	stop, done := make(chan struct{}), make(chan int)
	go func() {
		rng, changes := rand.New(rand.NewPCG(4, 6)), 0
		for {
			select {
			case <-stop:
				done <- changes
				return
			default:
			}
			target := &[]float64{rng.Float64() / 2}[0]
			if rng.IntN(4) == 0 {
				target = nil
			}
			if err := n.SetOffloadFraction(target); err != nil {
				t.Error(err)
			}
			if o := n.Offloading(); o.Fraction < o.Lowest || o.Fraction > o.Highest {
				t.Errorf("%+v", o)
			}
			changes++
		}
	}()
	for range 5 {
		if got := generate(t, n); got != want {
			t.Errorf("tokens %s, want %s", got, want)
		}
	}
	close(stop)
	l := n.Observe().Lending()
	t.Logf("%d changes, %d extents lent, %d returned", <-done, l.ToExperts, l.ToKV)
	if l.ToExperts == 0 || l.ToKV == 0 {
		t.Error("nothing was lent, or nothing came back")
	}
}

// TestOffloadFractionAsleep: a target outlives sleep, and one that is set meanwhile is reached after
// the wake.
func TestOffloadFractionAsleep(t *testing.T) {
	racedetector.SkipSequential(t) // in virtual time
	want := generate(t, open(t, machine{options: emulated.Options{}}, nil))
	n := open(t, machine{fraction: 0.5, options: linked(emulated.Random)}, lends)
	setFraction(t, n, 0.25)
	for _, c := range []struct {
		level     sleeping.Level
		meanwhile float64
	}{{sleeping.Copy, 0.25}, {sleeping.Drop, 0.25}, {sleeping.Copy, 0.375}, {sleeping.Drop, 0.125}} {
		reach(t, n, *n.Offloading().Target, want)
		if _, err := n.Sleep(t.Context(), c.level, engine.PauseWait); err != nil {
			t.Fatal(err)
		}
		if o := n.Offloading(); o.Target == nil {
			t.Errorf("asleep at level %d: %+v", c.level, o)
		}
		setFraction(t, n, c.meanwhile)
		if _, err := n.Wake(t.Context()); err != nil {
			t.Fatal(err)
		}
		reach(t, n, max(c.meanwhile, n.Offloading().Lowest), want)
	}
}

// TestOffloadFractionRefused: what cannot be reached is refused by name, with what to do, and changes
// nothing.
func TestOffloadFractionRefused(t *testing.T) {
	static := open(t, machine{fraction: 0.5}, nil)
	resident := open(t, machine{}, lends)
	full := open(t, machine{fraction: 0.5}, func(s *configs.Settings) {
		lends(s)
		s.KV.NumGPUBlocksOverride, s.KV.MaxModelLen = 16, 256
	})
	auto := open(t, machine{fraction: 0.5}, lends)
	setFraction(t, auto, 0.25)
	before := auto.Offloading()
	for _, c := range []struct {
		n      *node.Node
		target float64
		want   string
	}{
		{static, 0.25, "--offload-fraction is 0.25: cannot change while the shares of the KV cache and of experts are fixed; start again with --kv-experts-share auto"},
		{static, -1, `--offload-fraction is "auto": cannot change`},
		{resident, 0.25, "start again with the highest fraction that you want to set"},
		{full, 0.25, "start again with a lower --max-model-len"},
		{auto, 0.75, "--offload-fraction is 0.75: the highest is 0.5, that of the start, as experts that were loaded into GPU memory of their own stay there; start again with a higher one"},
		{auto, 1.5, "must be from 0 to 1"},
		{auto, -0.5, "must be from 0 to 1"},
		{auto, math.NaN(), "must be from 0 to 1"},
	} {
		target := &c.target
		if c.target == -1 {
			target = nil
		}
		err := c.n.SetOffloadFraction(target)
		var refused *configs.SettingError
		if !errors.As(err, &refused) || refused.Key != node.OffloadFractionKey || !strings.Contains(err.Error(), c.want) {
			t.Errorf("%g: %v, want %q", c.target, err, c.want)
		}
	}
	if after := auto.Offloading(); *after.Target != *before.Target || *after.TargetExtents != *before.TargetExtents {
		t.Errorf("%+v after targets that were refused, %+v before", after, before)
	}
	for _, n := range []*node.Node{static, resident} {
		if o := n.Offloading(); o.Target != nil || o.Lowest != o.Highest || o.Fraction != o.Highest || o.Extents != 0 {
			t.Errorf("%+v", o)
		}
	}
}

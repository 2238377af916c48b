package turns_test

import (
	"context"
	"errors"
	"sync"
	"testing"
	"testing/synctest"
	"time"

	"go.uber.org/goleak"

	"github.com/moeserve/moeserve/node/turns"
)

func TestMain(m *testing.M) { goleak.VerifyTestMain(m) }

// fake is a model that sleeps and wakes in no time but that of its switch.
type fake struct {
	*testing.T
	gpu *gpu

	mu      sync.Mutex
	load    turns.Load
	hurried int
	fails   int // of the next wakes
}

// gpu has room for one model.
type gpu struct {
	mu    sync.Mutex
	awake *fake
}

func (f *fake) set(l turns.Load) {
	f.mu.Lock()
	defer f.mu.Unlock()
	f.load = l
}

func (f *fake) Load() turns.Load {
	f.mu.Lock()
	defer f.mu.Unlock()
	return f.load
}

func (f *fake) Sleep(ctx context.Context, hurry <-chan struct{}) (turns.Took, error) {
	for f.Load().Running > 0 {
		select {
		case <-time.After(ms):
		case <-hurry:
			f.mu.Lock()
			f.hurried++
			f.load = turns.Load{Waiting: f.load.Running + f.load.Waiting}
			f.mu.Unlock()
		case <-ctx.Done():
			return turns.Took{}, ctx.Err()
		}
	}
	time.Sleep(30 * ms)
	f.gpu.mu.Lock()
	defer f.gpu.mu.Unlock()
	if f.gpu.awake != f {
		f.Error("a model is put to sleep that is not awake")
	}
	f.gpu.awake = nil
	return turns.Took{Total: 30 * ms, Copies: 20 * ms}, nil
}

func (f *fake) Wake(context.Context) (turns.Took, error) {
	time.Sleep(50 * ms)
	f.mu.Lock()
	defer f.mu.Unlock()
	if f.fails > 0 {
		f.fails--
		return turns.Took{}, errors.New("no memory")
	}
	f.gpu.mu.Lock()
	defer f.gpu.mu.Unlock()
	if f.gpu.awake != nil {
		f.Error("a model is woken while another is awake")
	}
	f.gpu.awake = f
	return turns.Took{Total: 50 * ms, Copies: 40 * ms}, nil
}

// TestRunner: a switch to a model that has a request, one for which running requests are preempted,
// and a wake that fails first; the state and the metrics say so.
func TestRunner(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		g := &gpu{}
		a, b := &fake{T: t, gpu: g}, &fake{T: t, gpu: g}
		g.awake = a
		var switches []turns.Took
		r, err := turns.NewRunner(turns.Options{Limits: turns.Limits{Turn: time.Second}, Models: []turns.Model{a, b}, Names: []string{"a", "b"}, Switched: func(took turns.Took) { switches = append(switches, took) }})
		if err != nil {
			t.Fatal(err)
		}
		ctx, cancel := context.WithCancel(t.Context())
		ran := make(chan struct{})
		go func() { r.Run(ctx); close(ran) }()
		time.Sleep(time.Minute)
		if s := r.State(); s.Awake != "a" || s.Switches != 0 {
			t.Errorf("without requests: %+v", s)
		}
		b.set(turns.Load{Waiting: 1})
		r.Notify()
		time.Sleep(100 * ms)
		if s := r.State(); s.Awake != "b" || s.Switches != 1 || s.SwitchSeconds != 0.08 || s.CopySeconds != 0.06 {
			t.Errorf("with a request for b: %+v", s)
		}
		b.set(turns.Load{Running: 3}) // for ever
		a.set(turns.Load{Waiting: 1})
		a.fails = 2
		r.Notify()
		time.Sleep(1500 * ms)
		if b.hurried != 0 || r.State().Awake != "" {
			t.Errorf("half a turn after the end of a turn: %d hurried, %+v", b.hurried, r.State())
		}
		time.Sleep(10 * time.Second)
		if s := r.State(); b.hurried == 0 || s.Failures != 2 || s.Switches < 2 {
			t.Errorf("after failures: %d hurried, %+v", b.hurried, s)
		}
		cancel()
		<-ran
		if len(switches) != int(r.State().Switches) || switches[0] != (turns.Took{Total: 80 * ms, Copies: 60 * ms}) {
			t.Errorf("switches %v; %+v", switches, r.State())
		}
	})
}

// TestRunnerOptions refuses what makes no sense.
func TestRunnerOptions(t *testing.T) {
	m := []turns.Model{&fake{}, &fake{}}
	for _, o := range []turns.Options{
		{Limits: turns.Limits{Turn: 1}, Models: m[:1], Names: []string{"a"}},
		{Limits: turns.Limits{Turn: 1}, Models: m, Names: []string{"a"}},
		{Limits: turns.Limits{Turn: 1}, Models: m, Names: []string{"a", "b"}, Awake: 2},
		{Models: m, Names: []string{"a", "b"}},
	} {
		if _, err := turns.NewRunner(o); err == nil {
			t.Errorf("accepted: %+v", o)
		}
	}
}

package offload_test

import (
	"context"
	"errors"
	"strings"
	"sync"
	"sync/atomic"
	"testing"

	"github.com/moeserve/moeserve/device"
	"github.com/moeserve/moeserve/device/emulated"
	"github.com/moeserve/moeserve/kvcache/offload"
)

// badStreams are host streams of which some calls fail.
type badStreams struct {
	mu sync.Mutex
	// fails returns how a call fails: refused, or, of work, in the error state.
	fails func(call, work string) (refused, broken bool)
	// late: a point is watched when it is reached.
	late  bool
	calls int
}

type badStream struct {
	device.Watcher
	*badStreams
}

var errStream = errors.New("the stream is broken")

// of returns what becomes of work.
func (b *badStreams) of(call string, w device.Work) (device.Work, error) {
	b.mu.Lock()
	defer b.mu.Unlock()
	refused, broken := b.fails(call, w.Name)
	if refused || broken {
		b.calls++
	}
	if refused {
		return w, errStream
	}
	if broken {
		failed := w.Failed
		w.Run = func(device.Access) error { failed(errStream); return nil }
	}
	return w, nil
}

func (s badStream) Execute(w device.Work) error {
	w, err := s.of("execute", w)
	if err != nil {
		return err
	}
	return s.Watcher.Execute(w)
}

func (s badStream) Watch(p device.Point, w device.Work) (bool, error) {
	w, err := s.of("watch", w)
	if err == nil && s.late {
		err = p.Wait(context.Background())
	}
	if err != nil {
		return false, err
	}
	return s.Watcher.Watch(p, w)
}

// TestFileStreamErrors: whatever a stream of the file tier refuses, a job ends once, when none of
// its copies is under way, and its buffers are used for others. What has arrived is right, and what
// has not is reported.
func TestFileStreamErrors(t *testing.T) {
	const blocks = 20
	for _, during := range []string{"store", "load"} {
		for _, call := range []string{"watch", "execute", "execute late"} {
			for _, how := range []string{"refused", "broken"} {
				for _, which := range []string{"all", "some"} {
					t.Run(strings.Join([]string{during, call, how, which}, " "), func(t *testing.T) {
						bad := &badStreams{late: call == "execute late"}
						n, armed := 0, false
						bad.fails = func(c, work string) (bool, bool) {
							if !armed || !strings.HasPrefix(call, c) || work == "remove kv files" {
								return false, false
							}
							if n++; which == "some" && n%2 == 0 {
								return false, false
							}
							return how == "refused", how == "broken"
						}
						for schedule := range emulated.Schedule(3) {
							armed = false
							o := rigOptions{config: offload.Config{FileBlocks: 64, Directory: t.TempDir()}, limit: 64, wall: bad.late}
							if o.machine.Seed = 5; !o.wall {
								o.machine.Schedule = schedule
							}
							o.machine.HostLink = emulated.Link{BytesPerSecond: 1e6}
							o.machine.Report = func(f emulated.Finding) { t.Errorf("%v schedule: %v", schedule, f) }
							r := newRig(t, o)
							r.tiers.WithFileStreams(2, func(s device.Watcher) device.Watcher { return badStream{s, bad} })
							r.failingStreams(during, blocks, func(on bool) {
								bad.mu.Lock()
								defer bad.mu.Unlock()
								armed = on
							})
							r.close()
						}
						// A store executes nothing where its copies are watched.
						if bad.calls == 0 && (during == "load" || call != "execute") {
							t.Error("no call has failed")
						}
					})
				}
			}
		}
	}
}

// failingStreams stores and loads a sequence, one of both while streams fail, and then others.
func (r *rig) failingStreams(during string, blocks int, arm func(bool)) {
	r.Helper()
	s := r.sequence(1, "a", blocks)
	r.fill(s, 0, blocks)
	arm(during == "store")
	r.tiers.Store(s.keys, 0, s.table.Blocks(), offload.Filled)
	r.settle()
	r.overwriteAll(s) // a copy under way would show
	got := r.stats(offload.File)
	if n := int(got.Stored + got.FailedStores); n != blocks || got.Pending > 0 {
		r.Errorf("%+v", got)
	}
	arm(during == "load")
	if n, _ := r.tiers.Lookup(s.keys, 0, blocks*blockTokens); n > 0 {
		r.ok(r.tiers.Load(1, s.keys, 0, s.table.Blocks()[:n]))
		l := r.settle()
		if len(l) != 1 || (l[0].Blocks < n) != (l[0].Err != nil) || !r.right(s, 0, l[0].Blocks) {
			r.Errorf("loaded %+v of %d", l, n)
		}
		if m, _ := r.tiers.Lookup(s.keys, 0, blocks*blockTokens); m != n {
			r.Errorf("found %d of %d blocks after a stream has failed, not they", m, n)
		}
	}
	arm(false)
	if idle, all := r.tiers.IdleBuffers(); idle != all {
		r.Errorf("%d of %d buffers are idle", idle, all)
	}
	x := r.sequence(2, "x", blocks)
	r.fill(x, 0, blocks)
	r.store(x, 0, blocks)
	r.overwriteAll(x)
	if n, l := r.load(x, 0); n != blocks || l.Blocks != blocks || !r.right(x, 0, blocks) {
		r.Errorf("found %d, loaded %+v", n, l)
	}
	if r.tiers.Pending() > 0 || r.tiers.Busy() {
		r.Errorf("%d loads are pending", r.tiers.Pending())
	}
}

// overwriteAll fills the blocks of a sequence with something else.
func (r *rig) overwriteAll(s *sequence) {
	r.Helper()
	for _, b := range s.table.Blocks() {
		r.write(b, make([]byte, int(r.n)))
	}
}

// slowRead is a stream whose first read of files, of all streams, waits until the others have ended.
type slowRead struct {
	device.Watcher
	reads *reads
}

type reads struct {
	begun  atomic.Int64
	others sync.WaitGroup
}

func (s slowRead) Execute(w device.Work) error {
	if w.Name != "read kv files" {
		return s.Watcher.Execute(w)
	}
	run, slow := w.Run, s.reads.begun.Add(1) == 1
	w.Run = func(a device.Access) error {
		if slow {
			s.reads.others.Wait()
		} else {
			defer s.reads.others.Done()
		}
		return run(a)
	}
	return s.Watcher.Execute(w)
}

// TestFileReadersShareLoads: no read waits for a stream that is slow while others are idle, and neither
// does the end of a copy, whose buffer the next read needs.
func TestFileReadersShareLoads(t *testing.T) {
	const groups = 64 // of one block each: more than there are buffers
	r := newRig(t, rigOptions{config: offload.Config{FileBlocks: groups, Directory: t.TempDir()}, limit: groups, blocks: groups, wall: true})
	slow := &reads{}
	slow.others.Add(groups - 1)
	r.tiers.WithFileStreams(1, func(s device.Watcher) device.Watcher { return slowRead{s, slow} })
	s := r.sequence(1, "a", groups)
	r.fill(s, 0, groups)
	r.store(s, 0, groups)
	r.overwriteAll(s)
	if n, l := r.load(s, 0); n != groups || l.Blocks != groups || !r.right(s, 0, groups) || slow.begun.Load() != groups {
		t.Errorf("found %d, loaded %+v by %d reads", n, l, slow.begun.Load())
	}
}

package offload

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"sync"
	"time"

	"github.com/moeserve/moeserve/device"
)

// route is from one medium to another.
type route struct{ from, to string }

// worker starts jobs by the handlers of their routes and collects those that have ended. Its
// host stream watches their ends, so that a goroutine can wait for the first of many.
type worker struct {
	machine  device.Machine
	watcher  device.Watcher
	handlers map[route]Handler

	// mu is a leaf: nothing waits or calls others while it is held, except Fence.Signal.
	mu sync.Mutex
	// ended jobs were not collected yet; left is the number of jobs that have not ended.
	ended []*running
	left  int
	// fence counts ended jobs: its value is last.
	fence device.Fence
	last  uint32
}

// running is a job under way.
type running struct {
	job      *Job
	transfer Transfer      // nil: nothing was started
	refused  []int         // blocks of the job, in ascending order
	began    time.Duration // when it was started
	ended    time.Duration // when it had ended
	ends     int           // points that are not reached; guarded by worker.mu
}

// blocks divides the job's blocks, without those refused, into those that have arrived and
// the others.
func (r *running) blocks(arrived []bool) (good, bad []int) {
	for i := range r.job.Blocks {
		switch _, refused := slices.BinarySearch(r.refused, i); {
		case refused:
		case arrived[i]:
			good = append(good, i)
		default:
			bad = append(bad, i)
		}
	}
	return good, bad
}

// bytes of the blocks that were not refused.
func (r *running) bytes() int64 {
	n := r.job.bytes()
	for _, i := range r.refused {
		n -= r.job.Blocks[i].bytes()
	}
	return n
}

// bytesOf are those of some of its blocks.
func (r *running) bytesOf(blocks []int) (n int64) {
	for _, i := range blocks {
		n += r.job.Blocks[i].bytes()
	}
	return n
}

func newWorker(m device.Machine) (*worker, error) {
	s, err := m.NewStream(device.Host, device.StreamOptions{Name: "kv transfers"})
	if err != nil {
		return nil, err
	}
	w, ok := s.(device.Watcher)
	if !ok {
		return nil, errors.Join(errors.New("host streams of this machine cannot watch fences"), s.Close())
	}
	f, err := m.NewFence("kv transfers")
	if err != nil {
		return nil, errors.Join(err, s.Close())
	}
	return &worker{machine: m, watcher: w, handlers: map[route]Handler{}, fence: f, last: f.Value()}, nil
}

// start starts a job. If all of its blocks are refused there is no running one.
func (w *worker) start(r route, job *Job) (run *running, refused []int, err error) {
	h := w.handlers[r]
	if h == nil {
		return nil, allOf(job), fmt.Errorf("no handler from %s to %s", r.from, r.to)
	}
	began := w.machine.Now()
	t, refused, err := h.Start(job)
	if t == nil {
		return nil, allOf(job), err
	}
	run = &running{job: job, transfer: t, refused: refused, began: began}
	return run, refused, errors.Join(err, w.watch(run))
}

// nothing is a job that has ended, of which nothing was started.
func (w *worker) nothing() *running {
	run := &running{}
	_ = w.watch(run) // no points
	return run
}

func allOf(job *Job) []int {
	all := make([]int, len(job.Blocks))
	for i := range all {
		all[i] = i
	}
	return all
}

// watch has a job collected once it has ended. Where a point cannot be watched it is waited
// for: the job must not be lost.
func (w *worker) watch(run *running) error {
	var ends []device.Point
	if run.transfer != nil {
		ends = run.transfer.Ends()
	}
	w.mu.Lock()
	w.left++
	run.ends = len(ends) + 1
	w.mu.Unlock()
	var errs []error
	for _, p := range ends {
		work := device.Work{Name: "kv transfer ended", Host: true, Run: func(device.Access) error { w.reached(run); return nil }, Failed: func(error) { w.reached(run) }}
		reached, err := w.watcher.Watch(p, work)
		if err != nil {
			errs = append(errs, err)
			_ = p.Wait(context.Background()) // it has ended, in any case
		}
		if reached || err != nil {
			w.reached(run)
		}
	}
	w.reached(run)
	return errors.Join(errs...)
}

// reached counts down the points that a job's end needs.
func (w *worker) reached(run *running) {
	now := w.machine.Now()
	w.mu.Lock()
	defer w.mu.Unlock()
	if run.ends--; run.ends > 0 {
		return
	}
	run.ended = now
	w.left--
	w.ended = append(w.ended, run)
	w.last++
	_ = w.fence.Signal(w.last) // fails after Close only
}

// collect returns the jobs that have ended since the last call.
func (w *worker) collect() []*running {
	w.mu.Lock()
	defer w.mu.Unlock()
	ended := w.ended
	w.ended = nil
	return ended
}

// wait waits until a job has ended that was not collected, or none is under way.
func (w *worker) wait(ctx context.Context) error {
	w.mu.Lock()
	next := device.Point{Fence: w.fence, Value: w.last + 1}
	done := len(w.ended) > 0 || w.left == 0
	w.mu.Unlock()
	if done {
		return nil
	}
	return next.Wait(ctx)
}

// close releases the worker. No job is under way.
func (w *worker) close() error { return errors.Join(w.watcher.Close(), w.fence.Close()) }

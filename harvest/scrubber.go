package harvest

import (
	"errors"
	"fmt"
	"slices"

	"github.com/moeserve/moeserve/device"
)

// scrubber overwrites slabs of one peer with zeros, on a stream of its own. One goroutine
// at a time uses it.
type scrubber struct {
	zeros  device.Memory // owned by resources
	stream device.Stream
	fence  device.Fence
	value  uint32 // of the latest signal enqueued
	// jobs have not ended. Those without a point wait until the broken stream is idle and
	// was recovered: also those that were refused, of which a part may be running.
	jobs   []*scrubJob
	broken bool
}

type scrubJob struct {
	slab   *slab
	memory device.Memory
	bytes  int64
	point  device.Point
	err    error
}

func newScrubber(m device.Machine, peer device.Space, zeros device.Memory) (*scrubber, error) {
	s := &scrubber{zeros: zeros}
	var err error
	if s.stream, err = m.NewStream(peer, device.StreamOptions{Name: "harvest scrub " + peer.String()}); err != nil {
		return nil, fmt.Errorf("harvest: peer %s: %w", peer, err)
	}
	if s.fence, err = m.NewFence("harvest scrubbed " + peer.String()); err != nil {
		return nil, errors.Join(fmt.Errorf("harvest: peer %s: %w", peer, err), s.stream.Close())
	}
	s.value = s.fence.Value()
	return s, nil
}

// begin starts to overwrite the first bytes of mem, the slab's memory.
func (s *scrubber) begin(of *slab, mem device.Memory, bytes int64) {
	s.jobs = append(s.jobs, &scrubJob{slab: of, memory: mem, bytes: bytes})
	s.enqueue()
}

// enqueue enqueues the waiting jobs on the stream, if it is not broken.
func (s *scrubber) enqueue() {
	for _, j := range s.jobs {
		if s.broken {
			return
		}
		if j.point.None() && j.err == nil {
			j.err = s.start(j)
			s.broken = j.err != nil
		}
	}
}

// start overwrites the first part from the scrub buffer, the rest by doubling within the
// device, so that little is copied over the host link.
func (s *scrubber) start(j *scrubJob) error {
	n := j.bytes
	done := min(n, s.zeros.Bytes())
	if err := s.stream.Copy(j.memory.Range(0, done), s.zeros.Range(0, done)); err != nil {
		return err
	}
	for done < n {
		more := min(done, n-done)
		if err := s.stream.Copy(j.memory.Range(done, more), j.memory.Range(0, more)); err != nil {
			return err
		}
		done += more
	}
	if err := s.stream.SignalFence(s.fence, s.value+1); err != nil {
		return err
	}
	s.value++
	j.point = device.Point{Fence: s.fence, Value: s.value}
	return nil
}

// completed removes and returns the jobs that have ended.
func (s *scrubber) completed() (over []result) {
	s.jobs = slices.DeleteFunc(s.jobs, func(j *scrubJob) bool {
		if j.point.None() {
			return false
		}
		ok, err := reached(j.point)
		if ok {
			s.broken = s.broken || err != nil
			over = append(over, scrubbed{j.slab, err})
		}
		return ok
	})
	if s.broken && !slices.ContainsFunc(s.jobs, func(j *scrubJob) bool { return !j.point.None() }) {
		// The stream skips all work behind a failure, and of a refused job only a part was
		// enqueued, so this hardly waits; the error is known.
		_ = s.stream.Recover(background)
		s.broken = false
		s.jobs = slices.DeleteFunc(s.jobs, func(j *scrubJob) bool {
			if j.err != nil {
				over = append(over, scrubbed{j.slab, j.err})
			}
			return j.err != nil
		})
	}
	s.enqueue()
	return over
}

func (s *scrubber) close() error { return errors.Join(s.stream.Close(), s.fence.Close()) }

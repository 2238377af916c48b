package harvest

import (
	"errors"
	"fmt"
	"slices"

	"github.com/moeserve/moeserve/device"
)

// scrubber overwrites slabs of one peer with zeros, on a stream of its own. It is used
// by one goroutine at a time.
type scrubber struct {
	zeros  device.Memory // not its own
	stream device.Stream
	fence  device.Fence
	value  uint32 // the fence's behind all that is enqueued
	// jobs are not over. Those without a point wait until the stream has nothing more to
	// do: it is broken, which is mended then.
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
	if s.stream, err = m.NewStream(peer, device.StreamOptions{Name: "harvest clear " + peer.String()}); err != nil {
		return nil, fmt.Errorf("harvest: peer %s: %w", peer, err)
	}
	if s.fence, err = m.NewFence("harvest cleared " + peer.String()); err != nil {
		return nil, errors.Join(fmt.Errorf("harvest: peer %s: %w", peer, err), s.stream.Close())
	}
	return s, nil
}

// begin enqueues the overwriting of the first bytes of mem, which is the slab's.
func (s *scrubber) begin(of *slab, mem device.Memory, bytes int64) {
	s.jobs = append(s.jobs, &scrubJob{slab: of, memory: mem, bytes: bytes})
	s.enqueue()
}

// enqueue gives the stream the jobs that it does not have, if it is not broken.
func (s *scrubber) enqueue() {
	if s.broken && !slices.ContainsFunc(s.jobs, func(j *scrubJob) bool { return !j.point.None() }) {
		// All that is behind the failure was skipped, so this hardly waits; the error is
		// known.
		_ = s.stream.Recover(background)
		s.broken = false
	}
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

// start overwrites the first part from the zeros, the rest by doubling within the
// device, so that little goes over the host's link.
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
	if err := s.stream.Raise(s.fence, s.value+1); err != nil {
		return err
	}
	s.value++
	j.point = device.Point{Fence: s.fence, Value: s.value}
	return nil
}

// completed takes out the jobs that are over.
func (s *scrubber) completed() (over []result) {
	s.jobs = slices.DeleteFunc(s.jobs, func(j *scrubJob) bool {
		ok, err := j.err != nil, j.err
		if !j.point.None() {
			ok, err = reached(j.point)
			s.broken = s.broken || err != nil
		}
		if ok {
			over = append(over, scrubbed{j.slab, err})
		}
		return ok
	})
	s.enqueue()
	return over
}

func (s *scrubber) close() error { return errors.Join(s.stream.Close(), s.fence.Close()) }

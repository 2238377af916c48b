package offload

import (
	"errors"

	"github.com/moeserve/moeserve/device"
)

// points are fences that are used again, each for one transfer after the other.
type points struct {
	machine device.Machine
	name    string
	idle    []device.Point
	all     []device.Fence
}

// take returns a value that will be signaled or failed once.
func (p *points) take() (device.Point, error) {
	if n := len(p.idle); n > 0 {
		at := p.idle[n-1]
		p.idle = p.idle[:n-1]
		at.Value++
		return at, nil
	}
	f, err := p.machine.NewFence(p.name)
	if err != nil {
		return device.Point{}, err
	}
	p.all = append(p.all, f)
	return device.Point{Fence: f, Value: f.Value() + 1}, nil
}

// put returns a value that was signaled or failed.
func (p *points) put(at device.Point) { p.idle = append(p.idle, at) }

// cancel returns a value that was not used.
func (p *points) cancel(at device.Point) {
	at.Value--
	p.put(at)
}

func (p *points) close() error {
	var errs []error
	for _, f := range p.all {
		errs = append(errs, f.Close())
	}
	return errors.Join(errs...)
}

package emulated_test

import (
	"fmt"
	"testing"
	"time"

	"go.uber.org/goleak"

	"github.com/moeserve/moeserve/device"
	"github.com/moeserve/moeserve/device/devicetest"
	"github.com/moeserve/moeserve/device/emulated"
)

func TestMain(m *testing.M) { goleak.VerifyTestMain(m) }

// TestConformance runs the suite in every mode that keeps data.
func TestConformance(t *testing.T) {
	gpu := emulated.GPU{MemoryBytes: 256 << 20, FlopsPerSecond: 1e12, BytesPerSecond: 1e12}
	slow := emulated.Options{
		GPUs: []emulated.GPU{gpu, gpu, gpu}, Host: emulated.GPU{MemoryBytes: 1 << 30},
		HostLink: emulated.Link{BytesPerSecond: 55e9, Latency: 8 * time.Microsecond},
		PeerLink: emulated.Link{BytesPerSecond: 395e9, Latency: 9 * time.Microsecond},
	}
	run := func(name string, o emulated.Options) {
		t.Run(name, func(t *testing.T) {
			devicetest.Run(t, func(t *testing.T) device.Machine {
				m, err := emulated.Open(o)
				if err != nil {
					t.Fatal(err)
				}
				return m
			})
		})
	}
	run("wall", emulated.Options{})
	run("wall,check", emulated.Options{Check: true})
	run("one GPU", emulated.Options{GPUs: make([]emulated.GPU, 1), Check: true})
	paced := slow
	paced.Pace, paced.Check = true, true
	run("paced", paced)
	for _, sched := range []emulated.Schedule{emulated.Eager, emulated.Lazy, emulated.Random} {
		o := emulated.Options{Virtual: true, Check: true, Schedule: sched}
		run("virtual,"+sched.String(), o)
		timed := slow
		timed.Virtual, timed.Check, timed.Schedule = true, true, sched
		run("virtual,timed,"+sched.String(), timed)
	}
	run("like CUDA", emulated.Options{LikeCUDA: true, Check: true})
	run("virtual,like CUDA", emulated.Options{LikeCUDA: true, Virtual: true, Check: true})
	for _, start := range []uint32{1<<31 - 100, 1<<32 - 100, 1<<32 - 1} {
		run(fmt.Sprintf("virtual,fences from %#x", start), emulated.Options{Virtual: true, Check: true, FenceStart: start})
	}
	for seed := range uint64(4) {
		run(fmt.Sprintf("virtual,random,seed=%d", seed+1), emulated.Options{Virtual: true, Check: true, Schedule: emulated.Random, Seed: seed + 1})
	}
}

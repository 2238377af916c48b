package devices

import (
	"math"
	"strings"
	"testing"
	"time"

	"github.com/moeserve/moeserve/device"
)

// TestOwnLoad: own copies count as far as they ran in the last second.
func TestOwnLoad(t *testing.T) {
	busy := map[device.Space]time.Duration{}
	o := ownLoad{busy: func(p device.Space) time.Duration { return busy[p] }}
	for i, c := range []struct {
		after, copied time.Duration
		want          float64
	}{
		{0, 0, 0},
		{250 * time.Millisecond, 250 * time.Millisecond, 1},
		{250 * time.Millisecond, 0, 0.5},
		{500 * time.Millisecond, 0, 0.25},
		{250 * time.Millisecond, 0, 0},
		{time.Second, 100 * time.Millisecond, 0.1},
		{time.Second, 2 * time.Second, 1}, // two links at a time
	} {
		busy[device.HBM(1)] += c.copied
		var now time.Duration
		for _, s := range o.samples[device.HBM(1)] {
			now = s.at
		}
		if got := o.fraction(device.HBM(1), now+c.after); math.Abs(got-c.want) > 1e-9 {
			t.Errorf("%d: %g, want %g", i, got, c.want)
		}
		if got := o.fraction(device.HBM(2), now+c.after); got != 0 {
			t.Errorf("%d: %g of a peer without copies", i, got)
		}
	}
	if got := (&ownLoad{}).fraction(device.HBM(1), time.Second); got != 0 {
		t.Errorf("%g without copies", got)
	}
}

func TestDescribePartitions(t *testing.T) {
	if got := describePartitions(nil); got != "" {
		t.Errorf("without MIG: %q", got)
	}
	got := describePartitions([]partition{{"GPU-a", 7}, {"GPU-b", 0}})
	for _, want := range []string{"GPU-a (7 instances), GPU-b (0 instances)", "no peer access", "nvidia-smi -mig 0"} {
		if !strings.Contains(got, want) {
			t.Errorf("%q does not say %q", got, want)
		}
	}
}

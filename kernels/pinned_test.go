package kernels_test

import (
	"testing"

	"github.com/moeserve/moeserve/device"
	"github.com/moeserve/moeserve/device/emulated"
	"github.com/moeserve/moeserve/kernels"
	"github.com/moeserve/moeserve/kernels/cpu"
)

// TestPinned: kernels copy few bytes, where no copy fails by itself; copies of more bytes, or of no
// whole words, are the copy engines'. All arrive.
func TestPinned(t *testing.T) {
	const most = 256 << 10
	check := func(err error) {
		t.Helper()
		if err != nil {
			t.Fatal(err)
		}
	}
	for _, failing := range []bool{false, true} {
		var copies, launches int
		m, err := emulated.New(emulated.Options{Virtual: true, Check: true, CopyErrorsLoseDevice: !failing, Trace: func(e emulated.Trace) {
			switch e.Op {
			case "copy":
				copies++
			case "launch":
				launches++
			}
		}})
		check(err)
		b := cpu.New(cpu.Options{})
		host, err := m.Alloc(device.Host, 3*most, "host")
		check(err)
		memory, err := m.Alloc(device.HBM(0), 2*most, "device")
		check(err)
		s, err := m.NewStream(device.HBM(0), device.StreamOptions{})
		check(err)
		p := kernels.NewPinned(m, host, device.HBM(0), b)
		for _, c := range []struct {
			bytes    int64
			byKernel bool
		}{{4, true}, {6, false}, {most, true}, {most + 4, false}} {
			data := p.Write(0, 3*most)
			for i := range data {
				data[i] = byte(i * 7 / 3)
			}
			want := append([]byte(nil), data[:c.bytes]...)
			copies, launches = 0, 0
			at := memory.Range(256, c.bytes)
			check(p.ToDevice(s, at, 0))
			check(p.ToHost(s, most+64, kernels.New(at.Addr, kernels.BF16, int(c.bytes/2))))
			check(s.Synchronize(t.Context()))
			if got := p.Read(most+64, c.bytes); string(got) != string(want) {
				t.Errorf("%d bytes differ from what was copied", c.bytes)
			}
			if byKernel := c.byKernel && !failing; byKernel != (launches == 2) || byKernel != (copies == 0) {
				t.Errorf("failing %v: %d bytes took %d copies and %d kernels", failing, c.bytes, copies, launches)
			}
		}
		check(s.Close())
		check(memory.Free())
		check(p.Free())
		check(b.Close())
		check(m.Close())
	}
}

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
			byKernel := c.byKernel && !failing
			if byKernel != (launches == 2) || byKernel != (copies == 0) {
				t.Errorf("failing %v: %d bytes took %d copies and %d kernels", failing, c.bytes, copies, launches)
			}
			if c.bytes%4 != 0 {
				continue
			}

			// The same with another copy of 8 bytes, in one kernel. What is copied on the device, a kernel always copies.
			copies, launches = 0, 0
			second, third := kernels.New(memory.Range(0, 8).Addr, kernels.I32, 2), kernels.New(memory.Range(16, 8).Addr, kernels.I32, 2)
			data = p.Write(0, 3*most)
			for i := range data {
				data[i] = byte(i * 11 / 3)
			}
			want = append(want[:0], data[8:][:c.bytes]...)
			check(p.ToDevice(s, second.Range(), 0))
			check(p.ToDeviceWith(s, at, 8, b, second, third))
			check(p.ToHostBoth(s, most+64, kernels.New(at.Addr, kernels.BF16, int(c.bytes/2)), most, third))
			check(s.Synchronize(t.Context()))
			if got := p.Read(most+64, c.bytes); string(got) != string(want) {
				t.Errorf("%d bytes differ from what was copied", c.bytes)
			}
			if got := p.Read(most, 8); string(got) != string(data[:8]) {
				t.Errorf("the other 8 bytes are %x, want %x", got, data[:8])
			}
			wantCopies, wantLaunches := 0, 3
			switch {
			case failing:
				wantCopies, wantLaunches = 4, 1
			case !byKernel: // of more bytes
				wantCopies, wantLaunches = 2, 3
			}
			if copies != wantCopies || launches != wantLaunches {
				t.Errorf("failing %v: %d and 8 bytes took %d copies and %d kernels, want %d and %d", failing, c.bytes, copies, launches, wantCopies, wantLaunches)
			}
		}
		check(s.Close())
		check(memory.Free())
		check(p.Free())
		check(b.Close())
		check(m.Close())
	}
}

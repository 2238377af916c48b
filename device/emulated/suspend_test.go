package emulated

import (
	"errors"
	"testing"

	"github.com/moeserve/moeserve/device"
)

// TestSuspendedMemory: what is suspended cannot be copied, and is not resumed where others have the
// memory, until they give it back.
func TestSuspendedMemory(t *testing.T) {
	var findings []Finding
	m, err := New(Options{Virtual: true, Check: true, GPUs: []GPU{{MemoryBytes: 1 << 20}}, Report: func(f Finding) { findings = append(findings, f) }})
	if err != nil {
		t.Fatal(err)
	}
	defer m.Close() //nolint:errcheck // the test reports
	mem, err := m.Alloc(device.HBM(0), 600<<10, "weights")
	if err != nil {
		t.Fatal(err)
	}
	if err := mem.Suspend(); err != nil {
		t.Fatal(err)
	}
	host, err := m.Alloc(device.Host, 256, "host")
	if err != nil {
		t.Fatal(err)
	}
	s, err := m.NewStream(device.HBM(0), device.StreamOptions{})
	if err != nil {
		t.Fatal(err)
	}
	host.Write(0, 256)
	if err := s.Copy(mem.Range(0, 256), host.Range(0, 256)); err == nil {
		t.Error("a copy to suspended memory is accepted")
	}
	if len(findings) != 1 || findings[0].Kind != UseAfterFree || findings[0].First.Name != "suspend" {
		t.Errorf("findings: %v", findings)
	}
	other, err := m.Alloc(device.HBM(0), 600<<10, "another")
	if err != nil {
		t.Fatal(err)
	}
	for range 2 {
		if err := mem.Resume(); !errors.Is(err, device.ErrOutOfMemory) {
			t.Errorf("Resume without room: %v", err)
		}
	}
	if err := errors.Join(other.Free(), mem.Resume(), s.Copy(mem.Range(0, 256), host.Range(0, 256)), s.Synchronize(t.Context())); err != nil {
		t.Error(err)
	}
	if err := errors.Join(mem.Free(), host.Free()); err != nil {
		t.Error(err)
	}
}

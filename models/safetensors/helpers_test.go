package safetensors_test

import (
	"bytes"
	"io"
	"os"
	"path/filepath"
	"runtime"
	"strings"
	"testing"

	"github.com/moeserve/moeserve/models/safetensors"
	"github.com/moeserve/moeserve/models/safetensors/write"
)

func writeFile(t testing.TB, path string, data []byte) {
	t.Helper()
	if err := os.WriteFile(path, data, 0o600); err != nil {
		t.Fatal(err)
	}
}

// open opens dir and closes it when the test ends, checking that nothing of it
// stays mapped.
func open(t testing.TB, dir string) *safetensors.Checkpoint {
	t.Helper()
	c, err := safetensors.Open(dir)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		if err := c.Close(); err != nil {
			t.Error(err)
		}
		noneMapped(t, dir)
	})
	return c
}

// noneMapped fails if this process still maps a file under dir, or holds one
// open.
func noneMapped(t testing.TB, dir string) {
	t.Helper()
	if runtime.GOOS != "linux" {
		return
	}
	maps, err := os.ReadFile("/proc/self/maps")
	if err != nil {
		t.Fatal(err)
	}
	for line := range strings.Lines(string(maps)) {
		if strings.Contains(line, dir+"/") {
			t.Errorf("still mapped: %s", line)
		}
	}
	fds, err := os.ReadDir("/proc/self/fd")
	if err != nil {
		t.Fatal(err)
	}
	for _, fd := range fds {
		if target, err := os.Readlink("/proc/self/fd/" + fd.Name()); err == nil && strings.HasPrefix(target, dir+"/") {
			t.Errorf("still open: %s", target)
		}
	}
}

func spec(name string, t safetensors.DType, shape ...int) write.Spec {
	return write.Spec{Name: name, DType: t, Shape: shape}
}

// ramp is write.Save's data: every tensor's bytes count up from the length of its
// name.
func ramp(s write.Spec) (io.Reader, error) {
	return bytes.NewReader(rampBytes(s)), nil
}

func rampBytes(s write.Spec) []byte {
	n, err := s.Bytes()
	if err != nil {
		panic(err)
	}
	b := make([]byte, n)
	for i := range b {
		b[i] = byte(i + len(s.Name))
	}
	return b
}

func save(t testing.TB, dir string, shardBytes int64, specs ...write.Spec) {
	t.Helper()
	if err := write.Save(dir, specs, shardBytes, ramp); err != nil {
		t.Fatal(err)
	}
}

func fixture(name string) string {
	return filepath.Join("..", "..", "testdata", "fixtures", name)
}

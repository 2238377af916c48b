package safetensors

import (
	"bytes"
	"encoding/binary"
	"io"
	"os"
	"path/filepath"
	"runtime"
	"strings"
	"testing"
)

// file makes a safetensors file of a header and n bytes of data 0, 1, 2, ...
func file(header string, n int) []byte {
	b := binary.LittleEndian.AppendUint64(nil, uint64(len(header)))
	b = append(b, header...)
	for i := range n {
		b = append(b, byte(i))
	}
	return b
}

func writeFile(t testing.TB, path string, data []byte) {
	t.Helper()
	if err := os.WriteFile(path, data, 0o600); err != nil {
		t.Fatal(err)
	}
}

// open opens dir and closes it when the test ends, checking that nothing of it
// stays mapped.
func open(t testing.TB, dir string) *Checkpoint {
	t.Helper()
	c, err := Open(dir)
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

// ramp is Save's data: every tensor's bytes count up from the length of its
// name.
func ramp(s Spec) (io.Reader, error) {
	return bytes.NewReader(rampBytes(s)), nil
}

func rampBytes(s Spec) []byte {
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

func save(t testing.TB, dir string, shardBytes int64, specs ...Spec) {
	t.Helper()
	if err := Save(dir, specs, shardBytes, ramp); err != nil {
		t.Fatal(err)
	}
}

func fixture(name string) string {
	return filepath.Join("..", "..", "testdata", "fixtures", name)
}

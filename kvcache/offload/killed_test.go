package offload_test

import (
	"bufio"
	"io"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"testing"

	"github.com/moeserve/moeserve/kvcache/offload"
)

// directoryOfChild has the test binary be a process that keeps blocks in files there.
const directoryOfChild = "MOESERVE_TEST_KV_DIRECTORY"

// TestChild is that process: it stores blocks, says so, and waits for its end.
func TestChild(t *testing.T) {
	directory := os.Getenv(directoryOfChild)
	if directory == "" {
		t.Skip("only as a process of TestKilledProcess")
	}
	r := newRig(t, rigOptions{config: offload.Config{FileBlocks: 20, Directory: directory}})
	s := r.sequence(1, "a", 4)
	r.fill(s, 0, 4)
	r.store(s, 0, 4)
	os.Stdout.WriteString("stored\n")
	io.Copy(io.Discard, os.Stdin) //nolint:errcheck // until it is killed
}

// TestKilledProcess: the files of a process that was killed are removed when the next one opens a
// tier in the directory, and not while it lives.
func TestKilledProcess(t *testing.T) {
	directory := t.TempDir()
	child := exec.CommandContext(t.Context(), os.Args[0], "-test.run=^TestChild$", "-test.v")
	child.Env = append(os.Environ(), directoryOfChild+"="+directory)
	stdin, err := child.StdinPipe()
	if err != nil {
		t.Fatal(err)
	}
	defer stdin.Close() //nolint:errcheck // it was killed
	out, err := child.StdoutPipe()
	if err != nil {
		t.Fatal(err)
	}
	if err := child.Start(); err != nil {
		t.Fatal(err)
	}
	lines := bufio.NewScanner(out)
	for lines.Scan() && !strings.HasSuffix(lines.Text(), "stored") {
	}
	folder := mustGlob(t, directory, "moeserve-kv-*")
	files := func() int {
		all, err := filepath.Glob(filepath.Join(folder, "*-[1-4]"))
		if err != nil {
			t.Error(err)
		}
		return len(all)
	}
	next := func() string {
		r := newRig(t, rigOptions{config: offload.Config{FileBlocks: 20, Directory: directory}})
		r.close()
		return r.logged()
	}
	if log := next(); files() != 4 || log != "" {
		t.Errorf("%d files of a process that lives; log: %s", files(), log)
	}
	if err := child.Process.Kill(); err != nil {
		t.Fatal(err)
	}
	_ = child.Wait() // killed
	if files() != 4 {
		t.Errorf("%d files of a process that was killed", files())
	}
	if log := next(); files() != 0 || !strings.Contains(log, "killed removed") || !strings.Contains(log, "files=5") {
		t.Errorf("%d files are left; log: %s", files(), log)
	}
	if left, err := os.ReadDir(directory); err != nil || len(left) > 0 {
		t.Errorf("left: %v, %v", left, err)
	}
}

package node_test

import (
	"bytes"
	"encoding/json"
	"errors"
	"os"
	"os/exec"
	"path/filepath"
	"testing"

	"github.com/moeserve/moeserve/configs"
	"github.com/moeserve/moeserve/node"
)

// viewed is what Perfetto's viewer makes of a trace.
type viewed struct {
	Rows []struct {
		Process, Thread string
		Slices          int
	}
	Slices []struct {
		Name string
		N    int
	}
}

// view opens a trace in Perfetto's own viewer: see tests/perfetto. The test is skipped
// where that is not installed.
func view(t *testing.T, path string) (v viewed) {
	t.Helper()
	var stderr bytes.Buffer
	cmd := exec.CommandContext(t.Context(), "../tests/perfetto/check.sh", path, os.Getenv("MOESERVE_PERFETTO_SCREENSHOT"))
	cmd.Stderr = &stderr
	out, err := cmd.Output()
	const missing = 77
	if exit := (*exec.ExitError)(nil); errors.As(err, &exit) && exit.ExitCode() == missing {
		t.Skipf("Perfetto's viewer is not tried: %s", stderr.Bytes())
	}
	if err != nil {
		t.Fatalf("%v: %s", err, stderr.Bytes())
	}
	if err := json.Unmarshal(out, &v); err != nil {
		t.Fatalf("%v in %s", err, out)
	}
	return v
}

// TestTraceInPerfetto: Perfetto's viewer opens the trace of a run without an import error,
// and finds every row in it.
func TestTraceInPerfetto(t *testing.T) {
	s := configs.Defaults()
	s.Offload.Fraction, s.Output.Trace = 0.5, filepath.Join(t.TempDir(), "trace.json")
	s.Device.Emulate = "virtual,pcie=1GB/s,bw=50GB/s"
	n, err := node.Open(t.Context(), node.Options{Settings: s})
	if err != nil {
		t.Fatal(err)
	}
	if _, err := n.Engine().Generate(t.Context(), requests(n.Info().Config.Vocab), nil); err != nil {
		t.Fatal(err)
	}
	if err := n.Close(); err != nil {
		t.Fatal(err)
	}
	v := view(t, s.Output.Trace)
	rows := map[string]int{}
	for _, r := range v.Rows {
		rows[r.Process+": "+r.Thread] = r.Slices
	}
	for _, want := range []string{"gpu0: compute", "gpu0: copy host to gpu0", "gpu0: upload"} {
		if rows[want] == 0 {
			t.Errorf("the viewer has no slices in row %q: %v", want, rows)
		}
	}
}

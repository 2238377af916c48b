package cuda

import (
	"bytes"
	"os"
	"testing"

	"github.com/moeserve/moeserve/kernels/cuda/internal/arguments"
)

// TestArguments holds the structs of arguments to those of the kernels: they are what the
// generator makes of the sources, and Go places every field where C does.
func TestArguments(t *testing.T) {
	structs, err := arguments.Read(os.DirFS("src"))
	if err != nil {
		t.Fatal(err)
	}
	files, err := arguments.Generate(structs)
	if err != nil {
		t.Fatal(err)
	}
	for name, want := range files {
		if got, err := os.ReadFile(name); err != nil || !bytes.Equal(got, want) {
			t.Errorf("%s is not what gen writes (%v): run go generate ./kernels/cuda", name, err)
		}
	}
	checkArguments(t, structs)
}

// checkArguments holds all structs of arguments.go to those of C.
func checkArguments(t *testing.T, structs []arguments.Struct) {
	t.Helper()
	if len(structs) != len(argumentTypes) {
		t.Errorf("%d structs in C, and %d in Go", len(structs), len(argumentTypes))
	}
	for _, s := range structs {
		if of, ok := argumentTypes[s.Name]; !ok {
			t.Errorf("%s is not in Go", s.Name)
		} else if err := s.Check(of); err != nil {
			t.Error(err)
		}
		if room := len(streamState{}.args); s.Size > room {
			t.Errorf("%s has %d bytes, and a lane has room for %d", s.Name, s.Size, room)
		}
	}
}

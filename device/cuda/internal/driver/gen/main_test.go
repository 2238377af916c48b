package main

import (
	"os"
	"path/filepath"
	"strings"
	"testing"
)

func TestGeneratedFilesAreUpToDate(t *testing.T) {
	list, err := os.ReadFile("../symbols.txt")
	if err != nil {
		t.Fatal(err)
	}
	files, err := generate(string(list))
	if err != nil {
		t.Fatal(err)
	}
	if len(files) != 3 {
		t.Fatalf("%d files, want table.h and one for each of two processors", len(files))
	}
	for name, want := range files {
		got, err := os.ReadFile(filepath.Join("..", name))
		if err != nil {
			t.Fatal(err)
		}
		if string(got) != string(want) {
			t.Errorf("%s differs from what symbols.txt gives: run go generate ./device/cuda/internal/driver", name)
		}
	}
}

func TestBadLists(t *testing.T) {
	for list, want := range map[string]string{
		"cuB cuA":     "sorted",
		"cuA cuA":     "once",
		"cuA cuInit":  "cuInit",
		"cuA\ncuB\n":  "",
		"cuA\n\ncuB ": "",
	} {
		_, err := generate(list)
		if (err == nil) != (want == "") || err != nil && !strings.Contains(err.Error(), want) {
			t.Errorf("generate(%q): %v, want %q", list, err, want)
		}
	}
}

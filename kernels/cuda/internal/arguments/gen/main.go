// Command gen writes what package arguments generates. Run it by `go generate` in
// kernels/cuda.
package main

import (
	"fmt"
	"os"
	"path/filepath"

	"github.com/moeserve/moeserve/kernels/cuda/internal/arguments"
)

func main() {
	if err := run("."); err != nil {
		fmt.Fprintln(os.Stderr, err)
		os.Exit(1)
	}
}

// run generates for the kernels of the folder src of dir.
func run(dir string) error {
	structs, err := arguments.Read(os.DirFS(filepath.Join(dir, "src")))
	if err != nil {
		return err
	}
	files, err := arguments.Generate(structs)
	if err != nil {
		return err
	}
	for name, text := range files {
		if err := os.WriteFile(filepath.Join(dir, filepath.FromSlash(name)), text, 0o644); err != nil {
			return err
		}
	}
	return nil
}

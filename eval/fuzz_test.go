package eval

import (
	"os"
	"path/filepath"
	"testing"
)

// FuzzResults reads foreign bytes as results of a sweep, and as the file of --resume: what is
// accepted can be written again, and a file that is refused stays as it was.
func FuzzResults(f *testing.F) {
	f.Add([]byte(`[{"offload_fraction": 0.5, "offload_tier": "host", "requests": 4, "trials": [{"seconds": 1}]}]`))
	f.Add([]byte(`{"sweep":{"model":"x"}}` + "\n" + `{"offload_tier":"host","requests":1}` + "\n{"))
	f.Add([]byte(`[]`))
	f.Add([]byte(`{"sweep":{}}`))
	dir := f.TempDir()
	f.Fuzz(func(t *testing.T, data []byte) {
		if results, err := ReadResults(data, "results"); err == nil {
			for i := range results {
				if results[i].Requests == 0 {
					t.Fatalf("%q: entry %d has no requests", data, i)
				}
			}
		}
		path := filepath.Join(dir, "journal")
		if err := os.WriteFile(path, data, 0o600); err != nil {
			t.Fatal(err)
		}
		j, err := OpenJournal(path, map[string]string{"model": "x"})
		if err != nil {
			if after, _ := os.ReadFile(path); string(after) != string(data) {
				t.Fatalf("%q was refused (%v), and is now %q", data, err, after)
			}
			return
		}
		if err := j.Close(); err != nil {
			t.Fatal(err)
		}
	})
}

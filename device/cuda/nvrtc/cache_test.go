package nvrtc

import (
	"bytes"
	"fmt"
	"maps"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"sync"
	"testing"
)

func source() Source {
	return Source{Name: "a.cu", Text: "text", Headers: map[string]string{"h": "1", "i": "2"}, Options: []string{"-DA", "-DB"}}
}

func TestKeyTellsInputsApart(t *testing.T) {
	first := KeyOf(source(), "sm_80", "12.9")
	seen := map[Key]string{first: "the source itself"}
	add := func(name string, k Key) {
		if other, ok := seen[k]; ok {
			t.Errorf("%s has the key of %s", name, other)
		}
		seen[k] = name
	}
	add("architecture", KeyOf(source(), "sm_90a", "12.9"))
	add("compiler", KeyOf(source(), "sm_80", "13.0"))
	for name, change := range map[string]func(*Source){
		"name":                    func(s *Source) { s.Name = "b.cu" },
		"text":                    func(s *Source) { s.Text += " " },
		"header's text":           func(s *Source) { s.Headers["h"] = "3" },
		"header's name":           func(s *Source) { delete(s.Headers, "h"); s.Headers["j"] = "1" },
		"headers swapped":         func(s *Source) { s.Headers = map[string]string{"h": "2", "i": "1"} },
		"option":                  func(s *Source) { s.Options = []string{"-DA"} },
		"options in one":          func(s *Source) { s.Options = []string{"-DA-DB"} },
		"options in other order":  func(s *Source) { s.Options = []string{"-DB", "-DA"} },
		"a header as two options": func(s *Source) { s.Options = append(s.Options, "h", "1"); delete(s.Headers, "h") },
	} {
		s := source()
		s.Headers = maps.Clone(s.Headers)
		change(&s)
		add(name, KeyOf(s, "sm_80", "12.9"))
	}
	// Headers lie in a map, whose order differs from time to time.
	for range 20 {
		if k := KeyOf(source(), "sm_80", "12.9"); k != first {
			t.Errorf("the same input has the keys %v and %v", first, k)
		}
	}
}

func TestCacheKeeps(t *testing.T) {
	c := Cache{Dir: filepath.Join(t.TempDir(), "made", "when", "needed")}
	a, b := KeyOf(source(), "a", ""), KeyOf(source(), "b", "")
	if _, ok := c.Load(a); ok {
		t.Fatal("an empty cache has something")
	}
	if err := c.Store(a, []byte("result")); err != nil {
		t.Fatal(err)
	}
	if got, ok := c.Load(a); !ok || string(got) != "result" {
		t.Errorf("%q, %v", got, ok)
	}
	if _, ok := c.Load(b); ok {
		t.Error("another key has the result too")
	}
	if got, ok := (Cache{}).Load(a); ok {
		t.Errorf("no cache has %q", got)
	}
	if err := (Cache{}).Store(a, nil); err != nil {
		t.Error(err)
	}
}

func TestCacheIgnoresDamage(t *testing.T) {
	c := Cache{Dir: t.TempDir()}
	k := KeyOf(source(), "a", "")
	if err := c.Store(k, bytes.Repeat([]byte("cubin"), 100)); err != nil {
		t.Fatal(err)
	}
	whole, err := os.ReadFile(c.file(k))
	if err != nil {
		t.Fatal(err)
	}
	flipped := bytes.Clone(whole)
	flipped[len(flipped)-7] ^= 1
	for name, damaged := range map[string][]byte{
		"empty": nil, "cut in the head": whole[:20], "cut": whole[:len(whole)-1], "flipped": flipped,
		"longer": append(bytes.Clone(whole), 0), "another format": []byte("\x7fELF" + strings.Repeat(" ", 100)),
	} {
		if err := os.WriteFile(c.file(k), damaged, 0o644); err != nil {
			t.Fatal(err)
		}
		if got, ok := c.Load(k); ok {
			t.Errorf("%s: gives %d bytes", name, len(got))
		}
	}
	if err := c.Store(k, []byte("mended")); err != nil {
		t.Fatal(err)
	}
	if got, ok := c.Load(k); !ok || string(got) != "mended" {
		t.Errorf("after mending: %q, %v", got, ok)
	}
}

func TestCacheThatCannotBeWritten(t *testing.T) {
	file := filepath.Join(t.TempDir(), "a file")
	if err := os.WriteFile(file, nil, 0o644); err != nil {
		t.Fatal(err)
	}
	c := Cache{Dir: filepath.Join(file, "below")}
	if err := c.Store(KeyOf(source(), "a", ""), []byte("x")); err == nil || !strings.Contains(err.Error(), "cache") {
		t.Errorf("Store below a file: %v", err)
	}
}

const raceVariable = "MOESERVE_TEST_CACHE_RACE"

// TestProcessesRace lets processes write and read the same keys: whoever reads finds
// nothing or the whole of one writer's result.
func TestProcessesRace(t *testing.T) {
	if dir := os.Getenv(raceVariable); dir != "" {
		for round := range 200 {
			raceOnce(t, Cache{Dir: dir}, round%5)
		}
		return
	}
	dir := t.TempDir()
	var wg sync.WaitGroup
	for range 3 {
		wg.Go(func() {
			cmd := exec.Command(os.Args[0], "-test.run=^TestProcessesRace$")
			cmd.Env = append(os.Environ(), raceVariable+"="+dir)
			if out, err := cmd.CombinedOutput(); err != nil {
				t.Errorf("%v: %s", err, out)
			}
		})
	}
	wg.Wait()
	files, err := os.ReadDir(dir)
	if err != nil {
		t.Fatal(err)
	}
	if len(files) != 5 {
		t.Errorf("%d files are left, want one for each of 5 keys", len(files))
	}
}

func raceOnce(t *testing.T, c Cache, n int) {
	k := KeyOf(source(), fmt.Sprint(n), "")
	if got, ok := c.Load(k); ok {
		id, rest, _ := bytes.Cut(got, []byte(":"))
		if len(rest) != 20000 || bytes.Count(rest, []byte{byte(n)}) != len(rest) {
			t.Fatalf("key %d: %d bytes of process %s", n, len(rest), id)
		}
	}
	if err := c.Store(k, append(fmt.Appendf(nil, "%d:", os.Getpid()), bytes.Repeat([]byte{byte(n)}, 20000)...)); err != nil {
		t.Fatal(err)
	}
}

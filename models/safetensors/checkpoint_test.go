package safetensors_test

import (
	"encoding/json"
	"errors"
	"fmt"
	"io/fs"
	"maps"
	"math"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"testing"
	"unsafe"

	"golang.org/x/sys/unix"

	"github.com/moeserve/moeserve/models/safetensors"
	"github.com/moeserve/moeserve/models/safetensors/write"
)

func TestOpenFixtures(t *testing.T) {
	dirs, err := filepath.Glob(fixture("*"))
	if err != nil {
		t.Fatal(err)
	}
	opened := 0
	for _, dir := range dirs {
		shards, err := filepath.Glob(filepath.Join(dir, "model*.safetensors"))
		if err != nil {
			t.Fatal(err)
		}
		if len(shards) == 0 {
			continue // a config.json that borrows another fixture's weights
		}
		opened++
		t.Run(filepath.Base(dir), func(t *testing.T) {
			c := open(t, dir)
			if !slices.Equal(c.Files(), shards) {
				t.Errorf("files %v, want %v", c.Files(), shards)
			}
			var total int64
			last := safetensors.Tensor{}
			for _, name := range c.Names() {
				tensor, ok := c.Tensor(name)
				if !ok || tensor.Name != name {
					t.Fatalf("tensor %q: %v, %v", name, tensor.Name, ok)
				}
				if !tensor.DType.Usable() || !tensor.Aligned() {
					t.Errorf("%s: dtype %s, aligned %v", name, tensor.DType, tensor.Aligned())
				}
				if len(tensor.Data) != tensor.Elements()*tensor.DType.Bits()/8 {
					t.Errorf("%s: %v has %d bytes", name, tensor.Shape, len(tensor.Data))
				}
				if last.File > tensor.File || last.File == tensor.File && address(last) > address(tensor) {
					t.Errorf("%s comes after %s", name, last.Name)
				}
				values := make([]float32, tensor.Elements())
				if err := tensor.Float32s(values); err != nil {
					t.Fatal(err)
				}
				if i := slices.IndexFunc(values, func(v float32) bool { return math.IsNaN(float64(v)) || math.Abs(float64(v)) >= 100 }); i >= 0 {
					t.Errorf("%s: element %d is %g", name, i, values[i])
				}
				total += int64(len(tensor.Data))
				last = tensor
			}
			if total != c.Bytes() || c.Len() != len(c.Names()) {
				t.Errorf("%d bytes in %d tensors, want %d in %d", c.Bytes(), c.Len(), total, len(c.Names()))
			}
			if got := c.Metadata(0)["format"]; got != "pt" {
				t.Errorf("metadata format %q", got)
			}
			if err := c.Verify(); err != nil {
				t.Error(err)
			}
		})
	}
	if opened < 5 {
		t.Errorf("only %d fixtures found", opened)
	}
}

func address(t safetensors.Tensor) uintptr { return uintptr(unsafe.Pointer(unsafe.SliceData(t.Data))) }

func TestOpenFileWithOtherTypes(t *testing.T) {
	c, err := safetensors.OpenFile(filepath.Join(fixture("mixtral"), "expected.safetensors"))
	if err != nil {
		t.Fatal(err)
	}
	defer func() {
		if err := c.Close(); err != nil {
			t.Error(err)
		}
	}()
	ids, ok := c.Tensor("ids1")
	if !ok || ids.DType != safetensors.I32 || !slices.Equal(ids.Shape, []int{7}) {
		t.Fatalf("ids1 is %s %v", ids.DType, ids.Shape)
	}
	err = ids.Float32s(make([]float32, 7))
	if !errors.Is(err, safetensors.ErrMismatch) || !strings.Contains(err.Error(), "dtype I32 cannot be used") {
		t.Errorf("decoding I32: %v", err)
	}
	if empty, ok := c.Tensor("greedy3"); !ok || empty.Elements() != 0 || len(empty.Data) != 0 {
		t.Errorf("greedy3: %v, %v", empty, ok)
	} else {
		empty.Prefetch(0, 0)
		empty.Release()
		if err := empty.CopyTo(nil); err != nil {
			t.Error(err)
		}
	}
}

// two writes a checkpoint of two shards: a and b in the first, c in the second.
func two(t *testing.T) string {
	dir := t.TempDir()
	save(t, dir, 24, spec("a", safetensors.F32, 2), spec("b", safetensors.BF16, 4, 2), spec("c", safetensors.F32, 6))
	return dir
}

const (
	shard1 = "model-00001-of-00002.safetensors"
	shard2 = "model-00002-of-00002.safetensors"
)

func TestOpenRefuses(t *testing.T) {
	editIndex := func(t *testing.T, dir string, edit func(map[string]string)) {
		path := filepath.Join(dir, safetensors.IndexFile)
		text, err := os.ReadFile(path)
		if err != nil {
			t.Fatal(err)
		}
		var ix struct {
			WeightMap map[string]string `json:"weight_map"`
		}
		if err := json.Unmarshal(text, &ix); err != nil {
			t.Fatal(err)
		}
		edit(ix.WeightMap)
		if text, err = json.Marshal(ix); err != nil {
			t.Fatal(err)
		}
		writeFile(t, path, text)
	}
	truncate := func(t *testing.T, path string, cut int64) {
		st, err := os.Stat(path)
		if err != nil {
			t.Fatal(err)
		}
		if err := os.Truncate(path, st.Size()-cut); err != nil {
			t.Fatal(err)
		}
	}
	tests := []struct {
		name   string
		damage func(t *testing.T, dir string)
		is     error
		want   []string
	}{
		{"shard missing", func(t *testing.T, dir string) {
			if err := os.Remove(filepath.Join(dir, shard2)); err != nil {
				t.Fatal(err)
			}
		}, safetensors.ErrDamaged, []string{shard2, "names this shard", "download the missing file"}},
		{"shard truncated in its data", func(t *testing.T, dir string) {
			truncate(t, filepath.Join(dir, shard2), 1)
		}, safetensors.ErrDamaged, []string{shard2, `tensor "c"`, "reach past the file's 23 bytes", "download it again"}},
		{"shard truncated in its header", func(t *testing.T, dir string) {
			if err := os.Truncate(filepath.Join(dir, shard1), 20); err != nil {
				t.Fatal(err)
			}
		}, safetensors.ErrDamaged, []string{shard1, "longer than the file of 20 bytes"}},
		{"shard longer", func(t *testing.T, dir string) {
			truncate(t, filepath.Join(dir, shard1), -3)
		}, safetensors.ErrDamaged, []string{shard1, "3 bytes at the end"}},
		{"shard is a directory", func(t *testing.T, dir string) {
			if err := os.Remove(filepath.Join(dir, shard1)); err != nil {
				t.Fatal(err)
			}
			if err := os.Mkdir(filepath.Join(dir, shard1), 0o700); err != nil {
				t.Fatal(err)
			}
		}, safetensors.ErrDamaged, []string{shard1, "is a directory; give a regular file"}},
		{"shard is a named pipe", func(t *testing.T, dir string) {
			if err := os.Remove(filepath.Join(dir, shard1)); err != nil {
				t.Fatal(err)
			}
			if err := unix.Mkfifo(filepath.Join(dir, shard1), 0o600); err != nil {
				t.Fatal(err)
			}
		}, safetensors.ErrDamaged, []string{shard1, "is a named pipe; give a regular file"}},
		{"index is a named pipe", func(t *testing.T, dir string) {
			clearDir(t, dir)
			if err := unix.Mkfifo(filepath.Join(dir, safetensors.IndexFile), 0o600); err != nil {
				t.Fatal(err)
			}
		}, nil, []string{safetensors.IndexFile, "is a named pipe; give a regular file"}},
		{"link to nothing", func(t *testing.T, dir string) {
			clearDir(t, dir)
			if err := os.Symlink("../../blobs/0123", filepath.Join(dir, safetensors.SingleFile)); err != nil {
				t.Fatal(err)
			}
		}, safetensors.ErrNotFound, []string{safetensors.SingleFile + ": is a link to ../../blobs/0123, which is not there", "download the model again, or repair the link"}},
		{"index names a long tensor", func(t *testing.T, dir string) {
			editIndex(t, dir, func(m map[string]string) { m[strings.Repeat("x", 1<<20)] = shard2 })
		}, safetensors.ErrDamaged, []string{shard2, "index says that it is in this file, but it is not"}},
		{"tensor not in its shard", func(t *testing.T, dir string) {
			editIndex(t, dir, func(m map[string]string) { m["d"] = shard2 })
		}, safetensors.ErrDamaged, []string{shard2, `tensor "d"`, "index says that it is in this file, but it is not"}},
		{"tensor in another shard", func(t *testing.T, dir string) {
			editIndex(t, dir, func(m map[string]string) { m["b"] = shard2 })
		}, safetensors.ErrDamaged, []string{shard2, `tensor "b"`, "but it is in " + shard1}},
		{"tensor not in the index", func(t *testing.T, dir string) {
			editIndex(t, dir, func(m map[string]string) { delete(m, "b") })
		}, safetensors.ErrDamaged, []string{shard1, `tensor "b"`, "the index does not name it"}},
		{"tensor in two shards", func(t *testing.T, dir string) {
			w, err := write.Create(filepath.Join(dir, shard2), []write.Spec{spec("b", safetensors.F32, 6), spec("c", safetensors.F32)}, nil)
			if err != nil {
				t.Fatal(err)
			}
			for _, s := range w.Specs() {
				if err := w.Write(s.Name, rampBytes(s)); err != nil {
					t.Fatal(err)
				}
			}
			if err := w.Close(); err != nil {
				t.Fatal(err)
			}
		}, safetensors.ErrDamaged, []string{shard2, `tensor "b"`, "is also in " + shard1}},
		{"index leads out of the directory", func(t *testing.T, dir string) {
			editIndex(t, dir, func(m map[string]string) { m["b"] = "../" + shard1 })
		}, safetensors.ErrDamaged, []string{safetensors.IndexFile, `tensor "b"`, "is not a file name"}},
		{"index empty", func(t *testing.T, dir string) {
			editIndex(t, dir, func(m map[string]string) { clear(m) })
		}, safetensors.ErrDamaged, []string{safetensors.IndexFile, "no weight_map"}},
		{"index not JSON", func(t *testing.T, dir string) {
			writeFile(t, filepath.Join(dir, safetensors.IndexFile), []byte(`{"weight_map":{"a":`))
		}, safetensors.ErrDamaged, []string{safetensors.IndexFile, "not valid JSON: unexpected EOF"}},
		{"index in UTF-16", func(t *testing.T, dir string) {
			writeFile(t, filepath.Join(dir, safetensors.IndexFile), []byte("\xff\xfe{\x00}\x00"))
		}, safetensors.ErrDamaged, []string{safetensors.IndexFile, "UTF-8"}},
		{"index followed by more", func(t *testing.T, dir string) {
			writeFile(t, filepath.Join(dir, safetensors.IndexFile), []byte(`{"weight_map":{"a":"b"}} x`))
		}, safetensors.ErrDamaged, []string{safetensors.IndexFile, "something follows"}},
		{"index names a tensor twice", func(t *testing.T, dir string) {
			writeFile(t, filepath.Join(dir, safetensors.IndexFile), []byte(`{"weight_map":{"a":"b","a":"b"}}`))
		}, safetensors.ErrDamaged, []string{safetensors.IndexFile, `tensor "a"`, "occurs twice"}},
		{"index with two maps", func(t *testing.T, dir string) {
			writeFile(t, filepath.Join(dir, safetensors.IndexFile), []byte(`{"weight_map":{"a":"b"},"weight_map":{}}`))
		}, safetensors.ErrDamaged, []string{safetensors.IndexFile, `"weight_map" occurs twice`}},
		{"index with numbers", func(t *testing.T, dir string) {
			writeFile(t, filepath.Join(dir, safetensors.IndexFile), []byte(`{"metadata":{"x":[1,{}]},"weight_map":{"a":1}}`))
		}, safetensors.ErrDamaged, []string{safetensors.IndexFile, `tensor "a"`, "not a string"}},
		{"only another format", func(t *testing.T, dir string) {
			clearDir(t, dir)
			writeFile(t, filepath.Join(dir, "pytorch_model.bin"), nil)
		}, safetensors.ErrNotFound, []string{"neither model.safetensors nor", "pytorch_model.bin", "safetensors form"}},
		{"only shards", func(t *testing.T, dir string) {
			if err := os.Remove(filepath.Join(dir, safetensors.IndexFile)); err != nil {
				t.Fatal(err)
			}
		}, safetensors.ErrNotFound, []string{shard1, "download " + safetensors.IndexFile}},
		{"nothing", clearDir, safetensors.ErrNotFound, []string{"neither", "complete Hugging Face checkpoint"}},
		{"no directory", func(t *testing.T, dir string) {
			if err := os.RemoveAll(dir); err != nil {
				t.Fatal(err)
			}
		}, fs.ErrNotExist, []string{"no such file or directory"}},
	}
	for _, tt := range tests {
		t.Run(tt.name, func(t *testing.T) {
			dir := two(t)
			tt.damage(t, dir)
			_, err := safetensors.Open(dir)
			if err == nil || tt.is != nil && !errors.Is(err, tt.is) {
				t.Fatalf("error %v, want %v", err, tt.is)
			}
			if n := len(err.Error()); n > 1000 {
				t.Errorf("the error has %d bytes", n)
			}
			for _, want := range append(tt.want, dir) {
				if !strings.Contains(err.Error(), want) {
					t.Errorf("error %q lacks %q", err, want)
				}
			}
			if strings.Count(err.Error(), dir) > 1 || strings.Contains(err.Error(), "\n") {
				t.Errorf("error %q is not one clear line", err)
			}
			noneMapped(t, dir)
		})
	}
}

func clearDir(t *testing.T, dir string) {
	entries, err := os.ReadDir(dir)
	if err != nil {
		t.Fatal(err)
	}
	for _, e := range entries {
		if err := os.Remove(filepath.Join(dir, e.Name())); err != nil {
			t.Fatal(err)
		}
	}
}

func TestSingleFileWinsOverIndex(t *testing.T) {
	dir := two(t)
	save(t, dir, 0, spec("only", safetensors.BF16, 3))
	if names := open(t, dir).Names(); !slices.Equal(names, []string{"only"}) {
		t.Errorf("names %v", names)
	}
}

func TestDiff(t *testing.T) {
	c := open(t, two(t))
	missing, unexpected := c.Diff(slices.Values([]string{"x", "c", "x", "a", "y"}))
	if !slices.Equal(missing, []string{"x", "y"}) || !slices.Equal(unexpected, []string{"b"}) {
		t.Errorf("missing %v, unexpected %v", missing, unexpected)
	}
	if m, u := c.Diff(maps.Keys(map[string]int{"a": 0, "b": 0, "c": 0})); m != nil || u != nil {
		t.Errorf("missing %v, unexpected %v", m, u)
	}
	err := error(&safetensors.MismatchError{Dir: "d", Missing: []string{"1", "2", "3", "4", "5"}, Unexpected: []string{"6"}})
	want := `safetensors: d: lacks 5 tensors: "1", "2", "3" and 2 more and has unexpected tensor "6": `
	if !strings.HasPrefix(err.Error(), want) || !errors.Is(err, safetensors.ErrMismatch) {
		t.Errorf("error %q", err)
	}
}

func TestFloat32s(t *testing.T) {
	dir := t.TempDir()
	// 1, -2 and the smallest subnormal, in each type.
	data := map[string][]byte{
		"bf16": {0x80, 0x3f, 0x00, 0xc0, 0x01, 0x00},
		"f16":  {0x00, 0x3c, 0x00, 0xc0, 0x01, 0x00},
		"f32":  {0, 0, 0x80, 0x3f, 0, 0, 0, 0xc0, 1, 0, 0, 0},
	}
	want := map[string][]float32{
		"bf16": {1, -2, 0x1p-133},
		"f16":  {1, -2, 0x1p-24},
		"f32":  {1, -2, 0x1p-149},
	}
	w, err := write.Create(filepath.Join(dir, safetensors.SingleFile), []write.Spec{spec("bf16", safetensors.BF16, 3), spec("f16", safetensors.F16, 3, 1), spec("f32", safetensors.F32, 1, 3)}, nil)
	if err != nil {
		t.Fatal(err)
	}
	for name, b := range data {
		if err := w.Write(name, b); err != nil {
			t.Fatal(err)
		}
	}
	if err := w.Close(); err != nil {
		t.Fatal(err)
	}
	c := open(t, dir)
	for name := range data {
		tensor, _ := c.Tensor(name)
		got := make([]float32, 3)
		if err := tensor.Float32s(got); err != nil || !slices.Equal(got, want[name]) {
			t.Errorf("%s: %v, %v, want %v", name, got, err, want[name])
		}
		if err := tensor.Float32s(got[:2]); err == nil {
			t.Errorf("%s: decoded into too little room", name)
		}
		if err := tensor.CopyTo(make([]byte, len(tensor.Data)+1)); err == nil {
			t.Errorf("%s: copied into too much room", name)
		}
	}
}

func TestMisaligned(t *testing.T) {
	dir := t.TempDir()
	// The header is one byte short of keeping the data aligned.
	h := `{"a":{"dtype":"F32","shape":[1],"data_offsets":[0,4]}}`
	for len(h)%8 != 1 {
		h += " "
	}
	writeFile(t, filepath.Join(dir, safetensors.SingleFile), safetensors.File(h, 4))
	tensor, _ := open(t, dir).Tensor("a")
	got := make([]float32, 1)
	if err := tensor.Float32s(got); err != nil || got[0] != math.Float32frombits(0x03020100) {
		t.Errorf("%v, %v", got, err)
	}
	if tensor.Aligned() {
		t.Error("said to be aligned")
	}
}

func TestIndexAlongExperts(t *testing.T) {
	dir := t.TempDir()
	save(t, dir, 0, spec("experts", safetensors.BF16, 3, 4, 2), spec("empty", safetensors.F32, 2, 0), spec("scalar", safetensors.F32))
	c := open(t, dir)
	all, _ := c.Tensor("experts")
	for e := range 3 {
		one := all.Index(e)
		if !slices.Equal(one.Shape, []int{4, 2}) || !slices.Equal(one.Data, all.Data[16*e:16*e+16]) || cap(one.Data) != 16 {
			t.Errorf("expert %d: %v, %v", e, one.Shape, one.Data)
		}
		one.Release()
	}
	empty, _ := c.Tensor("empty")
	if got := empty.Index(1); len(got.Data) != 0 || !slices.Equal(got.Shape, []int{0}) {
		t.Errorf("empty: %v", got)
	}
	for _, i := range []int{-1, 3} {
		func() {
			defer func() {
				if recover() == nil {
					t.Errorf("index %d did not panic", i)
				}
			}()
			all.Index(i)
		}()
	}
}

// A tensor whose pages are released is read again, and what is released leaves
// the resident set.
func TestReleaseAndPrefetch(t *testing.T) {
	dir := t.TempDir()
	save(t, dir, 0, spec("a", safetensors.BF16, 1<<20), spec("b", safetensors.BF16, 1<<20), spec("c", safetensors.BF16, 5))
	c := open(t, dir)
	sum := func() (n int) {
		for _, name := range c.Names() {
			tensor, _ := c.Tensor(name)
			tensor.Prefetch(0, int64(len(tensor.Data)))
			for _, b := range tensor.Data {
				n += int(b)
			}
		}
		return n
	}
	want := sum()
	mapped := residentKiB(t, dir)
	if mapped < 4<<10 {
		t.Errorf("%d KiB resident after reading 4 MiB", mapped)
	}
	for _, name := range c.Names() {
		tensor, _ := c.Tensor(name)
		tensor.Release()
	}
	if left := residentKiB(t, dir); left > 128 {
		t.Errorf("%d KiB resident after release", left)
	}
	if got := sum(); got != want {
		t.Errorf("read again: %d, want %d", got, want)
	}
}

// residentKiB returns how much of the files under dir this process has mapped
// in.
func residentKiB(t *testing.T, dir string) (kib int) {
	t.Helper()
	text, err := os.ReadFile("/proc/self/smaps")
	if err != nil {
		t.Skipf("needs /proc/self/smaps: %v", err)
	}
	inside := false
	for line := range strings.Lines(string(text)) {
		fields := strings.Fields(line)
		switch {
		case !strings.HasSuffix(fields[0], ":"):
			inside = strings.Contains(line, dir+"/")
		case inside && fields[0] == "Rss:":
			n := 0
			for _, d := range fields[1] {
				n = 10*n + int(d-'0')
			}
			kib += n
		}
	}
	return kib
}

func TestFileTruncatedAfterOpen(t *testing.T) {
	dir := t.TempDir()
	save(t, dir, 0, spec("a", safetensors.BF16, 1<<15), spec("b", safetensors.BF16, 1<<15))
	c := open(t, dir)
	if err := os.Truncate(filepath.Join(dir, safetensors.SingleFile), 1<<15); err != nil {
		t.Fatal(err)
	}
	// Several readers at once, as a loader has; each gets its own error.
	var wg sync.WaitGroup
	for range 4 {
		wg.Go(func() {
			b, _ := c.Tensor("b")
			check := func(err error) {
				if !errors.Is(err, safetensors.ErrChanged) || !strings.Contains(err.Error(), `tensor "b": its data vanished`) ||
					!strings.Contains(err.Error(), safetensors.SingleFile) {
					t.Errorf("error %v", err)
				}
			}
			check(b.CopyTo(make([]byte, len(b.Data))))
			check(b.Float32s(make([]float32, b.Elements())))
			check(b.Read(func(data []byte) error {
				t.Errorf("read %d past the file's end", data[len(data)-1])
				return nil
			}))
		})
	}
	wg.Wait()
	if err := c.Verify(); !errors.Is(err, safetensors.ErrChanged) || !strings.Contains(err.Error(), "size changed") {
		t.Errorf("verify: %v", err)
	}
}

// A fault elsewhere is the program's own, and stays a panic.
func TestReadKeepsForeignPanics(t *testing.T) {
	c := open(t, two(t))
	a, _ := c.Tensor("a")
	foreign, err := unix.Mmap(-1, 0, os.Getpagesize(), unix.PROT_NONE, unix.MAP_ANON|unix.MAP_PRIVATE)
	if err != nil {
		t.Fatal(err)
	}
	defer func() {
		if err := unix.Munmap(foreign); err != nil {
			t.Error(err)
		}
	}()
	for name, read := range map[string]func([]byte) error{
		"fault": func(data []byte) error { foreign[0] = data[0]; return nil },
		"panic": func([]byte) error { panic("mine") },
	} {
		t.Run(name, func(t *testing.T) {
			defer func() {
				if recover() == nil {
					t.Error("no panic")
				}
			}()
			t.Errorf("returned %v", a.Read(read))
		})
	}
	mine := errors.New("mine")
	if err := a.Read(func([]byte) error { return mine }); !errors.Is(err, mine) {
		t.Errorf("error %v", err)
	}
}

func TestVerifyFindsOverwriting(t *testing.T) {
	dir := two(t)
	c := open(t, dir)
	path := filepath.Join(dir, shard2)
	st, err := os.Stat(path)
	if err != nil {
		t.Fatal(err)
	}
	later := st.ModTime().Add(1000)
	if err := os.Chtimes(path, later, later); err != nil {
		t.Fatal(err)
	}
	if err := c.Verify(); !errors.Is(err, safetensors.ErrChanged) || !strings.Contains(err.Error(), shard2) {
		t.Errorf("verify: %v", err)
	}
	if err := c.Close(); err != nil {
		t.Error(err)
	}
	if err := c.Close(); err != nil {
		t.Errorf("second close: %v", err)
	}
}

// A file replaced by rename leaves the open checkpoint as it was.
func TestReplacedByRename(t *testing.T) {
	dir := t.TempDir()
	save(t, dir, 0, spec("a", safetensors.F32, 4))
	c := open(t, dir)
	a, _ := c.Tensor("a")
	want := slices.Clone(a.Data)
	save(t, dir, 0, spec("other", safetensors.F32, 1))
	if !slices.Equal(a.Data, want) {
		t.Error("data changed")
	}
	if err := c.Verify(); err != nil {
		t.Error(err)
	}
}

func TestParseIsOpenInMemory(t *testing.T) {
	dir := t.TempDir()
	save(t, dir, 0, write.Spec{Name: "a", DType: safetensors.BF16, Shape: []int{3, 5}}, write.Spec{Name: "b", DType: safetensors.F32, Shape: []int{7}})
	path := filepath.Join(dir, safetensors.SingleFile)
	data, err := os.ReadFile(path)
	if err != nil {
		t.Fatal(err)
	}
	mapped := open(t, dir)
	memory, err := safetensors.Parse("built in", data)
	if err != nil {
		t.Fatal(err)
	}
	if !slices.Equal(memory.Names(), mapped.Names()) || memory.Bytes() != mapped.Bytes() {
		t.Fatalf("names %v of %d bytes, want %v of %d", memory.Names(), memory.Bytes(), mapped.Names(), mapped.Bytes())
	}
	for _, name := range memory.Names() {
		m, _ := memory.Tensor(name)
		f, _ := mapped.Tensor(name)
		m.Prefetch(0, int64(len(m.Data)))
		m.Release() // must leave the caller's memory alone
		if !slices.Equal(m.Data, f.Data) || m.File != "built in" {
			t.Errorf("%s in %s differs from the file's", name, m.File)
		}
	}
	if err := errors.Join(memory.Verify(), memory.Close()); err != nil {
		t.Fatal(err)
	}
	var damage *safetensors.FileError
	if _, err := safetensors.Parse("cut", data[:len(data)-1]); !errors.As(err, &damage) || damage.File != "cut" || !errors.Is(err, safetensors.ErrDamaged) {
		t.Errorf("cut data: %v", err)
	}
}

func BenchmarkCopyTo(b *testing.B) {
	for _, size := range []int{1 << 16, 1 << 24} {
		b.Run(fmt.Sprintf("bytes=%d", size), func(b *testing.B) {
			dir := b.TempDir()
			save(b, dir, 0, spec("a", safetensors.U8, size))
			a, _ := open(b, dir).Tensor("a")
			dst := make([]byte, size)
			b.SetBytes(int64(size))
			for b.Loop() {
				if err := a.CopyTo(dst); err != nil {
					b.Fatal(err)
				}
			}
		})
	}
}

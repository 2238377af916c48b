package write

import (
	"bytes"
	"encoding/binary"
	"errors"
	"fmt"
	"io"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"
	"testing/iotest"

	"pgregory.net/rapid"

	"github.com/moeserve/moeserve/models/safetensors"
)

func TestWriterLayout(t *testing.T) {
	path := filepath.Join(t.TempDir(), "x.safetensors")
	specs := []Spec{
		{"b", safetensors.BF16, []int{1, 3}},
		{"é<", safetensors.BF16, []int{1}},
		{"a", safetensors.BF16, []int{0}},
		{"u", safetensors.U8, []int{3}},
		{"f", safetensors.F32, nil},
	}
	w, err := Create(path, specs, map[string]string{"z": "1", "format": "pt"})
	if err != nil {
		t.Fatal(err)
	}
	for _, s := range specs { // not the file's order
		if err := w.Write(s.Name, rampBytes(s)); err != nil {
			t.Fatal(err)
		}
	}
	if err := w.Close(); err != nil {
		t.Fatal(err)
	}
	got, err := os.ReadFile(path)
	if err != nil {
		t.Fatal(err)
	}
	header := `{"__metadata__":{"format":"pt","z":"1"}` +
		`,"f":{"dtype":"F32","shape":[],"data_offsets":[0,4]}` +
		`,"a":{"dtype":"BF16","shape":[0],"data_offsets":[4,4]}` +
		`,"b":{"dtype":"BF16","shape":[1,3],"data_offsets":[4,10]}` +
		`,"é<":{"dtype":"BF16","shape":[1],"data_offsets":[10,12]}` +
		`,"u":{"dtype":"U8","shape":[3],"data_offsets":[12,15]}}`
	header += strings.Repeat(" ", (8-len(header)%8)%8)
	want := append(binary.LittleEndian.AppendUint64(nil, uint64(len(header))), header...)
	want = append(want, 1, 2, 3, 4, 1, 2, 3, 4, 5, 6, 3, 4, 1, 2, 3)
	if !bytes.Equal(got, want) {
		t.Errorf("got  %q\nwant %q", got, want)
	}
}

// What the writer writes, the reader reads, whatever the tensors and shards.
func TestWriteReadProperty(t *testing.T) {
	parent, runs := t.TempDir(), 0
	rapid.Check(t, func(rt *rapid.T) {
		runs++
		dir := filepath.Join(parent, fmt.Sprint(runs))
		if err := os.Mkdir(dir, 0o700); err != nil {
			rt.Fatal(err)
		}
		specs := rapid.SliceOfNDistinct(rapid.Custom(func(rt *rapid.T) Spec {
			s := Spec{
				Name:  rapid.String().Filter(func(s string) bool { return s != safetensors.MetadataKey }).Draw(rt, "name"),
				DType: safetensors.DType(rapid.IntRange(int(safetensors.Bool), int(safetensors.U64)).Draw(rt, "dtype")),
				Shape: rapid.SliceOfN(rapid.IntRange(0, 5), 0, 3).Draw(rt, "shape"),
			}
			if _, err := s.Bytes(); err != nil {
				s.Shape = append(s.Shape, 4) // elements below a byte come in fours
			}
			return s
		}), 1, 12, func(s Spec) string { return s.Name }).Draw(rt, "specs")
		shardBytes := rapid.Int64Range(0, 300).Draw(rt, "shardBytes")
		if err := Save(dir, specs, shardBytes, ramp); err != nil {
			rt.Fatal(err)
		}
		c, err := safetensors.Open(dir)
		if err != nil {
			rt.Fatal(err)
		}
		defer func() {
			if err := c.Close(); err != nil {
				rt.Error(err)
			}
		}()
		if c.Len() != len(specs) {
			rt.Fatalf("%d tensors of %d", c.Len(), len(specs))
		}
		for _, s := range specs {
			got, ok := c.Tensor(s.Name)
			if !ok || got.DType != s.DType || !slices.Equal(got.Shape, s.Shape) || !bytes.Equal(got.Data, rampBytes(s)) {
				rt.Fatalf("%v came back as %v, %v", s, got, ok)
			}
			if !got.Aligned() {
				rt.Fatalf("%v is not aligned", s)
			}
		}
	})
}

func TestSaveShards(t *testing.T) {
	dir := t.TempDir()
	save(t, dir, 16, Spec{"a", safetensors.F32, []int{2}}, Spec{"b", safetensors.F32, []int{2}}, Spec{"c", safetensors.F32, []int{9}}, Spec{"d", safetensors.F32, []int{0}}, Spec{"e", safetensors.F32, []int{1}})
	c := open(t, dir)
	var got []string
	for _, name := range c.Names() {
		tensor, _ := c.Tensor(name)
		got = append(got, filepath.Base(tensor.File)[6:11]+name)
	}
	if want := []string{"00001a", "00001b", "00002c", "00003d", "00003e"}; !slices.Equal(got, want) {
		t.Errorf("got %v, want %v", got, want)
	}
}

func TestWriterRefuses(t *testing.T) {
	mine := errors.New("mine")
	tests := []struct {
		name  string
		specs []Spec
		write func(w *Writer) error
		want  string
	}{
		{"same name twice", []Spec{{"a", safetensors.U8, nil}, {"a", safetensors.F32, nil}}, nil, `tensor "a" is declared twice`},
		{"reserved name", []Spec{{"__metadata__", safetensors.U8, nil}}, nil, "reserved name"},
		{"no dtype", []Spec{{"a", 0, nil}}, nil, `tensor "a": it has no dtype`},
		{"negative", []Spec{{"a", safetensors.U8, []int{-1}}}, nil, "negative dimension"},
		{"too large", []Spec{{"a", safetensors.U8, []int{1 << 40, 1 << 40}}}, nil, "too large"},
		{"too large together", []Spec{{"a", safetensors.U8, []int{1 << 60, 1}}, {"b", safetensors.U8, []int{1 << 60, 1}}, {"c", safetensors.U8, []int{1 << 60}}, {"d", safetensors.U8, []int{1 << 60}}, {"e", safetensors.U8, []int{1 << 60}}, {"f", safetensors.U8, []int{1 << 60}}, {"g", safetensors.U8, []int{1 << 60}}, {"h", safetensors.U8, []int{1 << 60}}}, nil, "too large together"},
		{"undeclared", []Spec{{"a", safetensors.U8, nil}}, func(w *Writer) error { return w.Write("b", nil) }, `tensor "b" was not declared`},
		{"short", []Spec{{"a", safetensors.U8, []int{4}}}, func(w *Writer) error { return w.Write("a", []byte{1}) }, "1 bytes given, 4 needed"},
		{"long", []Spec{{"a", safetensors.U8, []int{1}}}, func(w *Writer) error { return w.Write("a", []byte{1, 2}) }, "more than the 1 bytes"},
		{"twice", []Spec{{"a", safetensors.U8, nil}}, func(w *Writer) error {
			return errors.Join(w.Write("a", []byte{1}), w.Write("a", []byte{1}))
		}, "was written before"},
		{"reader fails", []Spec{{"a", safetensors.U8, nil}}, func(w *Writer) error { return w.WriteFrom("a", iotest.ErrReader(mine)) }, `tensor "a": mine`},
		{"reader fails at its end", []Spec{{"a", safetensors.U8, nil}}, func(w *Writer) error {
			return w.WriteFrom("a", io.MultiReader(strings.NewReader("x"), iotest.ErrReader(mine)))
		}, `tensor "a": mine`},
		{"closed early", []Spec{{"a", safetensors.U8, nil}, {"b", safetensors.U8, nil}}, func(w *Writer) error {
			return errors.Join(w.Write("b", []byte{1}), w.Close())
		}, `not written: tensor "a"`},
	}
	for _, tt := range tests {
		t.Run(tt.name, func(t *testing.T) {
			dir := t.TempDir()
			w, err := Create(filepath.Join(dir, "x"), tt.specs, nil)
			if err == nil {
				err = tt.write(w)
				if err := w.Abort(); err != nil {
					t.Error(err)
				}
			}
			if err == nil || !strings.Contains(err.Error(), tt.want) {
				t.Errorf("error %v, want %q", err, tt.want)
			}
			if left, _ := os.ReadDir(dir); len(left) > 0 {
				t.Errorf("left behind: %v", left)
			}
		})
	}
	t.Run("no directory", func(t *testing.T) {
		_, err := Create(filepath.Join(t.TempDir(), "no", "x"), nil, nil)
		if !errors.Is(err, os.ErrNotExist) {
			t.Errorf("error %v", err)
		}
	})
	t.Run("save fails in the second shard", func(t *testing.T) {
		dir := t.TempDir()
		err := Save(dir, []Spec{{"a", safetensors.U8, nil}, {"b", safetensors.U8, nil}}, 1, func(s Spec) (io.Reader, error) {
			if s.Name == "b" {
				return nil, mine
			}
			return ramp(s)
		})
		if !errors.Is(err, mine) {
			t.Errorf("error %v", err)
		}
		if _, err := safetensors.Open(dir); !errors.Is(err, safetensors.ErrNotFound) {
			t.Errorf("half a checkpoint opens: %v", err)
		}
	})
	t.Run("save with a name in two shards", func(t *testing.T) {
		if err := Save(t.TempDir(), []Spec{{"a", safetensors.U8, nil}, {"a", safetensors.U8, nil}}, 1, ramp); err == nil {
			t.Error("no error")
		}
	})
}

// open opens dir and closes it when the test ends.
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
	})
	return c
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

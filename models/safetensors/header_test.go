package safetensors

import (
	"bytes"
	"encoding/binary"
	"errors"
	"fmt"
	"math"
	"strings"
	"testing"

	"github.com/moeserve/moeserve/tools/racedetector"
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

// manyTensors is a header of n empty tensors.
func manyTensors(n int) string {
	var b strings.Builder
	for i := range n {
		fmt.Fprintf(&b, `,"t%d":{"dtype":"U8","shape":[0],"data_offsets":[0,0]}`, i)
	}
	return "{" + b.String()[1:] + "}"
}

func muchMetadata(n int) string {
	var b strings.Builder
	for i := range n {
		fmt.Fprintf(&b, `,"k%d":""`, i)
	}
	return `{"__metadata__":{` + b.String()[1:] + "}}"
}

// TestManyTensors: a checkpoint of the maximum number of tensors opens.
func TestManyTensors(t *testing.T) {
	racedetector.SkipSequential(t)
	c, err := Parse("f", file(manyTensors(maxTensors), 0))
	if err != nil || c.Len() != maxTensors {
		t.Fatal(err)
	}
}

func TestHeaderRefused(t *testing.T) {
	racedetector.SkipSequential(t)
	const ok = `"a":{"dtype":"U8","shape":[4],"data_offsets":[0,4]}`
	withLength := func(n uint64) []byte {
		return append(binary.LittleEndian.AppendUint64(nil, n), "{}"...)
	}
	tests := []struct {
		name string
		file []byte
		want string // part of the error
	}{
		{"empty file", nil, "0 bytes are too few"},
		{"seven bytes", make([]byte, 7), "7 bytes are too few"},
		{"length zero", make([]byte, 8), "header of 0 bytes is too short"},
		{"length over cap", withLength(MaxHeaderBytes + 1), "over the limit of 100000000"},
		{"length of all ones", withLength(math.MaxUint64), "over the limit"},
		{"length over file", withLength(3), "header of 3 bytes is longer than the file of 10"},
		{"git lfs", []byte("version https://git-lfs.github.com/spec/v1\noid sha256:0\n"), "git lfs pull"},
		{"leading space", file(` {}`, 0), "does not begin with '{'"},
		{"array", file(`[]`, 0), "does not begin with '{'"},
		{"invalid UTF-8", file("{\"\xff\":{}}", 0), "not valid UTF-8"},
		{"cut JSON", file(`{"a":{"dtype":"U8"`, 4), "unexpected EOF"},
		{"cut in a list", file(`{"a":{"shape":[1,`, 4), `tensor "a": header is not valid JSON`},
		{"missing comma", file(`{"a":{"dtype":"U8" "shape":[4]}}`, 4), "not valid JSON"},
		{"trailing comma", file(`{`+ok+`,}`, 4), "not valid JSON"},
		{"second object", file(`{`+ok+`}{}`, 4), "2 bytes after its JSON object"},
		{"zero padding", file("{"+ok+"}\x00\x00", 4), "2 bytes after its JSON object"},
		{"repeated tensor", file(`{`+ok+`,`+ok+`}`, 4), `tensor "a": occurs twice`},
		{"repeated by escape", file(`{`+ok+`,"\u0061":{}}`, 4), `tensor "a": occurs twice`},
		{"repeated field", file(`{"a":{"dtype":"U8","dtype":"U8"}}`, 4), `field "dtype" occurs twice`},
		{"repeated metadata", file(`{"__metadata__":{},"__metadata__":{}}`, 0), "occurs twice"},
		{"repeated metadata key", file(`{"__metadata__":{"k":"1","k":"2"}}`, 0), `__metadata__: "k" occurs twice`},
		{"metadata number", file(`{"__metadata__":{"k":1}}`, 0), `__metadata__: "k" is not a string`},
		{"metadata nested", file(`{"__metadata__":{"k":{}}}`, 0), `__metadata__: "k" is not a string`},
		{"metadata list", file(`{"__metadata__":[]}`, 0), "an object is expected"},
		{"tensor is null", file(`{"a":null}`, 0), `tensor "a": header is not valid JSON: an object is expected`},
		{"many tensors", file(manyTensors(maxTensors+1), 0), "header lists more than 262144 tensors"},
		{"many dimensions", file(`{"a":{"dtype":"U8","shape":[1`+strings.Repeat(",1", maxDimensions)+`],"data_offsets":[0,1]}}`, 1), "shape has more than 64 numbers"},
		{"long name", file(`{"`+strings.Repeat("n", 1<<20)+`":{"dtype":"U8","shape":[2],"data_offsets":[0,1]}}`, 1), "hold 1 bytes, but U8 [2] needs 2"},
		{"long number", file(`{"a":{"dtype":"U8","shape":[`+strings.Repeat("9", 1<<20)+`],"data_offsets":[0,1]}}`, 1), "is not a size"},
		{"much metadata", file(muchMetadata(maxMetadata+1), 0), "__metadata__ has more than 4096 entries"},
		{"no dtype", file(`{"a":{"shape":[4],"data_offsets":[0,4]}}`, 4), `field "dtype" is missing`},
		{"no shape", file(`{"a":{"dtype":"U8","data_offsets":[0,4]}}`, 4), `field "shape" is missing`},
		{"no offsets", file(`{"a":{"dtype":"U8","shape":[4]}}`, 4), `field "data_offsets" is missing`},
		{"unknown field", file(`{"a":{"dtype":"U8","shape":[4],"data_offsets":[0,4],"scale":2}}`, 4), `unknown field "scale"`},
		{"unknown dtype", file(`{"a":{"dtype":"Q4_K","shape":[4],"data_offsets":[0,4]}}`, 4), `tensor "a": unknown dtype "Q4_K"`},
		{"dtype in small letters", file(`{"a":{"dtype":"u8","shape":[4],"data_offsets":[0,4]}}`, 4), `unknown dtype "u8"`},
		{"dtype number", file(`{"a":{"dtype":8,"shape":[4],"data_offsets":[0,4]}}`, 4), "dtype is not a string"},
		{"shape number", file(`{"a":{"dtype":"U8","shape":4,"data_offsets":[0,4]}}`, 4), "shape is not an array"},
		{"shape of strings", file(`{"a":{"dtype":"U8","shape":["4"],"data_offsets":[0,4]}}`, 4), "shape holds something that is not a number"},
		{"shape negative", file(`{"a":{"dtype":"U8","shape":[-4],"data_offsets":[0,4]}}`, 4), "shape: -4 is not a size"},
		{"shape fraction", file(`{"a":{"dtype":"U8","shape":[4.0],"data_offsets":[0,4]}}`, 4), "shape: 4.0 is not a size"},
		{"shape exponent", file(`{"a":{"dtype":"U8","shape":[4e0],"data_offsets":[0,4]}}`, 4), "shape: 4e0 is not a size"},
		{"shape over int", file(`{"a":{"dtype":"U8","shape":[9223372036854775808],"data_offsets":[0,4]}}`, 4), "is not a size"},
		{"shape product overflows", file(`{"a":{"dtype":"U8","shape":[4294967296,4294967296],"data_offsets":[0,0]}}`, 0), "too large"},
		{"shape bytes overflow", file(`{"a":{"dtype":"F64","shape":[2305843009213693952],"data_offsets":[0,0]}}`, 0), "too large"},
		{"half a byte", file(`{"a":{"dtype":"F4","shape":[3],"data_offsets":[0,1]}}`, 1), "not a whole number of bytes"},
		{"one offset", file(`{"a":{"dtype":"U8","shape":[4],"data_offsets":[4]}}`, 4), "1 numbers instead of 2"},
		{"three offsets", file(`{"a":{"dtype":"U8","shape":[4],"data_offsets":[0,4,4]}}`, 4), "3 numbers instead of 2"},
		{"offset negative", file(`{"a":{"dtype":"U8","shape":[4],"data_offsets":[-1,3]}}`, 4), "-1 is not a size"},
		{"offsets backwards", file(`{"a":{"dtype":"U8","shape":[4],"data_offsets":[4,0]}}`, 4), "[4, 0] run backwards"},
		{"offset past the end", file(`{"a":{"dtype":"U8","shape":[8],"data_offsets":[0,8]}}`, 4), "reach past the file's 4 bytes of data"},
		{"offset huge", file(`{"a":{"dtype":"U8","shape":[4],"data_offsets":[9223372036854775803,9223372036854775807]}}`, 4), "reach past"},
		{"bytes too few", file(`{"a":{"dtype":"BF16","shape":[4],"data_offsets":[0,4]}}`, 4), "hold 4 bytes, but BF16 [4] needs 8"},
		{"bytes too many", file(`{"a":{"dtype":"U8","shape":[2],"data_offsets":[0,4]}}`, 4), "hold 4 bytes, but U8 [2] needs 2"},
		{"empty with bytes", file(`{"a":{"dtype":"U8","shape":[0,4],"data_offsets":[0,4]}}`, 4), "needs 0"},
		{"hole at the start", file(`{"a":{"dtype":"U8","shape":[3],"data_offsets":[1,4]}}`, 4), "1 bytes before its data belong to no tensor"},
		{"hole between", file(`{"a":{"dtype":"U8","shape":[1],"data_offsets":[0,1]},"b":{"dtype":"U8","shape":[1],"data_offsets":[3,4]}}`, 4), `tensor "b": 2 bytes before`},
		{"hole at the end", file(`{"a":{"dtype":"U8","shape":[3],"data_offsets":[0,3]}}`, 4), "1 bytes at the end belong to no tensor"},
		{"data without tensors", file(`{}`, 4), "4 bytes at the end belong to no tensor"},
		{"overlap", file(`{"a":{"dtype":"U8","shape":[3],"data_offsets":[0,3]},"b":{"dtype":"U8","shape":[2],"data_offsets":[2,4]}}`, 4), `tensor "b": data_offsets [2, 4] overlap tensor "a"`},
		{"same place", file(`{"a":{"dtype":"U8","shape":[4],"data_offsets":[0,4]},"b":{"dtype":"U8","shape":[4],"data_offsets":[0,4]}}`, 4), `overlap tensor "a"`},
		{"deep nesting", file(`{"a":`+strings.Repeat(`[`, 20000), 0), "not valid JSON"},
	}
	for _, tt := range tests {
		t.Run(tt.name, func(t *testing.T) {
			entries, _, err := readHeader("x.safetensors", bytes.NewReader(tt.file), int64(len(tt.file)))
			if err == nil {
				t.Fatalf("accepted as %+v", entries)
			}
			if !errors.Is(err, ErrDamaged) {
				t.Errorf("%v does not wrap ErrDamaged", err)
			}
			for _, want := range []string{tt.want, "x.safetensors", "download it again"} {
				if !strings.Contains(err.Error(), want) {
					t.Errorf("error %q lacks %q", err, want)
				}
			}
		})
	}
}

func TestHeaderAccepted(t *testing.T) {
	tests := []struct {
		name string
		file []byte
		want string // entries, offsets relative to the data section
	}{
		{"nothing", file(`{}`, 0), ""},
		{"space after", file("{}  \n", 0), ""},
		{"metadata", file(`{"__metadata__":{"format":"pt"}}`, 0), ""},
		{"scalar", file(`{"s":{"dtype":"F32","shape":[],"data_offsets":[0,4]}}`, 4), "s F32 [] 0-4;"},
		{"zero dimension", file(`{"z":{"dtype":"F32","shape":[3,0],"data_offsets":[0,0]}}`, 0), "z F32 [3 0] 0-0;"},
		{
			"zero times huge", file(`{"z":{"dtype":"F64","shape":[9223372036854775807,9223372036854775807,0],"data_offsets":[0,0]}}`, 0),
			"z F64 [9223372036854775807 9223372036854775807 0] 0-0;",
		},
		{
			"empty ones by name, before the data at their offset",
			file(`{"b":{"dtype":"U8","shape":[4],"data_offsets":[0,4]},"d":{"dtype":"U8","shape":[0],"data_offsets":[0,0]},"c":{"dtype":"U8","shape":[0],"data_offsets":[0,0]},"a":{"dtype":"U8","shape":[0],"data_offsets":[4,4]}}`, 4),
			"c U8 [0] 0-0;d U8 [0] 0-0;b U8 [4] 0-4;a U8 [0] 4-4;",
		},
		{
			"sorted by offset", file(`{"a":{"dtype":"U8","shape":[1],"data_offsets":[3,4]},"b":{"dtype":"I8","shape":[3],"data_offsets":[0,3]}}`, 4),
			"b I8 [3] 0-3;a U8 [1] 3-4;",
		},
		{"fields in any order", file(`{ "a" : { "data_offsets":[0,2] , "shape":[2,1], "dtype":"F8_E4M3" } }`, 2), "a F8_E4M3 [2 1] 0-2;"},
		{"elements of less than a byte", file(`{"a":{"dtype":"F6_E2M3","shape":[4],"data_offsets":[0,3]}}`, 3), "a F6_E2M3 [4] 0-3;"},
	}
	for _, tt := range tests {
		t.Run(tt.name, func(t *testing.T) {
			entries, meta, err := readHeader("x", bytes.NewReader(tt.file), int64(len(tt.file)))
			if err != nil {
				t.Fatal(err)
			}
			start := int64(8 + binary.LittleEndian.Uint64(tt.file))
			var got strings.Builder
			for _, e := range entries {
				fmt.Fprintf(&got, "%s %s %v %d-%d;", e.name, e.dtype, e.shape, e.begin-start, e.end-start)
			}
			if got.String() != tt.want {
				t.Errorf("got %s\nwant %s", got.String(), tt.want)
			}
			if tt.name == "metadata" && meta["format"] != "pt" {
				t.Errorf("metadata %v", meta)
			}
		})
	}
}

func TestDTypes(t *testing.T) {
	usable := 0
	for d := Bool; d <= U64; d++ {
		got, ok := ParseDType(d.String())
		if !ok || got != d || d.Bits() == 0 {
			t.Errorf("%d: %s, %d bits, parses as %d, %v", d, d, d.Bits(), got, ok)
		}
		if d > Bool && d.align() < (d-1).align() {
			t.Errorf("%s is out of the order of alignment", d)
		}
		if d.Usable() {
			usable++
		}
	}
	if usable != 3 {
		t.Errorf("%d usable types", usable)
	}
	for _, d := range []DType{0, U64 + 1} {
		if d.Bits() != 0 || d.String() != "invalid" || d.Usable() {
			t.Errorf("%d: %s of %d bits", uint8(d), d, d.Bits())
		}
	}
	if _, ok := ParseDType(""); ok {
		t.Error("the empty name is a type")
	}
}

// FuzzHeader gives foreign bytes to the reader of whole files. What it accepts
// must be tensors that tile the data section.
func FuzzHeader(f *testing.F) {
	f.Add(file(`{}`, 0))
	f.Add(file(`{"__metadata__":{"format":"pt"},"a":{"dtype":"BF16","shape":[2,2],"data_offsets":[0,8]}}`, 8))
	f.Add(file(`{"a":{"dtype":"F4","shape":[4],"data_offsets":[0,2]},"b":{"dtype":"U8","shape":[0],"data_offsets":[2,2]},"c":{"dtype":"F32","shape":[],"data_offsets":[2,6]}}  `, 6))
	f.Add(file(`{"a":{"dtype":"U8","shape":[18446744073709551615,2],"data_offsets":[0,18446744073709551614]}}`, 4))
	f.Add(file(`{"a":{"dtype":"U8","shape":[3],"data_offsets":[0,3]},"b":{"dtype":"U8","shape":[2],"data_offsets":[2,4]}}`, 4))
	f.Add([]byte("version https://git-lfs.github.com/spec/v1\n"))
	f.Add([]byte("\xff\xff\xff\xff\xff\xff\xff\xff{}"))
	f.Fuzz(func(t *testing.T, data []byte) {
		entries, _, err := readHeader("f", bytes.NewReader(data), int64(len(data)))
		if err != nil {
			var fe *FileError
			if !errors.As(err, &fe) || !errors.Is(err, ErrDamaged) || fe.File != "f" {
				t.Fatalf("error %#v", err)
			}
			return
		}
		at := int64(8 + binary.LittleEndian.Uint64(data))
		names := map[string]bool{}
		for _, e := range entries {
			if e.begin != at || e.end < e.begin || names[e.name] || !e.dtype.valid() {
				t.Fatalf("entry %+v after %d", e, at)
			}
			n := 1
			for _, d := range e.shape {
				n *= d
			}
			if int64(n)*int64(e.dtype.Bits()) != 8*(e.end-e.begin) {
				t.Fatalf("entry %+v holds %d elements", e, n)
			}
			names[e.name] = true
			at = e.end
		}
		if at != int64(len(data)) {
			t.Fatalf("tensors end at %d of %d", at, len(data))
		}
	})
}

// FuzzIndex gives foreign bytes to the reader of indexes.
func FuzzIndex(f *testing.F) {
	f.Add([]byte(`{"metadata":{"total_size":4},"weight_map":{"a":"model-00001-of-00002.safetensors"}}`))
	f.Add([]byte(`{"weight_map":{"a":"../../etc/passwd"}}`))
	f.Add([]byte(`{"metadata":[[[{"x":[]}]]],"weight_map":{}}`))
	f.Add([]byte(`{"weight_map":{"a":"x","a":"y"}}`))
	f.Fuzz(func(t *testing.T, data []byte) {
		weights, err := parseIndex("i", data)
		if err != nil {
			if !errors.Is(err, ErrDamaged) {
				t.Fatalf("error %#v", err)
			}
			return
		}
		if len(weights) == 0 {
			t.Fatal("no weights and no error")
		}
		for name, shard := range weights {
			if shard == "" || shard == ".." || strings.ContainsRune(shard, '/') {
				t.Fatalf("tensor %q in %q", name, shard)
			}
		}
	})
}

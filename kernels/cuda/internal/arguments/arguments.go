package arguments

import (
	"fmt"
	"io/fs"
	"path"
	"reflect"
	"regexp"
	"strings"
)

// Struct is a struct of arguments as C lays it out; sizes and offsets are in bytes.
type Struct struct {
	Name   string // as in C
	File   string // where it stands
	Fields []Field
	Size   int
	// alignment of the struct in C and in Go
	align, goAlign int
}

// Field is one of its fields, none of which is padding.
type Field struct {
	Name, Type   string // as in C
	Offset, Size int
}

// ctype is a type of fields: how C lays it out, and what it is in Go.
type ctype struct {
	size, align, goAlign int
	name                 string
	kind                 reflect.Kind
}

// types that fields may have, but for structs.
var types = map[string]ctype{
	"u64":        {8, 8, 8, "uint64", reflect.Uint64},
	"i64":        {8, 8, 8, "int64", reflect.Int64},
	"int":        {4, 4, 4, "int32", reflect.Int32},
	"float":      {4, 4, 4, "float32", reflect.Float32},
	"tensor_map": {128, 64, 8, "tensorMap", reflect.Array}, // hopper.cuh has alignas(64)
}

// Read returns the structs of arguments of all .cuh files of a folder, then of all .cu files, file by file.
func Read(folder fs.FS) ([]Struct, error) {
	files, err := fs.Glob(folder, "*.cuh")
	if err != nil {
		return nil, err
	}
	units, err := fs.Glob(folder, "*.cu")
	if err != nil {
		return nil, err
	}
	files = append(files, units...)
	r := reader{known: make(map[string]ctype)}
	for _, file := range files {
		text, err := fs.ReadFile(folder, file)
		if err != nil {
			return nil, err
		}
		if err := r.read(path.Base(file), string(text)); err != nil {
			return nil, err
		}
	}
	return r.structs, nil
}

// reader has what was read so far.
type reader struct {
	structs []Struct
	known   map[string]ctype // structs by their names in C
}

var (
	comment    = regexp.MustCompile(`//.*|/\*(?s:.*?)\*/`)
	definition = regexp.MustCompile(`\bstruct\s+(\w+_args)\s*\{([^{}]*)\}\s*;`)
	// begun is what every definition begins with, also one that definition does not match.
	begun       = regexp.MustCompile(`\bstruct\s+(?:\w+\s*\([^()]*\)\s*)?\w+_args\b[^;{}()]*\{`)
	declaration = regexp.MustCompile(`^(\w+)\s+(\w+(?:\s*,\s*\w+)*)$`)
)

func (r *reader) read(file, text string) error {
	text = comment.ReplaceAllString(text, "")
	found := definition.FindAllStringSubmatch(text, -1)
	if n := len(begun.FindAllString(text, -1)); n != len(found) {
		return fmt.Errorf("arguments: %s: %d structs of arguments, of which %d are plain lists of fields", file, n, len(found))
	}
	for _, f := range found {
		s, err := r.layout(f[1], f[2])
		if err != nil {
			return fmt.Errorf("arguments: %s: %s: %w", file, f[1], err)
		}
		s.File = file
		r.structs = append(r.structs, s)
		r.known[s.Name] = ctype{size: s.Size, align: s.align, goAlign: s.goAlign, name: goName(s.Name), kind: reflect.Struct}
	}
	return nil
}

// layout places fields by C's rules: each at the next multiple of its alignment, the end at
// a multiple of the largest.
func (r *reader) layout(name, body string) (Struct, error) {
	s := Struct{Name: name, align: 1, goAlign: 1}
	if _, twice := r.known[name]; twice {
		return s, fmt.Errorf("is defined twice")
	}
	names := make(map[string]bool)
	for d := range strings.SplitSeq(body, ";") {
		d = strings.TrimSpace(d)
		if d == "" {
			continue
		}
		m := declaration.FindStringSubmatch(d)
		if m == nil {
			return s, fmt.Errorf("%q is no type with names", d)
		}
		t, ok := r.typeOf(m[1])
		if !ok {
			return s, fmt.Errorf("type %s is not known here", m[1])
		}
		for field := range strings.SplitSeq(m[2], ",") {
			field = strings.TrimSpace(field)
			if names[goName(field)] {
				return s, fmt.Errorf("two fields are %s in Go", goName(field))
			}
			names[goName(field)] = true
			offset := up(s.Size, t.align)
			s.Fields = append(s.Fields, Field{Name: field, Type: m[1], Offset: offset, Size: t.size})
			s.Size = offset + t.size
			s.align, s.goAlign = max(s.align, t.align), max(s.goAlign, t.goAlign)
		}
	}
	if len(s.Fields) == 0 {
		return s, fmt.Errorf("has no fields")
	}
	s.Size = up(s.Size, s.align)
	return s, nil
}

func (r *reader) typeOf(name string) (ctype, bool) {
	if t, ok := types[name]; ok {
		return t, true
	}
	t, ok := r.known[name]
	return t, ok
}

func up(n, align int) int { return (n + align - 1) / align * align }

// Check holds a Go struct to s: the same fields in the same order, each where C has it,
// and the same size. A field whose Type is "" may have any type of its size.
func (s *Struct) Check(t reflect.Type) error {
	var fields []reflect.StructField
	for i := range t.NumField() {
		if f := t.Field(i); f.Name != "_" {
			fields = append(fields, f)
		}
	}
	for i, f := range s.Fields {
		if i == len(fields) {
			return fmt.Errorf("arguments: %s has no %s, which %s has at %d", t.Name(), goName(f.Name), s.Name, f.Offset)
		}
		g := fields[i]
		switch {
		case g.Name != goName(f.Name):
			return fmt.Errorf("arguments: %s.%s is where %s has %s", t.Name(), g.Name, s.Name, f.Name)
		case int(g.Offset) != f.Offset:
			return fmt.Errorf("arguments: %s.%s is at %d, and %s.%s at %d", t.Name(), g.Name, g.Offset, s.Name, f.Name, f.Offset)
		case int(g.Type.Size()) != f.Size:
			return fmt.Errorf("arguments: %s.%s has %d bytes, and %s.%s %d", t.Name(), g.Name, g.Type.Size(), s.Name, f.Name, f.Size)
		case f.Type == "":
		case g.Type.Kind() != kindOf(f.Type):
			return fmt.Errorf("arguments: %s.%s is %v, and %s.%s %s", t.Name(), g.Name, g.Type, s.Name, f.Name, f.Type)
		}
	}
	if len(fields) > len(s.Fields) {
		return fmt.Errorf("arguments: %s has %s, and %s does not", t.Name(), fields[len(s.Fields)].Name, s.Name)
	}
	if int(t.Size()) != s.Size {
		return fmt.Errorf("arguments: %s has %d bytes, and %s %d", t.Name(), t.Size(), s.Name, s.Size)
	}
	return nil
}

func kindOf(name string) reflect.Kind {
	if t, ok := types[name]; ok {
		return t.kind
	}
	return reflect.Struct
}

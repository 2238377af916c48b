package main

import (
	"fmt"
	"go/ast"
	"go/parser"
	"go/token"
	"path/filepath"
	"reflect"
	"strconv"
	"strings"
	"testing"
)

const modulePath = "github.com/moeserve/moeserve/"

// jsonField is a field of a result as it is read from the source: its path in the object
// ("report.memory[].peak_bytes"), the Go type that has it, its own key, and its JSON type.
type jsonField struct{ path, owner, name, kind string }

// asMarshaled are the types whose MarshalJSON writes something else than their fields.
var asMarshaled = map[string]string{
	"harvest.State":        "stateJSON",
	"experts.ByTier":       "object: a number for each tier",
	"experts.FetchedBytes": "object: a number for `peer` and one for `host`",
	"planner.Curve":        "array of pairs of numbers",
	"time.Duration":        "integer",
	"time.Time":            "string, RFC 3339",
	"json.RawMessage":      "any",
}

// typeReader reads type declarations of the product from its source.
type typeReader struct {
	t    *testing.T
	pkgs map[string]*parsedPackage // by folder
}

type parsedPackage struct {
	types   map[string]ast.Expr
	files   map[string]*ast.File // the file of each type
	textual map[string]bool      // types with MarshalText
}

func (r *typeReader) pkg(dir string) *parsedPackage {
	if p, ok := r.pkgs[dir]; ok {
		return p
	}
	r.t.Helper()
	p := &parsedPackage{types: map[string]ast.Expr{}, files: map[string]*ast.File{}, textual: map[string]bool{}}
	names, err := filepath.Glob(filepath.Join("..", "..", dir, "*.go"))
	if err != nil {
		r.t.Fatal(err)
	}
	for _, name := range names {
		if strings.HasSuffix(name, "_test.go") {
			continue
		}
		f, err := parser.ParseFile(token.NewFileSet(), name, nil, 0)
		if err != nil {
			r.t.Fatal(err)
		}
		for _, d := range f.Decls {
			switch d := d.(type) {
			case *ast.GenDecl:
				for _, s := range d.Specs {
					if s, ok := s.(*ast.TypeSpec); ok {
						p.types[s.Name.Name], p.files[s.Name.Name] = s.Type, f
					}
				}
			case *ast.FuncDecl:
				if d.Recv != nil && d.Name.Name == "MarshalText" {
					recv := d.Recv.List[0].Type
					if star, ok := recv.(*ast.StarExpr); ok {
						recv = star.X
					}
					if id, ok := recv.(*ast.Ident); ok {
						p.textual[id.Name] = true
					}
				}
			}
		}
	}
	r.pkgs[dir] = p
	return p
}

// fields lists the fields of a struct type of the package in dir, in the order of the source.
func (r *typeReader) fields(dir, name string) []jsonField {
	r.t.Helper()
	st, ok := r.pkg(dir).types[name].(*ast.StructType)
	if !ok {
		r.t.Fatalf("%s has no struct %s", dir, name)
	}
	return r.structFields(dir, name, r.pkg(dir).files[name], st, "")
}

func (r *typeReader) structFields(dir, owner string, file *ast.File, st *ast.StructType, at string) []jsonField {
	var all []jsonField
	for _, f := range st.Fields.List {
		tag := ""
		if f.Tag != nil {
			text, err := strconv.Unquote(f.Tag.Value)
			if err != nil {
				r.t.Fatal(err)
			}
			tag, _, _ = strings.Cut(reflect.StructTag(text).Get("json"), ",")
		}
		switch {
		case tag == "-":
		case tag == "" && len(f.Names) == 0: // embedded: its fields are ours
			_, nested := r.describe(dir, file, f.Type, strings.TrimSuffix(at, "."))
			all = append(all, nested...)
		case tag == "":
			r.t.Errorf("%s.%s: field %v has no json key", dir, owner, f.Names)
		default:
			kind, nested := r.describe(dir, file, f.Type, at+tag)
			all = append(append(all, jsonField{at + tag, owner, tag, kind}), nested...)
		}
	}
	return all
}

// describe returns the JSON type of an expression, and the fields below it.
func (r *typeReader) describe(dir string, file *ast.File, e ast.Expr, at string) (string, []jsonField) {
	switch e := e.(type) {
	case *ast.StarExpr:
		kind, nested := r.describe(dir, file, e.X, at)
		return kind + " or null", nested
	case *ast.ArrayType:
		kind, nested := r.describe(dir, file, e.Elt, at+"[]")
		return "array of " + pluralKind(kind), nested
	case *ast.MapType:
		kind, nested := r.describe(dir, file, e.Value, at+".*")
		return "object of " + pluralKind(kind), nested
	case *ast.StructType:
		return "object", r.structFields(dir, "struct", file, e, at+".")
	case *ast.SelectorExpr:
		pkg := e.X.(*ast.Ident).Name
		if kind, ok := asMarshaled[pkg+"."+e.Sel.Name]; ok && pkg != "harvest" {
			return kind, nil
		}
		for _, imp := range file.Imports {
			path := strings.Trim(imp.Path.Value, `"`)
			if to, ours := strings.CutPrefix(path, modulePath); ours && (imp.Name != nil && imp.Name.Name == pkg || imp.Name == nil && filepath.Base(path) == pkg) {
				return r.named(to, e.Sel.Name, at)
			}
		}
		r.t.Fatalf("%s.%s is not the product's: say in asMarshaled what it is in JSON", pkg, e.Sel.Name)
	case *ast.Ident:
		switch e.Name {
		case "string":
			return "string", nil
		case "bool":
			return "boolean", nil
		case "float32", "float64":
			return "number", nil
		case "any":
			return "any", nil
		}
		if strings.HasPrefix(e.Name, "int") || strings.HasPrefix(e.Name, "uint") {
			return "integer", nil
		}
		return r.named(dir, e.Name, at)
	}
	r.t.Fatalf("%s: %T in a result", dir, e)
	return "", nil
}

func (r *typeReader) named(dir, name, at string) (string, []jsonField) {
	p := r.pkg(dir)
	if as, ok := asMarshaled[filepath.Base(dir)+"."+name]; ok {
		if _, other := p.types[as]; !other {
			return as, nil
		}
		name = as
	}
	def, ok := p.types[name]
	if !ok {
		r.t.Fatalf("%s has no type %s", dir, name)
	}
	if p.textual[name] {
		return "string", nil
	}
	if st, ok := def.(*ast.StructType); ok {
		if at != "" {
			at += "."
		}
		return "object", r.structFields(dir, name, p.files[name], st, at)
	}
	return r.describe(dir, p.files[name], def, at)
}

func pluralKind(kind string) string {
	for _, one := range []string{"string", "boolean", "number", "integer", "object", "array"} {
		if rest, ok := strings.CutPrefix(kind, one); ok {
			return one + "s" + rest
		}
	}
	return kind
}

// unitOf is the unit that a key names at its end.
func unitOf(f jsonField) string {
	for _, u := range []struct{ end, unit string }{
		{"_bytes_per_s", "bytes/s"},
		{"_flop_per_s", "flop/s"},
		{"_tok_s", "tokens/s"},
		{"_per_minute", "1/minute"},
		{"_ns", "ns"},
		{"_s", "s"},
		{"_bytes", "bytes"},
		{"_fraction", "0 to 1"},
		{"_rate", "0 to 1"},
	} {
		if strings.HasSuffix("_"+f.name, u.end) && !strings.HasSuffix(f.kind, "string") {
			return u.unit
		}
	}
	switch f.name {
	case "utilization", "fragmentation", "bandwidth":
		return "0 to 1"
	case "seconds", "busy_seconds", "predicted_seconds":
		return "s"
	case "bytes_by_purpose", "bytes_by_client":
		return "bytes"
	case "bytes_per_second":
		return "bytes/s"
	}
	return ""
}

// fieldTable is the table of a root type's fields, each with the definition that fieldDocs has.
func fieldTable(t *testing.T, r *typeReader, page, dir, name string, used map[string]bool) string {
	t.Helper()
	var b strings.Builder
	b.WriteString("| field | type | unit | definition |\n|---|---|---|---|\n")
	for _, f := range r.fields(dir, name) {
		doc := ""
		for _, key := range []string{page + ":" + f.path, f.owner + "." + f.name, f.name} {
			if d, ok := fieldDocs[key]; ok {
				used[key], doc = true, d
				break
			}
		}
		if doc == "" {
			t.Errorf("%s has no definition of %s (%s.%s) in fieldDocs", page, f.path, f.owner, f.name)
		}
		fmt.Fprintf(&b, "| `%s` | %s | %s | %s |\n", f.path, f.kind, unitOf(f), doc)
	}
	return b.String()
}

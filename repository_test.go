package moeserve_test

import (
	"go/parser"
	"go/token"
	"io/fs"
	"os"
	"path/filepath"
	"regexp"
	"slices"
	"strings"
	"testing"
)

const module = "github.com/moeserve/moeserve"

// mayImport is the package table of docs/ARCHITECTURE.md: what each package of
// ours may import of ours. A package stands for those below it unless they have a
// row of their own.
var mayImport = map[string][]string{
	"cmd/moeserve":       {"node", "engine", "server", "eval", "planner", "configs"},
	"node":               {"engine", "rebalancer", "pipeline", "planner", "experts", "kvcache", "forward", "models", "harvest", "transfer", "kernels", "device", "configs"},
	"node/bench":         {"node", "node/fault", "eval", "pipeline", "planner", "experts", "kvcache", "configs"},
	"node/checkpoint":    {"node/fault", "experts", "forward", "models", "kernels", "device", "configs"},
	"node/devices":       {"node/fault", "node/sizing", "harvest", "kernels", "device", "configs"},
	"node/fault":         {"device"},
	"node/observe":       {"node/sizing", "engine", "rebalancer", "pipeline", "experts", "harvest", "transfer", "device"},
	"node/planning":      {"node/checkpoint", "node/fault", "node/sizing", "planner", "experts", "transfer", "models", "kernels", "device", "configs"},
	"node/sizing":        {"node/checkpoint", "pipeline", "planner", "experts", "kvcache", "forward", "models", "harvest", "kernels", "device", "configs"},
	"server":             {"engine", "models/chat", "models/tokenizer"},
	"eval":               {"configs", "engine", "planner", "transfer", "kvcache", "device"},
	"engine":             {"pipeline", "kvcache", "models/tokenizer"},
	"rebalancer":         {"experts", "harvest", "planner", "device"},
	"pipeline":           {"forward", "models", "experts", "kvcache", "transfer", "configs", "kernels", "device"},
	"planner":            {"configs"},
	"experts":            {"residency", "peercache", "harvest", "transfer", "kernels", "device"},
	"kvcache":            {"kernels", "device"},
	"forward":            {"models", "kernels", "device"},
	"models":             {"kernels", "device"},
	"models/chat":        {},
	"models/safetensors": {},
	"models/tiny":        {},
	"models/tokenizer":   {},
	"peercache":          {"harvest", "transfer", "device"},
	"harvest":            {"residency", "device"},
	"transfer":           {"device"},
	"residency":          {"device"},
	"kernels":            {"device"},
	"kernels/cuda":       {"kernels", "device", "device/cuda"},
	"device":             {},
	"configs":            {},
	"tools":              {"models", "configs", "kernels", "device"},
}

// onlyIn confines packages of others: the path's prefix, who may import it, why.
var onlyIn = []struct {
	path string
	pkgs []string
	why  string
}{
	{"github.com/spf13/", []string{"cmd/moeserve"}, "configuration is decoded once, in cmd/, into plain structs"},
	{"gonum.org/v1/plot", []string{"eval"}, "plots are eval's"},
	{"github.com/prometheus/", []string{"server", "node/observe"}, "the parts' metrics are collected in observe, those of requests in server"},
	{"net/http", []string{"server", "cmd/moeserve"}, "HTTP is the server's"},
	{"gorgonia.org/cu", []string{"device/cuda"}, "the driver is device/cuda's"},
	{"github.com/NVIDIA/go-nvml", []string{"device/cuda"}, "readings are device/cuda's"},
	{"C", []string{"device/cuda", "kernels/cuda"}, "without the cuda tag the product needs nothing but Go"},
	{"github.com/sugarme/tokenizer", []string{"models/tokenizer"}, "one small interface stands before it"},
	{"github.com/nikolalohinski/gonja", []string{"models/chat"}, "templates are chat's"},
	{"github.com/moeserve/moeserve/device/emulated", []string{"node", "device/emulated"}, "node alone picks between emulated and cuda"},
	{"github.com/moeserve/moeserve/kernels/cpu", []string{"node/devices", "kernels/cpu"}, "node alone picks the backend"},
}

// row is the row of mayImport that pkg falls under.
func row(pkg string) (string, bool) {
	for p := pkg; p != "." && p != ""; p = filepath.ToSlash(filepath.Dir(p)) {
		if _, ok := mayImport[p]; ok {
			return p, true
		}
	}
	return "", false
}

func within(pkg, dir string) bool { return pkg == dir || strings.HasPrefix(pkg, dir+"/") }

func TestImportsRunDownwards(t *testing.T) {
	seen := 0
	err := filepath.WalkDir(".", func(path string, d fs.DirEntry, err error) error {
		if err != nil {
			return err
		}
		if d.IsDir() && path != "." && (strings.HasPrefix(d.Name(), ".") || d.Name() == "testdata") {
			return fs.SkipDir
		}
		if d.IsDir() || !strings.HasSuffix(path, ".go") || strings.HasSuffix(path, "_test.go") {
			return nil
		}
		pkg := filepath.ToSlash(filepath.Dir(path))
		f, err := parser.ParseFile(token.NewFileSet(), path, nil, parser.ImportsOnly)
		if err != nil {
			return err
		}
		from, ok := row(pkg)
		if !ok {
			t.Errorf("%s: package %s has no row in the package table", path, pkg)
			return nil
		}
		seen++
		for _, imp := range f.Imports {
			name := strings.Trim(imp.Path.Value, `"`)
			for _, o := range onlyIn {
				if strings.HasPrefix(name, o.path) && (o.path != "C" || name == "C") &&
					!slices.ContainsFunc(o.pkgs, func(p string) bool { return within(pkg, p) }) &&
					!strings.HasSuffix(pkg, "test") {
					t.Errorf("%s imports %s: only %v may: %s", path, name, o.pkgs, o.why)
				}
			}
			to, ours := strings.CutPrefix(name, module+"/")
			if !ours || within(to, from) {
				continue
			}
			target, ok := row(to)
			if !ok || !slices.ContainsFunc(mayImport[from], func(p string) bool { return p == target || within(target, p) && p != target }) {
				t.Errorf("%s imports %s: the package table allows %s only %v", path, to, from, mayImport[from])
			}
		}
		return nil
	})
	if err != nil {
		t.Fatal(err)
	}
	if seen < 20 {
		t.Fatalf("read %d files: the walk has lost the tree", seen)
	}
}

var link = regexp.MustCompile(`\]\(([^)#\s]+)(#[^)\s]*)?\)`)

func TestDocumentLinks(t *testing.T) {
	docs, err := filepath.Glob("docs/*.md")
	if err != nil {
		t.Fatal(err)
	}
	docs = append(docs, "README.md", "CHANGELOG.md")
	links := 0
	for _, doc := range docs {
		text, err := os.ReadFile(doc)
		if err != nil {
			t.Fatal(err)
		}
		for _, m := range link.FindAllStringSubmatch(string(text), -1) {
			if strings.Contains(m[1], "://") {
				continue
			}
			links++
			if _, err := os.Stat(filepath.Join(filepath.Dir(doc), m[1])); err != nil {
				t.Errorf("%s links to %s: %v", doc, m[1], err)
			}
		}
	}
	if links == 0 {
		t.Fatal("no document has a link")
	}
}

func TestEveryPackageSaysWhatItIs(t *testing.T) {
	for pkg := range mayImport {
		if _, err := os.Stat(pkg); err != nil || pkg == "tools" {
			continue // its issue has not come yet
		}
		name := "doc.go"
		if strings.HasPrefix(pkg, "cmd/") {
			name = "main.go"
		}
		text, err := os.ReadFile(filepath.Join(pkg, name))
		if err != nil {
			t.Errorf("package %s: %v", pkg, err)
			continue
		}
		if want := "// Package " + filepath.Base(pkg); name == "doc.go" && !strings.HasPrefix(string(text), want) {
			t.Errorf("%s/doc.go does not begin with %q", pkg, want)
		}
	}
}

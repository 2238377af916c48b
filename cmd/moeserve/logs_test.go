package main

import (
	"encoding/json"
	"fmt"
	"go/ast"
	"go/parser"
	"go/token"
	"io/fs"
	"path"
	"path/filepath"
	"regexp"
	"slices"
	"strconv"
	"strings"
	"testing"
)

// What operators grep for: every message that the module logs, with its level, its package, and
// the keys of its attributes as far as they stand beside it.
func TestLogMessagesAreListed(t *testing.T) {
	const root = "../.."
	var all []string
	err := filepath.WalkDir(root, func(name string, d fs.DirEntry, err error) error {
		if err != nil {
			return err
		}
		if d.IsDir() {
			if base := d.Name(); name != root && (strings.HasPrefix(base, ".") || slices.Contains([]string{"build", "testdata", "tools", "tests"}, base)) {
				return filepath.SkipDir
			}
			return nil
		}
		if !strings.HasSuffix(name, ".go") || strings.HasSuffix(name, "_test.go") {
			return nil
		}
		f, err := parser.ParseFile(token.NewFileSet(), name, nil, parser.SkipObjectResolution)
		if err != nil {
			return err
		}
		folder, err := filepath.Rel(root, filepath.Dir(name))
		if err != nil {
			return err
		}
		ast.Inspect(f, func(n ast.Node) bool {
			if m, ok := logMessage(n); ok {
				all = append(all, path.Clean(filepath.ToSlash(folder))+" "+m)
			}
			return true
		})
		return nil
	})
	if err != nil {
		t.Fatal(err)
	}
	slices.Sort(all)
	golden(t, "logs.txt", strings.Join(slices.Compact(all), "\n")+"\n")
}

// logReceiver is how what slog's methods are called on ends.
var logReceiver = regexp.MustCompile(`(?i)^(log|logger|slog|to)$`)

// logMessage describes a call that logs, or what harvest logs of an event: its level, message
// and keys.
func logMessage(n ast.Node) (string, bool) {
	switch n := n.(type) {
	case *ast.CallExpr:
		f, ok := n.Fun.(*ast.SelectorExpr)
		if !ok || !logReceiver.MatchString(lastName(f.X)) {
			return "", false
		}
		switch level := f.Sel.Name; level {
		case "Debug", "Info", "Warn", "Error":
			return describeLog(level, n.Args[0], n.Args[1:]), true
		case "Log", "LogAttrs":
			if len(n.Args) > 2 {
				return describeLog(strings.TrimPrefix(lastName(n.Args[1]), "Level"), n.Args[2], n.Args[3:]), true
			}
		}
	case *ast.CompositeLit:
		if lastName(n.Type) != "logRecord" || len(n.Elts) != 3 {
			return "", false
		}
		keys := n.Elts[2:]
		if list, ok := n.Elts[2].(*ast.CompositeLit); ok {
			keys = list.Elts
		}
		return describeLog(strings.TrimPrefix(lastName(n.Elts[0]), "Level"), n.Elts[1], keys), true
	}
	return "", false
}

// describeLog puts a message together from literals, with … for what is known only when it is logged.
func describeLog(level string, message ast.Expr, args []ast.Expr) string {
	var keys []string
	for _, a := range args {
		in := []ast.Expr{a}
		if call, ok := a.(*ast.CallExpr); ok { // slog.String("key", …), append(about, "key", …)
			in = call.Args
		}
		for _, k := range in {
			if k := literal(k); !strings.Contains(k, "…") {
				keys = append(keys, k)
			}
		}
	}
	return fmt.Sprintf("%s: %s [%s]", strings.ToLower(level), literal(message), strings.Join(keys, " "))
}

// literal is a string as it is written, with … for what is not a literal.
func literal(e ast.Expr) string {
	switch e := e.(type) {
	case *ast.BasicLit:
		if text, err := strconv.Unquote(e.Value); err == nil && e.Kind == token.STRING {
			return text
		}
	case *ast.BinaryExpr:
		return literal(e.X) + literal(e.Y)
	}
	return "…"
}

// lastName is the last name of x.y.z.
func lastName(e ast.Expr) string {
	switch e := e.(type) {
	case *ast.Ident:
		return e.Name
	case *ast.SelectorExpr:
		return e.Sel.Name
	}
	return ""
}

// That a word is taken as the prompt is a record where the log is JSON.
func TestNoteIsJSON(t *testing.T) {
	_, stderr, code := invoke(t, strings.NewReader(""), "run", "-q", "--log-format", "json", "--max-tokens", "1", "hello")
	var record struct{ Level, Msg string }
	if err := json.Unmarshal([]byte(stderr), &record); err != nil || code != exitDone || record.Level != "WARN" || !strings.HasPrefix(record.Msg, `"hello" is not a model`) {
		t.Errorf("exit code %d, %v: %s", code, err, stderr)
	}
}

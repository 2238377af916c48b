package jinja

import (
	"context"
	"encoding/json"
	"os"
	"testing"
	"time"
)

// now is the time at which the reference renders.
var now = time.Date(2024, time.July, 5, 9, 3, 7, 0, time.UTC)

// reference is a file that tools/templates/reference.py writes.
type reference struct {
	Variables json.RawMessage
	Cases     []struct {
		Template string
		Want     *string
		Error    string
	}
}

func readReference(t *testing.T, file string) (*reference, map[string]Value) {
	t.Helper()
	b, err := os.ReadFile(file)
	if err != nil {
		t.Fatal(err)
	}
	var ref reference
	if err := json.Unmarshal(b, &ref); err != nil {
		t.Fatal(err)
	}
	return &ref, variables(t, string(ref.Variables))
}

// variables decodes a JSON object.
func variables(t testing.TB, text string) map[string]Value {
	t.Helper()
	v, err := Decode([]byte(text), FromClient)
	if err != nil {
		t.Fatal(err)
	}
	vars := map[string]Value{}
	d := v.(*Dict)
	for i, key := range d.keys {
		vars[key.(Text).s] = d.values[i]
	}
	return vars
}

// render renders a text.
func render(text string, vars map[string]Value) (Text, error) {
	tmpl, err := Parse(text)
	if err != nil {
		return Text{}, err
	}
	return tmpl.Render(context.Background(), vars, Options{Now: func() time.Time { return now }})
}

// TestConstructs compares single constructs with what jinja2 makes of them.
func TestConstructs(t *testing.T) {
	compare(t, "testdata/constructs.json", 120)
}

// TestDifferential compares random templates with what jinja2 makes of them.
func TestDifferential(t *testing.T) {
	file := os.Getenv("MOESERVE_TEMPLATE_FUZZ")
	if file == "" {
		t.Skip("MOESERVE_TEMPLATE_FUZZ is not set: make its file with tools/templates/reference.py fuzz")
	}
	compare(t, file, 1)
}

func compare(t *testing.T, file string, least int) {
	t.Helper()
	ref, vars := readReference(t, file)
	if len(ref.Cases) < least {
		t.Fatalf("%d cases, want at least %d", len(ref.Cases), least)
	}
	exact, raised := 0, 0
	for _, c := range ref.Cases {
		got, err := render(c.Template, vars)
		switch {
		case c.Want == nil && err != nil:
			raised++
		case c.Want == nil:
			t.Errorf("%s\n got %q\nwant the error %s", c.Template, got.s, c.Error)
		case err != nil:
			t.Errorf("%s\n got the error %v\nwant %q", c.Template, err, *c.Want)
		case got.s != *c.Want:
			t.Errorf("%s\n got %q\nwant %q", c.Template, got.s, *c.Want)
		default:
			exact++
		}
	}
	t.Logf("%d cases: %d exact, %d raise in both, %d differ", len(ref.Cases), exact, raised, len(ref.Cases)-exact-raised)
}

package chat

import (
	"encoding/json"
	"os"
	"path/filepath"
	"testing"
)

// TestFilters holds filters and tests to what Jinja2 makes of the same expressions (testdata/make_filters.py).
func TestFilters(t *testing.T) {
	var expected struct {
		Variables map[string]json.RawMessage `json:"variables"`
		Cases     []struct {
			Expression string  `json:"expression"`
			Want       *string `json:"want"`
			Error      string  `json:"error"`
		} `json:"cases"`
	}
	b, err := os.ReadFile(filepath.Join("testdata", "filters.json"))
	if err != nil {
		t.Fatal(err)
	}
	if err := json.Unmarshal(b, &expected); err != nil {
		t.Fatal(err)
	}
	vars := map[string]any{}
	for name, v := range expected.Variables {
		vars[name] = v
	}
	used := 0
	for _, c := range expected.Cases {
		used++
		tmpl, err := parse("{{ ("+c.Expression+") | tojson }}", nil)
		got := ""
		if err == nil {
			got, err = tmpl.Render(nil, Options{Extra: vars})
		}
		switch {
		case c.Want == nil && err == nil:
			t.Errorf("%s: got %s, and Jinja2 has a %s", c.Expression, got, c.Error)
		case c.Want != nil && (err != nil || got != *c.Want):
			t.Errorf("%s: got %s, %v, and Jinja2 %s", c.Expression, got, err, *c.Want)
		}
	}
	if used == 0 {
		t.Fatal("no cases")
	}
}

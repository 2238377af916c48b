package schema_test

import (
	"bufio"
	"encoding/json"
	"errors"
	"fmt"
	"maps"
	"os"
	"slices"
	"strings"
	"testing"

	"github.com/moeserve/moeserve/models/grammar"
	"github.com/moeserve/moeserve/models/grammar/schema"
)

type group struct {
	File, Description string
	Schema            json.RawMessage
	Tests             []struct {
		Description string
		Data        json.RawMessage
		Valid       bool
	}
}

// Numbers of the suite, which docs/design/structured-output.md has, too. narrow are values that a schema allows and the
// grammar does not write, all of them of formats.
const suiteRefused, suiteGroups, suiteAccepted, suiteRejected, suiteNarrow = 23, 255, 694, 604, 48

// TestSuite runs JSON-Schema-Test-Suite: of a schema that is supported every valid value is a text of the grammar, in
// some order of its members, and no invalid one is; one that is not supported is refused by a keyword that it has.
func TestSuite(t *testing.T) {
	f, err := os.Open("testdata/suite.jsonl")
	if err != nil {
		t.Fatal(err)
	}
	defer f.Close()
	scan := bufio.NewScanner(f)
	scan.Buffer(nil, 1<<20)
	refused, groups, accepted, rejected := 0, 0, 0, 0
	var narrow []string
	keywords := map[string]int{}
	for scan.Scan() {
		var g group
		if err := json.Unmarshal(scan.Bytes(), &g); err != nil {
			t.Fatal(err)
		}
		e, err := schema.Compile(g.Schema, schema.Options{Open: true, Compact: true})
		var bad *schema.Error
		if err != nil {
			if !errors.As(err, &bad) || bad.Keyword == "" || !strings.Contains(string(g.Schema), fmt.Sprintf("%q", bad.Keyword)) {
				t.Errorf("%s: %s: %v", g.File, g.Description, err)
				continue
			}
			refused++
			keywords[bad.Keyword]++
			continue
		}
		groups++
		match := func(string) bool { return false }
		if c, err := grammar.New(e, nil); err == nil {
			match = c.Match
		} else if !strings.Contains(err.Error(), "no text fits") {
			t.Errorf("%s: %s: %v", g.File, g.Description, err)
			continue
		}
		for _, x := range g.Tests {
			var v any
			if err := json.Unmarshal(x.Data, &v); err != nil {
				t.Fatal(err)
			}
			is := slices.ContainsFunc(orders(v), match)
			switch {
			case is && !x.Valid:
				t.Errorf("%s: %s: %s: %s is accepted: %s", g.File, g.Description, x.Description, x.Data, g.Schema)
			case is:
				accepted++
			case x.Valid:
				narrow = append(narrow, g.File+": "+g.Description+": "+x.Description+": "+string(x.Data))
			default:
				rejected++
			}
		}
	}
	for _, n := range narrow {
		if t.Log("not written:", n); !strings.HasPrefix(n, "format") {
			t.Errorf("not written: %s", n)
		}
	}
	for _, k := range slices.Sorted(maps.Keys(keywords)) {
		t.Log("refused:", k, keywords[k])
	}
	got := [...]int{refused, groups, accepted, rejected, len(narrow)}
	if want := [...]int{suiteRefused, suiteGroups, suiteAccepted, suiteRejected, suiteNarrow}; got != want {
		t.Errorf("refused, groups, accepted, rejected, not written: %v, want %v", got, want)
	}
}

// orders are the ways to write a value, with its members in any order.
func orders(v any) []string {
	const most = 2000
	switch v := v.(type) {
	case map[string]any:
		var all []string
		var add func(done string, left []string)
		add = func(done string, left []string) {
			if len(left) == 0 {
				all = append(all, "{"+done+"}")
				return
			}
			for i, name := range left {
				for _, value := range orders(v[name]) {
					if len(all) >= most {
						return
					}
					key, _ := json.Marshal(name)
					next := string(key) + ":" + value
					if done != "" {
						next = done + "," + next
					}
					add(next, slices.Concat(left[:i], left[i+1:]))
				}
			}
		}
		add("", slices.Sorted(maps.Keys(v)))
		return all
	case []any:
		all := []string{""}
		for i, x := range v {
			var longer []string
			for _, value := range orders(x) {
				for _, done := range all {
					if i > 0 {
						done += ","
					}
					longer = append(longer, done+value)
				}
			}
			all = longer[:min(len(longer), most)]
		}
		for i := range all {
			all[i] = "[" + all[i] + "]"
		}
		return all
	}
	text, _ := json.Marshal(v)
	return []string{string(text)}
}

package moeserve_test

import (
	"encoding/json"
	"os"
	"path/filepath"
	"regexp"
	"slices"
	"strings"
	"testing"
)

// TestClientsAreThosePinned: the page of clients has a row for each package that `make clients` runs, at the version that
// is pinned now. So a version that is raised is tried before the page says that it works.
func TestClientsAreThosePinned(t *testing.T) {
	read := func(path string) string {
		text, err := os.ReadFile(path)
		if err != nil {
			t.Fatal(err)
		}
		return string(text)
	}
	pinned := map[string]string{} // by the name in the page
	requirement := regexp.MustCompile(`(?m)^([a-z0-9-]+)(?:\[[a-z,]*\])?==(\S+)$`)
	lists, err := filepath.Glob("tests/clients/*.txt")
	if err != nil {
		t.Fatal(err)
	}
	// What others need, and not what is tried.
	slices.SortFunc(lists, func(a, b string) int { return strings.Compare(b, a) }) // python.txt, whose versions count, comes first
	for _, path := range lists {
		for _, m := range requirement.FindAllStringSubmatch(read(path), -1) {
			if name := strings.TrimSuffix(m[1], "-slim"); pinned[name] == "" && name != "email-validator" { // a part of pydantic
				pinned[name] = m[2]
			}
		}
	}
	var npm struct{ Dependencies map[string]string }
	if err := json.Unmarshal([]byte(read("tests/clients/package.json")), &npm); err != nil {
		t.Fatal(err)
	}
	for name, version := range npm.Dependencies {
		if name != "zod" && !strings.HasPrefix(name, "@ai-sdk/") { // parts of ai, and what it takes schemas from
			pinned[name+" (npm)"] = version
		}
	}
	for _, m := range regexp.MustCompile(`(?m)^\tgithub\.com/(?:openai|anthropics)/([a-z-]+)(?:/v\d+)? v(\S+)$`).FindAllStringSubmatch(read("tests/openai/go.mod"), -1) {
		pinned[m[1]] = m[2]
	}
	listed := map[string]string{}
	for _, m := range regexp.MustCompile(`(?m)^\| ([^|]+) \| (\d[^|]*) \| [^|]*\S`).FindAllStringSubmatch(read("docs/reference/clients.md"), -1) {
		listed[m[1]] = m[2]
	}
	for name, version := range pinned {
		if listed[name] != version {
			t.Errorf("%s is pinned at %s, and docs/reference/clients.md has %q of it: run make clients", name, version, listed[name])
		}
	}
	for name, version := range listed {
		if pinned[name] == "" {
			t.Errorf("docs/reference/clients.md has %s %s, which nothing in tests/clients and tests/openai pins", name, version)
		}
	}
	if len(listed) < 15 {
		t.Errorf("%d clients are listed", len(listed))
	}
}

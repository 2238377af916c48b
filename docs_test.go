package moeserve_test

import (
	"io/fs"
	"os"
	"path/filepath"
	"regexp"
	"slices"
	"strings"
	"testing"
)

// pages are the documents: README.md, CHANGELOG.md, SECURITY.md and all below docs.
func pages(t *testing.T) map[string]string {
	t.Helper()
	all := map[string]string{}
	read := func(path string) {
		text, err := os.ReadFile(path)
		if err != nil {
			t.Fatal(err)
		}
		all[filepath.ToSlash(path)] = string(text)
	}
	read("README.md")
	read("CHANGELOG.md")
	read("SECURITY.md")
	err := filepath.WalkDir("docs", func(path string, d fs.DirEntry, err error) error {
		if err == nil && strings.HasSuffix(path, ".md") {
			read(path)
		}
		return err
	})
	if err != nil {
		t.Fatal(err)
	}
	if len(all) < 20 {
		t.Fatalf("%d documents: the walk has lost them", len(all))
	}
	return all
}

var (
	fence   = regexp.MustCompile("(?ms)^```.*?^```$")
	comment = regexp.MustCompile(`(?s)<!--.*?-->`)
	heading = regexp.MustCompile(`(?m)^#+ +(.*)$`)
	item    = regexp.MustCompile(`^ *([-*]|\d+\.) `)
	link    = regexp.MustCompile(`\]\(([^)#\s]*)(#[^)\s]*)?\)`)
	span    = regexp.MustCompile("`[^`]*`")
)

// blocks are the paragraphs, list items and table cells of a page; code is none of them.
func blocks(text string) []string {
	text = comment.ReplaceAllString(fence.ReplaceAllString(text, ""), "")
	var all []string
	current := ""
	end := func() {
		if strings.TrimSpace(current) != "" {
			all = append(all, current)
		}
		current = ""
	}
	for line := range strings.Lines(text) {
		switch {
		case strings.HasPrefix(line, "|"):
			end()
			all = append(all, strings.Split(strings.ReplaceAll(line, `\|`, ""), "|")...)
			continue
		case strings.TrimSpace(line) == "", heading.MatchString(line), item.MatchString(line):
			end()
		}
		current += line
	}
	end()
	return all
}

// TestDocumentsAreForReaders: each page says first whom it is for, and no paragraph is long.
func TestDocumentsAreForReaders(t *testing.T) {
	for path, text := range pages(t) {
		if path != "CHANGELOG.md" && !regexp.MustCompile(`^# .+\n\n\*For [^*\n]+\.\*\n`).MatchString(text) {
			t.Errorf("%s does not begin with a title and a line *For …* that says who reads it", path)
		}
		for _, b := range blocks(text) {
			if n := len(strings.Fields(b)); n > 120 {
				t.Errorf("%s: a paragraph of %d words, of 120 at most: %.80s…", path, n, strings.TrimSpace(b))
			}
		}
	}
	if n := strings.Count(pages(t)["README.md"], "\n"); n > 200 {
		t.Errorf("README.md has %d lines, of 200 at most", n)
	}
}

// TestKernelEntriesAreShort: docs/design/kernels.md has an entry of at most 60 words for each family.
func TestKernelEntriesAreShort(t *testing.T) {
	_, list, ok := strings.Cut(pages(t)["docs/design/kernels.md"], "\n## Which kernel does what\n")
	if !ok {
		t.Fatal("the page has no list of kernels")
	}
	list, _, _ = strings.Cut(list, "\n## ")
	entries := 0
	for _, b := range blocks(list) {
		if n := len(strings.Fields(b)); n > 60 {
			t.Errorf("an entry of %d words: %.80s…", n, b)
		}
		if strings.HasPrefix(b, "- ") {
			entries++
		}
	}
	if entries < 8 {
		t.Errorf("%d entries: the list is written in another way", entries)
	}
}

// TestGlossaryIsShort: a reader learns 40 terms, not more.
func TestGlossaryIsShort(t *testing.T) {
	terms := regexp.MustCompile(`(?m)^\| \*\*`).FindAllString(pages(t)["docs/GLOSSARY.md"], -1)
	if len(terms) < 20 || len(terms) > 40 {
		t.Errorf("the glossary has %d terms; want 20 to 40", len(terms))
	}
}

// privateWords are words that a reader would have to learn, with the field's term.
var privateWords = []struct{ word, term string }{
	{`head-room`, "headroom"},
	{`knees?`, "saturation point"},
	{`floors?`, "roofline"},
	{`whoever|somebody|nobody`, "who it is"},
	{`taken down`, "captured"},
	{`guess(es|ed)?`, "predict"},
	{`for good`, "resident"},
	{`with peers`, "in peer memory"},
	{`compute device`, "GPU"},
	{`left out`, "excluded, disabled"},
	{`(tells|told|tell)`, "reports, prints"},
	{`no such thing|please|never mind`, ""},
	{`ways? (up|down)`, "gate/up and down projection"},
	{`(large|dense|expert|grouped|experts') products?`, "GEMM"},
	{`(stood|stands|stand) still`, "stalled"},
	{`(given|gives|give) back`, "released"},
	{`garbage`, "heap allocations"},
	{`hand-?overs?`, "synchronization and launch overhead"},
	{`attends`, "computes attention"},
	{`local experts?`, "resident experts"},
	{`so many`, "n"},
	{`keys and values (lie|live|of a cache)`, "KV cache"},
}

func TestDocumentsUseTheFieldsWords(t *testing.T) {
	for path, text := range pages(t) {
		text = span.ReplaceAllString(comment.ReplaceAllString(fence.ReplaceAllString(text, ""), ""), "")
		text = link.ReplaceAllString(text, "]")
		for _, p := range privateWords {
			for _, m := range regexp.MustCompile(`(?i)\b(`+p.word+`)\b`).FindAllStringIndex(text, -1) {
				t.Errorf("%s: …%s…: want %q", path, text[max(0, m[0]-30):min(len(text), m[1]+30)], p.term)
			}
		}
	}
}

// TestDocumentsNameWhatThereIs: a metric that a page names is one of docs/reference/metrics.md, and so
// is a field that the glossary names one of docs/reference/json.md.
func TestDocumentsNameWhatThereIs(t *testing.T) {
	all := pages(t)
	for path, text := range all {
		if strings.HasPrefix(path, "docs/reference/") || path == "CHANGELOG.md" {
			continue
		}
		for _, name := range regexp.MustCompile(`\b(?:moeserve_|vllm:)[a-z][a-z_0-9]+`).FindAllString(text, -1) {
			if !regexp.MustCompile("`" + name + "(_[a-z]+)*`").MatchString(all["docs/reference/metrics.md"]) {
				t.Errorf("%s names %s, and there is no such metric", path, name)
			}
		}
	}
	for _, m := range regexp.MustCompile("`([a-z_.]+)`").FindAllStringSubmatch(all["docs/GLOSSARY.md"], -1) {
		if name := m[1]; strings.ContainsAny(name, "_.") && !regexp.MustCompile("[`.]"+regexp.QuoteMeta(name)+"`").MatchString(all["docs/reference/json.md"]) &&
			!strings.Contains(all["docs/reference/metrics.md"], name) {
			t.Errorf("the glossary names %s, and no result has it", name)
		}
	}
}

// anchors of a page, as GitHub makes them.
func anchors(text string) []string {
	var all []string
	for _, m := range heading.FindAllStringSubmatch(fence.ReplaceAllString(text, ""), -1) {
		a := strings.ToLower(regexp.MustCompile(`\[([^\]]*)\]\([^)]*\)`).ReplaceAllString(m[1], "$1"))
		a = regexp.MustCompile(`[^\p{L}\p{N}_ -]`).ReplaceAllString(a, "")
		all = append(all, "#"+strings.ReplaceAll(strings.TrimSpace(a), " ", "-"))
	}
	return all
}

// TestDocumentLinks: every link leads to a file, and to a heading where it names one.
func TestDocumentLinks(t *testing.T) {
	all := pages(t)
	for path, text := range all {
		for _, m := range link.FindAllStringSubmatch(fence.ReplaceAllString(text, ""), -1) {
			if strings.Contains(m[1], "://") {
				continue
			}
			to := path
			if m[1] != "" {
				to = filepath.ToSlash(filepath.Join(filepath.Dir(path), m[1]))
				if _, err := os.Stat(to); err != nil {
					t.Errorf("%s links to %s: %v", path, m[1], err)
					continue
				}
			}
			if page, ok := all[to]; ok && m[2] != "" && !slices.Contains(anchors(page), m[2]) {
				t.Errorf("%s links to %s%s, which has no such heading", path, to, m[2])
			}
		}
	}
}

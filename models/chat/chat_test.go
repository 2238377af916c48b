package chat

import (
	"encoding/json"
	"errors"
	"os"
	"path/filepath"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"
)

// parse is a template of this text. tokens holds the special tokens by the variable that the template knows them as.
func parse(text string, tokens map[string]string) (*Template, error) {
	vars := map[string]any{}
	for name, token := range tokens {
		vars[name] = token
	}
	return newTemplate(map[string]string{defaultTemplate: text}, vars)
}

func mustNew(t testing.TB, text string) *Template {
	t.Helper()
	tmpl, err := parse(text, map[string]string{"bos_token": "<s>", "eos_token": "</s>"})
	if err != nil {
		t.Fatal(err)
	}
	return tmpl
}

// TestReference compares with what transformers renders (testdata/make_expected.py).
func TestReference(t *testing.T) {
	var expected struct {
		Tokens map[string]string `json:"tokens"`
		Cases  []struct {
			Template string            `json:"template"`
			Chat     string            `json:"chat"`
			Messages []json.RawMessage `json:"messages"`
			Tools    json.RawMessage   `json:"tools"`
			Extra    map[string]any    `json:"extra"`
			Generate bool              `json:"generate"`
			Want     *string           `json:"want"`
			Error    string            `json:"error"`
		} `json:"cases"`
	}
	b, err := os.ReadFile(filepath.Join("testdata", "expected.json"))
	if err != nil {
		t.Fatal(err)
	}
	if err := json.Unmarshal(b, &expected); err != nil {
		t.Fatal(err)
	}
	if len(expected.Cases) == 0 {
		t.Fatal("no cases")
	}
	for _, c := range expected.Cases {
		name := c.Template + "/" + c.Chat
		if c.Generate {
			name += "/generate"
		}
		t.Run(name, func(t *testing.T) {
			text, err := os.ReadFile(filepath.Join("testdata", "templates", c.Template+".jinja"))
			if err != nil {
				t.Fatal(err)
			}
			tmpl, err := parse(string(text), expected.Tokens)
			if err != nil {
				t.Fatal(err)
			}
			var messages []Message
			for _, raw := range c.Messages {
				messages = append(messages, Message{Extra: raw})
			}
			opts := Options{AddGenerationPrompt: c.Generate, Tools: c.Tools, Extra: c.Extra}
			for range 2 { // a rendering leaves nothing behind
				got, err := tmpl.Render(messages, opts)
				if c.Want == nil {
					var raised *RaisedError
					if !errors.As(err, &raised) || raised.Message != c.Error {
						t.Fatalf("got %q and error %v, want the template to raise %q", got, err, c.Error)
					}
					return
				}
				if err != nil {
					t.Fatal(err)
				}
				if diff := cmp.Diff(*c.Want, got); diff != "" {
					t.Fatalf("-want +got:\n%s", diff)
				}
			}
		})
	}
}

func TestLoad(t *testing.T) {
	const config = `"bos_token": "<s>", "eos_token": {"content": "</s>", "special": true}, "unk_token": null`
	const show = `{{ bos_token }}|{{ eos_token }}|{{ unk_token is defined }}`
	for name, tc := range map[string]struct {
		files map[string]string
		opts  Options
		want  string
		err   string
	}{
		"string": {
			files: map[string]string{"tokenizer_config.json": `{` + config + `, "chat_template": "` + show + `"}`},
			want:  "<s>|</s>|False",
		},
		"file wins": {
			files: map[string]string{
				"tokenizer_config.json": `{` + config + `, "chat_template": "old"}`,
				"chat_template.jinja":   "new {{ eos_token }}",
			},
			want: "new </s>",
		},
		"file alone": {files: map[string]string{"chat_template.jinja": "x{{ bos_token }}y"}, want: "xy"},
		"list without tools": {
			files: map[string]string{"tokenizer_config.json": `{"chat_template": [
				{"name": "default", "template": "plain"}, {"name": "tool_use", "template": "with tools"}]}`},
			want: "plain",
		},
		"list with tools": {
			files: map[string]string{"tokenizer_config.json": `{"chat_template": [
				{"name": "default", "template": "plain"}, {"name": "tool_use", "template": "with tools"}]}`},
			opts: Options{Tools: json.RawMessage(`[]`)},
			want: "with tools",
		},
		"list by name": {
			files: map[string]string{"tokenizer_config.json": `{"chat_template": [
				{"name": "default", "template": "plain"}, {"name": "rag", "template": "documents"}]}`},
			opts: Options{Name: "rag"},
			want: "documents",
		},
		"further file": {
			files: map[string]string{
				"chat_template.jinja": "plain", "additional_chat_templates/rag.jinja": "documents",
			},
			opts: Options{Name: "rag"},
			want: "documents",
		},
		"unknown name": {
			files: map[string]string{"chat_template.jinja": "plain"},
			opts:  Options{Name: "rag"},
			err:   `there is no chat template "rag": the checkpoint has default`,
		},
		"does not parse": {
			files: map[string]string{"chat_template.jinja": "{% if x %}no end"},
			err:   `chat template "default": does not parse`,
		},
		"includes a file": {
			files: map[string]string{"chat_template.jinja": "{% include '/etc/passwd' %}"},
			err:   "include",
		},
		"bad config": {
			files: map[string]string{"tokenizer_config.json": `{"chat_template": 7}`},
			err:   "chat_template is neither a string nor a list",
		},
	} {
		t.Run(name, func(t *testing.T) {
			dir := t.TempDir()
			for file, text := range tc.files {
				path := filepath.Join(dir, file)
				if err := os.MkdirAll(filepath.Dir(path), 0o755); err != nil {
					t.Fatal(err)
				}
				if err := os.WriteFile(path, []byte(text), 0o600); err != nil {
					t.Fatal(err)
				}
			}
			tmpl, err := Load(os.DirFS(dir), dir)
			got := ""
			if err == nil {
				got, err = tmpl.Render(nil, tc.opts)
			}
			if tc.err != "" {
				if err == nil || !strings.Contains(err.Error(), tc.err) || strings.Contains(err.Error(), "\n") {
					t.Fatalf("error %v, want one line with %q", err, tc.err)
				}
				return
			}
			if err != nil || got != tc.want {
				t.Fatalf("got %q, %v, want %q", got, err, tc.want)
			}
		})
	}
}

func TestNoTemplate(t *testing.T) {
	dir := t.TempDir()
	for _, config := range []string{"", `{"bos_token": "<s>"}`, `{"chat_template": null}`} {
		if config != "" {
			if err := os.WriteFile(filepath.Join(dir, "tokenizer_config.json"), []byte(config), 0o600); err != nil {
				t.Fatal(err)
			}
		}
		if _, err := Load(os.DirFS(dir), dir); !errors.Is(err, ErrNoTemplate) {
			t.Errorf("with %q: %v, want ErrNoTemplate", config, err)
		}
	}
}

// TestValues holds expressions to what Python makes of them.
func TestValues(t *testing.T) {
	now := time.Date(2024, time.July, 5, 9, 3, 7, 0, time.UTC)
	for text, want := range map[string]string{
		`{{ strftime_now("%d %b %Y, %H:%M:%S %A %-d %j %% %q") }}`:                   "05 Jul 2024, 09:03:07 Friday 5 187 % %q",
		`{{ x.i }} {{ x.f }} {{ x.big }} {{ x | tojson }}`:                           `7 0.5 1e+20 {"i": 7, "f": 0.5, "big": 1e+20, "e": {}}`,
		`{{ x | tojson(separators=[",", ":"]) }}`:                                    `{"i":7,"f":0.5,"big":1e+20,"e":{}}`,
		`{{ ["é😀"] | tojson(ensure_ascii=true) }}`:                                   `["\u00e9\ud83d\ude00"]`,
		`{{ {"b": 1, "a": 2} | tojson(sort_keys=true) }}`:                            `{"a": 2, "b": 1}`,
		`{{ [[], {}, [1]] | tojson(indent=1) }}`:                                     "[\n [],\n {},\n [\n  1\n ]\n]",
		`{{ "a  b c ".split() | join("|") }}`:                                        "a|b|c",
		`{{ " a  b c ".split(none, 1) | join("|") }}`:                                "a|b c ",
		`{{ " a b  c ".rsplit(none, 1) | join("|") }}`:                               " a b|c",
		`{{ "a\nb\r\nc\n".splitlines() | tojson }}`:                                  `["a", "b", "c"]`,
		`{{ "éa".find("a") }} {{ "x".find("y") }}`:                                   "1 -1",
		`{{ "they're bill's".title() }} {{ "hELLO".capitalize() }}`:                  "They'Re Bill'S Hello",
		`{{ "ab".startswith(("x", "a")) }} {{ "ab".endswith("x") }}`:                 "True False",
		`{{ ", ".join(["a", "b"]) }} {{ ["a", "b"] | join("-") }}`:                   "a, b a-b",
		`{{ [1, 2] | reverse | list | tojson }} {{ "ab" | reverse }}`:                "[2, 1] ba",
		`{{ x.get("i") }} {{ x.get("none", "d") }} {{ "f" in x }}`:                   "7 d True",
		`{{ x.keys() | list | tojson }} {{ x.items() | list | first }}`:              `["i", "f", "big", "e"] ['i', 7]`,
		`{% set l = [5] %}{{ l[-1] }} {{ "a b".split()[-2] }} {{ l[3] is defined }}`: "5 a False",
		`{% set ns = namespace(a=1) %}{% set ns.b = [1] %}{{ ns.a }}{{ ns.b[0] }}`:   "11",
		`{{ nothing is true }} {{ nothing is false }} {{ true is true }}`:            "False False True",
		`{{ range(5, 0, -2) | list | tojson }}`:                                      "[5, 3, 1]",
		`{% for c in "é!" %}{{ c }},{% endfor %}`:                                    "é,!,",
	} {
		got, err := mustNew(t, text).Render(nil, Options{
			Extra: map[string]any{"x": json.RawMessage(`{"i": 7, "f": 0.5, "big": 1e20, "e": {}}`)},
			Now:   func() time.Time { return now },
		})
		if err != nil || got != want {
			t.Errorf("%s\n got %q, %v\nwant %q", text, got, err, want)
		}
	}
}

// TestErrors holds templates that go wrong to one clear line.
func TestErrors(t *testing.T) {
	for text, want := range map[string]string{
		`{{ raise_exception("two\nlines") }}`:                 "the chat template refuses these messages: two lines",
		`{{ messages[0].content.nope() }}`:                    "the chat template failed: ",
		`{% set messages[0].role = "x" %}`:                    "cannot be set",
		`{{ [1].append(2) }}`:                                 "append",
		`{{ {"a": 1}.update({"b": 2}) }}`:                     "update",
		`{{ 1 % 0 }}`:                                         "the chat template failed: ",
		`{% for x in 3 %}{% endfor %}`:                        "loop over",
		`{{ {"f": raise_exception} | tojson }}`:               "no JSON form",
		`{% set n = namespace() %}{% set n.n = n %}`:          "a namespace cannot hold a namespace",
		`{% set n = namespace() %}{% set n.n = [{"a": n}] %}`: "a namespace cannot hold a namespace",
	} {
		_, err := mustNew(t, text).Render([]Message{{Role: "user", Content: "x"}}, Options{})
		if err == nil || !strings.Contains(err.Error(), want) || strings.Contains(err.Error(), "\n") {
			t.Errorf("%s: error %v, want one line with %q", text, err, want)
		}
	}
	for _, m := range []Message{{Extra: json.RawMessage(`[1]`)}, {Extra: json.RawMessage(`{"a":`)}} {
		if _, err := mustNew(t, "x").Render([]Message{m}, Options{}); err == nil {
			t.Errorf("extra fields %s are accepted", m.Extra)
		}
	}
	if _, err := mustNew(t, "x").Render(nil, Options{Tools: json.RawMessage(`{}`)}); err == nil {
		t.Error("tools that are no array are accepted")
	}
}

// TestLimits holds templates that would take forever, or all memory, to their bounds: one
// that met none would not end.
func TestLimits(t *testing.T) {
	for name, text := range map[string]string{
		"loops":         `{% for a in range(9999) %}{% for b in range(9999) %}{% for c in range(9999) %}{% endfor %}{% endfor %}{% endfor %}`,
		"output":        `{% for a in range(9999) %}{% for b in range(9999) %}xxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxx{% endfor %}{% endfor %}`,
		"range":         `{% for a in range(1000000000) %}{% endfor %}`,
		"doubling":      `{% set n = namespace(s="xxxxxxxx") %}{% for a in range(99) %}{% set n.s = n.s ~ n.s %}{% endfor %}`,
		"doubling list": `{% set n = namespace(s=["x"]) %}{% for a in range(99) %}{% set n.s = n.s + n.s %}{% endfor %}`,
		"macro":         `{% macro m() %}{{ m() }}{% endmacro %}{{ m() }}`,
		"mutual":        `{% macro a() %}{{ b() }}{% endmacro %}{% macro b() %}{{ a() }}{% endmacro %}{{ a() }}`,
		"capture":       `{% macro m() %}{% for a in range(9999) %}{% for b in range(99) %}` + strings.Repeat("x", 999) + `{% endfor %}{% endfor %}{% endmacro %}{% set x = m() %}`,
		"nesting":       `{% set n = namespace(l=[]) %}{% for a in range(999) %}{% set n.l = [n.l] %}{% endfor %}`,
		"swallowed":     `{% for a in range(9999) if range(99999) %}{% endfor %}`,
	} {
		if _, err := mustNew(t, text).Render(nil, Options{}); !errors.Is(err, ErrLimit) {
			t.Errorf("%s: error %v, want ErrLimit", name, err)
		}
	}
	for name, text := range map[string]string{
		"recursive loop": `{% for a in [1] recursive %}{{ loop([1]) }}{% endfor %}`,
		"multiplication": `{{ "x" * 1000 * 1000 * 1000 }}`,
		"product":        `{% set n = 1000000000 %}{{ "x" * n }}`,
		"brackets":       `{{ ` + strings.Repeat("(", 60) + "1" + strings.Repeat(")", 60) + ` }}`,
		"long chain":     `{{ x` + strings.Repeat(".a", 2000) + ` }}`,
		"blocks":         strings.Repeat(`{% if 1 %}`, 200) + strings.Repeat(`{% endif %}`, 200),
		"size":           strings.Repeat("x", maxTemplateBytes+1),
	} {
		if _, err := parse(text, nil); err == nil {
			t.Errorf("%s: the template is accepted", name)
		}
	}
}

func TestConcurrentRender(t *testing.T) {
	text, err := os.ReadFile(filepath.Join("testdata", "templates", "qwen3.jinja"))
	if err != nil {
		t.Fatal(err)
	}
	tmpl := mustNew(t, string(text))
	messages := []Message{{Role: "user", Content: "a"}, {Role: "assistant", Content: "b"}, {Role: "user", Content: "c"}}
	opts := Options{AddGenerationPrompt: true, Tools: json.RawMessage(`[{"b": 1, "a": 2}]`)}
	want, err := tmpl.Render(messages, opts)
	if err != nil {
		t.Fatal(err)
	}
	var wg sync.WaitGroup
	for range 8 {
		wg.Go(func() {
			for range 10 {
				if got, err := tmpl.Render(messages, opts); err != nil || got != want {
					t.Errorf("got %q, %v, want %q", got, err, want)
				}
			}
		})
	}
	wg.Wait()
}

// FuzzTemplate feeds foreign templates and messages: nothing panics, hangs, or writes without end.
func FuzzTemplate(f *testing.F) {
	files, err := filepath.Glob(filepath.Join("testdata", "templates", "*.jinja"))
	if err != nil || len(files) == 0 {
		f.Fatal("no templates")
	}
	for _, file := range files {
		text, err := os.ReadFile(file)
		if err != nil {
			f.Fatal(err)
		}
		f.Add(string(text), "hello", `{"tool_calls": [{"name": "f"}]}`)
	}
	f.Add(`{% for a in range(99) %}{% macro b(a, b=1) %}{{ b(a) }}{% endmacro %}{{ b(1) }}{% endfor %}`, "", `{"a": [1, null]}`)
	f.Fuzz(func(t *testing.T, text, content, extra string) {
		tmpl, err := parse(text, map[string]string{"bos_token": "<s>"})
		if err != nil {
			return
		}
		got, err := tmpl.Render([]Message{
			{Role: "user", Content: content}, {Role: "assistant", Extra: json.RawMessage(extra)},
		}, Options{AddGenerationPrompt: true})
		if err != nil && (got != "" || strings.Contains(err.Error(), "\n")) {
			t.Fatalf("error %q with text %q", err, got)
		}
		if len(got) > maxOutputBytes {
			t.Fatalf("%d bytes of text", len(got))
		}
	})
}

package chat

import (
	"context"
	"encoding/json"
	"errors"
	"maps"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"

	"github.com/moeserve/moeserve/tools/racedetector"
	"github.com/moeserve/moeserve/untrusted"
)

// parse is a template of this text. tokens holds the special tokens by the variable that the template knows them as.
func parse(text string, tokens map[string]string) (*Template, error) {
	return newTemplate(map[string]string{defaultTemplate: text}, tokens)
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
			Extra    json.RawMessage   `json:"extra"`
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
			extra, err := ParseObject(c.Extra)
			if err != nil {
				t.Fatal(err)
			}
			opts := Options{AddGenerationPrompt: c.Generate, Tools: c.Tools, Extra: extra}
			for range 2 { // a rendering leaves nothing behind
				prompt, err := tmpl.Render(t.Context(), messages, opts)
				got := prompt.Text
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
			err:   `chat template "default" does not parse: line 1: Unexpected end of template.`,
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
				var prompt Prompt
				prompt, err = tmpl.Render(t.Context(), nil, tc.opts)
				got = prompt.Text
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

// TestMentions finds texts in the source of every template.
func TestMentions(t *testing.T) {
	tmpl, err := newTemplate(map[string]string{"default": "a", "tool_use": "{{ '<tool_call>\n' }}"}, nil)
	if err != nil {
		t.Fatal(err)
	}
	for text, want := range map[string]bool{"a": true, "<tool_call>": true, "<think>": false} {
		if tmpl.Mentions(text) != want {
			t.Errorf("%s: %v", text, !want)
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
		`{{ x.keys() | list | tojson }} {{ x.items() | list | first }}`:              `["i", "f", "big", "e"] ('i', 7)`,
		`{% set l = [5] %}{{ l[-1] }} {{ "a b".split()[-2] }} {{ l[3] is defined }}`: "5 a False",
		`{% set ns = namespace(a=1) %}{% set ns.b = [1] %}{{ ns.a }}{{ ns.b[0] }}`:   "11",
		`{{ nothing is true }} {{ nothing is false }} {{ true is true }}`:            "False False True",
		`{{ range(5, 0, -2) | list | tojson }}`:                                      "[5, 3, 1]",
		`{% for c in "é!" %}{{ c }},{% endfor %}`:                                    "é,!,",
	} {
		got, err := mustNew(t, text).Render(t.Context(), nil, Options{
			Extra: Object{{"x", json.RawMessage(`{"i": 7, "f": 0.5, "big": 1e20, "e": {}}`)}},
			Now:   func() time.Time { return now },
		})
		if err != nil || got.Text != want {
			t.Errorf("%s\n got %q, %v\nwant %q", text, got.Text, err, want)
		}
	}
}

// TestErrors holds templates that go wrong to one clear line.
func TestErrors(t *testing.T) {
	for text, want := range map[string]string{
		`{{ raise_exception("two\nlines") }}`:   "the chat template refuses these messages: two; lines",
		`{{ messages[0].content.nope() }}`:      "the chat template failed: ",
		`{% set messages.role = "x" %}`:         "cannot assign attribute on non-namespace object",
		`{{ [1].append(2) }}`:                   "append",
		`{{ {"a": 1}.update({"b": 2}) }}`:       "update",
		`{{ 1 % 0 }}`:                           "the chat template failed: ",
		`{% for x in 3 %}{% endfor %}`:          "line 1: 'int' object is not iterable",
		`{{ {"f": raise_exception} | tojson }}`: "function is not JSON serializable",
		"a\n{{ x }}\n{{ x.y }}":                 "line 3: 'x' is undefined",
		"{{ 1 }}\n\n{{ [1,'a',none]|max }}":     "line 3: '>' not supported between instances of 'str' and 'int'",
		`{{ raise_exception("boo\x1b[31m") }}`:  `boo\x1b[31m`,
	} {
		_, err := mustNew(t, text).Render(t.Context(), []Message{{Role: "user", Content: "x"}}, Options{})
		if err == nil || !strings.Contains(err.Error(), want) || strings.Contains(err.Error(), "\n") {
			t.Errorf("%s: error %v, want one line with %q", text, err, want)
		}
	}
	for _, m := range []Message{{Extra: json.RawMessage(`[1]`)}, {Extra: json.RawMessage(`{"a":`)}} {
		if _, err := mustNew(t, "x").Render(t.Context(), []Message{m}, Options{}); err == nil {
			t.Errorf("extra fields %s are accepted", m.Extra)
		}
	}
	if _, err := mustNew(t, "x").Render(t.Context(), nil, Options{Tools: json.RawMessage(`{}`)}); err == nil {
		t.Error("tools that are no array are accepted")
	}
}

// TestLimits holds templates that would take forever, or all memory, to their bounds: one
// that met none would not end.
func TestLimits(t *testing.T) {
	racedetector.SkipSequential(t)
	for name, text := range map[string]string{
		"loops":         `{% for a in range(9999) %}{% for b in range(9999) %}{% for c in range(9999) %}{% endfor %}{% endfor %}{% endfor %}`,
		"output":        `{% for a in range(9999) %}{% for b in range(9999) %}xxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxx{% endfor %}{% endfor %}`,
		"repetition":    `{{ "x" * 1000 * 1000 * 1000 }}`,
		"repeated list": `{{ [1] * 1000000000 }}`,
		"power":         `{{ 3 ** (2 ** 40) }}`,
		"width":         `{{ "%1000000000d" % 1 }}`,
		"precision":     `{{ "{:.1000000000f}".format(1.5) }}`,
		"padding":       `{{ "x".center(1000000000) }}`,
		"indentation":   `{{ "x\ny"|indent(1000000000) }}`,
		"spreading":     `{% set n = namespace(s="xxxxxxxx") %}{% for a in range(9) %}{% set n.s = n.s|replace("", n.s) %}{% endfor %}`,
		"recursive":     `{% for a in [1] recursive %}{{ loop([1]) }}{% endfor %}`,
		"splitting":     `{{ (" " * 30000000).split(" ")|length }}`,
		"lines":         `{{ ("\n" * 30000000).splitlines()|length }}`,
		"characters":    `{{ ("x" * 30000000)|list|length }}`,
		"scanning":      `{% set s = "x" * 30000000 %}{% for a in range(9999) %}{% if "y" in s %}{% endif %}{{ s.strip() == "y" }}{% endfor %}`,
		"index":         `{% set s = "é" * 9999999 %}{% for a in range(9999) %}{{ s[-1] }}{% endfor %}`,
		"key":           `{% set n = namespace(t=()) %}{% for a in range(99) %}{% set n.t = (n.t, n.t) %}{% endfor %}{{ {n.t: 1} }}`,
		"equal":         `{% set n = namespace(t=[], u=[]) %}{% for a in range(99) %}{% set n.t = [n.t, n.t] %}{% set n.u = [n.u, n.u] %}{% endfor %}{{ n.t == n.u }}`,
		"itself":        `{% set n = namespace() %}{% set n.n = n %}{{ n }}`,
		"doubling":      `{% set n = namespace(s="xxxxxxxx") %}{% for a in range(99) %}{% set n.s = n.s ~ n.s %}{% endfor %}`,
		"doubling list": `{% set n = namespace(s=["x"]) %}{% for a in range(99) %}{% set n.s = n.s + n.s %}{% endfor %}`,
		"macro":         `{% macro m() %}{{ m() }}{% endmacro %}{{ m() }}`,
		"mutual":        `{% macro a() %}{{ b() }}{% endmacro %}{% macro b() %}{{ a() }}{% endmacro %}{{ a() }}`,
		"capture":       `{% macro m() %}{% for a in range(9999) %}{% for b in range(99) %}` + strings.Repeat("x", 999) + `{% endfor %}{% endfor %}{% endmacro %}{% set x = m() %}`,
		"nesting":       `{% set n = namespace(l=[]) %}{% for a in range(999) %}{% set n.l = [n.l] %}{% endfor %}{{ n.l }}`,
		"condition":     `{% for a in range(9999) if range(99999)|list %}{% endfor %}`,
	} {
		t.Run(name, func(t *testing.T) {
			if _, err := mustNew(t, text).Render(t.Context(), nil, Options{}); !errors.Is(err, ErrLimit) {
				t.Errorf("error %v, want ErrLimit", err)
			}
		})
	}
	for name, text := range map[string]string{
		"brackets":   `{{ ` + strings.Repeat("(", 200) + "1" + strings.Repeat(")", 200) + ` }}`,
		"long chain": `{{ x` + strings.Repeat(".a", 2000) + ` }}`,
		"blocks":     strings.Repeat(`{% if 1 %}`, 200) + strings.Repeat(`{% endif %}`, 200),
		"size":       strings.Repeat("x", maxTemplateBytes+1),
	} {
		if _, err := parse(text, nil); err == nil {
			t.Errorf("%s: the template is accepted", name)
		}
	}
}

// TestClientRanges follows the bytes of a request through templates.
func TestClientRanges(t *testing.T) {
	message := Message{Role: "user", Content: "<|im_end|>é", Extra: json.RawMessage(`{"calls": [{"name": "<f>", "n": 12}], "list": ["a", "b"]}`)}
	for text, want := range map[string]string{ // what the client wrote stands in brackets
		`<|{{ messages[0].role }}|>{{ messages[0].content }}</s>`:                              "<|user|>[<|im_end|>é]</s>",
		`{{ bos_token + messages[0].content + eos_token }}{{ messages|length }}`:               "<s>[<|im_end|>é]</s>1",
		`{% set c = messages[0].content %}{{ c[2:4] ~ "|" ~ c[:-1]|trim("<|") ~ "," ~ c[0] }}`: "[im]|[im_end|>],[<]",
		`{{ "a-b"|replace("-", messages[0].content) }}`:                                        "a[<|im_end|>é]b",
		`{{ messages[0].content|replace("im_", "<s>") }}`:                                      "[<|]<s>[end|>é]",
		`{{ messages[0].content.split("|")|join("|") }}`:                                       "[<]|[im_end]|[>é]",
		`{{ "%s=%d" % (messages[0].content, 1) }} {{ "{}".format(messages[0].content) }}`:      "[<|im_end|>é]=1 [<|im_end|>é]",
		`{{ messages[0].content|upper }}{{ "x"|upper }}`:                                       "[<|IM_END|>É]X",
		`{{ messages[0].calls|tojson }} {{ {"a": 1}|tojson }}`:                                 `[[{"name": "<f>", "n": 12}]] {"a": 1}`,
		`{{ messages[0].list }}{{ messages[0].calls[0].n }}`:                                   "[['a'], ['b']]12",
		`{% for k, v in messages[0].calls[0].items() %}{{ k }}={{ v }};{% endfor %}`:           "[name]=[<f>];[n]=12;",
		`{% macro m(x) %}<{{ x }}>{% endmacro %}{{ m(messages[0].content[:2]) }}`:              "<[<|]>",
		`{% set x %}a{{ messages[0].content[:2] }}{% endset %}{{ x ~ "b" }}`:                   "a[<|]b",
		`{% for c in messages[0].content[:3] %}{{ c }}{% endfor %}{{ tools[0].t }}{{ v }}`:     "[<|iTV]",
		`{{ messages[0].content == "<|im_end|>é" and "<" in messages[0].content }}`:            "True",
		`{% filter indent(2) %}a` + "\n" + `{{ messages[0].content }}{% endfilter %}`:          "a\n  [<|im_end|>é]",
	} {
		got, err := mustNew(t, text).Render(t.Context(), []Message{message}, Options{
			Tools: json.RawMessage(`[{"t": "T"}]`), Extra: Object{{"v", json.RawMessage(`"V"`)}},
		})
		if err != nil {
			t.Errorf("%s: %v", text, err)
			continue
		}
		marked, at := "", 0
		for _, c := range got.Client {
			marked += got.Text[at:c[0]] + "[" + got.Text[c[0]:c[1]] + "]"
			at = c[1]
		}
		if marked += got.Text[at:]; strings.ReplaceAll(marked, "[a]", "a") != strings.ReplaceAll(want, "[a]", "a") {
			t.Errorf("%s\n got %s\nwant %s", text, marked, want)
		}
	}
}

// marker is a character that no template has.
const marker = "\uE000"

// marked puts the marker into every string of a JSON value but roles and types, which templates compare.
func marked(t *testing.T, raw json.RawMessage) json.RawMessage {
	t.Helper()
	var mark func(v any) any
	mark = func(v any) any {
		switch v := v.(type) {
		case string:
			return v[:len(v)/2] + marker + v[len(v)/2:]
		case []any:
			for i := range v {
				v[i] = mark(v[i])
			}
		case map[string]any:
			for key, value := range v {
				if _, text := value.(string); !text || key != "role" && key != "type" {
					v[key] = mark(value)
				}
			}
		}
		return v
	}
	if raw == nil {
		return nil
	}
	var v any
	if err := json.Unmarshal(raw, &v); err != nil {
		t.Fatal(err)
	}
	b, err := json.Marshal(mark(v))
	if err != nil {
		t.Fatal(err)
	}
	return b
}

// checkOrigin checks that all markers of a prompt are the client's, that its control tokens are the template's, and
// returns how many markers there are.
func checkOrigin(t *testing.T, name string, p Prompt) int {
	t.Helper()
	last := 0
	client := make([]bool, len(p.Text))
	for _, c := range p.Client {
		if c[0] < last || c[0] == last && last > 0 || c[0] >= c[1] || c[1] > len(p.Text) {
			t.Errorf("%s: ranges %v of %d bytes", name, p.Client, len(p.Text))
			return 0
		}
		last = c[1]
		for i := c[0]; i < c[1]; i++ {
			client[i] = true
		}
	}
	markers := 0
	for i := range p.Text {
		isMarker := strings.HasPrefix(p.Text[i:], marker)
		if isMarker {
			markers++
		}
		if isMarker != client[i] && (isMarker || strings.HasPrefix(p.Text[i:], "<|") || strings.HasPrefix(p.Text[i:], "</s>")) {
			t.Errorf("%s: %q is the client's: %v", name, p.Text[max(0, i-20):min(len(p.Text), i+20)], client[i])
			return markers
		}
	}
	return markers
}

// TestOrigin checks where each byte of whole prompts comes from.
func TestOrigin(t *testing.T) {
	files, err := filepath.Glob(filepath.Join("testdata", "templates", "*.jinja"))
	if err != nil || len(files) == 0 {
		t.Fatal("no templates")
	}
	markers := 0
	for _, file := range files {
		text, err := os.ReadFile(file)
		if err != nil {
			t.Fatal(err)
		}
		p, err := mustNew(t, string(text)).Render(t.Context(), []Message{
			{Role: "user", Extra: marked(t, json.RawMessage(`{"content": "  a\n"}`))},
			{Role: "assistant", Extra: marked(t, json.RawMessage(`{"content": "<think>b</think>c", "tool_calls": [{"function": {"name": "f", "arguments": {"k": "v", "l": [1, "x"]}}}]}`))},
			{Role: "user", Extra: marked(t, json.RawMessage(`{"content": "d"}`))},
		}, Options{AddGenerationPrompt: true, Tools: marked(t, json.RawMessage(`[{"type": "function", "function": {"name": "f", "description": "g"}}]`))})
		if err != nil {
			t.Fatal(err)
		}
		markers += checkOrigin(t, file, p)
	}
	if markers == 0 {
		t.Error("no template writes what the client sent")
	}
}

// TestParts passes content parts on to templates that walk them.
func TestParts(t *testing.T) {
	message := Message{Role: "user", Content: "a\nb", Parts: json.RawMessage(`[{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]`)}
	for text, want := range map[string]string{
		`{{ messages[0].content }}`: "a\nb",
		`{% for m in messages %}{% if m.content is string %}{{ m.content }}{% else %}{% for p in m.content %}{{ p.text }}{% endfor %}{% endif %}{% endfor %}`:      "ab",
		`{% for m in messages %}{% for p in m['content'] | list %}{{ p['text'] }}{% endfor %}{% endfor %}`:                                                         "ab",
		`{% macro show(c) %}{% for p in c %}{% if p['type'] == 'text' %}{{ p.text }}{% endif %}{% endfor %}{% endmacro %}{{ show(messages[0]['content']) }}`:       "ab",
		`{% for m in messages %}{% set c = m.get("content", "") %}{% for p in c %}{% if p.get("type") == "text" %}{{ p.text }}{% endif %}{% endfor %}{% endfor %}`: "ab",
		`{% for m in messages %}{{ m.content }}{% for b in m.blocks %}{% if b.type == "text" %}{{ b.text }}{% endif %}{% endfor %}{% endfor %}`:                    "a\nb",
		`{% for m in messages %}{{ m.content.split()|join("-") }}{% endfor %}`:                                                                                     "a-b",
	} {
		got, err := mustNew(t, text).Render(t.Context(), []Message{message}, Options{})
		if err != nil || got.Text != want {
			t.Errorf("%s: got %q, %v, want %q", text, got.Text, err, want)
		}
	}
}

// TestDeveloper keeps the role for templates that know it.
func TestDeveloper(t *testing.T) {
	for text, want := range map[string]string{
		`{{ messages[0].role }}`:                                 "system",
		`{% if messages[0].role == "developer" %}dev{% endif %}`: "dev",
	} {
		got, err := mustNew(t, text).Render(t.Context(), []Message{{Role: "developer"}}, Options{})
		if err != nil || got.Text != want {
			t.Errorf("%s: got %q, %v, want %q", text, got.Text, err, want)
		}
	}
}

// TestOrder keeps members in the order of the request, and integers exact.
func TestOrder(t *testing.T) {
	const calls = `[{"z": 12345678901234567890, "a": {"y": null, "b": 1.0}}]`
	got, err := mustNew(t, `{{ messages[0].tool_calls|tojson }}{{ v|tojson }}{{ tools|tojson }}`).Render(t.Context(),
		[]Message{{Role: "assistant", Extra: json.RawMessage(`{"tool_calls": ` + calls + `}`)}},
		Options{Tools: json.RawMessage(calls), Extra: Object{{"v", json.RawMessage(calls)}}})
	if want := calls + calls + calls; err != nil || got.Text != want {
		t.Errorf("got %q, %v, want %q", got.Text, err, want)
	}
	o, err := ParseObject([]byte(`{"b": {"y": 1, "x": 2}, "a": 1, "b": {"x": 0}}`))
	if err != nil {
		t.Fatal(err)
	}
	o.Set("a", json.RawMessage(`2`))
	if got := string(o.JSON()); got != `{"b":{"x": 0},"a":2}` {
		t.Errorf("got %s", got)
	}
	for _, bad := range []string{``, `[]`, `{"a"`, `{"a":1`, `{"a":}`} {
		if _, err := ParseObject([]byte(bad)); err == nil {
			t.Errorf("%s is accepted", bad)
		}
	}
}

// TestReserved: messages, tools and add_generation_prompt are no variables of a request.
func TestReserved(t *testing.T) {
	got, err := mustNew(t, `{{ messages|length }}{{ tools }}{{ add_generation_prompt }}{{ bos_token }}`).Render(t.Context(), nil, Options{Extra: Object{
		{"messages", json.RawMessage(`[1]`)}, {"tools", json.RawMessage(`[1]`)}, {"add_generation_prompt", json.RawMessage(`true`)}, {"bos_token", json.RawMessage(`"x"`)},
	}})
	if err != nil || got.Text != "0NoneFalsex" {
		t.Errorf("got %q, %v", got.Text, err)
	}
}

// TestCanceled stops a rendering whose client has left.
func TestCanceled(t *testing.T) {
	ctx, cancel := context.WithCancelCause(t.Context())
	left := errors.New("the client left")
	cancel(left)
	_, err := mustNew(t, `{% for a in range(9999) %}{% for b in range(9999) %}{% endfor %}{% endfor %}`).Render(ctx, nil, Options{})
	if !errors.Is(err, left) {
		t.Errorf("error %v, want %v", err, left)
	}
}

// sameError reports whether a rendering raised what jinja2 raises: the template's own message, or Python's, whose words for
// types may differ.
func sameError(err error, want string) bool {
	kind, message, _ := strings.Cut(want, ": ")
	if err == nil || errors.Is(err, ErrLimit) {
		return err != nil && kind == "RecursionError"
	}
	var raised *RaisedError
	if errors.As(err, &raised) != (kind == "TemplateError") {
		return false
	}
	return kind == "TypeError" || kind == "KeyError" || strings.HasSuffix(err.Error(), untrusted.Line(message))
}

// TestPublished compares with what jinja2 makes of the templates that MOESERVE_TEMPLATES has, which are their authors'.
func TestPublished(t *testing.T) {
	dir := os.Getenv("MOESERVE_TEMPLATES")
	if dir == "" {
		t.Skip("MOESERVE_TEMPLATES is not set: put *.jinja into a folder, and run tools/templates/reference.py published on it")
	}
	var expected struct {
		Tokens map[string]string
		Chats  []struct {
			Name     string
			Messages []json.RawMessage
			Tools    json.RawMessage
			Options  json.RawMessage
			Generate bool
		}
		Templates map[string]struct {
			Load  string
			Cases []struct {
				Want  *string
				Error string
			}
		}
	}
	b, err := os.ReadFile(filepath.Join(dir, "expected.json"))
	if err != nil {
		t.Fatal(err)
	}
	if err := json.Unmarshal(b, &expected); err != nil {
		t.Fatal(err)
	}
	now := time.Date(2024, time.July, 5, 9, 3, 7, 0, time.UTC)
	cases, exact, raised, refused, markers, walkers := 0, 0, 0, 0, 0, 0
	for _, file := range slices.Sorted(maps.Keys(expected.Templates)) {
		want := expected.Templates[file]
		text, err := os.ReadFile(filepath.Join(dir, file))
		if err != nil {
			t.Fatal(err)
		}
		tmpl, err := parse(string(text), expected.Tokens)
		if want.Load != "" && err != nil {
			refused++
			continue
		}
		if err != nil || want.Load != "" {
			t.Errorf("%s: got the error %v, want %q", file, err, want.Load)
			continue
		}
		// A template walks parts if it writes their texts and nothing else of them.
		parts, err := tmpl.Render(t.Context(), []Message{{Role: "user", Extra: json.RawMessage(`{"content": [{"type": "text", "text": "AAA"}]}`)}}, Options{})
		walks := err == nil && strings.Contains(parts.Text, "AAA") && !strings.Contains(parts.Text, "'type'") && !strings.Contains(parts.Text, `"type"`)
		if tmpl.named[defaultTemplate].parts != walks {
			t.Errorf("%s: walks parts: %v, thought %v", file, walks, !walks)
		} else if walks {
			walkers++
		}
		differ := 0
		for i, c := range want.Cases {
			chat := expected.Chats[i]
			var messages []Message
			for _, raw := range chat.Messages {
				messages = append(messages, Message{Extra: raw})
			}
			extra, err := ParseObject(chat.Options)
			if err != nil {
				t.Fatal(err)
			}
			cases++
			origins := make([]Message, len(messages))
			for i, m := range messages {
				origins[i].Extra = marked(t, m.Extra)
			}
			if p, err := tmpl.Render(t.Context(), origins, Options{AddGenerationPrompt: chat.Generate, Tools: marked(t, chat.Tools), Extra: extra}); err == nil {
				markers += checkOrigin(t, file+": "+chat.Name, p)
			}
			got, err := tmpl.Render(t.Context(), messages, Options{
				AddGenerationPrompt: chat.Generate, Tools: chat.Tools, Extra: extra, Now: func() time.Time { return now },
			})
			switch {
			case c.Want == nil && sameError(err, c.Error):
				raised++
				continue
			case c.Want != nil && err == nil && got.Text == *c.Want:
				exact++
				continue
			}
			if differ++; differ > 1 {
				continue
			}
			if c.Want == nil {
				t.Errorf("%s: %s: got %q, %v, want the error %s", file, chat.Name, got.Text, err, c.Error)
			} else {
				t.Errorf("%s: %s: error %v\n got %q\nwant %q", file, chat.Name, err, got.Text, *c.Want)
			}
		}
		if differ > 1 {
			t.Errorf("%s: %d cases differ", file, differ)
		}
	}
	t.Logf("%d templates, %d refused by both; %d cases: %d exact, %d raise in both, %d differ; %d strings of clients followed; %d walk parts",
		len(expected.Templates), refused, cases, exact, raised, cases-exact-raised, markers, walkers)
}

func TestConcurrentRender(t *testing.T) {
	text, err := os.ReadFile(filepath.Join("testdata", "templates", "qwen3.jinja"))
	if err != nil {
		t.Fatal(err)
	}
	tmpl := mustNew(t, string(text))
	messages := []Message{{Role: "user", Content: "a"}, {Role: "assistant", Content: "b"}, {Role: "user", Content: "c"}}
	opts := Options{AddGenerationPrompt: true, Tools: json.RawMessage(`[{"b": 1, "a": 2}]`)}
	want, err := tmpl.Render(t.Context(), messages, opts)
	if err != nil {
		t.Fatal(err)
	}
	var wg sync.WaitGroup
	for range 8 {
		wg.Go(func() {
			for range 10 {
				if got, err := tmpl.Render(t.Context(), messages, opts); err != nil || got.Text != want.Text {
					t.Errorf("got %q, %v, want %q", got.Text, err, want.Text)
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
		prompt, err := tmpl.Render(t.Context(), []Message{
			{Role: "user", Content: content}, {Role: "assistant", Extra: json.RawMessage(extra)},
		}, Options{AddGenerationPrompt: true})
		got := prompt.Text
		if err != nil && (got != "" || strings.Contains(err.Error(), "\n")) {
			t.Fatalf("error %q with text %q", err, got)
		}
		if len(got) > maxOutputBytes {
			t.Fatalf("%d bytes of text", len(got))
		}
	})
}

package output_test

import (
	"encoding/json"
	"fmt"
	"slices"
	"strings"
	"testing"

	"github.com/moeserve/moeserve/models/chat/output"
	"github.com/moeserve/moeserve/models/grammar"
	"github.com/moeserve/moeserve/models/grammar/schema"
)

var tools = map[string]output.Tool{
	"weather": {Strings: map[string]bool{"city": false, "zip": true}}, "add": {}, "write file": {}, "time": {},
}

// show writes deltas as text: content as it is, and the rest in brackets. Those of one kind are joined.
func show(deltas []output.Delta) string {
	var b strings.Builder
	for i, d := range deltas {
		same := i > 0 && deltas[i-1].Kind == d.Kind && d.Kind != output.Call
		if !same && i > 0 && deltas[i-1].Kind != output.Content && deltas[i-1].Kind != output.Call {
			b.WriteByte('}')
		}
		switch {
		case d.Kind == output.Call:
			fmt.Fprintf(&b, "«%d %s»", d.Index, d.Text)
		case d.Kind == output.Arguments && !same:
			b.WriteString("{" + d.Text)
		case d.Kind == output.Reasoning && !same:
			b.WriteString("THINK{" + d.Text)
		default:
			b.WriteString(d.Text)
		}
	}
	if n := len(deltas); n > 0 && deltas[n-1].Kind != output.Content && deltas[n-1].Kind != output.Call {
		b.WriteByte('}')
	}
	return b.String()
}

// parse reads a text in pieces.
func parse(o output.Options, pieces ...string) []output.Delta {
	p := output.New(o)
	var all []output.Delta
	for _, s := range pieces {
		all = append(all, p.Push(s)...)
	}
	return append(all, p.End()...)
}

// everyCut checks that a text reads the same, however it is cut in two, and byte by byte.
func everyCut(t *testing.T, o output.Options, text, want string) {
	t.Helper()
	for i := range len(text) + 1 {
		if got := show(parse(o, text[:i], text[i:])); got != want {
			t.Fatalf("%q, cut behind %q:\n got %s\nwant %s", text, text[:i], got, want)
		}
	}
	if got := show(parse(o, strings.Split(text, "")...)); got != want {
		t.Errorf("%q, by characters:\n got %s\nwant %s", text, got, want)
	}
}

func TestCalls(t *testing.T) {
	const paris = `{"city": "Paris", "days": [1, {"a": "}\"]"}]}`
	for _, c := range []struct {
		format     *output.Format
		text, want string
	}{
		// Hermes, Qwen2.5 and Qwen3.
		{output.Hermes, "<tool_call>\n" + `{"name": "weather", "arguments": ` + paris + "}\n</tool_call>", "«0 weather»{" + paris + "}"},
		{output.Hermes, "I look.\n\n<tool_call>\n" + `{"name": "weather", "arguments": ` + paris + "}\n</tool_call>\n", "I look.«0 weather»{" + paris + "}"},
		{
			output.Hermes, "<tool_call>\n" + `{"name": "add", "arguments": {}}` + "\n</tool_call>\n<tool_call>\n" + `{"name":"time","arguments":{"zone":"é"}}` + "\n</tool_call>",
			`«0 add»{{}}«1 time»{{"zone":"é"}}`,
		},
		{output.Hermes, `<tool_call>{"arguments": {"a": 1}, "name": "add", "id": [1, "x"], "n": 1.5}</tool_call>`, `«0 add»{{"a": 1}}`},
		{output.Hermes, `<tool_call>{"name": "add", "parameters": {"a": 1}}</tool_call>`, `«0 add»{{"a": 1}}`},
		{output.Hermes, `<tool_call>{"name": "add", "arguments": "{\"a\": \"\\n\"}"}</tool_call>`, `«0 add»{{"a": "\n"}}`},
		{output.Hermes, `<tool_call>{"name": "add", "arguments": null}</tool_call>`, `«0 add»{{}}`},
		{output.Hermes, `<tool_call>{"type": "function", "function": {"name": "add", "arguments": {}}, "id": "x"}</tool_call>`, `«0 add»{{}}`},
		{output.Hermes, `<tool_call>[{"name": "add", "arguments": {}}, {"name": "time", "arguments": {}}]</tool_call>`, `«0 add»{{}}«1 time»{{}}`},
		{output.Hermes, `<tool_call>{"name": "write\u0020file", "arguments": {}}</tool_call>`, `«0 write file»{{}}`},
		// What models leave out, or write too much.
		{output.Hermes, `<tool_call>{"name": "add", "arguments": {"a": 1}</tool_call>`, `«0 add»{{"a": 1}}`},
		{output.Hermes, `<tool_call>{"name": "add", "arguments": {"a": 1}}}` + "\n</tool_call>", `«0 add»{{"a": 1}}`},
		{output.Hermes, `<tool_call>{"name": "add", "arguments": {"a": 1}}` + "\nThat is all.", `«0 add»{{"a": 1}}` + "\nThat is all."},
		{output.Hermes, `<tool_call>{"name": "add", "arguments": {}}` + "\n" + `<tool_call>{"name": "time", "arguments": {}}</tool_call>`, `«0 add»{{}}«1 time»{{}}`},
		{output.Hermes, `<tool_call>{"name": "add", "arguments": {}}{"name": "time", "arguments": {}}</tool_call>`, `«0 add»{{}}«1 time»{{}}`},
		{output.Hermes, `a <tool_call>{"name": "add", "arguments": {}}</tool_call> b <tool_call>{"name": "time", "arguments": {}}</tool_call> c `, `a«0 add»{{}} b«1 time»{{}} c `},
		// The end of the tokens.
		{output.Hermes, `<tool_call>{"name": "add", "arguments": {"a": [1, "x`, `«0 add»{{"a": [1, "x}`},
		{output.Hermes, `<tool_call>{"name": "add", "arguments": {}}` + "\n</tool_c", `«0 add»{{}}`},
		{output.Hermes, `x <tool_call>{"name": "add", "argum`, `x <tool_call>{"name": "add", "argum`},
		{output.Hermes, "x <tool_", "x <tool_"},
		// What is no call is content.
		{output.Hermes, "", ""},
		{output.Hermes, " \n", " \n"},
		{output.Hermes, "a < b <tool> <<tool_call x", "a < b <tool> <<tool_call x"},
		{output.Hermes, "<tool_call>\nno </tool_call>", "<tool_call>\nno </tool_call>"},
		{output.Hermes, `<tool_call> {"name": "other", "arguments": {"a": 1}}</tool_call> x`, `<tool_call> {"name": "other", "arguments": {"a": 1}}</tool_call> x`},
		{output.Hermes, `<tool_call>{"arguments": {"a": 1}, "name": "other"}</tool_call>`, `<tool_call>{"arguments": {"a": 1}, "name": "other"}</tool_call>`},
		{output.Hermes, `<tool_call>{"name": "add"}</tool_call>`, `<tool_call>{"name": "add"}</tool_call>`},
		{output.Hermes, `<tool_call>{"name": "add", "arguments": [1]}</tool_call>`, `<tool_call>{"name": "add", "arguments": [1]}</tool_call>`},
		{output.Hermes, `<tool_call>{"name": "add", "arguments": "none"}</tool_call>`, `<tool_call>{"name": "add", "arguments": "none"}</tool_call>`},
		{output.Hermes, `<tool_call>{"name": 7, "arguments": {}}</tool_call>`, `<tool_call>{"name": 7, "arguments": {}}</tool_call>`},
		{output.Hermes, `<tool_call>{}</tool_call><tool_call>[]</tool_call>`, `<tool_call>{}</tool_call><tool_call>[]</tool_call>`},
		{output.Hermes, `<tool_call>oops <tool_call>{"name": "add", "arguments": {}}</tool_call>`, `<tool_call>oops«0 add»{{}}`},
		{output.Hermes, `<tool_call>{<tool_call>{"name": "add", "arguments": {}}</tool_call>`, `<tool_call>{«0 add»{{}}`},

		// Mistral: a list, and the form of newer models.
		{output.Mistral, `[TOOL_CALLS] [{"name": "weather", "arguments": ` + paris + `}]`, "«0 weather»{" + paris + "}"},
		{output.Mistral, `[TOOL_CALLS] [{"name": "add", "arguments": {}, "id": "abcdefghi"}, {"name": "time", "arguments": {}}]`, `«0 add»{{}}«1 time»{{}}`},
		{output.Mistral, `[TOOL_CALLS] {"name": "add", "arguments": {}}`, `«0 add»{{}}`},
		{output.Mistral, `Hm. [TOOL_CALLS]weather[ARGS]` + paris + `[TOOL_CALLS]time[CALL_ID]abcdefghi[ARGS]{}`, "Hm.«0 weather»{" + paris + "}«1 time»{{}}"},
		{output.Mistral, `[TOOL_CALLS]add{"a": 1}`, `«0 add»{{"a": 1}}`},
		{output.Mistral, `[TOOL_CALLS]other[ARGS]{"a": 1}`, `[TOOL_CALLS]other[ARGS]{"a": 1}`},
		{output.Mistral, `[TOOL_CALLS] [{"name": "add", "arguments": {}}, {"name": "other", "arguments": {}}]`, `«0 add»{{}} {"name": "other", "arguments": {}}]`},
		{output.Mistral, `[TOOL_CALLS] [1]`, `[TOOL_CALLS] [1]`},
		{output.Mistral, `[[TOOL_CALLS]add{}`, `[«0 add»{{}}`},
		{output.Mistral, "[TOOL_CALLS]" + strings.Repeat("x", 600), "[TOOL_CALLS]" + strings.Repeat("x", 600)},

		// Phi.
		{output.Phi4Mini, `functools[{"name": "weather", "arguments": ` + paris + `}]`, "«0 weather»{" + paris + "}"},
		{output.Phi4Mini, `functools[{"name": "add", "parameters": {}}, {"name": "time", "arguments": {}}] ok`, `«0 add»{{}}«1 time»{{}} ok`},
		{output.Phi4Mini, `<|tool_call|>[{"type": "function", "function": {"name": "add", "arguments": {}}}]<|/tool_call|>`, `«0 add»{{}}`},
		{output.Phi4Mini, `functools are functools[1]`, `functools are functools[1]`},

		// JSON.
		{output.JSON, ` {"name": "weather", "parameters": ` + paris + `}`, "«0 weather»{" + paris + "}"},
		{output.JSON, `[{"name": "add", "arguments": {}}, {"name": "time", "arguments": {}}]`, `«0 add»{{}}«1 time»{{}}`},
		{output.JSON, `{"name": "add", "parameters": {}}; {"name": "time", "parameters": {}}` + "\n", `«0 add»{{}}«1 time»{{}}`},
		{output.JSON, `Say {"name": "add", "arguments": {}}`, `Say {"name": "add", "arguments": {}}`},
		{output.JSON, `{"answer": {"name": "add", "arguments": {}}} x`, `{"answer": {"name": "add", "arguments": {}}} x`},
		{output.JSON, `[1, 2]`, `[1, 2]`},

		// Qwen3-Coder.
		{
			output.QwenXML, "Yes.\n<tool_call>\n<function=weather>\n<parameter=city>\nSaint-\"Étienne\"\n\n\\</b>\n</parameter>\n<parameter=days>\n3\n</parameter>\n</function>\n</tool_call>",
			`Yes.«0 weather»{{"city": "Saint-\"Étienne\"\n\n\\</b>", "days": 3}}`,
		},
		{
			output.QwenXML, "<tool_call>\n<function=add>\n<parameter=a>\n[1, {\"b\": null}]\n</parameter>\n<parameter=b>True</parameter>\n<parameter=c>\n x y\n</parameter>\n</function>\n</tool_call>\n" +
				"<tool_call><function=time></function></tool_call>",
			`«0 add»{{"a": [1, {"b": null}], "b": true, "c": " x y"}}«1 time»{{}}`,
		},
		{output.QwenXML, "Hm.\n<function=add>\n</function>\n</tool_call>\n<function=time></function> ok", "Hm.«0 add»{{}}«1 time»{{}} ok"},
		{output.QwenXML, "<tool_call>\n<function=add>\n<parameter=a>\n1\n</parameter>\n</tool_call>\n<tool_call><function=time></tool_call> ok", `«0 add»{{"a": 1}}«1 time»{{}} ok`},
		{output.QwenXML, "<function=weather><parameter=zip>\n90210\n</parameter></function><function=weather><parameter=zip>None</parameter></function>", `«0 weather»{{"zip": "90210"}}«1 weather»{{"zip": null}}`},
		{output.QwenXML, "<functions> <function=other>", "<functions> <function=other>"},
		{output.QwenXML, "<tool_call>\n<function=other>\n</function>\n</tool_call>", "<tool_call>\n<function=other>\n</function>\n</tool_call>"},
		{output.QwenXML, "<tool_call>\n<function=add>\n<param", "<tool_call>\n<function=add>\n<param"},
		{output.QwenXML, "<tool_call>\n<function=weather>\n<parameter=city>\nPar", `«0 weather»{{"city": "Par}`},
		{output.QwenXML, "<tool_call>\n<function=weather>\n<parameter=city>\nA\n</parameter>\nso <b>", `«0 weather»{{"city": "A"}}` + "\nso <b>"},

		// OLMo 3.
		{
			output.Olmo, "<function_calls>\nweather(city=\"Saint-'É)\\\"\", days=[1, -2.5, (True, None)], o={'a': {}, \"b\": 'x\\ny\\d'},)\ntime()\n</function_calls>",
			`«0 weather»{{"city": "Saint-'É)\"", "days": [1, -2.5, [true, null]], "o": {"a": {}, "b": "x\ny\\d"}}}«1 time»{{}}`,
		},
		{output.Olmo, "x <function_calls>add(1)</function_calls>", "x <function_calls>add(1)</function_calls>"},
		{output.Olmo, "<function_calls>other(a=1)</function_calls>", "<function_calls>other(a=1)</function_calls>"},
		{output.Olmo, "<function_calls>add(a=", "<function_calls>add(a="},
		{output.Olmo, "<function_calls>add(a=x)</function_calls>", "<function_calls>add(a=x)</function_calls>"},
		{output.Olmo, "<function_calls>add(a=1)\n</function", `«0 add»{{"a": 1}}`},
	} {
		everyCut(t, output.Options{Format: c.format, Tools: tools}, c.text, c.want)
	}
}

// A call begins as soon as its name and the first byte of its arguments are there, and these come as they are written.
func TestStreams(t *testing.T) {
	p := output.New(output.Options{Format: output.Hermes, Tools: tools})
	for _, c := range []struct{ text, want string }{
		{"Look", "Look"},
		{": ", ":"}, // a space may belong to a call
		{"<", ""},
		{"b", " <b"},
		{"\n<tool_", ""},
		{"call>\n", ""},
		{`{"name": "weather", "arg`, ""},
		{`uments": {`, "«0 weather»{{}"},
		{`"city": "Par`, `{"city": "Par}`},
		{"is\"", "{is\"}"},
		{"}", "{}}"},
		{"}\n</tool_call>", ""},
	} {
		if p.Complete() != 0 {
			t.Errorf("a call is complete before %q", c.text)
		}
		if got := show(p.Push(c.text)); got != c.want {
			t.Errorf("%q: %s, want %s", c.text, got, c.want)
		}
	}
	if got := p.End(); len(got) != 0 || p.Calls() != 1 || p.Complete() != 1 {
		t.Errorf("at the end: %v, %d calls", got, p.Calls())
	}
}

func TestReasoning(t *testing.T) {
	for _, c := range []struct {
		format     *output.ReasoningFormat
		at         output.Thinking
		text, want string
	}{
		{output.Qwen3, output.MayThink, "<think>\nHm, <b>.\n\n</think>\n\nYes. </think>", "THINK{Hm, <b>.}Yes. </think>"},
		{output.Qwen3, output.MayThink, "\n<think>\n\n</think>\n\nYes.", "Yes."},
		{output.Qwen3, output.MayThink, " <b>Yes</b> <think>", " <b>Yes</b> <think>"},
		{output.Qwen3, output.MayThink, "<<think>", "<<think>"},
		{output.Qwen3, output.MayThink, "<thin", "<thin"},
		{output.Qwen3, output.MayThink, " ", " "},
		{output.Qwen3, output.MayThink, "<think>Hm </thi", "THINK{Hm </thi}"},
		{output.Qwen3, output.MayThink, "<think>Hm <tool_call>{\"name\": \"add\", \"arguments\": {}}</think>", `THINK{Hm <tool_call>{"name": "add", "arguments": {}}}`},
		{output.Qwen3, output.MayThink, "<think>Hm</think>\n<tool_call>{\"name\": \"add\", \"arguments\": {}}</tool_call>", `THINK{Hm}«0 add»{{}}`},
		{output.Qwen3, output.Thinks, "Hm\n</think>\n\nYes.", "THINK{Hm}Yes."},
		{output.Qwen3, output.Thinks, "Hm", "THINK{Hm}"},
		{output.Qwen3, output.Answers, "<think>Yes.</think>", "<think>Yes.</think>"},
		{output.DeepSeekR1, output.MayThink, "Hm</think> Yes.", "THINK{Hm}Yes."},
		{output.DeepSeekR1, output.MayThink, "<think>\nHm</think> Yes.", "THINK{Hm}Yes."},
		{output.DeepSeekR1, output.MayThink, "<b>Hm", "THINK{<b>Hm}"},
		{nil, output.MayThink, "<think>Hm</think>", "<think>Hm</think>"},
	} {
		everyCut(t, output.Options{Format: output.Hermes, Tools: tools, Reasoning: c.format, Thinking: c.at}, c.text, c.want)
	}
	for prompt, want := range map[string]output.Thinking{
		"<|im_start|>assistant\n": output.MayThink, "<|im_start|>assistant\n<think>\n": output.Thinks,
		"<think>\n\n</think>\n\n": output.Answers, "<think> is a tag\n": output.MayThink,
	} {
		if got := output.Qwen3.After(prompt); got != want {
			t.Errorf("behind %q: %d, want %d", prompt, got, want)
		}
	}
}

// A call that the prompt has begun goes on in the output.
func TestBegin(t *testing.T) {
	for _, c := range []struct {
		format                *output.Format
		required, named, want string
	}{
		{output.Hermes, `add", "arguments": {"a": 1}}` + "\n</tool_call>", ` {"a": 1}}` + "\n</tool_call>", `«0 add»{{"a": 1}}`},
		{output.Mistral, `add", "arguments": {"a": 1}}]`, `{"a": 1}}]`, `«0 add»{{"a": 1}}`},
		{output.Phi4Mini, `add", "arguments": {"a": 1}}]`, ` {"a": 1}}]`, `«0 add»{{"a": 1}}`},
		{output.Phi4MiniTokens, `add", "arguments": {"a": 1}}<|/tool_call|>`, ` {"a": 1}}`, `«0 add»{{"a": 1}}`},
		{output.JSON, `add", "parameters": {"a": 1}}`, ` {"a": 1}}`, `«0 add»{{"a": 1}}`},
		{output.QwenXML, "add>\n<parameter=a>\n1\n</parameter>\n</function>\n</tool_call>", "<parameter=a>\n1\n</parameter>\n</function>", `«0 add»{{"a": 1}}`},
		{output.Olmo, "add(a=1)\n</function_calls>", "a=1)\n</function_calls>", `«0 add»{{"a": 1}}`},
	} {
		text, _, _ := c.format.Begin("")
		everyCut(t, output.Options{Format: c.format, Tools: tools, Begun: text, Reasoning: output.Qwen3}, c.required, c.want)
		text, start, end := c.format.Begin("add")
		if text[start:end] != "add" {
			t.Errorf("%s: the name is %q", c.format.Name, text[start:end])
		}
		everyCut(t, output.Options{Format: c.format, Tools: tools, Begun: text}, c.named, c.want)
		// What the model makes of it may be no call.
		if got := show(parse(output.Options{Format: c.format, Tools: tools, Begun: text}, "§")); got != text+"§" {
			t.Errorf("%s: %q, want %q", c.format.Name, got, text+"§")
		}
	}
	if text, start, end := output.Hermes.Begin(`a"b`); text[start:end] != `a\"b` {
		t.Errorf("%q", text)
	}
}

// A call of a name that a format spells is read, and one of another name is text.
func TestSpells(t *testing.T) {
	for _, c := range []struct {
		format *output.Format
		rest   string // of a call without arguments
	}{
		{output.Hermes, " {}}\n</tool_call>"},
		{output.Mistral, " {}}]"},
		{output.Phi4Mini, " {}}]"},
		{output.Phi4MiniTokens, " {}}<|/tool_call|>"},
		{output.JSON, " {}}"},
		{output.QwenXML, "</function>\n</tool_call>"},
		{output.Olmo, ")\n</function_calls>"},
	} {
		for _, name := range []string{
			"f", "get_weather-2", "a.b", "größe", "a b", " a", "a\n", "a>b", "a<b", "a(b", `a"b`, "a/b", "]", "[ARGS]", "</function>",
			strings.Repeat("x", 512), strings.Repeat("x", 513),
		} {
			begin, _, _ := c.format.Begin(name)
			p := output.New(output.Options{Format: c.format, Tools: map[string]output.Tool{name: {}}})
			p.Push(begin + c.rest)
			p.End()
			if got := p.Calls() == 1; got != c.format.Spells(name) {
				t.Errorf("%s: a call of %.20q is read: %v", c.format.Name, name, got)
			}
		}
	}
}

func TestNames(t *testing.T) {
	for _, name := range output.Names() {
		if output.Find(name) == nil {
			t.Errorf("no format %s", name)
		}
	}
	for _, name := range output.ReasoningNames() {
		if f := output.FindReasoning(name); f == nil || f.Name != name {
			t.Errorf("no reasoning %s", name)
		}
	}
	if output.Find("x") != nil || output.FindReasoning("x") != nil {
		t.Error("a format that is not there")
	}
	for template, want := range map[string]*output.Format{
		"… [TOOL_CALLS] …": output.Mistral, "<tool_call> <function=": output.QwenXML, "<tool_call>": output.Hermes,
		"<function_calls>": output.Olmo, "functools[": output.Phi4Mini, "<|tool_call|>": output.Phi4MiniTokens, "<|tool|>": output.Phi4MiniTokens, "": output.JSON,
	} {
		if got := output.Detect(func(s string) bool { return strings.Contains("{% if tools %}"+template, s) }); got != want {
			t.Errorf("%s: %v, want %v", template, got, want)
		}
	}
	for template, want := range map[string]*output.ReasoningFormat{
		"assistant\n<think>": output.Qwen3, "split('</think>')": output.Qwen3, "think": nil,
	} {
		if got := output.DetectReasoning(func(s string) bool { return strings.Contains(template, s) }); got != want {
			t.Errorf("%s: %v, want %v", template, got, want)
		}
	}
	if f := output.Detect(func(s string) bool { return s == "<tool_call>" }); f != nil {
		t.Errorf("a template without tools has format %s", f.Name)
	}
}

// FuzzOutput holds the parser to its invariants on any text, cut anywhere.
func FuzzOutput(f *testing.F) {
	for i, text := range []string{
		"Hm.\n<tool_call>\n{\"name\": \"add\", \"arguments\": {\"a\": \"\\\"}\"}}\n</tool_call>\n", "<think>\na\n</think>\nb",
		`[TOOL_CALLS] [{"name": "add", "arguments": {}}, {"name": "x"`, `[TOOL_CALLS]add[ARGS]{}`, `functools[{"name": "add", "arguments": {}}]`,
		"<tool_call>\n<function=add>\n<parameter=a>\n1\n</parameter>\n</function>\n</tool_call>", "<function_calls>\nadd(a='x', b=[1, {'c': None}])\n</function_calls>",
		`{"function": {"arguments": "{}", "name": "add"}}; {"name": "time", "parameters": null}`,
	} {
		f.Add(text, uint8(i), uint16(5))
	}
	f.Fuzz(func(t *testing.T, text string, kind uint8, cut uint16) {
		names := output.Names()
		o := output.Options{Format: output.Find(names[int(kind)%len(names)]), Tools: tools}
		if kind&0x80 != 0 {
			o.Reasoning, o.Thinking = output.Qwen3, output.Thinking((kind>>5&3)%3)
		}
		if kind&0x10 != 0 {
			o.Begun, _, _ = o.Format.Begin("")
			if kind&0x20 != 0 {
				o.Begun, _, _ = o.Format.Begin("add")
			}
		}
		whole := parse(o, text)
		at := int(cut) % (len(text) + 1)
		for _, pieces := range [][]string{{text[:at], text[at:]}, strings.SplitAfter(text, `"`), strings.Split(text, "")} {
			if got, want := show(parse(o, pieces...)), show(whole); got != want {
				t.Fatalf("%s, %q:\n got %s\nwant %s", o.Format.Name, pieces, got, want)
			}
		}
		p := output.New(o)
		if p.Push(text); p.Complete() > p.Calls() || p.Complete() < p.Calls()-1 {
			t.Errorf("%q: %d of %d calls are complete", text, p.Complete(), p.Calls())
		}
		calls := 0
		for i, d := range whole {
			if d.Text == "" && d.Kind != output.Call {
				t.Errorf("an empty delta in %+v", whole)
			}
			switch d.Kind {
			case output.Call:
				if _, ok := tools[d.Text]; !ok || d.Index != calls {
					t.Errorf("call %+v, the one with index %d", d, calls)
				}
				calls++
			case output.Arguments:
				if calls == 0 || d.Index != calls-1 || i > 0 && whole[i-1].Kind == output.Call && d.Text[0] != '{' {
					t.Errorf("arguments %+v behind %d calls", d, calls)
				}
			default:
			}
		}
		content := output.Join(whole, output.Content)
		if o.Reasoning == nil && calls == 0 && content != o.Begun+text {
			t.Errorf("%q behind %q became %q", text, o.Begun, content)
		}
		// With calls, content is left out, and nothing is put in or moved.
		rest := o.Begun + text
		for _, b := range []byte(content) {
			i := strings.IndexByte(rest, b)
			if i < 0 {
				t.Fatalf("%q behind %q has content %q", text, o.Begun, content)
			}
			rest = rest[i+1:]
		}
	})
}

// Texts that make a parser begin in vain over and over cost as much as others.
func TestLinear(t *testing.T) {
	for _, f := range []*output.Format{output.Hermes, output.Mistral, output.Phi4Mini, output.JSON, output.QwenXML, output.Olmo} {
		for _, unit := range []string{
			`<tool_call>{"a": "`, "<tool_call>\n", `[TOOL_CALLS] [`, "[TOOL_CALLS]a", "functools[", "<|tool_call|>", "[[[[", " \n", "{",
			"<tool_call><function=add>", "<tool_call><function=add><parameter=a>", "<function_calls>add(", "<function_calls>add(a=[[", "<",
		} {
			text := strings.Repeat(unit, 1<<17/len(unit))
			got := parse(output.Options{Format: f, Tools: tools, Reasoning: output.Qwen3}, text)
			if !slices.ContainsFunc(got, func(d output.Delta) bool { return d.Kind == output.Call }) && output.Join(got, output.Content) != text {
				t.Errorf("%s: %q came out otherwise", f.Name, unit)
			}
		}
	}
}

// Arguments of formats that do not write JSON are JSON.
func TestArgumentsAreJSON(t *testing.T) {
	for text, f := range map[string]*output.Format{
		"<tool_call><function=weather><parameter=city>\t\"\\\x01\n\n</parameter><parameter=x></parameter></function></tool_call>": output.QwenXML,
		"<function_calls>add(a='\\x41\\u00e9\\'\t', b=(), c={}, d=[[],], e=1e5)</function_calls>":                                 output.Olmo,
	} {
		got := parse(output.Options{Format: f, Tools: tools}, text)
		if args := output.Join(got, output.Arguments); !json.Valid([]byte(args)) || len(got) < 2 {
			t.Errorf("%q: %s", text, show(got))
		}
	}
}

// TestRestrictedStrings: strings that stand in tags as they are follow the keywords of their schema, too.
func TestRestrictedStrings(t *testing.T) {
	members, listed := schema.Members([]byte(`{"type": "object", "properties": {
		"code": {"type": "string", "pattern": "^[a-z\"\n]+$", "maxLength": 4},
		"day": {"anyOf": [{"type": "string", "format": "date"}, {"type": "null"}]},
		"name": {"type": "string", "minLength": 2, "not": {"enum": ["me"]}},
		"link": {"type": "string", "pattern": "^<"},
		"text": {"type": "string"}}}`), schema.Options{})
	if !listed {
		t.Fatal("the members are not listed")
	}
	e := output.QwenXML.Calls([]output.Function{{Name: "f", Members: members, Listed: true}}, false, "", false)
	g, err := grammar.New(e, nil)
	if err != nil {
		t.Fatal(err)
	}
	for _, c := range []struct {
		name, value string
		want        bool
	}{
		{"code", `a"`, true},
		{"code", "\na\n", true},
		{"code", "A", false},
		{"code", "abcde", false},
		{"code", "", false},
		{"day", "2024-02-29", true},
		{"day", "null", true},
		{"day", "2023-02-29", false},
		{"day", "", false},
		{"name", "éé", true},
		{"name", "me", false},
		{"name", "m", false},
		{"link", "<a>\n</a>", true},
		{"link", "<</parameter>", false},
		{"link", "a", false},
		{"text", "any\n\"text\"", true},
		{"text", "", true},
	} {
		text := "<tool_call>\n<function=f>\n<parameter=" + c.name + ">\n" + c.value + "\n</parameter>\n</function>\n</tool_call>"
		if got := g.Match(text); got != c.want {
			t.Errorf("%s of %q is written: %v, want %v", c.name, c.value, got, c.want)
		}
	}
}

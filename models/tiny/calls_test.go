package tiny_test

import (
	"encoding/json"
	"errors"
	"fmt"
	"os"
	"regexp"
	"slices"
	"strconv"
	"strings"
	"testing"

	"github.com/moeserve/moeserve/models/chat"
	"github.com/moeserve/moeserve/models/tiny"
	"github.com/moeserve/moeserve/models/tokenizer"
)

// TestCalls checks that conversations with tools reach the model as tools/tiny/calls.py trains it on them: its template
// writes the same text as jinja2, and its tokens are the same where clients' parts of it are plain text.
func TestCalls(t *testing.T) {
	content, err := os.ReadFile("testdata/calls.json")
	if err != nil {
		t.Fatal(err)
	}
	var trained []struct {
		Messages []json.RawMessage
		Tools    json.RawMessage
		Text     string
		IDs      []int32
	}
	if err := json.Unmarshal(content, &trained); err != nil {
		t.Fatal(err)
	}
	if len(trained) == 0 {
		t.Fatal("no conversations")
	}
	template, err := chat.Load(tiny.FS(), "")
	if err != nil {
		t.Fatal(err)
	}
	var raw json.RawMessage
	decode(t, "tokenizer.json", &raw)
	tokens, err := tokenizer.Parse(raw, nil)
	if err != nil {
		t.Fatal(err)
	}
	for _, c := range trained {
		var messages []chat.Message
		for _, m := range c.Messages {
			messages = append(messages, chat.Message{Extra: m})
		}
		prompt, err := template.Render(t.Context(), messages, chat.Options{Tools: c.Tools})
		if err != nil {
			t.Fatal(err)
		}
		if prompt.Text != c.Text {
			t.Errorf("the template writes %q, want %q", prompt.Text, c.Text)
			continue
		}
		ids, err := tokens.EncodeWith(prompt.Text, tokenizer.EncodeOptions{Plain: prompt.Client})
		if err != nil {
			t.Fatal(err)
		}
		if !slices.Equal(ids, c.IDs) {
			t.Errorf("%q has tokens %v, want %v", prompt.Text, ids, c.IDs)
		}
	}
}

// conversation is a line of testdata/calls-eval.jsonl.gz: turns of a prompt and its answer, as tools/tiny/calls.py has them.
type conversation struct {
	Task  string
	Turns [][2]string
}

// asks are the questions that need a tool: their form, the names of tools for them, in which order the form's groups are
// the arguments, and the answer to a result, with $r for that.
var asks = []struct {
	form, tools string
	arguments   []int
	answer      string
}{
	{`^What is (\d+) plus (\d+)\?$`, "add sum plus", []int{1, 2}, "$1 plus $2 is $r."},
	{`^Where is the (\w+) (\w+)\?$`, "find search lookup", []int{2, 1}, "The $1 $2 is in the $r."},
	{`^(?:Where is|Find|What room is) ([A-Z]\w+)(?:\?|\.| in\?)$`, "locate whereabouts", []int{1}, "$1 is in the $r."},
	{`^Paint the (\w+) (\w+)\.$`, "paint dye", []int{1, 2}, "The $1 is $2."},
	{`^Give the (\w+) to (\w+)\.$`, "give send", []int{1, 2}, "$2 has the $1."},
	{`^(?:What is the weather|How will the weather be) in (\w+) (?:on )?(\w+)\?$`, "weather get_weather forecast", []int{1, 2}, "It will be $r in $1."},
	{`^Set the timer to (\d+) hours and (\d+) minutes\.$`, "timer set_timer alarm", nil, ""},
	{`^Answer the next question\.$`, "next_question", nil, ""},
}

// call works out what a question calls, of the tools that are shown, and the answer to the call's result.
func call(question string, tools [][]string, result string) (text, answer string, err error) {
	for _, a := range asks {
		form := regexp.MustCompile(a.form)
		m := form.FindStringSubmatch(question)
		if m == nil {
			continue
		}
		at := slices.IndexFunc(tools, func(tool []string) bool { return slices.Contains(strings.Fields(a.tools), tool[0]) })
		if at < 0 {
			return "", "", fmt.Errorf("no tool for %q", question)
		}
		var values []string
		for _, group := range a.arguments {
			values = append(values, m[group])
		}
		answer := string(form.ExpandString(nil, strings.ReplaceAll(a.answer, "$r", result), question, form.FindStringSubmatchIndex(question)))
		switch tools[at][0] {
		case "add", "sum", "plus":
			sum, err := add(m[1], m[2])
			if err != nil {
				return "", "", err
			}
			if result != sum {
				return "", "", fmt.Errorf("%q gives %s", question, result)
			}
		case "timer", "set_timer", "alarm":
			hours, _ := strconv.Atoi(m[1])
			minutes, _ := strconv.Atoi(m[2])
			values = []string{strconv.Itoa(60*hours + minutes)}
			answer = values[0] + " minutes."
		case "next_question":
			if answer, err = solveAny(result); err != nil {
				return "", "", err
			}
		}
		keys := tools[at][1:]
		if len(keys) != len(values) {
			return "", "", fmt.Errorf("%q has arguments %v", tools[at], values)
		}
		var arguments []string
		for i, v := range values {
			if v[0] > '9' {
				v = strconv.Quote(v)
			}
			arguments = append(arguments, fmt.Sprintf("%q: %s", keys[i], v))
		}
		return fmt.Sprintf("<tool_call>\n{\"name\": %q, \"arguments\": {%s}}\n</tool_call>", tools[at][0], strings.Join(arguments, ", ")), answer, nil
	}
	return "", "", fmt.Errorf("no tool is needed for %q", question)
}

// solveAny works out the answer to a held-out prompt of any of the five tasks, which may lack its "=".
func solveAny(prompt string) (string, error) {
	for _, p := range []string{prompt, prompt + "=", prompt + " ="} {
		for _, task := range []string{"addition", "sorting", "reversing", "recall", "sentences"} {
			if answer, err := solve(task, p); err == nil && heldOut(p) {
				return answer, nil
			}
		}
	}
	return "", fmt.Errorf("%q is no held-out prompt", prompt)
}

// facts is the JSON that is asked for of a held-out sentence or sum.
func facts(told string, fields []string) (string, error) {
	if !heldOut(told) {
		return "", errors.New("not in the test split")
	}
	of := map[string]string{}
	if m := regexp.MustCompile(`^What is (\d+) plus (\d+)\?$`).FindStringSubmatch(told); m != nil {
		sum, err := add(m[1], m[2])
		if err != nil {
			return "", err
		}
		if !slices.Equal(fields, []string{"a", "b", "sum"}) {
			return "", fmt.Errorf("fields %q", fields)
		}
		of = map[string]string{"a": m[1], "b": m[2], "sum": sum}
	} else if m := regexp.MustCompile(`^(\w+) put the (\w+) (\w+) in the (\w+)\.$`).FindStringSubmatch(told); m != nil {
		for i, names := range []string{"name person", "color", "object thing item", "place room"} {
			for _, name := range strings.Fields(names) {
				of[name] = strconv.Quote(m[i+1])
			}
		}
	}
	var members []string
	for _, f := range fields {
		if of[f] == "" {
			return "", fmt.Errorf("no field %q", f)
		}
		members = append(members, fmt.Sprintf("%q: %s", f, of[f]))
	}
	return "{" + strings.Join(members, ", ") + "}", nil
}

// check tells what is wrong with a test conversation.
func (c conversation) check() error {
	before, question, _ := strings.Cut(c.Turns[0][0], "<|user|>")
	var tools [][]string
	for _, tool := range strings.Split(before, "<tool>")[1:] {
		tools = append(tools, strings.Split(tool, " "))
	}
	var want []string
	var err error
	switch c.Task {
	case "call", "parallel":
		questions := regexp.MustCompile(`[^.?]+[.?]`).FindAllString(question, -1)
		results := strings.Split(c.Turns[1][0], "<tool_response>")[1:]
		if count := map[string]int{"call": 1, "parallel": 2}[c.Task]; len(questions) != count || len(results) != count {
			return fmt.Errorf("%d questions, %d results", len(questions), len(results))
		}
		var calls, answers []string
		for i, q := range questions {
			q = strings.TrimSpace(q)
			if q != "Answer the next question." && !heldOut(q) {
				return fmt.Errorf("%q is not in the test split", q)
			}
			text, answer, err := call(q, tools, results[i])
			if err != nil {
				return err
			}
			calls, answers = append(calls, text), append(answers, answer)
		}
		want = []string{strings.Join(calls, "\n"), strings.Join(answers, " ")}
	case "plain":
		want = make([]string, 1)
		if want[0], err = solveAny(question); err != nil {
			return err
		}
		if len(tools) == 0 {
			return errors.New("no tools")
		}
	case "schema", "forced":
		told, named, _ := strings.Cut(question, " JSON")
		var fields []string
		for _, m := range regexp.MustCompile(`"(\w+)":`).FindAllStringSubmatch(c.Turns[0][1], -1) {
			fields = append(fields, m[1])
		}
		if given := " with " + strings.Join(fields, " "); named != given && (c.Task == "schema" || named != "") {
			return fmt.Errorf("the prompt names %q", named)
		}
		want = make([]string, 1)
		if want[0], err = facts(told, fields); err != nil {
			return err
		}
	}
	if len(c.Turns) != len(want) {
		return fmt.Errorf("%d turns", len(c.Turns))
	}
	for i, turn := range c.Turns {
		if turn[1] != want[i] {
			return fmt.Errorf("turn %d answers %q, want %q", i, turn[1], want[i])
		}
	}
	return nil
}

func TestTestConversationsAreHeldOutAndTrue(t *testing.T) {
	count := map[string]int{}
	for _, c := range readLines[conversation](t, "testdata/calls-eval.jsonl.gz") {
		count[c.Task]++
		if err := c.check(); err != nil {
			t.Errorf("%s %q: %v", c.Task, c.Turns, err)
		}
	}
	for _, task := range []string{"call", "parallel", "plain", "schema", "forced"} {
		if count[task] != 1000 {
			t.Errorf("%d conversations of %s, want 1000", count[task], task)
		}
	}
	if len(count) != 5 {
		t.Errorf("kinds are %v, want five", count)
	}
}

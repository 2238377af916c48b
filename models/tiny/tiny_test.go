package tiny_test

import (
	"bufio"
	"compress/gzip"
	"encoding/binary"
	"encoding/json"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"regexp"
	"slices"
	"strconv"
	"strings"
	"testing"

	"github.com/moeserve/moeserve/models/tiny"
)

// example is a line of testdata/eval.jsonl.gz.
type example struct{ Task, Prompt, Answer string }

// readLines reads gzipped lines of JSON.
func readLines[line any](t *testing.T, name string) []line {
	t.Helper()
	f, err := os.Open(name)
	if err != nil {
		t.Fatal(err)
	}
	defer f.Close()
	zipped, err := gzip.NewReader(f)
	if err != nil {
		t.Fatal(err)
	}
	var all []line
	lines := bufio.NewScanner(zipped)
	for lines.Scan() {
		var l line
		if err := json.Unmarshal(lines.Bytes(), &l); err != nil {
			t.Fatalf("line %d: %v", len(all)+1, err)
		}
		all = append(all, l)
	}
	if err := lines.Err(); err != nil {
		t.Fatal(err)
	}
	return all
}

var (
	additionForm = regexp.MustCompile(`^(\d+)\+(\d+)=$`)
	symbolsForm  = regexp.MustCompile(`^(sort|reverse): ([a-z](?: [a-z])*) =$`)
	recallForm   = regexp.MustCompile(`^recall: ([a-z]=\d\d(?: [a-z]=\d\d)*); ([a-z])=$`)
	gaveForm     = regexp.MustCompile(`^(\w+) gave the (\w+) (\w+) to (\w+)\. Who has the (\w+)\?$`)
	putForm      = regexp.MustCompile(`^\w+ put the (\w+) (\w+) in the (\w+)\. (Where|What color) is the (\w+)\?$`)
	ownersForm   = regexp.MustCompile(`^(\w+) has the (\w+) and (\w+) has the (\w+)\. Who has the (\w+)\?$`)
	roomsForm    = regexp.MustCompile(`^(\w+) is in the (\w+) and (\w+) is in the (\w+)\. Where is (\w+)\?$`)
)

// solve works an answer out from the prompt of a task. It refuses prompts that the task does not have.
func solve(task, prompt string) (string, error) {
	switch task {
	case "addition":
		if m := additionForm.FindStringSubmatch(prompt); m != nil {
			return add(m[1], m[2])
		}
	case "sorting", "reversing":
		m := symbolsForm.FindStringSubmatch(prompt)
		if m == nil || (m[1] == "sort") != (task == "sorting") {
			break
		}
		symbols := strings.Fields(m[2])
		if len(symbols) < 4 || len(symbols) > 10 {
			return "", fmt.Errorf("%d symbols", len(symbols))
		}
		if task == "sorting" {
			slices.Sort(symbols)
		} else {
			slices.Reverse(symbols)
		}
		return strings.Join(symbols, " "), nil
	case "recall":
		if m := recallForm.FindStringSubmatch(prompt); m != nil {
			return recall(strings.Fields(m[1]), m[2])
		}
	case "sentences":
		return read(prompt)
	}
	return "", errors.New("not in the task's form")
}

func add(a, b string) (string, error) {
	sum := 0
	for _, operand := range []string{a, b} {
		n, err := strconv.Atoi(operand)
		if err != nil || n > 999 || strconv.Itoa(n) != operand {
			return "", fmt.Errorf("operand %q", operand)
		}
		sum += n
	}
	return strconv.Itoa(sum), nil
}

func recall(pairs []string, asked string) (string, error) {
	values := map[string]string{}
	for _, pair := range pairs {
		key, value, _ := strings.Cut(pair, "=")
		values[key] = value
	}
	if len(values) != len(pairs) || len(pairs) < 4 || len(pairs) > 8 {
		return "", fmt.Errorf("%d keys in %d pairs", len(values), len(pairs))
	}
	value, ok := values[asked]
	if !ok {
		return "", fmt.Errorf("key %q has no value", asked)
	}
	return value, nil
}

func read(prompt string) (string, error) {
	if m := gaveForm.FindStringSubmatch(prompt); m != nil && m[1] != m[4] && m[3] == m[5] {
		return fmt.Sprintf("%s has the %s %s.", m[4], m[2], m[3]), nil
	}
	if m := putForm.FindStringSubmatch(prompt); m != nil && m[2] == m[5] {
		if m[4] == "Where" {
			return fmt.Sprintf("The %s %s is in the %s.", m[1], m[2], m[3]), nil
		}
		return fmt.Sprintf("The %s is %s.", m[2], m[1]), nil
	}
	for form, answer := range map[*regexp.Regexp]func(who, what string) (asked, sentence string){
		ownersForm: func(who, what string) (string, string) { return what, who + " has the " + what + "." },
		roomsForm:  func(who, what string) (string, string) { return who, who + " is in the " + what + "." },
	} {
		m := form.FindStringSubmatch(prompt)
		if m == nil || m[1] == m[3] || m[2] == m[4] {
			continue
		}
		for _, fact := range [][2]string{{m[1], m[2]}, {m[3], m[4]}} {
			if asked, sentence := answer(fact[0], fact[1]); asked == m[5] {
				return sentence, nil
			}
		}
	}
	return "", errors.New("not a question of the templates")
}

// One prompt in testShare is a test prompt. tools/tiny/tasks.py holds the same function, over tokens.
const (
	testShare = 16
	hashBase  = 0x100000001b3
	hashMix   = 0xff51afd7ed558ccd
)

// heldOut reports whether a prompt, without any chat template around it, belongs to the test split. The model has never
// been trained on such a prompt, neither bare nor in a chat.
//
// The hash is a polynomial in the prompt's bytes, each plus one, modulo 2^64, and then mixed.
func heldOut(prompt string) bool {
	var h uint64
	for i := range len(prompt) {
		h = h*hashBase + uint64(prompt[i]) + 1
	}
	h ^= h >> 33
	h *= hashMix
	h ^= h >> 33
	return h%testShare == 0
}

func TestTestPromptsAreHeldOutAndTrue(t *testing.T) {
	count := map[string]int{}
	seen := map[string]bool{}
	for _, e := range readLines[example](t, "testdata/eval.jsonl.gz") {
		count[e.Task]++
		if seen[e.Prompt] {
			t.Errorf("%q stands there twice", e.Prompt)
		}
		seen[e.Prompt] = true
		if !heldOut(e.Prompt) {
			t.Errorf("%q is not in the test split", e.Prompt)
		}
		answer, err := solve(e.Task, e.Prompt)
		if err != nil {
			t.Errorf("%s %q: %v", e.Task, e.Prompt, err)
		} else if answer != e.Answer {
			t.Errorf("%s %q: answer %q, want %q", e.Task, e.Prompt, e.Answer, answer)
		}
	}
	for _, task := range []string{"addition", "sorting", "reversing", "recall", "sentences"} {
		if count[task] != 1000 {
			t.Errorf("%d prompts of %s, want 1000", count[task], task)
		}
	}
	if len(count) != 5 {
		t.Errorf("tasks are %v, want five", count)
	}
}

func TestHeldOut(t *testing.T) {
	// As tools/tiny/tasks.py gives them.
	for prompt, want := range map[string]bool{
		"":                   true,
		"1+1=":               true,
		"12+34=":             false,
		"123+456=":           false,
		"sort: d a c b =":    false,
		"reverse: a b c d =": false,
		"é":                  false,
	} {
		if got := heldOut(prompt); got != want {
			t.Errorf("heldOut(%q) = %v, want %v", prompt, got, want)
		}
	}

	inSplit := 0
	for a := range 1000 {
		for b := range 1000 {
			if heldOut(fmt.Sprintf("%d+%d=", a, b)) {
				inSplit++
			}
		}
	}
	if inSplit < 61_000 || inSplit > 64_000 {
		t.Errorf("%d of 1000000 additions are held out, want about 62500", inSplit)
	}
}

func TestCheckpoint(t *testing.T) {
	entries, err := fs.ReadDir(tiny.FS(), ".")
	if err != nil {
		t.Fatal(err)
	}
	var names []string
	size := int64(0)
	for _, e := range entries {
		info, err := e.Info()
		if err != nil {
			t.Fatal(err)
		}
		names = append(names, e.Name())
		size += info.Size()
	}
	want := []string{
		"config.json", "generation_config.json", "model.safetensors", "tokenizer.json", "tokenizer_config.json",
	}
	if !slices.Equal(names, want) {
		t.Errorf("files are %v, want %v", names, want)
	}
	if size > 8_000_000 {
		t.Errorf("the checkpoint takes %d bytes, want at most 8 MB", size)
	}

	var config struct {
		ModelType string `json:"model_type"`
		Layers    int    `json:"num_hidden_layers"`
		Experts   int    `json:"num_local_experts"`
		Chosen    int    `json:"num_experts_per_tok"`
		Hidden    int    `json:"hidden_size"`
		Wide      int    `json:"intermediate_size"`
		Vocab     int    `json:"vocab_size"`
		EOS       int    `json:"eos_token_id"`
	}
	decode(t, "config.json", &config)
	if config.ModelType != "mixtral" || config.Layers < 4 || config.Experts < 8 || config.Chosen != 2 {
		t.Errorf("config is %+v, want a mixtral of at least 4 layers and 8 experts, 2 chosen", config)
	}

	var tokenizer struct {
		Model struct{ Vocab map[string]int }
	}
	decode(t, "tokenizer.json", &tokenizer)
	if len(tokenizer.Model.Vocab) != config.Vocab || tokenizer.Model.Vocab["<|endoftext|>"] != config.EOS {
		t.Errorf("tokenizer has %d tokens, its end is %d; config says %d and %d", len(tokenizer.Model.Vocab),
			tokenizer.Model.Vocab["<|endoftext|>"], config.Vocab, config.EOS)
	}

	tensors := safetensorsHeader(t)
	for name, wantShape := range map[string][]int{
		"lm_head.weight": {config.Vocab, config.Hidden},
		"model.layers.0.block_sparse_moe.gate.weight":         {config.Experts, config.Hidden},
		"model.layers.5.block_sparse_moe.experts.7.w1.weight": {config.Wide, config.Hidden},
		"model.layers.5.block_sparse_moe.experts.7.w2.weight": {config.Hidden, config.Wide},
		"model.layers.5.block_sparse_moe.experts.7.w3.weight": {config.Wide, config.Hidden},
	} {
		if got := tensors[name]; got.DType != "BF16" || !slices.Equal(got.Shape, wantShape) {
			t.Errorf("%s is %+v, want BF16 %v", name, got, wantShape)
		}
	}
}

type tensor struct {
	DType string `json:"dtype"`
	Shape []int  `json:"shape"`
}

func safetensorsHeader(t *testing.T) map[string]tensor {
	t.Helper()
	content, err := fs.ReadFile(tiny.FS(), "model.safetensors")
	if err != nil {
		t.Fatal(err)
	}
	header := map[string]json.RawMessage{}
	if err := json.Unmarshal(content[8:8+binary.LittleEndian.Uint64(content)], &header); err != nil {
		t.Fatal(err)
	}
	delete(header, "__metadata__")
	tensors := map[string]tensor{}
	for name, raw := range header {
		var described tensor
		if err := json.Unmarshal(raw, &described); err != nil {
			t.Fatalf("%s: %v", name, err)
		}
		tensors[name] = described
	}
	return tensors
}

func decode(t *testing.T, name string, into any) {
	t.Helper()
	content, err := fs.ReadFile(tiny.FS(), name)
	if err != nil {
		t.Fatal(err)
	}
	if err := json.Unmarshal(content, into); err != nil {
		t.Fatalf("%s: %v", name, err)
	}
}

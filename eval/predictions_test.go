package eval_test

import (
	"encoding/json"
	"errors"
	"strings"
	"testing"

	"github.com/moeserve/moeserve/configs"
	"github.com/moeserve/moeserve/eval"
)

// Times of emulated devices are not shown as if a GPU had taken them, and a result without times, or
// with one token for each request, has no cells.
func TestPredictionsOfResults(t *testing.T) {
	read := func(change func(*eval.Result)) ([]eval.Predicted, error) {
		r := eval.Result{
			Machine: eval.Machine{Device: "emulated", Emulated: true, Emulation: &eval.Emulation{Spec: "virtual,flops=78G", Rates: eval.RatesVirtual}},
			Model:   "mixtral-8x7b", Tier: configs.HostTier, OffloadFraction: 0.5, Requests: 4, PromptTokens: 40, GeneratedTokens: 16, DecodeTokS: 100, PrefillTokS: 1000,
			Prediction: &eval.Prediction{DecodeSeconds: 0.3, PrefillSeconds: 0.2},
		}
		change(&r)
		data, err := json.Marshal([]eval.Result{r})
		if err != nil {
			t.Fatal(err)
		}
		_, cells, err := eval.ReadTimings(data, "sweep.json")
		return cells, err
	}
	cells, err := read(func(*eval.Result) {})
	if err != nil || len(cells) != 2 {
		t.Fatalf("%+v, %v", cells, err)
	}
	var text strings.Builder
	p := eval.NewPredictions(eval.Run{}, "", cells)
	if err := eval.WritePredictions(&text, p); err != nil {
		t.Fatal(err)
	}
	data, err := json.Marshal(p)
	if err != nil {
		t.Fatal(err)
	}
	for _, s := range []string{text.String(), string(data)} {
		if !strings.Contains(s, "emulated on the CPU (--emulate virtual,flops=78G), on a virtual clock") {
			t.Errorf("%s\ndoes not say that the times are of emulated devices", s)
		}
	}
	for name, change := range map[string]func(*eval.Result){
		"no decode rate":  func(r *eval.Result) { r.DecodeTokS = 0 },
		"no prefill rate": func(r *eval.Result) { r.PrefillTokS = 0 },
		"no decode step":  func(r *eval.Result) { r.GeneratedTokens = 4 },
	} {
		if cells, err := read(change); !errors.Is(err, eval.ErrInput) {
			t.Errorf("%s: %+v, %v", name, cells, err)
		}
	}
}

// Lines of which one is no timing name it.
func TestReadTimingsRefuses(t *testing.T) {
	const line = `{"model": "mixtral-8x7b", "kind": "decode", "sequences": 1, "seconds": 1}` + "\n"
	for text, want := range map[string]string{
		line + "\n" + "x\n": `file: line 3: it is not JSON from "x" on`,
		line + "{\n":        "file: line 2: it is not JSON: it ends too early",
		line + "{}\n":       "file: line 2 has no kind, which the lines before it have",
		"x\n" + line:        `nor results of bench sweep --json or bench throughput --json: line 1 is not JSON from "x" on`,
		"[{}]":              "nor results of bench sweep --json or bench throughput --json: entry 1 is not one",
	} {
		if _, _, err := eval.ReadTimings([]byte(text), "file"); !errors.Is(err, eval.ErrInput) || !strings.HasSuffix(err.Error(), want) {
			t.Errorf("%q: %v, want %s", text, err, want)
		}
	}
	if list, _, err := eval.ReadTimings([]byte(line+"\n"+line), "file"); len(list) != 2 || err != nil {
		t.Errorf("%v, %v", list, err)
	}
}

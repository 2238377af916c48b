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

package planner

import (
	"encoding/json"
	"strings"
	"testing"

	"pgregory.net/rapid"
)

// A policy that is written is the policy that is read, alone or beside other things.
func TestPolicyJSON(t *testing.T) {
	p := problem(t, "mixtral-8x7b", "h200")
	rapid.Check(t, func(rt *rapid.T) {
		x := drawPolicy(rt, p)
		for _, v := range []any{x, map[string]any{"model": "m", "experts": 256, "expert_bytes": p.Model.ExpertBytes(), "policy": x}} {
			data, err := json.Marshal(v)
			if err != nil {
				rt.Fatal(err)
			}
			if got, err := ParsePolicy(data, p.Model); err != nil || got != x {
				rt.Fatalf("%s: %+v, %v", data, got, err)
			}
		}
	})
}

func TestPolicyJSONRefuses(t *testing.T) {
	m := presetModel(t, "mixtral-8x7b")
	for text, want := range map[string]string{
		``:             "read policy: it is empty",
		`{`:            "read policy: it is not JSON: it ends too early",
		`# Policy`:     `read policy: it is not JSON from "# Policy" on`,
		`[1, 2]`:       "cannot unmarshal array into Go value of type planner.plan",
		`5`:            "cannot unmarshal",
		`{"batch": 4}`: "batch and resident_experts are required",
		`{"policy": {"batch": 4, "resident_experts": 1, "fast": true}}`:    `read policy: unknown field "fast"`,
		`{"batch": 4, "resident_experts": 1, "attention": "tpu"}`:          `"tpu" is none of gpu, cpu`,
		`{"batch": 4, "resident_experts": 1, "expert_grouping": "expert"}`: `"expert" is none of layer, micro-batch`,
		`{"batch": 4, "resident_experts": 1} {}`:                           `it is not JSON from "{}" on`,
		`{"batch": "4", "resident_experts": 1}`:                            "batch",
		`{"batch": 4, "resident_experts": 1, "mikro_batch": 1}`:            `unknown field "mikro_batch"`,
		`{"batch": 4, "resident_experts": 1, "micro_batch_tokens": 9}`:     "micro_batch_tokens is 9 and batch 4",
		`{"batch": 4, "resident_experts": 200, "peer_experts": 57}`:        "resident_experts is 200 and peer_experts 57, and model mixtral-8x7b has 256 experts",

		`{"model": "m", "experts": 48, "expert_bytes": 7, "policy": {"batch": 4, "resident_experts": 1}}`: "the policy is for m with 48 experts of 7 bytes, and model mixtral-8x7b has 256 of ",
	} {
		if _, err := ParsePolicy([]byte(text), m); err == nil || !strings.Contains(err.Error(), want) || !strings.HasPrefix(err.Error(), "planner: read policy: ") {
			t.Errorf("%s: %v, want %s", text, err, want)
		}
	}
}

func FuzzParsePolicy(f *testing.F) {
	f.Add([]byte(`{"policy": {"batch": 324, "resident_experts": 4, "attention": "cpu"}}`))
	f.Add([]byte(`{"batch": 1, "resident_experts": 0, "kv_on_host": 0.25}`))
	m := presetModel(f, "mixtral-8x7b")
	f.Fuzz(func(t *testing.T, data []byte) {
		x, err := ParsePolicy(data, m)
		if err != nil {
			return
		}
		again, err := json.Marshal(x)
		if err != nil {
			t.Fatal(err)
		}
		if y, err := ParsePolicy(again, m); err != nil || x != y {
			t.Fatalf("%s: %+v, then %+v, %v", data, x, y, err)
		}
	})
}

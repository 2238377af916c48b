package tokenizer

import (
	"fmt"
	"math"

	"github.com/moeserve/moeserve/untrusted"
)

// buildSpecials reads which special tokens surround a prompt. As in transformers, tokenizer_config.json takes precedence
// over the post-processor.
func buildSpecials(t *Pipeline, c *fileConfig, side *sideConfig) error {
	for _, p := range flatten(c.PostProcessor, "processors") {
		switch p.kind() {
		case "ByteLevel":
		case "TemplateProcessing":
			if err := t.template(p); err != nil {
				return err
			}
		case "RobertaProcessing", "BertProcessing":
			if err := t.surround(p); err != nil {
				return err
			}
		default:
			return unsupported("post_processor %s: Sequence, TemplateProcessing, ByteLevel, RobertaProcessing and BertProcessing are", p.name())
		}
	}
	named := func(n *tokenName) int32 {
		if n == nil {
			return noToken
		}
		if id, ok := t.ID(n.token.content); ok {
			return id
		}
		return noToken
	}
	t.bos, t.eos = named(side.BOS), named(side.EOS)
	if side.AddBOS != nil || side.AddEOS != nil {
		t.prefix, t.suffix = nil, nil
		if side.AddBOS != nil && *side.AddBOS && t.bos >= 0 {
			t.prefix = []int32{t.bos}
		}
		if side.AddEOS != nil && *side.AddEOS && t.eos >= 0 {
			t.suffix = []int32{t.eos}
		}
	}
	return nil
}

// surround adds the two tokens that a RobertaProcessing or BertProcessing names, with their ids.
func (t *Pipeline) surround(p component) error {
	var ids [2]int32
	for i, key := range []string{"cls", "sep"} {
		pair, _ := p[key].([]any)
		if len(pair) != 2 {
			return fmt.Errorf("post_processor %s: %s is not a token and its id", p.kind(), key)
		}
		f, ok := pair[1].(float64)
		if !ok || f != math.Trunc(f) || f < 0 || f > maxID {
			return fmt.Errorf("post_processor %s: %s has an id that is none", p.kind(), key)
		}
		ids[i] = int32(f)
	}
	t.prefix = append([]int32{ids[0]}, t.prefix...)
	t.suffix = append(t.suffix, ids[1])
	return nil
}

// template adds the special tokens of a TemplateProcessing around the existing ones.
func (t *Pipeline) template(p component) error {
	table, _ := p["special_tokens"].(map[string]any)
	var before, after []int32
	seen := false
	for _, item := range p.list("single") {
		if _, ok := item["Sequence"]; ok {
			if seq, _ := item["Sequence"].(map[string]any); seen || component(seq).str("id") != "A" {
				return unsupported("post_processor TemplateProcessing whose single form is not one sequence A")
			}
			seen = true
			continue
		}
		special, _ := item["SpecialToken"].(map[string]any)
		name := component(special).str("id")
		entry, _ := table[name].(map[string]any)
		ids, ok := entry["ids"].([]any)
		if !ok {
			return fmt.Errorf("post_processor TemplateProcessing uses %s, which its special_tokens lack", untrusted.Quote(name))
		}
		for _, v := range ids {
			f, ok := v.(float64)
			if !ok || f != math.Trunc(f) || f < 0 || f > maxID {
				return fmt.Errorf("post_processor TemplateProcessing gives %s an id that is none", untrusted.Quote(name))
			}
			if seen {
				after = append(after, int32(f))
			} else {
				before = append(before, int32(f))
			}
		}
	}
	if !seen {
		return unsupported("post_processor TemplateProcessing whose single form is not one sequence A")
	}
	t.prefix = append(before, t.prefix...)
	t.suffix = append(t.suffix, after...)
	return nil
}
